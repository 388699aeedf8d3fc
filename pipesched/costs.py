"""Costs: plain numbers a stage, with their units in their names. Times may be whole numbers: sums then are exact."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any

from pipesched.actions import Action, Holding, Kind
from pipesched.errors import ScheduleError

__all__ = ["Costs"]

_OPTIONAL = ("backward_s", "recompute_s")


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs on each stage.

    Times in seconds, one a stage: forward, input gradient (I), weight gradient (W), full backward (B: I + W unless
    given), recompute (R: a forward unless given). transfer_s: latency of a tensor between different ranks.
    Sizes in bytes, one a stage: activations held for the backward, the stage's input (all that a checkpointed
    forward keeps), and what is held between I and W.
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

    def __post_init__(self) -> None:
        for name in _TUPLES:
            values = getattr(self, name)
            if not isinstance(values, Iterable):
                raise ScheduleError(f"costs have one number a stage; {name} is {values!r}; give a list of them")
            object.__setattr__(self, name, tuple(values))
        self._check(_GIVEN)
        if not self.backward_s:
            whole = tuple(i + w for i, w in zip(self.input_grad_s, self.weight_grad_s, strict=True))
            object.__setattr__(self, "backward_s", whole)
        if not self.recompute_s:
            object.__setattr__(self, "recompute_s", self.forward_s)
        for name in ("activation_bytes", "input_bytes", "weight_grad_bytes"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * self.num_stages)
        self._check(_TUPLES)
        _check_number(self.transfer_s, "transfer_s")

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            values: tuple[Any, ...] = getattr(self, name)
            if len(values) != self.num_stages:
                raise ScheduleError(
                    f"costs have one number a stage; forward_s has {self.num_stages}, {name} has {len(values)}; "
                    f"give as many"
                )
            for stage, value in enumerate(values):
                _check_number(value, f"{name} of stage {stage}")

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.forward_s)

    @classmethod
    def uniform(cls, num_stages: int, **costs: float) -> "Costs":
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
            name: value if name == "transfer_s" else (value,) * num_stages for name, value in costs.items()
        }
        return cls(**spread)

    def seconds(self, action: Action) -> float:
        """How long a compute action takes; 0 for any other."""
        name = _TIME_OF.get(action.kind)
        seconds: float = getattr(self, name)[action.stage] if name else 0
        return seconds

    def held_bytes(self, stage: int) -> Mapping[Holding, int]:
        """What a stage holds for one micro-batch, by holding."""
        return {
            Holding.INPUT: self.input_bytes[stage],
            Holding.ACTIVATIONS: self.activation_bytes[stage],
            Holding.WEIGHT_GRAD: self.weight_grad_bytes[stage],
        }

    def scaled(self, factor: float) -> "Costs":
        """All times multiplied by ``factor``; sizes as they are."""
        times = {name: tuple(value * factor for value in getattr(self, name)) for name in _TIME_OF.values()}
        return replace(self, transfer_s=self.transfer_s * factor, **times)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON takes them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Costs":
        """The inverse of ``to_dict``. Raises ScheduleError for unknown or missing names and bad numbers."""
        known = [field.name for field in fields(cls)]
        wrong = sorted(set(values) - set(known)) + sorted({"forward_s", "input_grad_s", "weight_grad_s"} - set(values))
        if wrong:
            raise ScheduleError(
                f"costs are {', '.join(known)}, the first three always; {wrong[0]!r} is unknown or missing; correct it"
            )
        return cls(**values)


_TIME_OF = {
    Kind.F: "forward_s",
    Kind.B: "backward_s",
    Kind.I: "input_grad_s",
    Kind.W: "weight_grad_s",
    Kind.R: "recompute_s",
}
_GIVEN = ("forward_s", "input_grad_s", "weight_grad_s")
_TUPLES = (*_TIME_OF.values(), "activation_bytes", "input_bytes", "weight_grad_bytes")


def _check_number(value: Any, what: str) -> None:
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise ScheduleError(f"costs are finite numbers, not negative; {what} is {value!r}; measure it again")


def check_times(times: Sequence[float], what: str) -> None:
    """Raise ScheduleError where a time is not a finite number or is negative."""
    for index, value in enumerate(times):
        _check_number(value, f"{what} {index}")
