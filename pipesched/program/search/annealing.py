"""Simulated annealing of orders (Kirkpatrick et al. 1983), reproducible on every machine.

All arithmetic uses integers, so equal inputs give equal orders on every machine, with or without compilation.
"""

import math
from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import UNFIT, RunTimes, Sequences, copy, evaluate, hold, run_times, sequences
from pipesched.program.search.moves import fuse, rotate, shift, split
from pipesched.program.search.problem import BACKWARD, FORWARD, KINDS, Tables
from pipesched.program.search.random_numbers import draw, start, state

__all__ = ["DRAWS", "Annealer", "AnnealingRun", "Cooling", "distance_of", "rise", "run_of"]

#: The number of random values that ``rise`` tells apart.
DRAWS = 1024
_ONE = 1 << 16  # fixed point: 1.0
_STAGES = 64  # the number of temperatures of a run
#: -ln(u) for equally likely values of u between 0 and 1, in fixed point.
_PATIENCE = [round(-math.log((draw + 0.5) / DRAWS) * _ONE) for draw in range(DRAWS)]
_NEAR, _FAR = 3, 24  # the maximum distance in slots of a short and of a long move


class Cooling(NamedTuple):
    """The first and the last temperature of an annealing run, and its number of steps.

    The temperatures are multiples of the mean action time.
    """

    hot: float
    cold: float
    steps: int


class _AnnealingBuffers(NamedTuple):
    """The preallocated buffers of an annealing run."""

    times: RunTimes
    #: The order of one rank before a fusion or a split.
    kept: Whole
    #: The state of the random number generator.
    random: Whole


class Annealer:
    """Improves orders by simulated annealing.

    Args:
        tables: the problem.

    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._memory = _AnnealingBuffers(run_times(tables), whole([0] * len(tables.rank_of_slot)), state())
        self._current = sequences(tables)

    def run(self, best: Sequences, makespan: int, cooling: Cooling, *, goal: int, seed: int) -> tuple[int, int]:
        """Improve the orders ``best`` in place, until their makespan is at most ``goal`` or the steps are used up.

        Args:
            best: orders that do not deadlock and are within the limits.
            makespan: the makespan of ``best``.
            cooling: the temperatures and the number of steps.
            goal: a lower bound on the makespan.
            seed: the seed of the random number generator.

        Returns:
            The final makespan of ``best``, and the number of steps taken.

        """
        tables = self._tables
        start(self._memory.random, seed)
        copy(best, self._current)
        run = run_of(best, makespan, cooling, goal)
        found, ran = _anneal(tables, self._memory, self._current, best, run)
        return int(found), int(ran)


class AnnealingRun(NamedTuple):
    """The parameters of an annealing run."""

    makespan: int
    goal: int
    #: The number of steps at each temperature.
    steps: int
    #: The temperatures, in 1/256 of a unit of time.
    heat: Whole
    patience: Whole


def run_of(orders: Sequences, makespan: int, cooling: Cooling, goal: int) -> AnnealingRun:
    """Return the parameters of a run that starts from the given orders."""
    mean = max(1, sum(map(int, orders.busy))) / max(1, sum(map(int, orders.lengths)))
    ratio = cooling.cold / cooling.hot
    heats = [cooling.hot * mean * ratio ** (stage / (_STAGES - 1)) for stage in range(_STAGES)]
    heat = whole(round(value * 256) for value in heats)
    return AnnealingRun(makespan, goal, max(1, cooling.steps // _STAGES), heat, whole(_PATIENCE))


@compiled
def rise(run: AnnealingRun, heat: int, bits: int) -> int:
    """Return the time by which a change may make the makespan longer, from random bits."""
    return heat * run.patience[bits % DRAWS] >> 24


@compiled
def _anneal(
    tables: Tables, memory: _AnnealingBuffers, orders: Sequences, best: Sequences, run: AnnealingRun
) -> tuple[int, int]:
    random = memory.random
    slots = len(tables.rank_of_slot)
    current = run.makespan
    shortest = run.makespan
    step = 0
    for heat in run.heat:
        for _ in range(run.steps):
            if shortest <= run.goal:
                return shortest, step
            step += 1
            slot = draw(random) % slots
            rank = tables.rank_of_slot[slot]
            if slot >= tables.first[rank] + orders.lengths[rank]:
                continue
            bits = draw(random)
            most = current + rise(run, heat, bits)
            bits //= DRAWS
            kind = orders.slots[slot] % KINDS
            if tables.fuses and kind != FORWARD and bits % 16 < 5:
                found = _recombined(tables, memory, orders, slot, most, bits // 16)
            else:
                found = _shifted(tables, memory, orders, slot, most, bits // 16)
            if found == UNFIT:
                continue
            current = found
            if found < shortest:
                shortest = found
                copy(orders, best)
    return shortest, step


@compiled
def distance_of(bits: int, far: int) -> int:
    """Convert random bits to the number of slots by which an action moves; negative for a move to the left.

    The distance is at most 3 slots with a probability of 60 %, and otherwise at most ``far`` slots.
    """
    most = _NEAR if bits % 5 < 3 else far
    bits //= 5
    distance = 1 + (bits // 2) % most
    return distance if bits % 2 else -distance


@compiled
def _shifted(tables: Tables, memory: _AnnealingBuffers, orders: Sequences, slot: int, most: int, bits: int) -> int:
    """Move the action in a slot by a random distance, and return the makespan of the new orders.

    With a probability of 25 %, also move the action of the same kind and micro-batch on the next or previous stage by
    the same distance. If the first action cannot move, or if the new orders deadlock or take longer than ``most``,
    leave the orders unchanged and return UNFIT.
    """
    distance = distance_of(bits // 8, _FAR)
    also = -1
    if bits % 4 == 0:
        also = _neighbour(tables, orders, orders.slots[slot], bits // 4 % 2 == 0)
    to = shift(tables, orders, tables.rank_of_slot[slot], slot, distance)
    if to == slot:
        return UNFIT
    also_to = also
    if also >= 0:
        also_to = shift(tables, orders, tables.rank_of_slot[also], also, distance)
    makespan = evaluate(tables, memory.times, orders, most)
    if makespan == UNFIT:
        _unshift(tables, orders, also, also_to)
        _unshift(tables, orders, slot, to)
    return makespan


@compiled
def _unshift(tables: Tables, orders: Sequences, slot: int, to: int) -> None:
    """Move an action back from slot ``to`` to ``slot``."""
    if to != slot:
        rotate(orders, to, slot)
        if tables.num_resources:
            hold(tables, orders, tables.rank_of_slot[slot], min(slot, to), max(slot, to) + 1)


@compiled
def _neighbour(tables: Tables, orders: Sequences, code: int, later: bool) -> int:
    """Return the slot of the action of the same kind and micro-batch on the next or previous stage.

    Return -1 if there is no such action, or if that stage is on the same rank.
    """
    away = tables.num_microbatches * KINDS
    stage = code // away
    other = stage + 1 if later else stage - 1
    if other < 0 or other >= tables.num_stages or tables.rank_of[other] == tables.rank_of[stage]:
        return -1
    code += away if later else -away
    begin = tables.first[tables.rank_of[other]]
    for slot in range(begin, begin + orders.lengths[tables.rank_of[other]]):
        if orders.slots[slot] == code:
            return slot
    return -1


@compiled
def _recombined(tables: Tables, memory: _AnnealingBuffers, orders: Sequences, slot: int, most: int, bits: int) -> int:
    """Replace an I and a W by a B, or a B by an I and a W, and return the makespan of the new orders.

    If this is not possible, or if the new orders exceed a limit, deadlock or take longer than ``most``, leave the
    orders unchanged and return UNFIT.
    """
    rank = tables.rank_of_slot[slot]
    begin = tables.first[rank]
    length = orders.lengths[rank]
    busy = orders.busy[rank]
    for kept in range(begin, begin + length):
        memory.kept[kept] = orders.slots[kept]
    if orders.slots[slot] % KINDS == BACKWARD:
        split(tables, orders, rank, slot, bits % _FAR)
    elif not fuse(tables, orders, rank, slot, bits % 2 == 0):
        return UNFIT
    makespan = UNFIT
    if not tables.num_resources or hold(tables, orders, rank, begin, begin + orders.lengths[rank]):
        makespan = evaluate(tables, memory.times, orders, most)
    if makespan == UNFIT:
        for kept in range(begin, begin + length):
            orders.slots[kept] = memory.kept[kept]
        orders.lengths[rank] = length
        orders.busy[rank] = busy
        if tables.num_resources:
            hold(tables, orders, rank, begin, begin + length)
    return makespan
