"""GRU, LSTM and RNN with the bits of a CPU: the CPU's own composite of operators, as one launch, with its backward.

torch splits these into fused cells on an accelerator, and a fused cell rounds differently from the CPU's products.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["register_recurrent"]

_OPERATORS = (
    "gru.input", "gru.data", "lstm.input", "lstm.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
    "rnn_relu.data", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip


def register_recurrent(backend: ModuleType) -> torch.library.Library:
    """Register the operators. They stay registered for as long as the returned object lives."""
    library = torch.library.Library("aten", "IMPL")
    for name in _OPERATORS:
        kernel = _kernel(backend, name)
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl(name, kernel, key)
    return library


def _kernel(backend: ModuleType, name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **options: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, options))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def on_cpu(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            own_args, own_options = pytree.tree_unflatten(filled, spec)
            made = operator(*own_args, **own_options)
            return made if isinstance(made, tuple) else (made,)

        given = [leaves[place] for place in places]
        made = _AsLaunch.apply(backend, f"aten::{packet}", on_cpu, *given)
        return made if len(made) > 1 else made[0]

    return run


class _AsLaunch(torch.autograd.Function):
    """Runs a function of CPU tensors as one launch, and its backward as another."""

    @staticmethod
    def forward(ctx: Any, backend: ModuleType, name: str, on_cpu: Callable[..., Any], *tensors: Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]

        def run(aliases: list[Tensor]) -> list[Tensor]:
            own = [
                alias.detach().requires_grad_(needs) if needs else alias
                for alias, needs in zip(aliases, needed, strict=True)
            ]
            with torch.set_grad_enabled(any(needed)):
                made = on_cpu(own)
            ctx.graph = made, [tensor for tensor, needs in zip(own, needed, strict=True) if needs]
            return list(made)

        ctx.backend, ctx.name = backend, name
        ctx.set_materialize_grads(False)
        outputs = backend.as_launch(name, list(tensors), run)
        if not any(needed):
            del ctx.graph
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        made, own = ctx.graph
        used = [place for place, grad in enumerate(grads) if grad is not None]

        def run(aliases: list[Tensor]) -> list[Tensor]:
            outputs = [made[place] for place in used]
            found = torch.autograd.grad(outputs, own, aliases, retain_graph=True, allow_unused=True)
            return [torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(own, found, strict=True)]

        given = [grads[place] for place in used]
        found = iter(ctx.backend.as_launch(f"{ctx.name}_backward", given, run))
        return None, None, None, *(next(found) if needs else None for needs in ctx.needs_input_grad[3:])
