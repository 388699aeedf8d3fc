"""Rule search: hill climbing over the rules of list schedules, with separate choices for each rank.

A rule makes the same choices for all micro-batches. Between its start and its end, the schedule therefore settles into
a pattern that repeats, so a rule that is good for a few micro-batches is also good for many.
"""

from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import UNFIT, Sequences, assign, copy, sequences
from pipesched.program.search.list_orders import (
    CHOICES,
    DEPTH,
    FILLING,
    FIRST_APART,
    FUSED,
    IN_TURN,
    LAST_APART,
    PATIENCE,
    WINDOW,
    Progress,
    progress_of,
    write,
)
from pipesched.program.search.problem import Problem, Tables
from pipesched.program.search.random_numbers import draw, start, state

__all__ = ["RuleSearch"]

_FILLINGS = whole((-1, 0, 77, 179, 256, 512, 1024))
_PATIENCES = whole((0, 77, 128, 200))


class _Run(NamedTuple):
    """The parameters of a rule search."""

    #: The choices that matter for the problem.
    choices: Whole
    fillings: Whole
    patiences: Whole
    #: The window that stands for no limit.
    widest: int
    makespan: int
    goal: int
    steps: int


class RuleSearch:
    """Improves the rules of list schedules by hill climbing.

    Args:
        problem: the problem.
        widest: the window to use for ranks without a limit on their forwards. Default: the number of micro-batches.

    """

    def __init__(self, problem: Problem, widest: int | None = None) -> None:
        self._widest = problem.num_microbatches if widest is None else widest
        self._tables = problem.tables
        self._progress = progress_of(self._tables)
        self._random = state()
        choices = [WINDOW, IN_TURN, FILLING, PATIENCE]
        if max(map(len, problem.chunks)) > 1:
            choices.append(DEPTH)
        if problem.fuses:
            choices += [FUSED, FIRST_APART, LAST_APART]
        self._choices = whole(choices)
        self._trial = whole([0] * (CHOICES * problem.num_ranks))
        self._current = sequences(self._tables)

    def run(self, rule: Whole, orders: Sequences, makespan: int, *, steps: int, goal: int) -> tuple[int, int]:
        """Improve ``rule`` and its ``orders`` in place. Return the makespan, and the number of schedules written."""
        start(self._random, steps)
        run = _Run(self._choices, _FILLINGS, _PATIENCES, self._widest, makespan, goal, steps)
        memory = self._tables, self._progress, self._random
        found, ran = _climb(*memory, rule, self._trial, self._current, orders, run)
        return int(found), int(ran)


def _climb(
    tables: Tables,
    progress: Progress,
    random: Whole,
    rule: Whole,
    trial: Whole,
    current: Sequences,
    best: Sequences,
    run: _Run,
) -> tuple[int, int]:
    shortest = run.makespan
    for step in range(run.steps):
        if shortest <= run.goal:
            return shortest, step
        assign(rule, trial)
        for _ in range(1 + draw(random) % 3 // 2):
            _change(tables, random, trial, run)
        found = write(tables, trial, progress, current, shortest)
        if found == UNFIT:
            continue
        assign(trial, rule)
        if found < shortest:
            shortest = found
            copy(current, best)
    return shortest, run.steps


@compiled
def _change(tables: Tables, random: Whole, rule: Whole, run: _Run) -> None:
    """Set one randomly selected choice of a rule to a new value, for one rank or several neighbouring ranks."""
    ranks = tables.num_ranks
    most = tables.num_microbatches
    choice = run.choices[draw(random) % len(run.choices)]
    first = draw(random) % ranks
    last = first
    if draw(random) % 5 < 2:
        last = draw(random) % ranks
    slope = 0
    bits = draw(random)
    value = bits % 2
    if choice == WINDOW:
        value = run.widest if bits % 4 == 0 else 1 + bits // 4 % (2 * ranks)
        slope = draw(random) % 3 // 2
    elif choice == FILLING:
        value = run.fillings[bits % len(run.fillings)]
    elif choice == PATIENCE:
        value = run.patiences[bits % len(run.patiences)]
    elif choice == DEPTH:
        value = bits % 3
    elif choice == FUSED:
        value = 2 * value
    elif choice in (FIRST_APART, LAST_APART):
        value = 0 if bits % 2 else bits // 2 % min(most, 4 * ranks)
    for rank in range(min(first, last), max(first, last) + 1):
        rule[choice * ranks + rank] = max(1, value - slope * (rank - first)) if choice == WINDOW else value
