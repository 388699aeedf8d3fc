"""Torch runtime: runs an order of ours in torch.distributed.pipelining, on torch's own stages."""

import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pipesched import Program

__all__ = ["step_in_torch"]


def step_in_torch(
    program: Program,
    model: nn.Sequential,
    boundaries: Sequence[int],
    loss_fn: Callable[..., Any],
    group: ProcessGroup | None = None,
) -> Callable[[Tensor, Tensor], None]:
    """Return a function that runs one step of a program in torch's runtime, with a process for each rank.

    Args:
        program: the program. Torch loads the file of ``to_torch``.
        model: the layers.
        boundaries: the first layer of each stage but the first.
        loss_fn: the loss of a micro-batch.
        group: the processes of the ranks. Default: all processes.

    """
    ends = list(pairwise([0, *boundaries, len(model)]))
    rank = distributed.get_rank(group)
    own = [stage for stage, place in enumerate(program.placement) if place == rank]
    cpu, count = torch.device("cpu"), program.num_stages
    stages = [PipelineStage(model[slice(*ends[stage])], stage, count, cpu, group=group) for stage in own]
    schedule = _PipelineScheduleRuntime(stages, program.num_microbatches, loss_fn=loss_fn)
    with tempfile.TemporaryDirectory() as folder:
        program.to_torch(Path(folder) / "order.csv")
        schedule._load_csv(str(Path(folder) / "order.csv"))

    def step(x: Tensor, y: Tensor) -> None:
        given = [x] if 0 in own else []
        schedule.step(*given, **({"target": y} if count - 1 in own else {}))

    return step
