"""``step(microbatches=[...])``: a batch that is already cut, each micro-batch of its own shape."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Microbatch, Pipeline
from pipesched.errors import ArgumentError, InputError
from tests.support import cut_batches as jobs
from tests.support.cut_batches import parts, pipeline, tagger
from tests.support.places import run_here
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

HERE = {"devices": ["cpu"] * 2}


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("every_product_deferred")
@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "always"), ("zb-h1", "never")])
def test_each_microbatch_has_its_own_shape(schedule: str, checkpoint: str) -> None:
    run_here(2, partial(jobs.trains, checkpoint=checkpoint), schedule)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("schedule", "inputs"), [("zb-h1", "all"), ("1f1b", "first")])
def test_lists_of_microbatches_train_over_a_mesh_as_the_loop(ranks: Ranks, schedule: str, inputs: str) -> None:
    ranks.run(2, jobs.trains, schedule, inputs)


def test_asynchronous_steps(ranks: Ranks) -> None:
    (here,) = run_here(2, jobs.streams)
    assert ranks.run(2, jobs.streams) == [here] * 2
    assert here[0] == here[1]  # the first step returns its own loss, and so does the second


def plain(model: nn.Module) -> Pipeline:
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "schedule": "1f1b", "boundaries": [1], "seed": 1}
    return Pipeline(model, torch.randn(2, 4), num_microbatches=4, **options, **HERE)


def test_equal_cuts_give_the_bits_of_a_whole_batch() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    results = []
    for cut in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        with plain(model) as pipe:
            given = [Microbatch(x, target=y) for x, y in zip(x.split(2), y.split(2), strict=True)]
            loss = pipe.step(microbatches=given) if cut else pipe.step(x, target=y)
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_inputs_that_require_a_gradient_get_one() -> None:
    inputs = [torch.randn(rows, 4, requires_grad=True) for rows in (1, 3)]
    with plain(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) as pipe:
        pipe.step(microbatches=[Microbatch(x, target=torch.zeros(len(x), 4)) for x in inputs])
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"must be at least 1; microbatches= contains 0; pass at least one Microbatch"),
        (torch.ones(3), r"microbatches= must be a list of Microbatch objects; got"),
        ([torch.ones(3)], r"microbatches= must be a list of Microbatch objects; got"),
        ([Microbatch(parts()[0].args[0], mask=parts()[0].kwargs["mask"])], r"must have a target if the pipeline has a"),
        (
            [*parts(), Microbatch(torch.ones(1, 2))],
            r"all micro-batches must have one; micro-batch 0 of 5 has a target, but micro-batch 4 has no target",
        ),
    ],
)
def test_wrong_lists_are_refused(given: Any, message: str) -> None:
    with pipeline(tagger(), HERE) as pipe:
        with pytest.raises(InputError, match=message):
            pipe.step(microbatches=given)
        with pytest.raises(InputError, match=r"step\(\) takes either a batch or microbatches=; both were passed"):
            pipe.step(torch.zeros(2, 3), microbatches=parts())
        with pytest.raises(ArgumentError, match=r"sample, Microbatch\(mask=tensor, tokens=tensor\); got Micro"):
            pipe.step(microbatches=[Microbatch(tokens=torch.zeros(2, 3).long(), target=torch.zeros(2, 3).long())])


def test_a_program_of_a_fixed_number_of_microbatches_refuses_another() -> None:
    with pipeline(tagger(), HERE) as pipe:
        program = pipe.plan.program
    with pipeline(tagger(), HERE, schedule=program) as pipe:
        pipe.step(microbatches=parts())
        with pytest.raises(
            InputError, match="must be exactly 4, because the program has 4 per replica; microbatches= contains 2"
        ):
            pipe.step(microbatches=parts((2, 3), (1, 1)))
