"""Caller context: copies torch's thread-local settings from one place to another.

`Caller` copies the settings of the thread that calls step() to the ranks' threads. `CodeModes` copies the settings of a
call in the model's code to a measurement of this call.

Default dtype, deterministic algorithms and matmul precision apply to the whole process and need not be copied.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch

from pipesched.devices.selection import autocast_types
from pipesched.errors import InputError
from pipesched.tensors.torch_insides import modes_of_thread

__all__ = ["Caller", "CodeModes", "check_modes", "intra_op"]


@dataclass(frozen=True)
class Caller:
    """A thread's grad mode, inference mode, autocast settings, default device and context variables."""

    grad: bool
    inference: bool
    autocasts: tuple[dict[str, Any], ...]
    #: The device on which torch makes tensors; None for the CPU.
    default_device: torch.device | None = None
    context: Context = field(default_factory=copy_context, compare=False, repr=False)

    @classmethod
    def here(cls, device_types: Iterable[str], *, grad: bool) -> "Caller":
        """Return the settings of the current thread, but with ``grad`` as the grad mode."""
        autocasts = tuple(
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": False,  # the process has one cache of casts, which any rank clears on exit
            }
            for kind in sorted({"cpu", *device_types})
            if torch.is_autocast_enabled(kind)
        )
        device = torch.get_default_device()
        default_device = None if device.type == "cpu" else device
        return cls(grad, torch.is_inference_mode_enabled(), autocasts, default_device)

    @contextmanager
    def held(self, device: torch.device | None = None) -> Iterator[None]:
        """A context that applies the grad and inference modes, and makes backward passes run in the current thread.

        Args:
            device: the device on which another thread than the caller's runs layers. The caller's default device is set
                in that thread; if both are of one kind, ``device`` is set. Default: None (the caller's own thread).

        """
        with ExitStack() as stack:
            if self.default_device is not None and device is not None:
                stack.enter_context(device if device.type == self.default_device.type else self.default_device)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """A context that applies the autocast settings to a forward. A backward does not need autocast settings."""
        with ExitStack() as stack:
            for settings in self.autocasts:
                stack.enter_context(torch.autocast(**settings))
            yield


def check_modes() -> None:
    """Raise InputError if a mode or a hook acts in the current thread, which cannot act in the ranks' threads."""
    if modes := modes_of_thread():
        raise InputError(
            f"a pipeline in one process runs its layers in threads of their own, in which modes and hooks of the "
            f"calling thread do not act; in this call, {' and '.join(modes)} would miss all layers; call the pipeline "
            f"outside it, call the model itself inside it, or run one process for each stage with mesh="
        )


@dataclass(frozen=True)
class CodeModes:
    """The grad mode and the autocast settings in which a model's code makes a call.

    ``autocasts`` maps a device type to the dtype of its autocast; None if autocast is disabled for this device type.
    """

    grad: bool
    autocasts: Mapping[str, torch.dtype | None]

    @classmethod
    def here(cls) -> "CodeModes":
        """Return the modes of the current thread."""
        on = {kind: torch.is_autocast_enabled(kind) for kind in autocast_types()}
        return cls(torch.is_grad_enabled(), {kind: torch.get_autocast_dtype(kind) if on[kind] else None for kind in on})

    def within(self, around: "CodeModes") -> "CodeModes":
        """Return only what differs from the modes around the code: disabled gradients, and autocast settings."""
        own = {kind: dtype for kind, dtype in self.autocasts.items() if dtype is not around.autocasts.get(kind)}
        return CodeModes(self.grad or not around.grad, own)

    @contextmanager
    def held(self, device: torch.device) -> Iterator[None]:
        """A context that applies the modes to a call on a device.

        Code such as ``torch.autocast(x.device.type)`` that ran on a CPU would set the same autocast on this device.
        """
        autocasts = {**self.autocasts}
        if "cpu" in autocasts:
            autocasts.setdefault(device.type, autocasts["cpu"])
        with ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            for kind, dtype in autocasts.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False))
            yield


@contextmanager
def intra_op(threads: int) -> Iterator[None]:
    """Set the number of intra-op threads of the current thread during the ``with`` block."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
