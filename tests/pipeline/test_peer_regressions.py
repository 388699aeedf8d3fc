"""What fails or misbehaves in torch.distributed.pipelining (torch 2.13) works here, in process and over a mesh."""

import pytest
from torch import nn

from pipesched import Program, schedules
from pipesched.program.actions import Kind
from tests.support.jobs.peer import (
    SOME,
    SPLIT,
    Modifies,
    Packs,
    Transposes,
    Unpacks,
    Views,
    accumulate,
    alternate,
    count_batches,
    count_forwards,
    count_hooks,
    draw,
    evaluate_without_target,
    fail_on_the_last_stage,
    infer,
    pass_between,
    switch_modes,
    train_replicas,
    train_sizes,
    train_with_dict_target,
    train_with_own_loss,
)
from tests.support.models import KINDS
from tests.support.places import Run

pytestmark = pytest.mark.timeout(60)


# ---- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sizes", [[32, 24, 32], [30, 7], [8, 64, 8]], ids=["smaller", "uneven", "larger"])
def test_batches_of_other_sizes_in_inference(run: Run, sizes: list[int]) -> None:
    """Stale rows, wrong results, an abort in gloo."""
    run(2, infer, sizes)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sizes", [[32, 24, 32], [30, 7], [8, 64, 8]], ids=["smaller", "uneven", "larger"])
def test_batches_of_other_sizes_in_training(run: Run, sizes: list[int]) -> None:
    run(2, train_sizes, sizes)


@pytest.mark.one_in(2)
def test_two_numbers_of_micro_batches_in_turn(run: Run) -> None:
    """Going back to the earlier one aborts the process."""
    run(2, alternate)


# ---- values between stages ----------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "layers",
    [[Packs, Unpacks], [Views, Views], [Views, Modifies], [Transposes, Transposes]],
    ids=lambda x: x[0].__name__,
)
def test_any_value_passes_between_stages(run: Run, layers: list[type[nn.Module]]) -> None:
    """Dicts, None, tensors that are not contiguous: errors; views: broken in zero-bubble schedules."""
    run(2, pass_between, layers)


# ---- targets and losses -------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)  # over a mesh: test_mesh_interface.py
def test_a_target_is_any_value(run: Run) -> None:
    run(2, train_with_dict_target)


@pytest.mark.one_in(2)
def test_a_loss_needs_no_target(run: Run) -> None:
    run(2, train_with_own_loss)


def test_evaluating_without_a_target_says_so_on_all_ranks(run: Run) -> None:
    """An error on one rank, and a hang on the other."""
    run(2, evaluate_without_target)


# ---- what is counted ----------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["never", "always"])
def test_batch_norm_counts_each_micro_batch_once(run: Run, mode: str) -> None:
    """14 instead of 12."""
    run(2, count_batches, mode)


@pytest.mark.one_in(2)
def test_gradients_add_up_over_two_steps(run: Run) -> None:
    """The first step's are scaled again: 56 % off."""
    run(2, accumulate)


def test_hooks_after_accumulation_fire_once_a_micro_batch(run: Run) -> None:
    """Under a split backward never."""
    run(2, count_hooks)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("by_itself", [True, False], ids=["the block's own", "the pipeline's"])
def test_a_checkpointed_block_runs_twice_under_a_split_backward(run: Run, by_itself: bool) -> None:
    """Eight times."""
    run(2, count_forwards, by_itself)


@pytest.mark.one_in(2)
def test_switching_between_training_and_evaluation_repeats_nothing(run: Run) -> None:
    """Each switch runs the first micro-batch once more, stage after stage."""
    run(2, switch_modes)


# ---- data parallel ------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SPLIT)
def test_the_user_adds_up_gradients_over_replicas(run: Run, name: str) -> None:
    """DDP around a stage is silently left out under a split backward."""
    run(4, train_replicas, name)


# ---- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SOME)
def test_an_error_on_the_last_stage_ends_all_ranks(run: Run, name: str) -> None:
    """The others hang for half an hour, and then say nothing of stage or micro-batch."""
    run(2, fail_on_the_last_stage, name)


# ---- pictures and sizes -------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
def test_a_measured_step_of_each_kind_of_schedule_is_drawn(run: Run) -> None:
    """KeyError, RuntimeError, TypeError; and of a real run there is no picture at all."""
    run(2, draw, [*KINDS, "chimera"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "interleaved-zb"])
def test_256_ranks_are_built_and_proved(name: str) -> None:
    """154 s, or more than 300: quadratic in the length of an order. Here the count of actions is linear in it."""
    program = schedules.get(name).program(256, 1024)
    kinds = 3 if program.index.has(Kind.I) else 2
    assert len(program.columns) == program.num_stages * 1024 * kinds
    assert isinstance(program, Program)
