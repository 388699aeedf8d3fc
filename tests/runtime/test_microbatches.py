"""How a mini-batch is cut into micro-batches, and what each counts for the loss."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipesched import Numerics, Pipeline
from pipesched.errors import InputError
from pipesched.runtime.microbatches import Splitter
from pipesched.tensors.row_evidence import Evidence
from pipesched.tensors.row_join import OutputRows
from pipesched.tensors.row_split import RowSplit
from pipesched.tensors.rows import Argument, Dim
from tests.support.random_programs import quick


def cut(*args, parts=2, fixed=False, target=None, split_dims=0, **kwargs):
    return Splitter(parts, fixed, split_dims).batch(args, kwargs, target)


def first_arguments(batch):
    return [args[0].tolist() for args, _ in batch.inputs]


# ---- splitting ------------------------------------------------------------------------------------------------------


def test_seven_rows_in_four_microbatches_are_two_two_two_and_one():
    batch = cut(torch.arange(7), parts=4)
    assert first_arguments(batch) == [[0, 1], [2, 3], [4, 5], [6]]
    assert batch.rows == [2, 2, 2, 1]
    assert len(batch.rows) == 4


@quick
@given(st.integers(1, 40), st.integers(1, 12))
def test_rows_are_split_as_torch_splits_them(rows, parts):
    x = torch.arange(rows)
    batch = cut(x, parts=parts, target=x * 2)
    expected = [part.tolist() for part in x.tensor_split(min(rows, parts))]
    assert first_arguments(batch) == expected
    assert batch.rows == [len(part) for part in expected]
    assert [(target // 2).tolist() for target in batch.targets] == expected
    assert min(batch.rows) >= 1


@quick
@given(st.integers(1, 12), st.integers(1, 12), st.integers(-2, 1))
def test_gather_is_the_inverse_of_split(rows, parts, dim):
    shape = (rows, 3) if dim in (0, -2) else (3, rows)
    value = {"x": torch.randn(shape), "deep": (torch.randn(shape), "text", None, 3)}
    split = RowSplit.into(Evidence(), rows, min(rows, parts))
    pieces = split.parts(Argument("target", value, Dim(dim)))
    back = OutputRows().joined(pieces, split.sizes, Dim(dim, explicit=True))
    torch.testing.assert_close(back["x"], value["x"], rtol=0, atol=0)
    torch.testing.assert_close(back["deep"][0], value["deep"][0], rtol=0, atol=0)
    assert back["deep"][1:] == value["deep"][1:]


def test_parts_are_views_of_the_batch():
    x = torch.arange(4.0)
    (first, _), _ = cut(x).inputs
    assert first[0].data_ptr() == x.data_ptr()


def test_outputs_without_dimensions_are_stacked():
    assert OutputRows().joined([torch.tensor(1.0), torch.tensor(2.0)], [1, 1], Dim()).tolist() == [1.0, 2.0]


def test_arguments_keywords_and_trees_are_split_alike():
    x, y = torch.arange(4), torch.arange(4) * 10
    batch = cut(x, {"y": y, "how": "text"}, z=[x, None], flag=True)
    args, kwargs = batch.inputs[1]
    assert args[0].tolist() == [2, 3]
    assert args[1]["y"].tolist() == [20, 30]
    assert args[1]["how"] == "text"
    assert kwargs["z"][0].tolist() == [2, 3]
    assert kwargs["z"][1] is None
    assert kwargs["flag"] is True


def test_values_without_rows_go_to_every_microbatch_whole():
    scale = torch.tensor(2.0)
    batch = cut(torch.arange(4), scale, "text")
    for args, _ in batch.inputs:
        assert args[1] is scale
        assert args[2] == "text"


def test_targets_of_any_structure_are_split():
    batch = cut(torch.arange(4), target={"label": torch.arange(4), "name": "a"})
    assert [target["label"].tolist() for target in batch.targets] == [[0, 1], [2, 3]]
    assert batch.targets[0]["name"] == "a"
    assert cut(torch.arange(4)).targets == []


def test_one_split_dim_for_all_arguments():
    batch = cut(torch.arange(6).view(2, 3), parts=3, split_dims=1, mask=torch.arange(6).view(2, 3))
    assert [args[0].tolist() for args, _ in batch.inputs] == [[[0], [3]], [[1], [4]], [[2], [5]]]
    assert batch.inputs[2][1]["mask"].tolist() == [[2], [5]]


def test_a_split_dim_for_each_argument_by_position():
    table = torch.arange(5)
    batch = cut(torch.zeros(2, 4), torch.ones(4, 3), table, parts=4, split_dims=[1, 0, None])
    assert [tuple(value.shape) for value in batch.inputs[0][0]] == [(2, 1), (1, 3), (5,)]
    assert batch.inputs[3][0][2] is table


def test_a_split_dim_for_each_argument_by_name():
    batch = cut(torch.zeros(4, 2), parts=4, split_dims={"steps": 1, "table": None}, steps=torch.ones(3, 4), table=[9])
    args, kwargs = batch.inputs[0]
    assert tuple(args[0].shape) == (1, 2)
    assert tuple(kwargs["steps"].shape) == (3, 1)
    assert kwargs["table"] == [9]


def test_a_pipeline_trains_time_first_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    bare, x = copy.deepcopy(model), torch.randn(5, 4, 3)

    def loss_fn(output, target):
        return (output.squeeze(-1).mean(0) - target).square().mean()

    target = torch.randn(4)
    with Pipeline(
        model,
        x[:, :1],
        loss_fn=loss_fn,
        devices=["cpu"] * 2,
        boundaries=[1],
        num_microbatches=4,
        numerics=Numerics(split_dims=1),
    ) as pipe:
        loss = pipe.step(x, target=target)
    whole = loss_fn(bare(x), target)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


def test_a_fixed_number_of_microbatches_refuses_fewer_rows_and_takes_more():
    with pytest.raises(InputError, match=r"the 3 micro-batches of a step; the batch has 2 rows; pass at least 3 rows"):
        cut(torch.arange(2), parts=3, fixed=True)
    assert len(cut(torch.arange(7), parts=3, fixed=True).rows) == 3


def test_the_inputs_that_want_gradients_are_found_in_order():
    a, b, c = torch.ones(4, requires_grad=True), torch.ones(4), torch.ones(4, requires_grad=True)
    batch = cut(a, (b, c))
    assert [len(tensors) for tensors in batch.wanted_inputs()] == [2, 2]
    with torch.no_grad():  # as in evaluation: the cut stays part of the graph
        assert [len(tensors) for tensors in cut(a, (b, c)).wanted_inputs()] == [2, 2]


# ---- what a micro-batch counts --------------------------------------------------------------------------------------


def factors(rows, parts, **choices):
    splitter = Splitter(parts, False, **choices)
    return splitter.factors(splitter.batch((torch.arange(rows),), {}, torch.arange(rows)))


def test_a_mean_counts_rows():
    assert factors(7, 4) == [2 / 7, 2 / 7, 2 / 7, 1 / 7]
    assert factors(8, 4) == [0.25] * 4
    assert factors(5, 1) == [1.0]


def test_a_sum_is_left_as_it_is():
    assert factors(7, 4, loss_reduction="sum") == [None] * 4


def test_weights_come_from_the_target_or_without_one_from_the_inputs():
    weighing = Splitter(2, False, loss_weight=lambda values: values.sum())
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert weighing.factors(weighing.batch((torch.zeros(4),), {}, x)) == [0.3, 0.7]
    assert weighing.factors(weighing.batch((x,), {})) == [0.3, 0.7]


def test_a_microbatch_may_count_nothing_as_long_as_another_counts():
    weighing = Splitter(2, False, loss_weight=lambda values: values.sum())
    assert weighing.factors(weighing.batch((torch.tensor([0.0, 0.0, 2.0]),), {})) == [0.0, 1.0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_padded_tokens_do_not_count(schedule):
    """With loss_weight the gradient is that of the mean over all tokens of the batch that are not padding."""
    padding = -100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    bare = copy.deepcopy(model)
    tokens = torch.randint(7, (6, 5))
    labels = tokens.clone()
    labels[0, 1:], labels[1, 2:], labels[3] = padding, padding, padding

    def loss_fn(output, target):
        flat = output.flatten(0, 1), target.flatten()
        return nn.functional.cross_entropy(*flat, ignore_index=padding, reduction="sum") / max(
            1, (target != padding).sum()
        )

    with Pipeline(
        model,
        tokens[:1],
        loss_fn=loss_fn,
        numerics=Numerics(loss_weight=lambda target: (target != padding).sum()),
        devices=["cpu"] * 2,
        boundaries=[1],
        schedule=schedule,
        num_microbatches=4,
    ) as pipe:
        loss = pipe.step(tokens, target=labels)
    whole = loss_fn(bare(tokens), labels)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 3, 7, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ragged_batches_give_the_gradient_of_the_whole_batch(rows, reduction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    bare, x, y = copy.deepcopy(model), torch.randn(rows, 3), torch.randn(rows, 3)
    loss_fn = nn.MSELoss(reduction=reduction)
    with Pipeline(
        model,
        x[:1],
        loss_fn=loss_fn,
        numerics=Numerics(loss_reduction=reduction),
        devices=["cpu"] * 2,
        boundaries=[1],
        num_microbatches=4,
    ) as pipe:
        loss = pipe.step(x, target=y)
    whole = loss_fn(bare(x), y)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])
