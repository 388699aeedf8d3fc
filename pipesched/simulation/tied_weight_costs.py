"""Tied weight costs: memory and messages of parameters that several layers use.

In memory a tied parameter counts once per stage (`stage_parameters`), or once per rank if the placement is known
(`weight_bytes`). Costs of layers without their graph (`pipesched.simulation.layer_costs`) count it once per use. Its
gradient counts once per use. Its update counts with the first layer that uses it
(`pipesched.profiling.profile_model.put_updates`). Messages between ranks (`tied_traffic_bytes`) are shown by plans, and
compared by the search when it may put all users into one stage; the simulated step does not include them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesched.program.program import Program

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["parameter_bytes", "stage_parameters", "tied_traffic_bytes", "tied_groups", "weight_bytes"]


def tied_groups(graph: "nx.DiGraph[str]") -> dict[tuple[str, ...], list[str]]:
    """The parameters that several layers use, as a mapping: layers -> names of the parameters that they share."""
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
    """The total size of these parameters of a measured graph."""
    return sum(graph.graph["parameters"][name][1] for name in names)


def stage_parameters(graph: "nx.DiGraph[str]", layers: Iterable[str]) -> set[str]:
    """The parameters of a stage of these layers, each once."""
    return {name for layer in layers for name in graph.nodes[layer]["parameters"]}


def weight_bytes(program: Program, parameters: Sequence[Mapping[str, int]]) -> list[int]:
    """The bytes that each stage adds to the weights of its rank. Parameters that an earlier stage of the rank has add
    nothing.

    Stages that share weights with an earlier stage, as in bidirectional schedules, have copies of their own.

    Args:
        program: the program.
        parameters: parameter name -> bytes, for each stage of one chain.

    """
    counted: set[tuple[int, str]] = set()
    found = []
    for stage, (part, rank) in enumerate(zip(program.weights, program.placement, strict=True)):
        added = {name: size for name, size in parameters[part].items() if stage != part or (rank, name) not in counted}
        counted |= {(rank, name) for name in added}
        found.append(sum(added.values()))
    return found


def tied_traffic_bytes(size: int, ranks: Sequence[Any]) -> int:
    """The bytes per step of a tied weight: it is sent to the other ranks, and each use there returns a gradient.

    Args:
        size: the size of the weight in bytes.
        ranks: the rank or device of each use, in execution order.

    """
    return sum(size * (1 + ranks.count(rank)) for rank in {*ranks} - {ranks[0]})
