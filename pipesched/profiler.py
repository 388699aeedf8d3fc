"""Profiler: layers + one micro-batch -> measured costs. The model is left as it was: weights, buffers, grads, RNG.

Layers are measured by the same Stage that later runs them, one layer a stage, over copies of its parameters.
"""

import copy
import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipesched.actions import Kind
from pipesched.capture import unchanged
from pipesched.contents import lacks_contents, stand_in
from pipesched.costs import Costs
from pipesched.feed import Feed
from pipesched.payload import Gradients, Payload, pytree
from pipesched.randomness import outside_kept
from pipesched.stage import Stage
from pipesched.trace import Trace
from pipesched.untouched import attributes_kept

__all__ = ["LayerCosts", "measure_calls", "measure_layers", "measured_costs", "stage_costs"]

_ROUNDS = 5
_ENOUGH_S = 1.0  # no further round once so much time is spent


@dataclass(frozen=True)
class LayerCosts:
    """What one layer costs for one micro-batch: seconds, and bytes."""

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    weight_grad_bytes: int
    parameter_bytes: int

    def __add__(self, other: "LayerCosts") -> "LayerCosts":
        """Both, one after the other."""
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        return LayerCosts(**{**sums, "input_bytes": self.input_bytes, "output_bytes": other.output_bytes})


def measure_layers(
    layers: Mapping[str, nn.Module], sample: Any, device: torch.device, intra_op_threads: int
) -> dict[str, LayerCosts]:
    """Run one micro-batch through the layers on ``device``, each several times; the medians count. Equal layers that
    get equal shapes are measured once.

    sample: (args, kwargs) of the first layer. Layers are measured in training mode; where some train and some do not,
    each in its own.
    """
    costs: dict[str, LayerCosts] = {}
    known: dict[Any, tuple[LayerCosts, Payload]] = {}
    with _intra_op_threads(intra_op_threads), _training(layers.values()), torch.enable_grad(), outside_kept():
        arrived = Payload.of(pytree.tree_map_only(Tensor, stand_in, sample))
        for name, layer in layers.items():
            kind = not costs, _kind(layer, arrived)
            try:
                if kind not in known:
                    known[kind] = _Probe(name, layer, device).measure(arrived, first=not costs)
                costs[name], arrived = known[kind]
            except Exception as error:
                error.add_note(f"while layer {name!r} was measured on {device} with the given sample")
                raise
    return costs


def stage_costs(stages: Sequence[Sequence[LayerCosts]]) -> Costs:
    """Sum the layers of each stage."""

    def total(field: str) -> tuple[Any, ...]:
        return tuple(sum(getattr(layer, field) for layer in layers) for layers in stages)

    return Costs(
        forward_s=total("forward_s"),
        input_grad_s=total("input_grad_s"),
        weight_grad_s=total("weight_grad_s"),
        backward_s=total("backward_s"),
        activation_bytes=total("activation_bytes"),
        input_bytes=tuple(layers[0].input_bytes if layers else 0 for layers in stages),
        weight_grad_bytes=total("weight_grad_bytes"),
        weight_bytes=total("parameter_bytes"),
        output_bytes=tuple(layers[-1].output_bytes if layers else 0 for layers in stages),
    )


def measured_costs(traces: Sequence[Trace], num_stages: int, profiled: Costs | None = None) -> Costs:
    """The medians of what each stage's actions took; sizes come from the profile.

    A backward that only ran whole is split in the ratio of the profile, without one it is all input gradients; one that
    only ran split takes both parts together. Other kinds that did not run cost nothing.
    """
    seen: dict[tuple[int, Kind], list[float]] = {}
    for trace in traces:
        for span in trace.spans:
            seen.setdefault((span.action.stage, span.action.kind), []).append(span.end_s - span.start_s)

    def medians(kind: Kind) -> list[float]:
        return [median(seen.get((stage, kind), [0.0])) for stage in range(num_stages)]

    whole, inputs, weights = medians(Kind.B), medians(Kind.I), medians(Kind.W)
    for stage in range(num_stages):
        if (stage, Kind.B) not in seen:
            whole[stage] = inputs[stage] + weights[stage]
        elif (stage, Kind.I) not in seen:
            parts = (profiled.input_grad_s[stage], profiled.weight_grad_s[stage]) if profiled else (1, 0)
            inputs[stage] = whole[stage] * parts[0] / sum(parts) if any(parts) else whole[stage]
            weights[stage] = whole[stage] - inputs[stage]
    times: dict[str, Any] = {
        "forward_s": medians(Kind.F),
        "input_grad_s": inputs,
        "weight_grad_s": weights,
        "backward_s": whole,
        "recompute_s": medians(Kind.R),
        "update_s": medians(Kind.UPDATE),
    }
    return Costs(**times) if profiled is None else replace(profiled, **times)


def measure_calls(
    calls: Mapping[str, tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]],
    wanted: Collection[str],
    device: torch.device,
    intra_op_threads: int,
) -> dict[str, LayerCosts]:
    """As ``measure_layers``, for layers that are called with arguments of their own. Equal calls are measured once.

    wanted: the calls whose arguments' gradients are asked for.
    """
    costs: dict[str, LayerCosts] = {}
    known: dict[Any, LayerCosts] = {}
    layers = [layer for layer, _ in calls.values()]
    with _intra_op_threads(intra_op_threads), _training(layers), torch.enable_grad(), outside_kept():
        for name, (layer, arguments) in calls.items():
            given = Payload.of(pytree.tree_map_only(Tensor, _wanting if name in wanted else stand_in, arguments))
            kind = _kind(layer, given)
            try:
                if kind not in known:
                    known[kind], _ = _Probe(name, layer, device).measure(given, first=True)
            except Exception as error:
                error.add_note(f"while layer {name!r} was measured on {device} with the given sample")
                raise
            costs[name] = known[kind]
    return costs


def _wanting(tensor: Tensor) -> Tensor:
    return stand_in(tensor).detach().requires_grad_(tensor.is_floating_point())


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return stand_in(tensor, device, weight=True) if tensor.is_meta else tensor.detach().to(device, copy=True)


def _kind(layer: nn.Module, given: Payload) -> Any:
    """What decides what a call costs: types, shapes, settings, and which parameters are trained.

    Whole numbers are no settings here: blocks of one kind have their own as names.
    """
    modules = tuple((name, type(module), repr(module), _settings(module)) for name, module in layer.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in given.tensors)
    return modules, parameters, shapes, given.places, given.needs_grad


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, float | bool | str))


class _Copied(nn.Module):
    """A layer called on copies of its parameters and buffers, so that its own are not touched."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._layer = [layer]  # in a list: not a child, which would be moved and counted
        self._tensors = {
            name: _copied(parameter, device).requires_grad_(parameter.requires_grad)
            for name, parameter in layer.named_parameters()
        } | {name: _copied(buffer, device) for name, buffer in layer.named_buffers()}
        self._scripted = any(isinstance(module, torch.jit.ScriptModule) for module in layer.modules())
        if self._scripted:  # they take no other tensors than their own
            with torch.no_grad():
                self._layer = [copy.deepcopy(layer).to(device)]
            for parameter, own in zip(self._layer[0].parameters(), layer.parameters(), strict=True):
                parameter.requires_grad_(own.requires_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._scripted:
            return self._layer[0](*args, **kwargs)
        return torch.func.functional_call(self._layer[0], self._tensors, args, kwargs)

    def forget(self) -> None:
        """Free the copies; at once where there may be no room for those of several layers."""
        for tensor in self._tensors.values():
            tensor.grad = None
        self._tensors.clear()
        if lacks_contents(self._layer[0]):
            gc.collect()  # stages, graphs and modules refer to each other

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._layer[0].parameters())


class _Probe:
    """Measures one layer."""

    def __init__(self, name: str, layer: nn.Module, device: torch.device) -> None:
        self._layer = _Copied(layer, device)
        self._stage = Stage({name: self._layer}, device)
        self._device = device

    def measure(self, arrived: Payload, *, first: bool) -> tuple[LayerCosts, Payload]:
        whole: list[tuple[float, ...]] = []
        parts: list[tuple[float, ...]] = []
        begin = time.perf_counter()
        for round_ in range(_ROUNDS + 1):  # the first warms up
            given = arrived.map_tensors(lambda tensor: tensor.to(self._device).clone())
            times = self._whole(given, first)
            split = self._split(given, first)
            if round_ == 0:
                continue
            whole.append(times)
            parts.append(split)
            if time.perf_counter() - begin > _ENOUGH_S:
                break
        held, output = self._held_bytes(arrived, first)
        self._layer.forget()
        forward_s, backward_s = (median(column) for column in zip(*whole, strict=True))
        input_grad_s, weight_grad_s = (median(column) for column in zip(*parts, strict=True))
        costs = LayerCosts(
            forward_s=forward_s,
            backward_s=backward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            input_bytes=_nbytes(arrived.tensors),
            output_bytes=_nbytes(output.tensors),
            activation_bytes=held,
            weight_grad_bytes=_nbytes(arrived.tensors) + _nbytes(output.tensors),
            parameter_bytes=self._layer.parameter_bytes,
        )
        return costs, output

    def _forward(self, given: Payload, first: bool, split: bool) -> Payload:
        feed = Feed(0, 0, [unchanged(given.with_wanted(given.wanted))] if first else [None])
        self._stage.begin(feed)
        output: Payload = self._stage.forward(0, *(() if first else (given,)), split=split)
        return output

    def _whole(self, given: Payload, first: bool) -> tuple[float, ...]:
        output, forward_s = self._timed(lambda: self._forward(given, first, split=False))
        _, backward_s = self._timed(lambda: self._stage.backward(0, _ones(output)))
        return forward_s, backward_s

    def _split(self, given: Payload, first: bool) -> tuple[float, ...]:
        output = self._forward(given, first, split=True)
        _, input_grad_s = self._timed(lambda: self._stage.input_grad(0, _ones(output)))
        _, weight_grad_s = self._timed(lambda: self._stage.weight_grad(0))
        return input_grad_s, weight_grad_s

    def _held_bytes(self, arrived: Payload, first: bool) -> tuple[int, Payload]:
        """Bytes that autograd keeps for the backward, each memory once, the layer's own parameters not."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        given = arrived.map_tensors(lambda tensor: tensor.to(self._device))
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = self._forward(given, first, split=False)
        own = {tensor.untyped_storage().data_ptr() for tensor in self._layer._tensors.values()}
        self._stage.begin(Feed(0, 0, []))
        return sum(size for memory, size in kept.items() if memory not in own), output

    def _timed(self, function: Callable[[], Any]) -> tuple[Any, float]:
        self._synchronize()
        start = time.perf_counter()
        result = function()
        self._synchronize()
        return result, time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _ones(output: Payload) -> Gradients:
    return tuple(torch.ones_like(tensor) for tensor in output.wanted)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _training(layers: Any) -> Iterator[None]:
    modules = [module for layer in layers for module in layer.modules()]
    flags = [module.training for module in modules]
    for module in modules:
        module.training = module.training or not any(flags)  # a frozen BatchNorm in a model that trains stays frozen
    try:
        with attributes_kept(modules):
            yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
