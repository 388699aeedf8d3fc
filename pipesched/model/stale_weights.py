"""Stale weights: a model over a mesh, whose other ranks' weights are not here: whoever reads or saves it is told so.

Each rank trains the weights of its own stages, in the user's own model. The rest of that model stays as it was. From
the first step on, until the weights are gathered, hooks on the modules with such weights raise where the model is
called, copied or saved outside the pipeline. Hooks are all that is kept: there are none before and none after.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, Protocol
from weakref import ref

from torch import nn

from pipesched.errors import ExecutionError
from pipesched.user_warning import warn

__all__ = ["Placement", "StaleGuard", "StaleHook", "check_not_stale", "release_model"]

_REMEDY = (
    "call gather_model() of its pipeline on every rank, which works after close() too, or load a whole state_dict into "
    "the model"
)


class Runs(Protocol):
    """What runs a pipeline's ranks in this process."""

    @property
    def busy(self) -> bool:
        """Whether a run is under way."""


@dataclass(frozen=True)
class Placement:
    """Where a model's tensors are. group: the mesh's ranks, as the job counts them. here: this one's number in it.

    homes: the rank in the mesh of each parameter and buffer, by name.
    """

    group: tuple[int, ...] = ()
    here: int = 0
    homes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def away(self) -> list[str]:
        """What other ranks hold."""
        return [name for name, rank in self.homes.items() if rank != self.here]


class StaleHook:
    """The hook on all modules of one model. It lets pass what the pipelines over the model do themselves."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.passing = 0
        self._runs: list[ref[Runs]] = []
        self._removals: list[Callable[[], None]] = []
        self._empty = self._warned = False

    @property
    def on(self) -> bool:
        """Whether the model still lacks what other ranks have."""
        return bool(self._removals)

    def allow(self, runs: Runs) -> None:
        """Let pass what happens in its runs."""
        self._runs = [known for known in self._runs if known() not in (None, runs)]
        self._runs.append(ref(runs))

    def put_on(self, roots: Mapping[str, nn.Module], run_here: Iterable[nn.Module]) -> None:
        """Register it with all modules that hold something of other ranks, and with the roots, the model first.

        Modules of this rank's stages get no hook on their forward, which steps would call.
        """
        own = set(run_here)
        others = set(self.placement.away)
        model = next(iter(roots.values()))
        for prefix, root in roots.items():
            for name, module in root.named_modules(prefix=prefix.removesuffix(".")):
                tensors = (*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False))
                away = [tensor for full, tensor in tensors if full in others]
                self._empty |= any(tensor.is_meta for tensor in away)
                if away or module is root:
                    self._removals.append(module.register_state_dict_pre_hook(self.saved).remove)
                if module is root or (away and module not in own):
                    self._removals.append(module.register_forward_pre_hook(self.called).remove)
        self._removals.append(model.register_load_state_dict_post_hook(self.loaded).remove)

    def remove(self) -> None:
        """Unregister it everywhere."""
        while self._removals:
            self._removals.pop()()

    def called(self, module: nn.Module, args: Any) -> None:
        """Before a forward."""
        if not self._passes():
            self.refuse(f"{type(module).__name__} was called")

    def saved(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before a state_dict. Where the others' weights have no contents, nobody can take them for newer ones."""
        if self._passes():
            return
        if not self._empty:
            self.refuse(f"state_dict() of {type(module).__name__} was called")
        if not self._warned:
            self._warned = True
            warn(self._said(f"state_dict() of {type(module).__name__} was called"))

    def loaded(self, module: nn.Module, incompatible: Any) -> None:
        """After load_state_dict of the model: a whole one makes it whole. Hooks that torch is going through stay."""
        if not incompatible.missing_keys and not self._empty and not self._passes():
            module._load_state_dict_post_hooks = OrderedDict(module._load_state_dict_post_hooks)
            self._removals.pop()
            own = [key for key, hook in module._load_state_dict_post_hooks.items() if hook == self.loaded]
            for key in own:
                del module._load_state_dict_post_hooks[key]
            self.remove()

    def __deepcopy__(self, memo: Any) -> "StaleHook":
        if not self._passes():
            self.refuse("it was copied")
        return self

    def __reduce__(self) -> NoReturn:
        self.refuse("it was pickled")

    def _passes(self) -> bool:
        for known in self._runs:  # first: a step may call the model for each micro-batch
            runs = known()
            if runs is not None and runs.busy:
                return True
        return self.passing > 0

    def refuse(self, what: str) -> NoReturn:
        """Raise what a reader is told."""
        raise ExecutionError(self._said(what))

    def _said(self, what: str) -> str:
        place = self.placement
        away = self.placement.away
        return (
            f"over a mesh each rank trains the weights of its own stages, and the others' in its model are stale; on "
            f"rank {place.here} {what}, where {len(away)} of {len(place.homes)} parameters and buffers are stale, such "
            f"as {away[0]!r}, which rank {place.homes[away[0]]} trains; {_REMEDY}"
        )


def _hook_on(model: nn.Module) -> StaleHook | None:
    for hook in model._state_dict_pre_hooks.values():
        own = getattr(hook, "__self__", None)
        if isinstance(own, StaleHook):
            return own
    return None


def release_model(model: nn.Module) -> None:
    """The model is whole here: no reader is told anything any more."""
    if (hook := _hook_on(model)) is not None:
        hook.remove()


def check_not_stale(model: nn.Module) -> None:
    """Raise ExecutionError for a model of which other ranks have newer weights."""
    hook = _hook_on(model)
    if hook is not None:
        hook.refuse("its layers were looked for, to measure them or for a second pipeline")


class StaleGuard:
    """One pipeline's hold on the hooks of its model. roots: the modules by the prefix of their names, the model first.

    Several pipelines over one model share the hooks, where the same ranks hold the same weights.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._hook: StaleHook | None = None
        self._placement = Placement()  # all here

    def place(self, placement: Placement, run_here: Iterable[nn.Module], runs: Runs) -> None:
        """Say where the tensors are. run_here: the modules that this rank's stages run."""
        self._placement = placement
        self._run_here = list(run_here)
        self._runs = runs

    def check(self, *, changes: bool) -> None:
        """Before a call of the pipeline that may change weights or buffers, or not.

        Raises ExecutionError where another pipeline, which places layers otherwise, has trained the model.
        """
        if self._hook is not None and self._hook.on:
            return
        self._hook = hook = _hook_on(next(iter(self._roots.values())))
        if hook is not None and hook.placement != self._placement:
            self._hook = None
            hook.refuse("a pipeline that places layers otherwise was used")
        if hook is None and changes and self._placement.away:
            self._hook = hook = StaleHook(self._placement)
            hook.put_on(self._roots, self._run_here)
        if hook is not None:
            hook.allow(self._runs)

    def release(self) -> None:
        """The model is whole here."""
        release_model(next(iter(self._roots.values())))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """What is done in here may read the model."""
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
