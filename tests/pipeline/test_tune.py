"""Plans that are found for real models: ``tune``, ``schedule="auto"`` and the command, from made-up measurements."""

import copy
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import pipesched
from pipesched import Pipeline, Plan, Search
from pipesched.cli.main import main
from pipesched.errors import InputError, MemoryLimitError, PartitionError, ScheduleError
from pipesched.pipeline.auto_plan import adds_up
from pipesched.planning.tuner import find_plan
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Machine, Overheads
from pipesched.simulation.profile import Profile
from pipesched.testing import reference_step

mse = nn.functional.mse_loss


def model(width=8, count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Dropout(0.1))))


def profiled(module, sample, sizes=(2,), heavy=(), fixed_s=0.0, activation_bytes=1000):
    """Every Linear takes a second a row forward, one that is heavy four."""
    graphs = {}
    for rows in sizes:
        graph = pipesched.graph_of(module, sample, measured=False)
        for at, (name, node) in enumerate(graph.nodes(data=True)):
            forward_s = (4.0 if at in heavy else 1.0 if node["parameters"] else 0.01) * rows + fixed_s
            times = {"input_grad_s": 0.9 * forward_s, "weight_grad_s": 0.9 * forward_s, "backward_s": 1.8 * forward_s}
            sizes_of = dict.fromkeys(("input_bytes", "output_bytes", "weight_grad_bytes"), 10 * rows)
            graph.add_node(name, forward_s=forward_s, **times, **sizes_of, activation_bytes=activation_bytes * rows)
        graphs[rows] = graph
    return Profile(graphs)


def made(module, profile=None, devices=4, search=Search(), **choices):
    x = torch.randn(2, 8)
    known = profiled(module, x) if profile is None else profile
    return Pipeline(
        module, x, loss_fn=mse, devices=["cpu"] * devices, search=replace(search, profile=known), seed=3, **choices
    )


def test_a_pipeline_runs_the_plan_that_is_found_with_the_loops_bits(tmp_path):
    own, other = model(), copy.deepcopy(model())
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    known = replace(profiled(own, x[:2], heavy=[10]), machine=Machine(threads=Overheads()))  # whatever runs this test
    with made(own, known, search=Search(effort=60_000)) as pipe:
        plan = pipe.plan
        assert plan.alternatives[0].step_s < min(a.step_s for a in plan.alternatives if a.label == "equal split")
        assert plan.alternatives[0].note == ""
        assert pipe.num_microbatches == 16
        loss = pipe.step(x, target=y)
    expected = reference_step(other, x, target=y, loss_fn=mse, num_microbatches=16, seed=3)
    assert torch.equal(loss, expected)
    for p, q in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    found = pipesched.tune(known, num_ranks=4, batch_size=32, num_microbatches=16, effort=60_000)
    assert (found.schedule, found.stages) == (plan.schedule, plan.stages)
    found.save(tmp_path / "plan.json")
    with Pipeline(model(), x[:2], loss_fn=mse, devices=["cpu"] * 4, plan=Plan.load(tmp_path / "plan.json")) as pipe:
        assert pipe.plan.alternatives == found.alternatives


def test_a_search_needs_no_tqdm(monkeypatch, capsys):
    known = profiled(model(), torch.randn(2, 8))
    plans = [pipesched.tune(known, num_ranks=2, batch_size=8, progress=True)]
    assert "searching for a plan: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    plans.append(pipesched.tune(known, num_ranks=2, batch_size=8, progress=True))
    assert plans[0].to_dict() == plans[1].to_dict()
    assert capsys.readouterr().err == ""


def test_overheads_of_the_profile_are_predicted_until_steps_are_measured():
    own = model()
    machine = Machine(threads=Overheads(action_s=0.25))
    with made(own, replace(profiled(own, torch.randn(2, 8)), machine=machine), devices=2) as pipe:
        assert pipe.predicted.costs.overheads == pipe.plan.costs.overheads == machine.threads
        assert pipe.predicted.makespan_s == pytest.approx(pipe.plan.alternatives[0].step_s)
        for _ in range(2):
            pipe.step(torch.randn(16, 8), target=torch.randn(16, 8))
        assert pipe.predicted.costs.overheads is None  # measured actions have it in them
        assert pipe.predicted.makespan_s < 1


def test_without_a_profile_layers_are_measured():
    with Pipeline(model(), torch.randn(2, 8), loss_fn=mse, devices=["cpu"] * 2) as pipe:
        assert {a.label for a in pipe.plan.alternatives} >= {"one device", "equal split"}
        assert pipe.num_microbatches == 8
        pipe.step(torch.randn(16, 8), target=torch.randn(16, 8))


def test_only_the_size_of_a_given_number_of_micro_batches_is_measured(monkeypatch):
    from pipesched.pipeline import tune as tuning

    real, profiles = tuning.measure, []

    def measure(*args, **options):
        profiles.append(real(*args, **options))
        return profiles[-1]

    monkeypatch.setattr(tuning, "measure", measure)
    for count, sizes in ((4, [8]), (None, [2, 4, 8, 16])):
        pipesched.tune(model(), torch.randn(8, 8), num_ranks=2, batch_size=32, num_microbatches=count, confirm=0)
        assert sorted(profiles.pop().graphs) == sizes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"effort": 0}, "effort= must be the number of actions"),
        ({"zero": 2}, "zero= splits optimizer states across replicas"),
        ({"axes": "auto", "effort": 5000}, "effort= limits a single search"),
    ],
)
def test_options_of_the_search_are_refused_before_the_layers_are_measured(monkeypatch, options, says):
    from pipesched.pipeline import tune as tuning

    monkeypatch.setattr(tuning, "measure", lambda *_, **__: pytest.fail("the layers were measured"))
    with pytest.raises(InputError, match=says):
        pipesched.tune(model(), torch.randn(8, 8), num_ranks=2, batch_size=32, **options)


@pytest.mark.usefixtures("whole_searches")
def test_searches_between_trial_runs_take_less_effort(monkeypatch):
    from pipesched.pipeline import tune as tuning

    efforts, run_all = [], []

    def confirmed_plan(search, *args):
        efforts.append(search.effort)
        return find_plan(search)

    def trial(*args, runs_all):
        run_all.append(runs_all)
        return SimpleNamespace(run=None)

    monkeypatch.setattr(tuning, "confirmed_plan", confirmed_plan)
    monkeypatch.setattr(tuning, "PlanTrial", trial)
    known = profiled(model(), torch.randn(2, 8))
    for effort, confirm in ((None, None), (5000, 2)):
        found = pipesched.tune(
            model(),
            torch.randn(2, 8),
            devices=["cpu"] * 2,
            batch_size=8,
            profile=known,
            effort=effort,
            confirm=confirm,
        )
        assert found.schedule
    assert efforts == [300_000, 5000]
    assert run_all == [False, True]


def test_devices_that_only_wait_are_not_used():
    with made(model(), search=Search(links=Links(inside=Link(latency_s=1000.0)))) as pipe:
        assert pipe.plan.program.num_ranks == 1
        assert len(pipe.devices) == 1
        pipe.step(torch.randn(16, 8), target=torch.randn(16, 8))


def test_a_plan_says_that_the_search_chose_it():
    with made(model()) as pipe:
        assert "the boundaries were given" not in pipe.plan.explain()
        assert "bound by " in pipe.plan.explain()
    with made(model(), boundaries=["4"], num_microbatches=4, devices=2) as pipe:
        assert "the boundaries were given" in pipe.plan.explain()


@pytest.mark.parametrize("profile", [3, ["profile.json"], b"x"])
def test_what_is_no_profile(profile):
    with pytest.raises(
        InputError, match=r"a Profile or the path of a saved profile; got .*; pass the result of pipesched\.profile"
    ):
        made(model(), profile)


def test_stages_that_do_not_divide_name_numbers_that_do():
    with pytest.raises(
        PartitionError,
        match=r"12 layers cannot be split into 3 stages on 2 ranks; pass num_stages=2 or num_stages=4, use",
    ):
        made(model(), num_stages=3, devices=2)
    match = r"2 layers cannot be split into 4 stages on 2 ranks; pass num_stages of at most 2, or leave it out"
    with pytest.raises(PartitionError, match=match):
        made(model(count=1), num_stages=4, devices=2)


def test_a_limit_of_memory_counts_the_states_of_the_optimizer():
    own = model(width=8)
    known = profiled(own, torch.randn(2, 8), activation_bytes=0)
    asked = {"devices": 2, "schedule": "1f1b"}
    with made(own, known, search=Search(memory_limit_bytes=10**6), **asked) as pipe:
        limit = pipe.plan.alternatives[0].peak_bytes
    with pytest.raises(MemoryLimitError):  # Adam keeps two more of each weight, and its step needs some, too
        made(own, known, search=Search(memory_limit_bytes=limit), optimizer=torch.optim.Adam, **asked)
    with made(own, known, search=Search(memory_limit_bytes=3 * limit), optimizer=torch.optim.Adam, **asked) as pipe:
        assert pipe.plan.memory()[0].optimizer > 0


def test_a_plan_and_what_a_search_would_take():
    plan = pipesched.tune(profiled(model(), torch.randn(2, 8)), num_ranks=2, batch_size=16)
    for given in (
        {"search": Search(memory_limit_bytes=10)},
        {"search": Search(batch_size=16)},
        {"search": Search(profile="profile.json")},
    ):
        with pytest.raises(
            PartitionError, match=r"a plan leaves nothing to search for; .* with plan=; pass plan= without them"
        ):
            Pipeline(model(), torch.randn(2, 8), loss_fn=mse, devices=["cpu"] * 2, plan=plan, **given)


def test_a_model_of_one_layer_runs_on_one_device():
    one = nn.Linear(8, 8)
    with Pipeline(one, torch.randn(2, 8), loss_fn=mse, devices=["cpu"] * 2) as pipe:
        assert len(pipe.devices) == 1
        pipe.step(torch.randn(16, 8), target=torch.randn(16, 8))


def test_a_number_of_micro_batches_from_a_file_of_settings_is_searched_with():
    with made(model(), num_microbatches=8.0) as pipe:
        assert pipe.num_microbatches == 8
        assert pipe.plan.alternatives


def test_replan_keeps_what_was_given_beside_a_search():
    own = model()
    known = profiled(own, torch.randn(2, 8))
    with made(own, known, boundaries={"10": 1}, num_stages=2, devices=2, num_microbatches=4) as pipe:
        for _ in range(5):
            pipe.step(torch.randn(16, 8), target=torch.randn(16, 8))
        pipe.replan()
        assert pipe.boundaries == ["10"]


def test_baselines_are_held_against_what_was_asked():
    with made(model(), checkpoint="always") as pipe:
        own, *others = pipe.plan.alternatives
        assert {each.checkpoint for each in (own, *others)} == {"always"}
        assert min(each.step_s for each in others) >= own.step_s * 0.995
    with made(model(), boundaries=["1"], num_microbatches=4, devices=2) as pipe:  # most of the work on one rank
        own, *others = pipe.plan.alternatives
        assert any(
            each.note.endswith("x faster, but the request does not allow this plan")
            for each in others
            if each.label == "equal split"
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seconds", [(1.0, 0.3), (1.0, 0.9), (0.3, 1.0)])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_no_schedule_is_left_out_that_would_have_been_faster(seconds, count):
    own = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    graph = pipesched.graph_of(own, torch.randn(2, 8), measured=False)
    for name, forward_s in zip(list(graph), seconds, strict=True):
        times = {"input_grad_s": forward_s, "weight_grad_s": 1.1 * forward_s, "backward_s": 2 * forward_s}
        sizes = dict.fromkeys(("input_bytes", "output_bytes", "weight_grad_bytes", "activation_bytes"), 10)
        graph.add_node(name, forward_s=forward_s, **times, **sizes)
    plan = pipesched.tune(Profile({2: graph}), num_ranks=2, batch_size=2 * count, all_ranks=True)
    chosen, *others = plan.alternatives
    assert all(other.step_s >= chosen.step_s for other in others if other.label != "one device")


def test_given_schedules_and_boundaries_are_kept():
    with made(model(), schedule="gpipe", num_microbatches=4) as pipe:
        assert (pipe.plan.schedule, pipe.num_microbatches) == ("gpipe", 4)
    with made(model(), boundaries={"4": 1}, num_stages=2, devices=2) as pipe:
        assert pipe.boundaries == ["4"]
    with made(model(), boundaries=["4", "6"], devices=3) as pipe:
        assert pipe.boundaries == ["4", "6"]


def test_a_limit_of_memory_is_kept_by_recomputing():
    own = model()
    with made(own, schedule="1f1b") as pipe:
        free = pipe.plan
    limit = max(a.peak_bytes for a in free.alternatives[:1]) // 2
    with made(own, schedule="1f1b", search=Search(memory_limit_bytes=limit)) as pipe:
        tight = pipe.plan.alternatives[0]
        assert tight.peak_bytes <= limit == tight.limit_bytes
        assert tight.step_s > free.alternatives[0].step_s
        pipe.step(torch.randn(32, 8), target=torch.randn(32, 8))
    with pytest.raises(MemoryLimitError, match="the smallest limit for a plan is"):
        made(own, schedule="1f1b", search=Search(memory_limit_bytes=10))


def test_the_size_of_micro_batches_is_chosen_where_nothing_learned_depends_on_it():
    own = model()
    dear = profiled(own, torch.randn(2, 8), sizes=(1, 2, 4, 8), fixed_s=8.0)
    with made(own, dear, search=Search(batch_size=32)) as pipe:
        assert pipe.num_microbatches < 16
    with made(own, dear, search=Search(batch_size=32), num_microbatches=32) as pipe:
        assert pipe.num_microbatches == 32
    norm = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8))))
    with made(
        norm, profiled(norm, torch.randn(2, 8), sizes=(1, 2, 4, 8), fixed_s=8.0), search=Search(batch_size=32)
    ) as pipe:
        assert pipe.num_microbatches == 16  # of the sample's size


def test_losses_that_add_up_over_microbatches_are_recognised():
    assert adds_up(model(), mse, None)
    assert adds_up(model(), nn.CrossEntropyLoss(), None)
    assert adds_up(model(), lambda output, target: output.sum(), len)
    assert not adds_up(model(), lambda output, target: output.std(), None)
    assert not adds_up(model(), None, None)
    assert not adds_up(nn.Sequential(nn.BatchNorm1d(8)), mse, None)


def test_a_profile_of_another_model_is_an_error():
    with pytest.raises(ScheduleError, match="model"):
        made(model(), profiled(model(count=2), torch.randn(2, 8)))
    with pytest.raises(ScheduleError, match="model"):
        made(model(), profiled(model(width=4), torch.randn(2, 4)))


@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        (
            {"num_ranks": 2, "devices": ["cpu"]},
            InputError,
            "exactly one of num_ranks=, devices= and mesh=; got .*; pass one of them",
        ),
        ({}, InputError, "exactly one of num_ranks=, devices= and mesh=; got num_ranks=None"),
        ({"num_ranks": 0}, PartitionError, r"num_ranks must be a whole number, at least 1; got 0; pass 1 or more"),
        (
            {"num_ranks": 2, "batch_size": 0},
            PartitionError,
            r"number of rows in a batch must be a whole number, at least 1; got 0",
        ),
        (
            {"num_ranks": 2, "batch_size": 64},
            PartitionError,
            r"64 rows cannot be split into micro-batches of a measured size; measured sizes: 20 rows",
        ),
        (
            {"num_ranks": 2, "num_microbatches": 99},
            PartitionError,
            r"32 rows cannot be split into 99 micro-batches; measured sizes",
        ),
        (
            {"num_ranks": 2, "memory_limit_bytes": [1]},
            PartitionError,
            r"applies to each rank, or a list with one number for each rank \(2 in all\); got",
        ),
        ({"num_ranks": 2, "memory_limit_bytes": -1}, PartitionError, r"positive number of bytes"),
        (
            {"num_ranks": 2, "schedule": "pipedream"},
            ScheduleError,
            r"synchronous schedules with one chain.*'pipedream'",
        ),
        ({"num_ranks": 2, "schedule": "chimera"}, ScheduleError, r"synchronous schedules with one chain.*'chimera'"),
    ],
)
def test_invalid_requests_of_tune_are_refused(asked, error, match):
    known = profiled(model(), torch.randn(2, 8), sizes=(20,) if asked.get("batch_size") == 64 else (2,))
    with pytest.raises(error, match=match):
        pipesched.tune(known, **{"batch_size": 32, **asked})


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_finds_the_same_plan_each_time(tmp_path):
    profiled(model(), torch.randn(2, 8), heavy=[0]).save(tmp_path / "profile.json")
    plans = []
    for name in ("one.json", "other.json"):
        command = ["tune", str(tmp_path / "profile.json"), "--ranks", "4", "--batch", "32", "--memory-limit", "1GB"]
        result = CliRunner().invoke(main, [*command, "-o", str(tmp_path / name)], catch_exceptions=False)
        assert result.exit_code == 0
        assert "equal split" in result.output
        plans.append((tmp_path / name).read_bytes())
    assert plans[0] == plans[1]
    assert json.loads(plans[0])["alternatives"][0]["limit_bytes"] == 10**9
    assert Plan.load(tmp_path / "one.json").predicted().makespan_s > 0


@pytest.mark.parametrize(
    ("target", "said"),
    [("nope.json", "or, for tune, a saved profile.*it names no function"), ("math:pi", "math:pi returned float")],
)
def test_what_is_no_model_on_the_command_line(target, said):
    result = CliRunner().invoke(main, ["tune", target, "--batch", "4"])
    assert result.exit_code == 1
    assert re.search(said, result.output)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("text", "exit_code"), [("16GB", 0), ("1 GiB", 0), ("2e9", 0), ("much", 2), ("1e", 2)])
def test_sizes_of_memory_on_the_command_line(tmp_path, text, exit_code):
    profiled(model(count=2), torch.randn(2, 8)).save(tmp_path / "profile.json")
    command = ["tune", str(tmp_path / "profile.json"), "--ranks", "2", "--batch", "4", "--memory-limit", text]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == exit_code
    if exit_code:
        assert "is not a number of bytes; for example, pass 16GB, 16GiB or 2e9" in result.output


def test_a_plan_found_with_links_is_of_these():
    known = profiled(model(), torch.randn(2, 8))
    slow = Links(inside=Link(latency_s=1.0))
    plan = pipesched.tune(known, num_ranks=2, batch_size=32, links=slow, all_ranks=True)
    assert plan.costs.links == slow
    assert replace(plan, costs=replace(plan.costs, links=None)).predicted().makespan_s < plan.predicted().makespan_s
