"""Replica checks: check that the replicas of a model stay equal, and raise an error or warn if they would not."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from pipesched.capture.layered_model import LayeredModel, LayersInARow
from pipesched.capture.stage_body import Body
from pipesched.errors import DeviceCountError, GraphError, InputError, ScheduleError
from pipesched.model.state_guard import reachable_parameters
from pipesched.partitioning.result import StageLayers
from pipesched.planning.plan import Plan
from pipesched.planning.program_factory import ProgramFactory
from pipesched.program.program import Program
from pipesched.runtime.stage.batch_norm import BatchNormMode
from pipesched.runtime.stage.buffer_copies import own_buffers
from pipesched.simulation.tensor_layout import LayoutKind, TensorLayout
from pipesched.units import and_more, counted
from pipesched.user_warning import warn

__all__ = [
    "TREE",
    "ZERO_3",
    "NeedsOwnWeights",
    "check_axes",
    "check_layout",
    "check_own_weights",
    "check_replicas",
    "check_tree",
    "warn_of_written",
]


class NeedsOwnWeights(NamedTuple):
    """An option that forbids a layer from using weights of other stages."""

    name: str
    reason: str
    remedy: str
    #: Whether the option also forbids the use of frozen weights of other stages.
    frozen: bool


ZERO_3 = NeedsOwnWeights("zero=3", "each stage gathers its own weights", "pass zero=2", True)
TREE = NeedsOwnWeights(
    "reduction_order='tree'", "each stage adds the gradients of its own weights", "leave reduction_order= out", False
)


def check_replicas(model: nn.Module, programs: ProgramFactory, batch_norm: BatchNormMode) -> None:
    """Check that replicas of a model end every step with equal weights and running statistics.

    Raises ScheduleError if the program updates weights before its last backward, and InputError if the
    running statistics of a replica would include only the rows of that replica.
    """
    program = programs.full.plain
    if program.has_updates:
        raise ScheduleError(
            f"with replicas, a step must update the weights once, after its last backward, because gradients are first "
            f"summed across the replicas; {program.name!r} updates weights earlier; choose a synchronous schedule, "
            f"such as 1f1b, or a mesh without replicas"
        )
    names = [name for name, module in model.named_modules() if _normalises(module)]
    if names and batch_norm == "micro-batch":
        raise InputError(
            f"with replicas, BatchNorm's running statistics must include the rows of all replicas; with "
            f"batch_norm='micro-batch' they would include only each replica's own rows in layer {and_more(names)}; "
            f"pass numerics=Numerics(batch_norm='mini-batch')"
        )


def check_own_weights(
    option: NeedsOwnWeights,
    model: nn.Module,
    layered: LayeredModel,
    cut: StageLayers,
    placement: Sequence[int],
    stage_of: Callable[[nn.Parameter], int | None],
    tied: Collection[nn.Parameter],
) -> None:
    """Check that no layer uses a weight of another stage on the same rank.

    Args:
        option: the option that forbids such uses.
        model: the user's module.
        layered: the model as layers.
        cut: the layers of each stage.
        placement: the rank of each stage.
        stage_of: maps a parameter to the stage that holds it; None for a parameter of a loss module.
        tied: the parameters that several layers use. The check of an nn.Sequential skips these parameters.

    Raises:
        GraphError: a layer of a captured model used such a weight, or a layer of an nn.Sequential refers to such a
            weight.

    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    uses = [(layer, name, stage) for layer, name, stage in layered.reached(cut, frozen=option.frozen)]
    if isinstance(layered, LayersInARow):
        uses += [
            (layer, names[parameter], stage)
            for stage, layers in enumerate(cut)
            for layer in layers
            for parameter in reachable_parameters(layered.layers[layer])
            if parameter in names and parameter not in tied and (option.frozen or parameter.requires_grad)
        ]
    for layer, name, stage in uses:
        home = stage_of(model.get_parameter(name))
        if home is not None and home != stage and placement[home] == placement[stage]:
            raise GraphError(
                f"with {option.name}, a layer may use only weights of its own stage and weights passed to it as "
                f"tensors, because {option.reason}; layer {layer!r} (stage {stage}) uses {name!r} of stage {home} "
                f"through a module or a reference; pass the weight to the layer as an argument, keep this layer and "
                f"the weight's layer in one stage with together=, or {option.remedy}"
            )


def check_tree(model: nn.Module, program: Program, bodies: Sequence[Body], tied: Collection[nn.Parameter]) -> None:
    """Check that all gradients of a model can be summed over the micro-batches in a binary tree.

    Raises ScheduleError for a program that does not add gradients in ascending order of micro-batches, or that updates
    weights while micro-batches are in flight. Raises GraphError for weights that several layers use, and for weights
    that belong to no layer.
    """
    rule = "reduction_order='tree' needs"
    remedy = "or leave reduction_order= out"
    if program.has_updates or not program.exact:
        does = (
            "updates weights while micro-batches are in flight"
            if program.has_updates
            else "adds gradients in a different order"
        )
        raise ScheduleError(
            f"{rule} a program that adds gradients in ascending order of micro-batches and updates the weights once; "
            f"{program.name!r} {does}; choose another schedule, such as 1f1b or zb-v, {remedy}"
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    shared = [names[parameter] for parameter in tied if parameter in names]
    if shared:
        raise GraphError(
            f"{rule} weights that are each used by one layer, because the gradients of a shared weight are first "
            f"summed across its uses; this model uses {counted(len(shared), 'weight')} several times: "
            f"{and_more(shared)}; untie the layers, {remedy}"
        )
    held = {parameter for body in bodies for layer in body.layers.values() for parameter in layer.parameters()}
    others = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in held]
    if others:
        raise GraphError(
            f"{rule} every trained weight to belong to a layer of a stage; this model has weights outside all layers: "
            f"{and_more(others)}; freeze them, {remedy}"
        )


def check_axes(plan: Plan | None, num_ranks: int, num_replicas: int, zero: int, tensor_size: int = 1) -> None:
    """Check that the numbers of replicas and ranks, and ``zero``, are those for which the plan was made.

    Raises DeviceCountError if a number differs, and InputError if ``zero`` differs. Ignores plans without replicas.

    Args:
        plan: the plan.
        num_ranks: the number of ranks of one pipeline; with tensor groups, the number of its groups.
        num_replicas: the number of replicas.
        zero: the value of ``zero=``.
        tensor_size: the number of ranks that split each layer. Not checked if the plan has no tensor groups, because
            layers that were split when they were measured have plans without groups. Default: 1.

    """
    if not isinstance(plan, Plan) or plan.replication is None:
        return
    planned = plan.replication
    groups = {} if plan.tensor is None else {"tp": tensor_size}  # without groups, layers may have been split before
    if plan.mesh != {"dp": num_replicas, "pp": num_ranks, **groups}:
        axes = {"pipeline": num_ranks, "replicate": num_replicas}
        ranks = counted(num_ranks, "rank")
        if tensor_size > 1:
            axes["tensor"] = tensor_size
            ranks = f"{counted(num_ranks, 'tensor group')} of {tensor_size} ranks"
        raise DeviceCountError(
            f"a mesh must have the axes for which the plan was made; the plan has {plan.ranks}, but the pipeline has "
            f"{counted(num_replicas, 'replica')} of {ranks}; pass a mesh with the sizes in plan.mesh ({plan.mesh}), or "
            f"make a plan with axes={axes}"
        )
    if planned.zero != zero:
        raise InputError(
            f"zero= must have the value for which the plan was made; the plan has zero={planned.zero}, but the "
            f"pipeline has zero={zero}; pass "
            f"distributed=Distributed(zero={planned.zero}), or make a plan with zero={zero}"
        )


def check_layout(plan: Plan | None, layout: LayoutKind | TensorLayout) -> None:
    """Check that the ranks of a tensor group divide matrices as the plan says. Ignores plans without tensor groups.

    Raises InputError for another layout.

    Args:
        plan: the plan.
        layout: the value of ``tensor_layout=``.

    """
    if not isinstance(plan, Plan) or plan.tensor is None:
        return
    planned = plan.tensor.layout
    own = TensorLayout.of(layout, planned.size) if layout == planned.kind else layout
    if own != planned:
        raise InputError(
            f"tensor_layout= must be the layout for which the plan was made; the plan has {planned}, but the pipeline "
            f"has {own}; pass distributed=Distributed(tensor_layout=plan.tensor.layout), or make a plan with this "
            f"layout (tensor_layouts=)"
        )


def warn_of_written(model: nn.Module, written: Collection[str]) -> None:
    """Warn about buffers that forwards write to, because such buffers are not combined across replicas.

    ``written`` holds the names of these buffers; buffers of torch's own layers may be missing.
    """
    own = {name for name, part, _ in own_buffers(model) if not _normalises(part)}
    known = {name for name in written if name in own or name.startswith("loss_fn.")}
    modules = model.named_modules()
    names = [*sorted(known), *(name for name, part in modules if _tracks(part) and not _normalises(part))]
    if names:
        warn(
            f"buffers that forwards write to are not combined across replicas, so each replica keeps the values "
            f"computed from its own rows; this model may write to {and_more(names)}; combine them after each step if "
            f"the replicas must be equal, or ignore this warning"
        )


def _normalises(module: nn.Module) -> bool:
    """Whether a module has running statistics that are combined across replicas with ``batch_norm="mini-batch"``."""
    return _tracks(module) and not isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)


def _tracks(module: nn.Module) -> bool:
    return isinstance(getattr(module, "running_mean", None), Tensor)
