"""Module interface: the nn.Module methods of a pipeline, for the pipeline's model and loss module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.checks import check_type
from pipesched.devices.transfers import CUDA
from pipesched.errors import GraphError
from pipesched.model.stale_weights import StaleGuard
from pipesched.model.watched_parameters import watched

__all__ = ["ModuleInterface"]

_LOSS_PREFIX = "loss_fn."


class ModuleInterface:
    """The nn.Module methods of a pipeline. They act on the pipeline's model and loss module.

    Tensors have the same names as in the model; names of a loss module's tensors start with ``loss_fn.``. Every method
    first finishes all steps in progress if the schedule is asynchronous. Under a mesh the methods cover only this
    rank's stages.

    - ``parameters``, ``buffers`` and ``modules`` with their ``named_...`` variants, ``train``, ``eval``, ``zero_grad``
      and ``apply``: as in nn.Module.
    - ``state_dict``, ``load_state_dict``: state dicts are interchangeable with the bare model's state dicts.
    - ``to``, ``half``, ``bfloat16``, ``float``, ``double``: change the dtype. Passing a device raises TypeError.
    - ``len()``, iteration and indexing: only for an nn.Sequential. ``bool(pipe)`` is True even if the length is 0.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        self.model = model
        self.loss_fn = loss_fn
        #: The model and the loss module, keyed by the prefix of their parameters' names.
        self._roots: dict[str, nn.Module] = {"": model}
        if isinstance(loss_fn, nn.Module):
            self._roots[_LOSS_PREFIX] = loss_fn
        #: Refuses reads of stale weights.
        self._guard = StaleGuard(self._roots)
        if isinstance(loss_fn, nn.Module) and any(name.startswith(_LOSS_PREFIX) for name in model.state_dict()):
            raise GraphError(
                "the model must not have a layer called loss_fn, because the loss module's parameters are named "
                "loss_fn.*; this model has such a layer; rename it"
            )
        of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        shared = [name for prefix, module in self._roots.items() if prefix for name in _tensors_in(module, of_model)]
        if shared:
            raise GraphError(
                f"the model and the loss module must not share a parameter; they share the loss module's "
                f"{shared[0]!r}; give the loss module a parameter of its own"
            )

    def _modules(self) -> dict[str, nn.Module]:
        """Return the model and the loss module with their latest weights, keyed by the prefix of tensor names."""
        return self._roots

    def _whole_weights(self, method: str) -> AbstractContextManager[None]:
        """Return a context manager within which this process holds the full weights of its stages.

        ``method`` is the public method that needs the weights.
        """
        return nullcontext()

    def _whole_layers(self, method: str) -> AbstractContextManager[None]:
        """Return a context manager within which layers that ranks divide among themselves are the user's whole layers.

        ``method`` is the public method that needs the layers.
        """
        return nullcontext()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules of the model and the loss module with their names, as nn.Module does.

        Under a mesh, modules whose parameters and buffers all belong to other ranks are skipped.
        """
        seen: set[nn.Module] = set()
        for prefix, root in self._modules().items():
            for name, module in root.named_modules(seen, prefix.removesuffix(".")):
                if self._is_here(name, module):
                    yield name, module

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over the modules of ``named_modules()``, without their names."""
        for _, module in self.named_modules():
            yield module

    def apply(self, function: Callable[[nn.Module], Any]) -> Self:
        """Call a function with every module of ``modules()``, submodules first, and return this pipeline.

        Under a mesh each rank draws random numbers for its own modules only. If initial weights must not depend on the
        plan, apply the function to the model before you create the pipeline, or pass ``init=``. The weights that the
        function sees are whole, also if ranks divide them.
        """
        here = set(self.modules())
        self._guard.check(changes=True)
        with self._whole_weights("apply"), self._whole_layers("apply"):
            for module in self._modules().values():
                module.apply(lambda each: function(each) if each in here else None)
        return self

    def _is_here(self, name: str, module: nn.Module) -> bool:
        """Return whether a module directly owns a tensor of this process, or owns no parameters or buffers at all."""
        dot = f"{name}." if name else ""
        named = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        names = [dot + key for tensors in named for key, _ in tensors]
        return not names or any(map(self._is_own, names))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters with their names; a tied parameter appears once, under its first name."""
        for prefix, module in self._modules().items():
            for name, parameter in module.named_parameters():
                if self._is_own(prefix + name):
                    yield prefix + name, parameter

    def _is_own(self, name: str) -> bool:
        """Return whether this process trains the parameter or buffer of this name."""
        return True

    def _check_idle(self, method: str) -> None:
        """Raise InputError if a step is running. ``method`` is the name of the method that changes weights."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters, for example for ``torch.optim.AdamW(pipe.parameters())``.

        Under a mesh these are the parameters of this rank's stages. To clip the gradients of all ranks, call
        ``Pipeline.clip_grad_norm_`` instead of torch's function, which raises an error if it gets this iterator, and
        computes the norm of this rank's gradients if it gets a list. For averages of weights, see
        docs/howto/averages.md. A rank without parameters yields an empty tensor, because torch's optimizers refuse an
        empty list.
        """
        parameters = [parameter for _, parameter in self.named_parameters()]
        parameters = parameters or [nn.Parameter(torch.empty(0)) for _ in islice(self.model.parameters(), 1)]
        return watched(parameters, self._check_optimizer) if self._is_divided() else iter(parameters)

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Check an optimizer that the user makes of this process's parameters."""

    def _is_divided(self) -> bool:
        """Return whether other processes train other parameters of the model."""
        return False

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the buffers with their names."""
        for prefix, module in self._modules().items():
            for name, buffer in module.named_buffers():
                if self._is_own(prefix + name):
                    yield prefix + name, buffer

    def buffers(self) -> Iterator[Tensor]:
        """Iterate over the buffers."""
        for _, buffer in self.named_buffers():
            yield buffer

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the model's own keys; under a mesh, only the state of this rank's stages."""
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
        """Load a ``state_dict`` of this pipeline or of the bare model.

        Under a mesh, the state may contain only the tensors of this rank's stages. With ``Distributed(zero=3)``, every
        rank must call this method.

        Args:
            state: a dict of tensors, keyed by name.
            strict: whether missing and unexpected keys are errors. Default: True.

        Raises:
            ArgumentError: the state is not a dict.
            RuntimeError: keys or shapes do not match the model (torch's own error).
            InputError: a step is running.

        """
        check_type(
            state,
            Mapping,
            "a state must be a dict of tensors, keyed by name",
            "pass the tensors, such as torch.load(path), or load a checkpoint with pipe.load(path)",
        )
        self._check_idle("load_state_dict")
        with self._whole_weights("load_state_dict"):
            self._load_state(state, strict)

    def _load_state(self, state: Mapping[str, Any], strict: bool) -> None:
        known = self._all_state()
        whole = all(name in state and not _is_empty(value) for name, value in known.items() if not self._is_own(name))
        state = self._own_blocks({name: value for name, value in state.items() if name in known or self._is_own(name)})
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

    def _own_blocks(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with the blocks that this process holds, given one with whole weights."""
        return state

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def train(self, mode: bool = True) -> Self:
        """Set training mode on all modules, or evaluation mode if ``mode`` is False."""
        for module in self._modules().values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode on all modules."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradient of each parameter to None, or to zero if ``set_to_none`` is False."""
        for module in self._modules().values():
            module.zero_grad(set_to_none)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype of parameters and buffers, for example with ``pipe.to(torch.bfloat16)``.

        Raises:
            TypeError: a device is given. The plan places the stages, so pass devices= to a new Pipeline instead.
            InputError: a step is running.

        """
        for value in (*args, *kwargs.values()):
            if not isinstance(value, torch.dtype | torch.memory_format | bool):
                got = f"a tensor on {value.device}" if isinstance(value, Tensor) else repr(value)
                raise TypeError(
                    f"to() may only change the dtype, because a pipeline's stages stay on their devices; got {got}; "
                    f"leave the call out, or make a new Pipeline with other devices="
                )
        self._check_idle("to")
        with self._whole_weights("to"):
            for module in self._modules().values():
                module.to(*args, **kwargs)
        return self

    def half(self) -> Self:
        """Convert parameters and buffers to float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Convert parameters and buffers to bfloat16."""
        return self.to(torch.bfloat16)

    def float(self) -> Self:
        """Convert parameters and buffers to float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Convert parameters and buffers to float64."""
        return self.to(torch.float64)

    def cpu(self) -> Self:
        """Raise TypeError, as `to()` does when given a device."""
        return self.to("cpu")

    def cuda(self, device: Any = CUDA) -> Self:
        """Raise TypeError, as `to()` does when given a device."""
        return self.to(device)

    def __bool__(self) -> bool:
        return True  # without this method, ``if pipe:`` would call __len__, which not every model has

    def __len__(self) -> int:
        return len(self._sequential())

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._sequential())

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self._sequential()[index]

    def _sequential(self) -> nn.Sequential:
        if not isinstance(self.model, nn.Sequential):
            raise TypeError(
                f"only a pipeline of an nn.Sequential supports len(), indexing and iteration; the model of this "
                f"pipeline is a {type(self.model).__name__}; use pipe.model or pipe.named_modules()"
            )
        return self.model


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _tensors_in(module: nn.Module, ids: set[int]) -> list[str]:
    """Return the names of the parameters and buffers whose ``id()`` is in ``ids``."""
    return [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if id(tensor) in ids]
