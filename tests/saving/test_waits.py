"""Saves and loads over processes end, also if a rank is stuck: the timeout after its last sign of progress."""

from pathlib import Path

import pytest

from tests.support.jobs import saving_waits as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(120)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_finish_writing_is_named_and_saves_go_on_later(
    ranks: Ranks, tmp_path: Path, rank: int, background: bool
) -> None:
    for first, second, third in ranks.run(2, jobs.stuck, str(tmp_path), "write", rank, background):
        assert f"rank {rank} failed: " in first
        assert f"rank {1 - rank} failed" not in first
        assert "nothing was read, written or finished for 1." in first or "wrote nothing for 1 s" in first
        assert "a new save must not begin before the last one has ended" in second
        assert third == ""


def test_a_commit_that_does_not_end_is_one_of_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    for first, _, third in ranks.run(2, jobs.stuck, str(tmp_path), "commit", 0, False):
        assert "rank 0 failed: nothing was read, written or finished for 1." in first
        assert ", at " in first
        assert third == ""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("where", "stops"), [("hash", False), ("set_extra_state", True)])
def test_a_load_that_is_stuck_is_named(ranks: Ranks, tmp_path: Path, where: str, stops: bool) -> None:
    """Once the load has begun to change the run, the pipeline cannot go on."""
    for first, _, third in ranks.run(2, jobs.stuck, str(tmp_path), where, 1, False):
        assert "rank 1 failed: nothing was read, written or finished for 1." in first
        assert bool(third) == stops


def test_a_rank_that_makes_progress_may_take_longer_than_the_timeout(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, jobs.slow, str(tmp_path))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_with_the_full_disk_is_named(ranks: Ranks, tmp_path: Path, rank: int, background: bool) -> None:
    said = ranks.run(2, jobs.fails, str(tmp_path), rank, background)
    assert said[rank].startswith("CheckpointError: a checkpoint must be written completely")
    assert f"; rank {rank} failed: a checkpoint must be written completely; " in said[1 - rank]
    assert "No space left on device" in said[1 - rank]
