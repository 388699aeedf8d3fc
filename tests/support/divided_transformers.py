"""Tiny models of transformers, whole and divided by "auto". Ranks import them, because the import takes seconds."""

import copy

import torch
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from pipesched.errors import InputError
from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.styles import split_model
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import Key, KeyedRandom
from tests.support.divided_layers import CPU, Results, grouped, whole

VOCABULARY, LENGTH, ROWS = 48, 10, 3
SHARED = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(**options):
    return GPT2LMHeadModel(
        GPT2Config(
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.1,
            attn_pdrop=0.2,
            embd_pdrop=0.1,
            **SHARED,
            **options,
        )
    )


def llama(**options):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_dropout=0.2,
        **SHARED,
        **options,
    )
    return LlamaForCausalLM(config)


def qwen3(**options):
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
        attention_dropout=0.2,
        tie_word_embeddings=True,
        **SHARED,
        **options,
    )
    return Qwen3ForCausalLM(config)


def bert(**options):
    config = BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.2,
        **SHARED,
        **options,
    )
    return BertForMaskedLM(config)


def t5(**options):
    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        **SHARED,
        **options,
    )
    return T5ForConditionalGeneration(config)


def gated_t5(**options):
    return t5(feed_forward_proj="gated-gelu", **options)


def planned(kind):
    """A model with transformers' plan."""

    def make(**options):
        config = AutoConfig.for_model(
            kind,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=16,
            attention_dropout=0.2,
            hidden_dropout=0.1,
            **SHARED,
        )
        return AutoModelForCausalLM.from_config(config, **options)

    return make


MODELS = {"gpt2": gpt2, "llama": llama, "qwen3": qwen3, "bert": bert, "t5": t5, "gated t5": gated_t5}


def batch(model):
    """Inputs with padding in one row, and labels of which some do not count."""
    numbers = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    numbers[1, 6:] = 0
    mask[1, 6:] = 0
    labels = numbers.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    inputs = {"input_ids": numbers, "attention_mask": mask}
    if isinstance(model, T5ForConditionalGeneration):
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return inputs, labels


def trained(model, inputs, labels, random, *, training=True):
    model.train(training)
    random.enter(Key(7, 1, 0), "layer")
    with Intercept(random):
        logits = model(**inputs).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return Results([logits.detach(), loss.detach()], [], grads)


def make(name, attention, **options):
    torch.manual_seed(0)
    return MODELS.get(name, planned(name))(attn_implementation=attention, **options).double()


def compared_model(process_group, size, name, attention, training, wanted="auto"):
    """Run a model whole and divided; return the difference, the part of the weights on a rank, and what is split."""
    model = make(name, attention)
    inputs, labels = batch(model)
    divided = copy.deepcopy(model)
    expected = trained(model, inputs, labels, KeyedRandom(CPU), training=training)
    group = grouped(process_group, size)
    splits = split_model(divided, wanted, group)
    results = trained(divided, inputs, labels, DividedRandom(CPU, group), training=training)
    numbers = [sum(weight.numel() for weight in one.parameters()) for one in (divided, model)]
    names = sorted(name for name, _ in model.named_parameters() if name in splits)
    return whole(results, splits).difference(expected), numbers[0] / numbers[1], names


def refusal(process_group, name):
    """The error of a forward, or of splitting, of a model that "auto" refuses."""
    torch.manual_seed(0)
    model = planned(name)(attn_implementation="eager")
    inputs, _ = batch(model)
    try:
        split_model(model, "auto", grouped(process_group, 2))
        model(**inputs)
    except InputError as error:
        return str(error)
    return "nothing"
