"""Recovery: lets the ranks that live go on after a loss, from the state before the step that was lost.

The survivors agree on a version of the state, connect anew, divide the layers among themselves, and take over the state
of the lost layers from its copies. They then run the steps after this version again. The results are bit-identical to
those of a run that lost nobody.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

from torch.amp import GradScaler
from torch.optim import Optimizer

from pipesched.elastic.kept_calls import KEPT_BATCHES, KeptCall, batches_of_first, divided_anew, of_replica
from pipesched.elastic.recovered import Recovered
from pipesched.elastic.redundancy import KeptStates, Redundancy, SettingsChange
from pipesched.elastic.survivors import Decision, HeldLayers, LostForGood, RankReport, Survivors
from pipesched.errors import InputError, RankLost
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.joining import Joining, old_alarm_counts
from pipesched.pipeline.plan_switch import PlanSwitch, weakly
from pipesched.pipeline.regrouping import NewGroup, Regrouping, SharedWork
from pipesched.pipeline.replan_search import FoundPlan
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.microbatches import GivenBatch
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.optimizers import settings_of
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.saving.live_run import LiveRun
from pipesched.saving.saved_run import CheckpointPart

__all__ = ["LossOptions", "Methods", "Recovery"]

_SENT = (SettingsChange, FoundPlan)  # the types of values that only recoveries and searches send
_LOG = logging.getLogger(__name__)

_KEPT_CALLS = 2  # a step may have to run again after the next one has begun


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What the user wishes after a loss, and what else a loss concerns."""

    #: Whether a step recovers from a loss by itself.
    recovers: bool
    #: The user's function, called after each recovery.
    on_recovery: Callable[[Recovered], Any] | None
    #: The scaler of the losses.
    scaler: GradScaler | None
    #: The file with the addresses of the job's ranks, for processes that join; None if none can join.
    rendezvous: str | PathLike[str] | None


class Methods(NamedTuple):
    """The methods of a pipeline that a recovery calls."""

    #: Runs a step.
    run_step: Callable[..., Any]
    #: Looks for a faster plan before a step, if that is due.
    replan_if_due: Callable[[], None]
    #: Returns the state of the run under the running plan.
    live_run: Callable[[], LiveRun]
    #: Waits for an asynchronous save, which a process that joins does not know.
    finish_saves: Callable[[], None]


class Recovery:
    """Keeps a pipeline ready for the loss of a rank, and lets it go on after a loss. The constructor is collective.

    Args:
        running: the running plan; a recovery replaces its contents.
        spec: the model and the user's options for its stages.
        switch: replaces the running plan.
        regrouping: lets another set of ranks run the pipeline.
        methods: the methods of the pipeline that a recovery calls.
        options: what the user wishes after a loss.

    """

    def __init__(
        self,
        *,
        running: RunningPlan,
        spec: AssemblySpec,
        switch: PlanSwitch,
        regrouping: Regrouping,
        methods: Methods,
        options: LossOptions,
    ) -> None:
        self._running = running
        self._spec = spec
        self._switch = switch
        self._regrouping = regrouping
        self._run_step = weakly(methods.run_step)
        self._replan_if_due = weakly(methods.replan_if_due)
        self._live_run = weakly(methods.live_run)
        self._options = options
        self._scaler = options.scaler
        self._redundancy: Redundancy | None = None
        self._assembly: Any = None  # whose states are copied
        self._survivors: Survivors | None = None
        self._calls: dict[int, KeptCall] = {}
        #: The micro-batches of steps that run again with another number of replicas, keyed by step.
        self._divided: dict[int, list[Any]] = {}
        #: The states of the scaler before the last steps, keyed by step. All ranks have the same.
        self._scaler_states: dict[int, dict[str, Any]] = {}
        #: With inputs="first", the batches of steps that run again, keyed by step: on rank 0 the batch, on the other
        #: ranks no batch. None if the batch was lost with the rank that passed it.
        self._batches: dict[int, GivenBatch | None] = {}
        #: The step that only some ranks had begun with the batches of the old replicas.
        self._late: int | None = None
        #: The last step that a rank had begun when a rank was lost. No rank looks for another plan before it.
        self._last_lost: int | None = None
        #: The number of changes of the state since the last step on this rank, and how many it is behind others.
        self._changes = 0
        self._behind = 0
        self._past: list[Alarm] = []
        #: The rank whose alarm the ranks that live use to agree; it stays while a recovery is not complete.
        self._base: ConnectedRank
        #: The work before the loss, because an attempt to recover may have replaced the running plan.
        self._work: SharedWork
        self._returned = running.step
        self._is_whole = True
        self._joining = Joining(
            running=running,
            regrouping=regrouping,
            live_run=methods.live_run,
            finish_saves=methods.finish_saves,
            rendezvous=options.rendezvous,
            sent_types=_SENT,
        )
        if running.host.maker is None:
            self._join()
            return
        self._connected.survives = True
        running.host.collectives.learn_types(*_SENT)
        self._settle_in(None)
        with self._connected.stopping_all("the construction of a pipeline"):
            self._begin(running.step)  # a loss in the first step is covered, too

    @property
    def _connected(self) -> ConnectedRank:
        maker = self._running.host.maker
        assert maker is not None
        return maker.connected

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self, given: GivenBatch, metrics: Metrics | None, wanted: Mapping[str, bool]) -> Any:
        """Run a step. After a loss, recover and run it again if the user wishes that."""
        running = self._running
        grid = running.host.grid
        call = KeptCall(given, metrics, wanted, running.splitter, grid.replica, len(grid.rows))
        is_new = True  # whether the caller knows the present number of replicas
        in_vain = False  # whether the last recovery has lost nobody, as after a broken connection
        while True:
            try:
                self._let_join()
                if self._last_lost is None or self._running.step > self._last_lost:
                    self._replan_if_due()
                call = self._divided_call(call, is_new=is_new)
                return self._stepped(call)
            except RankLost as error:
                if not (self._options.recovers and self._connected.closed) or isinstance(error, LostForGood) or in_vain:
                    raise
                replicas = len(self._running.host.grid.rows)
                in_vain = not self.recover().lost
                is_new = is_new and replicas == 1

    def _divided_call(self, call: KeptCall, *, is_new: bool) -> KeptCall:
        """Return the call for the batch of this process's replica, which may have changed during the call.

        ``is_new`` states whether the caller has passed the batch of this replica.
        """
        step, running, grid = self._running.step, self._running, self._running.host.grid
        divided = self._divided.pop(step, None)  # on all ranks, because ranks compare the form of their batches, too
        if self._late == step:
            self._late = None
            fits = is_new or (call.replica, call.num_replicas) == (grid.replica, len(grid.rows))
            divided = of_replica(running.host, call.in_microbatches() if fits else None)
            if divided is None:
                raise LostForGood(
                    f"a step can run again only if each replica has its batch; nobody has the batch of replica "
                    f"{grid.replica} in step {step}; start the job again from the last checkpoint"
                )
        if step in self._batches:
            call = self._with_kept_batch(call, self._batches[step])
            del self._batches[step]
        return call if divided is None else call.over(divided, grid.replica, len(grid.rows))

    def _with_kept_batch(self, call: KeptCall, kept: GivenBatch | None) -> KeptCall:
        """Return a call that runs again, or begins on the ranks that live, if only rank 0 passes a batch."""
        if kept is not None:
            passes = self._connected.rank == 0 and call.given.is_given
            return call if passes else call._replace(given=kept)
        if not self._running.host.collectives.agreed(lambda: call.given.is_given):
            raise RankLost(
                f"step {self._running.step} needs its batch, which was lost with rank 0 before another rank had a "
                f"copy; the pipeline remains usable; call step again, with the batch on the rank that is rank 0 now"
            )
        return call

    def _keep_batch(self, call: KeptCall) -> KeptCall:
        """Return the call with its batch on the ranks that keep it. If only rank 0 passes it, rank 1 keeps a copy."""
        grid = self._running.host.grid
        if grid.inputs == "all" or grid.rank > 1 or grid.num_processes == 1:
            return call
        exchange = self._connected.in_all()
        if grid.rank == 0:
            exchange.trade(KEPT_BATCHES, {1: call.sent()}, ())
            return call
        return call.with_sent(exchange.trade(KEPT_BATCHES, {}, (0,))[0])

    def _stepped(self, call: KeptCall, *, again: bool = False) -> Any:
        """Run a step. ``again`` states whether it has returned to the user before a rank was lost."""
        step = self._running.step
        if not again:
            self._returned = step
        self._calls = {known: own for known, own in self._calls.items() if known > step - _KEPT_CALLS}
        self._calls[step] = call
        self._scaler_states = {known: own for known, own in self._scaler_states.items() if known in self._calls}
        if self._scaler is not None:
            self._scaler_states[step] = self._scaler.state_dict()
        with self._connected.waiting("a step"):
            self._begin(step)
            self._calls[step] = self._keep_batch(call)
        try:
            result = self._run_step(call.given, call.metrics, **call.wanted)
        except Exception:
            if self._running.step == step + 1 and not self._connected.closed:
                self._finish(step, again=again)  # the step counts, such as one with gradients that are not finite
            raise
        with self._connected.stopping_all("a step"):
            self._connected.finish_broadcast()
        self._finish(step, again=again)
        return result

    def _finish(self, step: int, *, again: bool) -> None:
        """Begin to copy the state after a step."""
        if self._redundancy is not None:
            self._redundancy.finish()
        if not again:
            self._returned = step + 1
        self._changes = self._behind = 0
        self._calls[step] = self._calls[step].copied()

    def _begin(self, step: int) -> None:
        running = self._running
        if self._redundancy is None:  # this rank is the only one
            return
        if self._assembly is running.assembly:
            self._redundancy.begin(step)
        else:
            self._assembly = running.assembly
            stages, copied = running.assembly.stages, running.assembly.copied_stages
            self._redundancy.use(stages, copied, self._live_run(), self._layers_of_ranks(), step)

    def _layers_of_ranks(self) -> list[list[str]]:
        """Return the layers of each rank of a replica."""
        program = self._running.program
        layers: list[list[str]] = [[] for _ in self._running.host.grid.pipeline]
        for rank, names in zip(program.placement, self._running.cut, strict=False):
            layers[rank] += names
        return layers

    def copy_now(self) -> None:
        """Copy the state of all ranks after it was loaded. Collective."""
        step = self._returned = self._running.step
        self._calls, self._last_lost = {}, None
        with self._connected.waiting("load"):
            self._begin(step)
            if self._redundancy is not None:
                self._redundancy.wait()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A context in which the state changes as a whole, such as a load. What is kept must be complete before."""
        if self._redundancy is not None:
            with self._connected.stopping_all("a change of the state"):
                self._redundancy.wait()
        self._is_whole = False
        try:
            yield
            self._changes += 1
        finally:
            self._is_whole = not self._connected.closed

    def has_missed_change(self) -> bool:
        """Return whether the change that begins now had ended on other ranks when a rank was lost.

        All ranks have gone on from the state before it, and only some would repeat it.
        """
        missed = self._behind > 0
        self._behind -= missed
        return missed

    def close(self) -> None:
        """Let the alarms and the threads end."""
        if self._redundancy is not None:
            self._redundancy.end()
        for alarm in self._past:
            alarm.end()

    # ---- ranks that join and leave ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the job between two steps, once the others hold the state of this rank's layers. Closes the pipeline.

        The others go on without this rank, from the state after the last step.
        """
        self._running.check_idle("leave")
        with self._connected.stopping_all("leave"):
            if self._redundancy is not None:
                self._redundancy.wait()
        self._connected.leave("it leaves the job")
        self._connected.give_up()

    def _let_join(self) -> None:
        """Let newcomers join before a step, if all ranks know of them."""
        step, redundancy, connected = self._running.step, self._redundancy, self._connected
        with connected.stopping_all("a step"):
            count = self._joining.num_waiting() if redundancy is None else redundancy.newcomers_before(step)
            before, num_ranks = connected.num_ranks, self._joining.num_ranks_with(count)
            if num_ranks == before:
                return
            if redundancy is not None:
                redundancy.wait()
        begun_s = time.perf_counter()
        self._joining.let_join(connected, num_ranks)
        self._settle_in(None if redundancy is None else redundancy.kept)
        self._tell(step, begun_s, joined=num_ranks - before)

    def _join(self) -> None:
        """Join a running job."""
        begun_s = time.perf_counter()
        group = self._joining.join()
        self._settle_in(None)
        self._returned = group.step
        self._tell(group.step, begun_s, joined=group.num_ranks)

    def _tell(self, step: int, begun_s: float, *, lost: Sequence[str] = (), joined: int = 0) -> Recovered:
        """Return and log the outcome of a change of ranks, and tell the user's function of it."""
        grid = self._running.host.grid
        found = Recovered(
            lost=list(lost),
            joined=joined,
            rank=grid.rank,
            num_ranks=grid.num_processes,
            replica=grid.replica,
            num_replicas=len(grid.rows),
            step=step,
            seconds=time.perf_counter() - begun_s,
        )
        _LOG.info("before step %d: %s", step, found)
        if self._options.on_recovery is not None:
            self._options.on_recovery(found)
        return found

    # ---- after a loss ----------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """Go on with the ranks that live. Collective over the ranks that live.

        Raises:
            InputError: no rank is lost.
            RankLost: the state of a layer is lost with all its copies, or this rank was given up.

        """
        if not self._connected.closed:
            raise InputError(
                f"recover() goes on after the loss of a rank; all {self._connected.num_ranks} ranks of this pipeline "
                f"are connected; call it only after a RankLost error"
            )
        lost = 0
        while True:
            try:
                return self._recovered()
            except RankLost as again:
                lost += 1
                if isinstance(again, LostForGood) or lost > self._connected.num_ranks:
                    raise

    def _recovered(self) -> Recovered:
        begun_s = time.perf_counter()
        connected, redundancy = self._base, self._redundancy
        if redundancy is None:
            raise LostForGood("a rank was lost before any state was copied; start the job again")
        redundancy.settle()
        if self._survivors is None:
            layers = range(len(self._spec.layers))
            self._survivors = Survivors(connected.alarm, connected.store, layers, connected.timeout_s)
            self._work = SharedWork.of(self._running)
        survivors, waits_in = self._survivors, self._returned
        decision = survivors.agree(self._report(redundancy))
        names = [name for rank, name in enumerate(connected.grid.names) if rank not in decision.members]
        step = decision.version
        if step is None:
            raise LostForGood(
                f"the state of each layer must be held by a rank that lives; {', '.join(names)} held the only copies "
                f"of a layer; start the job again from the last checkpoint"
            )
        parts = [*redundancy.parts(step, self._live_run()), *self._scaler_part(step, decision, connected.rank)]
        redundancy.is_frozen = True
        work, numbers = self._work, {rank: place for place, rank in enumerate(decision.members)}
        group = NewGroup(
            rank=numbers[connected.rank], num_ranks=len(numbers), host=decision.host, port=decision.port, step=step
        )
        try:
            host = self._regrouping.connect(group, work, survivors.store, connected.encoding)
        except RuntimeError as error:
            raise RankLost(f"all {len(numbers)} ranks that live must connect anew; {error}") from error
        with old_alarm_counts(host):
            changes = self._exchange(host, redundancy, step, waits_in)
            self._regrouping.take_over(host, work, numbers, parts, step)
        self._past.append(connected.alarm)
        self._settle_in(redundancy.kept)
        self._change_settings(changes, step)
        found = self._tell(step, begun_s, lost=names)  # on all ranks at once, because the user may call collectives
        for missed in range(step, waits_in):
            self._stepped(self._divided_call(self._calls[missed], is_new=False), again=True)
            self._change_settings(changes, missed + 1)
        return found

    def _settle_in(self, kept: KeptStates | None) -> None:
        """Begin to keep copies over the new connections. ``kept`` are those kept so far."""
        if self._redundancy is not None:
            self._redundancy.end()
        self._base, self._survivors, self._assembly, self._redundancy = self._connected, None, None, None
        self._is_whole = True
        if self._running.host.grid.num_processes > 1:
            self._redundancy = Redundancy(
                self._connected,
                self._make,
                self._joining.num_waiting,
                kept,
                self._regrouping.form.intra_op_threads,
            )
        self._joining.welcome(self._connected)

    def _exchange(self, host: RankHost, redundancy: Redundancy, step: int, waits_in: int) -> list[SettingsChange]:
        """Exchange what the ranks that go on must know: batches, if there were replicas, and changes of settings."""
        gather = host.collectives.gathered_in_all
        self._last_lost = last = max(gather(waits_in))
        if any(gather(redundancy.is_changed)):
            raise LostForGood(
                f"a loss may fall back to the state before a change that your code has made to weights, buffers or "
                f"states, and that no copy has yet; the change was made before step {last}; start the job again from "
                f"the last checkpoint"
            )
        most = max(gather(self._changes))
        self._behind, self._changes = most - self._changes, most
        calls = {known: call for known, call in self._calls.items() if known >= step}
        if host.grid.inputs == "first":
            self._batches = batches_of_first(host, calls, range(step, last + 1))
            if any(self._batches[known] is None for known in range(step, last)):
                raise LostForGood(
                    "a step can run again only if a rank has its batch; ranks 0 and 1, which had it, are both lost; "
                    "start the job again from the last checkpoint"
                )
        elif any(gather(any(call.num_replicas > 1 for call in calls.values()))):
            self._divided = divided_anew(host, calls)
            self._late = None if last in self._divided else last
        return [change for own in gather(redundancy.settings_changes(step)) for change in own]

    @property
    def _make(self) -> Callable[[list[Any]], Optimizer]:
        assert self._spec.optimizer is not None
        return self._spec.optimizer

    def _scaler_part(self, step: int, decision: Decision, rank: int) -> list[CheckpointPart]:
        """Return the state of the scaler before a step, which the first rank that goes on gives to all."""
        if self._scaler is None or rank != decision.members[0]:
            return []
        return [CheckpointPart(values={"scaler": self._scaler_states.get(step, self._scaler.state_dict())})]

    def _report(self, redundancy: Redundancy) -> RankReport:
        """Return what this rank holds."""
        numbers = {name: number for number, name in enumerate(self._spec.layers)}
        held = redundancy.held_layers(live=self._is_whole and not self._switch.is_moving)
        every = [HeldLayers([numbers[name] for name in layers], versions) for layers, versions in held]
        return RankReport(every, self._returned)

    def _change_settings(self, changes: Sequence[SettingsChange], step: int) -> None:
        """Give the optimizers the learning rates and other settings that the user has changed before a step.

        If the rank that knew the settings of a parameter is lost, those of a group that had the same settings count.
        """
        names, due = self._live_run().names, [change for change in changes if change.step == step]
        of_name = {name: change for change in due for name in change.names}
        for optimizer in self._running.assembly.optimizers.values():
            for number, group in enumerate(list(optimizer.param_groups)):
                own = settings_of(group)
                alike = [change for change in due if change.before == own]
                guess = next((change for change in alike if change.number == number), next(iter(alike), None))
                found = [of_name.get(names[id(parameter)], guess) for parameter in group["params"]]
                settings = [own if change is None else change.now for change in found]
                _split(optimizer, group, settings)


def _split(optimizer: Optimizer, group: dict[str, Any], settings: Sequence[dict[str, Any]]) -> None:
    """Give each parameter of a group its settings. Those that differ from the first one's get groups of their own."""
    parts: list[tuple[dict[str, Any], list[Any]]] = []
    for parameter, own in zip(group["params"], settings, strict=True):
        known = next((members for other, members in parts if other == own), None)
        if known is None:
            parts.append((own, [parameter]))
        else:
            known.append(parameter)
    for number, (own, members) in enumerate(parts):
        if number == 0:
            group.update({**own, "params": members})
        else:
            optimizer.param_groups.append({**own, "params": members})
