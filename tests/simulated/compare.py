"""Runs all features on simulated devices, and prints how often the bits are the CPU's, and the races that were found.

    python -m tests.simulated.compare [RUNS] [NAME ...]

RUNS is the number of runs of each feature. Default: 1. NAME is a feature of `features.py`. Default: all.
"""

import sys
from collections import Counter

import torch

from tests.simulated.accelerator import start


def compare(runs: int, names: list[str]) -> None:
    """Print a row for each feature."""
    accelerator = start()  # before pipesched is imported
    from tests.simulated.actions import label_actions
    from tests.simulated.features import FEATURES, outcome, same

    label_actions(accelerator)
    torch.set_num_threads(1)
    for name in names or FEATURES:
        expected = outcome(name, "cpu")
        races: Counter[str] = Counter()
        equal = 0
        for _ in range(runs):
            accelerator.judge.forget()
            try:
                equal += same(expected, outcome(name, "sim"))
            except Exception as error:
                print(f"    {type(error).__name__}: {str(error)[:400]}")
            races.update(str(violation) for violation in accelerator.judge.violations)
        print(f"| {name} | {equal} of {runs} | {races.total()} |", flush=True)
        for text, count in races.most_common(2):
            print(f"    {count} x {text}", flush=True)


if __name__ == "__main__":
    compare(int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:])
