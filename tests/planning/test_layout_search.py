"""Tests of the search for the layout of the ranks that split each layer, in one to three dimensions."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import pipesched
from pipesched import Link, Links, Plan, Profile
from pipesched.cli.main import main
from pipesched.errors import InputError, PartitionError
from pipesched.pipeline.checks.replica_checks import check_layout
from pipesched.planning.axes_search import AxesRequest
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.profile_search import ProfileSearch
from pipesched.planning.report.report import Report
from pipesched.simulation.simulator import step_time
from pipesched.simulation.tensor_layout import TensorLayout

KINDS = ("1d", "2d", "2.5d", "3d")
LINKS = Links(inside=Link(5e-6, 25e9))
FLOPS_PER_S, WIDE = 100e12, 2


def pair(rows, width, count=1, **cells):
    """The layers h -> 4h -> h, for one micro-batch of all rows."""
    forward_s = 16 * rows * width**2 / FLOPS_PER_S
    small, large = WIDE * rows * width, WIDE * rows * 4 * width
    layer = {
        "forward_s": forward_s,
        "backward_s": 2 * forward_s,
        "parameter_bytes": WIDE * 8 * width**2,
        "output_bytes": small,
        "activation_bytes": small + large,
        "split_forward": 1,
        "split_activations": 1,
        "all_reduce_forward_bytes": small,
        "first_input_bytes": small,
        "first_output_bytes": large,
        "second_input_bytes": large,
        "second_output_bytes": small,
        "optimizer_bytes": 0,
    }
    return Profile.from_table([{"name": f"pair{at}"} | layer | cells for at in range(count)], rows=rows)


def found(profile, rows, **options):
    """The plan of the search, without the searches for advice, which take longer."""
    given = {"num_ranks": 64, "batch_size": rows, "axes": "auto", "tensor": 64, "tensor_layouts": KINDS}
    return ProfileSearch(profile=profile, **{"links": LINKS} | given | options).find()


def step_s(plan):
    """The step without the overheads of actions."""
    return step_time(plan.completed, replace(plan.costs, overheads=None))


def exchange_s(exchange):
    """The time of a collective of 64 equal links, from its definition."""
    latency_s, byte_s = LINKS.inside.latency_s, LINKS.inside.byte_s
    others, size = exchange.ranks - 1, WIDE * exchange.elements
    part_s = others * (latency_s + size / exchange.ranks * byte_s)
    direct_s = latency_s + others * size / exchange.ranks * byte_s
    each = {
        "all-gather": part_s,
        "reduce-scatter": direct_s,
        "all-reduce": direct_s + part_s,
        "broadcast": others * latency_s + size * byte_s,
        "reduce": latency_s + others * size * byte_s,
    }
    return exchange.times * each[exchange.kind]


def enumerated_s(layout, rows, width):
    """The step of a pair: three products of each of its layers, and the exchanges of F, I and W."""
    compute_s = 3 * 16 * rows * width**2 / FLOPS_PER_S / layout.size
    layers = (width, 4 * width, False), (4 * width, width, True)
    exchanges = [layout.exchanges(rows, inner, outer, second=second) for inner, outer, second in layers]
    return compute_s + sum(exchange_s(each) for of in exchanges for action in of.values() for each in action)


# ---- what is chosen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width", "kind"), [(512, 16_384, "1d"), (16_384, 4096, "3d"), (65_536, 16_384, "3d")])
def test_few_rows_are_divided_in_one_dimension_and_many_in_three(rows, width, kind):
    plan = found(pair(rows, width), rows)
    assert plan.tensor.layout == TensorLayout.of(kind, 64)
    steps = {str(layout): enumerated_s(layout, rows, width) for layout in TensorLayout.every(64)}
    assert set(steps) == {"1d (64)", "2d (8 x 8)", "2.5d (4 x 4 x 4)", "3d (4 x 4 x 4)"}
    assert min(steps, key=steps.get) == str(plan.tensor.layout)
    assert step_s(plan) == pytest.approx(min(steps.values()), rel=1e-9)
    simulated = {kind: found(pair(rows, width), rows, tensor_layouts=kind).predicted().makespan_s for kind in KINDS}
    assert plan.predicted().makespan_s <= 1.01 * min(simulated.values())
    for other in plan.alternatives:
        layout = other.tensor_layout or "1d (64)"
        assert other.step_s == pytest.approx(simulated[layout.split()[0]], rel=1e-9)
        assert other.step_s == pytest.approx(steps[layout], abs=2e-4)  # the overheads of actions


@pytest.mark.parametrize("rows", [64, 1024, 16_384])
@pytest.mark.parametrize("width", [1024, 4096, 16_384])
def test_no_layout_is_faster_than_the_chosen_one(rows, width):
    plan = found(pair(rows, width), rows)
    assert step_s(plan) <= 1.01 * min(enumerated_s(layout, rows, width) for layout in TensorLayout.every(64))


def test_sizes_and_layouts_are_chosen_together():
    """Slow links between hosts of 8: groups stay in their hosts, and replicas take the rest."""
    profile = pair(16_384, 4096, count=2)
    links = Links.of_hosts(8, 64, inside=Link(2e-6, 300e9), between=Link(1e-5, 1e9))
    plan = found(profile, 16_384 * 8, tensor=(8, 64), links=links, zero=0)
    assert plan.tensor.size == 8
    assert {other.tensor_size for other in plan.alternatives} == {8, 64}
    assert {other.tensor_layout for other in plan.alternatives} >= {"", "3d (2 x 2 x 2)", "3d (4 x 4 x 4)"}


def test_less_memory_makes_the_search_choose_more_dimensions():
    """In one dimension, each rank holds the activations that are not split."""
    profile = pair(4096, 16_384, split_activations=0)
    free = found(profile, 4096)
    assert free.tensor.is_flat
    plan = found(profile, 4096, memory_limit_bytes="600MB")
    assert plan.tensor.layout.kind == "3d"
    assert max(own.total_bytes for own in plan.memory()) <= 600 * 10**6 < free.alternatives[0].peak_bytes


def test_by_default_layers_are_divided_in_one_dimension():
    plan = found(pair(16_384, 4096), 16_384, tensor_layouts=("1d",))
    assert plan.tensor.is_flat
    assert {other.tensor_layout for other in plan.alternatives} == {""}
    assert "layout" not in plan.tensor.to_dict()
    assert "tensor_layout" not in json.dumps(plan.to_dict())


def test_the_ranks_get_equal_parts_of_the_rows():
    """48 rows can be divided by 8 row axes of 2d, and by 16 of 2.5d and 3d, but not into micro-batches of 24 rows."""

    def kinds(rows, **options):
        request = AxesRequest(
            profile=pair(rows, 1024),
            num_ranks=64,
            batch_size=rows,
            request=PlanRequest(**options),
            tensor=64,
            tensor_layouts=KINDS,
            links=LINKS,
            options={},
        )
        return [search.tensor.layout.kind for search in request.searches()]

    assert kinds(48) == ["1d", "2.5d", "3d", "2d"]
    assert kinds(24) == ["1d", "2d"]
    assert kinds(48, num_microbatches=2) == ["1d", "2d"]
    assert kinds(50) == ["1d"]
    with pytest.raises(PartitionError, match=r"must form q x q, .* into q, d x q or l x l equal parts; .* in 3d"):
        found(pair(50, 1024), 50, tensor_layouts="3d")
    with pytest.raises(PartitionError, match=r"no division of 64 ranks .* tensor groups of 32 ranks in 2d, 3d"):
        found(pair(64, 1024), 64, tensor=32, tensor_layouts=("2d", "3d"))


# ---- texts and files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    return pipesched.tune_profile(
        pair(65_536, 1024, count=2),
        num_ranks=64,
        batch_size=4 * 65_536,
        axes={"pipeline": 2, "replicate": 1, "tensor": 32},
        tensor_layouts=("1d", "2.5d"),
        links=LINKS,
        num_microbatches=4,
    )


def test_the_plan_states_its_layout_in_every_form(plan):
    assert str(plan.tensor) == "tp 32 in 2.5d (2 x 4 x 4)"
    assert plan.mesh == {"dp": 1, "pp": 2, "tp": 32}
    assert "tp 32 in 2.5d (2 x 4 x 4)" in plan.explain()
    assert "tp 32 in 2.5d (2 x 4 x 4)" in repr(plan)
    compared = Report(plan).text().partition("Compared plans")[2]
    lines = [line for line in compared.splitlines() if line.strip().startswith("dp 1 x pp 2")]
    assert "layout" in compared
    assert [" 1d " in line for line in lines] == [False, True]
    assert plan.alternatives[0].tensor_layout == "2.5d (2 x 4 x 4)"


def test_a_plan_with_a_layout_survives_json(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.predicted().makespan_s == plan.predicted().makespan_s
    assert again.communication() == plan.communication()


def test_the_tensor_axis_sends_what_the_layout_says(plan):
    """A stage has one pair, and runs 4 micro-batches."""
    layers = (1024, 4096, False), (4096, 1024, True)
    exchanges = [plan.tensor.layout.exchanges(65_536, inner, outer, second=second) for inner, outer, second in layers]
    due = sum(WIDE * each.received for of in exchanges for action in of.values() for each in action)
    assert plan.communication()[-1].sent_bytes == pytest.approx(4 * due, abs=16)


def test_a_pipeline_with_another_layout_refuses_the_plan(plan):
    check_layout(plan, "2.5d")
    check_layout(plan, plan.tensor.layout)
    check_layout(None, "3d")
    with pytest.raises(
        InputError, match=r"the plan has 2.5d \(2 x 4 x 4\), but the pipeline has 1d; pass distributed="
    ):
        check_layout(plan, "1d")
    with pytest.raises(InputError, match=r"but the pipeline has 2d \(2 x 2\)"):
        check_layout(plan, TensorLayout.of("2d", 4))


def test_advice_keeps_the_layout():
    made = pipesched.tune_profile(
        pair(16_384, 4096, count=2),
        num_ranks=128,
        batch_size=4 * 16_384,
        axes="auto",
        tensor=64,
        tensor_layouts=KINDS,
        links=LINKS,
    )
    assert made.tensor.layout.kind == "3d"
    assert made.advice.why_not_more
    for step in made.advice.next_steps:
        assert step.arguments["tensor_layouts"] == ("3d",)
        assert step.arguments["axes"]["tensor"] == 64


# ---- errors, and the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tensor_layouts": "4d"}, PartitionError, r"among '1d', '2d', '2.5d', '3d'; got '4d'; for example, pass"),
        ({"tensor_layouts": ()}, PartitionError, r"tensor_layouts= must have the layouts"),
        ({"tensor_layouts": 3}, PartitionError, r"tensor_layouts= must have the layouts .* got 3"),
        ({"tensor_layouts": ("3d", 2)}, PartitionError, r"tensor_layouts= must have the layouts"),
        ({"tensor": 1}, InputError, r"no layer is split, because all tensor groups have 1 rank; pass tensor="),
        (
            {"first_products": 0, "second_products": 0},
            PartitionError,
            r"no sizes of products for 'pair0'; add the columns first_input_bytes, .* or pass tensor_layouts='1d'",
        ),
    ],
)
def test_wrong_requests_are_refused(options, error, words):
    cells = {name: options.pop(name) for name in ("first_products", "second_products") if name in options}
    with pytest.raises(error, match=words):
        found(pair(64, 1024, **cells), 64, **dict(options))


@pytest.fixture
def tables(tmp_path):
    (tmp_path / "links.json").write_text(json.dumps(LINKS.to_dict()))
    pair(16_384, 4096).to_table(tmp_path / "layers.csv")
    return [
        *("tune", "--table", str(tmp_path / "layers.csv"), "--batch", "16384"),
        *("--ranks", "64", "--links", str(tmp_path / "links.json")),
    ]


def test_the_command_chooses_among_layouts(tables, tmp_path):
    path = tmp_path / "plan.json"
    options = ["--replicas", "auto", "--tensor", "64", "--tensor-layouts", "1d,2d,2.5d,3d", "-o", str(path)]
    result = CliRunner().invoke(main, [*tables, *options])
    assert result.exit_code == 0, result.output
    assert Plan.load(path).tensor.layout.kind == "3d"
    assert "in 3d (4 x 4 x 4)" in result.output


def test_the_command_refuses_other_layouts(tables):
    result = CliRunner().invoke(main, [*tables, "--tensor", "64", "--tensor-layouts", "4d"])
    assert result.exit_code == 2
    assert "'4d' is not a list of layouts; for example, pass 3d, or 1d,2d,2.5d,3d" in " ".join(
        result.output.replace("│", " ").split()
    )
