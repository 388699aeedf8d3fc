"""Survivors: who goes on after a loss, and from which version. Each rank is a thread with its own alarm."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from pipesched.elastic import survivors as module
from pipesched.elastic.survivors import Decision, HeldLayers, RankReport, Survivors, common_version, may_go_on, store_at
from pipesched.errors import ExecutionError, RankLost
from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.coordination.failure_notices import Fault, told
from tests.support.random_programs import quick

pytestmark = pytest.mark.timeout(60)

# ---- the common version ---------------------------------------------------------------------------------------------

LAYERS = ["a", "b", "c"]
VERSIONS = st.integers(0, 4)
HELD = st.builds(
    HeldLayers,
    st.lists(st.sampled_from(LAYERS), min_size=1, unique=True),
    st.lists(VERSIONS, min_size=1, max_size=2, unique=True),
)
REPORTS = st.dictionaries(
    st.integers(0, 5), st.builds(RankReport, st.lists(HELD, max_size=4), VERSIONS), min_size=1, max_size=4
)


def version_by_search(reports: dict[int, RankReport], layers: list[str]) -> int | None:
    """Return the largest version that no rank has passed and at which every layer is held somewhere."""
    for version in range(10, -1, -1):
        passed = [rank for rank, report in reports.items() if version > report.returned]
        homeless = [
            layer
            for layer in layers
            if not any(
                layer in held.layers and version in held.versions for report in reports.values() for held in report.held
            )
        ]
        if not passed and not homeless:
            return version
    return None


@quick
@given(REPORTS, st.lists(st.sampled_from(LAYERS), min_size=1, unique=True))
def test_the_common_version_is_the_latest_that_is_complete_and_that_no_rank_has_passed(reports, layers):
    assert common_version(reports, layers) == version_by_search(reports, layers)


def test_a_version_above_the_step_in_which_a_rank_waits_will_not_do():
    """Rank 1 has not returned from step 3, so it must run that step, and version 4 would leave it out."""
    ahead = RankReport([HeldLayers(["a", "b"], [3, 4])], returned=4)
    behind = RankReport([], returned=3)
    assert common_version({0: ahead, 1: behind}, ["a", "b"]) == 3
    assert common_version({0: ahead}, ["a", "b"]) == 4


def test_layers_of_different_versions_do_not_make_up_a_state():
    reports = {0: RankReport([HeldLayers(["a"], [2])], 3), 1: RankReport([HeldLayers(["b"], [3])], 3)}
    assert common_version(reports, ["a", "b"]) is None


# ---- broken links ---------------------------------------------------------------------------------------------------


@quick
@given(st.data())
def test_at_most_one_part_of_a_broken_network_goes_on(data):
    """The parts cannot reach each other. Of the ranks that have ended, each part sees some as silent."""
    parts: dict[int, list[int]] = {}
    ended = []
    for rank in range(data.draw(st.integers(2, 9))):
        part = data.draw(st.sampled_from([0, 1, 2, "ended"]))
        if part == "ended":
            ended.append(rank)
        else:
            parts.setdefault(part, []).append(rank)
    going_on = []
    for part, members in parts.items():
        others = [rank for other, ranks in parts.items() if other != part for rank in ranks]
        silent = others + [rank for rank in ended if data.draw(st.booleans())]
        going_on += [part] * may_go_on(members, silent)
    assert len(going_on) <= 1


@pytest.mark.parametrize("num_ranks", range(2, 8))
def test_of_two_parts_that_cannot_reach_each_other_exactly_one_goes_on(num_ranks):
    ranks = range(num_ranks)
    for choice in range(1, 2**num_ranks - 1):
        one = [rank for rank in ranks if choice >> rank & 1]
        other = [rank for rank in ranks if not choice >> rank & 1]
        assert may_go_on(one, other) + may_go_on(other, one) == 1


def test_ranks_without_silent_ones_go_on():
    assert may_go_on([3], [])


# ---- the agreement --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(module, "_GLANCE_S", 1.0)
    monkeypatch.setattr(module, "_PAUSE_S", 0.002)


class Ranks:
    """The alarms of ranks that have met, as threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        names = [f"rank {rank}" for rank in range(num_ranks)]
        groups = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: num_ranks) for rank in range(num_ranks)]
        self.alarms = [Alarm(group, names, "127.0.0.1", 30.0) for group in groups]
        store = distributed.HashStore()
        self.all(lambda rank: self.alarms[rank].meet(store))
        self.survivors = [self.survivor(alarm) for alarm in self.alarms]

    def survivor(self, alarm: Alarm, timeout_s: float = 30.0) -> Survivors:
        return Survivors(alarm, distributed.HashStore(), LAYERS, timeout_s)

    def all(self, call: Callable[[int], Any], ranks: Any = None) -> dict[int, Any]:
        """Call a function with each rank at the same time; return the results, or the errors of pipesched."""
        ranks = range(len(self.alarms)) if ranks is None else ranks

        def caught(rank: int) -> Any:
            try:
                return call(rank)
            except ExecutionError as error:
                return error

        with ThreadPoolExecutor(len(self.alarms)) as pool:
            return dict(zip(ranks, pool.map(caught, ranks), strict=True))

    def agree(self, ranks: Any = None, version: int = 3) -> dict[int, Any]:
        """Let ranks agree, each of which holds all layers."""
        return self.all(lambda rank: self.survivors[rank].agree(whole(version)), ranks)

    def lose(self, *ranks: int) -> None:
        """Let the processes of ranks end."""
        for rank in ranks:
            self.alarms[rank].end()

    def freeze(self, rank: int) -> socket.socket:
        """Return a socket that takes the place of a rank's alarm, and never answers."""
        frozen = socket.create_server(("127.0.0.1", 0))
        for alarm in self.alarms:
            place = alarm.addresses[rank]._replace(port=frozen.getsockname()[1])
            alarm._addresses = [place if own == rank else known for own, known in enumerate(alarm.addresses)]
        return frozen

    def blame(self, who: str, *, settled: bool = True) -> None:
        """Let all ranks hear of a fault."""
        for address in self.alarms[0].addresses:
            told(Fault(who, "it was killed", settled), [address], 0.5)


@contextmanager
def met(num_ranks: int) -> Iterator[Ranks]:
    ranks = Ranks(num_ranks)
    try:
        yield ranks
    finally:
        ranks.lose(*range(num_ranks))


def whole(version: int) -> RankReport:
    return RankReport([HeldLayers(LAYERS, [version])], version)


def the_one(decisions: dict[int, Any]) -> Decision:
    """Return the decision of all ranks, which must be the same."""
    first, *others = decisions.values()
    assert isinstance(first, Decision), first
    assert others == [first] * len(others)
    return first


@pytest.mark.parametrize("lost", [(), (0,), (2,), (0, 1), (3, 1), (0, 1, 2)])
def test_the_ranks_that_live_agree_on_the_same_members_and_version(lost):
    with met(4) as ranks:
        ranks.lose(*lost)
        alive = [rank for rank in range(4) if rank not in lost]
        decision = the_one(ranks.agree(alive))
        assert list(decision.members) == alive
        assert decision.version == 3
        assert decision.refusal == ""


def test_the_lowest_rank_that_lives_leads_and_hosts_the_store():
    with met(3) as ranks:
        ranks.lose(0)
        decision = the_one(ranks.agree([1, 2]))
        assert [own.store is not None for own in ranks.survivors] == [False, True, False]
        store = store_at(decision.host, decision.port, 60.0)
        store.set("key", "value")
        assert ranks.survivors[1].store.get("key") == b"value"


def test_the_version_is_that_of_the_reports_of_all_ranks():
    reports = {
        0: RankReport([HeldLayers(["a"], [2, 3])], 3),
        1: RankReport([HeldLayers(["b"], [2, 3])], 3),
        2: RankReport([HeldLayers(["c"], [2])], 3),
    }
    with met(3) as ranks:
        found = ranks.all(lambda rank: ranks.survivors[rank].agree(reports[rank]))
        assert the_one(found).version == 2
    with met(3) as ranks:
        ranks.lose(2)
        assert the_one(ranks.all(lambda rank: ranks.survivors[rank].agree(reports[rank]), [0, 1])).version is None


def test_a_leader_that_ends_during_the_agreement_is_replaced():
    """Rank 0 ends once both others have reported to it."""
    with met(3) as ranks:
        asked = {1: threading.Event(), 2: threading.Event()}

        def undecided(question: dict[str, Any]) -> dict[str, Any]:
            if "rank" in question:
                asked[question["rank"]].set()
            return {"decision": None}

        ranks.alarms[0].answer_with(undecided)

        def part(rank: int) -> Any:
            if rank:
                return ranks.survivors[rank].agree(whole(3))
            assert all(event.wait(30) for event in asked.values())
            return ranks.lose(0)

        found = ranks.all(part)
        assert list(the_one({rank: found[rank] for rank in (1, 2)}).members) == [1, 2]


def test_a_rank_that_did_not_report_in_time_for_the_decision_is_told_so():
    """Rank 2 was frozen, and wakes once the others have gone on without it."""
    with met(3) as ranks:
        addresses = list(ranks.alarms[0].addresses)
        with ranks.freeze(2):
            assert list(the_one(ranks.agree([0, 1])).members) == [0, 1]
        for alarm in ranks.alarms:
            alarm._addresses = addresses
        error = ranks.agree([2])[2]
        assert isinstance(error, RankLost)
        assert str(error) == (
            "a rank that the others have given up must not go on; ranks [0, 1] go on without rank 2; end this process"
        )


def test_the_others_do_not_wait_long_for_a_rank_that_is_blamed_and_does_not_come():
    """Its alarm still answers. The time for a rank that is not blamed is longer than this test may take."""
    with met(4) as ranks:
        ranks.survivors = [ranks.survivor(alarm, timeout_s=600.0) for alarm in ranks.alarms]
        ranks.blame("rank 0, rank 3")
        ranks.lose(0)
        assert list(the_one(ranks.agree([1, 2])).members) == [1, 2]


def test_a_rank_that_is_blamed_and_comes_takes_part():
    """Its link to another rank may have been broken for a moment only."""
    with met(3) as ranks:
        ranks.blame("rank 1")
        assert list(the_one(ranks.agree()).members) == [0, 1, 2]


def test_a_rank_that_is_blamed_together_with_ranks_that_have_ended_does_not_go_on():
    with met(2) as ranks:
        ranks.blame("rank 0, rank 1")
        ranks.lose(1)
        assert isinstance(ranks.agree([0])[0], RankLost)


def test_a_rank_that_is_only_suspected_goes_on():
    """The first to notice a loss is named until the rank to blame is found. It lives."""
    with met(3) as ranks:
        ranks.blame("rank 1", settled=False)
        ranks.lose(2)
        assert list(the_one(ranks.agree([0, 1])).members) == [0, 1]


def test_a_second_attempt_gives_a_second_decision():
    with met(3) as ranks:
        first = the_one(ranks.agree(version=3))
        ranks.lose(1)
        second = the_one(ranks.agree([0, 2], version=2))
        assert (list(first.members), first.version) == ([0, 1, 2], 3)
        assert (list(second.members), second.version) == ([0, 2], 2)
        assert first.port != second.port


def test_a_decision_of_an_earlier_attempt_is_no_answer_in_a_later_one():
    """Rank 1 agrees anew before rank 0, which still knows the first decision only."""
    with met(2) as ranks:
        the_one(ranks.agree(version=3))
        asked = threading.Event()
        known = ranks.survivors[0]._known.answer

        def heard(question: dict[str, Any]) -> dict[str, Any]:
            answer = known(question)
            asked.set()
            return answer

        ranks.alarms[0].answer_with(heard)

        def part(rank: int) -> Any:
            assert rank or asked.wait(30)
            return ranks.survivors[rank].agree(whole(2))

        assert the_one(ranks.all(part)).version == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("frozen", "goes_on"), [(0, [1, 2, 3]), (3, [0, 1, 2])])
def test_a_rank_that_does_not_answer_counts_as_cut_off_and_the_larger_part_goes_on(frozen, goes_on):
    with met(4) as ranks, ranks.freeze(frozen):
        assert list(the_one(ranks.agree(goes_on)).members) == goes_on


def test_the_smaller_part_ends_because_the_others_may_live():
    with met(3) as ranks, ranks.freeze(0), ranks.freeze(2):
        error = ranks.agree([1])[1]
        assert isinstance(error, RankLost)
        assert str(error) == (
            "only the larger part of the ranks may go on, because the others may live behind a broken link; "
            "1 rank can be reached, and rank 0, rank 2 cannot; rank 1 ends; start the job again from the last "
            "checkpoint"
        )


def test_a_rank_that_has_ended_is_not_cut_off():
    with met(3) as ranks, ranks.freeze(2):
        ranks.lose(1)
        assert list(the_one(ranks.agree([0])).members) == [0]


def test_a_refusal_ends_every_rank_of_the_smaller_part():
    with met(5) as ranks, ranks.freeze(2), ranks.freeze(3), ranks.freeze(4):
        found = ranks.agree([0, 1])
        assert all(isinstance(error, RankLost) for error in found.values())
        assert "2 ranks can be reached, and rank 2, rank 3, rank 4 cannot" in str(found[1])


def test_a_leader_that_lives_and_does_not_decide_in_time_counts_as_cut_off():
    """Its program may be about to decide, so a smaller part must not go on without it."""
    with met(2) as ranks:
        ranks.survivors[1] = ranks.survivor(ranks.alarms[1], timeout_s=0.1)
        error = ranks.agree([1])[1]
        assert isinstance(error, RankLost)
        assert "1 rank can be reached, and rank 0 cannot" in str(error)


def test_ranks_that_live_and_do_not_report_in_time_count_as_cut_off():
    with met(3) as ranks:
        ranks.survivors[0] = ranks.survivor(ranks.alarms[0], timeout_s=0.1)
        error = ranks.agree([0])[0]
        assert isinstance(error, RankLost)
        assert "1 rank can be reached, and rank 1, rank 2 cannot" in str(error)


def test_a_leader_that_replaces_another_waits_for_the_reports_as_long_as_the_first(monkeypatch):
    """Rank 0 ends after 29 of 30 s; rank 2 reports to rank 1 after 31 s."""
    seconds = [0.0]
    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    with met(3) as ranks:
        first, second = threading.Event(), threading.Event()

        def asked(event: threading.Event, now_s: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
            def answer(_: dict[str, Any]) -> dict[str, Any]:
                seconds[0] = now_s
                event.set()
                return {"decision": None}

            return answer

        ranks.alarms[0].answer_with(asked(first, 29.0))
        ranks.alarms[2].answer_with(asked(second, 31.0))  # rank 1 asks rank 2 once it leads

        def part(rank: int) -> Any:
            if rank == 0:
                assert first.wait(30)
                return ranks.lose(0)
            assert rank == 1 or second.wait(30)
            return ranks.survivors[rank].agree(whole(3))

        found = ranks.all(part)
        assert list(the_one({rank: found[rank] for rank in (1, 2)}).members) == [1, 2]


@pytest.mark.parametrize("renamed", [False, True])
def test_the_ranks_to_blame_are_found_by_names_that_contain_commas(renamed):
    """Names of ranks in several replicas. Before ``rename``, the ranks may have had other names."""
    names = [f"rank {rank} (replica {rank // 2}, rank {rank % 2} of its pipeline)" for rank in range(4)]
    with met(4) as ranks:
        for alarm in ranks.alarms:
            alarm.rename(names)
            if not renamed:
                alarm._addresses = [one._replace(name=names[rank]) for rank, one in enumerate(alarm.addresses)]
        ranks.blame(f"{names[1]}, {names[3]}")
        assert [alarm.blamed for alarm in ranks.alarms] == [[1, 3]] * 4
