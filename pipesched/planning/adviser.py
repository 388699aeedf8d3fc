"""Adviser: searches again with one thing changed, to say why a plan is as it is and what to try next."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from pipesched.errors import PipeschedError
from pipesched.planning.advice import Advice, Cause, NextStep, cause_of, more_in_words, no_more_in_words
from pipesched.planning.evaluated_candidate import EvaluatedCandidate, label_of
from pipesched.planning.plan import Plan
from pipesched.planning.profile_search import ProfileSearch
from pipesched.planning.search_request import SearchRequest, limits_of
from pipesched.planning.step_shares import StepShares
from pipesched.planning.tuner import Tuner
from pipesched.simulation.layer_split import with_split_layer
from pipesched.simulation.links import Links
from pipesched.units import counted, quote_bytes, quote_time

__all__ = ["advised"]

_QUICK = 1 / 4  # the effort of a quick search, relative to the search for the plan
_QUICK_WITH_AXES = 1 / 12  # the same for plans of replicas, whose own search takes much longer
_LEAST_EFFORT = 250_000  # actions: with less, quick searches miss remedies that are worth a line
_WORTH = 0.02  # a smaller saving is not worth a line
_SLIGHTLY = 1.1  # a memory limit that is larger by this factor is tried
_MOST = 3  # lines about what to try next
_NOTABLE = 0.03  # the smallest share of a step for which a remedy is tried
_SLOWER = 0.01  # a plan with fewer ranks may be slower by this fraction and still count as equally fast
_FREE_CHOICES = ("num_stages", "num_microbatches", "boundaries", "checkpoint")
_TIMES = 2  # how many times as large a batch, as many ranks or as fast links are tried


def advised(search: ProfileSearch, plan: Plan) -> Plan:
    """Return the plan with advice: why it does not have more ranks, chunks or micro-batches, and what to try next."""
    if plan.costs is None or plan.shares is None or not plan.alternatives:
        return plan
    adviser = _Adviser(search=search, plan=plan, shares=plan.shares)
    return replace(plan, advice=Advice(why_not_more=tuple(adviser.why_not_more()), next_steps=adviser.next_steps()))


class _FoundPlan(NamedTuple):
    """The result of a search."""

    candidate: EvaluatedCandidate
    #: Whether the effort sufficed.
    complete: bool


@dataclass(frozen=True, kw_only=True)
class _RequestChange:
    """A change of a search, with the words for it."""

    cause: Cause
    words: str
    arguments: dict[str, Any]
    #: The result of a quick search. None: not searched yet.
    quick: _FoundPlan | None = None


@dataclass(frozen=True, kw_only=True)
class _Adviser:
    search: ProfileSearch
    plan: Plan
    shares: StepShares

    # ---- searches -----------------------------------------------------------------------------------------------

    @cached_property
    def _pinned(self) -> dict[str, Any]:
        """The arguments that keep the division of the ranks into pipelines and replicas."""
        own = self.plan.replication
        if self.search.axes is None or own is None:
            return {}
        groups = {} if self.plan.tensor is None else {"tensor": self.plan.tensor.size}
        axes = {"pipeline": self.plan.program.num_ranks, "replicate": own.num_replicas, **groups}
        splits = self.plan.tensor is not None and self.plan.tensor.sequence_parallel
        chosen = {} if self.search.tensor == 1 else {"tensor": 1, "sequence_parallel": splits}
        return {"axes": axes, "zero": own.zero, **chosen, **self._layouts}

    @property
    def _layouts(self) -> dict[str, Any]:
        """The argument that keeps the layout of the tensor groups, if the search had to choose among several."""
        kind = "1d" if self.plan.tensor is None else self.plan.tensor.layout.kind
        return {} if self.search.tensor_layouts in (kind, (kind,), [kind]) else {"tensor_layouts": (kind,)}

    def _request(self, arguments: dict[str, Any]) -> SearchRequest:
        """Return the request for the plan after a change. With replicas, their division stays."""
        changed = self.search.but(**{**self._pinned, **arguments})
        if changed.axes is None:
            return changed.search_request
        searches = changed.axes_request.divisions()
        own = self.plan.replication
        same = [
            one
            for one in searches
            if one.tensor == self.plan.tensor
            and one.replica_costs
            and own
            and _alike(one.replica_costs.replication, own)
        ]
        return (same or searches)[0]

    def _quick(self, arguments: dict[str, Any]) -> _FoundPlan | None:
        """Search with a part of the effort of the search for the plan. Returns None if there is no candidate."""
        return self._searched(arguments, _QUICK_WITH_AXES if self._pinned else _QUICK)

    def _searched(self, arguments: dict[str, Any], effort: float = 1.0) -> _FoundPlan | None:
        """Search after a change, with an effort relative to that of the search for the plan."""
        try:
            request = self._request(arguments)
            least = min(request.effort, _LEAST_EFFORT)
            tuner = Tuner(replace(request, effort=max(least, int(request.effort * effort))))
            return _FoundPlan(tuner.refine(), tuner.complete) if tuner.explore() else None
        except PipeschedError:
            return None

    @property
    def _own_s(self) -> float:
        return self.plan.alternatives[0].step_s

    # ---- why not more -------------------------------------------------------------------------------------------

    def why_not_more(self) -> Iterator[str]:
        """Yield a sentence each for ranks, chunks and micro-batches."""
        yield self._more_ranks()
        yield self._more_chunks()
        yield self._more_microbatches()

    def _more_ranks(self) -> str:
        used = self.plan.program.num_ranks
        ranks = self._request({}).num_ranks
        if used == ranks:
            return no_more_in_words("rank", "all ranks are in use")
        return self._more("rank", ranks, {"all_ranks": True}, "their stages do not fit the layers or the memory limit")

    def _more_chunks(self) -> str:
        program = self.plan.program
        chunks = program.num_stages // program.num_ranks + 1
        stages = chunks * program.num_ranks
        layers = sum(map(len, self.plan.stages))
        if self.search.request.num_stages is not None or self.search.request.schedule != "auto":
            return no_more_in_words("chunk", "the request fixes the stages or the schedule")
        if program.num_ranks == 1:
            return no_more_in_words("chunk", "chunks need several ranks in a pipeline")
        if stages > layers:
            reason = f"{counted(layers, 'layer')} cannot be cut into {stages} stages"
            return no_more_in_words("chunk", reason)
        fixed = {} if self._pinned else {"num_ranks": program.num_ranks, "links": self._links_among(program.num_ranks)}
        change = {"num_stages": stages, "all_ranks": True, **fixed}
        return self._more("chunk", chunks, change, self._unfit)

    def _more_microbatches(self) -> str:
        count = self.plan.program.num_microbatches
        if self.search.request.num_microbatches is not None:
            reason = f"the request fixes {counted(count, 'micro-batch')}"
            return no_more_in_words("micro-batch", reason)
        more = [other for other in self._request({}).num_microbatches if other > count]
        if not more:
            rows = min(self.search.profile.graphs)
            reason = f"the profile has no costs for fewer than {counted(rows, 'row')}; add them to let the search try"
            return no_more_in_words("micro-batch", reason)
        change = {"num_microbatches": min(more)}
        return self._more("micro-batch", min(more), change, self._unfit)

    @property
    def _unfit(self) -> str:
        """The reason why a search found no plan with more chunks or micro-batches."""
        limited = self.search.memory_limit_bytes is not None
        return "no such plan fits into the memory limit" if limited else "no schedule makes such a plan"

    def _more(self, what: str, count: int, arguments: dict[str, Any], reason: str) -> str:
        found = self._quick(arguments)
        if found is None:
            return no_more_in_words(what, reason)
        name, value = next(iter(arguments.items()))
        return more_in_words(what, count, float(found.candidate.step_s), self._own_s, f"{name}={value}")

    def _links_among(self, num_ranks: int) -> Links | None:
        links = self.search.links
        return links.among(range(num_ranks)) if links is not None and links.hosts else links

    # ---- what to try next ---------------------------------------------------------------------------------------

    def next_steps(self) -> tuple[NextStep, ...]:
        """Return what to try next: first what removes the cause that binds the plan, then the largest savings."""
        quick: list[tuple[NextStep, _RequestChange, _FoundPlan]] = []
        for change in self._changes():
            found = change.quick or self._quick(change.arguments)
            step = None if found is None else self._step(change, found)
            if found is not None and step is not None:
                quick.append((step, change, found))
        cause = cause_of(self.shares, Advice(next_steps=tuple(step for step, _, _ in quick)))
        quick.sort(key=lambda own: (own[0].cause != cause, -own[0].saving))
        kept = (
            step if found.complete or self._pinned else self._fully(change) for step, change, found in quick[:_MOST]
        )
        return tuple(step for step in kept if step is not None)

    def _fully(self, change: _RequestChange) -> NextStep | None:
        """Search again after a change with all effort, because a quick search did not suffice."""
        found = self._searched(change.arguments)
        return None if found is None else self._step(change, found)

    def _changes(self) -> Iterator[_RequestChange]:
        """Yield the changes that may help, according to what the step is spent on."""
        search = self.search
        shares = self.shares
        yield from self._free_choices()
        yield from self._larger_limit()
        if shares.messages + shares.collectives >= _NOTABLE and search.links is not None:
            faster = search.links.faster(_TIMES)
            yield _RequestChange(cause="messages", words="links that are twice as fast", arguments={"links": faster})
        if shares.waiting >= _NOTABLE:
            yield self._larger_batch()
        if shares.imbalance >= _NOTABLE:
            yield self._split_layer()
        if shares.imbalance + shares.waiting >= _NOTABLE or search.all_ranks:
            yield from self._fewer_ranks()
        yield from self._more_devices()

    def _free_choices(self) -> Iterator[_RequestChange]:
        """Yield the change that leaves out all choices that the search could make itself."""
        request = self.search.request
        free: dict[str, Any] = {"schedule": "auto", **dict.fromkeys(_FREE_CHOICES)}
        fixed = [name for name, value in free.items() if getattr(request, name) != value]
        if fixed:
            words = f"leave out {', '.join(f'{name}=' for name in fixed)}"
            yield _RequestChange(cause="choices", words=words, arguments={name: free[name] for name in fixed})

    def _larger_limit(self) -> Iterator[_RequestChange]:
        """Yield the changes to a memory limit that suffices for the fastest plan, and to a slightly larger limit."""
        limit = self.search.memory_limit_bytes
        if limit is None:
            return
        found = self._quick({"memory_limit_bytes": None})
        if found is None:
            return
        most = math.ceil(max(found.candidate.peak_bytes))
        yield self._limit(most)
        if not self._has_limits and found.candidate.step_s < self._own_s * (1 - _WORTH):
            slightly = math.ceil((limits_of(limit, 1) or (0,))[0] * _SLIGHTLY)
            if slightly < most:
                yield self._limit(slightly)

    def _limit(self, limit: int) -> _RequestChange:
        words = f"memory_limit_bytes={limit} ({quote_bytes(limit)})"
        return _RequestChange(cause="memory", words=words, arguments={"memory_limit_bytes": limit})

    def _larger_batch(self) -> _RequestChange:
        batch = self.search.batch_size * _TIMES
        count = self.search.request.num_microbatches
        more = {} if count is None else {"num_microbatches": count * _TIMES}
        words = ", ".join(f"{name}={value}" for name, value in {"batch_size": batch, **more}.items())
        return _RequestChange(cause="micro-batches", words=words, arguments={"batch_size": batch, **more})

    def _split_layer(self) -> _RequestChange:
        """Return the change to a model in which the slowest layer of the busiest rank is two layers."""
        plan = self.plan
        rows = -(-self._request({}).batch_size // plan.program.num_microbatches)
        graph = self.search.profile.graph(rows)
        own = [
            layer
            for stage, rank in enumerate(plan.program.placement)
            for layer in plan.stages[plan.program.weights[stage]]
            if rank == self.shares.busiest
        ]
        slowest = max(own, key=lambda layer: graph.nodes[layer]["forward_s"] + graph.nodes[layer]["backward_s"])
        halves = with_split_layer(self.search.profile, slowest)
        return _RequestChange(cause="balance", words=f"cut layer {slowest!r} in two", arguments={"profile": halves})

    def _fewer_ranks(self) -> Iterator[_RequestChange]:
        """Yield changes to fewer ranks."""
        if self._pinned or self._has_limits or self.search.request.num_stages is not None:
            return
        used = self.plan.program.num_ranks
        for count in sorted({used // 4, used // 2, used * 3 // 4} - {0, used}):
            change = {"num_ranks": count, "links": self._links_among(count)}
            found = self._quick(change)
            if found is not None and found.candidate.step_s <= self._own_s * (1 + _SLOWER):
                yield _RequestChange(cause="ranks", words=f"num_ranks={count}", arguments=change, quick=found)
                return

    @property
    def _has_limits(self) -> bool:
        """Whether each rank has a memory limit of its own."""
        limit = self.search.memory_limit_bytes
        return isinstance(limit, Sequence) and not isinstance(limit, str)

    def _more_devices(self) -> Iterator[_RequestChange]:
        """Yield the change to twice as many ranks, if all ranks are used and the links are known."""
        search = self.search
        ranks = search.num_ranks * _TIMES
        links = _extended(search.links, ranks)
        if self.plan.num_devices < search.num_ranks or (links is None and search.links is not None) or self._has_limits:
            return
        change: dict[str, Any] = {"num_ranks": ranks, "links": links}
        if self._pinned:
            axes = self._pinned["axes"]
            change["axes"] = {**axes, "replicate": axes["replicate"] * _TIMES}
        yield _RequestChange(cause="compute", words=f"num_ranks={ranks}", arguments=change)

    def _step(self, change: _RequestChange, found: _FoundPlan) -> NextStep | None:
        """Return the next step that a change is; None if it saves too little for a line."""
        step_s = float(found.candidate.step_s)
        times = change.arguments.get("batch_size", self.search.batch_size) / self.search.batch_size
        ratio = step_s / times / self._own_s if self._own_s else 1.0
        saving = 1 - ratio
        if change.cause == "ranks":
            used = self.plan.program.num_ranks
            free = counted(used - found.candidate.candidate.num_ranks, "rank")
            effect = f"{quote_time(step_s)} per step, as fast, with {free} fewer"
        elif saving < _WORTH:
            return None
        elif times > 1:
            rows = self.search.batch_size
            each = [quote_time(seconds) for seconds in (step_s / times / rows, self._own_s / rows)]
            effect = f"{each[0]} for each row instead of {each[1]}, {saving:.1%} less; a larger batch changes training"
        else:
            effect = (
                f"{quote_time(step_s)} per step instead of {quote_time(self._own_s)}, {saving:.1%} less, with "
                f"schedule {label_of(found.candidate.candidate)}"
            )
        arguments = {**self._pinned, **change.arguments}
        words = change.words
        if self._pinned:
            axes = arguments["axes"]
            groups = axes.get("tensor", 1)
            pipeline = counted(axes["pipeline"], "rank" if groups == 1 else "tensor group")
            pipeline += "" if groups == 1 else f" of {groups} ranks"
            words += f" as {counted(axes['replicate'], 'replica')} of {pipeline}"
        return NextStep(
            cause=change.cause,
            change=words,
            step_s=step_s,
            ratio=ratio,
            effect=effect,
            arguments=arguments,
        )


def _alike(one: Any, other: Any) -> bool:
    """Return whether two replications differ at most in the number of replicas."""
    return (one.zero, one.gather_once, one.consecutive) == (other.zero, other.gather_once, other.consecutive)


def _extended(links: Links | None, num_ranks: int) -> Links | None:
    """Return the links between more ranks on hosts of the same size; None if there is no such pattern."""
    if links is None or not links.hosts:
        return links
    size = links.hosts.count(links.hosts[0])
    grown = Links.of_hosts(size, num_ranks, inside=links.inside, between=links.between, contended=links.contended)
    grown = replace(grown, algorithm=links.algorithm)
    plain = not links.special and not links.collectives
    return grown if plain and grown.hosts[: len(links.hosts)] == links.hosts else None
