"""Tiny configurations of transformers classes: few layers, narrow layers, a small vocabulary, small images.

`tiny_configs` starts from the default configuration and changes its numbers by name. All widths are divided by one
common factor, so that relations between them stay true: hidden size = heads x head size, sums of parts of heads, widths
of a text model and of the projection into it. Smaller factors follow for configurations whose widths do not divide.
"""

import copy
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["LAYERS", "VOCABULARY", "parts_of", "tiny_configs"]

LAYERS = 3
VOCABULARY = 160
FIRST_SPECIAL = 110  # ids of text are below
IMAGE = 64

DEPTH = re.compile(
    r"(^|_)(num|n)_(\w+_)?(layers?|blocks?)$|^(\w+_)?layers$|^(\w+_)?depths?$|_layer_depth$|^num_block_repeats$"
    r"|^stage_num_blocks$|^layers_per_stage$|^num_hidden_groups$|_num_(hidden_)?layers$|_depth$|^num_self_attends_per_block$"
)
NOT_DEPTH = re.compile(
    r"dropout|drop|prob|adapter|feat_extract|feature|max_window|per|kv_shared|dense_layers|conv|lstm|max_depth|min_depth"
    r"|nextn|bit_depth|stem|out|lqe|res_blocks?$|residual|attn_res|random|codevector|upscale|upsample|fusion|encode_proj"
    r"|sparse|dispersion|rope|mlp_only|no_|mtp|encoder_blocks|watermark"
)
WIDTH = re.compile(
    r"hidden|d_model|dim|embd|embed|ffn|d_ff|d_kv|d_inner|d_head|inner|intermediate|channels|width|rank|filters"
    r"|bottleneck|dimension|projection_size|proj_size|output_size|pooler|kv_channels|mlp_size|feature_size|coordinate_size"
    r"|shape_size|projector|conv_dim|tdnn|mamba_d_state|state_size|d_rel|mrope_section|head_size|classifier_proj|stem"
    r"|pointer|planes|d_latents|upsample_groups"
)
NOT_WIDTH = re.compile(
    r"layers?$|layer_types|prob|drop|act|num_|eps|kernel|stride|bias|max_|vocab|position|length|ratio|std|init|init_|type"
    r"|norm|window|dilation|image_size|patch_size|patch_embed|use_|token|scale|factor|in_chans|_channels_last|expand|mult|depth"
    r"|(?<!upsample_)groups"
    r"|n_heads|heads$|steps|loss|weight|seq|query_dim|input_channels|audio_channels|temperature|per_layer_input$"
)
SPECIAL = re.compile(r"_(token_)?(id|ids|index|idx)$|_token_(id|index)s?$")
NOT_SPECIAL = re.compile(
    r"lang|expert|layer|head|out_|feature|semantic|eval|mask_index|block|window|speaker|ignore|attn|global"
)
PLACES = re.compile(r"index|indices|vision_feature_layer|encode_proj|mlp_only|hybrid_layer_ids")
EXPERTS = re.compile(r"^(n|num|moe_num)_(routed_|local_|private_)?experts$|^num_(\w+_)?experts$")


def tiny_configs(kind: type[PreTrainedModel]) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield configurations of the class, the smallest first, each with a word that says how it was made."""
    made = kind.config_class()
    for way in (_rebuilt, _changed):
        for divisor in (16, 8, 4, 2, 1):
            try:
                config = _settled(way(made, divisor), kind)
            except Exception as error:
                failure = error
                continue
            yield f"widths / {divisor}{'' if way is _rebuilt else ', changed in place'}", config
    if "config" not in locals():
        raise failure


def _rebuilt(made: PretrainedConfig, divisor: int) -> PretrainedConfig:
    """Make the configuration anew from changed numbers, so that it derives its other values from them."""
    values = _shrunk(_without_timm(made.to_dict()), divisor)
    return type(made).from_dict(values)


def _changed(made: PretrainedConfig, divisor: int) -> PretrainedConfig:
    """Change numbers of the finished configuration, for those that do not accept what they give out."""
    config = copy.deepcopy(made)
    _set(config, divisor, count(FIRST_SPECIAL))
    return config


def _set(config: PretrainedConfig, divisor: int, special: Any) -> None:
    own = {name: value for name, value in vars(config).items() if not isinstance(value, PretrainedConfig)}
    changed = _shrunk(own, divisor, special)
    for name, value in changed.items():
        if name not in own or value is not own[name]:
            object.__setattr__(config, name, value)
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            _set(value, divisor, special)


def _settled(config: PretrainedConfig, kind: type[PreTrainedModel]) -> PretrainedConfig:
    """Set what some heads need and default configurations leave out: ids of padding and of the decoder's start."""
    for part in parts_of(config):
        if "vocab_size" in vars(part) and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
        if getattr(part, "axial_pos_shape", None):
            part.axial_pos_shape = (3, 4)
        if "use_mask_token" in vars(part) and "MaskedImage" in kind.__name__:
            part.use_mask_token = True
    if getattr(config, "is_encoder_decoder", False) or "EncoderDecoder" in kind.__name__:
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if kind.__name__.endswith("WithLMHead") and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def parts_of(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return a configuration and all configurations in it, the outer ones first."""
    found = [config]
    for part in found:
        inner = [value for value in vars(part).values() if isinstance(value, PretrainedConfig)]
        found += [value for value in inner if not any(value is other for other in found)]
    return found


def _shrunk(values: dict[str, Any], divisor: int, special: Any = None) -> dict[str, Any]:
    special = special or count(FIRST_SPECIAL)
    depth = _depth(values)
    found = {name: _value(name, value, divisor, special, depth) for name, value in values.items()}
    if "num_hidden_layers" not in values or "depths" in values:
        found |= {name: values[name] for name in ("out_indices", "out_features", "stage_names") if name in values}
    return _related(_filled(found), values, depth)


def _depth(values: dict[str, Any]) -> int:
    """Return the number of layers: more than LAYERS if a list names more of them."""
    named = [len(value) for name, value in values.items() if PLACES.search(name) and _ints(value)]
    least = max([LAYERS, *(length for length in named if length <= 8)])
    least = max(least, 4) if "attn_layer_period" in values else least
    known = [v for name, v in values.items() if _is_depth(name) and isinstance(v, int) and not isinstance(v, bool)]
    return min(least, max(known)) if known else least


def _value(name: str, value: Any, divisor: int, special: Any, depth: int) -> Any:
    if isinstance(value, dict):
        plain = all(isinstance(key, str) for key in value) and not name.endswith("2id")
        return _shrunk(value, divisor, special) if plain else value
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, list | tuple):
        return _sequence(name, value, divisor, special, depth)
    return _number(name, value, divisor, special, depth)


def _sequence(name: str, value: Any, divisor: int, special: Any, depth: int) -> Any:
    if value and all(isinstance(part, dict) for part in value):
        return type(value)(_shrunk(part, divisor, special) for part in value)
    if re.search(r"layer_types$|layers_block_type$|indexer_types$|layer_rope_theta$|no_rope_layers$", name):
        return type(value)(_one_of_each(list(value), depth))
    if PLACES.search(name) and _ints(value):
        last = depth - 1 if name != "out_indices" or 0 in value else depth  # stage 0 is the stem
        return value if max(value, default=0) <= last else type(value)(range(last + 1))[-len(value) :]
    if value and all(isinstance(part, list | tuple) for part in value):
        return value
    if name.endswith("_section") and any(part % divisor for part in value):
        raise ValueError(f"{name} {value} cannot be divided by {divisor}")
    return type(value)(_number(name, part, divisor, special, depth) for part in value)


def _ints(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(part, int) for part in value)


def _number(name: str, value: Any, divisor: int, special: Any, depth: int) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _is_depth(name):
        return min(value, depth)
    if "vocab_size" in name and name != "type_vocab_size":
        return min(value, VOCABULARY)
    if SPECIAL.search(name) and not NOT_SPECIAL.search(name):
        return value if value < FIRST_SPECIAL else min(next(special), VOCABULARY - 1)
    if EXPERTS.search(name):
        return min(value, 4)
    if name in LIMITS:
        return min(value, LIMITS[name])
    if re.search(r"^(\w+_)?(image|img|input|crop)_size$|^resolution$", name) and value >= 64:
        return IMAGE
    if WIDTH.search(name) and not NOT_WIDTH.search(name) and value >= 16 and value % divisor == 0:
        return value // divisor
    return value


LIMITS = {
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "top_k": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "n_groups": 1,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "mm_tokens_per_image": 4,
    "encoder_hash_byte_group_vocab": 100,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "hybrid_layer_ids": 2,
    "num_dense_layers": 1,
    "attention_window": 4,
    "max_source_positions": 64,
    "index_topk": 4,
    "num_queries": 20,
    "num_denoising": 0,
    "group_detr": 2,
    "expert_capacity": 16,
    "train_num_points": 32,
    "num_negatives": 4,
    "local_attention": 8,
    "num_codevectors_per_group": 16,
    "max_seq_len": 256,
}


def _is_depth(name: str) -> bool:
    return bool(DEPTH.search(name)) and not NOT_DEPTH.search(name)


def _one_of_each(kinds: list[Any], depth: int) -> list[Any]:
    """Return ``depth`` kinds of layers: as many different ones as fit, in the order of the first of each."""
    firsts = list(dict.fromkeys(kinds))[:depth]
    chosen = sorted({kinds.index(kind) for kind in firsts})
    others = [place for place in range(len(kinds)) if place not in chosen]
    return [kinds[place] for place in sorted(chosen + others[: max(0, depth - len(chosen))])]


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """Replace None by a number where the default configuration leaves one out that the model needs."""
    found = {name: FILLS.get(name) if value is None and name in FILLS else value for name, value in values.items()}
    heads, width = found.get("num_attention_heads"), found.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        for name, value in (("head_dim", width // heads), ("num_key_value_heads", heads)):
            if name in found and found[name] is None:
                found[name] = value
    return found


def _without_timm(values: dict[str, Any]) -> dict[str, Any]:
    """Replace backbones of the timm library, which is not needed here, by a residual net of transformers."""
    backbone = values.get("backbone_config")
    if isinstance(backbone, dict) and backbone.get("model_type") == "timm_backbone":
        net = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
        last = ["stage2", "stage3", "stage4"]
        values = {**values, "backbone_config": {"model_type": "resnet", **net, "out_features": last}, "backbone": None}
    return values


def _related(found: dict[str, Any], before: dict[str, Any], depth: int) -> dict[str, Any]:
    """Correct values that depend on others: images of whole patches, windows in images, names of stages."""
    patch = found.get("patch_size")
    for name in ("image_size", "img_size"):
        size = found.get(name)
        side = patch * 4 if isinstance(patch, int) and patch >= 8 else IMAGE
        if isinstance(size, int) and size > 1:
            found[name] = side
        elif isinstance(size, list | tuple) and isinstance(patch, int):
            found[name] = type(size)(side for _ in size)
    if "image_size" in found and isinstance(found.get("window_size"), int):
        found["window_size"] = min(found["window_size"], 2)
    stages, places = found.get("stage_names"), found.get("out_indices")
    cut = "num_hidden_layers" in before and "depths" not in before
    if isinstance(stages, list) and cut and _ints(places) and len(stages) > depth + 1:
        found["stage_names"] = stages[: depth + 1]
        found["out_features"] = [stages[place] for place in places]
    types = found.get("layer_types")
    if isinstance(types, list) and len(types) > 1 and set(types) == {"mamba"}:
        found["layer_types"] = [*types[:-1], "attention"]
    rope = found.get("rope_parameters")
    if rope == {} and isinstance(types, list):
        found["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(types)}
    return found


#: Values for settings that a default configuration leaves out although some model needs them.
FILLS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "prediction_length": 4,
    "context_length": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "watermarking_depth": 4,
    "num_images": 2,
    "layer_types": ["full_attention"] * LAYERS,
    "attn_layer_indices": [1],
    "default_language": "en_XX",
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 1,
}
