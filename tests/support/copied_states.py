"""Owners of states that are copied: ranks with small stages, without a pipeline; and unusual optimizers."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from pipesched.elastic.state_copy import RankState, RankUpdate, rank_state
from pipesched.model.named_parameters import NamedParameters
from pipesched.runtime.stage.stage_optimizer import StageOptimizer
from pipesched.saving.capturing import captured_here
from pipesched.saving.live_run import LiveRun
from pipesched.saving.saved_run import CheckpointPart


class Counted(Optimizer):
    """Keeps plain numbers, lists and tensors in its state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["past"] = [*state.get("past", [0.0, 0.0]), float(parameter.grad.norm())][-2:]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 / state["count"])
                parameter.sub_(mean, alpha=group["lr"] * max(state["past"]))


class Halving(Optimizer):
    """Writes to the gradients, as some optimizers that clip do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class SelfTuned(Optimizer):
    """Keeps the number of its updates in its parameter groups, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


def grouped(params: NamedParameters) -> Optimizer:
    """Return an optimizer without weight decay of biases."""
    named = params.named()
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    return AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, amsgrad=True)


class Owner:
    """A rank with two stages, whose third layer is frozen. Its steps depend on their number only.

    Args:
        make: creates an optimizer from parameters, as ``optimizer=`` does.
        width: the number of features.
        place: the beginning of the names of its layers.

    """

    def __init__(self, make: Callable[[Any], Any], width: int = 4, place: str = "") -> None:
        self.make = make
        self.place = place
        self.width = width
        self.version = 0
        generator = torch.Generator().manual_seed(width + len(place))
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 2)
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
        self.model[3].requires_grad_(False)
        self.layers = [f"{place}{number}" for number in range(5)]
        self.named = {f"{place}{name}": own for name, own in self.model.named_parameters()}
        self.buffers = {f"{place}{name}": own for name, own in self.model.named_buffers()}
        names = {id(parameter): name for name, parameter in self.named.items()}
        self.optimizers: dict[int, StageOptimizer] = {}
        for index, places in enumerate([(0, 1, 2), (3, 4)]):
            stage = StageOptimizer({self.layers[own]: self.model[own] for own in places}, map(str, places))
            stage.wrapped = make(NamedParameters((names[id(own)], own) for own in stage.parameters))
            self.optimizers[index] = stage
        self.run = LiveRun(
            host=None,
            facts=None,
            parameters=self.named,
            buffers=self.buffers,
            shared_buffers={},
            shapes={name: tuple(own.shape) for name, own in (self.named | self.buffers).items()},
            parameter_names=list(self.named),
            caches=(),
            names=names,
            modules={},
            optimizers={index: own.wrapped for index, own in self.optimizers.items() if own.wrapped is not None},
            divided={},
            zero=0,
            scaler=None,
        )

    def state(self) -> RankState:
        return rank_state(self.run, self.optimizers, self.buffers)

    def backward(self, unused: Collection[str] = ()) -> None:
        """Compute the gradients of a step."""
        generator = torch.Generator().manual_seed(self.version)
        self.model(torch.rand(6, self.width, generator=generator)).square().mean().backward()
        for name in unused:
            self.named[name].grad = None

    def step(self, unused: Collection[str] = (), skipped: Collection[int] = ()) -> RankUpdate:
        """Run a step, and return what a copy needs to run it again."""
        self.backward(unused)
        gradients: dict[str, torch.Tensor] = {}
        updated = [index for index in self.optimizers if index not in skipped]
        for index in updated:
            own = [parameter for parameter in self.optimizers[index].parameters if parameter.grad is not None]
            gradients |= {self.run.names[id(parameter)]: parameter.grad.clone() for parameter in own}
        for index, stage in self.optimizers.items():
            if stage.wrapped is not None and index in updated:
                stage.wrapped.step()
        self.model.zero_grad()
        self.version += 1
        updated = [index for index in updated if self.optimizers[index].wrapped is not None]
        buffers = {name: own.clone() for name, own in self.buffers.items()}
        return RankUpdate(gradients, updated, buffers, torch.zeros(0))  # a StateCopy does not read the digest

    def train(self) -> None:
        """Run a step as a stage does."""
        self.backward()
        self.update()

    def update(self) -> None:
        """Run the updates of a step."""
        for stage in self.optimizers.values():
            stage.update(None)
        self.version += 1

    def parts(self) -> tuple[CheckpointPart, CheckpointPart]:
        """Return copies of the parts of a checkpoint."""
        return tuple(
            CheckpointPart({key: own.clone() for key, own in part.tensors.items()}, part.entries, part.values)
            for part in captured_here(self.run)
        )


def assert_same_parts(found: Collection[CheckpointPart], due: Collection[CheckpointPart]) -> None:
    """Check that parts of a checkpoint have the same tensors bit for bit, and the same entries and values."""
    for own, other in zip(found, due, strict=True):
        assert list(own.tensors) == list(other.tensors)
        assert [name for name, tensor in own.tensors.items() if not torch.equal(tensor, other.tensors[name])] == []
        assert own.entries == other.entries
        assert own.values == other.values
