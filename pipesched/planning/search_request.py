"""Search request: what is asked of the tuner, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from pipesched import schedules
from pipesched.checks import is_count, shown
from pipesched.errors import PartitionError, ScheduleError
from pipesched.planning.candidates import microbatch_counts
from pipesched.planning.pins import Pins
from pipesched.planning.plan_request import PlanRequest
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.simulation.links import Links
from pipesched.simulation.memory import AHEAD
from pipesched.simulation.overheads import RanksAre
from pipesched.simulation.profile import Profile

__all__ = ["Offload", "SearchRequest", "check_offload", "limits_of"]

#: Whether what layers save may wait on the host; "auto": where that is another memory than the device's.
Offload = Literal["auto"] | bool

_EFFORT = 3_000_000  # actions that a search may simulate: some three seconds


@dataclass(frozen=True)
class SearchRequest:
    """What is asked, and what is given.

    profile: what layers cost. pins: of its layers. batch_size: rows of a step; num_microbatches: into so many it may be
    cut, one of these. num_ranks: so many there are; with all_ranks all are used. schedule, num_stages, checkpoint:
    where they are given. memory_limit_bytes: of each rank. ranks_are: threads or processes, by which overheads differ.
    offload: whether activations may wait on hosts; "auto": where the profile knows how fast they get there, and its
    device is not the host itself. effort: actions to be simulated at most.
    """

    profile: Profile
    pins: Pins
    num_ranks: int
    batch_size: int
    num_microbatches: Sequence[int]
    schedule: Schedule | None = None
    num_stages: int | None = None
    checkpoint: Checkpoint | None = None
    links: Links | None = None
    memory_limit_bytes: tuple[int, ...] | None = None
    all_ranks: bool = False
    ranks_are: RanksAre = "threads"
    offload: Offload = "auto"
    effort: int = _EFFORT

    def __post_init__(self) -> None:
        check_offload(self.offload)
        limited = self.memory_limit_bytes is not None
        known = self.profile.machine.host_bytes_per_s is not None
        if self.offload is True and limited and not known:
            raise PartitionError(
                "copies to the host take time; got offload=True, and a profile whose machine has no host_bytes_per_s; "
                "measure it again, or say how fast the device copies, such as Machine(host_bytes_per_s=20e9)"
            )

    @property
    def may_offload(self) -> bool:
        """Whether activations may wait on hosts."""
        if self.offload != "auto":
            return self.offload
        return self.profile.machine.host_bytes_per_s is not None and not self.profile.machine.on_host

    @property
    def posted(self) -> int:
        """Receives of each channel that have their memory ahead of their turn: between processes."""
        return AHEAD if self.ranks_are == "processes" else 0

    @classmethod
    def of(  # what pipesched.tune takes
        cls,
        profile: Profile,
        num_ranks: int,
        batch_size: int,
        request: PlanRequest,
        *,
        memory_limit_bytes: int | Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        ranks_are: RanksAre = "threads",
        num_cores: int | None = None,
        **others: Any,
    ) -> "SearchRequest":
        """What a user asks, checked. counts: into so many micro-batches the batch may be cut, unless the request says
        how many; where neither does, those whose sizes lie between the measured ones. num_cores: of the host, where all
        ranks compute there; default: as many as ranks. Overheads that were not measured are the usual ones.

        Raises PartitionError for what makes no sense.
        """
        for what, number in (("ranks", num_ranks), ("rows in a batch", batch_size)):
            if not is_count(number):
                raise PartitionError(
                    f"a plan is for a whole number of {what}, at least 1; got {shown(number)}; pass 1 or more"
                )
        if request.num_microbatches is not None:
            counts = [request.num_microbatches]
        if counts is None:
            counts = microbatch_counts(batch_size, num_ranks, profile.graphs)
        if not counts or max(counts) > batch_size or min(counts) < 1:
            raise PartitionError(
                f"micro-batches have at least one row, and sizes between those that were measured; a batch of "
                f"{batch_size} rows cannot be cut into {list(counts) or 'any number of them'}; measured: "
                f"{sorted(profile.graphs)} rows; pass another num_microbatches or batch_size, or measure more sizes"
            )
        return cls(
            replace(profile, machine=profile.machine.assuming(ranks_are, num_ranks, num_cores)),
            Pins(profile.layers, request.boundaries, request.together),
            num_ranks,
            batch_size,
            counts,
            _synchronous(request.schedule),
            request.num_stages if request.num_stages or not _is_list(request) else len(request.boundaries or ()) + 1,
            None if request.checkpoint is None else as_checkpoint(request.checkpoint, profile.layers),
            memory_limit_bytes=limits_of(memory_limit_bytes, num_ranks),
            ranks_are=ranks_are,
            **others,
        )


def check_offload(offload: Any) -> None:
    """Raise PartitionError for what is no policy."""
    if not isinstance(offload, bool) and not (isinstance(offload, str) and offload == "auto"):
        raise PartitionError(
            f"offload says whether what layers save may wait on the host: 'auto', True or False; got {offload!r}; "
            f"choose one of them"
        )


def _is_list(request: PlanRequest) -> bool:
    return request.boundaries is not None and not isinstance(request.boundaries, Mapping)


def _synchronous(schedule: Any) -> Schedule | None:
    if isinstance(schedule, Program):
        raise ScheduleError(
            "a program is all that a search would look for; got one as schedule; leave it out, or pass a name"
        )
    if isinstance(schedule, str) and schedule == "auto":
        return None
    wished = schedule if isinstance(schedule, Schedule) else schedules.get(schedule)
    program = wished.program(2, 2)
    if program.has_updates or program.num_weights < program.num_stages:
        raise ScheduleError(
            f"plans are searched for synchronous schedules of one chain of stages; got {wished.name!r}; choose "
            f"another, or leave out what is asked of the search (batch_size, memory_limit_bytes, profile)"
        )
    return wished


def limits_of(given: int | Sequence[int] | None, num_ranks: int) -> tuple[int, ...] | None:
    """One limit a rank. Raises PartitionError for what is none."""
    if given is None:
        return None
    limits = list(given) if isinstance(given, Sequence) else [given] * num_ranks
    if len(limits) != num_ranks or not all(map(_is_size, limits)):
        raise PartitionError(
            f"memory_limit_bytes is a number of bytes above 0, one for all ranks or one for each of {num_ranks}; got "
            f"{shown(given)}; pass such as 16 * 2**30"
        )
    return tuple(map(int, limits))


def _is_size(limit: Any) -> bool:
    return isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < inf
