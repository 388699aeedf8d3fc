"""Activation options: a layer's time and memory if its activations are kept on the device, recomputed or offloaded.

`pipesched.partitioning.knapsack` chooses one option for each layer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np

from pipesched.errors import PartitionError
from pipesched.partitioning.layer_arrays import Layers, numbers
from pipesched.program.checkpoint_options import LayerCheckpoint

__all__ = ["ActivationOption", "activation_options", "with_copies"]

# The number of micro-batches whose activations are on the device although they are offloaded: the activations of one
# micro-batch are being copied to the host, those of another are in use, and those of a third are being copied back.
_ON_DEVICE = 3
_MOST = 2**59  # upper bound on the ticks of all copies in one direction, so that sums fit into 64 bits


@dataclass(frozen=True, kw_only=True)
class ActivationOption:
    """A way to store or recompute a layer's activations, and the resulting time and memory of the layer."""

    #: "recompute" or "offload"; None if the activations are kept on the device.
    keep: LayerCheckpoint | None
    #: The time of a micro-batch's forward, backward and recomputation, in ticks.
    ticks: int
    #: Bytes that the layer occupies throughout a step.
    fixed_bytes: int
    #: Bytes that the layer occupies for each micro-batch in flight, but for at most ``most_in_flight`` micro-batches.
    #: ``most_in_flight`` is None if all micro-batches in flight count.
    flight_bytes: int
    most_in_flight: int | None = None
    #: Bytes needed only while the layer runs. A rank runs one layer at a time.
    working_bytes: int = 0
    #: The time to copy a micro-batch's activations to the host, in ticks. Copying them back takes the same time. Copies
    #: overlap with compute (see ``with_copies``).
    copy_ticks: int = 0
    #: The time of the forward without recomputation, in ticks, identical for all options of a layer.
    forward_ticks: int = 0

    def held_bytes(self, in_flight: int) -> int:
        """Return the number of bytes that the layer occupies with ``in_flight`` micro-batches in flight."""
        counted = in_flight if self.most_in_flight is None else min(in_flight, self.most_in_flight)
        return self.fixed_bytes + self.flight_bytes * counted


def with_copies(forward: Any, ticks: Any, copies: Any) -> Any:
    """Return the ticks that a stage takes for one micro-batch, including copies to the host and back.

    Each copy overlaps with one compute action. In 1F1B the copy to the host overlaps with a backward, and the copy back
    overlaps with a forward. In GPipe the copy to the host overlaps with a forward, and the copy back overlaps with a
    backward. A compute action and the copy that overlaps with it take as long as the slower of the two.

    Args:
        forward: the ticks of the layers' forwards, as a number or an array.
        ticks: the ticks of all compute actions: forward passes, backward passes and recomputation.
        copies: the ticks of the copies to the host. The copies back take the same time.

    """
    return np.maximum(forward, copies) + np.maximum(ticks - forward, copies)


def activation_options(
    graph: "nx.DiGraph[Any]", layers: Layers, allowed: Collection[LayerCheckpoint], offload_bytes_per_s: float | None
) -> list[tuple[ActivationOption, ...]]:
    """Return the activation options of each layer. The first option keeps all activations on the device.

    A layer is not recomputed if the attribute ``refuses`` of its node contains "recompute".

    Raises PartitionError if an argument or a cost is invalid.
    """
    _check(allowed, offload_bytes_per_s)
    made = []
    for place, name in enumerate(layers.names):
        node = graph.nodes[name]
        held_bytes = int(layers.activation_bytes[place])
        forward = round(float(numbers([node["forward_s"]], "forward_s of layer")[0]) * layers.ticks_per_s)
        ticks = int(layers.ticks[place])
        hold = ActivationOption(
            keep=None,
            ticks=ticks,
            fixed_bytes=int(layers.state_bytes[place]),
            flight_bytes=held_bytes,
            working_bytes=_working(node),
            forward_ticks=min(forward, ticks),
        )
        options = [hold]
        if "recompute" in allowed and "recompute" not in node.get("refuses", ()):
            options.append(
                replace(
                    hold,
                    keep="recompute",
                    ticks=ticks + forward,
                    flight_bytes=min(_input_bytes(graph, name), held_bytes),
                    working_bytes=hold.working_bytes + held_bytes,
                )
            )
        if "offload" in allowed and offload_bytes_per_s:
            copy_ticks = min(round(held_bytes / offload_bytes_per_s * layers.ticks_per_s), _MOST // len(layers))
            options.append(replace(hold, keep="offload", copy_ticks=copy_ticks, most_in_flight=_ON_DEVICE))
        made.append(tuple(options))
    return made


def _check(allowed: Collection[LayerCheckpoint], offload_bytes_per_s: float | None) -> None:
    known = "recompute", "offload"  # the time and memory of other options are not measured
    if isinstance(allowed, str) or not isinstance(allowed, Collection) or not all(keep in known for keep in allowed):
        raise PartitionError(
            f"checkpoint= must be a collection with no options other than {' and '.join(map(repr, known))}; got "
            f"{allowed!r}; pass a tuple, such as ('recompute',)"
        )
    if "offload" in allowed and not offload_bytes_per_s:
        raise PartitionError(
            "offloading requires the bandwidth of copies to the host; checkpoint= allows 'offload', but "
            "offload_bytes_per_s is missing; pass the bandwidth between a device and its host, such as 20e9"
        )


def _working(node: Mapping[str, Any]) -> int:
    sizes = [node.get("forward_transient_bytes", 0), node.get("backward_transient_bytes", 0)]
    return round(float(numbers(sizes, "transient bytes of layer").max()))


def _input_bytes(graph: "nx.DiGraph[Any]", layer: Any) -> int:
    """Return the size of a layer's input in bytes: the measured size or, if unknown, the size of the incoming tensors.

    If a tensor is on several incoming edges, its size is counted once.
    """
    if "input_bytes" in graph.nodes[layer]:
        return round(float(numbers([graph.nodes[layer]["input_bytes"]], "input_bytes of layer")[0]))
    inputs: dict[Any, float] = {}
    edges: list[tuple[Any, Any, Any]] = list(graph.in_edges(layer, data="tensors"))
    for producer, _, tensors in edges:
        sizes = {None: graph.nodes[producer].get("output_bytes", 0)} if tensors is None else tensors
        inputs.update({(producer, name): size for name, size in sizes.items()})
    return round(sum(inputs.values()))
