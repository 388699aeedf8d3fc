"""Jobs of the tests of the memory tracker."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pipesched.tensors.memory_tracker import Ledger


def counts_shards(group: Any) -> tuple[int, int]:
    """Return the bytes that a ledger counts for a sharded tensor of 8 x 4 floats, and for two such tensors."""
    mesh = init_device_mesh("cpu", (group.size(),))
    ledger = Ledger()
    whole = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    ledger.add([whole])
    before = ledger.bytes
    with ledger.watching():
        twice = whole * 2
    after = ledger.bytes
    del twice
    assert ledger.bytes == before
    return before, after
