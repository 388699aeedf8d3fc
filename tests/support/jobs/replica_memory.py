"""Jobs that compare the predicted memory of replicas with the measured memory."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim import Optimizer

from pipesched import Distributed, Pipeline, Search, schedules
from pipesched.errors import PipeschedError
from pipesched.runtime.reductions import replica_sum
from pipesched.simulation.memory import RankMemory
from pipesched.testing import MemoryMeter
from tests.support import rank_processes
from tests.support.models import TransformerBlock

WORDS, MICROBATCHES = 48, 4


class Shape(NamedTuple):
    """A model of equal blocks between an embedding and a head, and the number of tokens of a micro-batch."""

    blocks: Callable[[], nn.Module]
    count: int
    width: int
    tokens: int
    tied: bool = False  # whether embedding and head share a weight


class Block(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def transformer() -> nn.Module:
    return TransformerBlock(64)


SMALL, GPT = Shape(Block, 32, 64, 8), Shape(transformer, 16, 64, 16)
FEW = SMALL._replace(count=12)
TIED = FEW._replace(tied=True)


def made(shape: Shape) -> nn.Sequential:
    """Return the model of a Shape."""
    torch.manual_seed(0)
    blocks = [shape.blocks() for _ in range(shape.count)]
    embedding, head = nn.Embedding(WORDS, shape.width), nn.Linear(shape.width, WORDS)
    if shape.tied:
        head.weight = embedding.weight
    return nn.Sequential(embedding, *blocks, head)


def adam(parameters: list[Any]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.001)


def sgd(parameters: list[Any]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.001)


class Case(NamedTuple):
    """The options of a pipeline. dims: the numbers of replicas and of ranks."""

    dims: tuple[int, int]
    schedule: str
    optimizer: Callable[[list[Any]], Optimizer] | None
    zero: int = 0
    shape: Shape = SMALL
    gather_once: bool = True
    num_chunks: int | None = None


class Held(NamedTuple):
    """The bytes of a rank in a step, predicted and measured: its peak memory, and its traffic to other replicas."""

    predicted: RankMemory
    measured: int
    predicted_sent: int
    sent: int

    @property
    def ratio(self) -> float:
        return self.predicted.total_bytes / self.measured


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Yield a list to which each collective between replicas adds the bytes that this process sends."""
    sent: list[int] = []
    all_to_all, all_gather = distributed.all_to_all_single, replica_sum._all_gather

    def exchange(received: Tensor, given: Tensor, group: Any) -> Any:
        sent.append(given.nbytes * (group.size() - 1) // group.size())
        return all_to_all(received, given, group=group)

    def gather(received: Tensor, given: Tensor, group: Any) -> Any:
        sent.append(given.nbytes * (group.size() - 1))
        return all_gather(received, given, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_to_all_single", exchange)
        patch.setattr(replica_sum, "_all_gather", gather)
        yield sent


def batch(shape: Shape) -> Tensor:
    return torch.arange(shape.tokens * MICROBATCHES) % WORDS


def pipeline(mesh: DeviceMesh, case: Case, **options: Any) -> Pipeline:
    """Make the pipeline of a case, with equal numbers of blocks in its stages."""
    shape = case.shape
    usual = 1 if case.schedule == "chimera" else schedules.get(case.schedule).chunks_per_rank
    num_stages = case.dims[1] * (case.num_chunks or usual)
    return Pipeline(
        made(shape),
        batch(shape)[: shape.tokens],
        loss_fn=functional.cross_entropy,
        mesh=mesh,
        schedule=case.schedule,
        num_microbatches=MICROBATCHES,
        boundaries=[1 + shape.count * stage // num_stages for stage in range(1, num_stages)],
        optimizer=case.optimizer,
        distributed=Distributed(zero=case.zero, gather_once=case.gather_once, timeout=20),
        **options,
    )


def compare(group: Any, case: Case) -> Held:
    """Train for two steps; the bytes of this rank in the second step."""
    mesh = rank_processes.mesh_of(case.dims, ("dp", "pp"))
    x = batch(case.shape)
    with pipeline(mesh, case) as pipe, MemoryMeter(pipe) as meter:
        rank = mesh.get_local_rank("pp")
        predicted = pipe.predicted_memory[rank]
        for _ in range(2):
            meter.mark()
            with sent_bytes() as sent:
                pipe.step(x, target=x)
            if case.optimizer is None:
                pipe.zero_grad()
        (peak,) = meter.peak_bytes.values()
        predicted_sent = pipe._memory.sent_to_replicas()[rank]
    return Held(predicted, peak + predicted.batch, predicted_sent, sum(sent))


def searched(group: Any, case: Case) -> float:
    """Return a plan's memory as the search computes it, divided by the memory that the pipeline predicts."""
    mesh = rank_processes.mesh_of(case.dims, ("dp", "pp"))
    with pipeline(mesh, case) as pipe:
        predicted = max(own.total_bytes for own in pipe.predicted_memory)
    with pytest.raises(PipeschedError) as caught:
        pipeline(mesh, case, search=Search(memory_limit_bytes=predicted // 2), checkpoint="never")
    return int(re.findall(r"smallest limit for a plan is (\d+) bytes", str(caught.value))[0]) / predicted
