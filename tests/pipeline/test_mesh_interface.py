"""What a user sees of a pipeline over a mesh, on real gloo ranks. One set of processes serves all."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from pipesched import Distributed, Pipeline
from pipesched.errors import InputError
from tests.support.jobs import surface as jobs
from tests.support.models import mixed_model
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


# ---- the loss -----------------------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_a_loss_that_is_not_read(ranks: Ranks) -> None:
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
            assert said.startswith(
                "a loss must be received before the pipeline is closed; this loss was not received: "
            )
        assert all("rank 2 failed: ZeroDivisionError: a layer's own error, in 2F0 (stage 2" in said for said in sent)
        assert all("the rank that computed it stopped without sending it" in said for said in unsent)


@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_other_numbers_of_rows_by_rank_are_an_error_with_the_shapes(
    ranks: Ranks, num_ranks: int, replicas: int
) -> None:
    full, fewer = "3 x float32[5, 8] and 1 x float32[4, 8]", "1 x float32[5, 8] and 3 x float32[4, 8]"
    for text in ranks.run(num_ranks, jobs.other_rows, replicas):
        assert "all ranks of a pipeline must pass the same batch; rank " in text
        one, other = (full, fewer) if f"its micro-batches are {full}" in text else (fewer, full)
        assert f"its micro-batches are {one}, but on this rank they are {other}; pass the same batch" in text
        assert "DistributedSampler must count the replicas" in text
        assert text.count("distributed=Distributed(inputs='first')") == 1


# ---- inputs="first" -----------------------------------------------------------------------------------------------

ENDS_SWAPPED = """microbatches 4
placement 1 2 0
rank 0: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
rank 1: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
rank 2: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
"""


@pytest.mark.parametrize("inputs", ["all", "first"])
def test_targets_that_are_ignored_do_not_count(ranks: Ranks, inputs: str) -> None:
    ranks.run(2, jobs.counted_targets, inputs)


@pytest.mark.parametrize("inputs", ["all", "first"])
def test_the_loss_in_outputs_is_the_batchs(ranks: Ranks, inputs: str) -> None:
    ranks.run(2, jobs.losses_in_outputs, inputs)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_batch_on_rank_0_alone_gives_the_same_bits(ranks: Ranks, num_ranks: int, name: str) -> None:
    ranks.run(num_ranks, jobs.both_ways, name)


def test_inputs_and_targets_travel_to_whatever_ranks_need_them(ranks: Ranks) -> None:
    ranks.run(3, jobs.both_ways, "", ENDS_SWAPPED)
    ranks.run(2, jobs.both_ways, "chimera")


def test_rank_0_waits_for_nobody(ranks: Ranks) -> None:
    first, second = ranks.run(2, jobs.rank_0_goes_on)
    assert first == second


def test_wrong_uses_are_errors_on_all_ranks(ranks: Ranks) -> None:
    said = ranks.run(3, jobs.wrong_uses, ENDS_SWAPPED)
    for name, at, text in (
        (
            "a batch on rank 1",
            1,
            "InputError: with inputs='first', only rank 0 may pass a batch to step; rank 1 of 3 passed a batch; pass "
            "no batch on this rank, or make the pipeline with inputs='all'",
        ),
        (
            "none on rank 0",
            0,
            "InputError: with inputs='first', rank 0 must pass a batch to step; rank 0 of 3 passed no batch; pass the "
            "batch on rank 0",
        ),
        (
            "none on rank 1",
            1,
            "InputError: with inputs='all', every rank must pass a batch to step; rank 1 of 3 passed no batch; "
            "pass the batch on this rank, too, or make the pipeline with inputs='first'",
        ),
    ):
        assert said[at][name].startswith(text)
        for rank in {0, 1, 2} - {at}:
            assert said[rank][name].startswith(
                f"ExecutionError: a failed rank stops all ranks; rank {at} failed: {text}"
            )
    for name, text in (
        (
            "unequal rows",
            "InputError: all tensors of a batch must have the same number of rows; argument 0 has 19 rows, the target "
            "has 7",
        ),
        ("no target", "InputError: loss_fn(output, target) needs a target"),
        (
            "gradients",
            "InputError: with inputs='first', an input that requires a gradient may be used on rank 0 only; rank 1 "
            "also uses such an input",
        ),
    ):
        assert said[0][name].startswith(text)
        for rank in (1, 2):
            rule = "rank 0 must pass a valid batch for all ranks"
            wrong = f"{rule}; its call to step failed before the first action, with {text}"
            assert said[rank][name].startswith(f"ExecutionError: {wrong}")
        (after,) = {said[rank][name].split(" then: ")[1] for rank in range(3)}
        assert float(after) > 0, "the next step runs"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"distributed": Distributed(inputs="last")},
            "inputs= must be one of all, first; got 'last'; pass 'all' if every rank passes the batch, or 'first' if",
        ),
        (
            {"distributed": Distributed(inputs="first")},
            "inputs= may only be passed with a mesh=; inputs is 'first' without a mesh; leave",
        ),
    ],
)
def test_inputs_is_a_word_for_meshes(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), devices=["cpu"], **options)


# ---- outputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["all", "first"])
@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_outputs_come_to_all_ranks_where_asked(ranks: Ranks, name: str, inputs: str) -> None:
    assert ranks.run(2, jobs.gathered, name, inputs) == [1, 2]


# ---- meshes of two dimensions -------------------------------------------------------------------------------------


def test_replicas_of_stages_equal_one_process_on_all_rows(ranks: Ranks) -> None:
    losses = ranks.run(4, jobs.replicas, ["1f1b", "zb-h1", "chimera"])
    assert len(set(losses)) == 1


@pytest.mark.parametrize(("schedule", "boundaries"), [("1f1b", [2]), ("zb-v", [1, 2, 3])])
def test_stages_may_be_cut_over_another_dimension(ranks: Ranks, schedule: str, boundaries: list[int]) -> None:
    ranks.run(4, jobs.tensor_parallel, schedule, boundaries)


def test_modules_over_a_mesh_are_those_of_the_ranks_own_stages(ranks: Ranks) -> None:
    """Modules that hold no parameters or buffers are on every rank."""
    named = dict(mixed_model().named_modules())
    holds = {name: any(True for _ in (*m.parameters(False), *m.buffers(False))) for name, m in named.items()}
    first, second = ranks.run(2, jobs.modules_of_ranks)
    assert set(first) | set(second) == set(named)
    assert {name for name in named if name in first and name in second} == {n for n, own in holds.items() if not own}


def test_rank_0_searches_for_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.run(2, jobs.planned_by_rank_0)
    assert one == other


def test_all_ranks_hear_that_there_is_no_plan(ranks: Ranks) -> None:
    first, other = ranks.run(2, jobs.no_plan_of_rank_0, timeout_s=15)
    assert first.startswith("MemoryLimitError")
    assert "the smallest limit for a plan is" in other
