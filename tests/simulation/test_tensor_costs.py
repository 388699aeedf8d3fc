"""Tests of the costs of layers that the ranks of a tensor group split."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesched
from pipesched import Costs, Link, Links, Profile
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.program.completion import Completion
from pipesched.simulation.communication import communication
from pipesched.simulation.layer_costs import costs_of
from pipesched.simulation.layer_split import with_split_layer
from pipesched.simulation.simulator import step_time
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_costs import TensorCosts, without_collectives
from pipesched.simulation.tensor_split import TensorShares, TensorTraffic
from tests.support.random_programs import quick

SIZES = st.sampled_from([1, 2, 4, 8])
#: A block: 90 % of its time is in products and attention. It sums two tensors of 1 MB each way.
BLOCK = {
    "forward_ms": 10,
    "backward_ms": 20,
    "weight_grad_ms": 8,
    "parameter_bytes": 800,
    "output_bytes": 10**6,
    "activation_bytes": 8000,
    "split_forward": 0.9,
    "split_backward": 0.95,
    "split_weight_grad": 1,
    "split_parameters": 1,
    "split_activations": 0.75,
    "all_reduce_forward_bytes": 2 * 10**6,
    "all_reduces_forward": 2,
}
LINK = Link(latency_s=10e-6, bytes_per_s=1e9)
LINKS = Links(inside=LINK)


def table(*rows, **cells):
    return Profile.from_table([{"name": f"block{at}"} | BLOCK | cells | row for at, row in enumerate(rows)], rows=4)


def divided(profile, size, links=None, **options):
    return TensorCosts(TensorAxis(size=size, **options), size, links).divided(profile).graph(4)


def layer(size, links=None, *, cells=None, **options):
    return divided(table({}, **(cells or {})), size, links, **options).nodes["block0"]


# ---- without communication ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_takes_its_part_of_what_is_split_and_the_whole_rest(size):
    """Of 10 ms, 9 ms are divided. Of the 20 ms of a backward, 19 ms are: all 8 ms of W, and 11 of the 12 ms of I."""
    own = layer(size)
    assert own["forward_s"] == pytest.approx((9 / size + 1) * 1e-3)
    assert own["backward_s"] == pytest.approx((19 / size + 1) * 1e-3)
    assert own["input_grad_s"] == pytest.approx((11 / size + 1) * 1e-3)
    assert own["weight_grad_s"] == pytest.approx(8 / size * 1e-3)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_weights_gradients_and_states_are_divided_like_the_parameters(size):
    """800 bytes are 200 parameters, with 8 bytes of Adam's states each."""
    own = layer(size)
    assert own["parameter_bytes"] == own["gradient_bytes"] == 800 // size
    assert own["num_parameters"] == 200 // size
    assert own["optimizer_bytes"] == 1600 // size
    assert own["activation_bytes"] == 6000 // size + 2000


@quick
@given(SIZES, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_instant_links_divide_exactly_the_split_share(size, forward, backward, weight_grad):
    shares = {"split_forward": forward, "split_backward": backward, "split_weight_grad": weight_grad}
    own = layer(size, Links(inside=Link(0, None)), cells=shares)
    if size > 1:
        assert own["forward_s"] == 10e-3 * (forward / size + (1 - forward))
        assert own["backward_s"] == 20e-3 * (backward / size + (1 - backward))
        assert own["weight_grad_s"] == 8e-3 * (weight_grad / size + (1 - weight_grad))
    assert 12e-3 / size <= own["input_grad_s"] * (1 + 1e-12)
    assert own["input_grad_s"] <= 12e-3 * (1 + 1e-12)


@quick
@given(SIZES, st.integers(1, 10**9), st.booleans())
def test_the_parts_of_all_ranks_are_at_least_the_whole(size, parameter_bytes, sequence):
    """Rounding loses at most half a byte for each rank."""
    own = layer(size, cells={"parameter_bytes": parameter_bytes}, sequence_parallel=sequence)
    for name in ("parameter_bytes", "gradient_bytes", "activation_bytes"):
        whole = parameter_bytes if name != "activation_bytes" else 8000
        assert size * own[name] >= whole - size / 2
    assert own["kept_input_bytes"] <= own["activation_bytes"]


def test_one_rank_has_the_profile_itself():
    profile = table({}, {})
    for links in (None, LINKS):
        assert TensorCosts(TensorAxis(size=1), 4, links).divided(profile) is profile


def test_layers_without_shares_stay_whole():
    plain = {"split_forward": 0, "split_backward": 0, "split_weight_grad": 0, "split_parameters": 0}
    plain |= {"split_activations": 0, "all_reduce_forward_bytes": 0, "all_reduces_forward": 0}
    profile = table({}, plain)
    for sequence in (False, True):
        graph = divided(profile, 4, LINKS, sequence_parallel=sequence)
        assert costs_of(graph, "block1").figures() == pytest.approx(
            {
                name: 0 if name in plain else value
                for name, value in costs_of(profile.graph(4), "block1").figures().items()
            }
        )


def test_sequence_parallelism_divides_the_rest_and_the_tensors_between_layers():
    graph = divided(table({}, {}), 4, sequence_parallel=True)
    own = graph.nodes["block0"]
    assert own["forward_s"] == pytest.approx(10e-3 / 4)
    assert own["backward_s"] == pytest.approx(20e-3 / 4)
    assert own["activation_bytes"] == 2000
    assert own["output_bytes"] == graph.edges["block0", "block1"]["bytes"] == 250_000
    whole = divided(table({}, {}), 4)
    assert whole.nodes["block0"]["output_bytes"] == whole.edges["block0", "block1"]["bytes"] == 10**6


def test_norm_weights_stay_whole_on_each_rank_with_sequence_parallelism():
    for sequence in (False, True):
        own = layer(4, cells={"split_parameters": 0.5}, sequence_parallel=sequence)
        assert own["parameter_bytes"] == 400 // 4 + 400


def test_a_tied_weight_is_divided_once_and_counted_once():
    profile = table({}, {}, {"tied_to": "block0"})
    graph = divided(profile, 2)
    assert [node["parameter_bytes"] for node in graph.nodes.values()] == [400, 400, 400]
    costs = TensorCosts(TensorAxis(size=2), 2).divided(profile).costs([["block0", "block1", "block2"]], 4)
    assert costs.weight_bytes == (800,)


# ---- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8])
def test_an_all_reduce_takes_a_round_for_each_rank(size):
    """Two all-reduces of 1 MB in F and in I: a direct exchange and T-1 rounds, in which a rank sends 2(T-1)/T MB."""
    own, free = layer(size, LINKS), layer(size)
    each_s = size * 10e-6 + 2 * (size - 1) * 1e6 / size / 1e9
    assert own["forward_s"] - free["forward_s"] == pytest.approx(2 * each_s)
    assert own["input_grad_s"] - free["input_grad_s"] == pytest.approx(2 * each_s)
    assert own["backward_s"] - free["backward_s"] == pytest.approx(2 * each_s)
    assert own["weight_grad_s"] == free["weight_grad_s"]
    assert own["tensor_forward_bytes"] == own["tensor_input_grad_bytes"] == 2 * 2 * 10**6 * (size - 1) // size
    assert own["tensor_weight_grad_bytes"] == 0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_sequence_is_gathered_and_scattered_and_gathered_again_for_weight_gradients(size):
    own, free = layer(size, LINKS, sequence_parallel=True), layer(size, sequence_parallel=True)
    sent_s = (size - 1) * 1e6 / size / 1e9
    gather_s, both_s = (size - 1) * 10e-6 + sent_s, size * 10e-6 + 2 * sent_s
    assert own["forward_s"] - free["forward_s"] == pytest.approx(2 * both_s)
    assert own["input_grad_s"] - free["input_grad_s"] == pytest.approx(2 * both_s)
    assert own["weight_grad_s"] - free["weight_grad_s"] == pytest.approx(2 * gather_s)
    assert own["backward_s"] - free["backward_s"] == pytest.approx(2 * (both_s + gather_s))
    assert own["tensor_weight_grad_bytes"] == 2 * 10**6 * (size - 1) // size


@pytest.mark.parametrize(("size", "rounds"), [(2, 1), (3, 2), (4, 2), (8, 3)])
def test_a_tree_has_log2_rounds_and_sends_as_many_bytes(size, rounds):
    links = replace(LINKS, algorithm="tree")
    ranks = range(size)
    assert links.all_gather_s(0, ranks) == pytest.approx(rounds * 10e-6)
    assert links.all_reduce_s(0, ranks) == pytest.approx(2 * rounds * 10e-6)
    bytes_s = links.all_reduce_s(10**6, ranks) - links.all_reduce_s(0, ranks)
    assert bytes_s == pytest.approx(2 * (size - 1) / size * 1e-3)
    own, free = layer(size, links), layer(size)
    assert own["forward_s"] - free["forward_s"] == pytest.approx(2 * ((1 + rounds) * 10e-6 + bytes_s))


def test_links_keep_their_algorithm_in_files_and_older_files_have_rings():
    tree = replace(LINKS, algorithm="tree")
    assert Links.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
    assert "algorithm" not in LINKS.to_dict()
    assert tree.among([0, 1]).algorithm == tree.faster(2).algorithm == "tree"
    with pytest.raises(ScheduleError, match="algorithm of collectives must be 'ring' or 'tree'; got 'star'"):
        Links(algorithm="star")


def test_measured_collectives_count_instead_of_links():
    slow = Link(latency_s=1.0)
    measured = pipesched.simulation.links.Collectives((0, 1), slow, slow, slow)
    own = layer(2, replace(LINKS, collectives=(measured,)))
    assert own["forward_s"] - layer(2)["forward_s"] == pytest.approx(2)


def test_the_slowest_group_determines_the_time():
    """Ranks 2 and 3 are on different hosts."""
    links = Links(inside=LINK, between=Link(10e-6, 1e8), hosts=(0, 0, 0, 1))
    own = TensorCosts(TensorAxis(size=2), 4, links)
    assert own.traffic(TensorShares(all_reduce_forward_bytes=10**6)).forward_s == pytest.approx(2 * (10e-6 + 5e-3))


def test_stages_send_over_the_links_of_a_plane():
    """Four groups of two ranks, two groups in a host: neighbours are inside, then between hosts."""
    links = Links.of_hosts(4, 8, inside=LINK, between=Link(1e-3))
    plane = TensorCosts(TensorAxis(size=2), 8, links).links_of_planes()
    assert plane.hosts == (0, 0, 1, 1)
    assert (plane.link(0, 1), plane.link(1, 2)) == (LINK, Link(1e-3))


def test_the_slowest_plane_determines_the_links():
    """Hosts of three ranks: rank 0 and 2 are on one host, ranks 1 and 3 are not."""
    links = Links.of_hosts(3, 6, inside=LINK, between=Link(1e-3, 1e6))
    plane = TensorCosts(TensorAxis(size=2), 6, links).links_of_planes()
    assert plane.link(0, 1) == Link(1e-3, 1e6)
    assert plane.link(1, 2) == Link(1e-3, 1e6)


def test_a_recomputed_layer_repeats_its_collectives():
    profile = TensorCosts(TensorAxis(size=2), 2, LINKS).divided(table({}))
    costs = profile.costs([["block0"]], 4, keep={"block0": "recompute"})
    plain = profile.costs([["block0"]], 4)
    assert costs.backward_s[0] == pytest.approx(plain.backward_s[0] + plain.forward_s[0])
    traffic, again = plain.tensor[0], costs.tensor[0]
    assert again.input_grad_s == pytest.approx(traffic.input_grad_s + traffic.forward_s)
    assert again.backward_bytes == traffic.backward_bytes + traffic.forward_bytes


# ---- stages and steps -----------------------------------------------------------------------------------------------


def stages(size, links=LINKS, **options):
    profile = TensorCosts(TensorAxis(size=size, **options), size, links).divided(table({}, {}, {}, {}))
    return profile.costs([["block0", "block1"], ["block2", "block3"]], 4)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_communication_of_split_layers_is_that_of_all_actions(name):
    """Each of 4 micro-batches sums 2 MB forward and backward in each of 2 layers. A ring of 2 sends as many bytes."""
    program = pipesched.schedules.get(name).program(2, 4)
    costs = stages(2)
    (axis,) = [own for own in communication(program, costs, None, TensorAxis(size=2)) if own.axis == "tensor"]
    assert axis.size == 2
    assert axis.sent_bytes == 4 * 2 * (2 * 10**6 + 2 * 10**6)
    assert axis.seconds == pytest.approx(4 * 2 * (costs.tensor[0].forward_s / 2 + costs.tensor[0].backward_s / 2))
    assert axis.exposed_s == pytest.approx(step_time(program, costs) - step_time(program, stages(2, None)))
    assert axis.exposed_s > 0


def test_recomputed_stages_communicate_once_more():
    program = pipesched.schedules.get("1f1b").program(2, 4)
    again = Completion().treating("always", [["a"], ["b"]]).complete(program)
    sent = [communication(run, stages(2), None, TensorAxis(size=2))[-1].sent_bytes for run in (program, again)]
    assert sent[1] == sent[0] * 3 // 2


def test_costs_with_collectives_survive_json_and_scale():
    costs = stages(4, sequence_parallel=True)
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert costs.scaled(3).tensor[0].forward_s == pytest.approx(3 * costs.tensor[0].forward_s)
    assert without_collectives(costs).forward_s == pytest.approx(stages(4, None, sequence_parallel=True).forward_s)
    assert "tensor" not in Costs.uniform(2).to_dict()
    assert without_collectives(Costs.uniform(2)) == Costs.uniform(2)


def test_a_part_of_a_split_layer_has_half_of_its_collectives():
    halves = with_split_layer(table({}), "block0")
    first, second = (
        TensorShares(**{k: v for k, v in node.items() if k in vars(TensorShares())})
        for node in halves.graph(4).nodes.values()
    )
    assert first == second
    assert (first.all_reduces_forward, first.all_reduce_forward_bytes, first.split_forward) == (1, 10**6, 0.9)


# ---- tables and profiles --------------------------------------------------------------------------------------------


def test_the_backward_of_a_row_is_like_its_forward():
    cells = {"split_forward": 0.5, "all_reduce_forward_bytes": 100}
    row = (
        {"name": "a"} | {name: value for name, value in BLOCK.items() if not name.startswith(("split", "all"))} | cells
    )
    costs = costs_of(Profile.from_table([row], rows=4).graph(4), "a")
    assert costs.split == TensorShares(
        split_forward=0.5,
        split_backward=0.5,
        split_weight_grad=0.5,
        split_parameters=0.5,
        all_reduce_forward_bytes=100,
        all_reduce_backward_bytes=100,
        all_reduces_forward=1,
        all_reduces_backward=1,
    )


def test_tables_without_these_columns_make_the_layers_of_before():
    row = {name: value for name, value in BLOCK.items() if not name.startswith(("split", "all"))}
    node = Profile.from_table([{"name": "a"} | row], rows=4).graph(4).nodes["a"]
    assert not [name for name in node if name.startswith(("split", "all_reduce", "tensor"))]


def test_shares_survive_files(tmp_path):
    profile = table({}, {"split_forward": 0.25}, rows=4)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").graphs[4].nodes == profile.graphs[4].nodes
    rows = profile.to_table(tmp_path / "table.csv")
    assert Profile.from_table(tmp_path / "table.csv").to_table() == rows
    assert Profile.from_table(rows).graph(4).nodes == profile.graph(4).nodes


def test_a_split_profile_survives_files(tmp_path):
    profile = TensorCosts(TensorAxis(size=2), 2, LINKS).divided(table({}, {}))
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again.costs([["block0"], ["block1"]], 4) == profile.costs([["block0"], ["block1"]], 4)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"split_forward": 1.5}, "split_forward 1.5, which is not a share, a number from 0 to 1"),
        ({"split_activations": -1}, "not a share, a number from 0 to 1"),
        ({"all_reduces_forward": 1.5}, "not a whole number of at least 0"),
        ({"split_fordward": 1}, "did you mean split_forward"),
    ],
)
def test_wrong_cells_are_refused(cells, words):
    with pytest.raises(ScheduleError, match=words):
        table(cells)


def test_wrong_values_are_refused():
    with pytest.raises(ScheduleError, match="size of a tensor group must be a whole number, at least 1; got 0"):
        TensorAxis(size=0)
    with pytest.raises(PipeschedError, match="sequence_parallel must be True or False; got 1"):
        TensorAxis(size=2, sequence_parallel=1)
    with pytest.raises(ScheduleError, match="tensor= must have a TensorTraffic for each stage"):
        replace(Costs.uniform(2), tensor=(TensorTraffic(),))
    with pytest.raises(ScheduleError, match="whole number of bytes"):
        TensorTraffic(forward_bytes=-1)
    graph = table({}).graph(4)
    graph.nodes["block0"]["split_forward"] = 2
    with pytest.raises(ScheduleError, match="split_forward of layer 'block0' for 4 rows is 2"):
        Profile({4: graph})


def test_fractions_stay_exact():
    """The shares of a step on two ranks are those of the formula, without rounding."""
    shares = TensorShares(split_backward=1, split_weight_grad=Fraction(1, 2))
    assert shares.split_input_grad(Fraction(4), Fraction(2)) == 1
    assert TensorShares(split_backward=Fraction(1, 2), split_weight_grad=0).split_input_grad(4, 2) == 1
