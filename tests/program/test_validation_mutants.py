"""A program passes validation if and only if it runs: mutants of valid programs, against fake stages.

The validator reads the program as data; the fake stages run it, lowered, through the interpreter that also trains.
"""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipesched import schedules, validate
from pipesched.errors import DeadlockError, ExecutionError, ScheduleError
from pipesched.program.program import Program
from pipesched.testing import run_fake
from tests.support.random_programs import fitting

MUTANTS = 1000


@st.composite
def mutants(draw: st.DrawFn) -> Program:
    """A valid program with two actions of one rank swapped, one dropped, or one repeated."""
    name = draw(st.sampled_from(schedules.names()))
    num_ranks = fitting(name, draw(st.sampled_from([1, 2, 3, 3, 4, 4])))
    program = schedules.get(name).program(num_ranks, draw(st.integers(2, 6)))
    orders = [list(order) for order in program.orders]
    order = orders[draw(st.integers(0, program.num_ranks - 1))]
    first = draw(st.integers(0, len(order) - 1))
    how = draw(st.sampled_from(["swap"] * 8 + ["drop", "repeat"]))
    if how == "swap":
        second = draw(st.integers(0, len(order) - 1))
        order[first], order[second] = order[second], order[first]
    elif how == "drop":
        del order[first]
    else:
        order.insert(draw(st.integers(0, len(order))), order[first])
    return program.with_orders(orders)


def verdict(program: Program) -> str:
    """What the validator says."""
    try:
        validate(program)
    except DeadlockError:
        return "deadlock"
    except ScheduleError:
        return "wrong"
    return "valid"


def outcome(program: Program) -> str:
    """What happens when it runs."""
    try:
        run_fake(program)
    except DeadlockError:
        return "deadlock"
    except ExecutionError:
        return "wrong"
    return "valid"


def test_a_mutant_is_valid_if_and_only_if_it_runs() -> None:
    seen: Counter[tuple[str, str]] = Counter()

    @settings(max_examples=MUTANTS, suppress_health_check=list(HealthCheck))
    @given(mutants())
    def check(program: Program) -> None:
        says, does = verdict(program), outcome(program)
        seen[says, does] += 1
        assert (says == "valid") == (does == "valid"), program

    check()
    total = sum(seen.values())
    runs = Counter({does: sum(n for (_, d), n in seen.items() if d == does) for does in ("valid", "deadlock", "wrong")})
    print(f"{total} mutants: {dict(runs)}; (validator, run): {dict(seen)}")
    assert total >= 900
    assert runs["valid"] >= total / 5
    assert runs["deadlock"] >= total / 5
