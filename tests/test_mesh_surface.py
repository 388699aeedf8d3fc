"""What a user sees of a pipeline over a mesh, on real gloo ranks. One set of processes serves all."""

from collections.abc import Iterator

import mesh_surface_jobs as jobs
import pytest
from ranks import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


# ---- the loss -----------------------------------------------------------------------------------------------------


def test_who_does_not_look_at_a_loss_does_not_wait_for_it(ranks: Ranks) -> None:
    """The first step's is received after the second one has run, and so on: at most one is on its way."""
    first, second, last = ranks.run(3, jobs.who_does_not_look_does_not_wait)
    assert first == second == [0, 1, 2, 3]
    assert last == [0, 0, 0, 0]


def test_losses_are_the_loops_whenever_they_are_looked_at(ranks: Ranks) -> None:
    ranks.run(3, jobs.losses_looked_at_late)


def test_a_loss_outlives_its_pipeline(ranks: Ranks) -> None:
    ranks.run(2, jobs.a_loss_lives_without_its_pipeline)


def test_a_loss_that_never_comes_says_why(ranks: Ranks) -> None:
    *others, _ = ranks.run(3, jobs.losses_of_one_that_fails)
    for sent, unsent in others:
        for said in (*sent, *unsent):
            assert said.startswith("what another rank sends is received before the pipeline ends; this was not: ")
        assert all("rank 2 failed: ZeroDivisionError: a layer's own error, in 2F0 (stage 2" in said for said in sent)
        assert all("its rank left without sending it" in said for said in unsent)
