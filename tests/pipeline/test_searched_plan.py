"""Pipelines whose plan has a searched order: full, short and longer batches, and the options of the search."""

import pytest
import torch
from torch import nn

import pipesched
from pipesched import Plan
from pipesched.errors import InputError
from pipesched.testing import reference_step
from tests.support.synthetic_profiles import profile


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.fixture(scope="module")
def plan():
    known = profile([1.0, 2.0, 1.0, 4.0])
    names = {f"layer{at}": str(at) for at in range(4)}
    found = pipesched.tune(
        known, num_ranks=2, batch_size=4, num_microbatches=4, num_stages=4, schedule="searched", effort=50_000
    )
    values = found.to_dict()
    values["stages"] = [[names[layer] for layer in stage] for stage in values["stages"]]
    return Plan.from_dict({**values, "partition": None, "ties": []})


@pytest.mark.parametrize("count", [4, 3, 6])
def test_steps_of_any_number_of_microbatches_are_bit_identical(plan, count):
    assert plan.schedule == "searched"
    rows = torch.arange(4.0 * count).reshape(count, 4) / 10
    parts = [pipesched.Microbatch(row[None], target=row[None]) for row in rows]
    model, plain = layers(), layers()
    with pipesched.Pipeline(model, rows[:1], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, plan=plan) as pipe:
        loss = pipe.step(microbatches=parts)
        assert torch.equal(loss, reference_step(plain, microbatches=parts, loss_fn=nn.functional.mse_loss))
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)


def test_a_pipeline_searches_within_the_pairs_in_flight_that_are_given():
    given = pipesched.schedules.get("searched").with_options(max_in_flight=2)
    model, plain, x = layers(), layers(), torch.arange(24.0).reshape(6, 4) / 10
    search = pipesched.Search(profile=pipesched.profile(model, x[:1], rows=[2]), batch_size=6, effort=50_000)
    options = {"devices": ["cpu"] * 2, "loss_fn": nn.functional.mse_loss, "num_microbatches": 3}
    with pipesched.Pipeline(model, x[:2], schedule=given, search=search, **options) as pipe:
        assert pipe.plan.schedule == "searched"
        pipesched.validate(pipe.plan.program, exact=True, max_in_flight=2)
        loss = pipe.step(x, target=x)
        assert torch.equal(loss, reference_step(plain, x, target=x, loss_fn=nn.functional.mse_loss, num_microbatches=3))


@pytest.mark.parametrize(("options", "message"), [({"effort": 0}, "at least 1"), ({"axes": "auto"}, "single search")])
def test_a_wrong_effort_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        pipesched.tune(profile([1.0] * 4), num_ranks=2, batch_size=4, **{"effort": 100, **options})
