"""Orders that are exported for torch run in torch's runtime, on torch's stages, with the gradients of a plain loop."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from pipesched import Costs, Program, schedules
from pipesched.program.placement import v
from tests.support.torch_runtime import step_in_torch
from tests.support.torch_versions import runs_neighbours

pytestmark = pytest.mark.timeout(120)

RANKS, PARTS = 2, 4


def searched() -> Program:
    """Return an order that is made for stages of different times, two on each rank in a V."""
    costs = Costs(forward_s=[1, 3, 2, 1], input_grad_s=[1, 2, 2, 1], weight_grad_s=[2, 3, 1, 1])
    made = schedules.get("searched").with_options(costs=costs, placement=v(RANKS, 2), max_in_flight=4)
    return made.program(RANKS, PARTS)


ORDERS = {
    "1f1b": lambda: schedules.get("1f1b").program(RANKS, PARTS),
    "interleaved-1f1b": lambda: schedules.get("interleaved-1f1b").program(RANKS, PARTS),
    "zb-h1": lambda: schedules.get("zb-h1").program(RANKS, PARTS),
    "searched": searched,
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 2 * PARTS, 8, generator=draw)
    return x, y


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def in_torch(group: ProcessGroup, program: Program, boundaries: list[int]) -> list[Tensor | None]:
    """Return the gradients of this rank's stages after a step; None for other parameters."""
    model = layers()
    step_in_torch(program, model, boundaries, functional.mse_loss, group)(*batch())
    return gradients(model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=runs_neighbours if name == "searched" else ()) for name in ORDERS]
)
def test_an_exported_order_gives_the_gradients_of_a_plain_backward(name, ranks):
    """Stages have different numbers of layers, and each parameter has a gradient on one rank."""
    program = ORDERS[name]()
    boundaries = [2, 3, 6] if program.num_stages == 4 else [3]
    model, (x, y) = layers(), batch()
    functional.mse_loss(model(x), y).backward()
    by_rank = ranks.run(RANKS, in_torch, program, boundaries)
    for *own, expected in zip(*by_rank, gradients(model), strict=True):
        (found,) = (gradient for gradient in own if gradient is not None)
        torch.testing.assert_close(found, expected)
