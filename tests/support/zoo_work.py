"""Zoo work: counts the work of a model's layers, which is the same on every machine and in every run."""

from math import prod
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pipesched import partition
from pipesched.capture.captured_model import CapturedModel
from pipesched.model.state_guard import untouched
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["counted", "even_boundaries", "shares"]

_FLOPS_A_BYTE = 10  # operations that a processor performs in the time of reading one byte from memory


def counted(model: nn.Module, sample: dict[str, Any]) -> "nx.DiGraph[str]":
    """Return the chain of layers that a pipeline cuts, with each layer's forward work as its time.

    The work is the number of operations of products and convolutions, plus _FLOPS_A_BYTE for each byte of results.
    """
    captured = CapturedModel(model, ((), sample))
    graph = nx.path_graph(captured.layers, nx.DiGraph)
    nx.set_node_attributes(graph, 0.0, "forward_s")
    begin = ""
    with untouched(model, model.training), torch.no_grad():
        for name, call in captured.calls.items():
            begin = name if name in captured.layers else begin
            args, kwargs = captured.captures[model.training].examples[call.index]
            graph.nodes[begin]["forward_s"] += _work(captured.modules[call.layer], args, kwargs)
    for node in graph.nodes.values():
        node["backward_s"] = 2 * node["forward_s"]
    return graph


def _work(layer: nn.Module, args: Any, kwargs: Any) -> float:
    moved = _Bytes()
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mkldnn_rnn_layer: _recurrent}) as flops, moved:
        layer(*args, **kwargs)
    return flops.get_total_flops() + _FLOPS_A_BYTE * moved.count


def _recurrent(inputs: Any, from_input: Any, from_state: Any, *_: Any, **__: Any) -> int:
    """Return the operations of an RNN layer: per token, one product with each of two weights of these shapes."""
    return 2 * prod(inputs[:2]) * (prod(from_input) + prod(from_state))


class _Bytes(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += sum(tensor.nbytes for tensor in tensors_in(result))
        return result


def even_boundaries(graph: "nx.DiGraph[str]", num_stages: int) -> list[str]:
    """Return the boundaries with the smallest bottleneck."""
    return [names[0] for names in partition(graph, num_stages, exactly=True).stages[1:]]


def shares(graph: "nx.DiGraph[str]", stages: list[list[str]]) -> list[float]:
    """Return each stage's share of the total work."""
    work = [sum(graph.nodes[name]["forward_s"] for name in names if name in graph) for names in stages]
    return [one / sum(work) for one in work]
