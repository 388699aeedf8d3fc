"""Optimizer states: the optimizer state and options of each parameter, keyed by the parameter's name.

Because the states are keyed by name, they do not depend on how parameters are distributed among optimizers. When a
checkpoint is loaded, each optimizer takes the states of its own parameters.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.checks import check_type
from pipesched.errors import CheckpointError, InputError
from pipesched.runtime.stage.optimizers import NO_SETTINGS, near
from pipesched.saving.live_run import LiveRun
from pipesched.saving.saved_run import Part, SavedRun
from pipesched.saving.state_encoding import Encoder, decoded, tensor_keys
from pipesched.units import and_more, counted

__all__ = ["GivenOptimizers", "OptimizerChanges", "as_optimizers", "capture_optimizers"]

#: The argument ``optimizer=`` of save and load.
GivenOptimizers = Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer]


def as_optimizers(given: GivenOptimizers | None, run: LiveRun) -> list[Optimizer]:
    """Return the optimizers of a run: those made by Pipeline's ``optimizer=``, or else those passed to save or load.

    Raises:
        InputError: an optimizer was passed that is not one of the pipeline's own.

    """
    if isinstance(given, Mapping):
        optimizers = list(given.values())
    else:
        values: Any = [] if given is None else given
        optimizers = list(values) if isinstance(values, list | tuple) else [values]
    for optimizer in optimizers:
        check_type(
            optimizer,
            Optimizer,
            "optimizer must be a torch.optim.Optimizer, or a list or dict of them",
            "pass the optimizer",
        )
    if run.optimizers is None:
        return optimizers
    own = list(run.optimizers.values())
    if any(optimizer not in own for optimizer in optimizers):
        raise InputError(
            f"a pipeline with optimizer= saves and loads its own optimizers; it has {counted(len(own), 'optimizer')}, "
            f"and a different optimizer was passed; leave optimizer= out of save and load"
        )
    return own


def _members(optimizer: Optimizer, run: LiveRun) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield (index of the group, name, parameter) for each parameter of the model in an optimizer.

    Skips the empty tensor that ``pipe.parameters()`` yields on a rank without parameters.
    """
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = run.names.get(id(parameter))
            if name is not None:
                yield index, name, parameter
            elif parameter.numel():
                raise CheckpointError(
                    f"an optimizer that is saved or loaded must hold only parameters of the pipeline; group {index} of "
                    f"{type(optimizer).__name__} holds another parameter, of shape {list(parameter.shape)}; make the "
                    f"optimizer from pipe.parameters()"
                )


def _check_states(optimizer: Optimizer) -> None:
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [key for key in optimizer.state if id(key) not in members]
    kind = type(optimizer).__name__
    if others or kind == "LBFGS":
        what = "one state for all parameters" if not others else f"a state for {others[0]!r}, which is not a parameter"
        raise CheckpointError(
            f"an optimizer must keep a separate state for each parameter, so that another plan can distribute the "
            f"states; {kind} has {what}; pass the optimizer in extra=, which can be loaded only on the same ranks"
        )


def capture_optimizers(part: Part, optimizers: Sequence[Optimizer], run: LiveRun) -> None:
    """Add to a checkpoint part the optimizer states of the parameters that this process trains."""
    groups: list[Any] = []
    parameters: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        _check_states(optimizer)
        first = len(groups)
        kind = type(optimizer).__qualname__
        for at, group in enumerate(optimizer.param_groups):
            encoder = Encoder(f"options of optimizer {index}, group {at}", inline=True)
            options = {key: value for key, value in group.items() if key not in NO_SETTINGS}
            groups.append({"place": [index, at], "class": kind, "options": encoder.encoded(options)})
        for at, name, parameter in _members(optimizer, run):
            if name not in run.parameters:
                continue  # another rank trains it
            if name in parameters:
                raise CheckpointError(
                    f"a parameter must be in only one optimizer; {name!r} is in two optimizers; remove it from one"
                )
            encoder = Encoder(f"optimizer/{name}")
            state = optimizer.state.get(parameter)
            entry: dict[str, Any] = {"group": first + at}
            if state:
                entry["state"] = encoder.encoded(state)
            parameters[name] = entry
            part.add("optimizer state", name, encoder.tensors)
    if optimizers:
        part.values["groups"] = groups
        part.values["parameters"] = parameters


@dataclass(frozen=True)
class _Change:
    """The new options of a parameter group, and the encoded states of the group's parameters."""

    optimizer: Optimizer
    group: dict[str, Any]
    options: Any
    states: list[tuple[nn.Parameter, Any]]


class OptimizerChanges:
    """The changes that loading a checkpoint makes to a run's optimizers. Nothing changes before ``apply``.

    Args:
        saved: the saved run.
        optimizers: the optimizers of this process.
        run: the run into which the states are loaded.

    Raises:
        CheckpointError: names, classes or options do not fit.

    """

    def __init__(self, saved: SavedRun, optimizers: Sequence[Optimizer], run: LiveRun) -> None:
        self._saved = saved
        self._groups: Sequence[Any] = saved.values["groups"]
        self._parameters: Mapping[str, Any] = saved.values.get("parameters", {})
        self._changes: list[_Change] = []
        taken: set[str] = set()
        for index, optimizer in enumerate(optimizers):
            _check_states(optimizer)
            members = list(_members(optimizer, run))
            for at, group in enumerate(optimizer.param_groups):
                held = [(name, parameter) for where, name, parameter in members if where == at]
                own = [(name, parameter) for name, parameter in held if name in run.parameters]
                twice = taken & {name for name, _ in own}
                if twice:
                    raise CheckpointError(
                        f"a parameter must be in only one optimizer; {min(twice)!r} is in two optimizers; remove it "
                        f"from one"
                    )
                taken |= {name for name, _ in own}
                self._check_class(optimizer, own)
                options = self._options([name for name, _ in held], (index, at), type(optimizer).__name__)
                states = [(parameter, self._parameters[name].get("state")) for name, parameter in own]
                self._changes.append(_Change(optimizer, group, options, states))
        self._check_all_taken(optimizers, taken, run)
        #: The keys of the tensors that ``apply`` reads.
        self.keys = {key for change in self._changes for _, state in change.states for key in tensor_keys(state)}

    def _check_class(self, optimizer: Optimizer, own: Sequence[tuple[str, Any]]) -> None:
        kind = type(optimizer).__qualname__
        for name, _ in own:
            if name not in self._parameters:
                raise CheckpointError(
                    f"every parameter of an optimizer must have an entry in the checkpoint; {self._saved.where} has no "
                    f"entry for {name!r}; make the optimizer from the parameters that the saved optimizer had"
                )
            was = self._groups[self._parameters[name]["group"]]["class"]
            if was != kind:
                raise CheckpointError(
                    f"an optimizer must load the state of its own class; {name!r} was trained by {was} in "
                    f"{self._saved.where}, but is now in an optimizer of class {kind}; use {was}"
                )

    def _options(self, names: Sequence[str], place: tuple[int, int], kind: str) -> Any:
        """Return the saved options of the parameters ``names``.

        If none of these parameters was saved, return the options of the saved group at ``place``.
        """
        known = [name for name in names if name in self._parameters]
        options = [self._groups[self._parameters[name]["group"]]["options"] for name in known]
        if not known:
            found = [group["options"] for group in self._groups if group["place"] == list(place)]
            options = found if found and all(map(_same(found[0]), found)) else []
        others = [at for at, one in enumerate(options) if not _same(options[0])(one)]
        if others and known:
            first, other = options[0]["dict"], options[others[0]]["dict"]
            keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
            raise CheckpointError(
                f"the parameters of a parameter group must have been saved with the same options; {known[0]!r} and "
                f"{known[others[0]]!r} are now in one group of {kind}, but in {self._saved.where}, {keys[0]} is "
                f"{first.get(keys[0])} for the first and {other.get(keys[0])} for the second; make the same parameter "
                f"groups as in the saved run"
            )
        return options[0] if options else None

    def _check_all_taken(self, optimizers: Sequence[Optimizer], taken: set[str], run: LiveRun) -> None:
        left = [name for name in self._parameters if name in run.parameters and name not in taken]
        if optimizers and left:
            raise CheckpointError(
                f"every parameter with a saved optimizer state must be in an optimizer; these are not: "
                f"{and_more(left)}; unfreeze frozen parameters before you make the optimizer, or pass the optimizer "
                f"that holds them"
            )

    def apply(self, read: Callable[[str], Tensor]) -> None:
        """Load the states and options into the optimizers. ``read(key)`` returns the tensor with that key."""
        for change in self._changes:
            if change.options is not None:
                for key, value in decoded(change.options, read).items():
                    now = change.group.get(key)
                    if isinstance(value, Tensor) and isinstance(now, Tensor):
                        value = value.to(now.device)  # noqa: PLW2901  such as a learning rate that is a tensor
                    change.group[key] = value
            for parameter, encoded in change.states:
                change.optimizer.state.pop(parameter, None)
                if encoded is not None:
                    state = decoded(encoded, read)
                    change.optimizer.state[parameter] = near(state, parameter, change.group)


def _same(one: Any) -> Callable[[Any], bool]:
    text = json.dumps(one, sort_keys=True)
    return lambda other: json.dumps(other, sort_keys=True) == text
