"""Activation options: what may be done with what a layer saves for its backward, and what each option costs.

It may be held, recomputed, or taken to the host. `pipesched.partitioning.knapsack` takes one option for each layer.
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

_ON_DEVICE = 3  # micro-batches whose offloaded activations are there at once: one leaves, one is used, one comes back
_MOST = 2**59  # ticks of all copies one way; leaves room in 64 bits


@dataclass(frozen=True, kw_only=True)
class ActivationOption:
    """One thing that may be done with a layer's activations, and what it costs."""

    #: None: they are held.
    keep: LayerCheckpoint | None
    #: Forward and backward, with a second forward where that is done.
    ticks: int
    #: Held throughout a step.
    fixed_bytes: int
    #: Held for each micro-batch in flight, but for no more than ``most_in_flight``.
    flight_bytes: int
    most_in_flight: int | None = None
    #: Needed while the layer runs; of a rank's layers one runs at a time.
    working_bytes: int = 0
    #: Of a copy to the host, and of one back, which go on beside (``with_copies``).
    copy_ticks: int = 0
    #: Of the first forward, the same for all options of a layer.
    forward_ticks: int = 0

    def held_bytes(self, in_flight: int) -> int:
        """What the layer holds with so many micro-batches in flight."""
        counted = in_flight if self.most_in_flight is None else min(in_flight, self.most_in_flight)
        return self.fixed_bytes + self.flight_bytes * counted


def with_copies(forward: Any, ticks: Any, copies: Any) -> Any:
    """What a stage takes for a micro-batch: numbers, or an array of each. ticks: all that it computes.

    One action lies between the begin of a copy and what waits for its end: of 1F1B a backward, while a copy leaves, and
    a forward, while one comes back; of GPipe the other way round. So neither is shorter than the copy beside it.
    """
    return np.maximum(forward, copies) + np.maximum(ticks - forward, copies)


def activation_options(
    graph: "nx.DiGraph[Any]", layers: Layers, allowed: Collection[LayerCheckpoint], offload_bytes_per_s: float | None
) -> list[tuple[ActivationOption, ...]]:
    """The options of each layer, the one that holds everything first. Raises PartitionError for missing costs."""
    _check(allowed, offload_bytes_per_s)
    made = []
    for place, name in enumerate(layers.names):
        node = graph.nodes[name]
        held_bytes = int(layers.activation_bytes[place])
        again = round(float(numbers([node["forward_s"]], "forward_s of layer")[0]) * layers.ticks_per_s)
        ticks = int(layers.ticks[place])
        hold = ActivationOption(
            keep=None,
            ticks=ticks,
            fixed_bytes=int(layers.state_bytes[place]),
            flight_bytes=held_bytes,
            working_bytes=_working(node),
            forward_ticks=min(again, ticks),
        )
        options = [hold]
        if "recompute" in allowed:
            options.append(
                replace(
                    hold,
                    keep="recompute",
                    ticks=ticks + again,
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
    known = "recompute", "offload"  # what the others spare and cost is not measured
    if isinstance(allowed, str) or not isinstance(allowed, Collection) or not all(word in known for word in allowed):
        raise PartitionError(
            f"checkpoint says what may be done with saved activations, some of {', '.join(map(repr, known))}; got "
            f"{allowed!r}; pass a tuple, such as ('recompute',)"
        )
    if "offload" in allowed and not offload_bytes_per_s:
        raise PartitionError(
            "copies to the host take time; checkpoint allows 'offload', offload_bytes_per_s is missing; pass the "
            "bandwidth between a rank's device and its host, such as 20e9"
        )


def _working(node: Mapping[str, Any]) -> int:
    sizes = [node.get("forward_transient_bytes", 0), node.get("backward_transient_bytes", 0)]
    return round(float(numbers(sizes, "transient bytes of layer").max()))


def _input_bytes(graph: "nx.DiGraph[Any]", layer: Any) -> int:
    """What a layer is given: measured, or what edges bring, each tensor once."""
    if "input_bytes" in graph.nodes[layer]:
        return round(float(numbers([graph.nodes[layer]["input_bytes"]], "input_bytes of layer")[0]))
    brought: dict[Any, float] = {}
    along: list[tuple[Any, Any, Any]] = list(graph.in_edges(layer, data="tensors"))
    for maker, _, tensors in along:
        own = {None: graph.nodes[maker].get("output_bytes", 0)} if tensors is None else tensors
        brought.update({(maker, name): size for name, size in own.items()})
    return round(sum(brought.values()))
