"""Infeasibility: the plan that needs the least memory, and the errors where it needs more than there is, or none is."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import inf

from pipesched import schedules
from pipesched.errors import MemoryLimitError, PartitionError
from pipesched.planning.candidates import Candidate
from pipesched.planning.effort import Effort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.lean_candidates import LeanCandidates
from pipesched.planning.recomputation_choice import RecomputationChooser
from pipesched.planning.search_request import SearchRequest
from pipesched.program.order import Schedule
from pipesched.simulation.memory import rank_memory
from pipesched.units import counted, quote_bytes

__all__ = ["FittingPlans", "infeasible", "leanest", "no_partition"]

_FINE = 1.01  # how near the smallest limit is found
_MOST_TIMES = 16  # as many ranks
_A_PASS = 3  # times the effort in need
_LOOKED_AT = 3  # schedules, where it is asked whether any plan keeps a limit


def no_partition(search: SearchRequest) -> PartitionError:
    """The error for a search whose layers cannot be partitioned as asked, whatever the memory."""
    stages = search.num_stages
    ranks = search.num_ranks
    layers = len(search.pins.layers)
    remedy = "use fewer ranks, or leave out pins"
    if stages and stages > layers:
        remedy = f"pass num_stages of at most {layers}, or leave it out"
    elif stages and stages % ranks:
        fit = [count for count in (stages - stages % ranks, stages + ranks - stages % ranks) if 0 < count <= layers]
        remedy = " or ".join([f"pass num_stages={count}" for count in fit] + [remedy])
    return PartitionError(
        f"every stage holds at least one layer, and every rank as many stages; {counted(layers, 'layer')} have no "
        f"such cut into {counted(stages, 'stage') if stages else 'any number of stages'} on {counted(ranks, 'rank')}; "
        f"{remedy}"
    )


def infeasible(search: SearchRequest, least: int, fitting: "FittingPlans") -> MemoryLimitError:
    """The error for a search without a plan. least: bytes of each rank with which there is one."""
    limit = min(search.memory_limit_bytes or ())
    text = (
        f"every rank holds its weights, gradients and activations; no plan for {counted(search.num_ranks, 'rank')} "
        f"and a batch of {counted(search.batch_size, 'row')} fits in {quote_bytes(limit)} a rank: "
    )
    layer, alone = _largest_layer(search)
    if alone > limit:
        text += f"layer {layer!r} alone needs {quote_bytes(alone)} for one micro-batch, on any rank; "
    text += f"the least that does is {least} bytes ({quote_bytes(least)}), {quote_bytes(least - limit)} more"
    if search.checkpoint == "never" and fitting.any(replace(search, checkpoint=None)):
        text += ", or this limit with checkpoint='always'"
    text += _on_the_host(search, fitting)
    more = _ranks(search, fitting) if alone <= limit else None
    text += f"; allow that, use {more} ranks" if more else "; allow that"
    return MemoryLimitError(f"{text}, or smaller micro-batches")


def _on_the_host(search: SearchRequest, fitting: "FittingPlans") -> str:
    """What makes the limit enough where activations may wait on the host, if they may not and that is another memory;
    however long their copies take.
    """
    machine = search.profile.machine
    if machine.on_host or (search.may_offload and search.checkpoint is None):
        return ""
    known = replace(search.profile, machine=replace(machine, host_bytes_per_s=machine.host_bytes_per_s or 1.0))
    if not fitting.any(replace(search, profile=known, offload=True, checkpoint=None)):
        return ""
    text = ", or this limit with offload=True"
    if search.checkpoint is not None:
        text += " and without checkpoint="
    return text if machine.host_bytes_per_s else f"{text} and a profile that knows host_bytes_per_s"


def leanest(search: SearchRequest, fitting: "FittingPlans") -> EvaluatedCandidate:
    """The plan that needs the least memory, whatever the limit: of the thriftiest schedules, then of whatever has room
    with less, until nothing has, or there is no time to ask.
    """

    def within(limit: int, only: Candidate | None = None) -> EvaluatedCandidate | None:
        asked = replace(search, memory_limit_bytes=(limit,) * search.num_ranks)
        return fitting.any(asked) if only is None else fitting.of(asked, only)

    low = max(1, fitting.lean(search).least_bytes(min(search.num_microbatches)) // search.num_ranks)
    high = low
    found = None
    while found is None:
        high *= 2
        found = within(high)
    found = _leaner(found, low, within)
    every = fitting.others(search)
    failed = 0
    for candidate in cycle(every):
        if failed == len(every) or not fitting.has_time:
            break
        failed += 1
        if other := within(int(max(found.peak_bytes) / _FINE), candidate):
            found = _leaner(other, low, partial(within, only=candidate))
            failed = 0
    return found


def _leaner(
    found: EvaluatedCandidate, low: int, within: Callable[[int], EvaluatedCandidate | None]
) -> EvaluatedCandidate:
    """By bisection the one that needs the least. within: one that keeps a limit; none keeps low."""
    while (high := max(found.peak_bytes)) > low * _FINE and high > low + 1:
        middle = (low + high) // 2
        if other := within(middle):
            found = other
        else:
            low = middle
    return found


def _ranks(search: SearchRequest, fitting: "FittingPlans") -> int | None:
    """The fewest ranks, with the limit of the smallest, that have a plan; None where none is found."""
    limit = min(search.memory_limit_bytes or (1,))
    most = min(len(search.pins.layers), search.num_ranks * _MOST_TIMES)

    def enough(count: int) -> bool:
        asked = replace(search, num_ranks=count, memory_limit_bytes=(limit,) * count, num_stages=None)
        return fitting.any(asked) is not None

    if search.num_stages is not None or not enough(most):
        return None
    low = search.num_ranks
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _largest_layer(search: SearchRequest) -> tuple[str, int]:
    """The layer that needs the most when it is alone on a rank with one micro-batch, and how much."""
    layers = list(search.pins.layers)
    rows = -(-search.batch_size // max(search.num_microbatches))
    costs = search.profile.costs([[name] for name in layers], rows)
    needs = rank_memory(schedules.get("1f1b").program(len(layers), 1), costs)
    return max(zip(layers, (own.total_bytes for own in needs), strict=True), key=lambda each: each[1])


class FittingPlans:
    """Plans that keep the limits of searches. effort: counts what is asked.

    thrifty: for each way to checkpoint the schedules by what they need, as `LeanCandidates` has them: found once.
    """

    def __init__(self, thrifty: dict[str, list[Schedule]], effort: Effort) -> None:
        self._thrifty = thrifty
        self._effort = effort
        self._until = -inf

    def any(self, search: SearchRequest) -> EvaluatedCandidate | None:
        """A plan that keeps the limits, of the schedules that need the least memory; None where none of these does."""
        lean = self.lean(search)
        checkpoint = repr(search.checkpoint)
        if checkpoint not in self._thrifty:
            self._thrifty[checkpoint] = lean.thrifty
        return lean.any_that_fits(self._thrifty[checkpoint][:_LOOKED_AT])

    def of(self, search: SearchRequest, candidate: Candidate) -> EvaluatedCandidate | None:
        """A plan of this candidate that keeps the limits."""
        return self.lean(search).that_fits(candidate)

    def others(self, search: SearchRequest) -> list[Candidate]:
        """Those that may need the least memory first, to be asked as far as there is time from now on."""
        lean = self.lean(search)
        self._until = self._effort.left - _A_PASS * lean.effort_in_need
        return lean.by_thrift(lean.candidates(), self._thrifty[repr(search.checkpoint)])

    @property
    def has_time(self) -> bool:
        """Whether there is time to ask more."""
        return self._effort.left >= self._until

    def lean(self, search: SearchRequest) -> LeanCandidates:
        """The candidates of a search by what they need."""
        return LeanCandidates(search, RecomputationChooser(search, self._effort), self._effort)
