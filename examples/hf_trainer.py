"""Train a language model with Hugging Face's Trainer, in pipeline stages: the same script in one process or many.

    python examples/hf_trainer.py --output_dir runs/hf --pipeline_devices cpu cpu
    torchrun --nproc_per_node 2 examples/hf_trainer.py --output_dir runs/hf --use_cpu
    torchrun --nproc_per_node 4 examples/hf_trainer.py --output_dir runs/hf --use_cpu --pipeline_parallel_size 2

The options are those of TrainingArguments and PipelineArguments. The text is the source code of Python's standard
library, as bytes; nothing is downloaded. Run the same command again with --resume_from_checkpoint runs/hf/checkpoint-50
to continue, also with another number of processes.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

try:
    from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, TrainingArguments, set_seed

    from pipesched.hf import PipelineArguments, PipelineTrainer
except ImportError as error:
    sys.exit(f"this example needs {error.name}, which is not installed; pip install 'pipesched[hf]'")

CONTEXT = 64


class Text(Dataset):
    """Pieces of a text as bytes. The labels equal the inputs, because the model shifts the labels."""

    def __init__(self, text: bytes) -> None:
        self._pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // CONTEXT * CONTEXT]
        self._pieces = self._pieces.view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self._pieces[index].long()
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    """Train for 100 steps, evaluate and save every 50."""
    parser = HfArgumentParser((TrainingArguments, PipelineArguments), description=__doc__)
    parser.set_defaults(max_steps=100, eval_steps=50, eval_strategy="steps", save_steps=50, logging_steps=10)
    parser.set_defaults(learning_rate=2e-3, warmup_steps=10, lr_scheduler_type="cosine", report_to="none")
    args, pipeline = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    size = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **size))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    trainer = PipelineTrainer(
        model=model,
        args=args,
        pipeline=pipeline,
        train_dataset=Text(text[:2_000_000]),
        eval_dataset=Text(text[2_000_000:2_020_000]),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.end()


if __name__ == "__main__":
    main()
