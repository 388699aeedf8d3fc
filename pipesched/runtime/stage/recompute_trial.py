"""Recompute trial: compares the gradients of a layer on the sample with and without recomputation.

What a layer keeps outside its buffers, or changes in place, decides whether a second run gives the same values. No list
of such layers would be complete, so each layer that a pipeline recomputes is tried out when the pipeline is made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipesched.capture.stage_body import call_with
from pipesched.model.state_guard import has_attributes, same_bits, untouched
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.runtime.stage.recompute import RecomputedLayers
from pipesched.runtime.stage.split_backward import Deferral
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import InBackward, Key, KeyedRandom
from pipesched.tensors.tree_structure import map_tensors, tensors_in

__all__ = ["fault_of_recompute"]

_CALL = "layer", 0
#: Runs a layer with its arguments, under keyed random numbers.
_Act = Callable[[KeyedRandom, tuple[Any, ...], dict[str, Any]], Any]


def fault_of_recompute(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], word: LayerCheckpoint, device: torch.device
) -> str:
    """Return why a layer must not be recomputed; "" if recomputation leaves its gradients as they are.

    Args:
        layer: the user's module. Its state is the same afterwards.
        args: positional arguments of a call.
        kwargs: keyword arguments of the call.
        word: "recompute" or "recompute-cheap".
        device: the device of the layer.

    """
    plain = partial(_run, layer)
    again = partial(_run_recomputed, layer, word == "recompute-cheap")
    try:
        (first, state), (second, _) = (_results(layer, plain, args, kwargs, device) for _ in range(2))
    except Exception:  # a layer that fails on the sample fails in the first step, too, which says why
        return ""
    if not _equal(first, second):
        return ""  # a layer whose results vary by themselves cannot be compared
    try:
        third, state_again = _results(layer, again, args, kwargs, device)
    except Exception as error:
        return f"its backward fails ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    if not _equal(first, third):
        return "it has other gradients"
    same = state.keys() == state_again.keys() and all(_alike(state[key], state_again[key]) for key in state)
    return "" if same else "it changes its state twice"


def _run(layer: nn.Module, random: KeyedRandom, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call_with({}, layer, args, kwargs)


def _run_recomputed(
    layer: nn.Module, cheap: bool, random: KeyedRandom, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def run(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_with(own, layer, args, kwargs)

    return RecomputedLayers(random, Deferral()).call(_CALL, layer, {}, run, args, kwargs, cheap=cheap)


def _results(
    layer: nn.Module, act: _Act, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[list[Tensor | None], dict[tuple[int, str], Any]]:
    """Return the outputs of a call, the gradients of its inputs and of the layer's weights, and the layer's state."""
    given: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in given:
            trains = tensor.is_floating_point() or tensor.is_complex()
            given[id(tensor)] = tensor.detach().to(device, copy=True).requires_grad_(trains)
        return given[id(tensor)]

    args, kwargs = map_tensors(copied, (args, kwargs))
    leaves = [tensor for tensor in given.values() if tensor.requires_grad]
    random = KeyedRandom(device)
    with _apart(layer):
        random.enter(Key(0, 0, 0), *_CALL)
        with Intercept(random):  # the clones are no leaves, so that the layer may change its inputs in place
            entered = {id(leaf): leaf.clone() for leaf in leaves}
            args, kwargs = map_tensors(lambda tensor: entered.get(id(tensor), tensor), (args, kwargs))
            output = act(random, args, kwargs)
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        wanted = [*leaves, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        if not outputs or not wanted:
            return [tensor.detach().clone() for tensor in tensors_in(output)], _state(layer)
        values = [tensor.detach().clone() for tensor in outputs]
        edges, ends = ([get_gradient_edge(tensor) for tensor in own] for own in (outputs, wanted))
        with Intercept(InBackward(random)):  # of edges, because for tensors torch would disable the mode
            grads = torch.autograd.grad(edges, ends, [value.cos() for value in values], allow_unused=True)
        return [*values, *(None if grad is None else grad.clone() for grad in grads)], _state(layer)


def _state(layer: nn.Module) -> dict[tuple[int, str], Any]:
    """Return the plain values and the tensors that a layer keeps in attributes, and in the attributes of objects."""
    tables = [vars(module) for module in layer.modules()]
    tables += [vars(value) for table in tables for value in table.values() if has_attributes(value)]
    return {
        (number, name): value.detach().clone() if isinstance(value, Tensor) else value
        for number, table in enumerate(tables)
        for name, value in table.items()
        if type(value) in (Tensor, bool, int, float, str)
    }


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and _same(one, other)
    return repr(one) == repr(other)


@contextmanager
def _apart(layer: nn.Module) -> Iterator[None]:
    with untouched(layer, layer.training), torch.enable_grad():
        yield


def _equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        a is b or (a is not None and b is not None and a.shape == b.shape and _same(a, b))
        for a, b in zip(one, other, strict=True)
    )


def _same(one: Tensor, other: Tensor) -> bool:
    strided = type(one) is Tensor and one.layout is torch.strided and not one.is_quantized
    return same_bits(one, other) if strided else True
