"""Divided regions: the parts of a model in which the ranks of a tensor group hold blocks of the activations."""

from collections.abc import Container, Iterator, Mapping

from torch import nn

from pipesched.errors import InputError
from pipesched.parallel.grid_styles import GridStyle
from pipesched.parallel.layer_styles import (
    Attention,
    Block,
    Column,
    DividedVocabulary,
    LayerStyle,
    Row,
    SequencePart,
    SummedWeights,
    Whole,
)
from pipesched.parallel.norms import WholeWeights
from pipesched.parallel.split_module import become, is_split
from pipesched.parallel.tensor_group import TensorGroup

__all__ = ["divided_regions", "watch_whole_weights"]


def divided_regions(model: nn.Module, styles: Mapping[str, LayerStyle]) -> list[str]:
    """Return the names of the smallest modules that contain all layers from one with columns to the next with rows.

    Layers run in the order in which the model registers them. Layers with columns after which no rows come, such as a
    head, are no region.
    """
    regions = dict.fromkeys(name for name, style in styles.items() if isinstance(style, Attention | Block))
    begun: str | None = None
    for name, _ in model.named_modules(remove_duplicate=False):
        style = styles.get(name)
        if isinstance(style, Column) and not style.gathered:
            begun = begun or name
        elif isinstance(style, Row) and begun is not None:
            regions[_common(begun, name)] = None
            begun = None
    return [*regions]


def _common(one: str, other: str) -> str:
    """Return the name of the smallest module that contains two modules."""
    shared = []
    for first, second in zip(one.split("."), other.split("."), strict=False):
        if first != second:
            break
        shared.append(first)
    return ".".join(shared)


def watch_whole_weights(
    model: nn.Module, styles: Mapping[str, LayerStyle], divided: Container[str], group: TensorGroup
) -> None:
    """Let each layer with whole weights and without a style raise an error if it runs on divided activations.

    Raises InputError if a module that contains divided layers has a parameter of its own without a style, because
    nothing shows whether the gradient of this parameter is a part of a sum. ``divided`` has the names of the
    parameters that are divided.
    """
    by_sequence = any(isinstance(style, SequencePart) or getattr(style, "sequence", False) for style in styles.values())
    regions = [""] if by_sequence or group.grid is not None else divided_regions(model, styles)
    for name, module in _within(model, regions):
        every = [each for each, _ in module.named_parameters(prefix=name, recurse=False)]
        own = [each for each in every if each not in styles and each not in divided]
        if not own or isinstance(styles.get(name), _KNOW_THEIR_WEIGHTS):
            continue
        if any(is_split(part) for part in module.modules() if part is not module):
            raise InputError(
                f"a parameter of a module that contains divided layers must have a style, because its gradient may be "
                f"a part of a sum; {own[0]!r} has none; in tensor_parallel=, give it the style 'heads' if its last "
                f"dimension is heads, or 'whole' if it is used with whole activations"
            )
        if not is_split(module):
            become(module, WholeWeights, group, {}, name=name)


_KNOW_THEIR_WEIGHTS = (GridStyle, Attention, Column, DividedVocabulary, Row, SequencePart, SummedWeights, Whole)


def _within(model: nn.Module, regions: list[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if any(not region or name == region or name.startswith(f"{region}.") for region in regions):
            yield name, module
