"""Synchronous schedules with optimizers in the pipeline."""

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched import Kind, Pipeline, schedules
from pipesched.errors import ExecutionError
from tests.support.async_replay import (
    ASYNCHRONOUS,
    ROWS,
    Mean,
    Times,
    adam,
    batch,
    mse,
    pipeline,
    sgd,
    transformer,
)
from tests.support.models import assert_equal_bits


@pytest.mark.one_in(4)
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_a_synchronous_step_with_optimizers_is_a_step_and_the_users_own(name: str, optimizer: Callable) -> None:
    chunks = schedules.get(name).chunks_per_rank
    choices = {"boundaries": None, "num_stages": 6} if chunks == 2 else {}
    expected, actual = transformer(), transformer()
    with (
        pipeline(expected, name, 4, optimizer=None, **choices) as plain,
        pipeline(actual, name, 4, optimizer=optimizer, **choices) as pipe,
    ):
        parameters = [[p for p in part.parameters() if p.requires_grad] for part in plain.partitions]
        optimizers = [optimizer(own) for own in parameters if own]
        assert plain.boundaries == pipe.boundaries or chunks == 2
        for step in range(5):
            x, y = batch(step)
            assert torch.equal(pipe.step(x, target=y), plain.step(x, target=y))
            for one in optimizers:
                one.step()
                one.zero_grad()
        assert pipe.flush() is None
        kinds = [span.action.kind for span in pipe.trace.spans]
        assert kinds.count(Kind.UPDATE) == pipe.num_stages
        assert pipe.predicted.makespan_s > 0
    assert_equal_bits(actual.state_dict(), expected.state_dict())
    assert all(parameter.grad is None for parameter in actual.parameters())


def test_forward_and_backward_by_hand_update_nothing() -> None:
    model = transformer()
    before = copy.deepcopy(model.state_dict())
    with pipeline(model, "1f1b", 2) as pipe:
        pipe(batch(0)[0]).square().mean().backward()
        assert_equal_bits(model.state_dict(), before)
        assert model[0].weight.grad is not None
        for optimizer in pipe.optimizers.values():
            optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])


def trained_only(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], lr=0.1)


@pytest.mark.parametrize("selects", [True, False])
def test_a_stage_without_trainable_parameters_has_no_optimizer_if_the_function_selects(selects: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    for parameter in model[:1].parameters():
        parameter.requires_grad_(False)
    options = {"optimizer": trained_only} if selects else {}
    with pipeline(model, "pipedream", 2, boundaries=[1, 2], **options) as pipe:
        assert sorted(pipe.optimizers) == ([1, 2] if selects else [0, 1, 2])
        before = copy.deepcopy(model.state_dict())
        pipe.step(batch(0)[0], target=batch(0)[1])
        after = pipe.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["1.weight"], before["1.weight"])


def test_what_is_unfrozen_in_a_stage_that_had_nothing_to_train_is_trained() -> None:
    """As by an optimizer of all parameters in a plain loop."""
    model = transformer()
    model[:2].requires_grad_(False)
    with pipeline(model, "1f1b", 2) as pipe:
        pipe.step(batch(0)[0], target=batch(0)[1])
        before = model[0].weight.clone()
        model[0].requires_grad_(True)
        pipe.step(batch(0)[0], target=batch(0)[1])
        assert not torch.equal(model[0].weight, before)


def test_what_is_unfrozen_in_a_stage_without_an_optimizer_is_an_error() -> None:
    model = transformer()
    model[:2].requires_grad_(False)
    with pipeline(model, "1f1b", 2, optimizer=trained_only) as pipe:
        pipe.step(batch(0)[0], target=batch(0)[1])
        model[0].requires_grad_(True)
        with pytest.raises(ExecutionError, match="layers 0, 1 have gradients now; make a new Pipeline, or freeze"):
            pipe.step(batch(0)[0], target=batch(0)[1])
        model[0].requires_grad_(False)
        pipe.step(batch(0)[0], target=batch(0)[1])


@pytest.mark.parametrize("name", ["1f1b", *ASYNCHRONOUS])
@pytest.mark.parametrize("loss_fn", [None, mse])
def test_a_layer_may_be_called_as_the_loss_is(name: str, loss_fn: Callable | None) -> None:
    layer = Times(1.5).float() if loss_fn else nn.Sequential(Times(1.5).float(), Mean())
    layer.register_forward_hook(lambda *_: None)  # one layer, not two
    model = nn.Sequential(OrderedDict({"0": nn.Linear(6, 6), "loss_fn": layer}))
    weight = next(layer.parameters())
    with pipeline(model, name, 2, loss_fn=loss_fn, boundaries=["loss_fn"]) as pipe:
        pipe.step(batch(0)[0], target=torch.zeros(ROWS, 3, 6) if loss_fn else None)
        pipe.flush()
    assert weight.item() != 1.5
    assert weight.grad is None


class Checkpointed(nn.Module):
    """A layer that runs again in its backward, and looks at its weight there."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.inner, self.how, self.seen = nn.Linear(6, 6), how, []
        self.register_full_backward_hook(lambda *_: self.seen.append(self.inner.weight.sum().item()))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) if self.how is None else checkpoint(self.act, x, use_reentrant=self.how)

    def act(self, x: Tensor) -> Tensor:
        self.seen.append(self.inner.weight.sum().item())
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("how", [True, False])
def test_a_layer_that_runs_again_in_its_backward_meets_the_same_weights(name: str, how: bool) -> None:
    models, seen = [], []
    for one in (None, how):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 6), Checkpointed(one), nn.Linear(6, 4)))
        with pipeline(models[-1], name, 3, boundaries=[1, 2]) as pipe:
            for step in range(6):
                pipe.step(batch(step)[0], target=batch(step)[1])
        seen.append(models[-1][1].seen)
    assert_equal_bits(*(model.state_dict() for model in models))
    assert set(seen[0]) == set(seen[1])
    assert len(seen[0]) == 2 * 6 * 3
    assert len(seen[1]) == 3 * 6 * 3


def test_an_optimizer_keeps_the_states_that_it_begins_with() -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, params: list) -> None:
            super().__init__(params, lr=0.1)
            for parameter in params:
                self.state[parameter]["steps"] = torch.zeros(())

        def step(self, closure: None = None) -> None:
            super().step()
            for state in self.state.values():
                state["steps"] += 1

    x = torch.randn(4, 8)
    with Pipeline(
        nn.Linear(8, 8), x[:2], loss_fn=functional.mse_loss, devices=["cpu"], schedule="1f1b", optimizer=Counting
    ) as pipe:
        pipe.step(x, target=x)
        assert [state["steps"].item() for state in pipe.optimizers[0].state.values()] == [1, 1]
