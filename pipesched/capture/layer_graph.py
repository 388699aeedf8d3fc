"""Layer graph: a captured forward as a graph of layers, with stage boundaries and the bytes that layers exchange."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import networkx as nx
from torch import Tensor, nn

from pipesched.capture.capture import INPUT, Capture, Value
from pipesched.model.module_tree import class_names
from pipesched.simulation.layer_costs import LayerCosts

__all__ = ["assign_unused_tensors", "flow_of", "gap", "narrowest", "row_of", "with_costs"]


def gap(capture: Capture, position: int) -> list[int]:
    """Return the indices of the calls at which a stage may begin if its first layer call is ``layer_calls[position]``.

    Candidates are the calls after the previous layer call, up to and including this layer call.
    """
    legal = capture.legal_cuts
    before, own = capture.layer_calls[position - 1 : position + 1]
    first = before.index + 1
    last = own.index
    return legal[bisect_left(legal, first) : bisect_left(legal, last + 1)]


def narrowest(capture: Capture, candidates: Sequence[int]) -> int:
    """Return the call with the smallest ``Capture.crossing_bytes``; on ties, the last of these calls."""
    return min(reversed(candidates), key=capture.crossing_bytes.__getitem__)


def flow_of(model: nn.Module, capture: Capture, begins: Mapping[str, int]) -> "nx.DiGraph[str]":
    """Return the layers of a captured forward as a graph; see `pipesched.graph_of`.

    A function between layers belongs to the layer whose range of calls contains it. Values that any stage may compute
    (see `Capture.free`) create no edge.

    Args:
        model: the captured model.
        capture: the record of the model's forward.
        begins: layer name -> index of the layer's first call.

    """
    names = list(begins)
    starts = list(begins.values())
    layer_of = [names[bisect_right(starts, call.index) - 1] for call in capture.calls]
    graph = _nodes(model, names, _uses(model, capture, names, layer_of))
    given: dict[Value, str] = {}
    uses = [(value, call.index) for call in capture.calls if call.index not in capture.free for value in call.takes]
    outputs = [(value, len(capture.calls) - 1) for value in capture.output]
    for value, user in [*uses, *outputs]:
        index, place = value
        if index == INPUT or index in capture.free:
            continue
        size = capture.nbytes[value]
        ends = (layer_of[index], layer_of[user])
        if ends[0] != ends[1]:
            if not graph.has_edge(*ends):
                graph.add_edge(*ends, tensors={}, bytes=0)
            graph.edges[ends]["tensors"][f"{capture.calls[index]}:{index}.{place}"] = size
        if ends[0] != ends[1] or (value, user) in outputs:
            given[value] = ends[0]
    for value, name in given.items():
        graph.nodes[name]["output_bytes"] += capture.nbytes[value]
    for _, _, edge in graph.edges(data=True):
        edge["bytes"] = sum(edge["tensors"].values())
    return graph


def row_of(model: nn.Module, layers: Mapping[str, nn.Module], costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
    """Return a chain of layers as a graph. The sizes of the outputs are taken from ``costs``."""
    own = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    uses = {
        name: [own[id(tensor)] for tensor in (*layer.parameters(), *layer.buffers())] for name, layer in layers.items()
    }
    graph = _nodes(model, list(layers), uses)
    for name, layer in costs.items():
        graph.nodes[name]["output_bytes"] = layer.memory.output_bytes
    graph.add_edges_from((a, b, {"bytes": costs[a].memory.output_bytes}) for a, b in pairwise(layers))
    return graph


def with_costs(graph: "nx.DiGraph[str]", costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
    """Add the measured costs of each layer to the layer's node, and return the graph."""
    for name, own in costs.items():
        graph.nodes[name].update({key: value for key, value in own.figures().items() if key not in graph.nodes[name]})
    return graph


def _nodes(model: nn.Module, names: Sequence[str], uses: Mapping[str, Iterable[str]]) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph()
    parameters = dict(model.named_parameters())
    sizes = {name: (parameter.numel(), parameter.nbytes) for name, parameter in parameters.items()}
    buffers = {name: buffer.nbytes for name, buffer in model.named_buffers()}
    for name in names:
        own = [tensor for tensor in uses[name] if tensor in sizes]
        others = [tensor for tensor in uses[name] if tensor not in sizes]
        graph.add_node(
            name,
            parameters=tuple(own),
            buffers=tuple(others),
            buffer_bytes=sum(buffers.get(tensor, 0) for tensor in others),
            gradient_bytes=sum(sizes[tensor][1] for tensor in own if parameters[tensor].requires_grad),
            num_parameters=sum(sizes[tensor][0] for tensor in own),
            parameter_bytes=sum(sizes[tensor][1] for tensor in own),
            output_bytes=0,
        )
    graph.graph["parameters"] = sizes
    graph.graph["classes"] = class_names(model, names)
    return graph


def _uses(model: nn.Module, capture: Capture, names: Sequence[str], layer_of: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of each layer's parameters and buffers.

    `assign_unused_tensors` adds the tensors that no layer uses.
    """
    uses: dict[str, dict[str, None]] = {name: {} for name in names}
    for call in capture.calls:
        uses[layer_of[call.index]].update(dict.fromkeys(call.uses))
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    held = [[tensors[name] for name in used if name in tensors] for used in uses.values()]
    for position, others in assign_unused_tensors(model, held).items():
        uses[names[position]].update(dict.fromkeys(others))
    return {name: list(used) for name, used in uses.items()}


def assign_unused_tensors(model: nn.Module, holders: Sequence[Iterable[Tensor]]) -> dict[int, list[str]]:
    """Assign each parameter or buffer in none of the ``holders`` to the holder of the tensor registered before it.

    Returns the names of the assigned tensors, keyed by the index of the new holder.
    """
    holder_of: dict[Any, int] = {tensor: holder for holder, tensors in enumerate(holders) for tensor in tensors}
    found: dict[int, list[str]] = {}
    holder = 0
    for prefix, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor in holder_of:
                holder = holder_of[tensor]
            else:
                holder_of[tensor] = holder
                found.setdefault(holder, []).append(f"{prefix}.{name}" if prefix else name)
    return found
