"""Tensor layout: which block of X, W and Y each rank of a tensor group holds, in one to three dimensions.

A linear layer computes Y = X W. X is M x K, W is K x N, and Y is M x N; M counts the rows of all sequences together.

====== ============== ==================================================================================================
kind   ranks          source
====== ============== ==================================================================================================
1d     P              Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM)
2d     q x q          Xu et al. 2021, arXiv:2104.05343 (Optimus); SUMMA: van de Geijn and Watts 1997
2.5d   d x q x q      Wang et al. 2021, arXiv:2105.14500 (Tesseract)
3d     l x l x l      Bian et al. 2021, arXiv:2105.14450
====== ============== ==================================================================================================

Linear layers form pairs, such as h -> 4h -> h. The first of a pair turns activations between layers into hidden units,
the second turns them back. So residual sums need no exchange. `TensorLayout.linear` describes both. The layers, the
checkpoints, the counts, the costs and the pictures all read this description.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pipesched.checks import is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import read_fields

__all__ = ["BlockAxes", "LayerExchange", "LayoutKind", "LinearBlocks", "TensorLayout"]

#: How the ranks of a tensor group divide matrices.
LayoutKind = Literal["1d", "2d", "2.5d", "3d"]

#: An axis of the ranks of a tensor group: "depth", "row" or "column".
Axis = str

_AXES: dict[str, tuple[Axis, ...]] = {
    "1d": ("column",),
    "2d": ("row", "column"),
    "2.5d": ("depth", "row", "column"),
    "3d": ("depth", "row", "column"),
}


@dataclass(frozen=True)
class BlockAxes:
    """The axes of the ranks that divide the rows and the columns of a matrix.

    Ranks that differ only along other axes hold the same block. If several axes divide a dimension, the first divides
    it into the largest parts.
    """

    rows: tuple[Axis, ...] = ()
    columns: tuple[Axis, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinearBlocks:
    """The blocks of X, W and Y of a linear layer, and the axes along which the ranks exchange them.

    A forward gathers X and W, multiplies, and adds and scatters Y. The input gradient gathers Y's gradient and W, and
    adds and scatters X's gradient. The weight gradient gathers X and Y's gradient, and adds and scatters W's gradient.

    Attributes:
        x: the blocks of X.
        weight: the blocks of W, as a matrix of inputs x outputs.
        y: the blocks of Y.
        gathered_x: the axis along which X is gathered; None if it is not.
        gathered_weight: the axis along which W is gathered, by its rows; None if it is not.
        scattered_y: the axis along which Y is added and scattered, by its rows; None if it is not.
        panels: whether X (by its columns) and W are broadcast panel by panel, as in SUMMA, so that no rank ever holds
            more than one panel of another rank. Default: False, they are gathered.
        copied_x: the axis along which ranks have the same X. They add up the gradients of X. Default: None.
        summed_y: the axis along which ranks add up parts of Y, of which each gets the whole. Default: None.
        summed_weight: the axis along which ranks have the same W, but different rows of X. They add up the gradients of
            W. Default: None.

    """

    x: BlockAxes
    weight: BlockAxes
    y: BlockAxes
    gathered_x: Axis | None = None
    gathered_weight: Axis | None = None
    scattered_y: Axis | None = None
    panels: bool = False
    copied_x: Axis | None = None
    summed_y: Axis | None = None
    summed_weight: Axis | None = None


@dataclass(frozen=True, kw_only=True)
class LayerExchange:
    """A collective of a layer.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "broadcast" or "reduce" (to one rank).
        axes: the axes of the ranks that take part.
        ranks: the number of these ranks.
        elements: the size of the tensor: of the whole tensor for an all-reduce, an all-gather and a reduce-scatter, and
            of the block for a broadcast and a reduce.
        times: the number of repetitions. Default: 1.

    """

    kind: str
    axes: tuple[Axis, ...]
    ranks: int
    elements: float
    times: int = 1

    @property
    def received(self) -> float:
        """The number of elements that a rank receives. Broadcasts and reductions have each rank as their root once."""
        times = 2 * self.times if self.kind == "all-reduce" else self.times
        return times * self.elements * (self.ranks - 1) / self.ranks

    @property
    def rounds(self) -> int:
        """The number of messages that wait for one another."""
        each = {
            "all-gather": self.ranks - 1,
            "reduce-scatter": 1,
            "all-reduce": self.ranks,
            "broadcast": (self.ranks - 1).bit_length(),
            "reduce": 1,
        }
        return each[self.kind] * self.times


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """How the ranks of a tensor group divide matrices.

    ::

        TensorLayout.of("3d", 8).linear(second=False).weight  # BlockAxes(rows=("column", "depth"), columns=("row",))

    Attributes:
        kind: "1d", "2d", "2.5d" or "3d".
        shape: the number of ranks along each axis: (P,), (q, q), (d, q, q) or (l, l, l). The last axis changes first
            between neighbouring ranks.

    Raises:
        ScheduleError: the shape does not fit the kind.

    """

    kind: LayoutKind
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayoutKind):
            raise ScheduleError(
                f"the kind of a tensor layout must be one of {', '.join(map(repr, get_args(LayoutKind)))}; got "
                f"{shown(self.kind)}; pass one of them"
            )
        shape = self.shape
        fits = isinstance(shape, Sequence) and len(shape) == len(_AXES[self.kind]) and all(map(is_count, shape))
        equal = shape[1:] if self.kind == "2.5d" else shape
        if not fits or len({*equal}) > 1:
            form = {"1d": "(P,)", "2d": "(q, q)", "2.5d": "(d, q, q)", "3d": "(l, l, l)"}[self.kind]
            raise ScheduleError(
                f"the ranks of a {self.kind} layout must have the shape {form}; got {shown(shape)}; pass such a shape"
            )
        object.__setattr__(self, "shape", tuple(map(int, shape)))

    @classmethod
    def of(cls, kind: LayoutKind, size: int) -> "TensorLayout":
        """Return the layout of a kind for a number of ranks. With "2.5d", d is the largest possible, at most q.

        Raises ScheduleError if that many ranks do not form a square, or a cube, or d squares.
        """
        if kind not in get_args(LayoutKind) or not is_count(size):
            return cls(kind=kind, shape=(size,))  # raises the error of a wrong kind or size
        found = next((layout for layout in cls.every(size) if layout.kind == kind), None)
        if found is None:
            form = {"2d": "q x q, such as 4 or 9", "2.5d": "d x q x q with 2 <= d <= q, such as 8 or 32"}
            raise ScheduleError(
                f"the number of ranks of a {kind} layout must be {form.get(kind, 'l x l x l, such as 8 or 27')}; got "
                f"{size}; choose such a number, or another kind"
            )
        return found

    @classmethod
    def every(cls, size: int) -> "list[TensorLayout]":
        """Return all layouts for a number of ranks, of each kind those with the largest depth first."""
        layouts = [cls(kind="1d", shape=(size,))]
        for side in range(2, math.isqrt(size) + 1):
            depth, rest = divmod(size, side**2)
            if not rest and depth == 1:
                layouts.append(cls(kind="2d", shape=(side, side)))
            elif not rest and depth <= side:
                layouts.append(cls(kind="2.5d", shape=(depth, side, side)))
            if not rest and depth == side:
                layouts.append(cls(kind="3d", shape=(side, side, side)))
        return layouts

    def __str__(self) -> str:
        return f"{self.kind} ({' x '.join(map(str, self.shape))})"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the ranks, in the order of ``shape``."""
        return _AXES[self.kind]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    def length(self, axes: Sequence[Axis]) -> int:
        """Return the number of parts into which axes divide a dimension."""
        return math.prod(self.shape[self.axes.index(axis)] for axis in axes)

    def place(self, rank: int, axes: Sequence[Axis]) -> int:
        """Return the number of the part that a rank holds of a dimension that axes divide."""
        places = self.coordinates(rank)
        part = 0
        for axis in axes:
            part = part * self.length([axis]) + places[axis]
        return part

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the place of a rank along each axis."""
        places: dict[Axis, int] = {}
        for axis, length in zip(reversed(self.axes), reversed(self.shape), strict=True):
            rank, places[axis] = divmod(rank, length)
        return places

    def peers(self, rank: int, axes: Sequence[Axis]) -> list[int]:
        """Return the ranks that differ from a rank only along these axes, in ascending order."""
        own = self.coordinates(rank)
        fixed = [axis for axis in self.axes if axis not in axes]
        return [
            other for other in range(self.size) if all(self.coordinates(other)[axis] == own[axis] for axis in fixed)
        ]

    @property
    def outer(self) -> BlockAxes:
        """The blocks of activations between pairs of linear layers."""
        return self.linear(second=False).x

    def linear(self, *, second: bool) -> LinearBlocks:
        """Return the blocks of the first or the second linear layer of a pair."""
        if self.kind == "1d":
            if second:
                by_column, whole = BlockAxes(columns=("column",)), BlockAxes()
                return LinearBlocks(x=by_column, weight=BlockAxes(rows=("column",)), y=whole, summed_y="column")
            by_column = BlockAxes(columns=("column",))
            return LinearBlocks(x=BlockAxes(), weight=by_column, y=by_column, copied_x="column")
        if self.kind == "3d":
            inner, outer = ("row", "column") if not second else ("column", "row")
            return LinearBlocks(
                x=BlockAxes(("depth", inner), (outer,)),
                weight=BlockAxes((outer, "depth"), (inner,)),
                y=BlockAxes(("depth", outer), (inner,)),
                gathered_x=inner,
                gathered_weight="depth",
                scattered_y=outer,
            )
        deep = self.kind == "2.5d"
        block = BlockAxes(("depth", "row") if deep else ("row",), ("column",))
        return LinearBlocks(
            x=block,
            weight=BlockAxes(("row",), ("column",)),
            y=block,
            gathered_x="column",
            gathered_weight="row",
            panels=True,
            summed_weight="depth" if deep else None,
        )

    def exchanges(self, rows: float, inputs: float, outputs: float, *, second: bool) -> dict[str, list[LayerExchange]]:
        """Return the collectives of a linear layer without bias in its actions: "F", "I" and "W".

        For products of M x K and K x N, a rank receives these elements in a forward:

        ====== ======================================= ============================================
        kind   forward                                 other actions
        ====== ======================================= ============================================
        1d     0; second: 2 (P-1)/P MN                 I: 2 (P-1)/P MK; second: 0
        2d     (q-1)(MK + KN)/q^2                      I: (q-1)(MK + KN)/q^2 and W: the same
        2.5d   (q-1)(MK/d + KN)/q^2                    I: as F; W: also 2 (d-1)/d KN/q^2
        3d     (l-1)(MK + KN + MN)/l^3                 I and W: as F
        ====== ======================================= ============================================

        In 2d and 2.5d, I and W exchange W and X, and the gradients of X and W.

        Args:
            rows: M, of all ranks together.
            inputs: K.
            outputs: N.
            second: whether the layer is the second of a pair.

        """
        return self.exchanges_of(rows * inputs, inputs * outputs, rows * outputs, second=second)

    def exchanges_of(self, x: float, weight: float, y: float, *, second: bool) -> dict[str, list[LayerExchange]]:
        """Return the collectives of a linear layer, as `exchanges` does.

        Args:
            x: the size of X, such as MK elements. The exchanges have the unit of these sizes.
            weight: the size of W.
            y: the size of Y.
            second: whether the layer is the second of a pair.

        """
        blocks = self.linear(second=second)
        if blocks.panels:
            return self._panels(blocks, x, weight)
        found: dict[str, list[LayerExchange]] = {"F": [], "I": [], "W": []}
        if blocks.summed_y:
            found["F"].append(self._exchange("all-reduce", blocks.summed_y, y))
        if blocks.copied_x:
            found["I"].append(self._exchange("all-reduce", blocks.copied_x, x))
        tensors = ((blocks.gathered_x, x), (blocks.gathered_weight, weight), (blocks.scattered_y, y))
        for action, kept in (("F", 2), ("I", 0), ("W", 1)):
            for place, (axis, size) in enumerate(tensors):
                if axis is not None:
                    kind = "reduce-scatter" if place == kept else "all-gather"
                    found[action].append(self._exchange(kind, axis, size * self.length([axis]) / self.size))
        return found

    def _panels(self, blocks: LinearBlocks, x: float, weight: float) -> dict[str, list[LayerExchange]]:
        """Return the collectives of SUMMA. Each of q steps broadcasts a panel of X or W, and may reduce another."""
        assert blocks.gathered_x is not None
        assert blocks.gathered_weight is not None
        own_x, own_weight = x / self.size, weight / self.length(("row", "column"))
        steps = self.length([blocks.gathered_x])
        of_x, of_weight = (blocks.gathered_x, own_x), (blocks.gathered_weight, own_weight)
        exchange = self._exchange
        found = {
            "F": [exchange("broadcast", *of_x, steps), exchange("broadcast", *of_weight, steps)],
            "I": [exchange("broadcast", *of_weight, steps), exchange("reduce", *of_x, steps)],
            "W": [exchange("broadcast", *of_x, steps), exchange("reduce", *of_weight, steps)],
        }
        if blocks.summed_weight:
            found["W"].append(exchange("all-reduce", blocks.summed_weight, own_weight))
        return found

    def _exchange(self, kind: str, axis: Axis, elements: float, times: int = 1) -> LayerExchange:
        return LayerExchange(kind=kind, axes=(axis,), ranks=self.length([axis]), elements=elements, times=times)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> "TensorLayout":
        """Make the layout from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        return read_fields(cls, values, "a tensor layout must have")
