"""Layer arrays: the measured costs of a graph's layers as arrays of integers, in topological order of the layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from pipesched.errors import PartitionError, ScheduleError
from pipesched.program.action_arrays import Ints
from pipesched.simulation.links import Link, check_times

__all__ = ["Layers", "Tensors", "numbers", "read", "ticks_per_s"]

_FINEST = 10**12  # ticks per second: a tick is a picosecond. Times in whole ticks make sums and comparisons exact.
_MOST = 2**60  # upper bound on the sum of all ticks, so that results fit into 64 bits


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The tensors that pass between layers."""

    #: The layer that produces each tensor.
    makers: Ints
    #: The size of each tensor in bytes.
    sizes: Ints
    #: For each use of a tensor by a layer, the index of the tensor.
    used: Ints
    #: For each use of a tensor by a layer, the index of the layer.
    users: Ints


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The costs of layers in topological order."""

    names: list[Any]
    #: The time of a micro-batch's forward and backward, in ticks.
    ticks: Ints
    #: The number of ticks in a second.
    ticks_per_s: int
    parameter_bytes: Ints
    num_parameters: Ints
    #: The size of the parameters, gradients and optimizer state in bytes.
    state_bytes: Ints
    #: The size of the activations in bytes, for each micro-batch in flight.
    activation_bytes: Ints
    #: The producer of each edge.
    tails: Ints
    #: The consumer of each edge.
    heads: Ints
    tensors: Tensors

    def __len__(self) -> int:
        return len(self.names)

    def seconds(self, ticks: int) -> float:
        """Convert ticks to seconds."""
        return ticks / self.ticks_per_s


def ticks_per_s(total_s: float, scale: int = 1) -> int:
    """Return the number of ticks per second: 10**12, or fewer if ``total_s * scale`` would not fit into 64 bits."""
    per_s = _FINEST
    while total_s * per_s * scale > _MOST and per_s:
        per_s //= 10
    if not per_s:
        raise PartitionError(
            f"the times of all layers must add up to less than {_MOST // scale} s; they add up to "
            f"{total_s:g} s; pass the times in seconds"
        )
    return per_s


def numbers(values: Sequence[Any], what: str) -> NDArray[np.float64]:
    """Return the values as an array of floats. Raises PartitionError if a value is negative or not a finite number."""
    try:
        array = np.asarray(values)
    except ValueError:  # a list among numbers
        array = np.empty(0, object)
    try:
        if array.dtype.kind not in "fiu" or not (np.isfinite(array) & (array >= 0)).all():
            check_times(values, what)  # the error names the wrong value; other types, such as Fraction, are accepted
    except ScheduleError as error:
        raise PartitionError(str(error)) from None
    return array.astype(np.float64)


def read(
    graph: "nx.DiGraph[Any]", needed: Sequence[str], *, link: Link, weight_copies: float = 1, scale: int = 1
) -> Layers:
    """Read the layers of a graph.

    An edge with an attribute ``tensors``, a dict {name: bytes}, carries only these tensors. Any other edge carries its
    producer's whole output.

    Args:
        graph: the layers, with their costs as node attributes.
        needed: the attributes that every layer must have in addition to forward_s and backward_s. The default of
            activation_bytes is output_bytes; the default of other attributes is 0.
        link: the link between stages, needed because sums of transfer times must also fit into 64 bits.
        weight_copies: the size of parameters, gradients and optimizer state, as a multiple of the parameters' size.
        scale: the largest factor by which the caller multiplies ticks.

    Raises:
        PartitionError: if the graph has a cycle or no layers, or an attribute is missing or not a finite number.

    """
    if not graph.is_directed() or not len(graph):
        raise PartitionError(
            f"the layers must form a directed graph without cycles; got {graph}; pass a networkx.DiGraph with an edge "
            f"from each layer to the layers that use its output"
        )
    names, tails, heads = _ordered(graph)
    attributes = dict(graph.nodes(data=True))
    nodes = [attributes[name] for name in names]
    forward, backward = (_column(names, nodes, name, required=True) for name in ("forward_s", "backward_s"))
    times = forward + backward
    edges: list[tuple[Any, Any, Any]] = list(graph.edges.data("tensors"))
    named = any(tensors is not None for _, _, tensors in edges)
    outputs, parameters, counts = (
        _column(names, nodes, name, required=name in needed and not (named and name == "output_bytes"))
        for name in ("output_bytes", "parameter_bytes", "num_parameters")
    )
    held = [node.get("activation_bytes", node.get("output_bytes", 0)) for node in nodes]
    activations = numbers(held, "activation_bytes of layer")
    tensors = Tensors(makers=np.arange(len(names)), sizes=_whole(outputs), used=tails, users=heads)
    if named:
        tensors = _named_tensors(names, edges, outputs)
    crossing = 2 * (link.latency_s + link.byte_s * float(tensors.sizes.sum()))
    per_s = ticks_per_s(float(times.sum()) + crossing, scale)
    return Layers(
        names=names,
        ticks=_whole(times * per_s),
        ticks_per_s=per_s,
        parameter_bytes=_whole(parameters),
        num_parameters=_whole(counts),
        state_bytes=_whole(np.ceil(parameters * weight_copies)),
        activation_bytes=_whole(activations),
        tails=tails,
        heads=heads,
        tensors=tensors,
    )


def _whole(values: NDArray[np.float64]) -> Ints:
    return np.rint(values).astype(np.int64)


def _named_tensors(
    names: Sequence[Any], edges: Sequence[tuple[Any, Any, Mapping[Any, float] | None]], outputs: NDArray[np.float64]
) -> Tensors:
    """Return the tensors that the edges name. An edge without named tensors carries the producer's whole output."""
    place = {name: position for position, name in enumerate(names)}
    sizes: dict[tuple[int, Any], float] = {}
    uses: list[tuple[tuple[int, Any], int]] = []
    for tail, head, tensors in edges:
        maker = place[tail]
        for name, size in ({None: outputs[maker]} if tensors is None else tensors).items():
            sizes.setdefault((maker, name), size)
            uses.append(((maker, name), place[head]))
    number = {tensor: position for position, tensor in enumerate(sizes)}
    return Tensors(
        makers=np.array([maker for maker, _ in sizes], np.int64),
        sizes=_whole(numbers(list(sizes.values()), "the bytes of tensor")),
        used=np.array([number[tensor] for tensor, _ in uses], np.int64),
        users=np.array([user for _, user in uses], np.int64),
    )


def _ordered(graph: "nx.DiGraph[Any]") -> tuple[list[Any], Ints, Ints]:
    """Return the layers in topological order, and the producer and the consumer of each edge.

    If the order of the graph's nodes is already topological, the layers keep this order.
    """
    names = list(graph)
    number = {name: position for position, name in enumerate(names)}
    if any(number[a] >= number[b] for a, b in graph.edges):
        try:
            names = list(nx.lexicographical_topological_sort(graph, number.__getitem__))
        except nx.NetworkXUnfeasible:
            cycle = [edge[0] for edge in nx.find_cycle(graph)]
            raise PartitionError(
                f"the layers must form a graph without cycles; {' -> '.join(map(repr, [*cycle, cycle[0]]))} is a "
                f"cycle; merge the layers of the cycle into one layer"
            ) from None
        number = {name: position for position, name in enumerate(names)}
    ends = np.fromiter((number[end] for edge in graph.edges for end in edge), np.int64, 2 * graph.number_of_edges())
    return names, ends[::2], ends[1::2]


def _column(names: list[Any], nodes: Sequence[Mapping[str, Any]], name: str, *, required: bool) -> NDArray[np.float64]:
    values = [node.get(name, 0) for node in nodes]
    if required:
        missing = [layer for layer, node in zip(names, nodes, strict=True) if name not in node]
        if missing:
            raise PartitionError(
                f"a layer must have the attributes forward_s and backward_s, output_bytes if communication is "
                f"modelled, and parameter_bytes if memory is limited; {missing[0]!r} has no {name}; measure and "
                f"add it"
            )
    return numbers(values, f"{name} of layer")
