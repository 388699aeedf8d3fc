"""Small models of Hugging Face, data for them, and trainers that train them alone or in pipeline stages."""

import math
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.trainer_callback import PrinterCallback

from pipesched.hf import PipelineArguments, PipelineSeq2SeqTrainer, PipelineTrainer

WORDS, LENGTH, CLASSES = 64, 12, 5
TWO = {"pipeline_devices": ["cpu", "cpu"], "pipeline_schedule": "1f1b"}
_SIZE = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
_BERT = {**_SIZE, "intermediate_size": 64, "max_position_embeddings": 16}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(dropout: float = 0.0) -> nn.Module:
    size = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 2}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**size, **rates, bos_token_id=None, eos_token_id=None))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_BERT))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**_BERT, **_DRY))


def t5() -> nn.Module:
    """Return a T5 with the activation of T5 1.1. At the kink of a ReLU, rounding changes a gradient by far more."""
    size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **size, dropout_rate=0, decoder_start_token_id=0))


def vit() -> nn.Module:
    size = {**_SIZE, "intermediate_size": 64, "image_size": 8, "patch_size": 4, "num_labels": CLASSES}
    del size["vocab_size"]
    return ViTForImageClassification(ViTConfig(**size, **_DRY))


def token_classifier() -> nn.Module:
    return BertForTokenClassification(BertConfig(**_BERT, **_DRY, num_labels=CLASSES))


def sequence_classifier() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**_BERT, **_DRY, num_labels=CLASSES))


def regressor() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**_BERT, **_DRY, num_labels=1))


def adapted_gpt2() -> nn.Module:
    """Return a GPT-2 with an adapter. Only the adapter trains."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, fan_in_fan_out=True))


def rows(make: Callable[[], nn.Module], count: int, seed: int) -> list[dict[str, Any]]:
    """Return the data for a model: padded texts of different lengths, or images."""
    generator = torch.Generator().manual_seed(seed)
    return [_row(make, generator, number) for number in range(count)]


def _row(make: Callable[[], nn.Module], generator: torch.Generator, number: int) -> dict[str, Any]:
    if make is vit:
        return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": number % CLASSES}
    words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
    length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
    row = {"input_ids": words, "attention_mask": (torch.arange(LENGTH) < length).long()}
    labels = words.masked_fill(row["attention_mask"] == 0, -100)
    if make is sequence_classifier:
        return {**row, "labels": number % CLASSES}
    if make is regressor:
        return {**row, "labels": float(number % CLASSES)}
    if make is token_classifier:
        labels = labels.where(labels < 0, labels % CLASSES)
    return {**row, "labels": labels}


def rows_with_decoder_inputs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return data for a T5 that gets no labels, because the loss is computed outside."""
    return [{**row, "decoder_input_ids": row["input_ids"]} for row in rows(t5, count, seed)]


def measured(prediction: Any) -> dict[str, float]:
    outputs = prediction.predictions
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    return {"size": float(abs(outputs).mean()), "rows": len(outputs), "labels": float(prediction.label_ids.sum())}


def trained(
    make: Callable[[], nn.Module],
    pipeline: dict[str, Any] | None = None,
    *,
    resume: str | None = None,
    parts: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    train: bool = True,
    data: Callable[[int, int], list[dict[str, Any]]] | None = None,
    **options: Any,
) -> Trainer:
    """Return a trainer that has trained a model: a PipelineTrainer with these PipelineArguments, or a Trainer for None.

    Args:
        make: builds the model, unless ``model`` is given.
        pipeline: the PipelineArguments.
        resume: the checkpoint from which training resumes.
        parts: further arguments of the trainer, such as callbacks.
        model: the model.
        train: whether to train at all.
        data: makes the data from a count and a seed. Default: those that suit the model.
        **options: TrainingArguments that differ from the ones below.

    """
    torch.manual_seed(0)
    steps = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 1}
    eval_steps = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4, "save_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    given = {"output_dir": tempfile.gettempdir(), "learning_rate": 1e-3, "seed": 3, **steps, **eval_steps, **quiet}
    generates = "predict_with_generate" in options
    arguments = Seq2SeqTrainingArguments if generates else TrainingArguments
    made = data or (lambda count, seed: rows(make, count, seed))
    common = {
        "model": make() if model is None else model,
        "args": arguments(**{**given, **options}),
        "train_dataset": made(60, 1),
        "eval_dataset": made(11, 2),
        "compute_metrics": measured,
        **(parts or {}),
    }
    if pipeline is None:
        trainer = (Seq2SeqTrainer if generates else Trainer)(**common)
    else:
        kind = PipelineSeq2SeqTrainer if generates else PipelineTrainer
        trainer = kind(pipeline=PipelineArguments(**pipeline), **common)
    trainer.remove_callback(PrinterCallback)
    if train:
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def figures(trainer: Trainer) -> dict[str, Any]:
    """Return the figures of a trainer's state that do not depend on the speed and memory of the machine."""
    state = {**vars(trainer.state)}
    skipped = ("runtime", "per_second", "preparation_time", "_mem_")
    state["log_history"] = [
        {name: value for name, value in entry.items() if not any(word in name for word in skipped)}
        for entry in state["log_history"]
    ]
    return state


def largest_difference(one: Any, other: Any, place: str = "") -> tuple[float, str]:
    """Return the largest relative difference of two states' numbers, and its place; everything else must be equal."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (place, one.keys() ^ other.keys())
        pairs = [(one[name], other[name], f"{place}.{name}") for name in one]
    elif isinstance(one, list):
        assert len(one) == len(other), place
        pairs = [(a, b, f"{place}[{number}]") for number, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, float) and "epoch" not in place:
        if math.isnan(one) or math.isnan(other):
            return (0.0 if math.isnan(one) and math.isnan(other) else math.inf), place
        return abs(one - other) / max(abs(one), abs(other), 1e-12), place
    else:
        assert one == other, (place, one, other)
        return 0.0, place
    return max((largest_difference(*pair) for pair in pairs), default=(0.0, place))


def weights(trainer: Trainer) -> list[Tensor]:
    """Return copies of all weights."""
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]
