"""Grid styles: how the ranks of a grid, in two or three dimensions, divide one module of a model.

`on_grid` turns the styles of layers that are split in one dimension into these. So one dict of names and styles serves
layouts of any dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipesched.errors import InputError
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.grid_layers import (
    BlockedEmbedding,
    BlockedHeads,
    BlockedLinear,
    BlockedNorm,
    BlockedPositions,
    DividesBlocks,
    JoinsBlocks,
)
from pipesched.parallel.layer_styles import (
    Attention,
    Block,
    Column,
    DividedVocabulary,
    Edge,
    Heads,
    LayerStyle,
    Norm,
    Row,
    SummedWeights,
    apply_inside,
    check_embedding,
    check_linear,
    plain_attention,
    sections_of,
    splits_inside,
)
from pipesched.parallel.split_module import become
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.parallel.weight_split import GridSplit, Split
from pipesched.simulation.tensor_layout import Axis, TensorLayout

__all__ = ["GridStyle", "on_grid"]


@dataclass(frozen=True)
class GridStyle(ABC):
    """How the ranks of a grid divide a module.

    Attributes:
        layout: the layout of the grid.

    """

    layout: TensorLayout

    @abstractmethod
    def splits(self, module: nn.Module, name: str) -> Mapping[str, Split]:
        """Return how each divided parameter is split, by its name in the module. Raises InputError for a wrong kind."""

    @abstractmethod
    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        """Give a module, whose weights have been divided, the forward and the attributes of this style."""

    def _split(self, *dims: tuple[Axis, ...], sections: tuple[int, ...] = ()) -> GridSplit:
        return GridSplit(layout=self.layout, dims=dims, sections=sections)


@dataclass(frozen=True)
class GridLinear(GridStyle):
    """Divides a linear layer: the first or the second of a pair.

    Attributes:
        second: whether the layer is the second of a pair.
        sections: the parts of the outputs that are each divided, as in `Column`.

    """

    second: bool = False
    sections: int | tuple[int, ...] = 1

    def splits(self, module: nn.Module, name: str) -> Mapping[str, GridSplit]:
        transposed = check_linear(module, name, "row" if self.second else "column")
        blocks = self.layout.linear(second=self.second)
        weight: Any = module.weight
        sections = sections_of(self.sections, weight.shape[1 if transposed else 0], name)
        dims = blocks.weight.columns, blocks.weight.rows
        if transposed and sections:
            raise InputError(
                f"a Conv1D with sections cannot be divided in two or three dimensions; {name!r} has "
                f"{len(sections)} sections; use an nn.Linear, or tensor_layout='1d'"
            )
        splits = {"weight": self._split(*(reversed(dims) if transposed else dims), sections=sections)}
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            splits["bias"] = self._split(blocks.y.columns, sections=sections)
        return splits

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        self.hold(module, name, group, BlockedLinear, transposed=check_linear(module, name, "column"))

    def hold(
        self, module: nn.Module, name: str, group: TensorGroup, form: type[nn.Module] | None, *, transposed: bool
    ) -> None:
        """Give a linear layer, whose weights have been divided, this rank's sizes, and the forward of ``form``."""
        blocks = self.layout.linear(second=self.second)
        parts = self.layout.length(blocks.x.columns), self.layout.length(blocks.y.columns)
        sizes = ("nx", "nf") if transposed else ("in_features", "out_features")
        own = {size: vars(module)[size] // part for size, part in zip(sizes, parts, strict=True)}
        become(module, form, group, own, name=name, second=self.second, transposed=transposed)


@dataclass(frozen=True)
class GridNorm(GridStyle):
    """Divides an ``nn.LayerNorm`` or ``nn.RMSNorm`` over the hidden units, between pairs of linear layers."""

    def splits(self, module: nn.Module, name: str) -> Mapping[str, GridSplit]:
        kinds = nn.LayerNorm, nn.RMSNorm
        if not isinstance(module, kinds) or len(module.normalized_shape) != 1:
            raise InputError(
                f"the style 'norm' must be given to an nn.LayerNorm or nn.RMSNorm over one dimension; {name!r} is a "
                f"{type(module).__name__}; use one of these, or tensor_layout='1d'"
            )
        return {each: self._split(self.layout.outer.columns) for each, _ in module.named_parameters()}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        (width,) = vars(module)["normalized_shape"]
        own = {"normalized_shape": (width // self.layout.length(self.layout.outer.columns),)}
        become(module, BlockedNorm, group, own, name=name, centered=isinstance(module, nn.LayerNorm))


@dataclass(frozen=True)
class GridEmbedding(GridStyle):
    """Divides an embedding.

    Attributes:
        positions: whether its numbers are the same for all sequences, such as positions. Then only the hidden units are
            divided. Otherwise, the vocabulary is divided, too.

    """

    positions: bool = False

    def splits(self, module: nn.Module, name: str) -> Mapping[str, GridSplit]:
        check_embedding(module, name)
        outer = self.layout.outer
        return {"weight": self._split(() if self.positions else outer.rows, outer.columns)}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        embedding: Any = module
        outer = self.layout.outer
        own = {"embedding_dim": embedding.embedding_dim // self.layout.length(outer.columns)}
        if self.positions:
            become(module, BlockedPositions, group, own, name=name)
            return
        count = embedding.num_embeddings // self.layout.length(outer.rows)
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        padding -= self.layout.place(group.rank, outer.rows) * count
        own |= {"num_embeddings": count, "padding_idx": padding if padding in range(count) else None}
        become(module, BlockedEmbedding, group, own, name=name)


@dataclass(frozen=True)
class GridAttention(GridStyle):
    """Divides an ``nn.MultiheadAttention`` by sequences and heads."""

    def splits(self, module: nn.Module, name: str) -> Mapping[str, GridSplit]:
        attention = plain_attention(module, name)
        odd = [
            what
            for what, is_so in (
                ("batch_first=False", not attention.batch_first),
                ("kdim= or vdim=", attention.in_proj_weight is None),
                ("add_bias_kv=True", attention.bias_k is not None),
            )
            if is_so
        ]
        if odd:
            raise InputError(
                f"attention in two or three dimensions must be self-attention with batch_first=True; {name!r} has "
                f"{' and '.join(odd)}; use another attention, or tensor_layout='1d'"
            )
        first = self.layout.linear(second=False)
        sections = (attention.embed_dim,) * 3
        splits = {"in_proj_weight": self._split(first.weight.columns, first.weight.rows, sections=sections)}
        if attention.in_proj_bias is not None:
            splits["in_proj_bias"] = self._split(first.y.columns, sections=sections)
        own = self._out.splits(attention.out_proj, f"{name}.out_proj")
        return splits | {f"out_proj.{each}": split for each, split in own.items()}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        Heads("num_heads").check(module, name, group)
        attention: Any = module
        heads = attention.num_heads // group.hidden_parts
        become(module, BlockedHeads, group, {"num_heads": heads}, name=name, sequence=False)
        self._out.apply(attention.out_proj, f"{name}.out_proj", group)

    @property
    def _out(self) -> GridLinear:
        return GridLinear(self.layout, second=True)


@dataclass(frozen=True)
class GridBlock(GridStyle):
    """Divides an ``nn.TransformerEncoderLayer``: its attention, its linear layers and its norms."""

    def splits(self, module: nn.Module, name: str) -> Mapping[str, Split]:
        if not isinstance(module, nn.TransformerEncoderLayer):
            raise InputError(
                f"in two or three dimensions, the style 'block' must be given to an nn.TransformerEncoderLayer; "
                f"{name!r} is a {type(module).__name__}; give styles to the layers inside it"
            )
        return splits_inside(module, name, self._styles())

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        apply_inside(module, name, self._styles(), group)
        become(module, None, group, {"activation_relu_or_gelu": 0})  # torch's fused function needs whole weights

    def _styles(self) -> dict[str, LayerStyle]:
        layout = self.layout
        return {
            "self_attn": GridAttention(layout),
            "linear1": GridLinear(layout),
            "linear2": GridLinear(layout, second=True),
            "norm1": GridNorm(layout),
            "norm2": GridNorm(layout),
        }


@dataclass(frozen=True)
class GridEdge(GridStyle):
    """Divides the input of a module into blocks, or gathers the blocks of its output.

    Attributes:
        begins: True to divide the input, False to gather the output.

    """

    begins: bool = True

    def splits(self, module: nn.Module, name: str) -> Mapping[str, GridSplit]:
        if next(module.parameters(recurse=False), None) is not None:
            raise InputError(
                f"the styles 'begin' and 'end' must be given to a module without weights of its own; {name!r} is a "
                f"{type(module).__name__} with weights; give them to the module that contains it, or to an nn.Identity"
            )
        return {}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        become(module, DividesBlocks if self.begins else JoinsBlocks, group, {}, name=name)


def on_grid(style: LayerStyle, module: nn.Module | None, name: str, grid: AxisGroups) -> LayerStyle:
    """Return the style of a module on a grid, given its style in one dimension.

    Raises InputError if the style has no counterpart on a grid.
    """
    layout = grid.layout
    made: GridStyle | None = None
    match style:
        case Column(gathered=False, sequence=False) if not isinstance(module, nn.Embedding):
            made = GridLinear(layout, sections=style.sections)
        case Row(whole_input=False, sequence=False):
            made = GridLinear(layout, second=True)
        case DividedVocabulary(sequence=False):
            made = GridEmbedding(layout) if isinstance(module, nn.Embedding) else GridLinear(layout)
        case Attention(sequence=False):
            made = GridAttention(layout)
        case Block(sequence=False):
            made = GridBlock(layout)
        case Norm():
            made = GridNorm(layout)
        case Edge():
            made = GridEdge(layout, begins=style.begins)
        case Heads(attributes=()) if isinstance(module, nn.Embedding):
            made = GridEmbedding(layout, positions=True)
        case SummedWeights() | Heads() if module is not None:
            return style
    if made is None:
        raise InputError(
            f"this style has no counterpart in two or three dimensions; {name!r} got {style}; choose 'column', 'row', "
            f"'vocabulary', 'heads', 'block', 'norm', 'summed', 'begin' or 'end', or tensor_layout='1d'"
        )
    return made
