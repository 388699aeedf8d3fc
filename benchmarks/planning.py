"""Planning: measures how long the search for a plan takes, given a profile.

The model is a GPT of 96 blocks with a large vocabulary on 64 ranks, with synthetic times similar to those of A100s and
profiles of micro-batches with one, two and four rows. First, the script prints the processor time to cut the layers
once into 64 stages, for several schedules. Then it prints the processor time of the whole search, and compares the plan
with an equal split. It repeats the search for smaller shapes, and for memory limits that make the search choose layers
to recompute or offload. Nothing imports torch.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import networkx as nx
from measure import machine

from pipesched import schedules
from pipesched.planning.candidates import microbatch_counts
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.stage_partitioner import StagePartitioner
from pipesched.planning.tuner import find_plan
from pipesched.simulation.overheads import Machine
from pipesched.simulation.profile import Profile
from pipesched.units import quote_bytes, quote_time

WIDTH, TOKENS, VOCABULARY = 4096, 2048, 128_000
FLOPS = 150e12  # of a device
FIXED_S = 50e-6  # of every layer, for any number of rows
SHAPES = [(24, 4, 64), (48, 16, 128), (96, 64, 256)]  # blocks, ranks, rows of a batch
LIMITS = [20 * 10**9, 12 * 10**9]  # bytes of a rank, for the largest shape
HOST_BYTES_PER_S = 20e9
CUTS = [("1f1b", 64, 1), ("interleaved-1f1b", 32, 2), ("zb-v", 32, 2)]


def gpt(blocks: int, rows: int) -> "nx.DiGraph[str]":
    """Return a graph with costs: an embedding, ``blocks`` blocks, a norm and the head."""
    graph: nx.DiGraph[str] = nx.DiGraph(parameters={})
    names = ["embed", *(f"blocks.{at}" for at in range(blocks)), "norm", "head"]
    for before, name in zip([None, *names], names, strict=False):
        numbers = {"embed": VOCABULARY * WIDTH, "norm": WIDTH, "head": VOCABULARY * WIDTH}.get(name, 12 * WIDTH**2)
        products = 0 if name in ("embed", "norm") else numbers
        forward_s = FIXED_S + 2 * products * TOKENS * rows / FLOPS
        output = 2 * rows * TOKENS * (VOCABULARY if name == "head" else WIDTH)
        graph.graph["parameters"][f"{name}.weight"] = (numbers, 2 * numbers)
        graph.add_node(
            name,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            input_grad_s=1.02 * forward_s,
            weight_grad_s=1.02 * forward_s,
            input_bytes=2 * rows * TOKENS * WIDTH,
            output_bytes=output,
            activation_bytes=17 * 2 * rows * TOKENS * WIDTH,
            weight_grad_bytes=8 * rows * TOKENS * WIDTH,
            parameter_bytes=2 * numbers,
            num_parameters=numbers,
            parameters=(f"{name}.weight",),
            buffers=(),
        )
        if before is not None:
            graph.add_edge(before, name, bytes=2 * rows * TOKENS * WIDTH, tensors={before: 2 * rows * TOKENS * WIDTH})
    return graph


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Call ``work``; return the processor seconds that it takes and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(machine())
    print(f"\n{'one cut of 96 blocks':<52}{'ms':>8}")
    graph = gpt(96, 1)
    for name, ranks, chunks in CUTS:
        schedule = schedules.get(name)
        if chunks > 1:
            schedule = schedule.with_options(chunks_per_rank=chunks)
        program = schedule.program(ranks, 128)
        partitioner = StagePartitioner(pins=Pins(list(graph)), program=program, graph=lambda: graph)
        seconds = min(timed(partitioner.partition)[0] for _ in range(args.repeats))
        print(f"{f'{name}, {ranks} ranks, {program.num_stages} stages':<52}{seconds * 1e3:>8.1f}", flush=True)
    print(f"\n{'whole search':<52}{'s':>8}  plan")
    host = Machine(host_bytes_per_s=HOST_BYTES_PER_S)
    limited = [(SHAPES[-1], limit, offload) for limit in LIMITS for offload in (False, True)]
    for (blocks, ranks, batch), limit, offload in [*((shape, None, False) for shape in SHAPES), *limited]:
        profile = Profile({rows: gpt(blocks, rows) for rows in (1, 2, 4)}, machine=host)
        counts = microbatch_counts(batch, ranks, profile.graphs)
        limits = None if limit is None else (limit,) * ranks
        search = SearchRequest(
            profile, Pins(profile.layers), ranks, batch, counts, memory_limit_bytes=limits, offload=offload
        )
        runs = [timed(lambda search=search: find_plan(search)) for _ in range(args.repeats)]
        plan = runs[0][1]
        own, *others = plan.alternatives
        against = min(each.step_s for each in others if each.label == "equal split") / own.step_s
        label = f"{blocks} blocks, {ranks} ranks, {batch} rows"
        if limit is not None:
            label += f", {quote_bytes(limit)}{' or host' if offload else ''}"
        print(
            f"{label:<52}{min(run[0] for run in runs):>8.2f}  {own.label}, {own.num_ranks} ranks, "
            f"{own.num_microbatches} micro-batches, {own.checkpoint}, {quote_time(own.step_s)}, "
            f"bubble {own.bubble_ratio:.1%}; equal split / this plan: {against:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
