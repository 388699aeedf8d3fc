"""State copy: a copy of one rank's weights, buffers and optimizer states, on the host.

A rank keeps a copy of its own state from before the step under way, and of its neighbour's state. The first is copied
from the rank's tensors; the second runs the neighbour's updates again.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.model.named_parameters import NamedParameters
from pipesched.runtime.stage.optimizers import settings_of
from pipesched.runtime.stage.stage_optimizer import StageOptimizer
from pipesched.saving.capturing import captured_here
from pipesched.saving.live_run import LiveRun
from pipesched.saving.saved_run import CheckpointPart
from pipesched.tensors.payload import pytree

__all__ = [
    "GroupState",
    "Made",
    "OptimizerState",
    "RankState",
    "RankUpdate",
    "Settings",
    "StateCopy",
    "bare",
    "digest_of",
    "rank_state",
    "settings_of_groups",
]

#: The settings of each parameter group, such as the learning rate, keyed by stage.
Settings = Mapping[int, Sequence[Mapping[str, Any]]]


class GroupState(NamedTuple):
    """A parameter group of an optimizer."""

    names: list[str]
    settings: dict[str, Any]


class OptimizerState(NamedTuple):
    """The optimizer of a stage."""

    #: The names of the stage's parameters, in the order in which the user's function gets them.
    names: list[str]
    groups: list[GroupState]
    #: The state of each parameter that has one, keyed by name.
    states: dict[str, Any]


class RankState(NamedTuple):
    """The weights, buffers and optimizers of a rank's stages. Tensors are keyed by name."""

    parameters: dict[str, Tensor]
    #: Whether each parameter is trained.
    trains: dict[str, bool]
    buffers: dict[str, Tensor]
    #: The optimizers, keyed by stage.
    optimizers: dict[int, OptimizerState]


class RankUpdate(NamedTuple):
    """What changes the state of a rank in a step."""

    #: The gradients with which the optimizers were called, keyed by the name of the parameter.
    gradients: dict[str, Tensor]
    #: The stages whose update was not skipped.
    updated: list[int]
    #: The buffers after the step.
    buffers: dict[str, Tensor]
    #: The digest of the weights after the step.
    digest: Tensor


#: Makes the optimizer of a copied stage from the stage's number and its parameters.
Made = Callable[[int, NamedParameters], Optimizer]


def rank_state(run: LiveRun, optimizers: Mapping[int, StageOptimizer], buffers: Mapping[str, Tensor]) -> RankState:
    """Return the present state of a rank. Its tensors are the run's own.

    Args:
        run: the run.
        optimizers: the optimizers of this rank's stages.
        buffers: the values of the buffers.

    """
    names = run.names
    stages: dict[int, OptimizerState] = {}
    for index, stage in optimizers.items():
        optimizer = stage.wrapped
        if optimizer is None:
            continue
        groups = [
            GroupState([names[id(parameter)] for parameter in group["params"]], settings_of(group))
            for group in optimizer.param_groups
        ]
        states = {names[id(parameter)]: state for parameter, state in optimizer.state.items() if id(parameter) in names}
        stages[index] = OptimizerState([names[id(parameter)] for parameter in stage.parameters], groups, states)
    return RankState(
        parameters={name: parameter.detach() for name, parameter in run.parameters.items()},
        trains={name: parameter.requires_grad for name, parameter in run.parameters.items()},
        buffers=dict(buffers),
        optimizers=stages,
    )


def settings_of_groups(state: RankState) -> dict[int, list[dict[str, Any]]]:
    """Return the settings of each parameter group, keyed by stage."""
    return {index: [group.settings for group in stage.groups] for index, stage in state.optimizers.items()}


def digest_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return one number for each tensor, which shows with near certainty whether the bits of two tensors differ."""
    return torch.tensor([_digest(tensor.detach()) for tensor in tensors], dtype=torch.int64)


def _digest(tensor: Tensor) -> int:
    words = tensor.to("cpu").contiguous().flatten()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(words.element_size(), torch.int64)
    return int(words.view(kind).sum(dtype=torch.int64))


class StateCopy:
    """A copy of a rank's state, at a version: the number of steps after which the rank had this state.

    Args:
        made: makes the optimizer of a stage.

    """

    def __init__(self, made: Made) -> None:
        self._made = made
        #: The version of the copy; None before the first ``load`` and while the copy changes.
        self.version: int | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self._optimizers: dict[int, Optimizer] = {}
        #: The settings of parameter groups after the step that led to this version, keyed by stage.
        self.settings: Settings = {}
        #: The settings in the step after this version; None if they are not known yet.
        self.next_settings: Settings | None = None

    @torch.no_grad()
    def load(self, state: RankState, version: int) -> None:
        """Copy a state. Memory of an earlier state is used again."""
        self.version = None
        self.buffers = _copied(self.buffers, state.buffers)
        if [(name, _form(tensor)) for name, tensor in self.parameters.items()] != [
            (name, _form(tensor)) for name, tensor in state.parameters.items()
        ] or self._optimizers.keys() != state.optimizers.keys():
            self._make(state)
        for name, parameter in self.parameters.items():
            parameter.copy_(state.parameters[name])
            parameter.requires_grad_(state.trains[name])
        for index, stage in state.optimizers.items():
            self._load_optimizer(self._optimizers[index], stage)
        self.settings, self.next_settings = settings_of_groups(state), None
        self.version = version

    def _make(self, state: RankState) -> None:
        self.parameters = {
            name: nn.Parameter(torch.empty_like(tensor, device="cpu"), requires_grad=state.trains[name])
            for name, tensor in state.parameters.items()
        }
        with torch.enable_grad():
            self._optimizers = {
                index: self._made(index, NamedParameters((name, self.parameters[name]) for name in stage.names))
                for index, stage in state.optimizers.items()
            }

    def _load_optimizer(self, optimizer: Optimizer, stage: OptimizerState) -> None:
        groups = optimizer.param_groups[: len(stage.groups)]
        groups += [{} for _ in stage.groups[len(groups) :]]
        for own, (names, settings) in zip(groups, stage.groups, strict=True):
            own.clear()
            own.update({**settings, "params": [self.parameters[name] for name in names]})
        optimizer.param_groups[:] = groups
        known = dict(optimizer.state)
        optimizer.state.clear()
        for name, value in stage.states.items():
            parameter = self.parameters[name]
            optimizer.state[parameter] = _copied(known.get(parameter), value)

    def _set(self, settings: Settings) -> None:
        for index, every in settings.items():
            for group, own in zip(self._optimizers[index].param_groups, every, strict=True):
                group.update(own)

    def replay(self, update: RankUpdate, version: int) -> None:
        """Run an update again, after which the state has this version."""
        self.version = None
        if self.next_settings is not None:
            self.settings, self.next_settings = self.next_settings, None
        self._set(self.settings)
        for name, parameter in self.parameters.items():
            parameter.grad = update.gradients.get(name)
        for index in update.updated:
            self._optimizers[index].step()
        self.settings = {  # some optimizers count in their groups
            index: [settings_of(group) for group in self._optimizers[index].param_groups] for index in self.settings
        }
        for parameter in self.parameters.values():
            parameter.grad = None
        with torch.no_grad():
            self.buffers = _copied(self.buffers, update.buffers)
        self.version = version

    def names_of_groups(self) -> dict[int, list[list[str]]]:
        """Return the names of the parameters in each parameter group, keyed by stage."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            index: [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
            for index, optimizer in self._optimizers.items()
        }

    def parts(self, run: LiveRun) -> tuple[CheckpointPart, CheckpointPart]:
        """Return the parts of a checkpoint with this state, as ``captured_here`` returns those of a run.

        ``run`` supplies what is the same for all ranks.
        """
        self._set(self.settings)
        own = replace(
            run,
            parameters=self.parameters,
            buffers=self.buffers,
            shared_buffers={},
            names={id(parameter): name for name, parameter in self.parameters.items()},
            modules={},
            optimizers=self._optimizers,
            divided={},
            divided_weights={},
            scaler=None,
        )
        return captured_here(own)


def bare(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class without parameters, without calling the user's function."""
    other = copy.copy(optimizer)
    other.param_groups = []
    other.state = defaultdict(dict)
    return other


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype


def _copied(before: Any, value: Any) -> Any:
    """Return a copy of a structure of tensors. It uses the memory of an earlier copy of the same form."""
    leaves, form = pytree.tree_flatten(value)
    known, known_form = pytree.tree_flatten(before)
    old: Iterable[Any] = known if known_form == form else [None] * len(leaves)
    return pytree.tree_unflatten([_copied_leaf(*pair) for pair in zip(old, leaves, strict=True)], form)


def _copied_leaf(before: Any, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(before, Tensor) and _form(before) == _form(leaf):
        return before.copy_(leaf.detach())
    return leaf.detach().to("cpu", copy=True)
