"""Values between devices: headers by sockets, data by links. Stand-ins for links run all of it on CPUs.

Where there are CUDA devices, the same over NCCL.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Action
from tests.support.jobs import devices, failures, messages, pipelines, programs, training
from tests.support.models import KINDS
from tests.support.random_programs import OUT_OF_ORDER, random_text
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


def over_links(ranks: Ranks, count: int, job: object, *args: object) -> list[object]:
    return ranks.run(count, devices.over_links, job, *args)


@settings(max_examples=12)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_any_value_crosses_and_comes_out_as_it_was(ranks: Ranks, seeds: list[int]) -> None:
    """Also where a form changes after it was foreseen: shapes that change never crash."""
    assert over_links(ranks, 2, messages.round_trips, seeds) == [5 * len(seeds)] * 2


def test_long_values_cross(ranks: Ranks) -> None:
    assert over_links(ranks, 2, messages.long_values, [3000, 1, 3000, 1000, 1, 3000]) == [6, 6]


def test_a_later_message_may_be_used_first(ranks: Ranks) -> None:
    over_links(ranks, 2, programs.run_programs, OUT_OF_ORDER)


def test_random_valid_programs_run_though_sends_stand_until_they_are_received(ranks: Ranks) -> None:
    arrived = over_links(ranks, 3, programs.run_programs, [random_text(seed) for seed in range(50)])
    assert min(arrived) > 150


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("num_ranks", "checkpoint"), [(1, "never"), (2, "never"), (3, "always")])
def test_training_equals_the_loop_bit_by_bit(ranks: Ranks, num_ranks: int, checkpoint: str) -> None:
    over_links(ranks, num_ranks, training.train, ["gpipe", *KINDS], checkpoint)


def test_a_pipeline_over_a_mesh_equals_the_loop_bit_by_bit(ranks: Ranks) -> None:
    over_links(ranks, 2, pipelines.train_pipelines, ["1f1b", "zb-v"], "never")
    over_links(ranks, 3, pipelines.train_with_optimizer)


def test_the_memory_of_messages_is_used_again_once_they_are_sent(ranks: Ranks) -> None:
    assert max(over_links(ranks, 2, devices.memory_of_messages, 40)) <= 5


def test_links_are_made_for_the_channels_of_programs_and_kept(ranks: Ranks) -> None:
    chain, looped = over_links(ranks, 3, devices.links_of_programs, ["1f1b", "interleaved-1f1b"])[1]
    assert chain == [(0, 1, 0), (1, 0, 1), (1, 2, 0), (2, 1, 1)]
    assert looped == chain
    ends = over_links(ranks, 3, devices.links_of_programs, ["1f1b", "interleaved-1f1b"])[0]
    assert ends[0] == [(0, 1, 0), (1, 0, 1)]
    assert ends[1] == [(0, 1, 0), (0, 2, 1), (1, 0, 1), (2, 0, 0)]


def test_a_rank_has_no_more_links_than_torch_has_streams() -> None:
    assert "has 33 channels; move stage boundaries so that fewer edges cross them" in devices.too_many_links(None)


def test_several_executors_live_at_once_and_end(ranks: Ranks) -> None:
    assert over_links(ranks, 3, programs.several_at_once) == [0, 0, 0]


@pytest.mark.parametrize("failing", ["0F3", "2F3", "1B3"])
def test_an_error_in_one_rank_stops_all(ranks: Ranks, failing: str) -> None:
    action = Action.parse(failing)
    for rank, (seconds, error, text, _, after) in enumerate(
        over_links(ranks, 3, failures.fail, action, failures.divide)
    ):
        assert seconds < 5
        if rank == action.stage:
            assert (error, text) == ("ZeroDivisionError", "a layer's own error")
        else:
            assert error == "ExecutionError"
            assert text.startswith(f"a failed rank stops all ranks; rank {action.stage} failed: ZeroDivisionError")
        assert after.startswith("a closed pipeline cannot run")


def test_an_error_ends_what_stands_on_the_devices(ranks: Ranks) -> None:
    for rank, (seconds, text, left) in enumerate(over_links(ranks, 3, devices.fail_with_messages_posted)):
        assert seconds < 5
        assert ("ZeroDivisionError: " if rank == 1 else "rank 1 failed: ZeroDivisionError") in text
        assert not left


def test_another_batch_is_found_before_its_messages(ranks: Ranks) -> None:
    for text in over_links(ranks, 2, failures.different_batches):
        assert "has a different batch in this step: its micro-batches are 4 x float32[" in text
