"""Replicas: the predicted memory against the bytes that ranks hold, and the bytes sent against those predicted."""

import pytest

from tests.support.jobs import replica_memory
from tests.support.jobs.replica_memory import Case, adam, sgd
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "cases",
    [
        [Case((2, 2), "1f1b", adam, 1), Case((2, 2), "zb-v", sgd, 2), Case((2, 2), "interleaved-1f1b", None, 0)],
        [Case((4, 1), "1f1b", adam, 2), Case((4, 1), "zb-h1", sgd, 1)],
        [Case((2, 2), "1f1b", adam, 1, replica_memory.TIED), Case((2, 2), "chimera", None, 0)],
    ],
)
def test_ranks_hold_and_send_what_was_predicted(ranks: Ranks, cases: list[Case]):
    for founds in ranks.run(4, replica_memory.compare, cases):
        for case, found in zip(cases, founds, strict=True):
            assert 1 <= found.ratio <= 1.1, (case, found)
            assert found.sent == found.predicted_sent > 0, (case, found)
