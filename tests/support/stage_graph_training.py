"""Trains the same random layers twice: with an executor that runs a program of any stage graph, and in a plain loop."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Program
from pipesched.capture.stage_body import Head, LayerChain
from pipesched.program.lowering import lower
from pipesched.program.validation import validate
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.stage import split_backward as backward
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import Key, KeyedRandom
from pipesched.tensors.payload import PerConsumer, pytree
from tests.support.models import Scaled
from tests.support.random_programs import random_program

WIDTH = 6
NUM_RANKS = 3
_SEED = 11

#: The results of a run: gradients and buffers, keyed by name; losses, keyed by (step, stage, micro-batch).
Result = dict[Any, np.ndarray]


def program_of(seed: int) -> Program:
    """Return a random valid program, with any placement, stage graph and order, and some recomputes."""
    rng = random.Random(seed)
    program = random_program(
        rng,
        NUM_RANKS,
        rng.randint(3, 6),
        rng.randint(1, 4),
        skips=rng.random() < 0.6,
        recomputes=rng.random() < 0.4,
        ascending=rng.random() < 0.5,
    )
    program = program.forward() if rng.random() < 0.15 else program
    validate(program)
    return program


class Join(nn.Module):
    """The first layer of a stage: combines the outputs of all previous stages that send to this stage."""

    def __init__(self, num_values: int, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.mix = nn.Linear(WIDTH * (1 if adds else num_values), WIDTH)

    def forward(self, *values: Any) -> Tensor:
        tensors = [value["out"] * value["gain"] if isinstance(value, dict) else value for value in values]
        return self.mix(sum(tensors[1:], tensors[0]) if self.adds else torch.cat(tensors, -1))


class Residual(nn.Module):
    """A layer that uses one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.inner(x), 0.3, self.training)


class Dressed(nn.Module):
    """A layer that returns a dict of a non-contiguous tensor, a second tensor, and a value that is not a tensor."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": x.t().contiguous().t(), "gain": torch.sigmoid(x.mean(-1, keepdim=True)), "name": "dressed"}


BODIES = (
    nn.Tanh,
    Residual,
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: Scaled(WIDTH),
    lambda: nn.Sequential(Residual(), nn.ReLU(inplace=True)),
)


def layers_of(program: Program, seed: int) -> list[dict[str, nn.Module]]:
    """Return the layers of each stage by name."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    stages = []
    for stage, producers in enumerate(program.graph.producers):
        layers: list[nn.Module] = [Join(max(1, len(producers)), rng.random() < 0.5)]
        for _ in range(rng.randrange(3)):
            kinds = [nn.Tanh, Residual, lambda: nn.LayerNorm(WIDTH)]
            kinds += [
                lambda: Scaled(WIDTH),
                lambda: nn.BatchNorm1d(WIDTH),
                lambda: nn.Sequential(Residual(), nn.ReLU(True)),
            ]
            layers.append(rng.choice(kinds)())
        layers.append(nn.Dropout(0.2))
        if program.graph.consumers[stage] and rng.random() < 0.3:
            layers.append(Dressed())
        stages.append({f"{stage}.{place}": layer.double() for place, layer in enumerate(layers)})
    return stages


def batches(program: Program) -> Iterator[tuple[Any, list[float | None]]]:
    """Yield two batches of different sizes in uneven micro-batches, with the factor of each micro-batch's loss."""
    m = program.num_microbatches
    for rows in (2 * m + 1, 2 * m + 1 + (m > 1)):
        x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        splitter = Splitter(m, False, 0, None, "mean")
        batch = splitter.batch((x,), {}, x.flip(-1))
        yield batch, splitter.factors(batch)


def by_hand(program: Program, seed: int) -> Result:
    """Run stage after stage and micro-batch after micro-batch, with plain autograd."""
    stages, found = layers_of(program, seed), {}
    for step, (batch, factors) in enumerate(batches(program)):
        for mb, (args, _) in enumerate(batch.inputs):
            random_mode, values = KeyedRandom(torch.device("cpu")), []
            with torch.set_grad_enabled(not program.forward_only), Intercept(random_mode):
                for stage, layers in enumerate(stages):
                    given = [values[one] for one in program.graph.producers[stage]] or args
                    for name, layer in layers.items():
                        random_mode.enter(Key(_SEED, step, mb), name)
                        given = (layer(*given),)
                    values.append(given[0])
            roots = []
            for stage in sinks(program):
                loss = functional.mse_loss(values[stage], batch.targets[mb]) * factors[mb]
                found[step, stage, mb] = loss.detach().numpy()
                roots.append(loss)
            if not program.forward_only:
                torch.autograd.backward(roots)
    return found | state_of(stages)


class Each(LayerChain):
    """A chain of layers that returns a separate copy of its output for each stage that uses the output."""

    def __init__(self, layers: dict[str, nn.Module], num_takers: int) -> None:
        super().__init__(layers)
        self.num_takers = num_takers

    def run(self, *args: Any) -> Any:
        output = super().run(*args)
        if self.num_takers < 2:
            return output
        return PerConsumer(pytree.tree_map_only(Tensor, Tensor.clone, output) for _ in range(self.num_takers))


def sinks(program: Program) -> list[int]:
    """Return the stages without successors; each has a loss."""
    return [stage for stage, consumers in enumerate(program.graph.consumers) if not consumers]


def state_of(stages: list[dict[str, nn.Module]]) -> Result:
    modules = {name: layer for layers in stages for name, layer in layers.items()}
    grads = {
        f"{name}.{key}": parameter.grad.numpy()
        for name, layer in modules.items()
        for key, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    buffers = {
        ("buffer", name, key): buffer.numpy()
        for name, layer in modules.items()
        for key, buffer in layer.named_buffers()
    }
    return grads | buffers


def by_executor(executor: Any, program: Program, seed: int) -> Result:
    """Run the program, and return the results of the ranks in this process."""
    over_mesh = isinstance(executor, ProcessExecutor)
    own = program.chunks(executor.connected.rank) if over_mesh else range(program.num_stages)
    layers = layers_of(program, seed)
    graph = program.graph
    stages = {
        index: Stage(
            Each(layers[index], len(graph.consumers[index])),
            torch.device("cpu"),
            None if graph.consumers[index] else Head(functional.mse_loss),
        )
        for index in own
    }
    found: Result = {}
    for step, (batch, factors) in enumerate(batches(program)):
        data_of_stage = {
            index: StepData(_SEED, step, list(batch.inputs), targets=batch.targets, factors=factors) for index in stages
        }

        def begin(caller: Any, data_of_stage: dict[int, StepData] = data_of_stage) -> None:
            for index, stage in stages.items():
                stage.begin(data_of_stage[index])

        looks = {"looks": [look(one) for one in batch.inputs]} if over_mesh else {}
        executor.run(RunSpec(lower(program), stages, prepare=begin), grad=not program.forward_only, **looks)
        assert not any(stage._saved for stage in stages.values())
        for index, step_data in data_of_stage.items():
            found |= {(step, index, mb): loss.detach().numpy() for mb, loss in step_data.losses.items()}
    return found | state_of([layers[index] for index in own])


def over_mesh(group: Any, seeds: list[int]) -> list[Result]:
    """Run each program over a mesh, and return this rank's results. A job of test_stage_graphs."""
    backward.PAYS_FLOPS = 0  # defer the weight gradients of all products to W, however small
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    results = [by_executor(executor, program_of(seed), seed) for seed in seeds]
    executor.close()
    return results
