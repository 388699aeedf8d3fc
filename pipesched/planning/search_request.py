"""Search request: the validated input of the search for a plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, Literal

from pipesched import schedules
from pipesched.checks import is_count, shown
from pipesched.errors import PartitionError, ScheduleError
from pipesched.planning.candidates import LADDER, microbatch_counts
from pipesched.planning.pins import Pins
from pipesched.planning.plan_request import PlanRequest
from pipesched.program.checkpoint_options import Checkpoint, CheckpointMode, LayerCheckpoint, as_checkpoint
from pipesched.program.completion import UNCHANGED, Completion
from pipesched.program.liveness import rank_limits
from pipesched.program.order import Schedule
from pipesched.program.placement import Placement
from pipesched.program.program import Program
from pipesched.simulation.links import Links
from pipesched.simulation.memory import AHEAD
from pipesched.simulation.overheads import RanksAre
from pipesched.simulation.profile import Profile
from pipesched.simulation.replication import ReplicaCosts
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.units import as_bytes, counted

__all__ = ["EFFORT", "MemoryLimit", "Offload", "SearchRequest", "check_offload", "has_updates", "limits_of"]

#: Whether activations can be offloaded to the host. "auto": if host memory is separate and its bandwidth is known.
Offload = Literal["auto"] | bool

#: The memory of a rank in bytes, or as text such as "16GB" or "16GiB": one limit for all ranks, or one for each rank.
MemoryLimit = int | str | Sequence[int | str]

#: The default number of actions to simulate, about three seconds.
EFFORT = 3_000_000

_SEARCHED = "searched"
#: The options of `searched` that a search for a plan keeps.
_KEPT = ("max_in_flight", "placement")
#: For each other option of `searched`, the remedy in the error. A search for a plan sets these options itself.
_INSTEAD = {
    "chunks_per_rank": "pass num_stages= instead",
    "effort": "pass effort= to tune instead",
    "memory_limit_bytes": "pass memory_limit_bytes= to tune or Pipeline instead",
}


@dataclass(frozen=True)
class SearchRequest:
    """The input of one search: the measured model, the devices, and the user's choices."""

    #: The costs of the layers.
    profile: Profile
    #: Constraints on the partition.
    pins: Pins
    #: The number of available ranks.
    num_ranks: int
    #: The number of rows in a batch. A step processes one batch.
    batch_size: int
    #: The numbers of micro-batches to try.
    num_microbatches: Sequence[int]
    #: The schedule. None: any synchronous schedule.
    schedule: Schedule | None = None
    #: The number of stages. None: any number.
    num_stages: int | None = None
    #: The checkpoint setting. None: any setting with which the plan stays within the memory limits.
    checkpoint: Checkpoint | None = None
    #: The links between ranks. None: the links of the profile's machine.
    links: Links | None = None
    #: The memory limit of each rank. None: no limit.
    memory_limit_bytes: tuple[int, ...] | None = None
    #: Whether the plan must use all ranks.
    all_ranks: bool = False
    #: Whether ranks are "threads" or "processes", which have different overheads.
    ranks_are: RanksAre = "threads"
    #: Whether activations can be offloaded. "auto": if the host's bandwidth is known and the device is not a CPU.
    offload: Offload = "auto"
    #: The number of actions that the search is allowed to simulate.
    effort: int = EFFORT
    #: Whether a step updates the weights, and whether updates wait for the norm of all gradients.
    completion: Completion = UNCHANGED
    #: The costs of replicas, each of which runs the plan on ``num_ranks`` ranks with ``batch_size`` rows. None: one
    #: pipeline.
    replica_costs: ReplicaCosts | None = None
    #: The tensor groups. The profile, the ranks and the links are those of one plane: one rank of each group. None:
    #: layers are not split.
    tensor: TensorAxis | None = None
    #: Whether the gradients of micro-batches are summed in a binary tree.
    in_tree: bool = False
    #: The speeds of slow ranks relative to the others, keyed by rank.
    speeds: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_offload(self.offload)
        limited = self.memory_limit_bytes is not None
        known = self.profile.machine.host_bytes_per_s is not None
        if self.offload is True and limited and not known:
            raise PartitionError(
                "offload=True requires the bandwidth of copies to the host; the machine of this profile has no "
                "host_bytes_per_s; measure the model again, or set the bandwidth, such as "
                "Machine(host_bytes_per_s=20e9)"
            )
        _ = self.max_in_flight  # raises an error for an invalid option
        if self.placement is not None and self.num_stages not in (None, len(self.placement)):
            raise ScheduleError(
                f"placement= must have a rank for each stage; got {len(self.placement)} ranks for "
                f"{counted(self.num_stages, 'stage')}; make the numbers agree, or leave num_stages= out"
            )

    @property
    def may_offload(self) -> bool:
        """Whether activations can be offloaded to the host."""
        if self.offload != "auto":
            return self.offload
        return self.profile.machine.host_bytes_per_s is not None and not self.profile.machine.on_host

    @cached_property
    def ladder(self) -> tuple[CheckpointMode, ...]:
        """The checkpoint modes of whole stages that the search may choose, in ascending order of their time."""
        layers = next(iter(self.profile.graphs.values())).nodes(data="refuses")
        return LADDER[:1] if any("always" in (refused or ()) for _, refused in layers) else LADDER

    @property
    def by_layer(self) -> tuple[LayerCheckpoint, ...]:
        """How single layers may be treated if whole stages cannot be recomputed, or do not fit; () if not at all."""
        if self.may_offload:
            return ("recompute", "offload")
        return () if len(self.ladder) > 1 else ("recompute",)

    @property
    def searches_orders(self) -> bool:
        """Whether to search for an order of the actions: True if no schedule is given, or if `searched` is given."""
        return self.schedule is None or self.schedule.name == _SEARCHED

    @property
    def known_schedule(self) -> Schedule | None:
        """The schedule that every candidate must have. None: candidates can have any synchronous schedule."""
        return None if self.searches_orders else self.schedule

    @cached_property
    def max_in_flight(self) -> tuple[int, ...] | None:
        """The maximum number of (stage, micro-batch) pairs that each rank may hold, or None if there is no limit.

        The limit comes from the option ``max_in_flight`` of `searched`.

        Raises ScheduleError if a rank has no room for one micro-batch on each of its stages.
        """
        limit = self._option("max_in_flight")
        if limit is None:
            return None
        limits = tuple(rank_limits(limit, self.num_ranks))
        stages = -(-(self.num_stages or len(self.placement or [0])) // self.num_ranks)
        if len(limits) != self.num_ranks or min(limits) < stages:
            raise ScheduleError(
                f"max_in_flight must be a whole number, or a list with one number for each rank, and every rank must "
                f"have room for a micro-batch on each of its stages; got {shown(limit)} for "
                f"{counted(self.num_ranks, 'rank')} with {counted(stages, 'stage')} each; pass numbers of at least "
                f"{stages}"
            )
        return limits

    @cached_property
    def placement(self) -> Placement | None:
        """The rank of each stage, from the option ``placement`` of `searched`. None: stages can be on any rank.

        Raises ScheduleError if the ranks do not have equal numbers of stages.
        """
        if self._option("placement") is None:
            return None
        own = self.schedule.fixed_placement if self.schedule else None
        if own is not None and Counter(own) != dict.fromkeys(range(self.num_ranks), len(own) // self.num_ranks):
            raise ScheduleError(
                f"a search for a plan needs the same number of stages on every rank; got placement={own} for "
                f"{counted(self.num_ranks, 'rank')}; change the placement, or leave it out"
            )
        return own

    def _option(self, name: str) -> Any:
        """Return an option of the schedule `searched`; None for other schedules."""
        return None if self.schedule is None or not self.searches_orders else self.schedule.options[name]

    @property
    def is_limited(self) -> bool:
        """Whether the memory of ranks is limited, in bytes or in (stage, micro-batch) pairs in flight."""
        return self.memory_limit_bytes is not None or self.max_in_flight is not None

    @property
    def axes(self) -> str:
        """The mesh axes and the ZeRO level as text, such as "dp 8 x pp 4, zero 2"; "" without replicas."""
        own = self.replica_costs
        return "" if own is None else own.replication.describe(self.num_ranks, self.tensor)

    @property
    def posted(self) -> int:
        """The number of receives per channel that are posted in advance, each with a buffer; 0 for threads."""
        return AHEAD if self.ranks_are == "processes" else 0

    @classmethod
    def of(
        cls,
        profile: Profile,
        num_ranks: int,
        batch_size: int,
        request: PlanRequest,
        *,
        memory_limit_bytes: MemoryLimit | None = None,
        counts: Sequence[int] | None = None,
        ranks_are: RanksAre = "threads",
        num_cores: int | None = None,
        **others: Any,
    ) -> "SearchRequest":
        """Check a user's request, and return a search request. Unmeasured overheads get default values.

        Args:
            profile: the costs of the layers.
            num_ranks: the number of available ranks.
            batch_size: the number of rows in a batch.
            request: the user's choices.
            memory_limit_bytes: one limit for all ranks, or one for each rank. Default: no limit.
            counts: the numbers of micro-batches to try if the request has no number. Default: numbers for which the
                micro-batch size is within the range of the measured sizes.
            ranks_are: "threads" or "processes". Default: "threads".
            num_cores: the number of CPU cores that all ranks share. Default: ``num_ranks``.
            others: other fields of SearchRequest. The default of ``completion`` is updates, if the profile has the
                costs of an optimizer.

        Raises:
            PartitionError: for invalid values.

        """
        for name, number in (("ranks", num_ranks), ("rows in a batch", batch_size)):
            if not is_count(number):
                raise PartitionError(
                    f"the number of {name} must be a whole number, at least 1; got {shown(number)}; pass 1 or more"
                )
        if request.num_microbatches is not None:
            counts = [request.num_microbatches]
        if counts is None:
            counts = microbatch_counts(batch_size, num_ranks, profile.graphs)
        if not counts or max(counts) > batch_size or min(counts) < 1:
            split = f"{', '.join(map(str, counts))} micro-batches" if counts else "micro-batches of a measured size"
            raise PartitionError(
                f"a micro-batch must have at least one row, and a size within the measured range; a batch of "
                f"{batch_size} rows cannot be split into {split}; measured sizes: "
                f"{', '.join(map(str, sorted(profile.graphs)))} rows; pass a different num_microbatches or "
                f"batch_size, or measure more sizes"
            )
        others.setdefault("completion", Completion(updates=has_updates(profile)))
        return cls(
            profile.on(profile.machine.assuming(ranks_are, num_ranks, num_cores)),
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


def has_updates(profile: Profile) -> bool:
    """Return whether a profile has the costs of an optimizer."""
    layers = next(iter(profile.graphs.values())).nodes
    return any(node.get(cost) for node in layers.values() for cost in ("update_s", "optimizer_bytes"))


def check_offload(offload: Any) -> None:
    """Raise PartitionError unless ``offload`` is "auto", True or False."""
    if not isinstance(offload, bool) and not (isinstance(offload, str) and offload == "auto"):
        raise PartitionError(f"offload= must be 'auto', True or False; got {offload!r}; choose one of them")


def _is_list(request: PlanRequest) -> bool:
    return request.boundaries is not None and not isinstance(request.boundaries, Mapping)


def _synchronous(schedule: Any) -> Schedule | None:
    if isinstance(schedule, Program):
        raise ScheduleError(
            "a search chooses the program; got a Program as schedule=; leave schedule= out, or pass a schedule's name"
        )
    if isinstance(schedule, str) and schedule == "auto":
        return None
    wished = schedule if isinstance(schedule, Schedule) else schedules.get(schedule)
    if wished.name == _SEARCHED:
        _check_defaults(wished)
        return wished
    program = wished.program(2, 2)
    if program.has_updates or program.num_weights < program.num_stages:
        raise ScheduleError(
            f"the search covers only synchronous schedules with one chain of stages; got {wished.name!r}; choose a "
            f"different schedule, or leave out the options that start a search (batch_size, memory_limit_bytes, "
            f"profile)"
        )
    return wished


def _check_defaults(searched: Schedule) -> None:
    """Raise ScheduleError if the user has set options of `searched` that a search for a plan sets itself."""
    for name, default in schedules.get(_SEARCHED).options.items():
        given = searched.options[name]
        if name not in _KEPT and given is not default and given != default:
            raise ScheduleError(
                f"a search for a plan keeps only the options {' and '.join(_KEPT)} of the schedule 'searched', and "
                f"derives the others from the measured layers; got {name}={shown(given)}; "
                f"{_INSTEAD.get(name, 'leave it out')}"
            )


def limits_of(given: MemoryLimit | None, num_ranks: int) -> tuple[int, ...] | None:
    """Return one memory limit per rank; None if there are no limits. Raises PartitionError for invalid limits."""
    if given is None:
        return None
    limits = list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given] * num_ranks
    sizes: list[Any] = [as_bytes(limit) for limit in limits]
    if len(sizes) != num_ranks or not all(map(_is_size, sizes)):
        raise PartitionError(
            f"memory_limit_bytes must be a positive number of bytes, which applies to each rank, or a list with one "
            f"number for each rank ({num_ranks} in all); got {shown(given)}; for example, pass 16 * 2**30, or '16GiB'"
        )
    return tuple(map(int, sizes))


def _is_size(limit: Any) -> bool:
    return isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < inf
