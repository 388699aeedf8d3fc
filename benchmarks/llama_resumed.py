"""Llama resumed: a Hugging Face Llama is saved on some ranks, resumed on others, and compared with a loop.

    python benchmarks/llama_resumed.py [--steps 50] [--only 2x2] [--order tree]

A small Llama with dropout and uneven labels trains on 2 replicas of 2 ranks, on 1 pipeline of 4 ranks, on 4 replicas or
in one process, and is saved after half of the steps. It continues in each of the other three places. All losses are
compared bit by bit with those of one loop that never stops. With "sequential" sums, the loop adds the gradients in each
half in the order of the replicas of this half, and replicas have zero=2. With "tree" sums, the loop is the same for all
pairs, and replicas have zero=1.
"""

import argparse
import sys
import tempfile
import time
from itertools import permutations
from pathlib import Path

import torch
from measure import machine

from pipesched.runtime.gradients.tree_sums import ReductionOrder

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.rank_processes import Ranks
from tests.support.resumed_llama import Place, loop, run

ORDERS: dict[ReductionOrder, int] = {"sequential": 2, "tree": 1}  # the value of zero= for each order


def pairs(order: ReductionOrder) -> list[tuple[Place, Place]]:
    """All ordered pairs of places."""
    zero = ORDERS[order]
    places = Place(2, 2, zero), Place(1, 4), Place(4, 1, zero), Place(1, 2, mesh=False)
    return list(permutations([place._replace(order=order) for place in places], 2))


def main() -> None:
    """Resume each saved run in several ways; print for each way the number of losses that differ from the loop's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps of a run; default: 50")
    parser.add_argument("--only", default="", help="only pairs whose description contains this text")
    parser.add_argument("--order", nargs="+", default=list(ORDERS), choices=ORDERS, help="default: both")
    args = parser.parse_args()
    steps = args.steps
    stop = steps // 2
    begin = time.perf_counter()
    wrong = count = 0
    ranks = Ranks(4)
    try:
        for before, after in (pair for order in args.order for pair in pairs(order)):
            if args.only not in f"{before} -> {after}":
                continue
            with tempfile.TemporaryDirectory() as folder:
                losses = run(ranks, before, range(stop), None, folder)
                losses += run(ranks, after, range(stop, steps), folder, None)
            due = loop(before, after, stop, steps)
            different = sum(not torch.equal(*pair) for pair in zip(losses, due, strict=True))
            wrong += different
            count += 1
            print(
                f"{before} -> {after}: {steps} losses from {losses[0]:.4f} to {losses[-1]:.4f}, {different} differ",
                flush=True,
            )
    finally:
        ranks.close()
    print(f"{count} resumed runs, {wrong} losses differ; {time.perf_counter() - begin:.0f} s; {machine()}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
