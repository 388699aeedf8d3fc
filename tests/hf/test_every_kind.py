"""Kinds of data, models and uses of a Trainer that a PipelineTrainer follows."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import IterableDataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    PreTrainedTokenizerFast,
)

from pipesched.errors import InputError
from tests.hf import jobs
from tests.hf.test_equal_to_trainer import ROUNDING, check

SMALL = {
    "vocab_size": jobs.WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def streamed(count, seed):
    return Stream(jobs.rows(jobs.gpt2, count, seed))


def test_data_without_a_length():
    """The data end within the eighth step, whose batch joins the next step; the evaluation has an incomplete batch."""
    check(jobs.gpt2, data=streamed, max_steps=10, eval_steps=10)
    check(jobs.bert, data=streamed, max_steps=10, eval_strategy="no")


def test_several_evaluation_data_sets():
    sets = {"short": jobs.rows(jobs.gpt2, 5, 5), "long": jobs.rows(jobs.gpt2, 7, 6)}
    found = check(jobs.gpt2, max_steps=3, parts={"eval_dataset": sets})
    assert {"eval_short_loss", "eval_long_loss"} <= {name for entry in found["log_history"] for name in entry}


def answers():
    return BertForQuestionAnswering(BertConfig(**SMALL))


def questions(count, seed):
    rows = enumerate(jobs.rows(jobs.bert, count, seed))
    return [
        {"input_ids": row["input_ids"], "start_positions": number % 3, "end_positions": 3 + number % 4}
        for number, row in rows
    ]


def test_a_model_with_two_labels_of_other_names():
    check(answers, max_steps=3, data=questions, parts={"compute_metrics": None})


def choices():
    return BertForMultipleChoice(BertConfig(**SMALL))


def pairs(count, seed):
    rows = enumerate(jobs.rows(jobs.bert, count, seed))
    return [{"input_ids": torch.stack([row["input_ids"], row["input_ids"] - 1]), "labels": n % 2} for n, row in rows]


def test_a_model_that_scores_several_texts_of_a_row():
    """With SGD: Adam would enlarge the rounding of the bias, whose gradient is zero."""
    check(choices, max_steps=3, data=pairs, optim="sgd")


@pytest.mark.parametrize("make", [jobs.gpt2, jobs.vit])
def test_predictions_if_no_label_has_a_name(make):
    """Trainer then counts the loss among the outputs."""

    def predictions(pipeline):
        options = {"label_names": [], "max_steps": 1, "eval_strategy": "no", "parts": {"compute_metrics": None}}
        return jobs.trained(make, pipeline, **options).predict(jobs.rows(make, 7, 9)).predictions

    for expected, found in zip(predictions(None), predictions(jobs.TWO), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_tokenizer_is_saved_with_each_checkpoint(tmp_path):
    words = {"[PAD]": 0, **{f"w{number}": number for number in range(1, jobs.WORDS)}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="[PAD]")
    parts = {"processing_class": tokenizer}
    rows = [{"input_ids": [1] * length, "labels": length % 5} for length in range(3, 11)]

    def data(count, seed):
        return rows * (count // 8)

    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "data": data, "eval_strategy": "no"}
    check(jobs.sequence_classifier, parts=parts, output_dir=str(tmp_path), **options)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "checkpoint-2")
    assert loaded.get_vocab() == words


def test_trials_as_those_of_a_hyperparameter_search():
    """Each call of ``train`` makes a new model and a new pipeline. What a trial sets may be refused, too."""

    def losses(pipeline):
        parts = {"model": None, "model_init": lambda trial: jobs.gpt2()}
        options = {"max_steps": 2, "eval_strategy": "no", "train": False, "parts": parts}
        trainer = jobs.trained(jobs.gpt2, pipeline, **options)
        found = []
        for rate, accumulation in ((0.01, 2), (0.002, 4), (0.01, 2)):
            trainer.args.learning_rate, trainer.args.gradient_accumulation_steps = rate, accumulation
            trainer.train()
            found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        return trainer, found

    _, expected = losses(None)
    trainer, found = losses(jobs.TWO)
    assert found[0] == found[2] != found[1]
    for plain, pipelined in zip(expected, found, strict=True):
        assert pipelined == pytest.approx(plain, rel=ROUNDING)
    trainer.args.torch_empty_cache_steps = 2
    with pytest.raises(InputError, match="got torch_empty_cache_steps=2"):
        trainer.create_accelerator_and_postprocess()
