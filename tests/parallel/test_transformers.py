"""Models of transformers that "auto" divides give the outputs and gradients of the whole model."""

import pytest

NAMES = ["gpt2", "llama", "qwen3", "bert", "t5", "gated t5"]


def job(process_group, *args):
    from tests.support.divided_transformers import compared_model

    return compared_model(process_group, *args)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_models_divided_by_auto_give_the_numbers_of_the_whole_model(ranks, name, attention, training):
    for difference, part, _ in ranks.run(2, job, 2, name, attention, training, timeout_s=100):
        assert difference < 1e-10
        assert part < 0.6
