"""The distributed executor on real gloo ranks: values, order, bits, failures. One set of processes serves all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Action, schedules
from pipesched.program.actions import Lane
from tests.support.jobs import failures, messages, pipelines, programs, training
from tests.support.models import EXACT, KINDS
from tests.support.random_programs import OUT_OF_ORDER, random_text
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


@settings(max_examples=16)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_any_value_crosses_and_comes_out_as_it_was(ranks: Ranks, seeds: list[int]) -> None:
    assert ranks.run(2, messages.round_trips, seeds) == [5 * len(seeds)] * 2


@pytest.mark.parametrize("kilobytes", [[1000] * 20, [3000, 1, 3000, 1000, 1, 3000] * 2], ids=["one port", "both"])
def test_long_values_cross(ranks: Ranks, kilobytes: list[int]) -> None:
    assert ranks.run(2, messages.long_values, kilobytes) == [len(kilobytes)] * 2


def test_a_value_may_change_as_soon_as_it_is_sent(ranks: Ranks) -> None:
    kilobytes = [1, 100, 900, 900, 900, 900, 900, 900, 900, 100, 3000, 1]  # more than connections hold
    assert ranks.run(2, messages.changed_once_sent, kilobytes) == [len(kilobytes)] * 2


def test_a_later_message_may_be_used_first(ranks: Ranks) -> None:
    ranks.run(2, programs.run_programs, OUT_OF_ORDER)


def test_skip_edges_between_any_two_ranks(ranks: Ranks) -> None:
    text = """microbatches 2
placement 0 1 2 3
edges 0-1 0-2 0-3 1-2 1-3 2-3
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1F1 1B0 1B1
rank 2: 2F0 2F1 2I0 2W0 2B1
rank 3: 3F0 3B0 3F1 3B1
"""
    ranks.run(4, programs.run_programs, [text, text])


def test_random_valid_programs_run_as_written(ranks: Ranks) -> None:
    arrived = ranks.run(3, programs.run_programs, [random_text(seed) for seed in range(50)])
    assert min(arrived) > 150


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("num_ranks", "checkpoint"), [(1, "never"), (2, "always"), (3, "never"), (4, "always")])
@pytest.mark.parametrize("half", [0, 1])
def test_training_equals_the_loop_bit_by_bit(ranks: Ranks, half: int, num_ranks: int, checkpoint: str) -> None:
    """Every other exact schedule, from the first or from the second."""
    names = [name for name in EXACT if num_ranks * schedules.get(name).chunks_per_rank <= 11]
    ranks.run(num_ranks, training.train, names[half::2], checkpoint)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_all_ranks_are_drawn_on_one_axis(ranks: Ranks, name: str) -> None:
    spans = ranks.run(3, programs.one_clock, name)[0]
    program = schedules.get(name).program(3, 4)
    assert min(span.start_s for span in spans) >= 0
    ends = {span.action: span.end_s for span in spans}
    clocks_differ_s = 0.001
    for span in spans:
        if span.lane is Lane.COMPUTE:
            assert all(ends[need] <= span.start_s + clocks_differ_s for need in program.needs(span.action))


def test_the_memory_of_messages_is_used_again(ranks: Ranks) -> None:
    assert max(ranks.run(2, messages.memory_of_messages, "1f1b", 40)) == 1  # short ones are complete on return
    assert max(ranks.run(2, messages.memory_of_long_messages, "1f1b", 40)) <= 5


def test_values_beside_programs(ranks: Ranks) -> None:
    for values, shared in ranks.run(3, programs.exchange):
        assert values == [(0, 0), (1, 1000), (2, 2000)]
        assert shared == [2, 1, 0]


def test_the_callers_settings_hold_and_come_back(ranks: Ranks) -> None:
    wanted = {"threads": 2, "grad": False, "inference": True, "after": 1}
    assert ranks.run(2, programs.settings) == [wanted, wanted]


def test_several_executors_live_at_once_and_end(ranks: Ranks) -> None:
    assert ranks.run(3, programs.several_at_once) == [0, 0, 0]


# ---- Pipeline(mesh=...) ----


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("num_ranks", "checkpoint"), [(2, "never"), (2, "always"), (3, "except_last")])
def test_a_pipeline_over_a_mesh_equals_the_loop_bit_by_bit(ranks: Ranks, num_ranks: int, checkpoint: str) -> None:
    ranks.run(num_ranks, pipelines.train_pipelines, EXACT if checkpoint == "never" else KINDS, checkpoint)


def test_optimizers_over_a_mesh_equal_the_loop_bit_by_bit(ranks: Ranks) -> None:
    ranks.run(3, pipelines.train_with_optimizer)


def test_what_does_not_run_over_a_mesh_says_so(ranks: Ranks) -> None:
    for said in ranks.run(2, pipelines.refusals):
        check_refusals(*said)


def check_refusals(asynchronous: str, both: str, different: str, few: str) -> None:
    """A rank names its own error, or the same one of a rank that was first."""
    assert "needs an optimizer for each stage; got none; pass optimizer=" in asynchronous
    assert "both were passed; pass only one" in both
    assert "all ranks must have the same plan; rank 1 of 2 has a different plan than rank 0" in different
    assert "the mesh has 2 ranks, but the program uses 1; use a mesh of 1 rank," in few


def test_all_ranks_cut_alike_and_draw_alike(ranks: Ranks) -> None:
    first, second = ranks.run(2, pipelines.balanced)
    assert first == second


# ---- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("stage", range(4))
def test_an_error_in_one_rank_stops_all(ranks: Ranks, stage: int, kind: str) -> None:
    failing = Action.parse(f"{stage}{kind}3")
    for rank, (seconds, error, text, notes, after) in enumerate(ranks.run(4, failures.fail, failing, failures.divide)):
        assert seconds < 5, "others stop within seconds"
        place = f"in {failing} (stage {stage}, micro-batch 3), rank {stage}, position"
        said = f"rank {stage} failed: ZeroDivisionError: a layer's own error, {place}"
        if rank == stage:
            assert (error, text) == ("ZeroDivisionError", "a layer's own error")
            assert notes[-1].startswith(place)
        else:
            assert error == "ExecutionError"
            assert text.startswith(f"a failed rank stops all ranks; {said}")
            assert f"rank {rank} of 4 stopped" in text
        assert after.startswith(f"a closed pipeline cannot run; {said}")


def test_a_rank_that_waits_for_a_computing_rank_stops_as_soon_as_another_fails(ranks: Ranks) -> None:
    """Rank 2 fails while rank 1 computes for 2 s; rank 0 waits for rank 1 and need not."""
    results = ranks.run(3, failures.fail, Action.parse("2F0"), failures.divide, 10, Action.parse("1F1"))
    assert results[0][0] < results[1][0]
    assert all("rank 2 failed: ZeroDivisionError" in results[rank][2] for rank in (0, 1))


def test_a_rank_that_sticks_ends_by_timeout(ranks: Ranks) -> None:
    results = ranks.run(2, failures.fail, Action.parse("1F3"), failures.be_late, 0.5)
    seconds, error, text, _, _ = results[0]
    assert (error, seconds < results[1][0]) == ("ExecutionError", True)
    assert "no data arrived from rank 1 within the timeout" in text


def test_a_rank_that_closed_another_pipeline_is_not_to_blame(ranks: Ranks) -> None:
    """Rank 1 is late in two actions, in neither for half of the timeout: that the others are silent says nothing."""
    ranks.run(3, failures.good_step)
    results = ranks.run(2, failures.fail, Action.parse("1B3"), failures.be_late, 2.5, Action.parse("1F3"))
    _, error, text, _, _ = results[0]
    assert error == "ExecutionError"
    assert text.startswith(
        "a failed rank stops all ranks; rank 0 failed: no data arrived from rank 1 within the timeout"
    )


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_another_program_is_found_before_the_first_step(ranks: Ranks, odd: int) -> None:
    others = {0: "ranks 1, 2 of 3 have", 1: "rank 1 of 3 has", 2: "rank 2 of 3 has"}[odd]
    for text, ran in ranks.run(3, failures.different_programs, odd):
        assert text.startswith(f"all ranks must have the same program; {others} a different program than rank 0")
        assert ran == 0


def test_another_batch_is_found_before_a_message_of_another_size(ranks: Ranks) -> None:
    for text in ranks.run(2, failures.different_batches):
        assert "has a different batch in this step: its micro-batches are 4 x float32[" in text


def test_a_process_that_ends_is_named(ranks: Ranks) -> None:
    results = ranks.run(3, failures.fail, Action.parse("1B2"), failures.end_process)
    assert results[1] is None
    for rank in (0, 2):
        seconds, error, text, _, _ = results[rank]
        assert (error, seconds < 5) == ("ExecutionError", True)
        assert "the connection with rank 1 ended" in text
