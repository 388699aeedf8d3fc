"""Batches whose tensors have different numbers of rows are refused, and the error names split_dims that work."""

import copy
import re
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline
from pipesched.errors import InputError
from pipesched.testing import reference_step

pytestmark = pytest.mark.timeout(60)

HERE: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4, "seed": 1}


class Model(nn.Module):
    """Three layers. ``mixed`` uses all inputs together, with the first layer."""

    def __init__(self, mixed: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.mixed = mixed

    def forward(self, *given: Any) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.second(self.mixed(self.first, *given))))
        return made


class Case(NamedTuple):
    mixed: Callable[..., Tensor]
    #: The arguments of a batch, or of its rows in a slice.
    rows: Callable[[slice], tuple[Any, ...]]
    #: The split_dims that the error names.
    dims: dict[Any, Any]
    #: The batch's number of rows. The sample has 2 rows.
    count: int = 8


def stacked(first: nn.Module, x: Tensor, many: tuple[Tensor, ...]) -> Tensor:
    made: Tensor = first(x) + torch.stack([one.mean() for one in many])[: len(x), None]
    return made + torch.stack([one.mean() for one in many]).mean()


def banked(first: nn.Module, x: Tensor, bank: Tensor) -> Tensor:
    keys = first(bank)
    made: Tensor = (first(x) @ keys.t()).softmax(-1) @ keys
    return made


def in_list(first: nn.Module, x: Tensor, banks: list[Tensor]) -> Tensor:
    return banked(first, x, banks[0])


def in_dict(first: nn.Module, x: Tensor, both: dict[str, Tensor]) -> Tensor:
    made: Tensor = first(x + both["columns"].t()) * both["scale"].mean()
    return made


def time_first(first: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
    made: Tensor = first(x).mean(0) + sum(other.mean(1, keepdim=True) for other in others)
    return made


def with_state(first: nn.Module, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
    made: Tensor = first(x + state[0][0] * state[1].mean(0))
    return made


torch.manual_seed(0)
X, BANK, COLUMNS, SCALE = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 16), torch.rand(4)
Z = torch.randn(16, 8)
VECTORS = tuple(torch.randn(8) for _ in range(8))
RAGGED = tuple(torch.randn(1 + row % 3) for row in range(8))
TIME, SQUARE = torch.randn(6, 8, 8), torch.randn(8, 8, 8)
PADDING = torch.rand(8, 6)
STATE = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
Y = torch.randint(4, (16,))

CASES = {
    "bank of the batch's length": Case(banked, lambda rows: (X[rows], BANK), {1: None}),
    "bank in a list": Case(in_list, lambda rows: (X[rows], [BANK]), {1: None}),
    "bank of another length": Case(banked, lambda rows: (X[rows], BANK[:5]), {1: None}),
    "bank first": Case(lambda first, bank, x: banked(first, x, bank), lambda rows: (BANK[:5], X[rows]), {0: None}),
    "tuple of tensors of different lengths": Case(stacked, lambda rows: (X[rows], RAGGED[rows]), {1: 0}),
    "tuple of vectors": Case(stacked, lambda rows: (Z[rows], (VECTORS * 2)[rows]), {1: 0}, 16),
    "dict of columns": Case(
        in_dict,
        lambda rows: (Z[rows], {"columns": COLUMNS[:, rows], "scale": SCALE}),
        {1: {"columns": 1, "scale": None}},
        16,
    ),
    "time first": Case(time_first, lambda rows: (TIME[:, rows],), {0: 1}),
    "time first, as many steps as rows": Case(time_first, lambda rows: (SQUARE[:, rows],), {0: 1}),
    "time first with padding": Case(time_first, lambda rows: (TIME[:, rows], PADDING[rows]), {0: 1}),
    "time first with padding, as many steps as rows": Case(time_first, lambda rows: (SQUARE[:, rows], X[rows]), {0: 1}),
    "state of layers": Case(with_state, lambda rows: (X[rows], tuple(one[:, rows] for one in STATE)), {1: 1}),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_the_error_names_split_dims_that_work(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = Model(case.mixed)
    plain, looped = copy.deepcopy(model), copy.deepcopy(model)
    batch, target = case.rows(slice(case.count)), Y[: case.count]
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, **HERE}
    with (
        Pipeline(model, case.rows(slice(2)), **options) as pipe,
        pytest.raises(InputError, match=re.escape(f"Numerics(split_dims={case.dims!r})")),
    ):
        pipe.step(*batch, target=target)
    size = case.count // 4
    for begin in range(0, case.count, size):
        rows = slice(begin, begin + size)
        (functional.cross_entropy(looped(*case.rows(rows)), target[rows]) * 0.25).backward()
    with Pipeline(model, case.rows(slice(2)), numerics=Numerics(split_dims=case.dims), **options) as pipe:
        loss = pipe.step(*batch, target=target)
    own: dict[str, Any] = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 1}
    assert torch.equal(loss, reference_step(plain, *batch, target=target, split_dims=case.dims, **own))
    for one, other, third in zip(model.parameters(), plain.parameters(), looped.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        torch.testing.assert_close(one.grad, third.grad)  # a layer that is called twice has another order of sums


def test_the_error_keeps_the_dims_that_the_user_has_named() -> None:
    model = Model(time_first)
    sample, numerics = (TIME[:, :2], PADDING[:2]), Numerics(split_dims={0: 1, 1: 1})
    with (
        Pipeline(model, sample, loss_fn=functional.cross_entropy, numerics=numerics, **HERE) as pipe,
        pytest.raises(InputError, match=re.escape("split_dims={0: 1, 1: 0}")),
    ):
        pipe.step(TIME, PADDING, target=Y[:8])


def test_a_target_without_the_rows_of_the_batch_is_no_reason_to_leave_it_whole() -> None:
    with (
        Pipeline(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), X[:2], loss_fn=functional.cross_entropy, **HERE
        ) as pipe,
        pytest.raises(InputError, match=r"make the numbers equal, or set split_dims=None"),
    ):
        pipe.step(X, target=Y[:7])


def test_lists_are_compared_with_a_sample_of_unequal_rows() -> None:
    """A tuple with one vector a row in the sample: 2 rows and vectors of 8; the batch has 8 rows and vectors of 8."""
    torch.manual_seed(0)
    model = Model(stacked)
    looped = copy.deepcopy(model)
    for begin in range(0, 8, 2):
        rows = slice(begin, begin + 2)
        (functional.cross_entropy(looped(X[rows], VECTORS[rows]), Y[rows]) * 0.25).backward()
    with Pipeline(model, (X[:2], VECTORS[:2]), loss_fn=functional.cross_entropy, **HERE) as pipe:
        pipe.step(X, VECTORS, target=Y[:8])
    for one, other in zip(model.parameters(), looped.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [UserDict, lambda fields: SimpleNamespace(**fields)])
def test_a_sample_can_be_one_object_with_tensors(form: Callable[[dict[str, Tensor]], Any]) -> None:
    torch.manual_seed(0)
    model = Model(lambda first, given: first(given.x if isinstance(given, SimpleNamespace) else given["x"]))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "seed": 1, "num_microbatches": 4}
    with Pipeline(model, (form({"x": X[:2]}),), **(HERE | options)) as pipe:
        loss = pipe.step(form({"x": X}), target=Y[:8])
    assert torch.equal(loss, reference_step(plain, form({"x": X}), target=Y[:8], **options))


def test_a_dict_like_sample_holds_keyword_arguments() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with Pipeline(model, UserDict(input=X[:2]), loss_fn=functional.cross_entropy, **HERE) as pipe:
        loss = pipe.step(**UserDict(input=X), target=Y[:8])
    torch.testing.assert_close(loss, functional.cross_entropy(model(X), Y[:8]).detach())


def test_a_sample_of_arrays_is_refused() -> None:
    with pytest.raises(InputError, match=r"convert a numpy array with torch\.from_numpy"):
        Pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (np.ones((2, 8)),), **HERE)
