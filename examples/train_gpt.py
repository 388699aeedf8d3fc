"""Train a byte-level GPT through a pipeline of two stages, then report and draw the step with the median time.

    python examples/train_gpt.py [--steps 120] [--schedule 1f1b] [--out runs/demo] [--save weights.pt]
    torchrun --nproc_per_node 2 examples/train_gpt.py    # one process per rank; the weights are identical

The training text is the source code of Python's standard library. The script writes report.html and report.png (the
plan, and the predicted step above the measured one), trace.json (for Perfetto) and plan.json.
"""

import argparse
import os
import random
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from statistics import median_low, quantiles
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import pipesched

try:
    from tqdm import tqdm
except ImportError:
    sys.exit("the demo shows its progress with tqdm, which is not installed; pip install 'pipesched[demo]'")


class Embed(nn.Module):
    """Map bytes to vectors: the embedding of the byte plus the embedding of its position."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)

    def forward(self, text: Tensor) -> Tensor:
        return self.byte(text) + self.position(torch.arange(text.shape[1], device=text.device))


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward network, each after a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        mixed = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, tokens, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm_2(x)))))


def gpt(width: int = 128, depth: int = 4, context: int = 64) -> nn.Sequential:
    """Build the model: a plain nn.Sequential without any pipeline code."""
    blocks = (Block(width, heads=4, dropout=0.1) for _ in range(depth))
    return nn.Sequential(Embed(width, context), *blocks, nn.LayerNorm(width), nn.Linear(width, 256))


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def standard_library() -> Tensor:
    """Return the source code of Python's standard library as one tensor of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))), dtype=torch.uint8)


def batch(text: Tensor, rows: int, context: int, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Choose random pieces of the text as inputs, and the same pieces shifted by one byte as targets."""
    starts = [draw.randrange(len(text) - context - 1) for _ in range(rows)]
    pieces = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def ranks() -> dict[str, Any]:
    """Return a Pipeline's ``mesh`` of all processes under torchrun, otherwise two ``devices``.

    The two devices are the same GPU if there is only one GPU, and the CPU if there is no GPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    if "WORLD_SIZE" in os.environ:
        shape = (int(os.environ["WORLD_SIZE"]),)
        return {"mesh": init_device_mesh(kind, shape, mesh_dim_names=("pp",))["pp"]}
    if accelerator is None:
        return {"devices": ["cpu", "cpu"]}
    return {"devices": [f"{kind}:0", f"{kind}:{min(1, torch.accelerator.device_count() - 1)}"]}


def is_first() -> bool:
    """Return whether this is the process that prints and writes files."""
    return int(os.environ.get("RANK", "0")) == 0


def main() -> None:
    """Train the model, then print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="number of training steps (default: 120)")
    parser.add_argument("--schedule", default="1f1b", help="a name from `pipesched list` (default: 1f1b)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to (default: runs/demo)")
    parser.add_argument("--save", type=Path, help="file for the trained weights (default: not saved)")
    options = parser.parse_args()

    torch.manual_seed(0)
    draw = random.Random(0)
    text, rows, context, microbatches = standard_library(), 32, 64, 8
    test_x, test_y = batch(text, rows, context, draw)
    pipe = pipesched.Pipeline(
        gpt(context=context),
        test_x[: rows // microbatches],
        loss_fn=next_byte_loss,
        schedule=options.schedule,
        num_microbatches=microbatches,
        **ranks(),
    )
    if is_first():
        print(pipe)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    before = pipe.eval().evaluate(test_x, target=test_y)
    traces = train(pipe.train(), optimizer, text, rows, context, options.steps, draw)
    after = pipe.eval().evaluate(test_x, target=test_y)
    report, weights = pipe.report(), pipe.full_state_dict()  # collective: every rank calls both methods
    if is_first():
        print(f"loss {before:.3f} before training, {after:.3f} after {options.steps} steps (nats per byte)")
        step, words = median_step(traces)
        write(replace(report, measured=step, notes=[*report.notes, words]), options.out)
        if options.save:
            torch.save(weights, options.save)
    pipe.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def train(
    pipe: pipesched.Pipeline,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    rows: int,
    context: int,
    steps: int,
    draw: random.Random,
) -> list[pipesched.Trace]:
    """Run an ordinary training loop and return the measured trace of each step. A trace covers all ranks."""
    traces = []
    often = 1.0 if sys.stderr.isatty() else 10.0
    progress = tqdm(range(steps), desc="training", unit="step", mininterval=often, disable=not is_first())
    for _ in progress:
        x, y = batch(text, rows, context, draw)
        loss = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        traces.append(pipe.gather_trace())
        if is_first():
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return traces


def median_step(traces: list[pipesched.Trace]) -> tuple[pipesched.Trace, str]:
    """Return the step with the median time, and a note on the step times. The first step, a warm-up, is left out."""
    steps = sorted(traces[1:] or traces, key=lambda trace: trace.makespan_s)
    times = [trace.makespan_s * 1e3 for trace in steps]
    middle = median_low(times)
    spread = ""
    if len(times) > 1:
        low, _, high = quantiles(times, n=4, method="inclusive")
        spread = f"; the middle half of the steps took {low:.1f} to {high:.1f} ms"
    words = f"measured: the median step took {middle:.1f} ms ({len(times)} measured){spread}"
    return steps[times.index(middle)], words


def write(report: pipesched.Report, out: Path) -> None:
    """Print the report, and save the report, the measured trace and the plan as files."""
    print(report.title, *report.lines, sep="\n")
    out.mkdir(parents=True, exist_ok=True)
    report.save(out / "report.html")
    report.save(out / "report.png")
    report.measured.to_chrome(out / "trace.json")
    report.plan.save(out / "plan.json")
    print(f"wrote {out}/report.html, {out}/report.png, {out}/trace.json (open it at ui.perfetto.dev), {out}/plan.json")


if __name__ == "__main__":
    main()
