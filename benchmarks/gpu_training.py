"""GPU training: 50 steps of a language model of 355 million parameters, in a plain loop and in a pipeline.

    python benchmarks/gpu_training.py [--device cuda] [--steps 50] [--schedule 1f1b] [--plain-model] [--tiny]

The model is GPT2LMHeadModel of transformers, made from a configuration with random weights, or a GPT of the same size
written with torch if transformers cannot be imported or --plain-model is given. It has no dropout, is trained by AdamW
under autocast to bfloat16, and learns the source code of Python's standard library, one byte a token. Both runs start
with the same weights and get the same batches.

The script prints the losses of every fifth step, the largest relative difference of a loss, the tokens per second
(from the median step) and the most memory allocated at once. The pipeline has two stages: on two devices if the machine
has two, else on one.
"""

import argparse
import gc
import sysconfig
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import machine
from on_device import Figures, add_options, all_devices, begun, timed_s
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.devices.memory import begin_peak, peak_bytes
from pipesched.devices.streams import is_accelerator

MICROBATCHES = 8


class Size(NamedTuple):
    """The sizes of the model and of a batch."""

    layers: int
    width: int
    words: int
    tokens: int
    rows: int


FULL, SMALL = Size(24, 1024, 50304, 1024, 16), Size(4, 32, 256, 16, 8)


class CausalBlock(nn.TransformerEncoderLayer):
    """A transformer block in which a token attends only to earlier tokens."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


class Tokens(nn.Module):
    """Token embeddings plus position embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(size.words, size.width), nn.Embedding(size.tokens, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))


def plain_gpt(size: Size) -> nn.Module:
    """Return a GPT written with torch."""
    heads = max(1, size.width // 64)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
    blocks = [CausalBlock(size.width, heads, 4 * size.width, **options) for _ in range(size.layers)]
    return nn.Sequential(Tokens(size), *blocks, nn.LayerNorm(size.width), nn.Linear(size.width, size.words))


def has_transformers() -> bool:
    """Return whether transformers can be imported, with this version of torch, too."""
    try:
        return hasattr(import_module("transformers"), "GPT2LMHeadModel")
    except (ImportError, RuntimeError):
        return False


def hugging_face_gpt(size: Size) -> nn.Module:
    """Return GPT2LMHeadModel of transformers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    own = {"n_layer": size.layers, "n_embd": size.width, "n_head": max(1, size.width // 64), "n_positions": size.tokens}
    return GPT2LMHeadModel(GPT2Config(**own, vocab_size=size.words, use_cache=False, **none))


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Text:
    """Batches of pieces of the source code of Python's standard library."""

    def __init__(self, size: Size) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._bytes = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self._size = size

    def batch(self, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the inputs of a step, and the tokens that follow them."""
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self._bytes) - self._size.tokens - 1, (self._size.rows,), generator=draw)
        pieces = torch.stack([self._bytes[start : start + self._size.tokens + 1] for start in starts.tolist()]).long()
        return pieces[:, :-1].contiguous().to(device), pieces[:, 1:].contiguous().to(device)


class Run(NamedTuple):
    """The losses and the seconds of the steps of a run, and the most bytes allocated at once on each device."""

    losses: list[float]
    steps_s: list[float]
    peaks: list[int]


def trained(step: Callable[[Tensor, Tensor], Any], text: Text, steps: int, devices: list[torch.device]) -> Run:
    """Run steps; return their losses and times."""
    run = Run([], [], [])
    accelerators = list(dict.fromkeys(filter(is_accelerator, devices)))
    for device in accelerators:
        begin_peak(device)
    losses = []
    for number in range(steps):
        x, y = text.batch(number, devices[0])
        run.steps_s.append(timed_s(lambda x=x, y=y: losses.append(step(x, y)), devices))
    run.losses.extend(float(loss) for loss in losses)
    run.peaks.extend(map(peak_bytes, accelerators))
    return run


def plain_run(make: Callable[[], nn.Module], is_own: bool, text: Text, steps: int, device: torch.device) -> Run:
    """Train in a plain loop that accumulates gradients over micro-batches."""
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=part, labels=part).loss if is_own else next_token_loss(model(part), target)
            (loss / MICROBATCHES).backward()
            total += loss.detach() / MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        return total

    return trained(step, text, steps, [device])


def pipeline_run(
    make: Callable[[], nn.Module], is_own: bool, text: Text, steps: int, devices: list[torch.device], schedule: str
) -> Run:
    """Train in a pipeline."""
    x, _ = text.batch(0, torch.device("cpu"))
    part = x[: len(x) // MICROBATCHES]
    sample: Any = {"input_ids": part, "labels": part} if is_own else part
    loss_fn = None if is_own else next_token_loss
    options: dict[str, Any] = {"devices": devices, "schedule": schedule, "num_microbatches": MICROBATCHES}
    with Pipeline(make(), sample, loss_fn=loss_fn, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-4)
        print(pipe, flush=True)

        def step(x: Tensor, y: Tensor) -> Any:
            with torch.autocast(devices[0].type, torch.bfloat16):
                loss = pipe.step(input_ids=x, labels=x) if is_own else pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return trained(step, text, steps, devices)


def show(plain: Run, ours: Run, size: Size, figures: Figures) -> None:
    """Print both loss curves and the figures of both runs."""
    print(f"\n{'step':>6}{'plain':>12}{'pipeline':>12}")
    for step in sorted({*range(0, len(plain.losses), 5), len(plain.losses) - 1}):
        print(f"{step:>6}{plain.losses[step]:>12.5f}{ours.losses[step]:>12.5f}")
    pairs = list(zip(plain.losses, ours.losses, strict=True))
    difference = max(abs(one - other) / abs(one) for one, other in pairs)
    print(f"largest relative difference of a loss: {difference:.1e}")
    print(f"steps with equal losses: {sum(one == other for one, other in pairs)} of {len(pairs)}")
    for name, run in (("plain", plain), ("pipeline", ours)):
        rate = size.rows * size.tokens / median(run.steps_s)
        peaks = ", ".join(f"{peak / 2**30:.2f} GiB" for peak in run.peaks) or "not measured on a CPU"
        print(f"{name:<10}{rate:>10.0f} tokens/s, step {median(run.steps_s) * 1e3:.1f} ms, memory {peaks}")
        figures.add("training", run=name, losses=run.losses, tokens_per_s=rate, peaks=run.peaks, **size._asdict())


def main() -> None:
    """Train in both ways, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--plain-model", action="store_true", help="use the GPT written with torch")
    add_options(parser)
    args = parser.parse_args()
    device = begun(args.device)
    size, steps = (SMALL, 3) if args.tiny else (FULL, args.steps)
    is_own = not args.plain_model and has_transformers()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return (hugging_face_gpt if is_own else plain_gpt)(size)

    count = sum(parameter.numel() for parameter in make().parameters())
    print(f"{machine()}; {'transformers' if is_own else 'plain torch'}, {count / 1e6:.1f} M parameters, {size}")
    devices = all_devices(device)[:2] if len(all_devices(device)) > 1 else [device] * 2
    text = Text(size)
    plain = plain_run(make, is_own, text, steps, device)
    gc.collect()  # the plain model's memory does not count for the pipeline
    ours = pipeline_run(make, is_own, text, steps, devices, args.schedule)
    show(plain, ours, size, Figures(args.figures))


if __name__ == "__main__":
    main()
