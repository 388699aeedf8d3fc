"""Losses that layers add with ``add_loss``: in every plan they count as in a loop, to the bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pipesched
from pipesched.errors import ExecutionError, InputError
from tests.support import added_losses as jobs
from tests.support.added_losses import X, Y, looped, own, pipeline, row
from tests.support.models import assert_equal_bits, gradients
from tests.support.places import run_here
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

HERE = {"devices": ["cpu"] * 2}
NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@pytest.mark.one_in(12)
@pytest.mark.usefixtures("every_product_deferred")
@pytest.mark.parametrize("kind", ["row", "own"])
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_has_the_bits_of_the_loop(name: str, kind: str) -> None:
    layer = {"row": "1", "own": "blocks.1"}[kind]
    modes = ("always", {layer: "recompute-cheap"}) if name.startswith("zb") else ("never", {layer: "recompute"})
    for mode in modes:
        run_here(2, jobs.trains, kind, name, mode)


def plain_loop(model: nn.Module, microbatches: int) -> Tensor:
    """Gradient accumulation as anybody writes it."""
    total = torch.zeros(())
    for x, y in zip(X.tensor_split(microbatches), Y.tensor_split(microbatches), strict=True):
        with pipesched.collect_losses() as losses:
            output = model(x)
        loss = (functional.cross_entropy(output, y) + sum(losses.values())) * (len(x) / len(X))
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize("make", [row, own])
def test_the_loop_is_a_plain_loop_with_collected_losses(make: Callable[[], nn.Module]) -> None:
    expected, actual = make(), make()
    for model in (expected, actual):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    torch.testing.assert_close(looped(actual), plain_loop(expected, 3))
    torch.testing.assert_close(gradients(actual), gradients(expected))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "mode"), [("1f1b", "never"), ("zb-h1", "always")])
def test_a_scaler_scales_added_losses_as_well(name: str, mode: str) -> None:
    """Powers of two change no bit of a gradient, so a scaled run has the weights of a run without a scaler."""
    models = [row(), row()]
    sgd: Any = partial(torch.optim.SGD, lr=0.1)
    for model, scaler in zip(models, (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)), strict=True):
        options = {"schedule": name, "checkpoint": mode, "optimizer": sgd, "seed": 3, "num_microbatches": 4}
        options |= {"numerics": pipesched.Numerics(scaler=scaler), **HERE}
        with pipesched.Pipeline(model, X[:2], loss_fn=functional.cross_entropy, **options) as pipe:
            pipe.step(X, target=Y)
            pipe.step(X, target=Y)
    assert_equal_bits(dict(models[1].named_parameters()), dict(models[0].named_parameters()))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "mode"), [("1f1b", "never"), ("zb-v", "always"), ("interleaved-1f1b", "except_last")])
def test_over_a_mesh_the_loss_and_metrics_are_on_every_rank(ranks: Ranks, name: str, mode: str) -> None:
    (expected,) = run_here(2, jobs.trains, "own", name, mode)
    assert ranks.run(2, jobs.trains, "own", name, mode) == [expected] * 2
    assert list(expected) == [*(f"balance/{index}" for index in range(4)), "size", "z"]


def test_over_a_mesh_with_inputs_of_the_first_rank(ranks: Ranks) -> None:
    ranks.run(3, jobs.trains, "row", "1f1b", "never", "first")


def test_evaluate_includes_added_losses(ranks: Ranks) -> None:
    (here,) = run_here(2, jobs.evaluates)
    assert ranks.run(2, jobs.evaluates) == [here] * 2
    model = own().eval()
    with torch.no_grad(), pipesched.collect_losses() as losses:
        output = model(X)
    assert here[0] == pytest.approx(float(functional.cross_entropy(output, Y) + sum(losses.values())), rel=0.05)
    assert set(here[1]) == set(losses)


def test_asynchronous_steps_include_added_losses(ranks: Ranks) -> None:
    (here,) = run_here(2, jobs.streams, "pipedream")
    over_mesh = ranks.run(2, jobs.streams, "pipedream")
    assert over_mesh[0] == over_mesh[1] == here
    assert here[-1][0] < here[0][0]


def test_a_first_loss_in_a_later_step_over_a_mesh_is_refused(ranks: Ranks) -> None:
    own_error, other_error = ranks.run(2, jobs.adds_late)
    assert "layer '0' on rank 0 added its first loss 'added_loss' in a later step; in earlier steps, add a loss" in (
        own_error
    )
    assert "rank 0 failed: ExecutionError: with a mesh, layers must add losses from the first step on" in other_error


def test_a_step_without_added_losses_has_no_metrics() -> None:
    with pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), HERE, schedule="1f1b") as pipe:
        assert pipe.metrics == {}
        pipe.step(X, target=Y)
        assert pipe.metrics == {}


class Frozen(nn.Module):
    """A loss of values that need no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        pipesched.add_loss(x.detach().mean(), name="mean")
        return x


def test_a_loss_without_a_gradient_counts_in_the_shown_loss() -> None:
    model = nn.Sequential(Frozen(), nn.Linear(8, 4))
    expected = nn.Sequential(Frozen(), nn.Linear(8, 4))
    expected.load_state_dict(model.state_dict())
    with pipeline(model, HERE, schedule="zb-h1") as pipe:
        assert torch.equal(pipe.step(X, target=Y), looped(expected))
        torch.testing.assert_close(pipe.metrics["mean"], X.mean())
    assert_equal_bits(gradients(model), gradients(expected))


def test_a_stage_whose_output_needs_no_gradient_trains_by_its_own_loss() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x)
            pipesched.add_loss(made.square().mean())
            return made.detach()

    model, expected = (nn.Sequential(Detached(), nn.Linear(8, 4)) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    for mode in ("never", "always"):
        model.zero_grad()
        expected.zero_grad()
        with pipeline(model, HERE, schedule="zb-h1", checkpoint=mode) as pipe:
            assert torch.equal(pipe.step(X, target=Y), looped(expected))
        assert_equal_bits(gradients(model), gradients(expected))
        assert len(gradients(model)) == 4


def test_a_microbatch_without_weight_adds_nothing() -> None:
    def counted(target: Tensor) -> Tensor:
        return (target >= 0).sum()

    target = Y.clone()
    target[:7] = -100  # the whole first micro-batch
    model, expected = row(), row()
    numerics = pipesched.Numerics(loss_weight=counted)
    with pipeline(model, HERE, schedule="1f1b", numerics=numerics) as pipe:
        loss = pipe.step(X, target=target)
    named: dict[str, Any] = {"loss_fn": functional.cross_entropy, "num_microbatches": 3, "seed": 3}
    wanted = pipesched.testing.reference_step(expected, X, target=target, loss_weight=counted, **named)
    assert torch.equal(loss, wanted)
    assert_equal_bits(gradients(model), gradients(expected))


class Checkpointed(nn.Module):
    """A layer that recomputes another one by itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.experts = jobs.Experts()
        self.experts.drop.p = 0.0
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.experts, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return made


def test_a_layer_that_recomputes_itself_adds_its_loss_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(reentrant=False), nn.Linear(8, 4))
    expected = nn.Sequential(nn.Linear(8, 8), jobs.Experts(), nn.Linear(8, 4))
    expected[1].drop.p = 0.0  # type: ignore[union-attr]
    expected.load_state_dict({name.replace("experts.", ""): value for name, value in model.state_dict().items()})
    with pipeline(model, HERE, schedule="zb-h1") as pipe:
        assert torch.equal(pipe.step(X, target=Y), looped(expected))
    assert_equal_bits(
        {name.replace("experts.", ""): grad for name, grad in gradients(model).items()}, gradients(expected)
    )
    with pipesched.collect_losses() as losses:
        loss = functional.cross_entropy(model(X), Y) + sum(losses.values())
    before = dict(losses)
    loss.backward()
    assert losses == before


# ---- refused --------------------------------------------------------------------------------------------------------


def test_outside_a_step_an_added_loss_is_an_error_unless_nothing_is_trained() -> None:
    model = row()
    with pytest.raises(ExecutionError, match=r"would be lost; run the model under no_grad, or collect its losses"):
        model(X)
    with torch.no_grad():
        model(X)


def test_forward_refuses_a_loss_that_it_would_lose() -> None:
    with pipeline(own(), HERE, schedule="1f1b") as pipe:
        with pytest.raises(ExecutionError, match=r"forward\(\) returns only the outputs, so the loss 'balance/0' of"):
            pipe(X)
        with torch.no_grad():
            assert pipe(X).shape == (19, 4)
        pipe.step(X, target=Y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_loss_computed_without_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(reentrant=True), nn.Linear(8, 4))
    message = r"added under no_grad, .* or pass use_reentrant=False"
    with pytest.raises(ExecutionError, match=message), pipesched.collect_losses():
        model(X)
    with (
        pipeline(model, HERE, schedule="1f1b") as pipe,
        pytest.raises(ExecutionError, match=r"added under no_grad, .* or pass checkpoint= to Pipeline"),
    ):
        pipe.step(X, target=Y)


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        (1.0, None, r"an added loss must be a tensor of shape \[\]; got 1.0"),
        (torch.ones(3), None, r"the loss 'added_loss' has shape \[3\] and type torch.float32; reduce it with mean"),
        (torch.ones((), dtype=torch.int64), "load", r"the loss 'load' has shape \[\] and type torch.int64"),
        (torch.ones(()), 3, r"the name of an added loss must be a string; got 3"),
    ],
)
def test_wrong_values_are_refused(value: Any, name: Any, message: str) -> None:
    with pytest.raises(InputError, match=message), pipesched.collect_losses():
        pipesched.add_loss(value, name=name)


def test_a_wrong_value_in_a_step_names_its_place() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pipesched.add_loss(x)
            return x

    model = nn.Sequential(nn.Linear(8, 8), Wrong(), nn.Linear(8, 4))
    with (
        pipeline(model, HERE, schedule="1f1b") as pipe,
        pytest.raises(InputError, match=r"has shape \[7, 8\]") as caught,
    ):
        pipe.step(X, target=Y)
    assert "in 1F0 (stage 1, micro-batch 0), rank 1" in caught.value.__notes__[0]


class Penalised(nn.Module):
    """Adds a mean and a sum over rows, in a layer and in code between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.layers[1].register_forward_hook(self._penalise)

    @staticmethod
    def _penalise(layer: nn.Module, args: Any, output: Tensor) -> None:
        pipesched.add_loss(0.01 * output.square().sum(), name="sum", reduction="sum")
        pipesched.add_loss(0.1 * output.square().mean(), name="mean")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        pipesched.add_loss(0.02 * x.abs().sum(), name="between", reduction="sum")
        made: Tensor = self.head(x)
        return made


@pytest.mark.parametrize(
    ("name", "checkpoint"), [("1f1b", "never"), ("zb-h1", "always"), ("interleaved-1f1b", "never")]
)
def test_sums_over_rows_are_added_without_weights(name: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    model = Penalised()
    plain, whole = Penalised(), Penalised()
    for other in (plain, whole):
        other.load_state_dict(model.state_dict())
    target = Y.clone()
    target[:5] = -100  # the labels of the whole first micro-batch
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "seed": 3, "num_microbatches": 4}
    with pipesched.Pipeline(model, X[:2], schedule=name, checkpoint=checkpoint, **options, **HERE) as pipe:
        loss = pipe.step(X, target=target)
        metrics = pipe.metrics
    assert torch.equal(loss, pipesched.testing.reference_step(plain, X, target=target, **options))
    assert_equal_bits(gradients(model), gradients(plain))
    counts = [(part != -100).sum() / (target != -100).sum() for part in target.tensor_split(4)]
    summed = {"sum": torch.zeros(()), "between": torch.zeros(())}
    for x, y, weight in zip(X.tensor_split(4), target.tensor_split(4), counts, strict=True):
        with pipesched.collect_losses() as losses:
            output = whole(x)
        own = functional.cross_entropy(output, y) if weight else output.sum() * 0
        (weight * (own + losses["mean"]) + losses["sum"] + losses["between"]).backward()
        summed = {key: value + losses[key].detach() for key, value in summed.items()}
    for key, value in summed.items():
        torch.testing.assert_close(metrics[key], value)
    torch.testing.assert_close(gradients(model), gradients(whole))


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(InputError, match="the reduction of an added loss must be 'mean' or 'sum'; got 'none'"):
        pipesched.add_loss(torch.ones(()), reduction="none")  # type: ignore[arg-type]
