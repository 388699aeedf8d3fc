"""Planners: compares the simulated steps of pipesched's plans with those of other planners' plans.

    python benchmarks/planners.py [--models N] [--ranks 4 8 16]

The script prints each simulated step divided by a lower bound. All planners use the same cost tables (`cost_tables`),
so no runtime affects the comparison, and none except "ours, lean" has a memory limit. Hosts have eight ranks, with
links of 250 GB/s and 5 us inside a host and 25 GB/s and 10 us between hosts. The other planners cut layers by their
published rules, reimplemented here, and run 1F1B; torchgpipe runs GPipe:

equal layers     the same number of layers in each stage, plus the embedding in the first and the head in the last
                 stage (Megatron-LM)
equal, ends      the same, with the embedding and the head counted as a layer each (torchtitan)
equal, chunks    equal layers with interleaved 1F1B, the faster of two and four stages on each rank (Megatron-LM)
parameters       the same number of parameters in each stage (DeepSpeed's default, partition_method="parameters")
unit moves       torchgpipe's block partition (Barany and Grinberg 2015) of measured times
equal, any       "equal, ends" with the fastest of all schedules of torch.distributed.pipelining
balanced         the cut with the smallest bottleneck (proposed for torch.distributed.pipelining in
                 pytorch/pytorch#179212)
ours             `pipesched.planning.tuner`: searches schedule, chunks and cuts
ours, lean       the same, with the memory of every rank limited to the largest of any rank under "balanced"

The bound is valid for every plan. It is an equal share of the work of all micro-batches, or `pipesched.lower_bound` of
the model with one rank for each layer, whichever is larger.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import networkx as nx
from cost_tables import TABLES, table
from partition import max_min, unit_moves

from pipesched import lower_bound, schedules, simulate
from pipesched.partitioning.partition import balance
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.simulation.links import Link, Links
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.profile import Profile
from pipesched.units import quote_speed

HOST = 8  # ranks
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
        """The sum of some attributes, for each layer."""
        return [sum(self.graph.nodes[layer][name] for name in names) for layer in self.graph]

    def step_s(self, starts: Sequence[int], schedule: str = "1f1b") -> float:
        """The simulated step of a plan whose stages begin at these layers."""
        made = schedules.get(schedule)
        if len(starts) > self.num_ranks:
            made = made.with_options(chunks_per_rank=len(starts) // self.num_ranks)
        return simulate(made.program(self.num_ranks, self.num_microbatches), self.costs(starts)).makespan_s

    def costs(self, starts: Sequence[int]) -> Any:
        stages = [self.layers[begin:end] for begin, end in pairwise([*starts, len(self.layers)])]
        return replace(Profile({1: self.graph}).costs(stages, 1), links=LINKS)

    @property
    def bound_s(self) -> float:
        """The time that no plan can beat."""
        work = self.column("forward_s", "backward_s")
        shares = self.num_microbatches * sum(work) / self.num_ranks
        alone = replace(self.costs(range(len(self.layers))), links=None)
        return max(shares, lower_bound(alone, self.num_microbatches))


# ---- the others -----------------------------------------------------------------------------------------------------


def even(count: int, num_stages: int) -> list[int]:
    """The first layers of stages of equal size; the first stages have one layer more if the number is not divisible."""
    return [stage * (count // num_stages) + min(stage, count % num_stages) for stage in range(num_stages)]


def equal(case: Case, num_stages: int) -> list[int]:
    """The same number of blocks in each stage; other layers join the next block, and at the end the last one."""
    blocks = blocks_of(case)
    return [0, *(_begin(case, blocks[start]) for start in even(len(blocks), num_stages)[1:])]


def blocks_of(case: Case) -> list[int]:
    """The positions of the blocks: the layers with a number."""
    return [at for at, layer in enumerate(case.layers) if layer.rpartition(".")[2].isdigit()]


def _begin(case: Case, at: int) -> int:
    while at and at - 1 not in blocks_of(case):
        at -= 1
    return at


def equal_layers(case: Case) -> float:
    """Megatron-LM."""
    return case.step_s(equal(case, case.num_ranks))


def equal_ends(case: Case) -> float:
    """Torchtitan."""
    return case.step_s(even(len(case.layers), case.num_ranks))


def equal_chunks(case: Case) -> float:
    """Megatron-LM with virtual stages."""
    counts = [chunks * case.num_ranks for chunks in (2, 4) if chunks * case.num_ranks <= len(blocks_of(case))]
    steps = [case.step_s(equal(case, count), "interleaved-1f1b") for count in counts]
    return min(steps, default=math.nan)


def equal_any(case: Case) -> float:
    """torchtitan, with the fastest of all schedules."""
    steps = [case.step_s(even(len(case.layers), case.num_ranks), name) for name in ("gpipe", "1f1b")]
    if 2 * case.num_ranks <= len(case.layers):
        starts = even(len(case.layers), 2 * case.num_ranks)
        steps += [case.step_s(starts, name) for name in OF_TORCH]
    return min(steps)


OF_TORCH = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v")  # with two stages on each rank


def parameters(case: Case) -> float:
    """DeepSpeed."""
    return case.step_s(max_min(case.column("num_parameters"), case.num_ranks))


def torchgpipe(case: Case) -> float:
    """torchgpipe, which runs GPipe."""
    return case.step_s(unit_moves(case.column("forward_s", "backward_s"), case.num_ranks), "gpipe")


def balanced(case: Case) -> float:
    """The proposal for torch.distributed.pipelining."""
    return case.step_s(balance(case.column("forward_s", "backward_s"), case.num_ranks))


# ---- ours -----------------------------------------------------------------------------------------------------------


def ours(case: Case) -> float:
    """The search without a memory limit."""
    return searched(case, None)


def ours_lean(case: Case) -> float:
    """The search with a memory limit: the largest memory of any rank under a balanced cut and 1F1B."""
    program = schedules.get("1f1b").program(case.num_ranks, case.num_microbatches)
    costs = case.costs(balance(case.column("forward_s", "backward_s"), case.num_ranks))
    most = max(memory.total_bytes for memory in rank_memory(program, costs))
    return searched(case, (most,) * case.num_ranks)


def searched(case: Case, limits: tuple[int, ...] | None) -> float:
    """The simulated step of the plan that the search returns."""
    count = case.num_microbatches
    search = SearchRequest(
        Profile({1: case.graph}),
        Pins(case.layers),
        case.num_ranks,
        batch_size=count,
        num_microbatches=(count,),
        links=LINKS,
        memory_limit_bytes=limits,
    )
    chosen = find_plan(search).alternatives[0]
    CHOSEN.append(f"{chosen.schedule} x{chosen.chunks_per_rank} {chosen.checkpoint}")
    return chosen.step_s


CHOSEN: list[str] = []

PLANNERS: dict[str, Callable[[Case], float]] = {
    "equal layers": equal_layers,
    "equal, ends": equal_ends,
    "equal, chunks": equal_chunks,
    "equal, any": equal_any,
    "parameters": parameters,
    "unit moves": torchgpipe,
    "balanced": balanced,
    "ours": ours,
    "ours, lean": ours_lean,
}


# ---- rows -----------------------------------------------------------------------------------------------------------


def cases(models: Sequence[str], ranks: Sequence[int]) -> Iterator[tuple[str, Case]]:
    """Yield the cases of these models and numbers of ranks."""
    for model in models:
        graph = table(TABLES[model]())
        for num_ranks in ranks:
            for num_microbatches in (num_ranks, 4 * num_ranks):
                yield model, Case(graph, num_ranks, num_microbatches)


def main() -> None:
    """Print a row for each case, and a summary for each planner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=len(TABLES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16])
    asked = parser.parse_args()
    print(f"{'step / lower bound':<36}{'p':>4}{'m':>4}" + "".join(f"{name:>14}" for name in PLANNERS))
    over: dict[str, list[float]] = {name: [] for name in PLANNERS}
    for model, case in cases(list(TABLES)[: asked.models], asked.ranks):
        CHOSEN.clear()
        bound_s = case.bound_s
        ratios = {name: planner(case) / bound_s for name, planner in PLANNERS.items()}
        for name, value in ratios.items():
            over[name].append(value)
        figures = "".join(f"{value:>14.3f}" for value in ratios.values())
        print(f"{model:<36}{case.num_ranks:>4}{case.num_microbatches:>4}{figures}   {'; '.join(CHOSEN)}", flush=True)
    summary(over)


def summary(over: dict[str, list[float]]) -> None:
    """Print the geometric mean and the worst case of each planner, and the ratio of its step to ours."""
    print()
    for name, values in over.items():
        pairs = [(value, own) for value, own in zip(values, over["ours"], strict=True) if not math.isnan(value)]
        longer = [value / own for value, own in pairs]
        kept = [value for value, _ in pairs]
        line = f"{name:<16} mean {mean(kept):.3f}, worst {max(kept):.3f}"
        if name != "ours":
            line += f"; ours is {quote_speed(mean(longer))} ({quote_speed(min(longer))} to {quote_speed(max(longer))})"
        print(line)


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main()
