"""Hugging Face's Trainer: compares a PipelineTrainer with Trainer, and its step time with that of a bare loop.

    python benchmarks/hf_trainer.py [--pairs 15]                       # the time of a step
    python benchmarks/hf_trainer.py --equal [--only gpt2 bert ...]     # losses, metrics and counts; about 30 minutes

The time: a GPT-2 of two ranks in this process, whose steps take about 50 ms. The trainer and a loop of `pipe.step` run
the same pipeline in turn, ten steps each, with the same data loader, clipping, optimizer and scheduler. The ratio is
that of the median times from one step's end to the next.

--equal: for each model, with 1 and 4 accumulation steps, 30 steps without dropout: two ranks in one process and over
two processes beside Trainer in one process; two replicas of two ranks, with zero 0 and 2, beside Trainer in two
processes. Prints the largest relative difference of all figures of trainer_state.json, and the figure.
"""

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import machine, ratio
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from pipesched import Microbatch
from pipesched.hf import PipelineArguments, PipelineTrainer

sys.path.append(str(Path(__file__).parents[1]))

from tests.hf import jobs
from tests.hf.processes import in_processes

STEPS, ROWS, LENGTH = 10, 8, 32
LAYOUTS: list[tuple[str, int, list[dict[str, Any]]]] = [
    ("one process, 2 ranks", 1, [jobs.TWO]),
    ("2 processes, 2 ranks", 1, [{"pipeline_schedule": "1f1b"}]),
    ("4 processes, 2 x 2", 2, [{"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2}]),
    ("4 processes, 2 x 2, zero 2", 2, [{"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2, "pipeline_zero": 2}]),
    ("4 processes, 2 x 2, zero 3", 2, [{"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2, "pipeline_zero": 3}]),
]


class _Ends(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def step_s(ends: list[float]) -> float:
    """Return the median time from one step's end to the next."""
    return median(after - before for before, after in pairwise(ends))


def timed(pairs: int) -> None:
    """Print the ratio of the trainer's step time to that of a bare loop."""
    torch.manual_seed(0)
    size = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, bos_token_id=None, eos_token_id=None, **size))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (ROWS * 2 * STEPS, LENGTH))]
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1000, "save_strategy": "no"}
    args = TrainingArguments("runs/hf", max_steps=STEPS, per_device_train_batch_size=ROWS, **quiet)
    ends = _Ends()
    pipeline = PipelineArguments(**jobs.TWO)
    trainer = PipelineTrainer(model=model, args=args, pipeline=pipeline, train_dataset=rows, callbacks=[ends])
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    def bare() -> float:
        pipe, optimizer, scheduler = trainer.pipeline, trainer.optimizer, trainer.lr_scheduler
        found = []
        for _, batch in zip(range(STEPS), trainer.get_train_dataloader(), strict=False):
            count = (batch["labels"][..., 1:] != -100).sum().float()
            parts = zip(batch["input_ids"].split(2), batch["labels"].split(2), strict=True)
            target = {"share": 1.0, "is_part": True}
            pipe.step(
                microbatches=[
                    Microbatch(input_ids=ids, labels=labels, num_items_in_batch=count, target=target)
                    for ids, labels in parts
                ]
            )
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(time.perf_counter())
        return step_s(found)

    def trained() -> float:
        ends.ends.clear()
        trainer.train()
        return step_s(ends.ends)

    trained(), bare()  # a warm-up
    runs = [(trained(), bare()) for _ in range(pairs)]
    found = ratio(*zip(*runs, strict=True))
    print(f"trainer / bare loop: {found}, {found.first * 1e3:.1f} ms and {found.second * 1e3:.1f} ms")


def figures(make: Any, pipelines: list[dict[str, Any] | None], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with each of these PipelineArguments in turn; return the figures of each."""
    return [jobs.figures(jobs.trained(make, pipeline, **options)) for pipeline in pipelines]


def equal(names: list[str]) -> None:
    """Print a line for each model, number of accumulation steps and layout."""
    local = {"is_world_process_zero": True, "is_local_process_zero": True}
    print(f"{'model':<8}{'G':>3}  {'layout':<28}{'difference':>12}  figure")
    for name in names:
        make = getattr(jobs, name)
        for accumulation in (1, 4):
            options = {"max_steps": 30, "eval_steps": 10, "gradient_accumulation_steps": accumulation}
            options |= {"include_num_input_tokens_seen": "all"}
            plain = {1: figures(make, [None], options), 2: in_processes(2, figures, make, [None], options)[0]}
            for label, replicas, pipelines in LAYOUTS:
                count = int(label[0]) if label[0].isdigit() else 1
                runs = (
                    in_processes(count, figures, make, pipelines, options)
                    if count > 1
                    else [figures(make, pipelines, options)]
                )
                worst = max(jobs.largest_difference(plain[replicas][0] | local, run[0] | local) for run in runs)
                print(f"{name:<8}{accumulation:>3}  {label:<28}{worst[0]:>12.1e}  {worst[1]}", flush=True)


def main() -> None:
    """Print the time, or the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--only", nargs="+", default=["gpt2", "llama", "bert", "t5", "vit"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    if arguments.equal:
        equal(arguments.only)
    else:
        timed(arguments.pairs)


if __name__ == "__main__":
    main()
