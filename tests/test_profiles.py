"""Real profiles with exact answers, where they lie beside the project: the chain's bottleneck is the optimum."""

import heapq
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from pipesched.partitioner import balance

FOLDER = os.environ.get("PIPESCHED_PROFILES", "")
REFERENCE = Path(FOLDER, "reference.json") if FOLDER else None
GRAPHS = json.loads(REFERENCE.read_text())["graphs"] if REFERENCE and REFERENCE.exists() else {}


def layer_times(name: str) -> list[int]:
    """Forward + backward of each layer in units of 0.1 ns, in the linear order that the answers are for."""
    profile = json.loads(Path(FOLDER, f"{name}.json").read_text())
    nodes = {node["id"]: node for node in profile["nodes"] if not node["is_input"]}
    edges = {(a, b) for a, b in profile["edges"] if a in nodes and b in nodes}
    while True:  # sinks that only take an element out of a tuple are no layers
        sinks = [n for n in nodes if nodes[n]["desc"].startswith("__getitem__") and all(a != n for a, _ in edges)]
        if not sinks:
            break
        for sink in sinks:
            del nodes[sink]
        edges = {(a, b) for a, b in edges if b in nodes}
    waiting = {node: sum(b == node for _, b in edges) for node in nodes}
    ready = [(int(node.removeprefix("node")), node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    times = []
    while ready:
        _, node = heapq.heappop(ready)
        times.append(round((nodes[node]["forward_ms"] + nodes[node]["backward_ms"]) * 1e7))
        for a, b in edges:
            if a == node:
                waiting[b] -= 1
                if not waiting[b]:
                    heapq.heappush(ready, (int(b.removeprefix("node")), b))
    return times


@pytest.mark.skipif(not GRAPHS, reason="PIPESCHED_PROFILES names no folder of profiles")
@pytest.mark.parametrize("name", GRAPHS or ["none"])
def test_the_bottleneck_of_a_real_chain_is_the_optimum(name: str) -> None:
    times = layer_times(name)
    assert len(times) == GRAPHS[name]["n"]
    for stages, answer in GRAPHS[name]["p"].items():
        starts = balance(times, min(int(stages), len(times)))
        bottleneck = max(sum(times[a:b]) for a, b in pairwise([*starts, len(times)]))
        assert bottleneck == round(answer["compute_chain_ms"] * 1e7)
