"""Layer costs: what a layer takes and holds, as measured, and the costs of stages made of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import networkx as nx

from pipesched.program.checkpoint_options import Checkpoint, LayerCheckpoint, checkpoint_by_layer
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_memory import LayerMemory, LossMemory, dropping_bytes, offloaded_bytes, stage_memory

__all__ = [
    "MEMORY_COLUMNS",
    "NEEDED",
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

#: The figures that every layer of a profile has.
NEEDED = (*TIMES, "input_bytes", "output_bytes", "activation_bytes", "weight_grad_bytes", "parameter_bytes")

#: The sizes in which a stage is like one layer, and that `Costs` has, too. `kept_output_bytes` is no such size: a loss
#: behind the last layer has no output, and what that layer keeps of its own counts.
MEMORY_COLUMNS = {item.name for item in fields(LayerMemory) if item.name != "kept_output_bytes"}
MEMORY_COLUMNS &= {item.name for item in fields(Costs)}


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """What one layer costs for one micro-batch, in seconds and bytes."""

    #: A forward.
    forward_s: float = 0
    #: A whole backward (B).
    backward_s: float = 0
    #: The part of a split backward that makes the gradients of the input (I).
    input_grad_s: float = 0
    #: The part of a split backward that makes the gradients of the parameters (W).
    weight_grad_s: float = 0
    #: The parameters.
    parameter_bytes: int = 0
    #: How long a forward and a whole backward together leave the processor to others.
    waiting_s: float = 0
    #: How much longer these take where another rank computes beside.
    crowded_s: float = 0
    #: How far the middle half of their measured times lies apart, over what they take.
    spread: float = 0
    #: The optimizer's step.
    update_s: float = 0
    #: The optimizer's state.
    optimizer_bytes: int = 0
    #: The most that the optimizer's step needs beyond its state.
    update_transient_bytes: int = 0
    #: What the forward and the backward need in memory.
    memory: LayerMemory = field(default_factory=LayerMemory)
    #: What the loss needs in memory, if it was measured with this layer.
    loss: LossMemory = field(default_factory=LossMemory)

    def __add__(self, other: "LayerCosts") -> "LayerCosts":
        """Both, one after the other; the loss is the other one's."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in (*_SUMS, "crowded_s", "parameter_bytes")}
        spread = max(self.spread, other.spread)
        return replace(other, **sums, spread=spread, memory=self.memory + other.memory)

    @property
    def loss_layer(self) -> LayerMemory:
        """What a loss of its outputs needs in memory, as one more layer."""
        return self.loss.as_layer(self.memory.output_bytes)

    def figures(self) -> dict[str, Any]:
        """Everything in one mapping, by the names and in the order that layers of a profile have."""
        own: dict[str, Any] = dict.fromkeys(NEEDED) | vars(self)
        del own["memory"], own["loss"]
        loss = {f"loss_{name}": size for name, size in vars(self.loss).items()}
        return own | vars(self.memory) | loss

    def recomputed(self, *, keeps_dear: bool = False) -> "LayerCosts":
        """The same where its backward first runs its forward again. The time that ``keeps_dear`` saves was not
        measured: it takes no more than the whole.
        """
        return replace(
            self,
            backward_s=self.backward_s + self.forward_s,
            input_grad_s=self.input_grad_s + self.forward_s,
            waiting_s=self.waiting_s and self.waiting_s * (1 + self.forward_s / (self.forward_s + self.backward_s)),
            memory=self.memory.recomputed(keeps_dear=keeps_dear),
        )

    def treated(self, keep: LayerCheckpoint | None) -> "LayerCosts":
        """The same where this becomes of what it saves."""
        if keep == "offload":
            return replace(self, memory=replace(self.memory, offloads=1))
        return self if keep is None else self.recomputed(keeps_dear=keep == "recompute-cheap")


def costs_of(graph: "nx.DiGraph[str]", layer: str) -> LayerCosts:
    """What a layer of a measured graph costs."""
    node = graph.nodes[layer]

    def known(kind: type, prefix: str = "") -> dict[str, Any]:
        return {item.name: node[prefix + item.name] for item in fields(kind) if prefix + item.name in node}

    return LayerCosts(
        **known(LayerCosts), memory=LayerMemory(**known(LayerMemory)), loss=LossMemory(**known(LossMemory, "loss_"))
    )


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
    memories = [layer.memory for layer in layers]
    row: dict[str, Any] = {name: sum(getattr(layer, name) for layer in layers) for name in _SUMS}
    row["weight_bytes"] = sum(layer.parameter_bytes for layer in layers)
    row["offload_bytes"] = going = offloaded_bytes(memories)
    row["offload_s"] = row["fetch_s"] = going / host_bytes_per_s if host_bytes_per_s else 0
    if layers and begins:
        memories[0] = memories[0].of_batch()
    if layers and ends:
        memories.append(layers[-1].loss_layer)
    whole = stage_memory(memories)
    row.update((name, getattr(whole, name)) for name in MEMORY_COLUMNS)
    row["dropping_transient_bytes"] = dropping_bytes(memories)
    row["input_bytes"] = layers[0].memory.input_bytes if layers else 0
    row["output_bytes"] = layers[-1].memory.output_bytes if layers else 0
    row["kept_output_bytes"] = layers[-1].memory.kept_output_bytes if layers else 0
    return row


def joined_costs(stages: Sequence[Mapping[str, Any]], **others: Any) -> Costs:
    """The costs of stages, each given by what ``costs_of_stage`` says. others: what stages have in common."""
    columns: dict[str, Any] = {name: tuple(row[name] for row in stages) for name in stages[0]}
    return Costs(**columns, **others)


#: The figures of a stage that are sums of its layers'.
_SUMS = (
    "forward_s",
    "input_grad_s",
    "weight_grad_s",
    "backward_s",
    "waiting_s",
    "update_s",
    "optimizer_bytes",
    "update_transient_bytes",
)


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
    keep = checkpoint_by_layer(checkpoint)
    return {name: costs.treated(keep.get(name)) for name, costs in profile.items()}
