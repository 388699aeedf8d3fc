"""Resume: stops runs after 10 steps, resumes them under another plan, and compares them with 20 steps of a loop.

    python benchmarks/resume.py [--most 50] [--only pairwise | replicas | zero]

There are three groups of cases. The script compares losses, weights, buffers, optimizer states and learning rates bit
by bit. The model has tied weights, BatchNorm and dropout; AdamW has a learning rate scheduler. All cases run in the
same processes.

Group "pairwise": the plans before and after the stop vary in five factors: 1 to 4 ranks; 1f1b, interleaved-1f1b, zb-v
or zb-h1; one process or a mesh; a separate optimizer or ``optimizer=``; checkpointing "never", "always" or by layer.
Every combination of values of any two factors occurs at least once.

Group "replicas": runs begin or end with 2 or 4 replicas. If the number of replicas changes, the loop also changes the
order in which it adds gradients: its first 10 steps use the order of the replicas before the stop, the other steps use
the order of the replicas after the stop.

Group "zero": runs begin or end with states that replicas divide. All pairs of the following plans run: 2 replicas of 2
ranks and 4 replicas of 1 rank, each with zero=0, 1, 2 and 3; one pipeline of 4 ranks; and one process.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.rank_processes import Ranks
from tests.support.resumed_runs import differences, pairwise_cases, replica_cases, runs, zero_cases

CASES = {"pairwise": pairwise_cases, "replicas": replica_cases, "zero": zero_cases}


def main() -> None:
    """Run all cases and print their number and the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=None, help="largest number of cases to run; default: all")
    parser.add_argument("--only", choices=CASES, help="run only this group of cases; default: all groups")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="BatchNorm sees one micro-batch")
    begin = time.perf_counter()
    ranks = Ranks(4)
    cases = [case for name, make in CASES.items() if args.only in (None, name) for case in make()][: args.most]
    wrong = 0
    try:
        for number, (before, after) in enumerate(cases):
            with tempfile.TemporaryDirectory() as folder:
                different = differences(runs(ranks), before, after, f"{folder}/checkpoint")
            wrong += bool(different)
            print(f"{number}: {before} -> {after}: {', '.join(different[:5]) or 'equal'}", flush=True)
    finally:
        ranks.close()
    print(f"{len(cases)} resumed runs, {wrong} differ; {time.perf_counter() - begin:.0f} s; {machine()}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
