"""Gathers: the simulated cost of gathering weights that replicas divide, and checks of many programs with gathers.

    python benchmarks/gathers.py [--ranks 4] [--microbatches 8] [--replicas 8] [--proofs] [--picture gathers.png]

The model, devices and links are those of benchmarks/reductions.py. Each of the replicas holds a part of every weight
(zero=3): a stage gathers its weights by UNSHARD and reduces its gradients by REDUCE. The table compares three rules:
once (each stage gathers once in a step), often (a stage frees its weights while others run), and often without
prefetch. "held" is the largest size of gathered weights on a rank. With --proofs, every schedule is validated and
simulated for 1 to 6 ranks and 1 to 8 micro-batches under these rules and two more, and the numbers of cases and
failures are printed.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from reductions import BYTES, LINK, NUM_LAYERS, SCHEDULES, WIDTH, costs

from pipesched import Costs, Links, Program, Trace, lower, schedules, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.program.lowering import add_gathers, add_reductions
from pipesched.simulation.memory import rank_memory
from pipesched.units import quote_bytes
from pipesched.viz import plot_timeline

RULES: dict[str, dict[str, Any]] = {
    "once": {"keep": True},
    "often": {"keep": False},
    "often, prefetch=0": {"keep": False, "prefetch": 0},
}
MORE_RULES = (*RULES.values(), {"keep": True, "prefetch": 0}, {"keep": False, "prefetch": 3})


def divided_costs(num_stages: int, replicas: int) -> Costs:
    """Return the costs of equal stages whose weights are divided over replicas."""
    own = costs(num_stages, replicas)
    links = Links(inside=LINK)
    layers = max(1, NUM_LAYERS // num_stages)
    layer_bytes = 12 * WIDTH**2 * BYTES
    return replace(
        own,
        reduce_s=((links.reduce_scatter_s(layer_bytes, range(replicas)),) * layers,) * num_stages,
        unshard_s=(layers * links.all_gather_s(layer_bytes, range(replicas)),) * num_stages,
        weight_bytes=(layers * layer_bytes // replicas,) * num_stages,
        gathered_bytes=(layers * layer_bytes,) * num_stages,
    )


def divided(plain: Program, own: Costs, rule: dict[str, Any]) -> Program:
    """Return the program with a REDUCE for each layer, and with the UNSHARDs and RESHARDs of a rule."""
    return add_gathers(add_reductions(plain, list(map(len, own.reduce_s))), **rule)


def rows(ranks: int, microbatches: int, replicas: int) -> Iterator[str]:
    """Yield the rows of the table of schedules."""
    heads = ["schedule", "REDUCE only", "rule", "gathers a stage", "step", "exposed", "held"]
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for name in SCHEDULES:
        plain = schedules.get(name).program(ranks, microbatches)
        own = divided_costs(plain.num_stages, replicas)
        without = simulate(add_reductions(plain, list(map(len, own.reduce_s))), own).makespan_s
        for rule, options in RULES.items():
            program = divided(plain, own, options)
            trace = simulate(program, own)
            held = max(memory.gathered for memory in rank_memory(program, own))
            cells = [
                name,
                f"{without * 1e3:.0f} ms",
                rule,
                f"{sum(map(len, gathers(trace))) / program.num_stages:.1f}",
                f"{trace.makespan_s * 1e3:.0f} ms",
                f"{1 - (trace.hidden_communication or 0):.1%}",
                quote_bytes(held),
            ]
            yield f"| {' | '.join(cells)} |"


def gathers(trace: Trace) -> list[list[str]]:
    """Return the UNSHARD actions of each rank in a trace."""
    return [[str(span.action) for span in row if "UNSHARD" in str(span.action)] for row in trace.collectives_by_rank]


def proofs() -> tuple[int, int, list[str]]:
    """Validate and simulate many programs; return their number, the number without gathers, and the failed cases."""
    cases = without_gathers = 0
    failed = []
    for name, ranks, microbatches in product(schedules.names(), range(1, 7), (1, 2, 3, 5, 8)):
        try:
            plain = add_reductions(schedules.get(name).program(ranks, microbatches), 2)
        except ScheduleError:  # the schedule does not support this shape, or updates several times
            continue
        own = Costs.uniform(plain.num_stages, unshard_s=2, reduce_s=(1, 1), transfer_s=1)
        least = simulate(plain, own).makespan_s
        for rule in MORE_RULES:
            program = add_gathers(plain, **rule)
            cases += 1
            without_gathers += not program.has_gathers
            validate(program)
            trace = simulate(program, own)
            lowered = simulate(lower(program), own).makespan_s
            bound_s = trace.bound_s or 0
            if not (bound_s <= trace.makespan_s == lowered and trace.makespan_s >= least):
                failed.append(f"{name}, {ranks} ranks, {microbatches} micro-batches, {rule}")
    return cases, without_gathers, failed


def main() -> None:
    """Print the table of schedules or, with --proofs, the numbers of checked and of failed programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--proofs", action="store_true")
    parser.add_argument("--picture", help="write the timeline of interleaved 1F1B with gather_once=False to this file")
    options = parser.parse_args()
    if options.proofs:
        cases, without, failed = proofs()
        print(
            f"{cases} cases; {without} of them share weights, so they have no gathers; {len(failed)} cases fail",
            *failed,
            sep="\n",
        )
        return
    print(*rows(options.ranks, options.microbatches, options.replicas), sep="\n")
    if options.picture:
        plain = schedules.get("interleaved-1f1b").program(options.ranks, options.microbatches)
        own = divided_costs(plain.num_stages, options.replicas)
        plot_timeline(simulate(divided(plain, own, {"keep": False}), own)).figure.savefig(options.picture)


if __name__ == "__main__":
    main()
