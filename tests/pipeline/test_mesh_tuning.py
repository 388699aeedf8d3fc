"""``tune`` over a mesh, on real gloo ranks: rank 0 decides, all run. One set of processes serves all."""

import pytest

from tests.support.jobs import tuning as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(120)


def test_all_ranks_run_plans_and_get_one(ranks: Ranks) -> None:
    first, other = ranks.run(2, jobs.a_plan_is_confirmed_by_all, timeout_s=90)
    assert first == other
    assert first["num_ranks"] == 2
    ran = [one for one in first["alternatives"] if "measured_s" in one]
    assert len(ran) >= 2
    assert all(one["num_ranks"] == 2 for one in ran)


def test_rank_0_alone_measures(ranks: Ranks) -> None:
    (measured, plan), (none, other) = ranks.run(2, jobs.only_rank_0_measures, timeout_s=60)
    assert (measured, none) == (["processes"], [])
    assert plan == other


def test_layers_of_a_mesh_are_measured_in_the_threads_of_its_ranks(ranks: Ranks) -> None:
    for names in ranks.run(2, jobs.layers_run_in_the_rank, timeout_s=60):
        assert "pipesched-profiler_0" not in names
        assert "MainThread" in names


def test_an_impossible_request_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    first, other = ranks.run(2, jobs.what_cannot_be_asked, timeout_s=60)
    assert "pass num_stages of at most 12" in first
    assert "pass num_stages of at most 12" in other


def test_what_fails_while_plans_run_ends_all_ranks(ranks: Ranks) -> None:
    for said in ranks.run(2, jobs.what_fails_on_one_rank, timeout_s=60):
        assert "no layer today" in said
