"""Tied weight costs: memory and messages of parameters that several layers use.

The memory of a tied parameter is counted once per stage (`stage_parameters`), or once per rank if the placement is
known (`weight_bytes`). `pipesched.simulation.layer_costs` does not know which layers share parameters, so it counts the
parameter once per use. The gradient is always counted once per use. The update is part of the costs of the first layer
that uses the parameter (`pipesched.profiling.profile_model.put_updates`). Plans show how many bytes ranks send to each
other because of tied weights (`tied_traffic_bytes`). The search considers these bytes when it decides whether to put
all layers that use a weight into one stage. The simulated step does not include these messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesched.program.program import Program

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["parameter_bytes", "stage_parameters", "tied_traffic_bytes", "tied_groups", "weight_bytes"]


def tied_groups(graph: "nx.DiGraph[str]") -> dict[tuple[str, ...], list[str]]:
    """Return the parameters that several layers use, as {layers: names of the parameters that these layers share}."""
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
    """Return the total size of these parameters in bytes, as stored in a measured graph."""
    return sum(graph.graph["parameters"][name][1] for name in names)


def stage_parameters(graph: "nx.DiGraph[str]", layers: Iterable[str]) -> set[str]:
    """Return the names of all parameters that a stage of these layers uses."""
    return {name for layer in layers for name in graph.nodes[layer]["parameters"]}


def weight_bytes(program: Program, parameters: Sequence[Mapping[str, int]]) -> list[int]:
    """Return the size in bytes of the weights that each stage adds to its rank.

    A parameter that an earlier stage of the rank already holds is not counted again. The exception is bidirectional
    schedules, in which several stages hold copies of the same layers: every copy is counted.

    Args:
        program: the program.
        parameters: for each stage of one chain, the size in bytes of each parameter of the stage, keyed by name.

    """
    counted: set[tuple[int, str]] = set()
    found = []
    for stage, (part, rank) in enumerate(zip(program.weights, program.placement, strict=True)):
        added = {name: size for name, size in parameters[part].items() if stage != part or (rank, name) not in counted}
        counted |= {(rank, name) for name in added}
        found.append(sum(added.values()))
    return found


def tied_traffic_bytes(size: int, ranks: Sequence[Any]) -> int:
    """Return how many bytes are sent per step for a tied weight.

    The rank of the first use sends the weight to each other rank, and receives one gradient for each use on those
    ranks.

    Args:
        size: the size of the weight in bytes.
        ranks: the rank or device of each use, in execution order.

    """
    return sum(size * (1 + ranks.count(rank)) for rank in {*ranks} - {ranks[0]})
