"""Capacity: the fastest plan for each number of ranks, found by the planner, and the best that these ranks could do.

A plan has a number of replicas of one pipeline, all with the same stages. Ranks that do not fit into a replica are
idle, so a plan for fewer ranks is also a plan for more. For each number of ranks n, the planner first simulates 1F1B
for every division of n into replicas, with its best cuts, which may be uneven; then it searches the three most
promising divisions in full (`pipesched.planning.tuner`). The plan for n is the best of these, or the plan for n - 1.

The batch is the same for every number of ranks. If the number of replicas does not divide it, the replicas have
different numbers of rows, and the slowest one counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from pipesched.checks import LARGEST, check_type, is_count, shown
from pipesched.errors import InputError
from pipesched.planning.evaluated_candidate import WORTH, EvaluatedCandidate
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.search_request import MemoryLimit, SearchRequest
from pipesched.planning.tuner import Tuner
from pipesched.program.completion import Completion
from pipesched.simulation.layer_costs import costs_of
from pipesched.simulation.links import Link, Links
from pipesched.simulation.profile import Profile
from pipesched.simulation.replication import ReplicaCosts, Replication
from pipesched.units import as_bytes, quote_time

__all__ = ["EFFORT", "Capacity", "FleetPlan", "Layers"]

#: Layers of a profile, by their position.
Layers = frozenset[int]

#: The default number of actions that the search for one number of ranks simulates.
EFFORT = 300_000

_ANY_STEP_S = float(LARGEST)  # a rival that is never faster; with one, the search does not squeeze a plan into memory
_IN_FULL = 3  # the number of divisions of the ranks that are searched in full, the most promising first


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """The plan for a number of ranks: replicas of one pipeline."""

    num_replicas: int
    #: The layers of each position of the pipeline.
    layers: tuple[Layers, ...]
    #: The time for which a rank at each position computes in a step.
    busy_s: tuple[float, ...]
    step_s: float
    #: The rows of a step, in all replicas.
    batch_size: int
    schedule: str

    @property
    def depth(self) -> int:
        """The number of ranks of one pipeline."""
        return len(self.layers)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all replicas."""
        return self.num_replicas * self.depth

    @property
    def rows_per_s(self) -> float:
        """The rows of the batch that a second of training processes."""
        return self.batch_size / self.step_s

    def __str__(self) -> str:
        return f"{self.num_replicas} x {self.depth} ranks, {self.schedule}, {quote_time(self.step_s)} a step"

    def spread(self, num_ranks: int) -> tuple[int, ...]:
        """Return how many of the ranks each position has if losses are spread so that the step is shortest.

        Each rank that is missing is taken from the position whose other ranks then have the least work. At least one
        rank stays at each position. This is the failure normalization of Gandhi et al. 2024 (ReCycle).
        """
        peers = [self.num_replicas] * self.depth
        for _ in range(self.num_ranks - num_ranks):
            free = [at for at in range(self.depth) if peers[at] > 1]
            peers[min(free, key=lambda at: (self.busy_s[at] / (peers[at] - 1), at))] -= 1
        return tuple(peers)

    def rerouted_s(self, peers: Sequence[int]) -> float:
        """Return the time of a step in which the ranks of each position share the micro-batches of lost ones.

        A rank does additional micro-batches in its bubbles first, and all bubbles of the step can be used. This is the
        best case of Gandhi et al. 2024 (ReCycle), with staggered updates.
        """
        shares = (self.num_replicas / count * busy_s for count, busy_s in zip(peers, self.busy_s, strict=True))
        return max(self.step_s, *shares)


class Capacity:
    """The fastest plan for each number of ranks. Plans are found when they are first needed, and kept.

    Args:
        profile: the costs of the layers.
        batch_size: the rows of a step, in all replicas.
        num_ranks: the number of ranks of the whole fleet.
        memory_limit_bytes: the memory of a rank. Default: None, no limit.
        link: the link between two ranks. Default: messages take no time.
        microbatch_rows: the rows of a micro-batch. Default: the measured size that is best for the whole fleet.
        effort: the number of actions that the search for one number of ranks simulates. Default: 300,000.

    """

    def __init__(
        self,
        profile: Profile,
        *,
        batch_size: int,
        num_ranks: int,
        memory_limit_bytes: MemoryLimit | None = None,
        link: Link | None = None,
        microbatch_rows: int | None = None,
        effort: int = EFFORT,
    ) -> None:
        check_type(profile, Profile, "profile must be a Profile", "pass Profile.load(path) or Profile.from_table(...)")
        counts = {"batch_size": batch_size, "num_ranks": num_ranks, "effort": effort}
        counts |= {} if microbatch_rows is None else {"microbatch_rows": microbatch_rows}
        for name, value in counts.items():
            if not is_count(value):
                raise InputError(f"{name} must be a whole number, at least 1; got {shown(value)}; pass 1 or more")
        self.profile = profile
        self.batch_size = batch_size
        self.num_ranks = num_ranks
        self._limit = memory_limit_bytes
        self._links = Links(inside=link or Link())
        self._effort = effort
        self._solved: dict[Any, Any] = {}
        self._best: list[FleetPlan | None] = [None]
        self._best_step_s = inf
        self._rows = min(profile.graphs)
        if microbatch_rows is None:
            self._rows = min(sorted(profile.graphs), key=self._first_step_s)
        else:
            self._rows = microbatch_rows

    @property
    def microbatch_rows(self) -> int:
        """The largest number of rows of a micro-batch."""
        return self._rows

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """The state of each layer: its weights and the optimizer's state."""
        nodes = self.profile.graph(self._rows).nodes.values()
        return tuple(int(node["parameter_bytes"] + node.get("optimizer_bytes", 0)) for node in nodes)

    @property
    def state_bytes(self) -> int:
        """The state of all layers."""
        return sum(self.layer_bytes)

    def bytes_of(self, layers: Layers) -> int:
        """Return the size of the state of these layers."""
        return sum(self.layer_bytes[layer] for layer in layers)

    def best(self, num_ranks: int) -> FleetPlan | None:
        """Return the fastest plan for at most this number of ranks; None if no plan fits into memory."""
        while len(self._best) <= num_ranks:
            found = self._search(len(self._best))
            before = self._best[-1]
            if found is not None and (before is None or found.step_s < before.step_s):
                self._best_step_s = found.step_s
                self._best.append(found)
            else:
                self._best.append(before)
        return self._best[num_ranks]

    def best_rows_per_s(self, num_ranks: int) -> float:
        """Return the rows of the batch that the fastest plan for this number of ranks processes in a second."""
        plan = self.best(num_ranks)
        return 0.0 if plan is None else plan.rows_per_s

    @cached_property
    def _ideal(self) -> tuple[float, ...]:
        ideal = [self.best_rows_per_s(count) for count in range(self.num_ranks + 1)]
        for plan in {id(plan): plan for plan in self._best if plan is not None}.values():
            for count in range(1, self.num_ranks + 1):
                whole = min(count // plan.depth, plan.num_replicas) / plan.num_replicas * plan.rows_per_s
                ideal[count] = max(ideal[count], whole)
                if plan.depth <= count < plan.num_ranks:
                    ideal[count] = max(ideal[count], self.batch_size / plan.rerouted_s(plan.spread(count)))
        for count in range(1, self.num_ranks + 1):
            ideal[count] = max(ideal[count], ideal[count - 1])
        return tuple(ideal)

    def ideal_rows_per_s(self, num_ranks: int) -> float:
        """Return the most rows per second that any policy can reach with this number of ranks.

        This is the best of: the fastest plan for this number of ranks; a plan for more ranks, without the replicas that
        are not whole; a plan for more ranks, with the micro-batches of lost ranks rerouted.
        """
        return self._ideal[num_ranks]

    def _first_step_s(self, rows: int) -> float:
        """Return the shortest step of 1F1B on the whole fleet, or on the most ranks that it can use."""
        self._rows = rows
        for count in range(self.num_ranks, 0, -1):
            steps = [found.best()[0].step_s for found, _ in self._first(count)]
            if steps:
                return float(min(steps))
        return inf

    def _search(self, num_ranks: int) -> FleetPlan | None:
        """Return the fastest plan that uses all of this number of ranks; None if none can be faster than for fewer."""
        found = list(self._first(num_ranks))
        if not found:
            return None
        best = min((tuner.best()[0] for tuner, _ in found), key=lambda each: each.step_s)
        found.sort(key=lambda each: (each[0].best()[0].step_s + each[0].bound_s(), each[1].num_ranks))
        for tuner, search in found[:_IN_FULL]:
            rival_s = min(best.step_s, self._best_step_s)
            if tuner.bound_s() < rival_s * (1 - WORTH):
                full = Tuner(search, solved=self._solved)
                full.explore(rival_s, tuner.best())
                best = min(best, full.refine(), key=lambda each: each.step_s)
        return self._plan(best)

    def _first(self, num_ranks: int) -> Iterator[tuple[Tuner, SearchRequest]]:
        """Yield a search for each division of the ranks that may be faster than the best so far, after 1F1B."""
        for depth in range(1, min(num_ranks, len(self.profile.layers)) + 1):
            if num_ranks % depth or num_ranks // depth > self.batch_size or not self._may_fit(depth):
                continue
            search = self._request(num_ranks // depth, depth)
            if self._least_s(search) >= self._best_step_s:
                continue
            tuner = Tuner(replace(search, effort=1), solved=self._solved)
            if tuner.explore(_ANY_STEP_S):
                yield tuner, search

    def _may_fit(self, depth: int) -> bool:
        """Return whether the weights, gradients and states of one of this number of ranks may fit into memory."""
        limit: Any = as_bytes(self._limit)
        if not isinstance(limit, int | float):
            return True
        nodes = self.profile.graph(self._rows).nodes.values()
        gradient_bytes = sum(int(node["parameter_bytes"]) for node in nodes)
        return self.state_bytes + gradient_bytes <= depth * limit

    def _least_s(self, search: SearchRequest) -> float:
        """Return a lower bound on the step: the mean work of the ranks, or the slowest layer."""
        count = search.num_microbatches[0]
        graph = self.profile.graph(-(-search.batch_size // count))
        costs = [costs_of(graph, name) for name in graph]
        work = [own.forward_s + min(own.backward_s, own.input_grad_s + own.weight_grad_s) for own in costs]
        return float((count - 1) * max(sum(work) / search.num_ranks, *work))

    def _request(self, num_replicas: int, depth: int) -> SearchRequest:
        rows = -(-self.batch_size // num_replicas)
        replicas = ReplicaCosts(Replication(num_replicas=num_replicas), depth, self._links)
        return SearchRequest.of(
            self.profile,
            depth,
            rows,
            PlanRequest(num_microbatches=-(-rows // self._rows)),
            memory_limit_bytes=self._limit,
            links=replicas.pipeline_links(),
            all_ranks=True,
            ranks_are="processes",
            replica_costs=replicas,
            completion=Completion(updates=True),
            effort=self._effort,
        )

    def _plan(self, found: EvaluatedCandidate) -> FleetPlan:
        position = {name: at for at, name in enumerate(self.profile.layers)}
        candidate = found.candidate
        layers = [set[int]() for _ in range(candidate.num_ranks)]
        for rank, names in zip(candidate.placement, found.stages, strict=False):
            layers[rank] |= {position[name] for name in names}
        replicas = found.replication.num_replicas if found.replication else 1
        return FleetPlan(
            num_replicas=replicas,
            layers=tuple(map(frozenset, layers)),
            busy_s=tuple(map(float, found.trace.busy_s)),
            step_s=float(found.step_s),
            batch_size=self.batch_size,
            schedule=candidate.schedule.name,
        )
