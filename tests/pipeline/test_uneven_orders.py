"""Orders made for micro-batches of different lengths: exact, agreed by all ranks, searched once, never slower."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pipesched import Costs, Search
from pipesched.planning import program_factory
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory, StepPrograms
from pipesched.program.actions import Action, Kind
from pipesched.program.liveness import peak_in_flight
from pipesched.program.program import Program
from pipesched.simulation.size_fit import Size
from tests.support.cut_batches import looped, parts, tagger
from tests.support.jobs import uneven as jobs
from tests.support.models import assert_as
from tests.support.places import run_here
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

HERE = {"devices": ["cpu"] * 2}
SEEN = [
    (f"searched for micro-batches of {sizes} sizes, measured", searches)
    for sizes, searches in ((4, 1), (4, 2), (4, 3), (4, 3))
]


# ---- exact and agreed -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_product_deferred")
def test_steps_in_one_process_are_bit_identical_and_search_once_for_similar_sizes() -> None:
    (seen,) = run_here(2, jobs.trains)
    assert seen == [*SEEN, ("searched, measured", 3)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_ranks_find_the_same_order(ranks: Ranks, inputs: str) -> None:
    assert ranks.run(2, jobs.trains, inputs) == [[*SEEN, ("searched, measured", 3)]] * 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_replicas_with_other_lengths_run_one_order(ranks: Ranks, inputs: str) -> None:
    found = ranks.run(4, jobs.replicas, inputs)
    assert found == [found[0]] * 4
    assert found[0][-1][1] > 0


@pytest.mark.filterwarnings("ignore:the first step must have micro-batches of the planned size")
def test_random_lengths_train_to_the_bits_of_the_loop() -> None:
    rng = random.Random(0)
    expected = tagger()
    with jobs.pipeline(HERE) as pipe:
        for step in range(12):
            count = rng.randint(1, 7)
            lengths = tuple(rng.choice((2, 3, 9, 20, 33)) for _ in range(count))
            batch = parts(lengths, tuple(rng.randint(1, 3) for _ in range(count)))
            assert torch.equal(pipe.step(microbatches=batch), looped(expected, batch, step))
            assert_as(pipe, expected)


def test_one_rank_searches_no_order() -> None:
    with jobs.pipeline({"devices": ["cpu"]}, boundaries=None) as pipe:
        pipe.step(microbatches=jobs.batch(jobs.STEPS[0]))
        assert pipe.trace.name == "searched, measured"


# ---- shown ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "note"),
    [
        (
            {},
            "4 sizes, run in an order found for these sizes (1 order found so far for unequal sizes); the prediction "
            "is for equal sizes",
        ),
        ({"search": None}, "4 sizes, run in the order for equal sizes"),
        ({"schedule": "1f1b"}, "4 sizes, run in the order for equal sizes"),
    ],
)
def test_the_report_says_whether_the_order_was_made_for_the_lengths(options: dict[str, Any], note: str) -> None:
    with jobs.pipeline(HERE, **options) as pipe:
        pipe.step(microbatches=jobs.batch(jobs.STEPS[0]))
        assert f"the measured step has micro-batches of {note}" in str(pipe.report())
        assert pipe.trace.bound_s is None  # it would assume equal micro-batches
        pipe.step(microbatches=jobs.batch((7,) * 4))
        assert "the measured step has micro-batches of" not in str(pipe.report())
        assert pipe.trace.bound_s is not None


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_without_a_limit_more_micro_batches_may_be_in_flight() -> None:
    assert peaks({}) > peaks({"search": Search(profile=jobs.profile(), memory_limit_bytes=1 << 30)})


def peaks(options: dict[str, Any]) -> list[int]:
    with jobs.pipeline(HERE, **options) as pipe:
        pipe.step(microbatches=jobs.batch((30, 2, 2, 2, 30, 2, 2, 2)))
        return list(pipe.trace.peak_in_flight)


# ---- the programs ---------------------------------------------------------------------------------------------------


def factory(count: int, num_ranks: int = 3) -> ProgramFactory:
    return ProgramFactory(PlanRequest(schedule="searched", num_microbatches=count), num_ranks)


def costs(size: Size, num_stages: int = 3) -> Costs:
    seconds = range(size.elements, size.elements + num_stages)
    return Costs(forward_s=tuple(seconds), input_grad_s=tuple(seconds), weight_grad_s=tuple(seconds))


def sizes_of(lengths: Sequence[int]) -> tuple[Size, ...]:
    return tuple(Size(1, length) for length in lengths)


def makespan(program: Program, seconds: Callable[[Action], float]) -> float:
    """Run the orders of a chain of stages action by action."""
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * program.num_ranks
    left = [list(reversed(order)) for order in program.orders]
    while any(left):
        for rank, order in enumerate(left):
            while order and all(need in ends for need in needs(order[-1], program.num_stages)):
                action = order.pop()
                ready = max((ends[need] for need in needs(action, program.num_stages)), default=0)
                free[rank] = max(free[rank], ready) + seconds(action)
                kind = {Kind.F: "F", Kind.W: "W"}.get(action.kind, "gradient")
                ends[kind, action.stage, action.microbatch] = free[rank]
    return max(free)


def needs(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [("F", stage - 1, microbatch)] if stage else []
    if action.kind is Kind.W:
        return [("gradient", stage, microbatch)]
    return [("F", stage, microbatch)] + [("gradient", stage + 1, microbatch)] * (stage + 1 < num_stages)


def test_the_order_for_the_lengths_is_faster_than_the_order_for_equal_ones() -> None:
    rng = random.Random(1)
    ratios = []
    for _ in range(6):
        lengths = [rng.randint(10, 400) for _ in range(8)]
        programs = factory(8)
        even, own = programs.full.plain, programs.of_sizes(sizes_of(lengths), costs, max_in_flight=None).plain

        def seconds(action: Action, lengths: Sequence[int] = lengths) -> float:
            time_s = lengths[action.microbatch] + action.stage
            return time_s * (2 if action.kind is Kind.B else 1)

        assert own.exact
        ratios.append(makespan(own, seconds) / makespan(even, seconds))
    assert max(ratios) <= 1
    assert sum(ratios) / len(ratios) < 0.95


def test_with_the_default_limit_no_rank_holds_more_than_before() -> None:
    programs = factory(8)
    own = programs.of_sizes(sizes_of((400, 10, 10, 400, 10, 10, 200, 10)), costs).plain
    for rank in range(3):
        limit = peak_in_flight(programs.full.plain.orders.rank(rank))
        assert peak_in_flight(own.orders.rank(rank)) <= limit


def test_orders_are_kept_until_many_others_have_been_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_factory, "_MOST_KEPT", 3)
    programs = factory(2, 2)

    def of(length: int) -> StepPrograms:
        return programs.of_sizes(sizes_of((1, length)), lambda size: costs(size, 2))

    first, other = of(2), of(3)
    for length in (4, 5, 6):
        assert of(2) is first
        of(length)
    assert programs.num_searched == 5
    assert of(2) is first
    assert of(3) is not other
    assert programs.num_searched == 6
