"""Recompute: layers that keep only their inputs and run again in their own backward (torch.utils.checkpoint).

This is activation checkpointing of individual layers (Chen et al. 2016, arXiv:1604.06174). The second run uses the same
random numbers, weights and buffers as the first run, but changes only copies of the buffers.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipesched.errors import ExecutionError
from pipesched.runtime.stage.attribute_changes import AttributeChanges, with_values
from pipesched.runtime.stage.split_backward import Deferral
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.payload import Payload
from pipesched.tensors.strided_clone import strided_clone
from pipesched.tensors.tensor_attributes import with_attributes_of
from pipesched.tensors.torch_functions import version_of

__all__ = ["RecomputedLayers", "is_dear"]

#: (tensors that replace a layer's own tensors, args, kwargs) -> the layer's output
_RunLayer = Callable[[Mapping[str, Tensor], tuple[Any, ...], dict[str, Any]], Any]

_Call = tuple[str, int]


class _BuffersBefore(NamedTuple):
    """A layer's buffers before a call, divided into changed buffers and unchanged buffers."""

    #: Copies of the buffers that the call changes.
    copies: dict[str, Tensor]
    #: The buffers that the call leaves unchanged, with their version counters.
    still: dict[str, tuple[Tensor, int]]


class RecomputedLayers:
    """The recomputed layers of one stage. The first run of a call shows which buffers and inputs the call changes."""

    def __init__(self, random: KeyedRandom, deferral: Deferral) -> None:
        self._random = random
        self._deferral = deferral
        self._modifies_input: dict[_Call, bool] = {}
        self._changes: dict[_Call, AttributeChanges] = {}
        self._moving: dict[tuple[_Call, tuple[bool, ...]], frozenset[str]] = {}

    def call(
        self,
        which: _Call,
        layer: nn.Module,
        own: Mapping[str, Tensor],
        run: _RunLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        cheap: bool = False,
    ) -> Any:
        """Run a layer that is recomputed in its backward.

        Args:
            which: the layer's name and the number of the call.
            layer: the user's module.
            own: tensors that replace the layer's own tensors.
            run: calls the layer with replacement tensors, args and kwargs.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
            cheap: whether to keep the results of expensive operators and recompute only the other results.

        Raises:
            ExecutionError: if the call modifies its input, although its first run did not.

        """
        # A tensor that is passed twice must also be a single tensor in the recompute.
        given = Payload.of((args, kwargs), lambda tensor: tensor)
        versions = [version_of(tensor) for tensor in given.tensors]
        kept = given if self._modifies_input.get(which) is False else given.map_tensors(strided_clone)
        contexts = create_selective_checkpoint_contexts(_policy) if cheap else (nullcontext(), nullcontext())
        seen = self._before(which, layer, own)
        if which not in self._changes:
            self._changes[which] = AttributeChanges([layer])
        changes = self._changes[which]
        attributes = changes.before()
        place = self._random.place
        first = [(args, kwargs)]

        spread = given.same_form()

        def act(*leaves: Any) -> Any:
            if first:  # the forward, on the arguments themselves, which are then released
                with self._deferral.saving(), contexts[0]:
                    return run(own, *first.pop())
            args, kwargs = spread(leaves)
            with (
                self._random.repeated(place),
                with_values(attributes),
                self._deferral.saving(again=True),
                contexts[1],
            ):
                return run({**own, **_checked(seen, layer, own, which)}, args, kwargs)

        value = checkpoint(act, *kept.leaves, use_reentrant=False, preserve_rng_state=False)
        attributes = changes.after(attributes)
        self._after(which, layer, own, seen)
        self._check_input(which, versions != [version_of(tensor) for tensor in given.tensors])
        return value

    def _before(self, which: _Call, layer: nn.Module, own: Mapping[str, Tensor]) -> _BuffersBefore:
        buffers = _buffers(layer, own)
        moving = self._moving.get((which, _modes(layer)), buffers) if buffers else ()
        copies = {
            name: with_attributes_of(buffer, buffer.clone()) for name, buffer in buffers.items() if name in moving
        }
        return _BuffersBefore(copies, {name: (buffer, version_of(buffer)) for name, buffer in buffers.items()})

    def _after(self, which: _Call, layer: nn.Module, own: Mapping[str, Tensor], seen: _BuffersBefore) -> None:
        """Separate the buffers in ``seen`` that the call changes from the unchanged buffers.

        The first run of a call determines the changed buffers, once for each combination of the modules' training
        modes. Values are compared as well as version counters, which some operators do not increment.
        """
        if not seen.still:
            return
        key = which, _modes(layer)
        if key not in self._moving:
            now = _buffers(layer, own)
            changed = {name for name, copy in seen.copies.items() if not torch.equal(now[name], copy)}
            changed |= {
                name
                for name, (buffer, version) in seen.still.items()
                if now[name] is not buffer or version_of(buffer) != version
            }
            self._moving[key] = frozenset(changed)
        for name in seen.still.keys() - self._moving[key]:
            seen.copies.pop(name, None)
        for name in self._moving[key]:
            del seen.still[name]

    def _check_input(self, which: _Call, modified: bool) -> None:
        if self._modifies_input.setdefault(which, modified) is False and modified:
            raise ExecutionError(
                f"a recomputed layer must modify its input in place either always or never; layer {which[0]!r} "
                f"modified its input in this forward, but not in the first forward; take the layer out of checkpoint=, "
                f"or do not modify the input in place"
            )


#: Operators that are expensive to recompute.
_DEAR = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})


def is_dear(operator: Any) -> bool:
    """Return whether "recompute-cheap" keeps an operator's results instead of recomputing them."""
    name = operator.name().removeprefix("aten::").partition(".")[0]
    return name in _DEAR or "scaled_dot_product" in name


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_dear(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _checked(seen: _BuffersBefore, layer: nn.Module, own: Mapping[str, Tensor], which: _Call) -> dict[str, Tensor]:
    """Return copies of the buffers that the layer's forward changes, for use in the recompute.

    Raises ExecutionError if any other buffer has been modified since the first run.
    """
    now = _buffers(layer, own) if seen.still else {}
    for name, (buffer, version) in seen.still.items():
        if now[name] is not buffer or version_of(buffer) != version:
            raise ExecutionError(
                f"a layer must be recomputed with the same buffer values as in its forward; buffer {name!r} of layer "
                f"{which[0]!r} was modified between the forward and the recomputation; take the layer out of "
                f"checkpoint="
            )
    return seen.copies


def _buffers(layer: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: own.get(name, buffer) for name, buffer in layer.named_buffers()}


def _modes(layer: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in layer.modules())
