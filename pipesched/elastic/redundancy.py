"""Redundancy: keeps the state of each rank in a second place, so that a job goes on if a rank is lost.

After each step, a rank sends the gradients of its stages to its neighbour, which runs the updates again on its copy of
the rank's state. With several replicas nothing is sent, because the other replicas hold the same state. All this
happens in a thread of its own while the next step runs.

Why the survivors always find a common version. A version is a number of steps. A rank is at version k before its
updates of step k, and at k + 1 after them. It keeps its state of version k until the commit of step k: by then all
ranks have the result of step k, and all gradients of the step have arrived at the neighbours. So as long as a rank may
have to go back to version k, every rank can. After the commit every rank, and every copy, can be at version k + 1. A
rank updates its weights in step k + 1 only after it has kept version k + 1, so the state that it keeps is never the one
that changes.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipesched.elastic.state_copy import (
    GroupState,
    OptimizerState,
    RankState,
    RankUpdate,
    Settings,
    StateCopy,
    bare,
    digest_of,
    rank_state,
    settings_of_groups,
)
from pipesched.model.named_parameters import NamedParameters
from pipesched.program.actions import Kind
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.reductions.collective_lane import CollectiveLane, LaneJob
from pipesched.runtime.stage.copied_stage import CopiedStage, Times
from pipesched.runtime.stage.optimizers import settings_of
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.stage_optimizer import StageOptimizer
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.runtime.transport.rank_exchange import Exchange
from pipesched.saving.live_run import LiveRun
from pipesched.saving.saved_run import CheckpointPart
from pipesched.tensors.caller_context import intra_op
from pipesched.tensors.torch_functions import version_of

__all__ = ["KeptStates", "Redundancy", "SettingsChange"]

_LOG = logging.getLogger(__name__)

_COPIES = "copies of states"  # the name of the connections
_LAST_JOB_S = 2.0  # how long the lane may take to end when Python exits


@dataclass
class KeptStates:
    """The states that a rank holds for the case that a rank is lost. They outlive the connections."""

    #: This rank's state from before the step under way.
    own: StateCopy
    #: The state of the rank whose copy this rank holds.
    neighbour: StateCopy
    #: An update or a new state of the neighbour that has arrived, and the version to which it leads.
    arrived: tuple[RankUpdate | RankState, int] | None = None
    #: The layers of this rank's and of the neighbour's stages.
    own_layers: Sequence[str] = ()
    neighbour_layers: Sequence[str] = ()
    #: The states of the stages before, until all ranks hold these.
    before: "KeptStates | None" = None

    @property
    def every(self) -> "list[KeptStates]":
        """These states, and those before."""
        return [self, *([] if self.before is None else self.before.every)]

    @property
    def neighbour_versions(self) -> list[int]:
        """The versions at which the neighbour's state can be."""
        version = self.neighbour.version
        later = [self.arrived[1]] if self.arrived is not None and self.arrived[1] - 1 == version else []
        return [] if version is None else [version, *later]

    def take_arrived(self) -> None:
        """Bring the copy of the neighbour to the version to which the update that has arrived leads."""
        if self.arrived is None:
            return
        change, version = self.arrived
        self.arrived = None
        if isinstance(change, RankState):
            self.neighbour.load(change, version)
        elif self.neighbour.version == version - 1:
            self.neighbour.replay(change, version)
            if not torch.equal(digest_of(self.neighbour.parameters.values()), change.digest):
                self.neighbour.version = None  # something else than the gradients has changed the weights


class SettingsChange(NamedTuple):
    """The settings of a parameter group after a step and before the next one, when the user may have changed them."""

    step: int
    #: The number of the group among those of its optimizer.
    number: int
    #: The names of the group's parameters.
    names: list[str]
    before: dict[str, Any]
    now: dict[str, Any]


@dataclass
class _Step:
    """The gradients of a step under way, and the stages that it has updated."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    #: The number of in-place changes of each gradient before its update.
    versions: list[int] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient with which an optimizer is about to be called."""
        self.gradients[name] = gradient
        self.versions.append(version_of(gradient))

    @property
    def is_intact(self) -> bool:
        """Whether no optimizer has written to a gradient."""
        return self.versions == [version_of(gradient) for gradient in self.gradients.values()]


class Redundancy:
    """Keeps copies of the states of this rank and of its neighbour. The constructor is collective.

    Args:
        connected: this rank, connected to the other ranks.
        make: the user's function, which creates an optimizer.
        newcomers: the number of processes that have asked this rank to let them join.
        threads: the number of CPU threads of an update. Default: 1.
        kept: states that this rank holds already. Default: none.

    """

    def __init__(
        self,
        connected: ConnectedRank,
        make: Callable[[list[Any]], Optimizer],
        newcomers: Callable[[], int],
        kept: KeptStates | None = None,
        threads: int = 1,
    ) -> None:
        self._connected = connected
        self._newcomers = newcomers
        self._threads = threads
        #: The commits under way and the last ones, and the newcomers that were known then, keyed by version.
        self._commits: dict[int, LaneJob] = {}
        self._known_newcomers: dict[int, int] = {}
        self._make = make
        self._device = torch.device("cpu")
        self.kept = kept or self._empty()
        self._holder: int | None = None
        self._owner: int | None = None
        self._optimizers: dict[int, StageOptimizer] = {}
        self._run: LiveRun
        self._known: Any = None
        #: The settings of this rank's parameter groups before the updates of the last steps, keyed by step.
        self._settings: dict[int, Settings] = {}
        #: Those after the updates, which differ if an optimizer counts in its groups.
        self._settings_after: dict[int, Settings] = {}
        self._step = _Step()
        #: The version of this rank's own tensors; None while they are updated.
        self._live: int | None = None
        self._version = 0
        #: Whether a recovery has begun to change this rank's own tensors.
        self.is_frozen = False
        #: Whether the user has changed weights or states, and not all ranks have copied the change.
        self.is_changed = False
        self._sends_states = False  # because updates that run again do not give the same weights
        self._failure: BaseException | None = None
        #: When the lane ran the last commit: the start and the end of each kind of action, and the start of the step.
        self._times: dict[Kind, tuple[float, float]] = {}
        self._begun_s = 0.0
        self._layers: Sequence[str] = ()
        self._lane = CollectiveLane(self._device)
        self._exchange: Exchange | None = None
        at_exit = Finalize(
            None, _end_at_exit, (self._lane.close, self._lane.thread, connected.hang_ups_beside), exitpriority=0
        )
        self._end = finalize(self, _end_lane, self._lane, at_exit.cancel)
        self._end.atexit = False
        self._job = self._start(self._connect)

    def _empty(self) -> KeptStates:
        return KeptStates(own=StateCopy(self._bare), neighbour=StateCopy(partial(_made, self._make)))

    def use(
        self,
        stages: Mapping[int, Stage],
        copied: Mapping[int, CopiedStage],
        run: LiveRun,
        layers: Sequence[Sequence[str]],
        step: int,
    ) -> None:
        """Keep copies of the states of other stages from now on, and begin a step. Collective.

        What is kept so far stays until all ranks hold the new copies.

        Args:
            stages: the stages of this process.
            copied: the stages of the neighbour.
            run: the state of the run. Its tensors are those of the stages.
            layers: the layers of each rank of the pipeline.
            step: the number of steps so far.

        """
        self.wait()
        self._run = run
        self._optimizers = {index: stage.optimizer for index, stage in stages.items() if stage.optimizer.parameters}
        for index, optimizer in self._optimizers.items():
            optimizer.before_step = partial(self._before_update, index)
        for number, stage in enumerate([*stages.values()]):
            stage.copy_times = _StageTimes(self, is_first=not number)
        for number, other in enumerate(copied.values()):
            other.copy_times = _StageTimes(self, is_first=not number)
        grid = self._connected.grid
        row, position = grid.pipeline, grid.position
        alone = len(grid.rows) > 1 or len(row) == 1  # the other replicas hold the same state
        self._holder, self._owner = (None, None) if alone else (row[(position + 1) % len(row)], row[position - 1])
        self._live = step
        self._layers = layers[position]
        self._step = _Step()
        self._known = self._fingerprint()
        state = rank_state(run, self._optimizers, self._buffers_now())
        self._settings, self._settings_after = {step: settings_of_groups(state)}, {step - 1: settings_of_groups(state)}
        neighbour = () if self._owner is None else layers[position - 1]
        self._job = self._start(partial(self._copy_anew, state, neighbour, step))

    def _bare(self, stage: int, _: NamedParameters) -> Optimizer:
        optimizer = self._optimizers[stage].wrapped
        assert optimizer is not None
        return bare(optimizer)

    def _start(self, job: Callable[[], None]) -> LaneJob:
        """Let the lane run a job. After a job has failed no other runs, because each continues the one before."""
        return self._lane.start(partial(self._unless_failed, job))

    def _unless_failed(self, job: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            job()
        except BaseException as error:
            self._failure = error
            raise

    # ---- on the rank's own thread ----------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin a step: send what the user has changed since the last one, such as learning rates."""
        self._live = step
        self._begun_s = time.perf_counter()
        self._step = _Step()
        fingerprint = self._fingerprint()
        state = None
        if fingerprint != self._known:
            self._known = fingerprint
            self.is_changed = True
            state = rank_state(self._run, self._optimizers, self._buffers_now())
        settings = _settings(self._optimizers)
        sent = self._settings.get(step, self._settings_after.get(step - 1))  # the step may begin a second time
        change = None if settings == sent else settings
        self._settings = _later(self._settings, step - 2) | {step: settings}
        self._job = self._start(partial(self._send_changes, state, change, step))

    def wait(self) -> None:
        """Wait until all that was begun is done. Raises ConnectionLostError if a rank is lost.

        Raises the error that has stopped the copies on this rank, such as one of the optimizer, unchanged.
        """
        try:
            self._job.wait(self._connected.check_peers)
        except ConnectionLostError:
            if self._failure is None or isinstance(self._failure, ConnectionLostError):
                raise
            raise self._failure from None

    def _before_update(self, stage: int, skips: bool) -> None:
        """Called before the optimizer of a stage runs, with complete gradients."""
        if self._live is not None:
            self.wait()
            self._version, self._live = self._live, None
        if skips or self._holder is None:
            return
        self._step.updated.append(stage)
        names = self._run.names
        for parameter in self._optimizers[stage].parameters:
            if parameter.grad is not None:
                self._step.add(names[id(parameter)], parameter.grad)

    def finish(self) -> None:
        """End a step whose result this rank has: send its gradients, and keep the new state."""
        if self._live is not None:  # a rank without stages updates nothing
            self._version = self._live
        self._live = version = self._version + 1
        buffers = self._buffers_now()
        state = rank_state(self._run, self._optimizers, buffers)
        self._settings_after = _later(self._settings_after, version - 4) | {version - 1: settings_of_groups(state)}
        gives_gradients = self._step.is_intact and not self._sends_states
        gradients, updated = (self._step.gradients, self._step.updated) if gives_gradients else (None, [])
        self._known = self._fingerprint()
        self._times = {}
        self._job = self._start(partial(self._commit, gradients, updated, state, version))
        self._commits = {known: job for known, job in self._commits.items() if known >= version - 1}
        self._commits[version] = self._job
        self._step = _Step()

    def _buffers_now(self) -> dict[str, Tensor]:
        """Return copies of the buffers, because the forwards of the next step change them while the lane works."""
        return {name: buffer.detach().clone() for name, buffer in self._run.buffers.items()}

    def newcomers_before(self, step: int) -> int:
        """Return the number of newcomers that all ranks know before a step. Waits for the commit before the last."""
        version = step - 1
        if version in self._commits:
            self._commits[version].wait(self._connected.check_peers)
        return self._known_newcomers.get(version, 0)

    def times(self, kind: Kind, *, is_first: bool) -> Times:
        """Return when actions of a kind ran that belong to the present step. The lane may have begun them before it.

        The lane serves all stages of a rank at once. Their first action gets the time, and the others none of it.
        """
        if kind not in self._times:
            return {}
        start_s, end_s = (max(self._begun_s, own) for own in self._times[kind])
        return {0: (start_s if is_first else end_s, end_s)}

    # ---- after a loss ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the lane's jobs have ended, with or without an error."""
        self._lane.start(_nothing).wait(_nothing)

    def held_layers(self, *, live: bool) -> list[tuple[list[str], list[int]]]:
        """Return the layers whose states this rank holds, with the versions at which these can be.

        ``live`` states whether this rank's own tensors are whole.
        """
        held: list[tuple[Sequence[str], list[int]]] = []
        for kept in self.kept.every:
            own = [] if kept.own.version is None else [kept.own.version]
            held += [(kept.own_layers, own), (kept.neighbour_layers, kept.neighbour_versions)]
        if live and self._live is not None and not self.is_frozen:
            held.append((self._layers, [self._live]))
        return [(list(layers), versions) for layers, versions in held if layers and versions]

    def parts(self, version: int, run: LiveRun) -> list[CheckpointPart]:
        """Return what this rank holds of the state at a version."""
        if self._live == version and not self.is_frozen:
            self._keep_live(version)
        held: list[StateCopy] = []
        for kept in self.kept.every:
            if kept.neighbour.version != version and version in kept.neighbour_versions:
                kept.take_arrived()
            held += [kept.own, kept.neighbour]
        return [part for one in held if one.version == version for part in one.parts(run)]

    def _keep_live(self, version: int) -> None:
        """Keep the state of this rank's own tensors, unless it is kept already."""
        if self.kept.own_layers != self._layers:
            self.kept = replace(self._empty(), own_layers=self._layers, before=self.kept)
        own = self.kept.own
        if own.version != version:
            own.load(rank_state(self._run, self._optimizers, self._run.buffers), version)
            own.settings = self._settings_after.get(version - 1, own.settings)

    def settings_changes(self, version: int) -> list[SettingsChange]:
        """Return the settings of parameter groups before and after the user may have changed them between two steps.

        Includes the time after the step that led to this version, and that after the next step.
        """
        neighbour = self.kept.neighbour
        after, before_updates = self._settings_after, self._settings
        own = {
            index: [[self._run.names[id(parameter)] for parameter in group["params"]] for group in groups]
            for index, groups in _groups(self._optimizers).items()
        }
        pairs = [(step, own, after.get(step - 1), before_updates.get(step)) for step in (version, version + 1)]
        if neighbour.version == version:
            pairs.append((version, neighbour.names_of_groups(), neighbour.settings, neighbour.next_settings))
        return [
            SettingsChange(step, number, names, dict(before), dict(now))
            for step, names_of, old, new in pairs
            if old is not None and new is not None
            for index in old.keys() & new.keys() & names_of.keys()
            for number, (names, before, now) in enumerate(zip(names_of[index], old[index], new[index], strict=False))
        ]

    def end(self) -> None:
        """Let the lane end once its job has ended."""
        self._end()

    def _fingerprint(self) -> list[Any]:
        """Return what changes if the user changes weights, buffers or states between two steps."""
        tensors: list[Tensor] = [*self._run.parameters.values(), *self._run.buffers.values()]
        for stage in self._optimizers.values():
            if stage.wrapped is not None:
                for state in stage.wrapped.state.values():
                    tensors += [value for value in state.values() if isinstance(value, Tensor)]
        flags = [parameter.requires_grad for parameter in self._run.parameters.values()]
        return [*flags, *((id(tensor), version_of(tensor)) for tensor in tensors)]

    # ---- in the lane -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        wire = self._connected.connect_beside(_COPIES, Encoding((RankState, RankUpdate, OptimizerState, GroupState)))
        ranks = range(self._connected.num_ranks)
        self._exchange = Exchange(wire, self._connected.rank, ranks, self._device)

    def _sent(self, value: Any) -> Any:
        """Send a value to the rank that holds this rank's copy. Return the value of the rank whose copy is here."""
        if self._holder is None or self._owner is None:
            return None
        assert self._exchange is not None
        return self._exchange.trade(_COPIES, {self._holder: value}, [self._owner])[self._owner]

    def _copy_anew(self, state: RankState, neighbour_layers: Sequence[str], version: int) -> None:
        kept = replace(self._empty(), own_layers=self._layers, neighbour_layers=neighbour_layers, before=self.kept)
        self.kept = kept  # if the exchange ends early, a rank may hold the new copies, or only the ones before
        kept.own.load(state, version)
        arrived = self._sent(state)
        if arrived is not None:
            kept.neighbour.load(arrived, version)
        assert self._exchange is not None
        self._exchange.all_values(b"")
        kept.before = None

    def _send_changes(self, state: RankState | None, settings: Settings | None, step: int) -> None:
        assert self._exchange is not None
        arrived = self._sent((state, settings))
        _change(self.kept.own, state, settings, step)
        if arrived is not None:
            theirs, their_settings = arrived
            _change(self.kept.neighbour, theirs, their_settings, step)
        if any(self._exchange.all_values(state is not None)):
            self._exchange.all_values(b"")
        self.is_changed = False

    def _commit(self, gradients: dict[str, Tensor] | None, updated: list[int], state: RankState, version: int) -> None:
        change: RankUpdate | RankState = state
        if gradients is not None and self._holder is not None:
            change = RankUpdate(gradients, updated, state.buffers, digest_of(state.parameters.values()))
        begun_s = time.perf_counter()
        arrived = self._sent(change)
        times = {Kind.MIRROR: (begun_s, time.perf_counter())}
        if arrived is not None:
            self.kept.arrived = arrived, version
        assert self._exchange is not None
        lacks = self._owner is not None and self.kept.neighbour.version is None
        said = self._exchange.all_values((self._newcomers(), lacks))
        self._known_newcomers = {version: max(count for count, _ in said)} | {
            known: count for known, count in self._known_newcomers.items() if known == version - 1
        }
        if self._holder is not None and said[self._holder][1] and not self._sends_states:
            self._sends_states = True
            _LOG.warning(
                "after step %d, the copy of this rank's state differs from its weights, because something else than an "
                "update changes them; whole states are sent from now on",
                version - 1,
            )
        begun_s = time.perf_counter()
        self.kept.own.load(state, version)
        kept_s = time.perf_counter()
        with intra_op(self._threads):
            self.kept.take_arrived()
        self._times = {**times, Kind.KEEP: (begun_s, kept_s), Kind.REPLAY: (kept_s, time.perf_counter())}


class _StageTimes:
    """When the copy of one stage was brought up to date."""

    def __init__(self, redundancy: Redundancy, *, is_first: bool) -> None:
        self._redundancy = redundancy
        self._is_first = is_first

    def mirrored(self) -> Times:
        return self._redundancy.times(Kind.MIRROR, is_first=self._is_first)

    def kept(self) -> Times:
        self._redundancy.wait()
        return self._redundancy.times(Kind.KEEP, is_first=self._is_first)

    def replayed(self) -> Times:
        return self._redundancy.times(Kind.REPLAY, is_first=self._is_first)


def _change(copy: StateCopy, state: RankState | None, settings: Settings | None, step: int) -> None:
    """Apply the user's changes between two steps to a copy."""
    if state is not None:
        before = copy.settings
        copy.load(state, step)
        if settings is not None and _num_groups(before) == _num_groups(settings):
            copy.settings, copy.next_settings = before, settings
    elif settings is not None:
        copy.next_settings = settings


def _num_groups(settings: Settings) -> dict[int, int]:
    return {index: len(groups) for index, groups in settings.items()}


def _later(known: Mapping[int, Settings], step: int) -> dict[int, Settings]:
    """Return the settings of this step and of later ones."""
    return {number: own for number, own in known.items() if number >= step}


def _end_lane(lane: CollectiveLane, forget_exit: Callable[[], Any]) -> None:
    """Let a lane end once its job has ended. Until then, Python waits for it at exit."""
    lane.start(forget_exit)
    lane.close()


def _end_at_exit(close: Callable[[], Any], lane: Thread, hang_ups: Iterable[Callable[[], None]]) -> None:
    """End a lane when a script exits without having closed the pipeline: Python must not exit while it is in torch."""
    close()
    lane.join(_LAST_JOB_S)
    if lane.is_alive():
        for hang_up in hang_ups:
            hang_up()
        lane.join(_LAST_JOB_S)


def _nothing() -> None:
    """Do nothing."""


def _made(make: Callable[[list[Any]], Optimizer], stage: int, parameters: NamedParameters) -> Optimizer:
    return make(parameters)


def _groups(optimizers: Mapping[int, StageOptimizer]) -> dict[int, list[dict[str, Any]]]:
    return {index: stage.wrapped.param_groups for index, stage in optimizers.items() if stage.wrapped is not None}


def _settings(optimizers: Mapping[int, StageOptimizer]) -> Settings:
    return {index: [settings_of(group) for group in groups] for index, groups in _groups(optimizers).items()}
