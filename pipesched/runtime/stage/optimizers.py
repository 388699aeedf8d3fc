"""Optimizers: creates the optimizers of the stages, and moves their state to the stages of the next plan.

Each parameter keeps its optimizer state and the settings of its parameter group, such as the learning rate. A new stage
keeps the optimizer object of the old stage with the same number, so learning rate schedulers attached to that object
keep working.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.errors import ModelTypeError
from pipesched.model.named_parameters import NamedParameters
from pipesched.runtime.gradients.rules import GradientRules
from pipesched.runtime.stage.stage import Stage
from pipesched.tensors.payload import pytree
from pipesched.units import counted

__all__ = ["NO_SETTINGS", "Inheritance", "NumberedGroup", "follow", "near", "optimizers_for", "regroup", "settings_of"]

_Group = dict[str, Any]
NO_SETTINGS = ("params", "param_names")  # keys of a parameter group that are not settings


class NumberedGroup(NamedTuple):
    """A parameter group of an optimizer, and its number among the groups of this optimizer."""

    group: _Group
    number: int


class _OptimizerEntry(NamedTuple):
    """The states of the optimizer that a parameter is in, and the parameter's group."""

    states: Mapping[Any, Any]
    group: _Group
    number: int


@dataclass(frozen=True)
class _Heir:
    """A new stage's optimizer, with (parameter group, new entries) pairs and the states of the stage's parameters."""

    optimizer: Optimizer
    groups: list[tuple[_Group, _Group]]
    states: dict[Tensor, Any]

    def take(self) -> None:
        """Move the parameters and their states to the optimizer."""
        for group, change in self.groups:
            group.update(change)
        self.optimizer.param_groups[:] = [group for group, _ in self.groups]
        for key in [key for key in self.optimizer.state if isinstance(key, nn.Parameter)]:
            del self.optimizer.state[key]
        self.optimizer.state.update(self.states)


class Inheritance:
    """Prepares the optimizers for the stages of a new plan. The old optimizers do not change until ``take`` is called.

    Every stage with parameters gets an optimizer, frozen parameters included: as in plain PyTorch, their states are
    saved, and they are trained once they are unfrozen. The exception is a stage of frozen parameters for which
    ``make`` raises ValueError, as torch does for an empty list of parameters: ``make`` selects the trainable ones.

    Args:
        make: creates an optimizer for a list of parameters.
        before: the optimizers of the old stages, keyed by stage. A new stage whose number no old stage has gets the
            optimizer of an old stage whose number no new stage has, as long as there are such stages.
        stages: the parameters of the new stages, keyed by stage.
        names: the names of the parameters in the model.
        arriving: for each parameter that another process has trained, its parameter group there.

    Raises:
        ModelTypeError: if ``make`` does not return an optimizer, or returns an optimizer that has other parameters.

    """

    def __init__(
        self,
        make: Callable[[list[Any]], Any],
        before: Mapping[int, Optimizer],
        stages: Mapping[int, list[nn.Parameter]],
        names: Mapping[nn.Parameter, str],
        arriving: Mapping[nn.Parameter, NumberedGroup],
    ) -> None:
        def new(parameters: Sequence[nn.Parameter]) -> Optimizer | None:
            return _made(make, NamedParameters((names.get(parameter, ""), parameter) for parameter in parameters))

        self._before = list(before.values())
        old = _entries(self._before, arriving)
        kept = _kept(before, stages)
        heirs = {index: _heir(parameters, kept.get(index), new, old) for index, parameters in stages.items()}
        self._heirs = {index: heir for index, heir in heirs.items() if heir is not None}
        scheduled = any("initial_lr" in entry.group for entry in old.values())
        #: Stages with a new optimizer that no learning rate scheduler controls, although a scheduler controls the old
        #: optimizers.
        self.stages_without_scheduler = [index for index in self._heirs if scheduled and index not in kept]

    def take(self) -> dict[int, Optimizer]:
        """Move all parameters and states to the new stages' optimizers; return the optimizers, keyed by stage.

        Old optimizers that no new stage has keep no states, because schedulers may still refer to them.
        """
        for heir in self._heirs.values():
            heir.take()
        taken = {index: heir.optimizer for index, heir in self._heirs.items()}
        for optimizer in self._before:
            if optimizer not in taken.values():
                optimizer.state.clear()
        self._before.clear()
        return taken


def _kept(before: Mapping[int, Optimizer], stages: Iterable[int]) -> dict[int, Optimizer]:
    """Return the optimizers of old stages that new stages keep, keyed by the number of the new stage."""
    kept = {index: before[index] for index in stages if index in before}
    left = [index for index in sorted(before) if index not in kept]
    others = [index for index in sorted(stages) if index not in kept]
    return kept | {index: before[old] for index, old in zip(others, left, strict=False)}


def _made(make: Callable[[list[Any]], Any], parameters: list[Any]) -> Optimizer | None:
    """Return the optimizer of these parameters; None if there is nothing that the user's function puts into one."""
    if not parameters:
        return None
    try:
        made = make(parameters)
    except ValueError:
        if any(parameter.requires_grad for parameter in parameters):
            raise
        return None
    return _checked(made, parameters)


def _checked(made: Any, parameters: list[Any]) -> Optimizer:
    if not isinstance(made, Optimizer):
        raise ModelTypeError(
            f"optimizer(params) must return a torch.optim.Optimizer; got {type(made).__name__}; return the optimizer"
        )
    own = set(map(id, parameters))
    others = [p for *_, p in _members(made) if id(p) not in own]
    if others:
        raise ModelTypeError(
            f"optimizer(params) must return an optimizer of params only; for a stage with "
            f"{counted(len(own), 'parameter')} the function returned an optimizer with "
            f"{counted(len(others), 'other parameter')}; pass only params to the optimizer"
        )
    return made


def _members(optimizer: Optimizer) -> list[tuple[_Group, int, nn.Parameter]]:
    """Return each parameter with its group and the number of this group."""
    groups = enumerate(optimizer.param_groups)
    return [(group, number, parameter) for number, group in groups for parameter in group["params"]]


def _entries(
    optimizers: Iterable[Optimizer], arriving: Mapping[nn.Parameter, NumberedGroup] | None = None
) -> dict[nn.Parameter, _OptimizerEntry]:
    others = {parameter: _OptimizerEntry({}, *place) for parameter, place in (arriving or {}).items()}
    own = {
        parameter: _OptimizerEntry(optimizer.state, group, number)
        for optimizer in optimizers
        for group, number, parameter in _members(optimizer)
    }
    return others | own


def _heir(
    parameters: Sequence[nn.Parameter],
    kept: Optimizer | None,
    new: Callable[[Sequence[nn.Parameter]], Optimizer | None],
    old: Mapping[nn.Parameter, _OptimizerEntry],
) -> _Heir | None:
    """Prepare the optimizer of a new stage; None if the stage needs none.

    Args:
        parameters: the parameters of the new stage.
        kept: the optimizer of the old stage with the same number; None to use a new optimizer.
        new: creates an optimizer for parameters.
        old: the entries of all parameters of the old stages.

    """
    made = new([parameter for parameter in parameters if kept is None or parameter not in old])
    optimizer = kept or made
    if optimizer is None:
        return None
    if kept is None:
        _inherit_settings(optimizer, old)
    first = _entries([made] if made else [])
    later = {parameter: old[parameter] for parameter in parameters if parameter in old}
    group_of = {parameter: NumberedGroup(entry.group, entry.number) for parameter, entry in (first | later).items()}
    states: dict[nn.Parameter, Any] = {}
    for parameter, entry in (*first.items(), *later.items()):  # an old state replaces one that the constructor has set
        if parameter in entry.states:
            states[parameter] = entry.states[parameter]
    placed: dict[Tensor, Any] = {p: near(state, p, group_of[p].group) for p, state in states.items()}
    return _Heir(optimizer, _regrouped(optimizer, parameters, group_of), placed)


def _inherit_settings(new: Optimizer, old: Mapping[nn.Parameter, _OptimizerEntry]) -> None:
    """Give each group of a new optimizer the settings that its parameters have had, if they have had the same."""
    for group in new.param_groups:
        before = [old[parameter].group for parameter in group["params"] if parameter in old]
        if before and all(_same_settings(before[0], other) for other in before):
            group.update(settings_of(before[0]))


def settings_of(group: _Group) -> _Group:
    """Return copies of the settings of a group."""
    own = {key: value for key, value in group.items() if key not in NO_SETTINGS}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}


def _regrouped(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], group_of: Mapping[nn.Parameter, NumberedGroup]
) -> list[tuple[_Group, _Group]]:
    """Assign each parameter to a group with the same settings.

    Several groups can have the same settings for now, because a scheduler may treat them differently later. Of these
    groups, a parameter joins the one with the number of its previous group.

    Returns (group, new values of its entries "params" and "param_names") for each group. The optimizer's own groups
    come first, even if they become empty, because a learning rate scheduler has one learning rate per group. Groups
    with other settings follow. A parameter that the user's function has left out of all groups is not added.
    """
    groups = list(optimizer.param_groups)
    taken: list[list[nn.Parameter]] = [[] for _ in groups]
    stay = [parameter for *_, parameter in _members(optimizer) if parameter in {*parameters}]
    for parameter in dict.fromkeys([*stay, *(parameter for parameter in parameters if parameter in group_of)]):
        own, number = group_of[parameter]
        fitting = [at for at, group in enumerate(groups) if group is own or _same_settings(group, own)]
        at = number if number in fitting else next(iter(fitting), len(groups))
        if at == len(groups):
            groups.append(settings_of(own))
            taken.append([])
        taken[at].append(parameter)
    names = {
        parameter: name
        for group, _ in group_of.values()
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    return [
        (group, {"params": own} | ({"param_names": [names[p] for p in own]} if "param_names" in group else {}))
        for group, own in zip(groups, taken, strict=True)
    ]


def _same_settings(one: _Group, other: _Group) -> bool:
    keys = one.keys() - NO_SETTINGS
    return keys == other.keys() - NO_SETTINGS and all(_equal(one[key], other[key]) for key in keys)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def near(state: Any, parameter: nn.Parameter, group: _Group) -> Any:
    """Move a parameter's optimizer state to the parameter's device.

    A step count on the host stays on the host, unless the optimizer counts steps on the device.
    """
    counts_there = group.get("capturable") or group.get("fused")

    def moved(tensor: Tensor) -> Tensor:
        on_host = not tensor.dim() and tensor.device.type == "cpu" and not counts_there
        return tensor if on_host else tensor.to(parameter.device)

    return pytree.tree_map_only(Tensor, moved, state)


def follow(optimizer: Optimizer) -> None:
    """Move the states of an optimizer to the devices of its parameters."""
    for group, _, parameter in _members(optimizer):
        if parameter in optimizer.state:
            optimizer.state[parameter] = near(optimizer.state[parameter], parameter, group)


def regroup(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], arriving: Mapping[nn.Parameter, NumberedGroup]
) -> None:
    """Let an optimizer of the user train exactly these parameters. It keeps the states of those that it had.

    Args:
        optimizer: the optimizer.
        parameters: the parameters; each is in the optimizer or in ``arriving``.
        arriving: for each parameter that another process has trained, its parameter group there. The parameter joins
            the optimizer's group with the same settings and, if possible, the same number.

    """
    heir = _heir(parameters, optimizer, lambda _: None, _entries([optimizer], arriving))
    assert heir is not None
    heir.take()


def optimizers_for(
    optimizer: Callable[[list[Any]], Any],
    stages: Mapping[int, Stage],
    tied: Collection[nn.Parameter],
    home: Callable[[nn.Parameter], int | None],
    before: Mapping[int, Optimizer],
    names: Mapping[nn.Parameter, str],
    rules: GradientRules | None = None,
    arriving: Mapping[nn.Parameter, NumberedGroup] | None = None,
) -> Inheritance:
    """Prepare the optimizers of the new stages: keep an old stage's optimizer, or create one with the user's function.

    Args:
        optimizer: the user's function, which takes a list of parameters and returns an optimizer.
        stages: the new stages of this process.
        tied: parameters used by several stages. Only the stage that owns such a parameter updates it, after
            the gradients of all these stages are summed.
        home: maps a parameter to the stage that owns it.
        before: the optimizers of the old stages, keyed by stage.
        names: the names of the parameters in the model.
        rules: how gradients are clipped, scaled and checked before an update. If there are rules and tied parameters,
            all updates wait for the gradients of the tied parameters. Default: None (gradients are not changed before
            updates).
        arriving: for each parameter that another process has trained, its parameter group there. Default: none.

    Raises:
        ModelTypeError: if ``optimizer`` does not return a torch.optim.Optimizer of its params.

    """
    for index, stage in stages.items():
        stage.optimizer.elsewhere = {parameter for parameter in tied if home(parameter) != index}
        stage.optimizer.late = any(rules is not None or home(parameter) == index for parameter in tied)
        stage.optimizer.rules = rules
    own = {index: stage.optimizer.parameters for index, stage in stages.items()}
    return Inheritance(optimizer, before, own, names, arriving or {})
