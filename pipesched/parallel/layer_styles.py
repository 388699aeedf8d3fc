"""Layer styles: how the ranks of a tensor group divide one module of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import nn

from pipesched.errors import InputError
from pipesched.parallel.attention import HeadsAttention
from pipesched.parallel.embedding import GatheredEmbedding, VocabularyEmbedding
from pipesched.parallel.linear import ColumnLinear, RowLinear
from pipesched.parallel.norms import DividesSequence, JoinsSequence, Summed
from pipesched.parallel.split_module import become
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.parallel.weight_split import Split, WeightSplit

__all__ = [
    "STYLES",
    "Attention",
    "Block",
    "Column",
    "DividedVocabulary",
    "Edge",
    "Heads",
    "LayerStyle",
    "Norm",
    "Row",
    "SequencePart",
    "SummedWeights",
    "Whole",
    "apply_inside",
    "check_embedding",
    "check_linear",
    "is_plain_embedding",
    "linear_kind",
    "plain_attention",
    "sections_of",
    "splits_inside",
]

_DIM_OF_CONV1D = {"in": 0, "out": 1}
_DIM_OF_LINEAR = {"in": 1, "out": 0}


class LayerStyle(Protocol):
    """How the ranks of a tensor group divide a module."""

    def splits(self, module: nn.Module, name: str) -> Mapping[str, Split]:
        """Return how each divided parameter of the module is split, by its name in the module.

        ``name`` is the name of the module, for messages. Raises InputError if the module cannot have this style.
        """

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        """Give a module, whose weights have been divided, the forward and the attributes of this style."""


def splits_inside(module: nn.Module, name: str, styles: Mapping[str, LayerStyle]) -> dict[str, Split]:
    """Return how the parameters of a module are split whose submodules have these styles, by their names in it."""
    return {
        f"{child}.{parameter}": split
        for child, style in styles.items()
        for parameter, split in style.splits(module.get_submodule(child), f"{name}.{child}").items()
    }


def apply_inside(module: nn.Module, name: str, styles: Mapping[str, LayerStyle], group: TensorGroup) -> None:
    """Apply styles to submodules, by their names in a module, whose weights have been divided."""
    for child, style in styles.items():
        style.apply(module.get_submodule(child), f"{name}.{child}", group)


class _ShortRepr:
    """Shows the options that differ from their defaults."""

    def __repr__(self) -> str:
        known: Any = self
        values = ((field, getattr(self, field.name)) for field in fields(known))
        given = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({given})"


def linear_kind(module: nn.Module) -> str | None:
    """Return "linear" for ``nn.Linear``, "conv1d" for transformers' Conv1D, or None for a module of another kind."""
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return "linear"
    weight = getattr(module, "weight", None)
    if kind.__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2 and hasattr(module, "nf"):
        return "conv1d"
    return None


def _become_linear(
    module: nn.Module, form: Any, group: TensorGroup, sizes: tuple[str, str], options: Mapping[str, bool]
) -> None:
    """Split a linear layer. ``sizes`` are the names of its divided size in ``nn.Linear`` and in a Conv1D."""
    transposed = linear_kind(module) == "conv1d"
    size = sizes[transposed]
    become(module, form, group, {size: vars(module)[size] // group.size}, transposed=transposed, **options)


@dataclass(frozen=True, kw_only=True, repr=False)
class Column(_ShortRepr):
    """Divides a linear layer by its outputs, or an embedding by its hidden units.

    Attributes:
        sections: the number of parts of the outputs that are each divided, such as 3 for queries, keys and values in
            one weight, or their sizes. Default: 1.
        gathered: whether each rank gets the whole output. Default: its own part.
        sequence: whether the input is divided by positions. Default: the input is whole.

    """

    sections: int | tuple[int, ...] = 1
    gathered: bool = False
    sequence: bool = False

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        if isinstance(module, nn.Embedding):
            check_embedding(module, name)
            _refuse_options(self, name, sections=1, sequence=False)
            return {"weight": WeightSplit(dim=1)}
        dims = _dims(module, name, "column")
        sections = sections_of(self.sections, _weight(module).shape[dims["out"]], name)
        if sections and self.gathered:
            raise InputError(
                f"a layer whose output is gathered must have one section; {name!r} has the sections {list(sections)}; "
                f"leave sections= out, or gathered="
            )
        splits = {"weight": WeightSplit(dim=dims["out"], sections=sections)}
        return splits | ({"bias": WeightSplit(dim=0, sections=sections)} if _has_bias(module) else {})

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        if isinstance(module, nn.Embedding):
            size = {"embedding_dim": module.embedding_dim // group.size}
            become(module, GatheredEmbedding if self.gathered else None, group, size)
            return
        options = {"gathered": self.gathered, "sequence": self.sequence}
        _become_linear(module, ColumnLinear, group, ("out_features", "nf"), options)


@dataclass(frozen=True, kw_only=True, repr=False)
class Row(_ShortRepr):
    """Divides a linear layer by its inputs.

    Attributes:
        whole_input: whether the input is whole, so that each rank takes its part. Default: it has its part.
        sequence: whether each rank gets its positions of the output. Default: the whole output.

    """

    whole_input: bool = False
    sequence: bool = False

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        return {"weight": WeightSplit(dim=_dims(module, name, "row")["in"])}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        options = {"whole_input": self.whole_input, "sequence": self.sequence}
        _become_linear(module, RowLinear, group, ("in_features", "nx"), options)


@dataclass(frozen=True, kw_only=True, repr=False)
class DividedVocabulary(_ShortRepr):
    """Divides an embedding by its vocabulary, or a linear layer whose outputs are the vocabulary.

    The linear layer's output stays divided: the loss must be a `VocabularyCrossEntropy`.

    Attributes:
        sequence: whether the activations around the layer are divided by positions. Default: they are whole.

    """

    sequence: bool = False

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        if isinstance(module, nn.Embedding):
            check_embedding(module, name)
            return {"weight": WeightSplit(dim=0)}
        return self._columns.splits(module, name)

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        if isinstance(module, nn.Embedding):
            own = module.num_embeddings // group.size
            padding = -1 if module.padding_idx is None else module.padding_idx - group.rank * own
            attributes = {"num_embeddings": own, "padding_idx": padding if padding in range(own) else None}
            become(module, VocabularyEmbedding, group, attributes, sequence=self.sequence)
        else:
            self._columns.apply(module, name, group)

    @property
    def _columns(self) -> Column:
        return Column(sequence=self.sequence)


class Heads:
    """Divides attributes of a module that count heads or their hidden units, such as ``Heads("num_heads")``.

    Without names, divides an embedding whose columns are heads, such as that of a relative position bias.

    Args:
        *attributes: the names of integer attributes of the module. Each rank gets the number divided by the number of
            ranks.

    """

    def __init__(self, *attributes: str) -> None:
        self.attributes = attributes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Heads) and self.attributes == other.attributes

    def __hash__(self) -> int:
        return hash(self.attributes)

    def __repr__(self) -> str:
        return f"Heads({', '.join(map(repr, self.attributes))})"

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        if self.attributes:
            for attribute in self.attributes:
                if type(vars(module).get(attribute)) is not int:
                    raise InputError(
                        f"Heads must name integer attributes of the module; {name or 'the model'!r} (a "
                        f"{type(module).__name__}) has {attribute}={vars(module).get(attribute)!r}; name the "
                        f"attributes that count its heads"
                    )
            return {}
        if not isinstance(module, nn.Embedding):
            raise InputError(
                f"the style 'heads' must be given to an nn.MultiheadAttention, an nn.Embedding or a parameter whose "
                f"last dimension is heads; {name!r} is a {type(module).__name__}; pass Heads('num_heads') with the "
                f"names of the attributes that count heads"
            )
        check_embedding(module, name)
        return {"weight": WeightSplit(dim=1)}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        self.check(module, name, group)
        parts = group.hidden_parts
        become(module, None, group, {attribute: vars(module)[attribute] // parts for attribute in self._counts})

    @property
    def _counts(self) -> tuple[str, ...]:
        return self.attributes or ("embedding_dim",)

    def check(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        """Raise InputError if the heads of a module cannot be divided evenly."""
        parts = group.hidden_parts
        for attribute in self._counts:
            number = vars(module)[attribute]
            if number % parts:
                raise InputError(
                    f"heads must be divided evenly among the ranks of a tensor group; {attribute} of {name!r} is "
                    f"{number} for {parts} ranks; choose a number of ranks that divides {number}"
                )


@dataclass(frozen=True, kw_only=True, repr=False)
class Attention(_ShortRepr):
    """Divides an ``nn.MultiheadAttention`` by heads.

    Attributes:
        sequence: whether the activations around it are divided by positions. Default: they are whole.

    """

    sequence: bool = False

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        attention = plain_attention(module, name)
        width = attention.embed_dim
        fused = (width,) * 3
        splits = {
            "in_proj_weight": WeightSplit(dim=0, sections=fused),
            "in_proj_bias": WeightSplit(dim=0, sections=fused),
            "q_proj_weight": WeightSplit(dim=0),
            "k_proj_weight": WeightSplit(dim=0),
            "v_proj_weight": WeightSplit(dim=0),
            "bias_k": WeightSplit(dim=2),
            "bias_v": WeightSplit(dim=2),
            "out_proj.weight": WeightSplit(dim=1),
        }
        present = {name for name, _ in module.named_parameters()}
        return {name: split for name, split in splits.items() if name in present}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        attention = plain_attention(module, name)
        if self.sequence and group.sequence_dim != (1 if attention.batch_first else 0):
            raise InputError(
                f"sequence parallelism divides dimension {group.sequence_dim} of activations; {name!r} has its "
                f"positions in dimension 0 (batch_first=False); make it with batch_first=True"
            )
        heads = attention.num_heads
        Heads("num_heads").check(module, name, group)
        become(attention, HeadsAttention, group, {"num_heads": heads // group.size}, sequence=self.sequence)
        Row(sequence=self.sequence).apply(attention.out_proj, f"{name}.out_proj", group)


@dataclass(frozen=True, kw_only=True, repr=False)
class Block(_ShortRepr):
    """Divides an ``nn.TransformerEncoderLayer`` or ``nn.TransformerDecoderLayer``: its attention and its linear layers.

    Attributes:
        sequence: whether the activations between blocks are divided by positions. Default: they are whole.

    """

    sequence: bool = False

    def splits(self, module: nn.Module, name: str) -> Mapping[str, Split]:
        return splits_inside(module, name, self._styles(module, name))

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        apply_inside(module, name, self._styles(module, name), group)
        if isinstance(module, nn.TransformerEncoderLayer):
            become(module, None, group, {"activation_relu_or_gelu": 0})  # torch's fused function needs whole weights

    def _styles(self, module: nn.Module, name: str) -> dict[str, LayerStyle]:
        decodes = isinstance(module, nn.TransformerDecoderLayer)
        if not decodes and not isinstance(module, nn.TransformerEncoderLayer):
            raise InputError(
                f"the style 'block' must be given to an nn.TransformerEncoderLayer or nn.TransformerDecoderLayer; "
                f"{name!r} is a {type(module).__name__}; give styles to the layers inside it"
            )
        if decodes and self.sequence:
            raise InputError(
                f"sequence parallelism is not implemented for nn.TransformerDecoderLayer; {name!r} has one; use the "
                f"style 'block'"
            )
        styles: dict[str, LayerStyle] = {"self_attn": Attention(sequence=self.sequence)}
        if decodes:
            styles["multihead_attn"] = Attention()
        styles["linear1"] = Column(sequence=self.sequence)
        styles["linear2"] = Row(sequence=self.sequence)
        if self.sequence:
            styles["norm1"] = styles["norm2"] = SummedWeights()
        return styles


@dataclass(frozen=True, repr=False)
class SummedWeights(_ShortRepr):
    """Keeps a module's weights whole, and sums their gradients over the ranks, because its input is divided.

    For a norm between layers that are divided by positions, or a norm of each head.
    """

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        return {}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        become(module, Summed, group, {})


@dataclass(frozen=True, repr=False)
class Whole(_ShortRepr):
    """Keeps a module or a parameter whole, between divided layers. Its input is whole, so its gradients are, too."""

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        return {}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SequencePart(_ShortRepr):
    """Divides the input of a module by positions, or gathers the positions of its output.

    Attributes:
        begins: True to divide the input, False to gather the output.

    """

    begins: bool

    def splits(self, module: nn.Module, name: str) -> Mapping[str, WeightSplit]:
        return {}

    def apply(self, module: nn.Module, name: str, group: TensorGroup) -> None:
        become(module, DividesSequence if self.begins else JoinsSequence, group, {})


@dataclass(frozen=True, repr=False)
class Norm(Whole):
    """A norm over the hidden units between pairs of linear layers. In one dimension, it stays whole."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Edge(Whole):
    """The begin or the end of the layers that a grid of ranks divides. In one dimension, nothing is done.

    Attributes:
        begins: True for a module that gets whole activations, False for one whose output becomes whole.

    """

    begins: bool


def _heads(module: nn.Module | None) -> LayerStyle:
    return Attention() if isinstance(module, nn.MultiheadAttention) else Heads()


#: The style of each word, for a module.
STYLES: Mapping[str, Callable[[nn.Module | None], LayerStyle]] = {
    "column": lambda _: Column(),
    "row": lambda _: Row(),
    "column-gathered": lambda _: Column(gathered=True),
    "row-whole-input": lambda _: Row(whole_input=True),
    "vocabulary": lambda _: DividedVocabulary(),
    "heads": _heads,
    "block": lambda _: Block(),
    "summed": lambda _: SummedWeights(),
    "whole": lambda _: Whole(),
    "norm": lambda _: Norm(),
    "begin": lambda _: Edge(begins=True),
    "end": lambda _: Edge(begins=False),
    "sequence-begin": lambda _: SequencePart(begins=True),
    "sequence-end": lambda _: SequencePart(begins=False),
}


def _weight(module: nn.Module) -> nn.Parameter:
    weight: Any = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _has_bias(module: nn.Module) -> bool:
    return isinstance(getattr(module, "bias", None), nn.Parameter)


def plain_attention(module: nn.Module, name: str) -> nn.MultiheadAttention:
    """Return the module if it is torch's attention. Raises InputError for another module."""
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
        raise InputError(
            f"attention by heads must be an nn.MultiheadAttention with torch's forward; {name!r} is a "
            f"{type(module).__name__}; give its linear layers the styles 'column' and 'row', and the module "
            f"Heads('num_heads')"
        )
    return module


def _dims(module: nn.Module, name: str, style: str) -> Mapping[str, int]:
    return _DIM_OF_CONV1D if check_linear(module, name, style) else _DIM_OF_LINEAR


def check_linear(module: nn.Module, name: str, style: str) -> bool:
    """Return whether the weight of a linear layer is (inputs, outputs). Raises InputError for another module."""
    kind = linear_kind(module)
    if kind is None:
        own = "a forward of its own" if isinstance(module, nn.Linear) else "neither torch's nor Conv1D's forward"
        raise InputError(
            f"the style {style!r} must be given to an nn.Linear or a Conv1D of transformers; {name!r} is a "
            f"{type(module).__name__} with {own}; choose another layer, or leave it out of tensor_parallel="
        )
    return kind == "conv1d"


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether a module is an embedding with torch's forward, or one that transformers only scales."""
    scales = type(module).__name__.endswith("ScaledWordEmbedding")
    return isinstance(module, nn.Embedding) and (type(module).forward is nn.Embedding.forward or scales)


def check_embedding(module: nn.Module, name: str) -> None:
    """Raise InputError for an embedding that cannot be divided, and for another module."""
    if not is_plain_embedding(module):
        raise InputError(
            f"a divided embedding must have the forward of nn.Embedding; {name!r} is a {type(module).__name__} with a "
            f"forward of its own; leave it out of tensor_parallel="
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise InputError(
                f"a divided embedding must have no {option}, which needs the whole weight; {name!r} has "
                f"{option}={getattr(module, option)}; leave it out of tensor_parallel="
            )


def _refuse_options(style: Column, name: str, **defaults: Any) -> None:
    for option, default in defaults.items():
        if getattr(style, option) != default:
            raise InputError(
                f"an embedding has no option {option}; {name!r} got {option}={getattr(style, option)}; leave it out"
            )


def sections_of(sections: int | tuple[int, ...], length: int, name: str) -> tuple[int, ...]:
    """Return the sizes of the sections of a layer's outputs; () if there is one section. Raises InputError."""
    if isinstance(sections, int):
        if sections < 1 or length % sections:
            raise InputError(
                f"sections= must divide the outputs of a layer; {name!r} has {length} outputs for {sections} sections; "
                f"pass the sizes of the sections"
            )
        return () if sections == 1 else (length // sections,) * sections
    if sum(sections) != length:
        raise InputError(
            f"the sizes of sections= must add up to the outputs of the layer; {name!r} has {length} outputs, but "
            f"{list(sections)} add up to {sum(sections)}; correct the sizes"
        )
    return tuple(sections)
