"""Caller context: copies torch's thread-local settings from the thread that calls step() to the ranks' threads.

Default dtype, deterministic algorithms and matmul precision apply to the whole process and need not be copied.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Caller", "intra_op"]


@dataclass(frozen=True)
class Caller:
    """A thread's grad mode, inference mode and autocast settings."""

    grad: bool
    inference: bool
    autocasts: tuple[dict[str, Any], ...]

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
        return cls(grad, torch.is_inference_mode_enabled(), autocasts)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context that applies the grad and inference modes, and makes backward passes run in the current thread."""
        with ExitStack() as stack:
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
