"""Partitions are exact: no chain of order ideals, tried by brute force, has a smaller bottleneck."""

import random
from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import partition
from pipesched.errors import PartitionError
from pipesched.partitioning import search
from pipesched.partitioning.bisection import INFINITE, Fails, FoundPartition, smallest
from pipesched.program import placement
from tests.support.brute_force_partition import as_good, best, named_tensors, random_chain, random_graph, sent
from tests.support.layer_graphs import branches, chain, residual, u_net, weights_as_layers
from tests.support.random_programs import quick

SEEDS = st.integers(0, 10**6)


@st.composite
def wishes(draw, num_stages, *, plain=False):
    """Some of what can be asked of a partition."""
    asked = {"communication": draw(st.sampled_from(["none", "overlap", "serial"]))}
    if draw(st.booleans()):
        asked["latency_s"] = draw(st.integers(1, 2))
    if plain:
        return asked
    if draw(st.booleans()):
        asked["speeds"] = draw(st.lists(st.sampled_from([1, 2, 0.5, 0.75]), min_size=num_stages, max_size=num_stages))
    if draw(st.booleans()):
        limit = st.integers(5, 60)
        asked["memory_limit_bytes"] = draw(limit | st.lists(limit, min_size=num_stages, max_size=num_stages))
        asked["weight_copies"] = draw(st.sampled_from([1, 4]))
        if draw(st.booleans()):
            asked["in_flight"] = [num_stages - stage for stage in range(num_stages)]
    asked["any_order"] = draw(st.integers(0, 3)) == 0
    asked["exactly"] = draw(st.integers(0, 3)) == 0
    return asked


@st.composite
def pins(draw, graph, num_stages):
    """Layers that begin stages, and layers that share one."""
    layers = sorted(graph)
    asked = {"starts": draw(st.dictionaries(st.sampled_from(layers), st.integers(0, num_stages - 1), max_size=2))}
    asked["together"] = draw(st.lists(st.sets(st.sampled_from(layers), max_size=3), max_size=2))
    return asked


def check(graph, num_stages, **asked):
    """The partition is as good as the best, and is one; or there is none."""
    if (found := as_good(best(graph, num_stages, **asked), graph, num_stages, **asked)) is None:
        return
    assert found.gap == 0
    assert sorted(layer for stage in found.stages for layer in stage) == sorted(graph)
    assert len(found.stages) <= num_stages
    assert all(found.stages)
    stage_of = {layer: stage for stage, layers in enumerate(found.stages) for layer in layers}
    assert all(stage_of[a] <= stage_of[b] for a, b in graph.edges)


@settings(quick, max_examples=60)
@given(SEEDS, st.data())
def test_chains_and_graphs_with_communication(seed, data):
    rng = random.Random(seed)
    graph = rng.choice([random_chain, random_graph])(rng, rng.randint(1, 7), rng.choice([0.1, 0.3, 0.6]))
    if data.draw(st.booleans()):
        named_tensors(rng, graph)
    num_stages = data.draw(st.integers(1, 4))
    check(graph, num_stages, **data.draw(wishes(num_stages, plain=True)))


@settings(quick, max_examples=100)
@given(SEEDS, st.data())
def test_with_speeds_and_memory_limits(seed, data):
    rng = random.Random(seed)
    graph = rng.choice([random_chain, random_graph])(rng, rng.randint(1, 6), rng.choice([0.1, 0.3, 0.6]))
    num_stages = data.draw(st.integers(1, 3))
    check(graph, num_stages, **data.draw(wishes(num_stages)))


@settings(quick, max_examples=100)
@given(SEEDS, st.data())
def test_the_search_with_pins_finds_the_best_partition(seed, data):
    rng = random.Random(seed)
    graph = rng.choice([random_chain, random_graph])(rng, rng.randint(2, 6), rng.choice([0.1, 0.3, 0.6]))
    num_stages = data.draw(st.integers(1, 3))
    asked = data.draw(wishes(num_stages)) | {"any_order": False}
    check(graph, num_stages, **asked, **data.draw(pins(graph, num_stages)))


@quick
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_bisection_finds_the_smallest_bound(smallest_there_is, room_below, guess):
    """A probe that realises just its bound, and knows of no further bound than the next."""

    def probe(bound):
        return (
            FoundPartition(bottleneck=bound, order=[], ends=[], slots=[])
            if bound >= smallest_there_is
            else Fails(bound + 1)
        )

    low = max(0, smallest_there_is - room_below)
    found, probes = smallest(low, max(low, guess), probe)
    assert found.bottleneck == smallest_there_is
    assert probes <= 65
    assert smallest(low, low, lambda bound: Fails(INFINITE)) == (None, 2)


# ---- how much is searched -------------------------------------------------------------------------------------------


def product_of_branches(modules):
    """The ideals of modules of parallel branches, with four layers before them and one behind each."""
    count = 5
    for lengths in modules:
        inside = 1
        for length in lengths:
            inside *= length + 1
        count += inside - 1 + 1
    return count


@pytest.mark.parametrize("modules", [[(1, 1)], [(2, 3), (1, 4)], [(3, 3, 3)], [(70, 70)], [(1, 2, 3, 4), (2, 2)]])
@pytest.mark.parametrize("communication", ["none", "serial"])
def test_the_ideals_of_parallel_branches_are_counted(modules, communication):
    graph = branches(modules)
    found = partition(graph, 5, communication=communication, bandwidth_bytes_per_s=1e10)
    assert found.proved
    assert found.ideals in (0, product_of_branches(modules))  # 0: one order already reaches the bound


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("communication", ["none", "overlap", "serial"])
def test_all_orders_are_never_worse_than_some(seed, communication):
    graph = branches([(2, 3, 1), (4, 1), (2, 2)], seed)
    link = {"communication": communication, "bandwidth_bytes_per_s": 1e10}
    for num_stages in (2, 3, 5, 9):
        exact = partition(graph, num_stages, **link)
        some = partition(graph, num_stages, **link, max_ideals=1)
        assert exact.proved
        assert some.ideals == 0
        assert some.lower_bound_s <= exact.bottleneck_s <= some.bottleneck_s
        assert some.proved == (some.gap == 0)
        assert some.gap == some.bottleneck_s / some.lower_bound_s - 1


def test_layers_that_cost_nothing_are_no_places_to_cut():
    """2 ** 40 ideals, if each weight were a layer of its own."""
    graph = weights_as_layers(40)
    for communication in ("none", "overlap", "serial"):
        found = partition(graph, 6, communication=communication, bandwidth_bytes_per_s=1e11)
        assert found.proved
        assert found.ideals <= 41
        assert sum(map(len, found.stages)) == 80


@pytest.mark.parametrize("communication", ["none", "overlap", "serial"])
def test_a_bisection_takes_as_many_probes_as_bits_at_most(communication):
    graph = chain(500)
    found = partition(graph, 32, communication=communication, bandwidth_bytes_per_s=1e10)
    assert found.ideals == 0
    assert found.probes <= 45


@pytest.mark.parametrize("graph", [chain(40), residual(8), u_net(6), branches([(3, 2), (2, 2, 2)])])
def test_equal_graphs_have_equal_partitions(graph):
    for communication in ("none", "overlap", "serial"):
        asked = {"communication": communication, "bandwidth_bytes_per_s": 1e10}
        assert partition(graph, 5, **asked) == partition(graph.copy(), 5, **asked)


@pytest.mark.parametrize("share", [1, 0.9, 0.8, 0.7])
@pytest.mark.parametrize("communication", ["none", "serial"])
def test_limits_of_memory_on_a_large_lattice(share, communication, monkeypatch):
    """There the lattice without limits is a bound, orders an answer; and where that is none, all is searched."""
    graph = branches([(2, 3, 2), (5, 4), (3, 3)])
    asked = {
        "communication": communication,
        "bandwidth_bytes_per_s": 1e11,
        "in_flight": [4, 3, 2, 1],
        "weight_copies": 1,
    }
    free = partition(graph, 4, **asked)
    limit = share * max(summary.memory_bytes for summary in free.summaries)
    exact = partition(graph, 4, **asked, memory_limit_bytes=limit)
    assert exact.proved
    monkeypatch.setattr(search, "_MOST_LIMITED", 10)
    quicker = partition(graph, 4, **asked, memory_limit_bytes=limit)
    for found in (exact, quicker):
        assert max(summary.memory_bytes for summary in found.summaries) <= limit
    assert free.bottleneck_s <= quicker.lower_bound_s <= exact.bottleneck_s <= quicker.bottleneck_s


# ---- what the answer says -------------------------------------------------------------------------------------------


def small_chain():
    graph = nx.DiGraph()
    for name, time in (("embedding", 1), ("first", 2), ("second", 4), ("head", 3)):
        graph.add_node(name, forward_s=time, backward_s=0, output_bytes=2048, parameter_bytes=1024)
    nx.add_path(graph, list(graph))
    return graph


def test_a_partition_explains_itself():
    found = partition(small_chain(), 3)
    assert str(found) == found.explain()
    assert found.explain().splitlines() == [
        "stage  rank  layers  first .. last       time  parameters  activations  memory     in    out",
        "    0     0       2  embedding .. first   3 s       2 KiB        4 KiB  12 KiB    0 B  2 KiB",
        "    1     1       1  second               4 s       1 KiB        2 KiB   6 KiB  2 KiB  2 KiB",
        "    2     2       1  head                 3 s       1 KiB        2 KiB   6 KiB  2 KiB    0 B",
        "bottleneck: stage 1 (second), 4 s: optimal",
        "why: layer second alone takes 4 s",
    ]


def test_layers_that_must_be_together_explain_the_bottleneck():
    found = partition(small_chain(), 3, together=[["second", "head"]])
    assert found.explain().splitlines()[-1] == (
        "why: layer second and 1 layer that must be in the same stage take 7 s together"
    )


def test_a_move_names_all_layers_that_must_stay_together():
    graph = nx.DiGraph()
    for name, time in (("a", 1), ("b", 2), ("c", 2), ("d", 1), ("e", 3)):
        graph.add_node(name, forward_s=time, backward_s=0, output_bytes=1)
    nx.add_path(graph, list(graph))
    assert "moving layer b and 1 layer that must be in the same stage to stage 1 would make the slower of the two " in (
        partition(graph, 2, together=[["b", "c"]]).explain()
    )


def test_layers_that_say_how_many_parameters_they_have_are_counted():
    graph = small_chain()
    graph.nodes["first"]["num_parameters"] = 1_234_567
    assert "1.23 M, 2 KiB" in partition(graph, 3).explain()


def test_why_a_bottleneck_of_several_layers_cannot_be_better():
    text = partition(small_chain(), 2).explain()
    assert "bottleneck: stage 0 (embedding .. second), 7 s: optimal" in text or "stage 1" in text
    moves = (
        "moving layer first to stage 0",
        "moving layer second to stage 1 would make the slower of the two stages take 7 s",
    )
    assert any(move in text for move in moves)
    assert "all splits of the chain were searched" in text
    assert "all work divided equally would take 5 s on each of 2 ranks, which is 28.6% less than the bottleneck" in text


def test_a_cut_may_be_the_bottleneck():
    graph = small_chain()
    found = partition(graph, 2, communication="overlap", bandwidth_bytes_per_s=512)
    assert found.bottleneck_s == 8
    assert "bottleneck: the cut after stage 0 (2 KiB each way), 8 s" in found.explain()


def test_what_is_not_proved_says_so():
    text = partition(
        branches([(3, 3, 3)]), 4, communication="serial", bandwidth_bytes_per_s=1e9, max_ideals=10
    ).explain()
    assert "above the optimum" in text
    assert "the split may not be optimal, because the search did not try all orders of the layers" in text


def test_ranks_that_stay_empty_are_left_out():
    found = partition(small_chain(), 3, speeds=[0.001, 1, 1])
    assert found.ranks == (1, 2)
    assert found.bottleneck_s == 7
    found = partition(small_chain(), 2, speeds=[1, 4], any_order=True)
    assert found.bottleneck_s == pytest.approx(2.25)
    assert found.bottleneck_s == partition(small_chain(), 2, speeds=[4, 1], any_order=True).bottleneck_s


# ---- where there is none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (
            {"memory_limit_bytes": 5000},
            r"no partition of 4 layers into 2 stages within memory_limit_bytes; layer 'embedding' alone takes 6144 "
            r"bytes \(6 KiB\), 1144 more than a rank has; allow 12288 bytes \(12 KiB\) per rank$",
        ),
        (
            {"memory_limit_bytes": 10000},
            r"the limit is 10000 bytes per rank, but 22\.9% more would be enough; allow 12288 bytes \(12 KiB\) per "
            r"rank, or use",
        ),
        (
            {"memory_limit_bytes": 14000, "in_flight": lambda stage, stages: stages - stage},
            r"the limit is 14000 bytes per rank, but 17\.0% more would be enough; allow 16384 bytes \(16 KiB\) per "
            r"rank, or use",
        ),
        (
            {"starts": {"first": 1}, "together": [["embedding", "first"]]},
            r"requirements are: 'first' begins stage 1; 'embedding', 'first' share a stage; a partition exists if "
            r"'first' may be in any stage",
        ),
        (
            {"exactly": True, "together": [["embedding", "head"]]},
            r"the layers form only 1 block, because some must stay together; use fewer stages",
        ),
        (
            {"exactly": True, "together": [["embedding", "first"], ["second", "head"]], "memory_limit_bytes": 12000},
            r"12288 bytes \(12 KiB\), 288 more than a rank has; allow 12288 bytes \(12 KiB\) per rank$",
        ),
    ],
)
def test_an_error_says_what_would_help(asked, match):
    with pytest.raises(PartitionError, match=match):
        partition(small_chain(), 2, **asked)


def test_the_limit_that_is_named_is_the_smallest():
    with pytest.raises(PartitionError, match="allow 12288 bytes"):
        partition(small_chain(), 2, memory_limit_bytes=12287)
    assert partition(small_chain(), 2, memory_limit_bytes=12288).proved


# ---- several stages a rank ------------------------------------------------------------------------------------------


def best_placed(graph, ranks, communication="none", starts=None):
    """Of a chain's cuts the one with the fastest busiest rank, by trying all; links at one byte a second."""
    layers, count = list(graph), len(ranks)
    times = [graph.nodes[layer]["forward_s"] + graph.nodes[layer]["backward_s"] for layer in layers]
    bottlenecks = []
    for inner in combinations(range(1, len(layers)), count - 1):
        cuts = [0, *inner, len(layers)]
        if any(cuts[stage] != layers.index(layer) for layer, stage in (starts or {}).items()):
            continue
        loads, links = [0] * (max(ranks) + 1), [0]
        for stage, (first, last) in enumerate(pairwise(cuts)):
            loads[ranks[stage]] += sum(times[first:last])
        for stage, cut in enumerate(inner):
            size = sent(graph, set(layers[:cut]))
            if ranks[stage] != ranks[stage + 1]:
                links.append(2 * size)
                if communication == "serial":
                    loads[ranks[stage]] += size
                    loads[ranks[stage + 1]] += size
        bottlenecks.append(max([*loads, *(links if communication == "overlap" else [])]))
    return min(bottlenecks)


@settings(quick, max_examples=80)
@given(
    SEEDS,
    st.sampled_from([(2, 2), (3, 2), (2, 3)]),
    st.booleans(),
    st.sampled_from(["none", "overlap", "serial"]),
    st.booleans(),
)
def test_several_stages_a_rank(seed, shape, down_and_up, communication, pinned):
    """Never below the bound that brute force gives, and on chains this short nearly always on it."""
    graph = random_chain(random.Random(seed), 9, 0)
    ordered = nx.DiGraph()
    ordered.add_nodes_from((layer, graph.nodes[layer]) for layer in nx.topological_sort(graph))
    ordered.add_edges_from(graph.edges)
    ranks = (placement.v if down_and_up else placement.loop)(*shape)
    link = {"communication": communication, "bandwidth_bytes_per_s": 1}
    stage = 1 + seed % (len(ranks) - 1)
    starts = {list(ordered)[stage + seed % (9 - len(ranks) + 1)]: stage} if pinned else {}
    link["starts"] = starts
    found = partition(ordered, len(ranks), placement=ranks, **link)
    best_there_is = best_placed(ordered, ranks, communication, starts)
    assert all(found.stages[at][0] == layer for layer, at in starts.items())
    assert found.lower_bound_s <= best_there_is
    assert best_there_is - 1e-9 <= found.bottleneck_s <= 1.25 * best_there_is
    assert len(found.stages) == len(ranks)
    assert found.ranks == ranks
    assert all(found.stages)
    assert partition(ordered, len(ranks), placement=ranks, **link) == found


@pytest.mark.parametrize("graph", [residual(12), branches([(3, 2, 4), (2, 5), (4, 4)])])
@pytest.mark.parametrize("rule", [placement.loop, placement.v])
def test_two_stages_a_rank_balance_better_than_the_slowest_stage_does(graph, rule):
    ranks = rule(4, 2)
    found = partition(graph, 8, placement=ranks)
    assert found.bottleneck_s <= 2 * partition(graph, 8).bottleneck_s
    assert found.gap < 0.05
    stage_of = {layer: stage for stage, layers in enumerate(found.stages) for layer in layers}
    assert all(stage_of[a] <= stage_of[b] for a, b in graph.edges)
    assert "(stages " in found.explain()


def test_ranks_with_several_stages_keep_to_their_memory():
    graph = residual(12)
    free = partition(graph, 8, placement=placement.loop(4, 2), weight_copies=1)
    held = [sum(s.memory_bytes for s in free.summaries if s.rank == rank) for rank in range(4)]
    limit = 0.9 * max(held)
    found = partition(graph, 8, placement=placement.loop(4, 2), weight_copies=1, memory_limit_bytes=limit)
    held = [sum(s.memory_bytes for s in found.summaries if s.rank == rank) for rank in range(4)]
    assert max(held) <= limit
    assert found.bottleneck_s >= free.bottleneck_s
    with pytest.raises(PartitionError, match="no partition was found of 52 layers into 8 stages within memory_limit"):
        partition(graph, 8, placement=placement.loop(4, 2), memory_limit_bytes=1000)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"placement": [0, 1]}, r"a rank for each stage, and every rank must have a stage; got \[0, 1\] for 4 stages"),
        ({"placement": [0, 2, 2, 0]}, r"got \[0, 2, 2, 0\] for 4 stages"),
        (
            {"placement": [0, 1, 1, 0], "starts": {"first": 0}},
            r"'first' is mapped to stage 0 but depends on 1 layer; choose",
        ),
        (
            {"placement": [0, 1, 1, 0], "speeds": [1, 1, 1]},
            r"one number for each rank; got a list of 3 numbers for 2 ranks",
        ),
        ({"placement": [0, 1, 1, 0], "together": [["first", "second"]]}, r"4 stages, but .* form only 3 blocks"),
        ({"placement": [0, 1, 1, 0, 0]}, r"there are 5 stages and 4 layers"),
    ],
)
def test_placements_that_make_no_sense(asked, match):
    with pytest.raises(PartitionError, match=match):
        partition(small_chain(), 5 if len(asked["placement"]) == 5 else 4, **asked)
