"""The zoo: architectures of many kinds, built small from their configurations, with a mini-batch for each.

Nothing is downloaded: weights are drawn when a model is built. Dropout is on everywhere, also where a configuration
leaves it out. Layers that are skipped at random (layerdrop) never are: a stage cannot tell another which it skipped.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

__all__ = ["ZOO", "Specimen"]

transformers.logging.set_verbosity_error()

ROWS, TOKENS, VOCABULARY = 8, 12, 99


@dataclass(frozen=True)
class Specimen:
    """One model: how it is built, its keyword inputs of ROWS rows, and where it has no loss of its own a loss."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Any]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None

    def made(self) -> nn.Module:
        """The model, in training mode, with the same weights each time."""
        torch.manual_seed(0)
        return self.build().train()

    def rows(self, count: int) -> dict[str, Any]:
        """The inputs' first rows."""
        return {name: value[:count] if isinstance(value, Tensor) else value for name, value in self.inputs.items()}

    @property
    def target(self) -> dict[str, Tensor]:
        """What the loss function compares with, if there is one."""
        return {} if self.loss_fn is None else {"target": torch.zeros(ROWS)}


def _specimen(architecture: str, inputs: dict[str, Any], loss_fn: Any = None, **choices: Any) -> Specimen:
    kind = getattr(transformers, architecture)

    def build() -> nn.Module:
        config = kind.config_class(**choices)
        _drop(config)
        return kind(config)

    return Specimen(build, inputs, loss_fn)


def _drop(config: PreTrainedConfig) -> None:
    for name, value in vars(config).copy().items():
        if isinstance(value, PreTrainedConfig):
            _drop(value)
        elif "layerdrop" in name:
            setattr(config, name, 0.0)
        elif ("drop" in name or name.endswith("_pdrop")) and value in (0.0, None):
            setattr(config, name, 0.1)


def _square(output: Any, target: Tensor) -> Tensor:
    first = output if isinstance(output, Tensor) else output[0]
    return (first.mean(tuple(range(1, first.dim()))) - target).pow(2).mean()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


# ---- models of our own -----------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Long skips, used last to first."""

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
    """Two inputs, two losses."""

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
    """LSTMs, each of which hands its state on to the next."""

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
