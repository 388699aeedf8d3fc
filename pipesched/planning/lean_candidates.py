"""Lean candidates: the candidates likely to need the least memory, for searches in which no other candidate fits."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain

from pipesched.planning.candidate_evaluation import CandidateEvaluator
from pipesched.planning.candidates import Candidate, candidates, smaller_counts
from pipesched.planning.effort import FOR_MEMORY, SearchEffort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.narrow_1f1b import windowed
from pipesched.planning.search_request import SearchRequest
from pipesched.program.order import Schedule

__all__ = ["LeanCandidates"]

_IN_NEED = 1_000_000  # number of actions to simulate before an error is raised, even if the effort is used up
_FEW_LAYERS = 8  # with more layers, choosing the layers to recompute takes longer than the effort accounts for


class LeanCandidates:
    """Finds the candidates of one search that are likely to need the least memory.

    Args:
        search: the request.
        evaluator: assigns layers to stages, and chooses the layers to recompute or offload.
        effort: the remaining effort, from which all work is subtracted.

    """

    def __init__(self, search: SearchRequest, evaluator: CandidateEvaluator, effort: SearchEffort) -> None:
        self._search = search
        self._evaluator = evaluator
        self._effort = effort

    def candidates(self) -> Iterator[Candidate]:
        """Return all candidates of the search, in no particular order."""
        search = self._search
        ranks = [search.num_ranks] if search.all_ranks else smaller_counts(search.num_ranks)
        shapes = search.num_stages, ranks, search.num_microbatches, len(search.pins.layers)
        every = candidates(search.known_schedule, *shapes)
        if search.searches_orders and (search.is_limited or search.placement is not None):
            every = chain(every, windowed(*shapes, search.placement))
        return filter(self._is_allowed, every)

    def _is_allowed(self, candidate: Candidate) -> bool:
        """Return whether a candidate has the requested placement, if any, and can stay within ``max_in_flight``.

        Within ``max_in_flight``, each rank must be able to hold at least one micro-batch per chunk.
        """
        limits = self._search.max_in_flight
        if limits is not None and candidate.schedule.chunks_per_rank > min(limits[: candidate.num_ranks]):
            return False
        return self._search.placement in (None, candidate.placement)

    @cached_property
    def thrifty(self) -> list[Schedule]:
        """The simplest schedule, followed by all schedules in ascending order of their peak memory.

        Peak memory is computed for a partition that ignores the memory limits.
        """
        found = []
        for candidate in self._largest():
            own = candidate.recomputing(self._search.checkpoint or self._search.ladder[-1])
            evaluated = self._evaluator.without_limits(own)
            if evaluated is not None:
                self._effort.spend(candidate.num_actions * FOR_MEMORY)
                found.append(evaluated)
        thrifty = sorted(found, key=lambda evaluated: max(evaluated.peak_bytes))
        return [evaluated.candidate.schedule for evaluated in found[:1] + thrifty]

    def by_thrift(self, every: Iterable[Candidate], thrifty: Sequence[Schedule]) -> list[Candidate]:
        """Sort candidates by number of ranks (descending), micro-batch size (ascending) and place in ``thrifty``."""
        places = thrifty[1:]

        def place(each: Candidate) -> int:
            return places.index(each.schedule) if each.schedule in places else len(places)

        return sorted(every, key=lambda each: (-each.num_ranks, -each.num_microbatches, place(each)))

    def any_that_fits(self, looked_at: Sequence[Schedule] | None = None) -> EvaluatedCandidate | None:
        """Return a plan that fits, with the most ranks and the smallest micro-batches; None if none was found.

        Args:
            looked_at: the schedules to try. Default: all.

        """
        search = self._search
        unlimited = search.memory_limit_bytes is None
        for candidate in self._largest():
            if looked_at is not None and candidate.schedule not in looked_at:
                continue
            own = candidate.recomputing(search.checkpoint or search.ladder[-1])
            found = self._evaluator.without_limits(own) if unlimited else self._evaluator.within_limits(own)
            if found is None and not unlimited and search.checkpoint is None and search.by_layer:
                found = self._evaluator.within_limits(candidate, search.by_layer)
            if found is not None:
                return found
        return None

    def that_fits(self, candidate: Candidate) -> EvaluatedCandidate | None:
        """Return a plan for this candidate, or None if no plan within the limits was found."""
        return next(self._evaluator.choices(candidate), None) if self.may_fit(candidate) else None

    def _largest(self) -> list[Candidate]:
        """Return candidates with the most ranks and the smallest micro-batches, the simplest first.

        Schedules that search for an order are included only if there are no others.
        """
        every = list(self.candidates())
        most = max(((each.num_ranks, each.num_microbatches) for each in every), default=None)
        every = [each for each in every if (each.num_ranks, each.num_microbatches) == most]
        return sorted([each for each in every if not each.schedule.searches] or every, key=lambda each: each.order)

    def may_fit(self, candidate: Candidate) -> bool:
        """Return whether the candidate's ranks together have room for all weights, buffers and optimizer states."""
        limits = self._search.memory_limit_bytes
        return limits is None or self.least_bytes(candidate.num_microbatches) <= sum(limits[: candidate.num_ranks])

    def least_bytes(self, num_microbatches: int) -> int:
        """Return a lower bound on the memory of all ranks together, in bytes.

        The bound is the size of the weights, buffers and optimizer states of all layers and, with two or more
        micro-batches, of all gradients.
        """
        kept, gradients = self._kept_bytes
        return kept + (gradients if num_microbatches > 1 else 0)

    @cached_property
    def _kept_bytes(self) -> tuple[int, int]:
        """Return the memory that the layers occupy throughout a step and the size of their gradients, in bytes."""
        profile = self._search.profile
        whole = profile.costs([list(self._search.pins.layers)], min(profile.graphs))
        if self._search.replica_costs is not None:
            whole = self._search.replica_costs.added(whole, [0], [[]])
        return whole.weight_bytes[0] + whole.buffer_bytes[0] + whole.optimizer_bytes[0], whole.gradient_bytes[0]

    @property
    def effort_in_need(self) -> float:
        """The number of actions that may be simulated before an error is raised, even if the effort is used up."""
        return _IN_NEED * _FEW_LAYERS / max(_FEW_LAYERS, len(self._search.pins.layers))
