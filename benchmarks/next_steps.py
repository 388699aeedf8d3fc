"""Next steps: whether the step time that a plan expects of each "next" line is reached by following it.

    python benchmarks/next_steps.py [--plans 20] [--first 0] [--effort N]

Each plan is for a random table of 6 to 24 layers with at most 2 slow ones, on 2 to 8 ranks, with a random batch, links,
and, in half of the cases, a memory limit between the least and the most that plans need. Every next step of the plan is
followed: the search is repeated with the changed arguments. The script prints the step time that the next
step expected, the step time of the new plan, and their ratio. The last lines show the largest difference, and how often
the new plan is bound by something else.
"""

import argparse
import random
import time
from typing import Any

from pipesched import Link, Links, Plan, Profile
from pipesched.planning.advice import cause_of
from pipesched.planning.adviser import advised
from pipesched.planning.profile_search import ProfileSearch

MIB = 1 << 20


def main() -> None:
    """Print a line for each next step of each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first plan")
    parser.add_argument("--effort", type=int, help="actions that each search may simulate")
    options = parser.parse_args()
    worst = 0.0
    steps = 0
    print(f"{'plan':>4}  {'bound by':<14} {'next step':<48} {'expected':>9} {'reached':>9}  ratio  then bound by")
    for seed in range(options.first, options.first + options.plans):
        profile, request = case(random.Random(seed), options.effort)
        begin = time.perf_counter()
        search = ProfileSearch(profile=profile, **request)
        plan = advised(search, search.find())
        seconds = time.perf_counter() - begin
        for step in plan.advice.next_steps:
            followed = search.but(**step.arguments).find()
            reached_s = followed.alternatives[0].step_s
            worst = max(worst, abs(reached_s / step.step_s - 1))
            steps += 1
            print(
                f"{seed:>4}  {bound_by(plan):<14} {step.change[:48]:<48} {step.step_s * 1e3:>9.1f} "
                f"{reached_s * 1e3:>9.1f}  {reached_s / step.step_s:.3f}  {bound_by(followed)}",
                flush=True,
            )
        if not plan.advice.next_steps:
            print(f"{seed:>4}  {bound_by(plan):<14} nothing", flush=True)
        print(f"{seed:>4}  planned in {seconds:.1f} s", flush=True)
    print(f"{options.plans} plans, {steps} next steps: largest difference {worst:.1%}")


def bound_by(plan: Plan) -> str:
    """Return what binds a plan."""
    return "" if plan.shares is None else cause_of(plan.shares, plan.advice)


def case(draw: random.Random, effort: int | None) -> tuple[Profile, dict[str, Any]]:
    """Return a random profile and the other fields of a `ProfileSearch`."""
    count = draw.randint(6, 24)
    slow = draw.sample(range(count), draw.choice((0, 0, 1, 2)))
    table = []
    for number in range(count):
        forward_ms = draw.uniform(5, 10) * (draw.uniform(1, 6) if number in slow else 1)
        table.append(
            {
                "name": f"layer{number}",
                "forward_ms": forward_ms,
                "backward_ms": 2 * forward_ms,
                "parameter_bytes": draw.randint(4, 32) * MIB,
                "output_bytes": draw.choice((1, 4, 16)) * MIB,
                "activation_bytes": draw.randint(16, 64) * MIB,
            }
        )
    ranks = draw.randint(2, min(8, count))
    microbatches = ranks * draw.choice((1, 2, 4))
    links = Links(inside=Link(1e-5, draw.choice((0.1e9, 1e9, 10e9, 100e9))))
    request: dict[str, Any] = {"num_ranks": ranks, "batch_size": 4 * microbatches, "links": links, "effort": effort}
    profile = Profile.from_table(table, rows=4)
    if draw.random() < 0.5:
        most = ProfileSearch(profile=profile, **request).find().alternatives[0].peak_bytes or 0
        least = 16 * sum(row["parameter_bytes"] for row in table) // 4 // ranks + 128 * MIB
        request["memory_limit_bytes"] = least + (most - least) // 2 if most > least else most
    request["all_ranks"] = draw.random() < 0.5
    return profile, request


if __name__ == "__main__":
    main()
