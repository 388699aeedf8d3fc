"""What a micro-batch counts where a model takes a mean over its own labels: those that are not ignored."""

import copy
import warnings
from typing import Any

import pytest
import torch
from models import assert_as
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.labels import IGNORED, counted_labels, counts
from pipesched.testing import reference_step

VOCABULARY = 11


class Language(nn.Module):
    """A small model that computes its own loss from labels. how: over which labels it takes the mean."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.blocks = nn.Embedding(VOCABULARY, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, VOCABULARY)

    def forward(self, text: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(text)
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x)))
        logits = self.head(x)
        return {"logits": logits, "loss": None if labels is None else self.loss(logits, labels)}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        cross_entropy = functional.cross_entropy
        if self.how == "shifted":
            return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.how == "rolled":  # as where labels are padded at their end: the same labels, another code
            labels = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        if self.how == "rows":
            one_by_one = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
            return (one_by_one / (labels != IGNORED).sum(1)).mean()
        if self.how == "classes":
            return cross_entropy(logits[:, -1], labels)
        if self.how == "sum":
            return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if self.how == "no ignored":
            return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(how: str) -> Language:
    torch.manual_seed(0)
    return Language(how)


def text(rows: int, columns: int = 6) -> Tensor:
    return torch.randint(VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(rows))


def padded(rows: int) -> Tensor:
    """Labels, the last of which are ignored: one in the first row, two in the second, and so on."""
    labels = text(rows).clone()
    for row in range(rows):
        labels[row, 6 - min(row % 5, 4) :] = IGNORED
    return labels


WAYS = {"plain": "labels", "shifted": "labels but each row's first", "rolled": "labels but each row's first"}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_gradient_is_that_of_the_whole_batch_however_labels_are_padded(how: str, rows: int) -> None:
    model, whole, loop = (made(how) for _ in range(3))
    for one in (model, whole, loop):
        one.drop.p = 0.0
    x, labels = text(8), padded(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = Pipeline(
            model, {"text": text(rows), "labels": text(rows)}, devices=["cpu"] * 2, num_microbatches=4, seed=3
        )
    with pipe:
        loss = pipe.step(text=x, labels=labels)
        torch.testing.assert_close(loss, whole(x, labels)["loss"])
        whole(x, labels)["loss"].backward()
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        assert torch.equal(loss, reference_step(loop, text=x, labels=labels, num_microbatches=4, seed=3))
        assert_as(pipe, loop)


def sample(how: str, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    labels = torch.arange(rows) if how == "classes" else text(rows)
    return (), {"text": text(rows), "labels": labels}


@pytest.mark.parametrize("how", [*WAYS, "rows", "classes"])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("columns", [3, 700])
def test_the_way_is_told_from_the_losses(how: str, rows: int, columns: int) -> None:
    """Of short and long rows; the model is left as it was, and its random numbers too."""
    model = made(how)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    labels = torch.arange(rows) if how == "classes" else text(rows, columns)
    if rows == 5 and how != "classes":
        labels[1:, 1:] = IGNORED  # a sample may be padded, too
    way = counted_labels(model, ((text(rows, columns), labels), {}))
    assert way == {**WAYS, "rows": None, "classes": "labels"}[how]
    assert (counts(model, way) is None) == (how == "rows")
    assert model.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("how", WAYS)
def test_the_text_may_be_its_own_labels(how: str) -> None:
    """One tensor, passed twice."""
    x = text(2)
    assert counted_labels(made(how), ((), {"text": x, "labels": x})) == WAYS[how]
    assert counted_labels(made(how), ((x, x), {})) == WAYS[how]


@pytest.mark.parametrize("how", [*WAYS, "rows", "classes"])
def test_the_way_is_told_of_a_model_without_contents(how: str) -> None:
    with torch.device("meta"):
        empty = made(how)
    assert counted_labels(empty, sample(how, 2)) == {**WAYS, "rows": None, "classes": "labels"}[how]


@pytest.mark.parametrize(("how", "why"), [("sum", "fits none of"), ("no ignored", "it failed on four rows")])
def test_where_it_cannot_be_told_rows_count_and_a_warning_says_so(how: str, why: str) -> None:
    with pytest.warns(UserWarning, match=f"(?s){why}.*pass loss_weight="):
        assert counted_labels(made(how), sample(how, 2)) is None


def test_losses_that_are_all_equal_tell_nothing() -> None:
    model = made("plain")
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    with pytest.warns(UserWarning, match="its loss fits each of"):
        assert counted_labels(model, sample("plain", 2)) is None


def test_without_labels_nothing_is_run() -> None:
    model = made("plain")
    model.register_forward_hook(lambda *_: pytest.fail("it ran"))
    assert counted_labels(model, ((text(2),), {})) is None
    assert counted_labels(model, ((), {"text": text(2), "labels": None})) is None
    assert counted_labels(model, ((), {"text": text(2), "labels": torch.ones(2)})) is None
