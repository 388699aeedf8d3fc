"""Optimality: compares orders with proven optima. ``python benchmarks/optimality.py [--effort 1] [--every 1]``.

`optima.json` has small problems that CP-SAT has solved to a proven optimum. For each family of problems, the script
prints the best of the fixed schedules and the searched order, over the optimum of exact programs: median, 90th
percentile and maximum, and the share of problems that are solved to the optimum. If CP-SAT has not proved the optimum
of exact programs, that of all programs is used. A quotient below 1 ends the script with an error.
"""

import argparse
import json
import time
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from pipesched import Costs, lower_bound, schedules, simulate, validate

Problem = dict[str, Any]
LONG = 9  # problems with a longer forward have times as in real models; the others are random


class Result(NamedTuple):
    """The makespans of a problem."""

    optimum_s: int
    fixed_s: int | None
    searched_s: float
    bound_s: float
    seconds: float


def main() -> None:
    """Solve the problems and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", type=Fraction, default=Fraction(1), help="the effort of the search, such as 1/40")
    parser.add_argument("--every", type=int, default=1, help="solve one of this many problems")
    arguments = parser.parse_args()
    instances = json.loads((Path(__file__).parent / "optima.json").read_text())["instances"]
    solve(instances[0], Fraction(0))  # compiles, if numba is installed
    families: dict[str, list[Result]] = {}
    for instance in instances[:: arguments.every]:
        families.setdefault(family(instance), []).append(solve(instance, arguments.effort))
    print(f"{'':28}      fixed / optimum            searched / optimum         optimum / bound        seconds")
    print(f"{'family':28} cases  median  p90    max    exact  median  p90    max    exact  median  p90    max    max")
    for name, results in sorted(families.items()):
        print(row(name, results))
    print(row("all", [result for results in families.values() for result in results]))


def family(instance: Problem) -> str:
    """Name the family of a problem: its times, its stages and its limit."""
    num_ranks, limit = instance["num_ranks"], instance["max_in_flight"]
    times = "real" if max(instance["forward_s"]) > LONG else "random"
    chunks = len(instance["placement"]) // num_ranks
    room = "no limit" if limit is None else "limit < p" if limit < num_ranks else "limit >= p"
    return f"{times}, {chunks} a rank, {room}"


def solve(instance: Problem, effort: Fraction) -> Result:
    """Search an order for a problem, check it, and compare it with the optimum."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s", "transfer_s")
    costs = Costs(**{name: instance[name] for name in names})
    placement, limit = tuple(instance["placement"]), instance["max_in_flight"]
    searched = schedules.get("searched").with_options(costs=costs, placement=placement, max_in_flight=limit)
    began = time.perf_counter()
    program = searched.program(instance["num_ranks"], instance["num_microbatches"], effort=effort)
    seconds = time.perf_counter() - began
    validate(program, max_in_flight=limit, exact=True)
    result = Result(
        optimum_s=instance["exact_optimum_s"] or instance["optimum_s"],
        fixed_s=instance["best_of_catalogue_s"],
        searched_s=simulate(program, costs).makespan_s,
        bound_s=lower_bound(costs, instance["num_microbatches"], placement=placement, max_in_flight=limit),
        seconds=seconds,
    )
    if not result.bound_s <= instance["optimum_s"] <= result.searched_s:
        raise SystemExit(f"a bound above the optimum, or an order below it: {result}, {instance}")
    return result


def row(name: str, results: list[Result]) -> str:
    """Return a row of the table."""
    fixed = [result.fixed_s / result.optimum_s for result in results if result.fixed_s is not None]
    searched = [result.searched_s / result.optimum_s for result in results]
    bound = [result.optimum_s / result.bound_s for result in results]
    shares = [f"{sum(value == 1 for value in values) / len(results):6.1%}" for values in (fixed, searched)]
    parts = [quantiles(fixed), shares[0], quantiles(searched), shares[1], quantiles(bound)]
    return f"{name:28} {len(results):5}  {'  '.join(parts)}  {max(result.seconds for result in results):.2f}"


def quantiles(values: Iterable[float]) -> str:
    """Return the median, the 90th percentile and the maximum."""
    ranked = sorted(map(float, values))
    return "  ".join(f"{ranked[min(len(ranked) - 1, int(len(ranked) * share))]:.3f}" for share in (0.5, 0.9, 1))


if __name__ == "__main__":
    main()
