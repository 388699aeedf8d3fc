"""Layer costs: what a layer takes and holds, as measured, and the costs of stages made of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import reduce
from itertools import groupby, pairwise
from typing import Any

import networkx as nx

from pipesched.program.checkpoint_options import Checkpoint, Keep, keep_by_layer
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_memory import Footprint, dropping_bytes, of_loss, of_stage

__all__ = [
    "TIMES",
    "LayerCosts",
    "Stages",
    "costs_of",
    "costs_of_stage",
    "joined_costs",
    "messages",
    "stage_costs",
    "treated",
]


#: Of stages given by the names of their layers.
Stages = Sequence[Sequence[str]]


#: The times of a layer that are measured.
TIMES = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s")


@dataclass(frozen=True)
class LayerCosts:
    """What one layer costs for one micro-batch: seconds, and bytes, as `pipesched.simulation.layer_memory` has them.

    waiting_s: for how long of its forward and its whole backward it leaves the processor to others. crowded_s: how much
    longer these take where another rank computes beside. spread: how far the
    middle half of what these took lies apart, over what they took. Transients: the
    most that a forward, or a backward, holds while it runs, beyond what is held before it and what it keeps. offloads:
    1 where what it keeps waits on the host. loss_...: of the loss that was measured with the last layer, what it keeps,
    of that what lies in the layer's output, and its transients.
    """

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    weight_grad_bytes: int
    parameter_bytes: int
    waiting_s: float = 0
    crowded_s: float = 0
    spread: float = 0
    update_s: float = 0
    optimizer_bytes: int = 0
    update_transient_bytes: int = 0
    kept_input_bytes: int = 0
    kept_output_bytes: int = 0
    dear_bytes: int = 0
    dear_output_bytes: int = 0
    left_input_bytes: int = 0
    left_grad_bytes: int = 0
    gradient_bytes: int = 0
    deferred_gradient_bytes: int = 0
    buffer_bytes: int = 0
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    first_backward_transient_bytes: int = 0
    input_grad_transient_bytes: int = 0
    weight_grad_transient_bytes: int = 0
    offloads: int = 0
    loss_kept_bytes: int = 0
    loss_kept_input_bytes: int = 0
    loss_forward_bytes: int = 0
    loss_backward_bytes: int = 0

    def __add__(self, other: "LayerCosts") -> "LayerCosts":
        """Both, one after the other."""
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        sums["spread"] = max(self.spread, other.spread)
        sums["offloads"] = min(self.offloads, other.offloads)
        return LayerCosts(**{**sums, **asdict(self.footprint + other.footprint)})

    @property
    def footprint(self) -> Footprint:
        """What the layer needs in memory."""
        return Footprint(**{item.name: getattr(self, item.name) for item in fields(Footprint)})

    @property
    def loss(self) -> Footprint:
        """What a loss of its outputs needs."""
        measured = self.loss_kept_bytes, self.loss_kept_input_bytes, self.loss_forward_bytes, self.loss_backward_bytes
        return of_loss(self.output_bytes, *measured)

    def recomputed(self) -> "LayerCosts":
        """The same where its backward first runs its forward again, from its input and copies of its buffers, which are
        all that is kept.
        """
        again, kept = self.activation_bytes - self.kept_input_bytes, self.input_bytes + self.buffer_bytes
        return replace(
            self,
            backward_s=self.backward_s + self.forward_s,
            input_grad_s=self.input_grad_s + self.forward_s,
            activation_bytes=kept,
            kept_input_bytes=self.input_bytes,
            kept_output_bytes=0,
            forward_transient_bytes=max(0, self.activation_bytes + self.forward_transient_bytes - kept),
            backward_transient_bytes=again + self.backward_transient_bytes,
            first_backward_transient_bytes=again + self.first_backward_transient_bytes,
            input_grad_transient_bytes=again + self.input_grad_transient_bytes,
            waiting_s=self.waiting_s and self.waiting_s * (1 + self.forward_s / (self.forward_s + self.backward_s)),
        )

    def treated(self, keep: Keep | None) -> "LayerCosts":
        """The same where this becomes of what it saves."""
        if keep == "recompute":
            return self.recomputed()
        if keep == "recompute-cheap":  # the time that this saves was not measured: no more than the whole
            whole = self.recomputed()
            kept = whole.activation_bytes + self.dear_bytes
            return replace(
                whole,
                activation_bytes=kept,
                kept_output_bytes=self.dear_output_bytes,
                forward_transient_bytes=max(0, self.activation_bytes + self.forward_transient_bytes - kept),
            )
        return replace(self, offloads=1) if keep == "offload" else self


def costs_of(graph: "nx.DiGraph[str]", layer: str) -> LayerCosts:
    """What a layer of a measured graph costs."""
    node = graph.nodes[layer]
    known = [item.name for item in fields(LayerCosts) if item.name in node or item.default is MISSING]
    return LayerCosts(**{name: node[name] for name in known})


def stage_costs(
    stages: Sequence[Sequence[LayerCosts]], chain: int | None = None, *, host_bytes_per_s: float | None = None
) -> Costs:
    """What stages of these layers cost. chain: how many are one behind the other, all unless given: the first of a
    chain takes the model's inputs, the last one computes the loss. host_bytes_per_s: between a rank's device and its
    host; copies take no time unless given.
    """
    count = chain or len(stages)
    ends = [(not stage % count, stage % count == count - 1) for stage in range(len(stages))]
    return joined_costs(
        [costs_of_stage(layers, *own, host_bytes_per_s) for layers, own in zip(stages, ends, strict=True)]
    )


def costs_of_stage(
    layers: Sequence[LayerCosts], begins: bool, ends: bool, host_bytes_per_s: float | None = None
) -> dict[str, Any]:
    """What one stage of these layers costs, by the names of `Costs`. begins: it takes the model's inputs; ends: it
    computes a loss.
    """
    footprints = [layer.footprint for layer in layers]
    if footprints and begins:
        footprints[0] = footprints[0].of_batch()
    if footprints and ends:
        footprints.append(layers[-1].loss)
    whole = of_stage(footprints)
    row: dict[str, Any] = {name: getattr(whole, name) for name in _SIZES}
    row["dropping_transient_bytes"] = dropping_bytes(footprints)
    row.update((name, sum(getattr(layer, name) for layer in layers)) for name in _SUMS)
    row["weight_bytes"] = sum(layer.parameter_bytes for layer in layers)
    row["input_bytes"] = layers[0].input_bytes if layers else 0
    row["output_bytes"] = layers[-1].output_bytes if layers else 0
    row["kept_output_bytes"] = layers[-1].kept_output_bytes if layers else 0
    row["offload_bytes"] = going = _going_bytes(layers)
    row["offload_s"] = row["fetch_s"] = going / host_bytes_per_s if host_bytes_per_s else 0
    return row


def joined_costs(stages: Sequence[Mapping[str, Any]], **others: Any) -> Costs:
    """The costs of stages, each given by what ``costs_of_stage`` says. others: what stages have in common."""
    columns: dict[str, Any] = {name: tuple(row[name] for row in stages) for name in stages[0]}
    return Costs(**columns, **others)


def _going_bytes(layers: Sequence[LayerCosts]) -> int:
    """What goes to the host and back: of layers one behind the other what lies neither in their inputs nor in their
    outputs, which others may hold.
    """
    going = 0
    for offloads, run in groupby(layers, lambda layer: layer.offloads):
        if offloads:
            whole = reduce(Footprint.__add__, [layer.footprint for layer in run])
            going += max(0, whole.activation_bytes - whole.kept_input_bytes - whole.kept_output_bytes)
    return going


_TIMES = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s", "waiting_s", "update_s")


_SUMS = (*_TIMES, "optimizer_bytes", "update_transient_bytes")


_SIZES = [item.name for item in fields(Footprint) if not item.name.startswith(("kept_", "left_", "dear_"))]


def messages(graph: "nx.DiGraph[str]", stages: Stages) -> dict[tuple[int, int], int]:
    """The bytes that each stage sends to each later one for a micro-batch; each tensor goes from user to user."""
    home = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    ways: dict[tuple[int, str], tuple[int, set[int]]] = {}  # (stage, tensor): its bytes, and the stages that use it
    for one, other, edge in graph.edges(data=True):
        if home[one] != home[other]:
            for tensor, size in edge.get("tensors", {one: edge.get("bytes", 0)}).items():
                ways.setdefault((home[one], tensor), (size, set()))[1].add(home[other])
    sizes: dict[tuple[int, int], int] = {}
    for (giver, _), (size, users) in ways.items():
        for ends in pairwise([giver, *sorted(users)]):
            sizes[ends] = sizes.get(ends, 0) + size
    return sizes


def treated(profile: Mapping[str, LayerCosts], checkpoint: Checkpoint) -> dict[str, LayerCosts]:
    """What layers cost by name, where ``checkpoint`` says layer by layer what becomes of what they save."""
    keep = keep_by_layer(checkpoint)
    return {name: costs.treated(keep.get(name)) for name, costs in profile.items()}
