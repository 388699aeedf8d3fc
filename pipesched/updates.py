"""Updates: the optimizers of a pipeline's stages, made by the user's function."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipesched.errors import ModelTypeError
from pipesched.stage import Stage

__all__ = ["give_optimizers"]


def give_optimizers(
    optimizer: Callable[[list[Any]], Any],
    stages: Mapping[int, Stage],
    tied: Collection[nn.Parameter],
    home: Callable[[nn.Parameter], int | None],
) -> dict[int, Optimizer]:
    """Make each stage's optimizer of its parameters; a stage where none is trainable gets none.

    tied: parameters that several stages may hold: the one where their home is has their only optimizer, which steps
    when their gradients are summed.
    Raises ModelTypeError where ``optimizer`` is no function params -> Optimizer.
    """
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise ModelTypeError(
            f"optimizer is a function params -> Optimizer, called once for each stage; got {type(optimizer).__name__}; "
            f"pass one, such as lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    for index, stage in stages.items():
        stage.elsewhere = {parameter for parameter in tied if home(parameter) != index}
        stage.late = any(home(parameter) == index for parameter in tied)
        parameters = stage.parameters
        if any(parameter.requires_grad for parameter in parameters):
            stage.optimizer = _checked(optimizer(parameters), parameters)
    return {index: stage.optimizer for index, stage in stages.items() if stage.optimizer is not None}


def _checked(made: Any, parameters: list[Any]) -> Optimizer:
    if not isinstance(made, Optimizer):
        raise ModelTypeError(
            f"optimizer(params) returns a torch.optim.Optimizer; got {type(made).__name__}; return the optimizer"
        )
    own = set(map(id, parameters))
    others = [p for group in made.param_groups for p in group["params"] if id(p) not in own]
    if others:
        raise ModelTypeError(
            f"optimizer(params) makes an optimizer of these parameters alone, one for each stage; the one for a stage "
            f"with {len(own)} parameters has {len(others)} others; make it of params"
        )
    return made
