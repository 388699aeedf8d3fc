"""Redundancy: what a copy of each stage on another rank costs.

    python benchmarks/redundancy.py --measured [--ranks 4] [--microbatches 8] [--share 0.5] [--pairs 7]
    python benchmarks/redundancy.py --simulated [--ranks 4] [--microbatches 8] [--share 0.5] [--picture redundancy.png]

**Measured**, over gloo: each rank has 50 MB of weights with the states of AdamW. Its forwards, backwards and updates
sleep, as those of an accelerator leave the host free, and so does each message of gradients to the neighbour, as long
as the share of the bubble says. Copies are really made. Two pipelines, without and with redundancy, run a few steps in
turn, and the table has the ratio of their median steps.

**Simulated**, for every schedule: a rank has the work of a forward of 1 s, input gradients of 1 s and weight gradients
of 1 s for each micro-batch, and an update of 0.5 s. Its AdamW holds two values for each weight, and an output has a
hundredth of the size of its weights. A rank's gradients take a share (default: half) of the bubble of 1F1B to reach the
next rank, and KEEP and REPLAY of its stages take as long as their updates. The table compares the steps of a schedule
without and with redundancy:

- ratio: the step with redundancy, as a multiple of the step without
- lane: the part of the step until the last copy is updated
- host copies: the largest memory of copies on a rank's host, as a multiple of the rank's weights

The step gets longer if the lane is busy for longer than the step without, or if a KEEP ends after the backwards of its
stage: --share 4 shows this. It is not counted that MIRRORs share links with the messages between stages, nor that an
update of a copy takes time from a host whose processors also compute.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from pipesched import Costs, Distributed, Link, Links, Pipeline, Program, Trace, schedules, simulate
from pipesched.elastic.redundancy import Redundancy
from pipesched.errors import ScheduleError
from pipesched.program.completion import Completion
from pipesched.simulation.memory import rank_memory
from pipesched.viz import plot_compare

WORK_S = 1.0  # of a rank, for a forward, the input gradients and the weight gradients of a micro-batch
UPDATE_S = 0.5  # of a rank
WEIGHT_BYTES = 2**30  # of a rank
OUTPUT_BYTES = WEIGHT_BYTES // 100  # of a micro-batch
MOST = 1.02  # the largest step with redundancy, as a multiple of the step without

PLAIN = Completion(updates=True)
REDUNDANT = replace(PLAIN, redundancy=True)


class Steps(NamedTuple):
    """The steps of a schedule, without and with redundancy."""

    without: Trace
    kept: Trace
    #: The largest memory of copies on a rank's host, in bytes.
    host_bytes: int

    @property
    def ratio(self) -> float:
        """The step with redundancy as a multiple of the step without."""
        return float(self.kept.makespan_s / self.without.makespan_s)

    @property
    def lane(self) -> float:
        """The end of the last REPLAY, as a share of the step with redundancy."""
        end_s = max(span.end_s for row in self.kept.redundancy_by_rank for span in row)
        return float(end_s / self.kept.makespan_s)


def costs(program: Program, links: Links | None = None) -> Costs:
    """Return the costs of the stages of a program, whose ranks have equal work in total."""
    chunks = [len(program.chunks(rank)) for rank in program.placement]
    work = tuple(WORK_S / share for share in program.shares)
    weights = tuple(WEIGHT_BYTES // count for count in chunks)
    update_s = tuple(UPDATE_S / count for count in chunks)
    return Costs(
        forward_s=work,
        input_grad_s=work,
        weight_grad_s=work,
        update_s=update_s,
        keep_s=update_s,
        weight_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=tuple(2 * size for size in weights),
        output_bytes=(OUTPUT_BYTES // program.slices_per_microbatch,) * program.num_stages,
        links=links,
    )


def link_of(ranks: int, microbatches: int, share: float) -> Links:
    """Return links over which a rank's gradients take a share of the bubble of 1F1B."""
    program = PLAIN.complete(schedules.get("1f1b").program(ranks, microbatches))
    trace = simulate(program, costs(program))
    bubble_s = trace.bubble_ratio * trace.makespan_s
    return Links(Link(0, WEIGHT_BYTES / (share * bubble_s)))


def simulated(name: str, ranks: int, microbatches: int, links: Links) -> Steps:
    """Simulate a step of a schedule without and with redundancy.

    Raises ScheduleError if the schedule does not support the shape, or has no redundancy.
    """
    program = schedules.get(name).program(ranks, microbatches)
    own = costs(program, links)
    redundant = REDUNDANT.complete(program)
    if not redundant.has_redundancy:
        raise ScheduleError("several stages hold the same weights; they are updated after the step")
    host_bytes = max(memory.host_copies for memory in rank_memory(redundant, own))
    return Steps(simulate(PLAIN.complete(program), own), simulate(redundant, own), host_bytes)


def table(ranks: int, microbatches: int, links: Links) -> tuple[list[str], list[str]]:
    """Return the rows of the table of all schedules, and the names of schedules whose steps become too long."""
    heads = ["schedule", "bubble", "step", "with redundancy", "ratio", "lane", "host copies"]
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    slow = []
    for name in schedules.names():
        try:
            steps = simulated(name, ranks, microbatches, links)
        except ScheduleError as error:
            why = str(error).split(";")[0]
            rows.append(f"| {name} | {'| ' * 5}{why} |")
            continue
        cells = [
            name,
            f"{steps.without.bubble_ratio:.1%}",
            f"{steps.without.makespan_s:.2f} s",
            f"{steps.kept.makespan_s:.2f} s",
            f"{steps.ratio:.3f}",
            f"{steps.lane:.1%}",
            f"{steps.host_bytes / WEIGHT_BYTES:.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
        slow += [name] if steps.ratio > MOST else []
    return rows, slow


def print_simulated(ranks: int, microbatches: int, share: float, picture: str | None) -> None:
    """Print the table of simulated steps, and write a picture of 1F1B."""
    links = link_of(ranks, microbatches, share)
    rows, slow = table(ranks, microbatches, links)
    print("\n".join(rows))
    longer = f"longer: {', '.join(slow)}" if slow else "none is longer"
    print(f"steps with redundancy of at most {MOST} times the step without: {longer}")
    if picture is not None:
        steps = simulated("1f1b", ranks, microbatches, links)
        plot_compare([("1f1b", steps.without), ("with redundancy", steps.kept)]).savefig(picture)


FORWARD_S, UPDATES_S = 0.05, 0.05  # of a rank; a backward takes twice as long
WIDTH = 50_000_000 // 4  # the number of weights of a rank
STEPS = 4  # of a pipeline before it is the other's turn; the first of them is not counted


class _Work(torch.autograd.Function):
    """Sleeps in the forward and the backward. The gradient of the weights is there without work of the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, gradient: Tensor) -> Tensor:
        ctx.weight, ctx.gradient = weight, gradient
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * FORWARD_S)
        ctx.weight.grad = ctx.gradient
        return grad.clone(), None, None


class Layer(nn.Module):
    """A layer with the weights of a rank, whose work is sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self._gradient = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.weight, self._gradient)  # type: ignore[no-untyped-call,no-any-return]


class SleepingAdamW(torch.optim.AdamW):
    """AdamW whose updates sleep once the states exist."""

    def step(self, closure: Any = None) -> Any:
        """Sleep in place of an update."""
        if self.state:
            time.sleep(UPDATES_S)
            return None
        return super().step(closure)


def bubble_s(ranks: int) -> float:
    """Return the bubble of a rank in a step of 1F1B."""
    return (ranks - 1) * 3 * FORWARD_S


def _rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", options.ranks)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("pp",))
    send: Callable[..., Any] = Redundancy._sent
    pause_s = options.share * bubble_s(options.ranks)

    def sent(redundancy: Redundancy, value: Any) -> Any:
        arrived = send(redundancy, value)
        if hasattr(value, "gradients"):
            time.sleep(pause_s)
        return arrived

    Redundancy._sent = sent  # type: ignore[method-assign]
    x = torch.ones(options.microbatches, 4)

    def pipeline(**choices: Any) -> Pipeline:
        return Pipeline(
            nn.Sequential(*(Layer() for _ in range(options.ranks))),
            x[:1],
            loss_fn=nn.functional.mse_loss,
            mesh=mesh,
            schedule="1f1b",
            num_microbatches=options.microbatches,
            boundaries=list(range(1, options.ranks)),
            optimizer=SleepingAdamW,
            seed=0,
            distributed=Distributed(timeout=120, **choices),
        )

    pipes = {"without": pipeline(), "with": pipeline(redundancy="neighbour")}
    found: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(options.pairs + 1):
        for name, pipe in pipes.items():
            ended_s = []
            for _ in range(STEPS):
                pipe.step(x, target=x).item()
                ended_s.append(time.perf_counter())
            found[name].append((ended_s[-1] - ended_s[0]) / (STEPS - 1))
            distributed.barrier()
    if rank == 0:
        lines = [" ".join(map(str, found[name][1:])) for name in ("without", "with")]
        Path(f"{folder}/steps").write_text("\n".join(lines))
    for pipe in pipes.values():
        pipe.close()


def print_measured(options: argparse.Namespace) -> None:
    """Run two pipelines in turn, and print the ratio of their steps."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, folder, options)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        without, kept = (
            [float(one) for one in line.split()] for line in Path(f"{folder}/steps").read_text().split("\n")
        )
    ratios = sorted(b / a for a, b in zip(without, kept, strict=True))
    spread = f"[{ratios[0]:.3f}, {ratios[-1]:.3f}]"
    print(f"bubble of a rank {bubble_s(options.ranks):.2f} s, gradients travel {options.share:.0%} of it")
    print(f"step without {statistics.median(without):.3f} s, with {statistics.median(kept):.3f} s")
    print(f"ratio: median of {len(ratios)} pairs {statistics.median(ratios):.4f} {spread}")


def main() -> None:
    """Print the measured or the simulated steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulated", action="store_true", help="print the simulated steps")
    what.add_argument("--measured", action="store_true", help="print the measured steps")
    parser.add_argument("--pairs", type=int, default=7, help="of the measured runs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5, help="of the bubble of 1F1B, for a rank's gradients")
    parser.add_argument("--picture", help="write the timelines of 1F1B to this file")
    options = parser.parse_args()
    if options.measured:
        print_measured(options)
        return
    print_simulated(options.ranks, options.microbatches, options.share, options.picture)


if __name__ == "__main__":
    main()
