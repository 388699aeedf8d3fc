"""Plans with tensor groups run on the mesh that they ask for, and on no other."""

from tests.support.jobs import tensor_plans
from tests.support.rank_processes import Ranks


def test_the_plan_runs_on_the_mesh_that_it_asks_for(four: Ranks):
    """The losses are those of one process, within rounding."""
    found = four.run(4, tensor_plans.runs_a_plan, timeout_s=120)
    assert [mesh for mesh, _ in found] == [{"dp": 1, "pp": 2, "tp": 2}] * 4
    assert max(max(differences) for _, differences in found) < 1e-5


def test_another_mesh_refuses_the_plan(four: Ranks):
    for error in four.run(4, tensor_plans.refuses_a_plan, timeout_s=120):
        assert "the plan has 1 replica of 1 tensor group of 4 ranks (dp 1 x pp 1 x tp 4)" in error
        assert "the pipeline has 1 replica of 2 tensor groups of 2 ranks" in error
