"""Costs: plain numbers a stage, with their units in their names. Times may be whole numbers: sums then are exact."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pipesched.checks import LARGEST, LARGEST_SIZE, check_number, check_size, check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import maybe
from pipesched.program.actions import Action, Holding, Kind
from pipesched.simulation.links import Links, plain
from pipesched.simulation.overheads import Overheads

__all__ = ["Costs", "check_costs"]


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs on each stage, in seconds and bytes: one number a stage. Default: 0 for each stage.

    A size that has no comment of its own is explained in `pipesched.simulation.layer_memory.LayerMemory`.
    """

    #: A forward (F).
    forward_s: tuple[float, ...]
    #: The gradients of the input (I).
    input_grad_s: tuple[float, ...]
    #: The gradients of the parameters (W).
    weight_grad_s: tuple[float, ...]
    #: A full backward (B). Default: I and W.
    backward_s: tuple[float, ...] = ()
    #: A recompute (R). Default: a forward.
    recompute_s: tuple[float, ...] = ()
    #: Latency of a tensor between different ranks, beside what ``links`` add.
    transfer_s: float = 0
    #: The model's own inputs do not count: they are the batch's.
    activation_bytes: tuple[int, ...] = ()
    #: All that a checkpointed forward keeps.
    input_bytes: tuple[int, ...] = ()
    weight_grad_bytes: tuple[int, ...] = ()
    #: The optimizer's step.
    update_s: tuple[float, ...] = ()
    #: The weights, of each version of them.
    weight_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    #: What a forward and a backward that overlap take, over the sum of both times; 1: overlapping gains nothing.
    overlap: float = 1
    #: What lies between the ranks. Default: nothing that takes time.
    links: Links | None = None
    gradient_bytes: tuple[int, ...] = ()
    #: The optimizer's state.
    optimizer_bytes: tuple[int, ...] = ()
    buffer_bytes: tuple[int, ...] = ()
    forward_transient_bytes: tuple[int, ...] = ()
    backward_transient_bytes: tuple[int, ...] = ()
    #: How long a forward and a full backward together leave the processor to others, as while they wait for a device.
    waiting_s: tuple[float, ...] = ()
    #: What ranks take beside their stages' work. Default: nothing.
    overheads: Overheads | None = None
    #: Default: ``gradient_bytes`` and ``backward_transient_bytes``.
    first_backward_transient_bytes: tuple[int, ...] = ()
    #: Default: ``weight_grad_bytes`` and ``backward_transient_bytes``.
    input_grad_transient_bytes: tuple[int, ...] = ()
    #: Default: ``backward_transient_bytes``.
    weight_grad_transient_bytes: tuple[int, ...] = ()
    deferred_gradient_bytes: tuple[int, ...] = ()
    #: Transient of the optimizer's step.
    update_transient_bytes: tuple[int, ...] = ()
    #: The part of the activations that goes to the host and back, where a program says so.
    offload_bytes: tuple[int, ...] = ()
    #: How long it takes to get there, while the rank computes.
    offload_s: tuple[float, ...] = ()
    #: How long it takes to come back, while the rank computes.
    fetch_s: tuple[float, ...] = ()
    #: Transient of an F that keeps only its input. Default: ``activation_bytes`` and ``forward_transient_bytes``.
    dropping_transient_bytes: tuple[int, ...] = ()
    kept_output_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            values = getattr(self, name)
            if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
                raise ScheduleError(f"costs have one number a stage; {name} is {shown(values)}; give a list of them")
            object.__setattr__(self, name, tuple(map(plain, values)))
        for name in _SCALARS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        if not isinstance(self.links, Links | None):
            raise ScheduleError(f"links are pipesched's Links; got {self.links!r}; pass Links(...) or None")
        if not isinstance(self.overheads, Overheads | None):
            raise ScheduleError(f"overheads are pipesched's Overheads; got {self.overheads!r}; pass them or None")
        for name in _ZERO:
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * self.num_stages)
        self._check((*_GIVEN, *_ZERO))
        for name, parts in _SUMS.items():
            if not getattr(self, name):
                columns = zip(*(getattr(self, part) for part in parts), strict=True)
                object.__setattr__(self, name, tuple(map(sum, columns)))
        self._check(_SUMS)
        for name in _SCALARS:
            check_number(getattr(self, name), name)

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            values: tuple[Any, ...] = getattr(self, name)
            if len(values) != self.num_stages:
                raise ScheduleError(
                    f"costs have one number a stage; forward_s has {self.num_stages}, {name} has {len(values)}; "
                    f"give as many"
                )
            sizes = name.endswith("_bytes")
            kinds, most = ({int}, LARGEST_SIZE) if sizes else ({int, float}, LARGEST)
            if {*map(type, values)} <= kinds and min(values, default=0) >= 0 and sum(values) < most:
                continue
            for stage, value in enumerate(values):
                (check_size if sizes else check_number)(value, f"{name} of stage {stage}")

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each stage: in which part of its time it computes, and does not wait."""
        times = zip(self.forward_s, self.backward_s, self.waiting_s, strict=True)
        return tuple(max(0.0, 1 - waits / (there + back)) if waits else 1 for there, back, waits in times)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.forward_s)

    @classmethod
    def uniform(cls, num_stages: int, **costs: Any) -> "Costs":
        """The same costs for every stage. Default of forward, input gradient and weight gradient: 1 s.

        Takes the names of the fields, each a single number: ``Costs.uniform(4, forward_s=2, transfer_s=0.1)``.
        """
        unknown = sorted(set(costs) - {field.name for field in fields(cls)})
        if unknown:
            raise ScheduleError(
                f"costs are {', '.join(field.name for field in fields(cls))}; got {unknown[0]!r}; leave it out"
            )
        if not is_count(num_stages):
            raise ScheduleError(
                f"costs are for a whole number of stages, at least 1; got {shown(num_stages)}; pass 1 or more"
            )
        costs = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, **costs}
        spread: dict[str, Any] = {
            name: (value,) * num_stages if name in _COLUMNS else value for name, value in costs.items()
        }
        return cls(**spread)

    def times(self, kind: Kind) -> tuple[float, ...]:
        """How long an action of this kind takes, by stage; () for transfers."""
        name = _TIME_OF.get(kind)
        times: tuple[float, ...] = getattr(self, name) if name else ()
        return times

    def seconds(self, action: Action) -> float:
        """How long an action of a stage takes; 0 for transfers between stages."""
        times = self.times(action.kind)
        return times[action.stage] if times else 0

    def sizes(self) -> dict[Holding, tuple[int, ...]]:
        """What the stages hold for one micro-batch, or one version, by holding and stage."""
        return {
            Holding.INPUT: self.input_bytes,
            Holding.ACTIVATIONS: self.activation_bytes,
            Holding.OFFLOADED: self.offload_bytes,
            Holding.WEIGHT_GRAD: self.weight_grad_bytes,
            Holding.WEIGHTS: self.weight_bytes,
        }

    def scaled(self, factor: float) -> "Costs":
        """All times multiplied by ``factor``; sizes as they are. Raises ScheduleError for what is no number."""
        check_number(factor, "the factor")
        times: dict[str, Any] = {
            name: tuple(value * factor for value in getattr(self, name)) for name in (*_TIME_OF.values(), "waiting_s")
        }
        return replace(self, transfer_s=self.transfer_s * factor, **times)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON takes them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = {name: values[name].to_dict() if values[name] else None for name in ("links", "overheads")}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()} | parts

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Costs":
        """The inverse of ``to_dict``. Raises ScheduleError for unknown or missing names and bad numbers."""
        check_type(values, Mapping, "costs are read from a mapping of their names", "pass what to_dict returns")
        known = [field.name for field in fields(cls)]
        wrong = sorted(set(values) - set(known)) + sorted({"forward_s", "input_grad_s", "weight_grad_s"} - set(values))
        if wrong:
            raise ScheduleError(
                f"costs are {', '.join(known)}, the first three always; {shown(wrong[0])} is unknown or missing; "
                f"correct it"
            )
        parts = {"links": maybe(Links.from_dict), "overheads": maybe(Overheads.from_dict)}
        return cls(**{**values, **{name: make(values.get(name)) for name, make in parts.items()}})


def check_costs(costs: Any) -> None:
    """Raise ArgumentError for what is none."""
    check_type(costs, Costs, "costs are Costs", "pass such as Costs.uniform(num_stages)")


_TIME_OF = {
    Kind.F: "forward_s",
    Kind.B: "backward_s",
    Kind.I: "input_grad_s",
    Kind.W: "weight_grad_s",
    Kind.R: "recompute_s",
    Kind.UPDATE: "update_s",
    Kind.OFFLOAD: "offload_s",
    Kind.FETCH: "fetch_s",
}
_GIVEN = ("forward_s", "input_grad_s", "weight_grad_s")
_SUMS = {  # columns that are sums of others by default
    "backward_s": ("input_grad_s", "weight_grad_s"),
    "recompute_s": ("forward_s",),
    "dropping_transient_bytes": ("activation_bytes", "forward_transient_bytes"),
    "first_backward_transient_bytes": ("gradient_bytes", "backward_transient_bytes"),
    "input_grad_transient_bytes": ("weight_grad_bytes", "backward_transient_bytes"),
    "weight_grad_transient_bytes": ("backward_transient_bytes",),
}
_SCALARS = ("transfer_s", "overlap")
_COLUMNS = [field.name for field in fields(Costs) if field.name not in (*_SCALARS, "links", "overheads")]
_ZERO = [name for name in _COLUMNS if name not in (*_GIVEN, *_SUMS)]
