"""Jobs of test_mesh_surface: each function runs on all ranks of a group at the same time."""

import copy
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline, Program, Search, schedules
from pipesched.errors import ExecutionError, PipeschedError
from pipesched.runtime.transport.channels import _HEADER, SHARE
from pipesched.testing import reference_step
from tests.support import rank_processes
from tests.support.models import mixed_model
from tests.support.places import mesh_of

X, Y = torch.randn(19, 8, generator=torch.Generator().manual_seed(3)), torch.arange(19) % 4


def pipeline(group: Any, model: nn.Module | None = None, **options: Any) -> Pipeline:
    """Return a Pipeline over the ranks of a process group."""
    choices = {
        "loss_fn": functional.cross_entropy,
        "num_microbatches": 4,
        "seed": 5,
        "distributed": Distributed(timeout=20),
        **options,
    }
    model = mixed_model() if model is None else model
    if "boundaries" not in choices:
        choices["boundaries"] = [len(model) * rank // group.size() for rank in range(1, group.size())]
    sample = choices.pop("sample", X[:2])
    return Pipeline(model, sample, mesh=DeviceMesh.from_group(group, "cpu"), **choices)


def expected_losses(steps: int, model: nn.Module | None = None) -> list[Tensor]:
    model = mixed_model() if model is None else model
    given = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5}
    return [reference_step(model, X, target=Y, step=step, **given) for step in range(steps)]


# ---- the loss -----------------------------------------------------------------------------------------------------


class Waits:
    """Counts the waits for losses of other ranks."""

    def __init__(self, pipe: Pipeline) -> None:
        self.count = 0
        port = pipe._running.host.executor.connected.wire()._ports.short
        reader = port.reader

        def counted(peer: int, tag: int) -> Any:
            read = reader(peer, tag)
            return partial(self._counted, read) if tag == SHARE else read

        port.reader = counted

    def _counted(self, read: Any, into: memoryview) -> None:
        self.count += len(into) == _HEADER  # the header of a message is read first
        read(into)


def who_does_not_look_does_not_wait(group: Any) -> list[int]:
    """Return the number of waits for losses after each of four steps whose loss is never read."""
    with pipeline(group) as pipe:
        waits, counts = Waits(pipe), []
        for _ in range(4):
            pipe.step(X, target=Y)
            counts.append(waits.count)
        return counts


def losses_looked_at_late(group: Any) -> None:
    """Read losses late, in a different order, and after closing. Check that they equal a plain loop's losses.

    A loss is a plain tensor once it has been read.
    """
    wanted = expected_losses(5)
    with pipeline(group) as pipe:
        losses = [pipe.step(X, target=Y) for _ in range(5)]
        assert all(isinstance(loss, Tensor) for loss in losses)
        unseen = type(losses[4]) is not Tensor
        assert unseen == (group.rank() != group.size() - 1)
        for _ in range(2):  # before and after its value has arrived
            with pytest.raises(ExecutionError, match=r"stores the gradients in \.grad; .* remove the call"):
                losses[4].backward()
            losses[4].item()
        assert torch.equal(torch.stack(losses[3:1:-1]), torch.stack(wanted[3:1:-1]))
    for loss, due in zip(losses, wanted, strict=True):
        assert torch.equal(loss, due)
        assert type(loss) is Tensor
        assert (loss.dtype, loss.requires_grad, loss.grad_fn) == (due.dtype, False, None)


def a_loss_lives_without_its_pipeline(group: Any) -> None:
    pipe = pipeline(group)
    loss = pipe.step(X, target=Y)
    pipe._running.host.collectives.gathered(None)  # waits until all ranks are done with the pipeline
    del pipe
    assert torch.equal(loss, expected_losses(1)[0])


def losses_of_one_that_fails(group: Any) -> tuple[list[Any], list[Any]]:
    """Read a step's loss twice after the last rank has failed. Return the values or errors, for two pipelines.

    In the first pipeline, the last rank fails after it has sent the loss. In the second, it fails before.
    """
    last, results = group.rank() == group.size() - 1, []
    for sent in (True, False):
        with suppress(ExecutionError, ZeroDivisionError), pipeline(group) as pipe:
            losses = [pipe.step(X, target=Y)]
            if last and not sent:
                pipe._running.host.collectives._share = fails
            losses.append(pipe.step(X, target=Y))
            if sent:
                pipe.model[-1].register_forward_hook(fails)
                pipe.step(X, target=Y)
        results.append([looked_at(losses[-1]) for _ in range(2)])
    return tuple(results)


def fails(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("a layer's own error")


def looked_at(loss: Tensor) -> Any:
    try:
        return float(loss)
    except ExecutionError as error:
        return str(error)


def other_rows(group: Any, replicas: int) -> str:
    """Return the error of a step in which the last rank of each pipeline has fewer rows, as with a wrong sampler."""
    ranks = group.size() // replicas
    model = mixed_model()
    where = {"mesh": mesh_of(replicas, ranks)} if replicas > 1 else {"mesh": DeviceMesh.from_group(group, "cpu")}
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "num_microbatches": 4}
    options["distributed"] = Distributed(timeout=20)
    options["numerics"] = Numerics(batch_norm="mini-batch")  # which replicas need
    rows = 17 if group.rank() % ranks == ranks - 1 else 19
    boundaries = [len(model) * rank // ranks for rank in range(1, ranks)]
    with Pipeline(model, X[:2], boundaries=boundaries, schedule="1f1b", **where, **options) as pipe:
        with pytest.raises(ExecutionError) as caught:
            pipe.step(X[:rows], target=Y[:rows]).item()
        return str(caught.value)


# ---- inputs="first" -----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A first layer with inputs of several types, two of them keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embed = nn.Linear(8, 8), nn.Embedding(4, 8)

    def forward(self, x: Tensor, *, kind: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * scale + self.embed(kind)


def two_inputs() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU()]
    return nn.Sequential(Pair(), *layers, nn.Linear(8, 4))


def of_class_0_twice(target: Tensor) -> Tensor:
    return (target == 0).sum() + len(target)


def both_ways(group: Any, name: str, placement: str | None = None) -> None:
    """Check that inputs="first" and inputs="all" are bit-identical in steps, evaluations and forwards."""
    schedule = name if placement is None else Program.parse(placement)
    sample = {"x": X[:2], "kind": Y[:2]}
    options = {
        "schedule": schedule,
        "numerics": Numerics(loss_weight=of_class_0_twice),
        "boundaries": None,
        "sample": sample,
    }
    told, differentiated = group.rank() == 0, not placement and name != "chimera"
    with (
        pipeline(group, two_inputs(), **options) as everywhere,
        pipeline(
            group,
            two_inputs(),
            distributed=Distributed(inputs="first"),
            boundaries=everywhere.boundaries,
            **without(options),
        ) as first,
    ):
        for rows in (19, 6, 6, 19) if placement else (19, 6, 6, 3, 19):  # uneven, repeated, fewer than micro-batches
            x = X[:rows].t().contiguous().t().requires_grad_(differentiated)
            batch = {"x": x, "kind": Y[:rows], "scale": 0.5}
            given = {**batch, "target": Y[:rows]}
            loss = everywhere.step(**given)
            grad, x.grad = x.grad, None
            assert torch.equal(first.step(**given) if told else first.step(), loss)
            if told and differentiated:
                assert torch.equal(x.grad, grad)
            for key, parameter in first.named_parameters():
                assert torch.equal(parameter.grad, dict(everywhere.named_parameters())[key].grad)
            for method in ("step", "evaluate"):
                asked = {**given, "return_outputs": True}
                got = getattr(first, method)(**(asked if told else {}))
                assert same(got, getattr(everywhere, method)(**asked)), method
            with torch.no_grad():
                assert same(first(**batch) if told else first(), everywhere(**batch))
        assert first._running.step == everywhere._running.step


def counted_targets(group: Any, inputs: str) -> None:
    """Check that the loss, a weighted mean over targets that are not ignored, is bit-identical to a plain loop's."""
    targets = torch.where(torch.arange(19) < 6, -100, Y)  # the first of four micro-batches has only ignored targets
    weight, told = torch.tensor([1.0, 0.5, 2.0, 0.25]), group.rank() == 0 or inputs == "all"
    with pipeline(group, loss_fn=nn.CrossEntropyLoss(weight), distributed=Distributed(inputs=inputs)) as pipe:
        loss = pipe.step(X, target=targets) if told else pipe.step()
    given = {"loss_fn": nn.CrossEntropyLoss(weight), "num_microbatches": 4, "seed": 5}
    assert torch.equal(loss, reference_step(mixed_model(), X, target=targets, **given))


class Scored(nn.Module):
    """A model that computes its own loss: the mean over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.first(x).tanh())
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


def losses_in_outputs(group: Any, inputs: str) -> None:
    """Check that outputs contain the loss of the whole batch, not one loss per micro-batch."""
    batch = {"x": X, "labels": torch.where(torch.arange(19) < 6, -100, Y)}
    own = batch if group.rank() == 0 or inputs == "all" else {}
    sample, expected = {name: value[:2] for name, value in batch.items()}, Scored()(**batch)["loss"].detach()
    choices = {"loss_fn": None, "sample": sample, "boundaries": ["last"], "distributed": Distributed(inputs=inputs)}
    with pipeline(group, Scored(), **choices) as pipe:
        loss, output = pipe.evaluate(**own, return_outputs=True, gather=True)
        with torch.no_grad():
            outputs = output, pipe(**own, gather=True)
    torch.testing.assert_close(loss, expected)
    assert all(torch.equal(one["loss"], loss) for one in outputs)


def without(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "boundaries"}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return one is None and other is None if one is None or other is None else torch.equal(one, other)


def rank_0_goes_on(group: Any) -> list[float]:
    """Check that rank 0's evaluations return before the other ranks start theirs. Returns the losses.

    The first evaluation is an exception, because it compares the programs of all ranks.
    """
    store, losses = group.get_group_store(), []
    batches = [(torch.ones(rows, 8, wide), Y[:rows]) for rows in (19, 19, 6) for wide in (1, 20000)]
    model = nn.Sequential(nn.Flatten(), First(), *(nn.Linear(8, 8) for _ in range(3)))
    with pipeline(group, model, distributed=Distributed(inputs="first"), boundaries=[3]) as pipe:
        for number, (x, y) in enumerate(batches):
            if group.rank() and number:
                store.wait([f"ahead/{number}"], timedelta(seconds=15))
            losses.append(pipe.evaluate() if group.rank() else pipe.evaluate(x, target=y))
            if not group.rank():
                store.set(f"ahead/{number}", "")
        return [float(loss) for loss in losses]


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :8]


def wrong_uses(group: Any, ends_swapped: str) -> dict[str, str]:
    """Return this rank's error for each wrong use. With inputs="first", add the result of a good step afterwards."""
    rank, said = group.rank(), {}
    good = ((X,), {"target": Y}) if rank == 0 else ((), {})
    uses = {
        "a batch on rank 1": ("first", ((X,), {"target": Y}) if rank < 2 else ((), {})),
        "none on rank 0": ("first", ((), {})),
        "none on rank 1": ("all", ((), {}) if rank == 1 else ((X,), {"target": Y})),
        "unequal rows": ("first", ((X,), {"target": Y[:7]}) if rank == 0 else ((), {})),
        "no target": ("first", ((X,), {}) if rank == 0 else ((), {})),
        "gradients": ("first", ((X.clone().requires_grad_(),), {"target": Y}) if rank == 0 else ((), {})),
    }
    for name, (inputs, (args, kwargs)) in uses.items():
        schedule = Program.parse(ends_swapped) if name == "gradients" else "1f1b"
        try:
            with pipeline(group, distributed=Distributed(inputs=inputs), schedule=schedule) as pipe:
                said[name] = what_is_said(lambda: float(pipe.step(*args, **kwargs)))
                if inputs == "first":
                    said[name] += " then: " + what_is_said(lambda: float(pipe.step(*good[0], **good[1])))
        except ExecutionError as error:  # another rank failed while this rank had already made the pipeline
            said.setdefault(name, f"ExecutionError: {error}")
    return said


def what_is_said(call: Any) -> str:
    try:
        return str(call())
    except PipeschedError as error:
        return f"{type(error).__name__}: {error}"


# ---- outputs ------------------------------------------------------------------------------------------------------


def gathered(group: Any, name: str, inputs: str) -> int:
    """Check that gathered outputs equal those of a pipeline in one process.

    Runs one forward with gather=True and one with gather=False. Returns how many of them gave this rank the outputs.
    """
    options = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5, "schedule": name}
    chunks = schedules.get(name).chunks_per_rank * group.size()
    options["boundaries"] = [8 * stage // chunks for stage in range(1, chunks)]
    told, bare = inputs == "all" or group.rank() == 0, 0
    with (
        Pipeline(two_inputs()[1:], X[:2], devices=["cpu"] * group.size(), **options) as alone,
        pipeline(group, two_inputs()[1:], distributed=Distributed(inputs=inputs), **options) as pipe,
    ):
        for method in ("step", "evaluate"):
            given = {"target": Y, "return_outputs": True, "gather": True}
            outputs = getattr(pipe, method)(*((X,) if told else ()), **(given if told else {}))
            assert same(outputs, getattr(alone, method)(X, **given)), method
        for pipeline_ in (alone, pipe):
            pipeline_.eval()
        with torch.no_grad():
            due = alone(X)
            for gather in (True, False):
                output = pipe(*((X,) if told else ()), **({"gather": gather} if told else {}))
                assert output is None or same(output, due)
                bare += output is not None
        assert not due.requires_grad
    return bare


# ---- meshes of two dimensions -------------------------------------------------------------------------------------


def plain_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())))


def replicas(group: Any, names: list[str]) -> float:
    """Train several pipelines at the same time, and average their gradients over the other mesh dimension.

    Checks that losses and weights equal those of a model that is trained on all rows. Returns the last loss.
    """
    mesh = rank_processes.mesh_of((2, 2), ("dp", "pp"))
    own = slice(8 * mesh["dp"].get_local_rank(), 8 * mesh["dp"].get_local_rank() + 8)
    x, y = X[:16], X[:16].flip(1)
    expected, models = plain_model(), [plain_model() for _ in names]
    options = {
        "loss_fn": functional.mse_loss,
        "num_microbatches": 2,
        "mesh": mesh["pp"],
        "distributed": Distributed(timeout=20),
    }
    options["boundaries"] = [4]  # fixed, because replicas could measure different times and cut differently
    theirs = torch.optim.SGD(expected.parameters(), lr=0.5)
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(Pipeline(model, x[:4], schedule=name, **options))
            for name, model in zip(names, models, strict=True)
        ]
        ours = [torch.optim.SGD(pipe.parameters(), lr=0.5) for pipe in pipes]
        for _ in range(3):
            due = functional.mse_loss(expected(x), y)
            due.backward()
            theirs.step()
            theirs.zero_grad()
            losses = [pipe.step(x[own], target=y[own]) for pipe in pipes]
            for pipe, optimizer, loss in zip(pipes, ours, losses, strict=True):
                for value in (loss, *(parameter.grad for parameter in pipe.parameters())):
                    distributed.all_reduce(value, group=mesh["dp"].get_group())
                    value.div_(2)
                optimizer.step()
                optimizer.zero_grad()
            assert all(torch.allclose(loss, due.detach(), atol=1e-6) for loss in losses)
        for pipe in pipes:
            state = pipe.full_state_dict()
            assert all(torch.allclose(state[key], value, atol=1e-5) for key, value in expected.state_dict().items())
            states: list[Any] = [None, None]
            distributed.all_gather_object(states, state, group=mesh["dp"].get_group())
            assert all(torch.equal(states[0][key], states[1][key]) for key in state)
    return float(due)


def tensor_parallel(group: Any, schedule: str, boundaries: list[int]) -> None:
    """Check a pipeline whose layers are tensor-parallel over the other mesh dimension, so parameters are DTensors."""
    mesh = rank_processes.mesh_of((2, 2), ("pp", "tp"))
    expected = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)))
    for parameter in expected.parameters():
        distributed.broadcast(parameter.data, 0)
    model = copy.deepcopy(expected)
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    options = {
        "loss_fn": functional.mse_loss,
        "num_microbatches": 2,
        "mesh": mesh["pp"],
        "distributed": Distributed(timeout=20),
    }
    with Pipeline(model, X[:4], schedule=schedule, boundaries=boundaries, seed=1, **options) as pipe:
        for _ in range(2):
            due = functional.mse_loss(expected(X[:16]), X[:16])
            due.backward()
            assert torch.allclose(pipe.step(X[:16], target=X[:16]), due.detach(), atol=1e-6)
        gradients = {key: parameter.grad for key, parameter in expected.named_parameters()}
        for key, parameter in pipe.named_parameters():
            assert isinstance(parameter, DTensor), key
            assert torch.allclose(parameter.grad.full_tensor(), gradients[key], atol=1e-6), key


# ---- modules ------------------------------------------------------------------------------------------------------


def modules_of_ranks(group: Any) -> list[str]:
    """Return the names of this rank's modules. Check that ``apply`` visits only these, and can set their weights."""
    model = mixed_model()
    stale = copy.deepcopy(model.state_dict())
    with pipeline(group, model) as pipe:
        names = [name for name, _ in pipe.named_modules()]
        seen: set[nn.Module] = set()
        pipe.apply(seen.add)
        assert seen == set(pipe.modules())

        def clear(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)

        pipe.apply(clear)
        own = {name for name, _ in pipe.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, torch.zeros_like(parameter) if name in own else stale[name]), name
        pipe.gather_model()
        assert not any(map(torch.count_nonzero, model.parameters()))
    return names


# ---- another plan -------------------------------------------------------------------------------------------------


# ---- plans that are searched for ------------------------------------------------------------------------------------


def planned_by_rank_0(group: Any) -> str:
    """Train with a plan that rank 0 finds, and return the plan's schedule."""
    with pipeline(group, boundaries=None, num_stages=group.size(), distributed=Distributed(inputs="first")) as pipe:
        batch = ((X,), {"target": Y}) if group.rank() == 0 else ((), {})
        for expected in expected_losses(2):
            assert torch.equal(pipe.step(*batch[0], **batch[1]), expected)
        assert len(pipe.devices) == group.size()
        return pipe.plan.schedule


def no_plan_of_rank_0(group: Any) -> str:
    """Return this rank's error if rank 0 finds no plan."""
    try:
        small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        pipeline(group, small, boundaries=None, search=Search(memory_limit_bytes=10))
    except PipeschedError as error:
        return f"{type(error).__name__}: {error}"
    return ""
