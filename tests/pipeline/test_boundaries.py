"""Where a pipeline cuts: what the user pins, what crosses, several stages a rank, ties; and what a plan says."""

import json
from itertools import combinations, pairwise

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline, Plan, schedules
from pipesched.errors import PartitionError
from pipesched.planning.pins import Pins
from pipesched.planning.stage_partitioner import StagePartitioner
from pipesched.simulation.links import Link, Links
from tests.support.branching_models import Tied, UNet
from tests.support.places import Group, Run, place

MS = 1e-3


def layers(*times_ms: float, sizes: dict[str, tuple[str, int]] | None = None) -> "nx.DiGraph[str]":
    """A measured chain of layers a, b, ...; each gives 100 bytes. sizes: parameters by name, and who uses them."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    names = [chr(ord("a") + place_) for place_ in range(len(times_ms))]
    given = sizes or {name: (name, 10) for name in names}
    for name, time_ms in zip(names, times_ms, strict=True):
        own = tuple(parameter for parameter, (users, _) in given.items() if name in users)
        graph.add_node(name, forward_s=time_ms * MS, backward_s=0, activation_bytes=7, parameters=own, output_bytes=100)
    for ends in pairwise(names):
        graph.add_edge(*ends, tensors={f"of {ends[0]}": 100})
    graph.graph["parameters"] = {parameter: (size // 4, size) for parameter, (_, size) in given.items()}
    return graph


def cut(graph: "nx.DiGraph[str]", num_ranks: int, schedule: str = "1f1b", links: Links | None = None, **pins):
    program = schedules.get(schedule).program(num_ranks, 8)
    partitioner = StagePartitioner(pins=Pins(list(graph), **pins), program=program, graph=lambda: graph, links=links)
    stages, found = partitioner.partition()
    return ["".join(names) for names in stages], found


# ---- pins -----------------------------------------------------------------------------------------------------------


def test_some_stages_begin_where_they_are_told_and_the_rest_where_it_is_best() -> None:
    graph = layers(1, 1, 1, 1, 1, 1, 1, 1)
    assert cut(graph, 4)[0] == ["ab", "cd", "ef", "gh"]
    for boundaries, slowest in (({"d": 1}, 3), ({"d": 2}, 3), ({1: 1, "h": 3}, 3), ({"c": 2}, 3)):
        stages, found = cut(graph, 4, boundaries=boundaries)
        assert "".join(stages) == "abcdefgh"
        assert all(stages[stage][0] == (layer if layer != 1 else "b") for layer, stage in boundaries.items())
        assert found is not None
        assert max(map(len, stages)) == slowest == round(found.bottleneck_s / MS)
    assert cut(graph, 2, "interleaved-1f1b", boundaries={"b": 1, "g": 2})[0] == ["a", "bcdef", "g", "h"]


def test_layers_kept_together_share_a_stage() -> None:
    graph = layers(1, 1, 1, 1, 1, 1)
    assert cut(graph, 3, together=[("b", "d")])[0] == ["a", "bcd", "ef"]
    assert cut(graph, 2, "interleaved-1f1b", together=[("b", "d")])[0] == ["a", "bcd", "e", "f"]


def test_cuts_that_keep_pins_are_told_from_others() -> None:
    pins = Pins("abcdef", {"c": 1}, [("d", "e"), ()])
    kept = [starts for starts in combinations(range(1, 6), 2) if pins.allows([0, *starts])]
    assert kept == [(2, 3), (2, 5)]
    assert [["".join(stage) for stage in pins.stages([0, *starts])] for starts in kept] == [
        ["ab", "c", "def"],
        ["ab", "cde", "f"],
    ]
    pins.check_together([0, 1, 5])
    with pytest.raises(PartitionError, match="'d' into stage 1, 'e' into stage 2"):
        pins.check_together([0, 2, 4])


def test_the_explanation_states_the_cost_of_pins() -> None:
    _, found = cut(layers(1, 1, 1, 1), 2, boundaries={"b": 1})
    assert found is not None
    assert found.gap == pytest.approx(0.5)
    assert "an unrestricted split could reach 2 ms (1.50x faster)" in found.reason


@pytest.mark.parametrize(
    ("pins", "match"),
    [
        (
            {"boundaries": {"x": 1}},
            r"a boundary must name a layer; got 'x'; the layers are a, b, c, d; use one of these",
        ),
        ({"boundaries": {7: 1}}, r"there are 4 layers; got 7; pass a layer's position, starting at 0, or its name"),
        ({"boundaries": {"b": "1"}}, r"got stage '1' for layer 'b'; pass the number of the stage, such as \{'b': 1\}"),
        ({"boundaries": {"c": 1, "b": 2}}, r"'b' begins stage 2, but 'c', a later layer, begins stage 1; swap the"),
        ({"boundaries": {"b": 2}}, r"no partition of 4 layers into 3 stages; .*'b' begins stage 2"),
        ({"boundaries": {"b": 3}}, r"the stage that it begins, a number from 0 to 2; 'b' is mapped to stage 3"),
        ({"boundaries": {"b": 0}}, r"'b' is mapped to stage 0 but depends on 1 layer; choose a later stage"),
        ({"together": [("a", "x")]}, r"together= must name layers; got 'x'; the layers are a, b, c, d"),
        ({"together": ["ab"]}, r"together= must be a list of groups of layers; got 'ab'; pass \[\(first, second\)\]"),
        (
            {"together": [("a", "d")]},
            r"3 stages, but the layers form only 1 block, because some must stay together; .* fewer layers together",
        ),
        ({"boundaries": ["b", "c"], "together": [("a", "b")]}, r"put 'a' into stage 0, 'b' into stage 1; move a bound"),
        (
            {"boundaries": {"b": 1}, "together": [("a", "b")]},
            r"'b' begins stage 1; 'a', 'b' share a stage; .*a partition exists if 'b' may be in any stage",
        ),
    ],
)
def test_pins_that_cannot_be_kept_say_why(pins, match) -> None:
    with pytest.raises(PartitionError, match=match):
        cut(layers(1, 1, 1, 1), 3, **pins)


# ---- what is best ---------------------------------------------------------------------------------------------------


def test_the_busiest_rank_counts_where_ranks_have_several_stages() -> None:
    graph = layers(6, 1, 1, 1, 1, 1, 1)
    stages, found = cut(graph, 2, "interleaved-1f1b")  # stages 0 and 2 on rank 0
    assert found is not None
    assert found.bottleneck_s == pytest.approx(7 * MS)
    assert len(stages[0]) == len(stages[2]) == 1
    stages, found = cut(graph, 2, "zb-v")  # stages 0 and 3 on rank 0
    assert found is not None
    assert found.bottleneck_s == pytest.approx(7 * MS)
    assert (len(stages[0]), len(stages[3]), found.ranks) == (1, 1, (0, 1, 1, 0))


def test_known_links_count_and_unknown_ones_do_not() -> None:
    graph = layers(1, 1, 1, 1, 1, 1)
    graph.edges["c", "d"]["tensors"] = {"large": 1000}
    for way_s, bottleneck_s in ((1 * MS, 3 * MS), (3 * MS, 4 * MS)):  # there and back beside 3 ms of work
        stages, found = cut(graph, 2, links=Links(inside=Link(0, 1000 / way_s)))
        assert found is not None
        assert found.bottleneck_s == pytest.approx(bottleneck_s)
        assert (stages == ["abc", "def"]) == (bottleneck_s == 3 * MS)
    for unknown in (None, Links()):
        assert cut(graph, 2, links=unknown)[0] == ["abc", "def"]
    with pytest.raises(
        PartitionError,
        match=r"links= must be a pipesched\.Links; got 'fast'; pass the result of pipesched\.probe_links",
    ):
        cut(graph, 2, links="fast")  # type: ignore[arg-type]


def test_a_skip_crosses_every_cut_on_its_way() -> None:
    graph = layers(1, 1, 1, 1, 1, 1)
    graph.add_edge("b", "f", tensors={"of b": 100})
    graph.add_edge("b", "e", tensors={"another": 1})
    _, found = cut(graph, 3)
    assert found is not None
    assert [summary.bytes_out for summary in found.summaries] == [101, 201, 0]


@pytest.mark.parametrize(("size", "copies"), [(1_000, 2), (100_000, 1)])
def test_users_of_a_tied_weight_are_put_together_where_that_costs_less(size: int, copies: int) -> None:
    """Apart 24 ms of work a step and two messages at 1 MB/s, 2 ms or 200; together 32 ms."""
    graph = layers(1, 1, 1, 1, 1, 1, sizes={"w": ("cd", size)})
    stages, found = cut(graph, 2, links=Links(inside=Link(0, 1e6)))
    assert found is not None
    assert (stages == ["abc", "def"]) == (copies == 2)
    assert sum(summary.parameter_bytes for summary in found.summaries) == copies * size


def test_a_parameter_counts_once_a_stage() -> None:
    _, found = cut(layers(1, 1, 1, 1, sizes={"w": ("abcd", 40), "b": ("b", 8)}), 2)
    assert found is not None
    assert [(summary.num_parameters, summary.parameter_bytes) for summary in found.summaries] == [(12, 48), (10, 40)]


def test_the_explanation_names_a_better_order_of_the_layers() -> None:
    graph = layers(2, 3, 1)
    assert "another order" not in cut(graph, 2)[1].reason
    graph.remove_edges_from(list(graph.edges))
    stages, found = cut(graph, 2)
    assert stages == ["a", "bc"]
    assert found.reason.endswith("; another order of the layers could reach 3 ms (1.33x faster)")


# ---- through a pipeline ---------------------------------------------------------------------------------------------


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def pinned(group: Group) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    pins = {"boundaries": {"2": 1}, "together": [("5", "7")]}
    with Pipeline(
        model,
        torch.ones(2, 4),
        loss_fn=loss_fn,
        num_microbatches=3,
        schedule="interleaved-1f1b",
        **place(group),
        **pins,
    ) as pipe:
        pipe.step(torch.ones(6, 4), target=torch.ones(6, 4))
        pipe.gather_model()  # for the next pipeline over it
        plan = pipe.plan
    stages = plan.stages
    assert stages[1][0] == "2"
    assert len({stage for stage, names in enumerate(stages) for name in names if name in ("5", "6", "7")}) == 1
    assert sum(map(len, stages)) == 9
    loaded = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert loaded == plan
    assert loaded.explain() == plan.explain()
    with Pipeline(model, torch.ones(2, 4), loss_fn=loss_fn, plan=loaded, **place(group)) as pipe:
        assert pipe.plan.partition == plan.partition
    return plan.partition.explain().splitlines()


def test_a_pipeline_keeps_pins_and_its_plan_tells_why(run: Run) -> None:
    texts = run(2, pinned)
    assert all(text == texts[0] for text in texts)
    assert texts[0][0].split() == [
        *("stage", "rank", "layers", "first", "..", "last", "time", "parameters", "activations", "memory", "in", "out")
    ]
    assert [line.split()[1] for line in texts[0][1:5]] == ["0", "1", "0", "1"]
    assert texts[0][5].startswith("bottleneck: rank ")


def test_a_plan_names_ties_and_what_they_cost() -> None:
    text = torch.zeros(3, 5, dtype=torch.long)
    with Pipeline(
        Tied(), {"text": text, "labels": text}, devices=["cpu"] * 2, boundaries=["blocks.1"], num_microbatches=2
    ) as pipe:
        lines = pipe.plan.explain().splitlines()
        assert "stage costs are unknown: layers are measured only if pipesched chooses the boundaries" in lines
        assert "tied: embed.weight: used in stages 0, 1; gradients are summed; nothing is sent" in lines  # one memory
        assert [tie.stages for tie in pipe.plan.ties] == [(0, 1), (0, 1, 1, 1)]
        assert pipe.predicted.makespan_s > 0  # that measures the layers
        assert "the boundaries were given; other boundaries" in pipe.plan.explain()


def sent_for_ties(group: Group) -> list[int]:
    text = torch.zeros(3, 5, dtype=torch.long)
    with Pipeline(
        Tied(), {"text": text, "labels": text}, boundaries=["blocks.1"], num_microbatches=2, **place(group)
    ) as pipe:
        return [tie.bytes_per_step for tie in pipe.plan.ties]


def test_over_a_mesh_a_tied_weight_goes_there_and_a_gradient_a_use_comes_back(ranks) -> None:
    embedding, block = 12 * 8 * 4, (8 * 16 + 16 + 16 * 8 + 8) * 4
    assert ranks.run(2, sent_for_ties) == [[2 * embedding, 4 * block]] * 2


def test_stages_of_a_net_with_long_skips_count_all_that_crosses() -> None:
    with Pipeline(UNet(), torch.ones(2, 4, 6, 6), devices=["cpu"] * 4, loss_fn=loss_fn, schedule="1f1b") as pipe:
        found = pipe.plan.partition
        order = [name for names in pipe.plan.stages for name in names]
    one = 2 * 4 * 6 * 6 * 4
    crossing = {"down": lambda at: one * at, "up": lambda at: one * (1 + (8 - at)) if at > 4 else one * 4}
    for summary, names in zip(found.summaries[1:], pipe.plan.stages[1:], strict=True):
        at = order.index(names[0])
        assert summary.bytes_in == crossing[names[0].split(".")[0]](at)
