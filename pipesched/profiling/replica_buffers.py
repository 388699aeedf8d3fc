"""Replica buffers: computes the memory that a stage needs to communicate with its replicas, and the bytes it sends.

Replicas sum their gradients. If each replica updates only a part of the weights, the replicas also exchange the updated
parts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipesched.runtime.gradients.buckets import local
from pipesched.runtime.gradients.shards import Shards
from pipesched.simulation.replica_memory import CopyMemory, ReplicaMemory
from pipesched.tensors.flat_buffers import padded

__all__ = ["StageReplicas"]


@dataclass(frozen=True, kw_only=True)
class StageReplicas:
    """The parameters of a stage whose gradients are summed across replicas."""

    #: The parameters of each bucket.
    buckets: Sequence[Sequence[nn.Parameter]]
    #: The parameters whose gradients replicas sum after the run of the program.
    late: Sequence[nn.Parameter]
    num_replicas: int
    #: The parts of the weights that each replica updates; None if every replica updates all weights.
    shards: Shards | None
    #: The model states that replicas divide: 1: optimizer states; 2: also summed gradients; 3: also weights.
    zero: int
    #: The number of times that a step gathers the weights of the stage, if replicas divide them.
    num_gathers: int = 0

    def memory(self, freed: Sequence[int]) -> ReplicaMemory:
        """Return the memory that the stage needs to sum gradients and exchange weights.

        Args:
            freed: for each bucket, the bytes of activations that the last backward has freed by the time the bucket is
                complete.

        """
        gathers = self.zero == 3
        sent_late = [self.late] if gathers else [*self.buckets, self.late]
        exchanged = [size for bucket in sent_late for size in self._exchanged(bucket)]
        gathered = [size for bucket in self.buckets for size in self._exchanged(bucket)] if gathers else []
        rows = sum(gathered)
        divided = [
            p for bucket in self.buckets for p in bucket if gathers and self.shards is not None and p in self.shards
        ]
        return ReplicaMemory(
            buckets=tuple(self._copies(bucket, size) for bucket, size in zip(self.buckets, freed, strict=True)),
            late=self._copies(self.late),
            spread=(self.num_replicas + 1) * max(exchanged, default=0),
            gather=CopyMemory(rows, (self.num_replicas + 1) * max(gathered, default=0), rows),
            cut=max((self._longest([own]) * own.element_size() for own in divided), default=0),
        )

    def sent_bytes(self) -> int:
        """Return how many bytes a rank sends to other replicas in a step, for this stage's gradients and weights.

        For a buffer of b bytes, an all-to-all and an all-gather among n replicas each send b * (n - 1) / n bytes.
        """
        others = self.num_replicas - 1
        sent = 0
        for bucket in (*self.buckets, self.late):
            whole, parts = self._reduced(bucket)
            sent += 2 * others * sum(whole) // self.num_replicas
            times = self.num_gathers if self.zero == 3 and bucket is not self.late else 1
            sent += others * (sum(parts) + times * sum(self._exchanged(bucket)))
        return sent

    def _copies(self, bucket: Sequence[nn.Parameter], freed: int = 0) -> CopyMemory:
        whole, parts = self._reduced(bucket)
        replicas = self.num_replicas
        return CopyMemory(
            buffer=sum(whole) + replicas * sum(parts),
            working=max([*whole, *((replicas + 1) * part for part in parts)], default=0),
            summed=sum(whole) + sum(parts),
            kept=sum(parts),
            released=sum(self._numbers(p) * p.element_size() for p in bucket if p.requires_grad and self._divides(p)),
            freed=freed,
        )

    def _reduced(self, bucket: Sequence[nn.Parameter]) -> tuple[list[int], list[int]]:
        """Return two lists of buffer sizes in bytes for a bucket, each with one number for each dtype.

        The first list is for the buffers of parameters that are not divided among replicas. The second list is for one
        replica's part of the buffers of divided parameters. A buffer also stores, for each parameter, the number of
        replicas that have a gradient for it.
        """
        trained = [parameter for parameter in bucket if parameter.requires_grad]
        whole = []
        for own in _by_dtype(parameter for parameter in trained if not self._divides(parameter)):
            numbers = sum(map(self._numbers, own)) + len(own)
            whole.append(padded(numbers, self.num_replicas) * own[0].element_size())
        parts = [
            (self._longest(own) + len(own)) * own[0].element_size()
            for own in _by_dtype(parameter for parameter in trained if self._divides(parameter))
        ]
        return whole, parts

    def _exchanged(self, bucket: Sequence[nn.Parameter]) -> list[int]:
        """For each dtype, return how many bytes of a bucket's weights a replica sends to each other replica."""
        shards = self.shards
        gathers = self.zero == 3 and bucket is not self.late
        updated = [p for p in bucket if (p.requires_grad or gathers) and shards is not None and p in shards]
        return [self._longest(own) * own[0].element_size() for own in _by_dtype(updated)]

    def _divides(self, parameter: nn.Parameter) -> bool:
        return self.zero >= 2 and self.shards is not None and parameter in self.shards

    def _numbers(self, parameter: nn.Parameter) -> int:
        """Return how many elements of a parameter a process holds if weights are not divided."""
        if self.shards is not None and parameter in self.shards:
            return self.shards.shape(parameter).numel()
        return local(parameter).numel()

    def _longest(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return the largest number of elements of these parameters that any replica holds."""
        assert self.shards is not None
        return max(map(sum, zip(*map(self.shards.numbers, parameters), strict=True)))


def _by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())
