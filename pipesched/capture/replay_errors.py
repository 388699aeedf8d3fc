"""Replay errors: what is wrong if a stage's code does not do what it did for the sample, and what the user can do."""

import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from torch import Tensor

from pipesched.capture.capture import INPUT, Call, Value
from pipesched.errors import GraphError
from pipesched.tensors.tree_structure import tensors_in

if TYPE_CHECKING:
    from pipesched.capture.replay import Replay

__all__ = [
    "cannot_be_made",
    "changed_attribute",
    "fails_on_stand_ins",
    "loses_graph",
    "note",
    "other_calls",
    "other_calls_again",
    "other_form",
    "other_object",
    "other_value",
    "other_weight",
    "without_values",
]


def _home(replay: "Replay", value: Value) -> str:
    """Say which call returned a value, and in which stage."""
    index, name = value
    if index == INPUT:
        return f"input {name[0]!r}"
    stage = next((number for number, part in enumerate(replay.parts) if index in part.own), None)
    return f"the result of {replay.capture.calls[index]}" + (f" (stage {stage})" if stage is not None else "")


def _where(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Say which is the first line of the user's code in pairs (frame, line); an empty string if none is."""
    for frame, line in frames:
        if not _is_foreign(frame):
            return f" at {frame.f_code.co_filename}:{line}"
    return ""


def _keep_whole(replay: "Replay", frame: FrameType | None = None) -> str:
    container = replay.shells.running(frame)
    return f"keep module {container!r} whole with whole_layers=[{container!r}], or " if container else ""


def other_value(replay: "Replay", user: str, value: Value) -> GraphError:
    """Return the error of a stage that uses a value which it did not use for the sample."""
    return GraphError(
        f"a stage must use the same values as for the sample, because it receives only these; in stage {replay.stage}, "
        f"{user} {_home(replay, value)}{_where(traceback.walk_stack(None))}, which it did not for the sample; "
        f"{_keep_whole(replay)}pass all tensors among which the code chooses to one layer, which chooses"
    )


def changed_attribute(layer: str, attribute: str) -> GraphError:
    """Return the error of a layer that changes an attribute which code between layers reads."""
    return GraphError(
        f"code between layers may read only attributes of layers that their forwards do not change, because other "
        f"stages run this code at other times; the forward of layer {layer!r} changes its attribute {attribute!r}, and "
        f"code between layers reads it; let the layer return the value"
    )


def loses_graph(calls: Sequence[Call]) -> GraphError:
    """Return the error of code with a backward of its own that gets the result of another stage's autograd.Function.

    ``calls`` begins with the first call inside this code.
    """
    call = next((one for one in calls if one.layer), calls[0])
    return GraphError(
        f"a stage must not begin between an autograd.Function and another one, or torch.utils.checkpoint, because "
        f"the latter would get its input without a gradient (torch.utils.checkpoint with use_reentrant=True is an "
        f"autograd.Function, too); the stage begins right before the one that calls {call}; pass "
        f"use_reentrant=False to torch.utils.checkpoint, or choose another cut with boundaries= or together="
    )


def cannot_be_made(replay: "Replay", call: Call, error: Exception) -> GraphError:
    """Return the error of a call whose result cannot be made from stand-ins."""
    return GraphError(
        f"a call must return objects that can be made from stand-ins, because every stage runs the code between "
        f"layers; {_home(replay, (call.index, 0))} cannot be made in stage {replay.stage} ({type(error).__name__}: "
        f"{error}); {_keep_whole(replay)}return the tensors in a tuple, a dict or a dataclass"
    )


def without_values(call: Call) -> GraphError:
    """Return the error of a call whose result has no values, although none of its arguments is a known stand-in."""
    return GraphError(
        f"the arguments of a call must be inputs of the model or tensors that other calls returned; {call} uses a "
        f"different tensor, which has no values in this stage; create that tensor with torch functions, or in a layer"
    )


def other_weight(call: Call) -> GraphError:
    """Return the error of a function transform whose argument is a weight that cannot be replaced."""
    return GraphError(
        f"code between layers must pass weights to {call} directly from the attributes of the module whose code is "
        f"running; {call} uses {call.uses[0]!r}, which comes from elsewhere or was read before an earlier {call}; read "
        f"the attribute in the call to {call}, or put the call into a layer"
    )


def other_form(replay: "Replay", call: Call) -> GraphError:
    """Return the error of a call that returns another structure than for the sample."""
    return GraphError(
        f"a call must return values in the same structure as for the sample; {call} returned a different structure for "
        f"this batch; {_remedy(replay)}"
    )


def other_object(replay: "Replay", call: Call, value: object) -> GraphError:
    """Return the error of a call that returns an object which cannot be sent to other stages."""
    return GraphError(
        f"a call must return values that can be sent to other stages, because every stage runs the code between "
        f"layers; {call} (stage {replay.stage}) returned an object of class {type(value).__qualname__}, which is not "
        f"equal to the object for the sample and cannot be taken apart; {_keep_whole(replay)}return tensors and plain "
        f"values in a tuple, a dict or a dataclass"
    )


def other_calls(replay: "Replay", position: int, now: str) -> GraphError:
    """Return the error of code that makes other calls than for the sample."""
    calls = replay.capture.calls
    due = f"calls {calls[position]}" if position < len(calls) else "ends"
    read = _last_read_of_layers(calls[:position])
    reason = "the model's code depends on the batch, or on an attribute that was set after the pipeline was built"
    if read is not None:
        reason = (
            f"the model's code may depend on the value that {read[0]} reads, which depends on layer {read[1]!r} and so "
            f"is not known before the step"
        )
    return GraphError(
        f"a forward must make the same calls as for the sample; after {position} of {len(calls)} calls to layers and "
        f"torch functions, it {due} for the sample but {now} for this batch{_where(traceback.walk_stack(None))}; at "
        f"this point {reason}; {_remedy(replay, same_sample=read is None)}"
    )


def _last_read_of_layers(calls: Sequence[Call]) -> tuple[str, str] | None:
    """Return the last function that read a value computed by layers, and one of these layers; None if there is none."""
    layer_of: dict[int, str] = {}
    read = None
    for call in calls:
        layer = call.layer or next((layer_of[index] for index, _ in reversed(call.takes) if index in layer_of), "")
        if layer:
            layer_of[call.index] = layer
            read = (call.function, layer) if call.reads else read
    return read


def other_calls_again(replay: "Replay", position: int, now: str) -> GraphError:
    """Return the error of code that makes other calls when it runs again on the sample."""
    count = len(replay.capture.calls)
    return GraphError(
        f"a forward must make the same calls each time; after {position} of {count} calls to layers and torch "
        f"functions, the code of stage {replay.stage} {now}{_where(traceback.walk_stack(None))} when it runs "
        f"again on the sample; if the first forward filled a cache, build the pipeline again, else "
        f"{_keep_whole(replay)}move the code into a layer"
    )


def fails_on_stand_ins(replay: "Replay", stand_ins: Mapping[int, tuple[Tensor, Value]], error: Exception) -> GraphError:
    """Return the error of code between layers that fails because tensors of other stages have no values."""
    lines = list(traceback.walk_tb(error.__traceback__))[::-1]
    values = _values_in(lines, stand_ins)
    uses = f"; the code uses {_home(replay, values[0])}" if values else ""
    return GraphError(
        f"code between layers runs in every stage, and must not need the values of tensors of other stages; in stage "
        f"{replay.stage}, {type(error).__name__} is raised{_where(lines)} ({error}){uses}; "
        f"{_keep_whole(replay, lines[0][0])}move this code into the layer that returns the tensor"
    )


def note(replay: "Replay", stand_ins: Mapping[int, tuple[Tensor, Value]], error: Exception) -> None:
    """Add a note to an error of code between layers that has a stand-in, which may be the cause."""
    for value in _values_in(list(traceback.walk_tb(error.__traceback__))[::-1], stand_ins)[:1]:
        error.add_note(
            f"while stage {replay.stage} ran the code between layers, in which {_home(replay, value)} has no values"
        )


def _values_in(lines: Iterable[tuple[FrameType, int]], stand_ins: Mapping[int, tuple[Tensor, Value]]) -> list[Value]:
    """Return the values for which stand-ins are among the local variables of the user's code."""
    frames = [frame for frame, _ in lines if not _is_foreign(frame)] if stand_ins else []
    named = [id(one) for frame in frames for one in tensors_in(list(frame.f_locals.values()))]
    return [stand_ins[key][1] for key in named if key in stand_ins]


def _is_foreign(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "pipesched", "threading", "concurrent")


def _remedy(replay: "Replay", *, same_sample: bool = True) -> str:
    container = replay.shells.running()
    whole = f"treat module {container!r} as one layer with whole_layers=[{container!r}]" if container else ""
    sample = "build the pipeline with a sample like this batch and the model in its current state"
    layer = "move the code that makes these calls into a layer"
    *others, last = [one for one in (whole, sample if same_sample else "", layer) if one]
    return f"{', '.join(others)}, or {last}" if others else last
