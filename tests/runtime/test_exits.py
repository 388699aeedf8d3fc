"""Scripts that end while a pipeline is open: the exit code is their own, and so is all that they write."""

from itertools import cycle

import pytest

from tests.support.jobs.exits import ENDS, OF_THREADS
from tests.support.run_exits import Exit, exits

pytestmark = pytest.mark.timeout(240)

OPEN = [end for end in ENDS if end != "close"]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("end", [end for end in OPEN if end != "destroy_process_group"])
def test_a_stream_under_way_in_threads_leaves_the_exit_as_it_is(end: str) -> None:
    assert exits("threads", "pipedream", end) == [Exit(ENDS[end], True, "")]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("schedule", "end"), list(zip(cycle(["pipedream", "1f1b"]), reversed(OPEN))))
def test_open_pipelines_over_a_mesh_leave_the_exit_as_it_is(schedule: str, end: str) -> None:
    """The store lies in rank 0, which may end before the others."""
    ended = exits("mesh", schedule, end)
    if end in OF_THREADS:  # the thread of one rank may print that the other rank has left
        ended = [one._replace(said="") for one in ended]
    assert ended == [Exit(ENDS[end], True, "")] * 2


@pytest.mark.exhaustive
def test_torchrun_reports_what_the_script_did() -> None:
    (whole,) = exits("torchrun", "1f1b", "sys.exit(3)")
    assert (whole.code, whole.ran) == (1, True)
    assert "-6" not in whole.said.split()
