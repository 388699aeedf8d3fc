"""Owners: on which rank each of a model's parameters and buffers lives."""

from collections.abc import Mapping, Sequence

from torch import nn

__all__ = ["Owners"]


class Owners:
    """The ranks of a model's tensors, by name; those of a loss module are called ``loss_fn.…``.

    stages: the rank and the layers of each stage that holds weights of its own, in order. What several use belongs to
    the first; what none uses, to the first stage. loss: the rank where the loss is computed.
    """

    def __init__(self, model: nn.Module, stages: Sequence[tuple[int, Mapping[str, nn.Module]]], loss: int) -> None:
        self._first = stages[0][0]
        self._loss = loss
        self._ranks: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}
        of_tensor: dict[int, int] = {}
        for rank, of_stage in stages:
            for name, module in of_stage.items():
                self._prefixes.setdefault(f"{name}.", rank)
                for tensor in (*module.parameters(), *module.buffers()):
                    of_tensor.setdefault(id(tensor), rank)
        named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in (pair for pairs in named for pair in pairs):
            if id(tensor) in of_tensor:
                self._ranks[name] = of_tensor[id(tensor)]

    def rank(self, name: str) -> int:
        """Of a parameter, a buffer, or whatever else a layer keeps in its state."""
        if name.startswith("loss_fn.") and name not in self._ranks:
            return self._loss
        if name in self._ranks:
            return self._ranks[name]
        return next((rank for prefix, rank in self._prefixes.items() if name.startswith(prefix)), self._first)
