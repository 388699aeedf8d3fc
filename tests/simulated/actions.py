"""Which action of a pipeline a thread runs, so that a violation names its rank, stage and micro-batch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pipesched.program.actions import Action
from pipesched.runtime.executors import processes, threads
from pipesched.runtime.executors.interpreter import interpret
from tests.simulated.accelerator import Accelerator

__all__ = ["ActionOfRank", "label_actions"]


class ActionOfRank(NamedTuple):
    """An action of a pipeline's rank."""

    rank: int
    action: Action

    def __str__(self) -> str:
        stage, kind, number, _ = self.action
        return f"{self.action} (stage {stage}, {kind.row.number} {number}), rank {self.rank}"


def label_actions(accelerator: Accelerator) -> None:
    """Label each thread that interprets an order with its action. The executors call the interpreter by these names."""
    works_on, ident = accelerator.judge.works_on, accelerator.backend.host_thread

    def labelled(rank: Any, *rest: Any) -> Iterator[Action]:
        for action in interpret(rank, *rest):
            works_on(ident(), ActionOfRank(rank.index, action))
            yield action
        works_on(ident(), None)

    for executor in (threads, processes):
        executor.interpret = labelled
