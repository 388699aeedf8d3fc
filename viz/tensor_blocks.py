"""Tensor blocks: pictures of the blocks of inputs, weights and outputs that each rank of a tensor group holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipesched.checks import as_list
from pipesched.errors import ArgumentError
from pipesched.viz.colours import GREY, INK, stage_colour, towards_white

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BlockedLayer", "BlockedTensor", "plot_tensor_blocks"]

#: (first row, end of the rows, first column, end of the columns)
Rectangle = tuple[int, int, int, int]

_LONGEST = 1.5  # inches, the side of the longest matrix
_SHORTEST = 0.32  # inches, so that a label fits
_GAP = 0.55  # inches between two matrices
_HEAD = 1.9  # inches for the name of a layer
_ROOM = 0.75  # inches above a layer's matrices, for what the layer exchanges
_LIGHT = 0.35  # fraction of white in a block's colour


@dataclass(frozen=True)
class BlockedTensor:
    """A matrix of which each rank holds some rectangles.

    Attributes:
        name: "X", "W" or "Y".
        shape: the numbers of rows and columns of the whole matrix.
        held: for each rank, the rectangles that it holds.

    """

    name: str
    shape: tuple[int, int]
    held: tuple[tuple[Rectangle, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds the whole matrix."""
        return all(rectangles == ((0, self.shape[0], 0, self.shape[1]),) for rectangles in self.held)


@dataclass(frozen=True)
class BlockedLayer:
    """A layer of which each rank holds blocks: Y = X W.

    Attributes:
        name: the name of the layer.
        style: the style of the layer, as text.
        tensors: the input, the weight and the output.
        exchanged: the collectives of a forward, as text; "" if there are none.

    """

    name: str
    style: str
    tensors: tuple[BlockedTensor, ...]
    exchanged: str


def plot_tensor_blocks(layers: Sequence[BlockedLayer]) -> "Figure":
    """Draw which rank of a tensor group holds which block of the input X, the weight W and the output Y of each layer.

    A block has the colour of its rank, or of the first of the ranks that hold it. A matrix that all ranks hold is grey.

        pipesched.viz.plot_tensor_blocks(blocked_layers(model, styles, 4, x)).savefig("blocks.png")

    Args:
        layers: the layers, from `pipesched.parallel.blocked_layers.blocked_layers`.

    Raises:
        ArgumentError: if ``layers`` is no list of blocked layers, or is empty.

    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    remedy = "pass the result of blocked_layers"
    drawn = as_list(layers, "layers must be a list of blocked layers", remedy)
    if not drawn or not all(isinstance(layer, BlockedLayer) for layer in drawn):
        raise ArgumentError(f"layers must be a list of blocked layers; got {drawn!r}; {remedy}")
    per_inch = max(max(tensor.shape) for layer in drawn for tensor in layer.tensors) / _LONGEST
    heights = [max(_inches(tensor, per_inch)[0] for tensor in layer.tensors) + _ROOM for layer in drawn]
    widths = [sum(_inches(tensor, per_inch)[1] + _GAP for tensor in layer.tensors) + _HEAD for layer in drawn]
    figure = Figure(figsize=(max(widths) + 0.2, sum(heights) + 0.55), dpi=150)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, max(widths) + 0.2)
    ax.set_ylim(sum(heights) + 0.55, 0)
    ax.axis("off")
    top = 0.1
    for layer, height in zip(drawn, heights, strict=True):
        _draw_layer(ax, layer, top, per_inch)
        top += height
    num_ranks = len(drawn[0].tensors[0].held)
    entries = [Patch(facecolor=_colour(rank), label=f"rank {rank}") for rank in range(num_ranks)]
    entries.append(Patch(facecolor=towards_white(GREY, 0.7), label="all ranks"))
    ax.legend(handles=entries, loc="lower left", ncol=len(entries), frameon=False, fontsize=8, handlelength=1.2)
    return figure


def _draw_layer(ax: "Axes", layer: BlockedLayer, top: float, per_inch: float) -> None:
    left = _HEAD
    middle = top + 0.4 + max(_inches(tensor, per_inch)[0] for tensor in layer.tensors) / 2
    style = layer.style.replace(", ", ",\n")
    ax.text(0.1, middle, f"{layer.name}\n{style}", fontsize=8, color=INK, va="center")
    if layer.exchanged:
        ax.text(left, top + 0.12, f"forward: {layer.exchanged}", fontsize=7, color=INK, va="center")
    signs = ["", "·", "="]
    for sign, tensor in zip(signs, layer.tensors, strict=False):
        height, width = _inches(tensor, per_inch)
        if sign:
            ax.text(left - _GAP / 2, middle, sign, fontsize=13, color=INK, ha="center", va="center")
        _draw_tensor(ax, tensor, (left, middle - height / 2), (height, width))
        left += width + _GAP


def _draw_tensor(ax: "Axes", tensor: BlockedTensor, corner: tuple[float, float], size: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle as Box

    left, top = corner
    height, width = size
    rows, columns = tensor.shape
    if tensor.is_whole:
        ax.add_patch(Box(corner, width, height, fc=towards_white(GREY, 0.7), ec="white", linewidth=0.8))
    else:
        for (first, end, start, stop), ranks in _holders(tensor).items():
            place = left + start / columns * width, top + first / rows * height
            wide, high = (stop - start) / columns * width, (end - first) / rows * height
            ax.add_patch(Box(place, wide, high, fc=_colour(ranks[0]), ec="white", linewidth=0.8))
            label = ", ".join(map(str, ranks))
            if min(wide / len(label), high) > 0.05:
                middle = place[0] + wide / 2, place[1] + high / 2
                ax.text(*middle, label, fontsize=6, color=INK, ha="center", va="center")
    ax.add_patch(Box(corner, width, height, fc="none", ec=INK, linewidth=0.8))
    label = f"{tensor.name} {rows} x {columns}"
    ax.text(left + width / 2, top - 0.04, label, fontsize=7, color=INK, ha="center", va="bottom")


def _holders(tensor: BlockedTensor) -> dict[Rectangle, list[int]]:
    """Return the ranks that hold each rectangle."""
    holders: dict[Rectangle, list[int]] = {}
    for rank, rectangles in enumerate(tensor.held):
        for rectangle in rectangles:
            holders.setdefault(rectangle, []).append(rank)
    return holders


def _inches(tensor: BlockedTensor, per_inch: float) -> tuple[float, float]:
    rows, columns = tensor.shape
    return max(_SHORTEST, rows / per_inch), max(_SHORTEST, columns / per_inch)


def _colour(rank: int) -> str:
    return towards_white(stage_colour(rank), _LIGHT if rank < 6 else _LIGHT + 0.3)
