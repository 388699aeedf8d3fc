"""Gradient norms: the norms of all gradients of a model, in the form that stages and ranks exchange."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipesched.model.parameter_order import ParameterOrder
from pipesched.tensors.gradient_norm import norm_of, total_norm

__all__ = ["GradientNorms"]

_BETWEEN = "\n"


class GradientNorms(NamedTuple):
    """The norms of some parameters' gradients."""

    #: The parameters' keys, one per line, so that a message contains a single string.
    keys: str
    #: The norms as one vector, in the order of the keys; None if there are no norms.
    norms: Tensor | None
    #: A 0-d flag, set if a scaled gradient or a loss is infinite or NaN; None if neither is checked.
    nonfinite: Tensor | None = None

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], order: ParameterOrder, norm_type: float) -> "GradientNorms":
        """Compute the norms of these parameters' gradients. Parameters without a gradient are left out."""
        with_grad = [parameter for parameter in parameters if parameter.grad is not None]
        norms = [norm_of(parameter.grad, norm_type) for parameter in with_grad if parameter.grad is not None]
        here = [norm.to(norms[0].device) for norm in norms]
        return cls(_BETWEEN.join(order.keys(with_grad)), torch.stack(here) if here else None)

    @classmethod
    def named(
        cls, parameters: Sequence[nn.Parameter], norms: Tensor, order: ParameterOrder, nonfinite: Tensor | None
    ) -> "GradientNorms":
        """Return GradientNorms with these parameters and their ``norms``, sorted by parameter key."""
        keys = order.keys(parameters)
        places = sorted(range(len(keys)), key=keys.__getitem__)
        return cls(_BETWEEN.join(keys[place] for place in places), _picked(norms, places), nonfinite)

    @classmethod
    def merged(cls, parts: Sequence["GradientNorms"]) -> "GradientNorms":
        """Merge the norms of several stages or ranks, in the model's order. All norms must be on the same device."""
        found = sorted((part for part in parts if part.norms is not None), key=lambda part: part.keys)
        keys = [key for part in found for key in part.each_key()]
        vectors = [part.norms for part in found if part.norms is not None]
        checks = [part.nonfinite for part in parts if part.nonfinite is not None]
        nonfinite = torch.stack(checks).any() if checks else None
        if not vectors:
            return cls("", None, nonfinite)
        whole = torch.cat(vectors)
        places = sorted(range(len(keys)), key=keys.__getitem__)
        whole = _picked(whole, places)  # other places only if the parameters of two stages alternate in the model
        return cls(_BETWEEN.join(keys[place] for place in places), whole, nonfinite)

    def on(self, device: torch.device) -> "GradientNorms":
        """Copy the norms to a device."""
        norms, nonfinite = (one if one is None else one.to(device) for one in self[1:])
        return GradientNorms(self.keys, norms, nonfinite)

    def each_key(self) -> list[str]:
        """Return the keys of the parameters as a list."""
        return self.keys.split(_BETWEEN) if self.keys else []

    def total(self, norm_type: float) -> Tensor:
        """Return the total norm of the gradients."""
        return total_norm([] if self.norms is None else self.norms, norm_type)

    def first_nonfinite(self) -> str | None:
        """Return the key of the first parameter whose norm is infinite or NaN, or None. Waits for norms on a GPU."""
        finite = [] if self.norms is None else self.norms.isfinite().tolist()
        return next((key for key, good in zip(self.each_key(), finite, strict=True) if not good), None)


def _picked(norms: Tensor, places: Sequence[int]) -> Tensor:
    """Return the norms at these places. An index of numbers would be copied to a GPU, for which the host waits."""
    if all(at == place for at, place in enumerate(places)):
        return norms
    each = norms.unbind()
    return torch.stack([each[place] for place in places])
