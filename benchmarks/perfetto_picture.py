"""Perfetto picture: draws a measured step from the file that `Trace.to_perfetto` writes, read with Perfetto's protos.

    python benchmarks/perfetto_picture.py [--schedule zb-h1] [--ranks 4] [--folder runs/perfetto]

Prints the bubble twice: computed from the file, and from the trace. Writes step.pftrace, for https://ui.perfetto.dev,
and step.png, with the slices, the arrows and the counters of the file.
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from measure import machine
from sleeping import WIDTH, Sleeping
from torch import nn
from torch.nn import functional

from pipesched import Pipeline, Search

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.perfetto_trace import PerfettoTrace

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#d55e00", "W": "#009e73"}


def draw(read: PerfettoTrace, num_ranks: int, path: Path) -> None:
    """Draw the slices and the arrows of a trace, and below them the counters of each rank."""
    figure = Figure(figsize=(14, 8), dpi=110, layout="constrained")
    lanes, pairs, held = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    places = {}
    for (rank, lane), slices in read.slices.items():
        for name, start, end in slices:
            if lane == "compute":
                kind = next(letter for letter in name if letter.isalpha())
                lanes.barh(
                    rank, (end - start) / 1e6, left=start / 1e6, color=COLOURS.get(kind, "#999999"), edgecolor="w"
                )
                places[rank, name] = start / 1e6, end / 1e6
    for number, sender in read.senders.items():
        begin, end = (*sender, places[sender][1]), (*read.receivers[number], places[read.receivers[number]][0])
        style = {"arrowstyle": "->", "color": "#555555", "lw": 0.6}
        lanes.annotate("", (end[2], end[0]), (begin[2], begin[0]), arrowprops=style)
    for axes, name in ((pairs, "pairs in flight"), (held, "bytes held")):
        for rank in range(num_ranks):
            points = read.counters[rank, name]
            times = [time / 1e6 for time, _ in points]
            axes.step(times, [value for _, value in points], where="post", label=f"rank {rank}")
        axes.set_ylabel(name)
    pairs.legend(loc="upper right", fontsize=8, ncols=num_ranks)
    lanes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    lanes.invert_yaxis()
    held.set_xlabel("time [ms]")
    figure.savefig(path)


def main() -> None:
    """Measure a step of sleeping layers, write its trace, read it back and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="zb-h1")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/perfetto"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Sleeping(0.01) for _ in range(arguments.ranks)))
    x = torch.randn(16, WIDTH)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    options = {"loss_fn": functional.mse_loss, "schedule": arguments.schedule, "num_microbatches": 8}
    search = Search(memory_limit_bytes="1GB")  # so that sizes are measured
    with Pipeline(model, x[:2], devices=["cpu"] * arguments.ranks, search=search, **options) as pipe:
        for _ in range(3):
            pipe.step(x, target=x)
        trace = pipe.trace
    trace.to_perfetto(arguments.folder / "step.pftrace")
    read = PerfettoTrace(arguments.folder / "step.pftrace")
    draw(read, arguments.ranks, arguments.folder / "step.png")
    print(machine())
    print(
        f"bubble from the file {read.bubble_ratio:.6f}, of the trace {trace.bubble_ratio:.6f}, "
        f"{len(read.senders)} arrows"
    )


if __name__ == "__main__":
    main()
