"""Request: checks the arguments of `partition`, and creates the partitioning problem from them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, get_args

import networkx as nx

from pipesched.checks import as_list, check_number, check_type, is_whole, shown
from pipesched.errors import PartitionError, ScheduleError
from pipesched.partitioning.activation_options import ActivationOption, activation_options
from pipesched.partitioning.blocks import contract
from pipesched.partitioning.layer_arrays import Layers, read
from pipesched.partitioning.problem import Communication, CutProblem, Pin
from pipesched.partitioning.slots import RankCapacity, RankLayout, fixed_order, free_order, placed
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.simulation.links import Link
from pipesched.units import as_bytes, counted

__all__ = ["InFlight", "Request"]

InFlight = Sequence[int] | Callable[[int, int], int]

_FINEST_SPEED = 1000  # the largest denominator of a speed


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `pipesched.partition`. Raises PartitionError if an argument is invalid."""

    graph: "nx.DiGraph[Any]"
    num_stages: int
    communication: Communication = "none"
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0
    memory_limit_bytes: float | str | Sequence[float | str | None] | None = None
    in_flight: InFlight | None = None
    weight_copies: float = 4
    speeds: Sequence[float] | None = None
    any_order: bool = False
    starts: Mapping[Any, int] = field(default_factory=dict)
    together: tuple[Collection[Any], ...] = ()
    exactly: bool = False
    placement: Sequence[int] | None = None
    checkpoint: Collection[LayerCheckpoint] = ()
    offload_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        self._check_types()
        count = len(self.graph)
        if not is_whole(self.num_stages) or self.num_stages < 1 or (self._all_used and self.num_stages > count):
            raise PartitionError(
                f"every stage must hold at least one layer; there are {counted(self.num_stages, 'stage')} and "
                f"{counted(count, 'layer')}; use at most {counted(count, 'stage')}: fewer devices, or fewer chunks per "
                f"rank"
            )
        if self.communication not in get_args(Communication):
            raise PartitionError(
                f"communication= must be one of {', '.join(get_args(Communication))}; got {self.communication!r}; "
                f"choose one"
            )
        if self.communication != "none" and self.bandwidth_bytes_per_s is None:
            raise PartitionError(
                f"modelling communication requires a bandwidth; communication={self.communication!r} is set without "
                f"bandwidth_bytes_per_s; pass the bandwidth of the slowest link, such as 10e9"
            )
        _number(self.weight_copies, "weight_copies")
        if self.placement is not None:
            self._check_placement(list(self.placement))
        if self.checkpoint:
            self._check_checkpoint()

    def _check_types(self) -> None:
        graph = "a networkx.DiGraph with the layers' costs", "for example, pass pipesched.graph_of(model, sample)"
        check_type(self.graph, nx.Graph, f"graph= must be {graph[0]}", graph[1])
        check_type(
            self.starts,
            Mapping,
            "starts= must map layers to the stages that they begin",
            ("for example, pass {'head': 3}"),
        )
        if self.in_flight is not None and not callable(self.in_flight):
            rule = (
                "in_flight must be a list with one number of micro-batches for each stage, or a function (stage, "
                "num_stages)"
            )
            as_list(self.in_flight, rule, "for example, pass [4, 3, 2, 1]")
        if self.placement is not None:
            as_list(
                self.placement,
                "a placement must be a list with the rank of each stage",
                "for example, pass [0, 1, 0, 1]",
            )

    def _check_checkpoint(self) -> None:
        if self.any_order:
            raise PartitionError(
                "checkpoint= requires a fixed rank order; any_order=True was also passed; drop either checkpoint= or "
                "any_order=True"
            )
        if self.communication == "serial":
            raise PartitionError(
                "checkpoint= must not be combined with communication='serial', because a stage may then become faster "
                "with one more layer; both were passed; use communication='overlap' or 'none'"
            )

    def _check_placement(self, ranks: list[Any]) -> None:
        if len(ranks) != self.num_stages or not all(map(is_whole, ranks)) or set(ranks) != {*range(max(ranks) + 1)}:
            raise PartitionError(
                f"a placement must have a rank for each stage, and every rank must have a stage; got {shown(ranks)} "
                f"for {counted(self.num_stages, 'stage')}; pass one rank for each stage, such as [0, 1, 0, 1]"
            )
        if self.any_order:
            raise PartitionError(
                "placement= fixes the rank of each stage; any_order=True was also passed; drop either placement= or "
                "any_order=True"
            )

    @property
    def _all_used(self) -> bool:
        return self.exactly or self.placement is not None

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the placement or, without a placement, the number of stages."""
        return self.num_stages if self.placement is None else 1 + max(self.placement)

    @cached_property
    def link(self) -> Link:
        """The link between stages. Raises PartitionError for an invalid latency or bandwidth."""
        try:
            return Link(self.latency_s, self.bandwidth_bytes_per_s)
        except ScheduleError as error:
            raise PartitionError(str(error)) from None

    @cached_property
    def limits(self) -> list[int | None]:
        """The memory limit of each rank in bytes, or None if there is no limit."""
        limits = _one_each(self.memory_limit_bytes, self.num_ranks, "memory_limit_bytes")
        return [None if limit is None else _bytes(limit) for limit in limits]

    @cached_property
    def speeds_of_ranks(self) -> list[Fraction]:
        """The speed of each rank, relative to the rank on which the layers were measured."""
        values = _one_each(1 if self.speeds is None else self.speeds, self.num_ranks, "speeds")
        speeds = [Fraction(_number(speed, "a speed")).limit_denominator(_FINEST_SPEED) for speed in values]
        if not all(speeds):
            raise PartitionError(
                f"a rank's speed, relative to the measured rank, must be at least 1/{_FINEST_SPEED}; got {values}; "
                f"leave out slower ranks"
            )
        return speeds

    @cached_property
    def layers(self) -> Layers:
        """The layers of the graph with their costs. Raises PartitionError if the graph cannot be read."""
        needed = [
            *(["output_bytes"] if self.communication != "none" else []),
            *(["parameter_bytes"] if set(self.limits) != {None} else []),
        ]
        scale = max(speed.numerator + speed.denominator for speed in self.speeds_of_ranks)
        return read(self.graph, needed, link=self.link, weight_copies=self.weight_copies, scale=scale)

    @cached_property
    def ranks(self) -> list[RankCapacity]:
        """The ranks of the problem.

        If all ranks are alike and some are allowed to stay empty, there are at most as many ranks as layers.
        """
        ranks = [RankCapacity(speed, limit) for speed, limit in zip(self.speeds_of_ranks, self.limits, strict=True)]
        spare = self.placement is None and self.in_flight is None and set(ranks) == {RankCapacity()}
        return ranks[: len(self.layers)] if spare else ranks

    def problem(self) -> CutProblem:
        """Return the partitioning problem of this request.

        Raises PartitionError for unknown layers, or if no partition can satisfy ``starts`` and ``together``.
        """
        layers = self.layers
        position = {name: at for at, name in enumerate(layers.names)} if self.starts or self.together else {}
        groups = [[_known(layer, position, "together") for layer in group] for group in self.together]
        pins = [self._pin(layer, stage, position) for layer, stage in self.starts.items()]
        blocks = contract(layers, groups)
        if self._all_used and len(blocks) < self.num_stages:
            raise PartitionError(
                f"every stage must hold at least one layer; there are {counted(self.num_stages, 'stage')}, but the "
                f"layers form only {counted(len(blocks), 'block')}, because some must stay together; use fewer stages, "
                f"or keep fewer layers together"
            )
        options: list[tuple[ActivationOption, ...]] = []
        if self.checkpoint:
            options = activation_options(self.graph, layers, self.checkpoint, self.offload_bytes_per_s)
        return CutProblem(
            blocks=blocks,
            layout=self._layout(pins),
            communication=self.communication,
            link=self.link,
            pins=pins,
            options=options,
        )

    def _layout(self, pins: list[Pin]) -> RankLayout:
        ranks = self.ranks
        if self.placement is not None:
            return placed(ranks, self._held(self.num_stages), self.placement)
        held = self._held(len(ranks))
        if self.any_order:
            return free_order(ranks, held, exactly=self.exactly)
        return fixed_order(ranks, held, exactly=self.exactly, pinned=1 + max((pin.stage for pin in pins), default=-1))

    def _pin(self, layer: Any, stage: Any, position: Mapping[Any, int]) -> Pin:
        at = _known(layer, position, "starts")
        most = min(self.num_stages, len(position))
        if self.any_order:
            raise PartitionError(
                f"starts= requires a fixed rank order; {layer!r} must begin stage {stage}, but any_order=True was "
                f"also passed; drop either starts= or any_order=True"
            )
        if not is_whole(stage) or not 0 <= stage < most:
            raise PartitionError(
                f"starts= must map a layer to the stage that it begins, a number from 0 to {most - 1}; {layer!r} is "
                f"mapped to stage {stage!r}; choose one of these stages, or use more stages"
            )
        ancestors = frozenset(position[name] for name in nx.ancestors(self.graph, layer))
        if ancestors and not stage:
            raise PartitionError(
                f"a layer that begins a stage may depend only on layers in earlier stages; {layer!r} is mapped to "
                f"stage 0 but depends on {counted(len(ancestors), 'layer')}; choose a later stage for it"
            )
        return Pin(int(stage), at, ancestors)

    def _held(self, num_stages: int) -> list[int]:
        """Return the number of micro-batches in flight on each stage."""
        if self.in_flight is None:
            return [1] * num_stages
        if callable(self.in_flight):
            held = [self.in_flight(stage, self.num_stages) for stage in range(num_stages)]
        else:
            held = list(self.in_flight)
        if len(held) != num_stages or not all(is_whole(count) and count >= 0 for count in held):
            raise PartitionError(
                f"in_flight must have a number of micro-batches for each stage; got {held!r} for "
                f"{counted(num_stages, 'stage')}; pass a whole number for each stage, or a function (stage, "
                f"num_stages)"
            )
        return [int(count) for count in held]

    def but(self, **changes: Any) -> "Request":
        """Return a copy of the request with some arguments changed. The layers' costs are not read again."""
        other = replace(self, **changes)
        other.__dict__["layers"] = self.layers
        return other


def _number(value: Any, what: str) -> Any:
    try:
        check_number(value, what)
    except ScheduleError as error:
        raise PartitionError(str(error)) from None
    return value


def _bytes(limit: Any) -> int:
    size: Any = as_bytes(limit)
    if isinstance(size, str):
        raise PartitionError(
            f"memory_limit_bytes must be a number of bytes, or text such as '16GiB'; got {shown(size)}; for example, "
            f"pass 16 * 2**30"
        )
    return int(_number(size, "memory_limit_bytes"))


def _one_each(value: Any, num_ranks: int, name: str) -> list[Any]:
    """Return one value per rank; a single value is repeated. Raises PartitionError for a list of the wrong length."""
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value] * num_ranks
    if len(values) != num_ranks:
        raise PartitionError(
            f"{name} must have one number for each rank; got a list of {counted(len(values), 'number')} for "
            f"{counted(num_ranks, 'rank')}; pass one number, or a list of {counted(num_ranks, 'number')}"
        )
    return values


def _known(layer: Any, position: Mapping[Any, int], what: str) -> int:
    if layer not in position:
        names = ", ".join(map(repr, list(position)[:12])) + (", ..." if len(position) > 12 else "")
        raise PartitionError(
            f"{what}= may only name layers; {layer!r} is not a layer; the layers are {names}; use one of these"
        )
    return position[layer]
