"""Llama resumed: a Hugging Face Llama is saved on 2x2 ranks, resumed on other ranks, and compared with a loop.

    python benchmarks/llama_resumed.py [--steps 50] [--most 3]

A small Llama with dropout and uneven labels trains on 2 replicas of 2 ranks, with zero=2 and with zero=0, and is saved
after half of the steps. It continues on 2x2 ranks, on 1 pipeline of 4 ranks, on 4 replicas, and in one process. All
losses are compared bit by bit with those of one loop that never stops. In each half, the loop adds the gradients in the
same order as the replicas of this half.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.rank_processes import Ranks
from tests.support.resumed_llama import Place, loop, run

BEFORE = (Place(2, 2, zero=2), Place(2, 2))
AFTER = (Place(1, 4), Place(4, 1), Place(1, 2, mesh=False), Place(4, 1, zero=2), Place(2, 2), Place(2, 2, zero=2))


def main() -> None:
    """Resume each saved run in several ways; print for each way the number of losses that differ from the loop's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps of a run; default: 50")
    parser.add_argument(
        "--most", type=int, default=len(AFTER), help="largest number of resumed runs for each saved run"
    )
    args = parser.parse_args()
    steps = args.steps
    stop = steps // 2
    begin = time.perf_counter()
    wrong = pairs = 0
    ranks = Ranks(4)
    try:
        for before in BEFORE:
            with tempfile.TemporaryDirectory() as folder:
                first = run(ranks, before, range(stop), None, folder)
                for after in AFTER[: args.most]:
                    losses = first + run(ranks, after, range(stop, steps), folder, None)
                    due = loop(before, after, stop, steps)
                    different = sum(not torch.equal(*pair) for pair in zip(losses, due, strict=True))
                    wrong += different
                    pairs += 1
                    print(
                        f"{before} -> {after}: {steps} losses from {losses[0]:.4f} to {losses[-1]:.4f}, "
                        f"{different} differ",
                        flush=True,
                    )
    finally:
        ranks.close()
    print(f"{pairs} resumed runs, {wrong} losses differ; {time.perf_counter() - begin:.0f} s; {machine()}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
