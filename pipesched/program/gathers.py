"""Gathers: the UNSHARD and RESHARD actions, for weights that are divided over replicas, and the rules they follow.

Each replica runs the same program and holds a part of every weight. An UNSHARD gathers the whole weights of a stage
from the ranks that run the same orders in the other replicas, and a RESHARD frees them. UNSHARDs and REDUCEs share one
lane: a rank runs them one after the other, in the order of the program, and computes meanwhile. Because the ranks that
take part all have the same order, their collectives cannot cross. A collective waits only for the same action in other
replicas, which run the same program. If replicas waited for each other in a cycle, this program would contain a cycle,
and validation would find it.
"""

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program, marked_grid

__all__ = ["check_gathers"]


def check_gathers(program: Program) -> None:
    """Check that the UNSHARDs and RESHARDs of each stage alternate, in ascending order, and end with a RESHARD.

    Dependencies cover the other rules: an action that uses weights runs between an UNSHARD and its RESHARD, and an
    UPDATE follows all RESHARDs of its stage. Raises ScheduleError.
    """
    if not program.index.has(Kind.UNSHARD, Kind.RESHARD):
        return
    if program.num_weights < program.num_stages:
        raise ScheduleError(
            f"an UNSHARD may only gather weights that one stage holds; this program has {program.num_stages} stages "
            f"but {program.num_weights} weight copies; remove the UNSHARDs and RESHARDs, and keep whole weights on "
            f"each rank"
        )
    columns = program.columns
    rows = np.flatnonzero(columns.are(Kind.UNSHARD, Kind.RESHARD))
    rows = rows[np.argsort(columns.stage[rows], kind="stable")]
    stage = columns.stage[rows]
    turn = np.arange(len(rows)) - np.searchsorted(stage, stage)  # the position among the stage's gathers and frees
    kind = np.where(turn % 2, CODES[Kind.RESHARD], CODES[Kind.UNSHARD])
    wrong = (columns.kind[rows] != kind) | (columns.microbatch[rows] != turn // 2)
    for at in np.flatnonzero(wrong)[:1].tolist():
        due = Action(int(stage[at]), (Kind.UNSHARD, Kind.RESHARD)[turn[at] % 2], int(turn[at]) // 2)
        raise _misplaced(program, int(rows[at]), f"comes before {due}. Add or move {due} before it")
    last = np.append(stage[1:] != stage[:-1], True)
    for at in np.flatnonzero(last & (turn % 2 == 0))[:1].tolist():
        due = Action(int(stage[at]), Kind.RESHARD, int(turn[at]) // 2)
        raise _misplaced(program, int(rows[at]), f"has no {due}. Add it after the last action that uses the weights")
    _check_updated_once(program)


def _check_updated_once(program: Program) -> None:
    columns = program.columns
    updates = np.bincount(columns.stage[columns.are(Kind.UPDATE)], minlength=program.num_stages)
    for stage in np.flatnonzero(program.index.has_gathers & (updates > 1))[:1].tolist():
        raise ScheduleError(
            f"rank {program.placement[stage]}: a stage with UNSHARDs may have only one UPDATE, because an UPDATE "
            f"follows the last RESHARD of its stage; stage {stage} has {updates[stage]} UPDATEs; choose a schedule "
            f"that updates once a step, or remove the UNSHARDs"
        )


def _misplaced(program: Program, row: int, problem: str) -> ScheduleError:
    rank, position = program.orders.place(row)
    return ScheduleError(
        f"rank {rank}, position {position}: the UNSHARDs and RESHARDs of a stage must alternate, in ascending order; "
        f"{program.columns.action(row)} {problem}.\n" + marked_grid(program, {rank: position})
    )
