"""Split backward: compares the time of I + W with the time of a whole backward B on one stage.

    python benchmarks/split_backward.py [--pairs 40]

Each pair runs one micro-batch with a whole backward and one with a split backward, in turn. "with F" compares F + I + W
with F + B; rows with checkpointing compare R + I + W with R + B. First the gradients of both are compared bit by bit.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import Ratio, machine, ratio
from torch import Tensor, nn
from torch.nn import functional

from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.payload import Payload


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward network, each after a norm."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Scale(torch.autograd.Function):
    """An autograd.Function that computes x * weight; its backward computes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Custom(nn.Module):
    """A custom autograd.Function between two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(Scale.apply(self.before(x), self.weight))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Attention(nn.Module):
    """nn.MultiheadAttention, which runs all its matrix products in a single torch function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Twice(nn.Module):
    """A layer that uses the same weight in two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


def hooked(width: int) -> nn.Module:
    """Return a linear layer with one hook of each kind."""
    layer = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    for parameter in layer.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    layer[0].register_full_backward_hook(lambda module, grads, outputs: None)
    return layer


def stack(width: int, depth: int) -> nn.Module:
    """Return a sequence of transformer blocks."""
    return nn.Sequential(*(Block(width) for _ in range(depth)))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "4 transformer blocks d=256, 4x64 tokens": (lambda: stack(256, 4), lambda: torch.randn(4, 64, 256), False),
    "the same, checkpointed": (lambda: stack(256, 4), lambda: torch.randn(4, 64, 256), True),
    "tiny: 4 blocks d=64, 1x16 tokens": (lambda: stack(64, 4), lambda: torch.randn(1, 16, 64), False),
    "tiny: 2 x Linear(8), 4 rows": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        lambda: torch.randn(4, 8),
        False,
    ),
    "custom autograd.Function": (lambda: Custom(256), lambda: torch.randn(4, 64, 256), False),
    "LSTM (generic: all in I)": (lambda: Recurrent(128), lambda: torch.randn(4, 32, 128), False),
    "Embedding (in I), then Linear": (
        lambda: nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 256)),
        lambda: torch.randint(0, 1000, (4, 64)),
        False,
    ),
    "grouped convolution": (
        lambda: nn.Conv2d(64, 64, 3, padding=1, groups=8),
        lambda: torch.randn(4, 64, 24, 24),
        False,
    ),
    "nn.MultiheadAttention": (lambda: Attention(256), lambda: torch.randn(4, 64, 256), False),
    "one weight used twice": (lambda: Twice(256), lambda: torch.randn(4, 64, 256), False),
    "a module with hooks": (lambda: hooked(256), lambda: torch.randn(4, 64, 256), False),
}


class Bench:
    """One stage, which runs a micro-batch with a whole or with a split backward."""

    def __init__(self, build: Callable[[], nn.Module], sample: Callable[[], Tensor], checkpointed: bool) -> None:
        torch.manual_seed(0)
        self.module = build()
        self.stage = Stage({"layer": self.module}, torch.device("cpu"))
        given = sample()
        self.given = Payload.of(given.requires_grad_() if given.is_floating_point() else given)
        self.checkpointed = checkpointed
        self.stage.begin(StepData(0, 0, []))

    def run(self, split: bool) -> tuple[float, float]:
        """Run a micro-batch; return the seconds of F, and the seconds of the backward."""
        stage = self.stage
        start = time.perf_counter()
        output = stage.forward(0, self.given, split=split, checkpointed=self.checkpointed)
        grads = tuple(torch.ones_like(tensor) for tensor in output.wanted)
        del output
        middle = time.perf_counter()
        if self.checkpointed:
            stage.recompute(0, split=split)
        if split:
            stage.input_grad(0, grads)
            stage.weight_grad(0)
        else:
            stage.backward(0, grads)
        return middle - start, time.perf_counter() - middle

    def grads(self, split: bool) -> list[Tensor]:
        """Run a micro-batch and return its gradients."""
        self.module.zero_grad()
        self.run(split)
        return [parameter.grad for parameter in self.module.parameters()]

    def ratios(self, pairs: int) -> tuple[Ratio, Ratio]:
        """Return two ratios of split to whole runs: for the backward alone, and for F and the backward together."""
        split, whole = [], []
        for _ in range(pairs):
            split.append(self.run(split=True))
            whole.append(self.run(split=False))
        return (
            ratio([back for _, back in split], [back for _, back in whole]),
            ratio([sum(times) for times in split], [sum(times) for times in whole]),
        )


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    print(machine())
    print(f"{'case':45}{'(I+W)/B':>25}{'with F':>25}{'B ms':>9}  equal bits")
    for name, case in CASES.items():
        bench = Bench(*case)
        bench.run(split=True)  # warm-up: the first micro-batch decides which weights are deferred
        equal = all(torch.equal(a, b) for a, b in zip(bench.grads(True), bench.grads(False), strict=True))
        backward, whole = bench.ratios(pairs if backward_ms(bench) > 5 else 5 * pairs)
        print(f"{name:45}{backward!s:>25}{whole!s:>25}{backward.second * 1e3:9.2f}  {equal}", flush=True)


def backward_ms(bench: Bench) -> float:
    """Return the time of one whole backward in ms."""
    return bench.run(split=False)[1] * 1e3


if __name__ == "__main__":
    main()
