"""Reductions: simulates how much of the time of gradient sums over replicas each schedule hides.

    python benchmarks/reductions.py [--ranks 4] [--microbatches 8] [--replicas 8] [--picture reductions.png]

The model is a GPT of 24 layers of width 2304 (1.7 billion parameters, the first row of Table 1 of Narayanan et al.
2021), in bfloat16, with micro-batches of 4 x 2048 tokens on devices that reach 156 TFLOP/s. The gradients of each layer
are one bucket. The replicas are connected by a ring of 25 GB/s. The table shows the step without reductions, and with
three rules for the start of a stage's reductions: at the end of the stage's last backward, inside the last backward of
every stage, and inside the last backward of the first stage only, which is the rule of pipesched. The last columns
divide the time of the reductions under pipesched's rule into three shares: in bubbles, "under compute" (while the rank
computes), and "exposed" (after the last backward of all ranks).
"""

import argparse
from collections.abc import Callable, Iterator
from unittest.mock import patch

from pipesched import Costs, Link, Links, Program, Trace, schedules, simulate
from pipesched.program.lowering import add_reductions
from pipesched.program.reductions import early_stages
from pipesched.viz import plot_timeline

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
NUM_LAYERS, WIDTH = 24, 2304
TOKENS = 4 * 2048
FLOP_S = 156e12
BYTES = 2
LINK = Link(latency_s=10e-6, bytes_per_s=25e9)

Rule = Callable[[Program], frozenset[int]]
RULES: dict[str, Rule] = {
    "at the end": lambda program: frozenset(),
    "inside, every stage": lambda program: frozenset(range(program.num_stages)),
    "inside, first stage": early_stages,
}


def costs(num_stages: int, replicas: int) -> Costs:
    """Return the costs of equal stages, with one bucket of gradients for each layer."""
    layers = max(1, NUM_LAYERS // num_stages)
    parameters = 12 * WIDTH**2
    forward_s = 2 * parameters * TOKENS / FLOP_S * NUM_LAYERS / num_stages
    bucket_s = Links(inside=LINK).all_reduce_s(parameters * BYTES, range(replicas))
    return Costs.uniform(
        num_stages,
        forward_s=forward_s,
        input_grad_s=forward_s,
        weight_grad_s=forward_s,
        reduce_s=(bucket_s,) * layers,
    )


def simulated(name: str, ranks: int, microbatches: int, replicas: int, rule: Rule) -> Trace:
    """Simulate a step of a schedule. ``rule`` returns the stages whose reductions start inside their last backward."""
    plain = schedules.get(name).program(ranks, microbatches)
    own = costs(plain.num_stages, replicas)
    with patch("pipesched.simulation.simulator.early_stages", rule):
        return simulate(add_reductions(plain, list(map(len, own.reduce_s))), own)


def rows(ranks: int, microbatches: int, replicas: int) -> Iterator[str]:
    """Yield the rows of the table of schedules."""
    heads = ["schedule", "without", *RULES, "in bubbles", "while computing", "exposed"]
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for name in SCHEDULES:
        plain = schedules.get(name).program(ranks, microbatches)
        without = simulate(plain, costs(plain.num_stages, replicas)).makespan_s
        traces = [simulated(name, ranks, microbatches, replicas, rule) for rule in RULES.values()]
        times = [f"{trace.makespan_s * 1e3:.0f} ms" for trace in traces]
        parts = [sum(part) for part in zip(*traces[-1].communication_times, strict=True)]
        shares = [f"{part / sum(parts):.1%}" for part in parts]
        yield f"| {' | '.join([name, f'{without * 1e3:.0f} ms', *times, *shares])} |"


def main() -> None:
    """Print the table of schedules, then the reductions of each rank under 1F1B."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--picture", help="write the timeline of 1F1B to this file")
    options = parser.parse_args()
    shape = options.ranks, options.microbatches, options.replicas
    print(*rows(*shape), sep="\n")
    trace = simulated("1f1b", *shape, early_stages)
    for rank, own in enumerate(trace.communication_times):
        print(
            f"1f1b, rank {rank}: {own.total_s * 1e3:.1f} ms, {own.in_bubbles_s / own.total_s:.1%} in bubbles, "
            f"{own.under_compute_s / own.total_s:.1%} while computing, {own.exposed_s / own.total_s:.1%} exposed"
        )
    if options.picture:
        plot_timeline(trace).figure.savefig(options.picture)


if __name__ == "__main__":
    main()
