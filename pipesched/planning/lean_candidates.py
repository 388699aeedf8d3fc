"""Lean candidates: those of a search that may need the least memory, for searches in which nothing else fits."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from pipesched.planning.candidates import LADDER, Candidate, candidates, smaller_counts
from pipesched.planning.effort import FOR_MEMORY, Effort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.recomputation_choice import RecomputationChooser
from pipesched.planning.search_request import SearchRequest
from pipesched.program.order import Schedule

__all__ = ["LeanCandidates"]

_IN_NEED = 1_000_000  # actions that could be simulated before it is said that nothing fits, whatever the effort
_FEW_LAYERS = 8  # with more of them a choice of what is recomputed takes longer than is counted


class LeanCandidates:
    """The candidates of one search by what they need in memory. effort: counts what it takes to find that."""

    def __init__(self, search: SearchRequest, chooser: RecomputationChooser, effort: Effort) -> None:
        self._search = search
        self._chooser = chooser
        self._effort = effort

    def candidates(self) -> Iterator[Candidate]:
        """All that may be asked about, in no order."""
        search = self._search
        ranks = [search.num_ranks] if search.all_ranks else smaller_counts(search.num_ranks)
        return candidates(
            search.schedule, search.num_stages, ranks, search.num_microbatches, most_stages=len(search.pins.layers)
        )

    @cached_property
    def thrifty(self) -> list[Schedule]:
        """The simplest schedule, then all by what they need in memory where nothing limits them, the least first."""
        found = []
        for candidate in self._largest():
            own = self._chooser.without_limits(candidate.recomputing(self._search.checkpoint or LADDER[-1]))
            if own is not None:
                self._effort.spend(candidate.num_actions * FOR_MEMORY)
                found.append(own)
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

    def any_that_fits(self, looked_at: Sequence[Schedule] | None = None) -> EvaluatedCandidate | None:
        """One that fits, as far as these schedules, or all, show with most ranks and smallest micro-batches."""
        search = self._search
        unlimited = search.memory_limit_bytes is None
        for candidate in self._largest():
            if looked_at is not None and candidate.schedule not in looked_at:
                continue
            own = candidate.recomputing(search.checkpoint or LADDER[-1])
            found = self._chooser.without_limits(own) if unlimited else self._chooser.within_limits(own)
            if found is None and not unlimited and search.checkpoint is None and search.may_offload:
                found = self._chooser.within_limits(candidate, ("recompute", "offload"))
            if found is not None:
                return found
        return None

    def that_fits(self, candidate: Candidate) -> EvaluatedCandidate | None:
        """The candidate in a way that keeps the limits."""
        return next(self._chooser.choices(candidate), None) if self.may_fit(candidate) else None

    def _largest(self) -> list[Candidate]:
        """Candidates of most ranks and the smallest micro-batches, the simplest first; such as search for an order only
        where there are no others.
        """
        every = list(self.candidates())
        most = max(((each.num_ranks, each.num_microbatches) for each in every), default=None)
        every = [each for each in every if (each.num_ranks, each.num_microbatches) == most]
        return sorted([each for each in every if not each.schedule.searches] or every, key=lambda each: each.order)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether its ranks together may hold what layers keep all the time, each of them once."""
        limits = self._search.memory_limit_bytes
        return limits is None or self.least_bytes(candidate.num_microbatches) <= sum(limits[: candidate.num_ranks])

    def least_bytes(self, num_microbatches: int) -> int:
        """What all ranks together need at least: what layers keep all the time, and with the backward of a second
        micro-batch all gradients.
        """
        kept, gradients = self._kept_bytes
        return kept + (gradients if num_microbatches > 1 else 0)

    @cached_property
    def _kept_bytes(self) -> tuple[int, int]:
        """What all layers keep throughout a step, and their gradients."""
        profile = self._search.profile
        whole = profile.costs([list(self._search.pins.layers)], min(profile.graphs))
        return whole.weight_bytes[0] + whole.buffer_bytes[0] + whole.optimizer_bytes[0], whole.gradient_bytes[0]

    @property
    def effort_in_need(self) -> float:
        """Actions that are spent before it is said that nothing fits, whatever the effort."""
        return _IN_NEED * _FEW_LAYERS / max(_FEW_LAYERS, len(self._search.pins.layers))
