"""Redundancy: the MIRROR, KEEP and REPLAY actions, by which a job survives the loss of a rank, and their rules.

The next rank of the pipeline holds a copy of a rank's stages: their weights and the state of their optimizer. In each
step, a rank sends the gradients of its stages' previous update to this rank (MIRROR), which repeats the update on the
copy (REPLAY). Once all gradients of a step have arrived, the step is committed: each rank sets the new state of its
stages aside (KEEP), and can go back to it. So an UPDATE waits for the KEEP of its stage.

A rank only starts these actions. It runs them one after the other, in a lane of their own, while it computes. With
several replicas, nothing is sent: the other replicas are the copies, and a rank only keeps.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES, Columns, Orders
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program, marked_grid

__all__ = ["REDUNDANT", "check_redundancy", "redundant_orders"]

#: The kinds of redundancy, in the order in which a rank runs them.
REDUNDANT = (Kind.MIRROR, Kind.KEEP, Kind.REPLAY)
_RULE = "redundancy needs stages that are updated once in a step"
_PAIRS = ((Kind.MIRROR, Kind.KEEP), (Kind.MIRROR, Kind.REPLAY), (Kind.KEEP, Kind.UPDATE))


def redundant_orders(program: Program, *, sends: bool) -> Orders:
    """Return a program's orders with redundancy at the start of each.

    Args:
        program: the program, with one UPDATE for each stage.
        sends: whether gradients are sent to copies. If False, a rank only keeps.

    Raises:
        ScheduleError: a stage does not have exactly one UPDATE, as in an asynchronous schedule.

    """
    updates = np.bincount(program.columns.stage[program.columns.are(Kind.UPDATE)], minlength=program.num_stages)
    for stage in np.flatnonzero(updates != 1)[:1].tolist():
        raise ScheduleError(
            f"{_RULE}; stage {stage} has {updates[stage]} UPDATEs; choose a schedule that updates once a step, or do "
            f"without redundancy"
        )
    orders = program.orders
    return Orders.of_ranks(
        [
            Columns.joined_up([Columns.of(_first_actions(program, rank, sends)), orders.rank(rank)])
            for rank in range(program.num_ranks)
        ]
    )


def _first_actions(program: Program, rank: int, sends: bool) -> Iterator[Action]:
    """Yield the redundancy of a rank: of its own stages, then of the stages whose copies it holds."""
    for kind in REDUNDANT if sends else (Kind.KEEP,):
        for stage, home in enumerate(_homes(program, kind)):
            if home == rank:
                yield Action(stage, kind, 0)


def _homes(program: Program, kind: Kind) -> Sequence[int]:
    return program.copy_ranks if kind.row.on_copy else program.placement


def check_redundancy(program: Program) -> None:
    """Check that redundancy comes first on each rank, in the order MIRROR, KEEP, REPLAY, and that none is missing.

    `check_dependencies` checks the other rules: a KEEP needs the MIRRORs of all stages, a REPLAY that of its stage, and
    an UPDATE comes after the KEEP of its stage. Raises ScheduleError.
    """
    if not program.index.has(*REDUNDANT):
        return
    columns = program.columns
    updates = np.bincount(columns.stage[columns.are(Kind.UPDATE)], minlength=program.num_stages)
    for row in np.flatnonzero(columns.are(*REDUNDANT)).tolist():
        action = columns.action(row)
        if updates[action.stage] != 1 or action.microbatch:
            raise _wrong(
                program,
                row,
                f"{_RULE}, and is numbered 0; got {action}, but stage {action.stage} has {updates[action.stage]} "
                f"UPDATEs. Remove {action}, or choose a schedule that updates once a step",
            )
        for one, other in _PAIRS:
            missing = action._replace(kind=other)
            if action.kind is one and missing not in program.index:
                raise _wrong(program, row, f"{action} is of no use without {missing}. Add {missing}, or remove both")
    _check_places(program)


def _check_places(program: Program) -> None:
    """Check that a rank's redundancy comes first, in the order of `REDUNDANT`."""
    turns = np.full(len(CODES), len(REDUNDANT))
    turns[[CODES[kind] for kind in REDUNDANT]] = range(len(REDUNDANT))
    turn = turns[program.columns.kind]
    rank_of = program.orders.rank_of
    for row in np.flatnonzero((turn[1:] < turn[:-1]) & (rank_of[1:] == rank_of[:-1]))[:1].tolist():
        one, other = program.columns.action(row), program.columns.action(row + 1)
        raise _wrong(
            program,
            row + 1,
            f"a rank must run its MIRRORs first, then its KEEPs, then its REPLAYs, then all other actions; {other} "
            f"comes after {one}. Move {other} before it",
        )


def _wrong(program: Program, row: int, problem: str) -> ScheduleError:
    rank, position = program.orders.place(row)
    return ScheduleError(f"rank {rank}, position {position}: {problem}.\n" + marked_grid(program, {rank: position}))
