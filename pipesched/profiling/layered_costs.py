"""Layered costs: what the layers of a model cost, measured, and the layers as a graph with these costs."""

from bisect import bisect_right
from collections.abc import Collection, Set
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from pipesched.capture.capture import Call, Capture, FunctionCall, Value
from pipesched.capture.captured_model import CapturedModel
from pipesched.capture.layered_model import LayeredModel, as_model, layered
from pipesched.model.containers import Twin
from pipesched.model.state_guard import set_aside
from pipesched.profiling.layer_profiler import QUICK, Between, Effort, measure_calls, measure_layers
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.tensors.payload import pytree
from pipesched.torch_checks import as_call, as_device

__all__ = ["graph_of", "measure"]


def graph_of(
    model: nn.Module, sample: Any, *, measured: bool = True, device: Any = "cpu", whole_layers: Collection[str] = ()
) -> "nx.DiGraph[str]":
    """The layers of a model as a graph, as they are cut into stages.

    sample: one micro-batch, as for ``Pipeline``. Nodes are layers with which a stage may begin, under their names and
    in the order of their calls: a layer's second call is ``name#2``; what runs between layers belongs to one of them.
    Nodes have ``parameters`` and ``buffers`` (their names in the model; a tied one is in several nodes),
    ``num_parameters``, ``parameter_bytes``, and ``output_bytes`` (what later layers use, and the model's output). An
    edge leads from a layer to one that uses what it gives: ``bytes``, and ``tensors``, the bytes of each by a name: a
    tensor that several layers use has one name. What every stage computes by itself, such as masks, makes no edge.
    measured: each layer is run several times on ``device``, by one thread: nodes then also have ``forward_s``,
    ``backward_s``, ``input_grad_s``, ``weight_grad_s`` and ``activation_bytes`` (held from forward to backward).
    whole_layers: modules that are one layer each, as for ``Pipeline``. `pipesched.partition` cuts such a graph. The
    model is left as it was. Raises GraphError, ModelTypeError, InputError.
    """
    where = as_device(device)
    whole = as_model(model)
    known = layered(whole, as_call(sample), whole_layers)
    if not measured:
        return known.graph({})
    with set_aside(whole):
        costs = measure(known, where, 1)
    return known.graph(costs)


def measure(
    known: LayeredModel, device: torch.device, intra_op_threads: int, effort: Effort = QUICK
) -> dict[str, LayerCosts]:
    """What each layer costs."""
    if isinstance(known, CapturedModel):
        return _measure_captured(known, device, intra_op_threads, effort)
    return measure_layers(known.layers, known.sample, device, intra_op_threads, effort)


def _measure_captured(
    known: CapturedModel, device: torch.device, intra_op_threads: int, effort: Effort
) -> dict[str, LayerCosts]:
    """Of each layer, with those after it that no stage may begin with, and the functions between."""
    capture = known.captures[known.model.training]
    trained = capture.trained({name for name, parameter in known.model.named_parameters() if parameter.requires_grad})
    calls = {}
    for name, call in known.calls.items():
        layer = _as_told(known.modules[call.layer], capture, call)
        given = FunctionCall(layer, capture.examples[call.index], capture.taken[call.index])
        calls[name] = layer, _with_grads(given, trained)
    index_of = {name: call.index for name, call in known.calls.items()}
    if not lacks_contents(known.model):
        for call in capture.calls:
            if not (call.layer or call.reads or call.sealed or call.index in capture.free):
                between = capture.functions[call.index]
                name = f"{call}:{call.index}"
                calls[name] = Between(between.function), _with_grads(between, trained)
                index_of[name] = call.index
    calls = dict(sorted(calls.items(), key=lambda item: index_of[item[0]]))
    begins = known.begins(capture)
    names = list(begins)
    starts = list(begins.values())
    costs: dict[str, LayerCosts] = {}
    for name, own in measure_calls(calls, (), device, intra_op_threads, effort).items():
        begin = names[bisect_right(starts, index_of[name]) - 1]
        costs[begin] = costs[begin] + own if begin in costs else own
    return costs


def _as_told(layer: nn.Module, capture: Capture, call: Call) -> nn.Module:
    """The layer with the attributes that code between layers had given to it."""
    if call.index not in capture.told:
        return layer
    copy = Twin(layer).layer
    copy.__dict__.update(capture.told[call.index])
    return copy


def _with_grads(between: FunctionCall, trained: Set[Value]) -> Any:
    """The arguments of a function; of what is trained gradients are asked for."""
    leaves, spec = pytree.tree_flatten(between.arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place, value in zip(places, between.values, strict=False):
        if value in trained and leaves[place].is_floating_point():
            leaves[place] = leaves[place].detach().requires_grad_()
    return pytree.tree_unflatten(leaves, spec)
