"""Jobs that train small models of transformers whose layers the ranks of a tensor group divide.

The same training in one process, in plain PyTorch, gives the expected losses. transformers is imported only where a
model is made, because its import takes seconds.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Distributed, Numerics, Pipeline
from pipesched.parallel.layer_styles import Column, Heads
from pipesched.testing import clip_grad_norm_, reference_step

VOCABULARY, LENGTH, ROWS, MICROBATCHES, SEED = 48, 12, 8, 4, 3
CLIP = 0.5  # most steps have a larger norm
SHARED = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: The layers of a model by names, as "auto" divides them.
BY_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "transformer.wte": "vocabulary",
        "transformer.h.*.attn": Heads("num_heads", "split_size"),
        "transformer.h.*.attn.c_attn": Column(sections=3),
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "lm_head": "column-gathered",
    },
    "bert": {
        "bert.encoder.layer.*.attention.self": Heads("num_attention_heads", "all_head_size"),
        "bert.encoder.layer.*.attention.self.query": "column",
        "bert.encoder.layer.*.attention.self.key": "column",
        "bert.encoder.layer.*.attention.self.value": "column",
        "bert.encoder.layer.*.attention.output.dense": "row",
        "bert.encoder.layer.*.intermediate.dense": "column",
        "bert.encoder.layer.*.output.dense": "row",
    },
}


class Case(NamedTuple):
    """The model and the options of a run."""

    name: str
    #: The numbers of replicas, ranks of a pipeline, and planes. None: one rank in this process, without a mesh.
    mesh: tuple[int, int, int] | None = (1, 2, 2)
    by_names: bool = False
    dropout: float = 0.0

    @property
    def num_replicas(self) -> int:
        return self.mesh[0] if self.mesh else 1

    @property
    def replica(self) -> int:
        return distributed.get_rank() // (self.mesh[1] * self.mesh[2]) if self.mesh else 0


def model_of(case: Case, seed: int = 0) -> nn.Module:
    """Return a model with a tied head or without, in which an embedding is frozen."""
    torch.manual_seed(seed)
    model = _MODELS[case.name](case.dropout).train()
    frozen = {
        "gpt2": "transformer.wpe",  # the head shares the other embedding
        "llama": "model.embed_tokens",
        "bert": "bert.embeddings.word_embeddings",  # the head shares it, so it is frozen, too
        "t5": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    }[case.name]
    model.get_submodule(frozen).requires_grad_(False)
    return model


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}
    drops = {"resid_pdrop": dropout, "attn_pdrop": dropout, "embd_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes, **drops, **SHARED))


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": dropout}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes, **heads, **SHARED))


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForMaskedLM(BertConfig(max_position_embeddings=16, **sizes, **drops, **SHARED))


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": dropout}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False, **sizes, **SHARED))


_MODELS = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5}


def batch(step: int) -> dict[str, Tensor]:
    """Return tokens that count up, so that there is something to learn.

    Half of the micro-batches have rows with padding. The rows have different numbers of labels.
    """
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(3, VOCABULARY, (ROWS, 1), generator=generator)
    tokens = 3 + (start + torch.arange(LENGTH)) % (VOCABULARY - 3)
    lengths = torch.full((ROWS,), LENGTH)
    lengths[2:6] = torch.randint(4, LENGTH, (4,), generator=generator)  # rows of the second and third micro-batch
    mask = torch.arange(LENGTH) < lengths[:, None]
    first = torch.randint(0, 4, (ROWS, 1), generator=generator)  # labels before this position do not count
    labels = tokens.masked_fill(~mask | (torch.arange(LENGTH) < first), -100)
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


_MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, int, int]) -> DeviceMesh:
    """Return a mesh of the first ranks of the job. A dimension "tp" of one rank is left out."""
    names = ("dp", "pp", "tp") if shape[2] > 1 else ("dp", "pp")
    if shape not in _MESHES:
        members = torch.arange(shape[0] * shape[1] * shape[2]).view(shape[: len(names)])
        _MESHES[shape] = DeviceMesh("cpu", members, mesh_dim_names=names)
    return _MESHES[shape]


def pipeline(case: Case, model: nn.Module) -> Pipeline:
    where: dict[str, Any] = {"devices": ["cpu"]}
    if case.mesh is not None:
        styles: Any = BY_NAMES[case.name] if case.by_names else "auto"
        where = {
            "mesh": mesh_of(case.mesh),
            "distributed": Distributed(timeout=120, tensor_parallel=styles if case.mesh[2] > 1 else None),
        }
    return Pipeline(
        model,
        {name: rows[: ROWS // MICROBATCHES] for name, rows in batch(0).items()},
        schedule="1f1b",
        num_microbatches=MICROBATCHES // case.num_replicas,
        optimizer=sgd,
        numerics=Numerics(clip_grad_norm=CLIP),
        seed=SEED,
        **where,
    )


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    #: The elements of this rank's weights, as a part of those of the whole model.
    part: float
    state: dict[str, Tensor]


def trained(group: Any, case: Case, steps: range, load: str | None = None, save: str | None = None) -> Trained:
    """Load, train these steps, save, and return also the whole weights."""
    model = model_of(case, seed=steps.start)
    whole = sum(weight.numel() for weight in model.parameters())
    losses, norms = [], []
    with warnings.catch_warnings(action="ignore"), pipeline(case, model) as pipe:
        if load is not None:
            assert pipe.load(load).step == steps.start
        for step in steps:
            own = {name: rows.chunk(case.num_replicas)[case.replica] for name, rows in batch(step).items()}
            losses.append(float(pipe.step(**own)))
            norms.append(float(pipe.grad_norm))
        part = sum(weight.numel() for weight in pipe.parameters()) / whole
        if save is not None:
            pipe.save(save)
        state = {name: weight.clone() for name, weight in pipe.full_state_dict().items()}
    return Trained(losses, norms, part, state)


def looped(case: Case, steps: range) -> Trained:
    """Train the whole model in one process: in plain PyTorch, or micro-batch by micro-batch if there is dropout."""
    model = model_of(case)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = sgd(weights)
    losses, norms = [], []
    for step in steps:
        if case.dropout:
            counts = {"num_microbatches": MICROBATCHES // case.num_replicas, "num_replicas": case.num_replicas}
            losses.append(float(reference_step(model, **batch(step), **counts, step=step, seed=SEED)))
            norms.append(float(clip_grad_norm_(weights, CLIP)))
        else:
            loss = model(**batch(step)).loss
            loss.backward()
            losses.append(float(loss.detach()))
            norms.append(float(nn.utils.clip_grad_norm_(weights, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, 1.0, model.state_dict())


def plain_losses(case: Case, state: dict[str, Tensor]) -> list[float]:
    """Return the losses of the whole model in plain PyTorch with these weights."""
    model = model_of(case, seed=9).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return [float(model(**batch(step)).loss) for step in range(3)]


def largest_difference(found: list[float], due: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(own - other) / abs(other) for own, other in zip(found, due, strict=True))
