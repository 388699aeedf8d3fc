"""Checkpoint options: what becomes of the activations that forwards save: kept, recomputed or offloaded, by stage or
layer.
"""

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

#: Whole stages: which of their micro-batches run again (R) before their backward.
CheckpointMode = Literal["never", "always", "except_last"]
#: One layer: it runs again inside its own backward, all of it, or but for products and attention, whose results are
#: kept; or what it saved waits on the host.
LayerCheckpoint = Literal["recompute", "recompute-cheap", "offload"]
#: One word for all stages, or layers by name; those that are not named keep what they save.
Checkpoint = CheckpointMode | Mapping[str, LayerCheckpoint]


def as_checkpoint(checkpoint: Any, layers: Iterable[str]) -> Checkpoint:
    """The same, checked against the layers that there are, and in their order.

    Raises ScheduleError for another word, and for a layer that does not exist.
    """
    if not isinstance(checkpoint, Mapping):
        if checkpoint not in get_args(CheckpointMode):
            raise ScheduleError(
                f"checkpoint is one of {', '.join(get_args(CheckpointMode))}, or {{layer: word}}; got {checkpoint!r}; "
                f"choose one of them"
            )
        mode: CheckpointMode = checkpoint
        return mode
    order = list(layers)
    for layer, word in checkpoint.items():
        if layer not in order:
            shown = ", ".join(order[:8]) + (", ..." if len(order) > 8 else "")
            raise ScheduleError(
                f"checkpoint names layers as a plan does; it names {layer!r}, the model's {len(order)} layers are "
                f"{shown}; name some of them"
            )
        if word not in get_args(LayerCheckpoint):
            raise ScheduleError(
                f"what a layer saves is kept unless it is one of {', '.join(get_args(LayerCheckpoint))}; "
                f"layer {layer!r} has got {word!r}; choose one of them, or leave the layer out"
            )
    return {layer: checkpoint[layer] for layer in order if layer in checkpoint}


def checkpoint_by_layer(checkpoint: Checkpoint) -> Mapping[str, LayerCheckpoint]:
    """What is done layer by layer; nothing where whole stages run again."""
    return checkpoint if isinstance(checkpoint, Mapping) else {}


def offloading(checkpoint: Checkpoint, stages: Iterable[Iterable[str]]) -> frozenset[int]:
    """The stages, each given by its layers, that have layers whose activations wait on the host."""
    keep = checkpoint_by_layer(checkpoint)
    return frozenset(
        stage for stage, layers in enumerate(stages) if any(keep.get(layer) == "offload" for layer in layers)
    )


def checkpoint_in_words(checkpoint: Checkpoint) -> str:
    """In few words: the mode, or how many layers are treated how."""
    if not isinstance(checkpoint, Mapping):
        return checkpoint
    counts = Counter(checkpoint.values())
    words = [word for word in get_args(LayerCheckpoint) if counts[word]]
    return ", ".join(f"{word} {counted(counts[word], 'layer')}" for word in words) or "never"
