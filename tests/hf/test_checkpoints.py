"""Checkpoints of a PipelineTrainer: resumed with the same bits on another plan, without a pickle, and readable."""

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from tests.hf import jobs
from tests.hf.test_over_processes import losses, resumed, saved

SAVES = {"save_strategy": "steps", "save_steps": 2}
PLANS = [{"pipeline_devices": ["cpu"] * 3, "pipeline_schedule": "zb-h1"}, {"pipeline_devices": ["cpu"]}]


def is_pickle(file: Path) -> bool:
    try:
        pickle.loads(file.read_bytes())
    except Exception:
        return zipfile.is_zipfile(file)
    return True


def test_a_run_resumes_on_any_plan_with_the_same_losses(tmp_path):
    """Dropout draws the same numbers."""
    expected = saved(str(tmp_path), jobs.TWO, SAVES)
    for plan in PLANS:
        assert resumed(str(tmp_path), plan, {}) == expected


def test_no_file_is_a_pickle_and_the_weights_are_those_of_save_pretrained(tmp_path):
    trainer = jobs.trained(jobs.gpt2, jobs.TWO, output_dir=str(tmp_path), **SAVES)
    files = [path for path in (tmp_path / "checkpoint-6").rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "trainer_state.json", "training_args.json"} <= {f.name for f in files}
    assert [file for file in files if is_pickle(file)] == []
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-6")
    assert all(map(torch.equal, loaded.state_dict().values(), trainer.model.state_dict().values()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [jobs.gpt2, jobs.adapted_gpt2])
def test_the_best_model_is_loaded_at_the_end(make, tmp_path):
    """Each evaluation finds a lower score, so the first one is the best."""
    scores = iter(range(9, 0, -1))
    parts = {"compute_metrics": lambda _: {"score": next(scores)}}
    options = {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "score", "save_total_limit": 1}
    trainer = jobs.trained(make, jobs.TWO, output_dir=str(tmp_path), parts=parts, **SAVES, **options)
    first = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.state.best_global_step == first["step"] == 2
    assert trainer.evaluate()["eval_loss"] == first["eval_loss"]


def test_weights_alone_are_a_start(tmp_path):
    """With ``save_only_model`` training resumes from the weights, as Trainer's does."""
    trainer = jobs.trained(jobs.gpt2, jobs.TWO, output_dir=str(tmp_path), save_only_model=True, **SAVES)
    expected = jobs.trained(jobs.gpt2, None, output_dir=str(tmp_path), resume=str(tmp_path / "checkpoint-6"))
    found = jobs.trained(jobs.gpt2, jobs.TWO, output_dir=str(tmp_path), resume=str(tmp_path / "checkpoint-6"))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
    assert len(losses(trainer)) == 6
