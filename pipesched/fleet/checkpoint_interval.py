"""Checkpoint interval: the time between two checkpoints with which a run that loses ranks ends soonest."""

from math import exp, inf, sqrt

from pipesched.checks import shown
from pipesched.errors import InputError

__all__ = ["daly_interval_s", "expected_slowdown"]


def daly_interval_s(write_s: float, between_losses_s: float) -> float:
    """Return the best time of training between two checkpoints, by the higher-order estimate of Daly 2006.

    With d the time to write a checkpoint and M the mean time between losses, the estimate is
    sqrt(2dM) (1 + sqrt(d/2M)/3 + (d/2M)/9) - d for d < 2M, and M otherwise. J. T. Daly, "A higher order estimate of
    the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006).

    Args:
        write_s: the time to write a checkpoint, above 0.
        between_losses_s: the mean time between two losses, above 0; infinite if there are none.

    """
    for name, value in (("write_s", write_s), ("between_losses_s", between_losses_s)):
        if not value > 0:
            raise InputError(f"{name} must be above 0; got {shown(value)}; pass a time in seconds")
    if between_losses_s == inf:
        return inf
    ratio = write_s / (2 * between_losses_s)
    if ratio >= 1:
        return between_losses_s
    return sqrt(2 * write_s * between_losses_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - write_s


def expected_slowdown(interval_s: float, write_s: float, restart_s: float, between_losses_s: float) -> float:
    """Return the expected time of a run divided by its time of training, by the model of Daly 2006.

    Losses are exponential, and may also happen while a checkpoint is written or a run restarts.
    """
    mean_s = between_losses_s
    return mean_s * exp(restart_s / mean_s) * (exp((interval_s + write_s) / mean_s) - 1) / interval_s
