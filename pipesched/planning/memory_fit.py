"""Memory fit: the cuts of candidates that keep the limits of memory, and which of them may need the least."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import networkx as nx

from pipesched.errors import PartitionError
from pipesched.partitioning.partition import Partition
from pipesched.planning.candidates import LADDER, Candidate, candidates, smaller_counts
from pipesched.planning.evaluated_candidate import EvaluatedCandidate, Stages
from pipesched.planning.search_request import Search
from pipesched.planning.stage_cutter import Cutter
from pipesched.program.checkpoint_options import Keep, keep_by_layer
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs

__all__ = ["AT_LEAST", "A_SEARCH", "MemoryFitter"]

_IN_NEED = 1_000_000  # actions that could be simulated before it is said that nothing fits, whatever the effort
_FEW_LAYERS = 8  # with more of them a cut that chooses what is recomputed takes longer than is counted
A_SEARCH = 40  # actions that could be simulated while an order that is searched for gets one more
AT_LEAST = 1_000  # actions that could be simulated in the time that any one simulation or cut takes
_A_CUT = 100  # actions that could be simulated while layers are cut, for each of them and of the stages
_A_FIT = 2  # actions that could be simulated while it is found what ranks need in memory, for each action
_TRIES = 6  # at cuts under a limit of memory

Choices = tuple[Literal["recompute", "offload"], ...]
#: A candidate, and a cut of it that keeps the limits.
Fitting = tuple[Candidate, Stages, Costs]


class MemoryFitter:
    """Asks for one search, and counts what that takes, in actions that could have been simulated."""

    def __init__(self, search: Search, progress: Callable[[float], None] = lambda _: None) -> None:
        self._search, self._progress = search, progress
        self._left: float = search.effort
        self._cuts: dict[Any, tuple[Stages, Mapping[str, Keep], list[float]] | None] = {}

    def candidates(self) -> Iterator[Candidate]:
        """All that may be asked about."""
        search = self._search
        ranks = [search.num_ranks] if search.all_ranks else smaller_counts(search.num_ranks)
        most = len(search.pins.layers)
        return candidates(search.schedule, search.num_stages, ranks, search.num_microbatches, most)

    @cached_property
    def thrifty(self) -> list[Schedule]:
        """The simplest schedule, then all by what they need in memory where nothing limits them, the least first."""
        found = []
        for own in [each.recomputing(self._search.checkpoint or LADDER[-1]) for each in self._largest()]:
            if cut := self._cut(own, None):
                self._spend(own.num_actions * _A_FIT)
                found.append(EvaluatedCandidate(own, cut[1], self._costs(own, cut[1]), 0, posted=self._search.posted))
        thrifty = sorted(found, key=lambda each: max(each.peak_bytes))
        return [each.candidate.schedule for each in found[:1] + thrifty]

    def by_thrift(self, every: Iterable[Candidate], thrifty: Sequence[Schedule]) -> list[Candidate]:
        """Those that may need the least memory first: all ranks, the smallest micro-batches, schedules that hold few;
        those that are searched for last.
        """
        places = thrifty[1:]

        def place(each: Candidate) -> int:
            return places.index(each.schedule) if each.schedule in places else len(places)

        return sorted(every, key=lambda each: (-each.num_ranks, -each.num_microbatches, place(each)))

    def any_plan(self, looked_at: Sequence[Schedule] | None = None) -> Fitting | None:
        """One that fits, as far as these schedules, or all, show with most ranks and smallest micro-batches."""
        search, free = self._search, self._search.memory_limit_bytes is None
        both = not free and search.checkpoint is None and search.may_offload
        for candidate in [each for each in self._largest() if looked_at is None or each.schedule in looked_at]:
            own = candidate.recomputing(search.checkpoint or LADDER[-1])
            found = next(self._fitting(own) if free else self._squeezed(own), None)
            if found is None and both:
                found = next(self._squeezed(candidate, ("recompute", "offload")), None)
            if found is not None:
                return found
        return None

    def plan_of(self, candidate: Candidate) -> Fitting | None:
        """One of this candidate that keeps the limits."""
        return next(self._fitting(candidate), None) if self._may_hold(candidate) else None

    def _largest(self) -> list[Candidate]:
        """Candidates of most ranks and the smallest micro-batches, the simplest first; such as search for an order only
        where there are no others.
        """
        every = list(self.candidates())
        most = max(((each.num_ranks, each.num_microbatches) for each in every), default=None)
        every = [each for each in every if (each.num_ranks, each.num_microbatches) == most]
        return sorted([each for each in every if not each.schedule.searches] or every, key=lambda each: each.order)

    def _may_hold(self, candidate: Candidate) -> bool:
        """Whether its ranks together may hold what layers keep all the time, each of them once."""
        limits = self._search.memory_limit_bytes
        return limits is None or self.least_bytes(candidate.num_microbatches) <= sum(limits[: candidate.num_ranks])

    def least_bytes(self, num_microbatches: int) -> int:
        """What all ranks together need at least: what layers keep all the time, and with the backward of a second
        micro-batch all gradients.
        """
        whole = self._whole
        kept = whole.weight_bytes[0] + whole.buffer_bytes[0] + whole.optimizer_bytes[0]
        return kept + (whole.gradient_bytes[0] if num_microbatches > 1 else 0)

    @cached_property
    def _whole(self) -> Costs:
        """All layers as one stage."""
        return self._search.profile.costs([list(self._search.pins.layers)], min(self._search.profile.graphs))

    @property
    def in_need(self) -> float:
        """Actions that are spent before it is said that nothing fits, whatever the effort."""
        return _IN_NEED * _FEW_LAYERS / max(_FEW_LAYERS, len(self._search.pins.layers))

    @property
    def spent(self) -> float:
        """Actions that could have been simulated so far."""
        return self._search.effort - self._left

    def _spend(self, actions: float) -> None:
        self._left -= actions
        self._progress(min(1.0, 1 - self._left / self._search.effort))

    def _rows(self, num_microbatches: int) -> int:
        return -(-self._search.batch_size // num_microbatches)

    def _graph(self, num_microbatches: int) -> "nx.DiGraph[str]":
        return self._search.profile.graph(self._rows(num_microbatches))

    def _costs(self, candidate: Candidate, stages: Stages) -> Costs:
        search, rows = self._search, self._rows(candidate.num_microbatches)
        keep = keep_by_layer(candidate.checkpoint)
        costs = search.profile.costs(stages, rows, keep=keep, ranks_are=search.ranks_are)
        return replace(costs, links=search.links) if search.links else costs

    # ---- where layers are cut ---------------------------------------------------------------------------------------

    def _fitting(self, candidate: Candidate) -> Iterator[Fitting]:
        """The candidate's cuts that keep the limits: one where nothing is recomputed, or one for each mode."""
        asked, limits = self._search.checkpoint, self._search.memory_limit_bytes
        cut = self._cut(candidate.recomputing(LADDER[0] if asked is None else asked), None)
        if cut is None:
            return
        own, stages, _ = cut
        costs = self._costs(own, stages)
        if limits is None or not any(self._excess(own, stages, costs, limits)):
            yield own, stages, costs
        elif asked is not None:
            yield from self._squeezed(own)
        elif fitting := list(self._kept_by_layer(candidate)):
            yield from fitting
        else:
            for mode in LADDER[1:]:
                yield from self._squeezed(candidate.recomputing(mode))

    def _kept_by_layer(self, candidate: Candidate) -> Iterator[Fitting]:
        """The cuts under the limits with what becomes of each layer's activations, chosen together: recomputed alone,
        and where some may wait on the host both.
        """
        both = list(self._squeezed(candidate, ("recompute", "offload"))) if self._search.may_offload else []
        yield from both
        if not both or any(own.offloads for own, _, _ in both):
            yield from self._squeezed(candidate, ("recompute",))

    def _squeezed(self, candidate: Candidate, choices: Choices = ()) -> Iterator[Fitting]:
        """The cut under the limits, if there is one: where a rank needs more than its limit, the cut is asked for so
        much less than what it has counted; for half as much less where there is none. choices: what may be done with
        layers' activations, which is chosen with the cut.
        """
        limits = self._search.memory_limit_bytes or ()
        asked = [float(limit) for limit in limits[: candidate.num_ranks]]
        enough: list[float] = []  # for a cut, though not for all that it needs
        for _ in range(_TRIES):
            cut = self._cut(candidate, tuple(asked), choices)
            if cut is None and not enough:
                return
            if cut is None:
                asked = [(one + other) / 2 for one, other in zip(asked, enough, strict=True)]
                continue
            own, stages, counted = cut
            costs = self._costs(own, stages)
            excess = self._excess(own, stages, costs, tuple(limits))
            if not any(excess):
                yield own, stages, costs
                return
            enough = asked
            asked = [
                max(1, min(limit, size) - more) if more else limit
                for limit, size, more in zip(asked, counted or asked, excess, strict=True)
            ]

    def _excess(self, candidate: Candidate, stages: Stages, costs: Costs, limits: tuple[int, ...]) -> tuple[int, ...]:
        """How much each rank needs beyond its limit."""
        searches = candidate.schedule.searches and not candidate.is_written
        self._spend(candidate.num_actions * (A_SEARCH if searches else _A_FIT))
        return EvaluatedCandidate(candidate, stages, costs, 0, limits, self._search.posted).excess_bytes

    def _cut(
        self, candidate: Candidate, limits: tuple[float, ...] | None, choices: Choices = ()
    ) -> tuple[Candidate, Stages, list[float]] | None:
        """The candidate, its stages of the smallest bottleneck, and the bytes that the cut has counted of each rank,
        where it has; None where there are none. choices: what may become of layers' activations, which is chosen
        together with the cut.
        """
        key: Any = (candidate.placement, self._rows(candidate.num_microbatches))
        if limits is not None:  # then schedules that hold as much are alike
            again, held = candidate.checkpoint in LADDER[1:], self._cutter(candidate, candidate.program).in_flight
            key = (*key, limits, choices, tuple(held), candidate.num_microbatches, again or candidate.checkpoint)
        if key not in self._cuts:
            self._spend(AT_LEAST + _A_CUT * (len(self._search.pins.layers) + candidate.num_stages))
            # Without limits a cut asks for the placement alone, and not how many micro-batches are held.
            program = candidate.outline if limits is None else candidate.program
            to_host = self._search.profile.machine.host_bytes_per_s
            cutter = replace(self._cutter(candidate, program, limits), choices=choices, host_bytes_per_s=to_host)
            try:
                stages, found = cutter.cut()
                self._cuts[key] = stages, (found.checkpoint if found else {}), _counted(found, candidate.num_ranks)
            except PartitionError:
                self._cuts[key] = None
        if (cut := self._cuts[key]) is None:
            return None
        stages, chosen, counted = cut
        return (candidate.recomputing(chosen) if chosen else candidate), stages, counted

    def _cutter(self, candidate: Candidate, program: Program, limits: tuple[float, ...] | None = None) -> Cutter:
        search = self._search
        graph = self._graph(candidate.num_microbatches)
        return Cutter(search.pins, program, lambda: graph, candidate.checkpoint, search.links, limits)


def _counted(found: Partition | None, num_ranks: int) -> list[float]:
    """The bytes that a cut has counted of each rank; nothing where it has not."""
    if found is None:
        return []
    both = list(zip(found.ranks, found.summaries, strict=True))
    return [sum(own.memory_bytes for other, own in both if other == rank) for rank in range(num_ranks)]
