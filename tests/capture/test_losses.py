"""Losses of torch: micro-batches are weighted so that they give the loss of the whole batch."""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import loss as torch_losses
from torch.overrides import TorchFunctionMode

from pipesched import Numerics, Pipeline
from pipesched.errors import InputError
from pipesched.pipeline.auto_plan import adds_up
from pipesched.runtime.microbatches import GivenBatch
from pipesched.testing import reference_step
from tests.support.models import assert_as

ROWS, CLASSES = 7, 5
CLASS_WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0, 0.25])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


X = torch.randn(ROWS, 3, generator=generator())
INDICES = torch.randint(CLASSES, (ROWS,), generator=generator())
PROBABILITIES = torch.rand(ROWS, CLASSES, generator=generator()).softmax(1)
SIGNS = torch.randint(2, (ROWS, CLASSES), generator=generator()) * 2.0 - 1
#: Of four micro-batches of 2, 2, 2 and 1 rows, these targets count: none, both, one and one.
SOME = torch.tensor([-100, -100, 1, 2, -100, 4, 0])


class Model(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.last, self.end = nn.Linear(3, 4), nn.Linear(4, CLASSES), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(self.first(x).tanh()))


def model(end: Callable[[Tensor], Tensor] = lambda x: x) -> Model:
    torch.manual_seed(0)
    return Model(end)


def piped(own: nn.Module, loss_fn: Any, *, num_microbatches: int = 4, **choices: Any) -> Pipeline:
    choices = {"sample": X[:2], "boundaries": ["last"], "schedule": "1f1b", **choices}
    return Pipeline(own, devices=["cpu"] * 2, loss_fn=loss_fn, num_microbatches=num_microbatches, **choices)


def assert_trains_as_the_whole_batch(
    loss_fn: Any, target: Any, end: Callable[[Tensor], Tensor] = lambda x: x, x: Tensor = X, **choices: Any
) -> None:
    """Compare loss and gradients with plain PyTorch over the whole batch, and bit by bit with the reference loop."""
    own, whole, loop = (model(end) for _ in range(3))
    fns = [copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn for _ in range(2)]
    with piped(own, loss_fn, **choices) as pipe:
        loss = pipe.step(x, target=target)
        evaluated = pipe.evaluate(x, target=target)
        expected = fns[0](whole(x), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(evaluated, expected.detach())
        for one, other in zip(own.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        again = reference_step(loop, x, loss_fn=fns[1], target=target, num_microbatches=4)
        assert torch.equal(loss, again)
        if isinstance(fns[1], nn.Module):
            loop.loss_fn = fns[1]  # whose tensors the pipeline names so
        assert_as(pipe, loop)


# ---- every loss of torch ---------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A loss by its class and its function, with a target; ``end`` turns a model's output into the loss's input."""

    module: str
    function: str
    target: Tensor
    end: Callable[[Tensor], Tensor] = lambda x: x
    reductions: tuple[str, ...] = ("mean", "sum")


def first_column(x: Tensor) -> Tensor:
    return x[:, 0]


CASES = [
    Case("L1Loss", "l1_loss", PROBABILITIES),
    Case("MSELoss", "mse_loss", PROBABILITIES),
    Case("SmoothL1Loss", "smooth_l1_loss", PROBABILITIES),
    Case("HuberLoss", "huber_loss", PROBABILITIES),
    Case("PoissonNLLLoss", "poisson_nll_loss", PROBABILITIES),
    Case("KLDivLoss", "kl_div", PROBABILITIES, lambda x: x.log_softmax(1), ("mean", "sum", "batchmean")),
    Case("BCELoss", "binary_cross_entropy", PROBABILITIES, torch.sigmoid),
    Case("BCEWithLogitsLoss", "binary_cross_entropy_with_logits", PROBABILITIES),
    Case("HingeEmbeddingLoss", "hinge_embedding_loss", SIGNS),
    Case("SoftMarginLoss", "soft_margin_loss", SIGNS),
    Case("MultiLabelMarginLoss", "multilabel_margin_loss", torch.tensor([[3, 0, -1, 1, 4]] * ROWS)),
    Case("MultiLabelSoftMarginLoss", "multilabel_soft_margin_loss", (SIGNS + 1) / 2),
    Case("MultiMarginLoss", "multi_margin_loss", INDICES),
    Case("CrossEntropyLoss", "cross_entropy", SOME),
    Case("NLLLoss", "nll_loss", SOME, lambda x: x.log_softmax(1)),
    Case("NLLLoss2d", "nll_loss", SOME, lambda x: x.log_softmax(1)),
]
#: Losses with other arguments than output and target, or not complete losses.
OTHERS = {
    "GaussianNLLLoss",
    "CosineEmbeddingLoss",
    "MarginRankingLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
    "CTCLoss",
    "LinearCrossEntropyLoss",  # tested below if torch has it
}


def test_these_are_all_losses_of_torch() -> None:
    assert {case.module for case in CASES} | OTHERS == {*torch_losses.__all__} | {"LinearCrossEntropyLoss"}


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides", "ignore:NLLLoss2d has been deprecated")
@pytest.mark.parametrize(
    ("case", "reduction"),
    [pytest.param(case, one, id=f"{case.module}-{one}") for case in CASES for one in case.reductions],
)
@pytest.mark.parametrize("form", ["module", "partial"])
def test_micro_batches_give_the_loss_of_the_whole_batch(case: Case, reduction: str, form: str) -> None:
    function = getattr(functional, case.function)
    loss_fn = getattr(nn, case.module, getattr(torch_losses, case.module))(reduction=reduction)
    if form == "partial":
        loss_fn = functools.partial(function, reduction=reduction)
    assert_trains_as_the_whole_batch(loss_fn, case.target, case.end)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.module)
def test_functions_of_torch_reduce_by_their_defaults(case: Case) -> None:
    assert_trains_as_the_whole_batch(getattr(functional, case.function), case.target, case.end)


@pytest.mark.parametrize(("average", "reduce"), [(False, None), (None, True), (False, True), (True, True)])
def test_the_older_names_of_reductions_count_too(average: bool | None, reduce: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them deprecated
        loss_fn = nn.CrossEntropyLoss(size_average=average, reduce=reduce)
        assert_trains_as_the_whole_batch(loss_fn, SOME)
        function = functools.partial(functional.cross_entropy, size_average=average, reduce=reduce)
        assert_trains_as_the_whole_batch(function, SOME)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"weight": CLASS_WEIGHTS}, {"ignore_index": 1}, {"label_smoothing": 0.2}])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_what_cross_entropy_counts(options: dict[str, Any], schedule: str) -> None:
    target = SOME if "ignore_index" not in options else torch.where(SOME < 0, 1, SOME)
    assert_trains_as_the_whole_batch(nn.CrossEntropyLoss(**options), target, schedule=schedule)
    assert_trains_as_the_whole_batch(functools.partial(functional.cross_entropy, **options), target)


def test_cross_entropy_of_several_dims_and_of_small_types() -> None:
    def to_grid(x: Tensor) -> Tensor:
        return torch.stack([x, -x, 2 * x], 2)

    target = torch.randint(CLASSES, (ROWS, 3), generator=generator())
    target[:2], target[3, 1:] = -100, -100
    assert_trains_as_the_whole_batch(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), target, to_grid)
    assert_trains_as_the_whole_batch(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), INDICES.to(torch.uint8))


@pytest.mark.parametrize("weight", [None, CLASS_WEIGHTS])
def test_cross_entropy_with_probabilities_divides_by_rows(weight: Tensor | None) -> None:
    assert_trains_as_the_whole_batch(nn.CrossEntropyLoss(weight=weight), PROBABILITIES)


def test_class_weights_of_binary_losses_divide_by_nothing_but_rows() -> None:
    weights = {"weight": CLASS_WEIGHTS, "pos_weight": CLASS_WEIGHTS}
    assert_trains_as_the_whole_batch(nn.BCEWithLogitsLoss(**weights), PROBABILITIES)
    assert_trains_as_the_whole_batch(nn.MultiMarginLoss(weight=CLASS_WEIGHTS), INDICES)


def test_a_loss_with_its_own_layer_counts_its_targets() -> None:
    kind = getattr(nn, "LinearCrossEntropyLoss", None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no LinearCrossEntropyLoss")
    assert_trains_as_the_whole_batch(kind(CLASSES, 4), torch.where(SOME < 4, SOME, 3))


def test_more_arguments_than_two_may_be_given_before() -> None:
    assert_trains_as_the_whole_batch(functools.partial(functional.gaussian_nll_loss, var=0.5), PROBABILITIES)
    lengths = {"input_lengths": (4, 4), "target_lengths": (2, 1)}

    def to_time(x: Tensor) -> Tensor:
        return torch.stack([x, -x, 2 * x, x * x]).log_softmax(2)

    own, loop = model(to_time), model(to_time)
    ctc, target = functools.partial(functional.ctc_loss, **lengths), torch.tensor([[1, 2], [3, 1]] * 2)
    whole = functional.ctc_loss(loop(X[:4]), target, [4] * 4, [2, 1] * 2)
    with piped(own, ctc, numerics=Numerics(split_dims={"output": 1}), num_microbatches=2) as pipe:
        torch.testing.assert_close(pipe.step(X[:4], target=target), whole.detach())


def test_rows_along_another_dim_are_counted_there() -> None:
    x, target = X.T.contiguous(), SOME

    class Turned(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.T)

    torch.manual_seed(0)
    own = Turned()
    with piped(own, nn.CrossEntropyLoss(), sample=x[:, :2], numerics=Numerics(split_dims=1)) as pipe:
        loss = pipe.step(x, target=target)
    torch.testing.assert_close(loss, functional.cross_entropy(own(x), target).detach())


def test_a_weight_that_has_changed_counts_as_it_is_now() -> None:
    own, whole = model(), model()
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(CLASSES))
    with piped(own, loss_fn) as pipe:
        pipe.step(X, target=SOME)
        loss_fn.weight = CLASS_WEIGHTS.clone()
        loss_fn.ignore_index = 4
        expected = functional.cross_entropy(whole(X), SOME.abs() % 5, CLASS_WEIGHTS, ignore_index=4)
        torch.testing.assert_close(pipe.evaluate(X, target=SOME.abs() % 5), expected.detach())


# ---- micro-batches that count nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_micro_batch_that_counts_nothing_gives_no_nan(schedule: str) -> None:
    """Its own loss is 0 / 0; the batch's loss and all gradients are finite."""
    own = model()
    with piped(own, nn.CrossEntropyLoss(), schedule=schedule) as pipe:
        loss, output = pipe.step(X, target=SOME, return_outputs=True)
    torch.testing.assert_close(loss, functional.cross_entropy(output, SOME))
    assert all(bool(parameter.grad.isfinite().all()) for parameter in own.parameters())


def test_each_update_of_an_asynchronous_schedule_counts_its_own_targets() -> None:
    losses = []
    for loss_fn, weight in ((nn.CrossEntropyLoss(), None), (Reshaping(), lambda target: (target != -100).sum())):
        own = model()
        choices = {
            "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
            "numerics": Numerics(loss_weight=weight),
        }
        with piped(own, loss_fn, schedule="pipedream", **choices) as pipe:
            for _ in range(3):
                pipe.step(X, target=SOME)
            losses.append((pipe.flush(), *(parameter.detach().clone() for parameter in own.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)])
def test_a_batch_that_counts_nothing_is_refused(loss_fn: nn.Module) -> None:
    match = r"(?s)finite and above 0; got 0\.0; .*ignore_index.*skip this batch"
    nothing = torch.full((ROWS,), -100)
    with piped(model(), loss_fn) as pipe:
        with pytest.raises(InputError, match=match):
            pipe.step(X, target=nothing)
        assert pipe.step(X, target=SOME).isfinite()
    with pytest.raises(InputError, match=match):
        reference_step(model(), X, loss_fn=loss_fn, target=nothing)


def test_smoothed_labels_of_classes_without_weight_are_refused() -> None:
    """Plain torch adds the smoothing term there; a micro-batch with only such labels divides it by 0."""
    loss_fn = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)
    with piped(model(), loss_fn) as pipe:
        assert pipe.step(X, target=torch.tensor([1, 3, 3, 0, 2, 4, -100])).isfinite()
        with pytest.raises(InputError, match=r"(?s)finite and above 0; got nan; .*fewer micro-batches"):
            pipe.step(X, target=torch.tensor([3, 3, 1, 0, 2, 4, 0]))


def test_targets_are_counted_with_one_wait_for_the_device() -> None:
    reads = 0

    class Reading(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal reads
            reads += func in (Tensor.tolist, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__)
            return func(*args, **(kwargs or {}))

    with piped(model(), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)) as pipe, Reading():
        batch = pipe._steps._calls._batch("step", GivenBatch((X,), {}, SOME))
        pipe._running.splitter.weighting(pipe._running.splitter.weights(batch))
    assert reads == 1


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(reduction="none"), functools.partial(functional.mse_loss, reduction="none")]
)
def test_a_loss_that_is_not_reduced_is_refused_at_once(loss_fn: Any) -> None:
    match = r"mse_?loss has reduction='none'.*; pass reduction='mean' or 'sum'"
    with pytest.raises(InputError, match=f"(?i){match}"):
        piped(model(), loss_fn)
    with pytest.raises(InputError, match=f"(?i){match}"):
        reference_step(model(), X, loss_fn=loss_fn, target=PROBABILITIES)


@pytest.mark.parametrize(("says", "given"), [("sum", "mean"), ("mean", "sum"), ("batchmean", "sum")])
def test_a_reduction_that_the_loss_contradicts_is_refused(says: str, given: str) -> None:
    loss_fn = nn.KLDivLoss(reduction=says)
    match = f"KLDivLoss has reduction='{says}', but loss_reduction is '{given}'; leave loss_reduction out"
    with pytest.raises(InputError, match=match):
        piped(model(), loss_fn, numerics=Numerics(loss_reduction=given))
    with pytest.raises(InputError, match=match):
        reference_step(model(), X, loss_fn=loss_fn, target=PROBABILITIES, loss_reduction=given)


@pytest.mark.parametrize(("says", "given"), [("sum", "sum"), ("mean", "mean"), ("batchmean", "mean")])
def test_a_reduction_that_says_the_same_is_taken(says: str, given: str) -> None:
    loss_fn = nn.KLDivLoss(reduction=says)
    assert_trains_as_the_whole_batch(
        loss_fn, PROBABILITIES, lambda x: x.log_softmax(1), numerics=Numerics(loss_reduction=given)
    )


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(reduction="sum"), lambda output, target: (output - target).sum()])
def test_weights_of_a_sum_are_refused(loss_fn: Any) -> None:
    reduction = None if isinstance(loss_fn, nn.Module) else "sum"
    numerics = Numerics(loss_weight=len, loss_reduction=reduction)
    match = "loss_weight may only be passed if the loss is a mean; this loss is a sum, .*; leave loss_weight out"
    with pytest.raises(InputError, match=match):
        piped(model(), loss_fn, numerics=numerics)
    with pytest.raises(InputError, match=match):
        reference_step(model(), X, loss_fn=loss_fn, target=PROBABILITIES, loss_weight=len, loss_reduction=reduction)


def test_a_weight_of_each_row_is_refused() -> None:
    """The weights would be split with no micro-batch, and broadcast to micro-batches of one row."""
    loss_fn = nn.BCEWithLogitsLoss(weight=torch.rand(ROWS, 1))
    with piped(model(), loss_fn) as pipe, pytest.raises(InputError, match=r"shape \[7, 1\].*multiply .* in loss_fn"):
        pipe.step(X, target=PROBABILITIES)


def test_a_batch_mean_over_another_dim_than_rows_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"'batchmean' divides by the size of dim 0, so .* split_dims=1 .*reduction='mean'"
    ):
        piped(model(), nn.KLDivLoss(reduction="batchmean"), numerics=Numerics(split_dims=1))


# ---- losses that are recognised --------------------------------------------------------------------------------------


class Reshaping(nn.CrossEntropyLoss):
    """With its own forward, so torch's options do not tell what it averages over."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output.flatten(0, -2), target.flatten())


class Inheriting(nn.CrossEntropyLoss):
    """With torch's own forward."""


def test_a_class_that_inherits_its_forward_counts_as_its_parent() -> None:
    assert_trains_as_the_whole_batch(Inheriting(), SOME)


@pytest.mark.parametrize(
    ("loss_fn", "known"),
    [
        (nn.CrossEntropyLoss(), True),
        (functional.mse_loss, True),
        (functools.partial(functional.cross_entropy, ignore_index=0), True),
        (Inheriting(), True),
        (Reshaping(), False),
        (lambda output, target: (output - target).mean(), False),
        (functional.softmax, False),
    ],
)
def test_a_search_may_choose_micro_batches_where_the_loss_is_known_to_add_up(loss_fn: Any, known: bool) -> None:
    assert adds_up(model(), loss_fn, None) is known


@pytest.mark.smoke
def test_every_loss_function_of_torch_is_one_of_these() -> None:
    """Each is the function of one loss class."""
    functions = [
        name
        for name, function in vars(functional).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and "reduction" in inspect.signature(function).parameters
    ]
    assert {case.function for case in CASES} < set(functions)
    others = {"ctc_loss", "gaussian_nll_loss", "cosine_embedding_loss", "margin_ranking_loss", "linear_cross_entropy"}
    others |= {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
    assert set(functions) - {case.function for case in CASES} <= others
