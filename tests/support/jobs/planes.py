"""Jobs of the tests of planes: they train layers that are split by hand, and compare with whole layers in a loop."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import pipesched
from pipesched import Distributed, Pipeline
from pipesched.runtime.rank_grid import grid_of
from pipesched.testing import reference_step
from tests.support import rank_processes

SEED, ROWS, MICROBATCHES, STEPS, WIDTH = 3, 16, 8, 2, 8
#: Name of a parameter -> its value, and its gradient or None.
State = dict[str, tuple[Tensor, Tensor | None]]


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] = ("dp", "pp", "tp")) -> DeviceMesh:
    return rank_processes.mesh_of(shape, names)


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def said(call: Callable[[], Any]) -> str:
    """Return the error of a call as text; "" without an error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- grids --------------------------------------------------------------------------------------------------------


def grids(group: Any) -> dict[str, Any]:
    """Return what each rank knows of its place in several meshes."""
    found: dict[str, Any] = {}
    for name, shape, names, axes in (
        ("pp tp", (2, 2), ("pp", "tp"), None),
        ("tp pp", (2, 2), ("tp", "pp"), None),
        ("named", (2, 2), ("a", "b"), {"pipeline": "b", "tensor": "a"}),
        ("dp tp", (2, 1, 2), ("dp", "pp", "tp"), None),
        ("ignored", (2, 2), ("pp", "tp"), {"pipeline": "pp"}),
        ("one", (2, 2, 1), ("dp", "pp", "tp"), None),
    ):
        _, grid, sums = grid_of(mesh_of(shape, names), axes, 5.0)
        found[name] = (grid.rows, grid.plane, grid.tensor_peers, grid.names[grid.rank], sums.tensor)
    return found


def arranged(group: Any) -> Any:
    """Return the rows of each rank after the ranks of its pipeline have changed places."""
    _, grid, _ = grid_of(mesh_of((2, 2), ("pp", "tp")), None, 5.0)
    moved = grid.arranged(((2, 0),))
    again = moved.arranged(moved.rows_of(2))
    return moved.rows, moved.tensor_peers, moved.names[moved.rank], moved.rows_of(2), again.rows


# ---- layers that are split by hand --------------------------------------------------------------------------------


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Whole(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class ByHand(nn.Module):
    """This rank's block of a `Whole`."""

    group: Any

    def __init__(self, whole: Whole, group: Any) -> None:
        super().__init__()
        rank, size = group.rank(), group.size()
        self.up, self.down = copy.deepcopy(whole.up), copy.deepcopy(whole.down)
        self.up.weight.data = whole.up.weight.data.chunk(size)[rank].clone()
        self.up.bias.data = whole.up.bias.data.chunk(size)[rank].clone()
        self.down.weight.data = whole.down.weight.data.chunk(size, 1)[rank].clone()
        self.added = _OnGroup(_Added, group)
        self.copied = _OnGroup(_Copied, group)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(self.down(functional.gelu(self.up(self.copied(x)))))


class _OnGroup:
    """Calls an autograd function with a process group. Copies of a model share it."""

    def __init__(self, function: Any, group: Any) -> None:
        self._function = function
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._function.apply(x, self._group)

    def __deepcopy__(self, memo: Any) -> "_OnGroup":
        return self


def whole_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Whole(), nn.LayerNorm(WIDTH), nn.Dropout(dropout)) for _ in range(4)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def pipeline(mesh: DeviceMesh, model: nn.Module, x: Tensor, **options: Any) -> Pipeline:
    named: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "loss_fn": functional.mse_loss, "seed": SEED}
    given = options.pop("distributed", Distributed(timeout=20))
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(model, x[:2], mesh=mesh, distributed=given, **named | options)


def by_hand(group: Any, schedule: str, inputs: str = "all") -> dict[str, float]:
    """Train blocks that the user has split, without a clip. Return the largest difference from a plain loop."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    model = whole_model(0.2)
    for block in model:
        block[0] = ByHand(block[0], mesh["tp"].get_group())
    x, y = batch()
    options = {"schedule": schedule, "distributed": Distributed(timeout=20, weights="own", inputs=inputs)}
    boundaries = {"zb-v": [3, 6, 9]}.get(schedule, [6])
    with pipeline(mesh, model, x, optimizer=sgd, boundaries=boundaries, **options) as pipe:
        losses = [float(_stepped(pipe, x, y, inputs)) for _ in range(STEPS)]
        outputs = pipe.step(*([] if _waits(inputs) else [x]), target=None if _waits(inputs) else y, return_outputs=True)
    due = whole_model(0.2)
    optimizer = sgd(list(due.parameters()))
    expected = []
    for step in range(STEPS):
        loss = reference_step(due, x, loss_fn=functional.mse_loss, target=y, num_microbatches=4, seed=SEED, step=step)
        expected.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    assert (outputs[1] is None) != (mesh.get_local_rank("pp") == (0 if schedule == "zb-v" else 1))
    return {"loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True))}


def not_measured(group: Any, how: str) -> str:
    """Return why a pipeline of blocks that the user has split cannot choose its boundaries."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    model = whole_model()
    for block in model:
        if how == "DTensor":
            parallelize_module(block[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            block[0] = ByHand(block[0], mesh["tp"].get_group())
    x, _ = batch()
    return said(lambda: pipeline(mesh, model, x, distributed=Distributed(timeout=20, weights="own")))


def wrapped(group: Any, schedule: str) -> float:
    """Return the difference of the loss from a plain loop, if ``wrap=`` divides linear layers as DTensors."""
    mesh = mesh_of((2, 2), ("pp", "tp"))

    def wrap(module: nn.Module, stage: int) -> nn.Module:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                parallelize_module(layer, mesh["tp"], ColwiseParallel() if name.endswith("0") else RowwiseParallel())
        return module

    x, y = batch()
    with pipeline(mesh, _linears(), x, wrap=wrap, schedule=schedule, boundaries=[6]) as pipe:
        loss = float(pipe.step(x, target=y))
    options = {"loss_fn": functional.mse_loss, "target": y, "num_microbatches": 4, "seed": SEED}
    return abs(loss - float(reference_step(_linears(), x, **options)))


def dtensors(group: Any, schedule: str) -> float:
    """Return the difference of the loss from a plain loop, if the weights of the user's model are DTensors."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    model = _linears()
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, y = batch()
    with pipeline(mesh, model, x, schedule=schedule, boundaries=[6]) as pipe:
        loss = float(pipe.step(x, target=y))
    options = {"loss_fn": functional.mse_loss, "target": y, "num_microbatches": 4, "seed": SEED}
    return abs(loss - float(reference_step(_linears(), x, **options)))


def _linears() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)) for _ in range(4))
    return nn.Sequential(*blocks)


class Captured(nn.Module):
    """A model whose code calls its blocks, and which may compute its own loss."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output if labels is None else functional.mse_loss(output, labels)


def captured(group: Any, own_loss: bool) -> float:
    """Return the difference of the loss of a captured model, whose blocks the user has split, from a plain loop."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    torch.manual_seed(0)
    blocks = [Whole() for _ in range(4)]
    model = Captured([ByHand(block, mesh["tp"].get_group()) for block in blocks])
    x, y = batch()
    options: dict[str, Any] = {"loss_fn": None if own_loss else functional.mse_loss}
    batch_of: dict[str, Any] = {"labels": y} if own_loss else {"target": y}
    with (
        warnings.catch_warnings(action="ignore"),
        Pipeline(
            model,
            (x[:4], y[:4]) if own_loss else x[:4],
            mesh=mesh,
            schedule="1f1b",
            num_microbatches=4,
            boundaries=[2],
            whole_layers=[f"blocks.{number}" for number in range(4)],
            seed=SEED,
            distributed=Distributed(timeout=20, weights="own"),
            **options,
        ) as pipe,
    ):
        loss = float(pipe.step(x, **batch_of))
    return abs(loss - float(reference_step(Captured(blocks), x, num_microbatches=4, seed=SEED, **options, **batch_of)))


def links(group: Any) -> Any:
    """Return the pairs of ranks whose links are measured, and the groups whose collectives are measured."""
    found = [pipesched.probe_links(mesh_of(shape)) for shape in ((1, 2, 2), (2, 1, 2))]
    return [(sorted(pair for pair, _ in one.special), [own.ranks for own in one.collectives]) for one in found]


def _waits(inputs: str) -> bool:
    return inputs == "first" and distributed.get_rank() > 0


def _stepped(pipe: Pipeline, x: Tensor, y: Tensor, inputs: str) -> Tensor:
    return pipe.step() if _waits(inputs) else pipe.step(x, target=y)
