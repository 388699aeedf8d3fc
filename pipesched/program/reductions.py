"""Reductions: the REDUCE actions, which sum gradients over replicas, and the rules for these actions.

Each replica runs the same program. The gradients of a stage are divided into buckets, and a REDUCE sums a bucket over
all replicas. A rank runs its REDUCEs and its gathers of weights (`program.gathers`) one after the other, in program
order, while it computes. All ranks that take part in a REDUCE have the same order, so they start their collectives in
the same order. A REDUCE does not wait for any other rank of its own replica. REDUCEs therefore add no cycle to a
program, and cannot cause a deadlock.
"""

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Ints
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program, marked_grid

__all__ = ["SUM_USES", "check_reductions", "early_stages", "last_gradients", "reduction_rows"]

#: The kinds that use the sum of a stage's gradients over all micro-batches.
SUM_USES = (Kind.REDUCE, *(kind for kind in Kind if any(Kind.REDUCE in need.kinds for need in kind.row.needs)))


def last_gradients(program: Program) -> Ints:
    """Return, for each stage, the row of its last B or W; -1 if the stage has none."""
    last = np.full(program.num_stages, -1, np.int64)
    rows = np.flatnonzero(program.columns.are(Kind.B, Kind.W))
    last[program.columns.stage[rows]] = rows  # if a stage has several rows, numpy keeps the last one
    return last


def reduction_rows(program: Program, stage: int) -> Ints:
    """Return the rows of a stage's REDUCEs, in the order of their buckets."""
    count = program.buckets[stage]
    return program.index.rows(Kind.REDUCE, np.full(count, stage), np.arange(count))


def early_stages(program: Program) -> frozenset[int]:
    """Return the stages that start each REDUCE during their last backward, as soon as the REDUCE's bucket is complete.

    Such a stage meets three conditions: it has no producer; its last gradient is a B that does not overlap with an F;
    and its rank computes nothing between this B and the stage's last REDUCE. If the REDUCEs started only after the B,
    the rank would have nothing to compute while they run. The REDUCEs of all other stages start at their positions in
    the order, and run during later backwards.
    """
    firsts = [stage for stage, count in enumerate(program.buckets) if count and not program.graph.producers[stage]]
    columns = program.columns
    last = last_gradients(program) if firsts else ()
    found = []
    for stage in firsts:
        begin = int(last[stage])
        reductions = np.flatnonzero(columns.are(Kind.REDUCE) & (columns.stage == stage))
        whole = begin >= 0 and columns.action(begin).kind is Kind.B and not columns.overlapping[begin]
        if whole and not columns.compute[begin + 1 : reductions[-1]].any():
            found.append(stage)
    return frozenset(found)


def check_reductions(program: Program) -> None:
    """Check that the REDUCEs of each stage follow the stage's last gradient, in the order of their buckets.

    `check_dependencies` checks that an UPDATE and a NORM come after the REDUCEs of their stage. Raises ScheduleError.
    """
    if not program.index.has(Kind.REDUCE):
        return
    if program.num_weights < program.num_stages:
        raise ScheduleError(
            f"a REDUCE may only sum the gradients of weights that a single stage holds; the {program.num_stages} "
            f"stages of this program share {program.num_weights} sets of weights; remove the REDUCEs, and reduce the "
            f"gradients of shared weights after the step, when each replica has summed them over its stages"
        )
    columns = program.columns
    last = last_gradients(program)
    rows = np.flatnonzero(columns.are(Kind.REDUCE))
    for row in rows[rows < last[columns.stage[rows]]][:1].tolist():
        end = columns.action(int(last[columns.stage[row]]))
        raise _misplaced(program, row, "a REDUCE must follow the last gradient of its stage", end)
    for row in rows[last[columns.stage[rows]] < 0][:1].tolist():
        action = columns.action(row)
        raise ScheduleError(
            f"{_place(program, row)}: a REDUCE must follow a gradient of its stage; got {action}, but stage "
            f"{action.stage} runs no B and no W. Remove it.\n" + marked_grid(program, dict([program.orders.place(row)]))
        )
    own = rows[np.argsort(columns.stage[rows], kind="stable")]
    stage = columns.stage[own]
    falls = (stage[1:] == stage[:-1]) & (columns.microbatch[own][1:] < columns.microbatch[own][:-1])
    for before, row in zip(own[:-1][falls][:1].tolist(), own[1:][falls][:1].tolist(), strict=True):
        action, earlier = columns.action(row), columns.action(before)
        raise ScheduleError(
            f"{_place(program, row)}: the buckets of a stage must be reduced in ascending order; {action} comes after "
            f"{earlier}, at position {program.place(earlier)[1]}. Move {action} before {earlier}.\n"
            + marked_grid(program, dict([program.orders.place(row)]))
        )
    _check_updated_once(program)


def _check_updated_once(program: Program) -> None:
    columns = program.columns
    reduced = np.unique(columns.stage[columns.are(Kind.REDUCE)])
    updates = np.bincount(columns.stage[columns.are(Kind.UPDATE)], minlength=program.num_stages)
    for stage in reduced[updates[reduced] > 1][:1].tolist():
        raise ScheduleError(
            f"rank {program.placement[stage]}: a stage with REDUCEs may have only one UPDATE, because a REDUCE follows "
            f"the stage's last gradient; stage {stage} has {updates[stage]} UPDATEs; choose a schedule that updates "
            f"once a step, or remove the REDUCEs"
        )


def _misplaced(program: Program, row: int, rule: str, end: Action) -> ScheduleError:
    action = program.columns.action(row)
    return ScheduleError(
        f"{_place(program, row)}: {rule}; {action} comes before {end}, at position {program.place(end)[1]}. Move "
        f"{action} after {end}.\n" + marked_grid(program, dict([program.orders.place(row)]))
    )


def _place(program: Program, row: int) -> str:
    rank, position = program.orders.place(row)
    return f"rank {rank}, position {position}"
