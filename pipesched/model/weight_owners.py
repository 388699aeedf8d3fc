"""Weight owners: the rank that holds each parameter and buffer of a model."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from pipesched.errors import GraphError

__all__ = ["Owners"]


class Owners:
    """The rank that holds each tensor of a model, keyed by tensor name.

    Names of a loss module's tensors begin with ``loss_fn.``.

    A tensor that several stages use belongs to the first of these stages.

    Args:
        model: the user's module.
        stages: the rank and the layers of each stage that holds weights, in order.
        loss: the rank that computes the loss.
        tied: parameters that several stages may hold.

    Raises:
        GraphError: a parameter or buffer is in no stage, or a parameter that is not tied is in several stages.

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
                where = f"stages {' and '.join(map(str, held))}" if held else f"none of the {len(stages)} stages"
                raise GraphError(
                    f"every parameter and buffer that is not tied must be in exactly one stage; {name!r} is in "
                    f"{where}; register it in exactly one layer that the model calls, before you build the pipeline"
                )
            self._ranks[name] = next(iter(held.values()))

    def stage(self, parameter: nn.Parameter) -> int | None:
        """Return the first stage that holds a parameter; None for a parameter of a loss module."""
        return self._stages.get(id(parameter))

    def rank(self, name: str) -> int:
        """Return the rank that holds a parameter, a buffer, or another entry of a layer's state dict."""
        if name.startswith("loss_fn.") and name not in self._ranks:
            return self._loss
        if name in self._ranks:
            return self._ranks[name]
        return next((rank for prefix, rank in self._prefixes.items() if name.startswith(prefix)), self._first)
