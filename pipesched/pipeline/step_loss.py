"""Step loss: the tensor that a step returns. Its backward() explains that the step has run the backward already."""

import copy
from typing import Any, NoReturn

from torch import Tensor, nn

from pipesched.errors import ExecutionError

__all__ = ["StepLoss"]


class StepLoss(Tensor):
    """A detached loss. Operations on it return plain tensors, and so do copying and unpickling."""

    __torch_function__ = nn.Parameter.__torch_function__  # torch's own way of returning plain tensors

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise ExecutionError(
            "step() runs the backward itself, and its gradients are in .grad already; loss.backward() was called on "
            "the loss that it returned; remove the call, or compute a loss of your own from forward()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._plain())

    def __format__(self, form: str) -> str:
        return format(self._plain(), form)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)
