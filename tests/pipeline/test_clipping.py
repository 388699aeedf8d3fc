"""Clipping: one norm, bit for bit, under every plan, and the clipped weights of the plain loop."""

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.text import Text
from torch import nn
from torch.amp import GradScaler

from pipesched import Kind, Numerics, Pipeline, Program, Search, Trace, schedules, simulate, viz
from pipesched.errors import ArgumentError, ExecutionError, InputError, ScheduleError
from pipesched.program.lowering import add_norms, add_updates
from pipesched.simulation.links import Link, Links
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.async_replay import pipeline as asynchronous
from tests.support.async_replay import transformer
from tests.support.jobs import clipping
from tests.support.places import Run, run_here

pytestmark = pytest.mark.timeout(60)
FLOAT, HALF = torch.float32, torch.bfloat16


HERE, MESH = "in process", "mesh"
BETWEEN, INSIDE = clipping.clip_between_steps, clipping.clip_in_steps
Case = clipping.Case


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Run:
    """Runs a job where the test says: not every case runs in both places."""
    return run_here if request.param == HERE else request.getfixturevalue("ranks").run


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("place", "count", "job", "case", "norm_type"),
    [
        (HERE, 1, BETWEEN, Case("1f1b", clipping.tied_model, FLOAT, "never"), 2.0),
        (HERE, 2, INSIDE, Case("zb-v", clipping.plain_model, HALF, "always"), 2.0),
        (HERE, 3, INSIDE, Case("1f1b", clipping.tied_model, FLOAT, "never"), math.inf),
        (MESH, 3, BETWEEN, Case("1f1b", clipping.tied_model, FLOAT, "never"), math.inf),
        (MESH, 2, BETWEEN, Case("zb-v", clipping.plain_model, HALF, "always"), 2.0),
        (MESH, 2, INSIDE, Case("interleaved-1f1b", clipping.tied_model, HALF, "never"), 3.0),
        (MESH, 3, INSIDE, Case("zb-h1", clipping.plain_model, FLOAT, "always"), 1.0),
    ],
    indirect=["place"],
)
def test_the_norm_and_the_clipped_weights_are_the_loops(place, count, job, case, norm_type):
    norms = place(count, job, case, norm_type, 2)
    assert all(own == norms[0] for own in norms)


def test_for_float32_gradients_the_rule_is_torchs():
    for norm_type in (1.0, 2.0, 2.5, math.inf):
        one, other = clipping.tied_model(), clipping.tied_model()
        for model in (one, other):
            torch.manual_seed(0)
            model(clipping.batch(0)[0]).square().sum().backward()
        mine = clip_grad_norm_(one.parameters(), 1.0, norm_type)
        assert torch.equal(mine, torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0, norm_type))
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert p.grad is None or torch.equal(p.grad, q.grad)


def test_a_norm_of_float64_gradients_is_float64():
    layer = nn.Linear(3, 3).double()
    layer(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert clip_grad_norm_(layer.parameters(), 1.0).dtype == torch.float64


def test_what_cannot_be_clipped_is_refused(run: Run):
    run(2, clipping.refuse_norms)


@pytest.mark.parametrize(
    "arguments", [(0,), (-1.0,), (math.nan,), ("1",), (True,), (1.0, 0), (1.0, "two"), (1.0, True)]
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(InputError, match=r"max_norm must be|norm_type must be"):
        clip_grad_norm_([nn.Parameter(torch.ones(1))], *arguments)


def test_asynchronous_schedules_cannot_be_clipped():
    with (
        asynchronous(transformer(), "pipedream", 2) as pipe,
        pytest.raises(InputError, match=r"'pipedream' updates the weights during each step \(num_m"),
    ):
        pipe.clip_grad_norm_(1.0)


def make(schedule: object, numerics: Numerics | None, **options: object) -> Pipeline:
    model, sample = clipping.plain_model(), clipping.batch(0)[0][:3]
    choices: dict = {"optimizer": clipping.adam, "loss_fn": clipping.loss_fn, "boundaries": [5], "seed": 5, **options}
    return Pipeline(model, sample, devices=["cpu"] * 2, schedule=schedule, numerics=numerics, **choices)


CLIPPED = Numerics(clip_grad_norm=1.0)


def test_clipping_inside_a_step_needs_optimizers_and_one_update_a_step():
    with pytest.raises(InputError, match=r"without optimizer=.* pass optimizer=, or call pipe\.clip_grad_norm_"):
        make("1f1b", CLIPPED, optimizer=None)
    for name in ("pipedream", "pipedream-2bw"):
        with pytest.raises(ScheduleError, match=f"schedule '{name}' updates the weights while micro-batches"):
            make(name, CLIPPED)


def test_a_program_with_norms_runs_where_they_are_used(tmp_path: Path):
    with make("1f1b", CLIPPED, num_microbatches=4) as pipe:
        program = Program.parse(str(add_norms(add_updates(pipe.plan.program))))
        x, y = clipping.batch(0)
        loss, norm = pipe.step(x, target=y), pipe.grad_norm
        pipe.step(x, target=y)
        pipe.trace.to_chrome(tmp_path / "trace.json")
        kinds = [span.action.kind for span in Trace.load(tmp_path / "trace.json").spans]
        assert kinds.count(Kind.NORM) == 2
        axes = viz.plot_timeline(pipe.trace)
        assert "gradient norm (NORM)" in {text.get_text() for text in axes.findobj(Text)}
    with make(program, CLIPPED) as pipe:
        assert torch.equal(pipe.step(x, target=y), loss)
        assert torch.equal(pipe.grad_norm, norm)
    with pytest.raises(ScheduleError, match="no such option was passed"):
        make(program, None)


def test_a_search_predicts_the_time_of_the_barrier():
    links = Links(Link(latency_s=1.0))
    times = []
    for numerics in (CLIPPED, None):
        options = {"num_microbatches": 4, "search": Search(batch_size=12, links=links, effort=1000)}
        with make("1f1b", numerics, **options) as pipe:
            program = add_updates(pipe.plan.program)
            program = add_norms(program) if numerics else program
            times.append((pipe.plan.alternatives[0].step_s, simulate(program, pipe.plan.costs).makespan_s))
    assert times[0][0] == pytest.approx(times[0][1])
    assert times[0][0] > times[1][0] + 0.5


def test_a_failed_step_leaves_no_norms_behind():
    with make("1f1b", CLIPPED, num_microbatches=4) as pipe:
        x, y = clipping.batch(0)
        first = pipe.model[0]
        handle = first.weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe.step(x, target=y)
        handle.remove()
        for _ in range(2):
            assert pipe.step(x, target=y).isfinite()
            assert pipe.grad_norm.isfinite()


def test_a_new_plan_clips_on():
    losses = []
    for plans in (("1f1b",), ("1f1b", "zb-h1", "gpipe")):
        with make("1f1b", CLIPPED, num_microbatches=4) as pipe:
            others = {
                name: replace(pipe.plan, schedule=name, program=schedules.get(name).program(2, 4)) for name in plans
            }
            for step in range(3):
                if len(plans) > 1:
                    pipe.replan(others[plans[step]])
                x, y = clipping.batch(step)
                losses.append((float(pipe.step(x, target=y)), float(pipe.grad_norm)))
    assert losses[:3] == losses[3:]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("place", "count", "case", "overflow", "optimizers"),
    [
        (HERE, 2, Case("1f1b", clipping.tied_model, FLOAT, "never"), None, True),
        (HERE, 3, Case("1f1b", clipping.plain_model, FLOAT, "never"), 7, True),
        (MESH, 2, Case("zb-v", clipping.plain_model, HALF, "always"), 1, True),
        (MESH, 3, Case("1f1b", clipping.plain_model, FLOAT, "never"), None, True),
        (MESH, 2, Case("1f1b", clipping.tied_model, FLOAT, "always"), 0, True),
        (HERE, 2, Case("zb-v", clipping.tied_model, FLOAT, "always"), 1, False),
        (MESH, 3, Case("1f1b", clipping.plain_model, FLOAT, "never"), 1, False),
        (MESH, 3, Case("1f1b", clipping.plain_model, HALF, "always"), 7, False),
        (MESH, 3, Case("1f1b", clipping.plain_model, FLOAT, "never"), 14, False),
        (MESH, 2, Case("1f1b", clipping.tied_model, FLOAT, "never"), None, False),
    ],
    indirect=["place"],
)
def test_an_overflow_in_any_stage_skips_the_update_of_all(place, count, case, overflow, optimizers):
    """And halves the scale everywhere; weights, norms and scales are those of torch's scaler in the plain loop."""
    start = 2.0**13 if overflow is None else 1024.0
    results = place(count, clipping.scale_losses, case, overflow, optimizers, start)
    assert all(own == results[0] for own in results)
    skips, scales = results[0]
    assert 1 <= skips < len(scales)


def test_an_overflow_stays_in_the_gradients_until_they_are_cleared(run: Run):
    run(2, clipping.accumulate_after_an_overflow)


def test_a_rank_without_gradients_cannot_have_a_scaler(ranks):
    ranks.run(2, clipping.refuse_ranks_without_gradients)


def test_a_scaler_is_refused_where_it_cannot_be_right():
    scaled = Numerics(scaler=GradScaler("cpu"))
    with pytest.raises(ScheduleError, match="'pipedream' updates the weights while micro-batches"):
        make("pipedream", scaled)
    with pytest.raises(ArgumentError, match=r"scaler must be a torch\.amp\.GradScaler"):
        Numerics(scaler=torch.amp)  # type: ignore[arg-type]
    with make("1f1b", Numerics(scaler=GradScaler("cpu", enabled=False)), optimizer=None) as pipe:
        assert pipe.step(clipping.batch(0)[0], target=clipping.batch(0)[1]).isfinite()
    with make("1f1b", scaled) as pipe:
        pipe.half()
        with pytest.raises(InputError, match=r"a gradient of shape .* is float16"):
            pipe.step(clipping.batch(0)[0], target=clipping.batch(0)[1])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("place", "react", "backward", "optimizers", "tied"),
    [
        (HERE, "raise", False, True, False),
        (HERE, "skip", True, True, True),
        (HERE, "warn", False, False, False),
        (MESH, "raise", True, False, True),
        (MESH, "raise", True, True, False),
        (MESH, "skip", False, True, False),
    ],
    indirect=["place"],
)
def test_the_first_value_that_is_not_finite_is_named(place, react, backward, optimizers, tied):
    """With its layer and micro-batch, on every rank; all later layers have infinite values too."""
    messages = place(2, clipping.find_nonfinite, react, backward, optimizers, tied)
    assert all(own == messages[0] for own in messages)
    what = "the gradient of the output" if backward else "the output"
    assert len(messages[0]) == (1 if react != "warn" else 2)
    assert f"in step 1, {what} of layer '6' for micro-batch 2 was the first value that was not finite" in messages[0][0]


def test_a_loss_that_is_not_finite_is_named_where_all_layers_are():
    """Under any order of the backward, with clipping; the next step goes on."""
    x, y = clipping.batch(0)
    for schedule, checkpoint in (("zb-h1", "never"), ("1f1b", {"1": "recompute", "7": "recompute-cheap"})):
        loss_fn = clipping.spoilt_once(2)
        numerics = Numerics(on_nonfinite="skip", clip_grad_norm=1.0)
        with make(schedule, numerics, num_microbatches=4, checkpoint=checkpoint, loss_fn=loss_fn) as pipe:
            with pytest.warns(UserWarning, match="the loss for micro-batch 2 was the first value that was not finite"):
                assert pipe.step(x, target=y).isnan()
            assert pipe.step(x, target=y).isfinite()


def test_a_check_that_must_not_wait_comes_one_step_later(monkeypatch: pytest.MonkeyPatch):
    """As on the GPUs of one process; the update has then been made."""
    rules = Numerics.gradient_rules
    monkeypatch.setattr(Numerics, "gradient_rules", lambda *args, **given: rules(*args, **{**given, "lags": True}))
    x, y = clipping.batch(0)
    options = {"num_microbatches": 4, "loss_fn": clipping.spoilt_once(1)}
    with make("1f1b", Numerics(on_nonfinite="raise"), **options) as pipe:
        assert pipe.step(x, target=y).isnan()
        assert pipe.model[0].weight.isnan().any()
        with pytest.raises(ExecutionError, match=r"in step 0, the loss for micro-batch 1 .* gradients are not finite"):
            pipe.step(x, target=y)


def test_an_order_of_norms_without_clipping_is_refused():
    with pytest.raises(InputError, match="got norm_type=inf without clip_grad_norm=; pass clip_grad_norm= too"):
        Numerics(norm_type=math.inf)


def test_reactions_are_refused_where_they_cannot_be_right():
    with pytest.raises(InputError, match=r"on_nonfinite='skip' requires step.. to update .* without optimizer="):
        make("1f1b", Numerics(on_nonfinite="skip"), optimizer=None)
    with pytest.raises(InputError, match="must be one of raise, skip, warn; got 'stop'"):
        Numerics(on_nonfinite="stop")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="scaler= and on_nonfinite= must not be combined"):
        Numerics(on_nonfinite="skip", scaler=GradScaler("cpu"))
    with pytest.raises(ScheduleError, match="'pipedream' updates the weights while micro-batches"):
        make("pipedream", Numerics(on_nonfinite="warn"))


def test_a_rank_that_fails_before_its_norms_stops_those_that_wait_for_them(ranks):
    own, (other, why) = ranks.run(2, clipping.fail_before_norms)
    assert own == ("ZeroDivisionError", "planted")
    assert other == "ExecutionError"
    assert "rank 0 failed: ZeroDivisionError: planted, in 0B3" in why
    assert re.search(r"rank 1 of 2 stopped(, in 1(B3|NORM0|UPDATE0) \(stage 1, [^)]*\)[^;]*)?;", why), why


def test_sparse_gradients_are_clipped():
    dense, sparse = (nn.Embedding(6, 4, sparse=own) for own in (False, True))
    sparse.load_state_dict(dense.state_dict())
    for layer in (dense, sparse):
        layer(torch.tensor([1, 2, 2, 5])).square().sum().backward()
    assert clip_grad_norm_(sparse.parameters(), 0.1).item() == pytest.approx(
        clip_grad_norm_(dense.parameters(), 0.1).item()
    )
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


class Halves(nn.Module):
    """A layer with two outputs of one operation."""

    def __init__(self, spoilt: bool = False) -> None:
        super().__init__()
        self.linear, self.spoilt = nn.Linear(6, 12), spoilt

    def forward(self, x):
        first, second = self.linear(x).unflatten(1, (2, 6)).unbind(1)
        return first, second * math.nan if self.spoilt else second


class UsesOneHalf(nn.Module):
    def __init__(self, *, spoilt: bool, used: int) -> None:
        super().__init__()
        self.first, self.second, self.last, self.used = nn.Linear(6, 6), Halves(spoilt), nn.Linear(6, 6), used

    def forward(self, x):
        return self.last(self.second(self.first(x))[self.used])


@pytest.mark.parametrize("cut", ["second", "last"])
@pytest.mark.parametrize(("spoilt", "used"), [(False, 0), (False, 1), (True, 0)])
def test_an_output_that_nothing_uses_is_no_reason_to_stop(cut, spoilt, used):
    """Its gradient is None, whatever its values."""
    x, loss_fn = torch.randn(8, 6), nn.functional.mse_loss
    model = UsesOneHalf(spoilt=spoilt, used=used)
    plain = copy.deepcopy(model)
    reference_step(plain, x, target=x, loss_fn=loss_fn, num_microbatches=4)
    options = {"num_microbatches": 4, "schedule": "1f1b", "boundaries": [cut], "loss_fn": loss_fn}
    numerics = Numerics(on_nonfinite="raise")
    with Pipeline(model, x[:2], devices=["cpu"] * 2, numerics=numerics, **options) as pipe:
        pipe.step(x, target=x)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("place", [HERE, MESH], indirect=True)
@pytest.mark.parametrize("numerics", [{"scaler": 8.0}, {"clip_grad_norm": 0.1, "norm_type": math.inf}])
def test_a_parameter_without_elements_has_the_norm_0(place, numerics):
    place(2, clipping.train_with_empty, numerics)
