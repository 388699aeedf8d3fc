"""Step times: what each process sends of its last steps, and the spans of all ranks that come of it."""

from collections.abc import Sequence

import numpy as np
import pytest

from pipesched import schedules
from pipesched.pipeline.step_times import StepTimes
from pipesched.program.actions import Lane
from pipesched.program.lowering import lower
from pipesched.program.program import Program
from pipesched.runtime.executors.interpreter import Stamps
from pipesched.runtime.executors.rank_run import RankTimeline
from pipesched.simulation.trace import Span

PROGRAMS = [lower(schedules.get("interleaved-1f1b").program(2, count)) for count in (4, 8, 4)]


def timeline(program: Program, rank: int, seed: int, slower: float = 1.0) -> RankTimeline:
    """Return what a process that runs ``rank`` has measured: actions that take random times."""
    order = program.orders[rank] if rank < program.num_ranks else ()
    times = slower * np.random.default_rng(seed).random((len(order), 2)).cumsum(1).cumsum(0)
    own = Stamps(order, *(column.tolist() for column in times.T))
    others = Stamps.room_for(())
    return RankTimeline([own if at == rank else others for at in range(3)], [float] * 3, 0.0, program.orders)


def processes(*ranks: tuple[int, float]) -> list[list[RankTimeline]]:
    """Return the timelines of processes: of each, the rank that it runs and how much slower than others it is."""
    return [
        [timeline(program, rank, 10 * process + step, slower) for step, program in enumerate(PROGRAMS)]
        for process, (rank, slower) in enumerate(ranks)
    ]


def check(found: Sequence[Sequence[Span]], measured: Sequence[Sequence[RankTimeline]]) -> None:
    due = [tuple(span for own in step for span in own.spans()) for step in zip(*measured, strict=True)]
    assert [tuple(spans) for spans in found] == due


def test_the_spans_are_those_that_the_processes_measured() -> None:
    """The steps have different numbers of micro-batches, and the last process is idle."""
    measured = processes((0, 1.0), (1, 1.0), (2, 1.0))
    every = [StepTimes.of(own).sent for own in measured]
    for own in measured:
        check(StepTimes.of(own).spans(every, [(0,), (1,), (2,)]), measured)
    assert {span.lane for span in measured[0][0].spans()} == {Lane.COMPUTE, Lane.COPY}


@pytest.mark.parametrize("slow", [0, 1])
def test_of_several_replicas_each_rank_is_the_slowest(slow: int) -> None:
    slower = [[1.0, 3.0], [3.0, 1.0]]
    measured = processes(*((rank, slower[slow][replica]) for replica in range(2) for rank in range(2)))
    every = [StepTimes.of(own).sent for own in measured]
    slowest = measured[2:] if slow == 0 else measured[:2]
    check(StepTimes.of(measured[3]).spans(every, [(0, 2), (1, 3)]), slowest)


def test_the_steps_are_the_last_ones_that_all_processes_have() -> None:
    measured = processes((0, 1.0), (1, 1.0))
    measured = [measured[0][1:], measured[1]]
    every = [StepTimes.of(own).sent for own in measured]
    for own in measured:
        check(StepTimes.of(own).spans(every, [(0,), (1,)]), [own[-2:] for own in measured])


def test_a_process_sends_two_numbers_of_eight_bytes_for_each_action() -> None:
    (own,) = processes((1, 1.0))
    steps, times = StepTimes.of(own).sent
    assert steps == 3
    assert times.nbytes == 16 * sum(len(program.orders[1]) for program in PROGRAMS)
