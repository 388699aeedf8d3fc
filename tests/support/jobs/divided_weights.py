"""Jobs of the tests of zero=3: they train replicas that hold only their own rows of the weights between steps."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from pipesched import Distributed, Link, Links, Pipeline, Search, schedules
from pipesched.errors import ExecutionError, GraphError
from pipesched.program.lowering import add_gathers
from pipesched.runtime.reductions import replica_sum
from pipesched.runtime.stage import split_backward
from pipesched.testing import reference_step
from tests.support.branching_batches import Padded, batch_of, model_of
from tests.support.jobs.zero import MICROBATCHES, ROWS, batch, made, momentum, plain, tied
from tests.support.saved_reports import read_again


class Loop:
    """Trains a model in a plain loop, for comparison with a pipeline."""

    def __init__(self, model: nn.Module, optimizer: Callable[[list[Any]], Optimizer], num_replicas: int = 2) -> None:
        self.model = model
        self._optimizer = optimizer(list(model.parameters()))
        self._num_replicas = num_replicas

    def step(self, step: int) -> Tensor:
        x, y = batch(step)
        options: dict[str, Any] = {"num_replicas": self._num_replicas, "seed": 3, "step": step}
        options["num_microbatches"] = MICROBATCHES // self._num_replicas
        loss = reference_step(self.model, x, loss_fn=nn.CrossEntropyLoss(), target=y, **options)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


def divided(group: Any, model: Any, dims: tuple[int, int] = (2, 2), **options: Any) -> tuple[Pipeline, int]:
    """Return a pipeline with zero=3, and the number of this process's replica."""
    warnings.simplefilter("ignore")
    usual = {"optimizer": momentum, "distributed": Distributed(zero=3, timeout=20)}
    return made(group, dims, model, **{**usual, **options})


def own_batch(step: int, replica: int, num_replicas: int = 2) -> dict[str, Any]:
    x, y = batch(step)
    rows = slice(replica * ROWS // num_replicas, (replica + 1) * ROWS // num_replicas)
    return {"input": x[rows], "target": y[rows]}


def run(call: Callable[..., Any], step: int, replica: int) -> Any:
    given = own_batch(step, replica)
    return call(given["input"], target=given["target"])


def check_state(state: dict[str, Tensor], model: nn.Module) -> None:
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert [name for name, value in state.items() if not torch.equal(value, expected[name])] == []


def trained_only(parameters: list[Any]) -> Optimizer:
    """Return an optimizer for the parameters that are not frozen."""
    return momentum([parameter for parameter in parameters if parameter.requires_grad])


class Numbers(NamedTuple):
    """The numbers of weight elements and of collectives of one rank."""

    weights: int  #: elements that the rank holds between steps
    whole: int  #: elements of the whole weights of the rank's stages
    gathers: int  #: gathers in a step
    reductions: int  #: reductions in a step


def count(group: Any, schedule: str) -> Numbers:
    """Train two steps. Count the weight elements that this rank holds, and its collectives in the second step."""
    boundaries = [7] if schedule == "1f1b" else [4, 7, 10]
    pipe, replica = divided(group, plain(), schedule=schedule, boundaries=boundaries)
    with pipe:
        run(pipe.step, 0, replica)
        gather, scatter = replica_sum._all_gather, distributed.all_to_all_single
        with (
            patch.object(replica_sum, "_all_gather", side_effect=gather) as gathers,
            patch.object(distributed, "all_to_all_single", side_effect=scatter) as reductions,
        ):
            run(pipe.step, 1, replica)
        held = sum(one.numel() for one in pipe.parameters())
        stored = sum(one.untyped_storage().nbytes() // one.element_size() for one in pipe.parameters())
        assert stored == held
        names = [name for name, _ in pipe.named_parameters()]
        whole = pipe.full_state_dict()
        assert sum(one.numel() for one in pipe.parameters()) == held
        return Numbers(held, sum(whole[name].numel() for name in names), gathers.call_count, reductions.call_count)


class Gathers(NamedTuple):
    """The numbers of gathers of one rank in a step."""

    gathers_once: int  #: for a stage, in the program with ``gather_once=True``
    gathers_each: int  #: for a stage, in the program with ``gather_once=False``
    traced: int  #: for a stage, in the trace of a step with ``gather_once=False``
    collectives: int  #: collectives that this step ran
    due: int  #: collectives that the program asks for: one for each UNSHARD and each layer of its stage


def gather_each_use(group: Any, schedule: str) -> Gathers:
    """Check that training with ``gather_once=`` False and True is bit-identical to a plain loop. Count the gathers."""
    loop = Loop(plain(), momentum)
    shared: dict[str, Any] = {"schedule": schedule, "boundaries": [4, 7, 10] if "inter" in schedule else [7]}
    pipes = []
    for once in (True, False):
        options = Distributed(zero=3, gather_once=once, timeout=20)
        pipes.append(divided(group, plain(), distributed=options, **shared))
    (kept, replica), (freed, _) = pipes
    gather = replica_sum._all_gather
    with kept, freed:
        for step in range(2):
            due = loop.step(step)
            assert torch.equal(run(kept.step, step, replica), due)
            with patch.object(replica_sum, "_all_gather", side_effect=gather) as calls:
                assert torch.equal(run(freed.step, step, replica), due)
            assert torch.equal(run(freed.evaluate, 2, replica), run(kept.evaluate, 2, replica))
        check_state(freed.full_state_dict(), loop.model)
        once, each = (pipe._running.assembly.programs.full.without_messages for pipe in (kept, freed))
        own = freed._running.assembly.stages
        layers = {stage: sum(bool(bucket) for bucket in held.gradients.buckets) for stage, held in own.items()}
        spans = [span for span in freed.trace.spans if str(span.action.kind) == "UNSHARD"]
        assert all(span.end_s > span.start_s for span in spans)
        traced = max(sum(span.action.stage == stage for span in spans) for stage in own)
        number = sum(each.gathers[stage] * count for stage, count in layers.items())
        most = [max(program.gathers[stage] for stage in own) for program in (once, each)]
        return Gathers(*most, traced, calls.call_count, number)


def report(group: Any) -> tuple[str, set[str]]:
    """Return the texts of the plan and the report, and the kinds of actions in the trace."""
    search = Search(links=Links(inside=Link(1e-6, 1e9)), memory_limit_bytes=10**9)
    pipe, replica = divided(group, plain(), schedule="1f1b", boundaries=[7], search=search)
    with pipe:
        run(pipe.step, 0, replica)
        assert pipe.predicted.hidden_communication is not None
        assert pipe.plan.completed.gathers == (1, 1)
        made = pipe.report()
        assert read_again(made).text() == made.text()
        assert "optimizer" in next(table for table in made.tables if table.title == "Memory, predicted").columns
        return f"{pipe.plan.explain()}\n{made}", {str(span.action.kind) for span in pipe.trace.spans}


def own_program(group: Any) -> None:
    """Check that training with a program that already contains gathers is bit-identical to a plain loop."""
    program = schedules.get("1f1b").program(2, MICROBATCHES // 2)
    shared: dict[str, Any] = {"boundaries": [7]}
    pipe, replica = divided(group, plain(), schedule=add_gathers(program, prefetch=0), **shared)
    loop = Loop(plain(), momentum)
    with pipe:
        for step in range(2):
            assert torch.equal(run(pipe.step, step, replica), loop.step(step))
            assert torch.equal(run(pipe.evaluate, 2, replica), run(pipe.evaluate, 2, replica))
        check_state(pipe.full_state_dict(), loop.model)


def train(group: Any, **options: Any) -> None:
    """Check that training, with loads and changes of the weights between steps, is bit-identical to a plain loop.

    The model has a tied weight, and a frozen layer that is not in the optimizer.
    """
    model = tied()
    pipe, replica = divided(group, model, optimizer=trained_only, boundaries=["narrow"], **options)
    loop = Loop(tied(), trained_only)
    with pipe:
        for step in range(2):
            assert torch.equal(run(pipe.step, step, replica), loop.step(step))
            loss = run(pipe.evaluate, 2, replica)
            with torch.inference_mode():
                assert torch.equal(run(pipe.evaluate, 2, replica), loss)
        halves = {name: value / 2 for name, value in pipe.full_state_dict().items()}
        halves["head.weight"] = halves["embedding.weight"]
        pipe.load_state_dict(halves)
        loop.model.load_state_dict(halves)
        with torch.no_grad():
            for parameter in (*pipe.parameters(), *loop.model.parameters()):
                parameter.mul_(1.5)
        assert torch.equal(run(pipe.step, 2, replica), loop.step(2))
        pipe.apply(widths)
        loop.model.apply(widths)
        check_state(pipe.full_state_dict(), loop.model)
        pipe.gather_model(rank=0)
        if group.rank() == 0:
            check_state(model.state_dict(), loop.model)
        pipe.to(torch.float64)
        loop.model.double()
        assert torch.equal(run(pipe.step, 3, replica), loop.step(3))
    pipe.gather_model()
    check_state(model.state_dict(), loop.model)


def widths(module: nn.Module) -> None:
    """Set all weights of a linear layer to the number of rows of its weight, which is smaller if rows are missing."""
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, len(module.weight))


def split(group: Any, schedule: str) -> None:
    """Check that training with weight gradients in W, or with recomputation, is bit-identical to a plain loop."""
    options = {"checkpoint": "always"} if schedule == "1f1b" else {}
    with patch.object(split_backward, "PAYS_FLOPS", 0):
        pipe, replica = divided(group, plain(), schedule=schedule, **options)
        loop = Loop(plain(), momentum)
        with pipe:
            for step in range(2):
                assert torch.equal(run(pipe.step, step, replica), loop.step(step))
            check_state(pipe.full_state_dict(), loop.model)
            kinds = {str(span.action.kind) for span in pipe.trace.spans}
            assert kinds >= ({"R"} if options else {"I", "W"})


def hooks(group: Any) -> list[tuple[str, bool]]:
    """Return, for the hooks of this rank's parameters, (parameter name, whether the hook got a whole tensor).

    Two pipelines run at the same time, and must return equal losses.
    """
    pipe, replica = divided(group, plain(), boundaries=[7])
    other, _ = divided(group, plain(), schedule="zb-v", boundaries=[4, 7, 10])
    seen = []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append((name, tuple(grad.shape))) and None)
        parameter.register_post_accumulate_grad_hook(
            lambda one, name=name: seen.append((name, tuple(one.grad.shape)))  # type: ignore[union-attr]
        )
    with pipe, other:
        for step in range(2):
            assert torch.equal(run(pipe.step, step, replica), run(other.step, step, replica))
        shapes = {name: tuple(value.shape) for name, value in pipe.full_state_dict().items()}
        return sorted({(name, shape == shapes[name]) for name, shape in seen})


def refuse(group: Any, folder: Path) -> None:
    """Check that invalid uses of divided weights raise errors, and that saved weights are whole."""
    model = plain()
    x, _ = batch(0)
    pipe, replica = divided(group, model, boundaries=[7])
    again: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "schedule": "1f1b"}
    with pipe:
        for call in (
            lambda: model(x),
            model.state_dict,
            lambda: copy.deepcopy(model),
            lambda: model.load_state_dict(plain().state_dict()),
            lambda: Pipeline(model, x[:2], devices=["cpu"] * 2, **again),
        ):
            with pytest.raises(ExecutionError, match=r"zero=3 .* must not be used while its weights are divided"):
                call()
        with pytest.raises(
            ExecutionError, match=r"state_dict\(\) needs full \(unsharded\) weights, .* call full_state_dict\(\)"
        ):
            pipe.state_dict()
        before = {name: value.clone() for name, value in pipe.full_state_dict().items()}
        pipe.save_weights(folder)
        distributed.barrier(group)
        loaded, _ = divided(group, plain, init=str(folder), boundaries=[4])
        with loaded:
            check = loaded.full_state_dict()
            assert all(torch.equal(check[name], before[name]) for name in before)
        x, y = own_batch(0, replica).values()
        failing = torch.full_like(x, 10**6) if group.rank() == 3 or replica else x
        with pytest.raises((ExecutionError, IndexError)):
            pipe.step(failing, target=y)
    pipe.gather_model()  # the failed step has not changed any weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    first = nn.Linear(64, 64).requires_grad_(False)
    chunks: dict[str, Any] = {"sample": torch.ones(2, 64), "schedule": "interleaved-1f1b"}
    with pytest.raises(GraphError, match=r"layer 'second' \(stage 1\) uses 'first.weight' of stage 0 .* pass zero=2"):
        divided(group, Reaching(first), (4, 1), boundaries=["second"], **chunks)
    with pytest.raises(GraphError, match=r"layer '1' \(stage 1\) uses '0.(weight|bias)' of stage 0 .* pass zero=2"):
        divided(group, nn.Sequential(first, Scaled(first)), (4, 1), boundaries=[1], **chunks)


class Scaled(nn.Module):
    """A layer that uses a weight of another layer through a reference."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(64))
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.own * self.others[0].weight.sum()


class Reaching(nn.Module):
    """A model whose second layer uses the weight of its first layer through a reference."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.first = first
        self.second = Scaled(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def branch(group: Any) -> None:
    """Check that micro-batches take another branch than the sample's, in a step and in an evaluation."""
    options: dict[str, Any] = {"loss_fn": None, "num_microbatches": 2, "sample": batch_of([0])}
    pipe, replica = divided(group, model_of(Padded), **options)
    model = model_of(Padded)
    optimizer = momentum(list(model.parameters()))
    with pipe:
        for step, padding in enumerate([(0, 0, 3, 0), (3, 0, 2, 3)]):
            whole = batch_of(padding)
            own = {name: value.chunk(2)[replica] for name, value in whole.items()}
            due = reference_step(model, **whole, num_microbatches=2, num_replicas=2, seed=3, step=step)
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(pipe.step(**own), due)
        check_state(pipe.full_state_dict(), model)
        pipe.eval()
        pipe.evaluate(**own)


def start_empty(group: Any) -> None:
    """Check that, if a function builds the model, zero=3 and zero=0 have equal weights after a step."""
    shared: dict[str, Any] = {"boundaries": [7]}
    pipes = [divided(group, plain, distributed=Distributed(zero=zero, timeout=20), **shared) for zero in (0, 3)]
    states = []
    for pipe, replica in pipes:
        with pipe:
            run(pipe.step, 0, replica)
            states.append(pipe.full_state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
