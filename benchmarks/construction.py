"""Construction: compares the time that two versions of pipesched take to make a pipeline, for models of transformers.

    git worktree add ../before COMMIT
    python benchmarks/construction.py ../before [--count 48] [--seed 1] [--only NAME ...]

Takes classes at random from those of `architectures.py`. Each version makes a pipeline with three stages of a
tiny model, four times; the first time does not count, and the least of the others does. Both versions run at the same
time, in processes of their own, and take one class after the other. The script prints the median times, and the median
of the ratios this / other with a 95 % bootstrap interval.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import transformers
from architecture_trials import BATCHES, MICROBATCHES, RANKS, Search, mean_square
from architectures import classes
from measure import machine, ratio

from pipesched import Pipeline

TIMES = 4
SEED = 3


def construction_s(name: str) -> float:
    """Return the seconds that the construction of a pipeline takes."""
    specimen = Search(getattr(transformers, name)).found()
    sample = specimen.batch(BATCHES["all padded"])[0]
    loss = {} if specimen.recipe.own_loss else {"loss_fn": mean_square}
    times_s = []
    for _ in range(TIMES):
        model = specimen.model()
        begin_s = time.perf_counter()
        pipe = Pipeline(
            model,
            sample,
            devices=["cpu"] * RANKS,
            schedule="1f1b",
            num_microbatches=MICROBATCHES,
            seed=SEED,
            **loss,
        )
        times_s.append(time.perf_counter() - begin_s)
        pipe.close()
    return min(times_s[1:])


def serve(names: list[str]) -> None:
    """Print a JSON line for each class: its name, and the seconds, or None if no pipeline can be made."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in names:
        try:
            seconds = construction_s(name)
        except Exception:  # any error of a class that this version cannot run
            seconds = None
        print(json.dumps([name, seconds]), flush=True)


def measured(checkouts: list[Path], names: list[str]) -> list[dict[str, float]]:
    """Return the seconds by class for each checkout. Classes that one of them cannot run are left out."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", *names],
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for checkout in checkouts
    ]
    tables = [dict(map(json.loads, process.communicate()[0].splitlines())) for process in processes]
    both = [name for name in names if all(table.get(name) is not None for table in tables)]
    return [{name: table[name] for name in both} for table in tables]


def main() -> None:
    """Print the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="a checkout of the other version")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--serve", nargs="+", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.other is None:
        parser.error("give the folder of a checkout of the other version")
    chosen = arguments.only or random.Random(arguments.seed).sample(classes(), arguments.count)
    this, other = measured([Path(__file__).parent.parent, arguments.other], chosen)
    found = ratio(list(this.values()), list(other.values()))
    print(machine())
    medians = f"medians {found.first:.3f} and {found.second:.3f} s"
    print(f"{len(this)} of {len(chosen)} classes: this / other {found}, {medians}")
    slower = sorted(this, key=lambda name: this[name] / other[name])
    for name in (*slower[:3], *slower[-3:]):
        print(f"    {name:<50}{this[name] / other[name]:.2f}  {this[name]:.3f} s  {other[name]:.3f} s")


if __name__ == "__main__":
    main()
