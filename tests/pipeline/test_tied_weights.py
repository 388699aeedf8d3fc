"""Chimera and DualPipe train: two chains of stages over one set of weights, whose gradients are two sums added up."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Pipeline, Plan, Program, schedules
from pipesched.errors import DeviceCountError, GraphError, PartitionError, ScheduleError
from pipesched.testing import reference_step
from tests.support.models import Scaled, assert_equal_bits, gradients

pytestmark = pytest.mark.usefixtures("every_product_deferred")

NAMES = ("chimera", "dualpipe")
MODES = ("never", "always", "except_last")
X = torch.randn(19, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 4, (19,), generator=torch.Generator().manual_seed(2))


def model() -> nn.Sequential:
    """Dropout of two kinds, in-place layers, a custom function, two layers over one weight; no buffers that change."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)),
        nn.Dropout(0.1, inplace=True),
        Scaled(16),
        nn.AlphaDropout(0.1),
        Twice(16),
        nn.Linear(16, 4),
    ).double()


class Twice(nn.Module):
    """Two layers that share a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class ScaledLoss(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output * self.scale, target)


def wrap(wrapped: nn.Sequential, name: str, num_ranks: int = 2, microbatches: int = 6, **options) -> Pipeline:
    cut = [9 * stage // num_ranks for stage in range(1, num_ranks)]
    options = {"loss_fn": functional.cross_entropy, "boundaries": cut, "seed": 5, **options}
    return Pipeline(
        wrapped, X[:2], devices=["cpu"] * num_ranks, schedule=name, num_microbatches=microbatches, **options
    )


class Replay:
    """The plain loop, and what each micro-batch adds to each gradient: to be summed as two chains sum it."""

    def __init__(self, *modules: nn.Module) -> None:
        self.parameters = {f"{i}.{name}": p for i, m in enumerate(modules) for name, p in m.named_parameters()}
        self.parts: dict[str, list[torch.Tensor]] = {}
        for name, parameter in self.parameters.items():
            parameter.register_hook(lambda grad, name=name: self.parts.setdefault(name, []).append(grad.clone()))

    def gradients(self, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What was there, and chain 0's micro-batches one by one, and the sum of chain 1's."""
        sums = {}
        for name, parts in self.parts.items():
            half = (len(parts) + 1) // 2
            total = start.get(name)
            for part in parts[:half]:
                total = part if total is None else total + part
            own = parts[half : half + 1]
            for part in parts[half + 1 :]:
                own = [own[0] + part]
            sums[name] = total + own[0] if own else total
        self.parts.clear()
        return sums


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "microbatches"), [(2, 1), (2, 2), (2, 6), (2, 7), (4, 3), (4, 8), (4, 10)])
@pytest.mark.parametrize("mode", MODES)
def test_steps_equal_the_loop_summed_chain_by_chain(name, num_ranks, microbatches, mode):
    """Equal bits where the loop's gradients are added in the documented order; within rounding in the loop's own."""
    expected, actual = model(), model()
    losses = ScaledLoss(), ScaledLoss()
    replay = Replay(expected, losses[0])
    summed: dict[str, torch.Tensor] = {}
    with wrap(actual, name, num_ranks, microbatches, loss_fn=losses[1], checkpoint=mode) as pipe:
        for step in range(2):  # the second adds to the gradients of the first
            loss = pipe.step(X, target=Y)
            wanted = reference_step(
                expected, X, target=Y, loss_fn=losses[0], num_microbatches=microbatches, seed=5, step=step
            )
            summed = replay.gradients(summed)
            assert torch.equal(loss, wanted)
            ours = {f"0.{k}": v for k, v in gradients(actual).items()} | {
                f"1.{k}": v for k, v in gradients(losses[1]).items()
            }
            assert_equal_bits(ours, summed)
            for key, grad in ours.items():
                torch.testing.assert_close(grad, replay.parameters[key].grad, rtol=1e-12, atol=1e-12)
            if microbatches <= 2 and step == 0:  # one micro-batch a chain: one order of two
                assert_equal_bits(gradients(actual), gradients(expected))


@pytest.mark.parametrize("name", NAMES)
def test_training_follows_the_home_weights(name):
    """Steps of an optimizer, frozen parameters and modes reach both chains; state and parameters are the user's own."""
    expected, actual = model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, actual)]
    with wrap(actual, name) as pipe:
        assert dict(pipe.named_parameters()).keys() == dict(actual.named_parameters()).keys()
        assert pipe.state_dict().keys() == actual.state_dict().keys()
        for step, rows in enumerate((19, 4, 1, 12)):
            for m in (expected, actual):
                m.train(step != 2)
                m[3][0].weight.requires_grad_(step != 1)
            loss = pipe.step(X[:rows], target=Y[:rows])
            wanted = reference_step(
                expected,
                X[:rows],
                target=Y[:rows],
                loss_fn=functional.cross_entropy,
                num_microbatches=6,
                seed=5,
                step=step,
            )
            torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradients(actual), gradients(expected), rtol=1e-12, atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_and_forward(name):
    expected, actual = model().eval(), model().eval()
    with wrap(actual, name) as pipe:
        with torch.inference_mode():
            loss, output = pipe.evaluate(X, target=Y, return_outputs=True)
        torch.testing.assert_close(output, expected(X))
        torch.testing.assert_close(loss, functional.cross_entropy(expected(X), Y))
        assert not gradients(actual)
        with torch.no_grad():
            torch.testing.assert_close(pipe(X), expected(X))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_two_open_passes_go_backward_together(name, mode):
    expected = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    actual, x, y = copy.deepcopy(expected), X.clone().requires_grad_(), X.clone().requires_grad_()
    with Pipeline(
        actual, X[:2], devices=["cpu"] * 4, schedule=name, num_microbatches=6, boundaries=[1, 2, 3], checkpoint=mode
    ) as pipe:
        first, second = pipe(x), pipe(2 * x)
        (first.square().sum() + second.sum()).backward()
    (expected(y).square().sum() + expected(2 * y).sum()).backward()
    torch.testing.assert_close(gradients(actual), gradients(expected))
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_see_the_first_chains_micro_batches_and_then_the_seconds_sum(name):
    actual, seen, called = model(), Counter(), Counter()
    weight = actual[0].weight
    weight.register_hook(lambda grad: seen.update(["grad"]))
    weight.register_post_accumulate_grad_hook(lambda _: seen.update(["accumulated"]))
    actual[0].register_forward_hook(lambda *_: called.update(["forward"]))
    with wrap(actual, name) as pipe:
        pipe.step(X, target=Y)
    assert (seen["grad"], seen["accumulated"], called["forward"]) == (3 + 1, 3 + 1, 6)


class Recorder:
    """A hook that belongs to something."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, *_: object) -> None:
        self.calls += 1

    __call__ = count


def test_module_hooks_of_both_chains_are_the_users_own():
    actual, recorders = model(), [Recorder() for _ in range(4)]
    actual[0].register_forward_hook(recorders[0].count)
    actual[3].register_forward_pre_hook(recorders[1])
    actual[7].register_full_backward_hook(recorders[2].count)
    actual[8].register_full_backward_pre_hook(recorders[3])
    with wrap(actual, "dualpipe") as pipe:
        for recorder in recorders:
            recorder.calls = 0  # construction runs layers, too
        pipe.step(X, target=Y)
    assert [recorder.calls for recorder in recorders] == [6, 6, 6, 6]


@pytest.mark.parametrize("name", NAMES)
def test_an_error_leaves_nothing_behind(name):
    actual, failing = model(), []

    def fail(*_):
        if failing:
            raise ZeroDivisionError("a layer's own error")

    actual[5].register_forward_hook(fail)
    with wrap(actual, name) as pipe:
        pipe.step(X, target=Y)
        pipe.zero_grad()
        failing.append(1)
        with pytest.raises(ZeroDivisionError):
            pipe.step(X, target=Y)
        failing.clear()
        pipe.zero_grad()
        pipe._running.step = 0
        loss = pipe.step(X, target=Y)
    expected = model()
    wanted = reference_step(expected, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=6, seed=5)
    assert torch.equal(loss, wanted)
    torch.testing.assert_close(gradients(actual), gradients(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_holds_each_part_once_and_runs_again(name, tmp_path):
    actual = model()
    with wrap(actual, name, 4, 8, boundaries=None) as pipe:
        assert pipe.num_stages == len(pipe.partitions) == len(pipe.boundaries) + 1 == 4
        assert pipe.predicted.makespan_s > 0
        assert pipe.plan.costs.num_stages == 8
        for _ in range(3):
            pipe.step(X, target=Y)
        assert pipe.plan.costs.num_stages == 8
        assert pipe.predicted.makespan_s > 0
        assert "stage 4 on rank 3 (cpu): 0" in repr(pipe)
        assert "(a copy of stage 0)" in repr(pipe)
        pipe.plan.save(tmp_path / "plan.json")
        own = pipe.plan
    with Pipeline(
        model(), X[:2], loss_fn=functional.cross_entropy, devices=["cpu"] * 4, plan=Plan.load(tmp_path / "plan.json")
    ) as pipe:
        assert (pipe.plan.stages, pipe.plan.program) == (own.stages, own.program)
        pipe.step(X[:5], target=Y[:5])  # a short batch: the schedule is known by its name
    values = own.to_dict()
    values["stages"] = values["stages"] * 2
    with pytest.raises(ScheduleError, match="the plan lists 8 stages, but its program cuts the model into 4 parts"):
        Plan.from_dict(values)


def test_a_program_of_a_text_runs_as_its_schedule_does():
    text = str(schedules.get("chimera").program(2, 6))
    grads = []
    for schedule in ("chimera", Program.parse(text)):
        actual = model()
        with wrap(actual, schedule, 2, 6) as pipe:
            pipe.step(X, target=Y)
        grads.append(gradients(actual))
    assert_equal_bits(*grads)
    crossed = Program.parse(text.replace("weights 0 1 0 1", "weights 0 1 1 0"))
    everywhere = "microbatches 1\nplacement 0 1 1 0\nedges 0-1 2-3\nweights 0 1 0 1\n"
    everywhere += "rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 1B0 2B0"
    for program in (crossed, Program.parse(everywhere)):
        with pytest.raises(ScheduleError, match="a chain of stages, or several chains that share weights"):
            wrap(model(), program, 2, None, boundaries=[4])


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused(name):
    with pytest.raises(ScheduleError, match="got 3; use 2 or 4 ranks, with any number of micro-batches"):
        wrap(model(), name, 3)
    with pytest.raises(DeviceCountError, match="has one stage per rank; 4 stages need 4 devices, but there are 2"):
        wrap(model(), name, 2, num_stages=4, boundaries=None)
    with pytest.raises(PartitionError, match="got a list of 2 layers, which makes 3 stages"):
        wrap(model(), Program.parse(str(schedules.get(name).program(2, 6))), 2, boundaries=[2, 4])

    class Locked(nn.Identity):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a lock")

    locked = model()
    locked[2] = Locked()
    with pytest.raises(
        GraphError, match=r"one of 0, 1, 2, 3.0 cannot be copied \(cannot pickle a lock\); use a schedule"
    ):
        wrap(locked, name)


@pytest.mark.parametrize("name", NAMES)
def test_running_statistics_that_would_miss_micro_batches_are_refused(name):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()

    with pytest.raises(ScheduleError, match="the running statistics of layer '1' would miss"):
        wrap(build(), name, 2, 4, boundaries=[2])
    wrap(build().eval(), name, 2, 4, boundaries=[2]).close()


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_layers_may_change(name):
    expected, actual = model(), model()
    with wrap(actual, name) as pipe:
        for step, p in enumerate((0.2, 0.7, 0.0)):
            expected[2].p = actual[2].p = p
            loss = pipe.step(X, target=Y)
            wanted = reference_step(
                expected, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=6, seed=5, step=step
            )
            assert torch.equal(loss, wanted)


def test_weights_may_change_their_type():
    actual = model()
    with wrap(actual, "chimera") as pipe:
        pipe.step(X, target=Y)
        pipe.zero_grad()
        pipe.float()
        pipe.step(X.float(), target=Y)
        assert {grad.dtype for grad in gradients(actual).values()} == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"]])
def test_chains_that_end_on_different_devices(name, devices):
    expected, actual, x = model(), model(), X.clone().requires_grad_()
    with Pipeline(
        actual,
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=devices,
        schedule=name,
        num_microbatches=6,
        boundaries=[4],
        seed=5,
    ) as pipe:
        loss, outputs = pipe.eval().step(X, target=Y, return_outputs=True)
        assert loss.device == outputs.device == torch.device(devices[-1])
        pipe.train()(x).sum().backward()
        assert x.grad.device == x.device
    wanted = reference_step(expected.eval(), X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=6, seed=5)
    torch.testing.assert_close(loss.cpu(), wanted)
