"""The graph of a model's layers: names, parameters, and the bytes on its edges."""

import copy
from itertools import pairwise

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from pipesched import graph_of, partition
from pipesched.capture.capture import INPUT
from pipesched.capture.captured_model import CapturedModel
from pipesched.capture.layered_model import layered
from tests.support.branching_models import MODELS, Tied, made

FLOAT = 4


class Mixed(nn.Module):
    """A skip over two blocks, a value with two users, a pair, a mask that every stage computes, and a block output that
    is part of the model's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.rnn, self.spare = nn.LSTM(4, 4, batch_first=True), nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(x.shape[1], 1).tril()
        first = self.blocks[0](x) * mask
        y = self.blocks[2](self.blocks[1](first).relu() + self.table) + first
        y, (state, _) = self.rnn(y)
        return self.blocks[3](y * mask) + state[0, 0, 0], first


def mixed() -> "nx.DiGraph[str]":
    return graph_of(Mixed(), torch.ones(2, 3, 4), measured=False)


def test_edges_are_what_later_layers_use_each_tensor_once() -> None:
    graph, whole = mixed(), 2 * 3 * 4 * FLOAT
    assert list(graph) == ["blocks.0", "blocks.1", "blocks.2", "rnn", "blocks.3"]
    assert {(before, after): size for before, after, size in graph.edges(data="bytes")} == {
        ("blocks.0", "blocks.1"): whole,
        ("blocks.0", "blocks.2"): whole,  # the skip
        ("blocks.0", "blocks.3"): whole,  # a part of the output
        ("blocks.1", "blocks.2"): whole,
        ("blocks.2", "rnn"): whole,
        ("rnn", "blocks.3"): whole + 8 * FLOAT,  # of the pair the state, too
    }
    tensors = [graph.edges["blocks.0", other]["tensors"] for other in ("blocks.1", "blocks.2", "blocks.3")]
    assert tensors[0] == tensors[1] == tensors[2]
    assert graph.nodes["blocks.0"]["output_bytes"] == whole
    assert graph.nodes["rnn"]["output_bytes"] == whole + 8 * FLOAT
    assert graph.nodes["blocks.3"]["output_bytes"] == whole


def test_parameters_and_buffers_keep_their_names_and_each_has_a_layer() -> None:
    graph, model = mixed(), Mixed()
    assert graph.nodes["blocks.1"]["parameters"] == ("blocks.1.weight", "blocks.1.bias")
    assert graph.nodes["blocks.1"]["parameter_bytes"] == 20 * FLOAT
    assert graph.nodes["blocks.1"]["num_parameters"] == 20
    for kind, tensors in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        named = sorted(name for _, names in graph.nodes(data=kind) for name in names)
        assert named == sorted(name for name, _ in tensors)  # the spare one too


def test_a_tied_weight_is_named_by_all_that_use_it() -> None:
    text = torch.zeros(2, 5, dtype=torch.long)
    graph = graph_of(Tied(), {"text": text, "labels": text}, measured=False)
    assert [name for name, own in graph.nodes(data="parameters") if "embed.weight" in own] == ["embed", "head"]
    shared = [name for name, own in graph.nodes(data="parameters") if "shared.up.weight" in own]
    assert shared == ["shared", "shared#2", "shared#3", "shared#4"]


@pytest.mark.parametrize("name", MODELS)
def test_what_crosses_a_cut_is_what_its_stages_receive(name: str) -> None:
    """For every cut, the bytes on the graph's edges are the bytes that the later stages receive from earlier ones."""
    model, args, kwargs, _ = made(name, 3)
    if name == "attends":
        args, kwargs = (), {"x": args[0], "y": args[1], **kwargs}
    known = layered(model, (args, kwargs))
    assert isinstance(known, CapturedModel)
    graph, names = known.graph({}), list(known.layers)
    sizes = known.captures[True].nbytes
    for cut in range(1, len(names)):
        parts = known.parts((tuple(names[:cut]), tuple(names[cut:])))[True]
        received = [value for value in parts[1].receives.get(0, ()) if value[0] != INPUT and value in sizes]
        crossing = {
            tensor: size
            for before, after, tensors in graph.edges(data="tensors")
            if names.index(before) < cut <= names.index(after)
            for tensor, size in tensors.items()
        }
        assert sum(crossing.values()) == sum(sizes[value] for value in received)


def test_a_row_of_layers_is_a_chain_and_is_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.BatchNorm1d(8)).train()
    before = copy.deepcopy(model.state_dict())
    for measured in (False, True):
        graph = graph_of(model, torch.ones(2, 4), measured=measured)
        assert list(graph) == ["0", "1.0", "1.1", "2"]
        assert list(graph.edges) == list(pairwise(graph))
        assert [size for _, size in graph.nodes(data="output_bytes")] == [64, 64, 64, 64]
        assert [size for *_, size in graph.edges(data="bytes")] == [64, 64, 64]
        assert ("forward_s" in graph.nodes["0"]) == measured
    assert len(partition(graph, 2).stages) == 2
    assert not [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]


def test_a_measured_graph_can_be_cut() -> None:
    graph = graph_of(Mixed(), torch.ones(2, 3, 4))
    found = partition(graph, 2, communication="serial", bandwidth_bytes_per_s=1, exactly=True)  # bytes alone count
    assert found.stages[0] == ["blocks.0"]
    assert found.summaries[0].bytes_out == 96
    assert all(graph.nodes[name][key] >= 0 for name in graph for key in ("forward_s", "backward_s", "activation_bytes"))
