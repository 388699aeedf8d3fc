"""First tune: measures the first `tune` on a machine, where numba has compiled nothing yet, and the second.

    git worktree add ../before COMMIT
    python benchmarks/first_tune.py [../before] [--ranks 4] [--layers 24]

Tunes the model of ``make demo`` and a GPT of 24 layers, each in processes of its own with an empty cache of numba, with
numba (if it is installed) and as if it were not. If the folder of another version is passed, both versions take turns.
The script prints the seconds of the first and of the second call, and the chosen plan with its measured step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import machine

ROOT = Path(__file__).parents[1]
ROWS, BATCH = 4, 32
MODELS = ("demo", "GPT")


def tuned(name: str, ranks: int, layers: int) -> dict[str, Any]:
    """Tune a model, and return the seconds, the schedule and its measured step."""
    import torch

    import pipesched

    sys.path.append(str(ROOT / "examples"))
    from train_gpt import gpt, next_byte_loss

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = gpt() if name == "demo" else gpt(width=256, depth=layers)
    text = torch.randint(256, (ROWS, 65))
    begin_s = time.perf_counter()
    plan = pipesched.tune(
        model,
        text[:, :-1],
        target=text[:, 1:],
        loss_fn=next_byte_loss,
        devices=["cpu"] * ranks,
        batch_size=BATCH,
    )
    return {
        "seconds": time.perf_counter() - begin_s,
        "schedule": plan.schedule,
        "step_s": plan.alternatives[0].measured_s or plan.alternatives[0].step_s,
    }


def apart(package: Path, with_numba: bool, name: str, ranks: int, layers: int) -> list[dict[str, Any]]:
    """Tune twice, in two processes that share a cache that is empty at first."""
    command = [sys.executable, __file__, "--child", name, "--ranks", str(ranks), "--layers", str(layers)]
    paths = [str(package), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
        options = [] if with_numba else ["--without-numba"]
        runs = [
            subprocess.run([*command, *options], env=environment, check=True, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
    return [json.loads(run.stdout.splitlines()[-1]) for run in runs]


def has_numba() -> bool:
    """Return whether numba is installed."""
    return (
        subprocess.run([sys.executable, "-c", "import numba"], check=False, stderr=subprocess.DEVNULL).returncode == 0
    )


def main() -> None:
    """Print a row for each version, model and way to search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--without-numba", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if args.without_numba:
            sys.modules["numba"] = None  # type: ignore[assignment]  # as if it were not installed
        print(json.dumps(tuned(args.child, args.ranks, args.layers)))
        return
    versions = {"this version": ROOT} | ({"the other version": args.other.resolve()} if args.other else {})
    print(f"{machine()}; {args.ranks} ranks\n")
    print(
        "| model | numba | version | first tune, s | second, s | plan | its step, ms |\n|---|---|---|---|---|---|---|"
    )
    for name in MODELS:
        for with_numba in [True] * has_numba() + [False]:
            for version, package in versions.items():
                first, second = apart(package, with_numba, name, args.ranks, args.layers)
                print(
                    f"| {name} | {'yes' if with_numba else 'no'} | {version} | {first['seconds']:.1f} | "
                    f"{second['seconds']:.1f} | {first['schedule']} | {1e3 * first['step_s']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
