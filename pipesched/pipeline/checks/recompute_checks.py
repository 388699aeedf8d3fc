"""Recompute checks: refuses to recompute layers whose gradients would change, and to lose the state of layers."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.errors import GraphError
from pipesched.profiling.recompute_refusals import RecomputeTrial, faults, trials
from pipesched.runtime.stage.recompute_trial import RecomputeWord, fault_of_recompute, keeps_state

__all__ = ["check_recomputed", "check_stateless", "faults_of_recomputed"]


def check_recomputed(
    layered: LayeredModel,
    stages: Sequence[tuple[Mapping[str, nn.Module], torch.device]],
    words: Mapping[str, RecomputeWord],
) -> None:
    """Raise GraphError if recomputation would change the gradients of a layer.

    Of layers of one kind (see `trials`), only one is tried on each device.

    Args:
        layered: the model.
        stages: for each stage, the modules that it calls, keyed by layer name, and its device.
        words: layer name -> "recompute", "recompute-cheap", or "always" for the layers of checkpointed stages.

    """
    for trial, word, fault in faults(layered, stages, words):
        raise GraphError(
            f"a layer that is recomputed must have the gradients that it has without recomputation; with {word!r}, "
            f"layer {trial.name!r} ({type(trial.layer).__name__}) does not: {fault} on the sample, because its forward "
            f"changes state outside its buffers, draws from a generator of its own, or changes saved tensors in place; "
            f"{_remedy(trial, word)}"
        )


def faults_of_recomputed(
    layered: LayeredModel,
    stages: Sequence[tuple[Mapping[str, nn.Module], torch.device]],
    words: Mapping[str, RecomputeWord],
) -> list[str]:
    """Return a line for each layer whose gradients recomputation would change. Arguments as for `check_recomputed`."""
    return [
        f"layer {trial.name!r}, recomputed with {word!r}: {fault} on the sample"
        for trial, word, fault in faults(layered, stages, words)
    ]


def check_stateless(
    layered: LayeredModel,
    stages: Sequence[tuple[Mapping[str, nn.Module], torch.device]],
    names: Collection[str],
    *,
    because: str,
    remedy: str,
) -> None:
    """Raise GraphError if one of these layers keeps state between its calls.

    Args:
        layered: the model.
        stages: for each stage, the modules that it calls, keyed by layer name, and its device.
        names: the names of the layers.
        because: why these layers must not keep state, for the message.
        remedy: what to do, for the message.

    """
    for trial in trials(layered, stages, dict.fromkeys(names)):
        if keeps_state(trial.layer, *trial.given, trial.device):
            raise GraphError(
                f"{because}, so the output of a layer must depend only on its inputs; layer {trial.name!r} "
                f"({type(trial.layer).__name__}) keeps state in attributes, or draws from a generator of its own; "
                f"{remedy}"
            )


def _remedy(trial: RecomputeTrial, word: RecomputeWord) -> str:
    if word == "always":
        return "use checkpoint='never', or name the layers to recompute in checkpoint="
    if word != "recompute" and not fault_of_recompute(trial.layer, *trial.given, "recompute", trial.device):
        return "choose 'recompute' for this layer, or leave it out of checkpoint="
    return "leave this layer out of checkpoint=, or offload its activations with 'offload'"
