"""Weight owners: on which rank each of a model's parameters and buffers lives."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from pipesched.errors import GraphError

__all__ = ["Owners"]


class Owners:
    """The ranks of a model's tensors, by name; those of a loss module are called ``loss_fn.…``.

    stages: the rank and the layers of each stage that holds weights of its own, in order. What several use belongs to
    the first. tied: the parameters that several may hold. loss: the rank where the loss is computed.
    Raises GraphError for a parameter or buffer that no stage holds, or a parameter that several hold and is not tied.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[tuple[int, Mapping[str, nn.Module]]],
        loss: int,
        tied: Collection[nn.Parameter] = (),
    ) -> None:
        self._first = stages[0][0]
        self._loss = loss
        self._ranks: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}
        holders: dict[int, dict[int, int]] = {}
        for stage, (rank, layers) in enumerate(stages):
            for name, module in layers.items():
                self._prefixes.setdefault(f"{name}.", rank)
                for tensor in (*module.parameters(), *module.buffers()):
                    holders.setdefault(id(tensor), {}).setdefault(stage, rank)
        self._stages = {tensor: next(iter(held)) for tensor, held in holders.items()}
        shared = set(map(id, tied))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in (*parameters.items(), *model.named_buffers(remove_duplicate=False)):
            held = holders.get(id(tensor), {})
            if not held or (len(held) > 1 and name in parameters and id(tensor) not in shared):
                raise GraphError(
                    f"every parameter and buffer is in exactly one stage, if it is not tied; {name!r} is in "
                    f"{' and '.join(map(str, held)) or 'none'} of {len(stages)}; register it with a layer that the "
                    f"model calls, before the pipeline is made"
                )
            self._ranks[name] = next(iter(held.values()))

    def stage(self, parameter: nn.Parameter) -> int | None:
        """The first that holds a parameter; None for one of a loss module."""
        return self._stages.get(id(parameter))

    def rank(self, name: str) -> int:
        """Of a parameter, a buffer, or whatever else a layer keeps in its state."""
        if name.startswith("loss_fn.") and name not in self._ranks:
            return self._loss
        if name in self._ranks:
            return self._ranks[name]
        return next((rank for prefix, rank in self._prefixes.items() if name.startswith(prefix)), self._first)
