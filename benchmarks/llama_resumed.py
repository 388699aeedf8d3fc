"""Llama resumed: a Hugging Face Llama is saved on one layout of ranks, resumed on another, and compared with a loop.

    python benchmarks/llama_resumed.py [--steps 50] [--only 2x2] [--order tree]

There are four layouts: 2 replicas of 2 ranks, a pipeline of 4 ranks, 4 replicas, and one process. A small Llama with
dropout and uneven labels trains on one layout for half of the steps, is saved, and continues on another layout. Every
ordered pair of layouts is tested. The losses must be bit-identical to those of an unpipelined loop that never stops.

--order is the order in which gradients are summed. With "sequential", the result depends on the layout, so the loop
changes its order after half of the steps; replicas have zero=2. With "tree", one loop serves all pairs; replicas have
zero=1.
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
    """Run all pairs of layouts; print for each pair the number of losses that differ from the loop's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps of a run; default: 50")
    parser.add_argument("--only", default="", help="run only pairs of layouts whose description has this text")
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
