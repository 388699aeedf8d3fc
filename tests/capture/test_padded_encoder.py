"""torch's nn.TransformerEncoder with a padding mask is evaluated like the plain model, which uses nested tensors."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import InputError
from pipesched.testing import reference_step
from tests.support import places
from tests.support.odd_models import square
from tests.support.rank_processes import Ranks

X = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0))
TARGET = torch.zeros(8, 6, 8)


def lengths(*rows: int) -> Tensor:
    return torch.arange(6) >= torch.tensor(rows)[:, None]


ENDS = lengths(6, 4, 6, 5, 6, 3, 6, 2)
HOLES = ENDS.clone()
HOLES[3, :2] = True
MASKS = {
    "ends": ENDS,
    "full rows": lengths(*[6] * 8),
    "some full micro-batches": lengths(6, 6, 2, 1, 6, 6, 3, 3),
    "shorter than the batch": lengths(5, 4, 3, 1, 2, 2, 5, 1),
    "an empty row": lengths(6, 0, 6, 6, 4, 4, 3, 6),
    "holes in one micro-batch": HOLES,
    "padding at the start": ENDS.flip(1),
    "floats": torch.zeros(8, 6).masked_fill(ENDS, -torch.inf),
}


class Doubled(nn.TransformerEncoder):
    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(2 * src, *args, **kwargs)


class Model(nn.Module):
    """An encoder between two layers."""

    def __init__(self, kind: type[nn.TransformerEncoder] = nn.TransformerEncoder, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.encoder = kind(layer, 3, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=padding))


def model_of(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def pipeline(model: nn.Module, sample: str = "ends", group: Any = None, inputs: Any = "all", **given: Any) -> Pipeline:
    where = {**places.place(group or places.OneProcess(2), inputs), **given}
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5, "schedule": "1f1b"}
    return Pipeline(model, (X[:2], MASKS[sample][2:4]), **options, **where)


def due(model: nn.Module, mask: Tensor) -> Tensor:
    """The outputs of the plain model for each micro-batch."""
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        return torch.cat([plain(*rows) for rows in zip(X.chunk(4), mask.chunk(4), strict=True)])


def evaluates_alike(pipe: Pipeline, plain: nn.Module) -> None:
    pipe.eval()
    for name, mask in MASKS.items():
        expected = due(plain, mask)
        torch.testing.assert_close(pipe.forward(X, mask), expected, msg=name)
        torch.testing.assert_close(pipe.evaluate(X, mask, target=TARGET), square(expected, TARGET), msg=name)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sample", ["ends", "full rows", "holes in one micro-batch"])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": nn.LayerNorm(8)}, {"kind": Doubled}, {"kind": Doubled, "norm": nn.LayerNorm(8)}],
    ids=["plain", "norm", "subclass", "subclass with norm"],
)
def test_evaluations(options: dict[str, Any], sample: str, training: bool) -> None:
    with pipeline(model_of(**options).train(training), sample) as pipe:
        evaluates_alike(pipe, model_of(**options))


class Tower(nn.Module):
    """A module with an encoder inside, which is small enough to be a layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = Model(**options)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.dropout(self.inner(x, padding))


class Towers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second, self.head = Tower(**options), Tower(**options), nn.Linear(8, 8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.second(self.first(x, padding), padding))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(8)])
@pytest.mark.parametrize("kind", [Model, Towers])
def test_encoders_inside_layers(kind: type[nn.Module], norm: nn.Module | None) -> None:
    whole = {Model: ["encoder"], Towers: ["first", "second"]}[kind]
    torch.manual_seed(0)
    plain = kind(norm=norm)
    model = copy.deepcopy(plain)
    with pipeline(model, whole_layers=whole) as pipe:
        evaluates_alike(pipe, plain)
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    assert {type(encoder) for encoder in encoders} == {nn.TransformerEncoder}


def test_rows_of_padding_are_zero_before_the_norm() -> None:
    """The norm turns zeros into its bias, so the zeros must be there before the norm."""
    norm = nn.LayerNorm(8)
    nn.init.constant_(norm.bias, 3.0)
    with pipeline(model_of(norm=norm)) as pipe:
        evaluates_alike(pipe, model_of(norm=norm))


def test_an_encoder_can_be_the_whole_model() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    plain = nn.TransformerEncoder(layer, 4)
    model = copy.deepcopy(plain).eval()
    sample = {"src": X[:2], "src_key_padding_mask": ENDS[:2]}
    with Pipeline(model, sample, devices=["cpu"] * 2, schedule="1f1b", num_microbatches=4, loss_fn=square) as pipe:
        got = pipe.forward(X, src_key_padding_mask=ENDS)
    with torch.no_grad():
        torch.testing.assert_close(got, plain.eval()(X, src_key_padding_mask=ENDS))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("given", [{}, {"whole_layers": ["encoder"]}, {"checkpoint": "always"}], ids=str)
@pytest.mark.parametrize("frozen", [True, False])
def test_an_encoder_in_evaluation_mode_inside_a_model_that_trains(frozen: bool, given: dict[str, Any]) -> None:
    """Torch makes nested tensors in a training step only if nothing before the last encoder layer is trained."""

    def make() -> Model:
        model = model_of()
        model.encoder.eval()
        if frozen:
            model.encoder.requires_grad_(False)
            model.embed.requires_grad_(False)
        return model

    own, plain, loop = make(), make(), make()
    with pipeline(own, **given) as pipe:
        loss = pipe.step(X, ENDS, target=TARGET)
        whole = given.get("whole_layers", [])
        options: dict[str, Any] = {"whole_layers": whole, "loss_fn": square, "num_microbatches": 4, "seed": 5}
        assert torch.equal(loss, reference_step(loop, X, ENDS, target=TARGET, **options))
    expected = [plain(*rows) for rows in zip(X.chunk(4), ENDS.chunk(4), strict=True)]
    torch.testing.assert_close(loss, square(torch.cat(expected), TARGET).detach())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("options", "mask", "message"),
    [
        (
            {},
            torch.zeros(8, 6).masked_fill(ENDS, -3.0),
            "must hide the last positions of each row completely, .*; a mask of shape .* has values other than 0 and "
            "-inf; pass a bool mask",
        ),
        (
            {"mask_check": False},
            HOLES,
            "a mask of shape .* names positions before the end of a row; make the encoder with mask_check=True",
        ),
    ],
)
def test_masks_that_mean_something_else_for_nested_tensors(options: dict[str, Any], mask: Tensor, message: str) -> None:
    with pipeline(model_of(**options)) as pipe:
        pipe.eval()
        with pytest.raises(InputError, match=message):
            pipe.evaluate(X, mask, target=TARGET)


def over_processes(group: Any, inputs: Any) -> None:
    own, plain = model_of(norm=nn.LayerNorm(8)), model_of(norm=nn.LayerNorm(8))
    with pipeline(own, group=group, inputs=inputs) as pipe:
        sends = inputs == "all" or group.rank() == 0
        pipe.eval()
        for mask in MASKS.values():
            batch = (X, mask) if sends else ()
            target = {"target": TARGET} if sends else {}
            torch.testing.assert_close(pipe.evaluate(*batch, **target).cpu(), square(due(plain, mask), TARGET))
        pipe.train()
        loss = pipe.step(*((X, ENDS) if sends else ()), **({"target": TARGET} if sends else {}))
        options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5}
        assert torch.equal(loss, reference_step(plain, X, ENDS, target=TARGET, step=0, **options))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_two_processes(ranks: Ranks, inputs: str) -> None:
    ranks.run(2, over_processes, inputs)
