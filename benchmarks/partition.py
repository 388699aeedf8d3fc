"""Partition: compares the time and the quality of `pipesched.partition` with the splitters of torchgpipe and DeepSpeed.

    python benchmarks/partition.py [--profiles FOLDER]

FOLDER contains further profiles to split, as JSON: nodes with forward_ms, backward_ms and is_input, and edges.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import networkx as nx
import numpy as np
from measure import machine

from pipesched import partition
from pipesched.partitioning.partition import balance

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.layer_graphs import branches, chain, residual

LINK = {"bandwidth_bytes_per_s": 1e11}


# ---- other splitters, by their published rules ----------------------------------------------------------------------


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


def bottleneck(times: list[float], starts: list[int]) -> float:
    """Return the time of the slowest stage."""
    return max(sum(times[first:last]) for first, last in pairwise([*starts, len(times)]))


# ---- rows -----------------------------------------------------------------------------------------------------------


def median_ms(run: Callable[[], Any], repeats: int = 5) -> tuple[float, float, float]:
    """Return the median, minimum and maximum milliseconds of several runs, after one warm-up run."""
    run()
    times = []
    for _ in range(repeats):
        began = perf_counter()
        run()
        times.append((perf_counter() - began) * 1e3)
    return statistics.median(times), min(times), max(times)


def show(label: str, times: tuple[float, float, float], note: str = "") -> None:
    """Print a line of the first table."""
    print(f"{label:<58}{times[0]:>10.1f} ms  ({times[1]:.1f} to {times[2]:.1f})  {note}".rstrip(), flush=True)


def chains() -> None:
    """Time the partition of chains, from arrays and from graphs, and print a line for each chain."""
    for length, num_stages in ((1_000, 64), (10_000, 256), (100_000, 1_024)):
        generator = random.Random(0)
        times = np.array([generator.uniform(1e-4, 1e-2) for _ in range(length)])
        show(f"chain n={length:,} p={num_stages:,}, an array", median_ms(lambda t=times, p=num_stages: balance(t, p)))
        graph = chain(length)
        label = f"chain n={length:,} p={num_stages:,}, a networkx graph"
        show(label, median_ms(lambda g=graph, p=num_stages: partition(g, p), 3))
    for communication in ("overlap", "serial"):
        graph = chain(1_000)
        asked = {"communication": communication, **LINK}
        show(f"chain n=1,000 p=64, {communication}", median_ms(lambda a=asked, g=graph: partition(g, 64, **a), 3))


def choices() -> None:
    """Time the partition of equal layers under 1F1B with so little memory that some must be recomputed or offloaded."""
    graph = nx.DiGraph()
    for at in range(96):
        costs = {"forward_s": 1e-3, "backward_s": 2e-3, "parameter_bytes": 10**6, "input_bytes": 10**6}
        graph.add_node(at, **costs, activation_bytes=2 * 10**7)
    nx.add_path(graph, range(96))
    for num_stages, limit in ((8, 10**9), (64, 10**9)):
        asked = {"in_flight": lambda stage, count: count - stage, "memory_limit_bytes": limit, "exactly": True}
        for may in (("recompute",), ("recompute", "offload")):
            asked |= {"checkpoint": may, "offload_bytes_per_s": 20e9}
            found = partition(graph, num_stages, **asked)
            times = median_ms(lambda g=graph, p=num_stages, a=asked: partition(g, p, **a), 25)
            label = f"96 equal layers, p={num_stages}, {' or '.join(may)}"
            show(label, times, f"{len(found.checkpoint)} layers, gap {found.gap:.1%}")


def lattices(named: dict[str, nx.DiGraph]) -> None:
    """Time the exact partition of graphs that are not chains."""
    synthetic = {
        "16 residual blocks": residual(16),
        "11 modules of branches": branches([(2, 6, 6, 3), (3, 6, 12, 3)] * 4 + [(10, 10, 9, 9, 7, 2)]),
    }
    for name, graph in (named | synthetic).items():
        for communication in ("none", "overlap", "serial"):
            for num_stages in (4, 16):
                asked = {"communication": communication, **LINK}
                found = partition(graph, num_stages, **asked)
                times = median_ms(lambda g=graph, p=num_stages, a=asked: partition(g, p, **a), 3)
                note = f"{found.ideals:,} ideals, {found.probes} probes, gap {found.gap:.1%}"
                show(f"{name}, {len(graph)} layers, p={num_stages}, {communication}", times, note)


def splitters(named: dict[str, list[float]]) -> None:
    """For each chain and splitter, print the bottleneck divided by the optimum, and the time of the split."""
    names = f"{'pipesched':>11}{'unit moves':>12}{'max - min':>11}"
    print(f"\n{'':<40}{'bottleneck / optimum':>34}  {'milliseconds':>34}\n{'chain':<36}{'p':>4}{names}  {names}")
    drawn: list[float] = []
    for name, times in named.items():
        for num_stages in (2, 4, 8, 16):
            if num_stages > len(times):
                continue
            found = {}
            for splitter in (balance, unit_moves, max_min):
                began = perf_counter()
                starts = splitter(times, num_stages)
                found[splitter.__name__] = bottleneck(times, starts), (perf_counter() - began) * 1e3
            best = found["balance"][0]
            over = [value / best for value, _ in found.values()]
            spent = [time for _, time in found.values()]
            if " #" not in name:
                print(
                    f"{name:<36}{num_stages:>4}{over[0]:>11.3f}{over[1]:>12.3f}{over[2]:>11.3f}"
                    f"  {spent[0]:>11.2f}{spent[1]:>12.2f}{spent[2]:>11.0f}",
                    flush=True,
                )
            else:
                drawn += over[1:]
    for label, ratios in (("unit moves", drawn[::2]), ("max - min", drawn[1::2])):
        best = sum(ratio < 1 + 1e-9 for ratio in ratios) / len(ratios)
        figures = f"optimal in {best:.0%}, mean {np.mean(ratios):.3f}, worst {max(ratios):.3f}"
        print(f"{len(ratios)} random chains, {label}: {figures}")


def profile(path: Path) -> nx.DiGraph:
    """Return a layer graph from a JSON file of measured layers."""
    content = json.loads(path.read_text())
    graph = nx.DiGraph()
    for node in sorted(content["nodes"], key=lambda node: int(node["id"].removeprefix("node"))):
        if not node["is_input"]:
            costs = {"forward_s": node["forward_ms"] / 1e3, "backward_s": node["backward_ms"] / 1e3}
            graph.add_node(node["id"], **costs, output_bytes=node["activation_bytes"])
    graph.add_edges_from((a, b) for a, b in content["edges"] if a in graph and b in graph)
    return graph


def own_order(graph: nx.DiGraph) -> list[float]:
    """Return the times of the layers in topological order."""
    order = nx.lexicographical_topological_sort(graph, lambda name: int(name.removeprefix("node")))
    return [graph.nodes[name]["forward_s"] + graph.nodes[name]["backward_s"] for name in order]


def random_times(generator: random.Random) -> list[float]:
    """Return random times, some small and some large."""
    return [generator.choice([0.1, 1, 3]) * generator.random() for _ in range(generator.randrange(16, 80))]


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path)
    folder = parser.parse_args().profiles
    names = ("alexnet", "vgg16", "resnet18", "squeezenet1_0", "resnet50", "gnmt") if folder else ()
    graphs = {name: profile(folder / f"{name}.json") for name in names}
    print(machine())
    chains()
    choices()
    lattices({name: graphs[name] for name in ("resnet50", "gnmt") if name in graphs})
    own = {name: own_order(graph) for name, graph in graphs.items()}
    generator = random.Random(0)
    drawn = {f"random #{at}": random_times(generator) for at in range(100)}
    splitters(own | {"60 layers, ends heavy": [9.0] + [1.0 + at % 3 for at in range(58)] + [14.0]} | drawn)


if __name__ == "__main__":
    main()
