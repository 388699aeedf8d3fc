"""reduction_order="tree": results that do not depend on the number of replicas."""

from functools import reduce

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline
from pipesched.errors import ExecutionError, GraphError, InputError, ScheduleError
from pipesched.runtime.gradients.tree_sums import TreeSums, tree_sum
from pipesched.testing import MemoryMeter
from tests.support.jobs import tree
from tests.support.jobs.replicas import plain_batch, plain_model, tied_batch, tied_model
from tests.support.jobs.tree import IN_TREE, Case
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


def test_the_loop_does_not_depend_on_the_number_of_replicas():
    one, two, eight = (tree.looped(number, updates=True) for number in (1, 2, 8))
    assert all(tree.same(one[name], two[name]) and tree.same(one[name], eight[name]) for name in one)
    sequential = tree.looped(updates=True, order="sequential")
    assert not all(tree.same(one[name], sequential[name]) for name in one)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "cases",
    [
        [Case((2, 2), "1f1b"), Case((2, 2), "zb-h1", 1), Case((2, 2), "interleaved-1f1b", 2, "first")],
        [Case((4, 1), "1f1b"), Case((4, 1), "1f1b", 3), Case((1, 4), "1f1b", 0)],
    ],
    ids=str,
)
def test_losses_gradients_and_weights_are_those_of_one_loop(ranks: Ranks, cases: list[Case]):
    assert ranks.run(4, tree.differing, cases) == [[[]] * len(cases)] * 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("count", [6, 8])
def test_ranks_of_one_process_give_the_bits_of_the_loop(schedule: str, count: int):
    """Weights of 512 x 512 have gradients that a W computes; two steps accumulate."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 512), nn.Dropout(0.2), nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 4)]
    expected, model = nn.Sequential(*layers), nn.Sequential(*layers)
    x, y = torch.randn(48, 8), torch.randn(48, 4)
    options = {"loss_fn": functional.mse_loss, "num_microbatches": count, "seed": 3}
    due = []
    for step in range(2):
        loss = tree.reference_step(expected, x, target=y, step=step, reduction_order="tree", **options)
        due.append(loss)
    gradients = [parameter.grad for parameter in expected.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    with Pipeline(
        model, x[:6], devices=["cpu"] * 2, schedule=schedule, boundaries=_cut(schedule), numerics=IN_TREE, **options
    ) as pipe:
        assert all(torch.equal(pipe.step(x, target=y), loss) for loss in due)
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], gradients))


def _cut(schedule: str) -> list[int]:
    return [1, 2, 3] if schedule == "zb-v" else [2]


def test_metrics_and_added_losses_do_not_depend_on_the_number_of_replicas(ranks: Ranks):
    two, four = (ranks.run(4, tree.metrics, dims)[0] for dims in ((2, 2), (4, 1)))
    assert two == four


@pytest.mark.parametrize("count", [8, 12])
def test_missing_gradients_are_left_out_of_the_tree(count: int):
    """Some micro-batches do not use a weight; another has a gradient from before the step."""
    random = torch.Generator().manual_seed(0)
    groups = count & -count
    for _ in range(20):
        grads = [torch.randn(3, generator=random) if use > 0.4 else None for use in torch.rand(count, generator=random)]
        parameter = torch.zeros(3, requires_grad=True)
        before = parameter.grad = torch.randn(3, generator=random)
        due = _plus(before.clone(), _tree([reduce(_plus, part) for part in _parts(grads, count // groups)]))
        sums = TreeSums()
        sums.begin([parameter], count)
        for number, grad in enumerate(grads):
            with sums.adding(number):
                if grad is not None:
                    parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
        sums.finish()
        assert due is not None
        assert torch.equal(parameter.grad, due)


def _parts(values: list[Tensor | None], size: int) -> list[list[Tensor | None]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _tree(values: list[Tensor | None]) -> Tensor | None:
    half = len(values) // 2
    return _plus(_tree(values[:half]), _tree(values[half:])) if half else values[0]


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def test_losses_are_added_as_gradients_are():
    values = list(torch.randn(12, generator=torch.Generator().manual_seed(0)))
    a, b, c, d = (reduce(torch.add, values[start : start + 3]) for start in range(0, 12, 3))
    assert torch.equal(tree_sum(values), (a + b) + (c + d))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_memory_of_the_tree_is_predicted(schedule: str):
    """Of 8 micro-batches, up to three further copies of the gradients are held."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)], nn.Linear(128, 4))
    x, y = torch.randn(32, 128), torch.randn(32, 4)
    options = {"loss_fn": functional.mse_loss, "num_microbatches": 8, "boundaries": [3], "schedule": schedule}
    with Pipeline(model, x[:4], devices=["cpu"] * 2, optimizer=tree.momentum, numerics=IN_TREE, **options) as pipe:
        predicted = pipe.predicted_memory
        with MemoryMeter(pipe) as meter:
            for _ in range(2):
                meter.mark()
                pipe.step(x, target=y)
            held = list(meter.peak_bytes.values())
    for own, peak in zip(predicted, held, strict=True):
        assert 1 <= own.total_bytes / (peak + own.batch) <= 1.1
        assert own.gradients > 3 * 3 * 128 * 128 * 4


def test_what_cannot_be_added_as_a_tree_is_refused_by_name(ranks: Ranks):
    x, _ = plain_batch()
    options = {"loss_fn": functional.mse_loss, "devices": ["cpu"] * 2, "num_microbatches": 4, "numerics": IN_TREE}
    with pytest.raises(ScheduleError, match=r"adds gradients in ascending order .* 'pipedream' updates weights while"):
        Pipeline(plain_model(), x[:2], schedule="pipedream", optimizer=tree.sgd, **options)
    with pytest.raises(ScheduleError, match="'chimera' adds gradients in a different order; choose another schedule"):
        Pipeline(plain_model(), x[:2], schedule="chimera", **options)
    with pytest.raises(GraphError, match=r"this model uses 1 weight several times: '.*weight'; untie the layers"):
        Pipeline(tied_model(), tied_batch()[0][:2], schedule="1f1b", **options)
    with pytest.raises(InputError, match="must be a power of two; this pipeline has 6 replicas; use for example 4"):
        IN_TREE.check_reduction_order(num_replicas=6, zero=0)
    with pytest.raises(InputError, match="one of sequential, tree; got 'pairs'"):
        Numerics(reduction_order="pairs")  # type: ignore[arg-type]
    for found in ranks.run(4, tree.refused):
        assert "the gradient norm for clipping is combined from one norm per replica" in found["clipping"]
        assert "fully_shard adds those of the modules that it shards" in found["shards"]


def test_sparse_gradients_are_refused():
    tokens = torch.arange(8) % 4
    model = nn.Sequential(nn.Embedding(4, 8, sparse=True), nn.Linear(8, 4))
    options = {"loss_fn": nn.CrossEntropyLoss(), "num_microbatches": 2, "schedule": "1f1b", "boundaries": [1]}
    with (
        Pipeline(model, tokens[:4], devices=["cpu"] * 2, numerics=IN_TREE, **options) as pipe,
        pytest.raises(ExecutionError, match=r"a parameter of shape \(4, 8\) has a sparse gradient"),
    ):
        pipe.step(tokens, target=tokens)
