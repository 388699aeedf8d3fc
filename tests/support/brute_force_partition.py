"""Brute-force partitions: tries every cut of a graph into stages, and every assignment of stages to ranks."""

import random
from itertools import pairwise, permutations

import networkx as nx
import pytest

from pipesched import partition
from pipesched.errors import PartitionError


def random_graph(rng, num_layers, density):
    """Return a DAG with small integer costs, whose layers are added in random order."""
    graph = nx.DiGraph()
    names = [f"layer{i}" for i in range(num_layers)]
    inserted = rng.sample(names, num_layers)
    for name in inserted:
        graph.add_node(
            name,
            forward_s=rng.choice([0, 0, 1, 2, 5]),
            backward_s=rng.choice([0, 0, 1, 3]),
            output_bytes=rng.choice([0, 1, 2, 4]),
            parameter_bytes=rng.choice([0, 1, 3]),
            activation_bytes=rng.choice([0, 1, 2]),
            unknown="ignored",
        )
    graph.add_edges_from((a, b) for j, b in enumerate(names) for a in names[:j] if rng.random() < density)
    return graph


def random_chain(rng, num_layers, skips):
    """Return a chain with some edges that skip layers."""
    graph = random_graph(rng, num_layers, skips)
    graph.add_edges_from(pairwise(f"layer{i}" for i in range(num_layers)))
    return graph


def ideals(graph):
    """Return all order ideals: the sets of layers that contain all predecessors of their layers."""
    found = {frozenset()}
    grown = list(found)
    while grown:
        ideal = grown.pop()
        for layer in graph:
            if layer not in ideal and all(before in ideal for before in graph.predecessors(layer)):
                larger = ideal | {layer}
                if larger not in found:
                    found.add(larger)
                    grown.append(larger)
    return sorted(found, key=len)


def named_tensors(rng, graph):
    """Name the tensors on most edges of a graph. Each layer has three tensors; each edge gets up to three of these."""
    for layer in graph:
        sizes = {f"tensor{i}": rng.choice([0, 1, 2, 4]) for i in range(3)}
        for consumer in graph.successors(layer):
            if rng.random() < 0.8:
                named = rng.sample(sorted(sizes), rng.randrange(4))
                graph.edges[layer, consumer]["tensors"] = {name: sizes[name] for name in named}
    return graph


def sent(graph, ideal):
    crossing = {}
    for u, v, tensors in graph.out_edges(ideal, data="tensors"):
        if v not in ideal:
            given = {"output": graph.nodes[u]["output_bytes"]} if tensors is None else tensors
            crossing.update({(u, name): size for name, size in given.items()})
    return sum(crossing.values())


def best(
    graph, num_stages, *, communication="none", speeds=None, memory_limit_bytes=None, in_flight=None, weight_copies=4,
    any_order=False, starts=None, together=(), exactly=False, latency_s=0,
):  # fmt: skip
    """Return the smallest bottleneck at a bandwidth of one byte per second; None if no partition is valid."""
    speeds = speeds or [1] * num_stages
    limits = memory_limit_bytes if isinstance(memory_limit_bytes, list) else [memory_limit_bytes] * num_stages
    held = [1] * num_stages if in_flight is None else in_flight
    pinned = max((starts or {}).values(), default=-1)
    all_ideals = ideals(graph)
    toll = {ideal: sent(graph, ideal) + (latency_s if sent(graph, ideal) else 0) for ideal in all_ideals}
    work = {layer: graph.nodes[layer]["forward_s"] + graph.nodes[layer]["backward_s"] for layer in graph}

    def cost(stage, rank, begin, end):
        """Return the time of a stage with this kind of ``communication``; None if the stage is not allowed."""
        layers = end - begin
        if any(0 < len(layers & set(group)) < len(group) for group in together):
            return None
        for layer, at in (starts or {}).items():
            if (layer in layers) != (at == stage) or (at == stage and nx.ancestors(graph, layer) & layers):
                return None
        fixed = sum(weight_copies * graph.nodes[layer]["parameter_bytes"] for layer in layers)
        moving = sum(graph.nodes[layer]["activation_bytes"] for layer in layers)
        if limits[rank] is not None and fixed + held[stage] * moving > limits[rank]:
            return None
        time = sum(work[layer] for layer in layers) / speeds[rank]
        if communication == "serial":
            return time + toll[begin] + toll[end]
        return max(time, 2 * toll[end]) if communication == "overlap" else time

    def within(ranks):
        states = {(frozenset(), 0): 0}
        for place, rank in enumerate(ranks):
            following = {}
            for (begin, stage), bottleneck in states.items():
                if not exactly and place > pinned and not any_order:
                    key = (begin, stage)
                    following[key] = min(bottleneck, following.get(key, bottleneck))
                for end in all_ideals:
                    own = cost(place, rank, begin, end) if begin < end else None
                    if own is not None:
                        key = (end, stage + 1)
                        value = max(bottleneck, own)
                        following[key] = min(value, following.get(key, value))
            states = following
        reached = [bottleneck for (ideal, _), bottleneck in states.items() if len(ideal) == len(graph)]
        return min(reached, default=None)

    if not any_order:
        return within(range(num_stages))
    fewest = num_stages if exactly else 1
    lines = {line for count in range(fewest, num_stages + 1) for line in permutations(range(num_stages), count)}
    return min((found for line in sorted(lines) if (found := within(line)) is not None), default=None)


def seeded(seed):
    return random.Random(seed)


def as_good(expected, graph, num_stages, **asked):
    """Check that `partition` proves the expected bottleneck, or finds no partition if ``expected`` is None."""
    try:
        found = partition(graph, num_stages, bandwidth_bytes_per_s=1, **asked)
    except PartitionError:
        assert expected is None
        return None
    assert expected is not None
    assert found.bottleneck_s == pytest.approx(expected, abs=1e-9)
    assert found.proved
    return found
