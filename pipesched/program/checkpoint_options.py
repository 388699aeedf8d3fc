"""Checkpoint options: whether each stage or layer keeps, recomputes or offloads its activations."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from pipesched.errors import ScheduleError
from pipesched.units import counted

__all__ = [
    "Checkpoint",
    "CheckpointMode",
    "LayerCheckpoint",
    "as_checkpoint",
    "checkpoint_in_words",
    "checkpoint_by_layer",
    "offloading",
]

#: An option for whole stages: which micro-batches are recomputed (R) before their backward.
CheckpointMode = Literal["never", "always", "except_last"]
#: An option for one layer. "recompute" runs the layer's forward again during its backward. "recompute-cheap" does the
#: same, but keeps the results of matrix products and attention. "offload" moves the layer's saved tensors to the host
#: until the backward.
LayerCheckpoint = Literal["recompute", "recompute-cheap", "offload"]
#: One mode for all stages, or an option for each named layer; other layers keep their activations.
Checkpoint = CheckpointMode | Mapping[str, LayerCheckpoint]


def as_checkpoint(checkpoint: Any, layers: Iterable[str]) -> Checkpoint:
    """Validate a checkpoint option, and return the option with its layers in model order.

    Raises ScheduleError for an unknown mode or option, and for a layer that is not in the model.
    """
    if not isinstance(checkpoint, Mapping):
        if checkpoint not in get_args(CheckpointMode):
            raise ScheduleError(
                f"checkpoint= must be one of {', '.join(get_args(CheckpointMode))}, or {{layer: option}}; got "
                f"{checkpoint!r}; choose one of them"
            )
        mode: CheckpointMode = checkpoint
        return mode
    order = list(layers)
    for layer, word in checkpoint.items():
        if layer not in order:
            shown = ", ".join(order[:8]) + (", ..." if len(order) > 8 else "")
            raise ScheduleError(
                f"checkpoint= may only name layers of the model; {layer!r} is not one of its {len(order)} layers: "
                f"{shown}; choose from these layers"
            )
        if word not in get_args(LayerCheckpoint):
            raise ScheduleError(
                f"a layer's checkpoint option must be one of {', '.join(get_args(LayerCheckpoint))}; layer {layer!r} "
                f"has {word!r}; choose one of them, or leave the layer out to keep its activations"
            )
    return {layer: checkpoint[layer] for layer in order if layer in checkpoint}


def checkpoint_by_layer(checkpoint: Checkpoint) -> Mapping[str, LayerCheckpoint]:
    """Return the checkpoint option of each named layer. The result is empty if ``checkpoint`` is a mode for stages."""
    return checkpoint if isinstance(checkpoint, Mapping) else {}


def offloading(checkpoint: Checkpoint, stages: Iterable[Iterable[str]]) -> frozenset[int]:
    """Return the numbers of the stages with an offloaded layer. ``stages`` holds the layer names of each stage."""
    keep = checkpoint_by_layer(checkpoint)
    return frozenset(
        stage for stage, layers in enumerate(stages) if any(keep.get(layer) == "offload" for layer in layers)
    )


def checkpoint_in_words(checkpoint: Checkpoint) -> str:
    """Describe a checkpoint option: the mode, or the number of layers with each option."""
    if not isinstance(checkpoint, Mapping):
        return checkpoint
    counts = Counter(checkpoint.values())
    return (
        ", ".join(f"{word} {counted(counts[word], 'layer')}" for word in get_args(LayerCheckpoint) if counts[word])
        or "never"
    )
