"""A rank is lost: the others go on, with the same bits. benchmarks/losses.py runs all cases, these are some."""

from typing import Any

import pytest

from tests.support.jobs.losses import LossCase
from tests.support.rank_processes import FORKED
from tests.support.run_losses import LossOutcome, Undisturbed, kind_of, outcome, undisturbed_run

TIMEOUT_S = 20.0  # only ranks that are frozen or cut off are noticed by it
SHORT_S = 4.0

QUICK = [
    LossCase("SIGKILL", "F", 1, "env://"),
    LossCase("SIGKILL", "update", 0),
    LossCase("SIGKILL", "copy", 2, "of its own"),
    LossCase("SIGKILL", "W", 3),
    LossCase("SIGKILL", "save", 0),
    LossCase("SIGSTOP", "save", 0),
    LossCase("os._exit(0)", "between steps", 3),
    LossCase("raise", "B", 2),
    LossCase("sys.exit(3)", "copy sent", 1),
    LossCase("link, alarms too", "copy", 2),
    LossCase("SIGKILL", "B", 0, second=2, second_moment="again"),
    LossCase("SIGKILL", "F", 0, num_ranks=2),
    LossCase("SIGKILL", "update", 3, replicas=2),
    LossCase("SIGKILL", "B", 0, inputs="first"),
]
MORE = [
    LossCase("SIGKILL", "between steps", 0, inputs="first", second=2, second_moment="again"),
    LossCase("SIGKILL", "between steps", 0, inputs="first"),
    LossCase("SIGKILL", "copy", 1, inputs="first"),
    LossCase("SIGKILL", "F", 3, inputs="first"),
    LossCase("SIGKILL", "F", 0, num_ranks=2, inputs="first"),
    LossCase("SIGKILL", "B", 0, replicas=2, inputs="first"),
    LossCase("SIGKILL", "update", 3, replicas=2, inputs="first"),
    LossCase("SIGKILL", "between steps", 0, second=2, second_moment="between steps"),
    LossCase("SIGKILL", "B", 2, second=0, second_moment="agreeing"),
    LossCase("SIGKILL", "copy sent", 3),
    LossCase("SIGSTOP", "F", 1),
    LossCase("SIGSTOP", "F", 0, num_ranks=2),
    LossCase("SIGSTOP", "update", 1, num_ranks=2),
    LossCase("os._exit(0)", "copy", 0, "env://"),
    LossCase("link", "B", 3),
    LossCase("link, alarms too", "F", 1),
    LossCase("link, alarms too", "replan", 0),
    LossCase("SIGKILL", "between steps", 0, replicas=2),
    LossCase("SIGKILL", "B", 0, replicas=2),
    LossCase("SIGKILL", "B", 2, second=1, second_moment="again", replicas=2),
]


def name(case: LossCase) -> str:
    return ", ".join(str(value) for value in case if value not in (None, "", 1) or value is case.rank)


@pytest.mark.one_in(24)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", QUICK, ids=name)
def test_the_ranks_that_live_go_on_with_the_same_bits(case: LossCase) -> None:
    check(case)


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", MORE, ids=name)
def test_the_ranks_that_live_go_on_with_the_same_bits_after_more_losses(case: LossCase) -> None:
    check(case)


def check(case: LossCase) -> None:
    timeout_s = SHORT_S if case.fault == "SIGSTOP" else TIMEOUT_S
    found: LossOutcome = in_process(outcome, case, timeout_s, undisturbed(kind_of(case), case))
    assert not found.wrong, found
    assert found.recovered == found.expected, found


_known: dict[Any, Undisturbed] = {}


def undisturbed(kind: Any, case: LossCase) -> Undisturbed:
    if kind not in _known:
        _known[kind] = in_process(undisturbed_run, case, TIMEOUT_S)
    return _known[kind]


def in_process(call: Any, *args: Any) -> Any:
    """Return the result of a function in a process of its own, which forks ranks."""
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=_send, args=(there, call, *args))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def _send(pipe: Any, call: Any, *args: Any) -> None:
    pipe.send(call(*args))
