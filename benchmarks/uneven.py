"""Uneven: compares orders that are made for micro-batches of different lengths with other orders.

    python benchmarks/uneven.py [--ranks 4] [--microbatches 8] [--batches 6] [--visits 4]

Each rank is a process that holds one layer; messages use gloo. The layers sleep instead of computing: the forward of a
micro-batch takes 5 ms per 64 tokens, and its backward 10 ms. The lengths of the micro-batches are drawn from a
log-normal distribution, between 16 and 512 tokens. The profile is measured: the layers run with micro-batches of 16, 64
and 512 tokens, and their times are fitted as functions of the length.

All pipelines run the same batches in turn (A B C ...), each batch ``--visits`` times in a row. The first of these steps
(the first visit) includes the search for the batch's order. "ours" is an order that ``searched`` makes for the lengths
of a batch. In "ours, capped", a rank holds no more (stage, micro-batch) pairs than in "searched, equal", the order of
``searched`` for micro-batches of equal length. The rivals are "searched, equal" and fixed schedules. For each rival,
the script prints the most pairs that a rank holds, and three median ratios of our step to the rival's step with 95 %
bootstrap intervals: of the makespans, of the wall times of first visits, and of the wall times of later visits.
"""

import argparse
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import in_ranks, machine, ratio, slowest_s
from sleeping import wake_in_time
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import pipesched
from pipesched import Microbatch, Pipeline, Search

SECONDS = 0.005 / 64  # of F, for each token; B takes twice as long
WIDTH = 16
SHORTEST, MIDDLE, LONGEST = 16, 64, 512
EVEN, OURS, CAPPED = "searched, equal", "ours", "ours, capped"
RIVALS = (EVEN, "1f1b", "eager-1f1b", "gpipe")
_MUCH = 1 << 40  # a memory limit that no plan reaches; with a limit, orders hold no more pairs than the plan


class Waited(torch.autograd.Function):
    """An identity function that waits in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(x.shape[1] * SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * grad.shape[1] * SECONDS)
        return grad.clone()


class Reading(nn.Module):
    """A layer whose forward and backward take a time proportional to the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Waited.apply(x * self.weight)


def model(num_ranks: int) -> nn.Sequential:
    """Return a chain with one layer for each rank, with the same weights in all processes."""
    torch.manual_seed(0)
    return nn.Sequential(*(Reading() for _ in range(num_ranks)))


def microbatch(length: int) -> Microbatch:
    """Return a micro-batch of one sequence with this length."""
    return Microbatch(torch.randn(1, length, WIDTH), target=torch.randn(1, length, WIDTH))


def drawn(count: int, batches: int) -> list[list[int]]:
    """Return random lengths for ``count`` micro-batches of each batch, in tokens."""
    draw = random.Random(0)
    lengths = [[round(MIDDLE * draw.lognormvariate(0, 0.8)) for _ in range(count)] for _ in range(batches)]
    return [[min(LONGEST, max(SHORTEST, length)) for length in each] for each in lengths]


class Visit(NamedTuple):
    """The times of one step of each pipeline over the same batch, keyed by the pipeline's name."""

    is_first: bool
    makespans_s: dict[str, float]
    walls_s: dict[str, float]


class Results(NamedTuple):
    """The step times, the most (stage, micro-batch) pairs that a rank held, and whether all gradients are equal."""

    visits: list[Visit]
    peaks: dict[str, int]
    agree: bool


def run(rank: int, num_ranks: int, batches: list[list[int]], visits: int, file: str) -> Results:
    """Run all pipelines in turn over all batches. Runs on each rank."""
    wake_in_time()
    mesh = init_device_mesh("cpu", (num_ranks,))
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "mesh": mesh, "num_microbatches": len(batches[0])}
    options["boundaries"] = list(range(1, num_ranks))
    searches = {OURS: Search(profile=file), CAPPED: Search(profile=file, memory_limit_bytes=_MUCH)}
    sample = torch.randn(1, MIDDLE, WIDTH)
    pipes = {
        name: Pipeline(
            model(num_ranks),
            sample,
            schedule=name if name in pipesched.schedules.names() else "searched",
            search=searches.get(name),
            **options,
        )
        for name in (OURS, CAPPED, *RIVALS)
    }
    equal = [microbatch(MIDDLE) for _ in batches[0]]
    for pipe in pipes.values():
        pipe.step(microbatches=equal)
    found = []
    peaks = dict.fromkeys(pipes, 0)
    for number, lengths in enumerate(batches):
        torch.manual_seed(number)
        given = [microbatch(length) for length in lengths]
        for visit in range(visits):
            makespans, walls = {}, {}
            for name, pipe in pipes.items():
                walls[name] = slowest_s(partial(pipe.step, microbatches=given))
                trace = pipe.gather_trace()
                makespans[name] = trace.makespan_s
                peaks[name] = max(peaks[name], *trace.peak_in_flight)
            found.append(Visit(not visit, makespans, walls))
    every = [[p.grad for p in pipe.parameters()] for pipe in pipes.values()]
    agree = all(torch.equal(one, other) for own in every for one, other in zip(own, every[0], strict=True))
    for pipe in pipes.values():
        pipe.close()
    return Results(found, peaks, agree)


def show(num_ranks: int, count: int, batches: int, visits: int) -> None:
    """Measure the profile and run all pipelines; print one line for each of our orders and each rival."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        others = [microbatch(SHORTEST), microbatch(LONGEST)]
        options: dict[str, Any] = {"rows": [2], "loss_fn": functional.mse_loss, "target": others[1].target[:, :MIDDLE]}
        sample = torch.randn(1, MIDDLE, WIDTH)
        pipesched.profile(model(num_ranks), sample, microbatches=others, **options).save(file)
        results = in_ranks(num_ranks, run, num_ranks, drawn(count, batches), visits, str(file))
    found, peaks = results[0].visits, results[0].peaks
    agree = all(each.agree for each in results)
    print(
        f"{num_ranks} ranks, {count} micro-batches, {batches} batches, {visits} steps with each; bit-identical: {agree}"
    )
    first, later = ([visit for visit in found if visit.is_first is is_first] for is_first in (True, False))
    print(f"{'':14}{'rival':18}{'makespan':>24}{'wall, first visit':>24}{'wall, later':>24}{'pairs':>10}{'s':>8}")
    for own in (OURS, CAPPED):
        for rival in (*RIVALS, *([CAPPED] if own == OURS else [])):
            columns = [
                ratio([times(visit)[own] for visit in those], [times(visit)[rival] for visit in those])
                for times, those in ((_makespans, found), (_walls, first), (_walls, later))
            ]
            cells = "".join(f"{column!s:>24}" for column in columns)
            print(
                f"{own:14}{rival:18}{cells}{f'{peaks[own]} / {peaks[rival]}':>10}{columns[0].second:8.3f}", flush=True
            )
    searched_s = median(visit.walls_s[OURS] for visit in first) - median(visit.walls_s[OURS] for visit in later)
    print(
        f"the first step with a batch takes {searched_s * 1e3:.0f} ms longer than later steps, because all {num_ranks} "
        f"ranks search for an order"
    )


def _makespans(visit: Visit) -> dict[str, float]:
    return visit.makespans_s


def _walls(visit: Visit) -> dict[str, float]:
    return visit.walls_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--visits", type=int, default=4)
    args = parser.parse_args()
    print(machine())
    show(args.ranks, args.microbatches, args.batches, args.visits)


if __name__ == "__main__":
    main()
