"""Schedule checks: a schedule is proved, simulated and run by stages that check, over ranks and micro-batches."""

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

__all__ = ["check_schedule", "run_fake"]

_ROW = "{:>6}{:>15}{:>10}{:>8}{:>13}{:>16}"


def run_fake(program: Program, costs: Costs | None = None, *, sleeping: bool = False) -> Trace:
    """Run a program, lowered if it is not yet, with fake stages; unit costs unless given.

    On a virtual clock, in this thread, and without validating before; or sleeping: through the local executor, each
    stage sleeping for its time, as an accelerator would leave the processor free. On the clock no message overtakes
    another of its channel: over links a large one may delay those behind it, unlike in ``simulate``. Raises
    DeadlockError where ranks wait for ever (virtual clock), ExecutionError where work is missing, done twice, or done
    without what it needs.
    """
    check_program(program)
    if costs is not None:
        check_costs(costs)
    if not sleeping:
        return run_virtual(program, costs)
    costs = costs or Costs.uniform(program.num_stages)
    validate(program)  # threads that deadlock would wait for ever
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
    """Prove a schedule for every shape up to so many ranks and micro-batches, and print what it costs.

    schedule: a Schedule, or a plain function (rank, shape) -> Order, taken under its own name with one stage a rank.
    exact: also demand ascending micro-batch order (see ``Program.exact``). report: print makespan, bubble, how far the
    makespan is above what no schedule of these stages can beat (``lower_bound``, backwards whole or split, any memory)
    and peak in flight, for some shapes, at unit costs of a rank (a chunk costs 1/v). A schedule of several chains is
    never exact, and may refuse numbers of ranks. Raises what ``validate`` or the function raises, and notes the shape;
    ScheduleError for what is neither.
    """
    schedule = _as_schedule(schedule)
    if not is_count(max_ranks) or not is_count(max_microbatches):
        schedule.program(max_ranks, max_microbatches)  # which says why
    ranks = [count for count in range(1, max_ranks + 1) if schedule.num_chains == 1 or _builds(schedule, count)]
    if not ranks:
        schedule.program(max_ranks, max_microbatches)  # which says why
    for num_ranks, num_microbatches in product(ranks, range(1, max_microbatches + 1)):
        try:
            program = schedule.program(num_ranks, num_microbatches)
            validate(program, exact=exact and schedule.num_chains == 1)
            validate(lower(program))
        except Exception as error:  # whatever the author's function raises
            error.add_note(f"schedule {schedule.name!r} with {num_ranks} ranks and {num_microbatches} micro-batches")
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
            f"what is checked is a Schedule or a function (rank, shape) -> Order; got {given!r}; "
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
