"""Plans that run before one is chosen: real steps on CPUs, of layers that sleep; and the model is as it was."""

import copy
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import pipesched
from pipesched.cli.main import main
from pipesched.errors import InputError, ScheduleError
from pipesched.pipeline import plan_trials as trial
from pipesched.runtime.rank_host import host_for
from pipesched.simulation.profile import Profile
from tests.support.branching_models import ROWS, inputs_of, made
from tests.support.sleeping_layers import Waiting

mse = nn.functional.mse_loss


def sleepers(*seconds: float) -> nn.Sequential:
    return nn.Sequential(*(Waiting(each_s, back=1.0, width=4) for each_s in seconds))


def told(model: nn.Module, sample: torch.Tensor, seconds: list[float]) -> Profile:
    """A profile that says how long each layer sleeps."""
    graph = pipesched.graph_of(model, sample, measured=False)
    for (name, _), own in zip(list(graph.nodes(data=True)), seconds, strict=True):
        times = {"forward_s": own, "backward_s": own, "input_grad_s": own, "weight_grad_s": own / 10}
        sizes = dict.fromkeys(("input_bytes", "output_bytes", "weight_grad_bytes", "activation_bytes"), 32)
        graph.add_node(name, **times, **sizes)
    return Profile({len(sample): graph})


def tried_out(model: nn.Module) -> trial.PlanTrial:
    devices = ["cpu"] * 2
    return trial.PlanTrial(model, X, None, None, 0, {"devices": devices}, host_for(devices, None, 1, None, "all"), 8)


X, Y = torch.randn(2, 4), torch.randn(2, 4)


def test_trial_runs_correct_a_wrong_profile() -> None:
    """The last layer sleeps five times as long as is told: all but it belong on the other rank."""
    model = sleepers(0.01, 0.01, 0.01, 0.05)
    lie = told(model, X, [0.01, 0.01, 0.01, 0.01])
    choices: Any = {"devices": ["cpu"] * 2, "batch_size": 8, "num_microbatches": 4, "schedule": "1f1b"}
    misled = pipesched.tune(lie, **choices)
    assert misled.boundaries == ["2"]
    plan = pipesched.tune(model, X, profile=lie, loss_fn=mse, target=Y, confirm=2, all_ranks=True, **choices)
    assert plan.boundaries == ["3"]
    assert plan.costs is not None
    assert plan.costs.forward_s[0] < 0.045 < plan.costs.forward_s[1]  # corrected by the trial runs, so not exact
    own, *others = plan.alternatives
    assert own.first_s is not None
    assert own.measured_s is not None
    assert own.measured_s > 8 * 0.05
    assert any(other.measured_s is not None and other.note.startswith("measured ") for other in others)


class Hooked(nn.Module):
    """What training could leave behind: dropout, running statistics, counters, lists that grow, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.second, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.second(self.drop(self.norm(self.first(x)))[:, None])
        return self.last(hidden[:, 0])


@pytest.mark.filterwarnings("ignore:BatchNorm sees")
def test_the_model_is_as_it_was() -> None:
    """To the bit, and the same objects: parameters, gradients, buffers, the optimizer's state, random numbers, modes;
    an optimizer that steps in a hook of its parameters is not called.
    """
    torch.manual_seed(0)
    model, scale = Hooked(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam(model.parameters())
    mse(model(X), Y).backward()
    optimizer.step()
    model.norm.eval()
    fired = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p) or p.data.zero_())
    sample = X.clone().requires_grad_()
    objects = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), sample, scale)}
    grads = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    attributes = [dict(module.__dict__) for module in model.modules()]
    state = copy.deepcopy((model.state_dict(), grads, optimizer.state_dict()))
    torch.manual_seed(7)
    random.seed(7)
    numbers = torch.get_rng_state(), random.getstate()
    plan = pipesched.tune(model, sample, devices=["cpu"] * 2, batch_size=4, num_microbatches=2, loss_fn=mse, target=Y)
    assert any(other.measured_s for other in plan.alternatives)
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers(), sample, scale)} == {*objects}
    assert [parameter.grad for parameter in model.parameters()] == grads
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    torch.testing.assert_close(
        (model.state_dict(), grads, optimizer.state_dict()), state, rtol=0, atol=0, equal_nan=True
    )
    assert [module.training for module in model.modules()] == modes
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert (fired, sample.grad) == ([], None)
    assert model.last.weight is model.first.weight


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:layer times should add up")  # of the profile, on a busy machine
@pytest.mark.parametrize("name", ["tied", "towers", "unet"])
def test_any_model_runs_with_its_own_loss_or_without_one(name: str) -> None:
    model, (args, kwargs, _) = made(name)[0], inputs_of(name, ROWS)
    plan = pipesched.tune(
        model, kwargs or args, devices=["cpu"] * 2, batch_size=ROWS, num_microbatches=2, schedule="1f1b", confirm=1
    )
    assert plan.alternatives[0].measured_s


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:layer times should add up", "ignore:layer times must be measured on an idle")
@pytest.mark.parametrize(
    "setting", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_plans_run_as_they_train_whatever_the_caller_has_set(setting: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with setting():
        plan = pipesched.tune(model, X, devices=["cpu"] * 2, batch_size=8, num_microbatches=4, confirm=1)
    assert plan.alternatives[0].measured_s
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_plans_run_in_turn_each_after_a_step_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = pipesched.Pipeline.step

    def step(self: pipesched.Pipeline, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.plan.schedule)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(pipesched.Pipeline, "step", step)
    model, shares = sleepers(0.0, 0.0), []
    plans = [
        pipesched.tune(told(model, X, [1.0, 1.0]), num_ranks=2, batch_size=8, schedule=name)
        for name in ("1f1b", "gpipe")
    ]
    own = tried_out(model)
    steps = own.run(plans, shares.append)
    assert seen == (["1f1b"] * 3 + ["gpipe"] * 3) * 2
    assert [len(each) for each in steps] == [4, 4]
    assert {step.num_microbatches for each in steps for step in each} == {4}
    assert shares == [0.25, 0.5, 0.75, 1.0]


class Large(nn.Linear):
    """Has room for micro-batches of two rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("no room")
        return super().forward(x)


def test_a_plan_without_room_has_no_steps() -> None:
    model = nn.Sequential(Large(4, 4), Large(4, 4))
    known = told(model, X, [1.0, 1.0])
    small = pipesched.tune(known, num_ranks=2, batch_size=8, num_microbatches=4)
    large = pipesched.tune(Profile({4: known.graphs[2]}), num_ranks=2, batch_size=8, num_microbatches=2)
    assert [len(each) for each in tried_out(model).run([small, large, small], lambda _: None)] == [4, 0, 4]
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        tried_out(model).run([large], lambda _: None)


def test_no_round_begins_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_ROUNDS", 10)
    monkeypatch.setattr(trial, "_ENOUGH_S", -1.0)
    model = sleepers(0.0, 0.0)
    plan = pipesched.tune(told(model, X, [1.0, 1.0]), num_ranks=2, batch_size=8)
    own = tried_out(model)
    assert [len(each) for each in own.run([plan], lambda _: None)] == [2]


@pytest.mark.parametrize(("runs_all", "counts"), [(True, [2, 2, 2]), (False, [2, 0, 0])])
def test_only_the_best_plans_run_if_steps_take_long(
    runs_all: bool, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_ENOUGH_S", -1.0)
    model = sleepers(0.0, 0.0)
    plan = pipesched.tune(told(model, X, [1.0, 1.0]), num_ranks=2, batch_size=8)
    own = replace(tried_out(model), runs_all=runs_all)
    assert [len(each) for each in own.run([plan] * 3, lambda _: None)] == counts


def test_a_plan_without_room_does_not_count_as_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_ENOUGH_S", -1.0)
    model = nn.Sequential(Large(4, 4), Large(4, 4))
    known = told(model, X, [1.0, 1.0])
    small = pipesched.tune(known, num_ranks=2, batch_size=8, num_microbatches=4)
    large = pipesched.tune(Profile({4: known.graphs[2]}), num_ranks=2, batch_size=8, num_microbatches=2)
    own = replace(tried_out(model), runs_all=False)
    assert [len(each) for each in own.run([large, small, small], lambda _: None)] == [0, 2, 0]


def test_no_round_begins_after_the_fastest_plan_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_ROUNDS", 10)
    monkeypatch.setattr(trial, "settled", lambda steps: True)
    model = sleepers(0.0, 0.0)
    plan = pipesched.tune(told(model, X, [1.0, 1.0]), num_ranks=2, batch_size=8)
    assert [len(each) for each in tried_out(model).run([plan], lambda _: None)] == [2 * 4]


def test_what_fails_while_a_plan_runs_leaves_the_model_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = list(model.parameters())

    def loss(output: Any, target: Any) -> Any:
        raise OSError("no loss today")

    with pytest.raises(OSError, match="no loss today"):
        pipesched.tune(
            model, X, profile=told(model, X, [1.0, 1.0]), devices=["cpu"] * 2, batch_size=8, loss_fn=loss, target=Y
        )
    assert all(own is other for own, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (
            {"model": None},
            r"requires a model to run; got confirm=2 with a profile, but without a model; pass the model",
        ),
        (
            {"ranks_are": "processes"},
            r"running it on all of its ranks; got confirm=2 with ranks_are='processes', but without a mesh; call tune",
        ),
        ({"confirm": -1}, r"number of plans to run, at least 0; got -1; pass 0 to run none"),
        ({"confirm": 1.5}, r"number of plans to run, at least 0; got 1\.5; pass 0"),
        (
            {"target": Y},
            r"loss_fn= and target= must be passed together; only target= was passed; pass both, or neither",
        ),
    ],
)
def test_requests_that_cannot_be_confirmed_are_refused(asked: dict[str, Any], match: str) -> None:
    model = sleepers(0.0, 0.0)
    known = told(model, X, [1.0, 1.0])
    given: dict[str, Any] = {"model": model, "devices": ["cpu"] * 2, "confirm": 2, "profile": known, **asked}
    own = given.pop("model") or given.pop("profile")
    with pytest.raises(InputError, match=match):
        pipesched.tune(own, X, batch_size=8, **given)


def test_a_profile_of_another_model_does_not_run() -> None:
    with pytest.raises(ScheduleError, match="model"):
        pipesched.tune(
            sleepers(0.0, 0.0, 0.0),
            X,
            profile=told(sleepers(0.0, 0.0), X, [1.0, 1.0]),
            devices=["cpu"] * 2,
            batch_size=8,
        )


def test_no_plan_runs_without_a_model_devices_or_trials() -> None:
    model = sleepers(0.0, 0.0)
    known = told(model, X, [1.0, 1.0])
    for plan in (
        pipesched.tune(known, devices=["cpu"] * 2, batch_size=8),
        pipesched.tune(model, X, profile=known, num_ranks=2, batch_size=8),
        pipesched.tune(model, X, profile=known, devices=["cpu"] * 2, batch_size=8, confirm=0),
    ):
        assert all(other.measured_s is None for other in plan.alternatives)


SCRIPT = """
import torch
from torch import nn
def made():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
"""


def test_the_command_runs_plans(tmp_path: Any) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["tune", f"{tmp_path / 'script.py'}:made", "--ranks", "2", "--batch", "8", "--confirm", "2"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert re.search(r"confirmed: in trial runs of \d plans this plan took", result.output)
    told(sleepers(0.0, 0.0), X, [1.0, 1.0]).save(tmp_path / "profile.json")
    result = CliRunner().invoke(main, ["tune", str(tmp_path / "profile.json"), "--batch", "8", "--confirm", "2"])
    assert result.exit_code == 1
    assert "got confirm=2 with a profile, but without a model" in result.output
