"""Pictures of a model's layers: every box with its name and share, every cut edge with its bytes, ties dashed."""

from itertools import combinations, pairwise

import networkx as nx
import pytest
from click.testing import CliRunner
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from pipesched.cli.main import main
from pipesched.errors import PartitionError
from pipesched.viz import plot_layers
from pipesched.viz.routes import HEIGHT, WIDTH, Layout


def graph_with(num_layers, edges, tied=(), measured=True):
    graph = nx.DiGraph()
    for at in range(num_layers):
        times = {"forward_s": 0.001 * (at + 1), "backward_s": 0.001 * (at + 1)} if measured else {}
        own = (f"part.{at}.weight", *(["shared.weight"] if at in tied else []))
        graph.add_node(f"part.{at}", parameters=own, **times)
    graph.add_edges_from((f"part.{a}", f"part.{b}", {"bytes": size}) for a, b, size in edges)
    graph.graph["parameters"] = {name: (1, 2048) for _, names in graph.nodes(data="parameters") for name in names}
    return graph


def stages_of(graph, *ends):
    names, begin, stages = list(graph), 0, []
    for end in ends:
        stages.append(names[begin:end])
        begin = end
    return stages


CHAIN = [(at, at + 1, 4096) for at in range(11)]
SKIPS = [*CHAIN, (0, 2, 512), (1, 10, 1024), (2, 9, 1536)]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_every_layer_has_a_box_with_its_name_and_its_share_and_stages_add_up():
    graph = graph_with(12, CHAIN)
    ax = plot_layers(graph, stages_of(graph, 4, 8, 12))
    shown = texts(ax)
    assert {str(at) for at in range(12)} < {*shown}  # "part." is what all begin with
    assert shown.count("15%") == 1  # layer 11: 12 of 78
    assert [text.split("\n")[0] for text in shown[:3]] == ["stage 0", "stage 1", "stage 2"]
    assert shown[2] == "stage 2\n84 ms, 54%\nthe slowest"
    assert shown.count("4 KiB") == 2  # the two cuts


def test_edges_over_cuts_are_labelled_with_their_bytes_and_ties_are_dashed():
    graph = graph_with(12, SKIPS, tied=(0, 11))
    ax = plot_layers(graph, stages_of(graph, 4, 8, 12))
    shown = texts(ax)
    assert sorted(text for text in shown if text.endswith("KiB")) == [
        "1 KiB",
        "1.5 KiB",
        "4 KiB",
        "4 KiB",
        "shared.weight, 2 KiB",
    ]
    assert "512 B" not in shown  # inside a stage
    dashed = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch) and patch.get_linestyle() == "--"]
    assert len(dashed) == 3  # two branches and the lane


@pytest.mark.parametrize(("count", "ends"), [(1, [1]), (12, [5, 6, 12]), (100, [26, 51, 75, 100]), (100, [1, 100])])
def test_boxes_are_apart_and_in_the_picture(count, ends):
    graph = graph_with(count, [(at, at + 1, 8) for at in range(count - 1)] + [(0, count - 1, 8)] * (count > 2))
    ax = plot_layers(graph, stages_of(graph, *ends))
    boxes = [p for p in ax.patches if isinstance(p, FancyBboxPatch) and p.get_width() == WIDTH]
    assert len(boxes) == count
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    for one in boxes:
        assert left < one.get_x() < right - WIDTH
        assert top < one.get_y() < bottom - HEIGHT
    for one, other in combinations(boxes, 2):
        assert abs(one.get_x() - other.get_x()) > WIDTH or abs(one.get_y() - other.get_y()) > HEIGHT
    width, height = ax.figure.get_size_inches()
    assert max(width, height) < 25


def test_lines_from_layer_to_layer_have_tracks_and_lanes_of_their_own():
    graph = graph_with(12, [*SKIPS, (3, 8, 1)])
    layout = Layout(stages_of(graph, 4, 8, 12))
    layout.reserve(list(graph.edges))
    layout.place()
    heights = [layout.way(*ends)[1][1] for ends in (("part.1", "part.10"), ("part.2", "part.9"), ("part.3", "part.8"))]
    lanes = [layout.way(*ends)[2][0] for ends in (("part.1", "part.10"), ("part.2", "part.9"), ("part.3", "part.8"))]
    assert len({*heights}) == len({*lanes}) == 3
    assert min(lanes) > layout.right
    for before, behind in graph.edges:
        way = layout.way(before, behind)
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(way))
    entries = [layout.way(before, "part.8")[-1] for before in ("part.7", "part.3")]
    assert entries[0][0] < entries[1][0]  # what comes from the right ends on the right


def test_a_graph_that_was_not_measured_is_drawn_without_times():
    graph = graph_with(4, CHAIN[:3], measured=False)
    shown = texts(plot_layers(graph, stages_of(graph, 2, 4)))
    assert shown[:2] == ["stage 0", "stage 1"]
    assert not [text for text in shown if "%" in text]


def test_long_names_have_two_lines_and_very_long_ones_are_cut_in_the_middle():
    long = {"part.0": "part.encoder.block.12.layer.0", "part.1": "part.an_embedding_with_a_long_name"}
    graph = nx.relabel_nodes(graph_with(3, CHAIN[:2]), long)
    shown = texts(plot_layers(graph, [list(graph)]))
    assert {"encoder.block\n.12.layer.0", "an_embe…ng_name", "2"} < {*shown}


def test_stages_of_another_graph_are_refused():
    graph = graph_with(4, CHAIN[:3])
    for stages in ([["part.0"]], [list(graph), ["part.0"]], [list(graph), []]):
        with pytest.raises(
            PartitionError,
            match=r"each layer of the graph exactly once; (missing|repeated|some stages).*; pass the",
        ):
            plot_layers(graph, stages)


MODEL = """
import torch
from torch import nn

def small():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), torch.ones(2, 4)

def wrong():
    return 3
"""


def test_the_command_cuts_a_model_explains_and_draws(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for target, options in (("own_model.py:small", ["--stages", "2", "-o", "own.png"]), ("own_model:small", [])):
        result = CliRunner().invoke(main, ["graph", target, *options])
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("stage  rank  layers  first .. last")
        assert "bottleneck: stage " in result.stdout
    assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")
    for target, said in (
        ("own_model.py:wrong", "own_model.py:wrong returned int; return (model, sample)"),
        ("own_model.py:none", "has no attribute 'none'); correct the path or the name"),
        ("nowhere.py:small", "No such file or directory"),
        (
            "own_model",
            "MODEL must be file.py:function or module:function, or, for tune, a saved profile",
        ),
    ):
        result = CliRunner().invoke(main, ["graph", target])
        assert result.exit_code == 1
        assert said in result.output


def test_boxes_show_the_classes_of_numbered_layers():
    graph = graph_with(4, CHAIN[:3])
    graph.graph["classes"] = {"part.0": "Embed", "part.3": "LayerNormalisation"}
    shown = texts(plot_layers(graph, stages_of(graph, 2, 4)))
    assert "0 Embed" in shown
    assert "3\nLayerNo…isation" in shown
    assert "1" in shown
    assert "2" in shown
