"""Simulated prediction: compares predicted with virtual step times on simulated accelerators with regular costs.

    python benchmarks/simulated_prediction.py [--models gpt ...] [--pictures FOLDER]

The cases are those of `prediction.py` in which ranks compute: three models, four schedules, 4 and 8 micro-batches, two
ranks, each on a simulated device of its own. Layers are measured on a simulated device (`pipesched.profile`), and the
prediction adds the link of the simulation. A launch costs the host nothing, so there are no overheads. All times are
virtual and the same in each run, so each case runs two steps and the second is read. The batch is on the devices.
Nothing is measured on hardware.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from tests.simulated.started import ACCELERATOR

# isort: split

import torch
from prediction import COMPUTING, MODELS, Case
from torch.nn import functional

import pipesched
from pipesched import Pipeline, Trace, simulate
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Machine, Overheads
from pipesched.simulation.profile import Profile
from pipesched.viz import plot_timeline
from tests.simulated.virtual_clock import virtual_clock


def measured(name: str) -> Profile:
    """Measure the layers of a model on a simulated device."""
    cases = [case for case in COMPUTING if case.model == name]
    model, x, y = cases[0].parts
    rows = sorted({case.rows for case in cases})
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "target": y[: rows[-1]], "rows": rows, "device": "sim:0"}
    return pipesched.profile(model, x[: rows[-1]], **given).on(Machine(threads=Overheads()))


def links() -> Links:
    """Return the links between the simulated devices."""
    costs = ACCELERATOR.judge.costs
    return Links(inside=Link(costs.link_s, costs.link_bytes_per_s))


def ran(case: Case, profile: Profile) -> Trace:
    """Return the trace of the second step of a case, in virtual time."""
    model, x, y = case.parts
    options: dict[str, Any] = {
        "schedule": case.schedule,
        "num_microbatches": case.microbatches,
        "boundaries": [names[0] for names in case.stages(profile)][1:],
        "devices": [f"sim:{rank}" for rank in range(case.ranks)],
    }
    with (
        virtual_clock(ACCELERATOR),
        Pipeline(model, x[: case.rows], loss_fn=functional.mse_loss, **options) as pipe,
    ):
        x, y = x.to(options["devices"][0]), y.to(options["devices"][-1])
        for _ in range(2):
            for device in options["devices"]:
                torch.accelerator.synchronize(device)
            pipe.step(x, target=y)
        return pipe.trace


def main() -> None:
    """Print a row for each case, and the median and the largest error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    errors = []
    print(f"{'model':14}{'schedule':18}{'m':>3}{'predicted':>12}{'virtual':>10}{'error':>8}")
    for name in args.models:
        profile = measured(name)
        for case in (case for case in COMPUTING if case.model == name):
            costs = replace(profile.costs(case.stages(profile), case.rows), links=links())
            predicted_s = simulate(case.program, costs).makespan_s
            trace = ran(case, profile)
            errors.append(predicted_s / trace.makespan_s - 1)
            times = f"{predicted_s * 1e3:9.3f} ms{trace.makespan_s * 1e3:7.3f} ms"
            print(f"{name:14}{case.schedule:18}{case.microbatches:3}{times}{errors[-1]:+8.2%}", flush=True)
            if args.pictures:
                args.pictures.mkdir(parents=True, exist_ok=True)
                figure = plot_timeline(trace).figure
                figure.savefig(args.pictures / f"{name}-{case.schedule}-{case.microbatches}.png")
    print(f"median error {median(map(abs, errors)):.2%}, largest {max(map(abs, errors)):.2%}")


if __name__ == "__main__":
    main()
