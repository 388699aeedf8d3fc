"""Models of transformers that "auto" divides give the outputs and gradients of the whole model."""

import pytest

NAMES = ["gpt2", "llama", "qwen3", "bert", "t5", "gated t5"]


def job(process_group, *args):
    from tests.support.divided_transformers import compared_model

    return compared_model(process_group, *args)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_models_divided_by_auto_give_the_numbers_of_the_whole_model(ranks, name, attention, training):
    for difference, part, _ in ranks.run(2, job, 2, name, attention, training, timeout_s=100):
        assert difference < 1e-10
        assert part < 0.6


def by_sequence(process_group):
    from pipesched.parallel.layer_styles import Column, Heads, Row
    from tests.support.divided_transformers import compared_model

    wanted = {
        "transformer.drop": "sequence-begin",
        "transformer.h.*.ln_*": "summed",
        "transformer.h.*.attn": Heads("num_heads", "split_size"),
        "transformer.h.*.attn.c_attn": Column(sections=3, sequence=True),
        "transformer.h.*.attn.c_proj": Row(sequence=True),
        "transformer.h.*.mlp.c_fc": Column(sequence=True),
        "transformer.h.*.mlp.c_proj": Row(sequence=True),
        "transformer.ln_f": "sequence-end",
    }
    return compared_model(process_group, 2, "gpt2", "eager", True, wanted)


def test_gpt2_divided_by_positions_gives_the_numbers_of_the_whole_model(ranks):
    for difference, _, names in ranks.run(2, by_sequence, timeout_s=100):
        assert difference < 1e-10
        assert "transformer.h.0.attn.c_attn.weight" in names


PLANNED = ["gemma2", "gemma3_text", "phi3", "gpt_neox", "olmo2", "exaone4", "mistral", "cohere2"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", PLANNED)
def test_models_with_a_plan_of_transformers_give_the_numbers_of_the_whole_model(ranks, name):
    limit = 1e-6 if name == "gemma3_text" else 1e-10  # its norms compute in float32
    for difference, part, _ in ranks.run(2, job, 2, name, "eager", True, timeout_s=100):
        assert difference < limit
        assert part < 0.6


def refused(process_group, name):
    from tests.support.divided_transformers import refusal

    return refusal(process_group, name)


def test_weights_that_a_plan_forgets_are_refused_by_name(ranks):
    """The plan of Apertus leaves out the two weights of its activation, whose gradients are parts of a sum."""
    for message in ranks.run(2, refused, "apertus", timeout_s=100):
        assert "'model.layers.0.mlp.act_fn' (a XIELUActivation) runs where activations are divided" in message


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_plans_with_experts_are_refused_by_name(ranks, name):
    for message in ranks.run(2, refused, name, timeout_s=100):
        assert "must know the styles of the model's plan; 'model.layers.0.mlp.experts" in message
        assert "name the layers in tensor_parallel= instead" in message
