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
    """What one micro-batch costs on each stage.

    Times in seconds, one a stage: forward, input gradient (I), weight gradient (W), full backward (B: I + W unless
    given), recompute (R: a forward unless given), update (the optimizer's step: 0 unless given).
    overlap: the share of the sum of both times that a forward and a backward take that overlap; 1 where overlapping
    gains nothing. transfer_s: latency of a tensor between different ranks, beside what ``links`` add.
    Sizes in bytes, one a stage: activations held for the backward (without the model's own inputs: they are the
    batch's), the stage's input (all that a checkpointed forward keeps), what is held between I and W, the stage's
    weights (for each version of them), and its output (and so the gradient that comes back; kept: the part of it that
    is among the activations). links: what lies between the ranks; nothing that takes time unless given. Of a stage's
    own, whatever is in flight: gradients of its parameters (deferred: of these those that W makes), the optimizer's
    state, buffers. Transients: the most that an action holds beyond what is held as it begins: F and R beyond the
    activations that they leave, an F that keeps but its input beyond that (as both unless given), B once there are
    gradients to which it adds; the first one with these (as both unless given), I with what it leaves for W (as both
    unless given), W (as B unless given), and the optimizer's step.
    waiting_s: for how long of its forward and its whole backward together a stage leaves the processor to others, as
    one that waits for a device. overheads: what ranks take beside their stages' work; nothing unless given.
    offload_bytes: the part of the activations that goes to the host and back where a program says so, in offload_s and
    fetch_s, beside what is computed.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    backward_s: tuple[float, ...] = ()
    recompute_s: tuple[float, ...] = ()
    transfer_s: float = 0
    activation_bytes: tuple[int, ...] = ()
    input_bytes: tuple[int, ...] = ()
    weight_grad_bytes: tuple[int, ...] = ()
    update_s: tuple[float, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    overlap: float = 1
    links: Links | None = None
    gradient_bytes: tuple[int, ...] = ()
    optimizer_bytes: tuple[int, ...] = ()
    buffer_bytes: tuple[int, ...] = ()
    forward_transient_bytes: tuple[int, ...] = ()
    backward_transient_bytes: tuple[int, ...] = ()
    waiting_s: tuple[float, ...] = ()
    overheads: Overheads | None = None
    first_backward_transient_bytes: tuple[int, ...] = ()
    input_grad_transient_bytes: tuple[int, ...] = ()
    weight_grad_transient_bytes: tuple[int, ...] = ()
    deferred_gradient_bytes: tuple[int, ...] = ()
    update_transient_bytes: tuple[int, ...] = ()
    offload_bytes: tuple[int, ...] = ()
    offload_s: tuple[float, ...] = ()
    fetch_s: tuple[float, ...] = ()
    dropping_transient_bytes: tuple[int, ...] = ()
    kept_output_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _TUPLES:
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
        self._check(_GIVEN)
        if not self.backward_s:
            whole = tuple(i + w for i, w in zip(self.input_grad_s, self.weight_grad_s, strict=True))
            object.__setattr__(self, "backward_s", whole)
        if not self.recompute_s:
            object.__setattr__(self, "recompute_s", self.forward_s)
        for name in _ZERO:
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * self.num_stages)
        self._check(("backward_s", "recompute_s", *_ZERO))
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
        """The same costs for every stage; forward, input gradient and weight gradient take 1 s unless given.

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
            name: value if name in _SCALARS or name in ("links", "overheads") else (value,) * num_stages
            for name, value in costs.items()
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
_ZERO = (
    "activation_bytes",
    "input_bytes",
    "weight_grad_bytes",
    "update_s",
    "weight_bytes",
    "output_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "update_transient_bytes",
    "deferred_gradient_bytes",
    "waiting_s",
    "offload_bytes",
    "offload_s",
    "fetch_s",
    "kept_output_bytes",
)
_SUMS = {  # what is the sum of others unless given
    "dropping_transient_bytes": ("activation_bytes", "forward_transient_bytes"),
    "first_backward_transient_bytes": ("gradient_bytes", "backward_transient_bytes"),
    "input_grad_transient_bytes": ("weight_grad_bytes", "backward_transient_bytes"),
    "weight_grad_transient_bytes": ("backward_transient_bytes",),
}
_TUPLES = (*_GIVEN, "backward_s", "recompute_s", *_ZERO, *_SUMS)
_SCALARS = ("transfer_s", "overlap")
