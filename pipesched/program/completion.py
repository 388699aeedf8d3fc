"""Completion: the actions that a run adds to a schedule's program, and the passes that add these actions.

A schedule orders forwards and backwards. A run also recomputes, offloads, updates weights, exchanges data with other
replicas and keeps copies of stages. Everything that simulates, searches, proves, draws, exports or runs a program
completes it with `Completion`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pipesched.program.checkpoint_options import Checkpoint, CheckpointMode, offloading
from pipesched.program.lowering import (
    add_gathers,
    add_norms,
    add_offloading,
    add_recompute,
    add_reductions,
    add_redundancy,
    add_updates,
    lower,
)
from pipesched.program.program import Program

__all__ = ["UNCHANGED", "Completion"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The kinds of actions that a run adds to the program of a schedule.

    ::

        Completion(updates=True, recompute="always").complete(schedules.get("1f1b").program(4, 8))

    Attributes:
        updates: whether a step updates the weights. Default: False.
        norms: whether the updates of a step wait for the norm of all gradients. Default: False.
        buckets: for each stage, the number of buckets of gradients that replicas sum. Default: (), a single replica.
        gather_once: whether a step gathers the weights of a stage only once. If False, it gathers them again after
            other stages of the rank have run. Default: None, replicas do not divide the weights.
        recompute: the (stage, micro-batch) pairs whose activations an R recomputes. Default: "never".
        offloaded: the stages that copy activations to the host. Default: none.
        redundancy: whether another rank keeps a copy of each stage up to date, and each rank its state before the
            step. With buckets, the replicas are the copies. Without updates, nothing is added. Default: False.

    """

    updates: bool = False
    norms: bool = False
    buckets: tuple[int, ...] = ()
    gather_once: bool | None = None
    recompute: CheckpointMode = "never"
    offloaded: frozenset[int] = frozenset()
    redundancy: bool = False

    def treating(self, checkpoint: Checkpoint, stages: Iterable[Iterable[str]] = ()) -> "Completion":
        """Return a copy with the recomputes and offloads that an option ``checkpoint`` asks for.

        ``stages`` holds the layers of each stage, which the option may name.
        """
        recompute = checkpoint if isinstance(checkpoint, str) else "never"  # layers recompute inside their backward
        return replace(self, recompute=recompute, offloaded=offloading(checkpoint, stages))

    def complete(self, program: Program) -> Program:
        """Return the program with all actions that a run adds, except messages between ranks."""
        for add in _PASSES:
            program = add(program, self)
        return program

    def lower(self, program: Program) -> Program:
        """Return the program with all actions that a run adds, including messages between ranks."""
        return lower(self.complete(program))


#: Adds no action to a program.
UNCHANGED = Completion()


def _updates(program: Program, own: Completion) -> Program:
    return add_updates(program) if own.updates else program


def _norms(program: Program, own: Completion) -> Program:
    return add_norms(program) if own.norms else program


def _reductions(program: Program, own: Completion) -> Program:
    return add_reductions(program, own.buckets) if own.buckets else program


def _gathers(program: Program, own: Completion) -> Program:
    if own.gather_once is None:
        return program
    stages = [stage for stage, count in enumerate(own.buckets) if count]
    return add_gathers(program, keep=own.gather_once, stages=stages)


def _recomputes(program: Program, own: Completion) -> Program:
    return add_recompute(program, own.recompute)


def _offloads(program: Program, own: Completion) -> Program:
    return add_offloading(program, own.offloaded)


def _redundancy(program: Program, own: Completion) -> Program:
    return add_redundancy(program, replicas=any(own.buckets)) if own.redundancy else program


#: The passes, in the order in which they run. A pass finds the actions that it refers to wherever earlier passes put
#: them: a NORM moves behind the REDUCEs that are added after it, and an OFFLOAD spares what an R recomputes.
_PASSES: tuple[Callable[[Program, Completion], Program], ...] = (
    _updates,
    _norms,
    _reductions,
    _gathers,
    _recomputes,
    _offloads,
    _redundancy,
)
