"""Layer costs: the measured times and sizes of individual layers, and the costs of stages made of these layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import networkx as nx

from pipesched.program.checkpoint_options import Checkpoint, LayerCheckpoint, checkpoint_by_layer
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_memory import LayerMemory, LossMemory, dropping_bytes, offloaded_bytes, stage_memory
from pipesched.simulation.tensor_split import SPLIT_COUNTS, SPLIT_SHARES, TRAFFIC, TensorShares, TensorTraffic

__all__ = [
    "FIXED",
    "MEMORY_COLUMNS",
    "NEEDED",
    "TIMES",
    "LayerCosts",
    "Stages",
    "carried",
    "costs_of",
    "costs_of_stage",
    "joined_costs",
    "messages",
    "stage_costs",
    "treated",
]


#: The names of each stage's layers.
Stages = Sequence[Sequence[str]]

#: The names of the measured times of a layer.
TIMES = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s")

#: The names of the times and sizes that every layer of a profile must have.
NEEDED = (*TIMES, "input_bytes", "output_bytes", "activation_bytes", "weight_grad_bytes", "parameter_bytes")

#: The names of the costs that do not depend on the size of a micro-batch.
FIXED = (
    "parameter_bytes",
    "num_parameters",
    "gradient_bytes",
    "deferred_gradient_bytes",
    "buffer_bytes",
    "optimizer_bytes",
    "update_transient_bytes",
    "update_s",
    *SPLIT_SHARES,
    *SPLIT_COUNTS,
    "product_weight_bytes",
)

#: The names of the sizes that `LayerMemory` and `Costs` have in common. `kept_output_bytes` is excluded, because a
#: stage has the value of its last layer, even if a loss follows.
MEMORY_COLUMNS = {item.name for item in fields(LayerMemory) if item.name != "kept_output_bytes"}
MEMORY_COLUMNS &= {item.name for item in fields(Costs)}


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Times and sizes of one layer for one micro-batch, in seconds and bytes."""

    #: Time of a forward.
    forward_s: float = 0
    #: Time of a full backward (B).
    backward_s: float = 0
    #: Time of the input gradients of a split backward (I).
    input_grad_s: float = 0
    #: Time of the weight gradients of a split backward (W).
    weight_grad_s: float = 0
    #: Size of the parameters.
    parameter_bytes: int = 0
    #: The part of the time of a forward plus a full backward in which the processor is idle.
    waiting_s: float = 0
    #: Additional time of a forward plus a full backward while another rank computes.
    crowded_s: float = 0
    #: Interquartile range of the measured times, relative to the median.
    spread: float = 0
    #: Time of the optimizer's step.
    update_s: float = 0
    #: Size of the optimizer's state.
    optimizer_bytes: int = 0
    #: Peak memory of the optimizer's step, in addition to the optimizer's state.
    update_transient_bytes: int = 0
    #: Memory of the forward and the backward.
    memory: LayerMemory = field(default_factory=LayerMemory)
    #: Memory of the loss, if the loss was measured with this layer.
    loss: LossMemory = field(default_factory=LossMemory)
    #: The shares of the layer that the ranks of a tensor group can divide.
    split: TensorShares = field(default_factory=TensorShares)
    #: The collectives of the tensor group, if these are the costs of one of its ranks.
    traffic: TensorTraffic = field(default_factory=TensorTraffic)

    def __add__(self, other: "LayerCosts") -> "LayerCosts":
        """Return the costs of two layers in sequence. The loss is the loss of the second layer."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in (*_SUMS, "crowded_s", "parameter_bytes")}
        spread = max(self.spread, other.spread)
        traffic = self.traffic + other.traffic
        return replace(other, **sums, spread=spread, memory=self.memory + other.memory, traffic=traffic)

    @property
    def loss_layer(self) -> LayerMemory:
        """The memory of a loss computed from this layer's output. The loss is modelled as an additional layer."""
        return self.loss.as_layer(self.memory.output_bytes)

    def figures(self) -> dict[str, Any]:
        """Return all times and sizes as one flat mapping, named and ordered as in a profile.

        What concerns tensor groups is left out if the layer cannot be split, or is not split.
        """
        figures: dict[str, Any] = dict.fromkeys(NEEDED) | vars(self)
        del figures["memory"], figures["loss"], figures["split"], figures["traffic"]
        loss = {f"loss_{name}": size for name, size in vars(self.loss).items()}
        split = vars(self.split) if self.split else {}
        traffic = {name: getattr(self.traffic, own) for name, own in TRAFFIC.items()} if self.traffic else {}
        return figures | vars(self.memory) | loss | split | traffic

    @classmethod
    def of_figures(cls, figures: Mapping[str, Any]) -> "LayerCosts":
        """Make the costs from a mapping like the one that ``figures`` returns. Unknown names are ignored."""

        def known(kind: type, prefix: str = "") -> dict[str, Any]:
            return {item.name: figures[prefix + item.name] for item in fields(kind) if prefix + item.name in figures}

        memory, loss = LayerMemory(**known(LayerMemory)), LossMemory(**known(LossMemory, "loss_"))
        split, traffic = TensorShares(**known(TensorShares)), TensorTraffic(**known(TensorTraffic, "tensor_"))
        return cls(**known(cls), memory=memory, loss=loss, split=split, traffic=traffic)

    def recomputed(self, *, keeps_dear: bool = False) -> "LayerCosts":
        """Return the costs of the layer if its forward is recomputed before the backward.

        With ``keeps_dear``, activations that are expensive to compute are held. The time that this saves was not
        measured, so the full forward is counted.
        """
        return replace(
            self,
            backward_s=self.backward_s + self.forward_s,
            input_grad_s=self.input_grad_s + self.forward_s,
            waiting_s=self.waiting_s and self.waiting_s * (1 + self.forward_s / (self.forward_s + self.backward_s)),
            memory=self.memory.recomputed(keeps_dear=keeps_dear),
            traffic=self.traffic.recomputed(),
        )

    def treated(self, keep: LayerCheckpoint | None) -> "LayerCosts":
        """Return the layer's costs if its activations are held (``keep`` is None), recomputed or offloaded."""
        if keep == "offload":
            return replace(self, memory=replace(self.memory, offloads=1))
        return self if keep is None else self.recomputed(keeps_dear=keep == "recompute-cheap")


def costs_of(graph: "nx.DiGraph[str]", layer: str) -> LayerCosts:
    """Return the costs of a layer in a measured graph."""
    return LayerCosts.of_figures(graph.nodes[layer])


def stage_costs(
    stages: Sequence[Sequence[LayerCosts]], chain: int | None = None, *, host_bytes_per_s: float | None = None
) -> Costs:
    """Return the costs of stages made of these layers.

    Args:
        stages: the layers of each stage.
        chain: the number of stages in each chain. The first stage of a chain takes the model's inputs; the last stage
            computes the loss. Default: all stages.
        host_bytes_per_s: bandwidth between a rank's device and its host. Default: copies take no time.

    """
    count = chain or len(stages)
    ends = [(not stage % count, stage % count == count - 1) for stage in range(len(stages))]
    return joined_costs(
        [costs_of_stage(layers, *own, host_bytes_per_s) for layers, own in zip(stages, ends, strict=True)]
    )


def costs_of_stage(
    layers: Sequence[LayerCosts], begins: bool, ends: bool, host_bytes_per_s: float | None = None
) -> dict[str, Any]:
    """Return the costs of one stage, keyed by the field names of `Costs`.

    Args:
        layers: the layers of the stage.
        begins: whether the stage takes the model's inputs.
        ends: whether the stage computes a loss.
        host_bytes_per_s: bandwidth between the rank's device and its host. Default: copies take no time.

    """
    memories = [layer.memory for layer in layers]
    row: dict[str, Any] = {name: sum(getattr(layer, name) for layer in layers) for name in _SUMS}
    row["weight_bytes"] = sum(layer.parameter_bytes for layer in layers)
    row["offload_bytes"] = size = offloaded_bytes(memories)
    row["offload_s"] = row["fetch_s"] = size / host_bytes_per_s if host_bytes_per_s else 0
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
    row["tensor"] = sum((layer.traffic for layer in layers), TensorTraffic())
    return row


def joined_costs(stages: Sequence[Mapping[str, Any]], **others: Any) -> Costs:
    """Build `Costs` from the results of ``costs_of_stage``. ``others`` are fields with one value for all stages."""
    columns: dict[str, Any] = {name: tuple(row[name] for row in stages) for name in stages[0]}
    columns["tensor"] = columns["tensor"] if any(columns["tensor"]) else ()
    return Costs(**columns, **others)


#: The names of the times and sizes of a stage that are sums over the layers of the stage.
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


def carried(graph: "nx.DiGraph[str]", one: str, other: str) -> Mapping[str, int]:
    """Return the tensors on an edge, as {tensor: bytes}. An edge without sizes carries the whole output of ``one``."""
    edge = graph.edges[one, other]
    tensors: Mapping[str, int] | None = edge.get("tensors")
    if tensors is not None:
        return tensors
    return {one: edge.get("bytes", graph.nodes[one].get("output_bytes", 0))}


def messages(graph: "nx.DiGraph[str]", stages: Stages) -> dict[tuple[int, int], int]:
    """Return the bytes that stages send to later stages per micro-batch: {(sending stage, receiving stage): bytes}.

    A tensor that several stages use is passed on from each of these stages to the next.
    """
    home = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    ways: dict[tuple[int, str], tuple[int, set[int]]] = {}  # (stage, tensor): its bytes, and the stages that use it
    for one, other in graph.edges:
        if home[one] != home[other]:
            for tensor, size in carried(graph, one, other).items():
                ways.setdefault((home[one], tensor), (size, set()))[1].add(home[other])
    sizes: dict[tuple[int, int], int] = {}
    for (giver, _), (size, users) in ways.items():
        for ends in pairwise([giver, *sorted(users)]):
            sizes[ends] = sizes.get(ends, 0) + size
    return sizes


def treated(profile: Mapping[str, LayerCosts], checkpoint: Checkpoint) -> dict[str, LayerCosts]:
    """Return the layers' costs, keyed by name, with activations recomputed or offloaded as ``checkpoint`` specifies."""
    keep = checkpoint_by_layer(checkpoint)
    return {name: costs.treated(keep.get(name)) for name, costs in profile.items()}
