"""Updates: which stage updates what, and the optimizers that do."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipesched.inheritance import Inheritance
from pipesched.stage import Stage

__all__ = ["optimizers_for"]


def optimizers_for(
    optimizer: Callable[[list[Any]], Any],
    stages: Mapping[int, Stage],
    tied: Collection[nn.Parameter],
    home: Callable[[nn.Parameter], int | None],
    before: Mapping[int, Optimizer],
) -> Inheritance:
    """The optimizers of stages, as the function makes them, or handed on by the stages before.

    tied: parameters that several stages may hold: the one where their home is has their only optimizer, which steps
    when their gradients are summed.
    Raises ModelTypeError where ``optimizer`` makes something else.
    """
    for index, stage in stages.items():
        stage.elsewhere = {parameter for parameter in tied if home(parameter) != index}
        stage.late = any(home(parameter) == index for parameter in tied)
    return Inheritance(optimizer, before, {index: stage.parameters for index, stage in stages.items()})
