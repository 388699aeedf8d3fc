"""``metrics=``: named scalars of outputs and targets, averaged as the losses are."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Microbatch, Numerics, Pipeline
from pipesched.errors import InputError, ModelTypeError
from tests.support.jobs import metrics as jobs
from tests.support.jobs.metrics import X, Y, model, scores
from tests.support.places import run_here
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

HERE = {"devices": ["cpu"] * 2}
OPTIONS: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": "1f1b", "num_microbatches": 3}


def test_metrics_are_averaged_as_losses_are() -> None:
    with Pipeline(model(), X[:2], boundaries=[2], **OPTIONS, **HERE) as pipe:
        loss, outputs = pipe.evaluate(X, target=Y, metrics=scores, return_outputs=True)
        found = pipe.metrics
    assert list(found) == ["accuracy", "loss_again", "constant"]
    assert all(value.dtype is torch.float64 and not value.dim() for value in found.values())
    torch.testing.assert_close(found["accuracy"], (outputs.argmax(-1) == Y).double().mean())
    torch.testing.assert_close(found["loss_again"].float(), loss)
    assert float(found["constant"]) == pytest.approx(2)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("schedule", "inputs"), [("1f1b", "all"), ("zb-v", "all"), ("1f1b", "first"), ("chimera", "all")]
)
def test_every_rank_of_a_mesh_has_the_metrics(ranks: Ranks, schedule: str, inputs: str, adds: bool) -> None:
    (here,) = run_here(2, partial(jobs.measures, adds=adds), schedule)
    assert ranks.run(2, partial(jobs.measures, adds=adds), schedule, inputs) == [here] * 2
    own = ["accuracy", "loss_again", "constant"]
    added = ["added_loss", "z"] if adds else []
    assert [list(one) for one in here] == [added + own, added + own, added, added + own]


def test_asynchronous_steps_have_metrics(ranks: Ranks) -> None:
    (here,) = run_here(2, jobs.streams)
    assert ranks.run(2, jobs.streams) == [here] * 2
    assert [loss == pytest.approx(one["loss_again"]) if one else None for loss, one in here] == [True] * 3 + [
        None,
        True,
    ]


def test_ranks_that_pass_different_arguments(ranks: Ranks) -> None:
    first, last = ranks.run(2, jobs.differ)
    assert "if any rank passes metrics=, all ranks must pass it; another rank passed metrics=, but rank 1" in first[0]
    assert last[0].endswith(" []")
    assert first[1].endswith(" []")
    assert last[1].endswith(" ['accuracy', 'constant', 'loss_again']")


def test_other_names_in_one_microbatch_stop_all_ranks(ranks: Ranks) -> None:
    first, last = ranks.run(2, jobs.returns_other_names)
    assert "InputError: metrics(outputs, target) must return the same names for every micro-batch" in first
    assert last.startswith("metrics(outputs, target) must return the same names for every micro-batch")


def test_a_recomputed_stage_measures_once_without_gradients() -> None:
    calls = []

    def count(outputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        calls.append((outputs.requires_grad, torch.is_grad_enabled(), len(target)))
        return {"sum": outputs.sum()}

    with Pipeline(model(), X[:2], boundaries=[2], checkpoint="always", **OPTIONS, **HERE) as pipe:
        pipe.step(X, target=Y, metrics=count)
    assert calls == [(False, False, 4), (False, False, 4), (False, False, 3)]


def test_the_weights_are_those_of_the_losses() -> None:
    target = Y.clone()
    target[:4] = -100  # the whole first micro-batch: its nan does not count
    with Pipeline(model(), X[:2], boundaries=[2], **OPTIONS, **HERE) as pipe:
        loss = pipe.step(X, target=target, metrics=scores)
        torch.testing.assert_close(pipe.metrics["loss_again"].float(), loss)
    summed = {**OPTIONS, "loss_fn": nn.CrossEntropyLoss(reduction="sum")}
    with Pipeline(model(), X[:2], boundaries=[2], **summed, **HERE) as pipe:
        pipe.step(X, target=Y, metrics=lambda outputs, target: {"rows": len(target)})
        assert float(pipe.metrics["rows"]) == 11


def test_with_microbatches_as_given_and_the_models_own_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            for layer in self.layers:
                x = layer(x)
            return {"loss": x.square().mean(), "logits": x}

    numerics = Numerics(loss_reduction="mean")
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "boundaries": ["layers.1"]}
    with Pipeline(Own(), X[:2], numerics=numerics, **options, **HERE) as pipe:
        given = [Microbatch(X[:3]), Microbatch(X[3:])]
        loss = pipe.step(microbatches=given, metrics=lambda outputs, _: {"own": outputs["logits"].square().mean()})
        torch.testing.assert_close(pipe.metrics["own"].float(), loss)


# ---- refused --------------------------------------------------------------------------------------------------------


def odd_names(outputs: Tensor, target: Tensor) -> dict[str, int]:
    return {"rows": 1, f"rows of {len(target)}": 1}


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        (3, ModelTypeError, r"metrics must be a function"),
        (lambda outputs: {}, ModelTypeError, r"metrics must be callable as metrics\(outputs, target\)"),
        (
            lambda outputs, target: outputs,
            InputError,
            r"must return a dict that maps names to scalars; got",
        ),
        (lambda outputs, target: {"a": outputs}, InputError, r"metric 'a' is a tensor of shape \[4, 4\]; reduce it"),
        (lambda outputs, target: {"a": "b"}, InputError, r"metric 'a' is 'b'; reduce it"),
        (odd_names, InputError, r"the same names for every micro-batch; .* \['rows', 'rows of 3'\] for micro-batch 2"),
        (
            lambda outputs, target: {"z": 1},
            InputError,
            r"a layer adds a loss named 'z', and metrics= also returns that name",
        ),
    ],
)
def test_wrong_metrics_are_refused(metrics: Any, kind: type[Exception], message: str) -> None:
    with Pipeline(model(adds=True), X[:2], boundaries=[2], **OPTIONS, **HERE) as pipe:
        with pytest.raises(kind, match=message):
            pipe.step(X, target=Y, metrics=metrics)
        pipe.step(X, target=Y, metrics=scores)


class OwnLoss(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.name = name

    def forward(self, x: Tensor, labels: Tensor | None = None, targets: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": functional.cross_entropy(x, labels if targets is None else targets), "logits": x}


@pytest.mark.parametrize("name", ["labels", "targets"])
@pytest.mark.parametrize("as_given", [False, True])
def test_a_model_with_its_own_loss_passes_its_labels_as_the_target(name: str, as_given: bool) -> None:
    net, target = OwnLoss(name), Y.clone()
    target[0] = -100

    def hits(outputs: Any, target: Tensor) -> dict[str, Tensor]:
        kept = target != -100
        return {"hits": (outputs["logits"].argmax(-1) == target)[kept].float().mean()}

    sample = {"x": X[:2], name: Y[:2]}
    numerics = Numerics(loss_weight=lambda x, **labels: (labels[name] != -100).sum())
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "boundaries": ["layers.1"]}
    with Pipeline(net, sample, numerics=numerics, **options, **HERE) as pipe:
        batch: dict[str, Any] = {"x": X, name: target}
        if as_given:
            batch = {
                "microbatches": [Microbatch(x=X[own], **{name: target[own]}) for own in (slice(0, 5), slice(5, 11))]
            }
        for call in (pipe.step, pipe.evaluate):
            call(**batch, metrics=hits)
            want = hits(net(**{"x": X, name: target}), target)["hits"]
            torch.testing.assert_close(pipe.metrics["hits"].float(), want)
