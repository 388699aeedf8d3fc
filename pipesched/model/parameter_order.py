"""Parameter order: a key for each parameter of a model, equal in every process, that sorts in the model's order."""

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

__all__ = ["ParameterOrder"]

_ADDED = "~"  # sorts behind digits


class ParameterOrder:
    """The order of a model's parameters before ``wrap=`` changes them; parameters added later follow, by name.

    A tied parameter has one place, that of its first name. ``roots`` are the model and the loss module, by the prefix
    of their names.
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
        """The keys of these parameters."""
        wanted = list(parameters)
        if not all(parameter in self._keys for parameter in wanted):
            self._keys = {parameter: self._key(name) for name, parameter in self._named()}
        return [self._keys[parameter] for parameter in wanted]

    def _key(self, name: str) -> str:
        position = self._positions.get(name)
        return f"{_ADDED}{name}" if position is None else f"{position:09}"

    def name(self, key: str) -> str:
        """The name of the parameter with this key."""
        return key.removeprefix(_ADDED) if key.startswith(_ADDED) else self._names[int(key)]
