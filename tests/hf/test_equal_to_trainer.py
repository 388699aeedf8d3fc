"""A PipelineTrainer prints what a Trainer prints, up to rounding, for every kind of model and every argument."""

import pytest
import torch
from torch.nn import functional
from transformers import TrainerCallback

from pipesched.errors import InputError
from tests.hf import jobs

ROUNDING = 1e-5


def check(make, pipeline=jobs.TWO, rounding=ROUNDING, **options):
    plain = jobs.figures(jobs.trained(make, **options))
    pipelined = jobs.figures(jobs.trained(make, pipeline, **options))
    worst, place = jobs.largest_difference(plain, pipelined)
    assert worst <= rounding, place
    return pipelined


@pytest.mark.one_in(2)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("make", [jobs.gpt2, jobs.llama, jobs.bert, jobs.t5, jobs.vit])
def test_a_kind_of_model(make, accumulation):
    """With accumulation 4, the last step of an epoch has fewer batches."""
    check(make, gradient_accumulation_steps=accumulation, include_num_input_tokens_seen="all")


@pytest.mark.parametrize("make", [jobs.token_classifier, jobs.sequence_classifier, jobs.regressor, jobs.adapted_gpt2])
def test_a_task(make):
    check(make)


@pytest.mark.parametrize("make", [jobs.gpt2, jobs.bert, jobs.t5, jobs.vit])
def test_label_smoothing(make):
    check(make, label_smoothing_factor=0.1, data=jobs.rows_with_decoder_inputs if make is jobs.t5 else None)


#: TrainingArguments that change what is trained or printed.
ARGUMENTS = {
    "warm-up and cosine": {"warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "rate by metric": {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"},
    "no clipping": {"max_grad_norm": 0.0},
    "tight clipping": {"max_grad_norm": 0.1},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "workers": {"dataloader_num_workers": 1},
    "epochs": {"num_train_epochs": 2, "max_steps": -1, "eval_strategy": "epoch", "gradient_accumulation_steps": 4},
    "no incomplete batch": {"dataloader_drop_last": True, "num_train_epochs": 1, "max_steps": -1},
    "evaluation in parts": {"eval_accumulation_steps": 2},
    "losses only": {"prediction_loss_only": True},
    "inputs for metrics": {"include_for_metrics": ["inputs", "loss"]},
    "evaluation at the start": {"eval_on_start": True},
    "weight decay": {"weight_decay": 0.3},
    "another optimizer": {"optim": "sgd"},
    "seed of the data": {"data_seed": 4},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_argument(options):
    check(jobs.gpt2, **options)


@pytest.mark.exhaustive
def test_compiled_layers():
    check(jobs.gpt2, torch_compile=True, torch_compile_backend="eager")


def test_bf16_rounds_as_trainer_does_if_no_batch_is_split():
    check(jobs.gpt2, {**jobs.TWO, "pipeline_microbatches": 2}, bf16=True)


def summed(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"].flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def mean(outputs, labels, num_items_in_batch=None):
    return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def test_a_loss_function_of_ones_own():
    check(jobs.bert, parts={"compute_loss_func": summed})
    with pytest.raises(InputError, match="divide by num_items_in_batch, or pass pipeline_microbatches=grad"):
        jobs.trained(jobs.bert, jobs.TWO, parts={"compute_loss_func": mean})
    check(jobs.bert, {**jobs.TWO, "pipeline_microbatches": 2}, parts={"compute_loss_func": mean})


def test_an_optimizer_of_ones_own():
    check(jobs.gpt2, parts={"optimizer_cls_and_kwargs": (torch.optim.RMSprop, {"lr": 1e-3})})

    def figures(pipeline):
        model = jobs.gpt2()
        parts = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.01), None)}
        return jobs.figures(jobs.trained(jobs.gpt2, pipeline, model=model, parts=parts))

    torch.manual_seed(0)
    plain = figures(None)
    torch.manual_seed(0)
    assert jobs.largest_difference(plain, figures(jobs.TWO))[0] <= ROUNDING


def test_generated_text_and_its_loss():
    check(jobs.t5, predict_with_generate=True, generation_max_length=8)


def test_callbacks_see_the_gradients_and_the_metrics_see_prepared_outputs():
    class Norms(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            self.seen.append(float(sum(parameter.grad.norm() for parameter in model.parameters())))

    plain, pipelined = Norms(), Norms()
    prepared = {"preprocess_logits_for_metrics": lambda outputs, labels: outputs.argmax(-1)}
    one = jobs.figures(jobs.trained(jobs.gpt2, None, parts={"callbacks": [plain], **prepared}))
    other = jobs.figures(jobs.trained(jobs.gpt2, jobs.TWO, parts={"callbacks": [pipelined], **prepared}))
    assert jobs.largest_difference(one, other)[0] <= ROUNDING
    assert plain.seen == pytest.approx(pipelined.seen, rel=1e-5)
    assert len(plain.seen) == 6


def test_predictions_without_labels():
    unlabelled = [
        {name: value for name, value in row.items() if name != "labels"} for row in jobs.rows(jobs.gpt2, 7, 9)
    ]
    expected, found = (
        jobs.trained(jobs.gpt2, pipeline).predict(unlabelled).predictions for pipeline in (None, jobs.TWO)
    )
    assert found.shape == (7, jobs.LENGTH, jobs.WORDS)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_noise_in_embeddings_trains():
    """The noise is drawn from the pipeline's own random numbers, so the losses are close, not equal."""
    check(jobs.gpt2, neftune_noise_alpha=0.1, rounding=0.05)


def test_evaluation_before_training():
    plain, pipelined = (jobs.trained(jobs.bert, pipeline, train=False) for pipeline in (None, jobs.TWO))
    expected, found = (trainer.evaluate()["eval_loss"] for trainer in (plain, pipelined))
    assert found == pytest.approx(expected, rel=1e-6)
    plain.train()
    pipelined.train()
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (plain, pipelined)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_callback_may_stop_within_a_step():
    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    trainer = jobs.trained(jobs.gpt2, jobs.TWO, parts={"callbacks": [Stop()]})
    assert trainer.state.global_step == 2
    trainer.callback_handler.callbacks.pop()
    trainer.train()
    assert trainer.state.global_step == 6
