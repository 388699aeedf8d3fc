"""Validation: one function a rule. A program that passes runs to its end without a deadlock.

Rules are checked in this order: places, complete, dependencies, deadlock, and on request memory and exactness.
Each raises with rank, position, action and the marked grid.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from pipesched.actions import KINDS, OTHER_END, Action, Holding, Kind
from pipesched.dependencies import progress
from pipesched.errors import DeadlockError, MemoryLimitError, ScheduleError
from pipesched.program import Program, marked_grid

__all__ = ["in_flight_steps", "peak_in_flight", "validate"]


def validate(program: Program, *, max_in_flight: int | Sequence[int] | None = None, exact: bool = False) -> None:
    """Prove that a program is complete, ordered and free of deadlock.

    max_in_flight: at most so many (stage, micro-batch) pairs held at once, one number or one a rank.
    exact: also demand ascending micro-batch order (see ``Program.exact``).
    Raises ScheduleError, DeadlockError or MemoryLimitError.
    """
    check_places(program)
    check_complete(program)
    check_dependencies(program)
    check_transfers(program)
    check_deadlock(program)
    if max_in_flight is not None:
        check_memory(program, max_in_flight)
    if exact:
        check_exact(program)


def _place(program: Program, action: Action) -> str:
    rank, position = program.positions[action]
    return f"rank {rank}, position {position}"


def _grid(program: Program, *actions: Action) -> str:
    return "\n" + marked_grid(program, dict(program.positions[action] for action in actions))


def check_places(program: Program) -> None:
    """There is something to run, every stage lies on a rank that exists, and every action on its stage's rank."""
    if program.num_microbatches < 1 or program.num_stages < 1:
        raise ScheduleError(
            f"a program has at least one stage and one micro-batch; this one has {program.num_stages} stages and "
            f"{program.num_microbatches} micro-batches; correct its placement or its number of micro-batches"
        )
    for stage, rank in enumerate(program.placement):
        if not 0 <= rank < program.num_ranks:
            raise ScheduleError(
                f"every stage lies on one of the ranks; stage {stage} is placed on rank {rank}, "
                f"but there are {program.num_ranks} ranks; correct the placement"
            )
    for rank, order in enumerate(program.orders):
        for position, action in enumerate(order):
            place = f"rank {rank}, position {position}"
            if not (0 <= action.stage < program.num_stages and 0 <= action.microbatch < program.num_microbatches):
                raise ScheduleError(
                    f"{place}: {action} is outside the program's {program.num_stages} stages and "
                    f"{program.num_microbatches} micro-batches. Count both from 0.\n"
                    + marked_grid(program, {rank: position})
                )
            if program.placement[action.stage] != rank:
                raise ScheduleError(
                    f"{place}: {action} belongs to rank {program.placement[action.stage]}, which holds stage "
                    f"{action.stage}. Move it there.\n" + marked_grid(program, {rank: position})
                )


def check_complete(program: Program) -> None:
    """Every stage runs every micro-batch once: F, and B or both I and W, unless the program is forward only."""
    _check_repeats(program)
    present = program.positions
    for stage, rank in enumerate(program.placement):
        for microbatch in range(program.num_microbatches):
            kinds = {kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W) if Action(stage, kind, microbatch) in present}
            if kinds not in _accepted(program):
                raise ScheduleError(_incomplete(program, stage, rank, microbatch, kinds))


def _check_repeats(program: Program) -> None:
    counts = Counter(action for order in program.orders for action in order)
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(
                f"{_place(program, action)}: {action} runs once; found {count} times. Remove the others."
                + _grid(program, action)
            )


def _accepted(program: Program) -> tuple[set[Kind], ...]:
    if program.forward_only:
        return ({Kind.F},)
    return {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}


def _incomplete(program: Program, stage: int, rank: int, microbatch: int, kinds: set[Kind]) -> str:
    want = "F" if program.forward_only else "F and either B or both I and W"
    has = ", ".join(f"{stage}{kind}{microbatch}" for kind in sorted(kinds)) or "none of them"
    wanted = min(_accepted(program), key=lambda accepted: len(accepted ^ kinds))
    remedy = [f"Add {stage}{kind}{microbatch}." for kind in sorted(wanted - kinds)]
    remedy += [f"Remove {stage}{kind}{microbatch}." for kind in sorted(kinds - wanted)]
    marks = dict(program.positions[Action(stage, kind, microbatch)] for kind in sorted(kinds)[:1])
    return (
        f"rank {rank}: stage {stage} runs {want} for each of {program.num_microbatches} micro-batches; "
        f"for micro-batch {microbatch} it has {has}. {' '.join(remedy)}\n" + marked_grid(program, marks)
    )


def check_dependencies(program: Program) -> None:
    """What an action needs is in the program, and earlier where it is on the same rank."""
    for rank, order in enumerate(program.orders):
        for position, action in enumerate(order):
            for need in program.needs(action):
                if need not in program.positions:
                    raise ScheduleError(
                        f"{_place(program, action)}: {action} needs {need}, which no rank runs. Add {need}."
                        + _grid(program, action)
                    )
                other, at = program.positions[need]
                if other == rank and at > position:
                    raise ScheduleError(
                        f"rank {rank}, position {position}: {action} needs {need} before it on this rank, "
                        f"but {need} is at position {at}. Move {need} earlier." + _grid(program, action)
                    )


def check_transfers(program: Program) -> None:
    """Every send has its receive, and each channel (from rank, to rank, kind) is first in, first out."""
    sent: dict[tuple[int, int, Kind], list[Action]] = {}
    received: dict[tuple[int, int, Kind], list[Action]] = {}
    for rank, order in enumerate(program.orders):
        for action in order:
            stage, kind, microbatch, peer = action
            if kind in (Kind.SEND_F, Kind.SEND_B):
                receive = Action(-1 if peer is None else peer, OTHER_END[kind], microbatch, stage)
                if receive not in program.positions:
                    raise ScheduleError(
                        f"{_place(program, action)}: {action} needs {receive}, which no rank runs. Add {receive}."
                        + _grid(program, action)
                    )
                sent.setdefault((rank, program.placement[receive.stage], receive.kind), []).append(receive)
            elif kind in OTHER_END and peer is not None:
                received.setdefault((program.placement[peer], rank, kind), []).append(action)
    for channel, receives in received.items():
        for receive, due in zip(receives, sent[channel], strict=True):
            if receive != due:
                raise ScheduleError(
                    f"{_place(program, receive)}: {receive} is received before {due}, which rank {channel[0]} sends "
                    f"first; a channel is first in, first out. Receive {due} first." + _grid(program, receive)
                )


def check_deadlock(program: Program) -> None:
    """The orders of all ranks, taken together, can be run to their ends."""
    reached = [0] * program.num_ranks
    for rank, position, _ in progress(program.orders, program.needs):
        reached[rank] = position + 1
    waits: dict[int, tuple[Action, Action]] = {}
    for rank, order in enumerate(program.orders):
        if reached[rank] < len(order):
            action = order[reached[rank]]
            ran = {need for need in program.needs(action) if _has_run(program, need, reached)}
            waits[rank] = action, next(need for need in program.needs(action) if need not in ran)
    if waits:
        raise DeadlockError(_deadlock(program, waits))


def _has_run(program: Program, action: Action, reached: Sequence[int]) -> bool:
    if action not in program.positions:
        return False
    rank, position = program.positions[action]
    return position < reached[rank]


def _deadlock(program: Program, waits: dict[int, tuple[Action, Action]]) -> str:
    """Name the cycle that the waiting ranks form: each waits for an action of the next one."""
    chain: list[int] = []
    rank = next(iter(waits))
    while rank not in chain and rank in waits:
        chain.append(rank)
        rank = program.positions.get(waits[rank][1], (-1, -1))[0]
    cycle = chain[chain.index(rank) :] if rank in chain else chain
    lines = [
        f"  rank {r}, position {program.positions[waits[r][0]][1]}: {waits[r][0]} waits for {waits[r][1]}"
        for r in cycle
    ]
    others = [f"rank {r} at {action} for {need}" for r, (action, need) in waits.items() if r not in cycle]
    behind = f"\nBehind them wait {', '.join(others)}." if others else ""
    return (
        f"deadlock: {len(cycle)} of {program.num_ranks} ranks wait for each other in a cycle\n"
        + "\n".join(lines)
        + f"\nMove one of the awaited actions before the place where its rank waits.{behind}"
        + _grid(program, *(action for action, _ in waits.values()))
    )


def in_flight_steps(actions: Iterable[Action]) -> Iterable[tuple[Action, int, int]]:
    """One rank's actions, each with the number of (stage, micro-batch) pairs held while it runs, and after it.

    A pair is held from its F to the end of its B or W; one that is recomputed from its R; one without a backward
    only while its F runs.
    """
    actions = list(actions)
    pairs = [(action.stage, action.microbatch) for action in actions]
    ends = [Holding.WEIGHT_GRAD in KINDS[action.kind].gives for action in actions]
    recomputed = {pair for pair, action in zip(pairs, actions, strict=True) if action.kind is Kind.R}
    kept = {pair for pair, end in zip(pairs, ends, strict=True) if end}
    held = 0
    for action, pair, end in zip(actions, pairs, ends, strict=True):
        starts = action.kind is (Kind.R if pair in recomputed else Kind.F)
        held += starts
        after = held - (end or (starts and pair not in kept))
        yield action, held, after
        held = after


def peak_in_flight(actions: Iterable[Action]) -> int:
    """The most (stage, micro-batch) pairs that one rank's order holds at once."""
    return max((held for _, held, _ in in_flight_steps(actions)), default=0)


def check_memory(program: Program, max_in_flight: int | Sequence[int]) -> None:
    """No rank holds more (stage, micro-batch) pairs at once than its limit."""
    limits = [max_in_flight] * program.num_ranks if isinstance(max_in_flight, int) else list(max_in_flight)
    if len(limits) != program.num_ranks:
        raise ScheduleError(
            f"max_in_flight is one number or one a rank; got {len(limits)} for {program.num_ranks} ranks; pass as many"
        )
    for rank, (order, limit) in enumerate(zip(program.orders, limits, strict=True)):
        for position, (action, held, _) in enumerate(in_flight_steps(order)):
            if held > limit:
                raise MemoryLimitError(
                    f"rank {rank}, position {position}: {action} makes {held} micro-batches in flight, "
                    f"but the limit is {limit} (the order's peak is {peak_in_flight(order)}). "
                    f"Run a backward before it, or raise the limit.\n" + marked_grid(program, {rank: position})
                )


def check_exact(program: Program) -> None:
    """Forwards and weight gradients of each stage run in ascending micro-batch order, so that sums have one order."""
    descent = program.first_descent()
    if descent is not None:
        rank, position, action = descent
        raise ScheduleError(
            f"rank {rank}, position {position}: an exact program runs each stage's F, and its B or W, in ascending "
            f"micro-batch order; {action} comes after a later micro-batch. Reorder it, or validate without exact=True: "
            f"results then agree within rounding only.\n" + marked_grid(program, {rank: position})
        )
