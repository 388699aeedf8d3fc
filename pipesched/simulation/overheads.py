"""Overheads: the time that ranks spend outside their stages' work, and the slowdown of ranks that share a host."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesched.checks import as_list, check_number, shown
from pipesched.errors import InputError, ScheduleError
from pipesched.json_files import maybe, read_fields
from pipesched.program.action_arrays import Ints
from pipesched.simulation.links import Link, Links, check_speed, check_times

__all__ = ["Machine", "Overheads", "RanksAre", "check_ranks_are"]

Floats = NDArray[np.float64]

#: Default overhead in seconds for an action, for sending a message, and for receiving a message.
_USUAL_S = 50e-6

#: The same for ranks on CPUs, where the overhead is longer because layers use the same caches.
_ON_HOST_S = 200e-6
_MESSAGE_ON_HOST = Link(latency_s=125e-6, bytes_per_s=7e9)

#: Whether ranks are threads of one process (``devices=``) or processes (``mesh=``).
RanksAre = Literal["threads", "processes"]


def check_ranks_are(ranks_are: object) -> None:
    """Raise InputError unless ``ranks_are`` is "threads" or "processes"."""
    if ranks_are not in get_args(RanksAre):
        raise InputError(f"ranks_are= must be 'threads' or 'processes'; got {shown(ranks_are)}; pass one of them")


@dataclass(frozen=True)
class Overheads:
    """The time that a rank spends outside its stages' work. By default, there are no overheads."""

    #: Overhead of each action, in seconds.
    action_s: float = 0
    #: Additional time, in seconds, of an action that spends all its time waiting, for example for a device. The
    #: action's thread must wake up, and its caches are cold. For other actions, this value is multiplied by the
    #: fraction of their time that they spend waiting. Weight gradients (W) need no time to wake up, because they wait
    #: for no message.
    waking_s: float = 0
    #: Time to send a message to another rank, depending on the message's size. The rank cannot compute meanwhile.
    send: Link = field(default_factory=Link)
    #: Time to receive a message from another rank, depending on the message's size. The rank cannot compute meanwhile.
    receive: Link = field(default_factory=Link)
    #: Link between two ranks, if ``Costs.links`` is None.
    link: Link = field(default_factory=Link)
    #: The factors by which actions take longer while 1, 2, ... ranks compute on one host, because ranks share memory
    #: and cores. If more ranks compute than there are entries, they take turns. Default: (), no slowdown.
    crowding: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("action_s", "waking_s"):
            check_number(getattr(self, name), f"the {name} of overheads")
        rule = "crowding must be a list of slowdown factors, for 1, 2, ... computing ranks"
        object.__setattr__(self, "crowding", tuple(as_list(self.crowding, rule, "for example, pass (1, 1.2)")))
        check_times(self.crowding, "crowding of overheads, entry")
        if self.crowding and (self.crowding[0] != 1 or list(self.crowding) != sorted(self.crowding)):
            raise ScheduleError(
                f"crowding must list the slowdown with 1 rank computing, with 2 ranks, and so on; it must begin with 1 "
                f"and must not decrease; got {self.crowding}; divide each measured time by the time with one rank"
            )

    def slower(self, load: Floats) -> Floats:
        """Return the factor by which an action takes longer while ``load`` ranks of its host compute.

        ``load`` can be fractional.
        """
        if not self.crowding:
            return np.ones_like(load)
        most = len(self.crowding)
        within: Floats = np.interp(load, np.arange(1, most + 1), np.array(self.crowding, float))
        return within * np.maximum(load / most, 1)

    def beside(self, crowding: float) -> "Overheads":
        """Return a copy whose slowdown is the larger of this object's and the slowdown measured with the layers.

        Args:
            crowding: the slowdown factor measured while one other rank computed. Each further rank is assumed to add
                the same slowdown.

        """
        if crowding == 1:
            return self
        counts = range(max(2, len(self.crowding)))
        own = [*self.crowding, *[1.0] * len(counts)]
        return replace(self, crowding=tuple(max(own[count], 1 + (crowding - 1) * count) for count in counts))

    def crowded(self, starts: Floats, ends: Floats, share: Floats, host: Ints) -> Floats:
        """Return the factor by which each action takes longer because other actions run on its host at the same time.

        Args:
            starts: the start of each action, in seconds.
            ends: the end of each action, in seconds.
            share: the fraction of its time that each action spends computing. It spends the rest waiting, which does
                not slow other ranks.
            host: the host of each action.

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
                # The work up to each moment, in the seconds that it would take without crowding.
                done = np.concatenate([[0], np.cumsum(lengths / (1 + part * slower))])
                spent = np.interp(ends[same], moments, done) - np.interp(starts[same], moments, done)
                took = ends[same] - starts[same]
                slowest = 1 + part * slower.max(initial=0)
                exact = 2 * spent * slowest > took  # not distorted by rounding
                factor[same] = np.divide(took, spent, out=np.full_like(took, slowest), where=exact)
        return factor

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists and numbers for JSON."""
        return asdict(self) | {"crowding": list(self.crowding)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Overheads":
        """Make overheads from the dict that ``to_dict`` returned. Raises ScheduleError for wrong fields."""

        def link(plain: Any) -> Link:
            try:
                return Link.from_dict(plain)
            except ScheduleError as error:
                raise ScheduleError(f"overheads must have the form that to_dict writes: {error}") from error

        return read_fields(cls, values, "overheads must have", send=link, receive=link, link=link)


@dataclass(frozen=True)
class Machine:
    """The measured properties of a machine that do not depend on the model."""

    #: Name of the measured device.
    name: str = ""
    #: Links between ranks that are processes.
    links: Links | None = None
    #: Overheads of ranks that are threads.
    threads: Overheads | None = None
    #: Overheads of ranks that are processes.
    processes: Overheads | None = None
    #: Bandwidth of copies between the device and its host while copies run in both directions. None if unknown.
    host_bytes_per_s: float | None = None
    #: Whether the device is the host's CPU, so that offloading frees no memory.
    on_host: bool = False

    def __post_init__(self) -> None:
        check_speed(self.host_bytes_per_s, "host_bytes_per_s", "a machine")

    def assuming(self, ranks_are: RanksAre, num_ranks: int, num_cores: int | None = None) -> "Machine":
        """Return this machine or, if it has no measured overheads for ``ranks_are``, a copy with default overheads.

        Args:
            ranks_are: "threads" or "processes".
            num_ranks: the number of ranks.
            num_cores: the number of CPU cores that all ranks share. Default: one per rank.

        """
        if (self.threads if ranks_are == "threads" else self.processes) is not None:
            return self
        action_s, part = (_ON_HOST_S, _MESSAGE_ON_HOST) if self.on_host else (_USUAL_S, Link(latency_s=_USUAL_S))
        crowding = (1.0,) * min(num_ranks, num_cores or num_ranks)
        usual = Overheads(action_s=action_s, send=part, receive=part, crowding=crowding)
        return replace(self, threads=usual) if ranks_are == "threads" else replace(self, processes=usual)

    def between(self, ranks_are: RanksAre, crowding: float = 1.0) -> dict[str, Any]:
        """Return the ``links`` and ``overheads`` to pass to `Costs`, for ranks that are threads or processes.

        ``crowding`` is the slowdown factor measured while one other rank computed (see `Overheads.beside`).
        """
        check_ranks_are(ranks_are)
        threads = ranks_are == "threads"
        overheads = self.threads if threads else self.processes
        return {"links": None if threads else self.links, "overheads": overheads and overheads.beside(crowding)}

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        parts = {"links": self.links, "threads": self.threads, "processes": self.processes}
        plain = {"name": self.name, "host_bytes_per_s": self.host_bytes_per_s, "on_host": self.on_host}
        return plain | {name: part and part.to_dict() for name, part in parts.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Machine":
        """Make a machine from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        overheads = maybe(Overheads.from_dict)
        links = maybe(Links.from_dict)
        return read_fields(cls, values, "a machine must have", links=links, threads=overheads, processes=overheads)
