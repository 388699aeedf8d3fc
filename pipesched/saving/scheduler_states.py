"""Scheduler states: saves and loads learning rate schedulers (one for all parameters, or one per stage)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipesched.checks import shown
from pipesched.errors import ArgumentError, CheckpointError
from pipesched.saving.common_values import Encoded, encode, kept_here
from pipesched.saving.live_run import LiveRun
from pipesched.saving.rollback import Rollback
from pipesched.saving.saved_run import CheckpointPart, SavedRun
from pipesched.saving.state_encoding import decoded, tensor_keys

__all__ = ["SchedulerChanges", "as_schedulers", "capture_schedulers"]

_ONE = "all parameters"


def as_schedulers(given: Any, run: LiveRun) -> dict[str, Any]:
    """Return schedulers keyed by name: "all parameters" for a single scheduler, else names such as "stage 2".

    In a list, the number is the stage of the scheduler's optimizer or, if that is unknown, the index in the list.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        named = {f"stage {stage}": scheduler for stage, scheduler in given.items()}
    elif isinstance(given, Sequence):
        stages = {id(optimizer): stage for stage, optimizer in (run.optimizers or {}).items()}
        named = {}
        for position, scheduler in enumerate(given):
            stage = stages.get(id(getattr(scheduler, "optimizer", None)), position)
            name = f"stage {stage}"
            named[name if name not in named else f"stage {stage}, scheduler {position}"] = scheduler
    else:
        named = {_ONE: given}
    for scheduler in named.values():
        if not all(callable(getattr(scheduler, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ArgumentError(
                f"a scheduler must have state_dict and load_state_dict, like those of torch.optim.lr_scheduler; got "
                f"{shown(scheduler)}; pass a scheduler, a list of schedulers, or a dict from stages to schedulers"
            )
    return named


def encoded_schedulers(schedulers: Mapping[str, Any]) -> dict[str, Encoded]:
    """Encode the class and state of each scheduler."""
    found = {}
    for name, scheduler in schedulers.items():
        state = encode(scheduler.state_dict(), f"scheduler/{name}")
        found[name] = Encoded({"dict": {"class": type(scheduler).__qualname__, "state": state.value}}, state.tensors)
    return found


def capture_schedulers(part: CheckpointPart, encoded: Mapping[str, Encoded], run: LiveRun) -> None:
    """Add the scheduler states that this process saves to a checkpoint part. Collective."""
    own = kept_here(run.host, run.rank, "schedulers", encoded, everywhere=False)
    if encoded:
        part.values["schedulers"] = {name: encoded[name].value["dict"] for name in encoded if name in own}
    for name in own:
        part.add("scheduler state", name, encoded[name].tensors)


class SchedulerChanges:
    """The states to load from a checkpoint into a run's schedulers. Nothing changes until ``apply`` is called.

    Raises CheckpointError if the saved states do not fit the schedulers.
    """

    def __init__(self, saved: SavedRun, schedulers: Mapping[str, Any]) -> None:
        states: Mapping[str, Any] = saved.values["schedulers"]
        self._changes = [(scheduler, _state(saved, states, name)) for name, scheduler in schedulers.items()]
        for name, (scheduler, entry) in zip(schedulers, self._changes, strict=True):
            kind = type(scheduler).__qualname__
            if entry["class"] != kind:
                raise CheckpointError(
                    f"a scheduler must load the state of its own class; for {name}, {saved.where} has the state of "
                    f"{entry['class']}, but {kind} was passed; pass {entry['class']}"
                )
        self.keys = {key for _, entry in self._changes for key in tensor_keys(entry["state"])}

    def apply(self, read: Callable[[str], Tensor], rollback: Rollback) -> None:
        """Load the states into the schedulers. ``read(key)`` returns the tensor with that key.

        Raises CheckpointError if a scheduler raises an error.
        """
        for scheduler, entry in self._changes:
            rollback.check()
            rollback.remember(scheduler.state_dict, scheduler.load_state_dict)
            try:
                scheduler.load_state_dict(decoded(entry["state"], read))
            except Exception as error:
                raise CheckpointError(
                    f"a scheduler must load the state that it saved; load_state_dict of {type(scheduler).__qualname__} "
                    f"raised {type(error).__name__}: {error}; leave scheduler= out, or load another checkpoint"
                ) from error


def _state(saved: SavedRun, states: Mapping[str, Any], name: str) -> Any:
    """Return the saved state of the scheduler with this name, or the common state if all saved states are identical."""
    plain = [entry for entry in states.values() if not tensor_keys(entry["state"])]
    first = next(iter(states.values()))
    if len(plain) == len(states) and all(entry == first for entry in plain):
        return first
    if name not in states:
        raise CheckpointError(
            f"scheduler states can be loaded for other stages only if all are identical; {saved.where} has different "
            f"states for {', '.join(states)}, and none for {name}; load them into a pipeline with the same stages, or "
            f"leave scheduler= out and make new schedulers"
        )
    return states[name]
