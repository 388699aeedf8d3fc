"""Recompute trial: compares the gradients of a layer on the sample with and without recomputation.

A second run of a layer gives other values if the layer keeps state outside its buffers, or changes saved tensors in
place. No list of such layers would be complete. So each kind of layer that a pipeline recomputes runs on the sample
with and without recomputation while the pipeline is being made.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipesched.capture.stage_body import call_with
from pipesched.model.state_guard import same_bits, untouched
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.progress import advance
from pipesched.runtime.stage.attribute_changes import AttributeChanges, with_values
from pipesched.runtime.stage.buffer_copies import buffers_of
from pipesched.runtime.stage.recompute import RecomputedLayers
from pipesched.runtime.stage.split_backward import Deferral
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import InBackward, Key, KeyedRandom
from pipesched.tensors.strided_clone import strided_clone
from pipesched.tensors.tree_structure import map_tensors, tensors_in

__all__ = ["RecomputeWord", "fault_of_recompute", "faults_of_recompute", "keeps_state"]

#: How a layer is recomputed. "always": a stage with this layer runs again before its backward.
RecomputeWord = LayerCheckpoint | Literal["always"]

_CALL = "layer", 0
#: Runs a layer with its arguments, under keyed random numbers.
_Act = Callable[[KeyedRandom, tuple[Any, ...], dict[str, Any]], Any]


def fault_of_recompute(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    word: RecomputeWord,
    device: torch.device,
) -> str:
    """Return why a layer must not be recomputed in one way. Arguments as for `faults_of_recompute`."""
    return faults_of_recompute(layer, args, kwargs, [word], device)[word]


def faults_of_recompute(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    words: Sequence[RecomputeWord],
    device: torch.device,
) -> dict[RecomputeWord, str]:
    """Return why a layer must not be recomputed in each of several ways; "" if its gradients stay as they are.

    Args:
        layer: the user's module. Its state is the same afterwards.
        args: positional arguments of a call.
        kwargs: keyword arguments of the call.
        words: the ways.
        device: the device of the layer.

    """
    try:
        first, second = (_results(layer, partial(_run, layer), args, kwargs, device) for _ in range(2))
    except Exception:  # a layer that fails on the sample fails in the first step, too, which says why
        return dict.fromkeys(words, "")
    if not _equal(first, second):
        return dict.fromkeys(words, "")  # a layer whose results vary by themselves cannot be compared

    def fault(word: RecomputeWord) -> str:
        again = partial(_run_twice, layer) if word == "always" else partial(_run_recomputed, layer, word)
        try:
            third = _results(layer, again, args, kwargs, device)
        except Exception as error:
            return f"its backward fails ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        return "" if _equal(first, third) else "it has other gradients, or another output in the next forward,"

    return {word: fault(word) for word in words}


def keeps_state(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Return whether a second call of a layer, with equal arguments and random numbers, returns another output.

    Args:
        layer: the user's module. Its state is the same afterwards.
        args: positional arguments of a call.
        kwargs: keyword arguments of the call.
        device: the device of the layer.

    """
    random = KeyedRandom(device)

    def called() -> list[Tensor | None]:
        random.enter(Key(0, 0, 0), *_CALL)
        given = map_tensors(lambda tensor: tensor.detach().to(device, copy=True), (args, kwargs))
        with Intercept(random), random.outside(*_CALL):
            return [tensor.clone() for tensor in tensors_in(_run(layer, random, *given))]

    try:
        with untouched(layer, layer.training), torch.no_grad():
            return not _equal(called(), called())
    except Exception:  # a layer that fails on the sample fails in the first step, too, which says why
        return False


def _run(layer: nn.Module, random: KeyedRandom, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call_with({}, layer, args, kwargs)


def _run_recomputed(
    layer: nn.Module, word: LayerCheckpoint, random: KeyedRandom, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def run(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_with(own, layer, args, kwargs)

    return RecomputedLayers(random, Deferral()).call(
        _CALL, layer, {}, run, args, kwargs, cheap=word == "recompute-cheap"
    )


def _run_twice(layer: nn.Module, random: KeyedRandom, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a layer as a checkpointed stage does: first for its output, and then again for its gradients."""
    name, _ = _CALL
    changes = AttributeChanges([layer])
    before = changes.before()
    buffers = buffers_of({name: layer})[name]
    place = random.place
    clones: dict[int, Tensor] = {}  # a tensor that is passed twice stays one tensor
    kept = map_tensors(lambda tensor: clones.setdefault(id(tensor), strided_clone(tensor)), (args, kwargs))
    call_with({}, layer, args, kwargs)
    attributes = changes.after(before)
    with random.repeated(place), with_values(attributes):
        return call_with(buffers, layer, *kept)


def _results(
    layer: nn.Module, act: _Act, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> list[Tensor | None]:
    """Return the outputs of a call, the gradients of its inputs and of the layer's weights, and another call's outputs.

    The other call follows the backward of the first. Its outputs show whether the backward has changed the layer.
    """
    leaves: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in leaves:
            trains = tensor.is_floating_point() or tensor.is_complex()
            leaves[id(tensor)] = tensor.detach().to(device, copy=True).requires_grad_(trains)
        return leaves[id(tensor)].clone()  # no leaf, so that the layer may change its input in place

    random = KeyedRandom(device)

    def called(number: int) -> list[Tensor]:
        random.enter(Key(0, 0, number), *_CALL)
        entered: dict[int, Tensor] = {}
        given = map_tensors(lambda tensor: entered.setdefault(id(tensor), copied(tensor)), (args, kwargs))
        with Intercept(random), random.outside(*_CALL):
            results = list(tensors_in(act(random, *given)))
        advance()
        return results

    with untouched(layer, layer.training), torch.enable_grad():
        outputs = called(0)
        values: list[Tensor | None] = [tensor.detach().clone() for tensor in outputs]
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        wanted = [leaf for leaf in (*leaves.values(), *layer.parameters()) if leaf.requires_grad]
        if roots and wanted:
            seeds = [root.detach().cos() for root in roots]
            edges, ends = ([get_gradient_edge(tensor) for tensor in own] for own in (roots, wanted))
            with Intercept(InBackward(random)):  # of edges, because for tensors torch would disable the mode
                grads = torch.autograd.grad(edges, ends, seeds, allow_unused=True)
            values += [None if grad is None else grad.clone() for grad in grads]
        return values + [tensor.detach().clone() for tensor in called(1)]


def _equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        a is b or (a is not None and b is not None and a.shape == b.shape and _same(a, b))
        for a, b in zip(one, other, strict=True)
    )


def _same(one: Tensor, other: Tensor) -> bool:
    strided = type(one) is Tensor and one.layout is torch.strided and not one.is_quantized
    return same_bits(one, other) if strided else True
