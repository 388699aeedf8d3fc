"""Plane norms: the norms of gradients of which each plane holds blocks. All planes get the same bits.

The ranks of a tensor group hold different blocks of the weights that they divide, and the same values of all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipesched.model.parameter_order import ParameterOrder
from pipesched.parallel.weight_split import Gathers
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.tensors.gradient_norm import combined_norms

__all__ = ["NormMeasure", "PlaneNorms"]


class PlaneNorms:
    """Combines the norms of the blocks that the ranks of a tensor group hold.

    Args:
        group: the tensor group of this process.
        split: the weights that the group divides, and whether this rank's block of each counts: another rank may hold
            the same block.

    """

    def __init__(self, group: Gathers, split: Mapping[nn.Parameter, bool]) -> None:
        self._group = group
        self._split = split

    def of(self, parameters: Sequence[nn.Parameter], norms: GradientNorms, norm_type: float) -> GradientNorms:
        """Return the norms of whole gradients, given those of this rank. Collective over the tensor group.

        ``parameters`` are those of the norms, in the same order.
        """
        if norms.norms is not None:
            values, nonfinite = self.combined(parameters, norms.norms, norms.nonfinite, norm_type)
            return norms._replace(norms=values, nonfinite=nonfinite)
        flag = norms.nonfinite
        return norms if flag is None else norms._replace(nonfinite=torch.stack(self._group.gathered(flag)).any())

    @torch.no_grad()
    def combined(
        self, parameters: Sequence[nn.Parameter], norms: Tensor, nonfinite: Tensor | None, norm_type: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the norms of whole gradients, and whether any rank of the group has set the flag. Collective.

        The norm of a divided weight is combined from those of its blocks. The norm of any other weight is that of the
        first rank. So a weight counts once, and all ranks clip by the same bits.

        Args:
            parameters: the parameters of the norms, in the same order.
            norms: the norms of this rank's gradients.
            nonfinite: a 0-d flag; None if it is not checked.
            norm_type: the order of the norm.

        """
        sent = torch.zeros(len(parameters) + 1, dtype=torch.float64, device=norms.device)
        sent[:-1] = norms
        for place, parameter in enumerate(parameters):
            if not self._split.get(parameter, True):
                sent[place] = 0
        if nonfinite is not None:
            sent[-1] = nonfinite
        pieces = torch.stack(self._group.gathered(sent))
        blocks = combined_norms(pieces[:, :-1], norm_type, [parameter.dtype for parameter in parameters])
        each = zip(parameters, blocks.unbind(), pieces[0].unbind(), strict=False)
        whole = [block if parameter in self._split else first.to(block.dtype) for parameter, block, first in each]
        return torch.stack(whole), None if nonfinite is None else pieces[:, -1].any()


@dataclass(frozen=True)
class NormMeasure:
    """Computes the norms of gradients.

    Args:
        order: the order in which the norms of the parameters' gradients are combined.
        planes: combines norms over the planes. Default: None (no weights are divided over tensor groups).

    """

    order: ParameterOrder
    planes: PlaneNorms | None = None

    def of(self, parameters: Sequence[nn.Parameter], norm_type: float) -> GradientNorms:
        """Return the norms of these parameters' gradients, without those that have none. Collective over a group."""
        own = [parameter for parameter in parameters if parameter.grad is not None]
        norms = GradientNorms.of(own, self.order, norm_type)
        return norms if self.planes is None else self.planes.of(own, norms, norm_type)

    def name(self, key: str) -> str:
        """Return the name of the parameter with this sort key."""
        return self.order.name(key)
