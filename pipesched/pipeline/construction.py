"""Construction: builds a Pipeline by choosing a plan, making its programs, cutting the model and starting the ranks."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.capture.layered_model import stages_of
from pipesched.capture.stage_module import Wrap
from pipesched.errors import DeviceCountError
from pipesched.model.agreement import facts_of_model, form_of_sample
from pipesched.pipeline.assembly import Assembly, AssemblySpec
from pipesched.pipeline.auto_plan import AutoPlan
from pipesched.pipeline.cost_book import CostBook
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_host import RankHost, ThreadRanks
from pipesched.tensors.payload import fields_of
from pipesched.torch_checks import as_function, as_optimizer
from pipesched.units import counted

__all__ = ["check_functions", "checked_programs", "choose_plan", "ending_on_error", "facts_of", "start"]


_LOG = logging.getLogger(__name__)


def check_functions(
    *,
    loss_fn: Callable[[Any, Any], Any] | None,
    wrap: Wrap | None,
    optimizer: Callable[[list[Any]], Optimizer] | None,
) -> None:
    """Raise ModelTypeError if one of the user's functions does not accept the arguments that Pipeline passes to it."""
    as_function(loss_fn, "loss_fn", ("output", "target"))
    as_function(wrap, "wrap", ("stage_module", "stage"))
    as_optimizer(optimizer)


def facts_of(model: nn.Module, call: Any, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that must be identical on all ranks of a mesh before a plan is chosen.

    The facts are torch's version, the arguments of Pipeline, and the structure of the model.

    Args:
        model: the user's module.
        call: the sample, as (args, kwargs).
        options: the arguments of Pipeline, keyed by name. Functions and modules are compared by their names.

    """
    said = {f"{name}=": _in_words(value) for name, value in options.items()}
    version = {"the version of torch": str(torch.__version__)}
    return {**version, **said, "the form of the sample": form_of_sample(call), **facts_of_model(model)}


def _in_words(value: Any) -> str:
    """Describe an argument as text that is identical in all processes."""
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if is_dataclass(value):
        return ", ".join(f"{name}={_in_words(own)}" for name, own in fields_of(value).items())
    kind: Any = type(value)
    return str(kind.__qualname__) if kind.__repr__ is object.__repr__ else repr(value)


@contextmanager
def ending_on_error(host: RankHost) -> Iterator[None]:
    """Stop the ranks in all processes if the ``with`` block raises."""
    try:
        yield
    except BaseException as error:
        host.abandon("the construction of a pipeline", error)
        raise


def choose_plan(
    auto_plan: AutoPlan, request: PlanRequest, plan: Plan | None, host: RankHost, book: CostBook
) -> tuple[Plan | None, PlanRequest]:
    """Search for a plan if the user left a choice open, and store the layer costs of the search in ``book``.

    Args:
        auto_plan: the search.
        request: the user's choices.
        plan: the user's plan; None if none was given.
        host: the host of the ranks; rank 0 searches on behalf of all ranks.
        book: the known costs of layers and devices.

    Returns:
        The plan and a request that reproduces it; or None and the unchanged ``request``, if the user gave no plan and
        there was no search.

    """
    if auto_plan.is_wanted(request, plan):
        crowds = auto_plan.ranks_are == "threads"
        result = host.agreed(lambda: auto_plan.find(request, lambda: book.measured(crowds=crowds)))
        plan, book.layers, book.overheads, book.planned, book.size_fit = result
        request = PlanRequest()
    if plan is not None:
        request = request.pinned(plan, list(auto_plan.layered.layers))
    return plan, request


def checked_programs(request: PlanRequest, host: RankHost, spec: AssemblySpec) -> ProgramFactory:
    """Return the programs of a request. Raises ScheduleError or GraphError if the model cannot run the programs."""
    programs = ProgramFactory(
        request, len(host.all_devices), updates=spec.optimizer is not None, norms=spec.updates_by_rules
    )
    programs.check_updates()
    _ = programs.full.training  # raises if the program cannot be lowered
    spec.layered.check(programs.full.plain, threads=isinstance(host, ThreadRanks))
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
    """Make the programs, cut the model into stages, place the stages on the ranks, and return the running plan.

    Args:
        model: the user's model argument. If it is a list with one module per stage, each module becomes a stage.
        spec: the model and the user's options for its stages.
        host: the host of the ranks.
        book: the known costs of layers and devices.
        splitter: splits batches. This function sets the splitter's number of micro-batches.
        plan: the plan to run; None to follow the request.
        request: the schedule, boundaries and similar choices.
        agreed: other values that must be identical in all processes.

    """
    programs = checked_programs(request, host, spec)
    host = host.use(programs.num_ranks, all_ranks=plan is None)
    binds = spec.rules is not None and spec.rules.binds_all_ranks
    if binds and not isinstance(host, ThreadRanks) and len(host.devices) < len(host.all_devices):
        raise DeviceCountError(
            f"with scaler= or on_nonfinite=, every rank of the mesh must hold stages, because an idle rank would not "
            f"detect an overflow; the mesh has {len(host.all_devices)} ranks, but the plan uses {len(host.devices)}; "
            f"use a mesh of {counted(len(host.devices), 'rank')}, or pass schedule= to use all ranks"
        )
    program = programs.full.plain
    pins = Pins(list(spec.layers), request.boundaries, request.together)
    if request.boundaries is None and (starts := stages_of(model, pins.layers, program.num_weights)):
        pins = Pins(pins.layers, starts, request.together)
    stage_cut = book.cut_stages(host, pins, programs, plan)
    host.check(program, (stage_cut.cut, repr(pins), repr(programs.checkpoint), *agreed))
    if spec.wrap is not None or spec.zero == 3:
        book.layers = host.agreed(book.measured)  # measure the layers before their weights are sharded
    assembly = Assembly(spec, host, programs, stage_cut)
    assembly.take_over()
    splitter = replace(splitter, num_microbatches=programs.num_microbatches, fixed=programs.fixed)
    updates = spec.optimizer is not None
    running = RunningPlan(host=host, assembly=assembly, splitter=splitter, seed=spec.initial.seed, updates=updates)
    heading, *stages = str(running).splitlines()
    _LOG.info("made %s", heading)
    for stage in stages:
        _LOG.debug("%s", stage.strip())
    return running
