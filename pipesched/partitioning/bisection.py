"""The smallest bottleneck that a probe admits, by exact bisection on whole numbers (Pinar and Aykanat 2004)."""

from collections.abc import Callable
from dataclasses import dataclass

from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.slots import Slot

__all__ = ["INFINITE", "Fails", "Found", "smallest"]

INFINITE = 2**61  # above every number of ticks


@dataclass(frozen=True)
class Fails:
    """No partition is within the bound, nor within any below ``following``."""

    following: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """A partition within the bound."""

    #: In ticks.
    bottleneck: int
    #: The blocks in the order of the stages.
    order: list[int]
    #: Where each stage ends in that order.
    ends: list[int]
    #: The slot of each stage.
    slots: list[Slot]
    #: What is done with each layer's activations, where that was to be chosen.
    chosen: tuple[ActivationOption, ...] = ()


def smallest(low: int, guess: int, probe: Callable[[int], Found | Fails]) -> tuple[Found | None, int]:
    """The partition of the smallest bottleneck and how many probes that took; none where no bound is enough.

    probe: what is within a bound. low: no bottleneck is below. guess: a bound that is likely enough.
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
        probes += 1
        if isinstance(probed, Found):
            best = probed
        else:
            low = max(probed.following, middle + 1)
    return best, probes
