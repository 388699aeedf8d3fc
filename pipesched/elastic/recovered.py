"""Recovered: the outcome of a recovery."""

from dataclasses import dataclass

from pipesched.units import counted

__all__ = ["Recovered"]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The outcome of a recovery, or of a change of the ranks because others have joined.

    Attributes:
        lost: the names of the ranks that are lost.
        joined: the number of processes that have joined.
        rank: the new number of this process, as ``torch.distributed.get_rank()`` returns it.
        num_ranks: the number of processes that go on.
        replica: the replica to which this process belongs now.
        num_replicas: the number of replicas now.
        step: the number of steps after which the survivors went on.
        seconds: how long the recovery took, without the steps that run again.

    """

    lost: list[str]
    joined: int = 0
    rank: int
    num_ranks: int
    replica: int
    num_replicas: int
    step: int
    seconds: float

    def __str__(self) -> str:
        changes = [f"{', '.join(self.lost)} lost"] * bool(self.lost)
        changes += [f"{counted(self.joined, 'rank')} joined"] * bool(self.joined)
        return (
            f"{' and '.join(changes) or 'no rank lost'}; {counted(self.num_ranks, 'rank')} go on after "
            f"{counted(self.step, 'step')}, {self.seconds:.2f} s later; this process is rank {self.rank}"
        )
