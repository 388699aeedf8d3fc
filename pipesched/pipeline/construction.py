"""Construction: builds a Pipeline by choosing a plan, making its programs, cutting the model and starting the ranks."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import distributed as torch_distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipesched.capture.layered_model import stages_of
from pipesched.capture.stage_module import Wrap
from pipesched.devices.selection import as_devices
from pipesched.errors import DeviceCountError
from pipesched.model.agreement import facts_of_model, facts_of_weights, form_of_sample
from pipesched.pipeline.assembly import Assembly, AssemblySpec
from pipesched.pipeline.auto_plan import AutoPlan
from pipesched.pipeline.checks.redundancy_checks import Obstacle, check_redundancy
from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.options import Distributed, Numerics
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.sent_values import learn_step_types
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.profiling.tensor_link import measured_link
from pipesched.runtime.collectives import RankCollectives
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_grid import Axes, RankGrid
from pipesched.runtime.rank_host import RankHost, host_for, host_of_threads
from pipesched.tensors.payload import fields_of
from pipesched.torch_checks import as_function, as_optimizer
from pipesched.units import counted
from pipesched.user_warning import warn

__all__ = [
    "binds_all_ranks",
    "check_agreement",
    "check_functions",
    "check_idle_ranks",
    "checked_programs",
    "choose_plan",
    "made_host",
    "making",
    "start",
    "warn_of_lone_processes",
]


_LOG = logging.getLogger(__name__)
_NO_WRAP = "leave wrap= out"
_SAME_WEIGHTS = (
    "seed all ranks alike before you build the model, and load the same checkpoint on every rank; if each rank has "
    "loaded only the weights of its own stages, pass distributed=Distributed(weights='own')"
)


def made_host(
    devices: Sequence[Any] | None,
    mesh: DeviceMesh | None,
    axes: Axes | None,
    numerics: Numerics,
    distributed: Distributed,
) -> RankHost:
    """Return the host of a pipeline's ranks, from the arguments of Pipeline. Collective under a mesh."""
    threads = numerics.intra_op_threads
    if mesh is None:
        distributed.check_tensor_parallel(None, wraps=False, compiles=False)
    if distributed.survives(joins=mesh is None) == "joins":
        return host_of_threads(as_devices(devices or ["cpu"]), threads)  # until this process has joined the job
    host = host_for(devices, mesh, threads, distributed.timeout, distributed.inputs, axes, numerics.reduction_order)
    return host if distributed.tensor_parallel is None else replace(host, tensor_link=measured_link(host))


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


def check_agreement(collectives: RankCollectives, model: nn.Module, call: Any, options: Mapping[str, Any]) -> None:
    """Check, before a plan is chosen, that all ranks of a mesh make the same pipeline.

    The ranks compare torch's version, the arguments of Pipeline, and the structure and the weights of the model.

    Args:
        collectives: let the ranks compare.
        model: the user's module.
        call: the sample, as (args, kwargs).
        options: the arguments of Pipeline, keyed by name. Functions and modules are compared by their names.

    Raises:
        ExecutionError: the ranks differ. The error names the differences.

    """
    said = {f"{name}=": _in_words(value) for name, value in options.items()}
    facts = {"the version of torch": str(torch.__version__), **said, "the form of the sample": form_of_sample(call)}
    collectives.agree_on(lambda: {**facts, **facts_of_model(model)}, "make the same pipeline on every rank")
    if options["weights"] == "all":
        collectives.agree_on(lambda: facts_of_weights(model, partial(_in_planes, collectives)), _SAME_WEIGHTS)


def _in_planes(collectives: RankCollectives, value: Any) -> list[Any]:
    """All-gather a value over the processes of this replica in all planes."""
    return [*chain(*collectives.gather_over_planes(collectives.gathered(value)))]


def _check_survival(spec: AssemblySpec, grid: RankGrid, programs: ProgramFactory) -> None:
    """Raise InputError if the job cannot go on after the loss of a rank."""
    is_told = spec.survives == "told"
    obstacles = [
        Obstacle(
            spec.optimizer is None, "the copy of a state runs the updates again, and there is no optimizer=", "pass it"
        ),
        Obstacle(
            programs.streams,
            f"the steps of {programs.full.plain.name!r} overlap, so the ranks have no common version",
            "choose a schedule that ends each step before the next, such as 1f1b",
        ),
        Obstacle(spec.wrap is not None, "wrap= has changed each stage as a whole, so its layers cannot move", _NO_WRAP),
        Obstacle(spec.zero > 0, f"with zero={spec.zero} replicas are no copies of each other", "pass zero=0"),
        Obstacle(
            len(grid.rows) > 1 and not is_told,
            "a loss changes the number of replicas, so your data loader must divide its batches anew",
            "pass on_recovery=, or on_failure='raise'",
        ),
    ]
    check_redundancy(grid, (spec.model, spec.loss_fn), obstacles)


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
def making(host: RankHost) -> Iterator[None]:
    """Stop the ranks in all processes if the ``with`` block raises. In it, split layers run in each process alone."""
    try:
        with host.alone():
            yield
    except BaseException as error:
        host.executor.abandon("the construction of a pipeline", error)
        raise


def choose_plan(
    auto_plan: AutoPlan, request: PlanRequest, plan: Plan | None, collectives: RankCollectives, cost_model: CostModel
) -> tuple[Plan | None, PlanRequest]:
    """Search for a plan if the user left a choice open, and store the layer costs of the search in ``cost_model``.

    Args:
        auto_plan: the search.
        request: the user's choices.
        plan: the user's plan; None if none was given.
        collectives: send the plan to all ranks; rank 0 searches on behalf of all ranks.
        cost_model: the known costs of layers and devices.

    Returns:
        The plan and a request that reproduces it; or None and the unchanged ``request``, if the user gave no plan and
        there was no search.

    """
    if auto_plan.is_wanted(request, plan):
        crowds = auto_plan.ranks_are == "threads"
        result = collectives.agreed(lambda: auto_plan.find(request, lambda: cost_model.measured(crowds=crowds)))
        plan, cost_model.layers, cost_model.overheads, cost_model.planned, cost_model.size_fit = result
        cost_model.notes = plan.notes
        request = PlanRequest()
    if plan is not None:
        request = request.pinned(plan, list(auto_plan.layered.layers))
    return plan, request


def warn_of_lone_processes(mesh: Any) -> None:
    """Warn if several processes each make a pipeline with devices=, so that each trains the whole model by itself."""
    if mesh is not None:
        return
    size = 1
    if torch_distributed.is_available() and torch_distributed.is_initialized():
        size = torch_distributed.get_world_size()
    of_launcher = os.environ.get("WORLD_SIZE", "")  # as torchrun sets it
    size = max(size, int(of_launcher) if of_launcher.isdecimal() else 1)
    if size > 1:
        warn(
            f"each of {size} processes makes a pipeline with devices= and trains the whole model by itself; to divide "
            f"the model among the processes, pass mesh=; if each process is meant to train its own copy, ignore this "
            f"warning"
        )


def checked_programs(request: PlanRequest, grid: RankGrid, spec: AssemblySpec) -> ProgramFactory:
    """Return the programs of a request. Raises ScheduleError or GraphError if the model cannot run the programs."""
    programs = ProgramFactory(
        request,
        len(grid.all_devices),
        updates=spec.optimizer is not None,
        norms=spec.updates_by_rules,
        redundancy=spec.keeps_copies(grid),
    )
    programs.check_updates()
    _ = programs.full.training  # raises if the program cannot be lowered
    spec.layered.check(programs.full.plain, threads=grid.in_one_process)
    return programs


def binds_all_ranks(spec: AssemblySpec, grid: RankGrid) -> bool:
    """Return whether every rank must hold stages, because it must know whether the others found an overflow."""
    return spec.rules is not None and spec.rules.binds_all_ranks and not grid.in_one_process


def check_idle_ranks(spec: AssemblySpec, grid: RankGrid) -> None:
    """Raise DeviceCountError if a rank of the grid holds no stages, although every rank must."""
    if binds_all_ranks(spec, grid) and grid.num_idle:
        raise DeviceCountError(
            f"with scaler= or on_nonfinite=, every rank of the mesh must hold stages, because an idle rank would not "
            f"detect an overflow; the mesh has {len(grid.all_devices)} ranks, but the plan uses {len(grid.devices)}; "
            f"use a mesh of {counted(len(grid.devices), 'rank')}, or pass schedule= to use all ranks"
        )


def start(
    *,
    model: Any,
    spec: AssemblySpec,
    host: RankHost,
    cost_model: CostModel,
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
        cost_model: the known costs of layers and devices.
        splitter: splits batches. This function sets the splitter's number of micro-batches.
        plan: the plan to run; None to follow the request.
        request: the schedule, boundaries and similar choices.
        agreed: other values that must be identical in all processes.

    """
    programs = checked_programs(request, host.grid, spec)
    host = host.use(programs.num_ranks, all_ranks=plan is None)
    check_idle_ranks(spec, host.grid)
    program = programs.full.plain
    pins = Pins(list(spec.layers), request.boundaries, request.together)
    if request.boundaries is None and (starts := stages_of(model, pins.layers, program.num_weights)):
        pins = Pins(pins.layers, starts, request.together)
    stage_cut = cost_model.cut_stages(host, pins, programs, plan)
    host.collectives.check_plan(program, (stage_cut.cut, repr(pins), repr(programs.checkpoint), *agreed))
    if spec.survives is not None and spec.survives != "joins":
        _check_survival(spec, host.grid, programs)
    if spec.wrap is not None or spec.zero == 3 or spec.survives is not None:
        # measure the layers before their weights are sharded, or for the case that rank 0 is lost
        cost_model.agree(host.collectives.agreed(cost_model.measured))
    learn_step_types(host.collectives)
    assembly = Assembly(spec, host, programs, stage_cut)
    assembly.adopt_optimizers()
    splitter = replace(splitter, num_microbatches=programs.num_microbatches, fixed=programs.fixed)
    updates = spec.optimizer is not None
    running = RunningPlan(host=host, assembly=assembly, splitter=splitter, seed=spec.initial.seed, updates=updates)
    heading, *stages = str(running).splitlines()
    _LOG.info("made %s", heading)
    for stage in stages:
        _LOG.debug("%s", stage.strip())
    return running
