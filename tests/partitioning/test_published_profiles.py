"""Real profiles with exact answers, where they lie beside the project: every bottleneck is the optimum."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from pipesched import partition
from pipesched.errors import PartitionError
from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.bisection import smallest
from pipesched.partitioning.request import Request
from pipesched.partitioning.search import solve

FOLDER = os.environ.get("PIPESCHED_PROFILES", "")
REFERENCE = Path(FOLDER, "reference.json") if FOLDER else None
ANSWERS = json.loads(REFERENCE.read_text()) if REFERENCE and REFERENCE.exists() else {}
GRAPHS = ANSWERS.get("graphs", {})
RECOMPUTE = ANSWERS.get("recompute_bert32_a100", {})
MODELS = {"compute": "none", "overlap": "overlap", "serial": "serial"}

pytestmark = pytest.mark.skipif(not GRAPHS, reason="PIPESCHED_PROFILES names no folder of profiles")


def layers(name: str) -> nx.DiGraph:
    """The profile's layers, in the order of their numbers."""
    profile = json.loads(Path(FOLDER, f"{name}.json").read_text())
    graph = nx.DiGraph()
    for node in sorted(profile["nodes"], key=lambda node: int(node["id"].removeprefix("node"))):
        if not node["is_input"]:
            graph.add_node(
                node["id"],
                forward_s=node["forward_ms"] / 1e3,
                backward_s=node["backward_ms"] / 1e3,
                output_bytes=node["activation_bytes"],
                parameter_bytes=node["parameter_bytes"],
                desc=node["desc"],
            )
    graph.add_edges_from((a, b) for a, b in profile["edges"] if a in graph and b in graph)
    while sinks := [n for n in graph if graph.nodes[n]["desc"].startswith("__getitem__") and not graph.out_degree(n)]:
        graph.remove_nodes_from(sinks)  # sinks that only take an element out of a tuple are no layers
    return graph


def units(time_s: float) -> int:
    """In 0.1 ns, in which the answers are whole numbers."""
    return round(time_s * 1e10)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", GRAPHS or ["none"])
def test_the_bottleneck_of_a_real_graph_is_the_optimum(name: str, model: str) -> None:
    graph = layers(name)
    assert len(graph) == GRAPHS[name]["n"]
    for stages, answer in GRAPHS[name]["p"].items():
        asked = {"communication": MODELS[model], "bandwidth_bytes_per_s": 10e9}
        found = partition(graph, int(stages), **asked)
        assert units(found.bottleneck_s) == units(answer[f"{model}_dag_ms"] / 1e3)
        assert found.proved
        assert found.ideals <= GRAPHS[name]["ideals"]
        exactly = answer.get(f"{model}_exactly_p_dag_ms")
        if exactly and int(stages) <= len(graph):
            found = partition(graph, int(stages), **asked, exactly=True)
            assert units(found.bottleneck_s) == units(exactly / 1e3)
            assert len(found.stages) == int(stages)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", GRAPHS or ["none"])
def test_the_bottleneck_of_a_real_chain_is_the_optimum(name: str, model: str) -> None:
    """The order with the smallest numbers first, cut as a chain."""
    graph = layers(name)
    asked = {"communication": MODELS[model], "bandwidth_bytes_per_s": 10e9}
    for stages, answer in GRAPHS[name]["p"].items():
        assert units(along_own_order(graph, int(stages), **asked)) == units(answer[f"{model}_chain_ms"] / 1e3)


def along_own_order(graph: nx.DiGraph, num_stages: int, communication: str, bandwidth_bytes_per_s: float) -> float:
    """The bottleneck of the best cut of the graph's own order."""
    request = Request(
        graph=graph,
        num_stages=num_stages,
        communication=communication,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        weight_copies=1,
    )
    problem = request.problem()
    found, _ = smallest(problem.lower, problem.lower, problem.chain(range(len(graph))).probe)
    return problem.blocks.layers.seconds(found.bottleneck)


def bert(recompute: str) -> nx.DiGraph:
    """The chain of BERT with 32 layers on an A100, its costs with everything held, or with every layer recomputed."""
    profile = json.loads(Path(FOLDER, "extra_piper_bert32_a100.json").read_text())
    nodes = {node["id"]: node for node in profile["nodes"]}
    graph = nx.DiGraph()
    for name in RECOMPUTE["order"]:
        node = nodes[name]
        costs = {**node, "time_ms": node["forward_ms"]} if recompute == "none" else node["recompute"]
        graph.add_node(
            name,
            forward_s=costs["time_ms"] / 1e3,
            backward_s=0,
            parameter_bytes=costs["mem_fixed_bytes"],
            activation_bytes=costs["mem_per_inflight_bytes"],
        )
    nx.add_path(graph, RECOMPUTE["order"])
    return graph


def shape(case: str) -> dict[str, Any]:
    """1F1B with 16 micro-batches: stage k of p holds min(16, p - k) of them."""
    stages, cap = case.removeprefix("p").removesuffix("GB").split("_cap")
    return {
        "num_stages": int(stages),
        "memory_limit_bytes": int(cap) * 10**9,
        "weight_copies": 1,
        "in_flight": lambda stage, num_stages: min(16, num_stages - stage),
        "exactly": True,
    }


@pytest.mark.parametrize("case", RECOMPUTE.get("results", ["none"]))
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_real_chain_with_limits_of_memory_is_cut_best(case: str, recompute: str) -> None:
    answer = RECOMPUTE["results"][case][recompute]
    if answer is None:
        with pytest.raises(PartitionError, match="within memory_limit_bytes"):
            partition(bert(recompute), **shape(case))
    else:
        assert units(partition(bert(recompute), **shape(case)).bottleneck_s) == units(answer["bottleneck_ms"] / 1e3)


@pytest.mark.parametrize("case", RECOMPUTE.get("results", ["none"]))
def test_what_is_recomputed_of_a_real_chain_is_chosen_best(case: str) -> None:
    """Layer by layer, together with the cuts. A recomputed layer's working set counts as held, as in the answers."""
    held, again = bert("none"), bert("full")
    problem = Request(graph=held, **shape(case), checkpoint=("recompute",)).problem()
    per_s = problem.blocks.layers.ticks_per_s
    options = [
        tuple(
            ActivationOption(
                keep=keep,
                ticks=round(n["forward_s"] * per_s),
                fixed_bytes=int(n["parameter_bytes"]),
                flight_bytes=int(n["activation_bytes"]),
            )
            for keep, n in ((None, held.nodes[name]), ("recompute", again.nodes[name]))
        )
        for name in held
    ]
    solution = solve(replace(problem, options=options), 0)
    answer = RECOMPUTE["results"][case]["layer"]
    if answer is None:
        assert solution.found is None
    else:
        assert solution.exact
        assert solution.found is not None
        bottleneck_s = problem.blocks.layers.seconds(solution.found.bottleneck)
        assert units(bottleneck_s) == units(answer["bottleneck_ms"] / 1e3)
