"""Layered costs: measures the costs of a model's layers, and builds the graph of layers with these costs."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Set
from typing import Any

import networkx as nx
import torch
from torch import nn

from pipesched.capture.capture import Call, Capture, FunctionCall, Value
from pipesched.capture.captured_model import CapturedModel
from pipesched.capture.layered_model import LayeredModel, LayersInARow, as_model, layered
from pipesched.devices.selection import as_device
from pipesched.model.containers import Twin
from pipesched.model.state_guard import set_aside
from pipesched.profiling.layer_profiler import QUICK, Between, MeasurementEffort, measure_calls, measure_layers
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.tensors.caller_context import CodeModes
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.tensors.tree_structure import map_tensors, tensors_in
from pipesched.torch_checks import as_call

__all__ = ["graph_of", "measure"]


def graph_of(
    model: nn.Module, sample: Any, *, measured: bool = True, device: Any = "cpu", whole_layers: Collection[str] = ()
) -> "nx.DiGraph[str]":
    """Return the layers of a model as a graph, optionally with measured costs, for `pipesched.partition`.

    ::

        graph = pipesched.graph_of(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(8, 64))
        graph.nodes["0"]["forward_s"], graph.edges["0", "1"]["bytes"]

    Nodes are the layers at which a stage can begin, in call order. The second call of a layer is named ``name#2``.
    Code between two layers counts as part of one of these layers. The model is left unchanged.

    Args:
        model: an nn.Module, or a list of modules that form a chain.
        sample: one micro-batch: a tensor, a tuple of arguments, or a dict of keywords.
        measured: whether to measure each layer by running it several times with one thread. Default: True.
        device: the torch device to measure on. Default: "cpu".
        whole_layers: names of modules that are kept as one layer. Default: none.

    Returns:
        A networkx.DiGraph. Nodes have ``parameters`` and ``buffers`` (names; a tied tensor appears in several nodes),
        ``num_parameters``, ``parameter_bytes`` and ``output_bytes`` (bytes of the results that later layers or the
        model's output use). If measured, nodes also have ``forward_s``, ``backward_s``, ``input_grad_s``,
        ``weight_grad_s`` and ``activation_bytes``. An edge from a layer to a layer that uses its output has ``bytes``
        and ``tensors`` (name -> bytes; a tensor has the same name on all its edges). Values that every stage computes
        itself, such as masks, have no edge.

    Raises:
        ModelTypeError: the model is not an nn.Module, or its layers are inaccessible because it is compiled or wrapped.
        GraphError: the model cannot be cut into stages.
        InputError: the sample does not fit the model, or a name in ``whole_layers`` is unknown.

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
    known: LayeredModel, device: torch.device, intra_op_threads: int, effort: MeasurementEffort = QUICK
) -> dict[str, LayerCosts]:
    """Return the measured costs of each layer, keyed by the layer's name."""
    if isinstance(known, CapturedModel):
        return _measure_captured(known, device, intra_op_threads, effort)
    try:
        return measure_layers(known.layers, known.sample, device, intra_op_threads, effort)
    except TypeError as error:
        if isinstance(known, LayersInARow):
            known.check_sample(error)
        raise


def _measure_captured(
    known: CapturedModel, device: torch.device, intra_op_threads: int, effort: MeasurementEffort
) -> dict[str, LayerCosts]:
    """Return the measured costs of each layer at which a stage can begin.

    The costs of such a layer include the costs of all calls up to the next such layer, because these calls run in the
    same stage.
    """
    capture = known.primary_capture
    trained = capture.trained({name for name, parameter in known.model.named_parameters() if parameter.requires_grad})
    calls = {}
    for name, call in known.calls.items():
        layer = _as_called(known.modules[call.layer], capture, call, device)
        given = FunctionCall(layer, capture.examples[call.index], capture.taken[call.index])
        calls[name] = layer, _with_grads(given, trained)
    index_of = {name: call.index for name, call in known.calls.items()}
    if not lacks_contents(known.model):
        for call in capture.calls:
            if not (call.layer or call.reads or call.sealed or call.index in capture.free):
                between = capture.functions[call.index]
                name = f"{call}:{call.index}"
                modes = capture.modes.get(call.index)
                function = between.function if modes is None else _InModes(between.function, modes, device)
                calls[name] = Between(function), _with_grads(between, trained)
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


def _as_called(layer: nn.Module, capture: Capture, call: Call, device: torch.device) -> nn.Module:
    """Return the layer with the attributes and the modes that code between layers has set before this call."""
    if call.index in capture.told:
        layer = Twin(layer).layer
        layer.__dict__.update(capture.told[call.index])
    return _InModes(layer, capture.modes[call.index], device) if call.index in capture.modes else layer


class _InModes(nn.Module):
    """Calls a layer or a function in the modes in which the model's code calls it, for example under autocast."""

    def __init__(self, called: Callable[..., Any], modes: CodeModes, device: torch.device) -> None:
        super().__init__()
        self.called = called
        self.training = getattr(called, "training", True)
        self._modes = modes
        self._device = device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._modes.held(self._device):
            return self.called(*args, **kwargs)

    def extra_repr(self) -> str:  # calls in other modes have other costs
        return f"{self.called}, {self._modes}"


def _with_grads(between: FunctionCall, trained: Set[Value]) -> Any:
    """Return the arguments of a call. Arguments that depend on trained parameters require gradients."""
    made = {}
    for tensor, value in zip(tensors_in(between.arguments), between.values, strict=False):
        usable = tensor.clone() if tensor.is_inference() else tensor  # a tensor that autograd can use
        is_trained = value in trained and tensor.is_floating_point()
        made[id(tensor)] = usable.detach().requires_grad_() if is_trained else usable
    return map_tensors(lambda tensor: made.get(id(tensor), tensor), between.arguments)
