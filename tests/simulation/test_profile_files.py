"""Profiles: kept in a file, and read for sizes between those that were measured."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipesched
from pipesched import graph_of
from pipesched.errors import InputError, ScheduleError
from pipesched.profiling import profile_model
from pipesched.simulation.layer_costs import LayerCosts, costs_of, messages
from pipesched.simulation.overheads import Machine
from pipesched.simulation.profile import Profile
from pipesched.simulation.size_interpolation import figure_at


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def measured(*rows: int) -> Profile:
    return Profile({count: graph_of(model(), torch.randn(count, 8)) for count in rows}, "digest")


def test_a_profile_on_another_machine_shares_the_costs_of_sizes_between_measured_ones() -> None:
    profile = measured(2, 4)
    other = profile.on(Machine(name="other"))
    assert (profile.machine.name, other.machine.name) == ("", "other")
    assert other.graph(3) is profile.graph(3)


def test_a_profile_is_what_its_file_says(tmp_path: Path) -> None:
    profile = measured(2, 4)
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded.layers == ("0", "1", "2")
    assert loaded.model == "digest"
    for rows, graph in profile.graphs.items():
        del graph.graph["classes"]  # for reports alone: a file does not hold the classes of layers
        assert nx.utils.graphs_equal(loaded.graphs[rows], graph)


def test_between_measured_sizes_costs_are_on_a_line() -> None:
    profile = measured(2, 6)
    low, middle, high = (costs_of(profile.graph(rows), "2") for rows in (2, 4, 6))
    assert middle.memory.output_bytes == 4 * 4 * 4
    assert middle.parameter_bytes == low.parameter_bytes
    assert middle.forward_s == pytest.approx((low.forward_s + high.forward_s) / 2)


def test_one_measured_size_is_scaled() -> None:
    profile = measured(4)
    once, twice = (costs_of(profile.graph(rows), "0") for rows in (4, 8))
    assert twice.forward_s == 2 * once.forward_s
    assert twice.memory.activation_bytes == 2 * once.memory.activation_bytes


def test_what_is_no_profile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(ScheduleError, match=r"none\.json"):
        Profile.load(path)
    path.write_text('{"model": "x"}')
    with pytest.raises(ScheduleError, match="'machine' is missing"):
        Profile.load(path)


# ---- stages -------------------------------------------------------------------------------------------------------


def skipping() -> Profile:
    """Four layers that cost 1, 2, 3 and 4 s; one tensor of the first goes to all others; the ends share a weight."""
    graph = nx.DiGraph(parameters={"shared": (3, 12), "own": (2, 8)})
    for position, name in enumerate("abcd", 1):
        used = ("shared",) if name in "ad" else ("own",) if name == "b" else ()
        numbers = dict.fromkeys(LayerCosts().figures(), position)
        graph.add_node(name, **numbers, parameters=used)
    for user in "bcd":
        graph.add_edge("a", user, bytes=100, tensors={"a:0": 100})
    graph.add_edge("b", "c", bytes=10, tensors={"b:0": 10})
    graph.add_edge("c", "d", bytes=1, tensors={"c:0": 1})
    return Profile({2: graph})


def test_a_tensor_is_sent_from_each_user_to_the_next() -> None:
    found = skipping().costs([["a"], ["b"], ["c"], ["d"]], 2)
    assert found.forward_s == (1, 2, 3, 4)
    assert found.input_bytes == (1, 100, 110, 101)
    assert found.output_bytes == (100, 110, 101, 4)
    assert messages(skipping().graph(2), [["a"], ["b", "d"], ["c"]]) == {(0, 1): 100, (1, 2): 110, (2, 1): 1}


def test_a_weight_that_layers_of_one_stage_share_counts_once() -> None:
    assert skipping().costs([["a", "b", "c", "d"]], 2).weight_bytes == (20,)
    assert skipping().costs([["a", "b"], ["c", "d"]], 2).weight_bytes == (20, 12)


def test_a_layer_that_recomputes_keeps_its_input_and_runs_forward_again() -> None:
    costs = measured(4).costs([["0"], ["1"], ["2"]], 4, keep={"0": "recompute", "1": "recompute"})
    assert costs.activation_bytes[0] == 0  # its input lies in the batch
    assert costs.activation_bytes[1] == measured(4).graph(4).nodes["1"]["input_bytes"] > 0
    kept = skipping().costs([["a", "b", "c", "d"]], 2, keep={"c": "recompute"})
    assert (kept.forward_s, kept.backward_s, kept.input_grad_s, kept.weight_grad_s) == ((10,), (13,), (13,), (10,))


@pytest.mark.parametrize(
    ("stages", "keep", "said"),
    [
        ([["a", "b"], ["d"]], {}, "'c' is listed 0 times"),
        ([["a", "b"], ["c", "c", "d"]], {}, "'c' is listed 2 times"),
        ([["a", "b", "c", "d", "e"]], {}, "'e' is in a stage, but not in the profile"),
        ([["a", "b", "c", "d"]], {"e": "recompute"}, "'e': 'recompute'"),
        ([["a", "b", "c", "d"]], {"a": "forget"}, "'a': 'forget'"),
    ],
)
def test_stages_of_other_layers_are_refused(stages: list[list[str]], keep: dict[str, str], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        skipping().costs(stages, 2, keep=keep)


# ---- measuring several sizes ----------------------------------------------------------------------------------------


def test_a_sample_is_measured_in_several_sizes() -> None:
    found = pipesched.profile(model(), torch.randn(8, 8))
    assert sorted(found.graphs) == [2, 4, 8, 16]
    assert [costs_of(found.graph(rows), "0").memory.input_bytes for rows in (2, 16)] == [2 * 8 * 4, 16 * 8 * 4]
    found = pipesched.profile(model(), torch.randn(1, 8))
    assert sorted(found.graphs) == [2]


def test_rows_lie_along_the_dims_that_are_split() -> None:
    found = pipesched.profile(nn.LSTM(8, 4), torch.randn(3, 6, 8), rows=[2, 9], split_dims=1)
    assert costs_of(found.graph(9), "(model)").memory.input_bytes == 3 * 9 * 8 * 4


@pytest.mark.parametrize("rows", [[], [0], [True], [2.5]])
def test_sizes_are_whole_numbers(rows: list[int]) -> None:
    with pytest.raises(InputError, match="rows="):
        pipesched.profile(model(), torch.randn(8, 8), rows=rows)


# ---- files that cannot be true --------------------------------------------------------------------------------------


def spoilt(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A saved profile in which something was changed."""
    values = json.loads(json.dumps(measured(2, 4).to_dict()))
    change(values)
    return values


SPOILT = {
    "forward_s of layer '1' for 4 rows is nan": lambda v: v["sizes"]["4"]["layers"]["1"].update(forward_s=math.nan),
    "activation_bytes of layer '0' for 2 rows is -5": lambda v: v["sizes"]["2"]["layers"]["0"].update(
        activation_bytes=-5
    ),
    "backward_s of layer '2' for 2 rows is 'long'": lambda v: v["sizes"]["2"]["layers"]["2"].update(backward_s="long"),
    "bytes between '0' and '1' for 2 rows is inf": lambda v: v["sizes"]["2"]["edges"][0][2].update(bytes=math.inf),
    "backward_s of layer '1' is missing": lambda v: v["sizes"]["4"]["layers"]["1"].pop("backward_s"),
    "'2' exists for micro-batches of 2 rows, but not for 4 rows": lambda v: (
        v["sizes"]["4"]["layers"].pop("2"),
        v["sizes"]["4"]["edges"].pop(),
    ),
    "the same edges for all micro-batch sizes; '0' -> '1'": lambda v: v["sizes"]["4"]["edges"].pop(0),
    "this profile has none": lambda v: v["sizes"].clear(),
    "the profile has micro-batches of -4 rows": lambda v: v["sizes"].update({"-4": v["sizes"].pop("4")}),
}


@pytest.mark.parametrize("said", SPOILT)
def test_a_profile_that_cannot_be_true_is_refused(tmp_path: Path, said: str) -> None:
    path = tmp_path / "spoilt.json"
    path.write_text(json.dumps(spoilt(SPOILT[said])))
    with pytest.raises(ScheduleError, match=rf"spoilt\.json.*{re.escape(said)}.*; measure (it|the model) again"):
        Profile.load(path)


def test_a_profile_of_another_model_is_refused() -> None:
    profile = measured(2)
    profile.check_model(graph_of(model(), torch.randn(5, 8), measured=False))
    longer = nn.Sequential(*model(), nn.ReLU())
    wider = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    for other, said in (
        (longer, "layer 3, '3', is missing from the profile"),
        (wider, "64 elements in the profile"),
    ):
        with pytest.raises(ScheduleError, match=f"belong to the pipeline's model; .*{said}"):
            profile.check_model(graph_of(other, torch.randn(2, 8), measured=False))


# ---- kept in a folder -----------------------------------------------------------------------------------------------


def test_a_profile_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"rows": [2, 4], "cache": tmp_path / "profiles"}
    first = pipesched.profile(model(), torch.randn(4, 8), **asked)
    measuring: list[Any] = []

    def measured(row: Any, *_: Any) -> dict[str, LayerCosts]:
        measuring.append(row)
        return {name: costs_of(first.graph(4), name) for name in row.layers}

    monkeypatch.setattr(profile_model, "measure", measured)

    again = pipesched.profile(model(), torch.randn(4, 8), **asked)  # other numbers in weights and inputs
    assert not measuring
    assert again.to_dict() == first.to_dict()
    frozen = model()
    frozen[0].requires_grad_(False)
    for other, sample, changed in (
        (model(), torch.randn(4, 8), {"rows": [2]}),
        (model(), torch.randn(4, 8), {"intra_op_threads": 2}),
        (frozen, torch.randn(4, 8), {}),
        (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(4, 8), {}),
    ):
        before = len(measuring)
        pipesched.profile(other, sample, **{**asked, **changed})
        assert len(measuring) > before


# ---- sizes that were not measured -----------------------------------------------------------------------------------


@given(st.floats(0, 10), st.floats(0.1, 10), st.integers(1, 100))
def test_costs_that_are_linear_in_rows_are_interpolated_exactly(fixed: float, each: float, rows: int) -> None:
    sizes = [2, 4, 8, 16]
    assert figure_at(sizes, [fixed + each * size for size in sizes], rows) == pytest.approx(fixed + each * rows)


def test_noisy_linear_costs_are_fitted_and_bent_ones_interpolated() -> None:
    sizes = [2, 4, 8, 16, 32]
    noisy = [2.2, 3.7, 8.6, 15.2, 33.0]
    assert figure_at(sizes, noisy, 6) == pytest.approx(6, rel=0.03)
    bent = [1.0, 1.0, 1.0, 8.0, 16.0]  # as where a cache is full
    assert figure_at(sizes, bent, 6) == 1
    assert figure_at(sizes, bent, 24) == 12


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=5), st.integers(1, 100))
def test_a_figure_is_never_negative_and_a_measured_one_counts(values: list[float], rows: int) -> None:
    sizes = [2**at for at in range(len(values))]
    found = figure_at(sizes, values, rows)
    assert found >= 0
    if rows in sizes:
        assert found == values[sizes.index(rows)]
