"""The memory tracker counts the memory that this process holds."""

import pytest

from tests.support.jobs import ledger as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


def test_only_the_shard_of_a_sharded_tensor_is_counted(ranks: Ranks) -> None:
    shard = 8 * 4 * 4 // 2
    assert ranks.run(2, jobs.counts_shards) == [(shard, 2 * shard)] * 2
