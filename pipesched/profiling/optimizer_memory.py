"""Optimizer memory: computes the size of an optimizer's state, and the peak memory of its step, for any parameters.

An optimizer of the same class runs steps on meta tensors. Meta tensors need no memory, so parameters can have any size.
`pipesched.profiling.optimizer_costs` measures times, which requires real steps.
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

_SMALL = 8  # the largest dimension of a stand-in that is not on the meta device


class Upkeep(NamedTuple):
    """The size in bytes of an optimizer's state, and the peak memory that its step needs in addition to the state."""

    state_bytes: int
    transient_bytes: int


def another(optimizer: Optimizer) -> Callable[[list[Any]], Optimizer]:
    """Return a function that creates optimizers of the same class and with the same defaults as ``optimizer``."""
    taken = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return lambda parameters: type(optimizer)(parameters, **defaults)


def upkeep_of(make: Callable[[list[Any]], Optimizer], parameters: Sequence[Tensor]) -> Upkeep:
    """Find the memory that an optimizer needs for these parameters after its first step.

    Stand-ins replace the parameters: meta tensors if the optimizer's step accepts meta tensors, otherwise small
    tensors. The results for small tensors are scaled up. Each dimension of a state tensor is scaled like the same
    dimension of its parameter. The peak is multiplied by the largest ratio of a parameter's bytes to its stand-in's
    bytes.

    Args:
        make: a function that takes parameters and returns an Optimizer.
        parameters: the parameters. Frozen parameters are ignored.

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
    """Run two steps on the stand-ins, and return the memory for these steps, scaled up to the parameters' size."""
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
    """Return the size in bytes of a parameter's state tensor, computed from that of the parameter's stand-in.

    If a dimension has the same size in the state tensor and in the stand-in, the parameter's size of this dimension
    replaces this size. If the numbers of dimensions differ, the state tensor's bytes are multiplied by the ratio of the
    parameter's bytes to the stand-in's bytes. The size of a scalar does not change.
    """
    if value.dim() != stand_in.dim():
        return math.ceil(value.nbytes * parameter.nbytes / max(1, stand_in.nbytes)) if value.dim() else value.nbytes
    sizes = zip(value.shape, stand_in.shape, parameter.shape, strict=True)
    return math.prod(whole if own == small else own for own, small, whole in sizes) * value.element_size()
