"""A run whose processes are killed resumes on another plan, with the losses of a run that nobody disturbed."""

import os
import pkgutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState

from tests.hf import jobs
from tests.hf.processes import exit_codes, in_processes
from tests.hf.test_over_processes import losses

pytestmark = pytest.mark.timeout(300)

KILLED = -signal.SIGKILL
FOUR_PARTS = {"pipeline_schedule": "1f1b", "pipeline_microbatches": 4}
THREE_STAGES = {"pipeline_devices": ["cpu"] * 3, "pipeline_schedule": "zb-h1"}
SAVES = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wet_gpt2() -> Any:
    return jobs.gpt2(dropout=0.1)


def losses_of(pipeline: dict[str, Any], folder: str, resume: Any = True, **options: Any) -> list[float]:
    """Return the losses of all steps, also of those before the checkpoint from which the run resumes."""
    return losses(jobs.trained(wet_gpt2, pipeline, output_dir=folder, resume=resume, **{**SAVES, **options}))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of(jobs.TWO, str(tmp_path_factory.mktemp("whole")), resume=None)


# ---- within a training step -----------------------------------------------------------------------------------------


class DiesInBackward(TrainerCallback):
    """Kills its process in the first backward of the fourth step. The newest checkpoint is that of the second step."""

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 3:
            for parameter in model.parameters():
                parameter.register_hook(die)


def killed_in_step(folder: str) -> None:
    callbacks = [DiesInBackward()] if os.environ["RANK"] == "1" else []
    losses_of(FOUR_PARTS, folder, resume=None, parts={"callbacks": callbacks})


def check_killed_in_step(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["checkpoint-2"]
    assert TrainerState.load_from_json(str(folder / "checkpoint-2" / "trainer_state.json")).global_step == 2


@pytest.mark.exhaustive
def test_one_of_two_ranks_is_killed_within_a_step(tmp_path, undisturbed):
    """The other rank ends by itself, with an error. The run resumes in one process, on three stages."""
    assert exit_codes(2, 1, killed_in_step, str(tmp_path), kills_others=False) == [1, KILLED]
    check_killed_in_step(tmp_path)
    assert losses_of(THREE_STAGES, str(tmp_path)) == undisturbed


@pytest.mark.exhaustive
def test_all_of_four_ranks_are_killed_within_a_step(tmp_path, undisturbed):
    """The run resumes on two ranks."""
    assert exit_codes(4, 1, killed_in_step, str(tmp_path), kills_others=True) == [KILLED] * 4
    check_killed_in_step(tmp_path)
    assert in_processes(2, losses_of, FOUR_PARTS, str(tmp_path)) == [undisturbed] * 2


# ---- within a save --------------------------------------------------------------------------------------------------


def dies_at(name: str, call: int, first: Callable[..., Any]) -> None:
    """Kill this process at a call of a function, in place of the function.

    Args:
        name: the dotted name of the function.
        call: the number of the call, from 1.
        first: called with the arguments of this call, before the process is killed.

    """
    owner, attribute = name.rsplit(".", 1)
    function, calls = pkgutil.resolve_name(name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            first(*args, **kwargs)
            die()
        return function(*args, **kwargs)

    setattr(pkgutil.resolve_name(owner), attribute, counted)


def write_half(state: TrainerState, path: str) -> None:
    Path(path).write_text('{"global_step": 4, "log_')


_NO_STATE, _NO_RUN = "has no trainer_state.json", "has no pipeline/manifest.json"
#: A moment of a save -> the function before which a process is killed, what happens first, and what the folder lacks.
MOMENTS = {
    "before the weights": ("pipesched.saving.exported_weights.write_tensors", die, _NO_STATE),
    "before the run": ("pipesched.pipeline.pipeline.Pipeline.save", die, _NO_STATE),
    "before a part of the run": ("pipesched.saving.writing.write_tensors", die, _NO_RUN),
    "before the manifest": ("pipesched.saving.writing.commit", die, _NO_RUN),
    "before the trainer's state": ("transformers.TrainerState.save_to_json", die, _NO_STATE),
    "within the trainer's state": (
        "transformers.TrainerState.save_to_json",
        write_half,
        "has only a part of trainer_state.json",
    ),
}


def killed_in_save(pipeline: dict[str, Any], folder: str, moment: str) -> None:
    """Train until the second save, of step 4. The last rank dies there. Each save replaces the one before."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        name, first, _ = MOMENTS[moment]
        dies_at(name, 2, first)
    losses_of(pipeline, folder, resume=None, save_total_limit=1)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_is_killed_within_a_save(moment, tmp_path, undisturbed):
    """The checkpoint before is still there, and the run resumes from it."""
    assert exit_codes(1, 0, killed_in_save, jobs.TWO, str(tmp_path), moment, kills_others=True) == [KILLED]
    with pytest.warns(UserWarning, match=f"from .*checkpoint-2, because .*checkpoint-4 {MOMENTS[moment][-1]}"):
        assert losses_of(THREE_STAGES, str(tmp_path), save_total_limit=1) == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]


def test_one_of_two_ranks_is_killed_within_a_save(tmp_path, undisturbed):
    """The other rank ends by itself, with an error. The run resumes on four ranks."""
    moment = "before a part of the run"
    codes = exit_codes(2, 1, killed_in_save, FOUR_PARTS, str(tmp_path), moment, kills_others=False)
    assert codes == [1, KILLED]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert in_processes(4, losses_of, FOUR_PARTS, str(tmp_path)) == [undisturbed] * 4
