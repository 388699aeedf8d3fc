"""Master weights: lets an optimizer update float32 copies of bfloat16 or float16 parameters."""

from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple, TypeVar
from weakref import proxy, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipesched.checks import check_type
from pipesched.errors import ModelTypeError

__all__ = ["with_master_weights"]

_Made = TypeVar("_Made", bound=Optimizer)

_MASTER = "master"  # the key of the float32 copy in a parameter's state
_HALVES = (torch.bfloat16, torch.float16)


def with_master_weights(optimizer: _Made) -> _Made:
    """Let an optimizer update float32 copies of its bfloat16 or float16 parameters.

    After each update, the copies are rounded and written back to the parameters.

    ::

        pipe = Pipeline(
            model.bfloat16(), sample, optimizer=lambda params: with_master_weights(torch.optim.AdamW(params, lr=1e-4))
        )

    The optimizer's state for such a parameter is also float32, and contains the copy as ``"master"``. A copy therefore
    moves with its parameter when the plan changes, is part of ``state_dict()``, and is loaded without rounding. If
    other code changes a parameter, as ``load_state_dict`` does, the copy gets the new values. Parameters of other
    dtypes are updated as usual.

    Args:
        optimizer: a new optimizer, from torch.optim or with the same interface.

    Returns:
        The same optimizer.

    Raises:
        ArgumentError: the argument is not an optimizer.
        ModelTypeError: at a step, if a bfloat16 or float16 parameter is sharded. (``fully_shard`` can keep float32
            weights itself.)

    """
    check_type(optimizer, Optimizer, "with_master_weights takes an optimizer", "pass a torch.optim.Optimizer")
    masters = _MasterWeights()
    optimizer.register_step_pre_hook(masters.widen)
    optimizer.register_step_post_hook(masters.narrow)
    optimizer.register_load_state_dict_pre_hook(masters.note)
    optimizer.register_load_state_dict_post_hook(masters.restore)
    vars(optimizer)["step"] = _narrowing(optimizer, masters)
    return optimizer


def _narrowing(optimizer: Optimizer, masters: "_MasterWeights") -> MethodType:
    """Return a ``step`` that calls `narrow_after_failure` if the step fails, because torch then skips post-hooks.

    The result is a bound method, because learning rate schedulers use its ``__func__``. The method does not keep
    the optimizer alive.
    """
    own = ref(optimizer)
    inner = type(optimizer).step

    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        alive = own()
        assert alive is not None
        try:
            return inner(alive, *args, **kwargs)
        except BaseException:
            masters.narrow_after_failure(alive)
            raise

    return MethodType(step, proxy(optimizer))


class _Widened(NamedTuple):
    """A parameter that is float32 during a step, with the tensor and gradient to restore after the step."""

    parameter: Tensor
    values: Tensor
    grad: Tensor


class _MasterWeights:
    """The hooks that maintain the master weights of one optimizer."""

    def __init__(self) -> None:
        self._widened: list[_Widened] = []
        self._loaded: dict[str, Any] = {}

    @torch.no_grad()
    def widen(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step, replace each parameter's values with its float32 copy, and convert its gradient to float32."""
        for parameter in _parameters(optimizer):
            grad = parameter.grad
            if grad is None or parameter.dtype not in _HALVES:
                continue
            if hasattr(parameter, "full_tensor"):
                raise ModelTypeError(
                    f"master weights need unsharded parameters; a parameter of shape {list(parameter.shape)} is "
                    f"sharded; keep the model in float32, and pass "
                    f"mp_policy=MixedPrecisionPolicy(param_dtype={parameter.dtype}) to fully_shard"
                )
            values = parameter.data
            wide = values.float()
            master = optimizer.state[parameter].pop(_MASTER, wide)  # optimizers initialise only an empty state
            self._widened.append(_Widened(parameter, values, grad))
            parameter.grad = None
            parameter.data = torch.where(master.to(values.dtype) == values, master, wide)
            parameter.grad = grad.float()

    @torch.no_grad()
    def narrow(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """After a step, store the copies in the optimizer's state, and write their rounded values to the parameters."""
        for parameter, values, grad in self._widened:
            master = parameter.data
            parameter.grad = None
            parameter.data = values.copy_(master)
            parameter.grad = grad
            optimizer.state[parameter][_MASTER] = master
        self._widened = []

    def narrow_after_failure(self, optimizer: Optimizer) -> None:
        """After a failed step, call ``narrow``, and delete float32 copies that are the only entry of a state.

        Optimizers initialise only an empty state, so these states must be empty again.
        """
        parameters = [parameter for parameter, _, _ in self._widened]
        self.narrow(optimizer, (), {})
        for parameter in parameters:
            state = optimizer.state[parameter]
            if state.keys() == {_MASTER} and torch.equal(state[_MASTER], parameter.float()):
                del state[_MASTER]

    def note(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Before a state is loaded, keep the state for ``restore``."""
        self._loaded = state

    def restore(self, optimizer: Optimizer) -> None:
        """After a state is loaded, restore the exact values that torch has rounded to a parameter's dtype."""
        order = [number for group in self._loaded["param_groups"] for number in group["params"]]
        for number, parameter in zip(order, _parameters(optimizer), strict=True):
            saved = self._loaded["state"].get(number, {})
            own = optimizer.state.get(parameter, {})
            for name, value in saved.items():
                if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].dtype != value.dtype:
                    own[name] = value.to(own[name].device, copy=True)
        self._loaded = {}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
