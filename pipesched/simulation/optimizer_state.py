"""Optimizer state: the size of an optimizer's state, from the number and the size of the parameters."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.units import quote_bytes

__all__ = ["ASSUMED", "OptimizerName", "OptimizerState", "StateRule", "without_assumption"]

OptimizerName = Literal["sgd", "momentum", "adam", "adamw"]

#: The name of an optimizer, or the size of its state in bytes for each parameter.
OptimizerState = OptimizerName | float

_FLOAT_BYTES = 4
#: The first words of a note on a cost that a table of layers lacks.
ASSUMED = "assumed, as the table does not say: "
_OPTIMIZER_KEEPS = f"{ASSUMED}the optimizer keeps "
#: The number of float32 values that an optimizer keeps for each parameter.
_VALUES: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True, kw_only=True)
class StateRule:
    """The size of an optimizer's state for each parameter.

    An optimizer that is given by name keeps float32 values. For parameters smaller than float32, it also keeps a
    float32 copy of each parameter, as in mixed precision training (Micikevicius et al. 2018, section 3.1).
    """

    name: str = ""
    #: The size for each parameter in bytes, without the copy.
    bytes_each: float

    @classmethod
    def of(cls, optimizer: OptimizerState) -> "StateRule":
        """Return the rule for a name or a number of bytes. Raises InputError for any other value."""
        if isinstance(optimizer, str) and optimizer in _VALUES:
            return cls(name=optimizer, bytes_each=_FLOAT_BYTES * _VALUES[optimizer])
        if not isinstance(optimizer, int | float) or isinstance(optimizer, bool) or not 0 <= optimizer < math.inf:
            raise InputError(
                f"optimizer= for a table or a profile must be {', '.join(_VALUES)}, or the number of bytes of its "
                f"state for each parameter; got {shown(optimizer)}; for example, pass 'adamw', or 12"
            )
        return cls(bytes_each=float(optimizer))

    def each(self, bytes_per_parameter: float) -> float:
        """Return the bytes of state for a parameter of this size."""
        copy = _FLOAT_BYTES if self.name and 0 < bytes_per_parameter < _FLOAT_BYTES else 0
        return self.bytes_each + copy

    def size(self, num_parameters: int, parameter_bytes: int, trained: float = 1) -> int:
        """Return the bytes of state for these parameters, of which the fraction ``trained`` has gradients."""
        each = self.each(parameter_bytes / num_parameters) if num_parameters else 0
        return math.ceil(num_parameters * min(1, trained) * each)

    def assumed(self, bytes_per_parameter: float) -> str:
        """Return the note of a profile whose optimizer was not given."""
        size = quote_bytes(self.each(bytes_per_parameter))
        copy = ", with a float32 copy of each parameter" if self.each(bytes_per_parameter) > self.bytes_each else ""
        return f"{_OPTIMIZER_KEEPS}{size} for each parameter ({self.name}{copy})"


def without_assumption(notes: Iterable[str]) -> tuple[str, ...]:
    """Return the notes of a profile without `StateRule.assumed`, once the optimizer is known."""
    return tuple(note for note in notes if not note.startswith(_OPTIMIZER_KEEPS))
