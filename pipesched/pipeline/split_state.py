"""Split state: the state dict of a model that the ranks of a tensor group divide. Other code sees whole weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.parallel.weight_split import SplitWeights

__all__ = ["own_state", "whole_state"]


def whole_state(model: nn.Module, state: Mapping[str, Any], split: SplitWeights) -> dict[str, Any]:
    """Return a state dict with whole weights, given that of this rank. Collective over the tensor group.

    A tied weight is made whole once, so that it is one tensor under all its names.
    """
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    of = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in split and of[name] not in made:
            made[of[name]] = split.whole(name, value.detach())
    return {name: made[of[name]] if name in split else value for name, value in state.items()}


def own_state(model: nn.Module, state: Mapping[str, Any], split: SplitWeights) -> dict[str, Any]:
    """Return a state dict with this rank's blocks, given one with whole weights.

    Raises RuntimeError, as torch does, if the shape of a weight is not that of the model's whole weight.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    misfits = []
    found = dict(state)
    for name, value in state.items():
        if name not in split or not isinstance(value, Tensor) or value.is_meta:
            continue
        shape = torch.Size(split.whole_shape(name, own[name].shape))
        if value.shape != shape:
            misfits.append(
                f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, the shape in "
                f"current model is {shape}."
            )
        else:
            found[name] = split.own(name, value)
    if misfits:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(misfits))
    return found
