"""Names: the names of a model's tensors without the prefixes that wrappers add."""

from collections.abc import Callable, Collection, Mapping

from torch import nn

from pipesched.tensors.torch_insides import WRAPPED_IN

__all__ = ["model_name", "own_names"]

_MODULE = "module"  # used by DistributedDataParallel, AveragedModel and most other wrappers


def own_names(roots: Mapping[str, nn.Module]) -> Callable[[str], str]:
    """Return a function that strips wrapper prefixes from the name of a parameter, buffer or module.

    A child named ``module`` is treated as a wrapped module if its parent has no other child.

    Args:
        roots: the model and the loss module, keyed by the prefix of their tensors' names.

    """
    own: dict[str, str] = {"": ""}
    for root_prefix, root in roots.items():
        for name, module in root.named_modules(remove_duplicate=False, prefix=root_prefix.removesuffix(".")):
            here = own.setdefault(name, name)
            for key, child in module._modules.items():
                if child is not None:
                    wrapped = key in WRAPPED_IN or (key == _MODULE and len(module._modules) == 1)
                    own[f"{name}.{key}" if name else key] = here if wrapped else f"{here}.{key}" if here else key
    if all(name == short for name, short in own.items()):
        return lambda name: name

    def own_name(name: str) -> str:
        holder, _, key = name.rpartition(".")
        if name in own:
            return own[name]
        short = own.get(holder, holder)
        return f"{short}.{key}" if short else key

    return own_name


def model_name(key: str, names: Collection[str]) -> str | None:
    """Return the name in ``names`` to which a state dict's key refers, or None if no name matches.

    The key may have wrapper prefixes.
    """
    return next((name for name in (key, _without_wrapper(key)) if name in names), None)


def _without_wrapper(name: str) -> str:
    return ".".join(part for part in name.removeprefix(f"{_MODULE}.").split(".") if part not in WRAPPED_IN)
