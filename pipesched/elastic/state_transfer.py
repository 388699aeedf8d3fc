"""State transfer: moves the state of a run to the processes that need it under another plan. Nothing is written.

The state is described as in a checkpoint: tensors with entries, and plain values (`pipesched.saving`). All processes
exchange these descriptions, which are small. Then they send the tensors, in bounded rounds, to the processes that
lack them. A restored checkpoint and a moved state are loaded by the same code (`pipesched.saving.restoring`); they
differ only in where a tensor is read from.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.elastic.transfer_plan import HeldRows, Message, messages_for, rounds_of
from pipesched.runtime.collectives import RankCollectives
from pipesched.runtime.stage.optimizers import NumberedGroup
from pipesched.saving.capturing import captured
from pipesched.saving.chunks import Rows
from pipesched.saving.live_run import LiveRun
from pipesched.saving.manifest import TensorEntry
from pipesched.saving.optimizer_states import saved_groups
from pipesched.saving.saved_run import CheckpointPart, SavedRun, merged, merged_entries
from pipesched.saving.tensor_files import dtype_of

__all__ = ["GRADIENT", "HeldState", "MovedTensors", "held_in_parts", "held_state"]

#: The kind of the gradients that move with their parameters. Checkpoints have no gradients.
GRADIENT = "gradient"
_ROUND_BYTES = 64 << 20  # the number of bytes that a process sends, or receives, before the next round begins
_WHERE = "the state of the plan before"


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """The state of a run as all processes of a plane hold it, and the tensors that this process holds."""

    #: The state, with the entries and values of all processes.
    saved: SavedRun
    #: The rows of each tensor, and the processes that hold them, in the order in which a run loads them.
    held: Mapping[str, Sequence[HeldRows]]
    #: The tensors of this process. They share memory with the run's tensors.
    own: CheckpointPart

    def arriving(
        self, run: LiveRun, parameters: Mapping[str, nn.Parameter]
    ) -> dict[int, dict[nn.Parameter, NumberedGroup]]:
        """Return the parameter groups of parameters that other processes have trained, by the optimizer's index.

        Args:
            run: the run before the change.
            parameters: all parameters of the model, keyed by name.

        """
        others = {name: parameter for name, parameter in parameters.items() if name not in run.parameters}
        found: dict[int, dict[nn.Parameter, NumberedGroup]] = {}
        for index, number, name, settings in saved_groups(self.saved):
            if name in others:
                group = {**settings, "params": [others[name]], "param_names": [name]}
                found.setdefault(index, {})[others[name]] = NumberedGroup(group, number)
        return found


def held_state(run: LiveRun, optimizer: Any, scheduler: Any, extra: Mapping[str, Any] | None) -> HeldState:
    """Describe the state that all processes of this plane hold. Collective. Raises the errors of `Pipeline.save`."""
    common, own = captured(run, optimizer, scheduler, extra)
    for name, parameter in run.parameters.items():
        if parameter.grad is not None:
            common.add(GRADIENT, name, {f"{GRADIENT}/{name}": parameter.grad})
    return held_in_parts(run, [common, own])


def held_in_parts(run: LiveRun, own: Sequence[CheckpointPart]) -> HeldState:
    """Describe the state that all processes of this plane hold. Collective.

    Several processes may hold the same part, such as the replicas of a stage, or parts that overlap. Each value counts
    once.

    Args:
        run: the run.
        own: the parts that this process holds.

    """
    every = run.host.collectives.gathered_in_plane((run.replica, [_described(part) for part in own]))
    parts: list[dict[str, TensorEntry]] = []
    values: list[Any] = []
    held: dict[str, list[HeldRows]] = {}
    first: set[tuple[str, Rows | None]] = set()
    for process, (replica, described) in every.items():
        for part in described:
            entries = {key: TensorEntry.from_dict(entry) for key, entry in part["entries"].items()}
            _add_holder(held, entries, process)
            new = {key: entry for key, entry in entries.items() if (key, _rows(entry)) not in first}
            first.update((key, _rows(entry)) for key, entry in new.items())
            parts.append({key: entry.in_file(str(process)) for key, entry in new.items()})
            values.append(_without(values, part["values"]) if new or not (entries or replica) else {})
    entries = merged_entries(parts, _WHERE)
    order = sorted(entries, key=lambda key: _ORDER.index(entries[key].kind))
    saved = SavedRun(where=_WHERE, facts=run.facts, entries=entries, values=merged(values, _WHERE), read=_unread)
    return HeldState(saved=saved, held={key: held[key] for key in order}, own=_joined(own))


def _without(known: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a part without those of parameters that earlier parts have."""
    earlier = {name for own in known for name in own.get("parameters", ())}
    left = {name: own for name, own in values.get("parameters", {}).items() if name not in earlier}
    return {**values, "parameters": left} if "parameters" in values else dict(values)


def _joined(parts: Sequence[CheckpointPart]) -> CheckpointPart:
    """Return one part with the tensors of all parts."""
    joined = CheckpointPart()
    for part in parts:
        joined = joined.joined(part)
    return joined


#: The kinds of tensors in the order in which a run loads them: first the states that the user's code loads.
_ORDER = ("extra state", "module state", "scheduler state", "parameter", "buffer", "optimizer state", GRADIENT)


def _described(part: CheckpointPart) -> dict[str, Any]:
    return {"entries": {key: entry.to_dict() for key, entry in part.entries.items()}, "values": part.values}


def _rows(entry: TensorEntry) -> Rows | None:
    """Return the rows that a process holds of a tensor; None if it holds the whole tensor."""
    return entry.chunks[0].rows if entry.chunks else None


def _add_holder(held: dict[str, list[HeldRows]], entries: Mapping[str, TensorEntry], process: int) -> None:
    for key, entry in entries.items():
        rows, pieces = _rows(entry), held.setdefault(key, [])
        at = next((at for at, piece in enumerate(pieces) if piece.rows == rows), None)
        if at is None:
            sizes = entry.chunks[0].sizes if entry.chunks else entry.shape
            pieces.append(HeldRows(rows=rows, nbytes=prod(sizes) * dtype_of(entry.dtype).itemsize, holders=(process,)))
        else:
            pieces[at] = replace(pieces[at], holders=(*pieces[at].holders, process))


def _unread(key: str, rows: Rows | None = None) -> Tensor:
    raise AssertionError(f"{key} was read before it was moved")


class MovedTensors:
    """The tensors of a run, sent by the processes that hold them when this process reads them.

    Args:
        state: the state of the run.
        collectives: exchange the tensors.
        process: this process's rank among the processes of all replicas.
        needed: the rows of each tensor that this process loads (None: the whole tensor). Collective.

    """

    def __init__(
        self, state: HeldState, collectives: RankCollectives, process: int, needed: Mapping[str, Rows | None]
    ) -> None:
        self._state = state
        self._collectives = collectives
        self._process = process
        every = collectives.gathered_in_plane(
            {key: None if rows is None else tuple(rows) for key, rows in needed.items()}
        )
        asked = {
            process: {key: None if rows is None else Rows(*rows) for key, rows in own.items()}
            for process, own in every.items()
        }
        #: All messages of this transfer.
        self.messages: list[Message] = messages_for(state.held, asked)
        self._rounds = deque(rounds_of(self.messages, _ROUND_BYTES))
        self._arrived: dict[tuple[str, Rows | None], Tensor] = {}

    def read(self, key: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor or some of its rows. A part that another process sends can be read only once."""
        pieces = [self._piece(key, held, held.part(rows)) for held in self._state.held[key]]
        found = [piece for piece in pieces if piece is not None]
        if len(found) == 1:
            return found[0]
        device = next((piece.device for piece in found if not piece.is_cpu), found[0].device)  # what arrives is on CPUs
        return torch.cat([piece.to(device) for piece in found])

    def _piece(self, key: str, held: HeldRows, rows: Rows | None) -> Tensor | None:
        if rows is not None and rows.start == rows.end:
            return None
        if self._process in held.holders:
            return self._own(key, rows)
        while (key, rows) not in self._arrived:
            self._run_round()
        return self._arrived.pop((key, rows))

    def _own(self, key: str, rows: Rows | None) -> Tensor:
        tensor = self._state.own.tensors[key]
        if rows is None:
            return tensor
        entry = self._state.own.entries[key]
        start = entry.chunks[0].rows.start if entry.chunks else 0
        return tensor[rows.start - start : rows.end - start]

    def finish(self) -> None:
        """Send everything that other processes still need."""
        while self._rounds:
            self._run_round()

    def _run_round(self) -> None:
        messages = self._rounds.popleft()
        given: dict[int, list[Tensor]] = {}
        due: dict[int, list[Message]] = {}
        for message in messages:
            if message.source == self._process:
                given.setdefault(message.target, []).append(self._own(message.key, message.rows))
            if message.target == self._process:
                due.setdefault(message.source, []).append(message)
        arrived = self._collectives.trade_in_all("the state of a run", given, due)
        for source, sent in due.items():
            for message, tensor in zip(sent, arrived[source], strict=True):
                self._arrived[message.key, message.rows] = tensor
