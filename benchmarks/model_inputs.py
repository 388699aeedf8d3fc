"""Inputs of transformers classes: micro-batches of random text, images, sound and labels that fit a configuration.

The names in the signature of ``forward`` say what a class needs, its name says which labels. Where several forms are in
use (images of rows or packed patches, time first or last), `recipes` gives them one after another. A number that only
the model knows, such as the number of placeholders that an image fills in the text, is read from its error message.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from tiny_configs import parts_of
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Recipe", "learned", "microbatch", "recipes"]

TOKENS = 12
FIRST_WORD, LAST_WORD = 10, 100
SAMPLES = 6400
FRAMES = 64


@dataclass(frozen=True)
class Recipe:
    """A form of the inputs. The loss is the model's own if it is given labels, else a function of the output."""

    own_loss: bool = True
    images: str = "none"  # "rows", "stacked" (rows, images), "packed" (patches), or "none"
    sound: str = "none"  # "time first", "time last" or "none"
    labels: str = "tokens"
    extras: frozenset[str] = frozenset()
    placeholders: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = ["own loss" if self.own_loss else "loss of the output"]
        parts += [f"images: {self.images}"] if self.images != "none" else []
        parts += [f"sound: {self.sound}"] if self.sound != "none" else []
        parts += [f"labels: {self.labels.replace('_', ' ')}"] if self.own_loss else []
        return ", ".join([*parts, *sorted(self.extras)])


def recipes(kind: type[PreTrainedModel]) -> Iterator[Recipe]:
    """Yield the forms of inputs that the class may accept, with all modalities first."""
    names = set(_parameters(kind))
    text = bool(names & {"input_ids"})
    images = ["none"]
    if names & {"pixel_values", "pixel_values_videos", "flattened_patches"}:
        images = ["packed"] if "image_grid_thw" in names else []
        images += ["rows", "stacked"] + (["none"] if text else [])
    sound = ["none"]
    if names & {"input_features", "input_values", "audio_values"}:
        sound = ["time last", "time first"] + (["none"] if text else [])
    labelled = bool(names & LABELS)
    label_forms = [*dict.fromkeys([_usual_form(kind), "output", "rows", "tokens", "decoder"])] if labelled else []
    for image in images:
        for wave in sound:
            for form in label_forms:
                yield Recipe(images=image, sound=wave, labels=form)
    for image in images:
        for wave in sound:
            yield Recipe(own_loss=False, images=image, sound=wave)


def _usual_form(kind: type[PreTrainedModel]) -> str:
    return next((form for pattern, form in FORMS.items() if re.search(pattern, kind.__name__)), "tokens")


LABELS = {
    "labels",
    "return_loss",
    "start_positions",
    "future_values",
    "mask_labels",
    "mc_labels",
    "next_sentence_label",
}


def microbatch(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    recipe: Recipe,
    lengths: Sequence[float],
    seed: int,
    output: Any = None,
) -> dict[str, Any]:
    """Return keyword inputs of one micro-batch, with one row for each of ``lengths``, which are parts of a full row."""
    return _Maker(kind, config, recipe, lengths, seed, output).made()


def learned(recipe: Recipe, error: BaseException, config: PretrainedConfig, rows: int) -> Recipe | None:
    """Return a recipe without the fault that an error names, or None if it names no number that helps."""
    text = str(error)
    match = re.search(r"(?i)(image|video|audio|multimodal)?[^.]*tokens?[^.]*features", text)
    if match and "match" in text:
        word = (match[1] or "image").lower()
        count = _features(error, word) or _number_of_features(text)
        each = count // rows if count else 0
        word = "image" if word == "multimodal" else word
        if each and recipe.placeholders.get(word) != each:
            return replace(recipe, placeholders={**recipe.placeholders, word: each})
    if "argument 'indices'" in text and "decoder_input_ids" not in recipe.extras:
        return replace(recipe, extras=recipe.extras | {"decoder_input_ids"})
    for name in (
        "token_type_ids",
        "mm_token_type_ids",
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "bool_masked_pos",
    ):
        asked = f"`{name}`" in text or f'`model_inputs["{name}"]`' in text or name in text
        own = "decoder_input_ids" if name == "decoder_inputs_embeds" else name
        if asked and own not in recipe.extras:
            return replace(recipe, extras=recipe.extras | {own})
    return None


def _number_of_features(text: str) -> int:
    found = re.search(r"features:? \(?(\d+)", text)
    return int(found[1]) if found else 0


def _features(error: BaseException, word: str) -> int:
    """Read the number of features from the frames that raised the error."""
    trace = error.__traceback__
    found = 0
    while trace is not None:
        local = trace.tb_frame.f_locals
        embeds = local.get("inputs_embeds")
        for name in (f"{word}_features", "features", f"{word}_hidden_states", f"{word}_embeds"):
            value = local.get(name)
            parts = list(value) if isinstance(value, list | tuple) else [value]
            if isinstance(embeds, Tensor) and parts and all(isinstance(part, Tensor) for part in parts):
                found = sum(part.numel() for part in parts) // embeds.shape[-1]
                break
        trace = trace.tb_next
    return found


def _parameters(kind: type[PreTrainedModel]) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(kind.forward).parameters)
    return {name: parameter for name, parameter in found.items() if name not in ("self", "kwargs", "args")}


class _Maker:
    def __init__(
        self,
        kind: type[PreTrainedModel],
        config: PretrainedConfig,
        recipe: Recipe,
        lengths: Sequence[float],
        seed: int,
        output: Any,
    ) -> None:
        self.kind, self.config, self.recipe, self.lengths, self.output = kind, config, recipe, lengths, output
        self.rows = len(lengths)
        self.names = _parameters(kind)
        self.draw = torch.Generator().manual_seed(seed)
        self.text = self._text_config()
        self.marks = sum(recipe.placeholders.values())
        self.tokens = TOKENS + self.marks
        self.values: dict[str, Any] = {}

    def made(self) -> dict[str, Any]:
        for name, make in MAKERS.items():
            if name in self.names:
                value = make(self)
                if value is not None:
                    self.values[name] = value
        if self.recipe.own_loss:
            self.values |= self.labels()
        choices = {"input_ids", "attention_mask", "token_type_ids", "bbox"}
        if "DoubleHeads" in self.kind.__name__:
            choices.add("labels")
        if re.search("ForMultipleChoice|DoubleHeads", self.kind.__name__):
            for name in choices & set(self.values):
                self.values[name] = torch.stack([self.values[name], self.values[name].flip(0)], 1)
        return self.values

    # ---- configurations ----------------------------------------------------------------------------------------

    def _text_config(self) -> Any:
        try:
            return self.config.get_text_config(decoder=False)
        except Exception:
            return self.config

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these settings that a configuration has, the outer configurations first."""
        for part in parts_of(self.config):
            for name in names:
                value = vars(part).get(name)
                if value is not None:
                    return value
        return default

    def marked(self) -> Tensor:
        """Return the tokens that stand for images, video or sound."""
        settings = (item for part in parts_of(self.config) for item in vars(part).items())
        found = {mark for name, mark in settings if re.search("(image|video|audio).*token_(id|index)$", name)}
        return torch.tensor([mark for mark in found if isinstance(mark, int)])

    def words(self, *shape: int, high: int | None = None) -> Tensor:
        """Return random tokens that stand for text."""
        known = self.get("vocab_size", default=high or LAST_WORD)
        size = min(LAST_WORD, high or known, known if isinstance(known, int) else LAST_WORD)
        low = FIRST_WORD if size > FIRST_WORD + 2 else 0
        found = torch.randint(low, size, shape, generator=self.draw)
        marked = self.marked()
        text = next(word for word in range(low, size) if word not in marked)
        return torch.where(torch.isin(found, marked), text, found)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw)

    def mask(self, length: int) -> Tensor:
        """Return a mask of ones, with zeros at the end of rows that are padded."""
        ends = torch.tensor([max(1, round(part * length)) for part in self.lengths])
        return (torch.arange(length) < ends[:, None]).long()

    # ---- text --------------------------------------------------------------------------------------------------

    def input_ids(self) -> Tensor | None:
        if (self.get("is_encoder_decoder") and self.is_speech()) or self.kind.main_input_name == "inputs":
            return None
        ids = self.words(self.rows, self.tokens)
        at = 1
        for word, count in self.recipe.placeholders.items():
            mark = self.get(f"{word}_token_id", f"{word}_token_index", "image_token_id", "image_token_index")
            ids[:, at : at + count] = mark
            at += count
        separator = self.get("sep_token_id")
        if "Longformer" in self.kind.__name__:
            ids[:, 2:5] = separator
        pad = getattr(self.text, "pad_token_id", None)
        pad = pad if isinstance(pad, int) and pad >= 0 else 0
        end = getattr(self.text, "eos_token_id", None)
        if isinstance(end, int) and self.get("is_encoder_decoder") and "Classification" in self.kind.__name__:
            last = self.mask(self.tokens).sum(1) - 1
            ids[torch.arange(self.rows), last] = end
        return torch.where(self.mask(self.tokens).bool(), ids, pad)

    def is_speech(self) -> bool:
        return self.kind.main_input_name in ("input_features", "input_values")

    def attention_mask(self) -> Tensor | None:
        if "input_ids" in self.values:
            return self.mask(self.tokens)
        for name in ("input_features", "input_values"):
            if name in self.values:
                shape = self.values[name].shape
                time = shape[1] if len(shape) == 2 or self.recipe.sound == "time first" else shape[2]
                return self.mask(time)
        if "flattened_patches" in self.values:
            return torch.ones(self.values["flattened_patches"].shape[:2])
        return None

    def token_types(self, name: str) -> Any:
        if name not in self.recipe.extras and not (name == "mm_token_type_ids" and self.marks):
            return None
        types = torch.zeros(self.rows, self.tokens, dtype=torch.long)
        types[:, 1 : 1 + self.marks] = 1
        return types

    def decoder_input_ids(self) -> Tensor | None:
        if self.recipe.own_loss and "decoder_input_ids" not in self.recipe.extras:
            return None
        if not self.get("is_encoder_decoder") and "decoder_input_ids" not in self.recipe.extras:
            return None
        return self.words(self.rows, TOKENS)

    def bbox(self) -> Tensor:
        if "bbox_first_token_mask" in self.names:
            return torch.rand(self.rows, self.tokens, 8, generator=self.draw)
        corners = torch.randint(1, 50, (self.rows, self.tokens, 4), generator=self.draw)
        corners[..., 2:] = corners[..., :2] + 10
        return corners if "Udop" not in self.kind.__name__ else corners / 100

    # ---- images ------------------------------------------------------------------------------------------------

    def image_size(self) -> tuple[int, int]:
        for part in parts_of(self.config):
            size = vars(part).get("image_size")
            size = vars(part).get("img_size") if size is None else size
            size = vars(part).get("input_size") if size is None and "patch_size" in vars(part) else size
            if isinstance(size, dict):
                return size["height"], size["width"]
            if isinstance(size, list | tuple):
                return int(size[0]), int(size[1])
            if isinstance(size, int) and size > 1:
                return size, size
        return 64, 64

    def channels(self) -> int:
        found = self.get("num_channels", "in_chans", "image_channels", default=3)
        return found if isinstance(found, int) else 3

    def pixel_values(self) -> Tensor | None:
        form = self.recipe.images
        if form == "none":
            return None
        height, width = self.image_size()
        channels = self.channels()
        if form == "packed":
            return self.noise(self.rows * 16, self.patch())
        if "spatial_shapes" in self.names:
            return self.noise(self.rows, 16, self.patch())
        if self.frames():
            return self.noise(self.rows, self.frames(), channels, height, width)
        if form == "stacked":
            count = self.get("num_frames", "num_images", default=1)
            return self.noise(self.rows, count if isinstance(count, int) and count > 0 else 1, channels, height, width)
        return self.noise(self.rows, channels, height, width)

    def patch(self) -> int:
        size = self.get("patch_size", default=16)
        time = self.get("temporal_patch_size", default=1) if self.recipe.images == "packed" else 1
        return self.channels() * time * (prod(size) if isinstance(size, list | tuple) else size**2)

    def frames(self) -> int:
        frames = self.get("num_frames", "frames_per_clip", default=0)
        return frames if "pixel_values" in str(self.kind.main_input_name) and "input_ids" not in self.names else 0

    def grid(self) -> Tensor | None:
        return torch.tensor([[1, 4, 4]] * self.rows) if self.recipe.images == "packed" else None

    def videos(self) -> Tensor | None:
        if self.kind.main_input_name != "pixel_values_videos":
            return None
        return self.noise(self.rows, self.frames() or 4, self.channels(), *self.image_size())

    def pixel_mask(self) -> Tensor | None:
        if "pixel_values" not in self.values:
            return None
        *_, height, width = self.values["pixel_values"].shape
        columns = self.mask(width)[:, None].expand(-1, height, -1).contiguous()
        return columns if self.values["pixel_values"].dim() == 4 else columns[:, None]

    def pixel_attention_mask(self) -> Tensor | None:
        if "pixel_values" not in self.values:
            return None
        return self.mask(16) if "spatial_shapes" in self.names else self.pixel_mask()

    def image_sizes(self) -> Tensor | None:
        return torch.tensor([self.image_size()] * self.rows) if "pixel_values" in self.values else None

    def masked_patches(self) -> Tensor | None:
        if "bool_masked_pos" not in self.recipe.extras and "bool_masked_pos" in self.names and self.output is None:
            optional = self.names["bool_masked_pos"].default is not inspect.Parameter.empty
            if optional and not re.search("MaskedImage|PreTraining", self.kind.__name__):
                return None
        size = self.get("patch_size", default=16)
        size = size[0] if isinstance(size, list | tuple) else size
        height, width = self.image_size()
        count = (height // size) * (width // size)
        if self.frames():
            count *= self.frames() // self.get("tubelet_size", default=1)
        taken = torch.zeros(self.rows, count, dtype=torch.bool)
        taken[:, : max(1, count // 2)] = True
        return taken

    # ---- sound and series --------------------------------------------------------------------------------------

    def input_features(self) -> Tensor | None:
        if self.recipe.sound == "none":
            return None
        positions = self.get("max_source_positions")
        bins = self.get(
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "num_mel_bins",
            "feature_size",
            "n_mels",
            default=80,
        )
        if self.recipe.sound == "time last":
            return self.noise(self.rows, bins, 2 * positions if positions else FRAMES)
        return self.noise(self.rows, self.get("max_length", default=FRAMES), bins)

    def input_values(self) -> Tensor | None:
        if self.recipe.sound == "none":
            return None
        if self.recipe.sound == "time last":
            return self.noise(self.rows, SAMPLES)
        bins = self.get("num_mel_bins")
        if bins is None:
            return self.noise(self.rows, 1, SAMPLES)
        return self.noise(self.rows, self.get("max_length", default=FRAMES), bins)

    def past_values(self) -> Tensor:
        length = self.get("context_length", default=32)
        lags = self.get("lags_sequence", default=[0])
        wide = self.get("num_input_channels", "input_size", default=1)
        length += max(lags)
        if wide == 1 and "num_input_channels" not in vars(self.config):
            return self.noise(self.rows, length)
        return self.noise(self.rows, length, wide)

    def like_past(self, value: float) -> Tensor:
        return torch.full_like(self.values["past_values"], value)

    def time_features(self, length: int) -> Tensor:
        wide = self.get("num_time_features", default=0)
        return self.noise(self.rows, length, wide)

    def past_time_features(self) -> Tensor:
        return self.time_features(self.values["past_values"].shape[1])

    def future_time_features(self) -> Tensor:
        return self.time_features(self.get("prediction_length", default=4))

    # ---- labels ------------------------------------------------------------------------------------------------

    def labels(self) -> dict[str, Any]:
        if "return_loss" in self.names:
            return {"return_loss": True}
        if "start_positions" in self.names:
            zeros = torch.zeros(self.rows, dtype=torch.long)
            more = {"is_impossible": zeros.float(), "cls_index": zeros} if "is_impossible" in self.names else {}
            more |= {"question_positions": zeros + 1} if "question_positions" in self.names else {}
            return {"start_positions": zeros + 1, "end_positions": zeros + 2, **more}
        if "future_values" in self.names:
            length = self.get("prediction_length", default=4)
            past = self.values["past_values"]
            return {"future_values": self.noise(self.rows, length, *past.shape[2:])}
        if "mask_labels" in self.names:
            height, width = self.image_size()
            masks = [torch.randint(0, 2, (2, height, width), generator=self.draw).float() for _ in self.lengths]
            return {"mask_labels": masks, "class_labels": [torch.tensor([0, 1]) for _ in self.lengths]}
        values: dict[str, Any] = {}
        if "next_sentence_label" in self.names:
            values["next_sentence_label"] = self.classes(self.rows)
        if "sentence_order_label" in self.names:
            values["sentence_order_label"] = self.classes(self.rows)
        if "mc_labels" in self.names:
            values["mc_labels"] = self.classes(self.rows)
        if "labels" in self.names:
            values["labels"] = self.own_labels()
        return values

    def own_labels(self) -> Any:
        return getattr(self, f"labels_as_{self.recipe.labels}")()

    def classes(self, *shape: int) -> Tensor:
        return torch.randint(0, max(1, self.num_labels()), shape, generator=self.draw)

    def num_labels(self) -> int:
        found = getattr(self.config, "num_labels", 2)
        return found if isinstance(found, int) else 2

    def labels_as_rows(self) -> Tensor:
        return self.classes(self.rows)

    def labels_as_tokens(self) -> Tensor:
        ids = self.values.get("input_ids")
        if ids is None or (self.get("is_encoder_decoder") and "decoder_input_ids" in self.names):
            return self.labels_as_decoder()
        padded = self.values.get("attention_mask", torch.ones_like(ids)) == 0
        marked = torch.zeros_like(ids)
        marked[:, 1 : 1 + self.marks] = 1
        return ids.masked_fill(padded | marked.bool(), -100)

    def labels_as_decoder(self) -> Tensor:
        words = self.words(self.rows, TOKENS)
        return words.masked_fill(self.mask(TOKENS) == 0, -100)

    def labels_as_classes_of_tokens(self) -> Tensor:
        return self.classes(self.rows, self.tokens).masked_fill(self.mask(self.tokens) == 0, -100)

    def labels_as_transcript(self) -> Tensor:
        return self.words(self.rows, 3)

    def labels_as_pixels(self) -> Tensor:
        return self.classes(self.rows, *self.image_size())

    def labels_as_depths(self) -> Tensor:
        return torch.rand(self.rows, *self.image_size(), generator=self.draw) + 0.5

    def labels_as_boxes(self) -> list[dict[str, Tensor]]:
        height, width = self.image_size()
        box = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.2]])
        masks = torch.zeros(2, height, width)
        masks[:, : height // 2] = 1
        return [{"class_labels": torch.tensor([0, 1]), "boxes": box, "masks": masks} for _ in self.lengths]

    def labels_as_spectrogram(self) -> Tensor:
        return self.noise(self.rows, 8, self.get("num_mel_bins", default=80))

    def labels_as_output(self) -> Any:
        """Return labels of the shape of the model's own output without labels."""
        logits = self.output
        if logits is None:
            return self.labels_as_rows()
        return torch.zeros_like(logits.detach()).float()


#: The form of the labels, by the class's name: the first that fits.
FORMS = {
    "ForMultipleChoice|ForSequenceClass|ForImageClass|ForVideoClass|ForXVector|ForNextSent|ForAudioClass": "rows",
    "ForVisualReasoning|ForImagesAndText|ForSpeechClass|ForImageTextRetr|ForImageAndTextRetr": "rows",
    "ForAudioFrame": "output",
    "SpeechT5ForTextToSpeech|ForSpeechToSpeech": "spectrogram",
    "ForTokenClass": "classes_of_tokens",
    "ForCTC": "transcript",
    "ForSemanticSeg": "pixels",
    "ForDepth": "depths",
    "ObjectDetection|ForSegmentation|ForInstanceSeg": "boxes",
}

#: How each argument of a forward is made, in this order; None leaves the argument out.
MAKERS = {
    "pixel_values": _Maker.pixel_values,
    "pixel_values_videos": _Maker.videos,
    "flattened_patches": lambda m: m.noise(m.rows, 16, m.get("patch_embed_hidden_size", default=768) + 2),
    "image_grid_thw": _Maker.grid,
    "spatial_shapes": lambda m: torch.tensor([[4, 4]] * m.rows) if "pixel_values" in m.values else None,
    "pixel_mask": _Maker.pixel_mask,
    "pixel_attention_mask": _Maker.pixel_attention_mask,
    "image_sizes": _Maker.image_sizes,
    "bool_masked_pos": _Maker.masked_patches,
    "input_features": _Maker.input_features,
    "input_values": _Maker.input_values,
    "past_values": _Maker.past_values,
    "past_time_features": _Maker.past_time_features,
    "future_time_features": _Maker.future_time_features,
    "past_observed_mask": lambda m: m.like_past(1.0) if "past_values" in m.values else None,
    "input_ids": _Maker.input_ids,
    "inputs": lambda m: m.words(m.rows, m.tokens),
    "attention_mask": _Maker.attention_mask,
    "token_type_ids": lambda m: m.token_types("token_type_ids"),
    "mm_token_type_ids": lambda m: m.token_types("mm_token_type_ids"),
    "decoder_input_ids": _Maker.decoder_input_ids,
    "bbox": lambda m: m.bbox(),
    "qformer_input_ids": lambda m: m.words(m.rows, TOKENS),
    "prompt_pixel_values": lambda m: m.noise(*m.values["pixel_values"].shape),
    "prompt_masks": lambda m: m.noise(*m.values["pixel_values"].shape),
    "visual_feats": lambda m: m.noise(m.rows, 4, m.get("visual_feat_dim", default=2048)),
    "visual_pos": lambda m: torch.rand(m.rows, 4, 4, generator=m.draw),
    "visual_embeds": lambda m: m.noise(m.rows, 4, m.get("visual_embedding_dim", default=512)),
    "entity_ids": lambda m: torch.ones(m.rows, 2, dtype=torch.long),
    "entity_attention_mask": lambda m: torch.ones(m.rows, 2, dtype=torch.long),
    "entity_position_ids": lambda m: torch.tensor([[[1, 2, -1], [3, 4, -1]]] * m.rows),
    "entity_start_positions": lambda m: torch.tensor([[1, 3]] * m.rows),
    "entity_end_positions": lambda m: torch.tensor([[2, 4]] * m.rows),
    "codebook_idx": lambda m: 1,
}
