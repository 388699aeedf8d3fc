"""Replica sum: adds tensors of several processes in a fixed order, so that all processes get bit-identical sums.

Each process receives one shard of the tensor from every replica, adds the shards in replica order or in a binary tree
over the replicas, and sends the sum back. The reduce-scatter or all-reduce of a library would send the same number of
bytes, but would add in an order that depends on the number of bytes and the topology.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed

from pipesched.devices.streams import used_here
from pipesched.errors import ModelTypeError
from pipesched.parallel.process_groups import own_group
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.reductions.collective_lane import CollectiveLane, LaneJob
from pipesched.tensors.flat_buffers import free, padded, places

__all__ = ["ReplicaGroup", "ReplicaSums"]

#: The all-gather into one tensor, under its name in torch 2.13 or its earlier name.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class ReplicaGroup:
    """The processes of all replicas that hold the same stages.

    All methods that send tensors are collective over these processes. The constructor is collective over the processes
    of all groups.

    Args:
        groups: the global ranks of every group of processes in the mesh that hold the same stages. Each group is in
            replica order.
        timeout_s: how long a process waits for another process, in seconds.
        reduction_order: the order in which tensors of the replicas are added.

    """

    def __init__(
        self, groups: Sequence[Sequence[int]], timeout_s: float, reduction_order: ReductionOrder = "sequential"
    ) -> None:
        self._reduction_order = reduction_order
        ranks = next(ranks for ranks in groups if distributed.get_rank() in ranks)
        #: The global ranks of the group, in replica order.
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self._first = ranks[0]
        self._group: Any = own_group(groups, timeout_s, new=True)
        members = distributed.get_process_group_ranks(self._group)
        #: The replica of each member of the group.
        self._replicas = [list(ranks).index(rank) for rank in members]
        self._replica = list(ranks).index(distributed.get_rank())

    def length(self, numbers: int) -> int:
        """Return the length of a buffer for ``numbers`` elements: ``numbers``, rounded up to a multiple of ``size``."""
        return padded(numbers, self.size)

    @torch.no_grad()
    def add(self, buffer: Tensor) -> None:
        """Replace a flat buffer with the sum of the replicas' buffers. Blocks the thread."""
        used_here(buffer)  # a failed step frees it without waiting
        total = self._sum_of_own(buffer)
        _all_gather(buffer, total, group=self._group)
        free(total)

    @torch.no_grad()
    def scatter(self, buffer: Tensor) -> Tensor:
        """Sum this replica's row over the buffers of all replicas, and return the sum. Blocks the thread.

        ``buffer`` has a row for each replica. This method frees the memory of ``buffer``.
        """
        used_here(buffer)  # may be freed here, on another stream than its own
        in_order = self._replicas == sorted(self._replicas)
        sent = buffer if in_order else buffer[self._replicas]
        total = self._sum_of_own(sent.view(-1))
        free(sent)
        free(buffer)
        own = total.clone()
        free(total)
        return own

    def _sum_of_own(self, buffer: Tensor) -> Tensor:
        """Send each replica its shard of ``buffer``; return the sum of the shards sent to this replica.

        ``buffer`` contains one shard for each replica, in the order of the group. The sum is a view of a new buffer.
        """
        shards = torch.empty_like(buffer)
        distributed.all_to_all_single(shards, buffer, group=self._group)
        of_member = dict(zip(self._replicas, shards.view(self.size, -1), strict=True))
        sums: list[Tensor] = [of_member[replica] for replica in range(self.size)]
        if self._reduction_order == "tree":  # the number of replicas is a power of two
            while len(sums) > 1:
                sums = [one.add_(other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
        for following in sums[1:]:
            sums[0].add_(following)
        return sums[0]

    @torch.no_grad()
    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Copy the tensors in ``parts[i]``, all of one dtype, from replica i to the others. Blocks the thread."""
        for tensor in chain(*parts):
            used_here(tensor)  # a failed step frees it without waiting
        own = parts[self._replica]
        length = max(sum(tensor.numel() for tensor in tensors) for tensors in parts)
        like = next(tensor for tensors in parts for tensor in tensors)
        sent = like.new_empty(length)
        for tensor, place in places(own, sent):
            place.copy_(tensor)
        received = like.new_empty(self.size * length)
        _all_gather(received, sent, group=self._group)
        for replica, buffer in zip(self._replicas, received.view(self.size, length), strict=True):
            if replica != self._replica:
                for tensor, place in places(parts[replica], buffer):
                    tensor.copy_(place)
        free(sent)
        free(received)

    @torch.no_grad()
    def copy_from_first(self, tensor: Tensor) -> None:
        """Replace a tensor with the tensor of the group's first process. Blocks the thread."""
        flat = tensor.detach().flatten().contiguous()
        distributed.broadcast(flat.view(torch.uint8), src=self._first, group=self._group)  # as bytes, for any dtype
        tensor.copy_(flat.view(tensor.shape))

    def close(self) -> None:
        """Release the group's connections."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None


class ReplicaSums:
    """Sums buffers over replicas in the collective lane of this rank.

    Args:
        group: the processes of all replicas that hold the same stages.
        shards: the processes that hold the same shards of these stages; ``group`` if the weights are not sharded.
        lane: runs the sums.
        check: raises an exception if another rank has failed; called while waiting for a sum.

    """

    def __init__(
        self, group: ReplicaGroup, shards: ReplicaGroup, lane: CollectiveLane, check: Callable[[], None]
    ) -> None:
        self.length = group.length
        self.check = check
        self._group = group
        self._shards = shards
        self._lane = lane

    def is_sharded(self, name: str, parameter: Tensor) -> bool:
        """Return whether a parameter is sharded over the mesh dimension to which ``axes`` maps "shard".

        Raises ModelTypeError if the parameter is sharded over another dimension.
        """
        mesh = getattr(parameter, "device_mesh", None)
        own = distributed.get_rank()
        holders = set() if mesh is None else {*mesh.mesh.flatten().tolist()} & {*self._group.ranks}
        if holders <= {own}:
            return False
        num_shards = self._group.size // self._shards.size
        first = self._group.ranks.index(own) // num_shards * num_shards
        due = {*self._group.ranks[first : first + num_shards]}
        if holders != due:
            raise ModelTypeError(
                f"wrap= may divide weights among replicas only over the mesh dimension to which axes= maps 'shard'; "
                f"parameter {name!r} is divided among global ranks {sorted(holders)}, but the ranks of that dimension "
                f"are {sorted(due)}; for example, pass axes={{'pipeline': 'pp', 'shard': 'fsdp'}} and "
                f"fully_shard(..., mesh=mesh['fsdp'])"
            )
        return True

    def start(self, buffers: Sequence[Tensor], *, of_shards: bool = False) -> LaneJob:
        """Start replacing buffers with their sums over replicas, and return the Ticket of this job.

        If ``of_shards`` is True, each sum includes only the replicas that hold the same shards.
        """
        group = self._shards if of_shards else self._group
        return self._lane.start(partial(_each, group.add, buffers))

    def scatter(self, buffers: list[Tensor]) -> LaneJob:
        """Start a reduce-scatter of buffers that have one row per replica.

        Each buffer is replaced with this replica's row, summed over the buffers of all replicas.
        """
        scatter = self._group.scatter

        def run() -> None:
            for place, buffer in enumerate(buffers):
                buffers[place] = scatter(buffer)

        return self._lane.start(run)

    def any(self, flag: Tensor) -> Tensor:
        """Return whether a 0-d flag is set in any replica. Waits for all replicas."""
        buffer = flag.new_zeros(self.length(1), dtype=torch.float32)
        buffer[0] = flag
        self.start([buffer]).wait(self.check)
        return buffer[0] > 0

    def copy_from_first(self, tensors: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Copy ``tensors`` and ``shards`` from the first replica that holds each tensor. Waits for the copies."""
        copy = self._group.copy_from_first
        copy_shard = self._shards.copy_from_first

        def run() -> None:
            _each(copy, tensors)
            _each(copy_shard, shards)

        self._lane.start(run).wait(self.check)

    def spread(self, parts: Sequence[Sequence[Sequence[Tensor]]]) -> LaneJob:
        """Start copying tensors between replicas. Replica i sends list i of each entry of ``parts`` to all others."""
        return self._lane.start(partial(_each, self._group.spread, parts))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor that each replica passes, in replica order. Waits for all replicas."""
        every = [tensor.clone() for _ in range(self._group.size)]
        self.spread([[[one] for one in every]]).wait(self.check)
        return every

    def close(self) -> None:
        """Close the lane, and release the connections of the groups."""
        self._lane.close()
        self._group.close()
        self._shards.close()


def _each(run: Callable[[Any], None], items: Iterable[Any]) -> None:
    for item in items:
        run(item)
