"""Recompute checks: refuses to recompute layers whose gradients would change."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.errors import GraphError
from pipesched.model.fingerprint import form_of
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.runtime.stage.recompute_trial import fault_of_recompute
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["check_recomputed"]


def check_recomputed(
    layered: LayeredModel,
    layers: Mapping[str, nn.Module],
    words: Mapping[str, LayerCheckpoint | Literal["always"]],
    device: torch.device,
    tried: set[Any],
) -> None:
    """Raise GraphError if recomputation would change the gradients of one of a stage's layers.

    Args:
        layered: the model.
        layers: layer name -> the module that the stage calls.
        words: layer name -> "recompute", "recompute-cheap", or "always" for the layers of checkpointed stages.
        device: the device of the stage.
        tried: kinds of layers that have been tried. This function adds kinds. Layers of one kind have the same class,
            code, settings and shapes.

    """
    for name, (args, kwargs) in layered.examples(words.keys() & layers.keys()):
        layer, word = layers[name], words[name]
        tensors = [*tensors_in((args, kwargs)), *layer.parameters(), *layer.buffers()]
        kind = repr((form_of(layer), form_of((args, kwargs)), word, device))
        if kind in tried or any(tensor.is_meta or not _is_plain(tensor) for tensor in tensors):
            continue
        tried.add(kind)
        if fault := fault_of_recompute(layer, args, kwargs, word, device):
            remedy = "leave this layer out of checkpoint=, or offload its activations with 'offload'"
            if word == "always":
                remedy = "use checkpoint='never', or name the layers to recompute in checkpoint="
            elif word != "recompute" and not fault_of_recompute(layer, args, kwargs, "recompute", device):
                remedy = "choose 'recompute' for this layer, or leave it out of checkpoint="
            raise GraphError(
                f"a layer that is recomputed must have the gradients that it has without recomputation; with {word!r}, "
                f"layer {name!r} ({type(layer).__name__}) does not: {fault} on the sample, because its forward changes "
                f"state outside its buffers, draws from a generator of its own, or changes saved tensors in place; "
                f"{remedy}"
            )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)
