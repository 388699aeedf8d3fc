"""Paths: the ways that micro-batches take through the code between layers, each with its own capture.

The code between layers may branch on the model's inputs, such as on whether a mask has a zero, and on random numbers.
Path 0 is the path of the sample. Before a step, each micro-batch's path is found from its inputs and its random key
alone, so all ranks find the same paths without a message.

- A guard repeats what a known path read from micro-batches of the same form, which takes a fraction of a millisecond.
- If no guard holds, a scout runs the code between layers. If the scout makes the calls of no known path, its
  record becomes a new path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pipesched.capture.capture import Capture
from pipesched.capture.code_draws import CodeDraws
from pipesched.capture.guard import Guard, guard_of
from pipesched.capture.recorder import record
from pipesched.capture.recording import Recording
from pipesched.capture.scouting import Form, LayerForms, Scout, form_of_call
from pipesched.errors import GraphError
from pipesched.model.containers import MetaTwin
from pipesched.tensors.keyed_random import Key, KeyedRandom
from pipesched.tensors.payload import flatten
from pipesched.tensors.tree_structure import named_leaves, positional

__all__ = ["MOST_PATHS", "BatchPaths", "Paths"]

#: The number of captures that are kept. Of more paths, those used least recently are forgotten, and found again when
#: needed.
MOST_PATHS = 128
_MOST_FORMS = 4096
_MOST_GUARDS = 128  # for each form


@dataclass(frozen=True)
class BatchPaths:
    """The paths of the micro-batches of a batch, as one rank finds them and sends them to the others."""

    #: The path of each micro-batch; empty if all take the path of the sample.
    paths: list[int] = field(default_factory=list)
    #: (path, inputs, random key) of the first micro-batch on each new path.
    new: list[tuple[int, Any, tuple[int, ...]]] = field(default_factory=list)
    #: The paths that were forgotten before this batch.
    forgotten: list[int] = field(default_factory=list)

    def of_part(self, part: slice) -> "BatchPaths":
        """Return the same paths for a part of the micro-batches."""
        return replace(self, paths=self.paths[part])


class Paths:
    """The paths of a model in one mode.

    Args:
        model: the user's module.
        layers: layer name -> layer.
        mode: True for training mode, False for evaluation mode.
        recording: the recording of the sample in this mode.
        sample: the arguments (args, kwargs) that were recorded.
        check: raises GraphError if the stages cannot run the path of a capture.

    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        mode: bool,
        recording: Recording,
        sample: tuple[tuple[Any, ...], dict[str, Any]],
        check: Callable[[Capture], None],
    ) -> None:
        self._model = model
        self._layers = layers
        self._mode = mode
        self._recording = recording
        self._check = check
        self._names = positional(model.forward)
        self._random = KeyedRandom(torch.device("cpu"))
        self._forms = LayerForms.of(recording.capture, layers)
        self._twin: MetaTwin | None = None
        #: The shapes of the whole weights. Later, a replica may hold only some of their rows.
        self._shapes: dict[torch.Tensor, torch.Size] = {own: own.shape for own in model.parameters()}
        self._buffers = {name for name, _ in model.named_buffers()}
        #: path -> capture. Numbers are never used again.
        self.captures: dict[int, Capture] = {0: recording.capture}
        self._number_of: dict[Any, int] = {recording.capture.way: 0}
        self._next = 1
        #: path -> the number of the last batch that used the path
        self._used: dict[int, int] = {}
        self._num_batches = 0
        self._guards: dict[Form, list[tuple[Guard, int]]] = {}
        #: (layer, attribute) that the code between layers reads -> the value when the guards were made
        self._attributes: dict[tuple[str, str], Any] = {}
        self._note_attributes(recording.capture)
        leaves, spec = flatten(sample)
        self._keep_guard(form_of_call(leaves, spec), recording.capture, 0, sample)
        #: The number of scouting runs so far.
        self.scouted = 0

    def find(self, batch: Sequence[Any], first: Key) -> BatchPaths:
        """Return the paths of a batch's micro-batches.

        Args:
            batch: the inputs (args, kwargs) of each micro-batch.
            first: the random key of the first micro-batch.

        Raises:
            GraphError: the stages cannot run the path of a micro-batch.

        """
        forgotten = self._too_old(len(batch))
        self._forget(forgotten)
        self._follow_attributes()
        paths: list[int] = []
        new: list[tuple[int, Any, tuple[int, ...]]] = []
        for number, (args, kwargs) in enumerate(batch):
            key = first._replace(microbatch=first.microbatch + number)
            before = self._next
            path = self._path_of(args, kwargs, key)
            self._used[path] = self._num_batches
            paths.append(path)
            if self._next > before:
                new.append((path, (args, kwargs), tuple(key)))
        self._num_batches += 1
        return BatchPaths(paths if any(paths) else [], new, forgotten)

    def learn(self, found: BatchPaths) -> None:
        """Follow the paths that another rank has found. Raises GraphError if this rank finds other paths."""
        self._forget(found.forgotten)
        self._follow_attributes()
        for path, (args, kwargs), key in found.new:
            own = self._path_of(args, kwargs, Key(*key))
            if own != path:
                raise GraphError(
                    f"all ranks must find the same path for a micro-batch; rank 0 found path {path}, and this rank "
                    f"found path {own}; give the model the same attributes and mode on every rank"
                )

    def _note_attributes(self, capture: Capture) -> None:
        """Record the current values of the layers' attributes that the code of a path reads."""
        self._attributes.update(((name, key), self._value(name, key)) for name, key in capture.attributes_read)

    def _follow_attributes(self) -> None:
        """Forget the guards if the user has changed such an attribute, because the code may branch on it."""
        now = {(name, key): self._value(name, key) for name, key in self._attributes}
        if now != self._attributes:
            self._guards.clear()
            self._attributes = now

    def _value(self, layer: str, attribute: str) -> Any:
        return vars(self._layers[layer]).get(attribute)

    def _too_old(self, num_microbatches: int) -> list[int]:
        """Return the paths to forget. The paths of the last batches stay, because their steps may still run."""
        by_age = sorted((path for path in self.captures if path), key=lambda path: self._used.get(path, 0))
        return by_age[: max(0, len(by_age) - max(MOST_PATHS, 4 * num_microbatches))]

    def _forget(self, paths: Sequence[int]) -> None:
        for path in paths:
            dropped = self.captures.pop(path)
            self._used.pop(path, None)
            if self._number_of.get(dropped.way) == path:  # a path with more queries may have taken the place
                del self._number_of[dropped.way]

    def _path_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key) -> int:
        leaves, spec = flatten((args, kwargs))
        form = form_of_call(leaves, spec)
        draws = CodeDraws(self._random, key)
        for guard, path in self._guards.get(form, ()) if form is not None else ():
            if path in self.captures and guard.holds(leaves, draws):
                return path
        capture = self._scouted(args, kwargs, draws)
        if capture is None:
            return 0  # the stages raise an error if the micro-batch takes another path
        known = self._number_of.get(capture.way)
        is_known = known is not None and capture.queries_within(self.captures[known])
        path = known if known is not None and is_known else self._add(capture)
        self._keep_guard(form, capture, path, (args, kwargs))
        capture.functions.clear()
        capture.examples.clear()
        capture.results.clear()
        return path

    def _add(self, capture: Capture) -> int:
        known = {key for one in self.captures.values() for key in one.changed}
        if strange := [(module, name) for module, name in capture.changed if (module, name) not in known]:
            module, name = strange[0]
            raise GraphError(
                f"code between layers must not carry state from one forward to the next; for this batch, "
                f"{type(module).__name__} sets its attribute {name!r}, which it does not set for the sample; keep the "
                f"state in a layer, in another module that the forward calls, or in a buffer that is changed in place"
            )
        self._check(capture)
        self._note_attributes(capture)
        if (same := self._number_of.get(capture.way)) is not None:
            capture.quiet |= self.captures[same].quiet
            capture.looked_at |= self.captures[same].looked_at
        path = self._next
        self._next += 1
        self.captures[path] = capture
        self._number_of[capture.way] = path
        return path

    def _keep_guard(self, form: Form | None, capture: Capture, path: int, inputs: Any) -> None:
        names = [name for name, _ in named_leaves(self._names, *inputs)]
        if form is None or len(names) != len(form) - 1:
            return
        guard = guard_of(capture, names)
        if guard is None:
            return
        if len(self._guards) >= _MOST_FORMS:
            self._guards.clear()
        known = self._guards.setdefault(form, [])
        if len(known) < _MOST_GUARDS:
            known.append((guard, path))

    def _scouted(self, args: tuple[Any, ...], kwargs: dict[str, Any], draws: CodeDraws) -> Capture | None:
        """Run the code between layers on a micro-batch; return its capture, or None if it needs values of layers."""
        self.scouted += 1
        if self._twin is None:
            self._twin = MetaTwin(self._model, self._shapes)
        else:
            self._twin.refresh()
        twin = self._twin
        layers = {name: twin.of(layer) for name, layer in self._layers.items()}
        made = {name for name, _ in twin.layer.named_buffers()} - self._buffers
        scout = Scout(draws, self._forms, self.captures)
        try:
            with torch.enable_grad() if self._mode else torch.no_grad():
                capture = record(twin.layer, layers, args, kwargs, made=made, scout=scout)
        except Exception:  # the stages raise the error of the user's code
            return None
        capture.changed = {(twin.original(module), name): value for (module, name), value in capture.changed.items()}
        capture.outside = self._recording.capture.outside - {""} | ({""} if draws.drew_outside else set())
        return capture
