"""Ranks leave a job between two steps, and others join it; the results are those of a job that never changes."""

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from pipesched import Distributed, Pipeline
from pipesched.errors import InputError
from tests.support.jobs import joins as jobs
from tests.support.jobs.joins import Script
from tests.support.rank_processes import FORKED

pytestmark = pytest.mark.timeout(100)

WAIT = 6  # the step before which the first rank waits for a newcomer


@cache
def undisturbed(kind: str = "") -> tuple[list[float], str]:
    return jobs.undisturbed(Script().num_steps, kind)


class Job:
    """The processes of a job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=1), wait_for_workers=False)
        self.processes: list[Any] = []

    def start(self, *scripts: Script) -> None:
        """Start the ranks with which the job begins."""
        for rank, script in enumerate(scripts):
            self._add(jobs.member, rank, len(scripts), self._store.port, script)

    def join(self, script: Script = Script()) -> None:
        """Start a process that joins the job."""
        self._add(jobs.newcomer, script)

    def _add(self, job: Any, *args: Any) -> None:
        process = FORKED.Process(target=job, args=(str(self._folder), *args))
        process.start()
        self.processes.append(process)

    def results(self, who: Sequence[int]) -> list[Any]:
        """Wait for the ends of some processes, and return what they have written."""
        for process in self.processes:
            process.join()
        return [json.loads((self._folder / f"{self.processes[one].pid}.done").read_text()) for one in who]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    own = Job(tmp_path)
    yield own
    own.end()


def check(*results: Any, kind: str = "") -> None:
    """Check that all results have the losses, from the first step on, and the weights of an undisturbed run."""
    losses, weights = undisturbed(kind)
    for found in results:
        assert "error" not in found, found["error"]
        assert found["losses"] == {str(step): losses[step] for step in range(found["first"], len(losses))}
        assert found["weights"] == weights


def test_a_newcomer_gets_layers_and_survives_the_first_rank(job: Job) -> None:
    """The rank that was the first one before is lost afterwards."""
    job.start(Script(wait_before=WAIT, kill_before=10), Script(), Script())
    job.join()
    *others, new = job.results([1, 2, 3])
    check(*others, new)
    assert [one.partition(";")[0] for one in new["told"]] == ["4 ranks joined", "rank 0 lost"]


def test_a_rank_leaves_and_another_joins(job: Job) -> None:
    """The state of the rank that leaves is at its neighbour, so no step runs again."""
    job.start(Script(wait_before=WAIT), Script(leave_before=3), Script())
    job.join()
    first, third, new = job.results([0, 2, 3])
    check(first, third, new)
    changes = sorted(first["told"])  # the newcomer may be earlier
    assert [one.partition("; ")[0] for one in changes] == ["1 rank joined", "rank 1 lost"]
    assert "after 3 steps" in changes[1]


def test_a_rank_that_is_left_alone_takes_in_another(job: Job) -> None:
    job.start(Script(wait_before=WAIT), Script(kill_before=3))
    job.join()
    first, new = job.results([0, 2])
    check(first, new)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("kind", [kind for kind in jobs.KINDS if kind])
def test_a_rank_of_each_kind_of_pipeline_is_lost(job: Job, kind: str) -> None:
    job.start(Script(kind=kind), Script(kind=kind, kill_before=8), Script(kind=kind))
    check(*job.results([0, 2]), kind=kind)


def test_a_process_cannot_join_a_job_that_is_not_there(tmp_path: Path) -> None:
    choices = Distributed(redundancy="neighbour", rendezvous=tmp_path / "job", timeout=0.2)
    with pytest.raises(RuntimeError, match="there is no such file; check that the job runs with the same rendezvous="):
        Pipeline(jobs.model(), jobs.batch(0)[0][:2], distributed=choices, **jobs.options())


def test_only_a_job_with_copies_takes_in_others_and_lets_ranks_leave() -> None:
    with pytest.raises(InputError, match="rendezvous= was passed without redundancy="):
        Distributed(rendezvous="job")
    with Pipeline(jobs.model(), jobs.batch(0)[0][:2], devices=["cpu"] * 2, **jobs.options()) as pipe:
        with pytest.raises(InputError, match=r"leave\(\) hands the layers of this rank over"):
            pipe.leave()
        with pytest.raises(InputError, match=r"recover\(\) needs copies of the ranks' states"):
            pipe.recover()
