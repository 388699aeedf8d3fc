"""Tied weight costs: memory and messages of parameters that several layers use.

In memory a tied parameter counts once per stage (`stage_parameters`), or once per rank if the placement is known
(`weight_bytes`). `pipesched.simulation.layer_costs`, which adds up layers without their graph, counts the parameter
once per use. Its gradient counts once per use. Its update counts with the first layer that uses the parameter
(`pipesched.profiling.profile_model.put_updates`). The messages of tied weights between ranks (`tied_traffic_bytes`) are
shown by plans. The search considers them when it decides whether to put all users into one stage; the simulated step
does not include them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesched.program.program import Program

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["parameter_bytes", "stage_parameters", "tied_traffic_bytes", "tied_groups", "weight_bytes"]


def tied_groups(graph: "nx.DiGraph[str]") -> dict[tuple[str, ...], list[str]]:
    """The parameters that several layers use: {the layers: the names of the parameters that they share}."""
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
    """The total bytes of these parameters of a measured graph."""
    return sum(graph.graph["parameters"][name][1] for name in names)


def stage_parameters(graph: "nx.DiGraph[str]", layers: Iterable[str]) -> set[str]:
    """The names of all parameters that a stage of these layers uses."""
    return {name for layer in layers for name in graph.nodes[layer]["parameters"]}


def weight_bytes(program: Program, parameters: Sequence[Mapping[str, int]]) -> list[int]:
    """The bytes of weights that each stage adds to its rank, without parameters that the rank already has.

    In bidirectional schedules several stages have the same layers. Each has its own copy of the weights, which counts.

    Args:
        program: the program.
        parameters: for each stage of one chain, the bytes of its parameters by name.

    """
    counted: set[tuple[int, str]] = set()
    found = []
    for stage, (part, rank) in enumerate(zip(program.weights, program.placement, strict=True)):
        added = {name: size for name, size in parameters[part].items() if stage != part or (rank, name) not in counted}
        counted |= {(rank, name) for name in added}
        found.append(sum(added.values()))
    return found


def tied_traffic_bytes(size: int, ranks: Sequence[Any]) -> int:
    """The bytes sent per step for a tied weight: the weight to each other rank, and a gradient back from each use.

    Args:
        size: the size of the weight in bytes.
        ranks: the rank or device of each use, in execution order.

    """
    return sum(size * (1 + ranks.count(rank)) for rank in {*ranks} - {ranks[0]})
