"""Every schedule over a mesh of real gloo ranks, to the bit as in one process. One set of processes serves all."""

from typing import Any

import pytest

from pipesched import schedules
from tests.support.jobs import keeping as jobs_keeping
from tests.support.jobs import schedules as jobs
from tests.support.models import synchronous_names
from tests.support.random_programs import fitting
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

ASYNCHRONOUS = [name for name in schedules.names() if name not in synchronous_names()]
SHARED = [name for name in schedules.names() if (p := schedules.get(name).program(2, 2)).num_weights < p.num_stages]


@pytest.mark.smoke
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", schedules.names())
def test_every_name_trains_over_a_mesh(ranks: Ranks, name: str) -> None:
    ranks.run(fitting(name, 2), jobs.trains, name)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SHARED)
def test_copies_of_layers_in_other_processes(ranks: Ranks, name: str, num_ranks: int, checkpoint: str) -> None:
    ranks.run(num_ranks, jobs.shared_weights, name, checkpoint)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "checkpoint"),
    [(1, jobs.sgd, "never"), (2, jobs.sgd, "never"), (3, jobs.adam, "always"), (4, jobs.sgd, "except_last")],
)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_steps_over_a_mesh(
    ranks: Ranks, name: str, num_ranks: int, optimizer: Any, checkpoint: str
) -> None:
    ranks.run(num_ranks, jobs.streams, name, optimizer, checkpoint)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_program_with_updates_runs_step_by_step(ranks: Ranks, name: str) -> None:
    ranks.run(3, jobs.drained, name)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_no_rank_waits_for_the_others_where_a_step_ends(ranks: Ranks, name: str) -> None:
    assert ranks.run(2, jobs.no_barrier, name, f"no barrier in {name}") == [False, True]


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_messages_of_a_stream_are_soon_foreseen_and_their_memory_is_used_again(ranks: Ranks, name: str) -> None:
    for kept, announced in ranks.run(2, jobs.long_stream, name):
        assert kept <= 6
        assert announced[0] > 0
        assert announced[8] == announced[-1]


def test_layers_that_do_not_keep_what_they_save(ranks: Ranks) -> None:
    ranks.run(2, jobs_keeping.mixtures)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_a_stream_ends_all_ranks(ranks: Ranks, failing: int, backward: bool) -> None:
    for rank, (seconds, error, after) in enumerate(ranks.run(3, jobs.fail_in_a_stream, "pipedream", failing, backward)):
        assert seconds < 15, "nobody waits for a timeout"
        if rank == failing:
            assert error == "ZeroDivisionError: a layer's own error"
        else:
            assert "a failed rank stops all ranks" in error or "a closed pipeline cannot run" in error
            assert f"rank {failing} failed: ZeroDivisionError: a layer's own error" in error
            assert f"stage {failing}, micro-batch" in error
        assert f"a closed pipeline cannot run; rank {failing} failed: ZeroDivisionError" in after


def test_an_exception_inside_a_stream_ends_the_stream_on_all_ranks(ranks: Ranks) -> None:
    own, *others = ranks.run(3, jobs.leave_a_stream)
    assert "the user's own" in own
    assert all("rank 0 failed: it stopped before flush() had finished its steps" in text for text in others)
