"""Knapsack: finds the fastest activation options with which the layers of a rank fit into the rank's memory.

The module solves a multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger 2004, chapter 11). An item is a
layer together with its number of micro-batches in flight. Identical layers are the same item, so results are reused
wherever the same items occur. A state is a choice of one option for each item. A state is dropped if another state
needs no more bytes and no more time (Nemhauser and Ullmann 1969). The result is exact, unless there are too many
states. Then nearly equal states are merged.

A rank runs one layer at a time, so the rank's working memory is that of the layer with the largest working memory. The
search runs once for each possible size of the working memory, and uses only options that need at most this size.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipesched.partitioning.activation_options import ActivationOption, with_copies
from pipesched.partitioning.bisection import INFINITE
from pipesched.program.action_arrays import Ints

__all__ = ["Knapsack"]

_MOST_STATES = 20_000  # above this number, nearly equal states are merged, and results are no longer exact
_MOST_WITH_COPIES = 2_000  # the same limit for states with copies to the host


#: The options of an item, each with the bytes that the item occupies if the option is chosen.
_Options = Sequence[tuple[int, ActivationOption]]


@dataclass(frozen=True, kw_only=True)
class _Front:
    """The Pareto front of a group of items: the states that no other state dominates, in ascending order of bytes."""

    #: The bytes that the items occupy in each state.
    held: Ints
    #: The compute time of each state, in ticks.
    ticks: Ints
    #: The time of each state's copies to the host, in ticks; None if nothing is copied.
    copies: Ints | None
    #: For each state, the state without the last item, as an index into the front of the other items.
    parent: Ints
    #: For each state, the index of the last item's option.
    option: Ints

    def best(self, room: int, speed: Fraction, forward: int) -> tuple[int, int] | None:
        """Return the fastest state within ``room`` bytes, as its time in ticks and its index; None if no state fits.

        ``forward`` is the time of all forwards without recomputation, in ticks.
        """
        count = int(np.searchsorted(self.held, room, "right"))
        if not count:
            return None
        if self.copies is None:
            return _slowed(int(self.ticks[count - 1]), speed), count - 1
        ticks = -(-self.ticks[:count] * speed.denominator // speed.numerator)
        times = with_copies(_slowed(forward, speed), ticks, self.copies[:count])
        at = count - 1 - int(times[::-1].argmin())  # the last of equally fast states, which holds the most bytes
        return int(times[at]), at


_NOTHING = np.zeros(1, np.int64)
_EMPTY = _Front(held=_NOTHING, ticks=_NOTHING, copies=None, parent=_NOTHING, option=_NOTHING)


class Knapsack:
    """Finds the fastest options of layers within a memory limit, and caches partial results.

    An item is a layer together with its number of micro-batches in flight. ``exact`` is True as long as all results so
    far are proved to be optimal.
    """

    def __init__(self, options: Sequence[Sequence[ActivationOption]]) -> None:
        kinds: dict[tuple[ActivationOption, ...], int] = {}
        self._kind_of = [kinds.setdefault(tuple(of_layer), len(kinds)) for of_layer in options]
        self._kinds = list(kinds)
        self._items: dict[tuple[int, int], int] = {}
        self._options: list[_Options] = []
        self._fronts: dict[tuple[tuple[int, ...], int], _Front] = {}
        self._least: dict[tuple[tuple[int, ...], int, Fraction], int] = {}
        self.exact = True

    def item(self, layer: int, in_flight: int) -> int:
        """Return the item of a layer with ``in_flight`` micro-batches in flight; identical layers share an item."""
        kind = self._kind_of[layer]
        if (kind, in_flight) not in self._items:
            self._items[kind, in_flight] = len(self._items)
            self._options.append(_undominated_options(self._kinds[kind], in_flight))
        return self._items[kind, in_flight]

    def least(self, items: Sequence[int], limit: int | None, speed: Fraction) -> int:
        """Return the shortest total time of the items within ``limit`` bytes, in ticks; INFINITE if they do not fit."""
        limit = INFINITE if limit is None else limit
        if self._fits_at_once(items, limit):
            return _slowed(sum(self._options[item][0][1].ticks for item in items), speed)
        key = tuple(sorted(items)), limit, speed
        if key not in self._least:
            self._least[key] = min((ticks for ticks, _, _ in self._found(*key)), default=INFINITE)
        return self._least[key]

    def chosen(self, items: Sequence[int], limit: int | None, speed: Fraction) -> list[ActivationOption]:
        """Choose an option for each item so as to minimise the total time.

        If only some of several identical items need to be recomputed, the first of them are recomputed.
        """
        limit = INFINITE if limit is None else limit
        if self._fits_at_once(items, limit):
            return [self._options[item][0][1] for item in items]
        key = tuple(sorted(items))
        _, working, state = min(self._found(key, limit, speed))
        taken: dict[int, list[ActivationOption]] = {}
        for count in range(len(key), 0, -1):
            front = self._front(key[:count], working)
            item = key[count - 1]
            taken.setdefault(item, []).append(self._options[item][int(front.option[state])][1])
            state = int(front.parent[state])
        for options in taken.values():
            options.sort(key=lambda option: option.keep or "")
        return [taken[item].pop() for item in items]

    def _fits_at_once(self, items: Sequence[int], limit: int) -> bool:
        """Return whether all items fit into the limit with their fastest options, without copies to the host."""
        fastest = [self._options[item][0] for item in items]
        needed = sum(held for held, _ in fastest) + max(option.working_bytes for _, option in fastest)
        return needed <= limit and not any(option.copy_ticks for _, option in fastest)

    def least_bytes(self, items: Sequence[int]) -> int:
        """Return the minimum memory, in bytes, that the items need, regardless of their time."""
        kinds = {item: self._options[item] for item in items}
        needed = []
        for working in self._sizes(kinds.values()):
            least = _smallest(kinds, working)
            needed.append(working + sum(least[item] for item in items))
        return min(needed)

    def _found(self, key: tuple[int, ...], limit: int, speed: Fraction) -> Iterator[tuple[int, int, int]]:
        """For each possible size of the largest working memory, yield the fastest state, if the items fit.

        Each result is three numbers: the state's time in ticks, the working memory in bytes, and the state's index.
        """
        kinds = {item: self._options[item] for item in key}
        forward = sum(kinds[item][0][1].forward_ticks for item in key)
        for working in self._sizes(kinds.values()):
            least = _smallest(kinds, working)
            if sum(map(least.__getitem__, key)) + working > limit:
                continue
            best = self._front(key, working).best(limit - working, speed, forward)
            if best is not None:
                yield best[0], working, best[1]

    @staticmethod
    def _sizes(kinds: Collection[_Options]) -> list[int]:
        """Return the possible sizes of the items' largest working memory in bytes, in ascending order."""
        sizes = {option.working_bytes for options in kinds for _, option in options}
        floor = max(min(option.working_bytes for _, option in options) for options in kinds)
        return sorted(size for size in sizes if size >= floor)

    def _front(self, key: tuple[int, ...], working: int) -> _Front:
        """Return the Pareto front of the items.

        Only options that need at most ``working`` bytes of working memory are considered.
        """
        count = len(key)
        while count and (key[:count], working) not in self._fronts:
            count -= 1
        front = self._fronts[key[:count], working] if count else _EMPTY
        for at in range(count, len(key)):
            front = self._with(front, self._options[key[at]], working)
            self._fronts[key[: at + 1], working] = front
        return front

    def _with(self, front: _Front, options: _Options, working: int) -> _Front:
        """Return the front of the items of ``front`` and one more item, which has these options."""
        rows = [(at, held, c) for at, (held, c) in enumerate(options) if c.working_bytes <= working]
        size = len(front.held)
        held = np.concatenate([front.held + more for _, more, _ in rows])
        ticks = np.concatenate([front.ticks + c.ticks for _, _, c in rows])
        copies = None
        if front.copies is not None or any(c.copy_ticks for _, _, c in rows):
            before = np.zeros(size, np.int64) if front.copies is None else front.copies
            copies = np.concatenate([before + c.copy_ticks for _, _, c in rows])
        kept = _undominated(held, ticks) if copies is None else _undominated_with_copies(held, ticks, copies)
        if len(kept) > (_MOST_STATES if copies is None else _MOST_WITH_COPIES):
            kept = _thinned(kept, held, ticks, copies)
            self.exact = False
        return _Front(
            held=held[kept],
            ticks=ticks[kept],
            copies=None if copies is None else copies[kept],
            parent=kept % size,
            option=np.array([at for at, _, _ in rows])[kept // size],
        )


def _smallest(kinds: Mapping[int, _Options], working: int) -> dict[int, int]:
    """Return the number of bytes that each item occupies with its smallest option, keyed by item.

    Only options that need at most ``working`` bytes of working memory are considered.
    """
    return {
        item: min(held for held, option in options if option.working_bytes <= working)
        for item, options in kinds.items()
    }


def _slowed(ticks: int, speed: Fraction) -> int:
    return -(-ticks * speed.denominator // speed.numerator)


def _undominated_options(options: Sequence[ActivationOption], in_flight: int) -> list[tuple[int, ActivationOption]]:
    """Return (bytes held, option) for each option that no other option beats in all costs, fastest first."""
    made: list[tuple[tuple[int, int, int, int], ActivationOption]] = []
    for option in options:
        costs = (option.ticks, option.copy_ticks, option.held_bytes(in_flight), option.working_bytes)
        if not any(all(a <= b for a, b in zip(other, costs, strict=True)) for other, _ in made):
            made.append((costs, option))
    made.sort(key=lambda entry: entry[0])
    return [(costs[2], option) for costs, option in made]


def _undominated(held: Ints, ticks: Ints) -> Ints:
    """Return the indices of the states that no other state beats in bytes and ticks, in ascending order of bytes."""
    order = np.lexsort((ticks, held))
    sorted_ticks = ticks[order]
    least = np.minimum.accumulate(sorted_ticks)
    kept = np.ones(len(order), bool)
    kept[1:] = sorted_ticks[1:] < least[:-1]
    return order[kept]


def _undominated_with_copies(held: Ints, ticks: Ints, copies: Ints) -> Ints:
    """Return the indices of the states that no other state beats in bytes, ticks and copies, sorted by bytes."""
    kept: list[int] = []
    # Among the states visited so far, the (ticks, copies) pairs that no other pair beats. States are visited in
    # ascending order of bytes.
    stair_ticks: list[int] = []
    stair_copies: list[int] = []
    order = np.lexsort((copies, ticks, held))
    for place, time, copied in zip(order.tolist(), ticks[order].tolist(), copies[order].tolist(), strict=True):
        at = bisect_right(stair_ticks, time)
        if at and stair_copies[at - 1] <= copied:
            continue
        kept.append(place)
        first = bisect_left(stair_ticks, time)
        last = first
        while last < len(stair_ticks) and stair_copies[last] >= copied:
            last += 1
        stair_ticks[first:last] = [time]
        stair_copies[first:last] = [copied]
    return np.array(kept)


def _thinned(kept: Ints, held: Ints, ticks: Ints, copies: Ints | None) -> Ints:
    """Thin out a front: of each group of states with nearly equal times, keep the state with the fewest bytes."""
    sizes = [ticks[kept]] if copies is None else [ticks[kept], copies[kept]]
    steps = _MOST_STATES if copies is None else 40
    buckets = np.zeros(len(kept), np.int64)
    for values in sizes:
        width = max(1, -(-int(values.max() - values.min() + 1) // steps))
        buckets = buckets * steps + (values - values.min()) // width
    _, first = np.unique(buckets, return_index=True)  # states are in ascending order of bytes
    return kept[np.sort(first)]
