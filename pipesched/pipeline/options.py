"""Options of a pipeline that few users change, grouped by what reads them: the search, the numbers, the processes."""

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
    """What the search for a plan knows and must respect.

    ::

        Pipeline(model, sample, devices=devices, search=Search(memory_limit_bytes=16 << 30))

    Args:
        memory_limit_bytes: what a rank may hold, the states of ``optimizer=`` included: one number for all ranks, or
            one for each; default: no limit.
        batch_size: rows of a step. With it the search may choose micro-batches of another size than the sample's, if
            neither BatchNorm nor the loss looks across rows (a loss of torch.nn, a model's own over labels, or one
            with a ``loss_weight``); default: the sample's rows times the number of micro-batches.
        profile: what layers cost, a Profile or the path of one; default: layers are measured.
        links: how fast ranks send to each other, as `probe_links` measures it; with it, what crosses between stages
            counts.
        offload: whether a memory limit may move activations to the host's memory; default: "auto", not on CPUs, where
            that gives no memory back.
        effort: how many actions the search simulates at most; default: 200,000.

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
                f"effort is how many actions a search simulates, a whole number; got {shown(self.effort)}; pass "
                f"such as 200_000"
            )

    @property
    def is_asked_for(self) -> bool:
        """Whether an option here asks for a search, also where schedule and boundaries are given."""
        return (self.batch_size, self.memory_limit_bytes, self.profile) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What the numbers of a step depend on, beside model, batch and seed.

    ::

        Pipeline(model, sample, devices=devices, numerics=Numerics(split_dims={"mask": None}))

    Args:
        split_dims: the dim along which arguments are split into micro-batches, one for all, a sequence, or a dict by
            position or keyword; None passes an argument whole; default: 0.
        loss_weight: ``loss_weight(target)``, or of the inputs where there is no target -> the weight of a
            micro-batch's loss; default: what a mean loss of torch.nn divides by (rows, or targets that are not
            ignore_index, by their classes' weight), the labels over which a model with ``labels`` takes its own mean
            loss, else rows.
        loss_reduction: "mean" or "sum", how ``loss_fn`` reduces; default: as a loss of torch.nn says, else "mean".
        batch_norm: whether running statistics of BatchNorm move with each "micro-batch" (the default), or once a
            "mini-batch", as in one forward of the whole batch.
        intra_op_threads: threads with which each rank computes; default: 1.

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
    """How the ranks of a ``mesh=`` work together.

    ::

        Pipeline(model, sample, mesh=mesh["pp"], distributed=Distributed(inputs="first"))

    Args:
        inputs: who passes a batch: "all" ranks the same one (the default), or the "first" rank alone; the others then
            call ``step()``, ``evaluate()`` and ``forward()`` without arguments.
        timeout: seconds that a rank waits for another one; default: 60.

    """

    inputs: Inputs = "all"
    timeout: float | None = None


def as_options(given: _Options | None, kind: type[_Options]) -> _Options:
    """The options as given; the default ones for None. Raises ArgumentError for something else."""
    if given is None:
        return kind()
    name = kind.__name__
    check_type(given, kind, f"{name.lower()}= takes a pipesched.{name}", "pass one, or leave it out")
    return given
