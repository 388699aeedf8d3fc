"""Recording: a model seen once in a mode, whatever its first forward sets up or writes to; it is left as it was.

Containers may make things in their first forward that later ones use, such as masks. Stages run as later forwards do;
so those attributes are kept here until a step begins.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.capture import Capture
from pipesched.capture.recorder import record
from pipesched.errors import GraphError
from pipesched.model.class_state import ClassState, changed_classes, class_state, set_class_state
from pipesched.model.containers import set_attributes
from pipesched.model.state_guard import names_of, no_graph, untouched

__all__ = ["Recording", "recorded"]

_Attributes = Mapping[tuple[nn.Module, str], Any]
_NOTHING: Any = object()
_OF_ALL_MODULES = vars(nn.Module()).keys()


@dataclass(kw_only=True)
class Recording:
    """A capture. made: attributes that the first forward of all sets, and to what; before: what they were, where there
    was anything. written: names of weights and buffers that a forward writes to.
    """

    capture: Capture
    made: _Attributes = field(default_factory=dict)
    before: _Attributes = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def set_up(self) -> None:
        """The model is as after its first forward; what has been set since stays."""
        for (module, name), value in self.made.items():
            if getattr(module, name, _NOTHING) is self.before[module, name]:
                setattr(module, name, value)


def recorded(
    model: nn.Module, layers: Mapping[str, nn.Module], mode: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Recording:
    """One forward. Where it sets attributes of containers, also the next one that finds them, to see what that changes:
    stages start each micro-batch with the attributes as they are now.

    Raises GraphError where the next one gives something else, or finds other weights.
    """
    written: dict[str, None] = {}

    def seen(found: _Attributes, on_classes: ClassState | None = None) -> Capture:
        with untouched(model, mode) as changed, no_graph(model) if mode else torch.no_grad():
            set_attributes(found)
            set_class_state(on_classes or {})
            before = class_state(model)
            capture = record(model, layers, args, kwargs)
            made, changes = changed_classes(model, before, (args, kwargs), partial(record, model, layers))
        capture.changed_classes = changes
        written.update(dict.fromkeys(names_of(model, changed)))
        again = made and not changes and on_classes is None  # as forwards that find what the first one made there
        return seen(found, made) if again else capture

    first = seen({})
    if not first.changed:
        return Recording(capture=first, written=tuple(written))
    try:
        second = seen(first.changed)
    except Exception:  # layers have changed, too
        second = None
    if second is not None and _same_way(first, second):
        _check_kept(first, second)
        return Recording(capture=first, written=tuple(written))
    if weights := [name for name, _ in model.named_parameters() if name in written]:
        raise _rescaled(model, mode, weights)
    with untouched(model, mode), torch.no_grad():
        made, before = _made(model, first, args, kwargs)
    third = seen(made)
    if third.changed:
        fourth = seen({**made, **third.changed})
        if not _same_way(third, fourth):
            raise _carried(third)
        _check_kept(third, fourth)
    return Recording(capture=third, made=made, before=before, written=tuple(written))


def _made(model: nn.Module, first: Capture, args: Any, kwargs: Any) -> tuple[_Attributes, _Attributes]:
    """What a forward leaves in the attributes that the capture saw change, and in those that were not there or None."""
    before = {module: dict(module.__dict__) for module in model.modules()}
    known = {(module, name): getattr(module, name, _NOTHING) for module, name in first.changed}
    model(*args, **kwargs)
    for module, attributes in before.items():
        for name in module.__dict__.keys() - _OF_ALL_MODULES:
            if attributes.get(name) is None:
                known.setdefault(
                    (module, name), getattr(type(module), name, _NOTHING) if name not in attributes else None
                )
    made = {key: getattr(*key) for key in known if getattr(*key, _NOTHING) is not _NOTHING}
    filled = {key: copy.copy(value) for key, value in made.items() if value is known[key]}  # its contents are put back
    return made | filled, known


def _same_way(one: Capture, other: Capture) -> bool:
    return [(str(call), call.takes) for call in one.calls] == [(str(call), call.takes) for call in other.calls]


def _check_kept(first: Capture, second: Capture) -> None:
    """Raise GraphError where the second forward gives something else for what the first has left in attributes."""
    buffers = [(value, module._buffers.get(name, value)) for (module, name), value in first.changed.items()]
    for one, other in (*buffers, *zip(first.results, second.results, strict=True)):
        if one is not other and not (isinstance(one, Tensor) and isinstance(other, Tensor) and _alike(one, other)):
            raise _carried(first)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num()))


def _carried(capture: Capture) -> GraphError:
    module, name = next(iter(capture.changed))
    return GraphError(
        f"code between layers carries nothing from one forward to the next; {type(module).__name__} sets its attribute "
        f"{name!r}, and its next forward gives something else; let a layer keep it, a module that the forward calls, "
        f"or a buffer that is changed in place"
    )


def _rescaled(model: nn.Module, mode: bool, names: list[str]) -> GraphError:
    called = "train()" if mode else "eval()"
    return GraphError(
        f"making a pipeline leaves the weights as they are; the first forward of {type(model).__name__} after {called} "
        f"writes to {len(names)} of them, such as {names[0]!r}, and later ones do not, so they were put back; run "
        f"model.{called} and model(sample) once yourself before you make a pipeline in that mode"
    )
