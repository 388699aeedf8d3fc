"""Overheads: what ranks take beside the work of their stages, and what they take from each other; and a machine's."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesched.checks import as_list, check_number
from pipesched.errors import ScheduleError
from pipesched.json_files import maybe, read_fields
from pipesched.program.action_arrays import Ints
from pipesched.simulation.links import Link, Links, check_speed, check_times

__all__ = ["Machine", "Overheads", "RanksAre"]

Floats = NDArray[np.float64]

#: For an action, for a message that it sends and one that it takes, each: 150 us for one between two other ranks.
_USUAL_S = 50e-6

#: What ranks are: threads of one process (``devices=``), or processes (``mesh=``).
RanksAre = Literal["threads", "processes"]


@dataclass(frozen=True)
class Overheads:
    """What a rank takes beside its stages' work. Default: nothing."""

    #: For each of its actions.
    action_s: float = 0
    #: Beyond that for an action that waits all its time, as for a device: it wakes late, to code that has left the
    #: caches. Not for W, which goes on without a message.
    waking_s: float = 0
    #: For each message that it sends to another rank, by the message's size. It does nothing else meanwhile.
    send: Link = field(default_factory=Link)
    #: For each message that it takes from another rank, by the message's size. It does nothing else meanwhile.
    receive: Link = field(default_factory=Link)
    #: What then lies between two ranks, where nothing else is known of it.
    link: Link = field(default_factory=Link)
    #: How many times as long ranks of a host take if 1, 2, ... of them compute at once: they share memory and cores.
    #: More ranks than there are numbers take turns. (): they do not hinder each other.
    crowding: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("action_s", "waking_s"):
            check_number(getattr(self, name), f"the {name} of overheads")
        rule = "crowding is a list of numbers, one for each count of ranks"
        object.__setattr__(self, "crowding", tuple(as_list(self.crowding, rule, "pass such as (1, 1.2)")))
        check_times(self.crowding, "crowding of overheads by rank")
        if self.crowding and (self.crowding[0] != 1 or list(self.crowding) != sorted(self.crowding)):
            raise ScheduleError(
                f"crowding says how many times as long ranks take where 1, 2, ... of them compute: it begins with 1 "
                f"and does not fall; got {self.crowding}; divide by what one alone takes"
            )

    def slower(self, load: Floats) -> Floats:
        """How many times as long an action takes while so many ranks of its host compute; parts of ranks count."""
        if not self.crowding:
            return np.ones_like(load)
        most = len(self.crowding)
        within: Floats = np.interp(load, np.arange(1, most + 1), np.array(self.crowding, float))
        return within * np.maximum(load / most, 1)

    def beside(self, crowding: float) -> "Overheads":
        """The same for layers that are known to take so many times as long while another rank computes, and as much
        longer for each further one: these were not measured.
        """
        if crowding == 1:
            return self
        counts = range(max(2, len(self.crowding)))
        own = [*self.crowding, *[1.0] * len(counts)]
        return replace(self, crowding=tuple(max(own[count], 1 + (crowding - 1) * count) for count in counts))

    def crowded(self, starts: Floats, ends: Floats, share: Floats, host: Ints) -> Floats:
        """How many times as long as alone each action takes, where they run in these times.

        share: the part of its time in which it computes; what remains it waits, and hinders nobody. host: where.
        """
        factor = np.ones(len(starts))
        for one in np.unique(host):
            own = np.flatnonzero((host == one) & (ends > starts))
            times = np.concatenate([starts[own], ends[own]])
            order = np.argsort(times, kind="stable")
            load = np.cumsum(np.concatenate([share[own], -share[own]])[order])
            moments = times[order]
            slower = self.slower(load[:-1]) - 1
            lengths = np.diff(moments)
            for part in np.unique(share[own]):
                same = own[share[own] == part]
                done = np.concatenate([[0], np.cumsum(lengths / (1 + part * slower))])  # in seconds of one alone
                spent = np.interp(ends[same], moments, done) - np.interp(starts[same], moments, done)
                took = ends[same] - starts[same]
                slowest = 1 + part * slower.max(initial=0)
                exact = 2 * spent * slowest > took  # and not rounded to nothing
                factor[same] = np.divide(took, spent, out=np.full_like(took, slowest), where=exact)
        return factor

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON takes them."""
        return asdict(self) | {"crowding": list(self.crowding)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Overheads":
        """The inverse of ``to_dict``. Raises ScheduleError for unknown names and bad numbers."""

        def link(plain: Any) -> Link:
            try:
                return Link.from_dict(plain)
            except ScheduleError as error:
                raise ScheduleError(f"overheads are what to_dict writes: {error}") from error

        return read_fields(cls, values, "overheads have", send=link, receive=link, link=link)


@dataclass(frozen=True)
class Machine:
    """What of a step's time belongs to the machine and not to the layers."""

    #: Of the device that was measured.
    name: str = ""
    #: Between ranks that are processes.
    links: Links | None = None
    #: What ranks take that are threads.
    threads: Overheads | None = None
    #: What ranks take that are processes.
    processes: Overheads | None = None
    #: The speed at which the device copies to its host and back, both at once. None: not known.
    host_bytes_per_s: float | None = None
    #: Whether the device is the host's own processor: what it copies there gives no memory back.
    on_host: bool = False

    def __post_init__(self) -> None:
        check_speed(self.host_bytes_per_s, "host_bytes_per_s", "a machine")

    def assuming(self, ranks_are: RanksAre, num_ranks: int, num_cores: int | None = None) -> "Machine":
        """The same, with the usual overheads of such ranks where none were measured.

        num_cores: of the host on which all of them compute; default: one for each rank.
        """
        if (self.threads if ranks_are == "threads" else self.processes) is not None:
            return self
        part = Link(latency_s=_USUAL_S)
        crowding = (1.0,) * min(num_ranks, num_cores or num_ranks)
        usual = Overheads(action_s=_USUAL_S, send=part, receive=part, crowding=crowding)
        return replace(self, threads=usual) if ranks_are == "threads" else replace(self, processes=usual)

    def between(self, ranks_are: RanksAre, crowding: float = 1.0) -> dict[str, Any]:
        """What ``Costs`` take of it: links and overheads. crowding: as for `Overheads.beside`."""
        threads = ranks_are == "threads"
        overheads = self.threads if threads else self.processes
        return {"links": None if threads else self.links, "overheads": overheads and overheads.beside(crowding)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        parts = {"links": self.links, "threads": self.threads, "processes": self.processes}
        plain = {"name": self.name, "host_bytes_per_s": self.host_bytes_per_s, "on_host": self.on_host}
        return plain | {name: part and part.to_dict() for name, part in parts.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Machine":
        """The inverse of ``to_dict``. Raises ScheduleError for what is none."""
        overheads = maybe(Overheads.from_dict)
        links = maybe(Links.from_dict)
        return read_fields(cls, values, "a machine has", links=links, threads=overheads, processes=overheads)
