"""Program factory: turns the user's request into the programs that a pipeline runs."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from pipesched import schedules
from pipesched.errors import DeviceCountError, PartitionError, ScheduleError
from pipesched.planning.plan import searched_before
from pipesched.planning.plan_request import PlanRequest
from pipesched.program.checkpoint_options import Checkpoint
from pipesched.program.completion import Completion
from pipesched.program.dependencies import StageGraph, chain
from pipesched.program.gathers import check_collectives
from pipesched.program.lowering import forward_then_backward, lower
from pipesched.program.order import Schedule
from pipesched.program.placement import Placement
from pipesched.program.program import Program
from pipesched.program.segments import Segments, enough_steps
from pipesched.program.validation import validate
from pipesched.program.weight_versions import Uses, update_groups, used_versions
from pipesched.simulation.costs import Costs
from pipesched.simulation.size_fit import Size
from pipesched.units import counted

__all__ = ["MICROBATCHES_PER_RANK", "ProgramFactory", "StepPrograms"]

_LOG = logging.getLogger(__name__)

_AUTO = "1f1b"
# A stream of steps counts as aperiodic if its order does not repeat within this multiple of the steps that PipeDream
# needs.
_MORE_STEPS = 4
_MOST_KEPT = 32  # maximum number of orders kept for micro-batches of different sizes
MICROBATCHES_PER_RANK = 4  # enough for a small bubble (GPipe, Huang et al. 2019)


class ProgramFactory:
    """Creates and validates the programs of a pipeline. Caches the programs by number of micro-batches.

    Args:
        request: the user's choices.
        num_devices: the number of available devices; the programs can use fewer.
        updates: whether the pipeline has optimizers. If so, updates are added to programs that have none.
        norms: whether updates need the norm of all gradients.
        redundancy: whether copies of the stages are kept, for when a rank is lost.

    """

    def __init__(
        self,
        request: PlanRequest,
        num_devices: int,
        *,
        updates: bool = False,
        norms: bool = False,
        redundancy: bool = False,
    ) -> None:
        if request.num_ranks is not None:
            num_devices = _as_planned(request.num_ranks, num_devices)
        self.checkpoint: Checkpoint = request.checkpoint or "never"
        #: The actions that a training step adds to the program of the schedule.
        added = Completion(updates=updates, norms=norms, redundancy=redundancy)
        self.completion = added.treating(self.checkpoint)
        self.source = _source(request, num_devices)
        self._request = request
        if isinstance(self.source, Program):
            self.num_ranks = self.source.num_ranks
            self.num_microbatches = self.source.num_microbatches
        else:
            placed = self.source.fixed_placement
            num_stages = _num_stages(request, self.source, num_devices)
            self.num_ranks = min(num_devices, num_stages) if placed is None else max(placed) + 1
            self.num_microbatches = request.num_microbatches or self.num_ranks * MICROBATCHES_PER_RANK
        self.graph: StageGraph | None = None
        #: For each stage, the layers whose gradients are summed across replicas; empty for a single replica.
        self.buckets: Sequence[Sequence[str]] = ()
        #: The number of orders searched for micro-batches of different sizes.
        self.num_searched = 0
        self._made: dict[int, StepPrograms] = {}
        self._of_sizes: dict[tuple[Size, ...], StepPrograms] = {}

    def of(self, num_microbatches: int) -> "StepPrograms":
        """Return the programs of steps with this number of micro-batches.

        If the user passed a program with another number of micro-batches, using the result raises ScheduleError.
        """
        if num_microbatches not in self._made:
            if self._made:
                _LOG.debug("a step of %d micro-batches needs new programs", num_microbatches)
            self._made[num_microbatches] = StepPrograms(self, num_microbatches, self.source)
        return self._made[num_microbatches]

    def of_sizes(
        self, sizes: tuple[Size, ...], costs: Callable[[Size], Costs], **limits: int | Sequence[int] | None
    ) -> "StepPrograms":
        """Return the programs of steps with micro-batches of these sizes, in an order searched for these sizes.

        In simulation, this order is not slower than the order for equal micro-batches, and the results are
        bit-identical. The last 32 orders are kept. The schedule must be `searched`.

        Args:
            sizes: the size of each micro-batch.
            costs: a function that returns the stages' costs for micro-batches of a given size.
            limits: the limits of the search, as options of `searched`. Default: no rank holds more (stage, micro-batch)
                pairs than in the order for equal micro-batches.

        """
        made = self._of_sizes.pop(sizes, None)
        if made is None:
            begin = time.perf_counter()
            known = self.of(len(sizes)).plain
            known = replace(known, graph=chain(known.num_stages))
            of_size = {size: costs(size) for size in sizes}
            options: dict[str, Any] = {"costs": [of_size[size] for size in sizes], "starts": (known,), "found": None}
            schedule = searched_before(known, None).with_options(**options | limits)
            made = StepPrograms(self, len(sizes), schedule, sizes)
            _ = made.plain
            self.num_searched += 1
            took_s = time.perf_counter() - begin
            _LOG.debug("found an order for micro-batches of %d sizes in %.3f s", len(of_size), took_s)
        self._of_sizes[sizes] = made
        if len(self._of_sizes) > _MOST_KEPT:
            del self._of_sizes[next(iter(self._of_sizes))]
        return made

    @property
    def full(self) -> "StepPrograms":
        """The programs of steps with a full batch."""
        return self.of(self.num_microbatches)

    @property
    def fixed(self) -> bool:
        """Whether the user gave a program instead of a schedule."""
        return isinstance(self.source, Program)

    @property
    def searches(self) -> bool:
        """Whether the schedule is `searched` and there are several ranks. On one rank, all orders are equally fast."""
        return isinstance(self.source, Schedule) and "found" in self.source.options and self.num_ranks > 1

    @property
    def request(self) -> PlanRequest:
        """A request for this factory's schedule and numbers of stages, micro-batches and ranks, without boundaries."""
        return replace(
            self._request,
            schedule=self.source,
            num_stages=self.full.plain.num_weights,
            num_microbatches=self.num_microbatches,
            boundaries=None,
            num_ranks=self.num_ranks,
        )

    @cached_property
    def streams(self) -> bool:
        """Whether steps overlap: True only for a schedule with updates, never for a program given by the user."""
        return not self.fixed and self.full.plain.has_updates

    @property
    def options(self) -> dict[str, Any]:
        """The schedule's options that can be saved in a file; empty if the user gave a program."""
        options = self.source.options if isinstance(self.source, Schedule) else {}
        return {option: value for option, value in options.items() if isinstance(value, int | float | str)}

    def connect(self, edges: Sequence[tuple[int, int]], stages: Sequence[Collection[str]] = ()) -> Program:
        """Set the layers of each stage, and the connections between stages.

        A connection leads from a producing to a consuming stage. A bidirectional schedule has a chain of stages for
        each direction. All chains get the same connections.

        Args:
            edges: pairs of a producing and a consuming stage of one chain.
            stages: the layers of each stage of a chain, which the option ``checkpoint`` names.

        Returns:
            The program for a full batch.

        """
        program = self.full.plain
        chains = range(0, program.num_stages, program.num_weights)
        graph = StageGraph.of(program.num_stages, [(at + giver, at + taker) for at in chains for giver, taker in edges])
        self._complete_with(self.completion.treating(self.checkpoint, stages))
        if graph != program.graph:
            self.graph = graph
            self._forget()
        return self.full.plain

    def replicate(self, buckets: Sequence[Sequence[str]], gather_once: bool | None = None) -> None:
        """Add the replicas' communication to the programs: sums of gradients, and gathers of split weights.

        Args:
            buckets: for each stage, the layers whose gradients are summed; empty for a single replica.
            gather_once: whether a step gathers the weights of a stage only once, if the weights are split across
                replicas. If False, the step gathers the weights again after other stages of the rank have run. Default:
                None (the weights are not split).

        Raises:
            ScheduleError: if the sums or gathers in the user's program are not those that the replicas need.

        """
        if isinstance(self.source, Program):
            check_collectives(self.source, list(map(len, buckets)), gathers=gather_once is not None)
        self.buckets = buckets
        counts = tuple(map(len, buckets))
        self._complete_with(replace(self.completion, buckets=counts, gather_once=gather_once))

    def _complete_with(self, completion: Completion) -> None:
        if completion != self.completion:
            self.completion = completion
            self._forget()

    def _forget(self) -> None:
        self._made.clear()
        self._of_sizes.clear()

    def check_updates(self) -> None:
        """Raise ScheduleError if the schedule's updates do not fit the pipeline's optimizers.

        For example, the schedule needs optimizers and the pipeline has none, or the schedule does not support gradient
        norms.
        """
        program = self.full.plain
        if program.has_updates and not self.completion.updates:
            raise ScheduleError(
                f"schedule {program.name!r} updates the weights while micro-batches are in flight, so it needs an "
                f"optimizer for each stage; got none; pass optimizer=, such as lambda params: SGD(params, lr=0.1)"
            )
        if self.completion.updates and program.num_weights < program.num_stages:
            raise ScheduleError(
                f"optimizer= needs separate weights for each stage; here {counted(program.num_stages, 'stage')} share "
                f"{counted(program.num_weights, 'weight copy')}; leave optimizer= out and step an optimizer of your own"
            )
        if self.completion.norms and program.has_updates and (not program.has_norms or len(self.full.groups) > 1):
            raise ScheduleError(
                f"clip_grad_norm=, scaler= and on_nonfinite= need a single update per step, after all gradients of the "
                f"step; schedule {program.name!r} updates the weights while micro-batches are in flight; leave these "
                f"options out, or choose a synchronous schedule, such as 1f1b"
            )
        if program.has_norms and not self.completion.norms:
            raise ScheduleError(
                f"a program may only have NORM actions if an option uses gradient norms; program {program.name!r} has "
                f"NORM actions, but no such option was passed; pass numerics=Numerics(clip_grad_norm=1.0), or remove "
                f"the NORM actions"
            )
        if program.has_redundancy and not self.completion.redundancy:
            raise ScheduleError(
                f"a program may only have MIRRORs, KEEPs and REPLAYs if the pipeline keeps copies of its stages; "
                f"program {program.name!r} has them, but this pipeline keeps no copies; pass the program without them"
            )
        if self.streams:
            _ = self.full.segments


class StepPrograms:
    """The programs of steps with ``num_microbatches`` micro-batches. Each program is created on first use.

    Args:
        factory: the factory of these programs.
        num_microbatches: the number of micro-batches of a step.
        source: the schedule, or the user's program.
        sizes: the size of each micro-batch, if the order was made for these sizes. Default: equal sizes.

    """

    def __init__(
        self,
        factory: ProgramFactory,
        num_microbatches: int,
        source: Schedule | Program,
        sizes: tuple[Size, ...] = (),
    ) -> None:
        self._factory = factory
        self._source = source
        self.num_microbatches = num_microbatches
        #: The size of each micro-batch for which the order was searched; () if the sizes are equal.
        self.sizes = sizes

    @cached_property
    def plain(self) -> Program:
        """The program from the schedule or the user, before updates, recomputes and transfers are added.

        Raises ScheduleError if the user gave a program with another number of micro-batches.
        """
        source = self._source
        if not isinstance(source, Program):
            program = source.program(self._factory.num_ranks, self.num_microbatches)
        elif source.num_microbatches == self.num_microbatches:
            program = source
        else:
            raise ScheduleError(
                f"a program has a fixed number of micro-batches; this program has {source.num_microbatches}, but the "
                f"batch needs {self.num_microbatches}; drop the shorter last batch (drop_last=True)"
            )
        if program.slices_per_microbatch > 1:
            raise ScheduleError(
                f"a pipeline can only run whole micro-batches; {program.name!r} cuts each micro-batch into "
                f"{program.slices_per_microbatch} token slices, which requires layers that keep state between slices; "
                f"use this schedule with simulate only, or choose one of: {', '.join(schedules.names())}"
            )
        if self._factory.graph is not None:
            program = replace(program, graph=self._factory.graph)
        validate(program)
        return program

    @cached_property
    def without_messages(self) -> Program:
        """The program that the pipeline runs, but without transfers.

        The program contains one step or, if steps overlap, all steps until the order of actions repeats.
        """
        factory = self._factory
        source = self._source
        program = self._beginning(source) if factory.streams and isinstance(source, Schedule) else self.plain
        return factory.completion.complete(program)

    @cached_property
    def gradients(self) -> Program:
        """The program of a step that updates no weights, with transfers between ranks."""
        program = forward_then_backward(self.plain) if self.plain.has_updates else self.plain
        return replace(self._factory.completion, updates=False, norms=False).lower(program)

    def _beginning(self, schedule: Schedule) -> Program:
        """Return the first steps of a stream of overlapping steps, until the order of actions repeats.

        The longer a schedule uses old weight versions, the more steps it takes until the order repeats.
        """
        num_ranks = self._factory.num_ranks
        steps = enough_steps(num_ranks, self.num_microbatches)
        last = steps * _MORE_STEPS
        while True:
            program = schedule.program(num_ranks, self.num_microbatches, steps=steps)
            validate(program)
            try:
                Segments(lower(program), self.num_microbatches)
            except ScheduleError:
                if steps >= last:
                    raise
                steps *= 2
            else:
                return program

    @cached_property
    def training(self) -> Program:
        """The program of a training step, with transfers between ranks."""
        return lower(self.without_messages)

    @cached_property
    def segments(self) -> Segments:
        """The program of a stream of overlapping steps, with transfers, split into steps."""
        return Segments(self.training, self.num_microbatches)

    @cached_property
    def uses(self) -> dict[int, Uses]:
        """The weight versions that each stage uses in a step; empty if the program contains no updates."""
        program = self.plain
        return {stage: Uses(used) for stage, used in enumerate(used_versions(program))} if program.has_updates else {}

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batches whose gradients each update in a step applies; () if ``plain`` contains no updates."""
        if self._factory.streams:
            return self.segments.groups
        return update_groups(self.plain) if self.plain.has_updates else ()

    @cached_property
    def inference(self) -> Program:
        """The program with only the forwards, plus transfers between ranks."""
        return self._factory.completion.lower(self.plain.forward())

    @cached_property
    def open_pass(self) -> Program:
        """The program that runs all forwards and then all backward passes, with transfers between ranks."""
        return Completion(recompute=self._factory.completion.recompute).lower(forward_then_backward(self.plain))


def _as_planned(num_ranks: int, num_devices: int) -> int:
    if num_ranks > num_devices:
        raise DeviceCountError(
            f"every rank must have a device; the plan has {counted(num_ranks, 'rank')}, but the pipeline has "
            f"{counted(num_devices, 'device')}; pass {counted(num_ranks, 'device')} (a device may repeat), or make a "
            f"plan for {counted(num_devices, 'rank')}"
        )
    return num_ranks


def _num_stages(request: PlanRequest, schedule: Schedule, num_devices: int) -> int:
    if request.num_stages is not None:
        return request.num_stages
    if schedule.fixed_placement is not None:
        return len(schedule.fixed_placement)
    if request.boundaries is None or isinstance(request.boundaries, Mapping):
        return num_devices * schedule.chunks_per_rank
    return len(request.boundaries) + 1


def _source(request: PlanRequest, num_devices: int) -> Schedule | Program:
    """Return the program that the user gave, or the schedule with as many chunks as the number of stages requires."""
    if num_devices < 1:
        raise DeviceCountError("a pipeline needs at least one device; got none; for example, pass devices=['cpu']")
    if isinstance(request.schedule, Program):
        return _fixed(request.schedule, num_devices, request)
    schedule = _schedule(request.schedule)
    num_stages = _num_stages(request, schedule, num_devices)
    num_ranks = min(num_devices, num_stages)
    if schedule.fixed_placement is not None:
        return _placed(schedule, schedule.fixed_placement, num_stages, num_devices)
    if "chunks_per_rank" not in schedule.options:
        if num_stages > num_ranks:
            raise DeviceCountError(
                f"schedule {schedule.name!r} has one stage per rank; {counted(num_stages, 'stage')} need "
                f"{counted(num_stages, 'device')}, but there are {num_devices}; repeat a device, or use a schedule "
                f"with several chunks per rank: {', '.join(_with_chunks())}"
            )
        return schedule
    if num_stages % num_ranks:
        raise PartitionError(
            f"every rank must have the same number of stages; {counted(num_stages, 'stage')} cannot be divided evenly "
            f"among {counted(num_ranks, 'rank')}; pass a multiple of {num_ranks} as num_stages, or a different "
            f"number of devices"
        )
    return schedule.with_options(chunks_per_rank=num_stages // num_ranks)


def _placed(schedule: Schedule, placement: Placement, num_stages: int, num_devices: int) -> Schedule:
    """Return a schedule after checking that its option ``placement`` fits the stages and the devices."""
    if len(placement) != num_stages:
        raise PartitionError(
            f"placement= must have one rank for each stage; there are {counted(num_stages, 'stage')}, but the "
            f"placement has {counted(len(placement), 'entry')}; make the numbers agree"
        )
    if max(placement) >= num_devices:
        raise DeviceCountError(
            f"every rank must have a device; the placement has {counted(max(placement) + 1, 'rank')}, but there are "
            f"{counted(num_devices, 'device')}; pass more devices (a device may repeat), or correct the placement"
        )
    return schedule


def _schedule(wish: Any) -> Schedule:
    if isinstance(wish, Schedule):
        return wish
    if not isinstance(wish, str):
        raise ScheduleError(
            f"schedule= must be a name, a Schedule or a Program; got {type(wish).__name__}; pass one of them"
        )
    return schedules.get(_AUTO if wish == "auto" else wish)


def _with_chunks() -> list[str]:
    return [name for name in schedules.names() if "chunks_per_rank" in schedules.get(name).options]


def _fixed(program: Program, num_devices: int, request: PlanRequest) -> Program:
    """Return the program that the user gave, after checking that it fits the request."""
    if program.num_ranks > num_devices:
        raise DeviceCountError(
            f"every rank must have a device; the program has {counted(program.num_ranks, 'rank')}, but the pipeline "
            f"has {counted(num_devices, 'device')}; pass {counted(program.num_ranks, 'device')} (a device may repeat)"
        )
    for name, wish, has in (
        ("num_microbatches", request.num_microbatches, program.num_microbatches),
        ("num_stages", request.num_stages, program.num_weights),
    ):
        if wish not in (None, has):
            raise ScheduleError(
                f"{name} must agree with the program; the program has {name}={has}, but {name}={wish} was passed; pass "
                f"{name}={has}, or leave {name}= out"
            )
    if not program.is_chains or program.forward_only:
        raise ScheduleError(
            "a pipeline can only train a chain of stages, or several chains that share weights; this program has a "
            "different stage graph, or no backward passes; pass a program with one of these stage graphs and with "
            "backward passes"
        )
    return program
