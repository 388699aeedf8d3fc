"""Padded encoder: evaluates ``nn.TransformerEncoder`` on padded tensors, with the results of nested tensors.

In evaluation, torch's encoder may convert its input to a nested tensor without the padding. Its layers then exchange
nested tensors of the strided layout, which stages cannot exchange. Here the layers exchange padded tensors, and the
padding of the last layer's output becomes zeros, as torch's conversion from nested tensors makes it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from pipesched.errors import InputError

__all__ = ["container_class", "encoders_in", "padded"]


@cache
def container_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a copied container: for torch's encoder a class that evaluates padded tensors, else kind."""
    if issubclass(kind, _PaddedEncoder) or not issubclass(kind, nn.TransformerEncoder):
        return kind
    bases = (_PaddedEncoder,) if kind is nn.TransformerEncoder else (kind, _PaddedEncoder)  # ``super`` finds it
    return type(kind.__name__, bases, {"__module__": kind.__module__})


def encoders_in(layer: nn.Module) -> list[nn.Module]:
    """Return torch's encoders inside a layer, which runs in a function mode. There, torch makes no nested tensors."""
    return [module for module in layer.modules() if isinstance(module, nn.TransformerEncoder)]


@contextmanager
def padded(encoders: Sequence[nn.Module]) -> Iterator[None]:
    """During the ``with`` block, these encoders evaluate padded tensors. One thread calls them at a time."""
    kinds: list[Any] = [type(encoder) for encoder in encoders]
    for encoder, kind in zip(encoders, kinds, strict=True):
        encoder.__class__ = container_class(kind)
    try:
        yield
    finally:
        for encoder, kind in zip(encoders, kinds, strict=True):
            encoder.__class__ = kind


class _PaddedEncoder(nn.TransformerEncoder):
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"mask": mask, "is_causal": is_causal}
        if self.layers[0].training:
            return super().forward(src, src_key_padding_mask=src_key_padding_mask, **options)
        plain: Any = SimpleNamespace(layers=self.layers, norm=None)  # without ``use_nested_tensor``
        output = nn.TransformerEncoder.forward(plain, src, src_key_padding_mask=src_key_padding_mask, **options)
        if src_key_padding_mask is not None and mask is None:
            output = _with_zeros(output, src_key_padding_mask, self)
        return output if self.norm is None else self.norm(output)


class _NoLayers:
    """The layers of an encoder, for code that asks the first layer and calls none."""

    def __init__(self, layers: Any) -> None:
        self._layers = layers

    def __getitem__(self, index: int) -> Any:
        return self._layers[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _with_zeros(output: Tensor, padding: Tensor, encoder: nn.TransformerEncoder) -> Tensor:
    """Return the last layer's output, with zeros in the padding if torch's encoder makes a nested tensor.

    This is one call between layers. Torch's own code decides, outside of function modes, which would change its choice.
    """
    if has_torch_function((output, padding)):
        zeroed: Tensor = handle_torch_function(_with_zeros, (output, padding), output, padding, encoder)
        return zeroed
    if output.is_meta:
        return output.clone()
    options = {name: value for name, value in vars(encoder).items() if name in ("use_nested_tensor", "mask_check")}
    nested: Any = SimpleNamespace(layers=_NoLayers(encoder.layers), norm=None, **options)
    result = nn.TransformerEncoder.forward(nested, output, src_key_padding_mask=padding)
    if result is output:
        return output.clone()
    _check(padding)
    return result


def _check(padding: Tensor) -> None:
    """Raise InputError for a padding mask with which nested tensors give other results than padded tensors."""
    hidden = padding != 0
    at_the_end = not bool((hidden[:, :-1] & ~hidden[:, 1:]).any())
    if at_the_end and not (padding.is_floating_point() and bool((padding[hidden] != -torch.inf).any())):
        return
    problem, remedy = "names positions before the end of a row", "make the encoder with mask_check=True"
    if at_the_end:
        problem, remedy = "has values other than 0 and -inf", "pass a bool mask"
    raise InputError(
        f"src_key_padding_mask of nn.TransformerEncoder must hide the last positions of each row completely, because "
        f"in evaluation torch removes the positions that the mask names; a mask of shape {list(padding.shape)} "
        f"{problem}; {remedy}"
    )
