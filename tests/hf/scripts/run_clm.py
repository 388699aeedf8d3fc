"""Fine-tune a causal language model on a text file, in the style of the examples of transformers."""

import math
from dataclasses import dataclass, field

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DataArguments:
    """The text to train on."""

    train_file: str = field(metadata={"help": "A text file."})
    block_size: int = field(default=32, metadata={"help": "The length of a row."})


def blocks(text: bytes, size: int) -> TensorDataset:
    """Return the text as rows of bytes."""
    return TensorDataset(
        torch.frombuffer(bytearray(text[: len(text) // size * size]), dtype=torch.uint8).view(-1, size)
    )


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch. The model shifts the labels."""
    ids = torch.stack([row[0] for row in rows]).long()
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train, save, evaluate, and write the metrics."""
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    size = {"n_positions": data_args.block_size, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # random numbers would differ
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **size, **dropout))
    with open(data_args.train_file, "rb") as file:
        text = file.read()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks(text[:4096], data_args.block_size),
        eval_dataset=blocks(text[4096:5120], data_args.block_size),
        data_collator=collate,
    )
    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=get_last_checkpoint(training_args.output_dir))
        trainer.save_model()
        trainer.log_metrics("train", train_result.metrics)
        trainer.save_metrics("train", train_result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
