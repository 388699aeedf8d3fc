"""Infeasibility: no plan keeps the limits of memory: by how much, and what would help."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

from pipesched import schedules
from pipesched.errors import MemoryLimitError, PartitionError
from pipesched.planning.candidates import Candidate
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.memory_fit import MemoryFitter
from pipesched.planning.search_request import Search
from pipesched.program.order import Schedule
from pipesched.simulation.memory import rank_memory
from pipesched.units import counted, quote_bytes

__all__ = ["Fits", "infeasible", "leanest", "no_cut"]

_FINE = 1.01  # how near the smallest limit is found
_MOST_TIMES = 16  # as many ranks
_A_PASS = 3  # times what is spent in need
_LOOKED_AT = 3  # schedules, where it is asked whether any plan keeps a limit


def no_cut(search: Search) -> PartitionError:
    """The error for a search whose layers cannot be cut as asked, whatever the memory."""
    stages, ranks, layers = search.num_stages, search.num_ranks, len(search.pins.layers)
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


def infeasible(search: Search, least: int, fits: "Fits") -> MemoryLimitError:
    """The error for a search without a plan. least: bytes of each rank with which there is one."""
    limit = min(search.memory_limit_bytes or ())
    text = (
        f"every rank holds its weights, gradients and activations; no plan for {counted(search.num_ranks, 'rank')} "
        f"and a batch of {counted(search.batch_size, 'row')} fits in {quote_bytes(limit)} a rank: "
    )
    alone = _largest_layer(search)
    if alone[1] > limit:
        text += f"layer {alone[0]!r} alone needs {quote_bytes(alone[1])} for one micro-batch, on any rank; "
    text += f"the least that does is {least} bytes ({quote_bytes(least)}), {quote_bytes(least - limit)} more"
    if search.checkpoint == "never" and fits(replace(search, checkpoint=None)):
        text += ", or this limit with checkpoint='always'"
    text += _on_the_host(search, fits)
    more = _ranks(search, fits) if alone[1] <= limit else None
    text += f"; allow that, use {more} ranks" if more else "; allow that"
    return MemoryLimitError(f"{text}, or smaller micro-batches")


def _on_the_host(search: Search, fits: "Fits") -> str:
    """What makes the limit enough where activations may wait on the host, if they may not and that is another memory;
    however long their copies take.
    """
    machine = search.profile.machine
    if machine.on_host or (search.may_offload and search.checkpoint is None):
        return ""
    known = replace(search.profile, machine=replace(machine, host_bytes_per_s=machine.host_bytes_per_s or 1.0))
    if not fits(replace(search, profile=known, offload=True, checkpoint=None)):
        return ""
    text = ", or this limit with offload=True"
    if search.checkpoint is not None:
        text += " and without checkpoint="
    return text if machine.host_bytes_per_s else f"{text} and a profile that knows host_bytes_per_s"


def leanest(search: Search, fits: "Fits") -> EvaluatedCandidate:
    """The plan that needs the least memory, whatever the limit: of the thriftiest schedules, then of whatever has room
    with less, until nothing has, or there is no time to ask.
    """

    def within(limit: int, only: Candidate | None = None) -> EvaluatedCandidate | None:
        return fits(replace(search, memory_limit_bytes=(limit,) * search.num_ranks), only)

    low = max(1, MemoryFitter(search).least_bytes(min(search.num_microbatches)) // search.num_ranks)
    high, found = low, None
    while found is None:
        high *= 2
        found = within(high)
    found = _leaner(found, low, within)
    every, failed = fits.others(search), 0
    for candidate in cycle(every):
        if failed == len(every) or not fits.has_time(search):
            break
        failed += 1
        if other := within(int(max(found.peak_bytes) / _FINE), candidate):
            found, failed = _leaner(other, low, partial(within, only=candidate)), 0
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


def _ranks(search: Search, fits: "Fits") -> int | None:
    """The fewest ranks, with the limit of the smallest, that have a plan; None where none is found."""
    limit = min(search.memory_limit_bytes or (1,))
    most = min(len(search.pins.layers), search.num_ranks * _MOST_TIMES)

    def enough(count: int) -> bool:
        asked = replace(search, num_ranks=count, memory_limit_bytes=(limit,) * count, num_stages=None)
        return fits(asked) is not None

    if search.num_stages is not None or not enough(most):
        return None
    low, high = search.num_ranks, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _largest_layer(search: Search) -> tuple[str, int]:
    """The layer that needs the most when it is alone on a rank with one micro-batch, and how much."""
    layers = list(search.pins.layers)
    rows = -(-search.batch_size // max(search.num_microbatches))
    costs = search.profile.costs([[name] for name in layers], rows)
    needs = rank_memory(schedules.get("1f1b").program(len(layers), 1), costs)
    return max(zip(layers, (own.total_bytes for own in needs), strict=True), key=lambda each: each[1])


class Fits:
    """Plans that keep the limits of searches. By which schedules that is seen is found once for each way of
    checkpointing.

    thrifty: the schedules by what they need, as `MemoryFitter` has them. spend: is told of the actions that could have
    been simulated.
    """

    def __init__(self, thrifty: dict[str, list[Schedule]], spend: Callable[[float], object] = lambda _: None) -> None:
        self._thrifty, self._spend = thrifty, spend
        self.spent = 0.0

    def __call__(self, search: Search, only: Candidate | None = None) -> EvaluatedCandidate | None:
        """only: of this one."""
        room, checkpoint = MemoryFitter(search), repr(search.checkpoint)
        if only is not None:
            found = room.plan_of(only)
        else:
            if checkpoint not in self._thrifty:
                self._thrifty[checkpoint] = room.thrifty
            found = room.any_plan(self._thrifty[checkpoint][:_LOOKED_AT])
        self.spent += room.spent
        self._spend(room.spent)
        return found and EvaluatedCandidate(*found, 0, search.memory_limit_bytes, search.posted)

    def others(self, search: Search) -> list[Candidate]:
        """Those that may need the least memory first, to be asked as far as there is time from now on."""
        self.spent, room = 0.0, MemoryFitter(search)
        return room.by_thrift(room.candidates(), self._thrifty[repr(search.checkpoint)])

    def has_time(self, search: Search) -> bool:
        """Whether there is time to ask more."""
        return self.spent <= _A_PASS * MemoryFitter(search).in_need
