"""Layers on a grid of ranks: linear layers, norms, embeddings, attention, and the edges of a model.

Each rank holds a block of the activations: some sequences (rows of the batch), and of these some hidden units. Between
pairs of linear layers, activations have the layout `ActivationLayout.OUTER`, inside of a pair `ActivationLayout.INNER`.

Elements that each rank receives, beside those of products (`TensorLayout.exchanges`), for M rows of N hidden units, if
R ranks divide the rows, and C ranks the hidden units:

=====================  ==============================  ============================
layer                  F                               I
=====================  ==============================  ============================
bias                   0                               2 (R - 1)/R N/C
LayerNorm              2 (C - 1) M/R                   4 (C - 1)/C M/R, and 4 (R - 1)/R N/C
RMSNorm                2 (C - 1)/C M/R                 2 (C - 1)/C M/R, and 2 (R - 1)/R N/C
embedding              (R - 1)/R M N/C                 (R - 1)/R M N/C
positions              0                               2 (R - 1)/R of the weight's N/C
=====================  ==============================  ============================
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import InputError
from pipesched.parallel.attention import HeadsAttention
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.blocked_product import blocked_product
from pipesched.parallel.collective_functions import exchanged, scatter_sequence, summed_weights
from pipesched.parallel.embedding import own_places
from pipesched.parallel.linear import plus
from pipesched.parallel.split_module import held_by
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.tensors.weight_operations import weighted

__all__ = [
    "BlockedEmbedding",
    "BlockedHeads",
    "BlockedLinear",
    "BlockedNorm",
    "BlockedPositions",
    "DividesBlocks",
    "JoinsBlocks",
    "gather_blocks",
    "grid_of",
    "scatter_blocks",
]

_OUTER, _INNER = ActivationLayout.OUTER, ActivationLayout.INNER
_HALF = torch.float16, torch.bfloat16


def grid_of(module: nn.Module) -> AxisGroups:
    """Return the grid of ranks that divides a module."""
    grid = held_by(module).group.grid
    assert isinstance(grid, AxisGroups)
    return grid


def scatter_blocks(x: Tensor, grid: AxisGroups, layout: ActivationLayout) -> Tensor:
    """Return this rank's block of whole activations. The gradient is gathered."""
    return exchanged(
        x, grid.group, lambda whole: grid.own(whole, layout).clone(), lambda grad: grid.whole(grad, layout)
    )


def gather_blocks(x: Tensor, grid: AxisGroups, layout: ActivationLayout) -> Tensor:
    """Return whole activations. All ranks use them in the same way, so the gradient is whole on each rank."""
    return exchanged(x, grid.group, lambda own: grid.whole(own, layout), lambda grad: grid.own(grad, layout).clone())


class BlockedLinear(nn.Module):
    """The forward of a linear layer on a grid."""

    weight: Tensor
    bias: Any  # a tensor or None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's block of the output, given its block of the input."""
        options = held_by(self).options
        grid = grid_of(self)
        given, layout = self.layouts
        grid.group.expect(x, given, options["name"])
        inputs = vars(self)["nx" if options["transposed"] else "in_features"]
        if x.shape[-1] != inputs:
            raise InputError(
                f"a layer on a grid must get this rank's block of its input; {options['name']!r} gets a tensor of "
                f"shape {list(x.shape)}, but its block has {inputs} hidden units; pass scatter_input(x), or in a "
                f"pipeline, give the style 'begin' to a module before it"
            )
        product = blocked_product(grid, second=options["second"], transposed=options["transposed"])
        output = weighted(product, x, self.weight)
        if self.bias is not None:
            output = plus(output, *summed_weights(grid.over(grid.blocks(layout).rows), self.bias))
        return grid.group.returns(output, layout, options["name"])

    @property
    def layouts(self) -> tuple[ActivationLayout, ActivationLayout]:
        """The layouts of the input and of the output."""
        return (_INNER, _OUTER) if held_by(self).options["second"] else (_OUTER, _INNER)

    def scatter_input(self, x: Tensor) -> Tensor:
        """Return this rank's block of a whole input. Not collective in a forward."""
        return scatter_blocks(x, grid_of(self), self.layouts[0])

    def gather_input(self, x: Tensor) -> Tensor:
        """Return the whole input, given the blocks of all ranks. Collective."""
        return gather_blocks(x, grid_of(self), self.layouts[0])

    def scatter_output(self, output: Tensor) -> Tensor:
        """Return this rank's block of a whole output. Not collective in a forward."""
        return scatter_blocks(output, grid_of(self), self.layouts[1])

    def gather_output(self, output: Tensor) -> Tensor:
        """Return the whole output, given the blocks of all ranks. Collective."""
        return gather_blocks(output, grid_of(self), self.layouts[1])


class _Normalized(torch.autograd.Function):
    """Normalizes rows whose hidden units are divided: subtracts the mean if ``centered``, and divides by the spread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, eps: float, centered: bool) -> Tensor:
        wide = x.float() if x.dtype in _HALF else x
        width = x.shape[-1] * group.size
        if centered:
            own_mean = wide.mean(-1)
            spread = (wide - own_mean.unsqueeze(-1)).square().sum(-1)
            means, spreads = torch.stack(group.gathered(torch.stack([own_mean, spread]))).unbind(1)
            mean = means.mean(0)
            squares = spreads.sum(0) + (means - mean).square().sum(0) * x.shape[-1]
            wide = wide - mean.unsqueeze(-1)
        else:
            squares = group.all_reduce(wide.square().sum(-1))
        scale = (squares / width + eps).rsqrt().unsqueeze(-1)
        output = wide * scale
        ctx.save_for_backward(output, scale)
        ctx.group, ctx.width, ctx.centered = group, width, centered
        return output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        output, scale = ctx.saved_tensors
        grad = grads[0].to(output.dtype)
        sums = [(grad * output).sum(-1), *([grad.sum(-1)] if ctx.centered else [])]
        along, *constant = ctx.group.all_reduce(torch.stack(sums)).div(ctx.width).unsqueeze(-1)
        own = grad - output * along
        for part in constant:
            own = own - part
        return (own * scale).to(grads[0].dtype), None, None, None


class BlockedNorm(nn.Module):
    """The forward of ``nn.LayerNorm`` or ``nn.RMSNorm`` on a grid, between pairs of linear layers."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized block of this rank."""
        grid = grid_of(self)
        blocks = grid.blocks(_OUTER)
        options = held_by(self).options
        grid.group.expect(x, _OUTER, options["name"])
        wide = torch.float32 if x.dtype in _HALF else x.dtype  # in which torch computes, too
        eps = torch.finfo(wide).eps if self.eps is None else self.eps
        output: Tensor
        centered = options["centered"]
        output = _Normalized.apply(x, grid.over(blocks.columns), eps, centered)  # type: ignore[no-untyped-call]
        if self.weight is not None:
            weights = [weight for weight in (self.weight, getattr(self, "bias", None)) if weight is not None]
            weight, *rest = summed_weights(grid.over(blocks.rows), *weights)
            output = output * weight.to(output.dtype)
            output = plus(output, *rest) if rest else output
        if grid.group.trace is not None:
            grid.group.trace.note(output, _OUTER, options["name"])
        return output


class BlockedEmbedding(nn.Module):
    """The forward of an embedding on a grid: the ranks that divide the rows of a batch divide the vocabulary."""

    weight: Tensor

    def forward(self, numbers: Tensor) -> Tensor:
        """Return this rank's block of the embeddings, given the numbers of the whole batch."""
        grid = grid_of(self)
        group = grid.over(grid.blocks(_OUTER).rows)
        name = held_by(self).options["name"]
        grid.group.expect(numbers, ActivationLayout.WHOLE, name)
        places, outside = own_places(numbers, self.weight.shape[0], group)
        embedded: Tensor = super().forward(places)
        block = scatter_sequence(embedded.masked_fill(outside.unsqueeze(-1), 0), group, 0)
        grid.own_rows = len(block)
        return grid.group.returns(block, _OUTER, name)


class BlockedPositions(nn.Module):
    """The forward of an embedding on a grid that divides hidden units only, such as that of positions."""

    def forward(self, numbers: Tensor) -> Tensor:
        """Return this rank's hidden units of the embeddings.

        ``numbers`` are the same for all sequences, or have a row for each sequence of the batch or of this rank.
        """
        grid = grid_of(self)
        rows = grid.over(grid.blocks(_OUTER).rows)
        (weight,) = summed_weights(rows, self.weight)
        if numbers.dim() > 1 and len(numbers) not in (1, grid.own_rows):
            numbers = rows.own(numbers, 0)
        own: Any = self
        output = nn.functional.embedding(numbers, weight, own.padding_idx)
        if grid.group.trace is not None:
            grid.group.trace.note(output, _OUTER, held_by(self).options["name"])
        return output

    weight: Tensor


class BlockedHeads(HeadsAttention):
    """The forward of an ``nn.MultiheadAttention`` on a grid: self-attention of this rank's sequences and heads."""

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        grid = grid_of(self)
        assert self.in_proj_weight is not None
        name = held_by(self).options["name"]
        if not query is key is value or query.dim() != 3:
            raise InputError(
                f"attention in two or three dimensions must be self-attention of (rows, positions, width); {name!r} "
                f"gets a query, a key and a value of shapes {list(query.shape)}, {list(key.shape)} and "
                f"{list(value.shape)}{'' if query is key is value else ', which are different tensors'}; pass one "
                f"tensor of three dimensions, or tensor_layout='1d'"
            )
        grid.group.expect(query, _OUTER, name)
        product = blocked_product(grid, second=False, transposed=False)
        projected = weighted(product, query, self.in_proj_weight)
        if self.in_proj_bias is not None:
            rows = grid.over(grid.blocks(_INNER).rows)
            projected = plus(projected, *summed_weights(rows, self.in_proj_bias))
        projected = grid.group.returns(projected, _INNER, name)
        return [*projected.chunk(3, -1)]

    def _mask(self, mask: Tensor | None, padding: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor | None:
        if mask is not None and mask.dim() == 3:
            raise InputError(
                f"the mask of attention in two or three dimensions must be the same for all rows and heads; got a mask "
                f"of shape {list(mask.shape)}; pass one of two dimensions, and key_padding_mask="
            )
        if padding is not None and len(padding) != len(queries):
            padding = grid_of(self).over(grid_of(self).blocks(_INNER).rows).own(padding, 0)
        return super()._mask(mask, padding, queries, keys)

    def _of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        raise InputError(
            "attention in two or three dimensions returns no attention weights; need_weights=True was passed, which is "
            "the default; pass need_weights=False"
        )

    def _joined(self, output: Tensor) -> Tensor:
        joined: Tensor = self.out_proj(output.transpose(1, 2).flatten(2))
        return joined.transpose(0, 1).contiguous()  # in memory as torch lays it out, in whose order dropout draws


class DividesBlocks(nn.Module):
    """The forward of a module that gets whole activations, and runs on this rank's block of its first argument."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the module with this rank's block."""
        grid = grid_of(self)
        name = held_by(self).options["name"]
        grid.group.expect(x, ActivationLayout.WHOLE, name)
        block = grid.group.returns(scatter_blocks(x, grid, _OUTER), _OUTER, name)
        grid.own_rows = len(block)
        return super().forward(block, *args, **kwargs)


class JoinsBlocks(nn.Module):
    """The forward of a module after which all ranks have whole activations again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and gather the blocks of its output."""
        output = super().forward(*args, **kwargs)
        grid = grid_of(self)
        if not isinstance(output, Tensor):
            raise InputError(
                f"a module with the style 'end' must return a tensor; {held_by(self).options['name']!r} returns a "
                f"{type(output).__name__}; give 'end' to an nn.Identity for each tensor"
            )
        layout = _INNER if grid.group.layout is _INNER else _OUTER  # while it is measured by itself, it may be whole
        name = held_by(self).options["name"]
        grid.group.expect(output, layout, name)
        return grid.group.returns(gather_blocks(output, grid, layout), ActivationLayout.WHOLE, name)
