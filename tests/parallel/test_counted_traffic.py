"""The bytes that a plan counts for a layout are those that the layers exchange."""

import pytest
import torch
from torch import nn

from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.styles import split_model
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.simulation.layout_traffic import LayoutTraffic
from pipesched.simulation.tensor_layout import TensorLayout
from pipesched.simulation.tensor_split import TensorShares

GRIDS = [("2d", 4), ("2.5d", 8), ("3d", 8), ("2.5d", 32), ("2d", 64), ("3d", 64)]
ROWS, WIDTH, WIDE = 512, 128, 4


class Residual(nn.Module):
    """A norm and a pair of linear layers."""

    def __init__(self, bias):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device="meta")
        self.up, self.down = (
            nn.Linear(*sizes, bias=bias, device="meta") for sizes in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def received(layout, bias):
    """The bytes that a rank receives in the forward and the backward of the layers, on meta tensors."""
    group = TensorGroup.counting(layout.size)
    AxisGroups(group, layout)
    model = Residual(bias)
    split_model(model, {"norm": "norm", "up": "column", "down": "row"}, group)
    outer = layout.outer
    shape = ROWS // layout.length(outer.rows), WIDTH // layout.length(outer.columns)
    x = torch.ones(shape, device="meta", requires_grad=True)
    with group.counter.during("F"):
        output = model(x)
    with group.counter.during("B"):
        output.sum().backward()
    found = group.counter.traffic.items()
    return tuple(sum(own.received_bytes for (action, _), own in found if action == name) for name in "FB")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_rank_receives_what_the_costs_count(grid, bias):
    layout = TensorLayout.of(*grid)
    given = WIDE * ROWS * WIDTH
    shares = TensorShares(
        first_products=1,
        first_input_bytes=given,
        first_output_bytes=4 * given,
        second_products=1,
        second_input_bytes=4 * given,
        second_output_bytes=given,
        product_weight_bytes=WIDE * 8 * WIDTH**2,
        norms=1,
        norm_row_bytes=WIDE * ROWS,
        summed_weights=1 + 2 * bias,
        summed_weight_bytes=WIDE * WIDTH * (2 + 5 * bias),
    )
    counted = LayoutTraffic(layout, []).of(shares)
    assert received(layout, bias) == (counted.forward_bytes, counted.backward_bytes)
