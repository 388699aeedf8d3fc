"""Elementwise optimizers: those that can update a part of a weight as they would update the whole weight."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.errors import ModelTypeError
from pipesched.units import and_more, counted

__all__ = ["check_elementwise", "is_elementwise"]

#: The optimizers that update each element of a parameter independently of the other elements.
_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates each element of a parameter independently of the other elements.

    This is known for torch's own optimizers. A subclass of one may combine elements.
    """
    return type(optimizer) in _ELEMENTWISE


def check_elementwise(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], split: Mapping[nn.Parameter, str]
) -> None:
    """Raise ModelTypeError if an optimizer would combine elements of a weight of which this rank holds only a block.

    Args:
        optimizer: the optimizer.
        parameters: its parameters.
        split: the weights that the ranks of a tensor group divide, with their names.

    """
    names = [] if is_elementwise(optimizer) else [split[own] for own in parameters if own in split]
    if names:
        known = ", ".join(sorted(kind.__name__ for kind in _ELEMENTWISE))
        raise ModelTypeError(
            f"an optimizer of weights that tensor_parallel= splits must update each element independently of the "
            f"others, because each rank updates only its own block; {type(optimizer).__name__} may combine the "
            f"elements of a weight, and holds {counted(len(names), 'split weight')}: {and_more(names)}; use one of "
            f"torch's {known}, or leave these weights out of tensor_parallel="
        )
