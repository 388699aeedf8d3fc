"""Fleet: what losses and returns of ranks cost a run on 64 ranks, for four policies on the same plans and costs.

    python benchmarks/fleet.py [--families spot ...] [--seeds 0 1 2] [--hours 1 2 4 8 24] [-o spot.png]
    python benchmarks/fleet.py --profile profile.json --batch 512 --memory-limit 72GB
    python benchmarks/fleet.py --write        # writes benchmarks/fleets/spot.csv again

All figures are simulated. By default, the layers are those of ViT-22B on A100s (`benchmarks/published`), with 4,096
images in a step (64 for each rank) and micro-batches of 8. A rank may use 72 GB. The other
assumptions are in the table of `pipesched.fleet.FleetCosts`, the families in that of `pipesched.fleet.families`.

The first table shows the plan for some numbers of ranks, and what the search for each number took. The second has a row
for each policy and family, with the means over the seeds: the rows per second; the share of what the planner's plans do
with the ranks that are alive, and the share of what any policy could do with them, if changes cost nothing; the work
that was taken back, stalls and restarts; and how much more our policy does. The third shows how the last figure depends
on the time in which half of the ranks are lost, one after another.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from pipesched import Profile
from pipesched.fleet import FAMILIES, POLICIES, Capacity, FleetCosts, FleetReport, generate, replay
from pipesched.units import quote_time

FOLDER = Path(__file__).parent
TABLE = FOLDER / "published" / "vit-22b-a100.csv"
NUM_RANKS = 64
HOURS = (1.0, 1.5, 2.0, 4.0, 8.0, 24.0)
OURS = next(iter(POLICIES))


def plans(profile: Profile, batch: int, limit: str, rows: int | None) -> Capacity:
    """Search the plan for each number of ranks, print some of them, and return them all."""
    capacity = Capacity(
        profile,
        batch_size=batch,
        num_ranks=NUM_RANKS,
        memory_limit_bytes=limit,
        link=FleetCosts().link,
        microbatch_rows=rows,
    )
    taken = []
    print("| ranks | plan | rows/s |\n|---|---|---|")
    for count in range(1, NUM_RANKS + 1):
        begin = time.process_time()
        plan = capacity.best(count)
        taken.append(time.process_time() - begin)
        if count % 8 == 0 or count == NUM_RANKS - 1:
            print(f"| {count} | {plan or 'none fits'} | {capacity.best_rows_per_s(count):.1f} |", flush=True)
    print(
        f"the search for a number of ranks took {quote_time(mean(taken))} of processor time on average, at most "
        f"{quote_time(max(taken))}; state: {capacity.state_bytes / 1e9:.0f} GB\n"
    )
    return capacity


def show(name: str, reports: Sequence[FleetReport]) -> None:
    """Print a row for each policy, with the means over the reports."""
    for policy in POLICIES:
        own = [report[policy] for report in reports]
        rows = mean(result.rows_per_s for result in own)
        ours = mean(report[OURS].rows_per_s for report in reports)
        cells = (
            name,
            policy,
            f"{rows:.1f}",
            f"{mean(result.share for result in own):.1%}",
            f"{mean(result.ideal_share for result in own):.1%}",
            *(f"{mean(result.seconds[what] for result in own):.0f} s" for what in ("lost", "stall")),
            f"{mean(result.num_restarts for result in own):.1f}",
            f"{ours / rows:.2f}x",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def show_hours(hours: float, reports: Sequence[FleetReport]) -> None:
    """Print a row with the throughput and the shares of our policy, and the throughputs of the others."""
    means = {policy: mean(report[policy].rows_per_s for report in reports) for policy in POLICIES}
    own = [report[OURS] for report in reports]
    shares = (mean(result.share for result in own), mean(result.ideal_share for result in own))
    others = (f"{rows:.1f} ({means[OURS] / rows:.2f}x)" for policy, rows in means.items() if policy != OURS)
    cells = (f"{hours:g} h", f"{means[OURS]:.1f}", *(f"{share:.1%}" for share in shares), *others)
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--hours", nargs="*", type=float, default=list(HOURS))
    parser.add_argument("--profile", help="a saved profile, in place of ViT-22B")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--memory-limit", default="72GB")
    parser.add_argument("-o", "--output", help="draw the first family's first seed to this file")
    parser.add_argument("--write", action="store_true", help="only write the example of a trace")
    given = parser.parse_args()
    if given.write:
        comment = "Generated by benchmarks/fleet.py --write (family spot, seed 0); not a recording."
        generate("spot", seed=0, num_ranks=NUM_RANKS, duration_s=4 * 3600).save(FOLDER / "fleets" / "spot.csv", comment)
        return
    own = Profile.load(given.profile) if given.profile else Profile.from_table(TABLE, bytes_per_parameter=2)
    capacity = plans(own, given.batch, given.memory_limit, None if given.profile else 8)
    print("| family | policy | rows/s | of planned | of ideal | lost | stalls | restarts | ours / this |")
    print("|---|---|---|---|---|---|---|---|---|")
    for family in given.families:
        reports = [replay(generate(family, num_ranks=NUM_RANKS, seed=seed), capacity) for seed in given.seeds]
        show(family, reports)
        if given.output and family == given.families[0]:
            reports[0].save(given.output)
    others = [policy for policy in POLICIES if policy != OURS]
    print(f"\n| half lost in | {OURS}, rows/s | of planned | of ideal | {' | '.join(others)} |")
    print(f"|{'---|' * (4 + len(others))}")
    for hours in given.hours:
        seeds = [generate("decline", num_ranks=NUM_RANKS, seed=seed, duration_s=3600 * hours) for seed in given.seeds]
        show_hours(hours, [replay(trace, capacity) for trace in seeds])


if __name__ == "__main__":
    main()
