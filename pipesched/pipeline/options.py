"""Options: settings of a Pipeline that few users change, for the search, the numerics and a mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypeVar, get_args

from torch.amp import GradScaler

from pipesched.capture.loss_reduction import LossReduction
from pipesched.checks import check_type, is_count, shown
from pipesched.elastic.recovered import Recovered
from pipesched.errors import InputError
from pipesched.model.parameter_order import ParameterOrder
from pipesched.pipeline.assembly import Survives
from pipesched.planning.search_request import MemoryLimit, Offload, check_offload
from pipesched.runtime.gradients.loss_scale import LossScale
from pipesched.runtime.gradients.rules import GradientRules, OnNonfinite
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.microbatches import SplitDims
from pipesched.runtime.rank_grid import Inputs, RankGrid
from pipesched.runtime.stage.batch_norm import BatchNormMode
from pipesched.simulation.links import Links
from pipesched.simulation.profile import Profile
from pipesched.simulation.tensor_layout import LayoutKind, TensorLayout
from pipesched.tensors.gradient_norm import as_max_norm, as_norm_type
from pipesched.torch_checks import as_function, as_threads

__all__ = ["Distributed", "Numerics", "Search", "as_options"]

_Options = TypeVar("_Options")

#: The weights that each rank holds when a pipeline is made: those of the whole model, or those of its own stages.
Weights = Literal["all", "own"]

#: Where copies of the ranks' states are kept.
Redundant = Literal["neighbour"]

#: What a step does if a rank is lost.
OnFailure = Literal["raise", "recover"]

#: Patterns of module names, and the style in which each of these modules is split over ranks.
TensorParallel = Mapping[str, Any] | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Options of the search for a plan, such as memory limits and known layer costs.

    ::

        Pipeline(model, sample, devices=devices, search=Search(memory_limit_bytes=16 << 30))

    Args:
        memory_limit_bytes: the memory that a rank may hold, including the states of ``optimizer=``, in bytes or as text
            such as "16GB" (10**9 bytes) or "16GiB" (2**30 bytes): one limit for all ranks, or one per rank. Default:
            None (no limit).
        batch_size: the number of rows in a step. If you pass it, the search also chooses the number of micro-batches,
            provided that neither BatchNorm nor the loss combines rows. Default: the sample's rows times the number of
            micro-batches.
        profile: the layers' costs: a Profile, or the path of a saved Profile. Default: None (the layers are measured).
        links: the speed of the connections between ranks, from `probe_links`. Default: None (transfers take no time).
        offload: whether activations may be moved to the host to stay within a memory limit: "auto", True or False.
            Default: "auto", which means False on CPUs, where offloading would free no memory.
        effort: the maximum number of actions that the search simulates. For the schedule ``searched``, the search for
            an order of actions may simulate three times as many. Default: 200,000.

    Raises:
        InputError: effort is not a whole number of at least 1.
        PartitionError: offload is not "auto", True or False.

    """

    memory_limit_bytes: MemoryLimit | None = None
    batch_size: int | None = None
    profile: Profile | str | PathLike[str] | None = None
    links: Links | None = None
    offload: Offload = "auto"
    effort: int = 200_000

    def __post_init__(self) -> None:
        check_offload(self.offload)
        if not is_count(self.effort):
            raise InputError(
                f"effort= must be the number of actions that a search may simulate, at least 1; got "
                f"{shown(self.effort)}; pass a whole number such as 200_000"
            )

    @property
    def is_asked_for(self) -> bool:
        """Whether these options require a search even if schedule and boundaries are given."""
        return (self.batch_size, self.memory_limit_bytes, self.profile) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Options that affect the numerical results of a step.

    ::

        Pipeline(model, sample, devices=devices, numerics=Numerics(split_dims={"mask": None}))

    Args:
        split_dims: the dimension along which arguments are split into micro-batches: one number for all arguments, a
            sequence with one number per positional argument, or a dict keyed by position or name (including "target"
            and "output"). An argument with None instead of a number is not split. In place of a number, an argument can
            have a sequence or a dict with the dimensions of its entries. Default: 0; lists have rows if they have one
            entry for each row.
        loss_weight: a function that maps the target of a micro-batch (the inputs if there is no target) to the weight
            of the micro-batch in the loss. Default: the micro-batch's number of rows, or the number of labels over
            which a torch.nn loss or the model's own loss averages.
        loss_reduction: how loss_fn reduces over rows, "mean" or "sum". Default: the ``reduction`` of a torch.nn loss;
            for any other loss_fn, what its first calls show; for the model's own loss, "mean".
        batch_norm: when BatchNorm updates its running statistics: after each "micro-batch", or once per "mini-batch",
            just as a single forward over the whole batch would. Default: "micro-batch".
        intra_op_threads: the number of CPU threads per rank. Default: 1.
        clip_grad_norm: with ``optimizer=``, the maximum norm of all gradients together. If their norm is larger, they
            are scaled down before the update, as ``Pipeline.clip_grad_norm_`` does. Default: None (not clipped).
        norm_type: the order of the norm that ``clip_grad_norm`` limits; ``math.inf`` for the largest absolute value.
            Default: 2.
        scaler: a ``torch.amp.GradScaler``, for training in float16 under autocast. Backward passes start from the
            scaled loss, and ``step`` returns the unscaled loss. If a gradient of any stage overflows, no stage is
            updated. Without ``optimizer=``, call ``scaler.unscale_(optimizer)``, ``scaler.step(optimizer)`` and
            ``scaler.update()`` after each step, on every rank. Default: None (the loss is not scaled).
        on_nonfinite: how a step reacts to a loss or gradient that is infinite or NaN: "raise" an ExecutionError
            before the update, "skip" the update on all ranks and warn (requires ``optimizer=``), or only "warn". The
            message names the first layer and micro-batch with such a value. With GPUs in a single process, "raise" and
            "warn" react one step later, after the update. Default: None (not checked).
        reduction_order: the order in which the gradients and losses of micro-batches are added. With "sequential", each
            replica adds its micro-batches one after the other, and then the sums of the replicas are added in replica
            order. With "tree", all replicas' micro-batches are added in the order of one binary tree. The results then
            do not depend on the number of replicas, as long as the total number of micro-batches stays the same. A rank
            then holds up to log2(n) additional copies of its gradients, where n is the largest power of two that
            divides its number of micro-batches. Default: "sequential".

    Raises:
        ModelTypeError: loss_weight is not a function.
        InputError: intra_op_threads is not a whole number of at least 1, clip_grad_norm or norm_type is not a number
            above 0, on_nonfinite is unknown or combined with a scaler, or reduction_order is unknown.
        ArgumentError: scaler is not a GradScaler.

    """

    split_dims: SplitDims = 0
    loss_weight: Callable[..., Any] | None = None
    loss_reduction: LossReduction | None = None
    batch_norm: BatchNormMode = "micro-batch"
    intra_op_threads: int = 1
    clip_grad_norm: float | None = None
    norm_type: float = 2.0
    scaler: GradScaler | None = None
    on_nonfinite: OnNonfinite | None = None
    reduction_order: ReductionOrder = "sequential"

    def __post_init__(self) -> None:
        as_function(self.loss_weight, "loss_weight")
        as_threads(self.intra_op_threads)
        if self.clip_grad_norm is not None:
            as_max_norm(self.clip_grad_norm, "clip_grad_norm")
        if as_norm_type(self.norm_type) != 2.0 and self.clip_grad_norm is None:
            raise InputError(
                f"norm_type= may only be passed with clip_grad_norm=, the limit of that norm; got "
                f"norm_type={self.norm_type} without clip_grad_norm=; pass clip_grad_norm= too, or leave norm_type= out"
            )
        check_type(
            self.scaler,
            (GradScaler, type(None)),
            "scaler must be a torch.amp.GradScaler",
            "pass a GradScaler, or leave scaler= out",
        )
        if self.on_nonfinite not in (None, *get_args(OnNonfinite)):
            raise InputError(
                f"on_nonfinite must be one of {', '.join(get_args(OnNonfinite))}; got {shown(self.on_nonfinite)}; "
                f"pass one of them, or leave on_nonfinite= out to train without a check for infinite and NaN values"
            )
        if self.on_nonfinite is not None and self.scaler is not None and self.scaler.is_enabled():
            raise InputError(
                f"scaler= and on_nonfinite= must not be combined, because a scaler already skips updates with infinite "
                f"gradients; got on_nonfinite={self.on_nonfinite!r} with scaler=; leave one of the two out"
            )

        if self.reduction_order not in get_args(ReductionOrder):
            raise InputError(
                f"reduction_order must be one of {', '.join(get_args(ReductionOrder))}; got "
                f"{shown(self.reduction_order)}; pass 'tree' if results must not depend on the number of replicas, or "
                f"leave reduction_order= out"
            )

    def check_reduction_order(self, *, num_replicas: int, zero: int) -> None:
        """Raise InputError if the results would depend on the number of replicas even with the order "tree"."""
        if self.reduction_order != "tree":
            return
        if num_replicas & (num_replicas - 1):
            raise InputError(
                f"reduction_order='tree' adds the sums of replicas in pairs, so the number of replicas must be a power "
                f"of two; this pipeline has {num_replicas} replicas; use for example "
                f"{1 << num_replicas.bit_length() - 1}, or leave reduction_order= out"
            )
        if zero >= 2 and self.clip_grad_norm is not None:
            raise InputError(
                f"with zero=2 or 3, the gradient norm for clipping is combined from one norm per replica, so its "
                f"bits depend on the number of replicas despite reduction_order='tree'; got zero={zero} with "
                f"clip_grad_norm={self.clip_grad_norm}; pass zero=1 or 0, or leave reduction_order= or clip_grad_norm= "
                f"out"
            )

    def gradient_rules(self, order: ParameterOrder, *, has_optimizers: bool, lags: bool) -> GradientRules | None:
        """Return the rules for gradients before an update; None if there are no rules.

        Raises InputError for an option that requires ``optimizer=`` if there are no optimizers.
        """
        scaler = self.enabled_scaler
        if not self.needs_norms:
            return None
        clip = f"clip_grad_norm={self.clip_grad_norm}"
        for option, passed, remedy in (
            (clip, self.clip_grad_norm is not None, "call pipe.clip_grad_norm_() before your optimizer's step"),
            ("on_nonfinite='skip'", self.on_nonfinite == "skip", "pass on_nonfinite='raise', and catch the error"),
        ):
            if passed and not has_optimizers:
                raise InputError(
                    f"{option} requires step() to update the weights; without optimizer=, step() makes no updates; "
                    f"pass optimizer=, or {remedy}"
                )
        return GradientRules(
            order,
            max_norm=self.clip_grad_norm,
            norm_type=as_norm_type(self.norm_type),
            scale=None if scaler is None else LossScale(scaler),
            on_nonfinite=self.on_nonfinite,
            lags=lags,
        )

    @property
    def needs_norms(self) -> bool:
        """Whether updates inside a step wait for the norm of all gradients."""
        return self.clip_grad_norm is not None or self.enabled_scaler is not None or self.on_nonfinite is not None

    @property
    def enabled_scaler(self) -> GradScaler | None:
        """The enabled scaler; None if there is no scaler or the scaler is disabled."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    @property
    def agreed(self) -> tuple[Any, ...]:
        """The options that must be identical in all processes, in a form that can be compared."""
        scaler = None if self.scaler is None else sorted(self.scaler.state_dict().items())
        clipping = self.clip_grad_norm, self.norm_type
        return self.intra_op_threads, self.batch_norm, *clipping, scaler, self.on_nonfinite, self.reduction_order


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Options for the ranks of a ``mesh=``.

    ::

        Pipeline(model, sample, mesh=mesh["pp"], distributed=Distributed(inputs="first"))

    Args:
        inputs: the ranks that pass a batch. With "all", every rank passes the same batch. With "first", only the first
            rank passes a batch; the others call ``step()``, ``evaluate()`` and ``forward()`` without one. Default:
            "all".
        weights: the weights that each rank holds when the pipeline is made. With "all", every rank holds the same
            model, and construction compares a few values of each weight and buffer. With "own", a rank may hold other
            values for the weights that it does not train, as when each rank has loaded only its own stages. Weights
            on the meta device are not compared. Default: "all".
        timeout: the number of seconds that a rank waits for another rank. Default: 60.
        zero: with ``optimizer=`` and several replicas, which data is split across the replicas. With 1, each replica
            updates its own part of every stage's weights, and holds the optimizer states of that part only. With 2,
            each replica also keeps only that part of the summed gradients. With 3, each replica also holds only that
            part of the weights between steps; a step gathers the weights of a stage before they are used, and frees
            them afterwards. Default: 0 (nothing is split).
        gather_once: whether a step gathers sharded weights once and keeps them until the last backward of their stage.
            If False and ``zero=3``, a step frees the weights of a stage while other stages of the same rank run, and
            gathers the weights again. For modules that ``wrap=`` shards with ``fully_shard``, True also reduces the
            gradients only once, and False leaves both decisions to the FSDP flags of the modules. The default FSDP
            flags gather the weights in each forward and backward of a micro-batch, and reduce the gradients in each
            backward. False takes longer but needs less memory. Default: None (True, unless ``zero=3`` and only False
            stays within ``memory_limit_bytes``).

        replan_every: the number of steps after which the pipeline looks for a faster plan, as `Pipeline.replan` does,
            and logs what it found. It searches only if the times of the ranks have changed. Needs ``optimizer=``, and
            a schedule that ends each step before the next. Default: None (only when you call ``replan``).

        redundancy: with "neighbour", the job survives the loss of a rank: the weights and the optimizer states of each
            rank's stages have a copy in the host memory of the next rank, which runs the same updates again. With
            several replicas, the other replicas are the copies. Needs ``optimizer=``. Default: None (no copies; a rank
            that fails ends the pipeline on all ranks).
        on_failure: what ``step`` does if a rank is lost: "raise" a `RankLost`, after which you may call
            ``pipe.recover()``, or "recover" and run the same step again. Default: "raise".
        on_recovery: a function that is called with the `Recovered` after each recovery, for example to tell a data
            loader its new replica. Default: None.
        tensor_parallel: the layers that are split over the ranks of the mesh dimension "tp" (or of the axis "tensor"),
            and how: a mapping from patterns of module names to styles, such as ``{"blocks.*.up": "column",
            "blocks.*.down": "row"}``, or "auto" for models of transformers. Each rank of the dimension then holds a
            block of the weights of these layers. Default: None (every layer is whole).
        tensor_layout: with ``tensor_parallel=``, whether these ranks divide each matrix in one dimension ("1d", as
            Megatron-LM does), two ("2d"), two and a half ("2.5d") or three ("3d"). In more than one, the activations
            between layers are divided, too. "2d" needs q x q ranks, "2.5d" d x q x q and "3d" l x l x l; pass a
            `TensorLayout` to choose d. Default: "1d".
        rendezvous: with ``redundancy=``, the path of a file in which the job publishes the addresses of its ranks, so
            that processes can join it. A process joins if it makes the same pipeline without ``mesh=``, but with this
            path. Default: None (no process can join).

    Raises:
        InputError: zero, weights, replan_every, redundancy or on_failure has an invalid value.

    """

    inputs: Inputs = "all"
    weights: Weights = "all"
    timeout: float | None = None
    zero: int = 0
    gather_once: bool | None = None
    replan_every: int | None = None
    redundancy: Redundant | None = None
    on_failure: OnFailure = "raise"
    on_recovery: Callable[[Recovered], Any] | None = None
    rendezvous: str | PathLike[str] | None = None
    tensor_parallel: TensorParallel | None = None
    tensor_layout: LayoutKind | TensorLayout = "1d"

    def __post_init__(self) -> None:
        as_function(self.on_recovery, "on_recovery", ("recovered",))
        for name, value, known in (
            ("redundancy", self.redundancy, (None, *get_args(Redundant))),
            ("on_failure", self.on_failure, get_args(OnFailure)),
        ):
            if value not in known:
                raise InputError(
                    f"{name}= must be one of {', '.join(map(repr, known))}; got {shown(value)}; pass one of them"
                )
        options = {"on_failure='recover'": self.on_failure != "raise", "on_recovery=": self.on_recovery is not None}
        options["rendezvous="] = self.rendezvous is not None
        option = next((option for option, is_passed in options.items() if is_passed), "")
        if self.redundancy is None and option:
            raise InputError(
                f"a pipeline recovers from copies of its ranks' states; {option} was passed without redundancy=; pass "
                f"redundancy='neighbour', too"
            )
        if self.replan_every is not None and not is_count(self.replan_every):
            raise InputError(
                f"replan_every= must be a number of steps, at least 1; got {shown(self.replan_every)}; pass a number "
                f"such as 200, or leave it out"
            )
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise InputError(
                f"zero= must be 0 (nothing is split across replicas), 1 (optimizer states are split), 2 (also summed "
                f"gradients) or 3 (also weights); got {shown(self.zero)}; pass one of them"
            )
        if self.weights not in get_args(Weights):
            raise InputError(
                f"weights= must be 'all' (every rank holds the same model) or 'own' (each rank holds the weights of "
                f"its own stages); got {shown(self.weights)}; pass one of them"
            )
        if self.tensor_parallel not in (None, "auto") and not isinstance(self.tensor_parallel, Mapping):
            raise InputError(
                f"tensor_parallel= must map patterns of module names to styles, or be 'auto'; got "
                f"{shown(self.tensor_parallel)}; for example, pass {{'blocks.*.up': 'column', 'blocks.*.down': 'row'}}"
            )
        if not isinstance(self.tensor_layout, TensorLayout) and self.tensor_layout not in get_args(LayoutKind):
            raise InputError(
                f"tensor_layout= must be one of {', '.join(map(repr, get_args(LayoutKind)))}, or a TensorLayout; got "
                f"{shown(self.tensor_layout)}; pass one of them"
            )
        if self.gather_once not in (None, True, False):
            raise InputError(
                f"gather_once= must be True, False or None; got {shown(self.gather_once)}; pass one of them"
            )

    @property
    def agreed(self) -> dict[str, Any]:
        """The options that must be identical in all processes, keyed by name."""
        names = ("inputs", "gather_once", "zero", "weights", "replan_every", "tensor_parallel", "tensor_layout")
        return {name: getattr(self, name) for name in names}

    def survives(self, *, joins: bool) -> Survives | None:
        """Return whether the job goes on after the loss of a rank; None if it ends then.

        ``joins`` states whether this process has no mesh, and so is about to join a job.
        """
        if self.redundancy is None:
            return None
        if joins and self.rendezvous is not None:
            return "joins"
        return "told" if self.on_recovery is not None or self.on_failure == "raise" else "untold"

    def check_tensor_parallel(self, grid: RankGrid | None, *, wraps: bool, compiles: bool) -> None:
        """Raise InputError if layers cannot be split over ranks.

        Args:
            grid: the ranks of the mesh; None if the pipeline has no mesh.
            wraps: whether the user passed ``wrap=``.
            compiles: whether the user passed ``compile=``.

        """
        if self.tensor_parallel is None:
            return
        rule = "tensor_parallel= splits layers over the ranks of a mesh dimension"
        if grid is None:
            raise InputError(
                f"{rule}; this pipeline runs in one process, without mesh=; pass a mesh with a dimension 'tp', or "
                f"leave tensor_parallel= out"
            )
        if not grid.planes:
            raise InputError(
                f"{rule}; the mesh of this pipeline has no dimension 'tp', and axes= names none; use a mesh such as "
                f"init_device_mesh('cpu', ({len(grid.all_devices)}, 2), mesh_dim_names=('pp', 'tp')), or pass "
                f"axes={{'pipeline': ..., 'tensor': ...}}"
            )
        if wraps:
            raise InputError(
                f"{rule}, so each rank holds blocks of their weights, which wrap= could not tell from whole weights; "
                f"this pipeline has both options; split the layers in wrap= as well, or leave one of the two out"
            )
        if compiles:
            raise InputError(
                f"{rule}, and a split layer draws its block of the dropout mask of the whole layer, which compiled "
                f"code cannot do; this pipeline has tensor_parallel= and compile=; leave one of the two out"
            )

    def check_replan(self, *, has_optimizers: bool, is_asynchronous: bool) -> None:
        """Raise InputError if the pipeline cannot change its plan between two steps without being asked."""
        if self.replan_every is None or (has_optimizers and not is_asynchronous):
            return
        has = "a schedule whose steps overlap" if has_optimizers else "no optimizer="
        remedy = "choose another schedule" if has_optimizers else "pass optimizer="
        raise InputError(
            f"replan_every= moves weights and optimizer states between two steps, so it needs optimizer= and a "
            f"schedule that ends each step before the next; this pipeline has replan_every={self.replan_every} and "
            f"{has}; {remedy}, or call replan() yourself"
        )

    def check_zero(self, *, num_replicas: int, has_optimizers: bool) -> None:
        """Raise InputError if ``zero`` is set, but there is only one replica or no optimizer."""
        if self.zero and (num_replicas == 1 or not has_optimizers):
            has = f"{num_replicas} replica{'s' * (num_replicas > 1)} and {'an' if has_optimizers else 'no'} optimizer="
            raise InputError(
                f"zero={self.zero} splits the optimizer states of a pipeline across its replicas, so it needs several "
                f"replicas and optimizer=; this pipeline has {has}; pass both, or leave zero= out"
            )


def as_options(given: _Options | None, kind: type[_Options]) -> _Options:
    """Return the given options, or the default options for None. Raises ArgumentError for a value of another type."""
    if given is None:
        return kind()
    name = kind.__name__
    option = name.lower()
    check_type(given, kind, f"{option}= must be a pipesched.{name}", f"pass {name}(...), or leave {option}= out")
    return given
