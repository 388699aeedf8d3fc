"""Nonfinite reaction: raises or warns after a step whose loss or gradients were infinite or NaN."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesched.devices.memory import host_copy
from pipesched.devices.streams import current_stream, event_on
from pipesched.errors import ExecutionError
from pipesched.runtime.gradients.nonfinite_watch import NonfiniteWatch
from pipesched.runtime.gradients.rules import GradientRules, Verdict
from pipesched.user_warning import warn

__all__ = ["NonfiniteReaction"]


@dataclass(frozen=True)
class _Check:
    """The check of one step. ``arrived`` is recorded after the flag's copy to the host; None if there is no copy."""

    step: int
    verdict: Verdict
    watch: NonfiniteWatch
    flag: Tensor
    arrived: torch.Event | None = None

    @property
    def failed(self) -> bool:
        """Whether the loss or a gradient was infinite or NaN. Waits for the flag."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return bool(self.flag)


class NonfiniteReaction:
    """Raises or warns if the loss or a gradient of a step was infinite or NaN.

    ``GradientRules.on_nonfinite`` selects between an error and a warning. If ``GradientRules.lags`` is set, the error
    is raised, or the warning issued, one step later.
    """

    def __init__(self) -> None:
        self._before: _Check | None = None

    def react(
        self,
        step: int,
        verdict: Verdict,
        watch: NonfiniteWatch,
        rules: GradientRules,
        gathered: Callable[[Any], list[Any]],
    ) -> None:
        """Raise ExecutionError, or warn, if the check failed. All processes raise or warn together.

        ``gathered`` gathers a value from each process, and returns the values in rank order.
        """
        if verdict.nonfinite is None:
            return
        check: _Check | None = _Check(step, verdict, watch, *_on_host(verdict.nonfinite, rules.lags))
        if rules.lags:
            check, self._before = self._before, check
        if check is not None and check.failed:
            self._say(check, rules, gathered)

    def _say(self, check: _Check, rules: GradientRules, gathered: Callable[[Any], list[Any]]) -> None:
        notes = [note for note in gathered(check.watch.first()) if note is not None]
        key = check.verdict.norms.first_nonfinite()
        if notes:
            first = f"{min(notes)} was the first value that was not finite"
        elif key is not None:
            first = f"all layer outputs were finite, but the gradient of parameter {rules.order.name(key)!r} was not"
        else:
            first = "all outputs and gradients were finite, but the norm of the gradients is too large for float32"
        happened = "no update was made" if check.verdict.skips else "the step's gradients are not finite"
        text = (
            f"the loss and the gradients of a step must be finite; in step {check.step}, {first}; {happened}; check "
            f"the batch, or lower the learning rate; pipe.check(...) compares a step with plain PyTorch"
        )
        if rules.on_nonfinite == "raise":
            raise ExecutionError(text)
        warn(text)


def _on_host(flag: Tensor, lags: bool) -> tuple[Tensor, torch.Event | None]:
    """Return the flag to read, and the event recorded after its copy to the host (None if the flag is not copied).

    If ``lags`` is set, a flag on a GPU is copied to the host. Any other flag is returned unchanged.
    """
    if not lags or flag.is_cpu:
        return flag, None
    return host_copy(flag), event_on(current_stream(flag.device))
