"""Stale weights: raises an error if a model is called, copied or saved while other ranks hold its latest weights.

Each rank of a mesh trains the weights of its own stages, in its copy of the user's model. The other weights in that
copy are not updated. From the first step until the weights are gathered, hooks on the modules with stale weights raise
an error if code outside the pipeline calls, copies or saves the model. The hooks exist only during that time. Weights
that are divided among replicas count as stale from the start.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn, Protocol
from weakref import ref

from torch import Tensor, nn

from pipesched.errors import ExecutionError
from pipesched.model.watched_parameters import watched
from pipesched.user_warning import warn

__all__ = ["Placement", "StaleGuard", "StaleHook", "check_not_stale", "is_stale", "release_model"]

_REMEDY = (
    "call the pipeline's gather_model() on every rank, before or after close(), or load a complete state_dict into the "
    "model"
)


class Runs(Protocol):
    """Reports whether a pipeline's ranks are running in this process."""

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""


@dataclass(frozen=True)
class Placement:
    """The rank that holds each of a model's tensors."""

    #: The global ranks of the mesh.
    group: tuple[int, ...] = ()
    #: This process's rank in the mesh.
    here: int = 0
    #: Name of a parameter or buffer -> the mesh rank that holds it.
    homes: Mapping[str, int] = field(default_factory=dict)
    #: The names of parameters that ranks divide. This process holds only some rows, or a block, of each parameter.
    divided: frozenset[str] = frozenset()

    @cached_property
    def away(self) -> list[str]:
        """The names of parameters and buffers that other ranks hold, at least in part."""
        return [name for name, rank in self.homes.items() if rank != self.here or name in self.divided]


class StaleHook:
    """The hook on the modules of a model with stale weights. Only the model's pipelines can call these modules."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.passing = 0
        self._runs: list[ref[Runs]] = []
        self._removals: list[Callable[[], None]] = []
        self._empty = self._warned = False

    @property
    def on(self) -> bool:
        """Whether the hook is registered, that is, whether the model has stale weights."""
        return bool(self._removals)

    def allow(self, runs: Runs) -> None:
        """Allow calls of the model while ``runs`` is busy."""
        self._runs = [known for known in self._runs if known() not in (None, runs)]
        self._runs.append(ref(runs))

    def put_on(self, roots: Mapping[str, nn.Module], run_here: Iterable[nn.Module]) -> None:
        """Register the hook on the roots (the model first) and on all modules that hold tensors of other ranks.

        Modules of this rank's stages get no forward hook, because every step would run it. A loss module without
        tensors of other ranks gets no hook, because it may serve other models and pipelines.
        """
        own = set(run_here)
        others = set(self.placement.away)
        model = next(iter(roots.values()))
        for prefix, root in roots.items():
            away_of = {
                module: _held_away(module, name, others)
                for name, module in root.named_modules(prefix=prefix.removesuffix("."))
            }
            whole = root is model or any(away_of.values())  # whether a call of the root may use stale weights
            for module, away in away_of.items():
                self._empty |= any(tensor.is_meta for tensor in away)
                stale_root = whole and module is root
                if away or stale_root:
                    self._removals.append(module.register_state_dict_pre_hook(self.saved).remove)
                if stale_root or (away and module not in own):
                    self._removals.append(module.register_forward_pre_hook(self.called).remove)
        if self.placement.divided:
            self._removals.append(model.register_load_state_dict_pre_hook(self.loading).remove)
        parameters = model.parameters
        vars(model)["parameters"] = lambda recurse=True: watched(parameters(recurse))
        self._removals.append(partial(vars(model).pop, "parameters", None))
        self._removals.append(model.register_load_state_dict_post_hook(self.loaded).remove)

    def remove(self) -> None:
        """Unregister the hook everywhere."""
        while self._removals:
            self._removals.pop()()

    def called(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: raises ExecutionError unless a pipeline makes the call."""
        if not self._passes():
            self.refuse(f"{type(module).__name__} was called")

    def saved(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Hook before state_dict(): raises ExecutionError, or warns if the stale weights are on the meta device."""
        if self._passes():
            return
        if not self._empty:
            self.refuse(f"state_dict() of {type(module).__name__} was called")
        if not self._warned:
            self._warned = True
            warn(self._said(f"state_dict() of {type(module).__name__} was called"))

    def loading(self, module: nn.Module, *given: Any) -> None:
        """Hook before load_state_dict(): raises ExecutionError, because torch cannot load into divided weights."""
        if not self._passes():
            self.refuse(f"load_state_dict() of {type(module).__name__} was called instead of the pipeline's")

    def loaded(self, module: nn.Module, incompatible: Any) -> None:
        """Hook after load_state_dict(): removes the hooks if a complete state dict was loaded.

        Torch iterates over its dict of hooks during this call, so the dict is replaced by a copy first.
        """
        if not incompatible.missing_keys and not self._empty and not self._passes():
            module._load_state_dict_post_hooks = OrderedDict(module._load_state_dict_post_hooks)
            self._removals.pop()
            own = [key for key, hook in module._load_state_dict_post_hooks.items() if hook == self.loaded]
            for key in own:
                del module._load_state_dict_post_hooks[key]
            self.remove()

    def __deepcopy__(self, memo: Any) -> "StaleHook":
        if not self._passes():
            self.refuse("the model was copied")
        return self

    def __reduce__(self) -> NoReturn:
        self.refuse("the model was pickled")

    def _passes(self) -> bool:
        for known in self._runs:  # checked first: a step may call the model for each micro-batch
            runs = known()
            if runs is not None and runs.busy:
                return True
        return self.passing > 0

    def refuse(self, event: str) -> NoReturn:
        """Raise an ExecutionError that names stale weights."""
        raise ExecutionError(self._said(event))

    def _said(self, event: str) -> str:
        place = self.placement
        away = self.placement.away
        if self.placement.divided:
            return (
                f"the model of a pipeline with zero=3 or tensor_parallel= must not be used while its weights are "
                f"divided, because each rank holds only part of them; on rank {place.here} {event}, but {len(away)} of "
                f"{len(place.homes)} parameters and buffers are divided or belong to other ranks, such as {away[0]!r}; "
                f"call the pipeline's gather_model() on every rank, before or after close()"
            )
        return (
            f"the model of a pipeline over a mesh must not be used while its weights are stale, because each rank "
            f"trains only the weights of its own stages; on rank {place.here} {event}, but {len(away)} of "
            f"{len(place.homes)} parameters and buffers are stale, such as {away[0]!r}, which rank "
            f"{place.homes[away[0]]} trains; {_REMEDY}"
        )


def _held_away(module: nn.Module, name: str, others: Container[str]) -> list[Tensor]:
    """Return the tensors of a module itself that other ranks may change. ``others`` names the tensors of other ranks.

    The buffers of torch's loss modules are the weights of classes, which never change.
    """
    if type(module).__module__ == nn.CrossEntropyLoss.__module__:
        return []
    tensors = (*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False))
    return [tensor for full, tensor in tensors if full in others]


def _hook_on(model: nn.Module) -> StaleHook | None:
    for hook in model._state_dict_pre_hooks.values():
        own = getattr(hook, "__self__", None)
        if isinstance(own, StaleHook):
            return own
    return None


def release_model(model: nn.Module) -> None:
    """Remove the hooks. Called when all weights of the model are up to date."""
    if (hook := _hook_on(model)) is not None:
        hook.remove()


def is_stale(model: nn.Module) -> bool:
    """Return whether the model has stale weights."""
    return _hook_on(model) is not None


def check_not_stale(model: nn.Module) -> None:
    """Raise ExecutionError if the model has stale weights."""
    hook = _hook_on(model)
    if hook is not None:
        hook.refuse("the model's layers were about to be measured or used in a second pipeline")


class StaleGuard:
    """Registers, checks and removes the StaleHook of one pipeline. Pipelines with the same placement share a hook.

    ``roots`` maps name prefixes to modules; the model comes first.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._hook: StaleHook | None = None
        self._placement = Placement()  # this rank holds all tensors
        #: Lets the pipeline's modules hold blocks of weights again, if they hold whole ones. Returns whether they did.
        #: None if ranks do not split layers.
        self.hold_blocks: Callable[[], bool] | None = None

    def place(self, placement: Placement, run_here: Iterable[nn.Module], runs: Runs) -> None:
        """Set the rank that holds each tensor. ``run_here`` contains the modules of this rank's stages."""
        self._placement = placement
        self._run_here = list(run_here)
        self._runs = runs

    def check(self, *, changes: bool) -> None:
        """Check that a pipeline may run. ``changes`` is True if the run may change weights or buffers.

        Raises:
            ExecutionError: a pipeline with another placement has trained the model.

        """
        changes |= self.hold_blocks is not None and self.hold_blocks()
        if self._hook is not None and self._hook.on:
            return
        self._hook = hook = _hook_on(next(iter(self._roots.values())))
        if hook is not None and hook.placement != self._placement:
            self._hook = None
            hook.refuse("another pipeline with a different placement of layers was used")
        if hook is None and changes and self._placement.away:
            self._hook = hook = StaleHook(self._placement)
            hook.put_on(self._roots, self._run_here)
        if hook is not None:
            hook.allow(self._runs)

    def use(self) -> None:
        """Let the pipeline read or change the model. If its modules held whole weights, they hold blocks again."""
        if self.hold_blocks is not None and self.hold_blocks():
            self.check(changes=True)

    def release(self) -> None:
        """Remove the hooks. Called when all weights of the model are up to date."""
        release_model(next(iter(self._roots.values())))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Allow the code in the ``with`` block to read the model."""
        self.check(changes=False)
        hook = self._hook
        if hook is None:
            yield
            return
        hook.passing += 1
        try:
            yield
        finally:
            hook.passing -= 1
