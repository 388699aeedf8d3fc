"""Recording: records a model in one mode, training or evaluation, and leaves the model unchanged.

The first forward of some models creates attributes that later forwards use, such as masks. Stages need these
attributes, so a Recording stores them, and a step begins by setting them.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.capture import Capture
from pipesched.capture.first_forward import first_forward, following_batch
from pipesched.capture.recorder import record
from pipesched.errors import GraphError
from pipesched.model.attributes import OF_ALL_MODULES, Attributes, BufferValue, attribute, set_attributes
from pipesched.model.class_state import ClassState, changed_classes, class_state, set_class_state
from pipesched.model.state_guard import names_of, no_graph, untouched
from pipesched.model.tensor_places import changes_made_buffer, check_keeps_weights
from pipesched.tensors.keyed_random import outside_kept
from pipesched.units import counted

__all__ = ["Recording", "recorded"]

_NOTHING: Any = object()
_FIRST_NESTED = iter([True])


@dataclass(kw_only=True)
class Recording:
    """The capture of a model in one mode, and the attributes that the first forward in this mode sets."""

    capture: Capture
    #: Attributes that only the first forward sets, with the values that it sets.
    made: Attributes = field(default_factory=dict)
    #: The values of the attributes in ``made`` before the first forward; a sentinel for an attribute that was missing.
    before: Attributes = field(default_factory=dict)
    #: Names of weights and buffers that a forward writes to.
    written: tuple[str, ...] = ()

    def set_up(self) -> None:
        """Set the attributes that the first forward would set, except attributes changed after the recording."""
        for (module, name), value in self.made.items():
            if getattr(module, name, _NOTHING) is self.before[module, name]:
                set_attributes({(module, name): value})


def recorded(
    model: nn.Module, layers: Mapping[str, nn.Module], mode: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Recording:
    """Record a model in one mode. Runs more than one forward if the first forward sets attributes of containers.

    Stages start every micro-batch with the attributes already set. A forward that starts with these attributes must
    therefore make the same calls and return the same result as the recorded forward. If only the first forward differs,
    a later forward is recorded instead.

    Args:
        model: the user's module.
        layers: layer name -> layer. A call of a layer is recorded as a single call.
        mode: True for training mode, False for evaluation mode.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.

    Raises:
        GraphError: a later forward returns a different result, or only the first forward writes to weights.

    """
    written: dict[str, None] = {}
    buffers = {name for name, _ in model.named_buffers()}
    filled: Attributes = {}  # attributes that layers set in the first forward and then only read

    def seen(found: Attributes, on_classes: ClassState | None = None) -> Capture:
        given = {**filled, **found}
        with untouched(model, mode) if given or on_classes else nullcontext():
            set_attributes(given)
            set_class_state(on_classes or {})
            look = partial(record, model, layers, made=dict(model.named_buffers()).keys() - buffers)
            with _recording(model, mode) as changed:
                before = class_state(model)
                capture = look(args, kwargs)
                made, changes = changed_classes(model, before, (args, kwargs), look)
            written.update(dict.fromkeys(names_of(model, changed)))
        capture.changed_classes = changes
        again = made and not changes and on_classes is None  # record a forward that starts with these class attributes
        return seen(found, made) if again else capture

    first = seen({})
    if any(isinstance(one, Tensor) and one.is_nested for one in first.values.values()) and next(_FIRST_NESTED, False):
        first = seen({})  # in the first forward of the process, torch makes objects that later forwards use
    check_keeps_weights(model, first.changed)
    if (first.replaced or first.hidden) and (filled := _filled(model, layers, mode, args, kwargs)):
        written_first = [*written]
        written.clear()
        later = seen({})
        same = _same_way(first, later) and all(map(_alike, first.results, later.results))
        if same and not later.replaced and not later.hidden:
            first = later
        else:
            filled = {}
            written |= dict.fromkeys(written_first)
    if not first.changed:
        return Recording(capture=first, written=tuple(written))
    try:
        second = seen(first.changed)
    except Exception:  # for example because the first forward also set attributes of layers
        second = None
    if second is not None and _same_way(first, second):
        _check_kept(first, second)
        return Recording(capture=first, written=tuple(written))
    if weights := [name for name, _ in model.named_parameters() if name in written]:
        raise _rescaled(model, mode, weights)
    with untouched(model, mode), torch.no_grad():
        made, before = _made(model, first, args, kwargs)
    for module, name in following_batch(model, mode, first_forward(model, mode, args, kwargs), args, kwargs):
        if (module, name) in made:
            raise _from_batch(module, name)
    third = seen(made)
    if third.changed:
        fourth = seen({**made, **third.changed})
        if not _same_way(third, fourth):
            raise _carried(third)
        _check_kept(third, fourth)
    return Recording(capture=third, made=made, before=before, written=tuple(written))


@contextmanager
def _recording(model: nn.Module, mode: bool) -> Iterator[list[Tensor]]:
    """Run forwards in a mode, and restore the model afterwards, as ``untouched`` does.

    Random numbers are the same on every rank, so that code which skips layers at random skips the same layers.
    """
    with untouched(model, mode) as changed, outside_kept(0), no_graph(model) if mode else torch.no_grad():
        torch.manual_seed(0)
        yield changed


def _filled(
    model: nn.Module, layers: Mapping[str, nn.Module], mode: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Attributes:
    """Return what layers set in the first forward, such as tables. Returns nothing if a value depends on the batch.

    Raises GraphError if the next forward changes a buffer that the first forward makes.
    """
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    inside = {module for layer in layers.values() for module in layer.modules()}
    try:
        found = first_forward(model, mode, args, kwargs)
    except Exception:  # the model may not run outside of a recording, for example on the meta device
        return {}
    for (module, name), value in found.made.items():
        is_new = isinstance(value, BufferValue) and module._buffers.get(name) is None
        if is_new and module in inside and (module, name) not in found.kept:
            raise changes_made_buffer(f"{names.get(module, '')}{name}")
    if any(module in inside for module, _ in following_batch(model, mode, found, args, kwargs)):
        return {}
    return {key: value for key, value in found.made.items() if key[0] in inside}


def _made(model: nn.Module, first: Capture, args: Any, kwargs: Any) -> tuple[Attributes, Attributes]:
    """Run a forward. Return the new values and the old values of the attributes that the forward sets.

    These are attributes that changed during the capture, and attributes that were missing or None before the forward.
    """
    before = {module: dict(module.__dict__) for module in model.modules()}
    known = {(module, name): getattr(module, name, _NOTHING) for module, name in first.changed}
    model(*args, **kwargs)
    for module, attributes in before.items():
        for name in module.__dict__.keys() - OF_ALL_MODULES:
            if attributes.get(name) is None:
                known.setdefault(
                    (module, name), getattr(type(module), name, _NOTHING) if name not in attributes else None
                )
    made = {key: attribute(*key) for key in known if getattr(*key, _NOTHING) is not _NOTHING}
    # Lists and dicts that the forward filled are restored afterwards, so their contents are copied.
    filled = {key: copy.copy(value) for key, value in made.items() if value is known[key]}
    return made | filled, known


def _same_way(one: Capture, other: Capture) -> bool:
    return [(str(call), call.takes) for call in one.calls] == [(str(call), call.takes) for call in other.calls]


def _check_kept(first: Capture, second: Capture) -> None:
    """Raise GraphError if the second forward, in which the attributes are already set, returns different values."""
    buffers = [
        (value.tensor, module._buffers[name])
        for (module, name), value in first.changed.items()
        if isinstance(value, BufferValue) and name in module._buffers
    ]
    for one, other in (*buffers, *zip(first.results, second.results, strict=True)):
        if one is not other and not (isinstance(one, Tensor) and isinstance(other, Tensor) and _alike(one, other)):
            raise _carried(first)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num()))


def _carried(capture: Capture) -> GraphError:
    module, name = next(iter(capture.changed))
    return GraphError(
        f"code between layers must not carry state from one forward to the next; {type(module).__name__} sets its "
        f"attribute {name!r}, and its next forward returns a different result; keep the state in a layer, in another "
        f"module that the forward calls, or in a buffer that is changed in place"
    )


def _from_batch(module: nn.Module, name: str) -> GraphError:
    return GraphError(
        f"code between layers must not keep values of the first batch, because the pipeline is built with a sample "
        f"instead; the first forward of {type(module).__name__} sets its attribute {name!r} from values of its input "
        f"or from random numbers, and later forwards read it; call model(batch) once before you build the pipeline, "
        f"or set the attribute in __init__"
    )


def _rescaled(model: nn.Module, mode: bool, names: list[str]) -> GraphError:
    called = "train()" if mode else "eval()"
    return GraphError(
        f"building a pipeline must leave the weights unchanged; the first forward of {type(model).__name__} after "
        f"{called} writes to {counted(len(names), 'weight')}, such as {names[0]!r}, but later forwards do not; the "
        f"old values were restored; call model.{called} and model(sample) once before you build a pipeline in that mode"
    )
