"""Noisy trials: simulates how well `tune` chooses a plan if profiles and trial runs contain noise.

    python benchmarks/noisy_trials.py [--seeds 20] [--layers 24]

Nothing is measured. A synthetic profile contains the true times of layers; two ranks run 8 micro-batches. In each
seed, the search knows a noisy profile, and its trial runs are simulated with the true times and with noise. The script
prints the simulated step of the plan that `tune` chooses, divided by that of the plan that a search with the true times
finds, for several amounts of noise. It also prints this for a search without trial runs.

Profile noise is the standard deviation of the logarithm of a layer's time; the same amount is added as a trend from the
first layer to the last. Trial noise is that of a rank's speed in a step; 2/3 as much is added for all steps of the
trials.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

from pipesched import Plan, simulate
from pipesched.planning.confirmation import Run, confirmed_plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.simulation.layer_costs import TIMES
from pipesched.simulation.profile import Profile
from pipesched.simulation.trace import Trace

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.synthetic_profiles import profile

RANKS, MICROBATCHES, STEPS, PLANS = 2, 8, 4, 2
#: The noise of the profile and of the trials.
NOISE = ((0.05, 0.0), (0.15, 0.0), (0.05, 0.06), (0.15, 0.06), (0.05, 0.12), (0.15, 0.12))


def main() -> None:
    """Print one row for each amount of noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    truth = times_of(arguments.layers)
    best_s = true_step_s(find_plan(request(profile(truth))), truth)
    print("step / best step, mean and maximum over the seeds")
    print("profile noise   trial noise   with trial runs   without trial runs")
    for layers, trials in NOISE:
        with_s, without_s = zip(*chosen(truth, layers, trials, arguments.seeds), strict=True)
        columns = (f"{fmean(each) / best_s:.3f} {max(each) / best_s:.3f}" for each in (with_s, without_s))
        print(f"{layers:13.2f}{trials:14.2f}{''.join(f'{column:>20}' for column in columns)}", flush=True)


def times_of(count: int) -> list[float]:
    """Return the true times of the layers, which differ by up to a factor of 6."""
    draw = random.Random(count)
    return [draw.choice((1, 2, 3)) * draw.uniform(0.01, 0.02) for _ in range(count)]


def request(known: Profile) -> SearchRequest:
    """Return the request that `tune` makes for two processes on two cores."""
    options: dict[str, Any] = {"all_ranks": True, "ranks_are": "processes", "num_cores": RANKS, "effort": 300_000}
    return SearchRequest.of(known, RANKS, MICROBATCHES, PlanRequest(num_microbatches=MICROBATCHES), **options)


def chosen(truth: Sequence[float], layers: float, trials: float, seeds: int) -> Iterator[tuple[float, float]]:
    """Yield, for each seed, the true step of the plan chosen with trial runs, and of the plan chosen without."""
    for seed in range(seeds):
        draw = random.Random(seed)
        trend = draw.gauss(0, layers)
        last = len(truth) - 1
        noisy = [seconds * exp(draw.gauss(0, layers) + trend * (1 - 2 * at / last)) for at, seconds in enumerate(truth)]
        search = request(profile(noisy))
        confirmed = confirmed_plan(search, runs(truth, trials, draw), PLANS)
        yield true_step_s(confirmed, truth), true_step_s(find_plan(search), truth)


def runs(truth: Sequence[float], noise: float, draw: random.Random) -> Run:
    """Return a function that simulates trial runs."""

    def run(plans: Sequence[Plan], progress: Callable[[float], None]) -> list[list[Trace]]:
        usual = [exp(draw.gauss(0, noise * 2 / 3)) for _ in range(RANKS)]
        progress(1)
        return [
            [step(plan, truth, [slow * exp(draw.gauss(0, noise)) for slow in usual]) for _ in range(STEPS)]
            for plan in plans
        ]

    return run


def true_step_s(plan: Plan, truth: Sequence[float]) -> float:
    """Return the step time of a plan with the true times."""
    return step(plan, truth, [1.0] * RANKS).makespan_s


def step(plan: Plan, truth: Sequence[float], slowness: Sequence[float]) -> Trace:
    """Simulate a step in which each rank is slower by a factor."""
    assert plan.costs is not None
    costs = profile(truth).costs(plan.stages, 1, ranks_are="processes")
    slow = [slowness[rank] for rank in plan.program.placement]
    times: dict[str, Any] = {
        time: tuple(seconds * own for seconds, own in zip(getattr(costs, time), slow, strict=True)) for time in TIMES
    }
    return simulate(plan.program, replace(costs, **times, overheads=plan.costs.overheads))


if __name__ == "__main__":
    main()
