"""Plan switch: replaces the running plan between two steps. The weights, states and gradients move with their layers.

In one process, every rank reaches every tensor, so layers only move to the devices of their new ranks. Over processes,
the state is sent to the processes that need it (`pipesched.elastic.state_transfer`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakMethod

from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.checks import shown
from pipesched.elastic.state_transfer import GRADIENT, HeldState, MovedTensors, held_in_parts, held_state
from pipesched.elastic.transfer_plan import bytes_moved
from pipesched.elastic.user_flags import share_flags
from pipesched.errors import ArgumentError, InputError
from pipesched.model.stale_weights import StaleGuard
from pipesched.pipeline.assembly import Assembly, AssemblySpec, StageCut
from pipesched.pipeline.checks.replica_checks import check_replicas
from pipesched.pipeline.gathering import named_tensors, place_weights
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.program_factory import ProgramFactory
from pipesched.runtime.rank_grid import Rows
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.optimizers import NumberedGroup, follow, regroup
from pipesched.saving.extra_states import as_extra, covering_own
from pipesched.saving.live_run import LiveRun
from pipesched.saving.optimizer_states import GivenOptimizers, as_optimizers
from pipesched.saving.restoring import Restoring
from pipesched.saving.rollback import Rollback
from pipesched.saving.saved_run import CheckpointPart
from pipesched.tensors.meta_tensors import put_away
from pipesched.units import counted
from pipesched.user_warning import warn

__all__ = ["PlanSwitch", "UserStates", "weakly"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class UserStates:
    """The user's objects whose states move with the layers, as for `Pipeline.save`."""

    optimizer: GivenOptimizers | None = None
    scheduler: Any = None
    extra: Mapping[str, Any] | None = None

    @property
    def num_optimizers(self) -> int:
        """The number of the user's optimizers."""
        if self.optimizer is None:
            return 0
        return len(self.optimizer) if isinstance(self.optimizer, Sequence | Mapping) else 1

    @property
    def without_loading(self) -> list[str]:
        """The names of the values in ``extra`` that cannot load a state."""
        return [name for name, value in as_extra(self.extra).items() if not _loads(value)]

    def check(self) -> None:
        """Raise ArgumentError if a value in ``extra`` cannot load a state."""
        for name in self.without_loading:
            raise ArgumentError(
                f"every object in replan(extra=...) must have state_dict and load_state_dict, because its tensors move "
                f"with the layers; {name!r} is {shown(as_extra(self.extra)[name])}; leave it out"
            )


def _loads(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


class PlanSwitch:
    """Replaces the running plan of a pipeline.

    Args:
        running: the running plan; its contents are replaced.
        spec: the model and the user's options for its stages.
        roots: the model and the loss module, keyed by the prefix of their parameters' names.
        guard: the StaleGuard of the model.
        live_run: the method of the pipeline that returns the state of the run under the running plan.
        check_replicas: raises an error if the pipeline cannot have a number of replicas.

    """

    def __init__(
        self,
        running: RunningPlan,
        spec: AssemblySpec,
        roots: Mapping[str, nn.Module],
        guard: StaleGuard,
        live_run: Callable[[], LiveRun],
        check_replicas: Callable[[int], None],
    ) -> None:
        self._running = running
        self._spec = spec
        self._roots = roots
        self._guard = guard
        self._live_run = weakly(live_run)
        self._check_replicas = check_replicas
        #: Whether a switch over processes has begun and not ended, so that tensors and states may be incomplete.
        self.is_moving = False

    def check(self) -> None:
        """Raise InputError if the pipeline cannot switch to another plan."""
        if self._spec.wrap is not None:
            raise InputError(
                f"replan must not move layers of a pipeline with wrap=, because wrap= has changed each stage as a "
                f"whole; this pipeline of {len(self._running.cut)} stages has wrap=; save a checkpoint, and load it "
                f"into a new pipeline made with plan="
            )

    def switch(self, programs: ProgramFactory, stage_cut: StageCut, states: UserStates, rows: Rows) -> int:
        """Switch to the stages in ``stage_cut``, with ranks arranged in these rows. Return the number of bytes sent.

        If building the stages raises, the old plan keeps running in one process. Over processes the pipeline then
        ends in all processes, because some of them may have changed already.
        """
        host = self._running.host
        self._check_replicas(len(rows))
        if len(rows) > 1:
            check_replicas(self._spec.model, programs, self._spec.batch_norm)
        if host.grid.in_one_process:
            given = [] if states.optimizer is None else self._given(states, self._live_run())
            self._build(host.use(programs.num_ranks), programs, stage_cut, {})
            host.close()
            for optimizer in given:
                follow(optimizer)
            return 0
        return self._over_processes(programs, stage_cut, states, rows)

    def _over_processes(self, programs: ProgramFactory, stage_cut: StageCut, states: UserStates, rows: Rows) -> int:
        before = self._live_run()
        state = held_state(before, states.optimizer, states.scheduler, states.extra)
        self._warn_without_optimizer(states)
        host = self._running.host
        try:
            self._share_flags(before)
            self._end_division()
            return self._move(host.arranged(rows).use(programs.num_ranks), programs, stage_cut, before, state, states)
        except BaseException as error:
            host.executor.abandon("replan", error)
            raise

    def take_over(
        self, host: RankHost, programs: ProgramFactory, stage_cut: StageCut, own: Sequence[CheckpointPart], step: int
    ) -> int:
        """Switch to stages over other connections, after a rank was lost. Return the number of bytes sent. Collective.

        Args:
            host: the ranks that go on.
            programs: their programs.
            stage_cut: the layers of each stage.
            own: what this process holds of the state after ``step`` steps.
            step: the number of steps.

        """
        run = self._live_run()
        before = replace(run, host=host, facts=replace(run.facts, step=step))
        try:
            state = held_in_parts(before, own)
            self._share_flags(before)
            return self._move(host, programs, stage_cut, before, state, UserStates())
        except BaseException as error:
            host.executor.abandon("recover", error)
            raise

    def _share_flags(self, run: LiveRun) -> None:
        stages = self._running.assembly.stages.values()
        share_flags(run, self._roots, [module for stage in stages for module in stage.modules.values()])

    def _move(
        self,
        host: RankHost,
        programs: ProgramFactory,
        stage_cut: StageCut,
        before: LiveRun,
        state: HeldState,
        states: UserStates,
    ) -> int:
        """Build the new stages, and give them the state. Return the number of bytes sent between processes."""
        self.is_moving = True
        held = self._running.assembly.held_tensors()
        given = self._given(states, before)
        arriving = state.arriving(before, before.parameters_of(self._roots))
        following = _following(before, states.extra)
        of_stages = {} if given else {p: group for groups in arriving.values() for p, group in groups.items()}
        with self._guard.lifted():
            self._build(host, programs, stage_cut, of_stages)
        self._guard.release()
        place_weights(self._roots, self._guard, host, self._running.assembly)
        self._guard.check(changes=True)
        after = self._live_run()
        for index, optimizer in enumerate(given):
            self._regroup(optimizer, arriving.get(index, {}), after)
        sent = self._load(state, after, states, following)
        del state, before  # they refer to tensors that leave
        self._put_away(held)
        host.collectives.gathered_in_all(None)  # if a rank is lost, no rank has the new plan, or all that live have it
        self.is_moving = False
        return sent

    def _given(self, states: UserStates, run: LiveRun) -> list[Optimizer]:
        """Return the user's own optimizers."""
        return [] if self._spec.optimizer is not None else as_optimizers(states.optimizer, run)

    def _put_away(self, held: Sequence[Tensor]) -> None:
        """Free the memory of tensors that this process has held and holds no longer. They go where they once were."""
        left = {*held}.difference(self._running.assembly.held_tensors())
        every = named_tensors(self._roots)
        places = {tensor: self._spec.places.get(name, tensor.device) for name, tensor in every if tensor in left}
        self._guard.release()
        for root in self._roots.values():
            put_away(root, places)
        self._guard.check(changes=True)

    def _end_division(self) -> None:
        """Undo the division of weights and updates among the replicas; the new stages divide them again."""
        assembly = self._running.assembly
        for weights in assembly.divided_weights:
            weights.end_division()
        for update in assembly.divided_updates.values():
            update.end()

    def _build(
        self,
        host: RankHost,
        programs: ProgramFactory,
        stage_cut: StageCut,
        arriving: Mapping[nn.Parameter, NumberedGroup],
    ) -> None:
        """Build the new plan's stages and replace the running plan. If building raises, the old plan keeps running."""
        running = self._running
        splitter = replace(running.splitter, num_microbatches=programs.num_microbatches, fixed=programs.fixed)
        try:
            host.executor.start()
            with host.alone():  # layers may be tried on the sample
                assembly = Assembly(self._spec, host, programs, stage_cut, running.assembly, arriving)
        except BaseException:
            if host.grid.in_one_process:
                host.close()
            running.assembly.put_back()
            raise
        assembly.adopt_optimizers()
        running.replace(host=host, assembly=assembly, splitter=splitter)
        if assembly.stages_without_scheduler:
            warn(
                f"a learning rate scheduler changes only the optimizers that it was created with; replan() has created "
                f"new optimizers, with the current settings, for stages {assembly.stages_without_scheduler}; create "
                f"schedulers for these optimizers too (pipe.optimizers[stage])"
            )

    def _regroup(self, optimizer: Optimizer, arriving: Mapping[nn.Parameter, NumberedGroup], run: LiveRun) -> None:
        """Let one of the user's optimizers train those of its parameters that this process now trains."""
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        own = [parameter for parameter in run.parameters.values() if parameter in held or parameter in arriving]
        regroup(optimizer, own, arriving)

    def _warn_without_optimizer(self, states: UserStates) -> None:
        if self._spec.optimizer is None and not states.num_optimizers and self._running.step:
            warn(
                f"an optimizer trains only the weights that it was made with, and replan() moves weights to other "
                f"processes; after {counted(self._running.step, 'step')}, replan() got no optimizer=; pass the "
                f"optimizer, or make a new one from pipe.parameters()"
            )

    def _load(self, state: HeldState, run: LiveRun, states: UserStates, following: Collection[str]) -> int:
        """Load the state into the run under the new plan. Returns the number of bytes sent between processes."""
        facts = replace(state.saved.facts, settings={**state.saved.facts.settings, **_counts(run)})
        moved: MovedTensors | None = None

        def read(key: str, rows: Any = None) -> Any:
            assert moved is not None
            return moved.read(key, rows)

        saved = replace(state.saved, facts=facts, read=read)
        restoring = Restoring(saved, run, states.optimizer, states.scheduler, states.extra, following)
        restoring.warn()
        gradients = {
            f"{GRADIENT}/{name}": parameter
            for name, parameter in run.parameters.items()
            if f"{GRADIENT}/{name}" in state.held
        }
        needed = {**restoring.needed, **dict.fromkeys(gradients)}
        moved = MovedTensors(state, run.host.collectives, run.process, needed)
        rollback = Rollback()
        restoring.load_objects(restoring.extra_states(read), rollback)
        restoring.load_states(read, rollback)
        restoring.apply(read)
        for key, parameter in gradients.items():
            parameter.grad = read(key).to(parameter.device)
        moved.finish()
        for name, parameter in run.parameters_of(self._roots).items():
            if name not in run.parameters:
                parameter.grad = None  # has moved with the weight
        return bytes_moved(moved.messages)


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls a method without keeping its object: a pipeline that is dropped must end at once."""
    of = WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> T:
        own = of()
        assert own is not None  # the object itself calls
        return own(*args, **kwargs)

    return call


def _following(run: LiveRun, extra: Mapping[str, Any] | None) -> set[str]:
    """Return the names of objects that have, in each process, only tensors of the process's own stages. Collective.

    An average of a process's own weights is such an object. Its tensors follow the layers. An object with the tensors
    of the whole model keeps all of them.
    """
    if not extra:
        return set()
    every = run.host.collectives.gathered_in_all(covering_own(as_extra(extra), run))
    return {name for name in extra if all(own[name] for own in every)}


def _counts(run: LiveRun) -> dict[str, Any]:
    """Return the settings that a new plan may change."""
    return {"num_microbatches": run.facts.settings["num_microbatches"]}
