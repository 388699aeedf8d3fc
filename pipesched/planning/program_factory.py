"""Program factory: what the user asked for -> the programs to run, and the stages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pipesched import schedules
from pipesched.errors import DeviceCountError, PartitionError, ScheduleError
from pipesched.planning.plan_request import PlanRequest
from pipesched.program.checkpoint_options import Checkpoint
from pipesched.program.dependencies import StageGraph
from pipesched.program.lowering import add_offloading, add_recompute, add_updates, forward_then_backward, lower
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.program.segments import Segments, enough_steps
from pipesched.program.validation import validate
from pipesched.program.weight_versions import Uses, update_groups, used_versions

__all__ = ["MICROBATCHES_PER_RANK", "ProgramFactory"]

_AUTO = "1f1b"
_MORE_STEPS = 4  # times what PipeDream needs: a stream that does not repeat then never will
MICROBATCHES_PER_RANK = 4  # from here on the bubble is small (GPipe, Huang et al. 2019)


class ProgramFactory:
    """The programs of one pipeline, validated and lowered; built once for each number of micro-batches.

    updates: the pipeline has optimizers: programs end with updates where they have none of their own.
    """

    def __init__(self, wishes: PlanRequest, num_devices: int, *, updates: bool = False) -> None:
        self.updates = updates
        self.checkpoint: Checkpoint = wishes.checkpoint or "never"
        if wishes.num_ranks is not None:
            num_devices = _as_planned(wishes.num_ranks, num_devices)
        self._source = _source(wishes, num_devices)
        self._wishes = wishes
        self.fixed = isinstance(self._source, Program)
        if isinstance(self._source, Program):
            self.num_ranks = self._source.num_ranks
            count: Any = self._source.num_microbatches
        else:
            self.num_ranks = min(num_devices, _num_stages(wishes, self._source, num_devices))
            asked = wishes.num_microbatches
            count = self.num_ranks * MICROBATCHES_PER_RANK if asked is None else asked
        self.num_microbatches: int = count
        self._graph: StageGraph | None = None
        self._offloading: frozenset[int] = frozenset()
        self._forget()

    @property
    def wishes(self) -> PlanRequest:
        """Those that lead to programs of the same shape."""
        count = self.num_microbatches
        return replace(
            self._wishes,
            schedule=self._source,
            num_stages=self.plain(count).num_weights,
            num_microbatches=count,
            boundaries=None,
            num_ranks=self.num_ranks,
        )

    def connect(self, edges: Sequence[tuple[int, int]], offloading: Collection[int] = ()) -> Program:
        """From now on stages feed each other along these edges, in each of several chains. Returns the program for a
        full batch. offloading: the stages of a chain that take activations to the host.
        """
        program: Program = self.plain(self.num_microbatches)
        chains = range(0, program.num_stages, program.num_weights)
        graph = StageGraph.of(program.num_stages, [(at + giver, at + taker) for at in chains for giver, taker in edges])
        going = frozenset(offloading)
        if graph != program.graph or going != self._offloading:
            self._graph, self._offloading = graph, going
            self._forget()
        return self.plain(self.num_microbatches)

    def _forget(self) -> None:
        self.plain = lru_cache(maxsize=64)(self._plain)
        self.timed = lru_cache(maxsize=64)(self._timed)
        self.segments = lru_cache(maxsize=64)(self._segments)
        self.uses = lru_cache(maxsize=64)(self._uses)
        self.training = lru_cache(maxsize=64)(self._training)
        self.inference = lru_cache(maxsize=64)(self._inference)
        self.open_pass = lru_cache(maxsize=64)(self._open_pass)

    def _plain(self, num_microbatches: int) -> Program:
        """As its author wrote it. Raises ScheduleError where the program's number of micro-batches is fixed."""
        if not isinstance(self._source, Program):
            program = self._source.program(self.num_ranks, num_microbatches)
        elif num_microbatches == self.num_microbatches:
            program = self._source
        else:
            raise ScheduleError(
                f"a program is written for one number of micro-batches; {self.num_microbatches} here, but "
                f"{num_microbatches} are asked for; drop the last short batch (drop_last=True)"
            )
        if program.slices_per_microbatch > 1:
            raise ScheduleError(
                f"a model's layers run whole micro-batches; {program.name!r} cuts each into "
                f"{program.slices_per_microbatch} token slices, for which layers must keep what earlier slices left; "
                f"study it with simulate, or choose one of: {', '.join(schedules.names())}"
            )
        if self._graph is not None:
            program = replace(program, graph=self._graph)
        validate(program)
        return program

    def check_updates(self) -> None:
        """Raise ScheduleError where the schedule and the optimizers do not go together."""
        program = self.plain(self.num_microbatches)
        if program.has_updates and not self.updates:
            raise ScheduleError(
                f"schedule {program.name!r} updates the weights while micro-batches are in flight, and needs an "
                f"optimizer for each stage; got none; pass optimizer=, such as lambda params: SGD(params, lr=0.1)"
            )
        if self.updates and program.num_weights < program.num_stages:
            raise ScheduleError(
                f"optimizer= updates each stage by itself; here {program.num_stages} stages share "
                f"{program.num_weights} weight copies; leave optimizer= out and step an optimizer of your own"
            )
        if self.streams:
            self.segments(self.num_microbatches)

    @property
    def streams(self) -> bool:
        """Whether steps run on into each other: a schedule with updates of its own. A program runs step by step."""
        return not self.fixed and self.plain(self.num_microbatches).has_updates

    @property
    def options(self) -> dict[str, Any]:
        """The schedule's options that a file takes; none of a program."""
        options = self._source.options if isinstance(self._source, Schedule) else {}
        return {option: value for option, value in options.items() if isinstance(value, int | float | str)}

    def _timed(self, num_microbatches: int) -> Program:
        """What runs, without transfers: one step, or of a stream as many as show how it goes on."""
        program = self.plain(num_microbatches)
        if self.streams and isinstance(self._source, Schedule):
            program = self._beginning(self._source, num_microbatches)
        program = add_recompute(add_updates(program) if self.updates else program, self.checkpoint)
        return add_offloading(program, self._offloading)

    def _beginning(self, schedule: Schedule, num_microbatches: int) -> Program:
        """The first steps of a stream, as many as show how it goes on; old versions may be late to come."""
        steps = enough_steps(self.num_ranks, num_microbatches)
        last = steps * _MORE_STEPS
        while True:
            program = schedule.program(self.num_ranks, num_microbatches, steps=steps)
            validate(program)
            try:
                Segments(lower(program), num_microbatches)
            except ScheduleError:
                if steps >= last:
                    raise
                steps *= 2
            else:
                return program

    def _training(self, num_microbatches: int) -> Program:
        return lower(self.timed(num_microbatches))

    def _segments(self, num_microbatches: int) -> Segments:
        return Segments(self.training(num_microbatches), num_microbatches)

    def _uses(self, num_microbatches: int) -> dict[int, Uses]:
        """For a program that updates weights on its way: which versions each stage uses in one step."""
        program = self.plain(num_microbatches)
        return {stage: Uses(used) for stage, used in enumerate(used_versions(program))} if program.has_updates else {}

    def groups(self, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of each update of a step; none where the whole step is one."""
        if self.streams:
            return self.segments(num_microbatches).groups
        program = self.plain(num_microbatches)
        return update_groups(program) if program.has_updates else ()

    def _inference(self, num_microbatches: int) -> Program:
        return lower(self.plain(num_microbatches).forward())

    def _open_pass(self, num_microbatches: int) -> Program:
        return lower(add_recompute(forward_then_backward(self.plain(num_microbatches)), self.checkpoint))


def _as_planned(num_ranks: int, num_devices: int) -> int:
    if num_ranks > num_devices:
        raise DeviceCountError(
            f"every rank has a device; the plan has {num_ranks} ranks, but there are {num_devices} devices; give as "
            f"many (a device may repeat), or make a plan for {num_devices}"
        )
    return num_ranks


def _num_stages(wishes: PlanRequest, schedule: Schedule, num_devices: int) -> int:
    if wishes.num_stages is not None:
        return wishes.num_stages
    if wishes.boundaries is None or isinstance(wishes.boundaries, Mapping):
        return num_devices * schedule.chunks_per_rank
    return len(wishes.boundaries) + 1


def _source(wishes: PlanRequest, num_devices: int) -> Schedule | Program:
    """What makes the programs: the schedule with as many chunks as are asked for, or a program as it is."""
    if num_devices < 1:
        raise DeviceCountError("a pipeline runs on at least one device; got none; pass devices=['cpu'], or more")
    if isinstance(wishes.schedule, Program):
        return _fixed(wishes.schedule, num_devices, wishes)
    schedule = _schedule(wishes.schedule)
    num_stages = _num_stages(wishes, schedule, num_devices)
    num_ranks = min(num_devices, num_stages)
    if "chunks_per_rank" not in schedule.options:
        if num_stages > num_ranks:
            raise DeviceCountError(
                f"schedule {schedule.name!r} holds one stage a rank; {num_stages} stages need {num_stages} devices, "
                f"got {num_devices}; repeat a device, or use a schedule with chunks: {', '.join(_with_chunks())}"
            )
        return schedule
    if num_stages % num_ranks:
        raise PartitionError(
            f"every rank holds as many stages; {num_stages} stages do not go evenly on {num_ranks} ranks; "
            f"use a multiple of {num_ranks} stages, or another number of devices"
        )
    return schedule.with_options(chunks_per_rank=num_stages // num_ranks)


def _schedule(wish: Any) -> Schedule:
    if isinstance(wish, Schedule):
        return wish
    if not isinstance(wish, str):
        raise ScheduleError(f"schedule is a name, a Schedule or a Program; got {type(wish).__name__}; pass one of them")
    return schedules.get(_AUTO if wish == "auto" else wish)


def _with_chunks() -> list[str]:
    return [name for name in schedules.names() if "chunks_per_rank" in schedules.get(name).options]


def _fixed(program: Program, num_devices: int, wishes: PlanRequest) -> Program:
    """A program as the user wrote it: its shape is what it is."""
    if program.num_ranks > num_devices:
        raise DeviceCountError(
            f"every rank has a device; the program has {program.num_ranks} ranks, but there are {num_devices} devices; "
            f"give as many (a device may repeat)"
        )
    for what, wish, has in (
        ("micro-batches", wishes.num_microbatches, program.num_microbatches),
        ("stages", wishes.num_stages, program.num_weights),
    ):
        if wish not in (None, has):
            raise ScheduleError(f"a program's shape is fixed; it has {has} {what}, {wish} are asked for; ask for {has}")
    if not program.is_chains or program.forward_only:
        raise ScheduleError(
            "a model's layers run as a chain, or as several over the same weights, with backwards; this program is "
            "another form; rewrite it"
        )
    return program
