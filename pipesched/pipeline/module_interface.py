"""Module interface: what a pipeline shows of the model it wraps: parameters, state, modes, length and indices."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipesched.errors import GraphError
from pipesched.model.stale_weights import StaleGuard

__all__ = ["ModuleInterface"]

_LOSS_PREFIX = "loss_fn."


class ModuleInterface:
    """A model, and a loss function that may have parameters of its own, under one set of names."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        self.model = model
        self.loss_fn = loss_fn
        #: The modules by the prefix of their parameters' names.
        self._roots: dict[str, nn.Module] = {"": model}
        if isinstance(loss_fn, nn.Module):
            self._roots[_LOSS_PREFIX] = loss_fn
        #: Keeps stale weights from being read.
        self._guard = StaleGuard(self._roots)
        if isinstance(loss_fn, nn.Module) and any(name.startswith(_LOSS_PREFIX) for name in model.state_dict()):
            raise GraphError(
                "the loss module's parameters are named loss_fn.*; the model has a layer of that name; rename the layer"
            )
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        shared = [name for prefix, module in self._roots.items() if prefix for name in _tensors_in(module, own)]
        if shared:
            raise GraphError(
                f"a parameter belongs to a layer or to the loss; {shared[0]!r} of the loss module is the model's too; "
                f"give the loss one of its own (such ties are not supported)"
            )

    def _modules(self) -> dict[str, nn.Module]:
        """``roots``, once their weights are the newest."""
        return self._roots

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own parameters under their own names; those of a loss module as ``loss_fn.…``."""
        for prefix, module in self._modules().items():
            for name, parameter in module.named_parameters():
                if self._is_own(prefix + name):
                    yield prefix + name, parameter

    def _is_own(self, name: str) -> bool:
        """Whether what has this name is this process's to show."""
        return True

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters; over a mesh this rank's. A rank that has none gives an empty one, so that torch makes an
        optimizer of it.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        return iter(own or [nn.Parameter(torch.empty(0)) for _ in islice(self.model.parameters(), 1)])

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own buffers under their own names; those of a loss module as ``loss_fn.…``."""
        for prefix, module in self._modules().items():
            for name, buffer in module.named_buffers():
                if self._is_own(prefix + name):
                    yield prefix + name, buffer

    def state_dict(self) -> dict[str, Any]:
        """The model's own state under its own keys; that of a loss module as ``loss_fn.…``; over a mesh this rank's."""
        return {name: value for name, value in self._all_state().items() if self._is_own(name)}

    def _all_state(self) -> dict[str, Any]:
        modules = self._modules()
        with self._guard.lifted():
            return {
                prefix + name: value
                for prefix, module in modules.items()
                for name, value in module.state_dict().items()
            }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load what ``state_dict`` of this pipeline or of the bare model gave. Raises RuntimeError as torch does.

        Under a mesh a rank's own state suffices, and of the whole model's it uses that.
        """
        known = self._all_state()
        whole = all(name in state and not _is_empty(value) for name, value in known.items() if not self._is_own(name))
        state = {name: value for name, value in state.items() if name in known or self._is_own(name)}
        others = {name: value for name, value in known.items() if not self._is_own(name)}
        empty = {name: value for name, value in others.items() if _is_empty(value)}
        state = {**others, **state, **empty}
        modules = self._modules()
        loss = {name: value for name, value in state.items() if len(modules) > 1 and name.startswith(_LOSS_PREFIX)}
        self._guard.check(changes=not whole)
        with self._guard.lifted():
            self.model.load_state_dict({name: value for name, value in state.items() if name not in loss}, strict)
        if whole:
            self._guard.release()
        if loss and _LOSS_PREFIX in modules:
            bare = {name.removeprefix(_LOSS_PREFIX): value for name, value in loss.items()}
            modules[_LOSS_PREFIX].load_state_dict(bare, strict)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def train(self, mode: bool = True) -> Self:
        """Set the modules' mode, as nn.Module.train does."""
        for module in self._modules().values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the modules to evaluation mode."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for module in self._modules().values():
            module.zero_grad(set_to_none)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the parameters' dtype. Devices belong to the plan: raises TypeError where one is given."""
        for value in (*args, *kwargs.values()):
            if not isinstance(value, torch.dtype | torch.memory_format | bool):
                got = f"a tensor on {value.device}" if isinstance(value, Tensor) else repr(value)
                raise TypeError(
                    f"a pipeline's stages stay on their devices; got {got}; pass devices= to a new Pipeline"
                )
        for module in self._modules().values():
            module.to(*args, **kwargs)
        return self

    def half(self) -> Self:
        """Parameters and buffers in float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Parameters and buffers in bfloat16."""
        return self.to(torch.bfloat16)

    def float(self) -> Self:
        """Parameters and buffers in float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Parameters and buffers in float64."""
        return self.to(torch.float64)

    def cpu(self) -> Self:
        """Raises TypeError: devices belong to the plan."""
        return self.to("cpu")

    def cuda(self, device: Any = "cuda") -> Self:
        """Raises TypeError: devices belong to the plan."""
        return self.to(device)

    def __bool__(self) -> bool:
        return True  # also where the model has no length

    def __len__(self) -> int:
        return len(self._sequential())

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._sequential())

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self._sequential()[index]

    def _sequential(self) -> nn.Sequential:
        if not isinstance(self.model, nn.Sequential):
            raise TypeError(f"only an nn.Sequential has a length and indices; the model is {type(self.model).__name__}")
        return self.model


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _tensors_in(module: nn.Module, own: set[int]) -> list[str]:
    """The names of a module's parameters and buffers that are among ``own``."""
    return [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if id(tensor) in own]
