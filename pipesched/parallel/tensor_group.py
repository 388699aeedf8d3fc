"""Tensor group: the ranks that divide the layers of a stage among themselves, and their collectives.

With P ranks, a tensor of n bytes and shards of ceil(elements / P) elements, each rank sends and receives:

==============  =====================  ==========  ==========
collective      bytes                  messages    rounds
==============  =====================  ==========  ==========
reduce-scatter  (P - 1)/P n            P - 1       1
all-gather      (P - 1) of its block   P - 1       P - 1
all-reduce      2 (P - 1)/P n          2 (P - 1)   P
max             as all-reduce
broadcast       n, but the root 0      see below   log2(P)
reduce          n, but the root 0      1           1
==============  =====================  ==========  ==========

A reduce-scatter sends each rank its shard directly, and each rank adds the shards in rank order. So a sum has the same
bits on all ranks, with any library, and with sequence parallelism as without. An all-gather is a ring. An all-reduce is
a reduce-scatter and an all-gather. A broadcast is a binomial tree: a rank sends the tensor to at most log2(P) ranks. In
the last two rows, the bytes of a broadcast are received, and those of a reduce are sent; its root receives P - 1
tensors, and adds them in rank order.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from pipesched.errors import ExecutionError, InputError
from pipesched.parallel.traffic_counter import Traffic, TrafficCounter

__all__ = ["ActivationLayout", "Division", "JobGroups", "TensorGroup"]

#: The all-gather into one tensor, under its name in torch 2.13 or its earlier name.
_all_gather_single: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

_SLEEP_S = 1e-3  # a sleep may take this much longer than asked
_LOOK = timedelta(seconds=0.5)  # how often a waiting rank looks whether another rank has failed


class ActivationLayout(Enum):
    """What each rank of a tensor group holds of the activations."""

    WHOLE = "whole"  # each rank holds all of them
    DIVIDED = "divided"  # a block of the heads or of the hidden units
    SEQUENCE = "sequence"  # a block of the positions of each sequence
    OUTER = "outer"  # a block of the sequences and of the hidden units, as it lies between pairs of linear layers
    INNER = "inner"  # such a block as it lies inside a pair of linear layers


class Division(NamedTuple):
    """A dimension of a tensor that is divided, the part of this rank, and the number of parts."""

    dim: int
    place: int
    parts: int


class JobGroups(NamedTuple):
    """The global ranks of every tensor group of a job, by tensor rank, and how long a rank waits, in seconds."""

    groups: Sequence[Sequence[int]]
    timeout_s: float


class Grid(Protocol):
    """Ranks of a tensor group that form a grid of two or three dimensions."""

    #: The number of parts into which hidden units are divided inside a pair of linear layers.
    hidden_parts: int

    def divisions(self, layout: ActivationLayout, hidden: int) -> list[Division]:
        """Return how activations are divided whose hidden units or heads lie in the dimension ``hidden``."""


class FollowsLayouts(Protocol):
    """Follows which activations are divided."""

    def note(self, tensor: Any, layout: ActivationLayout, name: str) -> None:
        """Note the layout of the output of the layer ``name``."""

    def expect(self, tensor: Tensor, layout: ActivationLayout, name: str) -> None:
        """Raise InputError if the input of the layer ``name`` has another layout than it expects."""

    def expect_logits(self, *outputs: Any) -> None:
        """Raise InputError if none of the tensors are logits as `VocabularyCrossEntropy` takes them."""


@dataclass
class _Solo:
    """Whether the collectives of a tensor group and of its parts exchange nothing, and how long they take then."""

    alone: bool
    took_s: Callable[[Traffic], float] | None = None


class TensorGroup:
    """The ranks of a tensor group, and their collectives. All methods that return tensors are collective.

    Args:
        process_group: the processes, whose ranks in the group are the ranks here; None for a group that only counts.
        rank: the rank of this process in the group.
        size: the number of ranks.
        check: raises an exception if another rank has failed; called while a collective waits, and after it failed.
            Default: nothing is checked.

    Attributes:
        counter: counts the collectives.
        sequence_dim: the dimension of activations that numbers the positions of a sequence.
        job: the tensor groups of all processes of the job; None if this is the only one.
        grid: the grid of the ranks, if layers are split in more than one dimension; else None.
        trace: follows which activations are divided; None most of the time.

    """

    def __init__(
        self,
        process_group: Any,
        *,
        rank: int,
        size: int,
        check: Callable[[], None] | None = None,
        sequence_dim: int = 1,
    ) -> None:
        if not 0 <= rank < size:
            raise InputError(f"a rank of a tensor group must be in 0..size-1; got rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self.sequence_dim = sequence_dim
        self.counter = TrafficCounter()
        #: The tensor that layers with columns got last, its version, and the copy that they share.
        self.shared: tuple[Tensor, int, Tensor] | None = None
        self._layout = ActivationLayout.WHOLE
        self.grid: Grid | None = None
        self.trace: FollowsLayouts | None = None
        self.job: JobGroups | None = None
        self.process_group = process_group
        self._name = ""
        self._inner_dims = 0  # of the output of the last first layer of a pair
        self._check = check
        self._solo = _Solo(process_group is None)

    @classmethod
    def counting(cls, size: int, rank: int = 0) -> "TensorGroup":
        """Return a group without processes. Its collectives count, and return tensors of the right shape."""
        return cls(None, rank=rank, size=size)

    def part(self, process_group: Any, *, rank: int, size: int, name: str) -> "TensorGroup":
        """Return the group of some of these ranks. Its collectives are counted here, as "all-gather row", for example.

        Args:
            process_group: the processes; None for a group that only counts.
            rank: the rank of this process in the part.
            size: the number of ranks in the part.
            name: the name of the part, such as "row".

        """
        made = TensorGroup(process_group, rank=rank, size=size, check=self._check, sequence_dim=self.sequence_dim)
        made._name = f" {name}"
        made._solo = self._solo
        made.counter = self.counter
        return made

    @contextmanager
    def alone(self, took_s: Callable[[Traffic], float] | None = None) -> Iterator[None]:
        """In the ``with`` block, collectives exchange nothing, but count and return tensors of the right shape.

        ``took_s`` returns how long a collective would take, in seconds, given its traffic. The collectives then wait
        for so long, so that the measured time of a layer includes them. Default: None (they take no time).
        """
        solo = self._solo
        before = solo.alone, solo.took_s
        solo.alone, solo.took_s = True, took_s
        try:
            yield
        finally:
            solo.alone, solo.took_s = before

    @property
    def layout(self) -> ActivationLayout:
        """What each rank holds of the activations at the present point of a forward."""
        return self._layout

    @layout.setter
    def layout(self, layout: ActivationLayout) -> None:
        self._layout = layout
        if layout is not ActivationLayout.DIVIDED:
            self.shared = None

    def expect(self, tensor: Tensor, layout: ActivationLayout, name: str) -> None:
        """Raise InputError if a trace shows that the input of the layer ``name`` has another layout."""
        if self.trace is not None:
            self.trace.expect(tensor, layout, name)

    def returns(self, tensor: Tensor, layout: ActivationLayout, name: str = "") -> Tensor:
        """Return the output of the layer ``name``, after which activations have this layout."""
        self.layout = layout
        if layout in (ActivationLayout.DIVIDED, ActivationLayout.INNER):
            self._inner_dims = tensor.dim()
        if self.trace is not None:
            self.trace.note(tensor, layout, name)
        return tensor

    @property
    def is_alone(self) -> bool:
        """Whether collectives exchange nothing."""
        return self._solo.alone

    def __deepcopy__(self, memo: Any) -> "TensorGroup":
        return self  # copies of layers exchange tensors with the same ranks

    @property
    def hidden_parts(self) -> int:
        """The number of parts into which heads and hidden units are divided inside a pair of linear layers."""
        return self.size if self.grid is None else self.grid.hidden_parts

    def divisions(self, layout: ActivationLayout, dims: int, *, scores: bool = False) -> list[Division]:
        """Return the divided dimensions of activations with this layout and this number of dimensions.

        A tensor of four dimensions inside a pair of layers has attention scores: (batch, heads, queries, keys), unless
        the first layer of the pair has returned four dimensions. ``scores`` states that it has.
        """
        has_scores = scores or (layout is not ActivationLayout.OUTER and self._inner_dims != 4)
        return self.divisions_at(layout, 1 if dims == 4 and has_scores else dims - 1)

    def divisions_at(self, layout: ActivationLayout, hidden: int) -> list[Division]:
        """Return the divided dimensions of activations whose hidden units or heads lie in the dimension ``hidden``."""
        if layout is ActivationLayout.WHOLE:
            return []
        if layout is ActivationLayout.SEQUENCE:
            return [Division(self.sequence_dim, self.rank, self.size)]
        if self.grid is None:
            return [Division(hidden, self.rank, self.size)]
        return self.grid.divisions(layout, hidden)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's block of a whole tensor. Not collective.

        Raises InputError if the dimension is not divided evenly.
        """
        length = tensor.shape[dim]
        if length % self.size:
            raise InputError(
                f"activations must be divided evenly among the ranks of a tensor group; dimension {dim} of a tensor of "
                f"shape {list(tensor.shape)} has {length} elements for {self.size} ranks; pad the tensor to a multiple "
                f"of {self.size}"
            )
        part = length // self.size
        return tensor.narrow(dim, self.rank * part, part)

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, added in rank order."""
        return self._reduced("all-reduce", tensor, _sum)

    @torch.no_grad()
    def max(self, tensor: Tensor) -> Tensor:
        """Return the largest value of all ranks at each place of the tensor."""
        return self._reduced("max", tensor, _largest)

    @torch.no_grad()
    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the blocks of all ranks, joined in rank order along a dimension."""
        if self.size == 1:
            return tensor
        order = _memory_order(tensor)
        dim = order.index(dim % tensor.dim())
        block = tensor.permute(order)
        blocks = self._gathered("all-gather", block).movedim(0, dim)
        whole = blocks.reshape(*block.shape[:dim], -1, *block.shape[dim + 1 :])
        return whole.permute(_inverse(order))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order. All have the same shape."""
        with torch.no_grad():
            return [tensor] if self.size == 1 else [*self._gathered("all-gather", tensor).unbind()]

    @torch.no_grad()
    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's block, along a dimension, of the sum of the tensors of all ranks, added in rank order.

        Raises InputError if the dimension is not divided evenly.
        """
        if self.size == 1:
            return tensor
        order = _memory_order(tensor)
        part = self.own(tensor, dim).shape[dim]
        at = order.index(dim % tensor.dim())
        blocks = tensor.permute(order).unflatten(at, (self.size, part)).movedim(at, 0)
        shards = self._exchanged("reduce-scatter", blocks.reshape(self.size, -1))
        if self.is_alone:
            return self.own(tensor, dim).clone()
        own = _sum(shards)
        return own.view(blocks.shape[1:]).permute(_inverse(order))

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Return the tensor of the rank ``root``. All ranks pass tensors of one shape."""
        if self.size == 1:
            return tensor
        order = _memory_order(tensor)
        messages = _children(self.rank, root, self.size)
        received = tensor.nbytes if self.rank != root else 0
        traffic = Traffic(1, messages * tensor.nbytes, received, messages, (self.size - 1).bit_length())
        if not self._exchanges("broadcast", traffic, tensor):
            return tensor
        own = tensor.permute(order).contiguous()
        block = own if self.rank == root else torch.empty_like(own)
        self._run(lambda group: distributed.broadcast(_bytes(block), group=group, group_src=root, async_op=True), block)
        return block.permute(_inverse(order))

    @torch.no_grad()
    def reduce(self, tensor: Tensor, root: int) -> Tensor | None:
        """Return the sum of the tensors of all ranks, added in rank order, to the rank ``root``, and None to others."""
        if self.size == 1:
            return tensor
        others = self.size - 1
        is_root = self.rank == root
        sent, received = (0, others * tensor.nbytes) if is_root else (tensor.nbytes, 0)
        if not self._exchanges("reduce", Traffic(1, sent, received, int(not is_root), 1), tensor):
            return tensor if is_root else None
        own = tensor.contiguous()
        blocks = own.new_empty(self.size if is_root else 0, *own.shape)
        places = [_bytes(block) for block in blocks] if is_root else None
        self._run(
            lambda group: distributed.gather(_bytes(own), places, group=group, group_dst=root, async_op=True), own
        )
        return _sum(blocks) if is_root else None

    def _reduced(self, kind: str, tensor: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
        if self.size == 1:
            return tensor.clone()
        order = _memory_order(tensor)
        own = tensor.permute(order)
        flat = own.reshape(-1)
        missing = -flat.numel() % self.size
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        shard = join(self._exchanged(kind, flat.view(self.size, -1), calls=0))
        whole = self._gathered(kind, shard).reshape(-1)
        if self.is_alone:
            return tensor.clone()  # a sum of other rows would mix the rows of a batch
        return whole[: flat.numel() - missing].view(own.shape).permute(_inverse(order))

    def _exchanged(self, kind: str, shards: Tensor, calls: int = 1) -> Tensor:
        """Send row r to rank r, and return the rows that all ranks sent to this rank."""
        nbytes = shards[0].nbytes
        others = self.size - 1
        if not self._exchanges(kind, Traffic(calls, others * nbytes, others * nbytes, others, 1), shards):
            return shards
        shards = shards.contiguous()
        received = torch.empty_like(shards)
        self._run(
            lambda group: distributed.all_to_all_single(_bytes(received), _bytes(shards), group=group, async_op=True),
            received,
        )
        return received

    def _gathered(self, kind: str, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        others = self.size - 1
        traffic = Traffic(1, others * tensor.nbytes, others * tensor.nbytes, others, others)
        if not self._exchanges(kind, traffic, tensor):
            return tensor.expand(self.size, *tensor.shape)
        tensor = tensor.contiguous()
        blocks = tensor.new_empty(self.size, *tensor.shape)
        self._run(
            lambda group: _all_gather_single(_bytes(blocks), _bytes(tensor), group=group, async_op=True),
            blocks,
        )
        return blocks

    def _exchanges(self, kind: str, traffic: Traffic, tensor: Tensor) -> bool:
        """Count a collective, and return whether tensors are exchanged. Tensors on the meta device never are."""
        solo = self._solo
        if tensor.is_meta and not solo.alone:
            return False
        self.counter.count(f"{kind}{self._name}", traffic)
        if solo.alone and solo.took_s is not None and not tensor.is_meta:
            _wait(solo.took_s(traffic))
        return not solo.alone

    def _run(self, start: Callable[[Any], Any], result: Tensor) -> None:
        try:
            work = start(self.process_group)
            if result.device.type != "cpu" or self._check is None:
                work.wait()
                return
            while not _ended(work):
                self._check()
        except RuntimeError as error:
            if isinstance(error, ExecutionError):
                raise
            if self._check is not None:
                self._check()
            raise ExecutionError(
                f"all ranks of a tensor group must run the same collectives; one failed on rank {self.rank} of "
                f"{self.size} ({error}); the first rank that failed says why"
            ) from error


def _ended(work: Any) -> bool:
    """Wait a moment for a collective, and return whether it has ended. Raises RuntimeError if it failed."""
    try:
        work.wait(_LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have ended just after the moment; raises its own error if it failed
    return True


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions in the order in which the tensor lies in memory.

    Collectives keep this order, because random functions, such as dropout, draw numbers in this order.
    """
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _wait(seconds: float) -> None:
    """Wait for a time that may be shorter than a sleep can be."""
    end_s = time.perf_counter() + seconds
    if seconds > _SLEEP_S:
        time.sleep(seconds - _SLEEP_S)
    while time.perf_counter() < end_s:
        pass


def _children(rank: int, root: int, size: int) -> int:
    """Return the number of ranks to which a rank sends in a broadcast along a binomial tree."""
    place = (rank - root) % size
    return sum(place < step and place + step < size for step in (1 << bit for bit in range(size.bit_length())))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _sum(rows: Tensor) -> Tensor:
    """Add rows in order. Half-precision numbers are added in float32."""
    if rows.dtype in (torch.float16, torch.bfloat16):
        return _sum(rows.float()).to(rows.dtype)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _largest(rows: Tensor) -> Tensor:
    return rows.amax(0)
