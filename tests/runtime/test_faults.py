"""One rank fails: the others end in time, and name it. benchmarks/faults.py runs all cases, these are some."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from pipesched.program.actions import Action, Kind
from pipesched.runtime.coordination import stuck_collectives as stuck
from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.coordination.failure_notices import Fault, told
from pipesched.runtime.coordination.rank_activity import ENDED, SILENT, Activity, State, blamed, doing_at
from pipesched.runtime.coordination.stores import StoreLostError, asked
from pipesched.runtime.executors.interpreter import Stamps
from pipesched.runtime.transport.device_channels import Channel, DeviceLinks
from tests.support.jobs.faults import Case
from tests.support.run_faults import outcomes

TIMEOUT_S = 10.0

CASES = {
    "of each sort": [
        Case("SIGSTOP", "later forward", 1),
        Case("SIGKILL", "first backward", 2),
        Case("raise", "update", 2, "rank 0"),
        Case("raise", "first backward", 3, num_ranks=4, replicas=2),
        Case("SIGKILL", "later forward", 2, num_ranks=4, replicas=2, by="replicate"),
    ],
    "more of 3 ranks": [
        Case("sys.exit(3)", "before construction", 1),
        Case("hang", "first forward", 0),
        Case("SIGSTOP", "before construction", 0, "rank 0"),
    ],
    "more of 2x2": [
        Case("SIGSTOP", "later forward", 0, "rank 0", 4, 2),
        Case("hang", "first backward", 0, num_ranks=4, replicas=2, by="replicate"),
        Case("SIGSTOP", "update", 3, num_ranks=4, replicas=2, by="zero=2"),
        Case("SIGKILL", "evaluate", 1, num_ranks=4, replicas=2, by="zero=3"),
    ],
    "saves, loads and tune": [
        Case("poll", "save", 1),
        Case("SIGKILL", "save in the background", 1),
        Case("full disk", "save in the background", 2),
        Case("spin", "set_extra_state", 0),
        Case("hang", "load", 3, num_ranks=4, replicas=2, by="zero=3"),
        Case("SIGSTOP", "save", 0, "rank 0"),
        Case("spin", "tune", 0),
        Case("SIGSTOP", "tune", 0),
    ],
    "replicas that exchange weights while another one fails": [
        Case("hang", "while measuring", 3, num_ranks=4, replicas=2, by="zero=3"),
        Case("SIGKILL", "while measuring", 3, num_ranks=4, replicas=2, by="zero=3"),
        Case("hang", "state dict", 0, num_ranks=4, replicas=2, by="replicate"),
    ],
    "planes": [
        Case("SIGKILL", "in a collective", 1, num_ranks=4, replicas=2, by="tensor"),
        Case("SIGSTOP", "in a collective", 2, num_ranks=4, replicas=2, by="tensor"),
        Case("SIGKILL", "while measuring links", 2, num_ranks=4, replicas=2, by="tensor"),
        Case("SIGSTOP", "while measuring links", 1, num_ranks=4, replicas=2, by="tensor"),
        Case("hang", "in a collective", 3, num_ranks=4, replicas=2, by="tensor"),
        Case("raise", "in a collective", 0, num_ranks=4, replicas=2, by="tensor"),
        Case("SIGKILL", "first backward", 3, num_ranks=4, replicas=2, by="tensor"),
        Case("SIGSTOP", "later forward", 0, "rank 0", 4, 2, "tensor"),
        Case("spin", "while measuring", 2, num_ranks=4, replicas=2, by="tensor"),
        Case("SIGSTOP", "later forward", 1, num_ranks=4, replicas=2, by="by hand"),
        Case("SIGKILL", "first backward", 2, num_ranks=4, replicas=2, by="by hand"),
    ],
}


@pytest.mark.one_in(15)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_survivors_end_in_time_and_name_the_rank_that_failed(cases: list[Case]) -> None:
    for outcome in outcomes(cases, TIMEOUT_S, side_by_side=3):
        assert outcome.happened, outcome
        assert (outcome.late, outcome.wrong) == ([], []), outcome
        assert outcome.survivors, outcome


# ---- who is to blame ------------------------------------------------------------------------------------------------


def state(doing: Any, seconds: float = 0.0, what: str = "1F0", last: dict[str, str] | None = None) -> State:
    return State(doing, what, "", seconds, last or {})


def test_a_rank_that_raised_is_to_blame_whatever_others_do() -> None:
    answers = {"rank 0": SILENT, "rank 1": state("works", 9), "rank 2": state("raised", what="ZeroDivisionError: x")}
    assert blamed(answers, 5) == (["rank 2"], "ZeroDivisionError: x")


def test_ranks_that_do_not_answer_are_to_blame_with_the_last_that_came_from_them() -> None:
    answers = {"rank 0": state("waits", last={"rank 1": "1F3"}), "rank 1": SILENT}
    names, why = blamed(answers, 5) or ([], "")
    assert (names, why) == (
        ["rank 1"],
        "it does not answer, so its process is stopped or cannot be reached; its last message came from action 1F3",
    )
    names, why = blamed({**answers, "rank 2": ENDED}, 5) or ([], "")
    assert names == ["rank 1", "rank 2"]
    assert "rank 2: its process has exited, or it has left the pipeline; it has sent no message in this call" in why


def test_the_rank_that_computes_for_the_longest_time_is_blamed() -> None:
    answers = {"rank 0": state("waits", 5), "rank 1": state("works", 5.1), "rank 2": state("works", 0.1)}
    assert blamed(answers, 5) == (["rank 1"], "it has been in 1F0 for 5.1 s")
    assert blamed({**answers, "rank 1": state("collective", 5.1)}, 5) is None


def state_in(call: Callable[[Callable[[], Any]], Any]) -> State:
    """The state of a rank whose thread runs ``call``, as soon as that has called the function that it is given."""
    activity, barrier = Activity(["rank 0"]), threading.Barrier(2)

    def run() -> None:
        activity.begin("a step")
        call(barrier.wait)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not barrier.n_waiting:
        assert thread.is_alive()
    told = activity.state()
    barrier.wait()
    thread.join()
    return told


def test_the_position_of_a_ranks_thread_shows_whether_it_works_or_waits() -> None:
    def layer(wait: Callable[[], Any]) -> None:
        wait()

    working, waiting = state_in(layer), state_in(lambda wait: asked(wait, 60))
    assert (working.doing, working.what, working.place.endswith(" in layer")) == ("works", "a step", True)
    assert waiting.doing == "waits"


def test_a_rank_whose_device_waits_for_another_is_not_at_work() -> None:
    """While the first use of a link waits for its other end, and while posted transfers end."""

    def links(connect: Callable[[], Any], drain: Callable[[], Any]) -> DeviceLinks:
        link = SimpleNamespace(connect=connect, drain=drain)
        maker: Any = SimpleNamespace(device=torch.device("cpu"), begin=None, link=lambda store, sends: link)
        made = DeviceLinks(maker, distributed.HashStore(), 0)
        made.connect([Channel(0, 1, backward=False)])
        return made

    connecting, draining = state_in(lambda wait: links(wait, int)), state_in(lambda wait: links(int, wait).drain())
    assert connecting[:3] == draining[:3] == ("waits", "a step", "")


def test_a_rank_whose_receive_has_failed_is_not_at_work() -> None:
    """Its thread then releases the run, and the alarm still sees the action that waited."""
    activity, order = Activity(["rank 0", "rank 1"]), (Action(0, Kind.RECV_B, 0, 1), Action(0, Kind.B, 0))
    stamps = Stamps.room_for(order)
    activity.begin("a step")
    activity.run(stamps, (0, 1))
    stamps.starts[0] = time.perf_counter()
    with ThreadPoolExecutor(1) as alarm:  # another thread reads the state, as the alarm's thread does
        activity.fail("waits", "a connection was lost")
        assert alarm.submit(activity.state).result()[:3] == ("waits", "0RECV_B0<1 (stage 0, micro-batch 0)", "")
        activity.begin("a step")
        stamps.ends[0] = stamps.starts[1] = time.perf_counter()
        assert alarm.submit(activity.state).result()[:2] == ("works", "0B0 (stage 0, micro-batch 0)")


def test_an_error_is_of_a_collective_where_torch_raises_it_within_one() -> None:
    def by(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return doing_at(error)
        return "nothing"

    class Hook(torch.nn.Module):
        def forward(self) -> None:
            raise ValueError("of the user's own")

    assert by(lambda: distributed.get_process_group_ranks(object())) == "collective"
    assert by(lambda: torch.zeros(2).view(3)) == "raised"
    assert by(Hook()) == "raised"


class _Group:
    """The parts of a process group that an alarm uses."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.timeout(60)
def test_a_stranger_neither_raises_nor_delays_an_alarm() -> None:
    """Neither what it says, nor that it says nothing, nor half of a message."""
    import socket

    store = distributed.HashStore()
    alarms: list[Alarm] = []

    def make(rank: int) -> None:
        alarm = Alarm(_Group(rank, 2), ["rank 0", "rank 1"], "127.0.0.1", 30.0)
        alarm.meet(store)
        alarms.append(alarm)

    makers = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    alarms.sort(key=lambda alarm: alarm.rank)
    _, _, host, port, word = json.loads(store.get("alarm/1"))
    said = [b"", b"x", b"\n", b"y" * 32 + b'["rank 0", "lies", true]\n', word[:8].encode(), bytes(1 << 17)]
    strangers = [socket.create_connection((host, port)) for _ in said]
    for stranger, text in zip(strangers, said, strict=True):
        try:
            stranger.sendall(text)
        except ConnectionError:
            assert len(text) > 1 << 16
    assert alarms[0].ring("it failed", "raised") == Fault("rank 0", "it failed", True)
    assert alarms[1].bell.rung
    assert alarms[1].ring("lost", "waits") == Fault("rank 0", "it failed", True)
    for end in (*alarms, *strangers):
        getattr(end, "end", getattr(end, "close", None))()


def test_a_lost_store_is_to_blame_before_ranks_of_other_pipelines_that_have_ended() -> None:
    """Those ranks may have ended because they noticed the loss earlier."""

    def lost(*_: Any) -> Any:
        raise distributed.DistNetworkError("Broken pipe")

    alarm = Alarm(_Group(0, 1), ["rank 2"], "127.0.0.1", 30.0)
    alarm._job = SimpleNamespace(add=lost, check=lost)  # type: ignore[assignment]
    alarm._elsewhere = {1: alarm._own._replace(name="rank 1", rank=1, port=1)}  # nothing listens at this port
    assert alarm.ring("a connection was lost", "waits").who == "rank 0"
    alarm.end()


def test_a_stranger_at_the_port_of_a_closed_pipeline_puts_no_blame_on_its_rank() -> None:
    """The operating system gives the port of a closed pipeline to another process, which accepts and says nothing."""
    import socket

    job = distributed.HashStore()
    alarm = Alarm(_Group(0, 1), ["rank 2"], "127.0.0.1", 30.0)
    alarm.activity.end()
    alarm._job = job
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        there = alarm._own._replace(name="rank 1", rank=1, port=stranger.getsockname()[1])
        alarm._elsewhere = {1: there}
        job.set("pipesched/alarms/1/signed off", "")
        assert alarm.ring("no data arrived", "waits").who == "rank 2"
        answers = told(Fault("rank 2", "", False), [alarm._own, there._replace(name="rank 2")], 0.2)
        assert isinstance(answers["rank 2"], State), "a rank that answers at one of its addresses is alive"
    alarm.end()


def test_a_store_that_does_not_answer_is_an_error_after_the_timeout() -> None:
    silent = threading.Event()
    with pytest.raises(StoreLostError, match=r"rank 0 failed: .* the store .*, .* store did not answer within 0\.1 s"):
        asked(silent.wait, 0.1)
    silent.set()
    assert asked(lambda: 3, 60) == 3


def test_a_request_to_the_store_ends_when_a_rank_has_failed() -> None:
    silent, given_up = threading.Event(), threading.Event()
    given_up.set()
    with pytest.raises(RuntimeError, match="Connection closed: a rank has failed"):
        asked(silent.wait, 60, given_up)
    silent.set()
    assert asked(lambda: 3, 60, given_up) == 3


# ---- ranks that are stuck in a collective ---------------------------------------------------------------------------


class _InCollective(Activity):
    """Of a rank that is in a collective, and remains there."""

    def doing(self) -> Any:
        return "collective", ""

    def innermost(self) -> tuple[int, int]:
        return 1, 1


@pytest.mark.parametrize("setting", ["", "0"])
def test_a_stuck_rank_aborts_its_nccl_groups_and_then_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    now, ended, aborted = [100.0], [], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stuck, "_abort_nccl_groups", lambda: not aborted.append(now[0]))
    monkeypatch.setattr(stuck.os, "_exit", ended.append)
    monkeypatch.setenv("PIPESCHED_END_STUCK_RANKS", setting)
    activity = _InCollective(["rank 0"])
    activity.begin("a step")
    looks = stuck.Stuck(activity)
    while not ended and now[0] < 120:
        now[0] += 0.25
        looks.look("rank 0", "rank 1 failed: it raised")
    assert aborted == [102.0]
    assert (ended, now[0]) == (([], 120.0) if setting == "0" else ([1], 103.0))
    assert ("rank 1 failed: it raised; rank 0 is stuck in a collective" in capsys.readouterr().err) == bool(ended)


def test_only_nccl_groups_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    groups = {Group(): "nccl", Group(): "gloo", Group(): "cpu:gloo,cuda:nccl"}
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", groups.__getitem__)
    monkeypatch.setattr(stuck, "process_groups", lambda: [*groups])
    assert stuck._abort_nccl_groups()
    assert [group.aborted for group in groups] == [True, False, True]
