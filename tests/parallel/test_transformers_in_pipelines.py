"""Models of transformers that "auto" divides train over stages and tensor ranks as in one process."""

import pytest

from tests.support.rank_processes import preload

preload("tests.support.divided_transformers")  # importing transformers takes seconds


def job(process_group, *args):
    from tests.support.jobs.divided_transformers import Training, difference

    return difference(process_group, Training(*args))


CASES = [
    ("gpt2", "eager", "1f1b"),
    ("gpt2", "sdpa", "zb-h1"),
    ("llama", "eager", "1f1b"),
    ("llama", "sdpa", "zb-h1"),
    ("bert", "eager", "1f1b"),
    ("bert", "sdpa", "zb-h1"),
    ("t5", "sdpa", "1f1b"),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_models_train_as_in_one_process(four, case):
    """With dropout, clipping, padding, uneven labels of -100 and tied heads."""
    assert max(four.run(4, job, *case, timeout_s=100)) < 1e-5


@pytest.mark.exhaustive
def test_a_frozen_embedding_with_a_tied_head_stays_as_in_one_process(four):
    assert max(four.run(4, job, "gpt2", "eager", "1f1b", 2, 2, 3, "transformer.wte", timeout_s=100)) < 1e-5
