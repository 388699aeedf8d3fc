"""Tensor shares: measures how much of each layer a tensor group divides, and counts the bytes of its collectives.

A copy of the model is split as over a mesh, but its collectives exchange nothing. A share follows from a layer's costs
in the model and in the copy: if one of T ranks does the fraction x of the work, (1 - x) T / (T - 1) of it is divided.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor, nn

from pipesched.capture.layer_calls import LayerCalls
from pipesched.capture.layered_model import LayeredModel
from pipesched.errors import InputError
from pipesched.model.state_guard import untouched
from pipesched.parallel.styles import divide_losses, split_model
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.runtime.coordination.rank_activity import said
from pipesched.runtime.microbatches import Batch
from pipesched.tensors.meta_tensors import Beside, lacks_contents
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import tensors_in
from pipesched.units import and_more

__all__ = ["SplitCopy"]

_META = torch.device("meta")

#: The share of a layer -> the cost from which it follows.
_COSTS = {
    "split_forward": "forward_s",
    "split_backward": "backward_s",
    "split_weight_grad": "weight_grad_s",
    "split_parameters": "parameter_bytes",
    "split_activations": "activation_bytes",
}


#: The collectives that are half of a sum. All others are sums.
_HALVES = {"all-gather": "gathered", "reduce-scatter": "scattered"}


class _Sums(NamedTuple):
    """The sums over a tensor group in one action of a layer: their number, and the size of all summed tensors."""

    calls: int = 0
    num_bytes: int = 0


class SplitCopy:
    """A copy of a model and its loss that has the layers of one rank of a tensor group.

    Args:
        model: the user's module, which is not changed.
        loss_fn: the user's loss; None if there is none.
        tensor_parallel: which layers are split, as for ``Distributed(tensor_parallel=)``.
        size: the number of ranks of the tensor group.

    Raises:
        InputError: the model cannot be copied, its layers cannot have these styles, or ``size`` does not divide them.

    """

    def __init__(self, model: nn.Module, loss_fn: Any, tensor_parallel: Any, size: int) -> None:
        self._group = TensorGroup.counting(size)
        with torch.inference_mode(False):  # so that autograd can use the copied weights
            self.model, self.loss_fn = _copied(model, loss_fn)
            divide_losses(self.loss_fn, self._group)
            split_model(self.model, tensor_parallel, self._group)

    def put_shares(
        self, graph: "nx.DiGraph[str]", split_graph: "nx.DiGraph[str]", known: LayeredModel, batch: Batch
    ) -> None:
        """Give the layers of a profile the values of `TensorShares`.

        Args:
            graph: the layers of the model with their costs, to which the shares are added.
            split_graph: the layers of the copy with their costs, for a micro-batch of the same size.
            known: the layers of the copy.
            batch: the micro-batch, with its target if there is a loss.

        """
        if unlike := {*graph} ^ {*split_graph}:
            raise InputError(
                f"a model must have the same layers after it is split; {and_more(sorted(unlike))} would be in only one "
                f"of both; keep the module that contains them whole (whole_layers=), or leave tensor_parallel= out"
            )
        sums = self._sums(known, list(graph), batch)
        for name, node in graph.nodes(data=True):
            forward, backward = sums["F", name], sums["B", name]
            shares = self._shares(node, split_graph.nodes[name])
            if not (forward.calls or backward.calls or shares["split_parameters"] or shares["split_activations"]):
                shares = dict.fromkeys(shares, 0.0)  # the rest is noise
            node.update(
                shares,
                all_reduce_forward_bytes=forward.num_bytes,
                all_reduces_forward=forward.calls,
                all_reduce_backward_bytes=backward.num_bytes,
                all_reduces_backward=backward.calls,
            )

    def _shares(self, node: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, float]:
        """Return the divided shares of a layer, given its costs in the model and in the copy."""
        size = self._group.size
        return {
            share: min(1.0, max(0.0, (1 - own[cost] / node[cost]) * size / (size - 1))) if node.get(cost) else 0.0
            for share, cost in _COSTS.items()
        }

    # ---- counting collectives -----------------------------------------------------------------------------------

    def _sums(self, known: LayeredModel, names: Iterable[str], batch: Batch) -> "_SumsOfLayers":
        """Run the copy forward and backward, and return the sums in each action ("F" or "B") of each layer."""
        group = self._group
        group.layout = ActivationLayout.WHOLE
        group.counter.clear()
        calls = _CountedLayers(known.modules, list(names), group)
        mode = self.model.training or not any(module.training for module in self.model.modules())
        on_meta = lacks_contents(self.model)
        where = Beside(_META) if on_meta else nullcontext()

        def own(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=_META) if on_meta else tensor.detach().clone()

        with torch.inference_mode(False), torch.enable_grad(), untouched(self.model, mode), where, calls:
            args, kwargs = pytree.tree_map_only(Tensor, own, batch.inputs[0])
            output = self.model(*args, **kwargs)
            if self.loss_fn is not None:
                output = self.loss_fn(output, pytree.tree_map_only(Tensor, own, batch.targets[0]))
            calls.turn_back()
            if ends := [one for one in tensors_in(output) if one.requires_grad]:
                torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])
        group.layout = ActivationLayout.WHOLE
        return _SumsOfLayers(group)


def _copied(model: nn.Module, loss_fn: Any) -> tuple[nn.Module, Any]:
    try:
        return copy.deepcopy((model, loss_fn))
    except Exception as error:  # any error of a class that cannot be copied
        raise InputError(
            f"layers are split in a copy of the model; copy.deepcopy of the model and the loss raised {said(error)}; "
            f"give the class of the object that cannot be copied a __deepcopy__, or leave tensor_parallel= out"
        ) from error


class _SumsOfLayers:
    """The sums of each (action, layer), from the collectives that a group has counted."""

    def __init__(self, group: TensorGroup) -> None:
        self._traffic = group.counter.traffic
        self._size = group.size

    def __getitem__(self, key: tuple[str, str]) -> _Sums:
        action = " ".join(key)
        calls: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for (own, kind), traffic in self._traffic.items():
            if own == action:
                part = _HALVES.get(kind, "summed")
                calls[part] += traffic.calls
                sent[part] += traffic.sent_bytes
        # With sequence parallelism, an all-gather and a reduce-scatter take the place of a sum. W gathers once more.
        gathered = min(sent["gathered"], sent["scattered"]) if sent["scattered"] else sent["gathered"]
        sent_bytes = sent["summed"] + gathered + sent["scattered"]  # 2 (T - 1)/T of the summed tensors
        num_bytes = round(sent_bytes * self._size / (2 * (self._size - 1)))
        return _Sums(calls["summed"] + (calls["scattered"] or calls["gathered"]), num_bytes)


class _CountedLayers:
    """In a ``with`` block, counts the collectives of a group by action and layer, such as "F blocks.0".

    A layer's backward begins when the gradient of its output is known. Collectives before the first layer, and those of
    the code between layers, count for the layer before, and those of the loss for the last layer.

    Args:
        layers: the layers by name.
        names: the names of the layers that are counted; further layers count for the layer before.
        group: the tensor group.

    """

    def __init__(self, layers: Mapping[str, nn.Module], names: list[str], group: TensorGroup) -> None:
        self._layers = layers
        self._counted = {*names}
        self._group = group
        self._current = names[0]

    def __enter__(self) -> None:
        self._calls = LayerCalls(self._layers)
        self._outputs: dict[int, Tensor] = {}
        self._count("F")
        self._handles = [layer.register_forward_pre_hook(self._begin) for layer in self._calls.layers]
        self._handles += [layer.register_forward_hook(self._end) for layer in self._calls.layers]

    def __exit__(self, *_: object) -> None:
        self._group.counter.action = ""
        self._outputs.clear()
        self._remove_hooks()

    def turn_back(self) -> None:
        """Count for the backward of the last layer from now on, and for it whatever the layers compute again."""
        self._remove_hooks()
        self._count("B")

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, action: str) -> None:
        self._group.counter.action = f"{action} {self._current}"

    def _begin(self, layer: nn.Module, *_: Any) -> None:
        name, number = self._calls.begin(layer)
        if number:
            name += f"#{number + 1}"
        if name in self._counted:
            self._current = name
        self._count("F")

    def _end(self, layer: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and id(tensor) not in self._outputs:  # a layer may return its input
                self._outputs[id(tensor)] = tensor
                tensor.register_hook(partial(self._arrived, self._current))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        self._current = name
        self._count("B")
