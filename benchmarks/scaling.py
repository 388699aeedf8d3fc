"""Scaling: simulates and measures weak scaling, with identical stages and 2 micro-batches for each rank.

    python benchmarks/scaling.py [--ranks 2 4 8 16 64 256 1024] [--measured 2 4 8 16] [--steps 9] [--picture FILE]

F, I and W take 10 ms each on every stage. For the simulation, the script prints the makespan, the bubble, and the
efficiency (the time of a rank's actions divided by the makespan). For the measurement, with bare sleeping stages and a
process for each rank (see sleeping.py), it prints the median makespan, its efficiency, and measured / simulated.
--picture draws the efficiencies.
"""

import argparse
from statistics import median
from typing import NamedTuple

from measure import in_ranks, machine
from sleeping import SECONDS, all_measured, lengths

from pipesched import Costs, schedules, simulate

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


class Row(NamedTuple):
    """The results of one schedule on one number of ranks."""

    schedule: str
    num_ranks: int
    makespan_s: float
    bubble: float
    work_s: float  # the time of a rank's actions
    measured_s: float | None

    def __str__(self) -> str:
        figures = f"{self.makespan_s:12.3f}{self.bubble:9.3f}{self.work_s / self.makespan_s:12.3f}"
        seen = (
            (self.measured_s, self.work_s / self.measured_s, self.measured_s / self.makespan_s)
            if self.measured_s
            else ()
        )
        return f"{self.schedule:18}{self.num_ranks:6}{figures}" + "".join(f"{each:12.3f}" for each in seen)


def simulated(name: str, num_ranks: int, measured_s: float | None) -> Row:
    """Simulate a schedule on ``num_ranks`` ranks, and return the row of the table."""
    program = schedules.get(name).program(num_ranks, 2 * num_ranks)
    trace = simulate(program, Costs.uniform(program.num_stages, **lengths()))
    work_s = 3 * SECONDS * program.num_microbatches * program.num_stages / num_ranks
    return Row(name, num_ranks, float(trace.makespan_s), float(trace.bubble_ratio), work_s, measured_s)


def draw(rows: list[Row], path: str) -> None:
    """Draw the efficiency over the number of ranks, simulated as lines and measured as points; save the picture."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).add_subplot()
    for name in SCHEDULES:
        own = [row for row in rows if row.schedule == name]
        (line,) = axes.plot([row.num_ranks for row in own], [row.work_s / row.makespan_s for row in own], label=name)
        seen = [(row.num_ranks, row.work_s / row.measured_s) for row in own if row.measured_s]
        axes.plot([x for x, _ in seen], [y for _, y in seen], "o", color=line.get_color())
    axes.set(xlabel="ranks", ylabel="work / makespan", title="lines: simulated, points: measured")
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Print one line for each schedule and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 64, 256, 1024])
    parser.add_argument("--measured", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--picture")
    args = parser.parse_args()
    print(machine())
    print(
        f"{'':24}{'simulated s':>12}{'bubble':>9}{'efficiency':>12}{'measured s':>12}{'efficiency':>12}{'/ sim.':>12}"
    )
    rows = []
    for num_ranks in sorted({*args.ranks, *args.measured}):
        seen: dict[str, float] = {}
        if num_ranks in args.measured:
            cases = [("bare", name) for name in SCHEDULES]
            figures = in_ranks(num_ranks, all_measured, cases, num_ranks, args.steps)[0]
            seen = {name: median(each.makespans_s) for name, each in zip(SCHEDULES, figures, strict=True)}
        for name in SCHEDULES:
            rows.append(simulated(name, num_ranks, seen.get(name)))
            print(rows[-1], flush=True)
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
