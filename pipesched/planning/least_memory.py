"""Least memory: finds the plan that needs the least memory, and builds errors for requests that no plan satisfies."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import inf

from pipesched import schedules
from pipesched.errors import MemoryLimitError, PartitionError
from pipesched.planning.candidate_evaluation import CandidateEvaluator
from pipesched.planning.candidates import Candidate
from pipesched.planning.effort import SearchEffort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.lean_candidates import LeanCandidates
from pipesched.planning.search_request import SearchRequest
from pipesched.program.order import Schedule
from pipesched.simulation.memory import rank_memory
from pipesched.units import counted, quote_bytes

__all__ = ["FittingPlans", "leanest", "memory_limit_error", "stage_count_error"]

_FINE = 1.01  # the bisection of the limit ends when the ratio of its two ends is at most this number
_MOST_TIMES = 16  # numbers of ranks up to this multiple of the requested number are tried
_A_PASS = 3  # the effort for trying further candidates, as a multiple of `LeanCandidates.effort_in_need`
_LOOKED_AT = 3  # number of schedules to try when checking whether any plan fits


def stage_count_error(search: SearchRequest) -> PartitionError:
    """Return the error for layers that cannot be partitioned as requested, even with unlimited memory."""
    stages = search.num_stages
    ranks = search.num_ranks
    layers = len(search.pins.layers)
    remedy = "use fewer ranks, or remove some boundaries"
    if stages and stages > layers:
        remedy = f"pass num_stages of at most {layers}, or leave it out"
    elif stages and stages % ranks:
        fit = [count for count in (stages - stages % ranks, stages + ranks - stages % ranks) if 0 < count <= layers]
        numbers = " or ".join(f"num_stages={count}" for count in fit)
        remedy = f"pass {numbers}, {remedy}" if fit else remedy
    return PartitionError(
        f"every stage needs at least one layer, and every rank the same number of stages; {counted(layers, 'layer')} "
        f"cannot be split into {counted(stages, 'stage') if stages else 'stages'} on "
        f"{counted(ranks, 'rank')}; {remedy}"
    )


def memory_limit_error(search: SearchRequest, least: int, fitting: "FittingPlans") -> MemoryLimitError:
    """Return the error for a memory limit that no plan meets.

    Args:
        search: the request.
        least: the smallest limit per rank, in bytes, for which a plan exists.
        fitting: an object that finds plans within other limits.

    """
    limit = min(search.memory_limit_bytes or ())
    text = (
        f"every rank must have room for its weights, gradients and activations; no plan for "
        f"{counted(search.num_ranks, 'rank')} and a batch of {counted(search.batch_size, 'row')} fits into "
        f"{quote_bytes(limit)} per rank: "
    )
    layer, alone = _largest_layer(search)
    if alone > limit:
        text += f"layer {layer!r} alone needs {quote_bytes(alone)} for one micro-batch, on any rank; "
    text += (
        f"the smallest limit for a plan is {least} bytes ({quote_bytes(least)}), {quote_bytes(least - limit)} more "
        f"than the given limit"
    )
    if search.checkpoint == "never" and fitting.any(replace(search, checkpoint=None)):
        text += "; the given limit is enough with checkpoint='always'"
    text += _on_the_host(search, fitting)
    more = _ranks(search, fitting) if alone <= limit and search.replica_costs is None else None
    text += f"; raise the limit, use {more} ranks" if more else "; raise the limit"
    return MemoryLimitError(f"{text}, or use smaller micro-batches")


def _on_the_host(search: SearchRequest, fitting: "FittingPlans") -> str:
    """Return the part of the message that recommends offloading; "" if offloading is already possible or does not help.

    The time that copies to the host take is ignored.
    """
    machine = search.profile.machine
    if machine.on_host or (search.may_offload and search.checkpoint is None):
        return ""
    known = replace(search.profile, machine=replace(machine, host_bytes_per_s=machine.host_bytes_per_s or 1.0))
    if not fitting.any(replace(search, profile=known, offload=True, checkpoint=None)):
        return ""
    text = "; the given limit is enough with offload=True"
    if not machine.host_bytes_per_s:
        text += " and a profile with host_bytes_per_s"
    return text if search.checkpoint is None else f"{text}, if checkpoint= is left out"


def leanest(search: SearchRequest, fitting: "FittingPlans") -> EvaluatedCandidate:
    """Find the plan that needs the least memory per rank, regardless of the request's limit.

    The search starts with the schedules that need the least memory. Then the search tries all candidates with a limit
    below the best peak so far, until no candidate fits or the effort is spent.
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
    """Find the plan with the smallest peak memory, by bisecting the limit.

    Args:
        found: a plan to start from.
        low: a limit in bytes within which no plan fits.
        within: a function that returns a plan within a limit in bytes, or None.

    """
    while (high := max(found.peak_bytes)) > low * _FINE and high > low + 1:
        middle = (low + high) // 2
        if other := within(middle):
            found = other
        else:
            low = middle
    return found


def _ranks(search: SearchRequest, fitting: "FittingPlans") -> int | None:
    """Return the smallest number of ranks for which a plan fits into memory; None if no such plan is found.

    Assumes that every rank has the smallest of the given memory limits.
    """
    limit = min(search.memory_limit_bytes or (1,))
    most = min(len(search.pins.layers), search.num_ranks * _MOST_TIMES)

    def enough(count: int) -> bool:
        asked = replace(search, num_ranks=count, memory_limit_bytes=(limit,) * count, num_stages=None)
        return fitting.any(asked) is not None

    if search.num_stages is not None or search.placement is not None or search.max_in_flight is not None:
        return None
    if not enough(most):
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
    """Find the layer that needs the most memory if it is alone on a rank with one micro-batch.

    Returns the layer and the number of bytes that it needs.
    """
    layers = list(search.pins.layers)
    rows = -(-search.batch_size // max(search.num_microbatches))
    costs = search.profile.costs([[name] for name in layers], rows)
    needs = rank_memory(schedules.get("1f1b").program(len(layers), 1), costs)
    return max(zip(layers, (memory.total_bytes for memory in needs), strict=True), key=lambda pair: pair[1])


class FittingPlans:
    """Finds plans within the memory limits of a search.

    Args:
        thrifty: for each checkpoint setting, a cache of the schedules sorted by memory (`LeanCandidates.thrifty`).
        effort: the remaining effort, from which all work is subtracted.

    """

    def __init__(self, thrifty: dict[str, list[Schedule]], effort: SearchEffort) -> None:
        self._thrifty = thrifty
        self._effort = effort
        self._until = -inf

    def any(self, search: SearchRequest) -> EvaluatedCandidate | None:
        """Return a plan within the limits, made by a schedule that needs little memory; None if none was found."""
        lean = self.lean(search)
        checkpoint = repr(search.checkpoint)
        if checkpoint not in self._thrifty:
            self._thrifty[checkpoint] = lean.thrifty
        return lean.any_that_fits(self._thrifty[checkpoint][:_LOOKED_AT])

    def of(self, search: SearchRequest, candidate: Candidate) -> EvaluatedCandidate | None:
        """Return a plan for this candidate, or None if no plan within the limits was found."""
        return self.lean(search).that_fits(candidate)

    def others(self, search: SearchRequest) -> list[Candidate]:
        """Return all candidates, starting with the candidates that are likely to need the least memory.

        Also sets how much effort may be spent on trying these candidates; see ``has_time``.
        """
        lean = self.lean(search)
        self._until = self._effort.left - _A_PASS * lean.effort_in_need
        return lean.by_thrift(lean.candidates(), self._thrifty[repr(search.checkpoint)])

    @property
    def has_time(self) -> bool:
        """Whether the effort that ``others`` set for trying candidates is not yet used up."""
        return self._effort.left >= self._until

    def lean(self, search: SearchRequest) -> LeanCandidates:
        """Return the `LeanCandidates` of a search."""
        return LeanCandidates(search, CandidateEvaluator(search, self._effort), self._effort)
