"""Spans: measures the time to record the start and the end of an action, and the share of a step that this takes.

    python benchmarks/spans.py [--steps 15]

"a span" is the time that the interpreter's loop takes to read and store two time stamps, without the time of an empty
loop; on a GPU, it records two events of a stream instead. "share" is this cost times the number of spans of all ranks,
including sends and receives, divided by the time of the step; the limit is 1 %. "read" is the time to build the last
step's trace from the time stamps, which happens when a script reads ``pipe.trace``.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from measure import machine
from torch import nn

import pipesched
from pipesched.runtime.executors.device_streams import streams_for
from pipesched.runtime.executors.interpreter import Stamps

_LOOPS = 100_000
_ALLOWED = 0.01


def span_s(device: torch.device) -> float:
    """Return the seconds that it takes to record one span: the median of nine loops."""
    streams = streams_for(device)
    loops = _LOOPS if device.type == "cpu" else _LOOPS // 100
    order = list(range(loops))
    return max(0.0, median(_stamped(order, streams.now) - _empty(order) for _ in range(9)) / loops)


def _stamped(order: list[int], now: Any) -> float:
    _, starts, ends = Stamps([], [None] * len(order), [None] * len(order))
    begin = time.perf_counter()
    for position, _ in enumerate(order):
        starts[position] = now()
        ends[position] = now()
    return time.perf_counter() - begin


def _empty(order: list[int]) -> float:
    begin = time.perf_counter()
    for _position, _ in enumerate(order):
        pass
    return time.perf_counter() - begin


def blocks(width: int, count: int) -> nn.Module:
    """Return ``count`` equal feed-forward blocks."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))


#: Name, width, layers, rows of a micro-batch, micro-batches, ranks, schedule: from no work to a little.
CASES = [
    ("8 layers of width 8", 8, 8, 1, 32, 2, "1f1b"),
    ("8 layers of width 64", 64, 8, 16, 32, 2, "zb-h1"),
    ("8 layers of width 256", 256, 8, 32, 8, 2, "1f1b"),
    ("8 layers of width 512", 512, 8, 64, 8, 2, "interleaved-zb"),
]


def main() -> None:
    """Print the cost of a span, and one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(machine())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    cost_s = span_s(device)
    print(f"a span: {cost_s * 1e9:.0f} ns")
    print(f"{'':24}{'schedule':16}{'spans':>6}{'step ms':>10}{'share':>9}{'read ms':>10}")
    for name, width, layers, rows, microbatches, ranks, schedule in CASES:
        x = torch.randn(rows * microbatches, width)
        options: dict[str, Any] = {"schedule": schedule, "num_microbatches": microbatches}
        model = blocks(width, layers)
        with pipesched.Pipeline(
            model, x[:rows], loss_fn=nn.functional.mse_loss, devices=[device] * ranks, **options
        ) as pipe:
            x = x.to(device)
            times = []
            for _ in range(steps + 2):
                begin = time.perf_counter()
                pipe.step(x, target=x)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            spans = len(pipe.trace.spans)
            read_s, step_s = time.perf_counter() - begin, median(times[2:])
        share = spans * cost_s / step_s
        over = "" if share < _ALLOWED else "  more than 1 %"
        print(f"{name:24}{schedule:16}{spans:6}{step_s * 1e3:10.2f}{share:9.3%}{read_s * 1e3:10.2f}{over}", flush=True)


if __name__ == "__main__":
    main()
