"""The only statement of what must come before what.

``needs`` is the rule; the validator, the lowering, the simulator and the executors all ask it. ``progress`` is
the one walk over a program that the rule allows: it runs every rank's order as far as the others let it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from pipesched.actions import Action, Kind

__all__ = ["BACKWARDS", "StageGraph", "chain", "needs", "progress"]

#: The kinds that yield the gradient of a stage's input.
BACKWARDS = (Kind.B, Kind.I)


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Which stage's output goes to which stages. ``producers[s]`` and ``consumers[s]`` are ascending."""

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, num_stages: int, edges: Iterable[tuple[int, int]]) -> "StageGraph":
        """The graph with these (producer, consumer) edges."""
        pairs = sorted(set(edges))
        return cls(
            tuple(tuple(a for a, b in pairs if b == s) for s in range(num_stages)),
            tuple(tuple(b for a, b in pairs if a == s) for s in range(num_stages)),
        )

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All (producer, consumer) pairs, ascending."""
        return tuple((a, b) for a, ends in enumerate(self.consumers) for b in ends)


@cache
def chain(num_stages: int) -> StageGraph:
    """The default graph: every stage feeds the next one."""
    last = num_stages - 1
    return StageGraph(
        tuple((s - 1,) if s else () for s in range(num_stages)),
        tuple((s + 1,) if s < last else () for s in range(num_stages)),
    )


def needs(action: Action, graph: StageGraph, present: Collection[Action]) -> Iterator[Action]:
    """Yield what must have ended before ``action`` starts.

    ``present`` holds the program's actions. It decides between forms of one dependency: a backward that is split
    (I) or whole (B), a stage that is recomputed (R), an edge that is a transfer (RECV) or lies inside one rank.
    A needed action that the program lacks is yielded all the same, in its simplest form.
    """
    stage, kind, microbatch, peer = action
    match kind:
        case Kind.F:
            for producer in graph.producers[stage]:
                received = Action(stage, Kind.RECV_F, microbatch, producer)
                yield received if received in present else Action(producer, Kind.F, microbatch)
        case Kind.B | Kind.I:
            recompute = Action(stage, Kind.R, microbatch)
            yield recompute if recompute in present else Action(stage, Kind.F, microbatch)
            for consumer in graph.consumers[stage]:
                received = Action(stage, Kind.RECV_B, microbatch, consumer)
                yield received if received in present else _backward(consumer, microbatch, present)
        case Kind.W:
            yield Action(stage, Kind.I, microbatch)
        case Kind.R | Kind.SEND_F:
            yield Action(stage, Kind.F, microbatch)
        case Kind.SEND_B:
            yield _backward(stage, microbatch, present)
        case Kind.RECV_F if peer is not None:
            yield Action(peer, Kind.SEND_F, microbatch, stage)
        case Kind.RECV_B if peer is not None:
            yield Action(peer, Kind.SEND_B, microbatch, stage)


def _backward(stage: int, microbatch: int, present: Collection[Action]) -> Action:
    split = Action(stage, Kind.I, microbatch)
    return split if split in present else Action(stage, Kind.B, microbatch)


def progress(
    orders: Sequence[Sequence[Action]], needs_of: Callable[[Action], Iterable[Action]]
) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, position, action) in an order that the dependencies allow, each rank in its own order.

    Ends when every rank is at its end or waits; an action that the caller never sees yielded can never run.
    Each action is looked at once when its rank reaches it and once for each dependency that it waited for.
    """
    done: set[Action] = set()
    position = [0] * len(orders)
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            missing = next((need for need in needs_of(action) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, position[rank], action
            done.add(action)
            position[rank] += 1
            ready += waiting.pop(action, ())
