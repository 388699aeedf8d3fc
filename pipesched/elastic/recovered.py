"""Recovered: the outcome of a recovery."""

from dataclasses import dataclass

from pipesched.units import counted

__all__ = ["Recovered"]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The outcome of a recovery.

    Attributes:
        lost: the names of the ranks that are lost.
        rank: the new number of this process, as ``torch.distributed.get_rank()`` returns it.
        num_ranks: the number of processes that go on.
        replica: the replica to which this process belongs now.
        num_replicas: the number of replicas now.
        step: the number of steps after which the survivors went on.
        seconds: how long the recovery took, without the steps that run again.

    """

    lost: list[str]
    rank: int
    num_ranks: int
    replica: int
    num_replicas: int
    step: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{', '.join(self.lost)} lost; {counted(self.num_ranks, 'rank')} go on after "
            f"{counted(self.step, 'step')}, {self.seconds:.2f} s later; this process is rank {self.rank}"
        )
