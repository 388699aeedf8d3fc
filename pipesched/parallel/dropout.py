"""Dropout on divided activations: each rank uses its block of the mask that one process would draw.

All ranks of a tensor group have the same keys, so they draw the same numbers. Between a layer with columns and the next
layer with rows, each rank holds its own heads or hidden units. There, each rank draws the mask of the whole tensor and
takes its block. The same holds for positions with sequence parallelism.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipesched.errors import ExecutionError
from pipesched.parallel.tensor_group import ActivationLayout, Division, TensorGroup
from pipesched.tensors.keyed_random import Key, KeyedRandom, draws

__all__ = ["DividedRandom"]


class DividedRandom(KeyedRandom):
    """Keyed random numbers for the ranks of a tensor group.

    Args:
        device: the device of the stage.
        group: the tensor group, whose ``layout`` says how the activations are divided.
        layouts: the layout of the activations at the beginning of each call of a layer, by its name and the number of
            the call. Default: whole.

    """

    def __init__(
        self,
        device: torch.device,
        group: TensorGroup,
        layouts: Mapping[tuple[str, int], ActivationLayout] | None = None,
    ) -> None:
        super().__init__(device)
        self._group = group
        self._layouts = layouts or {}
        self._drawn: dict[tuple[str, int, int], ActivationLayout] = {}  # the layout at each draw of a layer

    def enter(self, key: Key, layer: str, call: int = 0, op: int = 0) -> None:
        super().enter(key, layer, call, op)
        if layer and op == 0:
            self._group.layout = self._layouts.get((layer, call), ActivationLayout.WHOLE)

    def begin(self, key: Key, layer: str, call: int = 0, op: int = 0) -> None:
        super().enter(key, layer, call, op)
        self._group.layout = self._layouts.get((self.first_layer, 0), ActivationLayout.WHOLE)

    def _layout(self) -> ActivationLayout:
        """Return the layout of the activations. A recomputed draw has the layout of its first run."""
        place = self.place[1:4]
        if self.again and place in self._drawn:
            return self._drawn[place]
        self._drawn[place] = self._group.layout
        return self._group.layout

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p < 1 or self._group.size == 1:
            return super()._drop(input, p, training, inplace)
        layout = self._layout()
        if layout is ActivationLayout.WHOLE:
            return super()._drop(input, p, training, inplace)
        mask = self._mask(input, p, self._generator(input.device), self._group.divisions(layout, input.dim()))
        return input.mul_(mask) if inplace else input * mask

    def _mask(
        self, input: Tensor, p: float, generator: torch.Generator | None, divisions: Sequence[Division]
    ) -> Tensor:
        """Draw the mask of the whole tensor, which lies in memory as ``empty_like`` of it, and return this block."""
        like = torch.empty_like(input, device="meta")
        order = sorted(range(input.dim()), key=like.stride, reverse=True)
        shape = list(input.shape)
        for dim, _, parts in divisions:
            shape[dim] *= parts
        mask = torch.empty_permuted(shape, order, dtype=input.dtype, device=input.device)
        mask.bernoulli_(1 - p, generator=generator)
        for dim, place, _ in divisions:
            mask = mask.narrow(dim, place * input.shape[dim], input.shape[dim])
        return mask / (1 - p)

    def _seeded(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._group.size == 1 or not draws(function, args, kwargs):
            return super()._seeded(function, args, kwargs)
        if self._layout() is ActivationLayout.WHOLE:
            return super()._seeded(function, args, kwargs)
        if function is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        raise ExecutionError(
            f"between layers that tensor_parallel= divides, random numbers may be drawn by dropout and by "
            f"scaled_dot_product_attention only, whose masks pipesched divides; {function.__name__} was called there; "
            f"use nn.functional.dropout, or leave the layers around it out of tensor_parallel="
        )

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute ``scaled_dot_product_attention`` with this rank's heads of the mask for all heads."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(groups, -3)
            value = value.repeat_interleave(groups, -3)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        nothing = (scores == float("-inf")).all(-1, keepdim=True)  # a query that may attend to no key
        weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0).to(value.dtype)
        layout = self._layout()
        by_heads = ActivationLayout.DIVIDED if layout is ActivationLayout.SEQUENCE else layout
        divisions = self._group.divisions(by_heads, 4, scores=True)
        if scores.dim() == 3:
            divisions = [division._replace(dim=0) for division in divisions]
        with self._default_generators():
            mask = self._mask(weights, dropout_p, None, divisions)
        return torch.matmul(weights * mask, value)
