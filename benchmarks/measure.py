"""Measure: paired, interleaved runs (A B A B ...) and what is printed of them."""

import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

__all__ = ["Ratio", "machine", "paired", "ratio"]


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with a 95 % bootstrap interval, and the medians behind it."""

    value: float
    low: float
    high: float
    first: float
    second: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired(first: Callable[[], float], second: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Run both in turn, after one warm-up of each; a run returns what it measured."""
    first(), second()
    results = [(first(), second()) for _ in range(pairs)]
    return [a for a, _ in results], [b for _, b in results]


def ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """How ``first`` compares with ``second``, pair by pair."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return Ratio(median(ratios), medians[25], medians[974], median(first), median(second))


def machine() -> str:
    """One line: processor, cores, versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")] or [platform.processor()]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{names[0]} x {len(names)}, {device}, Python {platform.python_version()}, torch {torch.__version__}"
