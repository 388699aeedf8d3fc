"""Tables of published models: `benchmarks/published.py` computes them again, and they have the published sizes."""

import sys
from pathlib import Path

import networkx as nx
import pytest

from pipesched import Profile
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_costs import TensorCosts

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import published
import published_models
from published_models import FOLDER, HOSTS, MODELS

FILES = sorted(FOLDER.glob("*.csv"))


def loaded(path):
    return Profile.from_table(path, bytes_per_parameter=2)


def model_of(path):
    return MODELS[path.stem.rpartition("-")[0]]


def test_each_model_has_a_table_for_each_host():
    assert {path.stem for path in FILES} == {f"{name}-{kind}" for name in MODELS for kind in HOSTS}


def test_the_script_writes_the_same_tables():
    assert {path: path.read_text() for path in FILES} == dict(published_models.tables())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_table_has_the_published_number_of_parameters(path):
    profile = loaded(path)
    counted = {sum(count for count, _ in graph.graph["parameters"].values()) for graph in profile.graphs.values()}

    assert len(counted) == 1
    assert counted.pop() == pytest.approx(model_of(path).num_parameters, rel=0.01)
    assert tuple(profile.graphs) == model_of(path).sizes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_table_names_its_source_and_its_device(path):
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]

    assert any("Source: " in line and "arXiv:" in line for line in comments)
    assert any(HOSTS[path.stem.rpartition("-")[2]].gpu in line for line in comments)
    assert any("computed, not measured" in line for line in comments)


def test_an_update_writes_and_reads_all_states_of_a_parameter():
    """A weight and a gradient of 2 bytes are read, the weight is written; 12 bytes of states are read and written."""
    assert published_models.UPDATE_BYTES == 2 + 2 + 2 + 12 + 12
    node = loaded(FOLDER / "vit-22b-a100.csv").graphs[8].nodes["layers.0"]
    assert node["optimizer_bytes"] == published_models.STATE_BYTES * node["num_parameters"]


def test_tied_layers_share_their_parameters():
    graph = loaded(FOLDER / "t5-11b-a100.csv").graphs[1]
    users = [name for name, own in graph.nodes(data="parameters") if "encoder.embedding (tied)" in own]

    assert users == ["encoder.embedding", "decoder.embedding", "head"]


def test_every_layer_of_the_u_net_on_the_way_down_has_a_skip_connection():
    graph = loaded(FOLDER / "sdxl-unet-a100.csv").graphs[1]
    skips = [edge for edge in graph.edges if edge[1].startswith("up.") and edge[0].startswith(("down.", "conv_in"))]

    assert len(skips) == 9
    assert nx.is_directed_acyclic_graph(graph)
    assert list(nx.ancestors(graph, "conv_out") | {"conv_out"}) != []
    assert len(nx.ancestors(graph, "conv_out")) == len(graph) - 1


def test_a_group_of_gpus_shares_the_work_of_a_layer_and_sums_its_output():
    """Eight GPUs take an eighth of all but the norms and residual sums, and two all-reduces longer."""
    model, host = MODELS["gpt-3-175b"], HOSTS["a100"]
    block = next(layer for layer in model.layers(host.device, 1) if layer.name == "layers.0")
    groups = TensorCosts(TensorAxis(size=8), 8, model.links(host, 8))
    node = groups.divided(loaded(FOLDER / "gpt-3-175b-a100.csv")).graphs[1].nodes["layers.0"]
    whole_s = 2 * host.device.passes(2048 * 12288, 4).forward_s
    all_reduce_s = 8 * host.inside.latency_s + 14 * block.output_bytes / 8 / host.inside.bytes_per_s
    expected_s = (block.work.forward_s - whole_s) / 8 + whole_s + 2 * all_reduce_s

    assert node["forward_s"] == pytest.approx(expected_s, rel=1e-5)
    assert node["parameter_bytes"] == block.work.parameters * 2 // 8


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_model_says_what_a_tensor_group_divides(path):
    """A rank of 2 has about half of the parameters, unless most of the work is in convolutions."""
    profile = loaded(path)
    rows = min(profile.graphs)
    divided = TensorCosts(TensorAxis(size=2), 2).divided(profile).graph(rows).graph["parameters"]
    count = sum(count for count, _ in divided.values())

    assert 0.49 < count / model_of(path).num_parameters < (0.7 if path.stem.startswith("sdxl") else 0.52)


def test_blocks_sum_what_narayanan_et_al_state():
    """Two tensors of the size of the output each way; the head sums three numbers of a row forward."""
    nodes = loaded(FOLDER / "gpt-3-175b-a100.csv").graphs[1].nodes
    assert nodes["layers.0"]["all_reduce_forward_bytes"] == 2 * nodes["layers.0"]["output_bytes"]
    assert nodes["layers.0"]["all_reduces_backward"] == 2
    assert (nodes["embedding"]["all_reduces_forward"], nodes["embedding"]["all_reduce_backward_bytes"]) == (1, 0)
    assert nodes["head"]["all_reduce_forward_bytes"] == 3 * 4 * 2048


@pytest.mark.parametrize("name", MODELS)
def test_what_a_paper_reports_is_said_for_every_model(name):
    assert published.REPORTED[name]


def test_the_reported_rate_of_gpt_3_gives_the_reported_days():
    """Table 2 of Narayanan et al. 2021: 300 billion tokens at 153 TFLOP/s on 384 GPUs take 84 days."""
    layout = published.LAYOUTS["gpt-3-175b"][0]
    model = MODELS["gpt-3-175b"]
    step_s = layout.counted * model.flops(HOSTS["a100"]) / (layout.num_gpus * layout.teraflops * 1e12)

    assert step_s * 300e9 / (model.batch * 2048) / 86400 == pytest.approx(84, rel=0.05)


def test_the_layout_of_a_paper_can_be_simulated():
    layout = published.LAYOUTS["gpt-3-175b"][0]
    found = published.Case(name="gpt-3-175b", kind="a100", num_ranks=384).laid_out(layout)

    assert found.candidate.num_ranks == 12
    assert found.replication.num_replicas == 4
    assert found.tensor.size == 8
    assert not any(found.excess_bytes)
