"""What the wrapper shows of the model."""

import copy
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

from pipesched import Pipeline
from tests.support.peer_cases import (
    assert_equal_bits,
    linears,
    mse,
    pipeline,
    rows,
)


def test_the_wrapper_exposes_the_models_own_parameters():
    model = linears()
    with pipeline(model, rows(2)) as pipe:
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_every_parameter_is_owned_by_exactly_one_stage():
    model = linears(5)
    with pipeline(model, rows(2), 3) as pipe:
        owned = Counter(id(p) for stage in pipe.partitions for p in stage.parameters())
    assert owned == dict.fromkeys(map(id, model.parameters()), 1)


def test_public_attributes_are_normalised():
    with Pipeline(
        linears(), rows(2), devices=("cpu", torch.device("cpu")), boundaries=(2,), num_microbatches=3
    ) as pipe:
        assert pipe.devices == [torch.device("cpu")] * 2
        assert pipe.boundaries == ["2"]
        assert pipe.num_microbatches == 3
        assert pipe.num_stages == 2
        assert pipe.checkpoint == "never"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_it_has_a_length_an_order_and_indices_like_the_sequential(num_stages):
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    with pipeline(nn.Sequential(a, b), rows(1, 1), num_stages) as pipe:
        assert len(pipe) == 2
        assert list(pipe) == [a, b]
        assert [pipe[0], pipe[1], pipe[-1], pipe[-2]] == [a, b, b, a]
        for outside in (2, -3):
            with pytest.raises(IndexError):
                pipe[outside]


def test_it_is_true_whatever_its_model():
    """As every object without a length is."""
    with pipeline(nn.Sequential(nn.Linear(1, 1)), rows(1, 1), 1) as row, pipeline(Plain(), rows(1, 1), 1) as other:
        assert row
        assert other
        with pytest.raises(
            TypeError, match=r"only a pipeline of an nn\.Sequential supports len\(\), .* Plain; use pipe\.model"
        ):
            len(other)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x)


def test_the_stages_hold_the_layers_themselves():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    with pipeline(nn.Sequential(a, b), rows(1, 1)) as pipe:
        assert all(isinstance(stage, nn.Sequential) for stage in pipe.partitions)
        assert [list(stage) for stage in pipe.partitions] == [[a], [b]]


def test_children_keep_their_names_and_are_no_attributes():
    model = nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1)))
    with pipeline(model, rows(1, 1), boundaries=["b"]) as pipe:
        assert list(pipe.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert pipe.boundaries == ["b"]
        with pytest.raises(AttributeError):
            _ = pipe.a


def test_the_state_dict_is_interchangeable_with_the_bare_models():
    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))

    trained, bare, back = build(0), build(1), build(2)
    with (
        pipeline(trained, rows(2), loss_fn=mse, num_microbatches=2) as pipe,
        pipeline(back, rows(2), loss_fn=mse) as other,
    ):
        pipe.step(rows(), target=rows(seed=2))
        assert list(pipe.state_dict()) == list(bare.state_dict())
        bare.load_state_dict(pipe.state_dict())
        other.load_state_dict(bare.state_dict())
    assert_equal_bits(bare.state_dict(), trained.state_dict())
    assert_equal_bits(back.state_dict(), trained.state_dict())


def test_a_state_dict_that_does_not_fit_is_refused_as_torch_refuses_it():
    with pipeline(linears(), rows(2)) as pipe, pytest.raises(RuntimeError, match=r"Missing key.*3\.weight"):
        pipe.load_state_dict(linears(3).state_dict())


def test_the_parameters_of_a_loss_module_are_trained_named_and_saved():
    loss_fn = Scale()
    with pipeline(linears(), rows(2), loss_fn=loss_fn) as pipe:
        pipe.step(rows(), target=rows(seed=2))
        assert loss_fn.scale.grad is not None
        assert [name for name, _ in pipe.named_parameters()][-1] == "loss_fn.scale"
        state = copy.deepcopy(pipe.state_dict())
        state["loss_fn.scale"].fill_(3)
        pipe.load_state_dict(state)
        assert loss_fn.scale.item() == 3


class Scale(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.MSELoss()

    def forward(self, output, target):
        return self.inner(output * self.scale, target)


def with_norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.Linear(4, 4))


def test_modules_are_the_models_and_the_loss_modules_with_their_names():
    model, loss_fn = with_norms(), Scale()
    with pipeline(model, rows(2), loss_fn=loss_fn) as pipe:
        named = [*model.named_modules(), ("loss_fn", loss_fn), ("loss_fn.inner", loss_fn.inner)]
        assert list(pipe.named_modules()) == named
        assert list(pipe.modules()) == [module for _, module in named]
        assert list(map(id, pipe.buffers())) == list(map(id, model.buffers()))


def test_a_function_is_applied_as_to_the_bare_model():
    """In the same order, so that random numbers are the same ones; between steps, too."""

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    model, bare = with_norms(), with_norms()
    with pipeline(model, rows(2), loss_fn=mse, num_microbatches=2) as pipe:
        for _ in range(2):
            torch.manual_seed(7)
            assert pipe.apply(init) is pipe
            torch.manual_seed(7)
            bare.apply(init)
            assert_equal_bits(dict(model.named_parameters()), dict(bare.named_parameters()))
            pipe.step(rows(), target=rows(seed=2))
        seen = []
        pipe.apply(seen.append)
        assert seen == [model[0], *model[1], model[1], model[2], model]


def test_modes_reach_every_module_and_the_next_step():
    model, loss_fn = with_norms(), Scale()
    with pipeline(model, rows(2), loss_fn=loss_fn) as pipe:
        assert pipe.eval() is pipe
        assert not pipe.training
        assert not any(module.training for module in pipe.modules())
        norms = copy.deepcopy(dict(model.named_buffers()))
        loss = pipe.step(rows(), target=rows(seed=2))
        assert_equal_bits(dict(model.named_buffers()), norms)  # running statistics stay in evaluation mode
        assert torch.equal(pipe.step(rows(), target=rows(seed=2)), loss)  # there is no dropout
        assert pipe.train() is pipe
        assert all(module.training for module in (*model.modules(), *loss_fn.modules()))
        for module in pipe.modules():  # one kind of module alone, as fine-tuning does
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        pipe.step(rows(), target=rows(seed=2))
        assert_equal_bits(dict(model.named_buffers()), norms)


STAY = (
    r"to\(\) may only change the dtype, because a pipeline's stages stay on their devices; got .*; leave the call out, "
    r"or make a new Pipeline"
)


@pytest.mark.parametrize(
    "place", ["cpu", 0, torch.device("cpu"), torch.zeros(1)], ids=["str", "int", "device", "tensor"]
)
def test_moving_to_another_device_is_denied(place):
    with pipeline(linears(), rows(2)) as pipe:
        with pytest.raises(TypeError, match=STAY):
            pipe.to(place)
        with pytest.raises(TypeError, match=STAY):
            pipe.to(device=place)
        with pytest.raises(TypeError, match=STAY):
            pipe.to(torch.float64, place)


def test_the_dtype_may_change_also_between_steps():
    model, x, y = linears(), rows(), rows(seed=2)
    with pipeline(model, x[:2], loss_fn=mse, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        assert pipe.to(torch.float64) is pipe
        assert pipe.step(x.double(), target=y.double()).dtype is torch.float64
    assert all(p.dtype is p.grad.dtype is torch.float64 for p in model.parameters())


def test_an_empty_sequential_is_the_identity():
    with Pipeline(nn.Sequential(), rows(2), devices=["cpu"], num_microbatches=2, schedule="1f1b") as pipe:
        assert_equal_bits(pipe(rows()), rows())
        assert pipe((rows(), "text"))[1] == "text"
    pair = rows(), rows(seed=2)
    sample = ((rows(2), rows(2, seed=2)),)
    with Pipeline(nn.Sequential(), sample, devices=["cpu"], num_microbatches=2, schedule="1f1b") as pipe:
        assert_equal_bits(pipe(pair), pair)


def test_devices_that_no_stage_needs_are_dropped():
    with Pipeline(linears(), rows(2), devices=["cpu"] * 5, boundaries=[1, 2]) as pipe:
        assert len(pipe.devices) == 3
        assert pipe.num_stages == 3
        assert len(pipe.plan.program.orders) == 3


def test_nested_sequentials_are_cut_inside_and_keep_their_names():
    model = nn.Sequential(linears(2), linears(2, seed=1))
    with pipeline(model, rows(2), boundaries=["0.1", "1.1"], loss_fn=mse) as pipe:
        assert pipe.plan.stages == (("0.0",), ("0.1", "1.0"), ("1.1",))
        torch.testing.assert_close(pipe(rows()), model(rows()))
