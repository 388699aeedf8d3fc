"""Rule search: hill climbing over the rules of list schedules, with separate choices for each rank.

A rule makes the same choices for all micro-batches. The schedule therefore settles into a repeating pattern between its
warm-up and its cool-down, so a rule that is good for a few micro-batches is also good for many.
"""

from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import MOST, UNFIT, Sequences, assign, copy, sequences
from pipesched.program.search.list_orders import (
    CHOICES,
    DEPTH,
    FILLING,
    FIRST_APART,
    FUSED,
    IN_TURN,
    LAST_APART,
    NONE_OWED,
    PATIENCE,
    WINDOW,
    OrderProgress,
    progress_of,
    write,
)
from pipesched.program.search.problem import OrderProblem, Tables
from pipesched.program.search.random_numbers import draw, start, state

__all__ = ["RuleSearch"]

_FILLINGS = (-1, 0, 77, 179, 256, 512, 1024)
_PATIENCES = (0, 77, 128, 200)


class _Run(NamedTuple):
    """The parameters of a rule search."""

    #: The choices that have an effect on the problem's orders.
    choices: Whole
    fillings: Whole
    patiences: Whole
    #: The value of WINDOW that means no limit.
    widest: int
    makespan: int
    goal: int
    steps: int


class RuleSearch:
    """Improves a rule of list schedules by hill climbing.

    Args:
        problem: the problem.
        rule: the initial rule.
        widest: the value of WINDOW for a rank whose forwards are not limited. Default: the number of micro-batches.

    Attributes:
        rule: the best rule so far.
        orders: the orders that this rule gives.
        makespan: the makespan of these orders; UNFIT if the limits are too tight for the initial rule.

    """

    def __init__(self, problem: OrderProblem, rule: Whole, widest: int | None = None) -> None:
        self.rule = whole(rule)
        self.orders = sequences(problem.tables)
        self._tables = problem.tables
        self._progress = progress_of(self._tables)
        self.makespan = int(write(self._tables, self.rule, self._progress, self.orders, MOST))
        self._widest = problem.num_microbatches if widest is None else widest
        self._random = state()
        start(self._random, 0)
        choices = [WINDOW, IN_TURN, FILLING, PATIENCE]
        if max(map(len, problem.chunks)) > 1:
            choices.append(DEPTH)
        if problem.fuses:
            choices += [FUSED, FIRST_APART, LAST_APART]
        self._choices = whole(choices)
        self._trial = whole([0] * (CHOICES * problem.num_ranks))
        self._current = sequences(self._tables)

    def run(self, steps: int, goal: int) -> int:
        """Write list schedules with random changes to the rule; keep the changes that do not increase the makespan.

        Args:
            steps: the maximum number of schedules to write.
            goal: the makespan at which the search ends.

        Returns:
            The number of schedules written.

        """
        if self.makespan == UNFIT:
            return 0
        run = _Run(self._choices, whole(_FILLINGS), whole(_PATIENCES), self._widest, self.makespan, goal, steps)
        memory = self._tables, self._progress, self._random
        self.makespan, ran = _climb(*memory, self.rule, self._trial, self._current, self.orders, run)
        return ran


def _climb(
    tables: Tables,
    progress: OrderProgress,
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
        changes = 1 + draw(random) % 3 // 2
        while changes > 0:
            changes -= int(_change(tables, random, trial, run))
        found = write(tables, trial, progress, current, shortest)
        if found == UNFIT:
            continue
        assign(trial, rule)
        if found < shortest:
            shortest = int(found)
            copy(current, best)
    return shortest, run.steps


@compiled
def _change(tables: Tables, random: Whole, rule: Whole, run: _Run) -> bool:
    """Set one randomly selected choice of a rule to a random value, for one rank or several neighbouring ranks.

    Returns whether the rule has changed.
    """
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
    changed = False
    for rank in range(min(first, last), max(first, last) + 1):
        at = choice * ranks + rank
        new = max(1, value - slope * (rank - first)) if choice == WINDOW else value
        changed |= rule[at] != new
        rule[at] = new
        if choice in (FIRST_APART, LAST_APART) and rule[FUSED * ranks + rank] == 0:
            rule[FUSED * ranks + rank] = NONE_OWED
            changed = True
    return changed
