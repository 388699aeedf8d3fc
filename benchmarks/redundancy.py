"""Redundancy: the simulated cost of a copy of each stage on another rank, for every schedule.

    python benchmarks/redundancy.py --simulated [--ranks 4] [--microbatches 8] [--share 0.5] [--picture redundancy.png]

A rank has the work of a forward of 1 s, input gradients of 1 s and weight gradients of 1 s for each micro-batch, and an
update of 0.5 s. Its AdamW holds two values for each weight, and an output has a hundredth of the size of its weights.
A rank's gradients take a share (default: half) of the bubble of 1F1B to reach the next rank, and KEEP and REPLAY of its
stages take as long as their updates. The table compares the steps of a schedule without and with redundancy:

- ratio: the step with redundancy, as a multiple of the step without
- lane: the part of the step until the last copy is updated
- host copies: the largest memory of copies on a rank's host, as a multiple of the rank's weights

The step gets longer if the lane is busy for longer than the step without, or if a KEEP ends after the backwards of its
stage: --share 4 shows this. It is not counted that MIRRORs share links with the messages between stages, nor that an
update of a copy takes time from a host whose processors also compute.
"""

import argparse
from dataclasses import replace
from typing import NamedTuple

from pipesched import Costs, Link, Links, Program, Trace, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.completion import Completion
from pipesched.simulation.memory import rank_memory
from pipesched.viz import plot_compare

WORK_S = 1.0  # of a rank, for a forward, the input gradients and the weight gradients of a micro-batch
UPDATE_S = 0.5  # of a rank
WEIGHT_BYTES = 2**30  # of a rank
OUTPUT_BYTES = WEIGHT_BYTES // 100  # of a micro-batch
MOST = 1.02  # the largest step with redundancy, as a multiple of the step without

PLAIN = Completion(updates=True)
REDUNDANT = replace(PLAIN, redundancy=True)


class Steps(NamedTuple):
    """The steps of a schedule, without and with redundancy."""

    without: Trace
    kept: Trace
    #: The largest memory of copies on a rank's host, in bytes.
    host_bytes: int

    @property
    def ratio(self) -> float:
        """The step with redundancy as a multiple of the step without."""
        return float(self.kept.makespan_s / self.without.makespan_s)

    @property
    def lane(self) -> float:
        """The end of the last REPLAY, as a share of the step with redundancy."""
        end_s = max(span.end_s for row in self.kept.redundancy_by_rank for span in row)
        return float(end_s / self.kept.makespan_s)


def costs(program: Program, links: Links | None = None) -> Costs:
    """Return the costs of the stages of a program, whose ranks have equal work in total."""
    chunks = [len(program.chunks(rank)) for rank in program.placement]
    work = tuple(WORK_S / share for share in program.shares)
    weights = tuple(WEIGHT_BYTES // count for count in chunks)
    update_s = tuple(UPDATE_S / count for count in chunks)
    return Costs(
        forward_s=work,
        input_grad_s=work,
        weight_grad_s=work,
        update_s=update_s,
        keep_s=update_s,
        weight_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=tuple(2 * size for size in weights),
        output_bytes=(OUTPUT_BYTES // program.slices_per_microbatch,) * program.num_stages,
        links=links,
    )


def link_of(ranks: int, microbatches: int, share: float) -> Links:
    """Return links over which a rank's gradients take a share of the bubble of 1F1B."""
    program = PLAIN.complete(schedules.get("1f1b").program(ranks, microbatches))
    trace = simulate(program, costs(program))
    bubble_s = trace.bubble_ratio * trace.makespan_s
    return Links(Link(0, WEIGHT_BYTES / (share * bubble_s)))


def simulated(name: str, ranks: int, microbatches: int, links: Links) -> Steps:
    """Simulate a step of a schedule without and with redundancy.

    Raises ScheduleError if the schedule does not support the shape, or has no redundancy.
    """
    program = schedules.get(name).program(ranks, microbatches)
    own = costs(program, links)
    redundant = REDUNDANT.complete(program)
    if not redundant.has_redundancy:
        raise ScheduleError("several stages hold the same weights; they are updated after the step")
    host_bytes = max(memory.host_copies for memory in rank_memory(redundant, own))
    return Steps(simulate(PLAIN.complete(program), own), simulate(redundant, own), host_bytes)


def table(ranks: int, microbatches: int, links: Links) -> tuple[list[str], list[str]]:
    """Return the rows of the table of all schedules, and the names of schedules whose steps become too long."""
    heads = ["schedule", "bubble", "step", "with redundancy", "ratio", "lane", "host copies"]
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    slow = []
    for name in schedules.names():
        try:
            steps = simulated(name, ranks, microbatches, links)
        except ScheduleError as error:
            why = str(error).split(";")[0]
            rows.append(f"| {name} | {'| ' * 5}{why} |")
            continue
        cells = [
            name,
            f"{steps.without.bubble_ratio:.1%}",
            f"{steps.without.makespan_s:.2f} s",
            f"{steps.kept.makespan_s:.2f} s",
            f"{steps.ratio:.3f}",
            f"{steps.lane:.1%}",
            f"{steps.host_bytes / WEIGHT_BYTES:.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
        slow += [name] if steps.ratio > MOST else []
    return rows, slow


def print_simulated(ranks: int, microbatches: int, share: float, picture: str | None) -> None:
    """Print the table of simulated steps, and write a picture of 1F1B."""
    links = link_of(ranks, microbatches, share)
    rows, slow = table(ranks, microbatches, links)
    print("\n".join(rows))
    longer = f"longer: {', '.join(slow)}" if slow else "none is longer"
    print(f"steps with redundancy of at most {MOST} times the step without: {longer}")
    if picture is not None:
        steps = simulated("1f1b", ranks, microbatches, links)
        plot_compare([("1f1b", steps.without), ("with redundancy", steps.kept)]).savefig(picture)


def main() -> None:
    """Print the table of simulated steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", required=True, help="print the simulated steps")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5, help="of the bubble of 1F1B, for a rank's gradients")
    parser.add_argument("--picture", help="write the timelines of 1F1B to this file")
    options = parser.parse_args()
    print_simulated(options.ranks, options.microbatches, options.share, options.picture)


if __name__ == "__main__":
    main()
