"""Every name builds, validates and simulates without options, for 1 to 4 ranks and 1 to 9 micro-batches, and trains."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Costs, Pipeline, lower, schedules, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.testing import reference_step
from tests.support.random_programs import fitting

ROWS = 9
X, Y = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 3


def model() -> nn.Sequential:
    """Eight layers: as many as 4 ranks with 2 chunks need."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), nn.Dropout(0.25), nn.Linear(4, 3))


@cache
def expected(microbatches: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Loss and gradients of the unpipelined loop."""
    own = model()
    loss = reference_step(own, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=microbatches, seed=3)
    return loss, tuple(p.grad for p in own.parameters() if p.grad is not None)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("p", range(1, 5))
@pytest.mark.parametrize("name", schedules.names())
def test_every_name_builds_validates_simulates_and_trains(name: str, p: int) -> None:
    if fitting(name, p) != p:
        with pytest.raises(ScheduleError, match=f"got {p}; use"):
            schedules.get(name).program(p, 4)
        return
    for m in range(1, 10):
        program = schedules.get(name).program(p, m)
        validate(program)
        validate(lower(program))
        trace = simulate(program, Costs.uniform(program.num_stages))
        assert 0 < trace.bound_s <= trace.makespan_s
        if m in (1, 2, 5, 9):
            train(name, p, m, program)


def train(name, p, m, program) -> None:
    parts = program.num_weights
    own = model()
    before = copy.deepcopy(own.state_dict())
    options = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)} if program.has_updates else {}
    with Pipeline(
        own,
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=["cpu"] * p,
        schedule=name,
        num_microbatches=m,
        boundaries=[8 * part // parts for part in range(1, parts)],
        seed=3,
        **options,
    ) as pipe:
        loss = pipe.step(X, target=Y)
        pipe.flush()
    wanted, gradients = expected(m)
    if program.has_updates:
        # The first micro-batches see the first weights, later ones updated ones: test_staleness replays them.
        assert loss.isfinite()
        assert not torch.equal(own.state_dict()["0.weight"], before["0.weight"])
        return
    assert torch.equal(loss, wanted)
    found = [p.grad for p in own.parameters() if p.grad is not None]
    for gradient, due in zip(found, gradients, strict=True):
        if program.exact:
            assert torch.equal(gradient, due)
        else:
            torch.testing.assert_close(gradient, due)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["chimera", "dualpipe", "dualpipe-v"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (4, 1), (4, 3)])
def test_measured_costs_cut_the_model_if_a_direction_has_no_micro_batch(name: str, p: int, m: int) -> None:
    own = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    plain = copy.deepcopy(own)
    loss = reference_step(plain, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=m)
    options = {"loss_fn": functional.cross_entropy, "num_microbatches": m}
    with Pipeline(own, X[: -(-ROWS // m)], devices=["cpu"] * p, schedule=name, **options) as pipe:
        assert torch.equal(pipe.step(X, target=Y), loss)
        assert pipe.evaluate(X, target=Y).isfinite()
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)  # two directions add gradients in another order
