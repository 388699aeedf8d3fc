"""Axes search: divides ranks into pipelines, replicas and tensor groups, for the shortest simulated step.

Each division of the ranks is searched separately (`pipesched.planning.tuner`), with the batch of one replica. The first
pass evaluates only 1F1B for each division. The stages of this 1F1B plan give a lower bound on the division's step time.
Of two divisions that differ only in the numbering of the ranks, the faster one goes on. The second pass searches the
divisions in full, in the order of their promise: the mean of the step of 1F1B and the bound. It begins with the most
promising value of ``zero=`` for each depth of the pipelines, because values of ``zero=`` differ less than depths. It
leaves out divisions whose bound is not below the best step time, and ends when it has used up its effort.

If the user allows it, ranks also form tensor groups that split each layer. For each size of the groups, and for each
layout of their ranks in one to three dimensions, the layers get the costs of one rank of a group, and one rank of each
group is divided into pipelines and replicas as above.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pipesched.checks import check_type, is_count, is_whole, shown
from pipesched.errors import InputError, MemoryLimitError, PartitionError
from pipesched.planning.candidates import microbatch_counts
from pipesched.planning.evaluated_candidate import WORTH, EvaluatedCandidate, simplest
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.search_request import MemoryLimit, SearchRequest
from pipesched.planning.tuner import Tuner, find_plan
from pipesched.program.completion import Completion
from pipesched.simulation.links import Links
from pipesched.simulation.profile import Profile
from pipesched.simulation.replication import ZERO_LEVELS, ReplicaCosts, Replication
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_costs import TensorCosts, can_be_split, without_products
from pipesched.simulation.tensor_layout import LayoutKind, TensorLayout
from pipesched.units import and_more, counted

__all__ = [
    "Axes",
    "AxesRequest",
    "TensorLayouts",
    "TensorSizes",
    "Zero",
    "check_tensor",
    "find_axes",
    "tensor_sizes",
]

#: The number of ranks per pipeline and the number of replicas, as {"pipeline": 8, "replicate": 8}, or "auto". A mapping
#: can also have the number of ranks that split each layer ("tensor").
Axes = Literal["auto"] | Mapping[str, int]

#: The ZeRO level, which determines the tensors that are split across replicas: 0, 1, 2, 3, or "auto".
Zero = Literal["auto"] | int

#: The numbers of ranks that may split each layer: one number, or several.
TensorSizes = int | Sequence[int]

#: The layouts of the ranks that split each layer: one kind, or several.
TensorLayouts = LayoutKind | Sequence[LayoutKind]

#: The values of zero= that "auto" tries, and whether weights are gathered only once per step. zero=1 is not tried,
#: because zero=1 never needs less peak memory than zero=2, and sends more bytes. zero=3 needs less memory than zero=2
#: only if weights are gathered for each use.
_TRIED_LEVELS = ((0, True), (2, True), (3, False))
_EFFORT = 8_000_000  # actions to simulate in all full searches together
_SHOWN = 12  # number of alternatives to list
_ANY_STEP_S = 1e300  # no step takes as long


@dataclass(frozen=True, kw_only=True)
class AxesRequest:
    """A request for a plan with replicas: the ranks and the batch of all replicas together, and the user's choices."""

    profile: Profile
    #: The total number of ranks in all replicas.
    num_ranks: int
    #: The number of rows in a batch, summed over all replicas.
    batch_size: int
    #: The user's choices for the pipeline of one replica, such as the number of micro-batches in this replica.
    request: PlanRequest
    axes: Axes = "auto"
    zero: Zero = "auto"
    #: The memory limit of every rank. None: no limit.
    memory_limit_bytes: MemoryLimit | None = None
    #: The links between all ranks. None: the links of the profile's machine.
    links: Links | None = None
    #: The numbers of ranks that may split each layer. A mapping in ``axes`` states this number itself.
    tensor: TensorSizes = 1
    #: Whether these ranks also divide the sequence between the split parts.
    sequence_parallel: bool = False
    #: The kinds of layouts in which these ranks may divide matrices.
    tensor_layouts: TensorLayouts = ("1d",)
    #: Other arguments of `SearchRequest.of`.
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        limit = self.memory_limit_bytes
        if limit is not None and not isinstance(limit, int | float | str):
            raise PartitionError(
                f"with axes=, all ranks have the same memory limit, because the search decides which stages each rank "
                f"runs; got memory_limit_bytes={shown(limit)}; pass one number"
            )
        if self.zero != "auto" and (not is_whole(self.zero) or self.zero not in ZERO_LEVELS):
            raise PartitionError(f"zero= must be 'auto', 0, 1, 2 or 3; got {shown(self.zero)}; choose one of them")
        check_tensor(self.axes, self.tensor, self.sequence_parallel, self.tensor_layouts)
        if max(self.tensor_sizes) > 1 and not can_be_split(self.profile):
            raise PartitionError(
                f"a tensor group can divide only what the profile says can be split; got the sizes "
                f"{', '.join(map(str, self.tensor_sizes))} of tensor groups for a profile without split_forward in any "
                f"layer; measure the model with pipesched.profile(tensor_parallel=...), add the column split_forward "
                f"to the table of layers (docs/howto/tables.md), or leave tensor= out"
            )
        if (
            max(self.tensor_sizes) > 1
            and {*self.layout_kinds} != {"1d"}
            and (unknown := without_products(self.profile))
        ):
            raise PartitionError(
                f"layouts of two and three dimensions exchange blocks of the matrices of products; the profile has no "
                f"sizes of products for {and_more(unknown)}; add the "
                f"columns first_input_bytes, first_output_bytes, second_input_bytes and second_output_bytes to the "
                f"table of layers (docs/howto/tables.md), or pass tensor_layouts='1d'"
            )
        if not isinstance(self.axes, str):
            self._check_mapping(self.axes)

    def _check_mapping(self, axes: Mapping[str, int]) -> None:
        """Raise PartitionError unless the product of the axes is the number of ranks, and replicas divide the batch."""
        if math.prod(axes.values()) != self.num_ranks:
            raise PartitionError(
                f"the product of the numbers in axes= must be the number of ranks; got {shown(axes)} for "
                f"{counted(self.num_ranks, 'rank')}; change axes= or the number of ranks"
            )
        if self.batch_size % axes["replicate"]:
            raise PartitionError(
                f"the number of replicas must divide the batch; {self.batch_size} rows cannot be divided evenly among "
                f"{axes['replicate']} replicas; correct batch_size= or axes="
            )

    @property
    def tensor_sizes(self) -> list[int]:
        """The numbers of ranks that may split each layer, in ascending order."""
        return tensor_sizes(self.axes, self.tensor)

    def divisions(self) -> list[SearchRequest]:
        """Return the search requests of `searches`. Raises PartitionError if there is no allowed division."""
        found = list(self.searches())
        if not found:
            raise _no_division(self)
        return found

    def searches(self) -> Iterator[SearchRequest]:
        """Yield a search request for each allowed division of the ranks into pipelines and replicas.

        The division that needs the least memory comes last.
        """
        for size in self.tensor_sizes:
            if self.num_ranks % size == 0:
                for tensor in self._groups(size):
                    yield from self._searches_of(tensor)

    @property
    def layout_kinds(self) -> Sequence[LayoutKind]:
        """The kinds of layouts in which the ranks of a tensor group may divide matrices."""
        return [self.tensor_layouts] if isinstance(self.tensor_layouts, str) else self.tensor_layouts

    def _groups(self, size: int) -> Iterator[TensorAxis | None]:
        """Yield the tensor groups of this size, in each allowed layout."""
        if size == 1:
            yield None
            return
        for layout in TensorLayout.every(size):
            if layout.kind in self.layout_kinds:
                splits = self.sequence_parallel and layout.kind == "1d"
                yield TensorAxis(size=size, sequence_parallel=splits, layout=layout)

    def _searches_of(self, tensor: TensorAxis | None) -> Iterator[SearchRequest]:
        """Yield the search requests with these tensor groups. A rank in a request stands for one group."""
        profile, links = self.profile, self.links or self.profile.machine.links
        total, size = self.num_ranks, 1 if tensor is None else tensor.size
        if tensor is not None:
            costs = TensorCosts(tensor, self.num_ranks, links)
            profile, links, total = costs.divided(profile), costs.links_of_planes(), self.num_ranks // size
        for num_ranks, replication in self._divisions(total, links):
            own = ReplicaCosts(replication, num_ranks, links)
            batch_size = self.batch_size // replication.num_replicas
            # Tensor groups may have as many micro-batches as a pipeline of all their ranks.
            counts = self._counts(batch_size, num_ranks * size, tensor)
            if not counts or counts[0] > batch_size:
                continue
            yield SearchRequest.of(
                profile,
                num_ranks,
                batch_size,
                self.request,
                counts=counts,
                memory_limit_bytes=self.memory_limit_bytes,
                links=own.pipeline_links(),
                all_ranks=True,
                replica_costs=own,
                tensor=tensor,
                completion=Completion(updates=True),
                **self.options,
            )

    def _counts(self, batch_size: int, num_ranks: int, tensor: TensorAxis | None) -> list[int]:
        """Return the numbers of micro-batches to try. The ranks of a layout must get equal parts of the rows."""
        count, sizes = self.request.num_microbatches, list(self.profile.graphs)
        parts = 1 if tensor is None else tensor.layout.length(tensor.layout.outer.rows)
        if parts == 1:
            return microbatch_counts(batch_size, num_ranks, sizes) if count is None else [count]
        units = batch_size // parts
        most, least = max(sizes) // parts, -(-min(sizes) // parts)
        if batch_size % parts or most < least:
            return []
        counts = microbatch_counts(units, num_ranks, (least, most)) if count is None else [count]
        return [known for known in counts if units % known == 0]

    def _divisions(self, total: int, links: Links | None) -> Iterator[tuple[int, Replication]]:
        """For each division of the ranks, yield the number of ranks per pipeline and the settings of the replicas.

        Args:
            total: the number of ranks.
            links: the links between them.

        """
        given = None if isinstance(self.axes, str) else self.axes["replicate"]
        choices: Sequence[tuple[int, bool]] = _TRIED_LEVELS
        if self.zero != "auto":
            choices = [(int(self.zero), True), *([(3, False)] if self.zero == 3 else [])]
        for count in range(total, 0, -1):
            num_ranks = total // count
            if given not in (None, count) or total % count or self.batch_size % count:
                continue
            if num_ranks > len(self.profile.layers):
                continue
            for zero, once in choices if count > 1 else [(0, True)]:
                made = Replication(num_replicas=count, zero=zero, gather_once=once)
                yield num_ranks, made
                if _order_matters(links) and count > 1 and num_ranks > 1:
                    yield num_ranks, replace(made, consecutive="replicas")


def tensor_sizes(axes: Axes | None, tensor: TensorSizes) -> list[int]:
    """Return the numbers of ranks that may split each layer, in ascending order."""
    if isinstance(axes, Mapping):
        return [axes.get("tensor", 1)]
    return [tensor] if isinstance(tensor, int) else sorted({*tensor})


def check_tensor(axes: Any, tensor: Any, sequence_parallel: Any, tensor_layouts: Any = ("1d",)) -> None:
    """Raise an error for wrong axes, tensor sizes or layouts, and for tensor sizes that contradict the axes.

    Raises PartitionError for wrong values, and InputError for a contradiction.
    """
    sizes = [tensor] if isinstance(tensor, int) else tensor
    if not isinstance(sizes, list | tuple) or not sizes or not all(map(is_count, sizes)):
        raise PartitionError(
            f"tensor= must have the numbers of ranks that may split each layer, at least 1; got {shown(tensor)}; for "
            f"example, pass tensor=(1, 2, 4, 8)"
        )
    check_type(sequence_parallel, bool, "sequence_parallel= must be True or False", "pass one of them")
    if axes is not None and axes != "auto":
        _check_names(axes)
    own = axes.get("tensor", 1) if isinstance(axes, Mapping) else max(sizes)
    if max(sizes) > 1 and axes != "auto":
        got = "without axes=" if axes is None else f"with axes={shown(axes)}"
        raise InputError(
            f"tensor= has the numbers of ranks from which axes='auto' chooses; got tensor={shown(tensor)} {got}; pass "
            f"axes='auto', or an axes= with the number of ranks that split each layer ('tensor')"
        )
    if sequence_parallel and own == 1:
        raise InputError(
            "sequence_parallel=True divides the sequence among the ranks that split each layer; no layer is split, "
            "because all tensor groups have 1 rank; pass tensor=(1, 2, 4, 8), or leave sequence_parallel= out"
        )
    _check_layouts(tensor_layouts, own)


def _check_layouts(layouts: Any, own: int) -> None:
    """Raise PartitionError for unknown layouts, and InputError for layouts if no layer is split."""
    kinds = [layouts] if isinstance(layouts, str) else layouts
    known = get_args(LayoutKind)
    if not isinstance(kinds, list | tuple) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        kinds = ["?"]
    if {*kinds} - {*known}:
        raise PartitionError(
            f"tensor_layouts= must have the layouts from which the search chooses, among "
            f"{', '.join(map(repr, known))}; got {shown(layouts)}; for example, pass tensor_layouts=('1d', '3d')"
        )
    if own == 1 and {*kinds} != {"1d"}:
        raise InputError(
            f"tensor_layouts= has the layouts of the ranks that split each layer; got tensor_layouts={shown(layouts)}, "
            f"but no layer is split, because all tensor groups have 1 rank; pass tensor=(1, 8, 64), or leave "
            f"tensor_layouts= out"
        )


def _check_names(axes: Any) -> None:
    """Raise PartitionError unless a mapping has the sizes of the axes."""
    rule = (
        "axes= must be 'auto', or a mapping with the number of ranks per pipeline ('pipeline') and the number of "
        "replicas ('replicate'), and it may have the number of ranks that split each layer ('tensor')"
    )
    remedy = "for example, pass axes={'pipeline': 4, 'replicate': 2}"
    if not isinstance(axes, Mapping) or {*axes} - {"tensor"} != {"pipeline", "replicate"}:
        raise PartitionError(f"{rule}; got {shown(axes)}; {remedy}")
    if not all(map(is_count, axes.values())):
        raise PartitionError(f"{rule}; got {shown(axes)}; pass whole numbers, at least 1")


def _order_matters(links: Links | None) -> bool:
    """Return whether links between ranks differ. If so, the numbering of the ranks affects the step time."""
    return links is not None and (1 < len({*links.hosts}) < len(links.hosts) or bool(links.special))


def find_axes(request: AxesRequest, progress: Callable[[float], None] = lambda _: None) -> Plan:
    """Find the best division of the ranks into pipelines and replicas, and the best plan for it.

    Args:
        request: the request.
        progress: called with the completed fraction of the search.

    Raises:
        PartitionError: if the layers cannot be partitioned as requested.
        MemoryLimitError: if no candidate fits into memory.

    """
    searches = request.divisions()
    solved: dict[TensorAxis | None, dict[Any, Any]] = {}
    divisions: list[_Division] = []
    for number, search in enumerate(_largest_groups_first(searches)):
        known = solved.setdefault(search.tensor, {})
        tuner = Tuner(replace(search, effort=1), solved=known)  # evaluates only 1F1B
        # With larger groups, less memory is needed: a plan is not squeezed into memory if one is known.
        in_need = not divisions or len(request.tensor_sizes) == 1
        if tuner.explore(math.inf if in_need else _ANY_STEP_S):
            divisions.append(_Division(search=search, tuner=tuner, best=tuner.best()[0]))
        progress(0.5 * (number + 1) / len(searches))
    if not divisions:
        return _infeasible(request, searches)
    found = list(divisions)
    best_s = min(own.best.step_s for own in divisions)
    left: float = _EFFORT
    for own in _by_promise(_best_numbered(divisions)):
        if left > 0 and own.tuner.bound_s() < best_s * (1 - WORTH):
            tuner = Tuner(own.search, solved=solved[own.search.tensor])
            tuner.explore(best_s, own.tuner.best())
            found.append(_Division(search=own.search, tuner=tuner, best=tuner.refine()))
            best_s = min(best_s, found[-1].best.step_s)
            left -= tuner.spent
            progress(1 - 0.5 * max(0, left) / _EFFORT)
    found = _best_of_axes(found)
    chosen = simplest((own.best, own.best.step_s) for own in found)
    plan = next(own.tuner for own in found if own.best is chosen).plan(chosen)
    others = _shown([own.best for own in found if own.best is not chosen])
    progress(1)
    return replace(plan, alternatives=(chosen.alternative(), *(own.against(chosen, own.label) for own in others)))


@dataclass(frozen=True, kw_only=True)
class _Division:
    """A division of the ranks into pipelines, replicas and tensor groups, with a search and the best plan it found."""

    search: SearchRequest
    tuner: Tuner
    best: EvaluatedCandidate

    @property
    def divides_weights(self) -> bool:
        """Whether replicas divide the weights (``zero=3``)."""
        return self.best.replication is not None and self.best.replication.zero == 3

    @property
    def depth(self) -> tuple[TensorAxis | None, int]:
        """The tensor groups, and the number of them in a pipeline."""
        return self.search.tensor, self.search.num_ranks

    @property
    def promise_s(self) -> float:
        """The mean of the best plan's step and the lower bound of its stages, in seconds.

        The bound alone is too low where replicas sum large gradients, because it assumes that sums are hidden.
        """
        return (self.best.step_s + self.tuner.bound_s()) / 2


def _best_numbered(divisions: Iterable[_Division]) -> Iterable[_Division]:
    """Return the faster of two divisions that differ only in the numbering of the ranks."""
    best: dict[Any, _Division] = {}
    for own in sorted(divisions, key=lambda each: each.best.step_s):
        replicas = replace(own.best.replication or Replication(), consecutive="stages")
        best.setdefault((own.search.tensor, replicas), own)
    return best.values()


def _by_promise(divisions: Iterable[_Division]) -> list[_Division]:
    """Return the divisions, the most promising first, but the best value of ``zero=`` for each depth before others.

    Second comes the division with the lowest bound, without ``zero=3``, because a promise can mislead.
    """
    ordered = sorted(divisions, key=lambda each: each.promise_s)
    of_depth: dict[Any, _Division] = {}
    for own in ordered:
        of_depth.setdefault(own.depth, own)
    first, *others = [*of_depth.values(), *(own for own in ordered if own is not of_depth[own.depth])]
    lowest = min(ordered, key=lambda each: (each.divides_weights, each.tuner.bound_s()))
    return [first, *([] if lowest is first else [lowest]), *(own for own in others if own is not lowest)]


def _best_of_axes(found: Iterable[_Division]) -> list[_Division]:
    """Return the fastest plan of each division, the fastest first."""
    best: dict[str, _Division] = {}
    for own in sorted(found, key=lambda each: each.best.step_s):
        best.setdefault(own.best.label, own)
    return list(best.values())


def _largest_groups_first(searches: Iterable[SearchRequest]) -> list[SearchRequest]:
    """Return the searches with the largest tensor groups first."""
    return sorted(searches, key=lambda search: 1 if search.tensor is None else search.tensor.size, reverse=True)


def _shown(found: Sequence[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """Return the fastest plans, and the fastest with each kind of tensor groups. The fastest comes first.

    Args:
        found: the fastest plan of each division, the fastest first.

    """
    fastest = {own.tensor: own for own in reversed(found)}
    rest = [own for own in found if fastest[own.tensor] is not own]
    kept = [*fastest.values(), *rest[: max(0, _SHOWN - 1 - len(fastest))]]
    return sorted(kept, key=lambda own: own.step_s)


def _no_division(request: AxesRequest) -> PartitionError:
    count = request.request.num_microbatches
    shapes = ""
    asked = "" if count is None else f" with {counted(count, 'micro-batch')} in each replica"
    if max(request.tensor_sizes) > 1:
        asked += f", tensor groups of {', '.join(map(str, request.tensor_sizes))} ranks"
    if {*request.layout_kinds} != {"1d"}:
        asked += f" in {', '.join(request.layout_kinds)}"
        shapes = (
            "; ranks in two or three dimensions must form q x q, d x q x q with d <= q, or l x l x l, and divide the "
            "rows of a micro-batch into q, d x q or l x l equal parts"
        )
    ranks, rows = counted(request.num_ranks, "rank"), counted(request.batch_size, "row")
    return PartitionError(
        f"the number of replicas must divide the batch, each pipeline needs at least one layer for each rank, and its "
        f"micro-batches must have a measured size{shapes}; no division of {ranks} meets these conditions for "
        f"{rows}{asked}, {counted(len(request.profile.layers), 'layer')} and measured sizes "
        f"{', '.join(map(str, sorted(request.profile.graphs)))}; pass a different batch_size, num_ranks or "
        f"num_microbatches, or measure more sizes"
    )


def _infeasible(request: AxesRequest, searches: Sequence[SearchRequest]) -> Plan:
    """Search the division with the most ranks per pipeline. If no plan fits, raise the error with the memory needed."""
    deepest = searches[-1]
    try:
        return find_plan(deepest)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"no division of {counted(request.num_ranks, 'rank')} into pipelines and replicas fits into memory; with "
            f"the deepest pipeline ({deepest.axes}): {error}"
        ) from None
