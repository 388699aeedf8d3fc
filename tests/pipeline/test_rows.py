"""What has rows: Python values in batches and targets, samples in another layout, and outputs of micro-batches."""

import copy
import math
from collections import UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Microbatch, Numerics, Pipeline
from pipesched.errors import InputError
from pipesched.testing import reference_step

pytestmark = pytest.mark.timeout(60)

HERE: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4, "seed": 1}
ROWS = 12
X, Y = torch.randn(ROWS, 8), torch.randn(ROWS, 4)
NUMBERS = [1.0 + row for row in range(ROWS)]


@dataclass
class Record:
    lengths: Any
    kind: str = "record"


class Holder:
    """A plain object, as a collate function may return it."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths


class Slotted:
    """An object without a ``__dict__``, as small records often are."""

    __slots__ = ("__private", "lengths", "unset")

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths
        self.__private = "record"


class SlottedChild(Slotted):
    """An object with slots of a base class, and other attributes."""


class Encoding(UserDict):
    """A dict-like object that torch's pytrees do not know."""


Named = namedtuple("Named", ["lengths"])


def read(given: Any) -> list[Any]:
    """Return the numbers in any of the containers."""
    if isinstance(given, Record | Holder | Slotted | Named):
        given = given.lengths
    elif isinstance(given, dict | UserDict):
        given = given["lengths"]
    return [float(torch.as_tensor(one).sum()) for one in given]


class Scale(nn.Module):
    """Divides each row by its own number, and by the largest number of the micro-batch."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        numbers = read(given)
        return torch.stack([row / number for row, number in zip(x, numbers, strict=True)]) / max(numbers)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(8, 16), Scale(), nn.Linear(16, 4)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        made: Tensor = self.last(self.scale(torch.tanh(self.first(x)), given))
        return made


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def slices(rows: int = ROWS, parts: int = 4) -> list[slice]:
    size = rows // parts
    return [slice(begin, begin + size) for begin in range(0, rows, size)]


def assert_gradients_as(model: nn.Module, plain: nn.Module) -> None:
    for (name, own), due in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert due.grad is not None
        assert torch.equal(own.grad, due.grad), name


FORMS: dict[str, Callable[[list[float]], Any]] = {
    "list": list,
    "tuple": tuple,
    "integers": lambda numbers: [int(number) for number in numbers],
    "scalar tensors": lambda numbers: [torch.tensor(number) for number in numbers],
    "tensors": lambda numbers: [torch.full((int(number),), 1.0) for number in numbers],
    "arrays": lambda numbers: [np.full(int(number), 1.0) for number in numbers],
    "lists": lambda numbers: [[1.0] * int(number) for number in numbers],
    "tuples": lambda numbers: [(number, 0.0) for number in numbers],
    "array": np.array,
    "table": lambda numbers: np.array([[number, 0.0] for number in numbers]),
    "dict": lambda numbers: {"lengths": list(numbers), "names": ["a", "b", "c", "d", "e"]},
    "named tuple": lambda numbers: Named(tuple(numbers)),
    "dataclass": lambda numbers: Record(list(numbers)),
    "dataclass of a tensor": lambda numbers: Record(torch.tensor(numbers)),
    "object": lambda numbers: Holder(torch.tensor(numbers)),
    "slots": lambda numbers: Slotted(torch.tensor(numbers)),
    "slots of a base class": lambda numbers: SlottedChild(list(numbers)),
    "object of a list": lambda numbers: Holder(list(numbers)),
    "dict-like object": lambda numbers: Encoding(lengths=torch.tensor(numbers)),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_with_one_entry_a_row_are_split_with_the_rows(form: str, by_keyword: bool) -> None:
    make, model = FORMS[form], scaled()
    plain, looped = copy.deepcopy(model), copy.deepcopy(model)
    for rows in slices():
        (functional.mse_loss(looped(X[rows], make(NUMBERS[rows])), Y[rows]) * 0.25).backward()
    given: tuple[Any, ...] = () if by_keyword else (make(NUMBERS),)
    named = {"given": make(NUMBERS)} if by_keyword else {}
    with Pipeline(model, (X[:2], make(NUMBERS[:2])), loss_fn=functional.mse_loss, **HERE) as pipe:
        loss = pipe.step(X, *given, target=Y, **named)
    due = reference_step(plain, X, *given, loss_fn=functional.mse_loss, target=Y, num_microbatches=4, seed=1, **named)
    assert torch.equal(loss, due)
    assert_gradients_as(model, plain)
    assert_gradients_as(model, looped)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_targets_with_one_entry_a_row_are_split_with_the_rows(form: str) -> None:
    def loss_fn(output: Tensor, target: Any) -> Tensor:
        numbers = torch.tensor(read(target))
        assert len(numbers) == len(output)
        return (output.squeeze(1) - numbers).square().mean()

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    want = loss_fn(model(X), FORMS[form](NUMBERS)).detach()
    with Pipeline(model, X[:2], loss_fn=loss_fn, **HERE) as pipe:
        torch.testing.assert_close(pipe.step(X, target=FORMS[form](NUMBERS)), want)
        rest = FORMS[form](NUMBERS[:7])  # a short last batch
        torch.testing.assert_close(
            pipe.step(X[:7], target=rest), loss_fn(model(X[:7]), FORMS[form](NUMBERS[:7])).detach()
        )


# ---- lists without rows ---------------------------------------------------------------------------------------------


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, factors: Any) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.first(x)) * sum(factors))
        return made


@pytest.mark.one_in(2)
@pytest.mark.parametrize("factors", [[0.5, 0.25, 2.0], (0.5, 0.25, 2.0), np.array([0.5, 0.25, 2.0])])
def test_a_list_of_settings_goes_to_each_microbatch_also_if_a_last_batch_has_as_many_rows(factors: Any) -> None:
    model = Kernels()
    with Pipeline(model, (X[:2], factors), loss_fn=functional.mse_loss, **HERE) as pipe:
        for rows in (12, 3):
            torch.testing.assert_close(
                pipe.step(X[:rows], factors, target=Y[:rows]),
                functional.mse_loss(model(X[:rows], factors), Y[:rows]).detach(),
            )


def test_a_list_of_settings_may_have_the_length_of_the_sample() -> None:
    model = Kernels()
    with Pipeline(model, (X[:2], [0.5, 2.0]), loss_fn=functional.mse_loss, **HERE) as pipe:
        torch.testing.assert_close(
            pipe.step(X, [0.5, 2.0], target=Y), functional.mse_loss(model(X, [0.5, 2.0]), Y).detach()
        )


def test_two_tensors_are_two_arguments_also_in_a_batch_of_two_rows() -> None:
    model = Kernels()
    for kind in (list, tuple):
        with Pipeline(model, (X[:1], kind((X[:1, :1], X[:1, 1:2]))), loss_fn=functional.mse_loss, **HERE) as pipe:
            for rows in (12, 2):
                pair = kind((X[:rows, :1], X[:rows, 1:2]))
                torch.testing.assert_close(
                    pipe.step(X[:rows], pair, target=Y[:rows]),
                    functional.mse_loss(model(X[:rows], pair), Y[:rows]).detach(),
                )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("sample", "given", "length"),
    [
        ([1.0] * 12, [1.0] * 12, 12),  # the list of the whole batch, in a sample of two rows
        ([1.0] * 2, [1.0] * 5, 5),
        ([1.0] * 3, [1.0] * 12, 12),
    ],
)
def test_lists_that_contradict_the_sample_are_refused_until_split_dims_decides(
    sample: list[float], given: list[float], length: int
) -> None:
    model = Kernels()
    with (
        Pipeline(model, (X[:2], sample), loss_fn=functional.mse_loss, **HERE) as pipe,
        pytest.raises(
            InputError, match=rf"argument 1 has {length} entries in a batch of 12 rows.*split_dims=\{{1: 0\}}"
        ),
    ):
        pipe.step(X, given, target=Y)
    for key in (1, "factors"):
        numerics = Numerics(split_dims={key: None})
        with Pipeline(model, (X[:2], sample), loss_fn=functional.mse_loss, numerics=numerics, **HERE) as pipe:
            torch.testing.assert_close(pipe.step(X, given, target=Y), functional.mse_loss(model(X, given), Y).detach())


def test_a_sample_that_is_the_batch_needs_split_dims() -> None:
    sample = X, NUMBERS
    model = scaled()
    plain = copy.deepcopy(model)
    with (
        Pipeline(model, sample, loss_fn=functional.mse_loss, **HERE) as pipe,
        pytest.raises(InputError, match=r"argument 1 has 12 entries in a batch of 12 rows, 12 entries and 12 rows in"),
    ):
        pipe.step(X, NUMBERS, target=Y)
    options: dict[str, Any] = {"loss_fn": functional.mse_loss}
    with Pipeline(model, sample, numerics=Numerics(split_dims={1: 0}), **options, **HERE) as pipe:
        loss = pipe.step(X, NUMBERS, target=Y)
    assert torch.equal(loss, reference_step(plain, X, NUMBERS, target=Y, num_microbatches=4, seed=1, **options))


def test_split_dims_by_entry() -> None:
    class Nested(Kernels):
        def forward(self, x: Tensor, batch: Any) -> Tensor:
            return super().forward(x + batch["maps"][0].t() + batch["maps"][1], batch["factors"])

    model = Nested()
    batch = {"maps": (X.t().contiguous(), X), "factors": [0.5] * 12}
    sample = {"x": X[:2], "batch": {"maps": (X[:2].t().contiguous(), X[:2]), "factors": [0.5] * 12}}
    numerics = Numerics(split_dims={"batch": {"maps": [1, 0], "factors": None}})
    with Pipeline(model, sample, loss_fn=functional.mse_loss, numerics=numerics, **HERE) as pipe:
        torch.testing.assert_close(
            pipe.step(X, batch=batch, target=Y), functional.mse_loss(model(X, batch), Y).detach()
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (deque(NUMBERS), r"argument 1 is an object of class deque with 12 entries"),
        (range(1, 13), r"argument 1 is an object of class range with 12 entries"),
        (set(NUMBERS), r"argument 1 is an object of class set with 12 entries"),
        (torch.distributions.Normal(X, 1.0), r"argument 1 is an object of class Normal; pass its tensors"),
        ([1.0] * 12, r"with one entry for each row must have as many entries.*argument 1 has 12 entries.* 11 rows"),
    ],
    ids=["deque", "range", "set", "distribution", "other length"],
)
def test_values_that_cannot_be_split_are_refused(given: Any, message: str) -> None:
    with Pipeline(Kernels(), (X[:2], [1.0, 1.0]), loss_fn=functional.mse_loss, **HERE) as pipe:
        pipe.step(X, NUMBERS, target=Y)
        rows = 11 if isinstance(given, list) else 12
        with pytest.raises(InputError, match=message):
            pipe.step(X[:rows], given, target=Y[:rows])


def test_a_number_that_is_the_number_of_rows_is_refused() -> None:
    class Sized(Kernels):
        def forward(self, x: Tensor, size: int) -> Tensor:
            return super().forward(x, [size])

    with (
        Pipeline(Sized(), (X[:2], 2), loss_fn=functional.mse_loss, **HERE) as pipe,
        pytest.raises(InputError, match=r"argument 1 is 12, the number of rows of the batch, and was 2 for the sample"),
    ):
        pipe.step(X, 12, target=Y)


def test_a_target_that_is_a_list_of_settings_is_told_from_rows_by_later_batches() -> None:
    def loss_fn(output: Tensor, target: Any) -> Tensor:
        labels, weights = target
        return functional.mse_loss(output, labels) * sum(weights)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with Pipeline(model, X[:2], loss_fn=loss_fn, **HERE) as pipe:
        for rows in (12, 3):
            target = Y[:rows], [0.5, 0.25, 2.0]
            torch.testing.assert_close(pipe.step(X[:rows], target=target), loss_fn(model(X[:rows]), target).detach())
    with Pipeline(model, X[:2], loss_fn=loss_fn, **HERE) as pipe:
        pipe.step(X[:3], target=(Y[:3], [0.5, 0.25, 2.0]))
        with pytest.raises(InputError, match=r"the target\[1\] has 3 entries in a batch of 12 rows, 3 entries and 3 "):
            pipe.step(X, target=(Y, [0.5, 0.25, 2.0]))


# ---- tensors in lists -----------------------------------------------------------------------------------------------


class Match(nn.Module):
    def forward(self, x: Tensor, masks: Any) -> Tensor:
        return torch.stack([(row - mask).square().mean() for row, mask in zip(x, masks, strict=True)]).mean()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.match = Match()

    def forward(self, x: Tensor, masks: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        made: Tensor = self.match(x, masks)
        return made


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_list_of_tensors_of_different_lengths(parts: int) -> None:
    """The micro-batches have more rows than the sample, and lists of different shapes."""
    model, masks = Masked(), [torch.randn(1 + row % 5, 8) for row in range(ROWS)]
    plain = copy.deepcopy(model)
    options = {**HERE, "devices": ["cpu"] * 3, "num_microbatches": parts}
    with Pipeline(model, {"x": X[:2], "masks": masks[:2]}, **options) as pipe:
        loss = pipe.step(x=X, masks=masks)
        assert torch.equal(loss, reference_step(plain, x=X, masks=masks, num_microbatches=parts, seed=1))
        assert_gradients_as(model, plain)
        pipe.eval()
        torch.testing.assert_close(pipe.evaluate(X[:7], masks[:7]), model.eval()(X[:7], masks[:7]).detach())


# ---- micro-batches that are given -----------------------------------------------------------------------------------


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        for layer in self.vision:
            patches = layer(patches).tanh()
        x = x + torch.stack([part.mean(0) for part in patches.split(sizes[:, 0].tolist())])
        for layer in self.text:
            x = layer(x).tanh()
        return x.square().mean()


def packed(counts: list[int]) -> dict[str, Tensor]:
    return {
        "x": torch.randn(len(counts), 8),
        "patches": torch.randn(sum(counts), 8),
        "sizes": torch.tensor(counts).unsqueeze(1),
    }


def test_packed_rows_of_equal_proportions() -> None:
    parts = [packed([4, 4]), packed([2, 6])]
    model = Packed()
    plain = copy.deepcopy(model)
    for part in parts:
        (plain(**part) * 0.5).backward()
    with Pipeline(model, parts[0], **{**HERE, "devices": ["cpu"] * 3}) as pipe:
        pipe.step(microbatches=[Microbatch(**part) for part in parts])
    assert_gradients_as(model, plain)


def test_packed_rows_of_other_proportions_need_a_weight() -> None:
    parts = [packed([4, 4]), packed([2, 3])]
    model = Packed()
    plain = copy.deepcopy(model)
    given = [Microbatch(**part) for part in parts]
    with Pipeline(model, parts[0], **{**HERE, "devices": ["cpu"] * 3}) as pipe:
        with pytest.raises(InputError, match=r"x= has \[2, 2\] rows; patches= has \[8, 5\] rows.*loss_weight"):
            pipe.step(microbatches=given)
        with pytest.raises(InputError, match=r"x= has 2 rows, patches= has 8; .* pass microbatches="):
            pipe.step(**parts[0])
    for part in parts:
        (plain(**part) * (len(part["patches"]) / 13)).backward()
    numerics = Numerics(loss_weight=lambda x, patches, sizes: len(patches))
    with Pipeline(model, parts[0], numerics=numerics, **{**HERE, "devices": ["cpu"] * 3}) as pipe:
        pipe.step(microbatches=given)
    assert_gradients_as(model, plain)


def test_graphs_count_by_the_rows_of_their_target() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, nodes: Tensor, edges: Tensor, graph_of: Tensor) -> Tensor:
            nodes = torch.tanh(self.first(nodes))
            nodes = nodes.index_add(0, edges[1], nodes[edges[0]])
            made: Tensor = self.last(nodes.new_zeros(int(graph_of.max()) + 1, 8).index_add(0, graph_of, nodes))
            return made

    def graphs(*nodes: int) -> Microbatch:
        total = sum(nodes)
        owner = torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor(nodes))
        return Microbatch(torch.randn(total, 8), torch.randint(total, (2, 5)), owner, target=torch.randn(len(nodes), 1))

    parts = [graphs(3, 4), graphs(2, 5, 1)]
    model = Graph()
    plain = copy.deepcopy(model)
    for part in parts:
        (functional.mse_loss(plain(*part.args), part.target) * (len(part.target) / 5)).backward()
    with Pipeline(model, parts[0].args, loss_fn=functional.mse_loss, whole_layers=["last"], **HERE) as pipe:
        pipe.step(microbatches=parts)
    assert_gradients_as(model, plain)


# ---- samples in another layout --------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(30, 16), nn.LSTM(16, 16), nn.Linear(16, 30)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.rnn(self.embed(x))[0])
        return made


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("time", "columns", "sample"), [(6, 8, 2), (35, 12, 3), (9, 8, 1), (6, 16, 2)])
def test_time_first_is_refused_until_split_dims_says_so(time: int, columns: int, sample: int) -> None:
    torch.manual_seed(0)
    model, tokens = Recurrent(), torch.randint(30, (time + 1, columns))
    x, y = tokens[:-1], tokens[1:]
    plain = copy.deepcopy(model)
    with (
        Pipeline(model, x[:, :sample], loss_fn=token_loss, **HERE) as pipe,
        pytest.raises(
            InputError, match=r"so its rows are in dim 1; pass numerics=Numerics\(split_dims=1\), or split_d"
        ),
    ):
        pipe.step(x, target=y)
    options: dict[str, Any] = {"loss_fn": token_loss}
    with Pipeline(model, x[:, :sample], numerics=Numerics(split_dims=1), **options, **HERE) as pipe:
        loss = pipe.step(x, target=y)
    assert torch.equal(loss, reference_step(plain, x, target=y, num_microbatches=4, seed=1, split_dims=1, **options))
    assert_gradients_as(model, plain)
    with Pipeline(model, x[:, :sample], numerics=Numerics(split_dims={0: 0}), **options, **HERE) as pipe:
        pipe.step(x, target=y)  # the user insists


def test_time_first_sequences_of_another_length_than_the_sample() -> None:
    with (
        Pipeline(Recurrent(), torch.randint(30, (35, 2)), loss_fn=token_loss, **HERE) as pipe,
        pytest.raises(InputError, match=r"so its rows are in dim 1"),
    ):
        pipe.step(torch.randint(30, (40, 8)), target=torch.randint(30, (40, 8)))


@pytest.mark.parametrize("sample", [(1, 5), (2, 16), (8, 5), (8, 16), (16, 12), (3, 1)])
def test_lengths_that_change_from_step_to_step_raise_no_alarm(sample: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))
    lengths = torch.randint(3, 40, (12,)).tolist()
    with Pipeline(model, torch.zeros(sample, dtype=torch.int64), loss_fn=token_loss, **HERE) as pipe:
        for rows, length in ((8, one) for one in lengths):
            tokens = torch.randint(30, (rows, length))
            assert math.isfinite(pipe.step(tokens, target=tokens))


# ---- outputs --------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, width: int, layers: int, experts: int) -> None:
        super().__init__()
        self.first = nn.GRU(width, width, num_layers=layers, batch_first=True)
        self.second = nn.GRU(width, width, num_layers=layers, batch_first=True)
        self.router = nn.Linear(width, experts)

    def forward(self, x: Tensor) -> dict[str, Any]:
        sequence, state = self.second(self.first(x)[0])
        load = self.router(sequence).softmax(-1).mean((0, 1))
        flat = sequence.flatten(0, 1)
        return {"sequence": sequence, "nested": (state, [flat, load]), "gram": flat[: len(x)] @ flat[: len(x)].t()}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize(("layers", "experts"), [(2, 3), (2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("differentiable", [False, True])
def test_outputs_are_joined_along_their_rows(layers: int, experts: int, rows: int, differentiable: bool) -> None:
    """The micro-batches have two rows; sizes that are two by chance are no rows."""
    torch.manual_seed(0)
    model, x = Encoder(8, layers, experts), torch.randn(rows, 5, 8)
    model.train(differentiable)
    plain = copy.deepcopy(model)
    want = plain(x)
    with Pipeline(model, x[:2], **HERE) as pipe, torch.set_grad_enabled(differentiable):
        got = pipe(x)
        state, (flat, load) = got["nested"]
        torch.testing.assert_close(got["sequence"], want["sequence"])
        torch.testing.assert_close(state, want["nested"][0])
        torch.testing.assert_close(flat, want["nested"][1][0])
        assert [tuple(one.shape) for one in load] == [(experts,)] * 4
        parts = x.tensor_split(4)
        assert [tuple(one.shape) for one in got["gram"]] == [(len(part), len(part)) for part in parts]
        for own, part in zip(load, parts, strict=True):
            torch.testing.assert_close(own, plain(part)["nested"][1][1])
        if not differentiable:
            return
        sums = [got["sequence"].sum(), state.square().sum(), flat.sum(), *(one.square().sum() for one in load)]
        torch.stack(sums).sum().backward()
    outputs = [plain(part) for part in parts]
    whole = want["sequence"].sum() + want["nested"][0].square().sum() + want["nested"][1][0].sum()
    (whole + sum(output["nested"][1][1].square().sum() for output in outputs)).backward()
    for own, due in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, due.grad)


def test_split_dims_of_outputs() -> None:
    model, x = Encoder(8, 2, 3).eval(), torch.randn(8, 5, 8)
    want = model(x)
    numerics = Numerics(split_dims={"output": {"nested": (1, [0, None]), "sequence": None, "gram": 0}})
    with Pipeline(model, x[:2], numerics=numerics, **HERE) as pipe, torch.no_grad():
        got = pipe(x)
    torch.testing.assert_close(got["nested"][0], want["nested"][0])
    assert len(got["nested"][1][1]) == len(got["sequence"]) == 4
    assert got["gram"].shape == (8, 2)
    numerics = Numerics(split_dims={"output": {"sequence": 3}})
    with (
        Pipeline(model, x[:2], numerics=numerics, **HERE) as pipe,
        torch.no_grad(),
        pytest.raises(InputError, match=r"the output\['sequence'\] has a tensor of shape \[2, 5, 8\], but split_dims"),
    ):
        pipe(x)


class Out:
    def __init__(self, logits: Tensor, gate: Tensor) -> None:
        self.logits, self.gate = logits, gate


class Gated(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.gate, self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 32), nn.Linear(32, 4)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        gate = self.gate(x)
        return self.wrap(self.b(torch.tanh(self.a(x))), gate)


def test_objects_come_back_as_a_list() -> None:
    model = Gated(Out)
    with Pipeline(model, X[:4], boundaries=["a"], **HERE) as pipe:
        with torch.no_grad():
            parts = pipe(X)
        want = model(X)
        assert len(parts) == 4
        torch.testing.assert_close(torch.cat([one.logits for one in parts]), want.logits)
        torch.testing.assert_close(torch.cat([one.gate for one in parts]), want.gate)
        with pytest.raises(InputError, match=r"an object of class Out with tensors; return the tensors in a dict or a"):
            pipe(X)


def test_a_loss_of_an_object_trains() -> None:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        made: Tensor = -output.log_prob(target).mean()
        return made

    model = Gated(lambda mean, gate: torch.distributions.Normal(mean, gate.exp()))
    plain = copy.deepcopy(model)
    with Pipeline(model, X[:3], boundaries=["a"], loss_fn=loss_fn, **HERE) as pipe:
        loss, outputs = pipe.step(X, target=Y, return_outputs=True)
        assert torch.equal(loss, reference_step(plain, X, loss_fn=loss_fn, target=Y, num_microbatches=4, seed=1))
        assert_gradients_as(model, plain)
        torch.testing.assert_close(torch.cat([one.mean for one in outputs]), plain(X).mean)
        assert not any(one.mean.requires_grad for one in outputs)


class CallableOut(Out):
    def __call__(self) -> Tensor:
        return self.gate


@pytest.mark.parametrize("kind", [Out, CallableOut])
def test_an_object_inside_an_output_has_the_tensors_of_all_stages(kind: Callable[[Tensor, Tensor], Any]) -> None:
    model = Gated(lambda logits, gate: {"logits": logits, "cache": kind(logits, gate)})
    with Pipeline(model, X[:3], boundaries=["a"], **HERE) as pipe, torch.no_grad():
        output = pipe(X)
    torch.testing.assert_close(output["logits"], model(X)["logits"])
    torch.testing.assert_close(torch.cat([one.gate for one in output["cache"]]), model(X)["cache"].gate)


class Queue(deque[Tensor]):
    pass


@pytest.mark.parametrize("hide", [lambda gate: Queue([gate]), lambda gate: {gate}, lambda gate: lambda: gate])
def test_what_cannot_be_taken_apart_says_so_when_tensors_of_other_stages_are_used(
    hide: Callable[[Tensor], Any],
) -> None:
    model = Gated(lambda logits, gate: {"logits": logits, "cache": hide(gate)})
    with Pipeline(model, X[:3], boundaries=["a"], **HERE) as pipe, torch.no_grad():
        output = pipe(X)
    with pytest.raises(InputError, match=r"the output\['cache'\] is an object of class .*, with tensors of other"):
        _ = output["cache"][0].gate


def test_values_that_differ_between_microbatches_come_back_as_a_list() -> None:
    class Counting(Gated):
        def forward(self, x: Tensor) -> Any:
            logits = super().forward(x)
            return {"logits": logits, "rows": len(x), "name": "a", "texts": [f"row of {len(x)}"] * len(x)}

    with Pipeline(Counting(lambda logits, gate: logits + gate), X[:2], **HERE) as pipe, torch.no_grad():
        output = pipe(X[:7])
    assert output["rows"] == [2, 2, 2, 1]
    assert output["name"] == "a"
    assert output["texts"] == ["row of 2"] * 6 + ["row of 1"]


@pytest.mark.filterwarnings("ignore:the model is too small")
def test_a_plan_is_found_for_a_packed_sample() -> None:
    parts = [packed([4, 4]), packed([2, 6])]
    model = Packed()
    plain = copy.deepcopy(model)
    for part in parts:
        (plain(**part) * 0.5).backward()
    with Pipeline(model, parts[0], devices=["cpu"] * 2, num_microbatches=2) as pipe:
        pipe.step(microbatches=[Microbatch(**part) for part in parts])
    assert_gradients_as(model, plain)
