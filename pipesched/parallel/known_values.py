"""Known values: runs a model on the meta device in which some activations have values, as in an evaluation."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pipesched.model.state_guard import set_aside, untouched
from pipesched.tensors.meta_tensors import Beside
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import map_tensors, tensors_in

__all__ = ["KnownValues", "Sample", "evaluated", "run_model"]

#: The arguments of a micro-batch.
Sample = tuple[tuple[Any, ...], dict[str, Any]]

_META = torch.device("meta")


class KnownValues(TorchFunctionMode):
    """Knows which tensors have values while the weights of a model are on the meta device.

    A function that gets a tensor with values returns values. In such a function, all elements of a meta tensor have the
    same value, so that a block of the tensor has the values of the whole.

    Args:
        on_meta: whether the weights are on the meta device. If they are not, every tensor has values.

    """

    def __init__(self, *, on_meta: bool) -> None:
        super().__init__()
        self._on_meta = on_meta
        self._known: Any = WeakTensorKeyDictionary()
        self._generator = torch.Generator().manual_seed(0)

    def make_up(self, output: Tensor) -> Tensor:
        """Return values for the output of a whole layer. Each column has another mean and another spread."""
        if not output.is_floating_point() or not output.dim():
            return output
        if self._on_meta:
            output = torch.randn(output.shape, generator=self._generator, device="cpu").to(output.dtype)
        ramp = torch.linspace(-1, 1, output.shape[-1], device=output.device).to(output.dtype)
        return self.keep(output * (1.25 + 0.75 * ramp) + ramp * output.abs().mean())

    def keep(self, tensor: Tensor) -> Tensor:
        """Let functions of this tensor compute."""
        if self._on_meta and not tensor.is_meta:
            self._known[tensor] = True
        return tensor

    def of(self, value: Any) -> Tensor | None:
        """Return a copy of a tensor on the CPU; None if it has no values, or is no tensor."""
        if not isinstance(value, Tensor) or (self._on_meta and value not in self._known):
            return None
        return value.detach().cpu().clone()

    def shown(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the CPU, or on the meta device if it has no values."""
        copied = self.of(tensor)
        return torch.empty_like(tensor, device=_META) if copied is None else copied

    def put_away(self, args: Any) -> Any:
        """Return the arguments of a layer, whose weights are on the meta device, so that it need not compute."""
        if not self._on_meta:
            return args
        return pytree.tree_map_only(
            Tensor, lambda one: torch.empty_like(one, device=_META) if one in self._known else one, args
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(tensor in self._known for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = map_tensors(lambda one: _even(one) if one.is_meta else one, (args, kwargs))
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self.keep(tensor)
        return result


def _even(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU that has the shape and the dtype of a meta tensor, and one value."""
    value = 0.75 if tensor.dtype.is_floating_point else 0
    one = torch.tensor(tensor.dtype is torch.bool or value, dtype=tensor.dtype, device="cpu")
    return one.expand(tensor.shape)


@contextmanager
def evaluated(model: nn.Module, *, on_meta: bool) -> Iterator[KnownValues]:
    """Run the model as in an evaluation in the ``with`` block, and restore its state."""
    values = KnownValues(on_meta=on_meta)
    with set_aside(model), untouched(model, False), torch.no_grad(), ExitStack() as stack:
        if on_meta:
            stack.enter_context(Beside(torch.device("cpu")))
            stack.enter_context(values)
        yield values


def run_model(model: nn.Module, sample: Sample, *, on_meta: bool) -> Any:
    """Run the model; with ``on_meta``, on weights without values."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), sample)
    if not on_meta:
        return model(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, _on_cpu, (args, kwargs))
    own = {name: torch.empty_like(weight, device=_META) for name, weight in model.named_parameters()}
    own |= {name: _on_cpu(buffer.detach().clone()) for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, own, args, kwargs)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.cpu()
