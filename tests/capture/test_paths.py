"""Paths: batches whose micro-batches take different branches of the code between layers train like the plain loop."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pipesched import Pipeline
from pipesched.errors import GraphError
from pipesched.testing import reference_step
from tests.support import places
from tests.support.branching_batches import (
    BY_CHANCE,
    BY_INPUT,
    LENGTH,
    ByBuffer,
    Dropped,
    Exits,
    Padded,
    Shaped,
    Text,
    batch_of,
    model_of,
)

OPTIONS: dict[str, Any] = {"num_microbatches": 4, "seed": 5}
MIXED = [(0, 0, 3, 3), (3, 0, 2, 0), (0, 0, 0, 0), (3, 3, 3, 3)]


def sample_of(padding: int = 0) -> dict[str, torch.Tensor]:
    return batch_of([padding])


def trained_alike(pipe: Pipeline, plain: nn.Module, batches: list[dict[str, torch.Tensor]], **given: Any) -> None:
    """Check that steps and evaluations of a pipeline have the bits of the plain loop."""
    for step, batch in enumerate(batches):
        due = reference_step(plain, **{name: own.clone() for name, own in batch.items()}, step=step, **OPTIONS)
        loss = pipe.step(**{name: own.clone() for name, own in batch.items()}, **given)
        assert torch.equal(loss, due), step
        same_gradients(pipe, plain)


def same_gradients(pipe: Pipeline, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, own in pipe.named_parameters():
        other = expected[name].grad
        assert (own.grad is None) == (other is None), name
        assert own.grad is None or torch.equal(own.grad, other), name


@pytest.mark.one_in(15)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b", "gpipe", "zb-v"])
@pytest.mark.parametrize("kind", BY_INPUT)
def test_branches_on_inputs(kind: type[Text], schedule: str) -> None:
    sample = sample_of(0)
    with Pipeline(model_of(kind), sample, devices=["cpu"] * 2, schedule=schedule, **OPTIONS) as pipe:
        trained_alike(pipe, model_of(kind), [batch_of(padding) for padding in MIXED])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [kind for kind in BY_INPUT if kind is not Exits])
def test_the_sample_may_take_either_branch(kind: type[Text]) -> None:
    with Pipeline(model_of(kind), sample_of(3), devices=["cpu"] * 3, schedule="1f1b", **OPTIONS) as pipe:
        trained_alike(pipe, model_of(kind), [batch_of(padding) for padding in MIXED])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", [*BY_INPUT, *BY_CHANCE])
def test_recomputed_stages_take_the_branch_of_their_forward(kind: type[Text]) -> None:
    options = {"schedule": "1f1b", "checkpoint": "always", **OPTIONS}
    with Pipeline(model_of(kind), sample_of(0), devices=["cpu"] * 3, **options) as pipe:
        trained_alike(pipe, model_of(kind), [batch_of(padding) for padding in MIXED])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", BY_CHANCE)
def test_skipped_layers_are_drawn_like_in_the_plain_loop(kind: type[Text], schedule: str) -> None:
    with Pipeline(model_of(kind), sample_of(0), devices=["cpu"] * 3, schedule=schedule, **OPTIONS) as pipe:
        trained_alike(pipe, model_of(kind), [batch_of([0] * 4, seed=seed) for seed in range(6)])


def test_every_mixture_of_two_branches() -> None:
    with Pipeline(model_of(Padded), sample_of(0), devices=["cpu"] * 3, schedule="1f1b", **OPTIONS) as pipe:
        plain = model_of(Padded)
        trained_alike(pipe, plain, [batch_of(padding) for padding in itertools.product((0, 3), repeat=4)])
        pipe.eval()
        plain.eval()
        for padding in MIXED:
            batch = batch_of(padding)
            parts = zip(*(value.chunk(4) for value in batch.values()), strict=True)
            with torch.no_grad():
                due = sum(plain(*part) * 0.25 for part in parts)
            torch.testing.assert_close(pipe.evaluate(**batch), due)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [Padded, Shaped])
def test_other_lengths_make_no_new_paths(kind: type[Text]) -> None:
    plain = model_of(kind)
    with Pipeline(model_of(kind), sample_of(0), devices=["cpu"] * 3, schedule="1f1b", **OPTIONS) as pipe:
        trained_alike(pipe, plain, [batch_of((0, 2, 0, 2), length) for length in (6, 9, 4, 9, 11, 6)])
        assert len(pipe._running.assembly.layered.paths[True].captures) == 2


def over_ranks(group: places.Group, kind: type[Text], inputs: str, schedule: str) -> None:
    plain = model_of(kind)
    placed = places.place(group, inputs)
    with Pipeline(model_of(kind), sample_of(0), schedule=schedule, **placed, **OPTIONS) as pipe:
        for step, padding in enumerate(MIXED):
            batch = batch_of(padding)
            due = reference_step(plain, **{name: own.clone() for name, own in batch.items()}, step=step, **OPTIONS)
            passes = inputs == "all" or group.rank() == 0
            assert torch.equal(pipe.step(**batch) if passes else pipe.step(), due)
            same_gradients(pipe, plain)
        pipe.eval()
        loss = pipe.evaluate(**batch_of(MIXED[1])) if passes else pipe.evaluate()
        parts = zip(*(value.chunk(4) for value in batch_of(MIXED[1]).values()), strict=True)
        with torch.no_grad():
            torch.testing.assert_close(loss, sum(plain.eval()(*part) * 0.25 for part in parts))


@pytest.mark.one_in(36)
@pytest.mark.parametrize("inputs", ["all", "first"])
@pytest.mark.parametrize("kind", [*BY_INPUT, *BY_CHANCE])
def test_ranks_agree_on_paths(ranks: Any, kind: type[Text], inputs: str) -> None:
    ranks.run(2, over_ranks, kind, inputs, "zb-h1")


class Undecided(Text):
    """Branches on a value that layers compute."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if x.mean() > mask.float().mean() * 100 - 99.5:
            x = x.tanh()
        return self.head(x).square().mean()


def test_a_branch_on_a_value_of_layers_is_refused_by_name() -> None:
    with Pipeline(model_of(Undecided), sample_of(0), devices=["cpu"] * 3, schedule="1f1b", **OPTIONS) as pipe:
        pipe.step(**batch_of((0, 0, 0, 0)))
        with pytest.raises(GraphError, match=r"py:\d+; .* __bool__ reads, which depends on layer 'blocks\.5'"):
            pipe.step(**batch_of((0, 0, 0, 3)))
        pipe.zero_grad()
        pipe.step(**batch_of((0, 0, 0, 0)))


def test_a_sample_without_all_layers_is_refused_with_the_layer() -> None:
    pipe = Pipeline(model_of(Exits), sample_of(3), devices=["cpu"] * 2, schedule="1f1b", **OPTIONS)
    with pipe, pytest.raises(GraphError, match=r"calls blocks\.4; build the pipeline with a sample for which"):
        pipe.step(**batch_of((0, 0, 0, 0)))


def test_a_buffer_that_the_sample_does_not_use_is_refused_and_the_remedy_works() -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "schedule": "1f1b", **OPTIONS}
    with Pipeline(model_of(ByBuffer), sample_of(0), **options) as pipe:
        with pytest.raises(GraphError, match=r"add uses shift in stage [12], and shift belongs to stage 0"):
            pipe.step(**batch_of((0, 0, 3, 0)))
        pipe.step(**batch_of((0, 0, 0, 0)))
    with Pipeline(model_of(ByBuffer), sample_of(3), **options) as pipe:
        trained_alike(pipe, model_of(ByBuffer), [batch_of(padding) for padding in MIXED])


def test_many_random_paths_are_forgotten_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesched.capture.paths.MOST_PATHS", 3)
    with Pipeline(model_of(Dropped), sample_of(0), devices=["cpu"] * 3, schedule="1f1b", **OPTIONS) as pipe:
        trained_alike(pipe, model_of(Dropped), [batch_of([0] * 4, LENGTH, seed) for seed in range(8)])
