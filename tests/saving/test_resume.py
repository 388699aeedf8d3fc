"""Runs that stop and continue under another plan have the bits of the run that never stopped."""

from functools import partial
from pathlib import Path

import pytest
import torch

from pipesched import Pipeline
from tests.support import places
from tests.support.jobs import saving as jobs
from tests.support.jobs.saving import X, Y, layers
from tests.support.rank_processes import Ranks
from tests.support.resumed_runs import FACTORS, Half, differences, never_stopped, pairwise_cases, replica_cases, runs

pytestmark = pytest.mark.timeout(90)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Half(2), Half(3, "zb-h1", checkpoint="always")),
        pytest.param(
            Half(3, "zb-v", optimizer="pipeline"),
            Half(2, "interleaved-1f1b", optimizer="user", checkpoint="by layer"),
            marks=pytest.mark.exhaustive,
        ),
        (Half(2, "interleaved-1f1b", "mesh", checkpoint="by layer"), Half(3, "1f1b", "mesh", "pipeline")),
        (Half(2, "zb-v", "mesh", "pipeline"), Half(1)),
        pytest.param(Half(1), Half(2, "zb-h1", "mesh", "user", "always"), marks=pytest.mark.exhaustive),
        replica_cases()[9],  # benchmarks/resume.py runs all
    ],
    ids=str,
)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    before: Half, after: Half, ranks: Ranks, tmp_path: Path
) -> None:
    assert differences(runs(ranks), before, after, str(tmp_path / "checkpoint")) == []


def test_the_pairwise_cases_cover_every_pair() -> None:
    """`benchmarks/resume.py` runs them."""
    cases = pairwise_cases()
    for half in (0, 1):
        for name, values in FACTORS.items():
            for other_half in (0, 1):
                for other, others in FACTORS.items():
                    if (half, name) != (other_half, other):
                        found = {(getattr(case[half], name), getattr(case[other_half], other)) for case in cases}
                        assert len(found) == len(values) * len(others), (name, other)


def test_torch_reads_what_the_user_writes_himself(tmp_path: Path) -> None:
    """training_state, written with torch.save and read with weights_only."""
    from tests.support.resumed_runs import HALF, STEPS, Net, Trainer

    first = Trainer(places.OneProcess(2), Half(2), Net())
    with first.pipe:
        first.train(range(HALF))
        torch.save(first.pipe.training_state(**first.states), tmp_path / "state.pt")
    second = Trainer(places.OneProcess(3), Half(3), Net(seed=7), seed=99)
    with second.pipe:
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        for _ in range(2):  # training does not change the state that was loaded
            assert second.pipe.load_training_state(state, **second.states).step == HALF
            losses = second.train(range(HALF, STEPS))
        tensors = dict(second.tensors())
    expected = never_stopped()
    assert all(map(torch.equal, losses, expected[0][HALF:]))
    assert all(torch.equal(tensors[name], value) for name, value in expected[1].items())


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_a_stage_of_frozen_layers_needs_no_optimizer(tmp_path: Path, before: int, after: int) -> None:
    def frozen_in_the_middle(ranks: int) -> Pipeline:
        model = layers(count=3)
        model[1].requires_grad_(False)
        return jobs.piped(places.OneProcess(ranks), model, optimizer=torch.optim.Adam)

    with frozen_in_the_middle(before) as pipe:
        pipe.step(X, target=Y)
        pipe.save(tmp_path)
        expected = pipe.step(X, target=Y).clone()
    with frozen_in_the_middle(after) as pipe:
        assert pipe.load(tmp_path).step == 1
        assert torch.equal(pipe.step(X, target=Y), expected)


@pytest.mark.parametrize("between", [1, 3])
def test_the_state_of_a_frozen_layer_survives_every_plan(tmp_path: Path, between: int) -> None:
    """Adagrad makes a state for frozen parameters too; the layer is trained, frozen, resumed twice, trained again."""

    def resumed(ranks: int, before: str = "") -> Pipeline:
        optimizer = partial(torch.optim.Adagrad, lr=0.1)
        pipe = jobs.piped(places.OneProcess(ranks), layers(count=3), optimizer=optimizer)
        if before:
            pipe.model[1].requires_grad_(False)
            pipe.load(tmp_path / before)
        return pipe

    with resumed(2) as first:
        first.step(X, target=Y)
        first.save(tmp_path / "one")
        first.model[1].requires_grad_(False)
        first.step(X, target=Y)
        first.model[1].requires_grad_(True)
        expected = [first.step(X, target=Y).clone() for _ in range(2)]
    with resumed(between, "one") as second:
        second.step(X, target=Y)
        second.save(tmp_path / "two")
    with resumed(2, "two") as third:
        third.model[1].requires_grad_(True)
        assert all(torch.equal(third.step(X, target=Y), loss) for loss in expected)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_layers_that_were_frozen_from_the_start_load_under_every_plan(tmp_path: Path, before: int, after: int) -> None:
    """Also if a stage has nothing but frozen layers, and the optimizer has a state for each parameter."""

    def frozen_in_the_middle(ranks: int) -> Pipeline:
        model = layers(count=3)
        model[1].requires_grad_(False)
        return jobs.piped(places.OneProcess(ranks), model, optimizer=partial(torch.optim.Adagrad, lr=0.1))

    with frozen_in_the_middle(before) as pipe:
        pipe.step(X, target=Y)
        pipe.save(tmp_path)
        expected = pipe.step(X, target=Y).clone()
    with frozen_in_the_middle(after) as pipe:
        pipe.load(tmp_path)
        assert torch.equal(pipe.step(X, target=Y), expected)
