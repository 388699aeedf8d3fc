"""Automatic styles: the styles of the layers of known models, found by ``tensor_parallel="auto"``."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipesched.errors import InputError
from pipesched.parallel.layer_styles import (
    Block,
    Column,
    DividedVocabulary,
    Heads,
    LayerStyle,
    Row,
    SummedWeights,
    is_plain_embedding,
    linear_kind,
)

__all__ = ["automatic_styles"]

#: transformers' names of styles, as in ``base_model_tp_plan``
_OF_TRANSFORMERS: Mapping[str, LayerStyle] = {
    "colwise": Column(),
    "rowwise": Row(),
    "colwise_gather_output": Column(gathered=True),
    "rowwise_split_input": Row(whole_input=True),
    "embedding_rowwise": DividedVocabulary(),
    "embedding_colwise": Column(gathered=True),
    "packed_colwise": Column(sections=2),
    "replicated_with_grad_allreduce": SummedWeights(),
}

_BERT: Mapping[str, LayerStyle] = {"query": Column(), "key": Column(), "value": Column()}

#: class name of a module -> the styles of its children; "" is the module itself
_TABLES: Mapping[str, Mapping[str, LayerStyle]] = {
    "GPT2Attention": {"": Heads("num_heads", "split_size"), "c_attn": Column(sections=3), "c_proj": Row()},
    "GPT2MLP": {"c_fc": Column(), "c_proj": Row()},
    "BertSelfAttention": {"": Heads("num_attention_heads", "all_head_size"), **_BERT},
    "BertCrossAttention": {"": Heads("num_attention_heads", "all_head_size"), **_BERT},
    "BertSelfOutput": {"dense": Row()},
    "BertIntermediate": {"dense": Column()},
    "BertOutput": {"dense": Row()},
    "T5Attention": {
        "": Heads("n_heads", "inner_dim"),
        "q": Column(),
        "k": Column(),
        "v": Column(),
        "o": Row(),
        "relative_attention_bias": Heads(),
    },
    "T5DenseActDense": {"wi": Column(), "wo": Row()},
    "T5DenseGatedActDense": {"wi_0": Column(), "wi_1": Column(), "wo": Row()},
}
_CROSS_GPT2: Mapping[str, LayerStyle] = {
    "": Heads("num_heads", "split_size"),
    "c_attn": Column(sections=2),
    "q_attn": Column(),
    "c_proj": Row(),
}


def automatic_styles(model: nn.Module, size: int) -> dict[str, LayerStyle]:
    """Return the style of each module that "auto" divides among ``size`` ranks, by its name.

    Takes tables for GPT-2, BERT, T5 and torch's transformer layers, else transformers' plan (``base_model_tp_plan``).
    The head, and an embedding with the same weight, are divided if the vocabulary can be; else both stay whole.

    Raises InputError if the model is unknown, or if its heads cannot be divided evenly.
    """
    styles: dict[str, LayerStyle] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            styles[name] = Block()
        table = _TABLES.get(type(module).__name__, {})
        if hasattr(module, "q_attn") and type(module).__name__ == "GPT2Attention":
            table = _CROSS_GPT2
        for child, style in table.items():
            if child == "" or isinstance(getattr(module, child, None), nn.Module):
                styles[f"{prefix}{child}" if child else name] = style
    if not styles:
        styles = _planned(model)
    if not styles:
        raise InputError(
            f"tensor_parallel='auto' must get a model with transformers' base_model_tp_plan, GPT-2, BERT, T5, or "
            f"torch's transformer layers; got a {type(model).__name__}; name its layers instead, such as "
            f"tensor_parallel={{'blocks.*.up': 'column', 'blocks.*.down': 'row'}}"
        )
    _check_heads(model, size)
    _with_vocabulary(model, styles, size)
    return styles


def _planned(model: nn.Module) -> dict[str, LayerStyle]:
    """Return the styles of transformers' plan of the base model."""
    config: Any = getattr(model, "config", None)
    base = getattr(model, "base_model", None)
    of_base = getattr(config, "base_model_tp_plan", None)
    if not of_base or not isinstance(base, nn.Module):
        return {}
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    plan = {f"{prefix}{pattern}": word for pattern, word in of_base.items()}
    modules = dict(model.named_modules())
    styles = {}
    for name in [*modules, *(name for name, _ in model.named_parameters())]:
        word = next((word for pattern, word in plan.items() if _matches(pattern, name)), None)
        if word is None:
            continue
        if word not in _OF_TRANSFORMERS or name not in modules:
            raise InputError(
                f"tensor_parallel='auto' must know the styles of the model's plan; {name!r} has the style {word!r}, "
                f"which pipesched does not implement there; it knows, for modules, "
                f"{', '.join(sorted(_OF_TRANSFORMERS))}; name the layers in tensor_parallel= instead"
            )
        styles[name] = _OF_TRANSFORMERS[word]
    return styles


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    for attribute in ("num_attention_heads", "num_key_value_heads", "num_heads", "decoder_attention_heads"):
        number = getattr(config, attribute, None)
        if isinstance(number, int) and number % size:
            raise InputError(
                f"heads must be divided evenly among the ranks of a tensor group; {attribute} of the model is {number} "
                f"for {size} ranks; choose a number of ranks that divides {number}"
            )


def _with_vocabulary(model: nn.Module, styles: dict[str, LayerStyle], size: int) -> None:
    """Divide the head and the embeddings that share its weight, if the vocabulary can be divided; else none of them."""
    known: Any = model
    head = known.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear):
        return
    sharing = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if getattr(module, "weight", None) is head.weight
    }
    divides = head.weight.shape[0] % size == 0 and all(map(_can_divide, sharing.values()))
    for name, module in sharing.items():
        if not divides:
            styles.pop(name, None)
        else:
            styles[name] = DividedVocabulary() if isinstance(module, nn.Embedding) else Column(gathered=True)


def _can_divide(module: nn.Module) -> bool:
    return is_plain_embedding(module) or linear_kind(module) == "linear"


def _matches(pattern: str, name: str) -> bool:
    """Return whether a module or parameter has a name of this pattern. "*" is one part of the name."""
    parts = pattern.split(".")
    own = name.split(".")
    return len(parts) == len(own) and all(part in ("*", given) for part, given in zip(parts, own, strict=True))
