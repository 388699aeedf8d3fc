"""A plan is a value: saved, loaded and run again it gives the same cut, the same program and the same bits."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipesched import Costs, Order, Pipeline, Plan, schedule, schedules, simulate
from pipesched.errors import DeadlockError, DeviceCountError, ScheduleError
from pipesched.planning.alternatives import Alternative
from pipesched.program.lowering import add_recompute
from tests.support import branching_models as any_models
from tests.support.models import KINDS, synchronous_names


def mse(output, target):
    return (output - target).square().mean()


def linears(count=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


def pipeline(model, **choices):
    if "plan" not in choices:
        choices.setdefault("schedule", "1f1b")  # so small a model would run on one device
    return Pipeline(model, torch.ones(1, 3), loss_fn=mse, devices=["cpu"] * 2, **choices)


def plan(checkpoint="never", costs=None, name="1f1b"):
    program = schedules.get(name).program(2, 4)
    return Plan((("a", "b"), ("c",)), name, program, checkpoint, costs)


COSTS = Costs((1.0, 2.0), (1.5, 2.5), (0.5, 0.25), transfer_s=0.125, activation_bytes=(100, 200), input_bytes=(8, 16))


@pytest.mark.parametrize("costs", [None, COSTS])
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_a_saved_plan_loads_as_it_was(tmp_path, checkpoint, costs):
    original = plan(checkpoint, costs)
    original.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == original
    assert loaded.program.name == "1f1b"
    assert loaded.predicted() == original.predicted()
    assert loaded.to_dict() == original.to_dict()


def test_the_file_is_json_that_a_reader_understands(tmp_path):
    plan("always", COSTS).save(str(tmp_path / "plan.json"))
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["stages"] == [["a", "b"], ["c"]]
    assert (values["schedule"], values["num_ranks"], values["num_microbatches"]) == ("1f1b", 2, 4)
    assert [*values["program"]] == ["digest"]
    assert values["predicted"]["makespan_s"] == plan("always", COSTS).predicted().makespan_s


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("num_microbatches", [1, 5, 40])
def test_what_a_schedule_makes_is_made_again_on_load(name, num_microbatches):
    """So a file is no larger for many micro-batches."""
    program = schedules.get(name).program(2, num_microbatches)
    original = Plan(tuple((str(stage),) for stage in range(program.num_weights)), name, program)
    values = json.loads(json.dumps(original.to_dict()))
    if schedules.get(name).searches:  # to make it again may take long
        assert values["program"] == str(program).splitlines()
    else:
        assert len(str(values)) < 600
    assert Plan.from_dict(values) == original


def test_options_are_made_again_too():
    chosen = schedules.get("interleaved-1f1b").with_options(chunks_per_rank=3)
    original = Plan(tuple((layer,) for layer in "abcdef"), chosen.name, chosen.program(2, 4), options=chosen.options)
    assert [*original.to_dict()["program"]] == ["digest"]
    assert Plan.from_dict(original.to_dict()) == original


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_a_file_with_all_lines_of_its_program_loads_as_ever(name):
    program = schedules.get(name).program(2, 4)
    original = Plan(tuple((layer,) for layer in "abcd"[: program.num_weights]), name, program)
    assert Plan.from_dict(original.to_dict() | {"program": str(program).splitlines()}) == original


def test_a_schedule_that_makes_another_program_now_is_an_error_and_so_is_an_edited_one():
    values = plan().to_dict() | {"schedule": "gpipe"}
    with pytest.raises(ScheduleError, match=r"'gpipe' for 2 ranks and 4 micro-batches generates .* remove the digest"):
        Plan.from_dict(values)
    assert Plan.from_dict(values | {"program": {}}).program == schedules.get("gpipe").program(2, 4)


def test_a_program_of_another_schedule_of_this_name_keeps_its_lines():
    """Here of one for three ranks, which chimera refuses."""
    original = replace(plan(), stages=(("a",), ("b",), ("c",)), program=schedules.get("1f1b").program(3, 4))
    for name in ("chimera", "gpipe", "unknown"):
        other = replace(original, schedule=name, program=replace(original.program, name=name))
        assert other.to_dict()["program"] == str(other.program).splitlines()
        assert Plan.from_dict(other.to_dict()) == other


OTHERS = (
    Alternative(
        label="1f1b",
        schedule="1f1b",
        num_ranks=2,
        chunks_per_rank=1,
        num_microbatches=4,
        checkpoint="never",
        step_s=1.5,
        bubble_ratio=0.25,
        peak_bytes=100,
        limit_bytes=150,
    ),
    Alternative(
        label="one device",
        schedule="1f1b",
        num_ranks=1,
        chunks_per_rank=1,
        num_microbatches=4,
        checkpoint="never",
        step_s=2.5,
        bubble_ratio=0,
        peak_bytes=200,
        limit_bytes=150,
        note="does not fit",
    ),
)


def test_the_alternatives_of_a_search_are_saved_with_the_plan(tmp_path):
    original = replace(plan(costs=COSTS), alternatives=OTHERS)
    original.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").alternatives == OTHERS
    assert [other.fits for other in OTHERS] == [True, False]
    values = json.loads((tmp_path / "plan.json").read_text())["alternatives"]
    assert "measured_s" not in values[0]  # what is not known
    assert values[1]["note"] == "does not fit"


def test_boundaries_are_the_first_layers_of_the_later_stages():
    assert plan().boundaries == ["c"]


def test_the_prediction_is_the_simulated_step_with_recomputation():
    assert plan().predicted() is None
    planned = plan("always", COSTS)
    assert planned.predicted() == simulate(add_recompute(planned.program, "always"), COSTS)
    assert planned.predicted().makespan_s > plan("never", COSTS).predicted().makespan_s


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*KINDS, "chimera"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_pipeline_of_a_plan_has_the_same_cut_program_and_bits(tmp_path, name, checkpoint):
    model, x, y = linears(), torch.randn(8, 3), torch.randn(8, 3)
    other = copy.deepcopy(model)
    with pipeline(model, schedule=name, num_microbatches=4, checkpoint=checkpoint) as pipe:
        pipe.plan.save(tmp_path / "plan.json")
        loss = pipe.step(x, target=y)
        chosen = pipe.plan
    with pipeline(other, plan=Plan.load(tmp_path / "plan.json")) as pipe:
        assert pipe.plan.stages == chosen.stages
        assert pipe.plan.program == chosen.program
        assert pipe.plan.schedule == name
        assert pipe.checkpoint == checkpoint
        assert pipe.num_microbatches == 4
        torch.testing.assert_close(pipe.step(x, target=y), loss, rtol=0, atol=0)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", synchronous_names())
def test_a_pipeline_of_a_plan_takes_short_batches_where_the_schedule_can(name):
    with pipeline(linears(), schedule=name, num_microbatches=4) as pipe:
        saved = pipe.plan
    with pipeline(linears(), plan=saved) as pipe:
        pipe.step(torch.ones(3, 3), target=torch.ones(3, 3))
        assert {span.action.microbatch for span in pipe.trace.spans} == {0, 1, 2}


def test_a_plan_keeps_its_ranks_where_there_are_more_devices(tmp_path):
    with pipeline(linears(), schedule="interleaved-1f1b") as pipe:
        saved = pipe.plan
    saved.save(tmp_path / "plan.json")
    choices = {"loss_fn": mse, "plan": Plan.load(tmp_path / "plan.json")}
    with Pipeline(linears(), torch.ones(1, 3), devices=["cpu"] * 4, **choices) as pipe:
        assert pipe.plan.program == saved.program
        assert len(pipe.devices) == 2
    with pytest.raises(DeviceCountError, match="the plan has 2 ranks, but the pipeline has 1 device"):
        Pipeline(linears(), torch.ones(1, 3), devices=["cpu"], **choices)


def test_a_plan_of_a_model_with_skips_runs_again(tmp_path):
    """With its schedule, which makes programs for short batches too."""
    model, args, _, target = any_models.made("unet")
    with any_models.pipeline("unet", model, devices=["cpu"] * 4) as pipe:
        saved, whole = pipe.plan, pipe.step(*args, target=target)
        short = pipe.step(args[0][:2], target=target[:2])
        assert not saved.program.is_chain
    assert [*saved.to_dict()["program"]] == ["edges", "digest"]
    saved.save(tmp_path / "plan.json")
    choices = {"plan": Plan.load(tmp_path / "plan.json"), "seed": 3, "loss_fn": any_models.square}
    with Pipeline(any_models.made("unet")[0], args[0][:3], devices=["cpu"] * 4, **choices) as pipe:
        assert pipe.plan.program == saved.program
        assert torch.equal(pipe.step(*args, target=target), whole)
        assert torch.equal(pipe.step(args[0][:2], target=target[:2]), short)


def test_a_plan_whose_program_was_edited_runs_the_edited_program(tmp_path):
    """Here the last rank of 1F1B does all its forwards first."""
    with pipeline(linears(), boundaries=[2], num_microbatches=2) as pipe:
        values, text = pipe.plan.to_dict(), str(pipe.plan.program)
    assert "rank 1: 1F0 1B0 1F1 1B1" in text
    values["program"] = text.replace("1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1").splitlines()
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert Plan.load(tmp_path / "plan.json").to_dict()["program"] == values["program"]
    with pipeline(linears(), plan=Plan.load(tmp_path / "plan.json")) as pipe:
        pipe.step(torch.ones(2, 3), target=torch.ones(2, 3))
        assert [str(span.action) for span in pipe.trace.by_rank[1]] == ["1F0", "1F1", "1B0", "1B1"]


def test_a_plan_of_a_users_own_schedule_runs_its_program():
    @schedule("one-at-a-time")
    def one_at_a_time(rank, shape):
        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
            order.B(rank)
        return order

    with pipeline(linears(), schedule=one_at_a_time, num_microbatches=3) as pipe:
        own = pipe.plan
    assert own.schedule == "one-at-a-time"
    assert own.to_dict()["program"] == str(own.program).splitlines()
    with pipeline(linears(), plan=Plan.from_dict(own.to_dict())) as pipe:
        assert pipe.plan.program == own.program == one_at_a_time.program(2, 3)


def test_a_measured_plan_predicts_from_what_was_measured():
    with pipeline(linears(), boundaries=[2]) as pipe:
        assert pipe.plan.costs is None
        assert pipe.predicted.makespan_s > 0
        profiled = pipe.plan.costs
        for _ in range(3):
            pipe.step(torch.ones(8, 3), target=torch.ones(8, 3))
        measured = pipe.plan.costs
    assert profiled.num_stages == measured.num_stages == 2
    assert measured.forward_s != profiled.forward_s
    assert measured.activation_bytes == profiled.activation_bytes
    assert min(profiled.activation_bytes) > 0


# ---- wrong files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "not json", "{", '{"stages": 1'])
def test_a_file_that_is_no_json_is_named(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ScheduleError, match=r"plan\.json: "):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"text"'])
def test_a_file_of_another_kind_of_json_is_named(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(
        ScheduleError,
        match=r"plan\.json: a plan must have the fields schedule, stages, .*; got .*; save the file again",
    ):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("key", ["schedule", "stages", "checkpoint", "program"])
def test_a_file_without_an_entry_names_it(tmp_path, key):
    values = plan().to_dict()
    del values[key]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(
        ScheduleError, match=rf"plan\.json: a plan must have .*; '{key}' is missing; save the plan again"
    ):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        (
            "stages",
            [["a", "b", "c"]],
            r"the plan lists 1 stage, but its program cuts the model into 2 parts; correct the stages",
        ),
        ("program", ["rank 0: 0F0"], r"no line 'microbatches'; add 'microbatches N'"),
        ("program", ["microbatches 1", "rank 0: 0F0 0Z0"], r"line 2: .*0Z0"),
        ("program", 3, r"a value is wrong \(TypeError: expected a list, got 3\); save the plan again"),
        ("program", {"digest": 3}, r"the plan has the digest 3: the plan was made by another version"),
        (
            "program",
            {"digset": ""},
            r"program must have the fields edges, digest; got the unknown key 'digset' \(did you mean 'digest'\?\)",
        ),
        (
            "chekpoint",
            "always",
            r"a plan must have .*; got the unknown key 'chekpoint' \(did you mean 'checkpoint'\?\); correct the key",
        ),
        ("comment", "mine", r"a plan must have .*; got the unknown key 'comment'; correct the key, or leave it out"),
        ("program", {"edges": [[0, 9]]}, r"an edge of a saved plan must lead"),
        ("num_ranks", 0, r"a value is wrong \(ZeroDivisionError: .*\); save the plan again"),
        ("num_microbatches", 4.5, r"whole number of micro-batches"),
        ("schedule", "gpype", r"unknown schedule; got 'gpype'"),
        ("stages", 3, r"a value is wrong \(TypeError: expected a list, got 3\); save the plan again"),
        (
            "stages",
            [["a", "b"], ["b"]],
            r"every layer must be in exactly one stage; the plan lists 'b' 2 times; remove the duplicates",
        ),
        ("costs", {"forward_s": [1]}, r"'input_grad_s' is missing; add it"),
        (
            "alternatives",
            [OTHERS[0].to_dict() | {"speed": 3}],
            r"an alternative must have the fields label, .*'speed'; correct the key",
        ),
        ("alternatives", [OTHERS[0].to_dict() | {"step_s": -1}], r"step_s of the alternative '1f1b' is -1"),
    ],
)
def test_a_wrong_entry_is_an_error_that_names_the_file(tmp_path, key, value, match):
    (tmp_path / "plan.json").write_text(json.dumps(plan().to_dict() | {key: value}))
    with pytest.raises(ScheduleError, match=r"(?s)plan\.json: .*" + match):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("schedule", "gpipe", r"'schedule' is 'gpipe' in the plan, but '1f1b' in its program"),
        ("num_ranks", 3, r"'num_ranks' is 3 in the plan, but 2 in its program"),
        ("num_microbatches", 16, r"'num_microbatches' is 16 in the plan, but 4 in its program"),
    ],
)
def test_an_edited_entry_that_the_program_contradicts_is_an_error_and_not_left_unread(tmp_path, key, value, match):
    values = plan().to_dict() | {"program": str(plan().program).splitlines()}
    (tmp_path / "plan.json").write_text(json.dumps(values | {key: value}))
    with pytest.raises(
        ScheduleError, match=rf"plan\.json: a plan must agree with its program; {match}; make them agree"
    ):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_plan_with_edited_stages_keeps_no_statements_about_the_old_stages(schedule):
    model = linears()
    with pipeline(model, schedule=schedule) as pipe:
        pipe.step(torch.ones(8, 3), target=torch.zeros(8, 3))
        pipe.step(torch.ones(8, 3), target=torch.zeros(8, 3))
        values = replace(pipe.plan, alternatives=OTHERS).to_dict()
    assert values["partition"]
    assert values["costs"]
    every = [name for layers in values["stages"] for name in layers]
    cut = 1 if len(values["stages"][0]) != 1 else 2
    values["stages"] = [every[:cut], every[cut:]]
    edited = Plan.from_dict(values)
    assert edited.stages == (tuple(every[:cut]), tuple(every[cut:]))
    assert (edited.costs, edited.partition, edited.ties, edited.alternatives) == (None, None, (), ())
    with pipeline(model, plan=edited) as pipe:
        pipe.step(torch.ones(8, 3), target=torch.zeros(8, 3))
        assert pipe.plan.stages == edited.stages
        assert "no cut is better" not in str(pipe.report())


def test_a_plan_with_an_unknown_checkpoint_mode_does_not_run():
    with pipeline(linears(), boundaries=[2]) as pipe:
        values = pipe.plan.to_dict() | {"checkpoint": "sometimes"}
    with pytest.raises(ScheduleError, match=r"one of never, always, except_last, or .*; got 'sometimes'"):
        Plan.from_dict(values)


def test_a_program_that_deadlocks_is_refused_on_load(tmp_path):
    values, wrong = plan().to_dict(), plan().program
    orders = [wrong.orders[0], tuple(reversed(wrong.orders[1]))]
    values["program"] = str(wrong.with_orders(orders)).splitlines()
    with pytest.raises((ScheduleError, DeadlockError), match="1B3"):
        Plan.from_dict(values)
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ScheduleError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_is_not_there_is_pythons_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "no.json")
