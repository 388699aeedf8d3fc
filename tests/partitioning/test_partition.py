"""The cut of a chain is exact: no other has a faster slowest stage."""

from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import partition
from pipesched.errors import PartitionError, PipeschedError
from pipesched.partitioning.partition import balance
from tests.support.random_programs import quick

TIMES = st.lists(st.integers(0, 20), min_size=1, max_size=9)
FLOATS = st.lists(st.floats(0, 1e3), min_size=1, max_size=7)


def loads(times, starts):
    return [sum(times[a:b]) for a, b in pairwise([*starts, len(times)])]


def brute_force(times, num_stages):
    """The best bottleneck over all cuts."""
    cuts = combinations(range(1, len(times)), num_stages - 1)
    return min(max(loads(times, [0, *starts])) for starts in cuts)


def chain(forward, backward=None):
    graph = nx.DiGraph()
    backward = [0] * len(forward) if backward is None else backward
    for i, (f, b) in enumerate(zip(forward, backward, strict=True)):
        graph.add_node(f"layer{i}", forward_s=f, backward_s=b, output_bytes=4, unknown="ignored")
    nx.add_path(graph, list(graph))
    return graph


# ---- balance --------------------------------------------------------------------------------------------------------


@settings(quick, max_examples=120)
@given(TIMES, st.data())
def test_no_cut_is_better(times, data):
    num_stages = data.draw(st.integers(1, len(times)))
    assert max(loads(times, balance(times, num_stages))) == brute_force(times, num_stages)


@quick
@given(FLOATS, st.data())
def test_no_cut_is_better_with_fractions_of_seconds(times, data):
    """To a picosecond a layer."""
    num_stages = data.draw(st.integers(1, len(times)))
    bottleneck = max(loads(times, balance(times, num_stages)))
    assert bottleneck == pytest.approx(brute_force(times, num_stages), rel=1e-12, abs=1e-11)


@settings(quick, max_examples=80)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_every_stage_has_a_layer_and_every_layer_a_stage(times, data):
    num_stages = data.draw(st.integers(1, len(times)))
    starts = balance(times, num_stages)
    assert len(starts) == num_stages
    assert starts[0] == 0
    assert all(a < b for a, b in pairwise([*starts, len(times)]))


@quick
@given(TIMES, st.data())
def test_the_cut_depends_on_the_times_alone(times, data):
    num_stages = data.draw(st.integers(1, len(times)))
    assert balance(times, num_stages) == balance(tuple(times), num_stages) == balance([*map(float, times)], num_stages)


@quick
@given(TIMES, st.data())
def test_the_unit_of_time_does_not_matter(times, data):
    num_stages = data.draw(st.integers(1, len(times)))
    assert balance([time * 1000 for time in times], num_stages) == balance(times, num_stages)


def test_one_to_six_in_two_stages_are_the_first_four_and_the_last_two():
    assert balance([1, 2, 3, 4, 5, 6], 2) == [0, 4]
    assert balance([6, 5, 4, 3, 2, 1], 2) == [0, 2]


def test_layers_that_take_no_time_still_make_stages():
    assert balance([0, 0], 2) == [0, 1]
    assert loads([0, 0, 5, 0, 0], balance([0, 0, 5, 0, 0], 5)) == [0, 0, 5, 0, 0]


def test_a_single_heavy_layer_is_alone_where_stages_suffice():
    assert balance([1, 100, 1], 3) == [0, 1, 2]
    starts = balance([1, 1, 100, 1, 1], 3)
    assert loads([1, 1, 100, 1, 1], starts) == [2, 100, 2]


def test_many_layers_are_cut_in_no_time():
    times = [(7 * i) % 13 + 1 for i in range(5000)]
    starts = balance(times, 256)
    assert max(loads(times, starts)) < 2 * sum(times) / 256


@pytest.mark.parametrize(("count", "num_stages"), [(1, 0), (1, -1), (1, 2), (3, 4), (0, 2)])
def test_too_many_or_no_stages(count, num_stages):
    with pytest.raises(
        PartitionError, match=rf"there are {num_stages} stages? and {count} layers?; .*fewer devices, or fewer chunks"
    ):
        balance([1] * count, num_stages)


# ---- partition ------------------------------------------------------------------------------------------------------


@quick
@given(TIMES, st.data())
def test_a_partition_says_its_bottleneck_and_what_none_can_beat(forward, data):
    backward = data.draw(st.lists(st.integers(0, 20), min_size=len(forward), max_size=len(forward)))
    num_stages = data.draw(st.integers(1, len(forward)))
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    found = partition(chain(forward, backward), num_stages)
    assert found.bottleneck_s == brute_force(times, num_stages)
    assert max(times) <= found.lower_bound_s <= found.bottleneck_s
    assert found.lower_bound_s >= sum(times) / num_stages
    assert [node for stage in found.stages for node in stage] == [f"layer{i}" for i in range(len(forward))]
    assert all(found.stages)


def test_a_partition_takes_forward_and_backward_times_together():
    assert partition(chain([1, 1, 1, 3], [2, 2, 2, 0]), 2).stages == [["layer0", "layer1"], ["layer2", "layer3"]]
    assert partition(chain([9, 1, 1, 1], [0, 0, 0, 0]), 2).stages == [["layer0"], ["layer1", "layer2", "layer3"]]


def test_a_partition_has_at_most_as_many_stages_as_layers():
    found = partition(chain([1, 2, 3]), 8)
    assert found.stages == [["layer0"], ["layer1"], ["layer2"]]
    assert found.bottleneck_s == found.lower_bound_s == 3


def test_the_order_of_the_layers_is_that_of_the_edges():
    graph = nx.DiGraph()
    for node in "cab":
        graph.add_node(node, forward_s=1, backward_s=1)
    nx.add_path(graph, "abc")
    assert partition(graph, 2).stages in ([["a"], ["b", "c"]], [["a", "b"], ["c"]])


def broken(change):
    graph = chain([1, 2, 3])
    change(graph)
    return graph


@pytest.mark.parametrize(
    ("graph", "match"),
    [
        (broken(lambda g: g.add_edge("layer2", "layer0")), r"without cycles; 'layer0' -> 'layer1' -> 'layer2' -> 'lay"),
        (
            broken(lambda g: g.add_edge("layer1", "layer1")),
            r"without cycles; 'layer1' -> 'layer1' is a cycle; .*one layer",
        ),
        (chain([1, 2, 3]).to_undirected(), r"directed graph without cycles; got Graph with 3 nodes.*networkx\.DiGraph"),
        (nx.DiGraph(), r"directed graph without cycles; got DiGraph with 0 nodes"),
        (broken(lambda g: g.nodes["layer1"].pop("backward_s")), r"'layer1' has no backward_s; measure and add it"),
        (
            chain([1, float("nan"), 3]),
            r"costs must be finite and not negative; forward_s of layer 1 is nan; measure it again",
        ),
        (chain([1, 2, 3], [1, 1, -3]), r"backward_s of layer 2 is -3"),
        (chain([1, "2", 3]), r"forward_s of layer 1 is '2'"),
        (chain([1, [2], 3]), r"forward_s of layer 1 is \[2\]"),
        (
            chain([1e300, 2, 3]),
            r"times of all layers must add up to less than \d+ s; they add up to 1e\+300 s; pass the times",
        ),
    ],
)
def test_a_graph_with_a_cycle_or_bad_times(graph, match):
    with pytest.raises(PartitionError, match=match) as caught:
        partition(graph, 2)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PipeschedError)


@pytest.mark.parametrize("num_stages", [0, -2, 1.5, "2", True])
def test_a_partition_has_a_whole_number_of_stages_at_least_one(num_stages):
    with pytest.raises(PartitionError, match=rf"there are {num_stages} stages? and 3 layers; use at most 3"):
        partition(chain([1, 2, 3]), num_stages)


@pytest.mark.parametrize(
    ("wishes", "match"),
    [
        ({"communication": "slow"}, r"one of none, overlap, serial; got 'slow'"),
        ({"communication": "serial"}, r"communication='serial' is set without bandwidth_bytes_per_s; pass"),
        ({"communication": "overlap", "bandwidth_bytes_per_s": 0}, r"bytes_per_s is 0"),
        ({"memory_limit_bytes": -1}, r"memory_limit_bytes is -1"),
        ({"memory_limit_bytes": 9}, r"'layer0' has no parameter_bytes; measure and add it"),
        (
            {"memory_limit_bytes": [1, 2, 3]},
            r"one number for each rank; got a list of 3 numbers for 2 ranks; pass one number, or a list of 2",
        ),
        ({"weight_copies": float("inf")}, r"weight_copies is inf"),
        ({"speeds": [1]}, r"speeds must have one number for each rank; got a list of 1 number for 2 ranks"),
        ({"speeds": [1, 0]}, r"at least 1/1000; got \[1, 0\]; leave out"),
        ({"in_flight": [1]}, r"got \[1\] for 2 stages; pass a whole number for each stage"),
        ({"in_flight": lambda stage, _: -stage}, r"got \[0, -1\] for 2 stages"),
        (
            {"starts": {"layer9": 1}},
            r"starts= may only name layers; 'layer9' is not a layer; the layers are 'layer0', 'layer1'",
        ),
        ({"starts": {"layer1": 2}}, r"stage that it begins, a number from 0 to 1; 'layer1' is mapped to stage 2"),
        ({"starts": {"layer1": 0}}, r"'layer1' is mapped to stage 0 but depends on 1 layer; choose a later stage"),
        (
            {"starts": {"layer1": 1}, "any_order": True},
            r"requires a fixed rank order; .*any_order=True was also passed; drop either starts= or",
        ),
        ({"together": [["layer0", "x"]]}, r"together= may only name layers; 'x' is not a layer"),
    ],
)
def test_invalid_options_of_partition_are_refused(wishes, match):
    with pytest.raises(PartitionError, match=match):
        partition(chain([1, 2, 3]), 2, **wishes)
