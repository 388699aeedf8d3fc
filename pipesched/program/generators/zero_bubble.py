"""Zero bubble: writes orders for given costs and memory (heuristic of Qi et al. 2023, arXiv:2401.10241, section 3.1).

Warm-up forwards fill the time until a rank's first input gradient can start. Then every rank alternates between input
gradients and forwards. It runs weight gradients when it would otherwise wait, or when memory is full. The paper leaves
three choices open; this module tries all eight combinations and returns the fastest orders.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple, Protocol

from pipesched.errors import ScheduleError
from pipesched.program.order import Order, Shape
from pipesched.units import counted

__all__ = ["ActionCosts", "zero_bubble"]


class ActionCosts(Protocol):
    """The attributes of ``pipesched.Costs`` that the heuristic reads. All times are in seconds."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""

    @property
    def forward_s(self) -> Sequence[float]:
        """The seconds that a forward (F) takes on each stage."""

    @property
    def input_grad_s(self) -> Sequence[float]:
        """The seconds that an input gradient (I) takes on each stage."""

    @property
    def weight_grad_s(self) -> Sequence[float]:
        """The seconds that a weight gradient (W) takes on each stage."""

    @property
    def transfer_s(self) -> float:
        """The seconds that a message between neighbouring ranks takes."""


class _UnitCosts(NamedTuple):
    """The default costs: 1 s for every action, and 0 s for every message."""

    num_stages: int
    forward_s: Sequence[float]
    input_grad_s: Sequence[float]
    weight_grad_s: Sequence[float]
    transfer_s: float = 0


class Switches(NamedTuple):
    """The three choices that the paper leaves open, each as a switch."""

    late_input_grad: bool  # a warm-up forward may delay the first input gradient
    input_grad_first: bool  # a forward that is not needed yet must not delay an input gradient
    fill_every_gap: bool  # a weight gradient may run in any gap, however short


def zero_bubble(
    shape: Shape, costs: ActionCosts | None, *, max_in_flight: int | None, weight_grad_share: float
) -> list[Order]:
    """Write the orders with the shortest span that the heuristic finds, for one stage per rank.

    The span is the longest time that any rank takes from the start of its first action to the end of its last action.
    If ``max_in_flight`` allows ZB-H1, ZB-H1 is also tried. The result's span is then at most that of ZB-H1.

    Args:
        shape: the ranks and micro-batches.
        costs: the time of each kind of action on each stage, in seconds. None: 1 s for every action, 0 s for messages.
        max_in_flight: the maximum number of micro-batches in flight on a rank. None: the number of ranks.
        weight_grad_share: the fraction of a micro-batch's activations, from 0 to 1, that a rank holds between I and W.

    Raises:
        ScheduleError: the costs are for a different number of stages, or the limit or the share is out of range.

    """
    if costs is None:
        ones = [1.0] * shape.num_stages
        costs = _UnitCosts(shape.num_stages, forward_s=ones, input_grad_s=ones, weight_grad_s=ones)
    limit = shape.num_ranks if max_in_flight is None else max_in_flight
    _check(shape, costs, limit, weight_grad_share)
    choices: list[Switches | None] = [Switches(*values) for values in product((False, True), repeat=3)]
    if limit >= min(shape.num_ranks, shape.num_microbatches):
        choices.append(None)
    candidates = [_Pipeline(shape, costs, limit, weight_grad_share, choice) for choice in choices]
    best = min(candidates, key=lambda candidate: (candidate.span_s, candidate.makespan_s))
    return [rank.order(shape) for rank in best.ranks]


def _check(shape: Shape, costs: ActionCosts, limit: int, share: float) -> None:
    if not all(hasattr(costs, name) for name in _UnitCosts._fields):
        raise ScheduleError(
            f"costs= must be a pipesched.Costs with one number for each stage; got {costs!r}; pass Costs(...)"
        )
    if costs.num_stages != shape.num_stages:
        raise ScheduleError(
            f"costs must have one number for each stage; there are {counted(shape.num_stages, 'stage')}, but the "
            f"costs have {costs.num_stages}; pass costs for {counted(shape.num_stages, 'stage')}"
        )
    if not isinstance(limit, int) or limit < 1:
        raise ScheduleError(f"max_in_flight must be a whole number, at least 1; got {limit!r}; pass 1 or more")
    if not isinstance(share, int | float | Fraction) or not 0 <= share <= 1:
        raise ScheduleError(
            f"weight_grad_share must be a fraction of the activations, from 0 to 1; got {share!r}; pass a number from "
            f"0 to 1"
        )


class _OneStageRank:
    """One rank with one stage: the actions that have run, and the times of these actions."""

    def __init__(self, stage: int, costs: ActionCosts, share: float) -> None:
        self.stage = stage
        self.forward_s = costs.forward_s[stage]
        self.input_grad_s = costs.input_grad_s[stage]
        self.weight_grad_s = costs.weight_grad_s[stage]
        self.forward_ends: list[float] = []
        self.input_grad_ends: list[float] = []
        self.forwards = 0
        self.input_grads = 0
        self.owed = 0  # the number of input gradients that have run without their weight gradients
        self.start_s: float = 0
        self.end_s: float = 0
        self.idle_s: float = 0  # idle time since the rank's first action
        self._share = share
        self._writes: list[Callable[[Order, int], None]] = []  # the methods that write the actions, in order

    def order(self, shape: Shape) -> Order:
        """Return the order of the actions that have run."""
        order = Order(shape)
        for write in self._writes:
            write(order, self.stage)
        return order

    @property
    def held(self) -> float:
        """The number of micro-batches in memory. From its I to its W, a micro-batch counts as ``weight_grad_share``."""
        return self.forwards - self.input_grads + self._share * self.owed

    def run_forward(self, ready_s: float) -> None:
        """Run the next forward. It starts no earlier than ``ready_s``, when its input is ready."""
        if not self.forwards:
            self.start_s = self.end_s = ready_s
        self._run(ready_s, self.forward_s)
        self.forward_ends.append(self.end_s)
        self.forwards += 1
        self._writes.append(Order.F)

    def run_input_grad(self, ready_s: float) -> None:
        """Run the next input gradient. It starts no earlier than ``ready_s``, when the output gradient is ready."""
        self._run(ready_s, self.input_grad_s)
        self.input_grad_ends.append(self.end_s)
        self.input_grads += 1
        self.owed += 1
        self._writes.append(Order.I)

    def run_weight_grad(self) -> None:
        """Run the oldest weight gradient whose input gradient has run."""
        self._run(self.end_s, self.weight_grad_s)
        self.owed -= 1
        self._writes.append(Order.W)

    def _run(self, ready_s: float, seconds: float) -> None:
        start_s = max(self.end_s, ready_s)
        self.idle_s += start_s - self.end_s
        self.end_s = start_s + seconds


class _Pipeline:
    """The orders of all ranks, written by the heuristic; if ``switches`` is None, the orders of ZB-H1."""

    def __init__(self, shape: Shape, costs: ActionCosts, limit: int, share: float, switches: Switches | None) -> None:
        self.ranks = [_OneStageRank(stage, costs, share) for stage in range(shape.num_stages)]
        self._transfer_s = costs.transfer_s
        self._m = shape.num_microbatches
        self._limit = limit
        if switches is None:
            self._run_by_hand()
        else:
            self._run_heuristic(switches)
        for rank in self.ranks:
            while rank.owed:
                rank.run_weight_grad()

    @property
    def span_s(self) -> float:
        """The longest time that any rank takes from the start of its first action to the end of its last action."""
        return max(rank.end_s - rank.start_s for rank in self.ranks)

    @property
    def makespan_s(self) -> float:
        """The time in seconds from the start of rank 0 to the end of the last action."""
        return max(rank.end_s for rank in self.ranks)

    def _run_heuristic(self, switches: Switches) -> None:
        """Write the orders with the heuristic of section 3.1 of the paper and the given choices."""
        for rank in self.ranks:
            self._warm_up(rank, switches)
        needed = set(range(len(self.ranks)))
        for _ in range(self._m):
            for rank in reversed(self.ranks):
                ready_s = self._input_grad_ready_s(rank)
                if rank.stage not in needed:
                    self._run_optional_forward(rank, ready_s, switches)
                self._fill(rank, ready_s, switches)
                rank.run_input_grad(ready_s)
            needed = self._needed_forwards()
            for rank in self.ranks:
                if rank.stage in needed:
                    self._run_forward(rank, switches)

    def _run_by_hand(self) -> None:
        """Write ZB-H1: on rank r, the weight gradients lag r micro-batches behind the input gradients."""
        for rank in self.ranks:
            for _ in range(min(self._m, len(self.ranks) - rank.stage)):
                rank.run_forward(self._forward_ready_s(rank))
        for _ in range(self._m):
            for rank in reversed(self.ranks):
                rank.run_input_grad(self._input_grad_ready_s(rank))
                if rank.owed > rank.stage:
                    rank.run_weight_grad()
            for rank in self.ranks:
                if rank.forwards < self._m:
                    rank.run_forward(self._forward_ready_s(rank))

    def _forward_ready_s(self, rank: _OneStageRank) -> float:
        """Return the time in seconds at which the input of the rank's next forward is ready."""
        if rank.stage == 0:
            return 0
        return self.ranks[rank.stage - 1].forward_ends[rank.forwards] + self._transfer_s

    def _input_grad_ready_s(self, rank: _OneStageRank) -> float:
        """Return the time in seconds at which the output gradient for the rank's next input gradient is ready."""
        if rank is self.ranks[-1]:
            return rank.forward_ends[rank.input_grads]
        return self.ranks[rank.stage + 1].input_grad_ends[rank.input_grads] + self._transfer_s

    def _warm_up(self, rank: _OneStageRank, switches: Switches) -> None:
        """Run forwards until the first input gradient can start.

        The rank runs fewer forwards than the previous rank, unless the later ranks need more, and never exceeds the
        memory limit.
        """
        behind = self.ranks[rank.stage + 1 :]
        needed = min(self._m, self._limit, len(behind) + 1)
        most = min(self._m, self._limit)
        if rank.stage > 0:
            most = min(most, max(needed, self.ranks[rank.stage - 1].forwards - 1))
        while rank.forwards < most:
            ready_s = self._forward_ready_s(rank)
            if rank.forwards >= needed:
                round_trip_s = sum(other.forward_s + other.input_grad_s + 2 * self._transfer_s for other in behind)
                gap_s = rank.forward_ends[0] + round_trip_s - max(rank.end_s, ready_s)
                if gap_s <= 0 or (gap_s < rank.forward_s and not switches.late_input_grad):
                    break
            rank.run_forward(ready_s)

    def _needed_forwards(self) -> set[int]:
        """Return the stages of the ranks that must run a forward now, to stay one forward ahead of the next rank.

        The last rank must stay one forward ahead of its own input gradients.
        """
        needed: set[int] = set()
        wanted = self.ranks[-1].input_grads + 1
        for rank in reversed(self.ranks):
            if rank.forwards < min(wanted, self._m):
                needed.add(rank.stage)
            wanted = rank.forwards + (rank.stage in needed) + 1
        return needed

    def _run_optional_forward(self, rank: _OneStageRank, input_grad_ready_s: float, switches: Switches) -> None:
        """Run a forward before it is needed, unless that delays an input gradient and ``input_grad_first`` is set."""
        if rank.forwards < self._m and self._has_input(rank):
            end_s = max(rank.end_s, self._forward_ready_s(rank)) + rank.forward_s
            if end_s <= input_grad_ready_s or not switches.input_grad_first:
                self._run_forward(rank, switches)

    def _has_input(self, rank: _OneStageRank) -> bool:
        return rank.stage == 0 or self.ranks[rank.stage - 1].forwards > rank.forwards

    def _run_forward(self, rank: _OneStageRank, switches: Switches) -> None:
        """Run a forward if the memory limit allows it. If memory is full, run weight gradients first."""
        if not self._has_input(rank) or rank.forwards - rank.input_grads >= self._limit:
            return
        while rank.held + 1 > self._limit:
            rank.run_weight_grad()
        ready_s = self._forward_ready_s(rank)
        self._fill(rank, ready_s, switches)
        rank.run_forward(ready_s)

    def _fill(self, rank: _OneStageRank, ready_s: float, switches: Switches) -> None:
        """Run weight gradients until ``ready_s``.

        A weight gradient that would end after ``ready_s`` runs only if ``fill_every_gap`` is set, or if this rank would
        otherwise become the rank with the most idle time.
        """
        while rank.owed and (gap_s := ready_s - rank.end_s) > 0:
            short = gap_s < rank.weight_grad_s and not switches.fill_every_gap
            if short and gap_s <= max(other.idle_s for other in self.ranks) - rank.idle_s:
                break
            rank.run_weight_grad()
