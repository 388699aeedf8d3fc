"""Costs: plain numbers a stage, with their units in their names. Times may be whole numbers: sums then are exact."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pipesched.actions import Action, Holding, Kind
from pipesched.errors import ScheduleError
from pipesched.links import Links, check_number, plain

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs on each stage.

    Times in seconds, one a stage: forward, input gradient (I), weight gradient (W), full backward (B: I + W unless
    given), recompute (R: a forward unless given), update (the optimizer's step: 0 unless given).
    overlap: the share of the sum of both times that a forward and a backward take that overlap; 1 where overlapping
    gains nothing. transfer_s: latency of a tensor between different ranks, beside what ``links`` add.
    Sizes in bytes, one a stage: activations held for the backward, the stage's input (all that a checkpointed
    forward keeps), what is held between I and W, the stage's weights (for each version of them), and its output (and
    so the gradient that comes back). links: what lies between the ranks; nothing that takes time unless given.
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

    def __post_init__(self) -> None:
        for name in _TUPLES:
            values = getattr(self, name)
            if not isinstance(values, Iterable):
                raise ScheduleError(f"costs have one number a stage; {name} is {values!r}; give a list of them")
            object.__setattr__(self, name, tuple(map(plain, values)))
        for name in _SCALARS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        if not isinstance(self.links, Links | None):
            raise ScheduleError(f"links are pipesched's Links; got {self.links!r}; pass Links(...) or None")
        self._check(_GIVEN)
        if not self.backward_s:
            whole = tuple(i + w for i, w in zip(self.input_grad_s, self.weight_grad_s, strict=True))
            object.__setattr__(self, "backward_s", whole)
        if not self.recompute_s:
            object.__setattr__(self, "recompute_s", self.forward_s)
        for name in _ZERO:
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * self.num_stages)
        self._check(_TUPLES)
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
            for stage, value in enumerate(values):
                check_number(value, f"{name} of stage {stage}")

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
        costs = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, **costs}
        spread: dict[str, Any] = {
            name: value if name in _SCALARS or name == "links" else (value,) * num_stages
            for name, value in costs.items()
        }
        return cls(**spread)

    def times(self, kind: Kind) -> tuple[float, ...]:
        """How long an action of this kind takes, by stage; () for transfers."""
        name = _TIME_OF.get(kind)
        times: tuple[float, ...] = getattr(self, name) if name else ()
        return times

    def seconds(self, action: Action) -> float:
        """How long a compute action takes; 0 for any other."""
        times = self.times(action.kind)
        return times[action.stage] if times else 0

    def sizes(self) -> dict[Holding, tuple[int, ...]]:
        """What the stages hold for one micro-batch, or one version, by holding and stage."""
        return {
            Holding.INPUT: self.input_bytes,
            Holding.ACTIVATIONS: self.activation_bytes,
            Holding.WEIGHT_GRAD: self.weight_grad_bytes,
            Holding.WEIGHTS: self.weight_bytes,
        }

    def scaled(self, factor: float) -> "Costs":
        """All times multiplied by ``factor``; sizes as they are."""
        times: dict[str, Any] = {
            name: tuple(value * factor for value in getattr(self, name)) for name in _TIME_OF.values()
        }
        return replace(self, transfer_s=self.transfer_s * factor, **times)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON takes them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        links = self.links.to_dict() if self.links else None
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()} | {"links": links}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Costs":
        """The inverse of ``to_dict``. Raises ScheduleError for unknown or missing names and bad numbers."""
        known = [field.name for field in fields(cls)]
        wrong = sorted(set(values) - set(known)) + sorted({"forward_s", "input_grad_s", "weight_grad_s"} - set(values))
        if wrong:
            raise ScheduleError(
                f"costs are {', '.join(known)}, the first three always; {wrong[0]!r} is unknown or missing; correct it"
            )
        links = Links.from_dict(values["links"]) if values.get("links") else None
        return cls(**{**values, "links": links})


_TIME_OF = {
    Kind.F: "forward_s",
    Kind.B: "backward_s",
    Kind.I: "input_grad_s",
    Kind.W: "weight_grad_s",
    Kind.R: "recompute_s",
    Kind.UPDATE: "update_s",
}
_GIVEN = ("forward_s", "input_grad_s", "weight_grad_s")
_ZERO = ("activation_bytes", "input_bytes", "weight_grad_bytes", "update_s", "weight_bytes", "output_bytes")
_TUPLES = (*_GIVEN, "backward_s", "recompute_s", *_ZERO)
_SCALARS = ("transfer_s", "overlap")
