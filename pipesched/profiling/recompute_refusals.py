"""Recompute refusals: finds the layers whose gradients would change if they were recomputed, by trying each kind."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.errors import GraphError
from pipesched.model.fingerprint import Behaviours, form_of
from pipesched.runtime.stage.recompute_trial import RecomputeWord, fault_of_recompute, faults_of_recompute
from pipesched.tensors.tensor_attributes import is_plain
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["RecomputeTrial", "faults", "put_refusals", "trials"]

#: The ways that a search may choose.
_SEARCHED: tuple[RecomputeWord, ...] = ("recompute", "always")


class RecomputeTrial(NamedTuple):
    """A layer with the arguments of a call, and the names of all layers of its kind on its device."""

    name: str
    layer: nn.Module
    given: tuple[Any, Any]
    device: torch.device
    alike: list[str]


def trials(
    layered: LayeredModel,
    stages: Sequence[tuple[Mapping[str, nn.Module], torch.device]],
    words: Mapping[str, Any],
) -> list[RecomputeTrial]:
    """Return one layer of each kind, word and device among the layers in ``words``.

    Layers of one kind have the same code, settings, attributes, hooks and shapes. Layers on the meta device are left
    out.

    Args:
        layered: the model.
        stages: for each stage, the modules that it calls, keyed by layer name, and its device.
        words: layer name -> how the layer is recomputed.

    """
    found: dict[str, RecomputeTrial] = {}
    behaviours = Behaviours()
    here = {name for layers, _ in stages for name in layers}
    for name, given in layered.examples(here & words.keys()):
        for layer, device in [(layers[name], device) for layers, device in stages if name in layers]:
            tensors = [*tensors_in(given), *layer.parameters(), *layer.buffers()]
            if any(tensor.is_meta or not is_plain(tensor) for tensor in tensors):
                continue
            kind = repr((behaviours.of(layer), form_of(given), words[name], device))
            found.setdefault(kind, RecomputeTrial(name, layer, given, device, [])).alike.append(name)
    return list(found.values())


def faults(
    layered: LayeredModel,
    stages: Sequence[tuple[Mapping[str, nn.Module], torch.device]],
    words: Mapping[str, RecomputeWord],
) -> Iterator[tuple[RecomputeTrial, RecomputeWord, str]]:
    """Yield each layer whose gradients recomputation would change, its word, and the fault. Arguments as for `trials`.

    Of layers of one kind, only one is tried and yielded.
    """
    for trial in trials(layered, stages, words):
        word = words[trial.name]
        if fault := fault_of_recompute(trial.layer, *trial.given, word, trial.device):
            yield trial, word, fault


def put_refusals(layered: LayeredModel, graphs: Iterable["nx.DiGraph[str]"]) -> None:
    """Note for each layer of a model's graphs the ways in which a search must not recompute it, as ``refuses``."""
    names = list(layered.layers)
    calls = {name: {module for module, _ in layered.calls_of(name, again=False)} for name in names}
    modules = {module for own in calls.values() for module in own}
    on_device: dict[torch.device, dict[str, nn.Module]] = {}
    for name in sorted(modules):
        layer = layered.modules[name]
        first = next(chain(layer.parameters(), layer.buffers()), torch.empty(0))
        on_device.setdefault(first.device, {})[name] = layer
    stages = [(layers, device) for device, layers in on_device.items()]
    refused: dict[str, set[str]] = {word: set() for word in _SEARCHED}
    for trial in trials(layered, stages, dict.fromkeys(modules)):
        for word, fault in faults_of_recompute(trial.layer, *trial.given, _SEARCHED, trial.device).items():
            refused[word].update(trial.alike if fault else ())
    refused["recompute"] |= set(layered.recomputed)
    found = {name: [word for word in _SEARCHED if calls[name] & refused[word]] for name in names}
    for name in names:
        if "recompute" not in found[name] and _is_bound(layered, name):
            found[name].append("recompute")
    for graph in graphs:
        for name, words in found.items():
            graph.nodes[name]["refuses"] = words


def _is_bound(layered: LayeredModel, name: str) -> bool:
    """Return whether a layer shares tensors or attributes with other layers, so that it cannot be recomputed alone."""
    try:
        layered.calls_of(name, again=True)
    except GraphError:
        return True
    return False
