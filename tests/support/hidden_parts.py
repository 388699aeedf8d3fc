"""Hides a private part of torch from pipesched, then trains: run as ``python -m tests.support.hidden_parts part ...``.

For each part, a forked process hides the part, imports pipesched and uses it. The processes print as JSON, for each
part, how an import of all modules, a plain step, and code that needs the part ended: "" or an error.
"""

import gc
import importlib
import inspect
import json
import os
import pkgutil
import sys
import traceback
from functools import partial
from types import SimpleNamespace
from typing import Any

import click  # noqa: F401  # like slow_imports, imported once for all processes
import networkx  # noqa: F401
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from tests.support import slow_imports  # noqa: F401

X = torch.ones(4, 8)


class Hidden:
    """An attribute that torch's own code finds, and other code does not."""

    def __init__(self, kind: type, name: str) -> None:
        self._before = inspect.getattr_static(kind, name, None)
        self._name = name

    def __get__(self, one: Any, kind: Any = None) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        if one is not None and self._name in one.__dict__:
            return one.__dict__[self._name]
        return self._before.__get__(one, kind) if hasattr(self._before, "__get__") else self._before

    def __set__(self, one: Any, value: Any) -> None:
        one.__dict__[self._name] = value


def hide(kind: type, *names: str) -> None:
    for name in names:
        setattr(kind, name, Hidden(kind, name))


def hide_module(holder: Any, name: str) -> None:
    delattr(holder, name)
    sys.modules[f"{holder.__name__}.{name}"] = None  # type: ignore[assignment]


def rename_hooks_of_checkpoint() -> None:
    """Give the functions of torch.utils.checkpoint other names, as a change of its code could."""
    module = torch.utils.checkpoint
    source = inspect.getsource(module).replace("unpack_hook", "restore_hook")
    exec(compile(source, module.__file__ or "", "exec"), module.__dict__)


def drop_compile_lock() -> None:
    import torch._dynamo.convert_frame

    del torch._dynamo.convert_frame.compile_lock


class Recomputed(nn.Module):
    """A layer that adds a loss, and recomputes itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._add, x, use_reentrant=False)

    def _add(self, x: Tensor) -> Tensor:
        import pipesched

        y = x.sin()
        pipesched.add_loss(y.mean())
        return y


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, None]
        return self.attention(y, y, y)[0][:, 0]


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[None])[0][0]


def step(*layers: nn.Module, **options: Any) -> None:
    import pipesched

    model = nn.Sequential(*layers)
    given: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "schedule": "1f1b", "num_microbatches": 2, **options}
    with pipesched.Pipeline(model, X[:2], devices=["cpu"] * 2, **given) as pipe:
        loss = pipe.step(X, target=X)
        if not loss.isfinite():
            raise ValueError("the loss is not finite")


def import_all() -> None:
    import pipesched

    for module in pkgutil.walk_packages(pipesched.__path__, "pipesched."):
        if not (module.name.endswith("__main__") or module.name.startswith("pipesched.hf")):  # transformers needs all
            importlib.import_module(module.name)
    for name in pipesched.__all__:
        getattr(pipesched, name)


def plain() -> None:
    step(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def with_hook() -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    layers[0].weight.register_hook(lambda grad: grad)
    step(*layers)


def offload() -> None:
    step(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), checkpoint={"0": "offload"})


def differentiate() -> None:
    import pipesched

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pipesched.Pipeline(model, X[:2], devices=["cpu"] * 2, schedule="1f1b") as pipe:
        pipe(X).sum().backward()


def on_meta(*layers: Any) -> None:
    with torch.device("meta"):
        made = [make() for make in layers]
    step(*made, seed=0)


def collect() -> None:
    import pipesched

    model = nn.Sequential(nn.Linear(8, 8), Recomputed())
    with pipesched.collect_losses() as losses:
        output = model(X)
        (output.sum() + sum(losses.values())).backward()


def groups() -> None:
    from pipesched.tensors.torch_insides import process_groups

    if process_groups() != [None]:  # the default group of a process that has none
        raise ValueError("unexpected groups")


PARTS: dict[str, tuple[Any, Any]] = {
    "torch.utils._pytree": (lambda: hide_module(torch.utils, "_pytree"), plain),
    "torch.utils._python_dispatch.TorchDispatchMode": (lambda: hide_module(torch.utils, "_python_dispatch"), plain),
    "torch._ops.OpOverload._schema": (lambda: hide(torch._ops.OpOverload, "_schema"), plain),
    "torch.Tensor._base": (lambda: hide(Tensor, "_base"), offload),
    "torch.Tensor._backward_hooks, torch.Tensor._post_accumulate_grad_hooks": (
        lambda: hide(Tensor, "_backward_hooks", "_post_accumulate_grad_hooks"),
        with_hook,
    ),
    "torch.utils.checkpoint.<locals>.unpack_hook": (rename_hooks_of_checkpoint, collect),
    "torch._C._will_engine_execute_node": (lambda: delattr(torch._C, "_will_engine_execute_node"), differentiate),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": (
        lambda: delattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack"),
        plain,
    ),
    "torch.nn.functional.multi_head_attention_forward.__globals__": (
        lambda: setattr(
            nn.functional, "multi_head_attention_forward", partial(nn.functional.multi_head_attention_forward)
        ),
        lambda: step(nn.Linear(8, 8), Attends()),
    ),
    "torch._dynamo.convert_frame.compile_lock": (drop_compile_lock, lambda: step(nn.Linear(8, 8), nn.RReLU())),
    "torch.nn.Module._compiled_call_impl": (lambda: hide(nn.Module, "_compiled_call_impl"), plain),
    "torch.nn.RNNBase._flat_weight_refs": (
        lambda: hide(nn.RNNBase, "_flat_weight_refs"),
        lambda: on_meta(lambda: nn.Linear(8, 8), Recurs),
    ),
    "torch.nn.MultiheadAttention._reset_parameters": (
        lambda: hide(nn.MultiheadAttention, "_reset_parameters"),
        lambda: on_meta(lambda: nn.Linear(8, 8), Attends),
    ),
    "torch.autograd.profiler._is_profiler_enabled": (
        lambda: delattr(torch.autograd.profiler, "_is_profiler_enabled"),
        lambda: None,
    ),
    "torch.distributed.distributed_c10d._world": (
        lambda: setattr(distributed_c10d, "_world", SimpleNamespace(default_pg=None)),
        groups,
    ),
}


def outcome(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return ""


def tried(name: str) -> list[str]:
    hide_part, use = PARTS[name]
    hide_part()
    return [outcome(import_all), outcome(plain), outcome(use)]


def main() -> None:
    gc.disable()  # a collection would scan all of torch in each process
    for name in sys.argv[1:]:
        if os.fork() == 0:
            try:
                print(json.dumps([name, *tried(name)]), flush=True)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    assert not any(name.startswith("pipesched") for name in sys.modules)
    main()
