"""What a pipeline cannot honour is refused by name, with a remedy."""

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from pipesched.errors import InputError
from pipesched.hf import PipelineArguments, PipelineTrainer
from pipesched.hf.refused_arguments import REFUSED, REFUSED_OPTIMIZERS, check_arguments, check_callbacks
from pipesched.model.named_parameters import NamedParameters
from tests.hf import jobs


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_is_refused_by_its_name(name, tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    check_arguments(arguments, PipelineArguments())
    object.__setattr__(arguments, name, "something")
    with pytest.raises(InputError, match=f"got {name}='something'; .*; .*"):
        check_arguments(arguments, PipelineArguments())


OPTIMIZERS = [one.value for one in OptimizerNames if one.value.startswith(tuple(REFUSED_OPTIMIZERS))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_whole_models_is_refused(name, tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", optim=name)
    with pytest.raises(InputError, match=f"got optim='{name}'; .*; pass optim='adafactor', .*, or optim='adamw_torch'"):
        check_arguments(arguments, PipelineArguments())


class Swapped(torch.optim.SGD):
    """Changes the weights for evaluations, as optimizers without a schedule do."""

    def eval(self):
        raise AssertionError


def test_an_optimizer_that_changes_weights_for_evaluations_with_zero():
    parts = {"optimizer_cls_and_kwargs": (Swapped, {"lr": 1e-3})}
    trainer = jobs.trained(jobs.gpt2, {**jobs.TWO, "pipeline_zero": 1}, parts=parts, train=False)
    with pytest.raises(InputError, match="got pipeline_zero=1 and Swapped; pass pipeline_zero=0"):
        trainer._optimizer_of_stage(NamedParameters(list(trainer.model.named_parameters())))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pipeline_microbatches": 0}, "pipeline_microbatches must be a whole number"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size must be a whole number"),
        ({"pipeline_tensor_size": 0}, "pipeline_tensor_size must be a whole number of at least 1; got 0"),
        ({"pipeline_plan": "plan.json", "pipeline_schedule": "1f1b"}, "a plan fixes the schedule"),
    ],
)
def test_options_that_contradict(given, text):
    with pytest.raises(InputError, match=text):
        PipelineArguments(**given)


def test_a_size_of_processes_in_one_process():
    with pytest.raises(InputError, match="pass pipeline_devices, or start the script with torchrun"):
        jobs.trained(jobs.gpt2, {"pipeline_parallel_size": 2})
    with pytest.raises(InputError, match="pipeline_tensor_size counts processes; got pipeline_tensor_size=2 in one"):
        jobs.trained(jobs.gpt2, {"pipeline_tensor_size": 2})


def test_microbatches_that_batches_cannot_share():
    with pytest.raises(InputError, match="pass a multiple, such as pipeline_microbatches=4"):
        jobs.trained(jobs.gpt2, {**jobs.TWO, "pipeline_microbatches": 3})


def test_a_loss_that_is_a_method():
    class Own(PipelineTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
    with pytest.raises(InputError, match="Own has its own compute_loss; pass compute_loss_func= instead"):
        Own(model=jobs.gpt2(), args=arguments)


def test_a_callback_that_reads_gradients_with_zero():
    class Reads(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            pass

    check_callbacks([Reads(), TrainerCallback()], PipelineArguments())
    check_callbacks([TrainerCallback()], PipelineArguments(pipeline_zero=1))
    with pytest.raises(InputError, match="a callback Reads with this method; pass pipeline_zero=0"):
        check_callbacks([Reads()], PipelineArguments(pipeline_zero=1))
