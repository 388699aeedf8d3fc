"""What user code has changed before a change of plan stays: settings of groups, frozen weights, modes of modules."""

import pytest

from tests.support.jobs import replanning as jobs
from tests.support.models import assert_equal_bits
from tests.support.rank_processes import Ranks

pytestmark = [pytest.mark.timeout(100), pytest.mark.filterwarnings("ignore:BatchNorm sees", "ignore:each of")]


def together(found):
    """Return the losses and the tensors of all processes in one dict."""
    tensors = {name: value for _, own in found for name, value in own.items()}
    return {**tensors, **{f"loss {step}": loss for step, loss in enumerate(found[0][0])}}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", ["groups", "unfrozen", "frozen norms"])
def test_user_changes_move_with_the_layers(ranks: Ranks, what: str) -> None:
    """groups: two groups have the same settings at the change, and different learning rates later.

    In all cases, an average of each process's own weights moves, too.
    """
    found, due = (ranks.run(4, jobs.with_user_changes, what, replans) for replans in (True, False))
    assert_equal_bits(together(found), together(due))


def test_wrong_plans_are_refused_by_all_ranks_and_the_pipeline_stays_usable(ranks: Ranks) -> None:
    for idle, searched, none in ranks.run(2, jobs.refused_with_idle_ranks):
        assert "every rank of the mesh must hold stages" in idle
        assert "num_replicas= needs a plan" in searched
        assert "cannot be divided into 0 replicas" in none


def test_ranks_that_pass_other_arguments_are_named_and_the_pipeline_stays_usable(ranks: Ranks) -> None:
    for other_model, searches, no_optimizer, wrong_plan, value, *warned in ranks.run(2, jobs.said_about_arguments):
        for said in (other_model, searches, no_optimizer):
            assert said.startswith("ExecutionError: all ranks must have the same")
            assert "rank 1 differs from rank 0" in said
        assert "optimizer= is 0 optimizers, but 1 optimizer on rank 0" in no_optimizer
        assert wrong_plan.startswith("PartitionError: a plan must have each layer of its model")
        assert value.startswith("ArgumentError: every object in replan(extra=...) must have state_dict")
        assert any("after 5 steps, replan() got no optimizer=" in text for text in warned)
