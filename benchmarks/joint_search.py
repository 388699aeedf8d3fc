"""Joint search: compares plans with proved optima of small chains, and with a simple planner. Needs ortools.

    python benchmarks/joint_search.py --chains 200 [--solver 20] [--first 0]
    python benchmarks/joint_search.py --models 5 --ranks 4 8 16 --counts 1 2 3 4

The chains have 4 to 7 layers with random times on 2 or 3 ranks, and 2 to 5 micro-batches. The optimum of a chain is its
shortest step over all cuts, three placements (one stage on each rank, or two in a loop or in a V) and all exact orders,
in which each stage runs its micro-batches in ascending order. The cuts with the smallest `pipesched.lower_bound` are
tried first. For each cut whose bound is below the best step so far, CP-SAT searches for the optimal order and proves
that it is optimal. A chain with a cut for which this fails is left out and counted.

The simple planner cuts the layers so that the slowest stage is as fast as possible, and uses the fastest of all exact
schedules and numbers of chunks. There are ``--counts`` micro-batches for each rank. The script prints how often the
step of the plan is at most 1 % and 3 % longer than the optimum, and how often it is longer than the step of the simple
planner.
"""

import argparse
import random
import time
from collections.abc import Iterator
from itertools import combinations

import networkx as nx
from cost_tables import TABLES, table
from planners import ROUNDING, Case, any_plans, ours

from pipesched import Costs, lower_bound
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.program.placement import Placement, linear, loop, v
from pipesched.simulation.exact_solver import solve
from pipesched.simulation.profile import Profile


def main() -> None:
    """Print a line for each chain and each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="seed of the first chain; later chains have the next seeds"
    )
    parser.add_argument(
        "--solver", type=float, default=20, help="limit on CP-SAT's deterministic time for each cut, in s"
    )
    parser.add_argument("--models", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 2, 3, 4])
    asked = parser.parse_args()
    if asked.chains:
        against_optima(range(asked.first, asked.first + asked.chains), asked.solver)
    if asked.models:
        against_rival(list(TABLES)[: asked.models], asked.ranks, asked.counts)


# ---- chains ---------------------------------------------------------------------------------------------------------


def chain(seed: int) -> SearchRequest:
    """Return the request for a random chain."""
    rng = random.Random(seed)
    graph: nx.DiGraph[str] = nx.DiGraph(parameters={})
    for at in range(rng.randint(4, 7)):
        forward, inputs, weights = rng.randint(1, 9), rng.randint(1, 9), rng.randint(0, 9)
        sizes = dict.fromkeys(("output_bytes", "activation_bytes", "parameter_bytes", "input_bytes"), 0)
        graph.add_node(
            f"layer{at}",
            forward_s=forward,
            input_grad_s=inputs,
            weight_grad_s=weights,
            backward_s=inputs + weights - rng.randint(0, min(inputs, weights) // 4),
            weight_grad_bytes=0,
            num_parameters=0,
            parameters=(),
            **sizes,
        )
        if at:
            graph.add_edge(f"layer{at - 1}", f"layer{at}", tensors={})
    count = rng.randint(2, 5)
    return SearchRequest(Profile({1: graph}), Pins(list(graph)), rng.randint(2, 3), count, (count,), all_ranks=True)


def cuts(request: SearchRequest) -> Iterator[tuple[Placement, Costs]]:
    """Yield each placement with the costs of each cut."""
    layers, num_ranks = request.pins.layers, request.num_ranks
    for placement in (linear(num_ranks, 1), loop(num_ranks, 2), v(num_ranks, 2)):
        for starts in combinations(range(1, len(layers)), len(placement) - 1):
            yield tuple(placement), request.profile.costs(request.pins.stages((0, *starts)), 1)


def optimum_s(request: SearchRequest, best_s: float, effort: float) -> float | None:
    """Return the seconds of the shortest step of all plans, or ``best_s`` if no step is shorter.

    Returns None if CP-SAT cannot prove the optimum of a cut.
    """
    count = request.num_microbatches[0]
    each = [
        (lower_bound(costs, count, placement=placement), number, placement, costs)
        for number, (placement, costs) in enumerate(cuts(request))
    ]
    for bound_s, _, placement, costs in sorted(each, key=lambda cut: cut[:2]):
        if bound_s >= best_s - ROUNDING:
            return best_s
        found = solve(costs, count, placement=placement, effort=effort)
        if found.makespan_s is not None:
            best_s = min(best_s, float(found.makespan_s))
        if found.bound_s < best_s - ROUNDING:
            return None
    return best_s


def against_optima(seeds: range, effort: float) -> None:
    """Compare the plans for random chains with the proved optima, and print a summary."""
    ratios = []
    seconds = []
    for seed in seeds:
        request = chain(seed)
        begin = time.process_time()
        step_s = float(find_plan(request).alternatives[0].step_s)
        seconds.append(time.process_time() - begin)
        best_s = optimum_s(request, step_s, effort)
        if best_s is not None:
            ratios.append(step_s / best_s)
        shown = "not proved" if best_s is None else f"{step_s:g} / {best_s:g} = {step_s / best_s:.4f}"
        print(f"chain {seed}: {shown}, {seconds[-1]:.2f} s", flush=True)
    if ratios:
        shares = [sum(ratio <= 1 + most + ROUNDING for ratio in ratios) / len(ratios) for most in (0, 0.01, 0.03)]
        print(
            f"{len(ratios)} chains with a proved optimum: {shares[0]:.1%} of the plans are optimal, {shares[1]:.1%} "
            f"are within 1 % of the optimum, {shares[2]:.1%} within 3 %; largest step / optimum: {max(ratios):.3f}; "
            f"median time of a search: {sorted(seconds)[len(seconds) // 2]:.2f} s; chains without a proof: "
            f"{len(seconds) - len(ratios)}"
        )


# ---- models ---------------------------------------------------------------------------------------------------------


def against_rival(models: list[str], ranks: list[int], counts: list[int]) -> None:
    """Compare the plans for published models with those of the simple planner, and print a summary."""
    ratios = []
    for model in models:
        graph = table(TABLES[model]())
        for num_ranks in ranks:
            for rounds in counts:
                case = Case(graph, num_ranks, num_ranks * rounds)
                begin = time.process_time()
                step_s = ours(case)
                seconds = time.process_time() - begin
                ratios.append(step_s / min(plan.step_s for plan in any_plans(case)))
                print(
                    f"{model:<36}{num_ranks:>4}{case.num_microbatches:>4}  ours / bound {step_s / case.bound_s:.4f}, "
                    f"ours / simple planner {ratios[-1]:.4f}, {seconds:.2f} s",
                    flush=True,
                )
    behind = sum(ratio > 1 + ROUNDING for ratio in ratios)
    print(
        f"{len(ratios)} cases: ours is slower than the simple planner in {behind}; ours / simple planner "
        f"{min(ratios):.3f} to {max(ratios):.3f}, mean {sum(ratios) / len(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
