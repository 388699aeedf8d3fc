"""Every TrainingArgument by name: equal to Trainer, refused, or beside training."""

import copy
import os
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, GenerationConfig, Seq2SeqTrainingArguments
from transformers.utils import logging

from pipesched.hf.refused_arguments import REFUSED
from tests.hf import jobs
from tests.hf import test_equal_to_trainer as others
from tests.hf import test_every_kind as kinds
from tests.hf.processes import in_processes

PINNED = re.search(r"^transformers==(.*)$", (Path(__file__).parents[2] / "constraints.txt").read_text(), re.MULTILINE)

#: A run -> its arguments. None has its default.
EQUAL = {
    "optimizer": {
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-4},
        "warmup_steps": 0.4,
        "optim": "adamw_torch",
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-3,
        "weight_decay": 0.2,
        "max_grad_norm": 0.2,
        "optim_target_modules": "all-linear",
        "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 3,
        "max_steps": 5,
        "seed": 5,
        "data_seed": 4,
        "tf32": False,
        "use_cpu": True,
        "use_cache": True,
        "eval_on_start": True,
        "eval_accumulation_steps": 2,
        "include_for_metrics": ["inputs", "loss"],
        "label_names": ["labels"],
        "remove_unused_columns": False,
        "accelerator_config": {
            "even_batches": False,
            "use_seedable_sampler": False,
            "non_blocking": True,
            "gradient_accumulation_kwargs": {"sync_each_batch": True},
        },
    },
    "data": {
        "optim": "sgd",
        "optim_args": "momentum=0.9,nesterov=true",
        "lr_scheduler_type": "greedy",
        "num_train_epochs": 2,
        "logging_strategy": "epoch",
        "eval_strategy": "epoch",
        "include_num_input_tokens_seen": "non_padding",
        "prediction_loss_only": True,
        "label_smoothing_factor": 0.1,
        "train_sampling_strategy": "batch_rebalance",
        "length_column_name": "size",
        "dataloader_drop_last": True,
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 1,
        "dataloader_multiprocessing_context": "fork",
        "dataloader_in_order": False,
        "dataloader_pin_memory": False,
    },
    "logs, and what belongs to a refused argument": {
        "logging_first_step": True,
        "logging_steps": 4,
        "logging_nan_inf_filter": False,
        "log_level": "error",
        "log_level_replica": "error",
        "log_on_each_node": False,
        "disable_tqdm": False,
        "run_name": "run",
        "project": "project",
        "trackio_space_id": "space",
        "trackio_bucket_id": "bucket",
        "trackio_static_space_id": "static",
        "skip_memory_metrics": False,
        "eval_delay": 3,
        "eval_steps": 2,
        "eval_do_concat_batches": False,
        "do_train": True,
        "do_eval": True,
        "do_predict": True,
        "resume_from_checkpoint": "read by scripts",
        "local_rank": 0,
        "fsdp_config": {"min_num_params": 1},
        "liger_kernel_config": {"rope": True},
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "hub_token": "token",
        "hub_model_id": "model",
        "hub_private_repo": True,
        "hub_always_push": True,
        "hub_strategy": "end",
        "hub_revision": "main",
    },
    "compiled": {
        "torch_compile": True,
        "torch_compile_backend": "eager",
        "torch_compile_mode": "reduce-overhead",
        "full_determinism": True,
        "batch_eval_metrics": True,
        "max_steps": 2,
        "eval_steps": 2,
    },
}

CHECKPOINTS = {
    "save_strategy": "best",
    "save_steps": 2,
    "save_total_limit": 2,
    "save_only_model": True,
    "enable_jit_checkpoint": True,
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_size",
    "greater_is_better": True,
    "ignore_data_skip": True,
    "restore_callback_states_from_checkpoint": True,
}

GENERATION = {
    "predict_with_generate": True,
    "sortish_sampler": True,
    "generation_max_length": 8,
    "generation_num_beams": 2,
    "generation_config": GenerationConfig(decoder_start_token_id=0, pad_token_id=0, max_new_tokens=6),
}

PROCESSES = {
    "average_tokens_across_devices": False,
    "ddp_backend": "gloo",
    "ddp_timeout": 99,
    "train_sampling_strategy": "batch_rebalance",
}

#: Argument -> a test elsewhere.
ELSEWHERE = {
    "bf16": others.test_bf16_rounds_as_trainer_does_if_no_batch_is_split,
    "neftune_noise_alpha": others.test_noise_in_embeddings_trains,
}

#: Argument -> why no training step depends on it.
BESIDE = {
    "output_dir": "names the folder; test_checkpoints.py reads it",
    "report_to": "adds callbacks that send the figures elsewhere",
}


@pytest.mark.skipif(transformers.__version__ != PINNED[1], reason="other versions of transformers have other arguments")
def test_the_tables_name_every_argument():
    tested = {name for run in (*EQUAL.values(), CHECKPOINTS, GENERATION, PROCESSES) for name in run} | {*ELSEWHERE}
    groups = [tested, {*REFUSED}, {*BESIDE}]
    names = {field.name for field in fields(Seq2SeqTrainingArguments)}
    assert set().union(*groups) ^ names == set()
    assert sum(map(len, groups)) == len(names)


@pytest.mark.parametrize("run", [*EQUAL.values(), CHECKPOINTS, GENERATION, PROCESSES])
def test_no_argument_of_a_run_has_its_default(run):
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(Seq2SeqTrainingArguments)
    }
    assert [name for name, value in run.items() if value == defaults.get(name, MISSING)] == []


@pytest.fixture
def _as_before(monkeypatch):
    """Undo what arguments set for the whole process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)
    torch.use_deterministic_algorithms(False)


def padded(texts):
    """Join texts of different lengths into a batch."""
    names = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([text[name] for text in texts], batch_first=True, padding_value=value)
        for name, value in names.items()
    }


def texts(count, seed):
    """Return texts of different lengths, without padding."""
    rows = jobs.rows(jobs.gpt2, count, seed)
    return [{name: value[: int(row["attention_mask"].sum())] for name, value in row.items()} for row in rows]


def sizes_of_batches(prediction):
    return {"size": float(sum(abs(outputs).mean() for outputs in prediction.predictions))}


def sums():
    """Return metrics that get one batch at a time."""
    seen = {"rows": 0, "size": 0.0}

    def add(prediction, compute_result):
        seen["rows"] += len(prediction.predictions)
        seen["size"] += float(abs(prediction.predictions).mean())
        return seen if compute_result else {}

    return add


PARTS = {
    "data": lambda: {"data_collator": padded},
    "logs, and what belongs to a refused argument": lambda: {"compute_metrics": sizes_of_batches},
    "compiled": lambda: {"compute_metrics": sums()},
}


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("name", EQUAL)
def test_a_run_equals_trainer(name):
    """Compiled stages need a model whose code does not depend on the padding of a batch."""
    make = jobs.vit if name == "compiled" else jobs.gpt2
    found = []
    for pipeline in (None, jobs.TWO):
        parts, options = PARTS.get(name, dict)(), copy.deepcopy(EQUAL[name])  # Trainer changes some values
        options |= {"max_steps": -1} if "num_train_epochs" in options else {}
        data = texts if "data_collator" in parts else None
        found.append(jobs.figures(jobs.trained(make, pipeline, parts=parts, data=data, **options)))
    worst, place = jobs.largest_difference(*found)
    assert worst <= others.ROUNDING, place


@pytest.mark.exhaustive
def test_a_resumed_run_equals_trainer(tmp_path):
    """The second run takes the patience of 5 from the checkpoint."""
    found = []
    for pipeline in (None, jobs.TWO):
        folder = tmp_path / str(pipeline is None)
        for start, patience in ((None, 5), (f"{folder}/checkpoint-2", 1)):
            parts = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=patience)]}
            options = {"output_dir": str(folder), "max_steps": 4, **CHECKPOINTS}
            trainer = jobs.trained(jobs.gpt2, pipeline, parts=parts, resume=start, **options)
            state = jobs.figures(trainer)
            best = Path(state.pop("best_model_checkpoint")).name
            found.append([state, best, trainer.evaluate()["eval_loss"]])
            assert {path.name for path in folder.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    assert len(found[1][0]["stateful_callbacks"]) == 2
    for plain, pipelined in zip(found[:2], found[2:], strict=True):
        worst, place = jobs.largest_difference(plain, pipelined)
        assert worst <= others.ROUNDING, place


def test_generated_text_equals_trainer():
    others.check(jobs.t5, max_steps=3, **GENERATION)


def figures_of_replicas(pipeline):
    """Train with texts of different lengths, then with data without a length, whose third step starts an epoch."""
    streamed = {"accelerator_config": {"dispatch_batches": False}, "per_device_train_batch_size": 6}
    runs = [
        {"parts": {"data_collator": padded}, "data": texts, **PROCESSES},
        {"data": kinds.streamed, **streamed},
    ]
    common = {"max_steps": 3}
    return [jobs.figures(jobs.trained(jobs.gpt2, pipeline, **common, **run)) for run in runs]


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_two_replicas_of_two_ranks_equal_two_replicas():
    """Each replica counts its own labels, and a sampler that balances batches balances them over replicas."""
    plain = in_processes(2, figures_of_replicas, None)[0]
    found = in_processes(4, figures_of_replicas, {"pipeline_schedule": "1f1b", "pipeline_parallel_size": 2})[0]
    worst, place = jobs.largest_difference(plain, found)
    assert worst <= others.ROUNDING, place


#: Optimizers and schedules of the learning rate that need no other package.
KINDS = {
    **{name: {"optim": name} for name in ("adamw_torch_fused", "adafactor", "adagrad", "rmsprop")},
    **{
        name: {"lr_scheduler_type": name, "warmup_steps": 1, "lr_scheduler_kwargs": given}
        for name, given in {
            "cosine_with_restarts": {"num_cycles": 2},
            "polynomial": {"power": 2.0},
            "constant_with_warmup": None,
            "inverse_sqrt": None,
            "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
            "warmup_stable_decay": {"num_decay_steps": 2},
        }.items()
    },
}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_or_schedule_equals_trainer(name):
    """Adafactor enlarges the rounding of small gradients."""
    others.check(jobs.gpt2, rounding=1e-4 if name == "adafactor" else others.ROUNDING, max_steps=4, **KINDS[name])
