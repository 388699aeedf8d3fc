"""Choice: compares the plan that schedule="auto" chooses with the best plans of a sweep that runs every plan.

    python benchmarks/choice.py [--steps 31] [--models N ...]

Two ranks (threads of one process) train on 8 micro-batches of 4 rows. Three small models compute: one with identical
layers, one with a heavy last layer (a large vocabulary), one with a heavy first layer. Three models of the same shapes
sleep instead, as if they waited for devices, so other work on the machine does not affect their times.

The profile is measured and saved in a separate process; `schedule="auto"` uses this profile. The sweep runs every
synchronous schedule with every cut into two stages. Schedules with several chunks on a rank run with cuts into four
stages, except cuts in which the busiest rank has more than 1.3 times the least possible work. Each plan runs two steps,
and the time of the faster step is used.
Then the chosen plan, the three best plans of the sweep, and equal splits with GPipe and 1F1B run in turn. The script
prints medians, and paired ratios of the chosen plan's steps to those of each other plan with 95 % intervals. All
processes keep freed memory, as in prediction.py.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import elsewhere, keep_freed_memory, machine, ratio
from torch import Tensor, nn
from torch.nn import functional

import pipesched
from pipesched import Pipeline, Plan, schedules
from pipesched.planning.candidates import synchronous
from pipesched.simulation.profile import Profile

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.sleeping_layers import Waiting

RANKS, COUNT, ROWS, WIDTH, LENGTH = 2, 8, 4, 192, 64
SLEEP_S = 0.003
NEAR = 1.3  # limit of the busiest rank, over the least possible


class Block(nn.Module):
    """A layer as large as a transformer block, without attention: products, a norm, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def even() -> nn.Sequential:
    """Return eight equal blocks."""
    return nn.Sequential(*(Block() for _ in range(8)))


def heavy_last() -> nn.Sequential:
    """Return seven blocks and a head over a large vocabulary."""
    return nn.Sequential(*(Block() for _ in range(7)), nn.Linear(WIDTH, 8 * WIDTH))


def heavy_first() -> nn.Sequential:
    """Return a wide first layer and seven blocks."""
    stem = nn.Sequential(nn.Linear(WIDTH, 12 * WIDTH), nn.GELU(), nn.Linear(12 * WIDTH, WIDTH))
    return nn.Sequential(stem, *(Block() for _ in range(7)))


def asleep(*times: int) -> nn.Sequential:
    """Return layers that sleep instead of computing."""
    return nn.Sequential(*(Waiting(factor * SLEEP_S) for factor in times))


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "even": even,
    "heavy last": heavy_last,
    "heavy first": heavy_first,
    "even, asleep": lambda: asleep(1, 1, 1, 1, 1, 1),
    "heavy last, asleep": lambda: asleep(1, 1, 1, 1, 1, 3),
    "heavy first, asleep": lambda: asleep(3, 1, 1, 1, 1, 1),
}


def parts(name: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return the model with this name, its inputs and its targets."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(COUNT * ROWS, LENGTH, WIDTH)
    with torch.no_grad():
        return model, x, torch.randn_like(model(x))


def measured(name: str, path: Path) -> None:
    """Measure the profile of a model and the overheads of the machine, and save both to ``path``."""
    torch.set_num_threads(1)
    model, x, y = parts(name)
    profile = pipesched.profile(model, x[:ROWS], loss_fn=functional.mse_loss, target=y[:ROWS], rows=[ROWS])
    values = profile.to_dict()
    overheads = pipesched.probe_overheads(devices=["cpu"] * RANKS)
    values["machine"]["threads"] = overheads.to_dict()
    Profile.from_dict(values).save(path)


class Running:
    """An open pipeline that runs steps."""

    def __init__(self, name: str, label: str, **options: Any) -> None:
        model, self.x, self.y = parts(name)
        self.label = label
        given = {"loss_fn": functional.mse_loss, "devices": ["cpu"] * RANKS, **options}
        self.pipe = Pipeline(model, self.x[:ROWS], **given)

    def step(self) -> float:
        """Run a step and return its seconds."""
        self.pipe.model.zero_grad()
        self.pipe.step(self.x, target=self.y)
        trace = self.pipe.trace
        assert trace is not None
        return float(trace.makespan_s)


def swept(name: str, profile: Profile) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Run every plan; yield its seconds, a label, and the options of its pipeline."""
    graph = profile.graph(ROWS)
    work = [graph.nodes[layer]["forward_s"] + graph.nodes[layer]["backward_s"] for layer in graph]
    for schedule in synchronous():
        chunks = schedule.chunks_per_rank
        for cut in cuts(work, schedule.placement(RANKS, chunks), len(graph)):
            options = {"schedule": schedule.name, "boundaries": list(cut), "num_microbatches": COUNT}
            running = Running(name, f"{schedule.name} {list(cut)}", **options)
            took_s = min(running.step() for _ in range(2))
            running.pipe.close()
            yield took_s, running.label, options


def cuts(work: Sequence[float], placement: Sequence[int], layers: int) -> Iterator[tuple[int, ...]]:
    """Yield every cut of the layers into stages, as the first layer of each stage after the first.

    With several chunks on a rank, cuts that give one rank too much work are left out.
    """

    def busiest(cut: tuple[int, ...]) -> float:
        spans = pairwise((0, *cut, layers))
        loads = [0.0] * RANKS
        for rank, (begin, end) in zip(placement, spans, strict=True):
            loads[rank] += sum(work[begin:end])
        return max(loads)

    every = list(combinations(range(1, layers), len(placement) - 1))
    if len(placement) > RANKS:
        least = min(map(busiest, every))
        every = [cut for cut in every if busiest(cut) <= NEAR * least]
    yield from every


def compare(name: str, path: Path, steps: int) -> None:
    """Run the plans of one model and print the comparison."""
    torch.set_num_threads(1)
    profile = Profile.load(path)
    options: dict[str, Any] = {"num_ranks": RANKS, "batch_size": COUNT * ROWS, "num_microbatches": COUNT}
    plan: Plan = pipesched.tune(profile, **options)
    for other in plan.alternatives:
        print(f"  predicted {other.step_s * 1e3:8.1f} ms, bubble {other.bubble_ratio:6.1%}  {other.label}")
    found = sorted(swept(name, profile), key=lambda row: row[0])
    print(f"  swept {len(found)} plans: {found[0][0] * 1e3:.1f} to {found[-1][0] * 1e3:.1f} ms")
    equal = len(profile.layers) // 2
    rivals = [
        *((label, given) for _, label, given in found[:3]),
        *(
            (f"equal split, {schedule}", {"schedule": schedule, "boundaries": [equal], "num_microbatches": COUNT})
            for schedule in ("gpipe", "1f1b")
        ),
    ]
    own = f"auto: {plan.schedule} {[names[0] for names in plan.stages[1:]]}"
    running = [Running(name, own, plan=plan), *(Running(name, label, **given) for label, given in rivals)]
    times: list[list[float]] = [[] for _ in running]
    for number in range(steps + 2):
        for one, took in zip(running, times, strict=True):
            seconds = one.step()
            if number > 1:
                took.append(seconds)
    for one, took in zip(running, times, strict=True):
        against = ratio(times[0], took)
        print(f"  {against.second * 1e3:8.1f} ms  chosen / this {against}  {one.label}", flush=True)
        one.pipe.close()


def main() -> None:
    """Print a block for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    keep_freed_memory()
    print(machine(), f"{os.cpu_count()} cores; {len(schedules.names())} schedules")
    for name in args.models:
        print(name, flush=True)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            elsewhere(measured, name, path)
            elsewhere(compare, name, path, args.steps)


if __name__ == "__main__":
    main()
