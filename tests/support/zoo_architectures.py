"""The zoo: small models of many architectures, built from configurations, with a mini-batch for each.

Nothing is downloaded; weights are drawn when a model is built. Dropout is enabled even if a configuration leaves it
out. No layer is skipped at random (layerdrop), because all stages must run the layers that ran for the sample.
"""

import copy
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MORE", "ZOO", "Specimen"]

ROWS, TOKENS, VOCABULARY = 8, 12, 99


@dataclass(frozen=True)
class Specimen:
    """A model: its constructor, its keyword inputs of ROWS rows, and a loss function if the model computes no loss.

    ranks: the largest number of ranks for which the model has enough layers. rounded: a parameter that another layer
    uses by reference, so that its gradient equals that of a plain loop only within rounding.
    """

    build: Callable[[], nn.Module]
    inputs: dict[str, Any]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    ranks: int = 4
    rounded: str | None = None

    def made(self) -> nn.Module:
        """Return the model in training mode, with the same weights at each call."""
        torch.manual_seed(0)
        return self.build().train()

    def rows(self, count: int) -> dict[str, Any]:
        """Return the first rows of the inputs."""
        rowed = Tensor, list
        return {name: value[:count] if isinstance(value, rowed) else value for name, value in self.inputs.items()}

    @property
    def target(self) -> dict[str, Tensor]:
        """Return the target of the loss function, if there is one."""
        return {} if self.loss_fn is None else {"target": torch.zeros(ROWS)}


def _specimen(
    architecture: str,
    inputs: dict[str, Any],
    loss_fn: Any = None,
    *,
    dropout: bool = True,
    ranks: int = 4,
    rounded: str | None = None,
    **choices: Any,
) -> Specimen:
    def build() -> nn.Module:
        kind = getattr(_transformers(), architecture)
        config = kind.config_class(**copy.deepcopy(choices))
        _drop(config, 0.1 if dropout else 0.0)
        return kind(config)

    return Specimen(build, inputs, loss_fn, ranks, rounded)


@cache
def _transformers() -> Any:
    """Import transformers when the first model is built, because the import takes two seconds."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    for name in (
        "loss.loss_for_object_detection",
        "loss.loss_deformable_detr",
        "models.mask2former.modeling_mask2former",
    ):
        module: Any = importlib.import_module(f"transformers.{name}")  # _assigned replaces scipy here
        module.linear_sum_assignment = _assigned
        module.requires_backends = lambda *_: None
    return transformers


def _drop(config: Any, rate: float) -> None:
    for name, value in vars(config).copy().items():
        if isinstance(value, _transformers().PreTrainedConfig):
            _drop(value, rate)
        elif "layerdrop" in name:
            setattr(config, name, 0.0)
        elif "drop" in name and not isinstance(value, bool | list) and (not value or not rate):
            setattr(config, name, rate)


def _assigned(cost: Any) -> tuple[Any, Any]:
    """Return the assignment with the smallest total cost: scipy's ``linear_sum_assignment``, for small inputs."""
    cost = np.asarray(cost)
    if len(cost) < cost.shape[1]:
        columns, rows = _assigned(cost.T)
        return rows[np.argsort(rows)], columns[np.argsort(rows)]
    columns = range(cost.shape[1])
    rows = min(permutations(range(len(cost)), len(columns)), key=lambda rows: cost[list(rows), columns].sum())
    order = np.argsort(rows)
    return np.array(rows, int)[order], np.array(columns, int)[order]


def _square(output: Any, target: Tensor) -> Tensor:
    first = output if isinstance(output, Tensor) else output[0]
    return (first.mean(tuple(range(1, first.dim()))) - target).pow(2).mean()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


# ---- models of our own -----------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """A model with long skip connections, which are used in reverse order."""

    def __init__(self, depth: int = 5, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_convolution(width, width) for _ in range(depth))
        self.up = nn.ModuleList(_convolution(2 * width, width) for _ in range(depth))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x, kept = self.first(pixel_values), []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        for layer in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, kept.pop()], 1))
        return self.last(x)


def _convolution(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.1))


class TwoTowers(nn.Module):
    """A model with two inputs and two losses."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, batch_first=True) for _ in range(4))
        self.right = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, batch_first=True) for _ in range(4))
        self.head = nn.Linear(width, 1)

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.left:
            left = layer(left)
        for layer in self.right:
            right = layer(right)
        own = functional.binary_cross_entropy_with_logits(self.head(left.mean(1)).squeeze(1), labels)
        apart = (left - right).pow(2).mean()
        return {"loss": own + apart, "own": own, "apart": apart}


class Recurrent(nn.Module):
    """A chain of LSTMs. Each LSTM passes its state to the next LSTM."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, 2, dropout=0.1, batch_first=True) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, state = self.embed(input_ids), None
        for layer in self.layers:
            x, state = layer(x, state)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


# ---- inputs ----------------------------------------------------------------------------------------------------------

_IDS = torch.randint(5, VOCABULARY - 4, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
_CLASSES = torch.arange(ROWS) % 2
_TEXT = {"input_ids": _IDS, "labels": _IDS}
_PADDED = {**_TEXT, "attention_mask": (torch.arange(TOKENS) < 8 + torch.arange(ROWS)[:, None] % 5).long()}
_IMAGES = {"pixel_values": _random(ROWS, 3, 32, 32), "labels": _CLASSES}
_LARGER = {"pixel_values": _random(ROWS, 3, 64, 64), "labels": _CLASSES}
_SOUND = {"input_values": _random(ROWS, 1000), "labels": _CLASSES}
_SPECTRA = {"input_features": _random(ROWS, 8, 40), "labels": _IDS}
_CAPTIONED = {"input_ids": _IDS, "pixel_values": _IMAGES["pixel_values"], "return_loss": True}
_PAIRS = {"left": _random(ROWS, TOKENS, 32), "right": _random(ROWS, TOKENS, 32).flip(0), "labels": _CLASSES.float()}

_QUARTERS = _random(ROWS, 5, 4).sigmoid() * 0.4 + 0.2  # boxes in the middle of a picture
_BOXES = [{"class_labels": torch.arange(1 + row % 3), "boxes": _QUARTERS[row, : 1 + row % 3]} for row in range(ROWS)]
_DETECTED: dict[str, Any] = {"pixel_values": _LARGER["pixel_values"], "labels": _BOXES}
_SEGMENTS = {
    "pixel_values": _LARGER["pixel_values"],
    "mask_labels": torch.stack([torch.ones(2, 16, 16).tril(row) for row in range(ROWS)]),
    "class_labels": _CLASSES[:, None].expand(ROWS, 2),
}
_SIXTEEN = torch.cat([_IDS, _IDS[:, :4]], 1)
_LONGER = {"input_ids": _SIXTEEN, "labels": _SIXTEEN}
_PICTURED = {
    "input_ids": torch.cat([torch.full((ROWS, 16), VOCABULARY - 1), _IDS], 1),
    "labels": torch.cat([torch.full((ROWS, 16), -100), _IDS], 1),
    "pixel_values": _IMAGES["pixel_values"],
}
_ASKED = {"input_ids": _IDS, "pixel_values": _IMAGES["pixel_values"], "labels": functional.one_hot(_CLASSES, 3).float()}
_SERIES = {
    "past_values": _random(ROWS, 24), "past_time_features": _random(ROWS, 24, 1), "future_values": _random(ROWS, 6),
    "past_observed_mask": torch.ones(ROWS, 24), "future_time_features": _random(ROWS, 6, 1),
}  # fmt: skip
_PIXELS = {"pixel_values": _IMAGES["pixel_values"], "labels": torch.arange(ROWS * 1024).reshape(ROWS, 32, 32) % 3}
_VIDEO = {"pixel_values": _random(ROWS, 4, 3, 32, 32), "labels": _CLASSES}

# ---- sizes -----------------------------------------------------------------------------------------------------------

_BLOCKS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
_WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, **_BLOCKS}
_GROUPED: dict[str, Any] = {**_WORDS, "num_key_value_heads": 2}
_PATCHES: dict[str, Any] = {**_BLOCKS, "image_size": 32, "patch_size": 8}
_STAGED: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 2, 2, 2]}
_BOTH: dict[str, Any] = {  # encoder and decoder
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SWIN: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [4, 6], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
_RESIDUAL: dict[str, Any] = {"hidden_sizes": [32, 48, 64, 96], "depths": [2, 2, 2, 2], "embedding_size": 8}
_CONVOLVED: dict[str, Any] = {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
}  # fmt: skip
_CLIP_TEXT = {**_WORDS, "num_hidden_layers": 4, "eos_token_id": 2}
_CLIP_IMAGE = {**_PATCHES, "num_hidden_layers": 4}
_FEWER = {**_GROUPED, "num_hidden_layers": 4}
_SQUARE = {**_PATCHES, "image_size": [64, 64], "num_hidden_layers": 4}
_DETECTOR: dict[str, Any] = {
    "backbone_config": {"model_type": "resnet", **_RESIDUAL, "depths": [1, 1, 1, 1], "out_features": ["stage4"]},
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "d_model": 32, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "num_queries": 5, "num_labels": 3,
}  # fmt: skip
_SMALL_SWIN: dict[str, Any] = {
    "image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4],
    "window_size": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
_FORECAST: dict[str, Any] = {
    "prediction_length": 6, "context_length": 17, "lags_sequence": [1, 2, 7], "num_time_features": 1, "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip

ZOO: dict[str, Specimen] = {
    "GPT-2": _specimen("GPT2LMHeadModel", _TEXT, vocab_size=VOCABULARY, n_embd=32, n_layer=8, n_head=4),
    "Llama": _specimen("LlamaForCausalLM", _PADDED, **_GROUPED),
    "Mistral": _specimen("MistralForCausalLM", _TEXT, **_GROUPED),
    "Qwen2": _specimen("Qwen2ForCausalLM", _PADDED, **_GROUPED),
    "Qwen3": _specimen("Qwen3ForCausalLM", _TEXT, **_GROUPED, head_dim=8),
    "Gemma2": _specimen("Gemma2ForCausalLM", _TEXT, **_GROUPED, head_dim=8),
    "Phi-3": _specimen("Phi3ForCausalLM", _TEXT, **_GROUPED, pad_token_id=0),
    "GPT-NeoX": _specimen("GPTNeoXForCausalLM", _TEXT, **_WORDS),
    "OPT": _specimen("OPTForCausalLM", _PADDED, **_WORDS, ffn_dim=64, word_embed_proj_dim=32, pad_token_id=1),
    "Bloom": _specimen("BloomForCausalLM", _PADDED, vocab_size=VOCABULARY, hidden_size=32, n_layer=8, n_head=4),
    "Falcon": _specimen("FalconForCausalLM", _PADDED, **_WORDS),
    "Mixtral": _specimen("MixtralForCausalLM", _TEXT, **_GROUPED, num_local_experts=4),
    "Jamba": _specimen("JambaForCausalLM", _TEXT, **_GROUPED, use_mamba_kernels=False, num_experts=2, mamba_d_state=4),
    "Mamba": _specimen("MambaForCausalLM", _TEXT, **_WORDS, state_size=4),
    "BERT": _specimen("BertForMaskedLM", _PADDED, **_WORDS),
    "RoBERTa": _specimen("RobertaForMaskedLM", _PADDED, **_WORDS),
    "ALBERT": _specimen("AlbertForMaskedLM", _PADDED, **_WORDS, embedding_size=16),
    "MPNet": _specimen("MPNetForMaskedLM", _PADDED, **_WORDS),
    "DeBERTa-v2": _specimen(
        "DebertaV2ForMaskedLM", _PADDED, **_WORDS, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "T5": _specimen("T5ForConditionalGeneration", _TEXT, **_T5),
    "BART": _specimen("BartForConditionalGeneration", _TEXT, **_BOTH),
    "Whisper": _specimen("WhisperForConditionalGeneration", _SPECTRA, **_BOTH, num_mel_bins=8, max_source_positions=20),
    "ViT": _specimen("ViTForImageClassification", _IMAGES, **_PATCHES),
    "Swin": _specimen("SwinForImageClassification", _IMAGES, **_SWIN),
    "SegFormer": _specimen("SegformerForImageClassification", _LARGER, **_STAGED, num_attention_heads=[1, 2, 3, 4]),
    "ConvNeXt": _specimen("ConvNextForImageClassification", _LARGER, **_STAGED),
    "ResNet": _specimen("ResNetForImageClassification", _LARGER, **_RESIDUAL),
    "Wav2Vec2": _specimen("Wav2Vec2ForSequenceClassification", _SOUND, **_WORDS, **_CONVOLVED),
    "CLIP": _specimen("CLIPModel", _CAPTIONED, text_config=_CLIP_TEXT, vision_config=_CLIP_IMAGE),
    "CLIP vision": _specimen("CLIPVisionModel", {"pixel_values": _IMAGES["pixel_values"]}, _square, **_PATCHES),
    "U-Net": Specimen(UNet, {"pixel_values": _LARGER["pixel_values"]}, _square),
    "two inputs, two losses": Specimen(TwoTowers, _PAIRS),
    "LSTM": Specimen(Recurrent, _TEXT),
}

#: Architectures with code that is harder to pipeline: recurrent states, experts, detection, reversible layers, hooks.
MORE: dict[str, Specimen] = {
    "Qwen3-Next": _specimen(
        "Qwen3NextForCausalLM",
        _TEXT,
        **_FEWER,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "RecurrentGemma": _specimen("RecurrentGemmaForCausalLM", _TEXT, **_FEWER, lru_width=32, attention_window_size=8),
    "Reformer": _specimen(
        "ReformerModelWithLMHead",
        _LONGER,
        ranks=3,  # all blocks run inside one autograd.Function
        dropout=False,  # the autograd.Function would draw random numbers again in its backward
        vocab_size=VOCABULARY,
        hidden_size=32,
        attention_head_size=8,
        num_attention_heads=4,
        feed_forward_size=64,
        axial_pos_embds_dim=(16, 16),
        axial_pos_shape=(4, 4),
        local_attn_chunk_length=4,
        attn_layers=["local"] * 4,
        is_decoder=True,
        max_position_embeddings=16,
    ),
    "RWKV": _specimen(
        "RwkvForCausalLM",
        _TEXT,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        rescale_every=2,
        context_length=16,
    ),
    "Perceiver": _specimen(
        "PerceiverForMaskedLM",
        _TEXT,
        rounded="perceiver.input_preprocessor.embeddings.weight",
        vocab_size=VOCABULARY,
        num_latents=8,
        d_latents=32,
        d_model=32,
        num_self_attends_per_block=4,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=32,
        max_position_embeddings=TOKENS,
    ),
    "DETR": _specimen("DetrForObjectDetection", _DETECTED, **_DETECTOR, auxiliary_loss=True),
    "Conditional DETR": _specimen("ConditionalDetrForObjectDetection", _DETECTED, **_DETECTOR),
    "YOLOS": _specimen("YolosForObjectDetection", _DETECTED, **_SQUARE, num_detection_tokens=5, num_labels=3),
    "Mask2Former": _specimen(
        "Mask2FormerForUniversalSegmentation",
        _SEGMENTS,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=5,
        num_labels=3,
        train_num_points=16,
        backbone_config={"model_type": "swin", **_SMALL_SWIN},
    ),
    "DPT": _specimen(
        "DPTForSemanticSegmentation",
        _PIXELS,
        **{**_PATCHES, "num_hidden_layers": 4},
        is_hybrid=False,
        num_labels=3,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
    ),
    "LLaVA": _specimen(
        "LlavaForConditionalGeneration",
        _PICTURED,
        image_token_index=VOCABULARY - 1,
        text_config={"model_type": "llama", **_FEWER},
        vision_config={"model_type": "clip_vision_model", **_CLIP_IMAGE},
    ),
    "Switch": _specimen(
        "SwitchTransformersForConditionalGeneration",
        _TEXT,
        **_T5,
        num_decoder_layers=4,
        num_experts=4,
        expert_capacity=8,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
    ),
    "DeepSeek-V3": _specimen(
        "DeepseekV3ForCausalLM",
        _TEXT,
        **{**_FEWER, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "GPT-OSS": _specimen("GptOssForCausalLM", _TEXT, **_FEWER, head_dim=8, num_local_experts=4, sliding_window=4),
    "Mamba-2": _specimen(
        "Mamba2ForCausalLM",
        _TEXT,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        state_size=4,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    "GPT-J": _specimen("GPTJForCausalLM", _TEXT, vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, rotary_dim=4),
    "Gemma3": _specimen("Gemma3ForCausalLM", _TEXT, **_FEWER, head_dim=8, sliding_window=4),
    "XLNet": _specimen("XLNetLMHeadModel", _TEXT, vocab_size=VOCABULARY, d_model=32, n_layer=4, n_head=4, d_inner=64),
    "Longformer": _specimen(
        "LongformerForMaskedLM",
        _PADDED,
        **{**_WORDS, "num_hidden_layers": 4},
        attention_window=4,
        pad_token_id=1,
        max_position_embeddings=40,
    ),
    "FNet": _specimen(
        "FNetForMaskedLM", _TEXT, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4
    ),
    "Funnel": _specimen(
        "FunnelForMaskedLM",
        _TEXT,
        vocab_size=VOCABULARY,
        block_sizes=[2, 2],
        num_decoder_layers=2,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    "ConvBERT": _specimen(
        "ConvBertForMaskedLM",
        _PADDED,
        **{**_WORDS, "num_hidden_layers": 4},
        embedding_size=16,
        head_ratio=2,
        conv_kernel_size=3,
    ),
    "ProphetNet": _specimen(
        "ProphetNetForConditionalGeneration",
        _TEXT,
        vocab_size=VOCABULARY,
        hidden_size=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_encoder_layers=4,
        num_decoder_layers=4,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        ngram=2,
        max_position_embeddings=32,
    ),
    "ViLT": _specimen(
        "ViltForQuestionAnswering",
        _ASKED,
        **{**_WORDS, "num_hidden_layers": 4},
        image_size=32,
        patch_size=8,
        max_image_length=-1,
        num_labels=3,
    ),
    "PVT": _specimen(
        "PvtForImageClassification",
        _LARGER,
        **_STAGED,
        image_size=64,
        num_attention_heads=[1, 2, 3, 4],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "VideoMAE": _specimen("VideoMAEForVideoClassification", _VIDEO, **_CLIP_IMAGE, num_frames=4),
    "Autoformer": _specimen("AutoformerForPrediction", _SERIES, **_FORECAST, moving_average=5),
}
