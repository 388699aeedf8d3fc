"""How ranks ended, in words."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipesched.units import counted

__all__ = ["RankEnd", "all_ends", "going_on", "names_of"]


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: its exit code, or the negated number of the signal that killed it; and how long it ran."""

    code: int
    ran_s: float

    @property
    def lost(self) -> bool:
        """Whether the rank failed or was killed."""
        return self.code != 0

    def text(self, count: int = 1) -> str:
        """Say how ``count`` ranks ended, such as ``was killed by SIGKILL``."""
        if self.code >= 0:
            return f"{'failed' if self.lost else 'ended'} with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:  # a real-time signal
            name = f"signal {-self.code}"
        return f"{'was' if count == 1 else 'were'} killed by {name}"


def names_of(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, such as ``rank 2`` or ``ranks 0-3 and 5``."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    ]
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def all_ends(ends: Mapping[int, RankEnd]) -> str:
    """Say how all ranks ended. Ranks that ended in the same way share a clause, with the shortest and longest time."""
    alike: dict[int, list[int]] = {}
    for rank in sorted(ends):
        alike.setdefault(ends[rank].code, []).append(rank)
    return "; ".join(
        _clause(ranks, ends) for _, ranks in sorted(alike.items(), key=lambda item: (item[0] != 0, item[1]))
    )


def _clause(ranks: Sequence[int], ends: Mapping[int, RankEnd]) -> str:
    times = sorted({f"{ends[rank].ran_s:.1f}" for rank in ranks}, key=float)
    after = f"{times[0]} s" if len(times) == 1 else f"{times[0]} to {times[-1]} s"
    return f"{names_of(ranks)} {ends[ranks[0]].text(len(ranks))} after {after}"


def going_on(count: int) -> str:
    """Say how many ranks go on, such as ``3 ranks go on``."""
    if not count:
        return "no rank goes on"
    return f"{counted(count, 'rank')} {'goes' if count == 1 else 'go'} on"
