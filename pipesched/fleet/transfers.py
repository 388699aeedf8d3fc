"""Transfers: which ranks take which positions of a new plan, and which layers must move between ranks for it."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from pipesched.fleet.capacity import FleetPlan, Layers
from pipesched.simulation.links import Link

__all__ = ["Holdings", "LayerMoves", "assigned", "held_layers", "layer_moves"]

#: The layers whose state each rank holds.
Holdings = Mapping[int, Layers]
_NOTHING: Layers = frozenset()


@dataclass(frozen=True)
class LayerMoves:
    """The bytes that each pair of ranks moves. All pairs move at the same time."""

    #: (sender, receiver) -> bytes.
    sent: Mapping[tuple[int, int], int]

    @property
    def total_bytes(self) -> int:
        """The bytes of all pairs."""
        return sum(self.sent.values())

    def time_s(self, link: Link) -> float:
        """Return the time of the rank that sends or receives most, with the bandwidth of the link in each direction."""
        sizes, messages = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for (giver, taker), size in self.sent.items():
            for end in (("out", giver), ("in", taker)):
                sizes[end] += size
                messages[end] += 1
        return max((messages[end] * link.latency_s + size * link.byte_s for end, size in sizes.items()), default=0.0)


def assigned(
    plan: FleetPlan,
    ranks: Collection[int],
    held: Holdings,
    layer_bytes: Sequence[int],
    room: Sequence[int] | None = None,
) -> dict[int, int]:
    """Assign ranks to the positions of a plan, so that many bytes stay where they are.

    The pair of a rank and a position with the most bytes in common comes first, then the next, as long as the position
    has room. Ranks that hold nothing of use take the rest in ascending order, one replica after another, so that the
    ranks of one position are on different hosts.

    Args:
        plan: the plan. With ``room``, some positions may have fewer ranks than the plan.
        ranks: the ranks that can take part.
        held: the layers that each rank holds. Default for a rank: none.
        layer_bytes: the state of each layer.
        room: the number of ranks at each position. Default: one for each replica.

    Returns:
        The position of each rank that takes part.

    """
    common: dict[tuple[Layers, int], int] = {}
    for own in {held.get(rank, _NOTHING) for rank in ranks}:
        for position, layers in enumerate(plan.layers):
            common[own, position] = sum(layer_bytes[layer] for layer in own & layers)
    pairs = ((-common[held.get(rank, _NOTHING), at], at, rank) for rank in ranks for at in range(plan.depth))
    left = [plan.num_replicas] * plan.depth if room is None else list(room)
    taken: dict[int, int] = {}
    for kept, position, rank in sorted(pairs):
        if kept and rank not in taken and left[position]:
            taken[rank] = position
            left[position] -= 1
    free = sorted((turn, position) for position, count in enumerate(left) for turn in range(count))
    others = sorted(rank for rank in ranks if rank not in taken)
    return taken | {rank: position for rank, (_, position) in zip(others, free, strict=False)}


def held_layers(held: Iterable[Layers]) -> Layers:
    """Return the layers that at least one rank holds."""
    return frozenset(chain.from_iterable(held))


def layer_moves(wanted: Holdings, held: Holdings, layer_bytes: Sequence[int]) -> LayerMoves:
    """Choose a sender for each layer that a rank needs and does not hold: the holder that sends least so far.

    Args:
        wanted: the layers that each rank needs.
        held: the layers that each rank holds. Each needed layer must be held by at least one rank.
        layer_bytes: the state of each layer.

    """
    holders: dict[int, list[int]] = {}
    for rank in sorted(held):
        for layer in held[rank]:
            holders.setdefault(layer, []).append(rank)
    load = Counter[int]()
    sent = Counter[tuple[int, int]]()
    for taker in sorted(wanted):
        for layer in sorted(wanted[taker] - held.get(taker, _NOTHING)):
            giver = min(holders[layer], key=lambda rank: (load[rank], rank))
            load[giver] += layer_bytes[layer]
            sent[giver, taker] += layer_bytes[layer]
    return LayerMoves(dict(sent))
