"""Hybrid sharding: compares a plain loop with replicas whose stages fully_shard divides over a mesh dimension.

    python benchmarks/hybrid_sharding.py [--schedules 1f1b zb-v]

Four processes train a model with dropout for two steps, on unequal numbers of labels, with clipping and AdamW. The
cases are all combinations of mesh (replicas x shards x ranks of a pipeline), schedule, and layers that fully_shard
divides (all or some). In each case, the losses, gradients, norms and weights are compared with those of the loop,
``reference_step(num_replicas=)``. The script prints the largest relative difference. The limit is 1e-6, not 0, because
fully_shard adds gradients in a different order.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.jobs import replicas
from tests.support.rank_processes import Ranks

MESHES = (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 4, 1)
SCHEDULES = "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"
LIMIT = 1e-6


def main() -> None:
    """Run all cases, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    schedules = parser.parse_args().schedules
    print(machine())
    ranks = Ranks(4)
    worst = []
    for mesh in MESHES:
        for schedule in schedules:
            for part in (False, True):
                errors = ranks.run(4, partial(replicas.hybrid, part=part), mesh, schedule, timeout_s=120)
                worst.append(max(map(max, errors)))
                layers = "some layers" if part else "all layers"
                print(f"{'x'.join(map(str, mesh))} {schedule}, {layers}: {worst[-1]:.1e}", flush=True)
    ranks.close()
    over = sum(error > LIMIT for error in worst)
    print(f"{len(worst)} cases: {worst.count(0)} equal to the plain loop, {over} differ from it by more than {LIMIT:g}")
    sys.exit(over > 0)


if __name__ == "__main__":
    main()
