"""Tests of the costs of layers that a tensor group divides in two, two and a half and three dimensions."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Link, Links, Profile
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.simulation.layer_costs import costs_of
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_costs import TensorCosts, without_products
from pipesched.simulation.tensor_layout import TensorLayout
from pipesched.simulation.tensor_split import TensorShares
from tests.support.random_programs import quick

WIDE = 2  # bytes of an element
#: The pair 100 -> 400 -> 100 for 640 rows, and norms with 200 weights.
PAIR = {
    "forward_ms": 10,
    "backward_ms": 20,
    "weight_grad_ms": 8,
    "parameter_bytes": 160_400,
    "output_bytes": 128_000,
    "activation_bytes": 1_280_000,
    "split_forward": 0.9,
    "split_weight_grad": 1,
    "split_parameters": 160_000 / 160_400,
    "split_activations": 0.75,
    "all_reduce_forward_bytes": 128_000,
    "first_input_bytes": 128_000,
    "first_output_bytes": 512_000,
    "second_input_bytes": 512_000,
    "second_output_bytes": 128_000,
}
SIZES = [name for name in PAIR if name.startswith(("first", "second"))]
LAYOUTS = [
    TensorLayout(kind="2d", shape=(4, 4)),
    TensorLayout(kind="2.5d", shape=(2, 4, 4)),
    TensorLayout(kind="2.5d", shape=(4, 4, 4)),
    TensorLayout(kind="3d", shape=(4, 4, 4)),
]
of_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def table(**cells):
    return Profile.from_table([{"name": "pair"} | PAIR | cells], rows=64)


def divided(layout, links=None, num_ranks=None, **cells):
    axis = TensorAxis(size=layout.size, layout=layout)
    return TensorCosts(axis, num_ranks or layout.size, links).divided(table(**cells)).graph(64).nodes["pair"]


def traffic(layout, shares, links=None):
    return TensorCosts(TensorAxis(size=layout.size, layout=layout), layout.size, links).traffic(shares)


# ---- what a rank has ------------------------------------------------------------------------------------------------


@of_layout
def test_all_ranks_divide_times_activations_and_outputs(layout):
    """Also norms and residual sums, of which each rank in one dimension does all."""
    own = divided(layout)
    for name in ("forward_s", "backward_s", "input_grad_s", "weight_grad_s"):
        assert own[name] == pytest.approx(table().graph(64).nodes["pair"][name] / layout.size)
    assert own["activation_bytes"] == 1_280_000 // layout.size
    assert own["output_bytes"] == 128_000 // layout.size


@of_layout
def test_the_ranks_of_a_plane_divide_the_weights_and_columns_divide_those_of_norms(layout):
    """160,000 bytes of matrices, 400 of norms. In 2.5d, planes have copies of the matrices."""
    matrices = 16 if layout.kind == "2.5d" else layout.size
    own = divided(layout)
    assert own["parameter_bytes"] == own["gradient_bytes"] == 160_000 // matrices + 400 // 4
    assert own["optimizer_bytes"] == 2 * own["parameter_bytes"]


def test_stages_send_each_other_a_part_of_the_output():
    profile = Profile.from_table([{"name": name} | PAIR for name in ("one", "two")], rows=64)
    for layout in LAYOUTS:
        graph = TensorCosts(TensorAxis(size=layout.size, layout=layout), layout.size).divided(profile).graph(64)
        assert graph.edges["one", "two"]["bytes"] == 128_000 // layout.size


def test_a_rank_holds_the_blocks_that_it_gathers():
    """In 3d, four blocks of input, output and weights; in 2d, its own and one that is broadcast."""
    assert divided(LAYOUTS[3])["forward_transient_bytes"] == 4 * (128_000 + 160_000) // 64
    assert divided(LAYOUTS[0])["forward_transient_bytes"] == 2 * (128_000 + 160_000) // 16
    own = divided(LAYOUTS[3])
    assert own["first_backward_transient_bytes"] == own["forward_transient_bytes"] + own["gradient_bytes"]


def test_layers_without_shares_stay_whole():
    plain = {name: 0 for name in PAIR if name.startswith(("split", "all_", "first", "second"))}
    assert set(plain) > set(SIZES)
    profile = table(**plain)
    graph = TensorCosts(TensorAxis(size=64, layout=LAYOUTS[3]), 64, Links(Link(1, 1))).divided(profile).graph(64)
    assert costs_of(graph, "pair").figures() == costs_of(profile.graph(64), "pair").figures()


def test_sizes_of_products_change_nothing_in_one_dimension():
    plain = dict.fromkeys(SIZES, 0)
    axis, links = TensorAxis(size=4), Links(inside=Link(1e-5, 1e9))
    with_sizes, without = (
        TensorCosts(axis, 4, links).divided(table(**cells)).graph(64).nodes["pair"] for cells in ({}, plain)
    )
    assert with_sizes == without


# ---- what the ranks exchange ----------------------------------------------------------------------------------------


def received(layout, rows, inputs, outputs):
    """The elements that a rank receives for a product in F, I and W, by the formulas of the papers."""
    x, weight, y = rows * inputs, inputs * outputs, rows * outputs
    if layout.kind == "3d":
        length = layout.shape[0]
        return [(length - 1) * (x + weight + y) / length**3] * 3
    depth, side = (1, layout.shape[0]) if layout.kind == "2d" else layout.shape[:2]
    panels = (side - 1) * (x / depth + weight) / side**2
    return [panels, panels, panels + 2 * (depth - 1) / depth * weight / side**2]


@settings(quick, max_examples=50)
@given(st.data())
def test_a_rank_sends_what_the_papers_count_for_each_product(data):
    layout = data.draw(st.sampled_from(LAYOUTS))
    rows = data.draw(st.integers(1, 1000))
    sizes = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), max_size=3)
    firsts, seconds = data.draw(sizes), data.draw(sizes)
    shares = TensorShares(
        first_input_bytes=WIDE * rows * sum(one for one, _ in firsts),
        first_output_bytes=WIDE * rows * sum(other for _, other in firsts),
        second_input_bytes=WIDE * rows * sum(one for one, _ in seconds),
        second_output_bytes=WIDE * rows * sum(other for _, other in seconds),
        product_weight_bytes=WIDE * sum(one * other for one, other in firsts + seconds),
        first_products=len(firsts),
        second_products=len(seconds),
    )
    found = traffic(layout, shares)
    due = [received(layout, rows, *both) for both in firsts + seconds]
    for action, own in enumerate((found.forward_bytes, found.input_grad_bytes, found.weight_grad_bytes)):
        assert own == pytest.approx(WIDE * sum(each[action] for each in due), abs=1)


@settings(quick, max_examples=30)
@given(st.data())
def test_the_mean_product_takes_as_long_as_the_products_one_by_one(data):
    layout = data.draw(st.sampled_from(LAYOUTS))
    links = Links.of_hosts(4, layout.size, inside=Link(1e-6, 1e11), between=Link(1e-5, 1e10))
    numbers = st.integers(0, 10**6)
    single = st.builds(
        lambda second, x, y, weight: TensorShares(
            **{f"{second}_input_bytes": x, f"{second}_output_bytes": y, f"{second}_products": 1},
            product_weight_bytes=weight,
        ),
        *(st.sampled_from(["first", "second"]), numbers, numbers, numbers),
    )
    many = data.draw(st.lists(single, min_size=1, max_size=4))
    names = [name for name in vars(many[0]) if name.startswith(("first", "second", "product"))]
    summed = TensorShares(**{name: sum(getattr(one, name) for one in many) for name in names})
    found, due = traffic(layout, summed, links), [traffic(layout, one, links) for one in many]
    for name in ("forward_s", "input_grad_s", "weight_grad_s"):
        assert getattr(found, name) == pytest.approx(sum(getattr(one, name) for one in due), rel=1e-9)


ONE = TensorShares(first_input_bytes=640, first_output_bytes=6400, product_weight_bytes=64000, first_products=1)


def ring(link, num_bytes, ranks=4):
    """All-gather of a tensor among four ranks."""
    return (ranks - 1) * (link.latency_s + num_bytes / ranks / link.bytes_per_s)


def direct(link, num_bytes, ranks=4):
    """Reduce-scatter of a tensor among four ranks, in one round."""
    return link.latency_s + (ranks - 1) * num_bytes / ranks / link.bytes_per_s


def test_the_last_axis_is_inside_a_host_and_the_others_are_not():
    """In 3d, F gathers X along rows and W along depth, and scatters Y along columns."""
    near, far = Link(1, 1000), Link(10, 100)
    links = Links.of_hosts(4, 64, inside=near, between=far)
    found = traffic(LAYOUTS[3], ONE, links)
    x, weight, y = (size * 4 / 64 for size in (640, 64000, 6400))
    assert found.forward_s == pytest.approx(ring(far, x) + ring(far, weight) + direct(near, y))
    assert found.input_grad_s == pytest.approx(ring(near, y) + ring(far, weight) + direct(far, x))
    assert found.weight_grad_s == pytest.approx(ring(far, x) + ring(near, y) + direct(far, weight))
    second = TensorShares(
        second_input_bytes=640, second_output_bytes=6400, product_weight_bytes=64000, second_products=1
    )
    assert traffic(LAYOUTS[3], second, links).forward_s == pytest.approx(
        ring(near, x) + ring(far, weight) + direct(far, y)
    )


def test_summa_broadcasts_panels_and_adds_them_on_one_rank():
    """q = 4 steps: X along columns (inside a host), W along rows. Sums of W over depth are all-reduces."""
    near, far = Link(1, 1000), Link(10, 100)
    flat, deep = LAYOUTS[0], LAYOUTS[2]
    found = traffic(flat, ONE, Links.of_hosts(4, 16, inside=near, between=far))
    x, weight = 640 / 16, 64000 / 16

    def broadcast(link, size):
        return 4 * (3 * link.latency_s + size / link.bytes_per_s)

    def summed(link, size):
        return 4 * (link.latency_s + 3 * size / link.bytes_per_s)

    assert found.forward_s == pytest.approx(broadcast(near, x) + broadcast(far, weight))
    assert found.input_grad_s == pytest.approx(broadcast(far, weight) + summed(near, x))
    assert found.weight_grad_s == pytest.approx(broadcast(near, x) + summed(far, weight))
    found = traffic(deep, ONE, Links.of_hosts(4, 64, inside=near, between=far))
    x = 640 / 64
    assert found.weight_grad_s == pytest.approx(
        broadcast(near, x) + summed(far, weight) + ring(far, weight) + direct(far, weight)
    )


def test_the_slowest_of_all_groups_determines_the_time():
    links = Links(inside=Link(1, 1000), special={(65, 66): Link(100, 1000)})
    own = divided(LAYOUTS[3], links, num_ranks=128)
    other = divided(LAYOUTS[3], Links(inside=Link(1, 1000)), num_ranks=128)
    assert own["forward_s"] - other["forward_s"] == pytest.approx(
        (3 + 1) * 99
    )  # X of one product is gathered, Y of the other scattered


@settings(quick, max_examples=30)
@given(st.sampled_from(LAYOUTS), st.integers(1, 100), st.integers(1, 100), st.integers(1, 3), st.integers(1, 3))
def test_a_rank_sends_what_norms_biases_and_embeddings_need(layout, rows, hidden, norms, biases):
    """R ranks divide the rows and C the hidden units. A norm gathers two numbers for each row, and sums two in I."""
    high, wide = layout.length(layout.outer.rows), layout.length(layout.outer.columns)
    size = 16 * rows * hidden
    found = traffic(layout, TensorShares(norms=norms, norm_row_bytes=4 * norms * rows))
    assert found.forward_bytes == pytest.approx(2 * (wide - 1) * 4 * norms * rows / high, abs=1)
    assert found.input_grad_bytes == pytest.approx(4 * (wide - 1) / wide * 4 * norms * rows / high, abs=1)
    found = traffic(layout, TensorShares(summed_weights=biases, summed_weight_bytes=biases * hidden))
    assert (found.forward_bytes, found.weight_grad_bytes) == (0, 0)
    assert found.input_grad_bytes == pytest.approx(2 * (high - 1) / high * biases * hidden / wide, abs=1)
    found = traffic(layout, TensorShares(embedding_output_bytes=size))
    assert found.forward_bytes == found.input_grad_bytes == pytest.approx((high - 1) / high * size / wide, abs=1)


def test_biases_are_summed_over_all_ranks_that_divide_the_rows():
    """In 3d, 16 ranks, in groups that leave their hosts; an all-reduce has 16 latencies."""
    near, far = Link(1, 1000), Link(10, 100)
    links = Links.of_hosts(4, 64, inside=near, between=far)
    found = traffic(LAYOUTS[3], TensorShares(summed_weights=2, summed_weight_bytes=12_800), links)
    assert found.input_grad_s == pytest.approx(2 * (16 * 10 + 2 * 15 * 6400 / 4 / 16 / 100))
    found = traffic(LAYOUTS[3], TensorShares(norms=1, norm_row_bytes=6400), links)
    assert found.forward_s == pytest.approx(ring(near, 2 * 6400 / 16 * 4))
    assert found.input_grad_s == pytest.approx(direct(near, 2 * 6400 / 16) + ring(near, 2 * 6400 / 16))


def test_all_ranks_divide_an_embedding_also_with_depth():
    cells = dict.fromkeys(SIZES, 0) | {"embedding_output_bytes": 128_000}
    for layout in LAYOUTS:
        assert divided(layout, **cells)["parameter_bytes"] == 160_000 // layout.size + 400 // 4


def test_larger_cubes_send_less():
    for shares in (ONE, TensorShares(second_input_bytes=10**6, product_weight_bytes=10**6, second_products=2)):
        sent = [traffic(TensorLayout.of("3d", size), shares).forward_bytes for size in (8, 27, 64)]
        assert sent == sorted(sent, reverse=True)


# ---- tables, and the axis -------------------------------------------------------------------------------------------


def test_a_table_needs_only_the_sizes_of_inputs_and_outputs():
    node = table().graph(64).nodes["pair"]
    assert (node["first_products"], node["second_products"]) == (1, 1)
    assert node["product_weight_bytes"] == 160_000
    given = {"first_products": 3, "second_products": 2, "product_weight_bytes": 5, "norms": 2, "norm_row_bytes": 512}
    given |= {"summed_weights": 6, "summed_weight_bytes": 700, "embedding_output_bytes": 3}
    cells = table(**given).to_table()[0]
    assert {name: cells[name] for name in given} == given
    one = table(norm_row_bytes=1, summed_weight_bytes=1).graph(64).nodes["pair"]
    assert (one["norms"], one["summed_weights"]) == (1, 1)
    assert "first_products" not in table().to_table()[0]
    assert Profile.from_table(table().to_table()).graph(64).nodes["pair"] == node
    none = dict.fromkeys(SIZES, 0)
    assert table(**none).graph(64).nodes["pair"]["product_weight_bytes"] == 0


def test_larger_micro_batches_have_the_same_weights():
    rows = [
        {"name": "pair"} | PAIR | {"rows": rows, "first_input_bytes": 2000 * rows, "summed_weight_bytes": 7}
        for rows in (64, 128)
    ]
    node = Profile.from_table(rows).graph(96).nodes["pair"]
    assert (node["first_input_bytes"], node["product_weight_bytes"]) == (192_000, 160_000)
    assert (node["summed_weight_bytes"], node["summed_weights"]) == (7, 1)


def test_layers_with_all_reduces_need_the_sizes_of_their_products():
    cells = dict.fromkeys(SIZES, 0)
    assert without_products(table(**cells)) == ["pair"]
    assert without_products(table()) == []
    assert without_products(table(**cells, all_reduce_forward_bytes=0)) == []
    assert without_products(table(**cells, embedding_output_bytes=1)) == []


@of_layout
def test_an_axis_has_its_layout_in_text_and_files(layout):
    axis = TensorAxis(size=layout.size, layout=layout)
    assert str(axis) == f"tp {layout.size} in {layout.kind} ({' x '.join(map(str, layout.shape))})"
    assert TensorAxis.from_dict(json.loads(json.dumps(axis.to_dict()))) == axis
    assert hash(axis) != hash(TensorAxis(size=layout.size))


def test_an_axis_in_one_dimension_is_as_before():
    axis = TensorAxis(size=4)
    assert axis == TensorAxis(size=4, layout=TensorLayout.of("1d", 4))
    assert axis.to_dict() == {"size": 4, "sequence_parallel": False}
    assert TensorAxis.from_dict({"size": 4}) == axis  # as older files have it
    assert str(axis) == "tp 4"
    assert axis.layout.shape == (4,)


def test_an_axis_refuses_other_layouts():
    layout = TensorLayout.of("3d", 8)
    with pytest.raises(ScheduleError, match=r"got 3d \(2 x 2 x 2\) for a group of 4 ranks; pass a layout for 4 ranks"):
        TensorAxis(size=4, layout=layout)
    with pytest.raises(ScheduleError, match=r"sequence_parallel=True with 3d .*; leave sequence_parallel out"):
        TensorAxis(size=8, layout=layout, sequence_parallel=True)
    with pytest.raises(PipeschedError, match="layout must be a TensorLayout; got '3d'"):
        TensorAxis(size=8, layout="3d")
