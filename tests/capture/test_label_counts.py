"""The weight of a micro-batch of a model that averages its own loss over the labels that are not ignored."""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline
from pipesched.capture import label_counts
from pipesched.capture.label_counts import IGNORED, SUM, counted_labels, counts
from pipesched.testing import reference_step
from tests.support.models import assert_as

VOCABULARY = 11


class Language(nn.Module):
    """A small model that computes its own loss from labels; ``how``: the labels that it averages over."""

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
        if self.how == "rolled":  # the same labels as when shifted, by other code
            labels = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        if self.how == "rows":
            one_by_one = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
            return (one_by_one / (labels != IGNORED).sum(1)).mean()
        if self.how == "classes":
            return cross_entropy(logits[:, -1], labels)
        if self.how == "sum":
            return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if self.how == "root":
            return cross_entropy(logits.flatten(0, 1), labels.flatten()).sqrt()
        if self.how == "no ignored":
            return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(how: str) -> Language:
    torch.manual_seed(0)
    return Language(how)


def text(rows: int, columns: int = 6) -> Tensor:
    return torch.randint(VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(rows))


def padded(rows: int) -> Tensor:
    """Labels with ignored ones at the end of each row: one in the first row, two in the second, and so on."""
    labels = text(rows).clone()
    for row in range(rows):
        labels[row, 6 - min(row % 5, 4) :] = IGNORED
    return labels


WAYS = {
    "plain": "labels",
    "shifted": "labels except the first in each row",
    "rolled": "labels except the first in each row",
}


@pytest.mark.one_in(2)
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
            model,
            {"text": text(rows), "labels": text(rows)},
            devices=["cpu"] * 2,
            num_microbatches=4,
            seed=3,
            schedule="1f1b",
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", [*WAYS, "rows", "classes"])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("columns", [3, 700])
def test_the_counted_labels_are_found_from_losses(how: str, rows: int, columns: int) -> None:
    """For short and long rows. The model and its random state are left unchanged."""
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
    """One tensor is passed as two arguments."""
    x = text(2)
    assert counted_labels(made(how), ((), {"text": x, "labels": x})) == WAYS[how]
    assert counted_labels(made(how), ((x, x), {})) == WAYS[how]


@pytest.mark.parametrize("how", [*WAYS, "rows", "classes"])
def test_the_counted_labels_of_a_model_on_the_meta_device_are_found(how: str) -> None:
    with torch.device("meta"):
        empty = made(how)
    assert counted_labels(empty, sample(how, 2)) == {**WAYS, "rows": None, "classes": "labels"}[how]


@pytest.mark.parametrize(
    ("how", "why"), [("root", "is not the mean over any of these"), ("no ignored", "the model failed on four rows")]
)
def test_rows_count_with_a_warning_if_the_counted_labels_are_not_found(how: str, why: str) -> None:
    with pytest.warns(UserWarning, match=f"(?s){why}.*loss_weight="):
        assert counted_labels(made(how), sample(how, 2)) is None


class Own(nn.Module):
    """A model that computes its own loss and has no argument named ``labels``."""

    def __init__(self, loss: Any, mode: str = "tensor") -> None:
        super().__init__()
        self.first, self.second, self.loss, self.mode = nn.Linear(4, 4), nn.Linear(4, 4), loss, mode

    def forward(self, x: Tensor, y: Tensor) -> Any:
        output = self.second(self.first(x).relu())
        loss = self.loss(output, y)
        return loss if self.mode == "tensor" else {"loss": loss, "output": output}


def squares(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square()


#: name -> (the loss, whether it is a sum over rows)
OWN_LOSSES = {
    "torch's sum": (lambda o, y: functional.mse_loss(o, y, reduction="sum"), True),
    "sum()": (lambda o, y: squares(o, y).sum(), True),
    "a loop over rows": (lambda o, y: sum(squares(a, b).mean() for a, b in zip(o, y, strict=True)), True),
    "two sums": (lambda o, y: squares(o, y).sum() + 0.1 * o.abs().sum(), True),
    "a mean for each row": (lambda o, y: squares(o, y).sum(0).mean(), True),
    "torch's mean": (functional.mse_loss, False),
    "a sum for each row": (lambda o, y: squares(o, y).sum(1).mean(), False),
    "a masked mean": (lambda o, y: squares(o, y)[y > 0].mean(), False),
    "a root": (lambda o, y: squares(o, y).sum().sqrt(), False),
    "a sum beside a mean": (lambda o, y: squares(o, y).sum() + o.abs().mean(), False),
    "noise": (lambda o, y: squares(o + torch.randn_like(o), y).sum(), False),
    "zero": (lambda o, y: 0 * o.sum(), False),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", OWN_LOSSES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", ["tensor", "dict"])
def test_a_sum_over_rows_is_told_from_a_mean(name: str, rows: int, mode: str) -> None:
    loss, is_sum = OWN_LOSSES[name]
    torch.manual_seed(0)
    model = Own(loss, mode)
    random = torch.get_rng_state()
    assert counted_labels(model, ((torch.randn(rows, 4), torch.randn(rows, 4)), {})) == (SUM if is_sum else None)
    torch.set_rng_state(random)
    assert model.training


@pytest.mark.parametrize("name", [name for name, (_, is_sum) in OWN_LOSSES.items() if is_sum])
def test_a_loss_of_the_models_own_that_is_a_sum_adds_up_to_the_batchs(name: str) -> None:
    """Also with micro-batches of different sizes, for losses and gradients."""
    torch.manual_seed(0)
    model = Own(OWN_LOSSES[name][0])
    whole, loop = copy.deepcopy(model), copy.deepcopy(model)
    x, y = torch.randn(10, 4), torch.randn(10, 4)
    with Pipeline(model, (x[:3], y[:3]), devices=["cpu"] * 2, num_microbatches=4, schedule="1f1b", seed=3) as pipe:
        loss = pipe.step(x, y)
        torch.testing.assert_close(loss, whole(x, y).detach())
        torch.testing.assert_close(pipe.evaluate(x, y), whole(x, y).detach())
        whole(x, y).backward()
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        assert torch.equal(loss, reference_step(loop, x, y, num_microbatches=4, seed=3))
        assert_as(pipe, loop)


def test_a_stated_reduction_wins() -> None:
    model = Own(OWN_LOSSES["sum()"][0])
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = Pipeline(
        model,
        (x[:3], y[:3]),
        devices=["cpu"] * 2,
        num_microbatches=4,
        schedule="1f1b",
        numerics=Numerics(loss_reduction="mean"),
    )
    with pipe:
        torch.testing.assert_close(pipe.step(x, y), model(x, y).detach() / 4)


def test_a_loss_that_sums_over_labels_is_recognised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counted_labels(made("sum"), sample("sum", 2)) == SUM


def test_losses_that_are_all_equal_tell_nothing() -> None:
    model = made("plain")
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    with pytest.warns(UserWarning, match="the model's loss could be the mean over more than one of these: "):
        assert counted_labels(model, sample("plain", 2)) is None


def test_without_a_loss_the_model_runs_once() -> None:
    model = made("plain")
    with patch.object(label_counts, "loss_entry", wraps=label_counts.loss_entry) as outputs:
        assert counted_labels(model, ((text(2),), {})) is None
    outputs.assert_called_once()
    assert counted_labels(model, ((), {"text": text(2), "labels": None})) is None
    assert counted_labels(model, ((), {"text": text(2), "labels": torch.ones(2)})) is None


# ---- the loss in outputs ---------------------------------------------------------------------------------------------


@dataclass
class Output:
    """An output class like Hugging Face's that is not registered as a pytree."""

    logits: Tensor
    loss: Tensor | None


class End(nn.Module):
    """The loss as a layer, so that the model's path is the same with and without labels."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, logits: Tensor, labels: Tensor | None) -> Any:
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.form == "scalar":
            return loss
        output = {"logits": logits, "loss": loss}
        return Output(**output) if self.form == "dataclass" else output


class Told(Language):
    """Returns its output in the given form."""

    def __init__(self, form: str) -> None:
        super().__init__("plain")
        self.drop.p, self.end = 0.0, End(form)

    def forward(self, text: Tensor, labels: Tensor | None = None) -> Any:
        return self.end(super().forward(text)["logits"], labels)


def loss_in(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output.loss


def some_without_labels() -> Tensor:
    """Of four micro-batches of two rows, the second has no label that counts."""
    labels = padded(8)
    labels[2:4] = IGNORED
    return labels


@pytest.fixture(params=["dict", "dataclass", "scalar"])
def told(request: pytest.FixtureRequest) -> Iterator[tuple[Pipeline, Told]]:
    torch.manual_seed(0)
    model = Told(request.param)
    whole, example = copy.deepcopy(model), {"text": text(2), "labels": text(2)}
    with Pipeline(model, example, devices=["cpu"] * 2, num_microbatches=4, schedule="1f1b") as pipe:
        yield pipe, whole


def test_the_loss_in_outputs_is_the_batchs(told: tuple[Pipeline, Told]) -> None:
    """One scalar instead of one per micro-batch, with the same bits as the returned loss."""
    pipe, whole = told
    x, labels = text(8), some_without_labels()
    expected = loss_in(whole(x, labels)).detach()
    for method in (pipe.step, pipe.evaluate):
        loss, output = method(text=x, labels=labels, return_outputs=True)
        assert torch.equal(loss_in(output), loss)
        torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        torch.testing.assert_close(loss_in(pipe(x, labels)), expected)
        assert torch.equal(loss_in(pipe(text=x, labels=labels)), loss)
    if pipe.model.end.form != "scalar":
        logits = output["logits"] if isinstance(output, dict) else output.logits
        torch.testing.assert_close(logits, whole(x)["logits"] if isinstance(output, dict) else whole(x).logits)


def test_the_loss_in_outputs_goes_backward(told: tuple[Pipeline, Told]) -> None:
    """Its gradients are those of the whole batch; micro-batches without labels give no gradients instead of NaN."""
    pipe, whole = told
    x, labels = text(8), some_without_labels()
    (2 * loss_in(pipe(text=x, labels=labels))).backward()
    (2 * loss_in(whole(x, labels))).backward()
    for one, other in zip(pipe.model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("told", ["dataclass"], indirect=True)
def test_outputs_without_a_loss_have_none(told: tuple[Pipeline, Told]) -> None:
    pipe, _ = told
    with torch.no_grad():
        assert loss_in(pipe(text=text(8))) is None
        assert loss_in(pipe(text=text(8), labels=None)) is None
        assert loss_in(pipe(text=text(8), labels=torch.full((8, 6), IGNORED))).isnan()  # as plain PyTorch says


def test_outputs_without_the_inputs_that_loss_weight_needs_have_no_loss() -> None:
    model = Told("dataclass")
    choices = {"devices": ["cpu"] * 2, "num_microbatches": 4, "schedule": "1f1b"}
    weight = lambda text, labels: (labels != IGNORED).sum()  # noqa: E731
    with (
        Pipeline(model, {"text": text(2), "labels": text(2)}, numerics=Numerics(loss_weight=weight), **choices) as pipe,
        torch.no_grad(),
    ):
        assert pipe(text=text(8)).loss is None
        assert pipe(text=text(8), labels=padded(8)).loss.dim() == 0


def test_scalars_that_are_not_the_loss_stay_one_for_each_micro_batch() -> None:
    class WithMore(Told):
        def forward(self, text: Tensor, labels: Tensor | None = None) -> Any:
            output = super().forward(text, labels)
            return output | {"largest": output["logits"].max()}

    choices = {"devices": ["cpu"] * 2, "num_microbatches": 4, "schedule": "1f1b"}
    with Pipeline(WithMore("dict"), {"text": text(2), "labels": text(2)}, **choices) as pipe:
        output = pipe.evaluate(text=text(8), labels=padded(8), return_outputs=True)[1]
    assert output["loss"].dim() == 0
    assert output["largest"].shape == (4,)


class Tagger(Language):
    """Averages its loss over the labels that the attention mask does not hide."""

    def __init__(self) -> None:
        super().__init__("labels")

    def forward(  # type: ignore[override]
        self, text: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Any]:
        seen = labels if attention_mask is None else torch.where(attention_mask == 1, labels, IGNORED)
        return super().forward(text, seen)


@pytest.mark.parametrize("padded", [False, True])
def test_labels_that_a_mask_hides_do_not_count_whatever_the_sample_hides(padded: bool) -> None:
    torch.manual_seed(0)
    plain = Tagger().eval()
    own = copy.deepcopy(plain)
    text = torch.randint(0, VOCABULARY, (8, 6))
    mask = (torch.arange(6) < torch.tensor([6, 6, 6, 6, 2, 3, 1, 6])[:, None]).long()
    rows = slice(4, 6) if padded else slice(0, 2)
    sample = {"text": text[rows], "attention_mask": mask[rows], "labels": text[rows]}
    batch = {"text": text, "attention_mask": mask, "labels": text}
    with Pipeline(own, sample, devices=["cpu"] * 2, num_microbatches=4, schedule="1f1b", seed=0) as pipe:
        loss = pipe.step(**batch)
        due = plain(**batch)["loss"]
        torch.testing.assert_close(loss, due.detach())
        due.backward()
        for one, other in zip(own.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    reference = copy.deepcopy(own)
    assert torch.equal(loss, reference_step(reference, **batch, num_microbatches=4, seed=0))


class WithClasses(Language):
    """Adds a mean over labels and a mean over rows, as models for pretraining do."""

    def forward(  # type: ignore[override]
        self, text: Tensor, labels: Tensor, row_label: Tensor | None = None
    ) -> dict[str, Any]:
        output = super().forward(text, labels)
        if row_label is not None:
            output["loss"] = output["loss"] + functional.cross_entropy(output["logits"][:, 0], row_label)
        return output


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_sum_of_means_over_labels_and_over_rows_is_neither_whatever_the_number_of_rows(rows: int) -> None:
    sample = {"text": text(rows), "labels": text(rows), "row_label": torch.arange(rows)}
    with pytest.warns(UserWarning, match="the model's loss is not the mean over any of these: "):
        assert counted_labels(WithClasses("plain"), ((), sample)) is None
