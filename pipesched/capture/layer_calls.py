"""Layer calls: numbers the calls of a model's layers while it runs."""

from collections.abc import Mapping

from torch import nn

__all__ = ["LayerCalls"]


class LayerCalls:
    """Numbers the calls of layers in one run of a model. A layer of several names runs once under each in turn.

    Args:
        layers: the layers by name.

    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._names: dict[nn.Module, list[str]] = {}
        for name, layer in layers.items():
            self._names.setdefault(layer, []).append(name)
        self._calls = dict.fromkeys(self._names, 0)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, each once."""
        return list(self._names)

    def begin(self, layer: nn.Module) -> tuple[str, int]:
        """Count a call of a layer. Return its name in this call, and how often it ran under this name before."""
        number, place = divmod(self._calls[layer], len(self._names[layer]))
        self._calls[layer] += 1
        return self._names[layer][place], number
