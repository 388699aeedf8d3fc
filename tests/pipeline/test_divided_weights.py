"""zero=3: replicas hold their rows of the weights between steps, and train as the plain loop does."""

from pathlib import Path

import pytest

from pipesched import Distributed
from pipesched.errors import InputError
from tests.support.jobs import divided_weights as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_rank_holds_its_rows_and_a_step_gathers_and_reduces_each_unit_once(ranks: Ranks, schedule: str):
    every = ranks.run(4, jobs.count, schedule)
    for rank in range(2):
        own, peer = every[rank], every[rank + 2]
        assert own.weights + peer.weights == own.whole == peer.whole
        assert own.weights < 0.9 * own.whole
    layers = sum(own.gathers for own in every[:2])
    assert layers == 5  # four linear layers and an embedding
    assert all(own.gathers == own.reductions for own in every)


def test_weights_can_be_read_loaded_changed_and_cast_between_steps(ranks: Ranks):
    ranks.run(4, jobs.train)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_weights_stay_whole_until_the_last_recomputation_or_w(ranks: Ranks, schedule: str):
    ranks.run(4, jobs.split, schedule)


def test_hooks_see_whole_gradients(ranks: Ranks):
    found = [pair for seen in ranks.run(4, jobs.hooks) for pair in seen]
    assert len(found) == 18
    assert all(whole for _, whole in found)


def test_divided_weights_are_not_used_by_mistake(ranks: Ranks, tmp_path: Path):
    ranks.run(4, jobs.refuse, tmp_path)


def test_micro_batches_take_another_branch_than_the_samples(ranks: Ranks):
    """The sizes of results on the new branch come from whole weights, of which a replica has some rows only."""
    ranks.run(4, jobs.branch)


def test_a_model_without_weights_is_filled_as_without_zero(ranks: Ranks):
    ranks.run(4, jobs.start_empty)


def test_plan_report_and_trace_show_what_replicas_send(ranks: Ranks):
    for text, kinds in ranks.run(4, jobs.report):
        assert "2 replicas of 2 ranks (dp 2 x pp 2, zero 3)" in text
        assert "zero: 2 ranks, " in text
        assert "replicas: 2 ranks, " in text
        assert kinds >= {"UNSHARD", "RESHARD", "REDUCE"}


def test_a_program_with_its_own_gathers_runs(ranks: Ranks):
    ranks.run(4, jobs.own_program)


def test_an_unknown_way_to_gather_is_refused():
    with pytest.raises(InputError, match=r"gather_once= must be True, False or None; got 'often'; pass one of them"):
        Distributed(zero=3, gather_once="often")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("schedule", "times"), [("interleaved-1f1b", 2), ("1f1b", 1)])
def test_weights_gathered_for_each_use_train_as_those_gathered_once(ranks: Ranks, schedule: str, times: int):
    for own in ranks.run(4, jobs.gather_each_use, schedule):
        assert own.gathers_once == 1
        assert own.gathers_each >= times
        assert own.collectives == own.due
        assert own.traced == own.gathers_each
