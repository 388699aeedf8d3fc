"""Zoo: trains models of many kinds in four stages, with pipesched and with torch's own tracer.

    python benchmarks/zoo.py [--models GPT-2 BERT] [--write]

The models are the small ones of tests/support/zoo_architectures.py, with dropout. They run on 4 ranks (fewer if a model
has fewer layers) with 4 micro-batches of 2 rows. Each model runs in separate processes with a time limit. --write
writes the table to docs/zoo.md.

pipesched: Pipeline(model, sample) and a step, in one process. "same bits": loss, gradients and buffers are
bit-identical to those of the unpipelined loop, in three cases: 1f1b and zb-h1 with a cut that balances the counted
operations, and 1f1b with a cut that balances the measured times.

torch: torch.distributed.pipelining.pipeline and Schedule1F1B over gloo, with the cut that balances the counted
operations. Decoders get use_cache=False, because torch cannot trace any of them otherwise. Each rank receives the
inputs of its stage as keyword arguments. There are two ways to train: "loss outside" applies a loss function to the
output of a model without labels; "own loss" uses the loss that the model computes from labels. If a step succeeds, it
is repeated without dropout, and its gradients are compared with those of the plain loop, within rounding.
"""

import argparse
import contextlib
import datetime
import io
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import machine
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from pipesched import Pipeline, graph_of
from pipesched.tensors.payload import pytree
from pipesched.testing import reference_step

try:
    import transformers
except ImportError:
    sys.exit("the zoo needs transformers, which is not installed; pip install 'pipesched[zoo]'")

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.zoo_architectures import MORE, ROWS, ZOO, Specimen
from tests.support.zoo_work import counted, even_boundaries, shares

MICROBATCHES = 4
MODELS = {**ZOO, **MORE}
PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"
LIMIT_S = 60
WORKS = "works"


def in_processes(limit_s: float, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run jobs in separate processes and return their results. If a job fails, its result is the reason, as a str."""
    context = multiprocessing.get_context("fork")
    running = []
    for job in jobs:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(there, job))
        process.start()
        there.close()
        running.append((process, here))
    answers = []
    for process, here in running:
        try:
            answers.append(here.recv() if here.poll(limit_s) else f"hangs: no end in {limit_s:g} s")
        except EOFError:
            process.join()
            answers.append(f"ends with exit code {process.exitcode}")
    for process, _ in running:
        process.kill()
        process.join()
    return answers


def _send(pipe: Any, job: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            answer = job()
    except Exception as error:
        answer = _first_line(error)
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # without waiting for process groups and threads


def _first_line(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


# ---- pipesched -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """A model's result in pipesched: "same bits" or an error, and each stage's share of the work and of the time."""

    answer: str
    layers: int
    work: list[float]
    time: list[float]


def ours(name: str) -> Ours:
    """Train a model in pipesched, in three cases.

    Two cases have a cut that balances the work, under 1f1b and zb-h1. The third has a cut that balances the time, under
    1f1b.
    """
    specimen = MODELS[name]
    choices = {"loss_fn": specimen.loss_fn, "num_microbatches": MICROBATCHES, "seed": 3}
    plain = specimen.made()
    due = reference_step(plain, **specimen.inputs, **specimen.target, **choices)
    work, even = _even(specimen)
    found: list[list[float]] = []
    different = []
    for schedule, boundaries in (*((name, even) for name in ("1f1b", "zb-h1") if even), ("1f1b", None)):
        model = specimen.made()
        sample = specimen.rows(ROWS // MICROBATCHES)
        with Pipeline(
            model, sample, devices=["cpu"] * specimen.ranks, schedule=schedule, boundaries=boundaries, **choices
        ) as pipe:
            loss = pipe.step(**specimen.inputs, **specimen.target)
            if not (torch.equal(loss, due) and _same(model, plain, specimen.rounded)):
                different.append(schedule)
            if boundaries is None:
                costs = pipe.plan.costs or pipe.predicted.costs
                times = [forward + back for forward, back in zip(costs.forward_s, costs.backward_s, strict=True)]
                found.append([time / sum(times) for time in times])
            else:
                found.append(shares(work, pipe.plan.stages))
    same = f"same bits, {specimen.rounded} within rounding" if specimen.rounded else "same bits"
    answer = f"other bits under {', '.join(different)}" if different else same
    return Ours(answer, len(work), found[0] if even else [], found[-1])


def _even(specimen: Specimen) -> tuple[Any, list[str] | None]:
    """Return the graph of layers with their work, and the boundaries that balance the work.

    If torch cannot count the work, the graph has no work and the boundaries are None.
    """
    rows = specimen.rows(ROWS // MICROBATCHES)
    try:
        work = counted(specimen.made(), rows)
    except AssertionError:
        return graph_of(specimen.made(), rows, measured=False), None
    return work, even_boundaries(work, specimen.ranks)


def _same(one: nn.Module, other: nn.Module, rounded: str | None) -> bool:
    """Return whether all buffers and gradients, except the gradient of ``rounded``, are bit-identical."""
    grads = [
        (own.grad, plain.grad)
        for (name, own), plain in zip(one.named_parameters(), other.parameters(), strict=True)
        if name != rounded
    ]
    buffers = list(zip(one.buffers(), other.buffers(), strict=True))
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in grads + buffers)


# ---- torch -----------------------------------------------------------------------------------------------------------


def ways(name: str) -> dict[str, dict[str, Any]]:
    """Return the model's inputs for each way to train it: "loss outside" and "own loss"."""
    specimen = MODELS[name]
    config = getattr(specimen.made(), "config", None)
    without = {key: value for key, value in specimen.inputs.items() if key not in ("labels", "return_loss")}
    if getattr(config, "is_encoder_decoder", False):
        without["decoder_input_ids"] = specimen.inputs["labels"]
    found = {}
    if config is not None or specimen.loss_fn is not None:
        found["loss outside"] = without
    if specimen.loss_fn is None:
        found["own loss"] = specimen.inputs
    return found


def torchs(name: str, way: str) -> str:
    """Train a model with torch's tracer, and return the text of its table cell."""
    trained = in_processes(5 * LIMIT_S, [partial(traced, name, way, True)])[0]
    if isinstance(trained, str):
        return trained
    evaluated = in_processes(5 * LIMIT_S, [partial(traced, name, way, False)])[0]
    if isinstance(evaluated, str):
        return f"{WORKS}; without dropout: {evaluated}"
    due = plain_gradients(name, way)
    wrong = [
        key for key, grad in due.items() if key not in evaluated or not _close(torch.from_numpy(evaluated[key]), grad)
    ]
    return f"wrong gradients: {wrong[0]}" + (f" and {len(wrong) - 1} more" * (len(wrong) > 1)) if wrong else WORKS


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5 * max(1e-3, float(other.abs().max())))


def model_for(specimen: Specimen, train: bool) -> nn.Module:
    """Return the model with the settings that torch's tracer needs."""
    model = specimen.made().train(train)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def loss_of(output: Any, way: str) -> Tensor:
    """Return the loss: the output's first tensor for "own loss", or else a loss function of this tensor."""
    first = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    return first if way == "own loss" else first.float().pow(2).mean()


def rows(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return the rows from ``begin`` to ``end`` of the inputs."""
    return {key: value[begin:end] if isinstance(value, Tensor) else value for key, value in inputs.items()}


def plain_gradients(name: str, way: str) -> dict[str, Tensor]:
    """Return the gradients of the unpipelined loop over micro-batches, without dropout."""
    model, inputs = model_for(MODELS[name], train=False), ways(name)[way]
    size = ROWS // MICROBATCHES
    for begin in range(0, ROWS, size):
        output = model(**rows(inputs, begin, begin + size))
        (loss_of(dict(output) if hasattr(output, "keys") else output, way) / MICROBATCHES).backward()
    return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


def traced(name: str, way: str, train: bool) -> str | dict[str, Any]:
    """Trace a model and run a step; return the gradients, keyed by parameter, or the reason for a failure as a str."""
    specimen, inputs = MODELS[name], ways(name)[way]
    sample = rows(inputs, 0, ROWS // MICROBATCHES)
    begins = _even(specimen)[1]
    if begins is None:
        return "not tried: torch cannot count the model's operations"
    split = {layer.partition("#")[0]: SplitPoint.BEGINNING for layer in begins}
    pipe = pipeline(model_for(specimen, train), mb_args=(), mb_kwargs=sample, split_spec=split)
    ranks = specimen.ranks
    if pipe.num_stages != ranks:
        return f"{pipe.num_stages} stages instead of {ranks}, because torch cuts before every call to a layer"
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    jobs = [partial(rank_of_torch, rank, ranks, store.port, pipe, inputs, way) for rank in range(ranks)]
    answers = in_processes(LIMIT_S, jobs)
    wrong = [answer for answer in answers if isinstance(answer, str)]
    if wrong:
        return min(wrong, key=lambda text: (text.startswith("hangs"), "onnection" in text))
    return {
        key: grad for answer in answers for key, grad in answer.items()
    }  # arrays, because tensors are sent by reference


def rank_of_torch(rank: int, ranks: int, port: int, pipe: Any, inputs: dict[str, Any], way: str) -> dict[str, Any]:
    """Run a step on one rank; return the gradients of its stage."""
    store = distributed.TCPStore("127.0.0.1", port, None, False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda output, target: loss_of(output, way))
    named = {node.name for node in stage.submod.graph.nodes if node.op == "placeholder"}
    given = {key: value for key, value in inputs.items() if key in named}
    target = {"target": torch.zeros(ROWS)} if rank == ranks - 1 else {}
    schedule.step(**given, **target)
    return {key: value.grad.numpy() for key, value in stage.submod.named_parameters() if value.grad is not None}


# ---- the table -------------------------------------------------------------------------------------------------------

HEAD = """\
<!-- Generated by `python benchmarks/zoo.py --write`; do not edit. -->

# The zoo

`python benchmarks/zoo.py --write` trains small versions of many kinds of models
(`tests/support/zoo_architectures.py`) with pipesched and with the tracer of
`torch.distributed.pipelining`. Each model runs in four stages (fewer if it has fewer layers), one
stage per rank, with 4 micro-batches of 2 rows and with dropout. The run below was made on {date}
with {machine}, transformers {transformers}.

{summary}

- **layers**: the number of layers at which a stage can begin.
- **pipesched**: the result of one training step with `Pipeline(model, sample)`, without any changes
  to the model. *same bits*: loss, gradients and buffers are bit-identical to those of the
  unpipelined loop over the same micro-batches, under `1f1b` and `zb-h1`.
- **work %**: each stage's share of the work if the cut balances the work, as in the tests. The work
  is the number of floating-point operations, plus ten for each byte of results.
- **time %**: each stage's share of the measured time if the cut balances the time, as `Pipeline`
  does by default.
- **torch, loss outside**: torch's tracer, on the model without labels. A loss function is applied
  to the model's output.
- **torch, own loss**: torch's tracer, on the model with labels. The model computes its own loss.

In the columns "work %" and "time %", four perfectly balanced stages would have 25 each. In every
row, no other cut of the model's layers would make the largest share smaller.

In the two columns for torch, the schedule is `Schedule1F1B`, and the cut balances the work. Each
rank receives the inputs of its stage as keyword arguments. Decoders get `use_cache=False`, because
torch cannot trace any of them otherwise. The entries mean:

- *works*: a step succeeds, and in a repetition without dropout all gradients equal those of the
  plain loop within rounding;
- *wrong gradients*: some gradients differ; the entry names the first parameter whose gradient
  differs, and the number of other such parameters;
- any other text: the first line of the error;
- no entry: the model cannot run without labels, or does not compute a loss itself.

Wav2Vec2, OPT, BART and Whisper run with `layerdrop=0`. Otherwise they would skip layers at random,
but the stages of a pipeline always run the layers that ran for the sample. Mamba and ResNet have no
dropout. Wav2Vec2 draws its masks from numpy's global generator.

"""


def percents(values: Sequence[float]) -> str:
    """Return the shares of the stages as whole percentages."""
    return " ".join(f"{value * 100:.0f}" for value in values)


def row(name: str) -> tuple[str, list[str], bool, list[str]]:
    """Run a model and return its row of the table."""
    answer = in_processes(5 * LIMIT_S, [partial(ours, name)])[0]
    own = Ours(answer, 0, [], []) if isinstance(answer, str) else answer
    peers = [torchs(name, way) if way in ways(name) else "" for way in ("loss outside", "own loss")]
    cells = [name, str(own.layers), own.answer, percents(own.work), percents(own.time), *map(_shown, peers)]
    return name, cells, own.answer.startswith("same bits"), peers


def _shown(text: str, limit: int = 110) -> str:
    plain = text.replace("|", "/").replace("<", "").replace(">", "").replace("`", "")
    return plain if len(plain) <= limit else plain[:limit].rsplit(" ", 1)[0] + " ..."


def main() -> None:
    """Run the models, and print a row for each or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--write", action="store_true", help="write the table to docs/zoo.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    titles = ["model", "layers", "pipesched", "work %", "time %", "torch, loss outside", "torch, own loss"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    good, peers = 0, []
    for name in args.models:
        _, cells, same, answers = row(name)
        good += same
        peers.append(answers)
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    count = [sum(answers[place] == WORKS for answers in peers) for place in range(2)]
    either = sum(WORKS in answers for answers in peers)
    summary = (
        f"pipesched trains {good} of {len(peers)} models, with results bit-identical to those of an unpipelined loop\n"
        f"over the same micro-batches. torch's tracer gives correct gradients for {count[0]} of them if a loss\n"
        f"function is applied to the model's output, and for {count[1]} if the model computes its own loss.\n"
        f"For {either} models, the gradients are correct in at least one of these two ways."
    )
    print(summary)
    if args.write:
        known = {"date": datetime.date.today(), "machine": machine(), "transformers": transformers.__version__}
        PAGE.write_text(HEAD.format(**known, summary=summary) + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
