"""A proved plan: its bound, its order, and the sentence in its report."""

from dataclasses import replace

import pytest

from pipesched import Costs, Plan, schedules
from pipesched.planning import proof
from pipesched.planning.alternatives import Alternative
from pipesched.planning.report.report import Report
from pipesched.program.program import Program
from pipesched.simulation.exact_solver import ProgramSolution

COSTS = Costs((2, 6, 1), (1, 1, 2), (6, 6, 6), (7, 7, 8))


@pytest.fixture
def plan():
    chosen = Alternative(
        label="gpipe",
        schedule="gpipe",
        num_ranks=3,
        chunks_per_rank=1,
        num_microbatches=2,
        checkpoint="never",
        step_s=40.0,
        bubble_ratio=0.5,
    )
    stages = (("a",), ("b",), ("c",))
    return Plan(stages, "gpipe", schedules.get("gpipe").program(3, 2), costs=COSTS, alternatives=(chosen,))


def solver(program, bound_s):
    def solve(costs, num_microbatches, **_):
        return ProgramSolution(program=program, makespan_s=bound_s, bound_s=bound_s, status="OPTIMAL")

    return solve


def test_a_better_order_replaces_the_plans_and_survives_saving(plan, monkeypatch):
    better = replace(schedules.get("zb-h2").program(3, 2), name="solved")
    monkeypatch.setattr(proof, "solve", solver(better, 29.0))
    found = proof.proved(plan)
    assert (found.program, found.schedule, found.proved_bound_s) == (better, "solved", 29.0)
    assert found.alternatives[0].step_s == found.predicted().makespan_s < plan.predicted().makespan_s
    again = Plan.from_dict(found.to_dict())
    assert again == found
    assert (
        "no order of these stages on these ranks can take less than 29 s and keep results bit-identical"
        in Report(again).text()
    )


def test_an_order_that_is_not_worth_it_leaves_the_plan(plan, monkeypatch):
    same = Program.parse(str(plan.program))
    monkeypatch.setattr(proof, "solve", solver(same, float(plan.predicted().makespan_s)))
    found = proof.proved(plan)
    assert (found.program, found.schedule) == (plan.program, "gpipe")
    assert "the predicted step is optimal" in found.explain()


def test_an_order_that_does_not_fit_leaves_the_plan(plan, monkeypatch):
    plan = replace(plan, costs=replace(COSTS, activation_bytes=(10, 10, 10)))
    monkeypatch.setattr(proof, "solve", solver(schedules.get("zb-h2").program(3, 2), 29.0))
    assert proof.proved(plan, (5, 5, 5)).schedule == "gpipe"
    assert proof.proved(plan, (10**6,) * 3).schedule == "solved"


def test_a_plan_without_costs_has_no_proof(plan):
    assert proof.proved(replace(plan, costs=None)).proved_bound_s is None
