"""Optimizer costs: measures the time of an optimizer's step and the memory of its state, for each parameter.

Times are measured in real steps. `pipesched.profiling.optimizer_memory` computes the memory without real steps.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.checks import shown
from pipesched.errors import ModelTypeError
from pipesched.model.named_parameters import NamedParameters
from pipesched.profiling.optimizer_memory import Upkeep, upkeep_of
from pipesched.tensors.caller_context import intra_op

__all__ = ["Update", "measure_updates"]

_STANDS_IN_BYTES = 1 << 26  # size of the parameters on which an optimizer is timed; larger than CPU caches
_ROUNDS = 7


class Update(NamedTuple):
    """The time and memory that the update of one parameter needs."""

    #: The part of the optimizer's step that updates the parameter, in seconds.
    update_s: float
    #: The size of the optimizer's state for the parameter, in bytes.
    optimizer_bytes: int
    #: The peak memory that the parameter's update needs in addition to the state, in bytes.
    update_transient_bytes: int


def measure_updates(
    optimizer: Callable[[list[Any]], Optimizer],
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
    intra_op_threads: int,
) -> dict[str, Update]:
    """Measure the time and memory that an optimizer's step needs for each parameter.

    The step is timed on stand-ins for the first parameters, up to a total size that exceeds the size of the caches. The
    time per byte is assumed to be the same for all parameters. Frozen parameters have no entry.

    Args:
        optimizer: ``optimizer(params)`` -> torch.optim.Optimizer.
        parameters: parameter name -> parameter, for the whole model.
        device: the device to run on.
        intra_op_threads: the number of intra-op threads.

    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    stands_in: dict[str, nn.Parameter] = {}
    room = _STANDS_IN_BYTES
    for name, parameter in trained.items():
        if room > 0:
            stands_in[name] = nn.Parameter(torch.zeros_like(parameter, device=device, requires_grad=False))
            room -= parameter.nbytes
    if not stands_in:
        return {}
    with intra_op(intra_op_threads), torch.enable_grad():
        weights = list(stands_in.values())
        made = optimizer(NamedParameters(stands_in.items()))
        if not isinstance(made, Optimizer):
            raise ModelTypeError(
                f"optimizer(params) must return a torch.optim.Optimizer; got {shown(made)}; return the optimizer"
            )
        _step(made, weights, device)  # the first step creates the state
        seconds = [_step(made, weights, device) for _ in range(_ROUNDS)]
    total = sum(parameter.nbytes for parameter in stands_in.values())
    each_s = median(seconds) / total
    known: dict[Hashable, Upkeep] = {}
    found = {}
    for name, parameter in trained.items():
        form = parameter.shape, parameter.dtype
        own = known.get(form) or known.setdefault(form, upkeep_of(partial(_made, optimizer, name), [parameter]))
        found[name] = Update(each_s * parameter.nbytes, *own)
    return found


def _made(optimizer: Callable[[list[Any]], Optimizer], name: str, parameters: list[Any]) -> Optimizer:
    return optimizer(NamedParameters((name, parameter) for parameter in parameters))


def _step(optimizer: Optimizer, parameters: list[nn.Parameter], device: torch.device) -> float:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
