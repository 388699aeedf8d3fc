"""Padding: trains text models of transformers on batches in which some micro-batches have padding and others have none.

    python benchmarks/padding.py [--models bert llama gpt2 t5] [--schedules ...] [--mesh] [--replicas] [--epoch 500]

Each model gets every subset of four padded micro-batches, with a padded and with a full sample. Losses and gradients
are compared with a plain loop over the same micro-batches, without pipesched. "equal" counts the batches with equal
bits; for tied weights the largest relative difference is given, because the order of sums differs.

--mesh runs two gloo ranks, with inputs="all" and "first"; --replicas runs 2 replicas of 2 ranks, also with zero=2;
--epoch runs this many batches of random lengths, and prints the number of paths and the seconds spent on them.
"""

import argparse
import copy
import itertools
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from measure import in_ranks, machine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

import pipesched

NUM_MICROBATCHES, ROWS, LENGTH, WORDS = 4, 2, 10, 64
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "interleaved-1f1b": {"schedule": "interleaved-1f1b"},
    "recomputed": {"schedule": "1f1b", "checkpoint": "always"},
}
SUBSETS = list(itertools.product((False, True), repeat=NUM_MICROBATCHES))
_SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
#: model -> (class, type, settings)
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "bert": (AutoModelForMaskedLM, "bert", {**_SMALL, **_NO_DROPOUT}),
    "llama": (AutoModelForCausalLM, "llama", {**_SMALL, "use_cache": False}),
    "gpt2": (AutoModelForCausalLM, "gpt2", {**_GPT2, "use_cache": False, "bos_token_id": None, "eos_token_id": None}),
    "t5": (AutoModelForSeq2SeqLM, "t5", {**_T5, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}),
}


def model_of(name: str) -> nn.Module:
    """Return a small model in training mode, without dropout."""
    kind, config_type, settings = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(config_type, vocab_size=WORDS, tie_word_embeddings=False, **settings)
    return kind.from_config(config, attn_implementation="sdpa").train()


def batch_of(padded: Sequence[bool], length: int = LENGTH, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch with a micro-batch for each entry of ``padded``; its second row has 3 places of padding if set."""
    ids = torch.randint(1, WORDS, (ROWS * len(padded), length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for number, has_padding in enumerate(padded):
        if has_padding:
            mask[ROWS * number + 1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def plain_step(model: nn.Module, batch: dict[str, Tensor], num_microbatches: int = NUM_MICROBATCHES) -> Tensor:
    """Run the plain loop, which accumulates gradients over the micro-batches; return the loss."""
    model.zero_grad()
    columns = zip(*(one.chunk(num_microbatches) for one in batch.values()), strict=True)
    parts = [dict(zip(batch, column, strict=True)) for column in columns]
    total = torch.zeros(())
    for part in parts:
        loss = model(**part).loss / num_microbatches
        if model.training:
            loss.backward()
        total = total + loss.detach()
    return total


class Comparison:
    """Counts batches with equal bits, and keeps the largest relative difference of a gradient."""

    def __init__(self, plain: nn.Module) -> None:
        self.plain = plain
        self.count = self.equal = 0
        self.tied: dict[str, float] = {}

    def add(self, batch: dict[str, Tensor], loss: Tensor, own: Iterator[tuple[str, nn.Parameter]]) -> None:
        due = plain_step(self.plain, batch)
        expected = dict(self.plain.named_parameters())
        differing = [] if torch.equal(loss, due) else ["loss"]
        for name, parameter in own:
            other = expected[name].grad
            if parameter.grad is None or other is None:
                differing += [name] if parameter.grad is not other else []
            elif not torch.equal(parameter.grad, other):
                differing.append(name)
                relative = (parameter.grad - other).abs().max() / other.abs().max()
                self.tied[name] = max(self.tied.get(name, 0.0), float(relative))
        self.count += 1
        self.equal += not differing

    def __str__(self) -> str:
        names = ", ".join(f"{name} differs by {size:.1e}" for name, size in self.tied.items())
        return f"{self.equal:3} of {self.count} batches with equal bits" + (f"; {names}" if names else "")


def pipeline(name: str, padded: bool, **options: Any) -> tuple[pipesched.Pipeline, Comparison]:
    """Return a pipeline that is made with a padded or a full sample, and a comparison with a copy of its model."""
    model = model_of(name)
    comparison = Comparison(copy.deepcopy(model))
    return pipesched.Pipeline(model, batch_of([padded]), num_microbatches=NUM_MICROBATCHES, **options), comparison


def in_process(name: str, schedule: str) -> None:
    """Train and evaluate on all subsets of padded micro-batches, with two ranks in this process."""
    for padded in (False, True):
        pipe, comparison = pipeline(name, padded, devices=["cpu"] * 2, **SCHEDULES[schedule])
        with pipe:
            for subset in SUBSETS:
                batch = batch_of(subset)
                pipe.zero_grad()
                comparison.add(batch, pipe.step(**batch), pipe.named_parameters())
            evaluated = evaluate(pipe, comparison.plain, passes=True)
        print(
            f"{name:6} {schedule:17} {'padded' if padded else 'full':6} sample: {comparison}; {evaluated}", flush=True
        )


def evaluate(pipe: pipesched.Pipeline, plain: nn.Module, *, passes: bool) -> str:
    """Compare evaluations after ``eval()`` with the plain loop."""
    pipe.eval()
    plain.eval()
    same = 0
    for subset in SUBSETS:
        batch = batch_of(subset)
        with torch.no_grad():
            due = plain_step(plain, batch)
        same += torch.equal(pipe.evaluate(**batch) if passes else pipe.evaluate(), due)
    return f"{same} of {len(SUBSETS)} evaluations equal"


def over_ranks(rank: int, name: str, inputs: str) -> str:
    """Train over two ranks. Return the comparison with the plain loop on this rank, as text."""
    quiet()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    distributed = pipesched.Distributed(inputs=inputs)
    pipe, comparison = pipeline(name, False, mesh=mesh, schedule="1f1b", distributed=distributed)
    passes = inputs == "all" or rank == 0
    with pipe:
        for subset in SUBSETS:
            batch = batch_of(subset)
            pipe.zero_grad()
            loss = pipe.step(**batch) if passes else pipe.step()
            comparison.add(batch, loss, pipe.named_parameters())
        evaluated = evaluate(pipe, comparison.plain, passes=passes)
    return f"{comparison}; {evaluated}"


def with_replicas(rank: int, name: str, zero: int) -> str:
    """Train 2 replicas of 2 ranks with SGD. Return the largest differences from the plain loop on this rank."""
    quiet()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    distributed = pipesched.Distributed(zero=zero)

    def sgd(parameters: Any) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=0.1)

    pipe, comparison = pipeline(name, False, mesh=mesh, schedule="1f1b", distributed=distributed, optimizer=sgd)
    plain = comparison.plain
    optimizer = sgd(plain.parameters())
    weights = losses = 0.0
    with pipe:
        for subset in SUBSETS:
            batch = batch_of(subset)
            loss = pipe.step(**{key: value.chunk(2)[rank // 2] for key, value in batch.items()})
            due = plain_step(plain, batch, 2 * NUM_MICROBATCHES)
            optimizer.step()
            losses = max(losses, float((loss - due).abs() / due))
            expected = dict(plain.named_parameters())
            for key, own in pipe.named_parameters():
                weights = max(weights, float((own - expected[key]).abs().max()))
    return f"after {len(SUBSETS)} steps, losses differ by {losses:.1e} (relative) and weights by {weights:.1e} at most"


def epoch(name: str, num_batches: int) -> None:
    """Train on batches of random lengths with random padding; print the number of paths and the time spent on them."""
    pipe, _ = pipeline(name, False, devices=["cpu"] * 2, schedule="1f1b")
    captured = pipe._running.assembly.layered
    paths = captured.paths[True]
    spent = steps = 0.0
    find = paths.find

    def timed(*args: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        found = find(*args)
        spent += time.perf_counter() - start
        return found

    paths.find = timed
    draw = random.Random(0)
    with pipe:
        for number in range(num_batches):
            padded = [draw.random() < 0.5 for _ in range(NUM_MICROBATCHES)]
            start = time.perf_counter()
            pipe.zero_grad()
            pipe.step(**batch_of(padded, draw.randrange(4, 64), number))
            steps += time.perf_counter() - start
    print(
        f"{name:6} {num_batches} batches of random lengths: {len(paths.captures)} paths, {paths.scouted} runs of the "
        f"code without its layers, {spent:.2f} s of {steps:.2f} s in steps ({spent / num_batches * 1e3:.2f} ms a step)",
        flush=True,
    )


def quiet() -> None:
    """Suppress warnings, which concern the small models of this benchmark only."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--mesh", action="store_true")
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--epoch", type=int, default=0, metavar="BATCHES")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    print(machine())
    for name in args.models:
        for schedule in args.schedules:
            in_process(name, schedule)
        for inputs in ("all", "first") if args.mesh else ():
            for rank, text in enumerate(in_ranks(2, over_ranks, name, inputs)):
                print(f"{name:6} two ranks, inputs={inputs!r}, rank {rank}: {text}", flush=True)
        for zero in (0, 2) if args.replicas else ():
            for rank, text in enumerate(in_ranks(4, with_replicas, name, zero)):
                print(f"{name:6} 2 replicas of 2 ranks, zero={zero}, rank {rank}: {text}", flush=True)
        if args.epoch:
            epoch(name, args.epoch)


if __name__ == "__main__":
    main()
