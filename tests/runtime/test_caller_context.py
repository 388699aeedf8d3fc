"""Settings of the calling thread hold in the layers of a pipeline in one process, or are refused by name."""

import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pipesched import Pipeline
from pipesched.errors import InputError
from tests.support.places import place
from tests.support.rank_processes import Ranks

X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.zeros(8, 8)
STRENGTH = contextvars.ContextVar("STRENGTH", default=1.0)


class Reads(nn.Module):
    """A layer that reads a context variable, makes a tensor on the default device, and notes both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((STRENGTH.get(), torch.arange(2).device.type))
        scaled: Tensor = self.linear(x) * STRENGTH.get()
        STRENGTH.set(100.0)
        STRENGTH.set(self.seen[-1][0])
        return scaled


def pipeline(model: nn.Module, schedule: str = "1f1b") -> Pipeline:
    return Pipeline(
        model, X[:2], loss_fn=nn.MSELoss(), devices=["cpu"] * 2, schedule=schedule, num_microbatches=4, boundaries=[2]
    )


@contextmanager
def strength(value: float) -> Iterator[None]:
    token = STRENGTH.set(value)
    try:
        yield
    finally:
        STRENGTH.reset(token)


@pytest.mark.parametrize("method", ["step", "evaluate", "forward", "differentiable"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_context_variables_have_the_callers_values(method: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Reads() for _ in range(4)))
    with pipeline(model, schedule) as pipe:
        for value in (2.0, 3.0, 2.0):
            for layer in model:
                layer.seen.clear()
            with strength(value):
                if method in ("step", "evaluate"):
                    result = getattr(pipe, method)(X, target=Y)
                    due = nn.functional.mse_loss(model(X), Y)
                else:
                    with torch.set_grad_enabled(method == "differentiable"):
                        result, due = pipe(X), model(X)
            torch.testing.assert_close(result, due.detach() if method != "differentiable" else due)
            assert {one for layer in model for one, _ in layer.seen} == {value}
    assert STRENGTH.get() == 1.0


@pytest.mark.parametrize("kind", ["context", "default"])
def test_tensors_are_made_on_the_default_device(kind: str) -> None:
    model = nn.Sequential(*(Reads() for _ in range(4)))
    with pipeline(model) as pipe:
        for device in ("cpu", "meta", "cpu"):
            for layer in model:
                layer.seen.clear()
            if kind == "context":
                with torch.device(device):
                    pipe.step(X, target=Y)
            else:
                torch.set_default_device(device)
                try:
                    pipe.step(X, target=Y)
                finally:
                    torch.set_default_device(None)
            assert {one for layer in model for _, one in layer.seen} == {device}


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def half(tensor: Tensor) -> Tensor:
    return tensor.half()


CONTEXTS: dict[str, Any] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "Doubles": Doubles,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "half": lambda: torch.autograd.graph.saved_tensors_hooks(half, Tensor.float),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("method", ["step", "evaluate", "forward"])
def test_modes_and_hooks_of_the_caller_are_refused_by_name(name: str, method: str) -> None:
    context: AbstractContextManager[Any] = CONTEXTS[name]()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pipeline(model) as pipe:
        given = {} if method == "forward" else {"target": Y}
        with context, pytest.raises(InputError, match=f"in this call, {name}.* would miss all layers"):
            getattr(pipe, method)(X, **given)
        pipe.step(X, target=Y)  # outside it, the pipeline goes on


def test_modes_act_where_each_stage_has_a_process(ranks: Ranks) -> None:
    counts = ranks.run(2, flops_of_step)
    assert sum(counts) == flops_of_loop()


def flops_of_step(group: Any) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "schedule": "1f1b", "num_microbatches": 4, "boundaries": [2]}
    with Pipeline(model, X[:2], **place(group), **options) as pipe, FlopCounterMode(display=False) as counter:
        pipe.step(X, target=Y)
    return int(counter.get_total_flops())


def flops_of_loop() -> int:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with FlopCounterMode(display=False) as counter:
        for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
            nn.functional.mse_loss(model(x), y).backward()
    return int(counter.get_total_flops())


def test_a_pipeline_makes_none_of_its_own_tensors_on_the_default_device(tmp_path: Path) -> None:
    """As with torch.set_default_device("cuda"), where the CPU has buffers of messages and of files."""
    x, y = torch.linspace(-1, 1, 128).reshape(16, 8), torch.linspace(1, -1, 128).reshape(16, 8)
    losses = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        options: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4}
        options |= {"loss_fn": functional.mse_loss, "checkpoint": {"1": "offload"}, "boundaries": [2]}
        with Pipeline(model, x[:4], **options) as pipe, torch.device(device):
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
            pipe.step(x, target=y)
            optimizer.step()
            pipe.save(tmp_path / device, optimizer=optimizer)
            for parameter in model.parameters():
                parameter.data.zero_()
            pipe.load(tmp_path / device, optimizer=optimizer)
            losses.append(float(pipe.step(x, target=y, metrics=lambda output, target: {"one": 1.0})))
            assert float(pipe.metrics["one"]) == 1
            pipe.forward(x).sum().backward()
    assert losses[0] == losses[1]


class ReadsDevice(nn.Linear):
    """Scales by a number that depends on the default device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3 if torch.get_default_device().type == "meta" else 1)


def test_a_recomputation_in_the_backward_of_outputs_has_the_settings_of_the_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(ReadsDevice(8, 8) for _ in range(4)))
    point = X.clone().requires_grad_()
    with torch.device("meta"):
        (due,) = torch.autograd.grad(model(point).sum(), point)
        with Pipeline(model, X[:2], devices=["cpu"] * 2, schedule="1f1b", checkpoint="always") as pipe:
            (slope,) = torch.autograd.grad(pipe(point).sum(), point)
    torch.testing.assert_close(slope, due)
