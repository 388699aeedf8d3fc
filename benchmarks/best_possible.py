"""Best possible: simulates how far any plan for two ranks can be ahead of the best of torch's five schedules.

    python benchmarks/best_possible.py [--only gpt vgg residual]

Measures a profile of each model of best_of_torch.py. All steps are then simulated with this profile, with the same
overheads: torch's schedules with the same number of layers in each stage, and the plan that `tune` finds. The script
also computes a lower bound on the step of every plan with at most three stages on each rank: the smallest bound of all
cuts and of five placements. Bounds and steps are printed relative to the best of torch's schedules. A better cut and
order cannot lower the ratio below the bound; measured ratios also depend on how fast the two libraries run a schedule.
"""

import argparse
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch
from best_of_torch import COMPUTING_MICROBATCHES, COMPUTING_RANKS, MODELS
from measure import keep_freed_memory, machine
from torch.nn import functional
from versus_torch import NAMES

import pipesched
from pipesched import Costs, schedules, simulate
from pipesched.partitioning.result import StageLayers
from pipesched.program.placement import Placement, linear, loop, v
from pipesched.simulation.bounds import lower_bound
from pipesched.simulation.profile import Profile
from pipesched.simulation.relaxation.chain_costs import chain_costs


def main() -> None:
    """Print the simulated steps and the bound for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    for name in arguments.only:
        torch.manual_seed(0)
        model, x, y = MODELS[name]()
        rows = len(x) // COMPUTING_MICROBATCHES
        profile = pipesched.profile(
            model, x[:rows], loss_fn=functional.cross_entropy, target=y[:rows], rows=[rows], ranks_are="processes"
        )
        report(name, profile, rows)


def report(name: str, profile: Profile, rows: int) -> None:
    """Print the simulated steps and the bound for one model."""
    plan = pipesched.tune(
        profile,
        num_ranks=COMPUTING_RANKS,
        batch_size=rows * COMPUTING_MICROBATCHES,
        num_microbatches=COMPUTING_MICROBATCHES,
        ranks_are="processes",
        all_ranks=True,
    )
    ours_s = simulate(plan.program, costs(profile, plan.stages, rows)).makespan_s
    torch_s = {schedule: of_torch_s(profile, schedule, rows) for schedule in NAMES}
    best_s = min(torch_s.values())
    for schedule, step_s in torch_s.items():
        print(f"  {schedule:<20}{step_s * 1e3:>8.1f} ms")
    bound_s = min(ours_s, *bounds_s(profile, rows, ours_s))
    sizes = [len(names) for names in plan.stages]
    print(f"{name}: ours, {plan.schedule} with {sizes} layers: {ours_s * 1e3:.1f} ms")
    print(f"  ours / best of torch {ours_s / best_s:.3f}, bound / best of torch {bound_s / best_s:.3f}", flush=True)


def costs(profile: Profile, stages: StageLayers, rows: int) -> Costs:
    """Return the costs of stages for ranks that are processes."""
    return profile.costs(stages, rows, ranks_are="processes")


def of_torch_s(profile: Profile, schedule: str, rows: int) -> float:
    """Return the simulated step of a schedule with the same number of layers in each stage."""
    names = list(profile.layers)
    program = schedules.get(schedule).program(COMPUTING_RANKS, COMPUTING_MICROBATCHES)
    ends = [len(names) * at // program.num_stages for at in range(program.num_stages + 1)]
    stages = tuple(tuple(names[begin:end]) for begin, end in pairwise(ends))
    return float(simulate(program, costs(profile, stages, rows)).makespan_s)


def bounds_s(profile: Profile, rows: int, most_s: float) -> Iterator[float]:
    """Yield a lower bound for each cut and placement whose busiest rank has at most ``most_s`` seconds of work."""
    placements: list[Any] = [linear(COMPUTING_RANKS), *(make(COMPUTING_RANKS, n) for n in (2, 3) for make in (loop, v))]
    for placement in map(tuple, placements):
        for stages in cuts(profile, placement, rows, most_s):
            own = chain_costs(costs(profile, stages, rows), placement)
            yield float(lower_bound(own, COMPUTING_MICROBATCHES, placement=placement, effort=0))


def cuts(profile: Profile, placement: Placement, rows: int, most_s: float) -> Iterator[StageLayers]:
    """Yield the cuts whose busiest rank has at most ``most_s`` seconds of work."""
    names = list(profile.layers)
    every = costs(profile, tuple((name,) for name in names), rows)
    gradients_s = np.minimum(every.backward_s, np.add(every.input_grad_s, every.weight_grad_s))
    before_s = np.cumsum([0.0, *(np.array(every.forward_s) + gradients_s) * COMPUTING_MICROBATCHES])
    ranks = np.array(placement)[:, None] == np.arange(COMPUTING_RANKS)
    for starts in combinations(range(1, len(names)), len(placement) - 1):
        ends = [0, *starts, len(names)]
        if (np.diff(before_s[ends]) @ ranks).max() < most_s:
            yield tuple(tuple(names[begin:end]) for begin, end in pairwise(ends))


if __name__ == "__main__":
    keep_freed_memory()
    main()
