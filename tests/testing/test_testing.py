"""What pipesched.testing offers to authors of schedules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Microbatch, schedules
from pipesched.errors import InputError, ScheduleError
from pipesched.order import Order, Shape, schedule
from pipesched.testing import check_schedule, reference_step


def test_a_good_schedule_is_proved_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    check_schedule(schedules.get("zb-h1"), max_ranks=4, max_microbatches=8)
    printed = capsys.readouterr().out
    assert "zb-h1: valid for 1..4 ranks and 1..8 micro-batches" in printed
    assert printed.splitlines()[-1].split() == ["4", "8", "27", "11.1%", "0.0%", "4"]
    check_schedule(schedules.get("interleaved-1f1b"), max_ranks=4, max_microbatches=8)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["4", "8", "28.5", "15.8%", "11.8%", "5.5"]


def test_a_schedule_of_two_chains_is_proved_for_the_ranks_that_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    check_schedule(schedules.get("chimera"), max_ranks=5, max_microbatches=8)
    printed = capsys.readouterr().out
    assert "chimera: valid for 2, 4 ranks and 1..8 micro-batches" in printed
    assert printed.splitlines()[-1].split() == ["4", "8", "30", "20.0%", "20.0%", "4"]
    with pytest.raises(ScheduleError, match="got 1; use 2"):
        check_schedule(schedules.get("chimera"), max_ranks=1)


def test_a_bad_schedule_is_named_with_the_shape_that_breaks_it() -> None:
    @schedule("forgets")
    def forgets(rank: int, shape: Shape) -> Order:
        order = Order(shape)
        for _ in range(min(3, shape.num_microbatches)):
            order.F(rank)
            order.B(rank)
        return order

    with pytest.raises(ScheduleError, match="for micro-batch 3 it has none") as caught:
        check_schedule(forgets, report=False)
    assert caught.value.__notes__ == ["this error occurred for schedule 'forgets' with 1 rank and 4 micro-batches"]


def one_by_one(rank: int, shape: Shape) -> Order:
    order = Order(shape)
    for _ in range(shape.num_microbatches):
        order.F(rank)
        order.B(rank)
    return order


def test_a_plain_function_is_checked_under_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    check_schedule(one_by_one, max_ranks=4, max_microbatches=3)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "one_by_one: valid for 1..4 ranks and 1..3 micro-batches"
    assert " ".join(printed[1].split()) == "ranks micro-batches makespan bubble above bound peak in flight"
    # The last rank starts after 3 s and has 24 s of work; its last weight gradient may lie in the way back.
    assert printed[-1].split() == ["4", "8", "96", "75.0%", "255.6%", "1"]


def test_what_is_no_schedule_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"a Schedule or a function \(rank, shape\) -> Order; got '1f1b'"):
        check_schedule("1f1b")  # type: ignore[arg-type]


def test_an_error_while_an_order_is_written_is_noted_with_its_shape() -> None:
    def own(rank: int, shape: Shape) -> Order:
        if shape.num_microbatches == 3:
            raise ZeroDivisionError
        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
            order.B(rank)
        return order

    with pytest.raises(ZeroDivisionError) as caught:
        check_schedule(own)
    assert "with 1 rank and 3 micro-batches" in caught.value.__notes__[0]
    with pytest.raises(ScheduleError, match="micro-batches, at least 1; got 0"):
        check_schedule(own, max_microbatches=0)


@pytest.mark.parametrize("function", [lambda: None, lambda rank, shape, more: None, lambda *both: None])
def test_a_schedules_function_takes_rank_and_shape(function: Callable[..., Order]) -> None:
    with pytest.raises(ScheduleError, match=r"a function \(rank, shape\) -> Order"):
        check_schedule(function)


def test_a_function_of_all_ranks_returns_their_orders() -> None:
    with pytest.raises(ScheduleError, match="returned None"):
        check_schedule(lambda shape: None)


def test_check_schedule_reports_only_shapes_that_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    def alone(rank: int, shape: Shape) -> Order:
        assert shape.num_ranks == 1
        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
            order.B(rank)
        return order

    check_schedule(alone, max_ranks=1)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"loss_fn": functional.mse_loss},
            r"loss_fn\(output, target\) needs a target; none was passed; pass target=, or call the model .*, or "
            r"call reference_step\(model, x, loss_fn=loss_fn, target=x\)",
        ),
        ({"target": torch.zeros(4, 3)}, r"a target may only be passed to a pipeline with a loss_fn"),
        (
            {"loss_fn": functional.mse_loss, "microbatches": [Microbatch(torch.ones(2, 3))] * 2},
            "every micro-batch must have a target if the pipeline has a loss_fn",
        ),
    ],
)
def test_a_reference_step_needs_a_target_for_its_loss_as_a_pipeline_does(given: dict[str, Any], message: str) -> None:
    inputs = () if "microbatches" in given else (torch.ones(4, 3),)
    with pytest.raises(InputError, match=message):
        reference_step(nn.Linear(3, 3), *inputs, num_microbatches=2, **given)
