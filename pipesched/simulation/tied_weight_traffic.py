"""Tied weight traffic: the parameters of a measured graph that several layers use, and what they cost a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["tied_bytes", "tied_groups"]


def tied_groups(graph: "nx.DiGraph[str]") -> dict[tuple[str, ...], list[str]]:
    """The parameters that several layers use, by these."""
    users: dict[str, list[str]] = {}
    for layer, names in graph.nodes(data="parameters"):
        for name in names or ():
            users.setdefault(name, []).append(layer)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, layers in users.items():
        if len(layers) > 1:
            groups.setdefault(tuple(layers), []).append(name)
    return groups


def tied_bytes(size: int, ranks: Sequence[Any]) -> int:
    """What a tied weight of so many bytes costs a step: it goes to the other ranks, and a gradient a use comes back.

    ranks: of its uses, in order; or their devices.
    """
    return sum(size * (1 + ranks.count(rank)) for rank in {*ranks} - {ranks[0]})
