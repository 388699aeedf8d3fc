"""Tests of the search for the number of ranks that split each layer."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesched
from pipesched import Link, Links, Plan, Profile
from pipesched.cli.main import main
from pipesched.errors import DeviceCountError, InputError, PartitionError, PipeschedError, ScheduleError
from pipesched.pipeline.checks.replica_checks import check_axes
from pipesched.planning.axes_search import AxesRequest, find_axes
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.profile_search import ProfileSearch
from pipesched.planning.report.report import Report
from pipesched.simulation.replication import Replication
from pipesched.simulation.simulator import step_time
from pipesched.simulation.tensor_axis import TensorAxis
from tests.support.random_programs import quick

INSIDE = Link(1e-6, 1e12)
#: Two hosts of four ranks.
LINKS = Links.of_hosts(4, 8, inside=INSIDE, between=Link(10e-6, 1e8))
SPLIT = {
    "split_forward": 1,
    "split_parameters": 1,
    "split_activations": 0.5,
    "all_reduce_forward_bytes": 2000,
    "all_reduces_forward": 2,
}


def table(count=8, **cells):
    row = {"forward_ms": 1, "backward_ms": 2, "parameter_bytes": 10**6, "output_bytes": 1000, "activation_bytes": 10**4}
    return [{"name": f"layer{at}", "optimizer_bytes": 0} | row | SPLIT | cells for at in range(count)]


def profile(count=8, **cells):
    """Layers for micro-batches of one and of two rows."""
    scaled = ("forward_ms", "backward_ms", "output_bytes", "activation_bytes", "all_reduce_forward_bytes")
    lines = table(count, **cells)
    return Profile.from_table(
        [line | {"rows": rows} | {name: rows * line[name] for name in scaled} for rows in (1, 2) for line in lines]
    )


LAYERS = profile()
WHOLE = Profile.from_table(
    [{key: value for key, value in row.items() if not key.startswith(("split", "all_"))} for row in table()], rows=1
)


GIVEN = {"num_ranks": 8, "batch_size": 16, "axes": "auto", "links": LINKS, "tensor": (1, 2, 4)}


def tuned(known=LAYERS, **options):
    return pipesched.tune_profile(known, **GIVEN | options)


def without_advice(known=LAYERS, **options):
    """The plan of the search, without the searches for advice, which take longer."""
    return ProfileSearch(profile=known, **GIVEN | options).find()


def step_s(plan):
    """The step without the overheads of actions."""
    return step_time(plan.completed, replace(plan.costs, overheads=None))


# ---- what is chosen -------------------------------------------------------------------------------------------------


def test_layers_are_split_inside_a_host_if_one_row_leaves_no_other_way():
    """A batch of one row allows no replicas, and a pipeline of one micro-batch has the largest bubble."""
    plan = tuned(batch_size=1, num_ranks=4, links=Links(inside=INSIDE))
    assert plan.tensor == TensorAxis(size=4)
    assert plan.mesh == {"dp": 1, "pp": 1, "tp": 4}
    assert plan.predicted().makespan_s == pytest.approx(8 * 3e-3 / 4, rel=0.1)  # and the overheads of actions


def test_layers_stay_whole_if_replicas_are_faster():
    plan = tuned(links=Links(inside=Link(1e-3, 1e12)))
    assert plan.tensor is None
    assert "tp" not in plan.mesh


def test_layers_are_split_if_memory_requires_it():
    """A layer has 40 MB of weights and gradients; one of two ranks has half of it."""
    known = profile(2, parameter_bytes=20 * 10**6)
    plan = tuned(known, num_ranks=4, links=Links(inside=INSIDE), zero=0, memory_limit_bytes=30 * 10**6)
    assert plan.tensor is not None
    assert max(own.total_bytes for own in plan.memory()) <= 30 * 10**6
    with pytest.raises(pipesched.errors.MemoryLimitError, match="no division of 4 ranks"):
        tuned(known, num_ranks=4, zero=0, memory_limit_bytes=30 * 10**6, tensor=1)


def test_a_group_does_not_leave_a_host_if_the_network_is_slow():
    plan = tuned(batch_size=1, tensor=(1, 2, 4, 8))
    assert plan.tensor.size <= 4


def test_given_sizes_are_kept():
    plan = tuned(axes={"pipeline": 2, "replicate": 2, "tensor": 2}, tensor=1)
    assert (plan.program.num_ranks, plan.replication.num_replicas, plan.tensor.size) == (2, 2, 2)
    assert plan.num_devices == 8


def test_sizes_that_do_not_divide_the_ranks_are_left_out():
    assert tuned(batch_size=1, num_ranks=4, tensor=(1, 2, 3)).tensor.size == 2
    with pytest.raises(PartitionError, match=r"no division of 8 ranks .*, tensor groups of 3 ranks"):
        tuned(tensor=(3,))


# ---- one rank in a group --------------------------------------------------------------------------------------------


@settings(quick, max_examples=4)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([4, 8, 16]), st.sampled_from([1e8, 1e12]))
def test_without_split_layers_plans_are_those_of_before(num_ranks, batch_size, bytes_per_s):
    """Layers that can be split, and layers that cannot, have the same plans to the last digit."""
    options = {"num_ranks": num_ranks, "batch_size": batch_size, "links": Links(inside=Link(1e-6, bytes_per_s))}
    plain = without_advice(WHOLE, tensor=1, **options)
    known = Profile.from_table(table(), rows=1)
    for sizes in (1, (1,)):
        again = without_advice(known, tensor=sizes, **options)
        assert again.to_dict() == plain.to_dict()
        assert again == plain


@settings(quick, max_examples=8)
@given(st.sampled_from([2, 4]), st.integers(1, 4), st.sampled_from([1, 2]))
def test_instant_links_make_a_step_of_fully_split_layers_as_many_times_as_fast(size, depth, replicas):
    """The same pipelines of tensor groups take exactly a T-th of the time of pipelines of single ranks."""
    known = profile(8, split_activations=0, all_reduce_forward_bytes=0, all_reduces_forward=0)
    request = PlanRequest(schedule="1f1b", num_microbatches=4)
    options = {"batch_size": 8 * replicas, "links": Links(), "request": request, "zero": 0, "tensor": 1}
    ranks = depth * replicas
    axes = {"pipeline": depth, "replicate": replicas}
    whole = without_advice(known, num_ranks=ranks, axes=axes, **options)
    split = without_advice(known, num_ranks=ranks * size, axes=axes | {"tensor": size}, **options)
    assert split.stages == whole.stages
    assert step_s(split) == pytest.approx(step_s(whole) / size, rel=1e-12)
    assert split.costs.weight_bytes == tuple(held // size for held in whole.costs.weight_bytes)


def test_the_plan_of_a_larger_choice_is_never_slower():
    options = {"batch_size": 4, "memory_limit_bytes": 20 * 10**6}
    steps = [without_advice(tensor=sizes, **options).alternatives[0].step_s for sizes in ((1,), (1, 2), (1, 2, 4))]
    assert steps[1] <= steps[0] * 1.005  # the simplest of plans that are about as fast
    assert steps[2] <= steps[1] * 1.005


def test_the_alternatives_have_a_plan_for_each_number_of_ranks():
    plan = without_advice(num_ranks=8, batch_size=16, tensor=(1, 2, 4))
    assert {other.tensor_size for other in plan.alternatives} == {None, 2, 4}
    steps = [other.step_s for other in plan.alternatives[1:]]
    assert steps == sorted(steps)
    assert len(plan.alternatives) <= 12


# ---- texts and files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    return tuned(axes={"pipeline": 2, "replicate": 2, "tensor": 2}, tensor=1, zero=2, num_microbatches=4)


def test_the_plan_states_its_tensor_groups_in_every_form(plan):
    assert list(plan.mesh.items())[-1] == ("tp", 2)
    assert "2 replicas of 2 tensor groups of 2 ranks" in plan.explain()
    assert " x tp 2, zero 2)" in plan.explain()
    assert [own.axis for own in plan.communication()] == ["pipeline", "replicas", "zero", "tensor"]
    assert "tensor: 2 ranks, at most" in plan.explain()
    report = Report(plan).text()
    assert "tp 2" in report
    assert "tensor" in report.partition("Communication, predicted")[2].partition("Stages")[0]
    assert plan.alternatives[0].tensor_size == 2
    assert "tp 2" in repr(plan)


def test_the_tensor_axis_sends_what_the_all_reduces_of_all_layers_send(plan):
    """A rank has 4 layers; each sums 2 x 1000 bytes for a row both ways, in 4 micro-batches of 2 rows."""
    axis = plan.communication()[-1]
    assert (axis.size, axis.sent_bytes) == (2, 4 * 4 * 2 * 4000 * 2 // 2)


def test_a_plan_with_tensor_groups_survives_json(plan):
    saved = json.loads(json.dumps(plan.to_dict()))
    again = Plan.from_dict(saved)
    assert again == plan
    assert again.tensor == TensorAxis(size=2)
    assert again.predicted().makespan_s == plan.predicted().makespan_s
    assert again.communication() == plan.communication()
    with pytest.raises(ScheduleError, match="size of a tensor group must be a whole number, at least 1; got 0"):
        Plan.from_dict({**saved, "tensor": {"size": 0, "sequence_parallel": False}})


def test_plans_without_tensor_groups_are_saved_as_before():
    for made in (tuned(tensor=1), pipesched.tune_profile(LAYERS, num_ranks=2, batch_size=16)):
        saved = made.to_dict()
        assert "tensor" not in saved
        assert "tensor" not in (saved["costs"] or {})
        assert not [own for own in saved["alternatives"] if "tensor_size" in own]


def test_sequence_parallelism_is_part_of_the_plan(plan):
    other = tuned(
        axes={"pipeline": 2, "replicate": 2, "tensor": 2}, tensor=1, zero=2, num_microbatches=4, sequence_parallel=True
    )
    assert other.tensor == TensorAxis(size=2, sequence_parallel=True)
    assert "tp 2, sequence parallel, zero 2" in other.explain()
    assert other.costs.output_bytes[0] == plan.costs.output_bytes[0] // 2
    assert Plan.from_dict(json.loads(json.dumps(other.to_dict()))) == other


def test_a_pipeline_with_other_tensor_groups_refuses_the_plan(plan):
    check_axes(plan, 2, 2, 2, tensor_size=2)
    with pytest.raises(
        DeviceCountError, match=r"2 replicas of 2 tensor groups of 2 ranks .* has 2 replicas of 2 ranks;"
    ):
        check_axes(plan, 2, 2, 2)
    with pytest.raises(DeviceCountError, match=r"has 2 replicas of 2 tensor groups of 4 ranks; .* 'tensor': 4"):
        check_axes(plan, 2, 2, 2, tensor_size=4)


def test_one_device_is_not_what_a_tensor_group_is_compared_with(plan):
    from pipesched.planning.report.key_figures import key_figures

    assert key_figures(plan, plan.predicted(), None)[0].label == "compared to one tensor group"


def test_a_mesh_has_the_tensor_groups_last():
    axis = TensorAxis(size=8)
    assert list(Replication(num_replicas=4).mesh(2, axis).items()) == [("dp", 4), ("pp", 2), ("tp", 8)]
    swapped = Replication(num_replicas=4, zero=1, consecutive="replicas")
    assert list(swapped.mesh(2, axis)) == ["pp", "dp", "tp"]
    assert swapped.describe(2, axis) == "pp 2 x dp 4 x tp 8, zero 1"


def test_advice_keeps_the_tensor_groups():
    made = tuned(batch_size=2, num_ranks=4, links=Links(inside=INSIDE), tensor=(1, 2, 4))
    for step in made.advice.next_steps:
        assert step.arguments["tensor"] == 1
        assert step.arguments["axes"].get("tensor", 1) == made.num_devices // (
            made.program.num_ranks * made.replication.num_replicas
        )
    assert made.advice.why_not_more


# ---- errors, and the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"tensor": 0},
            PartitionError,
            r"tensor= must have the numbers of ranks .* got 0; for example, pass tensor=\(",
        ),
        ({"tensor": ()}, PartitionError, "tensor= must have the numbers of ranks"),
        ({"tensor": "2"}, PartitionError, "tensor= must have the numbers of ranks"),
        ({"tensor": (1, 2.0)}, PartitionError, "tensor= must have the numbers of ranks"),
        ({"axes": None}, InputError, r"got tensor=\(1, 2, 4\) without axes=; pass axes='auto'"),
        ({"axes": {"pipeline": 4, "replicate": 2}}, InputError, r"got tensor=\(1, 2, 4\) with axes="),
        ({"axes": {"pipeline": 4, "tensor": 2}, "tensor": 1}, PartitionError, "a mapping with .* 'replicate'"),
        (
            {"axes": {"pipeline": 4, "replicate": 2, "tensor": 2}, "tensor": 1},
            PartitionError,
            "product of the numbers in axes= must be the number of ranks; .* for 8 ranks",
        ),
        ({"tensor": 1, "sequence_parallel": True}, InputError, "sequence_parallel=True divides the sequence"),
        ({"sequence_parallel": 1}, PipeschedError, "sequence_parallel= must be True or False; got 1"),
        ({"known": WHOLE}, PartitionError, "for a profile without split_forward in any layer; measure the model"),
    ],
)
def test_wrong_requests_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        tuned(**options)


def test_groups_have_as_small_micro_batches_as_a_pipeline_of_all_their_ranks():
    """With at most 16 micro-batches for each of 2 groups, micro-batches had 4 rows, for which there are no costs."""
    request = AxesRequest(
        profile=LAYERS, num_ranks=8, batch_size=128, request=PlanRequest(), tensor=4, links=LINKS, options={}
    )
    counts = {search.num_ranks: search.num_microbatches for search in request.searches()}
    assert 64 in counts[2]
    assert 128 in counts[2]


def test_a_request_can_be_made_without_a_search():
    request = AxesRequest(
        profile=LAYERS, num_ranks=8, batch_size=16, request=PlanRequest(), tensor=(1, 2), links=LINKS, options={}
    )
    found = {(search.tensor and search.tensor.size, search.num_ranks) for search in request.searches()}
    assert found == {(None, 1), (None, 2), (None, 4), (None, 8), (2, 1), (2, 2), (2, 4)}
    assert find_axes(replace(request, tensor=2)).tensor == TensorAxis(size=2)


@pytest.fixture
def tables(tmp_path):
    links = tmp_path / "links.json"
    links.write_text(json.dumps(LINKS.to_dict()))
    LAYERS.to_table(tmp_path / "layers.csv")
    return ["tune", "--table", str(tmp_path / "layers.csv"), "--batch", "16", "--ranks", "8", "--links", str(links)]


def test_the_command_chooses_among_sizes_and_writes_the_plan(tables, tmp_path):
    path = tmp_path / "plan.json"
    options = ["--replicas", "auto", "--tensor", "2,4", "--sequence-parallel", "-o", str(path)]
    result = CliRunner().invoke(main, [*tables, *options])
    assert result.exit_code == 0, result.output
    plan = Plan.load(path)
    assert plan.tensor.size in (2, 4)
    assert plan.tensor.sequence_parallel
    assert f"tp {plan.tensor.size}" in result.output
    assert "the plan uses" not in result.output


def test_the_command_takes_one_size(tables, tmp_path):
    path = tmp_path / "plan.json"
    result = CliRunner().invoke(main, [*tables, "--tensor", "4", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert Plan.load(path).mesh == {"dp": 1, "pp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tensor", "1,2"], "--tensor with several numbers needs --replicas auto"),
        (["--tensor", "a"], "'a' is not a list of numbers of ranks; for example, pass 8, or 1,2,4,8"),
        (["--tensor", "0"], "is not a list of numbers of ranks"),
    ],
)
def test_the_command_refuses_other_sizes(tables, options, words):
    result = CliRunner().invoke(main, [*tables, *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
