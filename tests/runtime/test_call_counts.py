"""What the runtime does around a stage's layers, in calls of Python: counted, so that no time is measured."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipesched
from pipesched.capture.stage_body import Head
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.function_mode import COMPOSITES, Intercept
from pipesched.tensors.keyed_random import Key, KeyedRandom
from pipesched.tensors.payload import Payload
from tests.support.call_count import calls

CPU = torch.device("cpu")
OURS = str(Path(pipesched.__file__).parent)
X, Y = torch.randn(2, 8), torch.randn(2, 8)
#: Calls of the package's own functions in (F, B) of one layer, or (F, I, W): what was counted when it was last reduced.
LIMITS = {"first": (22, 6), "middle": (18, 7), "last": (23, 5), "first, split": (24, 6, 1)}


def stage(place):
    made = Stage({"0": nn.Linear(8, 8)}, CPU, Head(functional.mse_loss) if place == "last" else None)
    made.begin(StepData(0, 0, [((X,), {})] * 3, targets=[Y] * 3, factors=[1 / 3] * 3 if place == "last" else None))
    return made


def actions(made, place, microbatch):
    """The actions of a micro-batch, one after the other."""
    arrived = () if place.startswith("first") else (Payload.of(torch.ones(2, 8, requires_grad=True)),)
    grads = () if place == "last" else ((torch.ones(2, 8),),)
    split = place.endswith("split")
    yield lambda: made.forward(microbatch, *arrived, split=split)
    yield lambda: (made.input_grad if split else made.backward)(microbatch, *grads)
    if split:
        yield lambda: made.weight_grad(microbatch)


@pytest.mark.parametrize("place", LIMITS)
def test_an_action_makes_few_calls(place):
    made = stage(place)
    for act in (*actions(made, place, 0), *actions(made, place, 1)):  # what the first ones teach, the others need not
        act()
    for act, limit in zip(actions(made, place, 2), LIMITS[place], strict=True):
        seen = calls(act)
        own = {at: count for at, count in seen.items() if at[0].startswith(OURS) and at[1] != "<listcomp>"}
        assert sum(own.values()) <= limit, own
        others = {(Path(file).name, name) for file, name in seen}
        assert "_pytree.py" not in {file for file, _ in others}
        assert ("overrides.py", "handle_torch_function") not in others  # a mode that sees a function of Python


def test_a_function_that_the_mode_leaves_alone_is_called_without_it():
    random = KeyedRandom(CPU)
    random.enter(Key(0, 0, 0), "loss")
    mode = Intercept(random)
    functions = functional.mse_loss, functional.dropout, functional.gumbel_softmax, *COMPOSITES
    assert not any(map(mode.passes, functions))
    with mode:
        functional.mse_loss(X, Y)
        functional.dropout(X)
        functional.gumbel_softmax(X)
        nn.MultiheadAttention(8, 2)(X, X, X)
    assert list(map(mode.passes, functions)) == [True, False, False, False]


def test_a_loss_that_draws_is_keyed_in_every_step():
    def loss_fn(output, target):
        return functional.mse_loss(functional.dropout(output), target)

    made = Stage({"0": nn.Identity()}, CPU, Head(loss_fn))
    given = X.clone().requires_grad_()
    losses = []
    for _ in range(3):
        made.begin(step_data := StepData(0, 0, [((given,), {})], targets=[Y], factors=[None]))
        made.forward(0)
        losses.append(step_data.losses[0])
    assert losses[0] == losses[1] == losses[2]
