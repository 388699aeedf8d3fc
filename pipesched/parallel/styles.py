"""Splitting a model in place: the layers that the user names get their styles, and keep this rank's blocks.

::

    splits = split_model(model, {"blocks.*.up": "column", "blocks.*.down": "row"}, group)

The modules and Parameters stay the same objects. A module's class becomes a subclass of its class, and the data of a
Parameter become this rank's block.
"""

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pipesched.errors import ArgumentError, InputError
from pipesched.parallel.automatic_styles import automatic_styles
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.divided_regions import watch_whole_weights
from pipesched.parallel.grid_styles import on_grid
from pipesched.parallel.layer_styles import (
    STYLES,
    Attention,
    Block,
    Column,
    DividedVocabulary,
    Heads,
    LayerStyle,
    Row,
    SequencePart,
    SummedWeights,
    Whole,
)
from pipesched.parallel.split_module import is_split, restore
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.parallel.weight_split import GridSplit, Split, SplitWeights, WeightSplit

__all__ = ["divide_losses", "split_model", "styles_of", "unsplit_model"]

_STYLES = (Attention, Block, Column, DividedVocabulary, Heads, Row, SequencePart, SummedWeights, Whole)


def split_model(model: nn.Module, wanted: Any, group: TensorGroup) -> SplitWeights:
    """Divide the layers of a model among the ranks of a tensor group, in place. Nothing is exchanged.

    Args:
        model: the user's model, with whole weights that are equal on all ranks, or on the meta device.
        wanted: (pattern of names) -> style, or "auto". In a pattern, "*" matches one part of a name. A style is a word,
            such as "column", or an object, such as ``Column(sections=3)``.
        group: the tensor group of this process.

    Returns:
        How each divided weight is split.

    Raises:
        InputError: a pattern matches nothing, a layer cannot have its style, or a size cannot be divided evenly.
        ArgumentError: an argument has the wrong type.

    """
    for name, module in model.named_modules():
        if is_split(module):
            raise InputError(
                f"a model must be split once; {name!r} is divided already; make a new model, or call unsplit_model and "
                f"load whole weights first"
            )
    styles = _on_its_grid(styles_of(model, wanted, group.size), model, group)
    splits = _splits(model, styles)
    for name, split in splits.items():
        split.check(model.get_parameter(name).shape, group.size, repr(name))
    try:
        _apply(model, styles, group)
        watch_whole_weights(model, styles, splits, group)
    except InputError:
        unsplit_model(model)
        raise
    divided: set[int] = set()
    for name, split in splits.items():
        parameter = model.get_parameter(name)
        if id(parameter) not in divided:
            divided.add(id(parameter))
            _divide(parameter, split, group)
    divide_losses(model, group)
    return SplitWeights(group, splits)


def _on_its_grid(styles: dict[str, LayerStyle], model: nn.Module, group: TensorGroup) -> dict[str, LayerStyle]:
    """Return the styles for the layout of a tensor group."""
    grid = group.grid
    if not isinstance(grid, AxisGroups):
        return styles
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: on_grid(style, modules.get(name), name, grid) for name, style in styles.items()}


def _apply(model: nn.Module, styles: Mapping[str, LayerStyle], group: TensorGroup) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    applied: set[nn.Module] = set()
    for name, style in styles.items():
        module = modules.get(name)
        if module is not None and module not in applied:
            applied.add(module)
            style.apply(module, name, group)


def unsplit_model(model: nn.Module) -> None:
    """Give the modules of a split model their classes and attributes back. The weights stay as they are."""
    for module in model.modules():
        restore(module)


def divide_losses(module: Any, group: TensorGroup) -> None:
    """Let each `VocabularyCrossEntropy` in a module take logits that the ranks of ``group`` divide.

    Does nothing if ``module`` is no module, such as a loss function.
    """
    if isinstance(module, nn.Module):
        for part in module.modules():
            if isinstance(part, VocabularyCrossEntropy):
                part.divide(group)


def styles_of(model: nn.Module, wanted: Any, size: int) -> dict[str, LayerStyle]:
    """Return the style of each module and parameter that is to be divided among ``size`` ranks, by its name.

    Raises InputError or ArgumentError as ``split_model`` does.
    """
    if wanted == "auto":
        return automatic_styles(model, size)
    if not isinstance(wanted, Mapping):
        raise ArgumentError(
            f"tensor_parallel= must be 'auto' or a dict of names and styles; got a {type(wanted).__name__}; pass, for "
            f"example, {{'blocks.*.up': 'column', 'blocks.*.down': 'row'}}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    styles: dict[str, LayerStyle] = {}
    chosen: dict[str, str] = {}
    for pattern, word in wanted.items():
        matched = [*_matching(pattern, names)]
        if not matched:
            raise _unmatched(pattern, names)
        for name in matched:
            if name in styles:
                raise InputError(
                    f"tensor_parallel= must give each layer one style; {name!r} matches {chosen[name]!r} and "
                    f"{pattern!r}; make the patterns narrower"
                )
            styles[name] = _style(word, modules.get(name), name)
            chosen[name] = pattern
    return styles


def _matching(pattern: Any, names: list[str]) -> Iterator[str]:
    if not isinstance(pattern, str):
        raise ArgumentError(
            f"the keys of tensor_parallel= must be names or patterns of layers; got {pattern!r}; pass strings such as "
            f"'blocks.*.up'"
        )
    parts = pattern.split(".")
    for name in names:
        own = name.split(".")
        if (name or not pattern) and len(own) == len(parts) and all(map(fnmatchcase, own, parts)):
            yield name


def _unmatched(pattern: str, names: list[str]) -> InputError:
    close = difflib.get_close_matches(pattern, [name for name in names if name], n=3, cutoff=0.4)
    near = f"; similar are {', '.join(map(repr, close))}" if close else ""
    return InputError(
        f"each pattern of tensor_parallel= must match a layer or a parameter; {pattern!r} matches none of "
        f"{len(names)} names{near}; correct the pattern ('*' stands for one part of a name)"
    )


def _style(word: Any, module: nn.Module | None, name: str) -> LayerStyle:
    if isinstance(word, _STYLES):
        return word
    if isinstance(word, str) and word in STYLES:
        return STYLES[word](module)
    raise InputError(
        f"unknown style of tensor_parallel=; {name!r} got {word!r}; choose one of: {', '.join(STYLES)}, or an object "
        f"such as Column(sections=3)"
    )


def _splits(model: nn.Module, styles: Mapping[str, LayerStyle]) -> dict[str, Split]:
    """Return the split of each parameter, under all its names. Parameters that layers share must agree."""
    modules = dict(model.named_modules(remove_duplicate=False))
    every = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, tuple[str, Split | None]] = {}
    for name, style in styles.items():
        module = modules.get(name)
        prefix = f"{name}." if name else ""
        if module is None:
            _agree(found, name, every[name], _of_parameter(every[name], style, name))
            continue
        own = style.splits(module, name)
        parameters = [each for each, _ in module.named_parameters(remove_duplicate=False)] if own else []
        for each in parameters:
            _agree(found, f"{prefix}{each}", every[f"{prefix}{each}"], own.get(each))
    _check_ties(every, modules, styles, found)
    return {name: split for name, parameter in every.items() if (split := found.get(id(parameter), ("", None))[1])}


def _of_parameter(parameter: nn.Parameter, style: LayerStyle, name: str) -> WeightSplit | None:
    if isinstance(style, Whole):
        return None
    if style != Heads():
        raise InputError(
            f"a parameter must have the style 'heads', which divides its last dimension, or 'whole'; {name!r} got "
            f"{style}; give other styles to the module of the parameter"
        )
    return WeightSplit(dim=parameter.dim() - 1)


def _agree(found: dict[int, tuple[str, Split | None]], name: str, parameter: nn.Parameter, split: Split | None) -> None:
    other, before = found.setdefault(id(parameter), (name, split))
    if before != split and (isinstance(split, GridSplit) or isinstance(before, GridSplit)):
        raise InputError(
            f"layers that share a weight must divide it in the same way, but in two or three dimensions, an embedding "
            f"and a head divide it differently; {other!r} and {name!r} are one weight; give each layer a weight of its "
            f"own, or pass tensor_layout='1d'"
        )
    if before != split:
        raise InputError(
            f"layers that share a weight must divide it in the same way; {other!r} and {name!r} are one weight, "
            f"divided as {before} and {split}; give the embedding the style 'vocabulary' and the head "
            f"'column-gathered'"
        )


def _check_ties(
    every: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, LayerStyle],
    found: Mapping[int, tuple[str, Split | None]],
) -> None:
    """Raise InputError if a layer without a style shares a divided weight, which it needs whole."""
    styled = [name for name in styles if name in modules]
    for name, parameter in every.items():
        other, split = found.get(id(parameter), ("", None))
        owner = name.rpartition(".")[0]
        covered = name in styles or any(owner == each or owner.startswith(f"{each}.") or not each for each in styled)
        unused = not isinstance(modules[owner], nn.Linear | nn.Embedding)  # such as a bias that its head shares
        if split is not None and not covered and not unused:
            raise InputError(
                f"layers that share a weight must divide it in the same way; {name!r} is the weight {other!r}, which "
                f"is divided, but {owner!r} has no style; give an embedding the style 'vocabulary', and a head "
                f"'column-gathered'"
            )


@torch.no_grad()
def _divide(parameter: nn.Parameter, split: Split, group: TensorGroup) -> None:
    """Let a Parameter hold this rank's block, in memory of its own, so that the whole weight is freed."""
    block = split.own(parameter.data, group.rank, group.size).clone(memory_format=torch.contiguous_format)
    grad = parameter.grad
    parameter.grad = None
    other = torch.float32 if parameter.dtype is torch.float16 else torch.float16
    parameter.data = block.new_empty(0, dtype=other)  # lets autograd forget the shape, which a live graph remembers
    parameter.data = block
    if grad is not None:
        parameter.grad = split.own(grad, group.rank, group.size).clone(memory_format=torch.contiguous_format)
