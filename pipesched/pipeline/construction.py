"""Construction: the steps by which a pipeline is made: choose a plan, make its programs, cut, assemble, start."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from pipesched.capture.layered_model import stages_of
from pipesched.capture.stage_module import Wrap
from pipesched.pipeline.assembly import Assembly, AssemblySpec
from pipesched.pipeline.auto_plan import AutoPlan
from pipesched.pipeline.cost_book import CostBook
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_host import RankHost
from pipesched.torch_checks import as_function, as_optimizer

__all__ = ["check_functions", "checked_programs", "choose_plan", "ending_on_error", "start"]


def check_functions(
    *,
    loss_fn: Callable[[Any, Any], Any] | None,
    wrap: Wrap | None,
    optimizer: Callable[[list[Any]], Optimizer] | None,
) -> None:
    """Raise ModelTypeError where one of the user's functions cannot be called as it will be."""
    as_function(loss_fn, "loss_fn", ("output", "target"))
    as_function(wrap, "wrap", ("stage_module", "stage"))
    as_optimizer(optimizer)


@contextmanager
def ending_on_error(host: RankHost) -> Iterator[None]:
    """End the ranks, in all processes, where what is done in here raises."""
    try:
        yield
    except BaseException as error:
        host.abandon("making a pipeline", error)
        raise


def choose_plan(
    auto_plan: AutoPlan, request: PlanRequest, plan: Plan | None, host: RankHost, book: CostBook
) -> tuple[Plan | None, PlanRequest]:
    """Find the plan to run, where the user left something open. Its search leaves in the book what layers cost.

    Args:
        auto_plan: the search.
        request: what the user asked for.
        plan: the plan that the user gave; None without one.
        host: of the ranks; rank 0 searches for all.
        book: what layers cost.

    Returns:
        The plan, None where the request says all; and the request that leads to it.

    """
    if auto_plan.is_wanted(request, plan):
        crowds = auto_plan.ranks_are == "threads"
        found = host.agreed(lambda: auto_plan.find(request, lambda: book.measured(crowds=crowds)))
        plan, book.layers, book.overheads, book.planned_rows = found
        request = PlanRequest()
    if plan is not None:
        request = request.pinned(plan, list(auto_plan.layered.layers))
    return plan, request


def checked_programs(request: PlanRequest, host: RankHost, spec: AssemblySpec) -> ProgramFactory:
    """The programs for a request. Raises ScheduleError and GraphError where they do not fit the model."""
    programs = ProgramFactory(request, len(host.all_devices), updates=spec.optimizer is not None)
    programs.check_updates()
    _ = programs.full.training  # raises what cannot be lowered
    spec.layered.check(programs.full.plain)
    return programs


def start(
    *,
    model: Any,
    spec: AssemblySpec,
    host: RankHost,
    book: CostBook,
    splitter: Splitter,
    plan: Plan | None,
    request: PlanRequest,
    agreed: tuple[Any, ...],
) -> RunningPlan:
    """Make the programs, cut the model, put its stages on their ranks, and start these.

    Args:
        model: as the user gave it: a list of modules is a stage each.
        spec: the model, and what is asked of it whatever the plan.
        host: of the ranks.
        book: what layers cost.
        splitter: how batches are split, but for the number of micro-batches.
        plan: the plan to run; None: as the request says.
        request: schedule, boundaries and the like.
        agreed: what else all processes must have been given alike.

    """
    programs = checked_programs(request, host, spec)
    host = host.use(programs.num_ranks, all_ranks=plan is None)
    program = programs.full.plain
    pins = Pins(list(spec.layers), request.boundaries, request.together)
    if request.boundaries is None and (starts := stages_of(model, pins.layers, program.num_weights)):
        pins = Pins(pins.layers, starts, request.together)
    stage_cut = book.cut_stages(host, pins, programs, plan)
    host.check(program, (stage_cut.cut, repr(pins), repr(programs.checkpoint), *agreed))
    if spec.wrap is not None:
        book.layers = host.agreed(book.measured)  # layers may be sharded from here on
    assembly = Assembly(spec, host, programs, stage_cut)
    assembly.take_over()
    splitter = replace(splitter, num_microbatches=programs.num_microbatches, fixed=programs.fixed)
    return RunningPlan(host=host, assembly=assembly, splitter=splitter)
