"""Over processes, a PipelineTrainer has the figures of a Trainer with as many replicas, and resumes on other ranks."""

import pytest
import torch
from torch.nn import functional
from transformers import GPT2LMHeadModel

from pipesched.errors import InputError
from tests.hf import jobs
from tests.hf.processes import in_processes

pytestmark = pytest.mark.timeout(200)


def figures(make, pipelines, options):
    """Train with each of these PipelineArguments in turn; return the figures of each."""
    return [jobs.figures(jobs.trained(make, pipeline, **options)) for pipeline in pipelines]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("make", [jobs.bert, jobs.t5, jobs.gpt2])
def test_two_ranks_equal_one_process(make):
    """All processes keep the same state."""
    options = {"include_num_input_tokens_seen": "all"}
    plain = jobs.figures(jobs.trained(make, **options))
    pipeline = {"pipeline_schedule": "1f1b"}
    for (found,) in in_processes(2, figures, make, [pipeline], options):
        found |= {"is_world_process_zero": True, "is_local_process_zero": True}
        assert jobs.largest_difference(plain, found)[0] <= 1e-5


@pytest.mark.one_in(9)
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("make", [jobs.gpt2, jobs.bert, jobs.vit])
def test_two_replicas_of_two_ranks_equal_two_replicas(make, zero):
    """Also with what ``zero`` splits over the replicas, and where the last batch of the evaluation is incomplete."""
    options = {"include_num_input_tokens_seen": "all"}
    ((plain,), _) = in_processes(2, figures, make, [None], options)
    pipeline = {"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2, "pipeline_zero": zero}
    (found,) = in_processes(4, figures, make, [pipeline], options)[0]
    worst, place = jobs.largest_difference(plain, found)
    assert worst <= 1e-5, place


def padded_by_batch(count, seed):
    """Return texts of different lengths, which a collator pads to the longest of each batch."""
    texts = jobs.rows(jobs.sequence_classifier, count, seed)
    for row in texts:
        length = int(row["attention_mask"].sum())
        row |= {name: row[name][:length] for name in ("input_ids", "attention_mask")}
    return texts


def padding(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.stack([functional.pad(row[name], (0, longest - len(row[name]))) for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}


def test_replicas_whose_first_batches_have_different_lengths():
    options = {"data": padded_by_batch, "parts": {"data_collator": padding}, "max_steps": 2, "eval_steps": 2}
    make = jobs.sequence_classifier
    ((plain,), _) = in_processes(2, figures, make, [None], options)
    pipeline = {"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2}
    ((found,), *_) = in_processes(4, figures, make, [pipeline], options)
    worst, place = jobs.largest_difference(plain, found)
    assert worst <= 1e-5, place


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def saved(folder, pipeline, options):
    model = jobs.gpt2(dropout=0.1)
    return losses(jobs.trained(jobs.gpt2, pipeline, model=model, output_dir=folder, **options))


def resumed(folder, pipeline, options):
    model = jobs.gpt2(dropout=0.1)
    start = f"{folder}/checkpoint-2"
    return losses(jobs.trained(jobs.gpt2, pipeline, model=model, resume=start, output_dir=folder, **options))


@pytest.mark.exhaustive
def test_training_resumes_on_other_ranks_with_the_same_losses(tmp_path):
    """From two ranks in one process to four over processes, with dropout and bit by bit; then to two replicas."""
    folder, saves = str(tmp_path), {"save_strategy": "steps", "save_steps": 2}
    expected = saved(folder, jobs.TWO, saves)
    assert in_processes(4, resumed, folder, {"pipeline_schedule": "zb-h1"}, {})[0] == expected
    replicas = {"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2, "pipeline_zero": 1}
    found = in_processes(4, resumed, folder, replicas, {"gradient_accumulation_steps": 1})[0]
    assert found == pytest.approx(expected, rel=1e-5)


def other_tasks(folder):
    """Train an adapter over ranks, then generate text; return what was saved, and the figures of the evaluation."""
    pipeline = {"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2}
    jobs.trained(jobs.adapted_gpt2, pipeline, output_dir=folder, save_strategy="steps", save_steps=6)
    options = {"predict_with_generate": True, "generation_max_length": 8, "max_steps": 3}
    generated = jobs.trained(jobs.t5, pipeline, **options)
    return [entry for entry in jobs.figures(generated)["log_history"] if "eval_loss" in entry]


def test_an_adapter_and_generated_text_over_ranks(tmp_path):
    found, other = in_processes(2, other_tasks, str(tmp_path))
    assert found == other
    plain = jobs.trained(jobs.t5, None, predict_with_generate=True, generation_max_length=8, max_steps=3)
    expected = [entry for entry in jobs.figures(plain)["log_history"] if "eval_loss" in entry]
    assert jobs.largest_difference(expected, found)[0] <= 1e-5
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {
        path.name for path in (tmp_path / "checkpoint-6").iterdir()
    }


def with_tensor_ranks(folder, options):
    """Train with layers that two processes split, and with an optimizer that cannot; return figures and the error."""
    pipeline = {"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2, "pipeline_tensor_size": 2}
    found = jobs.figures(jobs.trained(jobs.gpt2, pipeline, **options))
    saved(folder, pipeline, {"save_strategy": "steps", "save_steps": 2})
    try:
        jobs.trained(jobs.gpt2, pipeline, optim="adafactor")
    except InputError as error:
        return found, str(error)
    return found, ""


@pytest.mark.exhaustive
def test_layers_that_two_processes_split_equal_whole_layers_and_resume_as_such(tmp_path):
    options = {"include_num_input_tokens_seen": "all"}
    folder = str(tmp_path / "split")
    found, error = in_processes(4, with_tensor_ranks, folder, options)[0]
    worst, place = jobs.largest_difference(jobs.figures(jobs.trained(jobs.gpt2, **options)), found)
    assert worst <= 1e-5, place
    assert "got pipeline_tensor_size=2 and Adafactor; pass optim='adamw_torch'" in error
    plain = saved(str(tmp_path / "plain"), jobs.TWO, {"save_strategy": "steps", "save_steps": 2})
    assert resumed(folder, jobs.TWO, {}) == pytest.approx(plain, rel=1e-5)
    weights = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-2")
    assert weights.lm_head.weight is weights.transformer.wte.weight
