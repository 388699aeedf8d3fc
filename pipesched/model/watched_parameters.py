"""Watched parameters: refuses functions of torch that take the parameters of one rank for those of the model.

A generator sees which function takes its first value. So nothing in torch has to be replaced.
"""

from collections.abc import Callable, Iterable, Iterator
from inspect import currentframe

from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, swa_utils
from torch.optim import optimizer as optimizers

from pipesched.errors import ExecutionError

__all__ = ["watched"]

_CLIPPING = (
    "torch's clip_grad_norm_ computes the norm of the gradients that it gets, but each rank of a mesh has the "
    "gradients of its own stages only; call pipe.clip_grad_norm_ on every rank, or pass optimizer= and "
    "numerics=Numerics(clip_grad_norm=...)"
)
_AVERAGING = (
    "torch.optim.swa_utils averages all weights of a model, but each rank of a mesh has new values for the weights of "
    "its own stages only; call pipe.gather_model() on every rank before update_parameters(model), or average "
    "pipe.named_parameters() on every rank (docs/howto/averages.md)"
)


def watched(
    parameters: Iterable[nn.Parameter], check: Callable[[Optimizer], None] | None = None
) -> Iterator[nn.Parameter]:
    """Iterate over parameters of one rank. Raises ExecutionError if a function of torch would take them for all.

    ``check`` is called with an optimizer of torch that takes them, before it has any. Default: None.
    """
    frame = currentframe()
    caller = None if frame is None else frame.f_back
    if caller is not None:
        taker = caller.f_code
        if check is not None and taker.co_filename == optimizers.__file__ and taker.co_name == "__init__":
            made = caller.f_locals.get("self")
            if isinstance(made, Optimizer):
                check(made)
        if taker.co_filename == clip_grad.__file__ and taker.co_name == "clip_grad_norm_":
            raise ExecutionError(_CLIPPING)
        if taker.co_filename == swa_utils.__file__:
            raise ExecutionError(_AVERAGING)
    yield from parameters
