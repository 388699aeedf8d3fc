"""A fleet on a measured profile, where it lies beside the project: BERT with 32 layers on A100s, from Piper."""

import json
import os
from pathlib import Path

import networkx as nx
import pytest

from pipesched import Profile
from pipesched.fleet import POLICIES, Capacity, FleetCosts, generate, replay

FILE = Path(os.environ.get("PIPESCHED_PROFILES", "."), "extra_piper_bert32_a100.json")

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="PIPESCHED_PROFILES names no folder of profiles")


def bert():
    """The layers as a chain. Piper measured a forward and a backward together; a backward is taken as two thirds."""
    values = json.loads(FILE.read_text())
    nodes = {node["id"]: node for node in values["nodes"]}
    layers = [nodes[name] for name in nx.topological_sort(nx.DiGraph(map(tuple, values["edges"])))]
    table = [
        {
            "name": own["id"],
            "forward_ms": own["forward_ms"] / 3,
            "backward_ms": own["forward_ms"] * 2 / 3,
            "parameter_bytes": own["parameter_bytes"],
            "output_bytes": own["activation_bytes"],
            "activation_bytes": own["mem_per_inflight_bytes"],
        }
        for own in layers
        if own["desc"] != "tensor"
    ]
    return Profile.from_table(table, rows=1, optimizer="adam")


def test_ours_stays_above_nine_tenths_where_half_of_the_ranks_are_lost():
    capacity = Capacity(
        bert(), batch_size=32, num_ranks=8, memory_limit_bytes="12GB", link=FleetCosts().link, effort=1_000
    )
    report = replay(generate("decline", num_ranks=8, duration_s=8 * 3600), capacity)
    assert [result.policy for result in report.results] == list(POLICIES)
    assert report["elastic"].share > 0.9
    assert report["elastic"].rows > report["checkpoint-restart"].rows
    assert report["elastic"].num_restarts == 0
