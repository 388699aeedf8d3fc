"""Torch insides: everything that pipesched reads of torch's private parts, each with its reason.

Torch may change a private part in any release. Therefore each part is probed when it is first needed. If a probe fails,
pipesched either does without the part, with the same results, or raises TorchVersionError.

To use another private part, look for a public way first. If there is none, add an entry to INSIDES and a function that
reads the part here; tests/tensors/test_torch_insides.py then asks what happens without it.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib import import_module
from inspect import currentframe
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.utils import checkpoint

from pipesched.errors import TorchVersionError

__all__ = [
    "INSIDES",
    "WRAPPED_IN",
    "DispatchMode",
    "Inside",
    "base_of",
    "check_body",
    "compile_lock",
    "forget_weights",
    "hooks_kept",
    "hooks_on",
    "is_compiled",
    "is_profiled",
    "modes_of_thread",
    "node_of",
    "process_groups",
    "pytree",
    "recomputes",
    "reset_of",
    "runs_in_backward",
    "schema_of",
]

#: The versions of torch with which the tests of pipesched pass.
_TESTED = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")


class Inside:
    """A private part of torch.

    Args:
        name: the name of the part.
        reason: why pipesched reads the part.
        probe: returns whether the part works as pipesched expects. An error counts as no.
        seen_in: the versions of torch that have the part. Default: all tested versions.

    """

    def __init__(
        self, name: str, reason: str, probe: Callable[[], bool], *, seen_in: tuple[str, ...] = _TESTED
    ) -> None:
        self.name = name
        self.reason = reason
        self.seen_in = seen_in
        self._probe = probe

    @cached_property
    def fault(self) -> str:
        """What is wrong with the part; "" if nothing is. The probe runs once.

        The probe runs in a thread of its own, so that it runs outside the modes of this thread.
        """
        faults: list[str] = []
        thread = threading.Thread(target=self._look, args=(faults,), daemon=True)
        thread.start()
        thread.join()
        return faults[0]

    def _look(self, faults: list[str]) -> None:
        try:
            faults.append("" if self._probe() else "it works differently")
        except Exception as error:  # a probe of unknown code may raise any error
            faults.append(f"{type(error).__name__}: {error}")

    def require(self) -> None:
        """Raise TorchVersionError if the part is missing, or works differently than pipesched expects."""
        if self.fault:
            raise TorchVersionError(
                f"pipesched needs {self.name}, a private part of torch, because {self.reason}; torch "
                f"{torch.__version__} is installed, and its {self.name} cannot be used ({self.fault}); install a newer "
                f"version of pipesched, or one of these versions of torch: {', '.join(self.seen_in)}"
            )


class _Missing:
    """Stands for a private module that cannot be used. It can be read; calling anything of it raises the error."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> "_Missing":
        return _Missing(self._inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._inside.require()

    def __or__(self, other: Any) -> Any:  # in annotations
        return other


# ---- nested values ----


def node_of(spec: Any) -> tuple[Any, Any, list[Any]]:
    """Return the type, the context and the children of a TreeSpec's root; the type of a leaf is None."""
    if spec.is_leaf():
        return None, None, []
    children = (
        spec.children() if hasattr(spec, "children") else spec.children_specs
    )  # torch 2.11 has only the attribute
    return spec.type, spec.context, list(children)


def _has_trees() -> bool:
    from torch.utils import _pytree

    value = {"b": (1, [2, None]), "a": 3}
    leaves, spec = _pytree.tree_flatten(value)
    kind, names, parts = node_of(spec)
    lists = _pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, list))
    return (
        leaves == _pytree.tree_leaves(value)
        and _pytree.tree_unflatten(leaves, spec) == value
        and spec == _pytree.tree_structure({"b": (5, [6, None]), "a": 7})
        and lists == [1, [2, None], 3]
        and _pytree.tree_map(str, [1, 2]) == _pytree.tree_map_only(int, str, [1, 2]) == ["1", "2"]
        and _pytree.tree_structure(0).is_leaf()
        and not spec.is_leaf()
        and _pytree.TreeSpec(kind, names, parts) == spec
        and callable(_pytree.register_pytree_node)
    )


_PYTREE = Inside("torch.utils._pytree", "torch has no public module for nested tuples, lists and dicts", _has_trees)
if TYPE_CHECKING:
    from torch.utils import _pytree as pytree
elif _PYTREE.fault:
    pytree = _Missing(_PYTREE)
else:
    from torch.utils import _pytree as pytree


# ---- every operation of a thread ----

try:
    from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
except ImportError:
    _TorchDispatchMode = object  # type: ignore[assignment, misc]


class _Listening:
    """Defines ``__torch_dispatch__`` outside the mode class.

    If a mode class itself defines this method, torch imports torch.compile to wrap it, and this import is slow.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard: list[Any]
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


class _DispatchListener(_Listening, _TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = []


def _hears_backward() -> bool:
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401  # raises an error if there is none

    with _DispatchListener() as listener:
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        before = len(listener.heard)
        y.backward()
    return 0 < before < len(listener.heard)


_DISPATCH = Inside(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "public modes do not see the operations of backward passes; torch's guide to extending it documents this mode, "
    "which has no public module",
    _hears_backward,
)


class DispatchMode(_TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` is called for every operation of this thread, those of backwards included.

    Define that method outside the class of the mode, as in `_Listening`.
    """

    def __init__(self) -> None:
        _DISPATCH.require()
        super().__init__()  # type: ignore[no-untyped-call]


# ---- what operations write ----


def _knows_writes() -> bool:
    first, *_ = torch.ops.aten.add_.Tensor._schema.arguments
    return (
        torch.ops.aten.add_.Tensor._schema.is_mutable
        and not torch.ops.aten.add.Tensor._schema.is_mutable
        and first.name == "self"
        and first.alias_info is not None
        and first.alias_info.is_write
    )


_SCHEMA = Inside(
    "torch._ops.OpOverload._schema",
    "only the schema of an operation tells which tensors the operation writes to",
    _knows_writes,
)


def schema_of(operator: Any) -> Any:
    """Return the schema of an operation that a dispatch mode sees, or None if it is a higher-order operation."""
    _SCHEMA.require()
    return getattr(operator, "_schema", None)


# ---- views, and hooks of tensors ----


def _knows_bases() -> bool:
    tensor = torch.zeros(2)
    return tensor._base is None and tensor.view(-1)[:1]._base is tensor


_BASE = Inside("torch.Tensor._base", "torch has no public way to tell of which tensor another is a view", _knows_bases)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which this tensor is a view, or None."""
    _BASE.require()
    return tensor._base


def _knows_hooks() -> bool:
    tensor = torch.zeros(1, requires_grad=True)
    found = _hooks_on(tensor)
    tensor.register_hook(_ignore)
    tensor.register_post_accumulate_grad_hook(_ignore)
    return found == [] and [list(hooks.values()) for hooks in _hooks_on(tensor)] == [[_ignore], [_ignore]]


def _ignore(tensor: Tensor) -> None:
    """A hook that does nothing."""


def _hooks_on(tensor: Tensor) -> list[dict[Any, Any]]:
    return [hooks for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if hooks]


_HOOKS = Inside(
    "torch.Tensor._backward_hooks, torch.Tensor._post_accumulate_grad_hooks",
    "hooks must not fire while a model is measured, and torch has no public way to list the hooks of a tensor",
    _knows_hooks,
)


def hooks_on(tensor: Tensor) -> list[dict[Any, Any]]:
    """Return the dicts with the hooks that run when a gradient of the tensor is computed, without empty dicts."""
    _HOOKS.require()
    return _hooks_on(tensor)


def hooks_kept(tensor: Tensor, change: Callable[[], None]) -> None:
    """Call ``change``, which replaces what is behind a tensor, so that the tensor's hooks run afterwards, too."""
    _HOOKS.require()
    before = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    change()
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = before


# ---- recomputation ----


def _sees_recomputation() -> bool:
    found = []

    def ask(x: Tensor) -> Tensor:
        found.append(_recomputes())
        return x.sin()

    for use_reentrant in (False, True):
        x = torch.zeros(1, requires_grad=True)
        checkpoint.checkpoint(ask, x, use_reentrant=use_reentrant, preserve_rng_state=False).backward()
    return found == [False, True] * 2


def _recomputes() -> bool:
    frame = currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__ and code.co_name in ("unpack_hook", "backward"):
            return True
        frame = frame.f_back
    return False


_RECOMPUTATION = Inside(
    "torch.utils.checkpoint.<locals>.unpack_hook",
    "a layer adds its loss once, and only the functions that run tell that a layer is being recomputed",
    _sees_recomputation,
)


def recomputes() -> bool:
    """Return whether torch.utils.checkpoint is running a forward for the second time, in a backward pass."""
    _RECOMPUTATION.require()
    return _recomputes()


# ---- the nodes that a backward runs ----


class _Asks(torch.autograd.Function):
    """A function whose backward stores, for each of its inputs, whether this backward computes the input's gradient."""

    @staticmethod
    def forward(ctx: Any, answers: list[bool], *tensors: Tensor) -> Tensor:
        ctx.answers = answers
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.answers.extend(_runs(node) for node, _ in ctx.next_functions)
        return None, *[None] * len(ctx.next_functions)


def _runs(node: Any) -> bool:
    return bool(torch._C._will_engine_execute_node(node))


def _tells_nodes() -> bool:
    leaf, other = (torch.zeros(1, requires_grad=True) for _ in range(2))
    inner = leaf.clone(), other.clone()
    answers: list[bool] = []
    torch.autograd.grad(_Asks.apply(answers, *inner), leaf, allow_unused=True)  # type: ignore[no-untyped-call]
    _Asks.apply(answers, *inner).backward()  # type: ignore[no-untyped-call]
    return answers == [True, False, True, True]


_NODES = Inside(
    "torch._C._will_engine_execute_node",
    "torch.autograd.grad must not add to the gradients of weights, and only autograd knows whether it was called",
    _tells_nodes,
)


def runs_in_backward(node: Any) -> bool:
    """Return whether the backward pass that is running runs a node of its graph. The node must not be a leaf's."""
    _NODES.require()
    return _runs(node)


# ---- modes of a thread ----


def _modes_of_thread() -> list[str]:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    modes += _get_current_dispatch_mode_stack()
    found = [type(mode).__name__.strip("_") for mode in modes if not type(mode).__module__.startswith("pipesched.")]
    if (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(f"{hooks[0].__qualname__.partition('.')[0]} (torch.autograd.graph.saved_tensors_hooks)")
    return found


def _tells_modes() -> bool:
    class OfProbe(torch.overrides.TorchFunctionMode):
        __module__ = "of the user"  # modes of pipesched are left out

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def kept(tensor: Tensor) -> Tensor:
        return tensor

    before = _modes_of_thread()
    with OfProbe(), torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(kept, kept):
        return not before and [name.partition(" ")[0] for name in _modes_of_thread()] == ["OfProbe", "_tells_modes"]


_MODES = Inside(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "modes and hooks of the calling thread do not act in the threads of a pipeline",
    _tells_modes,
)


def modes_of_thread() -> list[str]:
    """Return the names of the modes and hooks that act in this thread only. Empty if this torch does not list them."""
    return [] if _MODES.fault else _modes_of_thread()


# ---- Python code of torch ----


def _has_own_attention() -> bool:
    function = nn.functional.multi_head_attention_forward
    return isinstance(function, FunctionType) and function.__globals__.get("linear") is nn.functional.linear


_ATTENTION = Inside(
    "torch.nn.functional.multi_head_attention_forward.__globals__",
    "a function mode does not see the calls in the body of this function, which draw random numbers and use weights",
    _has_own_attention,
)


def check_body(function: Any) -> None:
    """Raise TorchVersionError if a composite function of torch cannot be run with other functions in its body."""
    if function is nn.functional.multi_head_attention_forward:
        _ATTENTION.require()


# ---- compilation ----

_COMPILER = "torch._dynamo.convert_frame"


def _has_compile_lock() -> bool:
    return isinstance(import_module(_COMPILER).compile_lock, AbstractContextManager)


_COMPILE_LOCK = Inside(
    f"{_COMPILER}.compile_lock",
    "compilation sets back the default generators, and only this lock keeps other threads from compiling while one "
    "draws",
    _has_compile_lock,
)


def compile_lock() -> AbstractContextManager[Any]:
    """Return a lock that keeps other threads from compiling. It never imports torch.compile."""
    if _COMPILER not in sys.modules:  # no thread compiles
        return nullcontext()
    _COMPILE_LOCK.require()
    lock: AbstractContextManager[Any] = import_module(_COMPILER).compile_lock  # waits if a thread is importing it
    return lock


_COMPILED_CALL = Inside(
    "torch.nn.Module._compiled_call_impl",
    "torch has no public way to tell whether a module is compiled, and pipesched must not cut such a module",
    lambda: nn.Module._compiled_call_impl is None,
)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, with its ``compile()`` method or with ``torch.compile``."""
    _COMPILED_CALL.require()
    made_by_compile = type(module).__module__.startswith("torch._dynamo.")
    return module._compiled_call_impl is not None or made_by_compile or hasattr(module, _ORIGINAL)


_PROFILER = Inside(
    "torch.autograd.profiler._is_profiler_enabled",
    "torch has no public way to tell whether a profiler records, and a range costs 10 us also if none does",
    lambda: torch.autograd.profiler._is_profiler_enabled in (True, False),
)


def is_profiled() -> bool:
    """Return whether a torch profiler records. Without the part, actions have no ranges in its traces."""
    return not _PROFILER.fault and bool(torch.autograd.profiler._is_profiler_enabled)


# ---- modules of torch ----

_ORIGINAL = "_orig_mod"
#: Attributes in which torch.compile, FSDP and checkpoint_wrapper keep the wrapped module. If torch renames one of them,
#: names of tensors in checkpoints keep the new name as a part, and loading refuses names that the model lacks.
WRAPPED_IN = frozenset({_ORIGINAL, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def _has_weak_references() -> bool:
    module = nn.RNN(1, 1, device="meta")
    found = [own() if own else None for own in module._flat_weight_refs]
    return [*map(id, found)] == [*map(id, module.parameters())]


_WEAK_REFERENCES = Inside(
    "torch.nn.RNNBase._flat_weight_refs",
    "weak references to weights prevent filling a model on the meta device in place",
    _has_weak_references,
)


def forget_weights(module: nn.RNNBase) -> None:
    """Drop a recurrent module's weak references to its weights. ``module.to(device)`` creates them again."""
    _WEAK_REFERENCES.require()
    module._flat_weight_refs.clear()


_RESET = Inside(
    "torch.nn.MultiheadAttention._reset_parameters",
    "its public reset_parameters is missing",
    lambda: callable(_reset_of(nn.MultiheadAttention(1, 1, device="meta"))),
)


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that draws a module's initial weights, or None if it has none."""
    if isinstance(module, nn.MultiheadAttention):
        _RESET.require()
    return _reset_of(module)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    return reset if callable(reset) else None


# ---- processes ----


def _lists_groups() -> bool:
    return isinstance(distributed.distributed_c10d._world.pg_names, Mapping)


_GROUPS = Inside(
    "torch.distributed.distributed_c10d._world",
    "the NCCL groups of a job are aborted once a rank is stuck in one, and torch has no public list of groups",
    _lists_groups,
)


def process_groups() -> list[Any]:
    """Return the process groups of this job. Without torch's list of groups, returns only the default group.

    A rank that is stuck in another group then ends its process, as it does with gloo.
    """
    return [distributed.group.WORLD] if _GROUPS.fault else list(distributed.distributed_c10d._world.pg_names)


INSIDES: tuple[Inside, ...] = (
    _PYTREE,
    _DISPATCH,
    _SCHEMA,
    _BASE,
    _HOOKS,
    _RECOMPUTATION,
    _NODES,
    _MODES,
    _ATTENTION,
    _COMPILE_LOCK,
    _COMPILED_CALL,
    _PROFILER,
    _WEAK_REFERENCES,
    _RESET,
    _GROUPS,
)
