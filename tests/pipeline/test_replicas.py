"""Replicas of a pipeline train as one plain loop over the micro-batches of all of them."""

import pytest

from tests.support.jobs import replicas as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "case",
    [
        jobs.Case("plain", (2, 2), "zb-h1", True, "all"),
        jobs.Case("tied", (2, 2), "interleaved-1f1b", True, "first"),
        jobs.Case("tied", (2, 2), "chimera", False, "all"),
        jobs.Case("plain", (4, 1), "dualpipe-v", False, "first"),
    ],
    ids=str,
)
def test_losses_gradients_weights_and_buffers_are_those_of_the_loop(ranks: Ranks, case: jobs.Case) -> None:
    """benchmarks/replicas.py runs all cases."""
    results = ranks.run(4, jobs.trained, case)
    assert jobs.differing(case, results) == []
    assert all(own.num_reductions for own in results) == (case.schedule != "chimera")  # whose sums come after the run
