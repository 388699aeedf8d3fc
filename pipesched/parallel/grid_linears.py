"""Linear layers in two, two and a half and three dimensions, each made from a plain layer and a mesh."""

from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched.errors import InputError
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.grid_layers import BlockedLinear
from pipesched.parallel.grid_styles import GridLinear
from pipesched.parallel.process_groups import own_group
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.simulation.tensor_layout import LayoutKind, TensorLayout

__all__ = ["Linear2D", "Linear2p5D", "Linear3D"]

_L = TypeVar("_L", bound="GridLinearLayer")

_TIMEOUT_S = 600.0
_groups: "WeakKeyDictionary[DeviceMesh, dict[LayoutKind, TensorGroup]]" = WeakKeyDictionary()


class GridLinearLayer(nn.Linear, BlockedLinear):
    """A linear layer of which this rank of a mesh holds a block.

    ::

        mesh = init_device_mesh("cpu", (2, 2))
        up = Linear2D.from_linear(nn.Linear(16, 64), mesh)
        down = Linear2D.from_linear(nn.Linear(64, 16), mesh, second=True)
        y = down.gather_output(down(up(up.scatter_input(x))))

    Inside a pipeline, ``Distributed(tensor_layout=)`` makes such layers by their names.
    """

    _kind: ClassVar[LayoutKind]

    @classmethod
    def from_linear(cls: type[_L], linear: nn.Linear, mesh: DeviceMesh, *, second: bool = False) -> _L:
        """Return a layer with this rank's block of the weights of a plain layer. Collective over all processes.

        Args:
            linear: the plain layer, with the same weights on all ranks. It stays unchanged.
            mesh: the ranks, in as many dimensions as the layout has: q x q, d x q x q, or l x l x l.
            second: whether the layer is the second of a pair, such as the one with h outputs in h -> 4h -> h. Default:
                False.

        Returns:
            A layer whose ``forward`` takes and returns this rank's blocks.

        Raises:
            InputError: the weights cannot be divided evenly over this mesh.
            ScheduleError: the mesh does not have the shape of this layout.

        """
        layout = TensorLayout(kind=cls._kind, shape=tuple(mesh.shape))
        group = _group_of(mesh, layout)
        style = GridLinear(layout, second=second)
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        for name, split in style.splits(linear, cls.__name__).items():
            whole = linear.get_parameter(name).detach()
            split.check(whole.shape, group.size, f"{cls.__name__}.{name}")
            block = split.own(whole, group.rank, group.size).clone(memory_format=torch.contiguous_format)
            setattr(made, name, nn.Parameter(block, linear.get_parameter(name).requires_grad))
        style.hold(made, cls.__name__, group, None, transposed=False)
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's block of the output, given its block of the input."""
        return BlockedLinear.forward(self, x)


class Linear2D(GridLinearLayer):
    """A linear layer over q x q ranks: SUMMA (Xu et al. 2021, arXiv:2104.05343, "Optimus")."""

    _kind = "2d"


class Linear2p5D(GridLinearLayer):
    """A linear layer over d x q x q ranks (Wang et al. 2021, arXiv:2105.14500, "Tesseract")."""

    _kind = "2.5d"


class Linear3D(GridLinearLayer):
    """A linear layer over l x l x l ranks (Bian et al. 2021, arXiv:2105.14450)."""

    _kind = "3d"


def _group_of(mesh: DeviceMesh, layout: TensorLayout) -> TensorGroup:
    """Return the tensor group of a mesh, with its grid. Layers of one mesh share it."""
    groups = _groups.setdefault(mesh, {})
    if layout.kind not in groups:
        ranks = mesh.mesh.flatten().tolist()
        if sorted(ranks) != ranks:
            raise InputError(
                f"the ranks of a mesh must ascend, because torch numbers the ranks of a group so; this mesh has "
                f"{ranks}; make it with init_device_mesh()"
            )
        process_group: Any = own_group([ranks], _TIMEOUT_S)
        group = TensorGroup(process_group, rank=ranks.index(distributed.get_rank()), size=len(ranks))
        AxisGroups(group, layout)
        groups[layout.kind] = group
    return groups[layout.kind]
