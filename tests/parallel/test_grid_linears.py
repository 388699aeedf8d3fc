"""Linear layers that are made from plain layers and a mesh."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipesched.errors import InputError, ScheduleError
from pipesched.parallel import Linear2D, Linear2p5D, Linear3D

MESHES = {Linear2D: (2, 2), Linear2p5D: (2, 2, 2), Linear3D: (2, 2, 2)}
ROWS, WIDTH, HIDDEN = 12, 8, 20


def plain():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, HIDDEN, dtype=torch.float64), nn.Linear(HIDDEN, WIDTH, bias=False, dtype=torch.float64)


@pytest.mark.parametrize("kind", MESHES)
def test_a_pair_has_the_outputs_and_gradients_of_plain_layers(ranks_of, kind):
    size = 4 if kind is Linear2D else 8
    for found in ranks_of[size].run(size, of_pair, kind, MESHES[kind]):
        assert max(found) <= 1e-12


def of_pair(group, kind, shape):
    up, down = plain()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    (down(up(x).tanh()) * weights).sum().backward()
    due = x.grad
    mesh = init_device_mesh("cpu", shape)
    mine, back = kind.from_linear(up, mesh), kind.from_linear(down, mesh, second=True)
    y = x.detach().clone().requires_grad_()
    block = mine.scatter_input(y)
    assert torch.equal(mine.gather_input(block), y)
    hidden = mine(block)
    whole = mine.gather_output(hidden)
    assert torch.equal(mine.scatter_output(whole), hidden)
    output = back.gather_output(back(hidden.tanh()))
    (output * weights).sum().backward()
    assert mine.weight.numel() == up.weight.numel() // (4 if kind is Linear2p5D else mesh.size())
    gap = (output - down(up(y).tanh())).abs().max()
    return float(gap), float((y.grad - due).abs().max())


WRONG = {
    "mesh": (lambda mesh: Linear3D.from_linear(nn.Linear(4, 4), mesh), ScheduleError, "must have the shape (l, l, l)"),
    "inputs": (lambda mesh: Linear2D.from_linear(nn.Linear(5, 4), mesh), InputError, "has 5 elements for 2 ranks"),
    "outputs": (lambda mesh: Linear2D.from_linear(nn.Linear(4, 7), mesh), InputError, "has 7 elements for 2 ranks"),
    "a whole input": (
        lambda mesh: Linear2D.from_linear(nn.Linear(4, 4), mesh)(torch.zeros(4, 4)),
        InputError,
        "'Linear2D' gets a tensor of shape [4, 4], but its block has 2 hidden units; pass scatter_input(x)",
    ),
    "rows": (
        lambda mesh: (layer := Linear2D.from_linear(nn.Linear(4, 4), mesh)) and layer.scatter_input(torch.zeros(3, 4)),
        InputError,
        "has 3 elements for 2 ranks; pad the tensor",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_sizes_that_do_not_divide_are_refused_by_name(ranks_of, what):
    for found in ranks_of[4].run(4, refused, what):
        assert WRONG[what][2] in found


def refused(group, what):
    call, kind, _ = WRONG[what]
    with pytest.raises(kind) as raised:
        call(init_device_mesh("cpu", (2, 2)))
    return str(raised.value)
