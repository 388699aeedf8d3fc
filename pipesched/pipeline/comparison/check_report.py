"""Check report: the result of `Pipeline.check`, and the comparison of tensors behind it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isnan

import torch
from torch import Tensor

from pipesched.errors import DifferenceError
from pipesched.model.state_guard import same_bits
from pipesched.units import counted

__all__ = ["CheckReport", "Results", "differing", "in_words", "merged"]

_PAGE = "docs/howto/check.md"
#: The largest relative difference that counts as rounding, by the type of the values.
_ROUNDING = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float16: 5e-2, torch.bfloat16: 5e-2}
_SINGLE = 1e-3  # of all other types
#: The share of the norm of all gradients below which a gradient counts as zero but for rounding.
_LEAST = 1e-3
#: The largest relative difference that is shown as a number.
_SHOWN = 100.0


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of `Pipeline.check`. ``str()`` returns a line for each comparison."""

    equal: tuple[str, ...]  #: what was compared, and is equal
    skipped: tuple[str, ...]  #: what was not compared, and why
    differences: tuple[str, ...] = ()  #: what differs, and where first

    def __str__(self) -> str:
        kinds = (("equal", self.equal), ("not compared", self.skipped), ("different", self.differences))
        return "\n".join(f"{kind}: {line}" for kind, lines in kinds for line in lines)

    def raised(self) -> "CheckReport":
        """Return the report. Raises DifferenceError if it has differences."""
        if self.differences:
            raise DifferenceError(
                f"a pipeline must give the results of its model; {'; '.join(self.differences)}; do not train with "
                f"this pipeline until the cause is found; {_PAGE} says what to look for"
            )
        return self


@dataclass(kw_only=True)
class Results:
    """The results of a run: name -> tensor, or None for a gradient that does not exist."""

    values: dict[str, Tensor | None] = field(default_factory=dict)  #: losses, outputs and gradients of inputs
    grads: dict[str, Tensor | None] = field(default_factory=dict)  #: the gradients of parameters
    buffers: dict[str, Tensor | None] = field(default_factory=dict)


def differing(ours: Results, due: Results, *, exact: bool, names: Collection[str] | None = None) -> dict[str, float]:
    """Return what differs, as text -> relative difference: values first, then gradients and buffers.

    Args:
        ours: the results of the pipeline.
        due: the results that it must have.
        exact: whether the bits must be equal. If False, rounding is allowed.
        names: the names of the parameters and buffers to compare. Default: None (all).

    """
    found = _unlike(ours.values, due.values, exact, "")
    found |= _unlike(_only(ours.grads, names), _only(due.grads, names), exact, "the gradient of ")
    return found | _unlike(_only(ours.buffers, names), _only(due.buffers, names), exact, "the buffer ")


def _only(tensors: Mapping[str, Tensor | None], names: Collection[str] | None) -> dict[str, Tensor | None]:
    return {name: tensor for name, tensor in tensors.items() if names is None or name in names}


def _unlike(
    ours: Mapping[str, Tensor | None], due: Mapping[str, Tensor | None], exact: bool, prefix: str
) -> dict[str, float]:
    norms = [float(tensor.double().norm()) for tensor in due.values() if tensor is not None and _is_float(tensor)]
    least = _LEAST * sum(norm**2 for norm in norms) ** 0.5 if prefix.startswith("the grad") else 0.0
    found = {}
    for name in dict.fromkeys([*due, *ours]):
        distance = _distance(ours.get(name), due.get(name), least)
        tensor = due.get(name)
        limit = 0.0 if exact or tensor is None else _ROUNDING.get(tensor.dtype, _SINGLE)
        if distance > limit:
            found[f"{prefix}{name!r}" if prefix else name] = distance
    return found


def _distance(one: Tensor | None, other: Tensor | None, least: float) -> float:
    """Return the relative difference of two tensors; 0 if their bits are equal, infinity if their forms differ."""
    if one is None or other is None:
        return 0.0 if one is other or not _norm(other if one is None else one) else inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return inf
    one, other = one.detach().cpu(), other.detach().cpu()
    if same_bits(one, other) or torch.equal(one, other):
        return 0.0
    if not _is_float(one):
        return inf
    wide = torch.complex128 if one.is_complex() else torch.float64
    ratio = _norm(one.to(wide) - other.to(wide)) / max(_norm(other.to(wide)), least, 1e-30)
    return inf if isnan(ratio) else ratio


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.detach().to("cpu").norm().abs()) if _is_float(tensor) else 1.0


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def in_words(found: Mapping[str, float]) -> str:
    """Name the largest difference, and the number of others."""
    name, distance = max(found.items(), key=lambda pair: pair[1])
    others = f", and {counted(len(found) - 1, 'other value')}" if len(found) > 1 else ""
    return f"{name} by {distance:.1%}{others}" if distance < _SHOWN else f"{name}{others}"


def merged(reports: Iterable[tuple[tuple[str, ...], ...]]) -> CheckReport:
    """Return one report from those of all ranks, each as (equal, skipped, differences)."""
    equal, skipped, differences = zip(*reports, strict=True)
    return CheckReport(
        equal=tuple(line for line in equal[0] if all(line in of_rank for of_rank in equal)),
        skipped=tuple(dict.fromkeys(line for of_rank in skipped for line in of_rank)),
        differences=tuple(dict.fromkeys(line for of_rank in differences for line in of_rank)),
    )
