"""``Pipeline.check`` passes for every pipeline that is right, and names what is wrong if a guard is missing."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched import Microbatch, Numerics, Pipeline, add_loss
from pipesched.errors import DifferenceError, InputError
from tests.support.jobs import agreement as jobs
from tests.support.rank_processes import Ranks
from tests.support.unguarded import unguarded

X, Y = torch.linspace(-1, 1, 128).reshape(16, 8), torch.linspace(1, -1, 128).reshape(16, 8)
STEP, WHOLE = "a step and a plain loop over its micro-batches", "a step and the model on the whole batch"
RECOMPUTED, ONCE, TWICE = (
    "the gradients of recomputed layers",
    "first derivatives of pipe(...)",
    "second derivatives of pipe(...)",
)


def chain(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 8))


def pipeline(model: nn.Module, sample: Any = X[:4], **options: Any) -> Pipeline:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4, "seed": 3}
    return Pipeline(model, sample, **{"loss_fn": functional.mse_loss, **given, **options})


class Balances(nn.Linear):
    """A layer that adds a loss, counts its calls in a buffer, and draws from a generator of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x) + torch.rand((), generator=self.generator)
        add_loss(0.1 * y.square().mean())
        return y


# ---- pipelines that are right --------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch")
@pytest.mark.parametrize(
    ("options", "compared"),
    [
        ({}, {STEP, WHOLE, ONCE}),
        ({"schedule": "zb-h1"}, {STEP, WHOLE, ONCE}),
        ({"checkpoint": "always"}, {STEP, WHOLE, RECOMPUTED, ONCE}),
        ({"checkpoint": {"1": "recompute-cheap"}}, {STEP, WHOLE, RECOMPUTED, ONCE}),
        ({"schedule": "chimera", "numerics": Numerics(batch_norm="mini-batch")}, {STEP, WHOLE, ONCE}),
        ({"schedule": "interleaved-1f1b"}, {STEP, WHOLE, ONCE}),
        ({"schedule": "pipedream", "optimizer": torch.optim.Adam}, {STEP, WHOLE, ONCE}),
        ({"optimizer": torch.optim.Adam, "numerics": Numerics(clip_grad_norm=1.0)}, {STEP, WHOLE, ONCE}),
        ({"numerics": Numerics(reduction_order="tree")}, {STEP, WHOLE, ONCE}),
    ],
)
def test_a_correct_pipeline_passes_the_check(options: dict[str, Any], compared: set[str]) -> None:
    model = chain(nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh())
    with pipeline(model, **options) as pipe:
        pipe.step(X, target=Y)
        report = pipe.check(X, target=Y)
    assert set(report.equal) == compared
    assert not report.differences
    assert all(f"equal: {what}" in str(report) for what in compared)


def state(model: nn.Module) -> list[Any]:
    tensors = [tensor.clone() for tensor in model.state_dict().values()]
    grads = [None if one.grad is None else (id(one.grad), one.grad.clone()) for one in model.parameters()]
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    kinds = [[module.training, len(vars(module)), len(module._forward_hooks)] for module in model.modules()]
    generators = [module.generator.get_state() for module in model.modules() if isinstance(module, Balances)]
    return [tensors, grads, drawn, kinds, generators]


def test_a_check_leaves_everything_as_it_was() -> None:
    model, twin = (chain(Balances(), nn.Dropout(0.2)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    with pipeline(model) as pipe, pipeline(twin) as other:
        pipe.step(X, target=Y)
        other.step(X, target=Y)
        before = state(model)
        report = pipe.check(X, target=Y)
        after = state(model)
        assert STEP in report.equal
        torch.testing.assert_close(before, after, rtol=0, atol=0)
        assert torch.equal(pipe.step(X, target=Y), other.step(X, target=Y))
        assert pipe.metrics == other.metrics
        assert pipe.trace.makespan_s > 0
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, same.grad)


def test_the_report_states_why_a_comparison_was_skipped() -> None:
    parts = [Microbatch(x, target=y) for x, y in zip(X.chunk(4), Y.chunk(4), strict=True)]
    with pipeline(chain()) as pipe:
        report = pipe.check(microbatches=parts)
        assert report.equal == (STEP,)
        assert f"{WHOLE}: the micro-batches were passed as a list" in report.skipped
        assert f"{WHOLE}: whole_batch is False" in pipe.check(X, target=Y, whole_batch=False).skipped
        assert any(line.startswith(f"{TWICE}: the pipeline") for line in pipe.check(X, target=Y).skipped)
        pipe.eval()
        assert f"{ONCE}: the model is in evaluation mode" in pipe.check(X, target=Y).skipped
        with pytest.raises(InputError, match="target"):
            pipe.check(X)
    tokens = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    with pipeline(tokens, torch.arange(4), loss_fn=functional.cross_entropy) as pipe:
        report = pipe.check(torch.arange(16) % 9, target=torch.arange(16) % 9)
        assert set(report.equal) == {STEP, WHOLE, ONCE}
        assert f"{TWICE}: the model takes no floating-point tensor" in report.skipped


def test_a_loss_that_compares_rows_differs_on_the_whole_batch() -> None:
    def contrastive(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output @ target.T, torch.arange(len(output)))

    with pipeline(chain(), loss_fn=contrastive) as pipe:
        with pytest.raises(DifferenceError, match=f"{re.escape(WHOLE)}: .* all layers return the same"):
            pipe.check(X, target=Y)
        assert STEP in pipe.check(X, target=Y, whole_batch=False).equal


# ---- guards switched off -------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) * getattr(self.weight, "multiplier", 1.0)


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape, generator=self.generator))


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        made: Tensor = super().forward(x[None])[0][0]
        return made


class Checkpoints(nn.Module):
    """Recomputes its blocks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        made: Tensor = self.last(x)
        return made


class ReadsGain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[0].gain = 1.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.blocks[0].gain  # type: ignore[operator]
        return x


class PerRow(nn.Module):
    """Takes a number for each row, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scales: Any) -> Tensor:
        x = torch.stack([row * scale for row, scale in zip(self.first(x), scales, strict=False)])
        made: Tensor = self.last(x)
        return made


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8) / 3)
    weight.multiplier = 3.0  # type: ignore[attr-defined]
    return chain(Scaled(weight), nn.Linear(8, 8), Scaled(weight))


def wrong(guard: str, model: nn.Module, *args: Any, change: Any = None, **options: Any) -> str:
    """Return what a check says of a pipeline that was made without a guard."""
    torch.manual_seed(0)
    sample = (X[:4], *(arg[:4] for arg in args))
    with unguarded(guard), pipeline(model, sample, **options) as pipe:
        if change is not None:
            change(model)
        with pytest.raises(DifferenceError) as caught:
            pipe.check(X, *args, target=Y)
    return str(caught.value)


def test_second_derivatives() -> None:
    said = wrong("second derivatives", chain(nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))
    assert f"{TWICE}: the gradient of " in said
    assert ONCE not in said


def test_rows_in_lists() -> None:
    said = wrong("rows in lists", PerRow(), [float(place) for place in range(16)])
    assert f"{WHOLE}: the gradient of" in said
    assert "the first layer that returns something else is 'last'" in said


def test_attributes_of_tied_weights() -> None:
    said = wrong("attributes of weights", tied())
    assert "the first layer that returns something else is '1'" in said


def test_checkpoints_in_checkpoints() -> None:
    said = wrong("recomputed twice", Checkpoints(), checkpoint={"blocks.0.0": "recompute"})
    assert f"{STEP}: the gradient of 'blocks." in said or f"{STEP}: the pipeline raises CheckpointError" in said
    assert f"{ONCE}: the pipeline raises CheckpointError" in said


@pytest.mark.parametrize(
    ("make", "word"), [(lambda: Recurrent(8, 8), "recompute-cheap"), (OwnGenerator, "recompute")], ids=["gru", "noise"]
)
def test_recomputed_layers(make: Any, word: str) -> None:
    said = wrong("recomputed layers", chain(make(), nn.Linear(8, 8)), checkpoint={"1": word})
    assert f"{RECOMPUTED}: layer '1', recomputed with '{word}': it has other gradients" in said
    assert f"{STEP}: the gradient of" in said


def test_statistics_of_copies() -> None:
    said = wrong("statistics of copies", chain(nn.BatchNorm1d(8), nn.Linear(8, 8)), schedule="chimera")
    assert f"{STEP}: the buffer '1.running_" in said or "the buffer '1.num_batches_tracked'" in said


def test_an_attribute_of_another_stage() -> None:
    def change(model: nn.Module) -> None:
        model.blocks[0].gain = 3.0  # type: ignore[index,assignment]

    said = wrong("attributes of layers", ReadsGain(), change=change)
    assert f"{STEP}: " in said
    assert "the first layer that returns something else is 'blocks." in said


# ---- over a mesh ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_ranks_check_together(ranks: Ranks, inputs: str) -> None:
    *_, due = ranks.run(2, jobs.checks, inputs, False)[0]
    for equal, skipped, losses in ranks.run(2, jobs.checks, inputs):
        assert set(equal) == {STEP, WHOLE}
        assert f"{ONCE}: a forward over a mesh cannot be differentiated" in skipped
        assert losses == due


@pytest.mark.timeout(60)
def test_other_batches_of_ranks(ranks: Ranks) -> None:
    for text in ranks.run(2, jobs.checks_other_batches):
        assert f"{STEP}: " in text
