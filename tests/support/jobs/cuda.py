"""Jobs of test_cuda. On CPUs they use stand-ins for the links between devices."""

import random
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Pipeline, schedules
from pipesched.program.lowering import lower
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.rank_grid import RankGrid
from pipesched.tensors.payload import Payload
from pipesched.testing import reference_step
from tests.support.jobs.messages import Carries, tensor, value
from tests.support.jobs.programs import run_spec
from tests.support.models import gradients, mixed_model

X, Y = torch.randn(19, 8, generator=torch.Generator().manual_seed(3)), torch.arange(19) % 4


def own_device(group: Any, kind: str) -> torch.device:
    """Return this rank's own GPU, or the CPU if ``kind`` is "cpu"."""
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(group.rank())
    return torch.device("cuda", group.rank())


def round_trips(group: Any, kind: str, seed: int) -> int:
    """Send random values forward and gradients back. Check that they arrive unchanged. Return the number received."""
    device, rng = own_device(group, kind), random.Random(seed)
    outputs = [Payload.of(value(rng)).map_tensors(lambda one: one.to(device)) for _ in range(10)]
    grads = [tuple(rng.choice([None, tensor(rng).detach().to(device)]) for _ in range(3)) for _ in range(10)]
    program = lower(schedules.get("gpipe").program(2, 10))
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, device=device, timeout_s=30)))
    seen = 0
    for order in (1, 1, -1, 1):
        stages = {index: Carries(index, outputs[::order], grads[::order]) for index in range(2)}
        executor.run(run_spec(program, stages), grad=False, looks=list(range(10)))
        seen += stages[group.rank()].seen
    executor.close()
    return seen


def train(group: Any, kind: str, names: list[str], checkpoint: str) -> None:
    """Check that losses and gradients for two batch sizes are bit-identical to those of a plain loop on this device."""
    device = own_device(group, kind)
    mesh = DeviceMesh.from_group(group, kind)
    x, y = X.to(device), Y.to(device)
    for name in names:
        expected, actual = mixed_model().to(device), mixed_model()
        cut = [
            11 * stage // (group.size() * schedules.get(name).chunks_per_rank)
            for stage in range(1, group.size() * schedules.get(name).chunks_per_rank)
        ]
        with Pipeline(
            actual,
            x[:2],
            loss_fn=functional.cross_entropy,
            mesh=mesh,
            schedule=name,
            num_microbatches=4,
            boundaries=cut,
            checkpoint=checkpoint,
            seed=5,
        ) as pipe:
            for step, rows in enumerate((19, 6, 19)):
                loss = pipe.step(x[:rows], target=y[:rows])
                wanted = reference_step(
                    expected,
                    x[:rows],
                    target=y[:rows],
                    loss_fn=functional.cross_entropy,
                    num_microbatches=4,
                    seed=5,
                    step=step,
                )
                assert float(loss) == float(wanted), (name, step)
            due = gradients(expected)
            mine = {key: p.grad for key, p in pipe.named_parameters() if p.grad is not None}
            assert all(torch.equal(grad, due[key]) for key, grad in mine.items()), name
            assert pipe.trace.makespan_s > 0
