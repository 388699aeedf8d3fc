"""A PipelineTrainer prints what a Trainer prints, up to rounding, for every kind of model and every argument."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback, TrainingArguments

from pipesched.errors import InputError
from pipesched.hf import PipelineArguments, PipelineTrainer
from tests.hf import jobs

ROUNDING = 1e-5


def check(make, pipeline=jobs.TWO, rounding=ROUNDING, **options):
    plain = jobs.figures(jobs.trained(make, **options))
    pipelined = jobs.figures(jobs.trained(make, pipeline, **options))
    worst, place = jobs.largest_difference(plain, pipelined)
    assert worst <= rounding, place
    return pipelined


@pytest.mark.one_in(16)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("make", [jobs.gpt2, jobs.llama, jobs.bert, jobs.t5, jobs.vit])
def test_a_kind_of_model(make, accumulation):
    """With accumulation 4, the last step of an epoch has fewer batches."""
    check(make, gradient_accumulation_steps=accumulation, include_num_input_tokens_seen="all")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("make", [jobs.token_classifier, jobs.sequence_classifier, jobs.regressor, jobs.adapted_gpt2])
def test_a_task(make):
    check(make)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("make", [jobs.gpt2, jobs.bert, jobs.t5, jobs.vit])
def test_label_smoothing(make):
    check(make, label_smoothing_factor=0.1, data=jobs.rows_with_decoder_inputs if make is jobs.t5 else None)


#: Combinations of TrainingArguments. Each argument by itself is in test_every_argument.py.
ARGUMENTS = {
    "warm-up and cosine": {"warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "rate by metric": {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"},
    "no clipping": {"max_grad_norm": 0.0},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "epochs": {"num_train_epochs": 2, "max_steps": -1, "eval_strategy": "epoch", "gradient_accumulation_steps": 4},
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_argument(options):
    check(jobs.gpt2, **options)


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


def few_labels(count, seed):
    """Return texts of which some have no labels, as a collator for masked language models makes them."""
    texts = jobs.rows(jobs.bert, count, seed)
    for row in texts[::2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    return texts


def no_labels(count, seed):
    return [{**row, "labels": torch.full_like(row["labels"], -100)} for row in jobs.rows(jobs.bert, count, seed)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("data", [few_labels, no_labels])
def test_rows_without_labels(data):
    """The mean over the labels of a micro-batch without labels is NaN, but counts 0. Without any label it is NaN."""
    check(jobs.bert, data=data, gradient_accumulation_steps=1)


class Mixture(MixtralForCausalLM):
    """A language model that adds a loss of its experts, which is neither a sum nor a mean over rows."""

    def __init__(self):
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
        super().__init__(MixtralConfig(vocab_size=jobs.WORDS, intermediate_size=32, **size, **experts))


class Pairs(nn.Module):
    """Compares each row with all rows of its batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        scores = self.first(x).tanh() @ self.second(y).tanh().T
        return {"loss": functional.cross_entropy(scores, torch.arange(len(x))), "scores": scores}


def pairs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(8, generator=generator), "y": torch.randn(8, generator=generator)} for _ in range(count)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("make", "data"), [(Mixture, None), (Pairs, pairs)])
def test_a_loss_that_needs_whole_batches(make, data):
    data = data or (lambda count, seed: jobs.rows(jobs.llama, count, seed))
    parts = {"compute_metrics": None}
    with pytest.raises(InputError, match=f"the loss of {make.__name__} for some rows .* pipeline_microbatches=2"):
        jobs.trained(make, jobs.TWO, data=data, parts=parts)
    check(make, {**jobs.TWO, "pipeline_microbatches": 2}, data=data, parts=parts)


class Classifier(nn.Module):
    """A model that is not one of Hugging Face's, with an argument ``target`` and a loss that is a sum."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, jobs.CLASSES)

    def forward(self, x, target=None):
        outputs = self.last(self.first(x).tanh())
        return {"loss": functional.cross_entropy(outputs, target, reduction="sum"), "logits": outputs}


class LabelClassifier(Classifier):
    def forward(self, x, labels=None):
        return super().forward(x, labels)


@pytest.mark.parametrize(("make", "name"), [(Classifier, "target"), (LabelClassifier, "labels")])
def test_a_sum_of_labels_of_any_name(make, name):
    def data(count, seed):
        return [{"x": row["x"], name: number % jobs.CLASSES} for number, row in enumerate(pairs(count, seed))]

    check(make, data=data, label_names=[name])


class OwnOptimizer(PipelineTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        return self.optimizer


def test_a_method_that_makes_an_optimizer(tmp_path):
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    pipeline = PipelineArguments(**jobs.TWO)
    data = jobs.rows(jobs.gpt2, 16, 1)
    trainer = OwnOptimizer(model=jobs.gpt2(), args=arguments, pipeline=pipeline, train_dataset=data)
    before = jobs.weights(trainer)
    trainer.train()
    assert not any(torch.equal(one, other) for one, other in zip(before, jobs.weights(trainer), strict=True))


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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
