"""Memory limits of plans for models: the optimizer of training counts, and text means the bytes of the number."""

from functools import partial

import pytest
import torch
from torch import nn

import pipesched
from pipesched.errors import InputError, MemoryLimitError
from pipesched.pipeline import tune as tuning

ADAM_W = torch.optim.AdamW
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
mse = nn.functional.mse_loss


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))


def tuned(**options):
    x = torch.ones(8, 128)
    fixed = {"batch_size": 64, "num_microbatches": 8, "confirm": 0, "all_ranks": True, "effort": 10_000}
    return pipesched.tune(model(), x, num_ranks=2, loss_fn=mse, target=x, **fixed | options)


def needed(plan, optimizer):
    with pipesched.Pipeline(
        model(), torch.ones(8, 128), loss_fn=mse, devices=["cpu"] * 2, plan=plan, optimizer=optimizer
    ) as pipe:
        return max(one.total_bytes for one in pipe.predicted_memory)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("optimizer", "trained"),
    [(ADAM_W, ADAM_W), ("adamw", ADAM_W), (12, ADAM_W), (MOMENTUM, MOMENTUM), ("momentum", MOMENTUM)],
)
def test_a_plan_within_the_limit_stays_within_it_in_training(optimizer, trained):
    least = max(one.total_bytes for one in tuned(optimizer=optimizer).memory())
    limit = round(0.97 * least)
    try:
        plan = tuned(optimizer=optimizer, memory_limit_bytes=limit)
    except MemoryLimitError:
        plan, limit = tuned(optimizer=optimizer, memory_limit_bytes=least), least
    assert needed(plan, trained) <= limit
    assert plan.memory()[0].optimizer > 0


def test_without_an_optimizer_the_same_limit_allows_a_plan_that_training_exceeds():
    """What the argument optimizer= is for."""
    bare = tuned()
    limit = max(one.total_bytes for one in bare.memory())
    assert needed(bare, ADAM_W) > limit
    with pytest.raises(MemoryLimitError):
        tuned(optimizer="adamw", memory_limit_bytes=round(limit * 0.7))


def test_a_plan_for_an_optimizer_includes_the_updates():
    spans = tuned(optimizer=ADAM_W).predicted().spans
    assert sum(span.end_s - span.start_s for span in spans if str(span.action.kind) == "UPDATE") > 0


@pytest.mark.parametrize("optimizer", ["adamax", -1, True, [8]])
def test_a_wrong_optimizer_is_named_before_anything_is_measured(monkeypatch, optimizer):
    monkeypatch.setattr(tuning, "measure", None)
    with pytest.raises(InputError, match=r"sgd, momentum, adam, adamw, or the number of bytes.*; for example, pass"):
        tuned(optimizer=optimizer)


def test_a_function_needs_the_model():
    profile = pipesched.profile(model(), torch.ones(8, 128), rows=[8])
    with pytest.raises(InputError, match=r"measured with the model's parameters; got .*; pass 'adamw'"):
        pipesched.tune(profile, num_ranks=2, batch_size=64, optimizer=ADAM_W)


def test_text_limits_the_memory_of_a_pipeline():
    limits = {}
    for limit in ("9MB", 9 * 10**6, ["9MB", 9 * 10**6]):
        with pipesched.Pipeline(
            model(),
            torch.ones(8, 128),
            loss_fn=mse,
            devices=["cpu"] * 2,
            search=pipesched.Search(memory_limit_bytes=limit, effort=10_000),
            schedule="1f1b",
        ) as pipe:
            limits[str(limit)] = pipe._memory.limits
    assert set(limits.values()) == {(9 * 10**6,) * 2}
    with pytest.raises(pipesched.errors.PartitionError, match="for example, pass 16"):
        pipesched.Pipeline(
            model(), torch.ones(8, 128), devices=["cpu"] * 2, search=pipesched.Search(memory_limit_bytes="much")
        )
