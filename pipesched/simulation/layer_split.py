"""Layer split: a profile in which one layer is two, to predict what a finer model would gain."""

from dataclasses import replace
from typing import Any

import networkx as nx

from pipesched.simulation.layer_costs import carried
from pipesched.simulation.profile import Profile
from pipesched.simulation.size_fit import SizeFit
from pipesched.simulation.tensor_split import SPLIT_COUNTS, SPLIT_SIZES

__all__ = ["with_split_layer"]

_OF_TENSORS = (*SPLIT_SIZES, *SPLIT_COUNTS)
_HALVED = (
    *("forward_s", "backward_s", "input_grad_s", "weight_grad_s", "waiting_s", "crowded_s", "update_s"),
    *("parameter_bytes", "gradient_bytes", "deferred_gradient_bytes", "optimizer_bytes", "buffer_bytes"),
    *("activation_bytes", "weight_grad_bytes", "dear_bytes", "left_grad_bytes", "num_parameters"),
    *_OF_TENSORS,
)
_OF_FIRST = ("kept_input_bytes", "left_input_bytes")
_OF_SECOND = ("kept_output_bytes", "dear_output_bytes")


def with_split_layer(profile: Profile, layer: str) -> Profile:
    """Return the profile with a layer cut in two equal halves.

    Each half has half of the layer's work, parameters and activations. The first half's output has the size of the
    layer's output. Parameters that other layers share stay in the first half.
    """
    graphs = {rows: _split(graph, layer) for rows, graph in profile.graphs.items()}
    return replace(profile, graphs=graphs, size_fit=SizeFit())


def _split(graph: "nx.DiGraph[str]", layer: str) -> "nx.DiGraph[str]":
    first, second = f"{layer} (first half)", f"{layer} (second half)"
    sizes = dict(graph.graph["parameters"])
    made: nx.DiGraph[str] = nx.DiGraph(**{**graph.graph, "parameters": sizes})
    for name, node in graph.nodes(data=True):
        if name != layer:
            made.add_node(name, **node)
            continue
        used = {parameter for other in graph if other != layer for parameter in graph.nodes[other]["parameters"]}
        shared = tuple(parameter for parameter in node["parameters"] if parameter in used)
        own = [sizes.pop(parameter) for parameter in node["parameters"] if parameter not in used]
        halves = [(sum(column) // 2, sum(column) - sum(column) // 2) for column in zip(*own, strict=True)]
        for half, place in ((first, 1), (second, 0)):
            sizes |= {half: tuple(both[place] for both in halves)} if halves else {}
            parameters = ((half,) if halves else ()) + (shared if half is first else ())
            made.add_node(half, **_half(node, of_first=half is first), parameters=parameters)
    ends = {layer: (first, second)}
    for one, other in graph.edges:
        giver = ends.get(one, (one, one))[1]
        taker = ends.get(other, (other, other))[0]
        made.add_edge(giver, taker, tensors=dict(carried(graph, one, other)))
    made.add_edge(first, second, tensors={first: graph.nodes[layer]["output_bytes"]})
    return made


def _half(node: dict[str, Any], *, of_first: bool) -> dict[str, Any]:
    """Return the costs of one half of a layer."""
    half = dict(node)
    del half["parameters"]
    for name in _HALVED:
        if name in _OF_TENSORS and name not in half:
            continue
        value = half.get(name, 0)
        rest = value - value // 2 if of_first else value // 2
        half[name] = rest if isinstance(value, int) else value / 2
    for name in half:
        if name in (_OF_SECOND if of_first else _OF_FIRST) or (of_first and name.startswith("loss_")):
            half[name] = 0
    if not of_first:
        half["input_bytes"] = node["output_bytes"]
    return half
