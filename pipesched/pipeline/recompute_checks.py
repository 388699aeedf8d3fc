"""Recompute checks: refuses to recompute layers whose gradients would change."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.errors import GraphError
from pipesched.model.fingerprint import form_of
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.runtime.stage.recompute_trial import fault_of_recompute
from pipesched.tensors.tensor_attributes import is_plain
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["check_recomputed"]


_Word = LayerCheckpoint | Literal["always"]


def check_recomputed(
    layered: LayeredModel,
    stages: Sequence[tuple[Mapping[str, nn.Module], torch.device]],
    words: Mapping[str, _Word],
) -> None:
    """Raise GraphError if recomputation would change the gradients of a layer.

    Of layers of one kind, that is of the same class, code, settings and shapes, only one is tried on each device.

    Args:
        layered: the model.
        stages: for each stage, the modules that it calls, keyed by layer name, and its device.
        words: layer name -> "recompute", "recompute-cheap", or "always" for the layers of checkpointed stages.

    """
    tried: set[str] = set()
    here = {name for layers, _ in stages for name in layers}
    for name, (args, kwargs) in layered.examples(here & words.keys()):
        word = words[name]
        for layer, device in [(layers[name], device) for layers, device in stages if name in layers]:
            tensors = [*tensors_in((args, kwargs)), *layer.parameters(), *layer.buffers()]
            kind = repr((form_of(layer), form_of((args, kwargs)), word, device))
            if kind not in tried and not any(tensor.is_meta or not is_plain(tensor) for tensor in tensors):
                tried.add(kind)
                _try(name, layer, (args, kwargs), word, device)


def _try(name: str, layer: nn.Module, given: tuple[Any, Any], word: _Word, device: torch.device) -> None:
    """Raise GraphError if recomputation would change the gradients of a layer, or its output in the next forward."""
    fault = fault_of_recompute(layer, *given, word, device)
    if not fault:
        return
    remedy = "leave this layer out of checkpoint=, or offload its activations with 'offload'"
    if word == "always":
        remedy = "use checkpoint='never', or name the layers to recompute in checkpoint="
    elif word != "recompute" and not fault_of_recompute(layer, *given, "recompute", device):
        remedy = "choose 'recompute' for this layer, or leave it out of checkpoint="
    raise GraphError(
        f"a layer that is recomputed must have the gradients that it has without recomputation; with {word!r}, layer "
        f"{name!r} ({type(layer).__name__}) does not: {fault} on the sample, because its forward changes state outside "
        f"its buffers, draws from a generator of its own, or changes saved tensors in place; {remedy}"
    )
