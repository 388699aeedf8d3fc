"""The counter of a tensor group shows the bytes, messages and rounds of the formulas, exactly."""

import pytest
import torch
from torch import nn

from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.layer_styles import Column, DividedVocabulary, Row
from pipesched.parallel.styles import split_model
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.parallel.traffic_counter import Traffic
from tests.parallel.test_layers import HIDDEN, LENGTH, NUMBERS, ROWS, WIDTH, block, numbers, perceptron, states
from tests.support.divided_layers import CPU, Perceptron, grouped, run

SIZES = [2, 4, 8]
BYTES = 8  # of a float64
STATES = ROWS * LENGTH * WIDTH * BYTES  # of the activations between layers


def all_reduce(nbytes, size, calls=1):
    """2 (P - 1)/P n bytes, 2 (P - 1) messages, P rounds."""
    sent = calls * 2 * (size - 1) * nbytes // size
    return Traffic(calls, sent, sent, calls * 2 * (size - 1), calls * size)


def reduce_scatter(nbytes, size, calls=1):
    """(P - 1)/P n bytes, P - 1 messages, one round."""
    sent = calls * (size - 1) * nbytes // size
    return Traffic(calls, sent, sent, calls * (size - 1), calls)


def all_gather(nbytes, size, calls=1):
    """(P - 1)/P n bytes of the whole tensor, P - 1 messages, P - 1 rounds."""
    sent = calls * (size - 1) * nbytes // size
    return Traffic(calls, sent, sent, calls * (size - 1), calls * (size - 1))


def embedded(dtype):
    return nn.Embedding(NUMBERS, WIDTH, dtype=dtype), [numbers()], {}


def column(dtype):
    return nn.Linear(WIDTH, HIDDEN, dtype=dtype), [states(dtype)], {}


class Straight(Perceptron):
    """A perceptron without the residual connection, which needs a whole input."""

    def forward(self, x):
        return self.outer(self.down(self.inner(self.up(self.norm(x)))))


def straight(dtype):
    return Straight(WIDTH, HIDDEN, dtype=dtype), [states(dtype)], {}


def formulas(size):
    """(model, styles, the traffic of F, the traffic of B), by the formulas of the pages."""
    reduced, gathered, scattered = (act(STATES, size) for act in (all_reduce, all_gather, reduce_scatter))
    biases = all_reduce(WIDTH * BYTES, size)
    yield perceptron, {"up": "column", "down": "row"}, {"all-reduce": reduced}, {"all-reduce": reduced}
    yield (
        column,
        {"": "column-gathered"},
        {"all-gather": all_gather(ROWS * LENGTH * HIDDEN * BYTES, size)},
        {"all-reduce": reduced},
    )
    yield (
        straight,
        {"norm": "sequence-begin", "up": Column(sequence=True), "down": Row(sequence=True), "outer": "sequence-end"},
        {"all-gather": all_gather(STATES, size, 2), "reduce-scatter": scattered},
        {
            "all-gather": all_gather(STATES, size, 3),  # of X for dW, of dY, and of the input gradient
            "reduce-scatter": scattered,
            "all-reduce": total(biases, all_reduce(2 * WIDTH * BYTES, size)),  # of the row's bias and of the norm
        },
    )
    yield embedded, {"": "vocabulary"}, {"all-reduce": reduced}, {}
    yield embedded, {"": DividedVocabulary(sequence=True)}, {"reduce-scatter": scattered}, {"all-gather": gathered}
    yield embedded, {"": "column-gathered"}, {"all-gather": gathered}, {}
    yield block, {"": "block"}, {"all-reduce": all_reduce(STATES, size, 2)}, {"all-reduce": all_reduce(STATES, size, 2)}


def total(*parts):
    whole = Traffic()
    for part in parts:
        whole.add(part)
    return whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", range(7))
def test_layers_send_what_the_formulas_state(ranks, case, size):
    make, wanted, forward, backward = [*formulas(size)][case]
    expected = {("F", kind): traffic for kind, traffic in forward.items()}
    expected |= {("B", kind): traffic for kind, traffic in backward.items()}
    assert ranks.run(size, sent, size, make, wanted) == [expected] * size


def sent(process_group, size, make, wanted):
    model, args, kwargs = make(torch.float64)
    group = grouped(process_group, size)
    split_model(model, wanted, group)
    run(model, args, kwargs, DividedRandom(CPU, group), counter=group.counter)
    return group.counter.traffic


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", SIZES)
def test_a_divided_loss_sends_three_numbers_a_row(size, smoothing):
    group = TensorGroup.counting(size, rank=1)
    loss_fn = VocabularyCrossEntropy(label_smoothing=smoothing)
    loss_fn.divide(group)
    logits = torch.randn(16, NUMBERS // size, dtype=torch.float64, requires_grad=True)
    loss_fn(logits, torch.randint(NUMBERS, (16,))).backward()
    numbers_sent = (8 if smoothing else 6) * (size - 1) / size * 16
    assert group.counter.total().sent_bytes == numbers_sent * BYTES


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", SIZES)
def test_a_group_without_processes_counts_the_same_bytes(ranks, size, kind):
    def counted(group):
        tensor = torch.ones(8, 8, dtype=kind)
        shapes = [
            group.all_reduce(tensor[:5]).shape,
            group.max(tensor).shape,
            group.all_gather(tensor, 1).shape,
            group.reduce_scatter(tensor, 0).shape,
        ]
        return shapes, group.counter.traffic

    ours = counted(TensorGroup.counting(size))
    assert ours == counted(TensorGroup.counting(size, rank=1))
    for others in ranks.run(size, counted_in_processes, size, kind):
        assert others == ours


def counted_in_processes(process_group, size, kind):
    group = grouped(process_group, size)
    tensor = torch.ones(8, 8, dtype=kind)
    shapes = [
        group.all_reduce(tensor[:5]).shape,
        group.max(tensor).shape,
        group.all_gather(tensor, 1).shape,
        group.reduce_scatter(tensor, 0).shape,
    ]
    return shapes, group.counter.traffic


def test_actions_are_counted_apart():
    group = TensorGroup.counting(2)
    with group.counter.during("F"):
        group.all_reduce(torch.zeros(4))
        with group.counter.during("W"):
            group.all_gather(torch.zeros(4), 0)
        group.all_reduce(torch.zeros(4))
    assert group.counter.traffic == {
        ("F", "all-reduce"): Traffic(2, 32, 32, 4, 4),
        ("W", "all-gather"): Traffic(1, 16, 16, 1, 1),
    }
    assert group.counter.total(action="F") == group.counter.total(kind="all-reduce")
    group.counter.clear()
    assert group.counter.total() == Traffic()


def test_a_group_of_meta_tensors_gives_meta_tensors():
    group = TensorGroup.counting(4)
    tensor = torch.zeros(8, 8, device="meta")
    assert group.all_reduce(tensor).is_meta
    assert group.all_gather(tensor, 1).shape == (8, 32)
    assert group.reduce_scatter(tensor, 0).shape == (2, 8)


def test_a_group_that_is_alone_mixes_no_rows():
    """While a pipeline is made, the loss of a batch must depend on the losses of its rows as in one process."""
    tensor = torch.randn(4, 6, 8)
    group = TensorGroup.counting(2, 1)
    assert torch.equal(group.all_reduce(tensor), tensor)
    assert torch.equal(group.max(tensor), tensor)
    assert torch.equal(group.all_gather(tensor, 2), torch.cat([tensor, tensor], 2))
    assert torch.equal(group.reduce_scatter(tensor, 1), tensor[:, 3:])
