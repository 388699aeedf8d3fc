"""Axes search: divides ranks into pipelines and replicas, and finds the plan with the shortest simulated step.

Each division of the ranks is searched separately (`pipesched.planning.tuner`), with the batch of one replica. The first
pass evaluates only 1F1B for each division. The stages of this 1F1B plan give a lower bound on the division's step time.
Of two divisions that differ only in the numbering of the ranks, the faster one goes on. The second pass searches the
divisions in full, in the order of their promise: the mean of the step of 1F1B and the bound. It begins with the most
promising value of ``zero=`` for each depth of the pipelines, because values of ``zero=`` differ less than depths. It
leaves out divisions whose bound is not below the best step time, and ends when it has used up its effort.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipesched.checks import is_count, is_whole, shown
from pipesched.errors import MemoryLimitError, PartitionError
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
from pipesched.units import counted

__all__ = ["Axes", "AxesRequest", "Zero", "find_axes"]

#: The number of ranks per pipeline and the number of replicas, as {"pipeline": 8, "replicate": 8}, or "auto".
Axes = Literal["auto"] | Mapping[str, int]

#: The ZeRO level, which determines the tensors that are split across replicas: 0, 1, 2, 3, or "auto".
Zero = Literal["auto"] | int

#: The values of zero= that "auto" tries, and whether weights are gathered only once per step. zero=1 is not tried,
#: because zero=1 never needs less peak memory than zero=2, and sends more bytes. zero=3 needs less memory than zero=2
#: only if weights are gathered for each use.
_TRIED_LEVELS = ((0, True), (2, True), (3, False))
_EFFORT = 8_000_000  # actions to simulate in all full searches together
_SHOWN = 12  # number of alternatives to list


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
        if isinstance(self.axes, str) and self.axes == "auto":
            return
        rule = (
            "axes= must be 'auto', or a mapping with the number of ranks per pipeline ('pipeline') and the number of "
            "replicas ('replicate')"
        )
        remedy = "for example, pass axes={'pipeline': 4, 'replicate': 2}"
        if not isinstance(self.axes, Mapping) or {*self.axes} != {"pipeline", "replicate"}:
            raise PartitionError(f"{rule}; got {shown(self.axes)}; {remedy}")
        if not all(map(is_count, self.axes.values())):
            raise PartitionError(f"{rule}; got {shown(self.axes)}; pass whole numbers, at least 1")
        if self.axes["pipeline"] * self.axes["replicate"] != self.num_ranks:
            raise PartitionError(
                f"the product of the numbers in axes= must be the number of ranks; got {shown(self.axes)} for "
                f"{counted(self.num_ranks, 'rank')}; change axes= or the number of ranks"
            )
        if self.batch_size % self.axes["replicate"]:
            raise PartitionError(
                f"the number of replicas must divide the batch; {self.batch_size} rows cannot be divided evenly among "
                f"{self.axes['replicate']} replicas; correct batch_size= or axes="
            )

    def searches(self) -> Iterator[SearchRequest]:
        """Yield a search request for each allowed division of the ranks into pipelines and replicas.

        The division that needs the least memory comes last.
        """
        for num_ranks, replication in self._divisions():
            own = ReplicaCosts(replication, num_ranks, self.links or self.profile.machine.links)
            batch_size = self.batch_size // replication.num_replicas
            count = self.request.num_microbatches
            counts = microbatch_counts(batch_size, num_ranks, self.profile.graphs) if count is None else [count]
            if not counts or counts[0] > batch_size:
                continue
            yield SearchRequest.of(
                self.profile,
                num_ranks,
                batch_size,
                self.request,
                counts=counts,
                memory_limit_bytes=self.memory_limit_bytes,
                links=own.pipeline_links(),
                all_ranks=True,
                replica_costs=own,
                completion=Completion(updates=True),
                **self.options,
            )

    def _divisions(self) -> Iterator[tuple[int, Replication]]:
        """For each division of the ranks, yield the number of ranks per pipeline and the settings of the replicas."""
        given = None if isinstance(self.axes, str) else self.axes["replicate"]
        choices: Sequence[tuple[int, bool]] = _TRIED_LEVELS
        if self.zero != "auto":
            choices = [(int(self.zero), True), *([(3, False)] if self.zero == 3 else [])]
        for count in range(self.num_ranks, 0, -1):
            num_ranks = self.num_ranks // count
            if given not in (None, count) or self.num_ranks % count or self.batch_size % count:
                continue
            if num_ranks > len(self.profile.layers):
                continue
            for zero, once in choices if count > 1 else [(0, True)]:
                made = Replication(num_replicas=count, zero=zero, gather_once=once)
                yield num_ranks, made
                if self._order_matters and count > 1 and num_ranks > 1:
                    yield num_ranks, replace(made, consecutive="replicas")

    @property
    def _order_matters(self) -> bool:
        """Whether links between ranks differ. If so, the numbering of the ranks affects the step time."""
        links = self.links or self.profile.machine.links
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
    searches = list(request.searches())
    if not searches:
        raise _no_division(request)
    solved: dict[Any, Any] = {}
    divisions = []
    for number, search in enumerate(searches):
        tuner = Tuner(replace(search, effort=1), solved=solved)  # evaluates only 1F1B
        if tuner.explore():
            divisions.append(_Division(search=search, tuner=tuner, best=tuner.best()[0]))
        progress(0.5 * (number + 1) / len(searches))
    if not divisions:
        return _infeasible(request, searches)
    found = list(divisions)
    best_s = min(own.best.step_s for own in divisions)
    left: float = _EFFORT
    for own in _by_promise(_best_numbered(divisions)):
        if left > 0 and own.tuner.bound_s() < best_s * (1 - WORTH):
            tuner = Tuner(own.search, solved=solved)
            tuner.explore(best_s, own.tuner.best())
            found.append(_Division(search=own.search, tuner=tuner, best=tuner.refine()))
            best_s = min(best_s, found[-1].best.step_s)
            left -= tuner.spent
            progress(1 - 0.5 * max(0, left) / _EFFORT)
    found = _best_of_axes(found)
    chosen = simplest((own.best, own.best.step_s) for own in found)
    plan = next(own.tuner for own in found if own.best is chosen).plan(chosen)
    others = [own.best for own in found if own.best is not chosen][: _SHOWN - 1]
    progress(1)
    return replace(plan, alternatives=(chosen.alternative(), *(own.against(chosen, own.label) for own in others)))


@dataclass(frozen=True, kw_only=True)
class _Division:
    """A division of the ranks into pipelines and replicas, with a search and the best plan that it found."""

    search: SearchRequest
    tuner: Tuner
    best: EvaluatedCandidate

    @property
    def divides_weights(self) -> bool:
        """Whether replicas divide the weights (``zero=3``)."""
        return self.best.replication is not None and self.best.replication.zero == 3

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
        best.setdefault(replicas, own)
    return best.values()


def _by_promise(divisions: Iterable[_Division]) -> list[_Division]:
    """Return the divisions, the most promising first, but the best value of ``zero=`` for each depth before others.

    Second comes the division with the lowest bound, without ``zero=3``, because a promise can mislead.
    """
    ordered = sorted(divisions, key=lambda each: each.promise_s)
    of_depth: dict[int, _Division] = {}
    for own in ordered:
        of_depth.setdefault(own.search.num_ranks, own)
    first, *others = [*of_depth.values(), *(own for own in ordered if own is not of_depth[own.search.num_ranks])]
    lowest = min(ordered, key=lambda each: (each.divides_weights, each.tuner.bound_s()))
    return [first, *([] if lowest is first else [lowest]), *(own for own in others if own is not lowest)]


def _best_of_axes(found: Iterable[_Division]) -> list[_Division]:
    """Return the fastest plan of each division, the fastest first."""
    best: dict[str, _Division] = {}
    for own in sorted(found, key=lambda each: each.best.step_s):
        best.setdefault(own.best.label, own)
    return list(best.values())


def _no_division(request: AxesRequest) -> PartitionError:
    count = request.request.num_microbatches
    asked = "" if count is None else f" with {counted(count, 'micro-batch')} in each replica"
    return PartitionError(
        f"the number of replicas must divide the batch, each pipeline needs at least one layer for each rank, and its "
        f"micro-batches must have a measured size; no division of {counted(request.num_ranks, 'rank')} meets these "
        f"conditions for {counted(request.batch_size, 'row')}{asked}, {counted(len(request.profile.layers), 'layer')} "
        f"and measured sizes {', '.join(map(str, sorted(request.profile.graphs)))}; pass a different batch_size, "
        f"num_ranks or num_microbatches, or measure more sizes"
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
