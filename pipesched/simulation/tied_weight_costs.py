"""Tied weight costs: what a parameter costs that several layers use, in memory and in messages.

In memory it counts once wherever its users run together: once a stage (`stage_parameters`), and once a rank if the
ranks of stages are known (`weight_bytes`). Costs of layers without their graph (`pipesched.simulation.layer_costs`)
count it once a use. Its gradient counts once a use. Its update counts with the first layer that uses it
(`pipesched.profiling.profile_model.put_updates`). Between ranks it costs messages (`tied_traffic_bytes`): plans show
them, and the search compares them where it may keep the users together; the simulated step does not contain them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesched.program.program import Program

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["parameter_bytes", "stage_parameters", "tied_traffic_bytes", "tied_groups", "weight_bytes"]


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


def parameter_bytes(graph: "nx.DiGraph[str]", names: Iterable[str]) -> int:
    """The bytes of some parameters of a measured graph."""
    return sum(graph.graph["parameters"][name][1] for name in names)


def stage_parameters(graph: "nx.DiGraph[str]", layers: Iterable[str]) -> set[str]:
    """The parameters of a stage of these layers, each once."""
    return {name for layer in layers for name in graph.nodes[layer]["parameters"]}


def weight_bytes(program: Program, parameters: Sequence[Mapping[str, int]]) -> list[int]:
    """The bytes that each stage adds to the weights of its rank. A parameter that an earlier stage of the rank has adds
    none. A stage that is a copy of another one has weights of its own.

    parameters: the bytes of each by its name, of the stages that are no copies.
    """
    counted: set[tuple[int, str]] = set()
    found = []
    for stage, (part, rank) in enumerate(zip(program.weights, program.placement, strict=True)):
        own = {name: size for name, size in parameters[part].items() if stage != part or (rank, name) not in counted}
        counted |= {(rank, name) for name in own}
        found.append(sum(own.values()))
    return found


def tied_traffic_bytes(size: int, ranks: Sequence[Any]) -> int:
    """What a tied weight of so many bytes costs a step: it goes to the other ranks, and a gradient a use comes back.

    ranks: of its uses, in order; or their devices.
    """
    return sum(size * (1 + ranks.count(rank)) for rank in {*ranks} - {ranks[0]})
