"""Norms, and other modules with whole weights, on activations that are divided.

Each rank applies the whole weights to its own positions, or to its own heads. So its gradients of these weights are
parts of a sum. One all-reduce for each call adds the parts of all weights of the module: in the I, each of P ranks
sends 2 (P - 1)/P of their bytes.
"""

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from pipesched.errors import InputError
from pipesched.parallel.collective_functions import gather_from, scatter_to, summed_weights
from pipesched.parallel.split_module import held_by
from pipesched.parallel.tensor_group import ActivationLayout

__all__ = ["DividesSequence", "JoinsSequence", "Summed", "WholeWeights"]


class _Bound(nn.Module):
    """Calls the forward that a module had before it was split."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the module's original class."""
        return held_by(self.module).original.forward(self.module, *args, **kwargs)


class Summed(nn.Module):
    """The forward of a module whose weights are whole, and whose input is divided."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with weights whose gradients are summed over the ranks."""
        named = dict(self.named_parameters())
        copies = summed_weights(held_by(self).group, *named.values())
        own = {f"module.{name}": copy for name, copy in zip(named, copies, strict=True)}
        return functional_call(_Bound(self), own, args, kwargs)


class WholeWeights(nn.Module):
    """The forward of a module between divided layers that has no style: it must get whole activations."""

    shows_original = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises InputError if the activations are divided: then the gradients of its weights may be parts of a sum.
        """
        held = held_by(self)
        layout = held.group.layout
        if layout is ActivationLayout.WHOLE:
            return super().forward(*args, **kwargs)
        error = InputError(
            f"a layer with whole weights between divided layers must have a style, because the gradients of its "
            f"weights may be parts of a sum; {held.options['name']!r} (a {type(self).__name__}) runs where "
            f"activations are {_DIVIDED[layout]}; in tensor_parallel=, give it {_REMEDIES.get(layout, _SUMMED)}"
        )
        if not held.group.is_alone or held.group.trace is not None:
            raise error
        try:  # while the layer is measured by itself, the layout may be that of another layer
            return super().forward(*args, **kwargs)
        except RuntimeError as raw:
            raise error from raw


_DIVIDED = {
    ActivationLayout.SEQUENCE: "divided by positions",
    ActivationLayout.DIVIDED: "divided by heads or columns",
    ActivationLayout.OUTER: "divided by rows and hidden units",
    ActivationLayout.INNER: "divided by rows and hidden units",
}
_SUMMED = "the style 'summed' if its input is divided, or 'whole' if its input is whole"
_REMEDIES = {
    ActivationLayout.OUTER: "the style 'norm' if it is a norm, or 'column' or 'row' if it is a linear layer",
    ActivationLayout.INNER: "the style 'row' if it is a linear layer, or 'summed' if it is a norm of each head",
}


class DividesSequence(Summed):
    """The forward of a module that runs on this rank's positions of a whole input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the module with this rank's positions of its first argument."""
        group = held_by(self).group
        group.layout = ActivationLayout.SEQUENCE
        return super().forward(scatter_to(x, group, group.sequence_dim), *args, **kwargs)


class JoinsSequence(Summed):
    """The forward of a module after which all ranks have all positions again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and gather the positions of its output."""
        group = held_by(self).group
        output = super().forward(*args, **kwargs)
        group.layout = ActivationLayout.WHOLE
        return gather_from(output, group, group.sequence_dim)
