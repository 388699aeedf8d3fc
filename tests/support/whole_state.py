"""Whole state: reads the whole state of a model into a dict, so that tests find any change. Uses no pipesched code."""

from collections import deque
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import pipesched
from pipesched import Pipeline

#: Types whose values are recorded. Of other objects, the type and the id are recorded.
PLAIN = bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device


def bits(tensor: Tensor) -> Any:
    whole = tensor.detach().clone().reshape(-1)
    return tuple(tensor.shape), tensor.dtype, bytes(whole.view(torch.uint8).numpy().tobytes())


def of_tensor(tensor: Tensor) -> dict[str, Any]:
    found = {
        "object": id(tensor),
        "address": tensor.data_ptr(),
        "bits": bits(tensor),
        "needs a gradient": tensor.requires_grad,
        "hooks": (
            list((tensor._backward_hooks or {}).items()),
            list((tensor._post_accumulate_grad_hooks or {}).items()),
        ),
        "attributes": sorted(tensor.__dict__),
    }
    if isinstance(tensor, nn.Parameter):  # versions of buffers change when pipesched restores them
        found["version"] = tensor._version
    if tensor.is_leaf:
        found["grad"] = None if tensor.grad is None else (id(tensor.grad), tensor.grad._version, bits(tensor.grad))
    return found


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return all modules, attributes, hooks, tensors, generators, modes, and contents of containers, by path."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, PLAIN):
            found[path] = type(value), value
            return
        found[path] = type(value), id(value)
        if id(value) in seen:
            return
        seen[id(value)] = value  # keeps the object alive, so that its id is not reused
        if isinstance(value, Tensor):
            found.update((f"{path}: {what}", part) for what, part in of_tensor(value).items())
        elif isinstance(value, torch.Generator):
            found[f"{path}: state"] = value.get_state().tolist()
        elif isinstance(value, dict):
            found[f"{path}: keys"] = list(map(str, value))
            for key, part in value.items():
                walk(f"{path}[{key!r}]", part)
        elif isinstance(value, list | tuple | deque):
            found[f"{path}: length"] = len(value)
            for number, part in enumerate(value):
                walk(f"{path}[{number}]", part)
        elif isinstance(value, set | frozenset):
            found[f"{path}: members"] = sorted(map(repr, value))
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            walk(f"{path}.__dict__", dict(vars(value)).copy() and vars(value))
        elif isinstance(value, nn.Module):
            walk(f"{path}.__dict__", vars(value))

    walk(type(model).__name__, model)
    return found


@contextmanager
def unchanged(model: nn.Module, what: str, *, but: str = "nothing"):
    """Check that a model does not change in a ``with`` block. Paths that end in ``but`` may change."""
    before = whole_state(model)
    yield
    after = whole_state(model)
    ways = [path for path in {**before, **after} if before.get(path) != after.get(path) and not path.endswith(but)]
    assert not ways, (what, ways[:5], [(before.get(path), after.get(path)) for path in ways[:1]])


def prepared(model: nn.Module) -> list[Any]:
    """Add gradients and hooks to a model, and set its last module to evaluation mode.

    Returns a list to which each call of a parameter hook adds an item.
    """
    fired: list[Any] = []
    for number, parameter in enumerate(model.parameters()):
        if number % 3 == 0 and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
        if number % 4 == 0 and parameter.requires_grad:
            parameter.register_hook(fired.append)
            parameter.register_post_accumulate_grad_hook(fired.append)
    modules = list(model.modules())
    modules[-1].register_forward_hook(lambda module, args, output: None)
    modules[-1].eval()
    return fired


def check_nothing_changes(model: nn.Module, sample: Any, loss_fn: Any, target: Any, rows: int) -> None:
    """Check that the model does not change when it is measured, planned or built into a pipeline."""
    fired = prepared(model)
    measured = {} if loss_fn is None or target is None else {"loss_fn": loss_fn, "target": target}
    with unchanged(model, "graph_of"):
        pipesched.graph_of(model, sample)
    with unchanged(model, "profile"):
        known = pipesched.profile(model, sample, rows=[rows], **measured)
    with unchanged(model, "Pipeline"):
        pipe = Pipeline(model, sample, loss_fn=loss_fn, devices=["cpu"] * 2, seed=3)
    with unchanged(model, "predicted_memory"):
        assert pipe.predicted_memory
    with unchanged(model, "close"):
        pipe.close()
    with unchanged(model, "tune"):
        pipesched.tune(
            model,
            sample,
            profile=known,
            devices=["cpu"] * 2,
            batch_size=2 * rows,
            num_microbatches=2,
            confirm=1,
            **measured,
        )
    assert not fired
