"""Families: generated traces of fleets. The same family, number of ranks and seed always give the same trace.

Times between losses are exponential unless stated otherwise; ranks are drawn at random among those that are alive.

| Family | Losses | Outage | Default duration |
|---|---|---|---|
| single | one rank, every 2 h on average | 20 to 60 min | 24 h |
| hosts | a whole host at once, every 2 h on average | 30 to 60 min | 24 h |
| decline | one rank after another, half of the ranks over the whole duration | for good | 8 h |
| spot | 1 to 8 ranks with consecutive numbers (mean 3), every 11 min on average | 10 to 40 min, together | 24 h |
| waves | every 1.5 to 2.5 h, half of the ranks, in bursts within 5 min | 30 to 60 min, back within 5 min | 24 h |
| flapping | 2 ranks, again and again after 3 to 15 min | 1 to 5 min | 24 h |

All rates are assumptions. They are high, as for preemptible machines; reliable clusters lose ranks much less often. No
trace is a recording.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

from pipesched.checks import is_count, shown
from pipesched.errors import InputError
from pipesched.fleet.events import FleetEvent, FleetTrace

__all__ = ["FAMILIES", "generate"]

_MINUTE, _HOUR = 60.0, 3600.0


@dataclass
class _Losses:
    """The ranks of a trace in the making, and until when each of them is lost."""

    num_ranks: int
    ranks_per_host: int
    duration_s: float
    random: Random
    events: list[FleetEvent] = field(default_factory=list)
    _until_s: dict[int, float] = field(default_factory=dict)

    def alive(self, time_s: float) -> list[int]:
        """Return the ranks that are alive at a time. Times must not go backwards."""
        return [rank for rank in range(self.num_ranks) if self._until_s.get(rank, -1.0) < time_s]

    def lose(self, rank: int, time_s: float, outage_s: float = inf) -> None:
        """Lose a rank that is alive, if the trace has not ended."""
        begin_s, end_s = round(time_s, 1), round(time_s + outage_s, 1) if outage_s < inf else inf
        if begin_s > self.duration_s or self._until_s.get(rank, -1.0) >= begin_s:
            return
        self._until_s[rank] = end_s
        self.events.append(FleetEvent(begin_s, rank, is_up=False))
        if end_s <= self.duration_s:
            self.events.append(FleetEvent(end_s, rank, is_up=True))

    def moments(self, mean_s: float) -> list[float]:
        """Return times with exponential gaps until the end of the trace."""
        times, now_s = [], self.random.expovariate(1 / mean_s)
        while now_s < self.duration_s:
            times.append(now_s)
            now_s += self.random.expovariate(1 / mean_s)
        return times


def _single(own: _Losses) -> None:
    for time_s in own.moments(2 * _HOUR):
        if alive := own.alive(time_s):
            own.lose(own.random.choice(alive), time_s, own.random.uniform(20, 60) * _MINUTE)


def _hosts(own: _Losses) -> None:
    for time_s in own.moments(2 * _HOUR):
        host = own.random.randrange(-(-own.num_ranks // own.ranks_per_host)) * own.ranks_per_host
        outage_s = own.random.uniform(30, 60) * _MINUTE
        for rank in range(host, min(host + own.ranks_per_host, own.num_ranks)):
            own.lose(rank, time_s, outage_s)


def _decline(own: _Losses) -> None:
    times = sorted(own.random.uniform(0, own.duration_s) for _ in range(own.num_ranks // 2))
    for rank, time_s in zip(own.random.sample(range(own.num_ranks), len(times)), times, strict=True):
        own.lose(rank, time_s)


def _spot(own: _Losses) -> None:
    for time_s in own.moments(11 * _MINUTE):
        count = min(8, 1 + int(own.random.expovariate(1 / 2.5)))
        first = own.random.randrange(own.num_ranks)
        outage_s = own.random.uniform(10, 40) * _MINUTE
        for at in range(count):
            own.lose((first + at) % own.num_ranks, time_s, outage_s)


def _waves(own: _Losses) -> None:
    time_s = own.random.uniform(0.5, 1) * _HOUR
    while time_s < own.duration_s:
        outage_s = own.random.uniform(30, 60) * _MINUTE
        bursts = sorted(own.random.uniform(0, 5 * _MINUTE) for _ in range(8))
        leaving = own.random.sample(range(own.num_ranks), own.num_ranks // 2)
        for at, rank in enumerate(leaving):
            burst = bursts[at * len(bursts) // len(leaving)]
            back_s = outage_s + own.random.choice(bursts)
            own.lose(rank, time_s + burst, back_s - burst)
        time_s += own.random.uniform(1.5, 2.5) * _HOUR


def _flapping(own: _Losses) -> None:
    for rank in own.random.sample(range(own.num_ranks), min(2, own.num_ranks)):
        time_s = own.random.uniform(3, 15) * _MINUTE
        while time_s < own.duration_s:
            outage_s = own.random.uniform(1, 5) * _MINUTE
            own.lose(rank, time_s, outage_s)
            time_s += outage_s + own.random.uniform(3, 15) * _MINUTE


@dataclass(frozen=True)
class _Family:
    make: Callable[[_Losses], None]
    duration_s: float


_FAMILIES = {
    "single": _Family(_single, 24 * _HOUR),
    "hosts": _Family(_hosts, 24 * _HOUR),
    "decline": _Family(_decline, 8 * _HOUR),
    "spot": _Family(_spot, 24 * _HOUR),
    "waves": _Family(_waves, 24 * _HOUR),
    "flapping": _Family(_flapping, 24 * _HOUR),
}

#: The names of the families that `generate` knows.
FAMILIES = tuple(_FAMILIES)


def generate(
    family: str, *, num_ranks: int = 64, seed: int = 0, duration_s: float | None = None, ranks_per_host: int = 8
) -> FleetTrace:
    """Generate a trace of a family. The same arguments always give the same trace.

    ::

        trace = pipesched.fleet.generate("spot", num_ranks=64, seed=0)

    Args:
        family: "single", "hosts", "decline", "spot", "waves" or "flapping".
        num_ranks: the number of ranks. Default: 64.
        seed: the seed of the random numbers. Default: 0.
        duration_s: the length of the trace. Default: 24 hours; 8 hours for "decline".
        ranks_per_host: the number of ranks that "hosts" loses at once. Default: 8.

    Raises:
        InputError: for an unknown family, and numbers that are not positive.

    """
    if not isinstance(family, str) or family not in _FAMILIES:
        raise InputError(
            f"a family of traces must be one of {', '.join(FAMILIES)}; got {shown(family)}; choose one of them"
        )
    for name, value, least in (("num_ranks", num_ranks, 1), ("seed", seed, 0), ("ranks_per_host", ranks_per_host, 1)):
        if not is_count(value, least):
            raise InputError(
                f"{name} must be a whole number, at least {least}; got {shown(value)}; pass {least} or more"
            )
    known = _FAMILIES[family]
    end_s = known.duration_s if duration_s is None else duration_s
    FleetTrace(num_ranks=num_ranks, duration_s=end_s, events=())  # checks duration_s
    losses = _Losses(num_ranks, ranks_per_host, end_s, Random(f"{family} {num_ranks} {seed}"))
    known.make(losses)
    events = sorted(losses.events, key=lambda event: (event.time_s, not event.is_up, event.rank))
    return FleetTrace(num_ranks=num_ranks, duration_s=end_s, events=tuple(events), name=f"{family}, seed {seed}")
