"""Resume: runs that stop after 10 steps and continue under another plan, compared bit by bit with 20 steps of a loop.

    python benchmarks/resume.py [--most 50]

The plans before and after the stop vary in five factors: 1 to 4 ranks; 1f1b, interleaved-1f1b, zb-v or zb-h1; one
process or a mesh; an optimizer of the user or ``optimizer=``; checkpointing "never", "always" or by layer. The cases
are pairwise: every combination of values of any two factors occurs at least once. The model has tied weights, BatchNorm
and dropout; AdamW has a learning rate scheduler. The script compares losses, weights, buffers, optimizer states and
learning rates. All cases run in the same processes.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.places import run_here
from tests.support.rank_processes import Ranks
from tests.support.resumed_runs import Half, differences, never_stopped, pairwise_cases


def main() -> None:
    """Run all cases and print their number and the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=None, help="the most cases to run; default: all")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="BatchNorm sees one micro-batch")
    begin = time.perf_counter()
    ranks = Ranks(4)
    expected = never_stopped()
    cases = pairwise_cases()[: args.most]
    wrong = 0

    def run(half: Half, job: Any, path: str) -> list[Any]:
        return (run_here if half.place == "process" else ranks.run)(half.ranks, job, half, path)

    try:
        for number, (before, after) in enumerate(cases):
            with tempfile.TemporaryDirectory() as folder:
                different = differences(run, before, after, f"{folder}/checkpoint", expected)
            wrong += bool(different)
            print(f"{number}: {before} -> {after}: {', '.join(different[:5]) or 'equal'}", flush=True)
    finally:
        ranks.close()
    print(f"{len(cases)} resumed runs, {wrong} differ; {time.perf_counter() - begin:.0f} s; {machine()}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
