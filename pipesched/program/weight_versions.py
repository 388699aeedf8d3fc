"""Weight versions: the version of a stage's weights that each micro-batch uses, derived from the program.

Version v contains the weights after v updates of the stage. The forward and the backward of a micro-batch use the same
version.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program, marked_grid
from pipesched.units import counted

__all__ = ["Uses", "check_versions", "update_groups", "used_versions"]

_NEVER = -1  # the version of a micro-batch that does not visit the stage


@dataclass(frozen=True)
class Uses:
    """The version of one stage's weights that each micro-batch uses."""

    #: The version that each micro-batch uses, indexed by micro-batch.
    used: tuple[int, ...]
    #: (micro-batches per step, updates per step) if steps repeat without end: later steps repeat the versions of the
    #: last step in ``used``, each increased by the number of updates in between. None if no later steps follow.
    period: tuple[int, int] | None = None

    def version(self, microbatch: int) -> int:
        """Return the version that a micro-batch uses."""
        if self.period is None or microbatch < len(self.used):
            return self.used[microbatch]
        microbatches, updates = self.period
        steps = (microbatch - len(self.used)) // microbatches + 1
        return self.used[microbatch - steps * microbatches] + steps * updates

    def users(self, version: int) -> Iterator[int]:
        """Yield the micro-batches that use a version."""
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
    """Return, for each stage, the weight version that each micro-batch uses.

    It is the version set in the program or, by default, the newest version when the micro-batch's F runs.
    """
    of_stages: list[tuple[int, ...]] = []
    for stage, rank in enumerate(program.placement):
        written = program.versions[stage] if program.versions else ()
        actions = program.orders.rank(rank)
        actions = actions[actions.stage == stage]
        forwards = actions.are(Kind.F)
        table = np.full(program.num_microbatches, _NEVER)
        table[actions.microbatch[forwards]] = np.cumsum(actions.are(Kind.UPDATE))[forwards]
        of_stages.append(written or tuple(table.tolist()))
    return tuple(of_stages)


def update_groups(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return, for each update of the last stage, the micro-batches whose gradients the update applies, ascending.

    In a valid program, all stages have the same groups.
    """
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
    """Check the updates and the weight versions of a program.

    Updates must be in order and apply the gradients of the same micro-batches on every stage. Every version must exist
    before its first use. Raises ScheduleError.
    """
    if not program.index.has(Kind.UPDATE):
        if program.has_norms:
            raise ScheduleError(
                "a NORM needs an UPDATE that uses it; the program has no UPDATE; add updates, or remove the NORM"
            )
        if any(any(own) for own in program.versions):
            raise ScheduleError(
                "weight versions require updates; this program has no UPDATE; add updates, or remove the weight "
                "versions"
            )
        return
    if program.num_weights < program.num_stages:
        raise ScheduleError(
            f"an UPDATE may only change the weights of one stage; this program has "
            f"{counted(program.num_stages, 'stage')} but {counted(program.num_weights, 'set')} of weights; remove the "
            f"UPDATEs, and update the shared weights after the step"
        )
    models: dict[bytes, tuple[int, list[tuple[int, ...]]]] = {}
    placed = _placed(program)
    for stage, rank in enumerate(program.placement):
        groups = _updated(program, stage, placed[stage])
        model, due = models.setdefault(program.visits[stage].tobytes(), (stage, groups))
        if due != groups:
            number = next(n for n, (mine, theirs) in enumerate(zip_longest(groups, due)) if mine != theirs)
            raise ScheduleError(
                f"rank {rank}: update {number} must apply the gradients of the same micro-batches on every stage; it "
                f"applies the gradients of {_quoted(due, number)} on stage {model}, but those of "
                f"{_quoted(groups, number)} on stage {stage}. Place {stage}UPDATE{number} directly after the backward "
                f"of {_quoted(due, number)} on stage {stage}."
            )
        _check_used(program, stage, placed[stage])


def _placed(program: Program) -> list[list[tuple[int, Action]]]:
    """Return, for each stage, the stage's actions in order, each with its position in the rank's order."""
    placed: list[list[tuple[int, Action]]] = [[] for _ in program.placement]
    for order in program.orders:
        for position, action in enumerate(order):
            placed[action.stage].append((position, action))
    return placed


def _quoted(groups: list[tuple[int, ...]], number: int) -> str:
    group = groups[number] if number < len(groups) else ()
    return f"micro-batch{'es' * (len(group) > 1)} {', '.join(map(str, group))}" if group else "no micro-batch"


def _updated(program: Program, stage: int, actions: list[tuple[int, Action]]) -> list[tuple[int, ...]]:
    """Return, for each update of a stage, the micro-batches whose gradients the update applies.

    Raises ScheduleError if an update has the wrong number or applies no gradient, or if a gradient is never applied.
    """
    groups: list[tuple[int, ...]] = []
    open_group: list[int] = []
    rank = program.placement[stage]
    measured = False  # whether a NORM has run since the last update
    for position, action in actions:
        if action.kind in (Kind.B, Kind.W):
            open_group.append(action.microbatch)
        late = measured and action.kind in (Kind.B, Kind.W)
        if late or (action.kind is Kind.NORM and (action.microbatch != len(groups) or not open_group)):
            due = f"{stage}NORM{len(groups)} between the last backward and {stage}UPDATE{len(groups)}"
            raise ScheduleError(
                f"rank {rank}, position {position}: a NORM must measure all gradients of its update; got {action}, "
                f"expected {due}.\n" + marked_grid(program, {rank: position})
            )
        measured = action.kind is Kind.NORM or (measured and action.kind is not Kind.UPDATE)
        if action.kind is Kind.UPDATE:
            if action.microbatch != len(groups) or not open_group:
                due = f"{stage}UPDATE{len(groups)}, after a backward"
                raise ScheduleError(
                    f"rank {rank}, position {position}: updates must be numbered from 0, and each must come after "
                    f"the backward passes whose gradients it applies; got {action}, expected {due}.\n"
                    + marked_grid(program, {rank: position})
                )
            groups.append(tuple(sorted(open_group)))
            open_group = []
    if open_group:
        raise ScheduleError(
            f"rank {rank}: every gradient must be applied by an update; no update follows the backward of micro-batch "
            f"{open_group[0]} on stage {stage}. Add {stage}UPDATE{len(groups)} at the end."
        )
    return groups


def _check_used(program: Program, stage: int, actions: list[tuple[int, Action]]) -> None:
    """Check that each forward uses a version that exists when the forward runs. Raises ScheduleError."""
    wanted = program.versions[stage] if program.versions else ()
    if wanted and len(wanted) != program.num_microbatches:
        raise ScheduleError(
            f"a stage must have one weight version for each micro-batch; stage {stage} "
            f"has {counted(len(wanted), 'version')}; pass a list of {counted(program.num_microbatches, 'version')}"
        )
    newest = 0
    rank = program.placement[stage]
    for position, action in actions:
        if action.kind is Kind.UPDATE:
            newest += 1
        if wanted and action.kind is Kind.F and not 0 <= wanted[action.microbatch] <= newest:
            raise ScheduleError(
                f"rank {rank}, position {position}: {action} uses weight version {wanted[action.microbatch]}, "
                f"but at this position stage {stage} has only version{f's 0 to {newest}' if newest else ' 0'}. Use an "
                f"existing version, or move {action} later.\n" + marked_grid(program, {rank: position})
            )
