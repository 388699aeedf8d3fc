"""Zero bubble: orders made for given costs and memory (Qi et al. 2023, arXiv:2401.10241,
section 3.1).

Warm-up forwards fill the time until a rank's first input gradient can start. Then every rank runs input gradients and
forwards by turns, and weight gradients where it would wait or where memory is full. Three choices are open; all eight
combinations are tried, and the shortest wins.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple, Protocol

from pipesched.errors import ScheduleError
from pipesched.program.order import Order, Shape

__all__ = ["StageTimes", "zero_bubble"]


class StageTimes(Protocol):
    """What the heuristic reads of ``pipesched.Costs``: seconds, one a stage, and of a transfer."""

    @property
    def num_stages(self) -> int:
        """How many stages."""

    @property
    def forward_s(self) -> Sequence[float]:
        """Of F."""

    @property
    def input_grad_s(self) -> Sequence[float]:
        """Of I."""

    @property
    def weight_grad_s(self) -> Sequence[float]:
        """Of W."""

    @property
    def transfer_s(self) -> float:
        """Of a message between neighbours."""


class _Equal(NamedTuple):
    """Every action takes a second, and no message any time."""

    num_stages: int
    forward_s: Sequence[float]
    input_grad_s: Sequence[float]
    weight_grad_s: Sequence[float]
    transfer_s: float = 0


class Switches(NamedTuple):
    """What the heuristic leaves open."""

    late_input_grad: bool  # a warm-up forward may delay the first input gradient
    input_grad_first: bool  # a forward that is not yet needed may not delay an input gradient
    fill_every_gap: bool  # a weight gradient goes into any gap, however short


def zero_bubble(
    shape: Shape, costs: StageTimes | None, *, max_in_flight: int | None, weight_grad_share: float
) -> list[Order]:
    """The orders of all ranks, one stage each, with the shortest span that the heuristic finds.

    costs: seconds, one a stage; where None all 1 and no latency. max_in_flight: how many micro-batches a rank may
    hold at once; where None p. weight_grad_share: what is held from I to W as a share of a micro-batch's activations;
    1 counts it whole until the end of W. ZB-H1 competes too, where the limit allows it, so the span is no longer.
    Raises ScheduleError for costs of another number of stages, a limit below 1 and a share that is none.
    """
    if costs is None:
        ones = [1.0] * shape.num_stages
        costs = _Equal(shape.num_stages, forward_s=ones, input_grad_s=ones, weight_grad_s=ones)
    limit = shape.num_ranks if max_in_flight is None else max_in_flight
    _check(shape, costs, limit, weight_grad_share)
    choices: list[Switches | None] = [Switches(*each) for each in product((False, True), repeat=3)]
    if limit >= min(shape.num_ranks, shape.num_microbatches):
        choices.append(None)
    candidates = [_Pipeline(shape, costs, limit, weight_grad_share, choice) for choice in choices]
    best = min(candidates, key=lambda candidate: (candidate.span_s, candidate.makespan_s))
    return [rank.order for rank in best.ranks]


def _check(shape: Shape, costs: StageTimes, limit: int, share: float) -> None:
    if not all(hasattr(costs, name) for name in _Equal._fields):
        raise ScheduleError(f"costs are pipesched.Costs, one number a stage; got {costs!r}; pass Costs(...)")
    if costs.num_stages != shape.num_stages:
        raise ScheduleError(
            f"costs have one number a stage; there are {shape.num_stages} stages, the costs have {costs.num_stages}; "
            f"make the costs for {shape.num_stages} stages"
        )
    if not isinstance(limit, int) or limit < 1:
        raise ScheduleError(f"max_in_flight is a whole number, at least 1; got {limit!r}; pass 1 or more")
    if not isinstance(share, int | float | Fraction) or not 0 <= share <= 1:
        raise ScheduleError(f"weight_grad_share is a share of the activations, 0 to 1; got {share!r}; pass 1 or less")


class _Rank:
    """One rank and its only stage: what it has run, on its own clock."""

    def __init__(self, shape: Shape, stage: int, costs: StageTimes, share: float) -> None:
        self.order = Order(shape)
        self.stage = stage
        self.forward_s = costs.forward_s[stage]
        self.input_grad_s = costs.input_grad_s[stage]
        self.weight_grad_s = costs.weight_grad_s[stage]
        self.forward_ends: list[float] = []
        self.input_grad_ends: list[float] = []
        self.weight_grads = 0
        self.start_s: float = 0
        self.end_s: float = 0
        self.idle_s: float = 0  # since its own start
        self._share = share

    @property
    def forwards(self) -> int:
        """How many forwards have run."""
        return len(self.forward_ends)

    @property
    def input_grads(self) -> int:
        """How many input gradients have run."""
        return len(self.input_grad_ends)

    @property
    def owed(self) -> int:
        """How many weight gradients can run."""
        return self.input_grads - self.weight_grads

    @property
    def held(self) -> float:
        """Micro-batches in memory."""
        return self.forwards - self.input_grads + self._share * self.owed

    def run_forward(self, ready_s: float) -> None:
        """Run the next micro-batch's forward once its input is there."""
        if not self.forwards:
            self.start_s = self.end_s = ready_s
        self._run(ready_s, self.forward_s)
        self.forward_ends.append(self.end_s)
        self.order.F(self.stage)

    def run_input_grad(self, ready_s: float) -> None:
        """Run the next micro-batch's input gradient once the gradient of its output is there."""
        self._run(ready_s, self.input_grad_s)
        self.input_grad_ends.append(self.end_s)
        self.order.I(self.stage)

    def run_weight_grad(self) -> None:
        """Run the oldest weight gradient that is owed."""
        self._run(self.end_s, self.weight_grad_s)
        self.weight_grads += 1
        self.order.W(self.stage)

    def _run(self, ready_s: float, seconds: float) -> None:
        start_s = max(self.end_s, ready_s)
        self.idle_s += start_s - self.end_s
        self.end_s = start_s + seconds


class _Pipeline:
    """All ranks of one candidate: the heuristic with its choices made, or ZB-H1 where there are none."""

    def __init__(self, shape: Shape, costs: StageTimes, limit: int, share: float, switches: Switches | None) -> None:
        self.ranks = [_Rank(shape, stage, costs, share) for stage in range(shape.num_stages)]
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
        """The longest of the ranks' own last end minus first start."""
        return max(rank.end_s - rank.start_s for rank in self.ranks)

    @property
    def makespan_s(self) -> float:
        """The last end; rank 0 starts at 0."""
        return max(rank.end_s for rank in self.ranks)

    def _run_heuristic(self, switches: Switches) -> None:
        """Write the orders by section 3.1 of the paper, with the open choices made."""
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
        """Write ZB-H1: on rank r weight gradients lag r micro-batches behind input gradients."""
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

    def _forward_ready_s(self, rank: _Rank) -> float:
        """When the input of the next forward is there."""
        if rank.stage == 0:
            return 0
        return self.ranks[rank.stage - 1].forward_ends[rank.forwards] + self._transfer_s

    def _input_grad_ready_s(self, rank: _Rank) -> float:
        """When the gradient that the next input gradient starts from is there."""
        if rank is self.ranks[-1]:
            return rank.forward_ends[rank.input_grads]
        return self.ranks[rank.stage + 1].input_grad_ends[rank.input_grads] + self._transfer_s

    def _warm_up(self, rank: _Rank, switches: Switches) -> None:
        """Run forwards until the first input gradient can start, fewer than the rank before and within memory."""
        behind = self.ranks[rank.stage + 1 :]
        needed = min(self._m, self._limit, len(behind) + 1)
        most = min(self._m, self._limit)
        if rank.stage > 0:
            most = min(most, max(needed, self.ranks[rank.stage - 1].forwards - 1))
        while rank.forwards < most:
            ready_s = self._forward_ready_s(rank)
            if rank.forwards >= needed:
                round_trip_s = sum(each.forward_s + each.input_grad_s + 2 * self._transfer_s for each in behind)
                gap_s = rank.forward_ends[0] + round_trip_s - max(rank.end_s, ready_s)
                if gap_s <= 0 or (gap_s < rank.forward_s and not switches.late_input_grad):
                    break
            rank.run_forward(ready_s)

    def _needed_forwards(self) -> set[int]:
        """The stages that need a forward: every rank is one ahead of the next, the last one of its input gradients."""
        needed: set[int] = set()
        wanted = self.ranks[-1].input_grads + 1
        for rank in reversed(self.ranks):
            if rank.forwards < min(wanted, self._m):
                needed.add(rank.stage)
            wanted = rank.forwards + (rank.stage in needed) + 1
        return needed

    def _run_optional_forward(self, rank: _Rank, input_grad_ready_s: float, switches: Switches) -> None:
        """Get further ahead of the next rank, unless that delays an input gradient and none may be."""
        if rank.forwards < self._m and self._has_input(rank):
            end_s = max(rank.end_s, self._forward_ready_s(rank)) + rank.forward_s
            if end_s <= input_grad_ready_s or not switches.input_grad_first:
                self._run_forward(rank, switches)

    def _has_input(self, rank: _Rank) -> bool:
        return rank.stage == 0 or self.ranks[rank.stage - 1].forwards > rank.forwards

    def _run_forward(self, rank: _Rank, switches: Switches) -> None:
        """Run a forward, if weight gradients can make room for it."""
        if not self._has_input(rank) or rank.forwards - rank.input_grads >= self._limit:
            return
        while rank.held + 1 > self._limit:
            rank.run_weight_grad()
        ready_s = self._forward_ready_s(rank)
        self._fill(rank, ready_s, switches)
        rank.run_forward(ready_s)

    def _fill(self, rank: _Rank, ready_s: float, switches: Switches) -> None:
        """Run weight gradients until ``ready_s``: also one too long for its gap, where waiting would make this the rank
        that has waited longest.
        """
        while rank.owed and (gap_s := ready_s - rank.end_s) > 0:
            waits_s = max(each.idle_s for each in self.ranks) - rank.idle_s
            if gap_s < rank.weight_grad_s and gap_s <= waits_s and not switches.fill_every_gap:
                break
            rank.run_weight_grad()
