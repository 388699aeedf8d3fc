"""Output probe: runs a model on another number of rows, to find the dimensions of its outputs that have rows.

The model runs on the meta device, so that nothing is computed, and the model's weights are not needed.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import InputError
from pipesched.model.stale_weights import StaleGuard
from pipesched.model.state_guard import set_aside, untouched
from pipesched.runtime.microbatches import Splitter
from pipesched.tensors.meta_tensors import Beside
from pipesched.tensors.payload import pytree

__all__ = ["probed_output"]

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_META = torch.device("meta")


def probed_output(
    model: nn.Module,
    guard: StaleGuard,
    splitter: Splitter,
    sample: _Inputs,
    given: _Inputs | None,
    other_than: int,
) -> tuple[Any, int] | None:
    """Return (output, number of rows) of a forward; the output's tensors are on the meta device.

    Returns None if the sample cannot be resized, or if the model does not run on the meta device.

    Args:
        model: the user's module.
        guard: the StaleGuard, which refuses other forwards of a model whose weights are stale.
        splitter: splits a batch like the sample.
        sample: the arguments (args, kwargs) of a forward.
        given: the arguments of another forward, to use if this process has them.
        other_than: a number of rows that the forward must not have.

    """
    rows = max(splitter.evidence.rows or 1, other_than) + 1
    try:
        inputs = splitter.resized(*(given if given and any(given) else sample), None, rows).inputs[0]
    except InputError:
        return None
    without_values = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=_META), inputs)
    for args, kwargs in (inputs, without_values):  # code may read the values of inputs, such as masks
        with guard.lifted(), suppress(Exception):  # any error of a model's code
            return _output(model, args, kwargs), rows
    return None


def _output(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    own = {name: torch.empty_like(tensor, device=_META) for name, tensor in named.items()}
    with set_aside(model), untouched(model, model.training), torch.no_grad(), Beside(_META):
        return torch.func.functional_call(model, own, args, kwargs)
