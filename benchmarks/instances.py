"""Instances: compares `pipesched.lower_bound` with proved optima of random small scheduling problems. Needs ortools.

python benchmarks/instances.py --count 40 [--seed 0] [--effort 60] [--independent | --stored | --file optima.json]

With ``--independent`` the solver does not use the bound, so the script can find bounds that are above the optimum.
`optima.json` has the optima of 2,002 instances that were proved in this way; ``--stored`` reads them.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from time import process_time

from pipesched import Costs, lower_bound
from pipesched.program.placement import Placement, loop, v
from pipesched.simulation.exact_solver import solve

__all__ = ["FAMILIES", "OPTIMA", "Instance", "instances", "realistic_costs", "stored"]

OPTIMA = Path(__file__).parent / "optima.json"

FAMILIES = (
    "small",
    "small, capped",
    "realistic",
    "realistic, cap p",
    "realistic, cap p-1",
    "4 stages on 2 ranks",
    "4 stages on 2 ranks, capped",
)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A scheduling problem: costs, placement, micro-batches, and how many (stage, micro-batch) pairs fit on a rank."""

    family: str
    costs: Costs
    num_microbatches: int
    placement: Placement
    max_in_flight: int | None = None
    #: The shortest makespan of exact programs; None if it is not known.
    optimum_s: float | None = None


def instances(family: str, count: int, seed: int = 0) -> Iterator[Instance]:
    """Yield random instances of a family; equal seeds give equal instances."""
    rng = random.Random(f"{family} {seed}")
    for _ in range(count):
        yield _one(family, rng)


def _one(family: str, rng: random.Random) -> Instance:
    if family.startswith("small"):
        ranks = rng.randint(2, 3)
        limit = rng.randint(max(1, ranks - 1), ranks) if "capped" in family else None
        return Instance(
            family=family,
            costs=_random_costs(ranks, rng),
            num_microbatches=rng.randint(2, 3),
            placement=tuple(range(ranks)),
            max_in_flight=limit,
        )
    if family.startswith("realistic"):
        ranks = rng.randint(2, 4)
        limit = None if "cap" not in family else max(1, ranks - 1) if family.endswith("p-1") else ranks
        return Instance(
            family=family,
            costs=realistic_costs(ranks, rng),
            num_microbatches=rng.randint(4, 8),
            placement=tuple(range(ranks)),
            max_in_flight=limit,
        )
    return Instance(
        family=family,
        costs=_random_costs(4, rng),
        num_microbatches=rng.randint(2, 5),
        placement=rng.choice((loop, v))(2, 2),
        max_in_flight=rng.randint(2, 4) if "capped" in family else None,
    )


def _random_costs(stages: int, rng: random.Random) -> Costs:
    """Return random times from 1 to 9. W may take no time. B takes as long as I + W, or a little less."""
    forward = [rng.randint(1, 9) for _ in range(stages)]
    inputs = [rng.randint(1, 9) for _ in range(stages)]
    weights = [rng.randint(0, 9) for _ in range(stages)]
    return Costs(forward, inputs, weights, _whole(inputs, weights, rng), transfer_s=rng.choice((0, 0, 1, 3)))


def realistic_costs(stages: int, rng: random.Random) -> Costs:
    """Return random costs of similar stages. One stage takes up to 1.6 times as long, as if it had a large head."""
    forward = [rng.randint(14, 20) for _ in range(stages)]
    heavy = rng.randrange(stages)
    forward[heavy] = round(forward[heavy] * rng.uniform(1, 1.6))
    inputs = [round(time * rng.uniform(0.9, 1.3)) for time in forward]
    weights = [round(time * rng.uniform(0.6, 1)) for time in forward]
    return Costs(forward, inputs, weights, _whole(inputs, weights, rng), transfer_s=rng.randint(0, 2))


def _whole(inputs: Sequence[int], weights: Sequence[int], rng: random.Random) -> list[int]:
    return [i + w - rng.randint(0, max(0, min(i, w) // 4)) for i, w in zip(inputs, weights, strict=True)]


def read(path: Path) -> Iterator[Instance]:
    """Yield the instances of a JSON file, with their optima."""
    for each in json.loads(path.read_text())["instances"]:
        placement = tuple(each["placement"])
        limit = each["max_in_flight"]
        names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s", "transfer_s")
        chunks = len(placement) // each["num_ranks"]
        capped = "no cap" if limit is None else "cap below p" if limit < len(placement) else "cap p"
        yield Instance(
            family=f"{counted_chunks(chunks)}, {capped}",
            costs=Costs(**{name: each[name] for name in names}),
            num_microbatches=each["num_microbatches"],
            placement=placement,
            max_in_flight=limit,
            optimum_s=each["optimum_s"],
        )


def counted_chunks(chunks: int) -> str:
    return "1 stage per rank" if chunks == 1 else f"{chunks} stages per rank"


def stored(every: int = 1) -> Iterator[Instance]:
    """Yield every ``every``-th of the generated instances in optima.json, with its proved optimum."""
    found = json.loads(OPTIMA.read_text())["generated"]
    for family, optima in found["optima"].items():
        for number, instance in enumerate(instances(family, len(optima), found["seed"])):
            if number % every == 0:
                yield replace(instance, optimum_s=optima[number])


def bounds_of(instance: Instance) -> tuple[float, float, float]:
    """Return the bound from formulas alone, the bound from formulas and search, and the CPU seconds of the search."""
    limits = {"placement": instance.placement, "max_in_flight": instance.max_in_flight}
    formulas = lower_bound(instance.costs, instance.num_microbatches, effort=0, **limits)
    start = process_time()
    whole = lower_bound(instance.costs, instance.num_microbatches, **limits)
    return formulas, whole, process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, default=20, help="number of instances of each family (286 gives 2,002 in all)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--effort", type=float, default=60.0, help="limit on the solver's deterministic time, in seconds"
    )
    parser.add_argument("--independent", action="store_true", help="do not give the lower bound to the solver")
    parser.add_argument("--stored", action="store_true", help="take the instances and optima of optima.json")
    parser.add_argument("--file", type=Path, help="read the instances and their optima from this file")
    args = parser.parse_args()
    generated = (each for family in FAMILIES for each in instances(family, args.count, args.seed))
    every = read(args.file) if args.file else stored() if args.stored else generated
    rows = defaultdict(list)
    above = unproved = 0
    for each in every:
        optimum = each.optimum_s
        if optimum is None:
            found = solve(
                each.costs,
                each.num_microbatches,
                placement=each.placement,
                max_in_flight=each.max_in_flight,
                low=0 if args.independent else None,
                effort=args.effort,
            )
            if not found.proved or found.makespan_s is None:
                unproved += 1
                continue
            optimum = found.makespan_s
        formulas, whole, seconds = bounds_of(each)
        above += whole > optimum
        rows[each.family].append((float(optimum / formulas), float(optimum / whole), seconds))
        if each.max_in_flight is not None:
            rows["all capped"].append(rows[each.family][-1])
    print(f"{'family':28} {'n':>4}  optimum / formulas: median, p90, max   optimum / bound: median, p90, max   CPU s")
    for family, found in rows.items():
        columns = [_spread([row[column] for row in found]) for column in (0, 1)]
        print(f"{family:28} {len(found):4}  {columns[0]:>38}   {columns[1]:>33}   {max(row[2] for row in found):.3f}")
    print(f"bounds above the optimum: {above}; instances left out, because no optimum was proved: {unproved}")


def _spread(ratios: list[float]) -> str:
    tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    return f"{median(ratios):.3f} {tenths[-1]:.3f} {max(ratios):.3f}"


if __name__ == "__main__":
    main()
