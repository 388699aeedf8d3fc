"""Weights that the ranks of tensor groups divide: other code sees them whole, and all planes decide alike."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipesched.saving.manifest import hash_of
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.jobs import split_weights as jobs
from tests.support.jobs.split_weights import Case
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(120)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [Case((1, 2, 2), dropout=0.0), Case((2, 1, 2), dropout=0.0, zero=3, tied=False)])
def test_the_gathered_model_is_the_users_whole_model(four: Ranks, case: Case) -> None:
    losses, between = jobs.gathered_loop(case)
    for rank, found in enumerate(four.run(4, jobs.gathered, case, timeout_s=100)):
        assert found["losses"] == pytest.approx(losses, rel=1e-12)
        assert found["loss"] == pytest.approx(between, rel=1e-12)
        for text in (found["stale"], found["stale again"]):
            assert "must not be used while its weights are divided" in text
            assert "call the pipeline's gather_model() on every rank" in text
        assert not any(name.startswith("pipesched") for name in found["classes"])
        assert found["equal"]
        assert found["after close"]
        assert found["own"][0]
        assert found["own"][1] < found["own"][2]
        assert (found["whole"] == (24, 16)) == (rank == 1)


def test_state_dicts_are_loaded_and_exported_whole(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    case = Case((1, 2, 2), tied=False)
    for found in four.run(4, jobs.loaded_states, case, str(tmp_path / "split"), timeout_s=100):
        assert found["loaded"]
        assert found["misfit"] == (
            "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for blocks.1.mixed.weight: "
            "copying a param with shape torch.Size([8, 16]) from checkpoint, the shape in current model is "
            "torch.Size([48, 16])."
        )
        assert "Missing key(s) in state_dict" in found["missing"] or not found["missing"]
        assert found["applied"]
    two.run(2, jobs.exported, Case((1, 2, 1), tied=False), str(tmp_path / "plain"), timeout_s=60)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "split").iterdir())
    assert all(hash_of(tmp_path / "plain" / name) == hash_of(tmp_path / "split" / name) for name in files)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("init", [None, "function", "mapping", "files"])
def test_models_without_weights_get_the_same_bits_with_any_number_of_planes(
    four: Ranks, two: Ranks, tmp_path: Path, init: str | None
) -> None:
    plain = Case((1, 2, 1), tied=init != "function")
    given = init
    if init == "files":
        two.run(2, jobs.exported, replace(plain), str(tmp_path / "weights"), timeout_s=60)
        given = str(tmp_path / "weights")
    due, _ = two.run(2, jobs.filled, plain, given, timeout_s=60)[0]
    named = dict(plain.model().named_parameters())
    for dims in ((1, 2, 2), (1, 1, 4)):
        results = four.run(4, jobs.filled, replace(plain, dims=dims), given, timeout_s=60)
        for found, _ in results:
            assert found.keys() == due.keys()
            assert all(torch.equal(value, due[name]) for name, value in found.items())
        block_bytes = [own.nbytes // (dims[2] if jobs.is_split(name) else 1) for name, own in named.items()]
        assert sum(held for _, held in results) == dims[2] * sum(block_bytes)


def test_the_predicted_memory_is_that_of_blocks(four: Ranks) -> None:
    for rank, (held, predicted) in enumerate(four.run(4, jobs.memory_of, Case((1, 2, 2), tied=False), timeout_s=60)):
        own = predicted[rank // 2]
        assert own["parameters"] == own["gradients"] == held
        assert 2 * held <= own["optimizer"] < 2.05 * held  # AdamW has two numbers for each, and counts steps


@pytest.mark.one_in(8)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_nan_in_one_block_skips_the_step_on_all_planes(four: Ranks, on_nonfinite: str, zero: int) -> None:
    case = Case((2, 1, 2), zero=zero, tied=False) if zero else Case((1, 2, 2))
    results = four.run(4, jobs.poisoned, case, on_nonfinite, timeout_s=100)
    for found in results:
        assert found["kept"]
        assert ("'blocks.1.mixed.weight'" in found["error"]) == (on_nonfinite == "raise"), found["error"]
        assert found.get("losses") == results[0].get("losses")
    assert on_nonfinite == "raise" or all(map(math.isfinite, results[0]["losses"]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own_optimizer", [True, False])
def test_an_overflow_in_one_block_lowers_the_scale_on_all_planes(four: Ranks, own_optimizer: bool) -> None:
    case = Case((1, 2, 2), dtype=torch.float32, own_optimizer=own_optimizer)
    for found in four.run(4, jobs.overflown, case, timeout_s=100):
        assert found["scales"] == [1024.0, 512.0, 512.0]
        assert found["kept"] == [False, True, False]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_norms_count_blocks_together_and_whole_weights_once(four: Ranks, norm_type: float) -> None:
    case = Case((1, 2, 2), own_optimizer=False)
    model = case.model()
    optimizer = jobs.adam(model.parameters())
    due = []
    for step in range(2):
        x, y = jobs.batch(step)
        reference_step(model, x, target=y, loss_fn=jobs.loss_of, num_microbatches=4, seed=jobs.SEED, step=step)
        due.append(float(clip_grad_norm_(model.parameters(), jobs.CLIP, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    results = four.run(4, jobs.norms_of, case, norm_type, timeout_s=60)
    assert results[0] == pytest.approx(due, rel=1e-12)
    assert all(found == results[0] for found in results)


def test_optimizers_that_combine_elements_are_refused_by_name(four: Ranks) -> None:
    for rank, found in enumerate(four.run(4, jobs.refused, Case((1, 2, 2)), timeout_s=100)):
        for name in ("Adafactor", "Muon", "Odd"):
            assert f"{name} may combine the elements of a weight, and holds" in found[name], (rank, found[name])
            assert "split weights: '" in found[name]
            assert "use one of torch's ASGD, Adadelta," in found[name]
        assert found["given"].startswith("ModelTypeError: ")
        assert "Adafactor may combine the elements of a weight" in found["given"]
        assert "call pipe.clip_grad_norm_ on every rank" in found["clipped"]
        assert "Adafactor may combine the elements of a weight" in found["saved"]


def test_saves_that_fail_name_the_cause_on_all_ranks(four: Ranks, tmp_path: Path) -> None:
    for found in four.run(4, jobs.faulty_saves, Case((1, 2, 2)), str(tmp_path), timeout_s=100):
        assert "No space left on device" in found["full False"]
        assert "No space left on device" in found["full True"]
        assert "parameter 'blocks.1.norm.weight' differs between rank 0 and rank 1 (tensor rank 1)" in found["differs"]
        assert "extra value 'number' differs between rank 0 and rank 1 (tensor rank 1)" in found["states"]
