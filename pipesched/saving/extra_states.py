"""Extra states: the states of additional objects in a checkpoint, such as a data loader or averaged weights.

Some tensors in these states, such as averaged weights, have the name and shape of a parameter or buffer of the model.
The rank that owns the parameter or buffer saves such a tensor, and the ranks that need it under the new plan load it.
All other values must be identical on all ranks.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesched.checks import check_type, is_text, shown
from pipesched.errors import ArgumentError, CheckpointError, InputError
from pipesched.progress import advance
from pipesched.saving.common_values import Encoded, kept_here
from pipesched.saving.live_run import LiveRun
from pipesched.saving.names import model_name
from pipesched.saving.rollback import Rollback, noted
from pipesched.saving.saved_run import CheckpointPart, SavedRun
from pipesched.saving.saved_values import blank_reader
from pipesched.saving.state_encoding import Encoder, at_path, decoded, tensor_keys
from pipesched.saving.tensor_files import plain

__all__ = ["ExtraChanges", "as_extra", "capture_extra", "covering_own", "encoded_extra"]


@dataclass(frozen=True)
class _NamedTensor:
    """A tensor that has the name and shape of a parameter or buffer of the model."""

    path: tuple[Any, ...]
    key: str
    #: The name of the parameter or buffer.
    name: str
    tensor: Tensor


class _ExtraEncoder(Encoder):
    """Encodes values, and collects in ``leaves`` the tensors with the name and shape of one of the model's tensors."""

    def __init__(self, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(prefix)
        self._shapes = shapes
        self.leaves: list[_NamedTensor] = []

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        rest: dict[Any, Any] = {}
        for key, part in value.items():
            name = model_name(key, self._shapes) if type(key) is str else None
            is_named = isinstance(part, Tensor) and name is not None and self._shapes[name] == tuple(part.shape)
            if name is not None and is_named and all(type(step) in (str, int) for step in path):
                self.leaves.append(_NamedTensor(path, key, name, plain(part, f"{self._place(path)}[{key!r}]")))
            else:
                rest[key] = part
        return super()._mapping(rest, path)


@dataclass(frozen=True)
class _Extra:
    encoded: Encoded
    leaves: list[_NamedTensor] = field(default_factory=list)


def as_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the argument ``extra=`` of save or load, and return it as a dict."""
    extra = {} if extra is None else extra
    check_type(extra, Mapping, "extra must be a dict from names to objects or values", "pass a dict")
    for name in extra:
        check_type(name, str, "the names in extra must be strings", "pass a dict with string keys")
        if not is_text(name):
            raise InputError(f"the names in extra must be valid Unicode; got {shown(name)}; pass another name")
    return dict(extra)


def encoded_extra(extra: Mapping[str, Any], run: LiveRun) -> dict[str, _Extra]:
    """Encode each value or, if the value has a ``state_dict`` method, its state."""
    found = {}
    for name, value in extra.items():
        has_state = callable(getattr(value, "state_dict", None))
        encoder = _ExtraEncoder(f"extra/{name}", run.shapes)
        own = encoder.encoded(value.state_dict() if has_state else value)
        advance()
        content = {"dict": {"kind": "state" if has_state else "value", "value": own}}
        found[name] = _Extra(Encoded(content, encoder.tensors), encoder.leaves)
    return found


def covering_own(extra: Mapping[str, Any], run: LiveRun) -> dict[str, bool]:
    """Return, for each object, whether all its tensors with names of the model belong to this process's stages."""
    own = {*run.parameters, *run.buffers}
    return {name: {leaf.name for leaf in one.leaves} <= own for name, one in encoded_extra(extra, run).items()}


def capture_extra(part: CheckpointPart, extras: Mapping[str, _Extra], run: LiveRun) -> None:
    """Add to a checkpoint part the extra values that this process saves. Collective."""
    encoded = {name: extra.encoded for name, extra in extras.items()}
    own = kept_here(run.host, run.rank, "extra values", encoded, everywhere=True)
    saved = _leaves_saved(extras, run)
    if extras:
        part.values["extra"] = {name: encoded[name].value["dict"] for name in extras if name in own}
        part.values["extra leaves"] = {}
    for name, extra in extras.items():
        if name in own:
            part.add("extra state", name, extra.encoded.tensors)
        for leaf in extra.leaves:
            place = (name, leaf.path, leaf.key)
            if place in saved:
                key = "/".join(("extra", name, *map(str, leaf.path), leaf.key))
                part.add("extra state", name, {key: leaf.tensor})
                part.values["extra leaves"].setdefault(name, []).append([list(leaf.path), leaf.key, leaf.name, key])


def _leaves_saved(extras: Mapping[str, _Extra], run: LiveRun) -> set[Any]:
    """Return the leaves that this process saves, each as (name of the object, path, key).

    The owner of a parameter or buffer saves the leaf of that name. If the owner does not have the leaf, the first
    process that has the leaf saves it.
    """
    mine = {(name, leaf.path, leaf.key): leaf for name, extra in extras.items() for leaf in extra.leaves}
    known = run.host.collectives.gathered({place: run.is_own(leaf.name) for place, leaf in mine.items()})
    givers = {place: min((not own[place], rank) for rank, own in enumerate(known) if place in own)[1] for place in mine}
    return {place for place, giver in givers.items() if giver == run.rank}


class ExtraChanges:
    """The extra states of a checkpoint: ``states`` reads them, and ``apply`` loads them into the objects.

    Nothing changes until ``apply`` is called.

    Args:
        saved: the saved run.
        extra: the objects to load, keyed by name.
        run: the run into which the states are loaded.
        following: the names of objects that get the tensors of this process's stages, whatever they have now.
            Default: none.

    Raises:
        ArgumentError: an object has no load_state_dict method.
        CheckpointError: the checkpoint has no state for an object, or lacks a tensor that an object has.

    """

    def __init__(
        self, saved: SavedRun, extra: Mapping[str, Any], run: LiveRun, following: Collection[str] = ()
    ) -> None:
        self._objects = dict(extra)
        self._entries: Mapping[str, Any] = saved.values.get("extra", {})
        leaves: Mapping[str, Any] = saved.values.get("extra leaves", {})
        for name, value in extra.items():
            if name not in self._entries:
                raise CheckpointError(
                    f"a checkpoint must have a state for every object in extra; {saved.where} has no state for "
                    f"{name!r} (it has: {', '.join(map(repr, self._entries)) or 'none'}); leave that object out"
                )
            if not callable(getattr(value, "load_state_dict", None)):
                raise ArgumentError(
                    f"every object that is passed to load(extra=...) must have a load_state_dict method; {name!r} is "
                    f"{shown(value)}; leave it out, and read the saved value from the result: load(...).extra[{name!r}]"
                )
        self._leaves = {
            name: self._needed(saved, name, None if name in following else extra.get(name), leaves.get(name, ()), run)
            for name in self._entries
        }
        self.keys = {key for entry in self._entries.values() for key in tensor_keys(entry["value"])}
        self.keys |= {key for own in self._leaves.values() for _, _, key in own}
        self._check_leaves(saved)

    def _check_leaves(self, saved: SavedRun) -> None:
        """Raise CheckpointError if a leaf has no place in its state."""
        for name, own in self._leaves.items():
            if not own:
                continue
            state = decoded(self._entries[name]["value"], blank_reader(saved.entries))
            for path, *_ in own:
                if not isinstance(at_path(state, path), dict):
                    raise CheckpointError(
                        f"every tensor in extra= must have a place in its state; in {saved.where}, {name!r} has no "
                        f"dict at {path}; save the checkpoint again"
                    )

    @staticmethod
    def _needed(saved: SavedRun, name: str, value: Any, leaves: Any, run: LiveRun) -> list[tuple[list[Any], str, str]]:
        """Return the leaves of an object that this process needs, as (path, key in the object's state, tensor key).

        These are the leaves that the object has now. If the object has no leaves, these are the leaves with the names
        of this process's parameters and buffers.
        """
        now = None if value is None or not callable(getattr(value, "state_dict", None)) else value.state_dict()
        advance()
        needed = []
        for path in dict.fromkeys(tuple(path) for path, *_ in leaves):
            own = {own_name: (key, stored) for at, key, own_name, stored in leaves if tuple(at) == path}
            present = at_path(now, path)
            keys = [key for key in present if type(key) is str] if isinstance(present, dict) else []
            named = [(model_name(key, run.shapes), key) for key in keys]
            asked = {own_name: key for own_name, key in named if own_name is not None}
            for own_name in asked:
                if own_name not in own and isinstance(present[asked[own_name]], Tensor):
                    raise CheckpointError(
                        f"a checkpoint must hold every tensor that an object in extra has; {saved.where} has no tensor "
                        f"{own_name!r} for object {name!r}; load into an object that was built like the saved object"
                    )
            for own_name, (key, stored) in own.items():
                if own_name in asked if asked else run.is_own(own_name):
                    needed.append((list(path), asked.get(own_name, key), stored))
        return needed

    def states(self, read: Callable[[str], Tensor]) -> dict[str, Any]:
        """Return the decoded states and values, keyed by name. ``read(key)`` returns the tensor with that key."""
        found = {}
        for name, entry in self._entries.items():
            state = decoded(entry["value"], read)
            for path, key, stored in self._leaves[name]:
                at_path(state, path)[key] = read(stored)
            found[name] = state
        return found

    def apply(self, states: Mapping[str, Any], rollback: Rollback) -> None:
        """Load the states into the objects."""
        for name, value in self._objects.items():
            if callable(getattr(value, "state_dict", None)):
                rollback.remember(value.state_dict, value.load_state_dict)
            with noted(f"the object {name!r} in extra="):
                value.load_state_dict(states[name])
            rollback.check()
            advance()

    @property
    def left(self) -> list[str]:
        """The names of the saved objects for which no object was passed to ``load``."""
        return [name for name, entry in self._entries.items() if entry["kind"] == "state" and name not in self._objects]
