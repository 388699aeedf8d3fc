"""Trains a small Hugging Face Llama that stops and resumes with other numbers of replicas and ranks.

A plain loop gives the expected losses.
"""

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipesched import Distributed, Numerics, Pipeline
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.places import Group, mesh_of, place, run_here
from tests.support.rank_processes import Ranks

ROWS, TOKENS, VOCABULARY, MICROBATCHES, CLIP, SEED = 8, 12, 96, 4, 0.5, 3

#: What determines the rounding of sums: the numbers of replicas and of shards of a gradient, and the order.
Sums = tuple[int, int, ReductionOrder]


class Place(NamedTuple):
    """The numbers of replicas and ranks of a run, the order of sums, and whether it uses a mesh or one process."""

    replicas: int
    ranks: int
    zero: int = 0
    mesh: bool = True
    order: ReductionOrder = "sequential"

    @property
    def sums(self) -> Sums:
        """The numbers of replicas and shards and the order, which together determine the rounding of sums."""
        if self.order == "tree":  # these sums do not depend on the number of replicas
            return 1, 1, self.order
        return self.replicas, self.replicas if self.zero == 2 else 1, self.order

    def __str__(self) -> str:
        where = f"{self.replicas}x{self.ranks}, zero={self.zero}" if self.mesh else "one process"
        return f"({where}{', tree' if self.order == 'tree' else ''})"


def llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).train()


def batch(step: int) -> dict[str, Tensor]:
    """Return tokens that count up from a random token. The rows have different numbers of labels."""
    start = torch.randint(VOCABULARY, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(TOKENS)) % VOCABULARY
    labels = torch.where(torch.arange(TOKENS) < 4 + torch.arange(ROWS)[:, None], tokens, -100)
    return {"input_ids": tokens, "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def train(group: Group, where: Place, steps: range, load: str | None, save: str | None) -> list[Tensor]:
    """Load, train these steps, save, and return the losses."""
    options: dict[str, Any] = place(group)
    if where.replicas > 1:
        options = {
            "mesh": mesh_of(where.replicas, where.ranks),
            "distributed": Distributed(timeout=600, zero=where.zero),
        }
    replica = 0 if where.replicas == 1 else options["mesh"].get_local_rank("dp")
    pipe = Pipeline(
        llama(seed=steps.start),
        {name: rows[: ROWS // MICROBATCHES] for name, rows in batch(0).items()},
        schedule="1f1b",
        num_stages=where.ranks,
        num_microbatches=MICROBATCHES // where.replicas,
        optimizer=adamw,
        numerics=Numerics(clip_grad_norm=CLIP, reduction_order=where.order),
        seed=SEED + steps.start,
        **options,
    )
    losses = []
    with pipe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*differs in rounding")
        if load is not None:
            assert pipe.load(load).step == steps.start
        for step in steps:
            own = {name: rows.chunk(where.replicas)[replica] for name, rows in batch(step).items()}
            losses.append(pipe.step(**own).clone())
        if save is not None:
            pipe.save(save)
    return losses


def run(ranks: Ranks, where: Place, *args: Any) -> list[Tensor]:
    """Return the losses of ``train``, which are the same on all ranks."""
    found = (
        ranks.run(4, train, where, *args, timeout_s=300) if where.mesh else run_here(where.ranks, train, where, *args)
    )
    assert all(torch.equal(*pair) for own in found for pair in zip(own, found[0], strict=True))
    return found[0]


def loop(before: Place, after: Place, stop: int, steps: int) -> list[Tensor]:
    """Return the losses of a plain loop that adds gradients like ``before``, and like ``after`` from step ``stop``."""
    return _loop(before.sums, after.sums, stop, steps)


@cache
def _loop(before: Sums, after: Sums, stop: int, steps: int) -> list[Tensor]:
    model = llama()
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        num_replicas, num_shards, order = before if step < stop else after
        counts = {"num_replicas": num_replicas, "num_microbatches": MICROBATCHES // num_replicas}
        losses.append(reference_step(model, **batch(step), **counts, seed=SEED, step=step, reduction_order=order))
        clip_grad_norm_(model.parameters(), CLIP, num_shards=num_shards)
        optimizer.step()
        optimizer.zero_grad()
    return losses
