"""The loss over a divided vocabulary is that of torch over the whole one."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched.errors import InputError
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy, cross_entropy_of_rows
from pipesched.parallel.styles import split_model
from pipesched.parallel.tensor_group import TensorGroup
from tests.support.divided_layers import EXACT, grouped

SIZES = [2, 4, 8]
CLASSES = 24
OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    for reduction, smoothing, ignored in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (-100, 3))
]


def targets(ignored, *shape):
    target = torch.randint(CLASSES, shape)
    target.view(-1)[::3] = ignored
    return target


def differences(process_group, size, dtype):
    """The largest difference of losses and gradients from those of torch, relative, for all options and shapes."""
    torch.manual_seed(0)
    group = grouped(process_group, size)
    worst = 0.0
    for options in OPTIONS:
        for shape in ((10, CLASSES), (3, CLASSES, 4), (CLASSES,)):
            logits = 5 * torch.randn(shape, dtype=dtype)
            dim = 0 if len(shape) == 1 else 1
            target = targets(options["ignore_index"], *shape[:dim], *shape[2:])
            if dim == 0:
                target = torch.tensor(5)
            whole = logits.clone().requires_grad_()
            own = group.own(logits, dim).clone().requires_grad_()
            expected = nn.CrossEntropyLoss(**options)(whole, target)
            loss_fn = VocabularyCrossEntropy(**options)
            loss_fn.divide(group)
            loss = loss_fn(own, target)
            assert loss.shape == expected.shape
            assert loss.dtype == expected.dtype
            expected.sum().backward()
            loss.sum().backward()
            gap = (loss - expected).abs().max() / expected.abs().max()
            grad = (own.grad - group.own(whole.grad, dim)).abs().max() / whole.grad.abs().max()
            worst = max(worst, gap.item(), grad.item())
    return worst


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_divided_loss_is_that_of_torch(ranks, dtype, size):
    assert max(ranks.run(size, differences, size, dtype)) <= EXACT[dtype]


def extremes(process_group, size):
    group = grouped(process_group, size)
    loss_fn = VocabularyCrossEntropy()
    loss_fn.divide(group)
    logits = torch.full((3, CLASSES), -1e4, dtype=torch.float64)
    logits[0, 0] = 1e4
    logits[1, 5:] = float("-inf")
    target = torch.tensor([0, 2, 1])
    ignored = torch.full((3,), -100)
    return (
        (loss_fn(group.own(logits, 1), target) - functional.cross_entropy(logits, target)).item(),
        loss_fn(group.own(logits, 1), ignored).isnan().item(),
    )


def test_large_and_infinite_logits_and_no_counted_row(ranks):
    for gap, nothing_counts in ranks.run(4, extremes, 4):
        assert abs(gap) < 1e-12
        assert nothing_counts  # as torch's mean of no rows


def of_rows(process_group, size, dtype):
    """Rank r holds its rows, of which r + 1 count."""
    torch.manual_seed(0)
    group = grouped(process_group, size)
    logits = torch.randn(size, 10, CLASSES, dtype=dtype)
    target = torch.randint(CLASSES, (size, 10))
    for rank in range(size):
        target[rank, rank + 1 :] = -100
    whole = logits.clone().requires_grad_()
    expected = functional.cross_entropy(whole.flatten(0, 1), target.flatten())
    own = logits[group.rank].clone().requires_grad_()
    loss = cross_entropy_of_rows(own, target[group.rank], group)
    expected.backward()
    loss.backward()
    gap = (loss - expected).abs() / expected
    return max(gap.item(), ((own.grad - whole.grad[group.rank]).abs().max() / whole.grad.abs().max()).item())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_mean_over_divided_rows_counts_the_rows_of_all_ranks(ranks, dtype, size):
    """Dividing by the rows of each rank gives another loss if they differ (NVIDIA/Megatron-LM#7452)."""
    assert max(ranks.run(size, of_rows, size, dtype)) <= EXACT[dtype]


class Ends(nn.Module):
    """A model whose head is divided by the vocabulary, and which computes its loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8, dtype=torch.float64)
        self.head = nn.Linear(8, CLASSES, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.loss_fn = VocabularyCrossEntropy(label_smoothing=0.1)

    def forward(self, numbers, target):
        return self.loss_fn(self.head(self.embedding(numbers)).flatten(0, 1), target.flatten())


def ends(process_group, size):
    torch.manual_seed(0)
    model, numbers = Ends(), torch.randint(CLASSES, (3, 5))
    target = targets(-100, 3, 5)
    loss = model(numbers, target)
    loss.backward()
    grad, model.embedding.weight.grad = model.embedding.weight.grad, None
    splits = split_model(model, {"embedding": "vocabulary", "head": "vocabulary"}, grouped(process_group, size))
    assert {"embedding.weight", "head.weight"} == {name for name in model.state_dict() if name in splits}
    divided = model(numbers, target)
    divided.backward()
    whole = splits.whole("embedding.weight", model.embedding.weight.grad)
    return abs(loss.item() - divided.item()), (grad - whole).abs().max().item()


@pytest.mark.parametrize("size", SIZES)
def test_a_tied_head_and_its_loss_never_gather_the_logits(ranks, size):
    for loss, grad in ranks.run(size, ends, size):
        assert loss < 1e-12
        assert grad < 1e-12


def test_without_a_group_it_is_the_loss_of_torch():
    logits, target = torch.randn(4, CLASSES), torch.randint(CLASSES, (4,))
    assert torch.equal(VocabularyCrossEntropy()(logits, target), nn.CrossEntropyLoss()(logits, target))


def test_targets_that_are_probabilities_are_refused():
    loss_fn = VocabularyCrossEntropy()
    loss_fn.divide(TensorGroup.counting(2))
    with pytest.raises(InputError, match=r"must be class numbers; got torch\.float32 of shape"):
        loss_fn(torch.randn(4, CLASSES // 2), torch.randn(4, CLASSES))


@pytest.mark.parametrize("number", [-1, CLASSES])
def test_a_target_that_is_no_class_raises_the_error_of_torch(number):
    loss_fn = VocabularyCrossEntropy()
    loss_fn.divide(TensorGroup.counting(2))
    with pytest.raises(RuntimeError, match=r"index|out of bounds"):
        loss_fn(torch.randn(1, CLASSES // 2), torch.tensor([number]))


@pytest.mark.parametrize("number", [-1, CLASSES])
def test_a_number_outside_of_the_vocabulary_raises_the_error_of_torch(number):
    model = nn.Sequential(nn.Embedding(CLASSES, 4))
    split_model(model, {"0": "vocabulary"}, TensorGroup.counting(2))
    with pytest.raises(IndexError):
        model(torch.tensor([number]))
