"""Schedule checks: validate, simulate and run schedules for many numbers of ranks and micro-batches."""

from itertools import product

import torch

from pipesched.checks import is_count
from pipesched.errors import ScheduleError
from pipesched.program.lowering import lower
from pipesched.program.order import OrderFunction, Schedule
from pipesched.program.order import schedule as schedule_of
from pipesched.program.program import Program, check_program
from pipesched.program.validation import validate
from pipesched.runtime.executors.threads import RunSpec, ThreadExecutor
from pipesched.simulation.costs import Costs, check_costs
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Trace
from pipesched.testing.fake_executor import FakeStage, run_virtual
from pipesched.units import counted

__all__ = ["check_schedule", "run_fake"]

_ROW = "{:>6}{:>15}{:>10}{:>8}{:>13}{:>16}"


def run_fake(program: Program, costs: Costs | None = None, *, sleeping: bool = False) -> Trace:
    """Run a program with fake stages, on a virtual clock or with sleeps, and return its trace.

    ::

        trace = run_fake(pipesched.schedules.get("1f1b").program(4, 8))
        print(trace.makespan_s, trace.bubble_ratio)

    The virtual clock needs no threads and no validation, so it can also show the faults of an invalid program. Messages
    between two ranks arrive in order. If the costs contain links, a large message may therefore delay later messages,
    unlike in ``simulate``.

    Args:
        program: the program, which is lowered first if necessary.
        costs: the times of the program's actions, in seconds. Default: unit costs.
        sleeping: whether to validate the program, then run each rank in its own thread, with stages that sleep for the
            time of each action. Default: False (the virtual clock).

    Returns:
        The trace.

    Raises:
        DeadlockError: ranks wait forever (only with the virtual clock).
        ExecutionError: work is missing, done twice, or done before the work that it needs.
        ScheduleError: the program is not valid. With the virtual clock only placement and routes are checked.

    """
    check_program(program)
    if costs is not None:
        check_costs(costs)
    if not sleeping:
        return run_virtual(program, costs)
    costs = costs or Costs.uniform(program.num_stages)
    validate(program)  # a deadlock of threads would never end
    stages = {index: FakeStage(index, costs) for index in range(program.num_stages)}
    executor = ThreadExecutor([torch.device("cpu")] * program.num_ranks, intra_op_threads=1)
    try:
        run = executor.run(RunSpec(lower(program), stages), grad=False)
    finally:
        executor.close()
    return Trace(tuple(run.spans()), program.num_ranks, program.name, costs)


def check_schedule(
    schedule: Schedule | OrderFunction,
    *,
    max_ranks: int = 8,
    max_microbatches: int = 16,
    exact: bool = True,
    report: bool = True,
) -> None:
    """Validate a schedule for all numbers of ranks and micro-batches up to a limit, and print a table of results.

    ::

        check_schedule(pipesched.schedules.get("zb-h1"), max_ranks=4)

    Args:
        schedule: a Schedule, or a function (rank, shape) -> Order. A function is checked under its own name, with one
            stage per rank.
        max_ranks: the largest number of ranks. Default: 8.
        max_microbatches: the largest number of micro-batches. Default: 16.
        exact: whether to also require ascending micro-batch order; see ``Program.exact``. Schedules with several chains
            of stages are never exact and are exempt. Default: True.
        report: whether to print, for some shapes, the makespan, the bubble, the excess over ``lower_bound`` and the
            peak in flight. The bound is for unlimited memory, and holds whether or not B is split into I and W. With v
            chunks per rank, an F, I or W of one chunk takes 1/v s. Default: True.

    Raises:
        ScheduleError: a program is not valid (a note names its shape), or ``schedule`` is not a schedule. Errors of the
            schedule's function are raised unchanged, with the same note.

    """
    schedule = _as_schedule(schedule)
    if not is_count(max_ranks) or not is_count(max_microbatches):
        schedule.program(max_ranks, max_microbatches)  # raises the error
    ranks = [count for count in range(1, max_ranks + 1) if schedule.num_chains == 1 or _builds(schedule, count)]
    if not ranks:
        schedule.program(max_ranks, max_microbatches)  # raises the error
    for num_ranks, num_microbatches in product(ranks, range(1, max_microbatches + 1)):
        try:
            program = schedule.program(num_ranks, num_microbatches)
            validate(program, exact=exact and schedule.num_chains == 1)
            validate(lower(program))
        except Exception as error:  # any error of the author's function
            shape = f"{counted(num_ranks, 'rank')} and {counted(num_microbatches, 'micro-batch')}"
            error.add_note(f"this error occurred for schedule {schedule.name!r} with {shape}")
            raise
    if report:
        shown = f"1..{max_ranks}" if len(ranks) == max_ranks else ", ".join(map(str, ranks))
        print(f"{schedule.name}: valid for {shown} ranks and 1..{max_microbatches} micro-batches")
        print(_ROW.format("ranks", "micro-batches", "makespan", "bubble", "above bound", "peak in flight"))
        for num_ranks in sorted({2, 4, ranks[-1]} & set(ranks)):
            _report(schedule, num_ranks, 2 * num_ranks)


def _as_schedule(given: Schedule | OrderFunction) -> Schedule:
    if isinstance(given, Schedule):
        return given
    if not callable(given):
        raise ScheduleError(
            f"schedule must be a Schedule or a function (rank, shape) -> Order; got {given!r}; "
            f"pass pipesched.schedules.get(name), or the function"
        )
    return schedule_of(getattr(given, "__name__", type(given).__name__))(given)


def _builds(schedule: Schedule, num_ranks: int) -> bool:
    try:
        schedule.program(num_ranks, num_ranks)
    except ScheduleError:
        return False
    return True


def _report(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    program = schedule.program(num_ranks, num_microbatches)
    chunks = max(program.shares)
    unit = 1 / chunks
    costs = Costs.uniform(program.num_stages, forward_s=unit, input_grad_s=unit, weight_grad_s=unit)
    trace = simulate(program, costs)
    above = trace.above_bound
    peak = max(trace.peak_in_flight) / chunks
    shares = f"{trace.bubble_ratio:.1%}", "-" if above is None else f"{above:.1%}"
    print(_ROW.format(num_ranks, num_microbatches, f"{trace.makespan_s:g}", *shares, f"{peak:g}"))
