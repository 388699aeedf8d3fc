"""Validation: proves that a program is complete, correctly ordered and free of deadlock.

Each rule has a function that checks it. The rules are checked in this order: places, routes, completeness, slices,
overlaps, offloads, dependencies, transfers, versions, reductions, gathers, redundancy, deadlock; then, on request,
memory and exactness. Errors name the rank, the position and the action, and show a grid of the orders with the action
marked.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pipesched.errors import DeadlockError, MemoryLimitError, ScheduleError
from pipesched.program.action_arrays import Mask
from pipesched.program.actions import NUMBERED, ON_COPIES, OTHER_END, SENDS, Action, Kind
from pipesched.program.dependencies import BACKWARDS
from pipesched.program.gathers import check_gathers
from pipesched.program.liveness import pairs_held, peak_in_flight, rank_limits
from pipesched.program.program import Program, check_program, marked_grid
from pipesched.program.reductions import check_reductions
from pipesched.program.redundancy import check_redundancy
from pipesched.program.traversal import walk
from pipesched.program.weight_versions import check_versions
from pipesched.units import counted

__all__ = ["WORK", "check_order", "deadlock_error", "validate"]

_SHOWN = 16  # largest number of list entries that an error shows
#: The kinds of which each (stage, micro-batch) pair runs an F, and either a B or both an I and a W.
WORK = (Kind.F, Kind.B, Kind.I, Kind.W)


def validate(program: Program, *, max_in_flight: int | Sequence[int] | None = None, exact: bool = False) -> None:
    """Prove that a program is complete, correctly ordered and free of deadlock.

        pipesched.validate(pipesched.schedules.get("1f1b").program(4, 8), max_in_flight=4)

    Args:
        program: the program, with or without communication.
        max_in_flight: the maximum number of (stage, micro-batch) pairs in flight on a rank: one number for all ranks,
            or a sequence with a number for each rank. Default: None, no limit.
        exact: whether to check that the program is exact, so that its results are bit-identical to those of every other
            exact program (see `Program.exact`). Default: False.

    Raises:
        ScheduleError: an action is missing, repeated, on a wrong rank or out of order.
        DeadlockError: ranks wait for each other in a cycle.
        MemoryLimitError: a rank exceeds ``max_in_flight``.

    """
    check_program(program)
    check_order(program)
    check_deadlock(program)
    if max_in_flight is not None:
        check_memory(program, max_in_flight)
    if exact:
        check_exact(program)


def check_order(program: Program) -> None:
    """Check all rules except those on deadlock, memory and exactness."""
    check_places(program)
    check_routes(program)
    check_complete(program)
    check_slices(program)
    check_overlaps(program)
    check_offloads(program)
    check_dependencies(program)
    check_transfers(program)
    check_versions(program)
    check_reductions(program)
    check_gathers(program)
    check_redundancy(program)


def _place(program: Program, row: int) -> str:
    rank, position = program.orders.place(row)
    return f"rank {rank}, position {position}"


def _grid(program: Program, *rows: int) -> str:
    return "\n" + marked_grid(program, dict(program.orders.place(row) for row in rows))


def _first(rows: Mask) -> int | None:
    return int(np.argmax(rows)) if rows.any() else None


def check_places(program: Program) -> None:
    """Check that stages and micro-batches are in range, ranks exist, and each action is on its stage's rank."""
    if program.num_microbatches < 1 or program.num_stages < 1:
        raise ScheduleError(
            f"a program must have at least one stage and one micro-batch; this program has "
            f"{counted(program.num_stages, 'stage')} and {counted(program.num_microbatches, 'micro-batch')}; correct "
            f"its placement or its number of micro-batches"
        )
    for stage, rank in enumerate(program.placement):
        if not 0 <= rank < program.num_ranks:
            raise ScheduleError(
                f"every stage must be on an existing rank; stage {stage} is placed on rank {rank}, but the "
                f"program has {counted(program.num_ranks, 'rank')}; correct the placement"
            )
    if set(program.weights) != set(range(program.num_weights)):
        raise ScheduleError(
            f"sets of weights must be numbered from 0 without a gap; the stages use the "
            f"sets {', '.join(map(str, program.weights[:_SHOWN]))}; renumber the sets"
        )
    columns = program.columns
    stage_in = (columns.stage >= 0) & (columns.stage < program.num_stages)
    inside = (
        stage_in
        & (columns.peer < program.num_stages)
        & (columns.microbatch >= 0)
        & ((columns.microbatch < program.num_microbatches) | columns.are(*NUMBERED))
    )
    homes = np.array([program.placement, program.copy_ranks])
    home = homes[columns.are(*ON_COPIES).astype(int), np.where(stage_in, columns.stage, 0)]
    row = _first(~inside | (home != program.orders.rank_of))
    if row is None:
        _check_numbered(program)
        return
    action = columns.action(row)
    if not inside[row]:
        raise ScheduleError(
            f"{_place(program, row)}: {action} is outside the program's {counted(program.num_stages, 'stage')} and "
            f"{counted(program.num_microbatches, 'micro-batch')}. Number stages and micro-batches from 0."
            + _grid(program, row)
        )
    of = "the copy of stage" if action.kind in ON_COPIES else "stage"
    raise ScheduleError(
        f"{_place(program, row)}: {action} belongs to rank {home[row]}, which holds {of} {action.stage}. Move it to "
        f"that rank." + _grid(program, row)
    )


def _check_numbered(program: Program) -> None:
    """Check that the buckets and the gathers of each stage are numbered from 0 without gaps."""
    columns = program.columns
    for kind in NUMBERED:
        of_kind = columns.are(kind)
        counts = np.bincount(columns.stage[of_kind], minlength=program.num_stages)
        row = _first(of_kind & (columns.microbatch >= counts[columns.stage]))
        if row is not None:
            action = columns.action(row)
            raise ScheduleError(
                f"{_place(program, row)}: the {kind}s of a stage must be numbered from 0 without a gap; got {action}, "
                f"but stage {action.stage} has only {counted(int(counts[action.stage]), kind)}. Renumber them, or add "
                f"the missing {kind}s." + _grid(program, row)
            )


def check_routes(program: Program) -> None:
    """Check that a micro-batch that visits a stage also visits all producers and consumers of the stage."""
    for route in set(program.routes):
        if not route or len(set(route)) < len(route):
            twice = next((stage for stage in route if route.count(stage) > 1), None)
            problem = "is empty" if twice is None else f"visits stage {twice} {route.count(twice)} times"
            raise ScheduleError(
                f"a micro-batch must visit at least one stage, and must not visit a stage twice; the route of "
                f"micro-batch {program.routes.index(route)} {problem}; correct the route"
            )
        for stage in route:
            if not 0 <= stage < program.num_stages:
                raise ScheduleError(
                    f"a route may only visit stages of the program, 0..{program.num_stages - 1}; one route visits "
                    f"stage {stage}; correct the route"
                )
            neighbours = {*program.graph.producers[stage], *program.graph.consumers[stage]} - set(route)
            if neighbours:
                raise ScheduleError(
                    f"a route must contain complete chains of stages; one route has stage {stage} but not its "
                    f"neighbour {min(neighbours)}; add stage {min(neighbours)}, or remove the edge from the graph"
                )


def check_complete(program: Program) -> None:
    """Check that every stage runs each of its micro-batches exactly once.

    For each micro-batch, a stage runs one F, and either one B, or one I and one W. In a forward-only program, it runs
    only the F.
    """
    index = program.index
    columns = program.columns
    for row in index.repeated().tolist():
        action = columns.action(row)
        same = (columns.stage == action.stage) & (columns.kind == columns.kind[row])
        same &= (columns.microbatch == action.microbatch) & (columns.peer == columns.peer[row])
        rows = np.flatnonzero(same)
        if len(rows) > 1:
            raise ScheduleError(
                f"{_place(program, int(rows[0]))}: {action} must run exactly once; it occurs {len(rows)} times. Remove "
                f"the duplicates." + _grid(program, int(rows[0]))
            )
        raise ScheduleError(
            f"{_place(program, row)}: the stage graph has no edge for {action}. Correct or remove {action}."
            + _grid(program, row)
        )
    has = {kind: index.grid(kind) >= 0 for kind in WORK}
    split = (has[Kind.I] & has[Kind.W] & ~has[Kind.B]) | (has[Kind.B] & ~has[Kind.I] & ~has[Kind.W])
    none = ~(has[Kind.B] | has[Kind.I] | has[Kind.W])
    due = has[Kind.F] & (none if program.forward_only else split)
    good = np.where(program.visits, due, none & ~has[Kind.F]) if program.routes else due
    row = _first(~good.ravel())
    if row is not None:
        stage, microbatch = divmod(row, program.num_microbatches)
        kinds = {kind for kind in WORK if has[kind][stage, microbatch]}
        raise ScheduleError(_incomplete(program, stage, microbatch, kinds))


def _accepted(program: Program, stage: int, microbatch: int) -> tuple[set[Kind], ...]:
    if not program.visits[stage, microbatch]:
        return (set(),)
    if program.forward_only:
        return ({Kind.F},)
    return {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}


def _incomplete(program: Program, stage: int, microbatch: int, kinds: set[Kind]) -> str:
    accepted = _accepted(program, stage, microbatch)
    want = "F and either B or both I and W" if len(accepted) > 1 else "F"
    has = ", ".join(f"{stage}{kind}{microbatch}" for kind in sorted(kinds)) or "none of them"
    wanted = min(accepted, key=lambda choice: len(choice ^ kinds))
    remedy = [f"Add {stage}{kind}{microbatch}." for kind in sorted(wanted - kinds)]
    remedy += [f"Remove {stage}{kind}{microbatch}." for kind in sorted(kinds - wanted)]
    marks = dict(program.place(Action(stage, kind, microbatch)) for kind in sorted(kinds)[:1])
    rule = f"stage {stage} must run {want} for each of {program.num_microbatches} micro-batches"
    if program.routes:
        rule = f"stage {stage} must run {want} for each micro-batch whose route visits it"
    if not accepted[0]:
        rule = f"stage {stage} must not run a micro-batch whose route does not visit the stage"
    return (
        f"rank {program.placement[stage]}: {rule}; for micro-batch {microbatch} it has {has}. {' '.join(remedy)}\n"
        + marked_grid(program, marks)
    )


def check_slices(program: Program) -> None:
    """Check that the slices of a micro-batch run forward in ascending order and backward in descending order."""
    slices = program.slices_per_microbatch
    if slices == 1:
        return
    if slices < 1 or program.num_microbatches % slices:
        raise ScheduleError(
            f"every micro-batch must have the same number of slices, at least 1; there are {program.num_microbatches} "
            f"slices in total, and slices_per_microbatch is {slices}; choose a number of at least 1 that divides the "
            f"total"
        )
    visits = program.visits.reshape(program.num_stages, -1, slices)
    visited = visits.sum(axis=2)
    parted = np.flatnonzero(((visited > 0) & (visited < slices)).any(axis=0))
    if len(parted):
        raise ScheduleError(
            f"all slices of a micro-batch must visit the same stages; the {slices} slices of micro-batch {parted[0]} "
            f"visit different stages; give them the same route"
        )
    forward = program.index.grid(Kind.F)
    backward = np.maximum(program.index.grid(Kind.B), program.index.grid(Kind.I))[:, ::-1]
    for rows, direction in ((forward, "first to the last"), (backward, "last to the first")):
        grid = rows.reshape(program.num_stages, -1, slices)
        in_order = (np.diff(grid, axis=2) > 0) | (grid[:, :, 1:] < 0)  # < 0: stage not visited
        if program.forward_only and direction.startswith("last"):
            continue
        if not in_order.all():
            stage, microbatch, part = np.argwhere(~in_order)[0].tolist()
            row = int(grid[stage, microbatch, part + 1])
            raise ScheduleError(
                f"{_place(program, row)}: {program.columns.action(row)} runs too early; the slices of a micro-batch "
                f"must run from the {direction}. Move it later." + _grid(program, row)
            )


def check_overlaps(program: Program) -> None:
    """Check that overlapping actions are an F followed directly by a B or I on the same rank.

    The two actions must belong to different (stage, micro-batch) pairs.
    """
    columns = program.columns
    rank_of = program.orders.rank_of
    pair = program.columns.pair
    first = np.flatnonzero(columns.joined)
    second = np.minimum(first + 1, len(columns) - 1)
    good = columns.are(Kind.F)[first] & columns.are(*BACKWARDS)[second] & ~columns.joined[second]
    good &= (rank_of[first] == rank_of[second]) & (pair[first] != pair[second])
    wrong = _first(~good)
    if wrong is not None:
        rank, position = program.orders.place(int(first[wrong]))
        pairs = " & ".join(map(str, program.orders[rank][position : position + 2]))
        raise ScheduleError(
            f"rank {rank}, position {position}: an F may overlap only with the next action, a B or I of another "
            f"stage or micro-batch; got {pairs}. Run them one after the other." + _grid(program, int(first[wrong]))
        )


def check_offloads(program: Program) -> None:
    """Check that offloaded activations are freed and fetched, and that they are not also recomputed."""
    columns = program.columns
    index = program.index
    if not index.has(Kind.OFFLOAD):
        return
    rows = np.flatnonzero(columns.are(Kind.OFFLOAD))
    offloads = columns[rows]
    for kind, due in ((Kind.FREE, True), (Kind.FETCH, True), (Kind.R, False)):
        wrong = _first((index.rows(kind, offloads.stage, offloads.microbatch) >= 0) != due)
        if wrong is not None:
            action = offloads.action(wrong)
            other = action._replace(kind=kind)
            problem = f"has no {other}. Add it" if due else f"is also recomputed, by {other}. Remove one of them"
            raise ScheduleError(
                f"{_place(program, int(rows[wrong]))}: offloaded activations must be freed (FREE), and fetched (FETCH) "
                f"before their backward; {action} {problem}." + _grid(program, int(rows[wrong]))
            )


def check_dependencies(program: Program) -> None:
    """Check that every needed action exists and, if it is on the same rank, comes before the action that needs it."""
    row, needed = program.requirements
    rank_of = program.orders.rank_of
    late = (needed < 0) | ((rank_of[row] == rank_of[needed]) & (needed > row))
    if not late.any():
        return
    first = int(row[late].min())
    action = program.columns.action(first)
    rank, position = program.orders.place(first)
    for need in program.needs(action):
        at = program.index.row(need)
        if at < 0:
            raise ScheduleError(
                f"{_place(program, first)}: {action} needs {need}, which no rank runs. Add {need}."
                + _grid(program, first)
            )
        if rank_of[at] == rank and at > first:
            raise ScheduleError(
                f"rank {rank}, position {position}: {action} needs {need} before it on this rank, "
                f"but {need} is at position {program.orders.place(at)[1]}. Move {need} earlier." + _grid(program, first)
            )


def check_transfers(program: Program) -> None:
    """Check the transfers of a program, if there are any.

    Every send must have a matching receive. Each channel (sending rank, receiving rank, kind) must be first in, first
    out. Every result that another rank needs must be transferred.
    """
    if not program.index.has(*OTHER_END):
        return
    for send in SENDS:
        if program.index.has(send):
            _check_channels(program, send)
    _check_transferred(program)


def _check_transferred(program: Program) -> None:
    rank_of = program.orders.rank_of
    computes = program.columns.compute
    row, needed = program.requirements
    bare = (rank_of[row] != rank_of[needed]) & computes[row] & computes[needed]
    bare &= ~program.columns.are(Kind.UPDATE)[row]  # ranks exchange norms without messages between stages
    if bare.any():
        first = int(row[bare].min())
        giver = int(needed[bare][row[bare] == first].min())
        action = program.columns.action(first)
        stage = program.columns.action(giver).stage
        send, receive = (Kind.SEND_F, Kind.RECV_F) if action.kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
        ends = Action(stage, send, action.microbatch, action.stage), action._replace(kind=receive, peer=stage)
        raise ScheduleError(
            f"{_place(program, first)}: {action} needs a result of stage {stage} on rank {rank_of[giver]}; the "
            f"program has transfers, but none for this result. Add {ends[0]} and {ends[1]}, or remove all transfers "
            f"and call lower()." + _grid(program, first)
        )


def _check_channels(program: Program, send: Kind) -> None:
    columns = program.columns
    receive = OTHER_END[send]
    sends = np.flatnonzero(columns.are(send))
    sent = columns[sends]
    receives = program.index.rows(receive, sent.peer, sent.microbatch, sent.stage)
    lost = _first(receives < 0)
    if lost is not None:
        stage, _, microbatch, peer = action = sent.action(lost)
        missing = Action(-1 if peer is None else peer, receive, microbatch, stage)
        raise ScheduleError(
            f"{_place(program, int(sends[lost]))}: {action} needs {missing}, which no rank runs. Add {missing}."
            + _grid(program, int(sends[lost]))
        )
    placement = np.asarray(program.placement)
    channel = placement[sent.stage].astype(np.int64) * program.num_ranks + placement[sent.peer]
    order = np.argsort(channel, kind="stable")  # within a channel, in sending order
    channel = channel[order]
    receives = receives[order]
    swapped = np.flatnonzero((channel[1:] == channel[:-1]) & (receives[1:] < receives[:-1]))
    if len(swapped):
        # The first receive, in its rank's order, that does not match the next send.
        in_channel = channel == channel[swapped[0]]
        due = receives[in_channel]
        by_place = np.sort(receives[in_channel])
        at = int(np.argmax(due != by_place))
        early, first = (columns.action(int(rows[at])) for rows in (by_place, due))
        raise ScheduleError(
            f"{_place(program, int(by_place[at]))}: {early} comes before {first}, but rank "
            f"{int(channel[swapped[0]]) // program.num_ranks} sends the message of {first} first; a channel is first "
            f"in, first out. Move {first} before {early}." + _grid(program, int(by_place[at]))
        )


def check_deadlock(program: Program) -> None:
    """Check that the ranks can run their orders to the end without waiting for each other forever."""
    reached = walk(program).reached
    if sum(reached) < len(program.columns):
        raise deadlock_error(program, reached)


def deadlock_error(program: Program, reached: Sequence[int]) -> DeadlockError:
    """Return an error that shows the waiting ranks. ``reached`` is the number of actions that each rank ran."""
    waits: dict[int, tuple[Action, Action]] = {}
    for rank, order in enumerate(program.orders):
        if reached[rank] < len(order):
            at = reached[rank]
            actions = order[at : at + 2] if program.orders.rank(rank).joined[at] else order[at : at + 1]
            missing = (need for act in actions for need in program.needs(act) if not _has_run(program, need, reached))
            waits[rank] = actions[0], next(missing)
    return DeadlockError(_deadlock(program, waits))


def _has_run(program: Program, action: Action, reached: Sequence[int]) -> bool:
    row = program.index.row(action)
    rank, position = program.orders.place(row)
    return row >= 0 and position < reached[rank]


def _deadlock(program: Program, waits: Mapping[int, tuple[Action, Action]]) -> str:
    """Describe a deadlock by a cycle of ranks, in which each rank waits for an action of the next rank."""
    chain: list[int] = []
    rank = next(iter(waits))
    while rank not in chain and rank in waits:
        chain.append(rank)
        rank = program.orders.place(program.index.row(waits[rank][1]))[0]
    cycle = chain[chain.index(rank) :] if rank in chain else chain
    rows = {r: program.index.row(action) for r, (action, _) in waits.items()}
    lines = [f"  {_place(program, rows[r])}: {waits[r][0]} waits for {waits[r][1]}" for r in cycle]
    others = [f"rank {r} at {action} for {need}" for r, (action, need) in waits.items() if r not in cycle]
    also = f"\nAlso waiting: {', '.join(others)}." if others else ""
    return (
        f"deadlock: {len(cycle)} of {program.num_ranks} ranks wait for each other in a cycle\n"
        + "\n".join(lines)
        + f"\nMove one of the awaited actions before the position where its rank waits.{also}"
        + _grid(program, *rows.values())
    )


def check_memory(program: Program, max_in_flight: int | Sequence[int]) -> None:
    """Check that no rank has more (stage, micro-batch) pairs in flight at once than its limit."""
    limits = rank_limits(max_in_flight, program.num_ranks)
    if len(limits) != program.num_ranks:
        raise ScheduleError(
            f"max_in_flight must be one number, or a list with one for each rank; got a list of "
            f"{counted(len(limits), 'number')} for {counted(program.num_ranks, 'rank')}; pass one number, or a list of "
            f"{counted(program.num_ranks, 'number')}"
        )
    for rank, limit in enumerate(limits):
        order = program.orders.rank(rank)
        held = pairs_held(order).during
        position = _first(held > limit)
        if position is not None:
            raise MemoryLimitError(
                f"rank {rank}, position {position}: {order.action(position)} puts "
                f"{counted(int(held[position]), 'micro-batch')} in flight, but the limit is {limit} (the order's peak "
                f"is {peak_in_flight(order)}). "
                f"Run a backward before it, or raise the limit.\n" + marked_grid(program, {rank: position})
            )


def check_exact(program: Program) -> None:
    """Check that the program is exact: it sums gradients in the order of the micro-batches (see `Program.exact`)."""
    if program.num_weights < program.num_stages:
        raise ScheduleError(
            f"every stage of an exact program must have its own weights; here {counted(program.num_stages, 'stage')} "
            f"share {counted(program.num_weights, 'set')} of weights, so the gradients of a set are summed within each "
            f"stage and then over stages, which rounds differently; validate without exact=True"
        )
    if program.slices_per_microbatch > 1:
        raise ScheduleError(
            f"an exact program must run whole micro-batches; this program cuts each micro-batch into "
            f"{program.slices_per_microbatch} slices and sums their gradients; validate without exact=True: results "
            f"then agree only up to rounding"
        )
    descent = program.first_descent()
    if descent is not None:
        rank, position, action = descent
        raise ScheduleError(
            f"rank {rank}, position {position}: an exact program must run the forwards, the input gradients and the "
            f"weight gradients of each stage in ascending micro-batch order; {action} comes after a later micro-batch. "
            f"Move {action}, or validate without exact=True: "
            f"results then agree only up to rounding.\n" + marked_grid(program, {rank: position})
        )
