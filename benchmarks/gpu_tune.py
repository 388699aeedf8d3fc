"""GPU tune: the plan of pipesched.tune for this machine's accelerators, beside a sweep of all schedules.

    python benchmarks/gpu_tune.py [--device cuda] [--ranks 2] [--pairs 11] [--seconds 300] [--tiny]

The model is a GPT whose head takes the time of several blocks. tune measures its layers on the device, searches, and
runs the best plans there. The first table shows the plans that ran: the step time that was predicted before any step
ran, the measured time, and the error of the prediction. Then the chosen plan and each exact schedule with equal stages
and the same number of micro-batches run in turn (A B A B ...). "schedule / plan" above 1 means that the plan is faster.
There is one rank for each device, at most four, unless --ranks is given. Predictions assume that each rank has an
accelerator of its own. If ranks share one, the error shows by how much they slow each other down.
"""

import argparse
import time
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from measure import machine
from on_device import Budget, Figures, add_options, all_devices, begun, in_turn, timed_s
from torch import Tensor, nn
from torch.nn import functional

import pipesched
from pipesched import Pipeline, Plan, schedules
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.program.actions import Kind


class Size(NamedTuple):
    """The sizes of the GPT and of its batch."""

    blocks: int
    width: int
    words: int
    tokens: int
    rows: int


FULL, SMALL = Size(16, 1024, 50304, 512, 64), Size(6, 32, 512, 8, 16)


def gpt(size: Size, device: torch.device) -> nn.Sequential:
    """Return token embeddings, transformer blocks and a head over the vocabulary."""
    torch.manual_seed(0)
    heads = max(1, size.width // 64)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
    with device:
        blocks = [nn.TransformerEncoderLayer(size.width, heads, 4 * size.width, **options) for _ in range(size.blocks)]
        ends = nn.LayerNorm(size.width), nn.Linear(size.width, size.words)
        return nn.Sequential(nn.Embedding(size.words, size.width), *blocks, *ends)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def exact_schedules(ranks: int, microbatches: int) -> list[str]:
    """Return the names of the exact schedules for these ranks that have no updates inside a step."""
    found = []
    for name in schedules.names():
        with suppress(ScheduleError):  # a bidirectional schedule refuses an odd number of ranks
            program = schedules.get(name).program(ranks, microbatches)
            kinds = {action.kind for order in program.orders for action in order}
            if program.exact and Kind.UPDATE not in kinds:
                found.append(name)
    return found


def show_trials(plan: Plan, figures: Figures) -> None:
    """Print the predicted and the measured step of each plan that ran."""
    print(f"\n{'plan':<32}{'m':>4}{'ranks':>6}{'predicted ms':>14}{'measured ms':>13}{'error':>9}")
    for one in plan.alternatives:
        if one.measured_s is None or one.first_s is None:
            continue
        error = one.first_s / one.measured_s - 1
        times = f"{one.first_s * 1e3:>14.1f}{one.measured_s * 1e3:>13.1f}{error:>+9.1%}"
        print(f"{one.label:<32}{one.num_microbatches:>4}{one.num_ranks:>6}{times}", flush=True)
        row = {"predicted_ms": one.first_s * 1e3, "measured_ms": one.measured_s * 1e3, "error": error}
        figures.add("prediction", plan=one.label, microbatches=one.num_microbatches, ranks=one.num_ranks, **row)


def sweep(plan: Plan, size: Size, batch: tuple[Tensor, Tensor], devices: list[torch.device], args: Any) -> None:
    """Compare the plan with each exact schedule; print a row for each."""
    x, y = batch
    count = plan.program.num_microbatches
    names = exact_schedules(len(devices), count)
    print(f"\n{'schedule':<20}{'schedule / plan':>24}{'its ms':>10}{'plan ms':>10}")
    budget, figures = Budget(args.seconds, len(names)), Figures(args.figures)
    make = partial(Pipeline, sample=x[: size.rows // count], loss_fn=loss_fn)
    with make(gpt(size, devices[0]), plan=plan, devices=devices[: plan.program.num_ranks]) as ours:
        for name in names:
            share_s = budget.share_s()
            if share_s <= 0:
                print(f"{name:<20}  not run: the time is used up", flush=True)
                continue
            model = gpt(size, devices[0])
            stages = len(devices) * schedules.get(name).chunks_per_rank
            cut = [len(model) * stage // stages for stage in range(1, stages)]
            try:
                other = make(model, schedule=name, num_microbatches=count, boundaries=cut, devices=devices)
            except (PipeschedError, torch.OutOfMemoryError) as error:
                print(f"{name:<20}  {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                continue
            with other as pipe:
                steps = (partial(timed_s, partial(one.step, x, target=y), devices) for one in (pipe, ours))
                found = in_turn(*steps, args.pairs, share_s).compared
            print(f"{name:<20}{found!s:>24}{found.first * 1e3:>10.1f}{found.second * 1e3:>10.1f}", flush=True)
            interval = {"ratio": found.value, "low": found.low, "high": found.high}
            figures.add("sweep", schedule=name, its_ms=found.first * 1e3, plan_ms=found.second * 1e3, **interval)


def main() -> None:
    """Search for a plan, and compare it with the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="number of ranks (default: one for each device, at most four)")
    parser.add_argument("--pairs", type=int, default=11)
    add_options(parser, seconds=300)
    args = parser.parse_args()
    device = begun(args.device)
    size = SMALL if args.tiny else FULL
    args.pairs = min(args.pairs, 3) if args.tiny else args.pairs
    there = all_devices(device)
    ranks = args.ranks or min(4, len(there))
    devices = there[:ranks] if len(there) >= ranks else [device] * ranks
    print(f"{machine()}; {size}; ranks on {', '.join(map(str, devices))}")
    x, y = (torch.randint(size.words, (size.rows, size.tokens)).to(device) for _ in range(2))
    begin_s = time.perf_counter()
    plan = pipesched.tune(
        gpt(size, devices[0]),
        x[:4],
        devices=devices,
        batch_size=size.rows,
        loss_fn=loss_fn,
        target=y[:4],
        all_ranks=True,
        effort=30_000 if args.tiny else None,
    )
    print(f"tune took {time.perf_counter() - begin_s:.1f} s\n\n{plan.explain()}", flush=True)
    show_trials(plan, Figures(args.figures))
    sweep(plan, size, (x, y), devices, args)


if __name__ == "__main__":
    main()
