"""Replicas: trains replicas of a pipeline, and compares them bit by bit with a plain loop over all micro-batches.

    python benchmarks/replicas.py [--schedules 1f1b zb-v] [--zero 3]

Four processes train two models for two steps: one with dropout, and one with dropout, a tied weight, BatchNorm and
unequal numbers of labels in the replicas. The cases are all combinations of model, mesh (2 replicas of 2 ranks, 4 of 1,
1 of 4), schedule, optimizer (the pipeline's, with clipping; or none, so that gradients accumulate over the steps),
``inputs=`` and, with several replicas and an optimizer, ``zero=``. The losses, and all weights, gradients and buffers
must be bit-identical to those of ``reference_step(num_replicas=)``. The values of chimera, which stores two copies of
the weights, must be equal within rounding. The script prints the differing values of each case, and the number of
REDUCE actions in a step.
"""

import argparse
import sys
import time
from pathlib import Path

from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.jobs import replicas
from tests.support.rank_processes import Ranks

_PATIENCE_S = 300.0


def main() -> None:
    """Run all cases, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=replicas.SCHEDULES, choices=replicas.SCHEDULES)
    parser.add_argument("--zero", nargs="+", type=int, default=range(4), choices=range(4))
    args = parser.parse_args()
    print(machine())
    cases = [case for case in replicas.cases() if case.schedule in args.schedules and case.zero in args.zero]
    ranks = Ranks(4)
    start = time.perf_counter()
    failures = values = 0
    for case in cases:
        try:
            results = ranks.run(4, replicas.trained, case, timeout_s=_PATIENCE_S)
        except AssertionError as error:
            failures += 1
            print(f"{case}: {str(error).splitlines()[-1]}", flush=True)
            continue
        odd = replicas.differing(case, results)
        values += len(replicas.looped(case.model, case.mesh[0], case.updates, case.num_parts).state)
        failures += bool(odd)
        count = sum(own.num_reductions for own in results)
        print(f"{case}: {', '.join(odd) or 'equal'}; {count} REDUCE", flush=True)
    ranks.close()
    seconds = time.perf_counter() - start
    print(f"{len(cases)} cases with {values} compared values; {failures} cases differ; {seconds:.0f} s")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
