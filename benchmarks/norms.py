"""Norms: trains with clipping, and with a scaled loss, under many plans; compares each bit by bit with a plain loop.

    python benchmarks/norms.py [--steps 4] [--long-steps 50] [--quick]

A small model with dropout and a tied weight is trained with every combination of number of ranks (1 to 4), schedule,
place (one process, or one process per rank), checkpointing, dtype and way to clip: ``pipe.clip_grad_norm_`` with a
separate optimizer, or ``Numerics(clip_grad_norm=)`` with ``optimizer=``. In every step the norm, the loss and the
weights must be bit-identical to those of the loop. Then the gradient of each layer overflows in turn: all ranks must
skip the update and halve the scale, as torch's GradScaler does in the loop. --quick runs every seventh combination.
Every combination trains for --steps steps, and one in seven for --long-steps.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.jobs import clipping
from tests.support.places import run_here
from tests.support.rank_processes import Ranks

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v", "zb-h1")
CHECKPOINTS: tuple[Any, ...] = ("never", "always", {"1": "recompute", "4": "recompute", "7": "recompute"})
DTYPES = (torch.float32, torch.bfloat16)
JOBS = {"own optimizer": clipping.clip_between_steps, "optimizer=": clipping.clip_in_steps}
_PATIENCE_S = 600.0
_SOME = 7  # --quick runs one of this many combinations; coprime to the numbers of choices, so that every choice occurs


def cases() -> Iterator[tuple[int, str, str, Any, torch.dtype]]:
    """Yield (ranks, schedule, place, checkpointing, dtype)."""
    yield from product(range(1, 5), SCHEDULES, ("one process", "mesh"), CHECKPOINTS, DTYPES)


def run(ranks: Ranks, place: str, count: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``job`` on each rank, in this process or in one process per rank; return the results."""
    if place == "mesh":
        return ranks.run(count, job, *args, timeout_s=_PATIENCE_S)
    return run_here(count, job, *args)


def clipped(ranks: Ranks, steps: int, every: int) -> bool:
    """Train with clipping under every plan and print counts; return whether all plans agree with the loop."""
    norms: dict[torch.dtype, set[tuple[float, ...]]] = {dtype: set() for dtype in DTYPES}
    counts: Counter[str] = Counter()
    failures = []
    for number, ((count, schedule, place, checkpoint, dtype), (how, job)) in enumerate(product(cases(), JOBS.items())):
        if number % every:
            continue
        case = clipping.Case(schedule, clipping.tied_model, dtype, checkpoint)
        try:
            for own in run(ranks, place, count, job, case, 2.0, steps):
                norms[dtype].add(tuple(own))
            counts[str(dtype).removeprefix("torch.")] += 1
        except AssertionError as error:
            failures.append(f"{count} ranks, {schedule}, {place}, {checkpoint}, {dtype}, {how}: {error}")
    for dtype, seen in norms.items():
        plans = counts[str(dtype).removeprefix("torch.")]
        print(
            f"{dtype}: {plans} plans equal the loop over {steps} steps with clipping; "
            f"distinct sequences of norms: {len(seen)}"
        )
    print(f"differing plans: {len(failures)}", *failures, sep="\n", flush=True)
    return not failures and all(len(seen) == 1 for seen in norms.values())


def scaled(ranks: Ranks, steps: int, every: int) -> bool:
    """Make the gradient of each layer overflow in turn, and print counts.

    Returns whether all ranks skip the update, with the same results as the loop.
    """
    layers = [place for place, layer in enumerate(clipping.plain_model()) if getattr(layer, "weight", None) is not None]
    trained = [place for place in layers if clipping.plain_model()[place].weight.requires_grad]
    failures = []
    good = 0
    combinations = product(range(1, 5), SCHEDULES, ("one process", "mesh"), trained)
    for number, (count, schedule, place, layer) in enumerate(combinations):
        if number % every:
            continue
        dtype = DTYPES[number // every % 2]
        case = clipping.Case(schedule, clipping.plain_model, dtype, CHECKPOINTS[number % 3])
        optimizers = number // every % 4 < 2
        try:
            results = run(ranks, place, count, clipping.scale_losses, case, layer, optimizers, 1024.0, steps)
            assert all(own == (1, results[0][1]) for own in results), f"ranks disagree: {results}"
            good += 1
        except AssertionError as error:
            failures.append(f"{count} ranks, {schedule}, {place}, layer {layer}, {dtype}, {optimizers}: {error}")
    print(
        f"overflows in one layer: in {good} cases, all ranks skip the update, with the same results as the loop with "
        f"a GradScaler"
    )
    print(f"differing: {len(failures)}", *failures, sep="\n", flush=True)
    return not failures


def main() -> None:
    """Run all combinations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--long-steps", type=int, default=50)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    every = _SOME if args.quick else 1
    ranks = Ranks(4)
    try:
        good = scaled(ranks, args.steps, every)
        good &= clipped(ranks, args.steps, every)
        good &= clipped(ranks, args.long_steps, every * _SOME)
    finally:
        ranks.close()
    print(f"{machine()}; {time.perf_counter() - begin:.0f} s")
    sys.exit(not good)


if __name__ == "__main__":
    main()
