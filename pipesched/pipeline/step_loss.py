"""Step loss: raises an error if ``backward()`` is called on the loss that a step returned.

The step has already run the backward pass.
"""

from typing import Any
from weakref import ref

from torch import Tensor

from pipesched.errors import ExecutionError

__all__ = ["explain_backward", "without_attributes"]


def explain_backward(loss: "ref[Tensor]", *args: Any, **kwargs: Any) -> None:
    """Act as the ``backward`` method of a loss that a step returned.

    Raises ExecutionError, unless the loss has been modified in place so that it requires gradients.
    """
    tensor = loss()
    if tensor is not None and tensor.requires_grad:  # the caller has added a term to the loss in place
        Tensor.backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        return
    raise ExecutionError(
        "backward() must not be called on the loss of step(), which runs the backward itself and stores the gradients "
        "in .grad; it was called on such a loss; remove the call, or compute your own loss "
        "from forward()"
    )


def without_attributes() -> None:
    """Act as the ``__getstate__`` method of a loss that a step returned, so that torch pickles it as a plain tensor."""
