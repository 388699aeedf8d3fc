"""Train a Hugging Face causal LM, and resume automatically: stop or kill the run at any time, then run it again.

    python examples/train_hf.py [--steps 2000] [--save-every 100] [--folder runs/train_hf]
    torchrun --nproc_per_node 2 examples/train_hf.py    # any number of ranks, which may change when the run resumes
    torchrun --nproc_per_node 4 examples/train_hf.py --replicas 2 --zero 2    # 2 pipelines of 2 ranks each
    torchrun --nproc_per_node 4 examples/train_hf.py --tp 2    # a pipeline of 2 stages, each split over 2 ranks

The training text is the source code of Python's standard library, as bytes; nothing is downloaded. The final weights
are bit-identical on any number of ranks, however often the run is interrupted. Only three options change the weights,
because they change the order in which numbers are added. With --replicas, each replica first adds the gradients of its
own micro-batches. With --zero 2, the gradients are split across replicas, and the norm for clipping is combined from
the norms of the parts. With --tp, several ranks split each layer and add their parts of its output. A run may resume
with another --tp or without it.
"""

import argparse
import math
import os
import random
import signal
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import pipesched

try:
    from tqdm import tqdm
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as error:
    sys.exit(f"this example needs {error.name}, which is not installed; pip install 'pipesched[demo,zoo]'")

ROWS, MICROBATCHES, CONTEXT = 8, 4, 64


class Batches:
    """Draws random pieces of a text. The state is only the number of batches drawn, because batch n is always the same.

    Every replica draws the whole batch and keeps its own rows.
    """

    def __init__(self, text: Tensor, name: str, replica: int = 0, replicas: int = 1) -> None:
        self._text, self._name, self._drawn = text, name, 0
        self._rows = slice(replica * ROWS // replicas, (replica + 1) * ROWS // replicas)

    def next(self) -> dict[str, Tensor]:
        """Draw a batch. The labels equal the inputs, because the model shifts the labels."""
        draw = random.Random(f"{self._name} {self._drawn}")
        self._drawn += 1
        starts = [draw.randrange(len(self._text) - CONTEXT) for _ in range(ROWS)][self._rows]
        pieces = torch.stack([self._text[start : start + CONTEXT] for start in starts]).long()
        return {"input_ids": pieces, "labels": pieces}

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]


class StopSignal:
    """Records SIGTERM and Ctrl+C, so that training stops after the current step."""

    def __init__(self) -> None:
        self._received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, *_: Any) -> None:
        self._received = True

    def on_any_rank(self) -> bool:
        """Return whether a signal has reached any rank, so that all ranks stop after the same step.

        All ranks must call this method.
        """
        if not distributed.is_initialized():
            return self._received
        received = torch.tensor(float(self._received), device="cuda" if torch.cuda.is_available() else "cpu")
        distributed.all_reduce(received, distributed.ReduceOp.MAX)
        return bool(received)


def standard_library() -> Tensor:
    """Return the source code of Python's standard library as one tensor of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))), dtype=torch.uint8)


def model() -> GPT2LMHeadModel:
    """Build a small GPT-2 over bytes, with dropout and with one weight shared by the embedding and the head."""
    size = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, use_cache=False, **size))


def ranks(replicas: int, tp: int) -> dict[str, Any]:
    """Return a Pipeline's ``mesh`` of all processes under torchrun, otherwise the ``devices``: all GPUs, or the CPU."""
    gpus = torch.cuda.device_count()
    if "WORLD_SIZE" in os.environ:
        shape = (replicas, int(os.environ["WORLD_SIZE"]) // (replicas * tp), tp)
        names = ("dp", "pp", "tp")[: 3 if tp > 1 else 2]
        return {"mesh": init_device_mesh("cuda" if gpus else "cpu", shape[: len(names)], mesh_dim_names=names)}
    if replicas > 1 or tp > 1:
        sys.exit("--replicas and --tp need several processes: torchrun --nproc_per_node 4 examples/train_hf.py --tp 2")
    return {"devices": [f"cuda:{index}" for index in range(gpus)] or ["cpu"]}


def rate(step: int, steps: int, warmup: int = 50) -> float:
    """Return a step's learning rate, as a fraction of the maximum: a linear warm-up, then a cosine decay."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def arguments() -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="number of training steps (default: 2000)")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one save to the next (default: 100)")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps between evaluations (default: 200)")
    parser.add_argument("--log-every", type=int, default=100, help="steps between lines of the log (default: 100)")
    parser.add_argument("--schedule", default="1f1b", help="a name from `pipesched list` (default: 1f1b)")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas of the pipeline (default: 1)")
    parser.add_argument("--tp", type=int, default=1, help="number of ranks that split each layer (default: 1)")
    parser.add_argument(
        "--zero",
        type=int,
        default=0,
        choices=(0, 1, 2),
        help="training state split across replicas: 0 none, 1 optimizer states, 2 also gradients (default: 0)",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/train_hf"), help="folder of the checkpoints")
    return parser.parse_args()


def main() -> None:
    """Train and save checkpoints until all steps are done or a signal arrives."""
    options = arguments()
    torch.manual_seed(0)
    stop = StopSignal()
    text = standard_library()
    last = len(text) // 20  # the last twentieth is for validation
    where = ranks(options.replicas, options.tp)
    replica = (where["mesh"].get_local_rank("dp") if "mesh" in where else 0, options.replicas)
    training, validation = Batches(text[:-last], "training", *replica), Batches(text[-last:], "validation", *replica)
    sample = {name: value[: ROWS // MICROBATCHES] for name, value in Batches(text, "sample").next().items()}
    microbatches = MICROBATCHES // options.replicas
    pipe = pipesched.Pipeline(
        model(),
        sample,
        schedule=options.schedule,
        num_microbatches=microbatches,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),  # one optimizer for each stage
        numerics=pipesched.Numerics(clip_grad_norm=1.0),
        distributed=pipesched.Distributed(zero=options.zero, tensor_parallel="auto" if options.tp > 1 else None),
        seed=0,
        **where,
    )
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options.steps))
        for optimizer in pipe.optimizers.values()
    ]
    state = {"scheduler": schedulers, "extra": {"training": training, "validation": validation}}
    done = 0
    with suppress(pipesched.errors.MissingCheckpointError):  # there is no checkpoint at the first start
        done = pipe.load(options.folder, **state).step

    first = int(os.environ.get("RANK", "0")) == 0
    bar = tqdm(total=options.steps, initial=done, unit="step", disable=not first)
    log = pipesched.StepLog(pipe, every=options.log_every, tokens=ROWS * CONTEXT, show=bar.write if first else None)
    while done < options.steps and not stop.on_any_rank():
        log(pipe.step(**training.next()), step=done)
        for scheduler in schedulers:
            scheduler.step()
        done += 1
        bar.update()
        if done % options.evaluate_every == 0:
            loss = pipe.eval().evaluate(**validation.next())
            pipe.train()
            if first:
                bar.write(f"step {done}: validation loss {loss:.4f} nats per byte")
        if done % options.save_every == 0 and done < options.steps:
            pipe.save(options.folder, keep=2, asynchronous=True, **state)
    pipe.save(options.folder, keep=2, **state)
    bar.close()
    if first:
        words = "done" if done == options.steps else "stopped"
        print(f"{words} after step {done}; saved in {options.folder}")
        if done < options.steps:
            print("run the same command to continue")
    pipe.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
