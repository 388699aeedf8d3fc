"""Optimizer states: the optimizer state and options of each parameter, keyed by the parameter's name.

Because the states are keyed by name, they do not depend on how parameters are distributed among optimizers. When a
checkpoint is loaded, each optimizer gets the states of its own parameters, or of its own rows of a parameter.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.checks import check_type, shown
from pipesched.errors import CheckpointError, InputError
from pipesched.runtime.stage.elementwise import check_elementwise
from pipesched.runtime.stage.optimizers import NO_SETTINGS, near
from pipesched.saving.chunks import Rows
from pipesched.saving.live_run import LiveRun
from pipesched.saving.rollback import Rollback
from pipesched.saving.saved_run import CheckpointPart, Read, SavedRun
from pipesched.saving.state_encoding import Encoder, decoded, tensor_keys
from pipesched.units import and_more, counted

__all__ = ["GivenOptimizers", "OptimizerChanges", "as_optimizers", "capture_optimizers", "saved_groups"]

#: The argument ``optimizer=`` of save and load.
GivenOptimizers = Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer]


def as_optimizers(given: GivenOptimizers | None, run: LiveRun) -> list[Optimizer]:
    """Return a run's optimizers: those that Pipeline made (``optimizer=``) or, if none, those passed to save or load.

    Raises:
        InputError: the pipeline has its own optimizers, and another optimizer was passed.

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


@dataclass(frozen=True)
class _Member:
    """A parameter of the model that belongs to an optimizer."""

    #: The index of the parameter group.
    group: int
    name: str
    #: The key in ``optimizer.state``: the parameter, or this replica's rows of the parameter. None if only other
    #: replicas update the parameter.
    key: nn.Parameter | None
    #: The rows that this replica updates; None if replicas do not split the rows of the parameter.
    rows: Rows | None = None


def _members(optimizer: Optimizer, run: LiveRun) -> Iterator[_Member]:
    """Yield the parameters of the model that an optimizer updates.

    If the update is split across replicas, also yields the parameters that only other replicas update. Skips the empty
    tensor that ``pipe.parameters()`` yields on a rank without parameters.
    """
    update = run.division_of(optimizer)
    groups = [group["params"] for group in optimizer.param_groups] if update is None else update.groups
    if len(groups) < len(optimizer.param_groups):
        raise CheckpointError(
            f"with zero=, the parameter groups of a saved or loaded optimizer must be those it was made with; "
            f"{type(optimizer).__name__} was made with {counted(len(groups), 'group')}, and now has "
            f"{len(optimizer.param_groups)}; make all groups in optimizer=, or leave zero= out"
        )
    for index, parameters in enumerate(groups):
        for parameter in parameters:
            name = run.names.get(id(parameter))
            if name is not None and update is None:
                yield _Member(index, name, parameter)
            elif name is not None and update is not None:
                rows = update.own_rows(parameter)
                yield _Member(index, name, update.local.get(parameter), None if rows is None else Rows(*rows))
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
            f"states; {kind} has {what}; pass the optimizer in extra=, and load the checkpoint only on the same ranks"
        )


def _check_blocks(optimizer: Optimizer, run: LiveRun) -> None:
    """Raise ModelTypeError if an optimizer cannot update the blocks of weights that this process holds."""
    if run.split is not None:
        split = {parameter: name for name, parameter in run.parameters.items() if name in run.split}
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        check_elementwise(optimizer, held, split)


def capture_optimizers(
    common: CheckpointPart, own: CheckpointPart, optimizers: Sequence[Optimizer], run: LiveRun
) -> None:
    """Add to checkpoint parts the optimizer states of the parameters that this process trains.

    Args:
        common: the part to which states that all replicas hold are added.
        own: the part to which states that only this replica holds are added.
        optimizers: the optimizers of this process.
        run: the running pipeline.

    """
    groups: list[Any] = []
    parameters: dict[str, Any] = {}
    alone: dict[str, Any] = {}  # the parameters that only this replica updates
    for index, optimizer in enumerate(optimizers):
        _check_states(optimizer)
        _check_blocks(optimizer, run)
        first = len(groups)
        kind = type(optimizer).__qualname__
        for at, group in enumerate(optimizer.param_groups):
            encoder = Encoder(f"options of optimizer {index}, group {at}", inline=True)
            groups.append({"place": [index, at], "class": kind, "options": encoder.encoded(_settings(group))})
        is_divided = run.division_of(optimizer) is not None
        for member in _members(optimizer, run):
            name = member.name
            if name not in run.parameters or member.key is None:
                continue  # another rank or another replica trains this parameter
            if name in parameters or name in alone:
                raise CheckpointError(
                    f"a parameter must be in only one optimizer; {name!r} is in two optimizers; remove it from one"
                )
            encoder = Encoder(f"optimizer/{name}")
            state = optimizer.state.get(member.key)
            entry: dict[str, Any] = {"group": first + member.group}
            if state:
                entry["state"] = encoder.encoded(state)
            if member.rows is not None:
                parameters[name] = entry
                _add_rows(common, own, member, encoder.tensors, run)
            elif is_divided:
                alone[name] = entry
                own.add("optimizer state", name, encoder.tensors)
            else:
                parameters[name] = entry
                common.add("optimizer state", name, encoder.tensors)
    if optimizers:
        common.values |= {"groups": groups, "parameters": parameters}
    if alone:
        own.values |= {"groups": groups, "parameters": alone}


def _add_rows(
    common: CheckpointPart, own: CheckpointPart, member: _Member, tensors: Mapping[str, Tensor], run: LiveRun
) -> None:
    """Add the states of this replica's rows of a parameter to ``own``, and the scalar states to ``common``.

    All replicas hold the same scalar states.
    """
    assert member.rows is not None
    assert member.key is not None
    shape = run.shapes[member.name]
    scalars = {key: tensor for key, tensor in tensors.items() if not tensor.dim()}
    rows = {key: tensor for key, tensor in tensors.items() if tensor.dim()}
    for key, tensor in rows.items():
        if tensor.shape != member.key.shape:
            raise CheckpointError(
                f"with zero=, the states of an optimizer must have the shape of their parameter, or be scalars; "
                f"{key!r} has shape {list(tensor.shape)}, but this replica's rows of {member.name!r} have shape "
                f"{list(member.key.shape)}; leave zero= out"
            )
    common.add("optimizer state", member.name, scalars)
    own.add_rows("optimizer state", member.name, rows, member.rows, shape[0])


@dataclass(frozen=True)
class _Change:
    """The new options of a parameter group, and the encoded states of the group's parameters."""

    optimizer: Optimizer
    group: dict[str, Any]
    options: Any
    states: list[tuple[_Member, Any]]


class OptimizerChanges:
    """The changes that loading a checkpoint makes to a run's optimizers. Nothing changes until ``apply`` is called.

    Args:
        saved: the saved run.
        optimizers: the optimizers of this process.
        run: the run into which the states are loaded.

    Raises:
        CheckpointError: saved names, classes or options do not fit the optimizers.

    """

    def __init__(self, saved: SavedRun, optimizers: Sequence[Optimizer], run: LiveRun) -> None:
        self._saved = saved
        self._groups: Sequence[Any] = saved.values["groups"]
        self._parameters: Mapping[str, Any] = saved.values.get("parameters", {})
        self._changes: list[_Change] = []
        taken: set[str] = set()
        for index, optimizer in enumerate(optimizers):
            _check_states(optimizer)
            _check_blocks(optimizer, run)
            members = list(_members(optimizer, run))
            for at, group in enumerate(optimizer.param_groups):
                held = [member for member in members if member.group == at]
                own = [member for member in held if member.name in run.parameters]
                twice = taken & {member.name for member in own}
                if twice:
                    raise CheckpointError(
                        f"a parameter must be in only one optimizer; {min(twice)!r} is in two optimizers; remove it "
                        f"from one"
                    )
                taken |= {member.name for member in own}
                self._check_class(optimizer, [one.name for one in own], run)
                options = self._options([member.name for member in held], (index, at), type(optimizer).__name__)
                self._check_options(optimizer, group, options)
                states = [(one, self._parameters.get(one.name, {}).get("state")) for one in own if one.key is not None]
                self._changes.append(_Change(optimizer, group, options, states))
        self._check_all_taken(optimizers, taken, run)
        #: Key of each tensor that ``apply`` reads -> the rows to read (None: all rows).
        self.needed: dict[str, Rows | None] = {}
        for change in self._changes:
            for member, state in change.states:
                self.needed |= {key: self._rows(member, key, run) for key in tensor_keys(state)}

    def _rows(self, member: _Member, key: str, run: LiveRun) -> Rows | None:
        """Return the rows of a parameter's saved state that this replica loads; None for the whole state."""
        entry = self._saved.entries.get(key)
        if member.rows is None or entry is None or not entry.shape:
            return None
        if entry.shape != run.whole_shape(member.name):
            raise CheckpointError(
                f"with zero=, the states of an optimizer must have the shape of their parameter, or be scalars; "
                f"{key!r} has shape {list(entry.shape)} in {self._saved.where}, but the parameter has shape "
                f"{list(run.whole_shape(member.name))}; leave zero= out"
            )
        return member.rows

    def _check_class(self, optimizer: Optimizer, names: Sequence[str], run: LiveRun) -> None:
        kind = type(optimizer).__qualname__
        for name in names:
            if name not in self._parameters and not run.parameters[name].requires_grad:
                continue  # this parameter was saved in a stage of frozen layers, without an optimizer
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
        own = [name for name in self._parameters if name in run.parameters and name not in taken]
        left = [name for name in own if "state" in self._parameters[name] or run.parameters[name].requires_grad]
        if optimizers and left:
            raise CheckpointError(
                f"every parameter with a saved optimizer state must be in an optimizer; these are not: "
                f"{and_more(left)}; unfreeze frozen parameters before you make the optimizer, or pass the optimizer "
                f"that holds them"
            )

    def _check_options(self, optimizer: Optimizer, group: Mapping[str, Any], options: Any) -> None:
        """Raise CheckpointError if an option that is a number was saved as text or as a collection."""
        for key, value in decoded(options or {"dict": {}}, _no_tensor).items():
            if isinstance(group.get(key), int | float | Tensor) and isinstance(value, str | list | dict):
                raise CheckpointError(
                    f"the options of an optimizer must be saved with their types; {key} of {type(optimizer).__name__} "
                    f"is {shown(value)} in {self._saved.where}, but {shown(group[key])} now; save the checkpoint again"
                )

    def apply_options(self, rollback: Rollback) -> None:
        """Load the options into the parameter groups."""
        for change in self._changes:
            rollback.then(_replace, change.group, dict(change.group))
            for key, value in decoded(change.options or {"dict": {}}, _no_tensor).items():
                now = change.group.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor):
                    value = value.to(now.device)  # noqa: PLW2901  such as a learning rate that is a tensor
                change.group[key] = value

    def apply_states(self, read: Read) -> None:
        """Load the states into the optimizers. ``read(key)`` returns the tensor with that key."""
        for change in self._changes:
            for member, encoded in change.states:
                assert member.key is not None
                change.optimizer.state.pop(member.key, None)
                if encoded is not None:
                    state = decoded(encoded, lambda key: read(key, self.needed[key]))
                    change.optimizer.state[member.key] = near(state, member.key, change.group)


def saved_groups(saved: SavedRun) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    """Yield the place of each parameter of a saved run: (optimizer, number of the group, name, settings of the group).

    ``optimizer`` is the optimizer's index.
    """
    groups = saved.values.get("groups", ())
    for name, entry in saved.values.get("parameters", {}).items():
        group = groups[entry["group"]]
        yield *group["place"], name, decoded(group["options"], _no_tensor)


def _no_tensor(key: str) -> Tensor:
    raise CheckpointError(f"the options of an optimizer must be saved without tensor files; got {key!r}; save again")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NO_SETTINGS}


def _replace(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    group.clear()
    group.update(before)


def _same(one: Any) -> Callable[[Any], bool]:
    text = json.dumps(one, sort_keys=True)
    return lambda other: json.dumps(other, sort_keys=True) == text
