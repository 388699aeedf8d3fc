"""Replicas: the predicted memory against the bytes that ranks hold, and the bytes sent against those predicted."""

import pytest

from tests.support.jobs import replica_memory
from tests.support.jobs.replica_memory import FEW, TIED, Case, adam, sgd
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(120)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 2), "1f1b", adam, 1, TIED),
        Case((2, 2), "zb-v", sgd, 2, FEW),
        Case((2, 2), "chimera", None, 0, FEW),
        Case((4, 1), "1f1b", adam, 2, FEW),
        Case((2, 2), "zb-h1", adam, 3, FEW),
        Case((2, 2), "interleaved-1f1b", adam, 3, gather_once=False, num_chunks=4),
        Case((2, 2), "zb-v", adam, 3, FEW, gather_once=False),
    ],
)
def test_ranks_hold_and_send_what_was_predicted(ranks: Ranks, case: Case):
    for found in ranks.run(4, replica_memory.compare, case, timeout_s=100):
        assert 1 <= found.ratio <= 1.1, (case, found)
        assert found.sent == found.predicted_sent > 0, (case, found)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dims", [(2, 2), (4, 1)])
def test_a_search_counts_the_sums_and_the_divided_states(ranks: Ranks, dims: tuple[int, int], zero: int):
    for share in ranks.run(4, replica_memory.searched, Case(dims, "1f1b", adam, zero, FEW), timeout_s=100):
        assert 1 <= share <= 1.2, share  # it takes no account of activations that the last backward has freed
