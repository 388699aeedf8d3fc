"""Optimizer memory: what optimizers hold beside the weights, and what their steps need: asked of the optimizer's own
class.

By steps of stand-ins that need no memory: so any stage can be asked about, and what a step needs meanwhile is seen.
`pipesched.profiling.optimizer_costs` makes real steps, since it times them.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.tensors.memory_tracker import Ledger

__all__ = ["Upkeep", "another", "upkeep_of"]

_SMALL = 8  # of each dim of a stand-in that has contents


class Upkeep(NamedTuple):
    """Bytes of an optimizer's state, and the most that its step needs beyond it."""

    state_bytes: int
    transient_bytes: int


def another(optimizer: Optimizer) -> Callable[[list[Any]], Optimizer]:
    """What makes optimizers like this one: of its class, with those of its defaults that the class takes."""
    taken = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return lambda parameters: type(optimizer)(parameters, **defaults)


def upkeep_of(make: Callable[[list[Any]], Optimizer], parameters: Sequence[Tensor]) -> Upkeep:
    """What an optimizer of such parameters needs once it has made a step.

    make: parameters -> Optimizer, as for ``Pipeline``. It is called with stand-ins, which have no contents where the
    optimizer's step can do without, and are small where it cannot: then the state is as much larger as they are, dim by
    dim, and what the step needs is in proportion.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return Upkeep(0, 0)
    try:
        return _stepped(make, trained, [torch.empty_like(parameter, device="meta") for parameter in trained])
    except (RuntimeError, NotImplementedError):
        small = [torch.zeros([min(size, _SMALL) for size in p.shape], dtype=p.dtype) for p in trained]
        return _stepped(make, trained, small)


def _stepped(
    make: Callable[[list[Any]], Optimizer], parameters: Sequence[Tensor], stand_ins: Sequence[Tensor]
) -> Upkeep:
    """From two steps of stand-ins."""
    ledger = Ledger(stand_ins[0].device.type)
    weights = [nn.Parameter(tensor) for tensor in stand_ins]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = make(list(weights))
    with ledger.watching():
        optimizer.step()
        ledger.mark()
        held = ledger.bytes
        optimizer.step()
    pairs = list(zip(parameters, weights, strict=True))
    state = sum(
        _enlarged(value, weight, own)
        for own, weight in pairs
        for value in optimizer.state[weight].values()
        if isinstance(value, Tensor)
    )
    times = max(own.nbytes / max(1, weight.nbytes) for own, weight in pairs)
    return Upkeep(state, math.ceil((ledger.peak - held) * times))


def _enlarged(value: Tensor, stand_in: Tensor, parameter: Tensor) -> int:
    """The bytes of what is kept of a parameter. value: what is kept of its stand-in: each dim as large as the
    stand-in's is as large as the parameter's; what has other dims, and is no scalar, is in proportion.
    """
    if value.dim() != stand_in.dim():
        return math.ceil(value.nbytes * parameter.nbytes / max(1, stand_in.nbytes)) if value.dim() else value.nbytes
    sizes = zip(value.shape, stand_in.shape, parameter.shape, strict=True)
    return math.prod(whole if own == small else own for own, small, whole in sizes) * value.element_size()
