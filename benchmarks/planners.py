"""Planners: compares the simulated steps of pipesched's plans with those of other planners' plans.

    python benchmarks/planners.py [--models NAME ...] [--ranks 4 8 16] [--counts 1 4]

The script prints each simulated step divided by a lower bound. All planners use the same cost tables (`cost_tables`),
so no runtime affects the comparison. Hosts have eight ranks, with links of 250 GB/s and 5 us inside a host and 25 GB/s
and 10 us between hosts. The number of micro-batches of a case is the number of ranks times one of ``--counts``. The
other planners cut layers by their published rules, reimplemented here, and run 1F1B unless stated otherwise:

equal layers     the same number of layers in each stage, plus the embedding in the first and the head in the last
                 stage (Megatron-LM)
equal, chunks    equal layers with interleaved 1F1B, the faster of two and four stages on each rank (Megatron-LM)
uneven ends      the first and the last rank have fewer layers, the others the same number, with one, two and four
                 stages on each rank; the fastest of all such cuts. Users of Megatron-LM choose such a cut by hand, with
                 its options for the embedding, the loss, and the layers of the first and the last rank.
equal, ends      equal layers, where the embedding and the head each count as a layer (torchtitan)
equal, any       "equal, ends" with the fastest of all schedules of torch.distributed.pipelining
parameters       the same number of parameters in each stage (DeepSpeed's default, partition_method="parameters")
unit moves       torchgpipe's block partition of measured times, GPipe
balanced         the cut with the smallest bottleneck (proposed for torch.distributed.pipelining in
                 pytorch/pytorch#179212)
any              "balanced" with the fastest of all schedules and numbers of stages on each rank that pipesched knows
ours             `pipesched.planning.tuner`: searches schedule, chunks, cuts and orders

Plans use different amounts of memory. In three more columns, the memory of each rank is limited. The limit is the
largest memory of any rank under another plan:

any, lean        "any" with the limit of "balanced"
ours, lean       ours with the limit of "balanced"
ours = chunks    ours with the limit of "equal, chunks"

The bound is valid for every plan. It is an equal share of the work of all micro-batches, or `pipesched.lower_bound` of
the model with one rank for each layer, whichever is larger.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import networkx as nx
import numpy as np
from cost_tables import TABLES, table

from pipesched import Costs, Program, lower_bound, schedules, simulate
from pipesched.partitioning.partition import balance
from pipesched.planning.candidates import candidates
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.simulation.links import Link, Links
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.profile import Profile
from pipesched.units import quote_speed

HOST = 8  # ranks
ROUNDING = 1e-9
LINKS = Links(inside=Link(5e-6, 250e9), between=Link(10e-6, 25e9), hosts=tuple(rank // HOST for rank in range(64)))


@dataclass(frozen=True)
class Case:
    """A model's layers, with the numbers of ranks and micro-batches."""

    graph: "nx.DiGraph[str]"
    num_ranks: int
    num_microbatches: int

    @property
    def layers(self) -> list[str]:
        return list(self.graph)

    def column(self, *names: str) -> list[float]:
        """Return the sum of these attributes for each layer."""
        return [sum(self.graph.nodes[layer][name] for name in names) for layer in self.graph]

    def plan(self, starts: Sequence[int], schedule: str = "1f1b") -> "Planned":
        """Return the plan whose stages begin at these layers."""
        made = schedules.get(schedule)
        if len(starts) > self.num_ranks:
            made = made.with_options(chunks_per_rank=len(starts) // self.num_ranks)
        return Planned(made.program(self.num_ranks, self.num_microbatches), self.costs(starts))

    def costs(self, starts: Sequence[int]) -> Costs:
        """Return the costs of the stages that begin at these layers."""
        stages = [self.layers[begin:end] for begin, end in pairwise([*starts, len(self.layers)])]
        return replace(Profile({1: self.graph}).costs(stages, 1), links=LINKS)

    @cached_property
    def work(self) -> list[float]:
        """The time of the forward and backward of each layer."""
        return self.column("forward_s", "backward_s")

    @property
    def bound_s(self) -> float:
        """A lower bound on the step time of every plan of this case."""
        work = self.work
        shares = self.num_microbatches * sum(work) / self.num_ranks
        alone = replace(self.costs(range(len(self.layers))), links=None)
        return max(shares, lower_bound(alone, self.num_microbatches))


@dataclass(frozen=True)
class Planned:
    """A program with the costs of its stages."""

    program: Program
    costs: Costs

    @cached_property
    def step_s(self) -> float:
        """The simulated step time."""
        return simulate(self.program, self.costs).makespan_s

    @cached_property
    def most_bytes(self) -> int:
        """The predicted peak memory of the rank that needs the most."""
        return max(memory.total_bytes for memory in rank_memory(self.program, self.costs))


# ---- the others -----------------------------------------------------------------------------------------------------


def even(count: int, num_stages: int) -> list[int]:
    """Return the first layer of each stage if all stages have the same number of layers.

    If ``count`` layers cannot be divided evenly, the first stages have one layer more than the last.
    """
    return [stage * (count // num_stages) + min(stage, count % num_stages) for stage in range(num_stages)]


def equal(case: Case, num_stages: int) -> list[int]:
    """Return the first layer of each stage if all stages have the same number of blocks.

    A layer between blocks is in the stage of the block that follows it.
    """
    blocks = blocks_of(case)
    return [0, *(_begin(case, blocks[start]) for start in even(len(blocks), num_stages)[1:])]


def blocks_of(case: Case) -> list[int]:
    """Return the indices of the blocks, which are the layers with a number in their name."""
    return [at for at, layer in enumerate(case.layers) if layer.rpartition(".")[2].isdigit()]


def _begin(case: Case, at: int) -> int:
    while at and at - 1 not in blocks_of(case):
        at -= 1
    return at


def chunk_counts(case: Case) -> list[int]:
    """Return the numbers of stages on a rank (1, 2 or 4) for which the model has enough blocks."""
    return [chunks for chunks in (1, 2, 4) if chunks * case.num_ranks <= len(blocks_of(case))]


def fastest(plans: Iterable[Planned]) -> Planned | None:
    """Return the plan with the shortest step, or None if there are no plans."""
    return min(plans, key=lambda plan: plan.step_s, default=None)


def unit_moves(times: list[float], num_stages: int) -> list[int]:
    """Return the indices of the layers at which stages begin, by torchgpipe's rule (Barany and Grinberg 2015).

    This is the block partition of torchgpipe 0.0.7. Times are scaled to lie between 0 (the smallest) and 1 (the
    largest). At first every stage but the last has the same number of layers. While the largest and the smallest stage
    differ by more than 1, a layer moves to the smallest stage from its neighbour on the side of the largest stage. The
    largest stage is chosen again only after it has lost a layer.
    """
    least, spread = min(times), max(times) - min(times)
    scaled = [(time - least) / spread if spread else 0.0 for time in times]
    cuts = [len(times) // num_stages * stage for stage in range(num_stages)] + [len(times)]

    def sizes() -> list[tuple[float, int]]:
        return [(sum(scaled[cuts[stage] : cuts[stage + 1]]), stage) for stage in range(num_stages)]

    most, largest = max(sizes())
    while most > min(sizes())[0] + 1:
        smallest = min(sizes())[1]
        towards = 1 if largest > smallest else -1
        cuts[smallest + (towards > 0)] += towards
        if smallest + towards == largest:
            most, largest = max(sizes())
    return cuts[:-1]


def max_min(times: list[float], num_stages: int) -> list[int]:
    """Return the first layers of stages with the smallest difference between the largest and the smallest stage.

    This is DeepSpeed's balanced split. For each number of layers and stages, a dynamic program stores the best split.
    """
    prefix = np.concatenate([[0], np.cumsum(times)])
    count = len(times)
    high, low = prefix.copy(), prefix.copy()
    back = np.zeros((num_stages + 1, count + 1), int)
    for stage in range(2, num_stages + 1):
        next_high, next_low = np.full(count + 1, np.inf), np.full(count + 1, -np.inf)
        for end in range(stage, count + 1):
            begins = np.arange(stage - 1, end)
            own = prefix[end] - prefix[begins]
            most, least = np.maximum(high[begins], own), np.minimum(low[begins], own)
            best = int((most - least).argmin())
            back[stage, end] = begins[best]
            next_high[end], next_low[end] = most[best], least[best]
        high, low = next_high, next_low
    starts, end = [], count
    for stage in range(num_stages, 0, -1):
        end = int(back[stage, end]) if stage > 1 else 0
        starts.append(end)
    return starts[::-1]


def equal_layers(case: Case) -> Planned:
    """Return the plan "equal layers": Megatron-LM's rule."""
    return case.plan(equal(case, case.num_ranks))


def equal_chunks(case: Case) -> Planned | None:
    """Return the plan "equal, chunks": Megatron-LM's rule with several stages on each rank; None if impossible."""
    return fastest(
        case.plan(equal(case, chunks * case.num_ranks), "interleaved-1f1b") for chunks in chunk_counts(case)[1:]
    )


def uneven_ends(case: Case) -> Planned | None:
    """Return the plan "uneven ends": Megatron-LM with the best numbers of layers on the first and the last rank."""
    return fastest(
        case.plan(starts, "1f1b" if chunks == 1 else "interleaved-1f1b")
        for chunks in chunk_counts(case)
        for starts in uneven_cuts(case, chunks)
    )


def uneven_cuts(case: Case, chunks: int) -> Iterator[list[int]]:
    """Yield cuts in which all ranks but the first and the last have equal numbers of layers.

    The first and the last rank have at most as many layers as in an equal cut. The layers of each rank are divided
    evenly among its stages.
    """
    blocks = blocks_of(case)
    most = -(-len(blocks) // case.num_ranks)
    for first in range(chunks, most + 1):
        for last in range(chunks, most + 1):
            between = even_sizes(len(blocks) - first - last, case.num_ranks - 2)
            ranks = [even_sizes(size, chunks) for size in (first, *between, last)]
            sizes = [rank[chunk] for chunk in range(chunks) for rank in ranks]
            yield [0, *(_begin(case, blocks[start]) for start in accumulate(sizes[:-1]))]


def even_sizes(count: int, parts: int) -> list[int]:
    """Return the sizes of equal parts. If ``count`` does not divide evenly, the first parts have one more."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def equal_ends(case: Case) -> Planned:
    """Return the plan "equal, ends": torchtitan's rule."""
    return case.plan(even(len(case.layers), case.num_ranks))


def equal_any(case: Case) -> Planned | None:
    """Return the plan "equal, any": torchtitan's cut with the fastest of torch's schedules; None if impossible."""
    plans = [case.plan(even(len(case.layers), case.num_ranks), name) for name in ("gpipe", "1f1b")]
    if 2 * case.num_ranks <= len(case.layers):
        starts = even(len(case.layers), 2 * case.num_ranks)
        plans += [case.plan(starts, name) for name in OF_TORCH]
    return fastest(plans)


OF_TORCH = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v")  # with two stages on each rank


def parameters(case: Case) -> Planned:
    """Return the plan "parameters": DeepSpeed's default."""
    return case.plan(max_min(case.column("num_parameters"), case.num_ranks))


def torchgpipe(case: Case) -> Planned:
    """Return the plan "unit moves": torchgpipe's cut and GPipe."""
    return case.plan(unit_moves(case.work, case.num_ranks), "gpipe")


def balanced(case: Case) -> Planned:
    """Return the plan "balanced": the cut with the smallest bottleneck under 1F1B."""
    return case.plan(balance(case.work, case.num_ranks))


def any_plans(case: Case) -> Iterator[Planned]:
    """Yield a plan for each exact schedule and number of chunks, with the cut that has the smallest bottleneck."""
    for each in candidates(None, None, [case.num_ranks], [case.num_microbatches], most_stages=len(case.layers)):
        yield Planned(each.program, case.costs(balance(case.work, each.num_stages)))


def any_schedule(case: Case, limit_bytes: float = math.inf) -> Planned | None:
    """Return the plan "any": the fastest of `any_plans` within a memory limit; None if no plan fits."""
    return fastest(plan for plan in any_plans(case) if plan.most_bytes <= limit_bytes)


# ---- ours -----------------------------------------------------------------------------------------------------------


def ours(case: Case, limit_bytes: int | None = None) -> float:
    """Return the simulated step of the plan that pipesched's search finds."""
    count = case.num_microbatches
    search = SearchRequest(
        Profile({1: case.graph}),
        Pins(case.layers),
        case.num_ranks,
        batch_size=count,
        num_microbatches=(count,),
        links=LINKS,
        memory_limit_bytes=None if limit_bytes is None else (limit_bytes,) * case.num_ranks,
    )
    return float(find_plan(search).alternatives[0].step_s)


def steps_s(case: Case) -> dict[str, float]:
    """Return the seconds of a step under every planner's plan, keyed by planner; NaN if the planner has no plan."""
    plans = {name: planner(case) for name, planner in OTHERS.items()}
    chunks, limit_bytes = plans["equal, chunks"], balanced(case).most_bytes
    plans["any, lean"] = any_schedule(case, limit_bytes)
    return {name: math.nan if plan is None else plan.step_s for name, plan in plans.items()} | {
        "ours": ours(case),
        "ours, lean": ours(case, limit_bytes),
        "ours = chunks": math.nan if chunks is None else ours(case, chunks.most_bytes),
    }


OTHERS: dict[str, Callable[[Case], Planned | None]] = {
    "equal layers": equal_layers,
    "equal, chunks": equal_chunks,
    "uneven ends": uneven_ends,
    "equal, ends": equal_ends,
    "equal, any": equal_any,
    "parameters": parameters,
    "unit moves": torchgpipe,
    "balanced": balanced,
    "any": any_schedule,
}
COLUMNS = (*OTHERS, "any, lean", "ours", "ours, lean", "ours = chunks")


# ---- rows -----------------------------------------------------------------------------------------------------------


def cases(models: Sequence[str], ranks: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[str, Case]]:
    """Yield (model, case) for all combinations of models, numbers of ranks, and micro-batches per rank."""
    for model in models:
        graph = table(TABLES[model]())
        for num_ranks in ranks:
            for count in counts:
                yield model, Case(graph, num_ranks, count * num_ranks)


def main() -> None:
    """Print a row for each case, and a summary for each planner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4])
    asked = parser.parse_args()
    print(f"{'step / lower bound':<36}{'p':>4}{'m':>4}" + "".join(f"{name:>14}" for name in COLUMNS))
    over: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for model, case in cases(asked.models, asked.ranks, asked.counts):
        bound_s = case.bound_s
        ratios = {name: step_s / bound_s for name, step_s in steps_s(case).items()}
        for name in COLUMNS:
            over[name].append(ratios[name])
        figures = "".join(f"{ratios[name]:>14.3f}" for name in COLUMNS)
        print(f"{model:<36}{case.num_ranks:>4}{case.num_microbatches:>4}{figures}", flush=True)
    summary(over)


def summary(over: dict[str, list[float]]) -> None:
    """Print the geometric mean and the worst case of each planner, and compare pipesched with each of them."""
    print()
    for name, values in over.items():
        known = [value for value in values if not math.isnan(value)]
        print(f"{name:<16} mean {mean(known):.3f}, worst {max(known):.3f}" if known else f"{name:<16} no plan")
    print()
    others = [over[name] for name in OTHERS if name != "any"]
    over["fastest but any"] = [
        min(case_s for case_s in row if not math.isnan(case_s)) for row in zip(*others, strict=True)
    ]
    for own, rivals in (
        ("ours", [*OTHERS, "fastest but any"]),
        ("ours, lean", ["balanced", "any, lean"]),
        ("ours = chunks", ["equal, chunks"]),
    ):
        for rival in rivals:
            compare(own, rival, over)


def compare(own: str, rival: str, over: dict[str, list[float]]) -> None:
    """Print how much faster the steps of one planner are than those of its rival."""
    pairs = zip(over[rival], over[own], strict=True)
    longer = [theirs / its for theirs, its in pairs if not math.isnan(theirs / its)]
    if longer:
        behind = sum(ratio < 1 - ROUNDING for ratio in longer)
        figures = f"{quote_speed(mean(longer))} ({quote_speed(min(longer))} to {quote_speed(max(longer))})"
        print(f"{own:<13} against {rival:<20}: {figures}, slower in {behind} of {len(longer)} cases")


def mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main()
