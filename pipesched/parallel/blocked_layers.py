"""Blocked layers: which blocks of its input, weight and output each rank of a tensor group holds, for pictures.

The blocks of weights are those that the `WeightSplit` of each weight gives to a rank. Those of activations follow from
a forward of the split model on the meta device, in which the layers set the layout and exchange what they exchange.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipesched.parallel.layer_styles import linear_kind
from pipesched.parallel.styles import split_model, styles_of
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.parallel.weight_split import Split
from pipesched.simulation.tensor_layout import Axis, BlockAxes, TensorLayout
from pipesched.units import quote_bytes
from pipesched.viz.tensor_blocks import BlockedLayer, BlockedTensor, Rectangle

__all__ = ["blocked_layers", "layout_blocks"]

_Run = tuple[int, int]  # (first, end)


class _Call(NamedTuple):
    """The input and the output of a layer on one rank, in one call."""

    input_shape: Sequence[int]
    input_layout: ActivationLayout
    output_layout: ActivationLayout
    exchanged: str


def blocked_layers(model: nn.Module, wanted: Any, size: int, *inputs: Tensor) -> list[BlockedLayer]:
    """Return the blocks of each linear layer that ``wanted`` divides among ``size`` ranks. The model stays unchanged.

    Args:
        model: the whole model.
        wanted: the styles of its layers, as in ``Distributed(tensor_parallel=...)``.
        size: the number of ranks.
        *inputs: the inputs of a forward, of which the shapes matter.

    Raises:
        InputError: the layers cannot have these styles.

    """
    styles = styles_of(model, wanted, size)
    twin = copy.deepcopy(model).to("meta")
    group = TensorGroup.counting(size)
    splits = split_model(twin, wanted, group)
    names = [name for name, module in model.named_modules() if linear_kind(module) and f"{name}.weight" in splits]
    calls = _calls(twin, names, group, [x.to("meta") for x in inputs])
    return [
        _layer(name, str(styles.get(name, "")), model.get_submodule(name), splits[f"{name}.weight"], group, call)
        for name, call in calls.items()
    ]


def layout_blocks(layout: TensorLayout, rows: int, width: int, hidden: int) -> list[BlockedLayer]:
    """Return the blocks of a pair of linear layers, width -> hidden -> width, in a layout.

    Args:
        layout: the layout, such as ``TensorLayout.of("3d", 8)``.
        rows: the rows of all sequences together.
        width: the inputs of the first layer, and the outputs of the second.
        hidden: the outputs of the first layer.

    """
    return [
        _of_layout(layout, second, (rows, *sizes)) for second, sizes in enumerate([(width, hidden), (hidden, width)])
    ]


def _of_layout(layout: TensorLayout, second: int, sizes: tuple[int, int, int]) -> BlockedLayer:
    rows, inputs, outputs = sizes
    blocks = layout.linear(second=bool(second))
    exchanges = layout.exchanges(*sizes, second=bool(second))["F"]
    each = ", ".join(f"{one.received:,.0f} by {one.kind} ({one.axes[0]})" for one in exchanges)
    text = f"a rank receives {each}" if exchanges else ""
    tensors = (
        _blocked("X", (rows, inputs), blocks.x, layout),
        _blocked("W", (inputs, outputs), blocks.weight, layout),
        _blocked("Y", (rows, outputs), blocks.y, layout),
    )
    return BlockedLayer("second" if second else "first", str(layout), tensors, text)


def _blocked(name: str, shape: tuple[int, int], blocks: BlockAxes, layout: TensorLayout) -> BlockedTensor:
    def run(rank: int, length: int, axes: Sequence[Axis]) -> _Run:
        place, parts = layout.place(rank, axes), layout.length(axes)
        return place * length // parts, (place + 1) * length // parts

    held = tuple(
        ((*run(rank, shape[0], blocks.rows), *run(rank, shape[1], blocks.columns)),) for rank in range(layout.size)
    )
    return BlockedTensor(name, shape, held)


def _calls(model: nn.Module, names: Sequence[str], group: TensorGroup, inputs: Sequence[Tensor]) -> dict[str, _Call]:
    """Run the model, and return the first call of each layer."""
    found: dict[str, _Call] = {}
    open_calls: dict[str, tuple[Sequence[int], ActivationLayout]] = {}

    def before(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        open_calls[name] = args[0].shape, group.layout
        group.counter.clear()

    def after(name: str, *_: Any) -> None:
        sent = {kind: traffic.sent_bytes for (_, kind), traffic in group.counter.traffic.items()}
        text = ", ".join(f"{kind}, {quote_bytes(number)} sent" for kind, number in sent.items())
        found.setdefault(name, _Call(*open_calls[name], group.layout, text))

    handles = [model.get_submodule(name).register_forward_pre_hook(partial(before, name)) for name in names]
    handles += [model.get_submodule(name).register_forward_hook(partial(after, name)) for name in names]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _layer(name: str, style: str, module: nn.Module, split: Split, group: TensorGroup, call: _Call) -> BlockedLayer:
    weight: Any = module.weight
    rows, columns = weight.shape
    numbered = torch.arange(rows * columns).view(rows, columns)
    held = [split.own(numbered, rank, group.size) for rank in range(group.size)]
    of_rows = [_runs(block // columns) for block in held]
    of_columns = [_runs(block % columns) for block in held]
    if linear_kind(module) == "linear":  # (outputs, inputs): the picture shows (inputs, outputs)
        rows, columns, of_rows, of_columns = columns, rows, of_columns, of_rows
    positions = call.input_shape[group.sequence_dim] if len(call.input_shape) > group.sequence_dim else 1
    if call.input_layout is ActivationLayout.SEQUENCE:
        positions *= group.size
    activations = partial(_activations, positions, group.size)
    tensors = (
        activations("X", rows, call.input_layout, of_rows),
        BlockedTensor("W", (rows, columns), tuple(map(_rectangles, of_rows, of_columns))),
        activations("Y", columns, call.output_layout, of_columns),
    )
    return BlockedLayer(name, style, tensors, call.exchanged)


def _activations(
    positions: int, size: int, name: str, width: int, layout: ActivationLayout, divided: Sequence[Sequence[_Run]]
) -> BlockedTensor:
    """Return the blocks of the activations of one sequence. ``divided`` has the columns of each rank if divided."""
    blocks: Mapping[ActivationLayout, Callable[[int], tuple[Sequence[_Run], Sequence[_Run]]]] = {
        ActivationLayout.WHOLE: lambda _: ([(0, positions)], [(0, width)]),
        ActivationLayout.DIVIDED: lambda rank: ([(0, positions)], divided[rank]),
        ActivationLayout.SEQUENCE: lambda rank: (
            [(rank * positions // size, (rank + 1) * positions // size)],
            [(0, width)],
        ),
    }
    held = tuple(_rectangles(*blocks[layout](rank)) for rank in range(size))
    return BlockedTensor(name, (positions, width), held)


def _rectangles(rows: Sequence[_Run], columns: Sequence[_Run]) -> tuple[Rectangle, ...]:
    return tuple((*row, *column) for row in rows for column in columns)


def _runs(numbers: Tensor) -> list[_Run]:
    """Return the runs of successive numbers."""
    runs: list[_Run] = []
    for number in torch.unique(numbers).tolist():
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
