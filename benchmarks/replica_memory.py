"""Replica memory: compares the memory of each rank, and the bytes that it sends to other replicas, with predictions.

    python benchmarks/replica_memory.py [--schedules 1f1b zb-v] [--model gpt] [--each-use]

Four gloo ranks form 2 replicas of 2 ranks, or 4 replicas of 1 rank. A row of the table shows the largest peak memory of
a rank in the second step ("Held"), the smallest and the largest ratio of predicted to measured memory over the ranks,
and the measured and predicted bytes that the first rank sends to the other replicas in a step. In the cases
"3, each use", zero=3 runs with `gather_once=False`, and interleaved-1f1b has 4 stages on each rank. `--each-use` runs
only these cases.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.jobs import replica_memory
from tests.support.jobs.replica_memory import GPT, SMALL, Case, adam, sgd
from tests.support.rank_processes import Ranks

MESHES = (2, 2), (4, 1)
SCHEDULES = "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"
LEVELS = (0, True), (1, True), (2, True), (3, True), (3, False)


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--model", default="linear", choices=("linear", "gpt"), help="32 linear or 16 GPT blocks")
    parser.add_argument("--each-use", action="store_true", help="run only zero=3 with gather_once=False")
    options = parser.parse_args()
    levels = LEVELS[-1:] if options.each_use else LEVELS
    shape = GPT if options.model == "gpt" else SMALL
    print("| Mesh | Schedule | Optimizer | zero | Held | Predicted / held | Sent | Predicted |")
    print("|---|---|---|---|---|---|---|---|")
    ranks = Ranks(4)
    least, most, above, wrong = 2.0, 0.0, 0, 0
    for dims, name, make, (zero, once) in product(MESHES, options.schedules, (adam, sgd), levels):
        chunks = 4 if name == "interleaved-1f1b" and not once else None
        case = Case(dims, name, make, zero, shape, once, chunks)
        level = f"{zero}{'' if once else ', each use'}"
        every = ranks.run(4, replica_memory.compare, case, timeout_s=300)
        ratios = [one.ratio for one in every]
        least, most = min(least, *ratios), max(most, *ratios)
        above += sum(ratio < 1 for ratio in ratios)
        wrong += sum(one.sent != one.predicted_sent for one in every)
        print(
            f"| {dims[0]}x{dims[1]} | {name} | {make.__name__} | {level} | {max(one.measured for one in every):,} | "
            f"{min(ratios):.3f} to {max(ratios):.3f} | {every[0].sent:,} | {every[0].predicted_sent:,} |",
            flush=True,
        )
    ranks.close()
    print(
        f"predicted / held: {least:.3f} to {most:.3f}; ranks that hold more than predicted: {above}; ranks whose sent "
        f"bytes differ from the prediction: {wrong}"
    )


if __name__ == "__main__":
    main()
