"""Bisection: finds the smallest possible bottleneck by exact bisection on integers (Pinar and Aykanat 2004)."""

from collections.abc import Callable
from dataclasses import dataclass

from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.slots import StageSlot
from pipesched.progress import advance

__all__ = ["INFINITE", "Fails", "FoundPartition", "smallest"]

INFINITE = 2**61  # larger than any time in ticks


@dataclass(frozen=True)
class Fails:
    """The result of a probe that finds no partition within the bound."""

    #: The next bound worth probing, in ticks. The probe fails for every smaller bound.
    following: int


@dataclass(frozen=True, kw_only=True)
class FoundPartition:
    """The result of a probe that finds a partition within the bound."""

    #: The bottleneck in ticks.
    bottleneck: int
    #: The blocks, in stage order.
    order: list[int]
    #: For each stage, the position in ``order`` just after the stage's last block.
    ends: list[int]
    #: The slot of each stage, including the stage's rank.
    slots: list[StageSlot]
    #: The activation option of each layer; empty if all activations are kept on the device.
    chosen: tuple[ActivationOption, ...] = ()


def smallest(low: int, guess: int, probe: Callable[[int], FoundPartition | Fails]) -> tuple[FoundPartition | None, int]:
    """Find the partition with the smallest bottleneck.

    Args:
        low: a lower bound on the bottleneck, in ticks.
        guess: the first bound to probe, chosen so that a partition probably exists within it.
        probe: a function of a bound. It returns a partition whose bottleneck is at most this bound, or `Fails`.

    Returns:
        The partition (None if the probe fails for every bound), and the number of calls of ``probe``.

    """
    probes = 1
    best = probe(guess)
    if isinstance(best, Fails):
        probes = 2
        low = max(low, best.following)
        best = probe(INFINITE)
        if isinstance(best, Fails):
            return None, probes
    while low < best.bottleneck:
        middle = (low + best.bottleneck - 1) // 2
        probed = probe(middle)
        advance()
        probes += 1
        if isinstance(probed, FoundPartition):
            best = probed
        else:
            low = max(probed.following, middle + 1)
    return best, probes
