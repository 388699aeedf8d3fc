"""Size fit: the times and sizes of layers as functions of the size of a micro-batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipesched.checks import check_number, shown
from pipesched.errors import ScheduleError
from pipesched.simulation.layer_costs import FIXED, LayerCosts

__all__ = ["Size", "SizeFit"]

#: The factors (a, b, c) of a fit (see `SizeFit`).
Factors = tuple[float, float, float]

_ONE, _LINEAR, _SQUARE = range(3)
#: The terms of a fit that may have a factor above 0, in order of preference.
_CHOICES = (
    [_LINEAR],
    [_ONE],
    [_SQUARE],
    [_ONE, _LINEAR],
    [_LINEAR, _SQUARE],
    [_ONE, _SQUARE],
    [_ONE, _LINEAR, _SQUARE],
)
_TINY = 1e-6  # values below this fraction of the largest value are treated as this fraction
_SAME = 1e-12  # sums of squared relative errors that differ by less are treated as equal
_COLLINEAR = 1e-3  # terms whose singular values have a smaller ratio cannot be told apart
_BITS = 4  # significant bits of a rounded size, so neighbours differ by 6 to 12 %


@dataclass(frozen=True)
class Size:
    """The size of a micro-batch."""

    #: The number of rows.
    rows: int
    #: The number of elements of the first input tensor, such as tokens.
    elements: int

    def rounded(self) -> "Size":
        """Return the size with rows and elements rounded to 4 significant bits, so that similar sizes become equal."""
        return Size(_rounded(self.rows), _rounded(self.elements))

    @property
    def terms(self) -> tuple[float, float, float]:
        """The values of a fit's three terms for this size: 1, elements and elements^2 / rows."""
        return 1.0, float(self.elements), self.elements**2 / self.rows


@dataclass(frozen=True)
class SizeFit:
    """Times and sizes of layers as functions of the size of a micro-batch.

    Each time or size is modelled as a + b x elements + c x elements^2 / rows. For sequences of tokens, the second term
    grows with the number of tokens, and the third with the number of token pairs in each sequence, as in attention.

    Attributes:
        layers: the factors (a, b, c), keyed by layer name and by the name of the time or size in `LayerCosts`. If
            there are no factors, the time or size is proportional to the number of elements.

    """

    layers: Mapping[str, Mapping[str, Factors]] = field(default_factory=dict)

    @classmethod
    def of(cls, measured: Sequence[tuple[Size, Mapping[str, LayerCosts]]]) -> "SizeFit":
        """Fit the costs of layers that were measured with micro-batches of several sizes.

        The factors are non-negative and minimise the sum of squared relative errors. Raises ScheduleError if the
        layers are not the same for all sizes.
        """
        (known, first), *others = measured
        for size, layers in others:
            if list(layers) != list(first):
                raise ScheduleError(
                    f"micro-batches of all sizes must run the same layers; the {len(layers)} layers that run for "
                    f"{size.rows} rows ({size.elements} elements) are not the {len(first)} layers that run for "
                    f"{known.rows} rows ({known.elements} elements); pass whole_layers= with the name of the module "
                    f"whose code branches on the batch"
                )
        sizes = [size for size, _ in measured]
        fits: dict[str, dict[str, Factors]] = {}
        for name in first:
            columns = [layers[name].figures() for _, layers in measured]
            figures = [key for key in columns[0] if key.endswith(("_s", "_bytes")) and key not in FIXED]
            values = {key: [own[key] for own in columns] for key in figures}
            fits[name] = {key: _fitted(sizes, own) for key, own in values.items() if any(own)}
        return cls(fits)

    def scaled(self, layers: Mapping[str, LayerCosts], known: Size, size: Size) -> dict[str, LayerCosts]:
        """Convert the costs of layers for one micro-batch size to the costs for another size.

        Each time or size is multiplied by the ratio of its fitted values for the two sizes.

        Args:
            layers: the costs for the known size, keyed by layer.
            known: the known size.
            size: the size to return the costs for.

        """
        found = {}
        for name, costs in layers.items():
            fits = self.layers.get(name, {})
            figures = costs.figures()
            for key, value in figures.items():
                if key.endswith(("_s", "_bytes")) and key not in FIXED and value:
                    more = value * _ratio(fits.get(key), known, size)
                    figures[key] = math.ceil(more) if key.endswith("_bytes") else more
            found[name] = LayerCosts.of_figures(figures)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {name: {key: list(factors) for key, factors in fits.items()} for name, fits in self.layers.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SizeFit":
        """Make a fit from the dict that ``to_dict`` returned. Raises ScheduleError for invalid factors."""
        fits: dict[str, dict[str, Factors]] = {}
        for name, own in values.items():
            fits[name] = {}
            for key, factors in own.items():
                if not isinstance(factors, list | tuple) or len(factors) != len(Size(1, 1).terms):
                    raise ScheduleError(
                        f"every fitted cost must have 3 factors; {key} of layer {name!r} has {shown(factors)}; "
                        f"measure the model again"
                    )
                for factor in factors:
                    check_number(factor, f"a factor of {key} of layer {name!r}")
                fits[name][key] = (factors[0], factors[1], factors[2])
        return cls(fits)


def _ratio(factors: Factors | None, known: Size, size: Size) -> float:
    """Return the fitted value for ``size`` divided by the fitted value for ``known``."""
    if factors is None:
        return size.elements / known.elements
    before, after = (_value(factors, one) for one in (known, size))
    return after / before if before else 1.0


def _value(factors: Factors, size: Size) -> float:
    return sum(factor * term for factor, term in zip(factors, size.terms, strict=True))


def _fitted(sizes: Sequence[Size], values: Sequence[float]) -> Factors:
    """Return the non-negative factors that minimise the sum of squared relative errors."""
    heights = np.array(values, float)
    weights = 1 / np.maximum(heights, _TINY * heights.max())
    goal = heights * weights
    columns = np.array([size.terms for size in sizes]) * weights[:, None]
    norms = np.linalg.norm(columns, axis=0)
    columns /= norms
    best = np.zeros(len(norms))
    least = math.inf
    for terms in _CHOICES:
        own, _, rank, _ = np.linalg.lstsq(columns[:, terms], goal, rcond=_COLLINEAR)
        error = float(((columns[:, terms] @ own - goal) ** 2).sum())
        if rank == len(terms) and own.min() >= 0 and error < least - _SAME:
            least = error
            best = np.zeros(len(norms))
            best[terms] = own
    one, linear, square = (best / norms).tolist()
    return one, linear, square


def _rounded(number: int) -> int:
    """Round a whole number to 4 significant bits."""
    last = max(0, number.bit_length() - _BITS)
    return (number + (1 << last >> 1)) >> last << last
