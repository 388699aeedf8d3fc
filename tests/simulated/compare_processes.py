"""Runs features over several processes, and prints how often the bits are the CPU's, and the races that were found.

    python -m tests.simulated.compare_processes [RUNS] [NAME ...]

RUNS is the number of runs of each feature. Default: 1. NAME is a feature of `process_features.py` or a job of
`replica_jobs.py`. Default: all.
"""

import sys
from collections import Counter

from tests.simulated import replica_jobs
from tests.simulated.process_features import FEATURES, compared
from tests.simulated.rank_devices import Judged, judged, simulated_ranks
from tests.support.rank_processes import Ranks

_LIMIT_S = 60


def compare(runs: int, names: list[str]) -> None:
    """Print a row for each feature."""
    ranks = simulated_ranks()
    for name in names or [*FEATURES, *replica_jobs.__all__]:
        races: Counter[str] = Counter()
        equal = 0
        for _ in range(runs):
            try:
                judgements = _judgements(ranks, name)
            except AssertionError as error:
                print(f"    {str(error)[-400:]}")
                continue
            equal += all(judgement.result in (True, None) for judgement in judgements)
            races.update(found for judgement in judgements for found in judgement.violations)
            if name != "a failed step":
                races.update(f"cut off: {found}" for judgement in judgements for found in judgement.cut_off)
            errors = [judgement.result[-400:] for judgement in judgements if isinstance(judgement.result, str)]
            print(*errors[:1], sep="\n", end="")
        print(f"| {name} | {equal} of {runs} | {races.total()} |", flush=True)
        for text, count in races.most_common(2):
            print(f"    {count} x {text}", flush=True)


def _judgements(ranks: Ranks, name: str) -> list[Judged]:
    if name in FEATURES:
        return ranks.run(FEATURES[name][0], judged, compared, name, timeout_s=_LIMIT_S)
    return ranks.run(4, judged, getattr(replica_jobs, name), timeout_s=_LIMIT_S)


if __name__ == "__main__":
    compare(int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:])
