"""The exact solver finds the optimum, proves it, and gives equal results for equal inputs."""

import pytest

from pipesched import Costs, schedules, validate
from pipesched.errors import InputError, ScheduleError
from pipesched.program.placement import v
from pipesched.simulation import exact_solver
from pipesched.simulation.best_known import best_known
from pipesched.simulation.bounds import lower_bound
from pipesched.simulation.exact_solver import ProgramSolution, solve
from pipesched.simulation.links import Links
from pipesched.simulation.simulator import step_time

# What another model of the problem proved: placement, m, F, I, W, B, transfer, limit, optimum.
OPTIMA = [
    ((0, 1, 0, 1), 2, (6, 3, 2, 9), (8, 6, 3, 8), (8, 1, 1, 4), (16, 7, 4, 12), 0, 4, 79),
    ((0, 1, 2), 3, (3, 1, 1), (2, 2, 1), (1, 3, 3), (2, 5, 4), 1, 3, 25),
    ((0, 1, 0, 1), 3, (8, 4, 5, 6), (3, 2, 4, 8), (4, 6, 3, 6), (7, 8, 7, 14), 0, 2, 128),
    ((0, 1, 2), 2, (2, 6, 1), (1, 1, 2), (6, 6, 6), (7, 7, 8), 0, None, 29),
]


def has_ortools():
    try:
        exact_solver.check_solver()
    except InputError:
        return False
    return True


needs_ortools = pytest.mark.skipif(not has_ortools(), reason="needs ortools (the extra solver)")


@needs_ortools
@pytest.mark.parametrize(("placement", "m", "F", "I", "W", "B", "c", "limit", "optimum"), OPTIMA)
def test_it_finds_and_proves_the_optimum(placement, m, F, I, W, B, c, limit, optimum):  # noqa: E741
    costs = Costs(F, I, W, B, transfer_s=c)
    found = solve(costs, m, placement=placement, max_in_flight=limit, effort=5.0)
    assert (found.makespan_s, found.bound_s, found.proved, found.gap) == (optimum, optimum, True, 0)
    validate(found.program, max_in_flight=limit, exact=True)
    assert step_time(found.program, costs) == optimum


@needs_ortools
def test_whole_backwards_floats_and_little_effort():
    placement, m, F, I, W, B, c, limit, _ = OPTIMA[0]  # noqa: E741
    whole = solve(Costs(F, I, W, B, transfer_s=c), m, placement=placement, max_in_flight=limit, split=False)
    assert whole.proved
    assert {str(action.kind) for order in whole.program.orders for action in order} == {"F", "B"}
    tenths = Costs(*(tuple(0.1 * time for time in times) for times in (F, I, W, B)))
    found = solve(tenths, m, placement=placement, max_in_flight=limit)
    assert found.proved
    assert found.makespan_s == pytest.approx(7.9)
    assert found.bound_s <= found.makespan_s
    costs = Costs.uniform(4, forward_s=3, input_grad_s=4, weight_grad_s=2)
    little = [solve(costs, 5, max_in_flight=3, effort=0.01) for _ in range(2)]
    assert little[0] == little[1]
    assert little[0].bound_s <= little[0].makespan_s


def test_a_program_at_the_bound_needs_no_search(monkeypatch):
    monkeypatch.setattr(exact_solver, "_cp_model", None)
    costs = Costs.uniform(8)
    found = solve(costs, 8, placement=v(4, 2))
    assert found.proved
    assert found.makespan_s == lower_bound(costs, 8, placement=v(4, 2))


def test_the_best_known_program_keeps_the_limit():
    costs = Costs((5, 1, 3), (2, 4, 6), (1, 1, 2))
    free, tight = (best_known(costs, 6, (0, 1, 2), limit) for limit in (None, 2))
    validate(tight, max_in_flight=2, exact=True)
    assert step_time(free, costs) <= step_time(tight, costs)
    others = [schedules.get(name).program(3, 6) for name in ("1f1b", "gpipe", "zb-h1", "zb-auto")]
    assert step_time(free, costs) <= min(step_time(program, costs) for program in others)
    elsewhere = best_known(costs, 6, (2, 0, 1))
    assert elsewhere.placement == (2, 0, 1)
    assert step_time(elsewhere, costs) == step_time(free, costs)


def test_a_solution_within_the_tolerance_of_its_bound_is_proved():
    program = schedules.get("1f1b").program(1, 1)
    near = ProgramSolution(program=program, makespan_s=1.00005, bound_s=1.0, status="FEASIBLE")
    assert near.proved
    assert not ProgramSolution(program=program, makespan_s=1.1, bound_s=1.0, status="FEASIBLE").proved
    none = ProgramSolution(program=None, makespan_s=None, bound_s=1.0, status="UNKNOWN")
    assert (none.gap, none.proved) == (None, False)


@pytest.mark.parametrize(
    ("costs", "options", "said"),
    [
        (Costs.uniform(2, links=Links.of_hosts(1, 2)), {}, "the solver supports only the times of actions"),
        (Costs.uniform(2, overlap=0.5), {}, "leave them out"),
        (Costs.uniform(2), {"effort": 0}, "effort must be a number above 0; got 0"),
        (Costs.uniform(2), {"start": schedules.get("1f1b").program(2, 3)}, "start= must have placement"),
        (Costs.uniform(2), {"max_in_flight": 0}, "max_in_flight allows 0"),
    ],
)
def test_problems_that_the_solver_cannot_express_are_refused(costs, options, said):
    with pytest.raises(ScheduleError, match=said):
        solve(costs, 4, **options)


def test_without_ortools_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    with pytest.raises(InputError, match=r"requires the package ortools.*pip install 'pipesched\[solver\]'"):
        solve(Costs((5, 1, 3), (2, 4, 6), (1, 1, 2)), 4, max_in_flight=2)
