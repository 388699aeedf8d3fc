"""Tensor costs: the costs of layers on one rank of a tensor group, computed from the costs of whole layers.

A profile says which shares of a layer can be split (`pipesched.simulation.tensor_split`). The rank's part of the times
and sizes is computed from the shares, and the times of collectives from the links inside the group. The result is a
profile again, whose layers have the costs of one rank; so partitions, schedules and memory are computed as for whole
layers.

In a layout of two or three dimensions, all ranks together divide everything that a split layer does and holds: products
and attention, norms and residual sums, activations and outputs. They also divide the weights, except that in 2.5d only
the q x q ranks of a plane divide the weights of products. Weights that are not split, such as those of norms, are
divided like the columns of the activations.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import networkx as nx

from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import carried
from pipesched.simulation.layout_traffic import LayoutTraffic
from pipesched.simulation.links import Links, slowest_of
from pipesched.simulation.profile import Profile
from pipesched.simulation.size_fit import SizeFit
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_split import SPLIT_COUNTS, SPLIT_SHARES, SPLIT_SIZES, TensorShares, TensorTraffic

__all__ = ["TensorCosts", "can_be_split", "shares_of", "without_collectives", "without_products"]

#: What is divided like the parameters, like the activations, and like the input and the output.
_LIKE_PARAMETERS = (
    *("gradient_bytes", "deferred_gradient_bytes", "optimizer_bytes", "update_transient_bytes", "update_s"),
    *("parameter_bytes", "num_parameters"),
)
_LIKE_ACTIVATIONS = ("activation_bytes", "weight_grad_bytes", "dear_bytes", "left_grad_bytes")
_LIKE_OUTPUT = (
    *("input_bytes", "output_bytes", "kept_input_bytes", "kept_output_bytes", "dear_output_bytes", "left_input_bytes"),
)
_LIKE_LOSS = ("loss_kept_bytes", "loss_kept_input_bytes", "loss_forward_bytes", "loss_backward_bytes")
#: Peaks, and the sizes that are parts of them.
_PEAKS = (
    ("forward_transient_bytes", None),
    ("backward_transient_bytes", None),
    ("weight_grad_transient_bytes", None),
    ("first_backward_transient_bytes", "gradient_bytes"),
    ("input_grad_transient_bytes", "weight_grad_bytes"),
)
#: Sizes that are parts of other sizes, and may not exceed them.
_PARTS = {
    "kept_input_bytes": "activation_bytes",
    "kept_output_bytes": "activation_bytes",
    "dear_output_bytes": "dear_bytes",
    "left_input_bytes": "weight_grad_bytes",
}


def shares_of(node: Mapping[str, Any]) -> TensorShares:
    """Return the shares of a layer of a profile that the ranks of a tensor group divide."""
    names = (*SPLIT_SHARES, *SPLIT_SIZES, *SPLIT_COUNTS)
    return TensorShares(**{name: node[name] for name in names if name in node})


def can_be_split(profile: Profile) -> bool:
    """Return whether the ranks of a tensor group can divide any layer of a profile."""
    return any(shares_of(node) for node in profile.graphs[min(profile.graphs)].nodes.values())


def without_products(profile: Profile) -> list[str]:
    """Return the split layers of which a profile does not have the sizes of the products, but those of all-reduces."""
    nodes = profile.graphs[min(profile.graphs)].nodes(data=True)
    split = {name: shares_of(node) for name, node in nodes}
    return [
        name
        for name, own in split.items()
        if own.all_reduce_forward_bytes + own.all_reduce_backward_bytes
        and not own.num_products
        and not own.embedding_output_bytes
    ]


class TensorCosts:
    """Computes the costs of one rank of a tensor group.

    The slowest group determines the times of collectives, and the slowest plane the links. A plane has one rank of each
    group: stages and replicas exchange tensors inside a plane.

    Args:
        axis: the ranks of a tensor group.
        num_ranks: the number of ranks of all groups together.
        links: the links between all ranks. Default: None, communication takes no time.

    """

    def __init__(self, axis: TensorAxis, num_ranks: int, links: Links | None = None) -> None:
        self._axis = axis
        self._links = links
        size = axis.size
        groups = [range(first, first + size) for first in range(0, num_ranks, size)]
        self._planes = [range(place, num_ranks, size) for place in range(size)]
        inside = [] if links is None else list(dict.fromkeys(map(links.among, groups)))
        self._traffic = LayoutTraffic(axis.layout, inside)

    def links_of_planes(self) -> Links | None:
        """Return the links between the ranks of one plane: for each pair, the slowest link of any plane."""
        return None if self._links is None else slowest_of(self._links, self._planes)

    def divided(self, profile: Profile) -> Profile:
        """Return the profile of one rank."""
        if self._axis.size == 1:
            return profile
        graphs = {rows: self._divided_graph(graph) for rows, graph in profile.graphs.items()}
        return replace(profile, graphs=graphs, size_fit=SizeFit())

    def traffic(self, shares: TensorShares) -> TensorTraffic:
        """Return the collectives of a layer for one micro-batch.

        In a group of T ranks, a rank sends 2(T-1)/T of the bytes of an all-reduce. With ``sequence_parallel``, an
        all-gather before the split part and a reduce-scatter after it take the place of an all-reduce. A rank sends
        (T-1)/T of the bytes in each of them. The weight gradients then need the whole input again, so each all-gather
        of a forward is repeated for W. Layouts of two and three dimensions exchange blocks of the products' matrices.
        """
        if not self._axis.is_flat:
            return self._traffic.of(shares)
        forward = self._sums(shares.all_reduces_forward, shares.all_reduce_forward_bytes)
        backward = self._sums(shares.all_reduces_backward, shares.all_reduce_backward_bytes)
        again = 0.0, 0
        if self._axis.sequence_parallel and shares.all_reduce_backward_bytes:
            count, size = max(1, shares.all_reduces_backward), shares.all_reduce_backward_bytes
            again = count * self._seconds("all-gather", size / count), self._part_sent(size)
        return TensorTraffic(
            forward_s=forward[0],
            input_grad_s=backward[0],
            weight_grad_s=again[0],
            forward_bytes=forward[1],
            input_grad_bytes=backward[1],
            weight_grad_bytes=again[1],
        )

    def _sums(self, count: int, size: int) -> tuple[float, int]:
        """Return the time of the sums of ``count`` tensors of ``size`` bytes in all, and the bytes a rank sends."""
        if not size:
            return 0.0, 0
        count = max(1, count)
        each = size / count
        if self._axis.sequence_parallel:
            seconds = self._seconds("all-gather", each) + self._seconds("reduce-scatter", each)
        else:
            seconds = self._seconds("all-reduce", each)
        return count * seconds, 2 * self._part_sent(size)

    def _part_sent(self, size: int) -> int:
        """Return the bytes that a rank sends in an all-gather or a reduce-scatter."""
        return round(size * (self._axis.size - 1) / self._axis.size)

    def _seconds(self, kind: str, num_bytes: float) -> float:
        """Return the time of a collective of all ranks of a group."""
        return self._traffic.seconds(kind, self._axis.layout.axes, num_bytes)

    # ---- layers -------------------------------------------------------------------------------------------------

    def _divided_graph(self, graph: "nx.DiGraph[str]") -> "nx.DiGraph[str]":
        shares = {name: shares_of(node) for name, node in graph.nodes(data=True)}
        made: nx.DiGraph[str] = nx.DiGraph(**graph.graph)
        made.graph["parameters"] = self._parameters(graph, shares)
        for name, node in graph.nodes(data=True):
            own = self._layer(node, shares[name]) if shares[name] else _unsplit(node)
            if node["parameters"]:
                own["parameter_bytes"] = sum(made.graph["parameters"][one][1] for one in node["parameters"])
                own["num_parameters"] = sum(made.graph["parameters"][one][0] for one in node["parameters"])
            made.add_node(name, **own)
        for one, other, edge in graph.edges(data=True):
            rest = self._rest if shares[one] else 1
            tensors = {name: _whole(size / rest) for name, size in carried(graph, one, other).items()}
            made.add_edge(one, other, **{**edge, "tensors": tensors, "bytes": sum(tensors.values())})
        return made

    def _parameters(self, graph: "nx.DiGraph[str]", shares: Mapping[str, TensorShares]) -> dict[str, tuple[int, int]]:
        """Return the number and the bytes of the elements of each parameter that a rank has.

        Of the layers that share a parameter, the one of which a rank has the largest part counts.
        """
        largest: dict[str, float] = {}
        for name, parameters in graph.nodes(data="parameters"):
            for parameter in parameters:
                part = self._weights_part(shares[name]) if shares[name] else 1.0
                largest[parameter] = max(largest.get(parameter, 0.0), part)
        return {
            name: (_whole(count * largest.get(name, 1.0)), _whole(size * largest.get(name, 1.0)))
            for name, (count, size) in graph.graph["parameters"].items()
        }

    @property
    def _rest(self) -> int:
        """The number of ranks among which everything that is not split is divided."""
        return self._axis.size if self._axis.sequence_parallel or not self._axis.is_flat else 1

    def _part(self, value: float, share: float, rest: int = 1) -> float:
        """Return a rank's part of a value of which a share is split, and the rest divided by ``rest``."""
        return value * (share / self._axis.size + (1 - share) / rest)

    def _weights_part(self, shares: TensorShares) -> float:
        """Return a rank's part of the weights of a layer."""
        layout, share = self._axis.layout, shares.split_parameters
        parts = self._traffic.num_weights if shares.num_products else layout.size
        return share / parts + (1 - share) / layout.length(layout.outer.columns)

    def _layer(self, node: Mapping[str, Any], shares: TensorShares) -> dict[str, Any]:
        """Return the costs of a split layer."""
        own = _unsplit(node)
        traffic = self.traffic(shares)
        of_input_grad = shares.split_input_grad(node["backward_s"], node["weight_grad_s"])
        for name, share, seconds in (
            ("forward_s", shares.split_forward, traffic.forward_s),
            ("backward_s", shares.split_backward, traffic.backward_s),
            ("input_grad_s", of_input_grad, traffic.input_grad_s),
            ("weight_grad_s", shares.split_weight_grad, traffic.weight_grad_s),
        ):
            own[name] = self._part(node[name], share, self._rest) + seconds
        for names, part in (
            (_LIKE_PARAMETERS, self._weights_part(shares)),
            (_LIKE_ACTIVATIONS, self._part(1, shares.split_activations, self._rest)),
            (_LIKE_OUTPUT, 1 / self._rest),
            (_LIKE_LOSS, 1 if self._axis.is_flat else 1 / self._rest),
        ):
            for name in filter(node.__contains__, names):
                own[name] = _whole(node[name] * part) if isinstance(node[name], int) else node[name] * part
        for name, whole in _PARTS.items():
            if name in own:
                own[name] = min(own[name], own.get(whole, 0))
        for name, included in _PEAKS:
            if name in node and (included is None or included in node):
                own[name] = self._peak(node, own, name, included, shares)
        before_s = node["forward_s"] + node["backward_s"]
        for name in ("waiting_s", "crowded_s"):
            if node.get(name) and before_s:
                own[name] = node[name] * (own["forward_s"] + own["backward_s"]) / before_s
        return own | {f"tensor_{name}": value for name, value in vars(traffic).items()}

    def _peak(
        self, node: Mapping[str, Any], own: Mapping[str, Any], name: str, included: str | None, shares: TensorShares
    ) -> int:
        """Return a rank's part of a peak. A size that it includes has been divided before.

        In one dimension, the rank holds the rest in whole. In the others, it holds as many blocks of each matrix as it
        gathers at a time, and the weights of the layer count as one matrix.
        """
        part: int = own.get(included, 0) if included else 0
        rest: int = node[name] - (node[included] if included else 0)
        if not self._axis.is_flat and rest > 0:
            rest = _whole(self._traffic.num_held * (rest / self._axis.size + self._traffic.weight_bytes(shares)))
        return max(part, rest + part)


def without_collectives(costs: Costs) -> Costs:
    """Return the costs of stages without the time of the collectives of tensor groups."""
    if not costs.tensor:
        return costs

    def less(name: str, of: str) -> tuple[float, ...]:
        pairs = zip(getattr(costs, name), costs.tensor, strict=True)
        return tuple(max(0, seconds - getattr(own, of)) for seconds, own in pairs)

    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
    changed: dict[str, Any] = {name: less(name, name) for name in names}
    return replace(costs, **changed, recompute_s=less("recompute_s", "forward_s"), tensor=())


def _unsplit(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs of a layer without what can be split, and without collectives."""
    names = (*SPLIT_SHARES, *SPLIT_SIZES, *SPLIT_COUNTS)
    own = {name: value for name, value in node.items() if name not in names}
    return own | {f"tensor_{name}": value for name, value in vars(TensorTraffic()).items()}


def _whole(size: float) -> int:
    return round(size)
