"""Named parameters: the list of parameters that ``optimizer=`` gets, which knows the parameters' names."""

from collections.abc import Iterable
from typing import Any

__all__ = ["NamedParameters"]


class NamedParameters(list[Any]):
    """A list of parameters. ``named()`` returns the parameters with their names in the model.

    ::

        def optimizer(params):
            named = params.named()
            plain = [p for name, p in named if name.endswith("bias") or "norm" in name]
            decayed = [p for name, p in named if not (name.endswith("bias") or "norm" in name)]
            return AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)

    Args:
        named: pairs (name, parameter).

    """

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        pairs = list(named)
        super().__init__(parameter for _, parameter in pairs)
        self._names = [name for name, _ in pairs]

    def named(self) -> list[tuple[str, Any]]:
        """Return pairs (name, parameter). The name is the full name in the whole model, also under a mesh."""
        return list(zip(self._names, self, strict=True))
