"""Split states: the states of weights that the ranks of a tensor group divide. A checkpoint holds whole tensors.

So a run can continue with tensor groups of any size, with none, or in plain PyTorch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipesched.errors import CheckpointError
from pipesched.parallel.weight_split import SplitWeights
from pipesched.runtime.gradients.shards import row_cuts
from pipesched.runtime.stage.sharded_update import ShardedUpdate
from pipesched.saving.chunks import Chunk, Rows
from pipesched.saving.live_run import LiveRun
from pipesched.saving.manifest import TensorEntry
from pipesched.saving.saved_run import CheckpointPart, Read, SavedRun
from pipesched.saving.whole_tensors import NO_WHOLE_TENSORS, WholeTensor, WholeTensors

__all__ = ["OwnBlocks", "whole_part", "whole_weights"]


def whole_part(part: CheckpointPart, run: LiveRun) -> CheckpointPart:
    """Return a part of a checkpoint with the entries of whole tensors, and how they are made of this process's blocks.

    Raises CheckpointError for a state that is neither a scalar nor has the shape of its parameter.
    """
    split = run.split
    if split is None:
        return part
    entries = dict(part.entries)
    made = {}
    for key, name in _names(entries, part.values, split).items():
        entry = entries[key]
        if entry.shape:
            if entry.shape != run.shapes[name]:
                raise _odd(key, entry.shape, name, run.shapes[name], "this rank")
            entries[key], made[key] = _whole(entry, part.tensors[key], name, run, split)
    return CheckpointPart(part.tensors, entries, part.values, WholeTensors(part.tensors, made))


def whole_weights(weights: Mapping[str, Tensor], run: LiveRun) -> WholeTensors:
    """Return how the whole weights are made of those that this process holds, keyed by name."""
    split = run.split
    if split is None:
        return NO_WHOLE_TENSORS
    names = [name for name in weights if name in split]
    made = {name: partial(split.whole, name, weights[name].detach()) for name in names}
    return WholeTensors(weights, {name: WholeTensor(run.whole_shape(name), make) for name, make in made.items()})


def _names(entries: Mapping[str, TensorEntry], values: Mapping[str, Any], split: SplitWeights) -> dict[str, str]:
    """Return the name of the divided weight to which a tensor belongs, keyed as in the checkpoint."""
    found = {key: one.name for key, one in entries.items() if one.kind in ("parameter", "optimizer state")}
    for leaves in values.get("extra leaves", {}).values():
        found |= {key: name for *_, name, key in leaves if key in entries}
    return {key: name for key, name in found.items() if name in split}


def _odd(key: str, shape: Sequence[int], name: str, due: Sequence[int], where: str) -> CheckpointError:
    return CheckpointError(
        f"the states of a weight that tensor_parallel= splits must have the shape of the weight, or be scalars; "
        f"{key!r} has shape {list(shape)}, but {name!r} has shape {list(due)} on {where}; use an optimizer that "
        f"updates each element independently, or leave this weight out of tensor_parallel="
    )


def _whole(
    entry: TensorEntry, tensor: Tensor, name: str, run: LiveRun, split: SplitWeights
) -> tuple[TensorEntry, WholeTensor]:
    """Return the entry of the whole tensor, and how the part of it that this process saves is made."""
    shape = split.whole_shape(name, entry.shape)
    if not entry.chunks:
        return replace(entry, shape=shape), WholeTensor(shape, lambda: split.whole(name, tensor))
    if not split[name].divides_rows:
        rows = entry.chunks[0].rows
        make = partial(split.whole, name, tensor)
    else:
        cuts = row_cuts(shape, len(run.host.grid.rows))
        assert cuts is not None  # the block has fewer rows, and is cut
        rows = Rows(*cuts[run.replica])
        make = partial(_rows_of_whole, tensor, name, run, split, rows)
    sizes = (rows.end - rows.start, *shape[1:])
    chunk = Chunk(file="", offsets=(rows.start, *[0] * (len(shape) - 1)), sizes=sizes)
    return replace(entry, shape=shape, chunks=(chunk,)), WholeTensor(sizes, make)


def _rows_of_whole(tensor: Tensor, name: str, run: LiveRun, split: SplitWeights, rows: Rows) -> Tensor:
    """Return rows of a whole tensor, given this replica's rows of this plane's block.

    Collective over the replicas, and over the tensor group.
    """
    parameter, update = _update_of(name, run)
    block = tensor.new_empty(run.shapes[name])
    parts = update.parts(parameter, block)
    own = parts[run.replica]
    assert own is not None
    assert run.host.sums is not None
    own.copy_(tensor)
    run.host.sums.spread([[[] if part is None else [part] for part in parts]]).wait(run.host.sums.check)
    return split.whole(name, block)[rows.start : rows.end]


def _update_of(name: str, run: LiveRun) -> tuple[nn.Parameter, ShardedUpdate]:
    parameter = run.parameters[name]
    return parameter, next(update for update in run.divided.values() if parameter in update.shards)


@dataclass(frozen=True)
class _OwnBlock:
    """The part of a saved tensor that this process holds: its block, or some rows of its block."""

    split: SplitWeights
    name: str
    #: The shape of the block.
    shape: tuple[int, ...]
    #: The rows of the block; None for all.
    rows: Rows | None

    @property
    def needed(self) -> Rows | None:
        """The rows of the whole tensor to read; None for all."""
        how = self.split[self.name]
        if how.reads_whole:
            return None
        if not how.divides_rows:
            return self.rows
        first = self.shape[0] * self.split.group.rank
        rows = self.rows or Rows(0, self.shape[0])
        return Rows(first + rows.start, first + rows.end)

    def of(self, read: Tensor) -> Tensor:
        """Return the part that this process holds, given the rows that were read. Keeps no memory of the rest."""
        how = self.split[self.name]
        if how.divides_rows and not how.reads_whole:
            return read
        block = self.split.own(self.name, read)
        if how.divides_rows and self.rows is not None:
            block = block[self.rows.start : self.rows.end]
        return block.clone()


class OwnBlocks:
    """The parts of saved tensors that a process loads, of weights that the ranks of its tensor group divide.

    Args:
        saved: the saved run, which holds whole tensors.
        run: the run into which the saved run is loaded.
        needed: the key of each tensor that this process loads, and the rows of its block (None: all).

    Raises:
        CheckpointError: a state is neither a scalar nor has the shape of its parameter.

    """

    def __init__(self, saved: SavedRun, run: LiveRun, needed: Mapping[str, Rows | None]) -> None:
        split = run.split
        self._blocks: dict[str, _OwnBlock] = {}
        if split is None:
            return
        entries = {key: saved.entries[key] for key in needed}
        for key, name in _names(entries, saved.values, split).items():
            shape = entries[key].shape
            if shape and shape != run.whole_shape(name):
                raise _odd(key, shape, name, run.whole_shape(name), saved.where)
            if shape:
                self._blocks[key] = _OwnBlock(split, name, run.shapes[name], needed[key])

    def needed(self, key: str, rows: Rows | None) -> Rows | None:
        """Return the rows of a saved tensor to read (None: all). ``rows`` are those if the tensor is not divided."""
        return self._blocks[key].needed if key in self._blocks else rows

    def reading(self, read: Read) -> Read:
        """Return a function that reads the parts that this process holds, for those that ``read`` would read."""

        def own(key: str, rows: Rows | None = None) -> Tensor:
            block = self._blocks.get(key)
            return read(key, rows) if block is None else block.of(read(key, block.needed))

        return own
