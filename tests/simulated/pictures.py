"""Draws what the streams of simulated devices do in a step: computation, copies beside it, offloading and bubbles.

    python -m tests.simulated.pictures FOLDER

Writes `copies.png` (two ranks, 1F1B, a batch from the host) and `offload.png` (one rank, all layers offloaded).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from tests.simulated.accelerator import Accelerator, start
from tests.simulated.happens_before import StreamSpan

WIDTH, BLOCKS, ROWS, MICROBATCHES = 512, 8, 64, 6
_COLORS = {"F": "#56b4e9", "B": "#d55e00", "OFFLOAD": "#cc79a7", "FETCH": "#009e73", "other": "#999999"}


def spans_of_step(accelerator: Accelerator, num_ranks: int, **options: Any) -> list[StreamSpan]:
    """Run two steps of a chain of linear layers, and return what the streams did in the second."""
    from pipesched import Pipeline
    from tests.simulated.actions import label_actions
    from tests.simulated.virtual_clock import virtual_clock

    label_actions(accelerator)
    torch.manual_seed(0)
    layers = [layer for _ in range(BLOCKS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    devices = [f"sim:{rank}" for rank in range(num_ranks)]
    x = torch.randn(MICROBATCHES * ROWS, WIDTH).pin_memory()
    boundaries = [2 * BLOCKS * stage // num_ranks for stage in range(1, num_ranks)]
    given = {"devices": devices, "num_microbatches": MICROBATCHES, "boundaries": boundaries, **options}
    with virtual_clock(accelerator), Pipeline(model, x[:ROWS], loss_fn=torch.nn.MSELoss(), **given) as pipe:
        pipe.step(x, target=x)
        for device in devices:
            torch.accelerator.synchronize(device)
        accelerator.judge.spans = []
        pipe.step(x, target=x)
        for device in devices:
            torch.accelerator.synchronize(device)
        spans, accelerator.judge.spans = accelerator.judge.spans, None
    return [span for span in spans if span.end_s > span.start_s]


def draw(spans: Sequence[StreamSpan], title: str, path: Path) -> None:
    """Draw a row for each stream, with a bar for each operation, coloured by its action."""
    rows = sorted({span.stream for span in spans})
    first_s = min(span.start_s for span in spans)
    figure = Figure(figsize=(14, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for span in spans:
        kind = "other" if span.label is None else span.label.action.kind.value.split("_")[0]
        color = _COLORS.get(kind, _COLORS["other"])
        hatch = "//" if "copy" in span.name else None
        left, width = (span.start_s - first_s) * 1e6, (span.end_s - span.start_s) * 1e6
        axes.barh(rows.index(span.stream), width, left=left, color=color, edgecolor="white", linewidth=0.3, hatch=hatch)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("virtual time [µs]; hatched: copies")
    axes.set_title(title, loc="left")
    for kind, color in _COLORS.items():
        axes.bar(0, 0, color=color, label=kind)
    axes.legend(ncols=len(_COLORS), loc="upper right", bbox_to_anchor=(1, 1.12), frameon=False)
    figure.savefig(path, dpi=110)


def main(folder: Path) -> None:
    """Write both pictures."""
    accelerator = start()
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    draw(
        spans_of_step(accelerator, 2, schedule="1f1b"),
        "1F1B on two simulated devices: copies run beside computation",
        folder / "copies.png",
    )
    offloaded = {str(layer): "offload" for layer in range(2 * BLOCKS)}
    draw(
        spans_of_step(accelerator, 1, schedule="gpipe", checkpoint=offloaded),
        "All layers offloaded: activations leave and return on streams of their own",
        folder / "offload.png",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
