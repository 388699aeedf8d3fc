"""Gathers: the UNSHARD and RESHARD actions for weights that are split across replicas, and the rules for these actions.

Each replica runs the same program and holds its own shard of every weight. An UNSHARD gathers the full weights of a
stage from the ranks that run the same order in the other replicas. A RESHARD frees the gathered weights. UNSHARDs and
REDUCEs share one lane: a rank runs them one after the other, in program order, while it computes. All ranks that take
part in a collective have the same order, so they start their collectives in the same order. A collective waits only for
the same action in other replicas, which run the same program. So if replicas waited for each other in a cycle, the
program itself would contain a cycle, and validation would reject it.
"""

from collections.abc import Sequence

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES
from pipesched.program.actions import Action, Kind
from pipesched.program.dependencies import WEIGHT_USES
from pipesched.program.program import Program, marked_grid

__all__ = ["check_collectives", "check_gathers", "first_uses"]


def first_uses(program: Program) -> frozenset[int]:
    """Return, for each UNSHARD, the row of the first action that uses the gathered weights.

    This action waits for the gather. An UNSHARD whose weights no action uses has no row in the result.
    """
    if not program.has_gathers:
        return frozenset()
    row, needed = program.requirements
    uses = program.columns.are(Kind.UNSHARD)[needed] & (needed >= 0) & program.columns.are(*WEIGHT_USES)[row]
    first = np.full(len(program.columns), len(program.columns), np.int64)
    np.minimum.at(first, needed[uses], row[uses])
    return frozenset(first[first < len(program.columns)].tolist())


def check_gathers(program: Program) -> None:
    """Check that the UNSHARDs and RESHARDs of each stage alternate, in ascending order, and end with a RESHARD.

    `check_dependencies` checks the other rules: an action that uses weights runs between an UNSHARD and its RESHARD,
    and an UPDATE follows all RESHARDs of its stage. Raises ScheduleError.
    """
    if not program.index.has(Kind.UNSHARD, Kind.RESHARD):
        return
    if program.num_weights < program.num_stages:
        raise ScheduleError(
            f"an UNSHARD may only gather weights that a single stage holds; the {program.num_stages} stages of this "
            f"program share {program.num_weights} sets of weights; remove the UNSHARDs and RESHARDs, and keep "
            f"full weights on each rank"
        )
    columns = program.columns
    rows = np.flatnonzero(columns.are(Kind.UNSHARD, Kind.RESHARD))
    rows = rows[np.argsort(columns.stage[rows], kind="stable")]
    stage = columns.stage[rows]
    turn = np.arange(len(rows)) - np.searchsorted(stage, stage)  # the index among the stage's UNSHARDs and RESHARDs
    kind = np.where(turn % 2, CODES[Kind.RESHARD], CODES[Kind.UNSHARD])
    wrong = (columns.kind[rows] != kind) | (columns.microbatch[rows] != turn // 2)
    for at in np.flatnonzero(wrong)[:1].tolist():
        due = Action(int(stage[at]), (Kind.UNSHARD, Kind.RESHARD)[turn[at] % 2], int(turn[at]) // 2)
        raise _misplaced(program, int(rows[at]), f"comes before {due}. Add {due}, or move it to an earlier position")
    last = np.append(stage[1:] != stage[:-1], True)
    for at in np.flatnonzero(last & (turn % 2 == 0))[:1].tolist():
        due = Action(int(stage[at]), Kind.RESHARD, int(turn[at]) // 2)
        raise _misplaced(program, int(rows[at]), f"has no {due}. Add {due} after the last action that uses the weights")
    _check_updated_once(program)


def check_collectives(program: Program, buckets: Sequence[int], *, gathers: bool) -> None:
    """Check that the user's program has all REDUCEs and UNSHARDs that the pipeline needs, and no others.

    A program without any REDUCEs is valid, because the pipeline adds them. The same applies to UNSHARDs.

    Args:
        program: the program.
        buckets: the number of gradient buckets on each stage; empty if there is a single replica.
        gathers: whether the weights are split across replicas.

    Raises:
        ScheduleError: the program lacks such an action, or has one that the pipeline does not need.

    """
    for stage, (has, due) in enumerate(zip(program.buckets, buckets, strict=False)):
        if any(program.buckets) and has != due:
            raise ScheduleError(
                f"a program with REDUCEs must have one REDUCE for each layer with weights; the number of "
                f"REDUCEs on stage {stage} of program {program.name!r} is {has}, but must be {due}; add or remove "
                f"REDUCEs, or pass the program without them"
            )
    if not program.has_gathers:
        return
    if not gathers:
        raise ScheduleError(
            f"UNSHARDs gather weights that are split across replicas; the number of UNSHARDs in program "
            f"{program.name!r} is {sum(program.gathers)}, but this pipeline splits no weights; pass "
            f"distributed=Distributed(zero=3) with a mesh of replicas, or the program without UNSHARDs and RESHARDs"
        )
    for stage, count in enumerate(buckets):
        if count and not program.gathers[stage]:
            raise ScheduleError(
                f"if a program has UNSHARDs, each stage with weights must have one; stage {stage} of program "
                f"{program.name!r} has none; add one, or pass the program without UNSHARDs and RESHARDs"
            )


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
