"""Graph: a model -> its layers, as a networkx graph with the layers' own names."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import networkx as nx
from torch import nn

from pipesched.errors import GraphError, ModelTypeError

__all__ = ["chain_graph", "hooks_of", "layers_of", "normalised_over_rows", "with_running_statistics"]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of an nn.Sequential in order, by qualified name; nested plain Sequentials are flattened.

    Raises ModelTypeError for another model, GraphError where a layer or a parameter is used twice.
    """
    if not _is_plain(model):
        raise ModelTypeError(
            f"the model is an nn.Sequential without a forward of its own; got {type(model).__name__}; "
            f"write it as an nn.Sequential of its layers (capture of any module is planned)"
        )
    hooks = hooks_of(model)
    if hooks:
        raise GraphError(
            f"layers are called one by one, the model itself is not; it has {len(hooks)} hooks that would never "
            f"run; register them on its first or last layer"
        )
    layers = dict(_flatten(model, ""))
    _check_unique(layers)
    _check_parameters(model, layers)
    return layers


def chain_graph(layers: dict[str, nn.Module]) -> "nx.DiGraph[str]":
    """Layers that feed each other in a row, as a graph."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(layers)
    graph.add_edges_from(pairwise(layers))
    return graph


def normalised_over_rows(model: nn.Module) -> list[str]:
    """The layers that normalise over the rows of a batch, such as BatchNorm, while they train."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm is for replicas
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module.training]


def with_running_statistics(model: nn.Module) -> list[str]:
    """The layers that change buffers of theirs while they train: means and variances of what they have seen."""
    return [name for name, module in model.named_modules() if _tracks(module) and module.training]


def _tracks(module: nn.Module) -> bool:
    return bool(getattr(module, "track_running_stats", False))


def _is_plain(module: Any) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def hooks_of(module: nn.Module) -> list[Any]:
    """What the user has registered on a module's forward and backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for name in names for hook in getattr(module, name).values()]


def _flatten(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules(remove_duplicate=False):
        if name and "." not in name:
            if _is_plain(child) and not hooks_of(child):
                yield from _flatten(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child


def _check_unique(layers: dict[str, nn.Module]) -> None:
    first: dict[int, str] = {}
    for name, layer in layers.items():
        other = first.setdefault(id(layer), name)
        if other != name:
            raise GraphError(
                f"a layer is used once; {name!r} is the same module as {other!r} ({type(layer).__name__}); "
                f"give each place a module of its own"
            )


def _check_parameters(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    owner: dict[int, str] = {}
    for name, layer in layers.items():
        for kind, tensors in (("parameter", layer.named_parameters()), ("buffer", layer.named_buffers())):
            for tensor_name, tensor in tensors:
                other = owner.setdefault(id(tensor), name)
                if other != name:
                    raise GraphError(
                        f"a {kind} belongs to one layer; {tensor_name!r} of {name!r} is shared with {other!r}; "
                        f"give each layer a {kind} of its own (tied weights are planned)"
                    )
    stray = [name for name, parameter in model.named_parameters() if id(parameter) not in owner]
    if stray:
        raise GraphError(f"every parameter belongs to a layer; {stray[0]!r} to none; move it into a layer that uses it")
