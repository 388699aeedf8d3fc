"""Training resumes from complete checkpoints only, and incomplete ones do not count as checkpoints to keep."""

import os
import re
import time

import pytest

from pipesched.errors import DamagedCheckpointError
from pipesched.hf.whole_checkpoints import begin_save, check_whole, newest_whole
from tests.hf import jobs


def make(folder, *steps, whole):
    """Make folders of checkpoints, with a state of Trainer if they are ``whole``."""
    for step in steps:
        made = folder / f"checkpoint-{step}"
        made.mkdir()
        if whole:
            (made / "trainer_state.json").write_text("{}")


def test_the_newest_complete_checkpoint_is_found_by_its_number(tmp_path):
    make(tmp_path, 8, 10, whole=True)
    make(tmp_path, 9, 100, whole=False)
    (tmp_path / "checkpoint-200").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    expected = tmp_path / "checkpoint-10", [f"{tmp_path}/checkpoint-100 has no trainer_state.json"]
    assert newest_whole(tmp_path) == expected


def test_a_folder_whose_run_is_half_deleted_is_not_complete(tmp_path):
    make(tmp_path, 2, 4, whole=True)
    (tmp_path / "checkpoint-4" / "pipeline").mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint-4 has no pipeline/manifest\.json, so its save"):
        check_whole(tmp_path / "checkpoint-4")


def test_an_incomplete_checkpoint_is_refused_by_name(tmp_path):
    make(tmp_path, 2, whole=True)
    make(tmp_path, 4, whole=False)
    trainer = jobs.trained(jobs.gpt2, jobs.TWO, train=False, output_dir=str(tmp_path))
    remedy = re.escape(f"so its save was interrupted; pass '{tmp_path}/checkpoint-2', the newest complete checkpoint")
    with pytest.raises(DamagedCheckpointError, match=f"checkpoint-4 has no trainer_state.json, {remedy}"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_no_checkpoint_is_complete(tmp_path):
    trainer = jobs.trained(jobs.gpt2, jobs.TWO, train=False, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    make(tmp_path, 2, 4, whole=False)
    for resume in (True, str(tmp_path / "checkpoint-2")):
        with pytest.raises(DamagedCheckpointError, match="leave resume_from_checkpoint out, to start from the first"):
            trainer.train(resume_from_checkpoint=resume)


def test_a_checkpoint_that_is_written_again_is_incomplete_until_then(tmp_path):
    make(tmp_path, 2, 4, whole=True)
    begin_save(tmp_path / "checkpoint-4", removes_others=False)
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoint-2"


def test_incomplete_checkpoints_do_not_displace_complete_ones(tmp_path):
    """Trainer alone would keep checkpoint-5, because it changed last, and delete all others."""
    make(tmp_path, 5, whole=False)
    later = time.time() + 1000
    os.utime(tmp_path / "checkpoint-5", (later, later))
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 4, "eval_strategy": "no"}
    jobs.trained(jobs.gpt2, jobs.TWO, output_dir=str(tmp_path), **saves)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-4", [])
