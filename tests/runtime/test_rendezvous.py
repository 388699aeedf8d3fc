"""Ranks come together to make a pipeline, whatever became of the ones before."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import distributed

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.rendezvous import Rendezvous
from tests.support.jobs import rendezvous as jobs
from tests.support.rank_processes import Ranks

NAMES = ["rank 0", "rank 1", "rank 2"]

pytestmark = pytest.mark.timeout(120)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrong", [0, 2])
def test_a_mistake_of_one_rank_ends_one_attempt_in_all(ranks: Ranks, wrong: int) -> None:
    for rank, found in enumerate(ranks.run(3, jobs.mistakes, wrong, timeout_s=100)):
        own = {
            "seed": "InputError: a seed must be a whole number; got 'five'",
            "model": "ModelTypeError: the model must be an nn.Module",
            "timeout": "InputError: ",
            "boundaries": "PartitionError: ",
            "devices": "InputError: a pipeline must run either on devices= of this process or over a mesh=; ",
            "init": "InputError: ",
            "links": "InputError: ",
        }
        for name, text in found.items():
            if rank == wrong:
                assert text.startswith(own[name]), name
            else:
                assert text.startswith(f"ExecutionError: a failed rank stops all ranks; rank {wrong} failed: "), name
                assert own[name] in text, name


def test_a_mistake_of_all_ends_no_later_pipeline(ranks: Ranks) -> None:
    for found in ranks.run(3, jobs.all_alike):
        for text in found:
            assert text.startswith(
                ("InputError: a seed must be", "ExecutionError: a failed rank stops all ranks; rank ")
            )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("who", [[1], [0, 2]])
def test_ranks_that_do_not_come_are_named_and_may_come_later(ranks: Ranks, who: list[int]) -> None:
    names = " and ".join(f"rank {rank}" for rank in who) + (" has" if len(who) == 1 else " have")
    for rank, found in enumerate(ranks.run(3, jobs.absent, who, timeout_s=60)):
        for text in found:
            assert (text == "absent") == (rank in who)
            if text != "absent":
                assert text.startswith("ExecutionError: all 3 ranks must construct the pipeline at the same time; ")
                assert re.search(
                    rf"; {names} not joined; rank \d waited 2 s; make the pipeline on every rank, or p", text
                )


def test_ranks_wait_for_one_that_is_late(ranks: Ranks) -> None:
    ranks.run(3, jobs.later)


def test_measuring_may_take_longer_than_the_timeout(ranks: Ranks) -> None:
    assert ranks.run(2, jobs.measures_for_long, "ends") == ["nothing", "nothing"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["hangs", "spins"])
def test_a_rank_0_that_hangs_while_it_measures_is_named(ranks: Ranks, how: str) -> None:
    _, other = ranks.run(2, jobs.measures_for_long, how)
    assert "rank 0 failed: it has been in " in other
    assert " in measured; rank 1 noticed: " in other


def test_a_rank_0_that_fails_or_stops_while_it_measures_is_named(ranks: Ranks) -> None:
    own, other = ranks.run(2, jobs.measures_for_long, "fails")
    assert own == "OSError: no layer today"
    assert "a failed rank stops all ranks; rank 0 failed: OSError: no layer today, in the construction" in other
    _, other = ranks.run(2, jobs.measures_for_long, "stops")
    said = (
        "no data arrived from rank 0 within the timeout, in the construction of a pipeline, where rank 0 measures and "
        "decides for all"
    )
    assert said in other


# ---- the store alone ----------------------------------------------------------------------------------------------


def test_nothing_is_left_of_an_earlier_start_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of torchelastic keep one store for all starts."""
    store = distributed.HashStore()
    with pytest.raises(ExecutionError, match=r"rank 0 has not joined; rank 1 waited 0\.1 s"):
        Rendezvous(store, 1, NAMES[:2]).meet(0.1)
    Rendezvous(store, 0, NAMES[:2]).fail("InputError: wrong")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert meet(store, [0, 1])[0] == meet(store, [1, 0])[0] == "met"


def test_each_pipeline_has_keys_of_its_own() -> None:
    store = distributed.HashStore()
    found = []
    for _ in range(3):
        parts: dict[int, Any] = {}
        assert meet(store, [0, 1, 2], parts) == ["met"] * 3
        parts[0].set("key", f"{len(found)}")
        found.append([parts[rank].get("key") for rank in range(3)])
    assert found == [[b"0"] * 3, [b"1"] * 3, [b"2"] * 3]


def test_a_rank_that_withdrew_is_passed_over() -> None:
    store = distributed.HashStore()
    for _ in range(3):
        with pytest.raises(ExecutionError, match=r"rank 0 and rank 2 have not joined; rank 1 waited 0\.05 s"):
            Rendezvous(store, 1, NAMES).meet(0.05)
    with pytest.raises(ExecutionError, match=r"rank 1 and rank 2 have not joined; rank 0 waited 0\.05 s"):
        Rendezvous(store, 0, NAMES).meet(0.05)
    assert meet(store, [2, 1, 0]) == ["met"] * 3


def test_rank_0_raises_only_after_the_others_have_read_its_error() -> None:
    """Its process may host the store, and may end as soon as it raises."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(1) as rank_1:
        waiting = rank_1.submit(Rendezvous(store, 1, NAMES).meet, 20)
        keys = distributed.PrefixStore("pipesched/0", store)  # type: ignore[attr-defined]
        keys.wait(["came/1/1"])
        with pytest.raises(ExecutionError, match=r"rank 2 has not joined; rank 0 waited 0\.05 s"):
            Rendezvous(store, 0, NAMES).meet(0.05)
        assert keys.check(["heard/1/1"])
        with pytest.raises(ExecutionError, match=r"rank 2 has not joined; rank 0 waited 0\.05 s"):
            waiting.result()


def meet(store: Any, ranks: list[int], parts: dict[int, Any] | None = None) -> list[str]:
    """All ranks meet, each in a thread, in this order."""
    found = {}

    def come(rank: int) -> None:
        try:
            part = Rendezvous(store, rank, NAMES[: len(ranks)]).meet(20)
            found[rank] = "met"
            if parts is not None:
                parts[rank] = part
        except ExecutionError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(ranks))]
