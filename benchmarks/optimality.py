"""Optimality: compares the orders of the schedule `searched` with proven optima.

python benchmarks/optimality.py [--generated | --large | --equal] [--effort 1] [--every 1]

`optima.json` has small problems with optima that CP-SAT has proved. A program is exact if each stage runs its
micro-batches in ascending order. For each family of problems, the script prints the makespan of the best fixed schedule
and of the searched order, divided by the optimum of exact programs (median, 90th percentile and maximum), and the share
of problems that are solved to the optimum. If CP-SAT has not proved the optimum of exact programs, the optimum of all
programs is used. The script ends with an error if a makespan is below the optimum, or if a searched order is longer
than the best fixed schedule. ``--generated`` uses the problems of `instances.py` instead.

``--large`` searches for orders of problems with many micro-batches. It prints the CPU seconds of each search, and the
makespan, once divided by the lower bound, and once by the makespan that a search with 20 times the effort finds. The
longer search takes 1 to 5 s for p = 8 if numba is installed. ``--equal`` prints the idle time of schedules for stages
of equal length (F = I = W) with 8 ranks and 20 micro-batches, divided by the time of a forward of a rank's layers.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from instances import OPTIMA, Instance, realistic_costs, stored

from pipesched import Costs, Program, lower_bound, schedules, simulate, validate
from pipesched.program.placement import loop, v
from pipesched.simulation.best_known import best_known

LONG = 9  # a problem whose longest forward exceeds this has times like a real model; the others have random times
LARGER = 20  # times the effort, for the searches to compare with
#: Ranks, micro-batches, stages on a rank, placement, limit, and whether to compare with more effort.
LARGE = (
    (8, 32, 1, loop, None, True),
    (8, 32, 1, loop, 8, True),
    (8, 32, 2, loop, None, True),
    (8, 32, 2, loop, 16, True),
    (8, 32, 2, v, None, True),
    (8, 32, 2, v, 16, True),
    (16, 128, 2, loop, None, False),
    (16, 128, 2, v, 32, False),
    (64, 512, 1, loop, None, False),
    (8, 128, 1, loop, 6, False),
    (8, 128, 2, loop, 10, False),
    (8, 128, 2, v, 12, False),
    (8, 128, 2, v, 8, False),
    (4, 128, 2, v, 6, False),
    (2, 128, 2, v, 3, False),
)


class Case(NamedTuple):
    """A scheduling problem, its proven optima, and the makespan of the best fixed schedule."""

    instance: Instance
    #: The shortest makespan of all programs if it is known, otherwise of exact programs.
    optimum_s: float
    exact_optimum_s: float
    #: The makespan of the best fixed schedule; None if no fixed schedule fits.
    fixed_s: float | None


class Result(NamedTuple):
    """The makespans that were found for a problem, in seconds, and the CPU seconds of the search."""

    optimum_s: float
    fixed_s: float | None
    searched_s: float
    bound_s: float
    seconds: float


def main() -> None:
    """Solve the problems and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--effort", type=Fraction, default=Fraction(1), help="search effort relative to the default, such as 1/40"
    )
    parser.add_argument("--every", type=int, default=1, help="solve every n-th problem")
    parser.add_argument("--generated", action="store_true", help="solve the problems of instances.py")
    parser.add_argument("--equal", action="store_true", help="print idle times for stages that all take equal times")
    parser.add_argument("--large", action="store_true", help="solve problems with many micro-batches")
    arguments = parser.parse_args()
    if arguments.equal:
        print_equal()
        return
    solve(next(sample(1)), Fraction(0))  # compiles the search if numba is installed
    if arguments.large:
        print_large(arguments.effort)
        return
    families: dict[str, list[Result]] = {}
    for case in generated(arguments.every) if arguments.generated else sample(arguments.every):
        families.setdefault(case.instance.family, []).append(solve(case, arguments.effort))
    print(f"{'':28}      fixed / optimum            searched / optimum         optimum / bound        seconds")
    print(f"{'family':28} cases  median  p90    max  optimal  median  p90    max  optimal  median  p90    max    max")
    for name, results in sorted(families.items()):
        print(row(name, results))
    print(row("all", [result for results in families.values() for result in results]))


def sample(every: int) -> Iterator[Case]:
    """Yield every ``every``-th problem of the sample in optima.json."""
    for each in json.loads(OPTIMA.read_text())["instances"][::every]:
        num_ranks, limit = each["num_ranks"], each["max_in_flight"]
        times = "real" if max(each["forward_s"]) > LONG else "random"
        chunks = len(each["placement"]) // num_ranks
        room = "no limit" if limit is None else "limit < p" if limit < num_ranks else "limit >= p"
        names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s", "transfer_s")
        instance = Instance(
            family=f"{times}, {chunks} a rank, {room}",
            costs=Costs(**{name: each[name] for name in names}),
            num_microbatches=each["num_microbatches"],
            placement=tuple(each["placement"]),
            max_in_flight=limit,
        )
        optimum = each["optimum_s"]
        yield Case(instance, optimum, each["exact_optimum_s"] or optimum, each["best_of_catalogue_s"])


def generated(every: int) -> Iterator[Case]:
    """Yield every ``every``-th problem of instances.py, with its optimum from optima.json."""
    fixed = [name for name in schedules.names() if name != "searched"]
    for each in stored(every):
        assert each.optimum_s is not None
        program = best_known(each.costs, each.num_microbatches, each.placement, each.max_in_flight, names=fixed)
        fixed_s = None if program is None else simulate(program, each.costs).makespan_s
        yield Case(each, each.optimum_s, each.optimum_s, fixed_s)


def search(each: Instance, effort: Fraction) -> tuple[Program, float]:
    """Return the searched program of a problem, and the CPU seconds of the search."""
    searched = schedules.get("searched").with_options(costs=each.costs, placement=each.placement, effort=effort)
    began = time.process_time()
    program = searched.program(max(each.placement) + 1, each.num_microbatches, max_in_flight=each.max_in_flight)
    return program, time.process_time() - began


def solve(case: Case, effort: Fraction) -> Result:
    """Search for an order, check it, and compare its makespan with the optimum."""
    each = case.instance
    program, seconds = search(each, effort)
    validate(program, max_in_flight=each.max_in_flight, exact=True)
    limits = {"placement": each.placement, "max_in_flight": each.max_in_flight}
    result = Result(
        optimum_s=case.exact_optimum_s,
        fixed_s=case.fixed_s,
        searched_s=simulate(program, each.costs).makespan_s,
        bound_s=lower_bound(each.costs, each.num_microbatches, **limits),
        seconds=seconds,
    )
    if not result.bound_s <= case.optimum_s <= result.searched_s:
        raise SystemExit(f"the optimum must be at least the bound, and at most the searched makespan: {result}, {each}")
    if result.fixed_s is not None and result.searched_s > result.fixed_s:
        raise SystemExit(f"a searched order must not be slower than the best fixed schedule: {result}, {each}")
    return result


def print_large(effort: Fraction) -> None:
    """Search for orders of problems with many micro-batches; print the CPU times and the results."""
    print("  p    m  stages  limit    CPU s  makespan/bound   more effort: CPU s  makespan/makespan with more effort")
    for p, m, chunks, place, limit, compare in LARGE:
        for number in range(2 if compare else 1):
            problem = Instance(
                family="large",
                costs=realistic_costs(p * chunks, random.Random(number)),
                num_microbatches=m,
                placement=place(p, chunks),
                max_in_flight=limit,
            )
            search(problem, Fraction(1, 7))  # compiles or loads all functions
            program, seconds = search(problem, effort)
            makespan = simulate(program, problem.costs).makespan_s
            bound = lower_bound(problem.costs, m, placement=problem.placement, max_in_flight=limit, effort=0)
            more = f"{'':12}"
            if compare:
                other, longer = search(problem, LARGER * effort)
                more = f"{longer:19.2f}  {makespan / simulate(other, problem.costs).makespan_s:34.3f}"
            name = f"{chunks} {place.__name__ if chunks > 1 else ''}"
            print(f"{p:3} {m:4}  {name:6}  {limit or '':5}  {seconds:7.2f}  {float(makespan / bound):14.3f}  {more}")


def print_equal(p: int = 8, m: int = 20) -> None:
    """Print a rank's idle time if all stages take equal times, and the idle time that no schedule can avoid."""
    print("schedule        stages on a rank   idle   least possible idle time (only for chains of stages)")
    of_each = [(name, chunks) for name in ("interleaved-zb", "searched") for chunks in range(1, 7)]
    for name, chunks in (("dualpipe", 2), ("zb-v", 2), *of_each):
        options = {"interleaved-zb": {"chunks_per_rank": chunks}, "searched": {"placement": v(p, chunks)}}
        program = schedules.get(name).program(p, m, **options.get(name, {}))
        costs = Costs.uniform(program.num_stages)
        parts = int(program.visits.sum()) // m // p  # the number of stages of a rank that a micro-batch visits
        idle = simulate(program, costs).makespan_s / parts - 3 * m
        least = ""
        if program.is_chain:
            bound = lower_bound(costs, m, placement=program.placement, effort=0)
            least = f"{float(bound / parts - 3 * m):.2f}"
        print(f"{name:15} {chunks:16}  {float(idle):5.2f}   {least}")


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
