"""Weight versions: which version of a stage's weights each micro-batch uses, read from the program.

Version v is the weights after v updates of the stage. A micro-batch's forward and backward use one version.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program, marked_grid

__all__ = ["Uses", "check_versions", "update_groups", "used_versions"]

_NEVER = -1  # stands for the version of a micro-batch that does not visit the stage


@dataclass(frozen=True)
class Uses:
    """The version of one stage's weights that each micro-batch uses.

    used: by micro-batch. period: (micro-batches, updates) of a step, where the steps go on for ever: what follows
    repeats the last step of ``used``, as many versions later.
    """

    used: tuple[int, ...]
    period: tuple[int, int] | None = None

    def version(self, microbatch: int) -> int:
        """The version that a micro-batch uses."""
        if self.period is None or microbatch < len(self.used):
            return self.used[microbatch]
        microbatches, updates = self.period
        steps = (microbatch - len(self.used)) // microbatches + 1
        return self.used[microbatch - steps * microbatches] + steps * updates

    def users(self, version: int) -> Iterator[int]:
        """The micro-batches that use a version."""
        yield from (microbatch for microbatch, used in enumerate(self.used) if used == version)
        if self.period is None:
            return
        microbatches, updates = self.period
        first = len(self.used) - microbatches
        for microbatch in range(first, len(self.used)):
            steps, rest = divmod(version - self.used[microbatch], updates)
            if steps > 0 and not rest:
                yield microbatch + steps * microbatches


def used_versions(program: Program) -> tuple[tuple[int, ...], ...]:
    """The version that each micro-batch uses, by stage: as the program says, else the newest when its F runs."""
    found: list[tuple[int, ...]] = []
    for stage, rank in enumerate(program.placement):
        written = program.versions[stage] if program.versions else ()
        own = program.orders.rank(rank)
        own = own[own.stage == stage]
        forwards = own.are(Kind.F)
        table = np.full(program.num_microbatches, _NEVER)
        table[own.microbatch[forwards]] = np.cumsum(own.are(Kind.UPDATE))[forwards]
        found.append(written or tuple(table.tolist()))
    return tuple(found)


def update_groups(program: Program) -> tuple[tuple[int, ...], ...]:
    """The micro-batches whose gradients each update applies, ascending; validation proves them equal on all stages."""
    groups: list[tuple[int, ...]] = []
    waiting: list[int] = []
    last = program.num_stages - 1
    for action in program.orders[program.placement[last]]:
        if action.stage == last and action.kind in (Kind.B, Kind.W):
            waiting.append(action.microbatch)
        elif action.stage == last and action.kind is Kind.UPDATE:
            groups.append(tuple(sorted(waiting)))
            waiting = []
    return tuple(groups)


def check_versions(program: Program) -> None:
    """Updates follow each other, each behind the backwards of the same micro-batches on every stage, and what a
    forward uses exists.
    """
    if not program.index.has(Kind.UPDATE):
        if any(any(own) for own in program.versions):
            raise ScheduleError("versions of weights come from updates; there is no UPDATE; add some, or no versions")
        return
    if program.num_weights < program.num_stages:
        raise ScheduleError(
            f"an UPDATE changes the weights of one stage; here {program.num_stages} stages share {program.num_weights} "
            f"weight copies; update them after the step, when their gradients are summed"
        )
    models: dict[bytes, tuple[int, list[tuple[int, ...]]]] = {}
    placed = _placed(program)
    for stage, rank in enumerate(program.placement):
        groups = _updated(program, stage, placed[stage])
        model, due = models.setdefault(program.visits[stage].tobytes(), (stage, groups))
        if due != groups:
            number = next(n for n, (mine, theirs) in enumerate(zip_longest(groups, due)) if mine != theirs)
            raise ScheduleError(
                f"rank {rank}: update {number} is of the same micro-batches on every stage; stage {model} has "
                f"{_quoted(due, number)}, stage {stage} {_quoted(groups, number)}. Move {stage}UPDATE{number}."
            )
        _check_used(program, stage, placed[stage])


def _placed(program: Program) -> list[list[tuple[int, Action]]]:
    """For each stage its actions, with their positions."""
    placed: list[list[tuple[int, Action]]] = [[] for _ in program.placement]
    for order in program.orders:
        for position, action in enumerate(order):
            placed[action.stage].append((position, action))
    return placed


def _quoted(groups: list[tuple[int, ...]], number: int) -> str:
    return f"micro-batches {', '.join(map(str, groups[number]))}" if number < len(groups) else "none"


def _updated(program: Program, stage: int, own: list[tuple[int, Action]]) -> list[tuple[int, ...]]:
    """The micro-batches whose gradients each update of a stage applies. All are applied."""
    groups: list[tuple[int, ...]] = []
    open_group: list[int] = []
    rank = program.placement[stage]
    for position, action in own:
        if action.kind in (Kind.B, Kind.W):
            open_group.append(action.microbatch)
        if action.kind is Kind.UPDATE:
            if action.microbatch != len(groups) or not open_group:
                due = f"{stage}UPDATE{len(groups)}, behind a backward"
                raise ScheduleError(
                    f"rank {rank}, position {position}: updates count from 0, each behind the backwards that it "
                    f"applies; got {action}, due is {due}.\n" + marked_grid(program, {rank: position})
                )
            groups.append(tuple(sorted(open_group)))
            open_group = []
    if open_group:
        raise ScheduleError(
            f"rank {rank}: every gradient is applied by an update; none follows the backward of micro-batch "
            f"{open_group[0]} on stage {stage}. Add {stage}UPDATE{len(groups)} at the end."
        )
    return groups


def _check_used(program: Program, stage: int, own: list[tuple[int, Action]]) -> None:
    """A forward uses weights that its stage has had, and weight gradients of one version follow each other."""
    wanted = program.versions[stage] if program.versions else ()
    if wanted and len(wanted) != program.num_microbatches:
        raise ScheduleError(
            f"versions of a stage are one for each of {program.num_microbatches} micro-batches; stage {stage} has "
            f"{len(wanted)}; give as many"
        )
    newest = 0
    rank = program.placement[stage]
    for position, action in own:
        if action.kind is Kind.UPDATE:
            newest += 1
        if wanted and action.kind is Kind.F and not 0 <= wanted[action.microbatch] <= newest:
            raise ScheduleError(
                f"rank {rank}, position {position}: {action} uses the weights after {wanted[action.microbatch]} "
                f"updates, but {newest} of stage {stage} ran before it. Use an older version, or move it.\n"
                + marked_grid(program, {rank: position})
            )
