"""Over processes, a run under changing plans has the bits of a run that never changes."""

from dataclasses import replace

import pytest

from tests.support import resumed_runs as runs
from tests.support.jobs import replanning as jobs
from tests.support.models import assert_equal_bits
from tests.support.rank_processes import Ranks
from tests.support.resumed_runs import Half

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:BatchNorm sees", "ignore:each of", "ignore:a learning rate scheduler"),
]

FOUR = [Half(2), Half(4, "zb-h1"), Half(1), Half(3, "interleaved-1f1b", checkpoint="always")]
REPLICATED = [Half(2, replicas=2), Half(1, replicas=2), Half(2, "zb-v", replicas=2, checkpoint="always")]


def check(found, due):
    """Check that all processes have the losses, and together the tensors, of a run that never changes."""
    losses, tensors = due
    together = {}
    for own_losses, own, _ in found:
        assert_equal_bits(dict(enumerate(own_losses)), dict(enumerate(losses)))
        together |= own
    assert_equal_bits(runs.whole(together), tensors)


@pytest.mark.parametrize("optimizer", ["user", "pipeline"])
def test_changes_of_schedule_ranks_and_checkpointing(ranks: Ranks, optimizer: str) -> None:
    halves = [replace(half, optimizer=optimizer) for half in FOUR]
    check(ranks.run(4, jobs.trained, halves), runs.never_stopped())


@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_replicas_change_together(ranks: Ranks, zero: int | None) -> None:
    """None: with an optimizer of the user."""
    choices = {"optimizer": "user"} if zero is None else {"optimizer": "pipeline", "zero": zero}
    halves = [replace(half, **choices) for half in REPLICATED]
    check(ranks.run(4, jobs.trained, halves), runs.never_stopped((halves[0].sums,) * 2))


def test_the_number_of_replicas_changes_with_the_same_bits(ranks: Ranks) -> None:
    """With sums in a tree."""
    halves = [Half(2, replicas=2), Half(3, "zb-h1"), Half(1, replicas=4), Half(1, replicas=2), Half(4)]
    for own in ("user", "pipeline"):
        found = ranks.run(4, jobs.trained, [replace(half, optimizer=own) for half in halves], True)
        same = ranks.run(4, jobs.trained, [Half(2, optimizer=own, replicas=2)], True)
        check(found, (same[0][0], runs.whole({name: value for one in same for name, value in one[1].items()})))


@pytest.mark.parametrize("slow", [{2: 2.0}, {1: 3.0, 2: 3.0}, {1: 50.0}])
def test_slow_processes_get_fewer_layers_or_none(ranks: Ranks, slow: dict[int, float]) -> None:
    """Rank 0 searches, also if it is slow itself. All processes know later that no process is slow any more."""
    found = ranks.run(4, jobs.with_slow_processes, slow, timeout_s=60)
    for losses, ((then, known), (_, later)) in found:
        assert_equal_bits(dict(enumerate(losses)), dict(enumerate(runs.never_stopped()[0][:6])))
        assert max(then[rank] for rank in slow) < min(then[rank] for rank in set(then) - set(slow))
        assert max(slow.values()) < 10 or not any(then[rank] for rank in slow)
        assert known.keys() == slow.keys()
        assert min(known.values()) > 1.5
        assert later == {}
    assert all(one[1] == found[0][1] for one in found)
