"""What a user who is new to Pipeline does first, and what it says to that."""

import copy
import inspect
import io
import pickle
import pydoc
import typing

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import ArgumentError, ExecutionError, InputError
from pipesched.testing import reference_step
from tests.support.peer_cases import linears, mse, pipeline, rows

X, Y = rows(), rows(seed=2)


def test_a_trace_before_the_first_step_is_an_error_with_a_remedy():
    match = r"no step has run under this plan yet; call step\(\) first, or use pipe\.predicted, the simulated trace"
    with pipeline(linears(), X[:2], loss_fn=mse) as pipe:
        with pytest.raises(ExecutionError, match=match):
            _ = pipe.trace
        with pytest.raises(ExecutionError, match=match):
            pipe.gather_trace()
        assert pipe.report().measured is None
        pipe.step(X, target=Y)
        assert pipe.trace.num_microbatches == pipe.num_microbatches
        assert pipe.gather_trace() == pipe.trace
        pipe.replan(pipe.plan)
        with pytest.raises(ExecutionError, match=match):  # the steps of another plan do not count
            _ = pipe.trace


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)])
def test_a_pipeline_is_true_whatever_the_length_of_its_model(model):
    with pipeline(model, X[:2], 1, schedule="1f1b") as pipe:
        assert pipe


class Pair(nn.Module):
    """Takes two inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.layer(x) * scale


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_target_as_a_positional_argument_is_told_its_keyword(method):
    with pipeline(linears(), X[:2], loss_fn=mse) as pipe:
        match = (
            rf"the target must be passed to {method}\(\) as a keyword; got 2 positional arguments and no target=, but "
            rf"the sample has 1 positional argument; call {method}\(x, target=y\)"
        )
        with pytest.raises(InputError, match=match):
            getattr(pipe, method)(X, Y)
        with pytest.raises(InputError, match=r"needs a target; none was passed; pass target=, or call forward"):
            getattr(pipe, method)(X)
        assert getattr(pipe, method)(X, target=Y).isfinite()
    with pipeline(Pair(), (X[:2], X[:2]), 1, loss_fn=mse, schedule="1f1b") as pipe:
        match = rf"got 3 positional .* sample has 2 positional arguments; call {method}\(\.\.\., target=y\)"
        with pytest.raises(InputError, match=match):
            getattr(pipe, method)(X, X, Y)
        with pytest.raises(InputError, match=r"needs a target; none was passed"):
            getattr(pipe, method)(X, X)


def test_a_target_as_a_positional_argument_of_a_model_with_its_own_loss_is_another_form():
    with pipeline(linears(), X[:2]) as pipe:
        match = r"form of the sample, step\(tensor\); got step\(tensor, tensor\), and the model raised TypeError"
        with pytest.raises(ArgumentError, match=match):
            pipe.step(X, Y)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_backward_after_a_step_is_told_that_it_has_run(schedule):
    optimizer = {"optimizer": lambda params: torch.optim.SGD(params, 0.1)} if schedule == "pipedream" else {}
    with pipeline(linears(), X[:2], loss_fn=mse, schedule=schedule, **optimizer) as pipe:
        loss, output = pipe.step(X, target=Y, return_outputs=True) if not optimizer else (pipe.step(X, target=Y), None)
        gradients = [copy.deepcopy(parameter.grad) for parameter in pipe.parameters()]
        match = r"step\(\), which runs the backward itself and stores .* in \.grad; .*; remove the call, or compute"
        for arguments in ({}, {"retain_graph": True}):
            with pytest.raises(ExecutionError, match=match):
                loss.backward(**arguments)
        assert output is None or type(output) is Tensor
        for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
            assert gradient is parameter.grad is None or torch.equal(parameter.grad, gradient)


def test_a_loss_behaves_as_a_plain_tensor():
    model = linears()
    with pipeline(copy.deepcopy(model), X[:2], loss_fn=mse, num_microbatches=4) as pipe:
        loss = pipe.step(X, target=Y)
        assert type(pipe.evaluate(X, target=Y)) is Tensor
    due = reference_step(model, X, target=Y, loss_fn=mse, num_microbatches=4)
    assert torch.equal(loss, due)
    assert (loss.shape, loss.dtype, loss.requires_grad, loss.is_leaf) == ((), torch.float32, False, True)
    assert (repr(loss), str(loss), f"{loss:.3f}", f"{loss}") == (repr(due), str(due), f"{due:.3f}", f"{due}")
    assert float(loss) == loss.item() == float(due)
    assert type(loss) is Tensor
    saved = io.BytesIO()
    torch.save({"loss": loss}, saved)
    saved.seek(0)
    others = [torch.load(saved, weights_only=True)["loss"], pickle.loads(pickle.dumps(loss)), copy.copy(loss)]
    for other in (*others, copy.deepcopy(loss), loss.detach(), loss.clone(), loss * 1):
        assert type(other) is Tensor
        assert torch.equal(other, due)
    assert not any(map(vars, others))
    penalty = torch.ones((), requires_grad=True)
    (loss + penalty).backward()  # a loss of one's own
    loss += penalty
    loss.backward()
    assert penalty.grad == 2


def test_help_shows_the_names_and_defaults_of_the_arguments() -> None:
    lines = pydoc.plain(pydoc.render_doc(Pipeline)).splitlines()
    shown = [line.strip(" |") for line in lines if "whole_layers=()" in line]
    assert [line.partition("(")[0] for line in shown] == ["Pipeline", "__init__"]
    assert all("schedule='auto', num_microbatches=None" in line and len(line) < 500 for line in shown)


def test_the_signature_binds_like_the_constructor_whose_annotations_stay() -> None:
    bound = inspect.signature(Pipeline).bind("model", "sample", schedule="1f1b")
    assert bound.arguments == {"model": "model", "sample": "sample", "schedule": "1f1b"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'schedul'"):
        inspect.signature(Pipeline).bind("model", "sample", schedul="1f1b")
    named = inspect.signature(Pipeline).parameters
    assert {"self", "return", *named} == {"self", *typing.get_type_hints(Pipeline.__init__)}
