"""The beam search: its proofs against all orders, its limits, and its orders, compiled or not."""

import random
from functools import cache
from itertools import product

import pytest

from pipesched import Costs, schedules, simulate, validate
from pipesched.program.search.beam_search import BeamSearch
from pipesched.program.search.evaluation import evaluate, hold, run_times, sequences
from pipesched.program.search.problem import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, OrderProblem, Resource

LONG = 1 << 40


def problem(seed, num_stages=2, num_microbatches=2):
    """Random times, sizes, placement and limits, different for each micro-batch."""
    rng = random.Random(seed)

    def rows(most, count=num_stages):
        return [[rng.randint(0, most) for _ in range(num_microbatches)] for _ in range(count)]

    num_ranks = rng.randint(1, num_stages)
    placement = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    forwards, inputs, weights, saved, activations, weight_grads = (rows(most) for most in (6, 6, 6, 2, 4, 4))
    pairs = list(product(range(num_stages), range(num_microbatches)))
    whole = [[0] * num_microbatches for _ in range(num_stages)]
    needed = [[0] * num_microbatches for _ in range(num_ranks)]
    for stage, microbatch in pairs:
        both = inputs[stage][microbatch] + weights[stage][microbatch]
        whole[stage][microbatch] = max(0, both - saved[stage][microbatch])
        needed[placement[stage]][microbatch] += activations[stage][microbatch] + weight_grads[stage][microbatch]
    none = [[0] * num_microbatches] * num_stages
    memory = Resource(
        takes=[activations, weight_grads, none, none],
        gives=[none, activations, weight_grads, activations],
        limits=[max(0, max(row) + rng.randint(-3, 4)) for row in needed],
    )
    return OrderProblem(
        num_ranks=num_ranks,
        placement=tuple(placement),
        num_microbatches=num_microbatches,
        times=[forwards, inputs, weights, whole],
        forward_lags=rows(3, num_stages - 1),
        backward_lags=rows(3, num_stages - 1),
        resources=[memory],
    )


def changed(row, at, value):
    """The row with another value at a position."""
    return (*row[:at], value, *row[at + 1 :])


def shortest(problem):
    """The shortest makespan of all orders, by trying all; LONG if all break the limit."""
    tables, (memory,) = problem.tables, problem.resources
    count = problem.num_microbatches
    after = {FORWARD: (1, 0, 0), INPUT_GRAD: (0, 1, 0), WEIGHT_GRAD: (0, 0, 1), BACKWARD: (0, 1, 1)}

    @cache
    def rest(counts, clock, held, done):
        if all(weights == count for _, _, weights in counts):
            return max(clock)
        best = LONG
        for stage, kind in product(range(problem.num_stages), range(KINDS)):
            forwards, gradients, weights = counts[stage]
            most = {FORWARD: count, INPUT_GRAD: forwards, WEIGHT_GRAD: gradients, BACKWARD: forwards}[kind]
            microbatch = (forwards, gradients, weights, gradients)[kind]
            code = (stage * count + microbatch) * KINDS + kind
            if microbatch >= most or (kind == BACKWARD and weights < gradients) or done[tables.needs[code]] < 0:
                continue
            rank = problem.placement[stage]
            peak = held[rank] + memory.takes[kind][stage][microbatch]
            if peak > memory.limits[rank]:
                continue
            start = max(clock[rank], done[tables.needs[code]] + int(tables.lag[code]))
            end = start + int(tables.seconds[code])
            own = tuple(a + b for a, b in zip(counts[stage], after[kind], strict=True))
            best = min(
                best,
                rest(
                    changed(counts, stage, own),
                    changed(clock, rank, end),
                    changed(held, rank, peak - memory.gives[kind][stage][microbatch]),
                    changed(done, int(tables.yields[code]), end if kind != WEIGHT_GRAD else -1),
                ),
            )
        return best

    ranks = (0,) * problem.num_ranks
    return rest(((0, 0, 0),) * problem.num_stages, ranks, ranks, tuple(map(int, tables.blank)))


def searched(problem, width, most=LONG):
    """The codes of the ranks' orders, their makespan, and whether it is proved; None and ``most`` without orders."""
    tables = problem.tables
    orders = sequences(tables)
    found, _, proved = BeamSearch(problem, width).run(orders, most)
    if not found:
        return None, most, proved
    parts = [(tables.first[rank], tables.first[rank] + orders.lengths[rank]) for rank in range(problem.num_ranks)]
    assert all(hold(tables, orders, rank, begin, stop) for rank, (begin, stop) in enumerate(parts))
    codes = [[int(code) for code in orders.slots[begin:stop]] for begin, stop in parts]
    assert [int(seconds) for seconds in orders.busy] == [
        sum(int(tables.seconds[code]) for code in own) for own in codes
    ]
    return codes, int(evaluate(tables, run_times(tables), orders, LONG)), proved


@pytest.mark.parametrize("seed", range(20))
def test_a_proved_makespan_is_the_shortest_of_all_orders(seed):
    """Also if there are none within the limit."""
    own = problem(seed)
    best = shortest(own)
    _, makespan, proved = searched(own, width=200)
    assert (makespan, proved) == (best, True)
    assert searched(own, 200, most=best) == (None, best, True)


def test_a_narrow_beam_proves_nothing():
    _, narrow, proved = searched(problem(3, 4, 4), width=2)
    _, wide, _ = searched(problem(3, 4, 4), width=100)
    assert not proved
    assert wide < narrow


def test_a_problem_that_annealing_does_not_solve():
    """The orders are the same on every machine, compiled or not."""
    costs = Costs((5, 2, 7, 7), (4, 1, 9, 6), (0, 7, 9, 8), (4, 8, 17, 13))
    options = {"placement": (0, 1, 0, 1), "max_in_flight": 3, "effort": 1 / 30, "starts": ()}
    program = schedules.get("searched").program(2, 5, costs=costs, **options)
    validate(program, max_in_flight=3, exact=True)
    assert simulate(program, costs).makespan_s == 188  # proven optimal
    assert str(program).splitlines()[3:] == [
        "rank 0: 0F0 2F0 0F1 2I0 0I0 0W0 2F1 2W0 0F2 2I1 0B1 2F2 2W1 0F3 2I2 0B2 2F3 2W2 0F4 2I3 0B3 2F4 2W3 2I4 2W4 "
        "0B4",
        "rank 1: 1F0 3F0 3I0 3W0 1I0 1F1 1W0 3F1 3I1 3W1 1F2 1I1 1W1 3F2 3I2 3W2 1F3 1I2 1W2 3F3 3I3 3W3 1F4 1I3 1W3 "
        "3F4 3I4 3W4 1I4 1W4",
    ]
