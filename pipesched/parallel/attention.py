"""Attention by heads: ``nn.MultiheadAttention`` whose heads are divided among the ranks.

The weights of queries, keys and values are divided by columns, and those of the output by rows. Each of P ranks sends
what one linear layer with columns and one with rows send (`linear`): for self-attention with an input of x bytes,
2 (P - 1)/P x in a forward and as many in a backward. Attention weights that the caller wants cost one more collective.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched.errors import InputError
from pipesched.parallel.collective_functions import copy_to, gather_from, reduce_from
from pipesched.parallel.linear import GatheredProduct, plus
from pipesched.parallel.split_module import held_by
from pipesched.parallel.tensor_group import ActivationLayout
from pipesched.tensors.weight_operations import weighted

__all__ = ["HeadsAttention"]


class HeadsAttention(nn.Module):
    """The forward of an ``nn.MultiheadAttention`` that holds this rank's heads. ``num_heads`` is their number."""

    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: nn.Module

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if they are wanted, the attention weights of all heads."""
        batched = query.dim() == 3
        inputs = self._projected(query, key, value)
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
        elif not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        queries, keys, values = self._heads(*inputs)
        mask = self._mask(attn_mask, key_padding_mask, queries, keys)
        causal = is_causal and mask is None and not need_weights
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights = functional.dropout(self._weights(queries, keys, mask), rate)  # torch returns them so, too
            output = torch.matmul(weights, values)
            weights = self._of_all_heads(weights, average_attn_weights)
        else:
            output = functional.scaled_dot_product_attention(queries, keys, values, mask, rate, causal)
        output = self._joined(output)
        if not batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return output.transpose(0, 1) if self.batch_first else output, weights

    def _joined(self, output: Tensor) -> Tensor:
        """Return (length, batch, width), as torch lays it out, from (batch, heads, length, head size)."""
        joined: Tensor = self.out_proj(output.permute(2, 0, 1, 3).flatten(2), 0)
        return joined

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        held = held_by(self)
        group = held.group
        weight = self.in_proj_weight
        own = query is key is value
        if held.options["sequence"] and group.size > 1:
            if weight is None or not own:
                raise InputError(
                    "with sequence parallelism, nn.MultiheadAttention must be self-attention with one weight; its "
                    "query, key and value are different tensors; use the style 'heads' for this layer, on whole tensors"
                )
            projected = weighted(GatheredProduct(group, transposed=False), query, weight)
            group.layout = ActivationLayout.DIVIDED
            return [*plus(projected, self.in_proj_bias).chunk(3, -1)]
        copies = [copy_to(x, group) for x in (query, key, value)]
        group.layout = ActivationLayout.DIVIDED
        if weight is not None and own:
            return [*functional.linear(copies[0], weight, self.in_proj_bias).chunk(3, -1)]
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        modules: Any = self
        weights = (
            (modules.q_proj_weight, modules.k_proj_weight, modules.v_proj_weight) if weight is None else weight.chunk(3)
        )
        return [functional.linear(x, part, bias) for x, part, bias in zip(copies, weights, biases, strict=True)]

    def _heads(self, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Return (batch, heads, length, head size) of each, with the learned and the zero key and value at the end."""
        rows = len(keys)
        if self.bias_k is not None and self.bias_v is not None:
            keys = torch.cat([keys, self.bias_k.expand(rows, -1, -1)], 1)
            values = torch.cat([values, self.bias_v.expand(rows, -1, -1)], 1)
        if self.add_zero_attn:
            keys, values = (functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (queries, keys, values)]

    def _mask(self, mask: Tensor | None, padding: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return the mask to be added to the scores of this rank's heads, from torch's two masks."""
        parts = []
        if mask is not None:
            mask = _added(mask, queries.dtype)
            if mask.dim() == 3:  # one mask for each row and head
                group = held_by(self).group
                mask = group.own(mask.view(-1, self.num_heads * group.size, *mask.shape[1:]), 1)
            parts.append(mask)
        if padding is not None:
            padding = _added(padding, queries.dtype)
            parts.append(padding[..., None, None, :] if padding.dim() == 2 else padding)
        parts = [functional.pad(part, (0, keys.shape[2] - part.shape[-1])) for part in parts]
        return sum(parts[1:], parts[0]) if parts else None

    def _weights(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(queries * self.head_dim**-0.5, keys.transpose(-2, -1))
        return (scores if mask is None else scores + mask).softmax(-1)

    def _of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        group = held_by(self).group
        if average:
            return reduce_from(weights.sum(1), group) / (self.num_heads * group.size)
        return gather_from(weights, group, 1)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to be added, from one that is True where attention is forbidden, or that is to be added."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
