"""Before the first step the ranks of a mesh compare what must be equal; a difference names who differs, and in what."""

import pytest

from pipesched.model.agreement import differences
from tests.support.jobs import agreement as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("dtype", "the dtype of 3.weight is float16, but float32 on rank 0"),
        ("shape", "the settings of 0 is in_features=4, out_features=6, bias=True, but in_features=4, out_features=4"),
        ("setting", "the settings of 1 is p=0.2, inplace=False, but p=0.1, inplace=False on rank 0"),
        ("frozen", "requires_grad of 0.bias is False, but True on rank 0"),
        ("mode", "the training mode of 1 is False, but True on rank 0"),
        ("structure", "the class of 4 is Identity, but missing on rank 0"),
        ("seed", "seed= is 2, but 1 on rank 0"),
        ("numerics", "numerics= is split_dims=0, loss_weight=None, loss_reduction='sum'"),
        ("torch", "the version of torch is 1.0, but 2."),
    ],
)
def test_a_difference_is_named_on_every_rank(ranks: Ranks, change: str, named: str) -> None:
    for text in ranks.run(3, jobs.builds, change):
        assert text.startswith("ExecutionError: all ranks must have the same model and arguments; rank 2 differs from ")
        assert f"rank 2 differs from rank 0: {named}" in text
        assert text.endswith("; make the same pipeline on every rank")


def test_equal_ranks_compare_once(ranks: Ranks) -> None:
    assert ranks.run(2, jobs.builds, "nothing") == ["", ""]
    assert ranks.run(2, jobs.counts) == [[1, 1, 1]] * 2


def test_a_mode_that_one_rank_sets_before_the_first_step_is_named(ranks: Ranks) -> None:
    for text, loss in ranks.run(2, jobs.forgets_train):
        assert (
            "rank 1 differs from rank 0: the training mode of the model is False, but True on rank 0, the training"
            in text
        )
        assert text.endswith("; call train() or eval() on every rank")
        assert loss > 0


@pytest.mark.one_in(6)
@pytest.mark.parametrize("change", ["values", "order of rows", "target", "plain number", "part of other storage"])
@pytest.mark.parametrize("method", ["step", "evaluate"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_another_batch_of_the_same_form_is_refused(ranks: Ranks, change: str, method: str, num_ranks: int) -> None:
    results = ranks.run(num_ranks, jobs.passes_other_values, change, method, "all")
    assert len({loss for loss, _ in results}) == 1
    for _, text in results:
        assert "all ranks of a pipeline must pass the same batch" in text
        assert "has other values than" in text


@pytest.mark.parametrize("when", ["first", "after a flush", "never"])
def test_asynchronous_steps_compare_the_first_batch(ranks: Ranks, when: str) -> None:
    """Also that of the first step after a flush. Steps in between do not wait for other ranks."""
    results = ranks.run(3, jobs.streams_other_values, when)
    assert len({loss for loss, _ in results}) == 1
    for _, text in results:
        assert ("all ranks of a pipeline must pass the same batch" in text) == (when != "never")


@pytest.mark.parametrize("inputs", ["all", "first"])
def test_ranks_that_pass_the_same_batch_or_none_go_on(ranks: Ranks, inputs: str) -> None:
    results = ranks.run(3, jobs.passes_other_values, "nothing" if inputs == "all" else "values", "step", inputs)
    assert [text for _, text in results] == [""] * 3


@pytest.mark.parametrize(
    ("change", "named"), [("seed", "0.weight"), ("one weight", "0.weight"), ("buffer", "4.running_mean")]
)
def test_other_weights_are_named(ranks: Ranks, change: str, named: str) -> None:
    for text, _ in ranks.run(2, jobs.holds_other_weights, change, "all"):
        assert f"rank 1 differs from rank 0: the values of {named} is " in text
        assert "load the same checkpoint on every rank" in text
    results = ranks.run(2, jobs.holds_other_weights, change, "own")
    assert [text for text, _ in results] == [""] * 2
    assert len({loss for _, loss in results}) == 1


def test_a_rank_may_freeze_its_own_stages_alone(ranks: Ranks) -> None:
    ranks.run(2, jobs.sets_own_modes)


def test_a_message_names_each_rank_and_its_first_differences() -> None:
    first = {"a": "1", "b": "2", "c": "3", "d": "4", "e": ""}
    second = {"a": "2", "b": "3", "c": "4", "d": "5", "e": ""}
    third = {**first, "e": "new", "f": "more"}
    assert differences([first, second, first, third]) == (
        "rank 1 differs from rank 0: a is 2, but 1 on rank 0, b is 3, but 2 on rank 0, c is 4, but 3 on rank 0 and 1 "
        "more; rank 3 differs from rank 0: e is new, but empty on rank 0, f is more, but missing on rank 0"
    )
