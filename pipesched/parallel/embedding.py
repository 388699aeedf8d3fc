"""Embeddings whose weights are divided by the vocabulary or by the hidden units.

Bytes that each of P ranks sends for an output of y bytes (the whole tensor):

=======================  ==============  ===========
embedding                F               I
=======================  ==============  ===========
vocabulary               2 (P - 1)/P y   0
vocabulary, sequence     (P - 1)/P y     (P - 1)/P y
column, gathered output  (P - 1)/P y     0
heads                    0               0
=======================  ==============  ===========
"""

import torch
from torch import Tensor, nn

from pipesched.parallel.collective_functions import gather_from, reduce_from, scatter_sequence
from pipesched.parallel.split_module import held_by
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup

__all__ = ["GatheredEmbedding", "VocabularyEmbedding", "own_places"]


def own_places(numbers: Tensor, own: int, group: TensorGroup) -> tuple[Tensor, Tensor]:
    """Return the place of each number in this rank's block of ``own`` numbers, and whether the number is outside of it.

    The place of a number of another rank is 0. A number that no rank has gets a place behind the block, so that the
    operation that uses it raises the error that it would raise for the whole.
    """
    start = group.rank * own
    outside = (numbers < start) | (numbers >= start + own)
    nowhere = (numbers < 0) | (numbers >= group.size * own)
    elsewhere = torch.where(nowhere, own, 0)
    return torch.where(outside, elsewhere, numbers - start), outside


class VocabularyEmbedding(nn.Module):
    """The forward of an embedding that holds this rank's part of the vocabulary."""

    weight: Tensor

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the embeddings of all numbers, or those of this rank's positions."""
        held = held_by(self)
        group = held.group
        places, outside = own_places(numbers, self.weight.shape[0], group)
        embedded: Tensor = super().forward(places)
        embedded = embedded.masked_fill(outside.unsqueeze(-1), 0)
        if held.options["sequence"]:
            group.layout = ActivationLayout.SEQUENCE
            return scatter_sequence(embedded, group, group.sequence_dim)
        group.layout = ActivationLayout.WHOLE
        return reduce_from(embedded, group)


class GatheredEmbedding(nn.Module):
    """The forward of an embedding that holds this rank's part of the hidden units, and whose output is gathered."""

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the embeddings of all numbers."""
        group = held_by(self).group
        output: Tensor = super().forward(numbers)
        group.layout = ActivationLayout.WHOLE
        return gather_from(output, group)
