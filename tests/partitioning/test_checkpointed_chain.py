"""Cuts and what is done with each layer's activations, chosen together: no other cut with other choices is faster."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, product

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import partition
from pipesched.errors import PartitionError
from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.bisection import INFINITE
from pipesched.partitioning.knapsack import Knapsack
from tests.support.brute_force_partition import as_good
from tests.support.random_programs import quick

ON_DEVICE = 3  # of a layer's offloaded micro-batches


@st.composite
def chains(draw):
    """A few layers, of which some are alike."""
    sizes = st.integers(0, 4)
    kinds = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "forward_s": st.integers(0, 4),
                    "backward_s": st.integers(0, 4),
                    "parameter_bytes": sizes,
                    "activation_bytes": st.integers(0, 9),
                    "input_bytes": sizes,
                    "output_bytes": st.integers(0, 6),
                    "forward_transient_bytes": sizes,
                    "backward_transient_bytes": sizes,
                }
            ),
            min_size=1,
            max_size=3,
        )
    )
    graph = nx.DiGraph()
    for at, kind in enumerate(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))):
        graph.add_node(f"layer{at}", **kind)
    nx.add_path(graph, list(graph))
    return graph


@st.composite
def wishes(draw, num_layers):
    num_stages = draw(st.integers(1, min(4, num_layers)))
    limit = st.integers(5, 40)
    return num_stages, {
        "memory_limit_bytes": draw(limit | st.lists(limit, min_size=num_stages, max_size=num_stages)),
        "in_flight": draw(st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages)),
        "weight_copies": draw(st.sampled_from([1, 3])),
        "speeds": draw(st.none() | st.lists(st.sampled_from([1, 2, 0.5]), min_size=num_stages, max_size=num_stages)),
        "communication": draw(st.sampled_from(["none", "overlap"])),
        "exactly": draw(st.booleans()),
        "checkpoint": draw(st.sampled_from([("recompute",), ("offload",), ("recompute", "offload")])),
        "offload_bytes_per_s": draw(st.sampled_from([1, 2, 5])),
    }


def cost(graph, keep, layer, asked, in_flight):
    """(Seconds, seconds of copies, bytes held, bytes while it runs) of one layer."""
    node = graph.nodes[layer]
    fixed, held = asked["weight_copies"] * node["parameter_bytes"], node["activation_bytes"]
    time = node["forward_s"] + node["backward_s"]
    working = max(node["forward_transient_bytes"], node["backward_transient_bytes"])
    if keep == "recompute":
        given = min(node["input_bytes"], held)
        return time + node["forward_s"], 0, fixed + given * in_flight, working + held
    if keep == "offload":
        return time, held / asked["offload_bytes_per_s"], fixed + held * min(in_flight, ON_DEVICE), working
    return time, 0, fixed + held * in_flight, working


def stage_cost(graph, keeps, layers, asked, stage, num_stages):
    """Seconds of a stage with its choices, None where they do not fit."""
    costs = [
        cost(graph, keep, layer, asked, asked["in_flight"][stage]) for keep, layer in zip(keeps, layers, strict=True)
    ]
    times, copies, held, working = (list(column) for column in zip(*costs, strict=True))
    limits = asked["memory_limit_bytes"]
    limit = limits[stage] if isinstance(limits, list) else limits
    speed = (asked["speeds"] or [1] * num_stages)[stage]
    forward = sum(graph.nodes[layer]["forward_s"] for layer in layers) / speed
    time = max(forward, sum(copies)) + max(sum(times) / speed - forward, sum(copies))
    return time if sum(held) + max(working) <= limit else None


def best(graph, num_stages, asked):
    """The least bottleneck of all cuts and all choices; None where none fits."""
    layers, found = list(graph), []

    def least(stage, begin, end):
        if begin == end:
            return 0 if not asked["exactly"] else None
        own = layers[begin:end]
        all_keeps = product((None, *asked["checkpoint"]), repeat=len(own))
        times = [stage_cost(graph, keeps, own, asked, stage, num_stages) for keeps in all_keeps]
        return min((time for time in times if time is not None), default=None)

    for inner in combinations_with_replacement(range(len(layers) + 1), num_stages - 1):
        cuts = [0, *inner, len(layers)]
        times = [least(stage, *cut) for stage, cut in enumerate(pairwise(cuts))]
        if asked["communication"] == "overlap":  # a byte a second, both ways
            times += [2 * graph.nodes[layers[cut - 1]]["output_bytes"] for cut in inner if 0 < cut < len(layers)]
        if None not in times:
            found.append(max(times))
    return min(found, default=None)


@settings(quick, max_examples=60)
@given(st.data())
def test_no_cut_with_any_choices_is_faster(data):
    graph = data.draw(chains())
    num_stages, asked = data.draw(wishes(len(graph)))
    expected = best(graph, num_stages, asked)
    if (found := as_good(expected, graph, num_stages, **asked)) is None:
        return
    times = []
    for layers, rank, summary in zip(found.stages, found.ranks, found.summaries, strict=True):
        keeps = [found.checkpoint.get(layer) for layer in layers]
        times.append(stage_cost(graph, keeps, layers, asked, rank, num_stages))
        assert summary.time_s == pytest.approx(times[-1], abs=1e-9)
        assert (summary.num_recomputed, summary.num_offloaded) == (keeps.count("recompute"), keeps.count("offload"))
    assert max(times) <= expected + 1e-9
    assert [layer for layers in found.stages for layer in layers] == list(graph)


CHOICES = st.builds(
    ActivationOption,
    keep=st.sampled_from([None, "recompute", "offload"]),
    ticks=st.integers(0, 6),
    fixed_bytes=st.integers(0, 3),
    flight_bytes=st.integers(0, 5),
    working_bytes=st.integers(0, 5),
    copy_ticks=st.integers(0, 3) | st.just(0),
    most_in_flight=st.sampled_from([None, None, 1]),
)


@settings(quick, max_examples=80)
@given(st.data())
def test_no_choices_of_a_ranks_layers_are_faster(data):
    drawn = st.tuples(st.lists(CHOICES, min_size=1, max_size=3), st.integers(0, 3))
    kinds = [
        [replace(option, ticks=option.ticks + forward, forward_ticks=forward) for option in options]
        for options, forward in data.draw(st.lists(drawn, min_size=1, max_size=3))
    ]
    layers = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    held = data.draw(st.lists(st.integers(0, 3), min_size=len(layers), max_size=len(layers)))
    limit, speed = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([Fraction(1), Fraction(3, 2)]))

    def time(chosen):
        forward, ticks = (-(-sum(getattr(c, name) for c in chosen) // speed) for name in ("forward_ticks", "ticks"))
        copies = sum(c.copy_ticks for c in chosen)
        return max(forward, copies) + max(ticks - forward, copies)

    fitting = [
        time(chosen)
        for chosen in product(*layers)
        if sum(c.held_bytes(count) for c, count in zip(chosen, held, strict=True))
        + max(c.working_bytes for c in chosen)
        <= limit
    ]
    knapsack = Knapsack(layers)
    items = [knapsack.item(layer, count) for layer, count in enumerate(held)]
    least = knapsack.least(items, limit, speed)
    assert least == min(fitting, default=INFINITE)
    if fitting:
        chosen = knapsack.chosen(items, limit, speed)
        assert all(one in of_layer for one, of_layer in zip(chosen, layers, strict=True))
        assert time(chosen) == least
        memory = sum(c.held_bytes(count) for c, count in zip(chosen, held, strict=True))
        assert memory + max(c.working_bytes for c in chosen) <= limit


COSTS = {"forward_s": 1, "backward_s": 2, "parameter_bytes": 0, "input_bytes": 1}


def blocks(count, **costs):
    """Layers all alike."""
    graph = nx.DiGraph()
    for at in range(count):
        graph.add_node(
            f"block{at}", **{"forward_s": 1, "backward_s": 2, "parameter_bytes": 0, "input_bytes": 1} | costs
        )
    nx.add_path(graph, list(graph))
    return graph


SHAPE = {"in_flight": lambda stage, num_stages: num_stages - stage, "exactly": True}


def test_early_stages_recompute_more_and_hold_fewer_layers():
    found = partition(blocks(24, activation_bytes=10), 4, memory_limit_bytes=150, checkpoint=("recompute",), **SHAPE)
    assert [len(layers) for layers in found.stages] == [5, 5, 7, 7]
    assert [summary.num_recomputed for summary in found.summaries] == [2, 0, 0, 0]
    assert found.bottleneck_s == 21
    assert all(summary.memory_bytes <= 150 for summary in found.summaries)
    assert "5 (2 recomputed)" in str(found)


def test_copies_that_end_in_time_cost_nothing():
    asked = {"memory_limit_bytes": 220, "checkpoint": ("recompute", "offload"), **SHAPE}
    free = partition(blocks(24, activation_bytes=10), 4, offload_bytes_per_s=10, **asked)
    assert set(free.checkpoint.values()) == {"offload"}
    assert free.bottleneck_s == 18
    slow = partition(blocks(24, activation_bytes=10), 4, offload_bytes_per_s=0.5, **asked)
    assert set(slow.checkpoint.values()) == {"recompute"}


def test_only_one_recomputed_layer_at_a_time_holds_its_activations():
    graph = blocks(4, activation_bytes=10)
    again = partition(graph, 1, memory_limit_bytes=50, in_flight=[10], checkpoint=("recompute",))
    assert again.summaries[0].memory_bytes == 4 * 10 + 10
    assert again.summaries[0].num_recomputed == 4


def test_the_error_names_the_option_or_the_limit_that_makes_it_possible():
    graph = blocks(4, activation_bytes=10)
    with pytest.raises(PartitionError, match=r"activations to be recomputed \(checkpoint=\('recompute',\)\)"):
        partition(graph, 1, memory_limit_bytes=60, in_flight=[10])
    with pytest.raises(PartitionError, match=r"is 49 bytes per rank, but 2\.0% more would be enough; allow 50 bytes"):
        partition(graph, 1, memory_limit_bytes=49, in_flight=[10], checkpoint=("recompute",))
    with pytest.raises(PartitionError, match="layer 'block0' alone takes 20 bytes"):
        partition(graph, 4, memory_limit_bytes=19, in_flight=[10] * 4, checkpoint=("recompute",))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"checkpoint": "recompute"}, "pass a tuple"),
        ({"checkpoint": ("forget",)}, "a collection with no options other than 'recompute' and 'offload'"),
        ({"checkpoint": ("offload",)}, "offload_bytes_per_s is missing"),
        (
            {"checkpoint": ("recompute",), "any_order": True},
            "any_order=True was also passed; drop either checkpoint= or any_order=True",
        ),
        (
            {"checkpoint": ("recompute",), "communication": "serial", "bandwidth_bytes_per_s": 1},
            "use communication='overlap' or 'none'",
        ),
    ],
)
def test_options_that_cannot_be_combined_with_checkpointing_are_refused(wrong, says):
    with pytest.raises(PartitionError, match=says):
        partition(blocks(4, activation_bytes=10), 2, memory_limit_bytes=100, **wrong)


@settings(quick, max_examples=60)
@given(st.data())
def test_stages_of_one_rank_share_its_memory(data):
    """The busiest rank: not below the best of all cuts and choices, never above the best where all is held."""
    graph = data.draw(chains())
    num_stages = min(4, 2 * (len(graph) // 2))
    if not num_stages:
        return
    ranks = [stage % (num_stages // 2) for stage in range(num_stages)]
    asked = {
        "in_flight": data.draw(st.lists(st.integers(1, 4), min_size=num_stages, max_size=num_stages)),
        "memory_limit_bytes": data.draw(st.integers(10, 60)),
        "weight_copies": 1,
    }
    may = {"checkpoint": ("recompute",), "offload_bytes_per_s": 1}

    def busiest(cuts, keep):
        """Seconds of the busiest rank; None where one is too small."""
        times, held, working = ([0] * num_stages for _ in range(3))
        for stage, (begin, end) in enumerate(pairwise(cuts)):
            for layer in list(graph)[begin:end]:
                own = cost(graph, keep.get(layer), layer, asked, asked["in_flight"][stage])
                rank = ranks[stage]
                times[rank] += own[0]
                held[rank] += own[2]
                working[rank] = max(working[rank], own[3])
        fits = all(a + b <= asked["memory_limit_bytes"] for a, b in zip(held, working, strict=True))
        return max(times) if fits else None

    inner = combinations(range(1, len(graph)), num_stages - 1)
    keeps = [dict(zip(graph, chosen, strict=True)) for chosen in product((None, "recompute"), repeat=len(graph))]
    values = [busiest([0, *cuts, len(graph)], keep) for cuts in inner for keep in keeps]
    best_of_all = min((value for value in values if value is not None), default=None)
    try:
        found = partition(graph, num_stages, placement=ranks, **asked, **may)
    except PartitionError:
        return  # there may be one: it is a descent
    cuts = [0]
    for layers in found.stages:
        cuts.append(cuts[-1] + len(layers))
    assert busiest(cuts, found.checkpoint) == pytest.approx(found.bottleneck_s, abs=1e-9)
    assert found.bottleneck_s >= best_of_all - 1e-9


def test_stages_of_one_rank_give_up_what_is_needed():
    graph, asked = blocks(16, activation_bytes=10), {"placement": [0, 1, 0, 1], "in_flight": [5, 4, 3, 2]}
    with pytest.raises(PartitionError, match=r"or allow activations to be recomputed"):
        partition(graph, 4, **asked, memory_limit_bytes=180)
    found = partition(graph, 4, **asked, memory_limit_bytes=180, checkpoint=("recompute",))
    assert found.bottleneck_s <= 27
    assert len(found.checkpoint) <= 3
