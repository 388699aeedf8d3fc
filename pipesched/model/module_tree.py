"""Module tree: finds the chained layers, hooks, BatchNorm layers and replaced modules of a model."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from pipesched.errors import GraphError, ModelTypeError
from pipesched.model.stale_weights import StaleHook
from pipesched.tensors.torch_insides import is_compiled
from pipesched.units import and_more, counted

__all__ = [
    "Members",
    "RECORDING",
    "check_hooks",
    "check_initialised",
    "class_names",
    "hooks_of",
    "is_in_a_row",
    "is_recorder",
    "layers_of",
    "layers_that_share",
    "normalised_over_rows",
    "recorders_of",
    "with_running_statistics",
]


def layers_of(model: nn.Module, whole: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the layers of an nn.Sequential in order, keyed by qualified name.

    Nested plain Sequentials are flattened, except Sequentials named in ``whole``.
    """
    return dict(_flatten(model, "", whole))


def layers_that_share(layers: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Return, for each layer that holds a module with parameters of another layer, the names of all such layers."""
    holders: dict[nn.Module, set[str]] = {}
    for name, layer in layers.items():
        for module in layer.modules():
            if module._parameters:
                holders.setdefault(module, set()).add(name)
    sharing: dict[str, set[str]] = {}
    for names in holders.values():
        for name in names if len(names) > 1 else ():
            sharing.setdefault(name, set()).update(names)
    return sharing


def is_in_a_row(model: nn.Module) -> bool:
    """Return whether a model is an nn.Sequential that has no hooks and whose layers share no tensors."""
    if not _is_plain(model) or hooks_of(model):
        return False
    layers = list(layers_of(model).values())
    tensors = [id(tensor) for layer in layers for tensor in {*layer.parameters(), *layer.buffers()}]
    own = {id(parameter) for parameter in model.parameters()}
    return len({id(layer) for layer in layers}) == len(layers) and own <= {*tensors} and len({*tensors}) == len(tensors)


def check_initialised(model: nn.Module) -> None:
    """Raise ModelTypeError if parameters or buffers have no shape yet."""
    lazy = [name for name, own in (*model.named_parameters(), *model.named_buffers()) if nn.parameter.is_lazy(own)]
    if lazy:
        raise ModelTypeError(
            f"all parameters and buffers must have shapes before the model is cut; those of lazy modules are still "
            f"uninitialized: {and_more(lazy)}; call the model once with a sample, under torch.no_grad()"
        )


def check_hooks(model: nn.Module) -> None:
    """Raise GraphError if the model itself has backward hooks, because no stage would run them."""
    hooks = [*model._backward_hooks.values(), *model._backward_pre_hooks.values()]
    if hooks:
        raise GraphError(
            f"a pipeline's model must not have backward hooks on the model itself, because no stage runs the backward "
            f"of the whole model; the model has {counted(len(hooks), 'backward hook')} that would never run; register "
            f"such hooks on the model's first or last layer"
        )


def normalised_over_rows(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers in training mode, which normalise over the rows of a batch."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # excluding SyncBatchNorm, which synchronises replicas
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module.training]


def with_running_statistics(model: nn.Module) -> list[str]:
    """Return the names of layers in training mode that update running means and variances in their buffers."""
    return [name for name, module in model.named_modules() if _tracks(module) and module.training]


def _tracks(module: nn.Module) -> bool:
    return bool(getattr(module, "track_running_stats", False))


def _is_plain(module: Any) -> bool:
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not is_compiled(module)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that the user registered on a module's forward and backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for name in names for hook in getattr(module, name).values()]
    return [
        hook for hook in hooks if not is_recorder(hook) and not isinstance(getattr(hook, "__self__", None), StaleHook)
    ]


#: The module of the transformers library that records outputs.
RECORDING = "transformers.utils.output_capturing"


def recorders_of(module: nn.Module) -> list[Any]:
    """Return the hooks with which the transformers library records layer outputs for the enclosing module's code."""
    return [hook for hook in module._forward_hooks.values() if is_recorder(hook)]


def installs_recorders(model: nn.Module) -> bool:
    """Install transformers' recording hooks now instead of in the first forward; return whether any hook is new."""
    capturing = sys.modules.get(RECORDING)
    before = sum(len(recorders_of(module)) for module in model.modules())
    if capturing is not None:
        for module in model.modules():
            records = getattr(module, "_can_record_outputs", None)
            # the library installs hooks in all descendants, again in those that have hooks
            if records and not any(recorders_of(part) for part in module.modules()):
                capturing.maybe_install_capturing_hooks(module)
    return sum(len(recorders_of(module)) for module in model.modules()) > before


def is_recorder(hook: Any) -> bool:
    """Return whether the transformers library installed a hook to record a layer's output."""
    return getattr(hook, "__module__", "") == RECORDING


def _flatten(module: nn.Module, prefix: str, whole: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules(remove_duplicate=False):
        if name and "." not in name:
            if _is_plain(child) and not hooks_of(child) and f"{prefix}{name}" not in whole:
                yield from _flatten(child, f"{prefix}{name}.", whole)
            else:
                yield f"{prefix}{name}", child


class Members:
    """Detects modules that were replaced after the pipeline was built: stores the modules in the model's containers.

    A pipeline runs the layers that the model had when the pipeline was built. Without this check, a module that
    replaces a layer later would not be trained.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        ways: dict[str, dict[str, None]] = {}
        for layer in layers:
            parts = layer.split(".")
            for depth, part in enumerate(parts):
                ways.setdefault(".".join(parts[:depth]), {})[part] = None
        self._held: list[tuple[str, Mapping[str, nn.Module | None], list[str] | None, dict[str, Any]]] = []
        for name, keys in ways.items():
            holder = model.get_submodule(name)
            modules = holder._modules
            # A Sequential or ModuleList may run all its modules; other containers call modules by name.
            own = None if isinstance(holder, nn.Sequential | nn.ModuleList) else list(keys)
            known = dict(modules) if own is None else {key: modules.get(key) for key in own}
            self._held.append((name, modules, own, known))

    def check(self) -> None:
        """Raise GraphError if a module has been replaced or removed since this object was created."""
        for name, modules, keys, known in self._held:
            now = modules if keys is None else {key: modules.get(key) for key in keys}
            if list(now.values()) != list(known.values()):
                raise GraphError(
                    f"a model must keep the modules that it had when the pipeline was built; in {name or 'the model'}, "
                    f"{_change(known, now)}; restore the old modules, or close this pipeline and build a new one"
                )


def _change(known: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first difference between the modules of a container before and after a change."""
    names = {module: key for key, module in known.items()}
    new = next((key for key, module in now.items() if module is not None and module not in names), None)
    if new is not None:
        return f"{new!r} is a new module"
    left = sum(module is not None for module in now.values())
    if left < len(known):
        return f"{left} of {len(known)} modules are left"
    moved = next(key for key, module in now.items() if known.get(key) is not module)
    return f"the order has changed: {moved!r} is now the module that was {names[now[moved]]!r}"


def class_names(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """Return the class name of each layer that is a numbered member of an nn.Sequential, keyed by layer name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for layer in layers:
        path = layer.partition("#")[0]  # a layer's second call is name#2
        parent, _, number = path.rpartition(".")
        if number.isdecimal() and path in modules and isinstance(modules.get(parent), nn.Sequential):
            found[layer] = type(modules[path]).__name__
    return found
