"""Progress: each thread counts its finished parts, and a heartbeat beats only after a finished part."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipesched import progress
from pipesched.errors import ExecutionError
from pipesched.progress import Progress, advance, progress_here, work_for
from pipesched.runtime.coordination.heartbeat import beating


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the progress sees."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_idle_time_counts_from_the_last_part(clock: list[float]) -> None:
    own = Progress()
    clock[0] += 3
    assert own.idle_s == 3
    own.advance()
    assert (own.idle_s, own.num_parts) == (0, 1)


def test_a_bounded_call_is_progress_also_within_another(clock: list[float]) -> None:
    own = Progress()
    with own.bounded(), own.bounded():
        clock[0] += 50
        assert own.idle_s == 0
        assert own.has_advanced(own.num_parts)
    clock[0] += 1
    assert own.idle_s == 1
    assert not own.has_advanced(own.num_parts)


def test_each_thread_has_its_own_progress_unless_it_works_for_another() -> None:
    own = progress_here()
    before = own.num_parts
    with ThreadPoolExecutor(1) as pool:
        pool.submit(advance).result()
    assert own.num_parts == before
    with ThreadPoolExecutor(1, initializer=work_for, initargs=(own,)) as pool:
        pool.submit(advance).result()
    assert own.num_parts == before + 1


@pytest.mark.timeout(20)
def test_a_heartbeat_is_sent_only_for_finished_parts() -> None:
    """The thread spins between its parts, and processor time is no progress."""
    beaten = threading.Semaphore(0)
    with beating(beaten.release, timeout_s=0.08):
        for _ in range(5):
            advance()
            while not beaten.acquire(blocking=False):
                pass
        assert not beaten.acquire(timeout=0.2)


@pytest.mark.timeout(20)
def test_heartbeats_stop_when_a_rank_has_failed() -> None:
    tried = threading.Semaphore(0)

    def beat() -> None:
        tried.release()
        raise ExecutionError("rank 1 failed")

    with beating(beat, timeout_s=0.08):
        advance()
        assert tried.acquire(timeout=10)
        advance()
        assert not tried.acquire(timeout=0.2)
