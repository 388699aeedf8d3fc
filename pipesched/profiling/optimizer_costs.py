"""Optimizer costs: measures the time of an optimizer's step and the memory of its state, for each parameter.

Times are measured in real steps. `pipesched.profiling.optimizer_memory` computes the memory without real steps.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.capture.layered_model import as_model
from pipesched.checks import shown
from pipesched.devices.selection import as_device
from pipesched.devices.streams import synchronize
from pipesched.errors import InputError, ModelTypeError
from pipesched.model.named_parameters import NamedParameters
from pipesched.profiling.optimizer_memory import Upkeep, upkeep_of
from pipesched.simulation.optimizer_state import OptimizerState, StateRule, without_assumption
from pipesched.simulation.profile import Profile
from pipesched.tensors.caller_context import intra_op
from pipesched.torch_checks import as_optimizer

__all__ = ["Update", "check_optimizer", "measure_updates", "put_updates", "with_updates"]

_STANDS_IN_BYTES = 1 << 26  # size of the parameters on which an optimizer is timed; larger than CPU caches
_ROUNDS = 7
#: The optimizers that can be given by name. Their settings do not matter, only their states and times.
_BY_NAME: dict[str, Callable[[list[Any]], Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


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
    synchronize(device)
    begin = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    return time.perf_counter() - begin


def put_updates(graphs: Iterable["nx.DiGraph[str]"], updates: Mapping[str, Update]) -> None:
    """Add the costs of each parameter's update to the first layer that uses the parameter."""
    for graph in graphs:
        left = dict(updates)
        for _, node in graph.nodes(data=True):
            own = [left.pop(name) for name in node["parameters"] if name in left]
            node["update_s"] = sum(update.update_s for update in own)
            node["optimizer_bytes"] = sum(update.optimizer_bytes for update in own)
            node["update_transient_bytes"] = sum(update.update_transient_bytes for update in own)


def check_optimizer(optimizer: Callable[[list[Any]], Optimizer] | OptimizerState, model: Any) -> None:
    """Raise InputError unless ``optimizer`` is a known name, a number of bytes or, with a model, a function."""
    if not callable(optimizer):
        StateRule.of(optimizer)
    elif model is None:
        raise InputError(
            f"optimizer= must be a name or a number of bytes if only a profile is known, because the function is "
            f"measured with the model's parameters; got {shown(optimizer)}; pass 'adamw', the bytes of state for each "
            f"parameter, or the model together with profile="
        )


def with_updates(
    profile: Profile, optimizer: Callable[[list[Any]], Optimizer] | OptimizerState, model: Any, device: Any
) -> Profile:
    """Return the profile with the costs of an optimizer.

    Args:
        profile: the profile.
        optimizer: a function that makes the optimizer, which is measured; or its name, or the bytes of state for each
            parameter.
        model: the user's model. None if only a profile is known; the state of an optimizer is then computed.
        device: the device on which updates are measured.

    Raises:
        InputError: as `check_optimizer`.

    """
    check_optimizer(optimizer, model)
    make = _BY_NAME.get(optimizer) if isinstance(optimizer, str) else optimizer
    if model is None or not callable(make):
        return profile.with_optimizer(optimizer)  # type: ignore[arg-type]  # checked there
    parameters = dict(as_model(model).named_parameters())
    updates = measure_updates(as_optimizer(make), parameters, as_device(device), 1)
    graphs = {rows: graph.copy() for rows, graph in profile.graphs.items()}
    put_updates(graphs.values(), updates)
    return replace(profile, graphs=graphs, notes=without_assumption(profile.notes))
