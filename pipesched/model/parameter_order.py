"""Parameter order: sort keys for a model's parameters. The keys are identical in every process."""

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

__all__ = ["ParameterOrder"]

_ADDED = "~"  # sorts after digits


class ParameterOrder:
    """The order of a model's parameters before ``wrap=`` changes them. Parameters added later come last, by name.

    A tied parameter is sorted by its first name. ``roots`` maps prefixes of parameter names to root modules: the model,
    and the loss module.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._names = [name for name, _ in self._named()]
        self._positions = {name: position for position, name in enumerate(self._names)}
        self._keys: dict[nn.Parameter, str] = {}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, root in self._roots.items():
            for name, parameter in root.named_parameters():
                yield prefix + name, parameter

    def keys(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Return the sort key of each of these parameters."""
        wanted = list(parameters)
        if not all(parameter in self._keys for parameter in wanted):
            self._keys = {parameter: self._key(name) for name, parameter in self._named()}
        return [self._keys[parameter] for parameter in wanted]

    def _key(self, name: str) -> str:
        position = self._positions.get(name)
        return f"{_ADDED}{name}" if position is None else f"{position:09}"

    def name(self, key: str) -> str:
        """Return the name of the parameter with this sort key."""
        return key.removeprefix(_ADDED) if key.startswith(_ADDED) else self._names[int(key)]
