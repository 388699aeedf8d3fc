"""Weight writes: refuses models whose forward changes weights so that the result would depend on the plan.

Forwards of later micro-batches run before the backward of an earlier one, and on other ranks at the same time. A layer
that limits its own weights in each call, such as an embedding with ``max_norm=``, has the same weights in all
micro-batches. A momentum encoder that is moved in the forward has not.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import GraphError
from pipesched.model.state_guard import untouched
from pipesched.tensors.tree_structure import tensors_in
from pipesched.units import and_more

__all__ = ["check_stages_of_writes", "check_weight_writes"]


def check_weight_writes(
    model: nn.Module, mode: bool, sample: tuple[tuple[Any, ...], dict[str, Any]], names: Collection[str]
) -> None:
    """Raise GraphError if a forward changes weights again in every call, or changes values that a backward needs.

    Args:
        model: the user's module. It is the same afterwards.
        mode: True for training mode, False for evaluation mode.
        sample: the arguments of a forward, as (args, kwargs).
        names: the names of the weights that a forward writes to.

    """
    found = _changing(model, mode, sample, names)
    if found:
        name, reason = next(iter(found.items()))
        raise _refusal(model, list(found), f"{name!r} is refused because {reason}")


def check_stages_of_writes(model: nn.Module, stages_of: Mapping[str, Collection[int]]) -> None:
    """Raise GraphError if stages use a weight that a forward writes to in another stage.

    ``stages_of`` maps the name of each weight that a forward writes to to the stages that use the weight.
    """
    found = {name: stages for name, stages in stages_of.items() if len(stages) > 1}
    if found:
        name, stages = next(iter(found.items()))
        raise _refusal(model, list(found), f"{name!r} is refused because stages {sorted(stages)} use it")


def _refusal(model: nn.Module, names: Sequence[str], reason: str) -> GraphError:
    return GraphError(
        f"a forward may only limit the weights of the layer that it calls, such as max_norm= of an embedding, because "
        f"forwards of several micro-batches run before the first backward; a forward of {type(model).__name__} writes "
        f"to {and_more(names)}; {reason}; change weights after the step, such as a momentum encoder after "
        f"optimizer.step()"
    )


def _changing(
    model: nn.Module, mode: bool, sample: tuple[tuple[Any, ...], dict[str, Any]], names: Collection[str]
) -> dict[str, str]:
    """Return the weights that must not change, because two forwards before a backward give other results; name -> why.

    A second forward changes them again, by more than rounding, or the backward of the first needs their old values.
    """
    args, kwargs = sample
    with untouched(model, mode), torch.enable_grad():
        first = model(*args, **kwargs)
        named = dict(model.named_parameters())
        before = {name: named[name].detach().clone() for name in names}
        model(*args, **kwargs)
        named = dict(model.named_parameters())
        found = {
            name: "every call changes it again" for name, value in before.items() if not _close(named[name], value)
        }
        roots = [tensor for tensor in tensors_in(first) if tensor.requires_grad]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        try:
            torch.autograd.grad(roots, trained, seeds, allow_unused=True)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                found |= dict.fromkeys(names, "the backward of an earlier call needs the old value")
        return found


def _close(one: Tensor, other: Tensor) -> bool:
    rounding = 64 * torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0
    return torch.allclose(one, other, rtol=rounding, atol=0, equal_nan=True)
