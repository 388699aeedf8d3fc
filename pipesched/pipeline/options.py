"""Options of a Pipeline that few users change: options of the search, of the numerics and of a mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

from pipesched.capture.loss_reduction import LossReduction
from pipesched.checks import check_type, is_count, shown
from pipesched.errors import InputError
from pipesched.planning.search_request import Offload, check_offload
from pipesched.runtime.microbatches import SplitDims
from pipesched.runtime.rank_host import Inputs
from pipesched.runtime.stage.batch_norm import BatchNormMode
from pipesched.simulation.links import Links
from pipesched.simulation.profile import Profile
from pipesched.torch_checks import as_function, as_threads

__all__ = ["Distributed", "Numerics", "Search", "as_options"]

_Options = TypeVar("_Options")


@dataclass(frozen=True, kw_only=True)
class Search:
    """Options of the search for a plan: limits that it must respect, and costs that it need not measure.

    ::

        Pipeline(model, sample, devices=devices, search=Search(memory_limit_bytes=16 << 30))

    Args:
        memory_limit_bytes: the most bytes that a rank may hold, including the states of ``optimizer=``. One number for
            all ranks, or one per rank. Default: None (no limit).
        batch_size: rows of a step. It allows the search to choose the number of micro-batches, provided that neither
            BatchNorm nor the loss combines rows. Default: the sample's rows times the number of micro-batches.
        profile: the layers' costs: a Profile or the path of one. Default: None (the layers are measured).
        links: the speed of the connections between ranks, from `probe_links`. Default: None (transfers count as free).
        offload: whether activations may be moved to the host to keep within a memory limit: "auto", True or False.
            Default: "auto", which is False on CPUs because it would free no memory there.
        effort: the most actions that the search simulates. Default: 200,000.

    Raises:
        InputError: effort is not a whole number of at least 1.
        PartitionError: offload is not one of its three values.

    """

    memory_limit_bytes: int | Sequence[int] | None = None
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
        split_dims: the dimension along which arguments are split into micro-batches: one for all, a sequence, or a dict
            by position or keyword (including "target" and "output"). With None an argument is not split. Default: 0.
        loss_weight: maps a micro-batch's target (its inputs if there is no target) to its weight in the loss. Default:
            its number of rows, or the number of labels over which a loss of torch.nn or the model's own loss averages.
        loss_reduction: how loss_fn reduces over rows, "mean" or "sum". Default: the ``reduction`` of a torch.nn loss,
            else "mean".
        batch_norm: when BatchNorm updates its running statistics: after each "micro-batch", or once per "mini-batch" as
            in a forward of the whole batch. Default: "micro-batch".
        intra_op_threads: CPU threads with which each rank computes. Default: 1.

    Raises:
        ModelTypeError: loss_weight is not a function.
        InputError: intra_op_threads is not a whole number of at least 1.

    """

    split_dims: SplitDims = 0
    loss_weight: Callable[..., Any] | None = None
    loss_reduction: LossReduction | None = None
    batch_norm: BatchNormMode = "micro-batch"
    intra_op_threads: int = 1

    def __post_init__(self) -> None:
        as_function(self.loss_weight, "loss_weight")
        as_threads(self.intra_op_threads)


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Options for the ranks of a ``mesh=``.

    ::

        Pipeline(model, sample, mesh=mesh["pp"], distributed=Distributed(inputs="first"))

    Args:
        inputs: the ranks that pass a batch. With "all", every rank passes the same one. With "first", only the first
            rank passes it; the others call ``step()``, ``evaluate()`` and ``forward()`` without it. Default: "all".
        timeout: seconds that a rank waits for another rank. Default: 60.

    """

    inputs: Inputs = "all"
    timeout: float | None = None


def as_options(given: _Options | None, kind: type[_Options]) -> _Options:
    """Return the given options, or the default options for None. Raises ArgumentError for a value of another type."""
    if given is None:
        return kind()
    name = kind.__name__
    check_type(given, kind, f"{name.lower()}= must be a pipesched.{name}", "pass one, or leave it out")
    return given
