"""Channels: send values from rank to rank, in order.

Each value is sent as one message: a header of 64 bytes, then the bytes of all its tensors. The layout of a message
states the dtype, the shape and the position of each tensor, and contains the values that are not tensors. Both ends
predict the layout from the last message with the same key (the two stages, and the dtypes and shapes of the
micro-batch), so that a receive can be posted before its message is sent. If the prediction is wrong, the header
announces another layout. This layout and the data then follow on a side channel, and later runs predict the new layout.
Both ends keep identical tables of layouts and compare their predictions before the first message of a run. A change of
shapes therefore costs time, but never causes an error.

A send does not wait for its receiver, and the caller may change the tensors immediately afterwards. A short message of
one tensor is written to the connection's buffers directly from the tensor. Any other message is copied into a buffer.
The buffer is reused once its bytes have been written or, with gloo, once a later header from the other end reports the
message as received. The next run begins by waiting for messages that have not been reported as received.

The messages of a run may be added in several calls (``extend``), and the receiver may add a message in a later call
than the sender does. A layout announced within such a run is predicted only after a fixed number of further messages,
so that both ends begin to predict the new layout at the same message.

A receive allocates new memory, and the received tensors are views of this memory, so the data is not copied again.
Allocation is cheap, because the allocator reuses freed memory.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.layout_predictor import DIGEST_BYTES, LayoutPredictor, digest
from pipesched.runtime.transport.message_layout import MessageLayout, Packed, describe
from pipesched.runtime.transport.ports import Ports, Work, awaited, lost
from pipesched.simulation.memory import AHEAD

__all__ = ["COLLECT", "NORMS", "SHARE", "Channels", "Ends", "Incoming", "Messages", "Outgoing", "check_run"]

_HEADER = 64  # bytes
_MOST_BYTES = 1 << 44  # limit for a message; more than any machine's memory
# A header: the sizes in bytes of a following layout and its data; the counts of received forward and backward messages.
_FIELDS = Struct("<4q")


class Counts(NamedTuple):
    """The number of messages that each end has received in a run, as [forward, backward]."""

    #: Messages received by this end; sent in every header.
    here: list[int]
    #: Messages received by the other end, from its latest header.
    there: list[int]

    @classmethod
    def none(cls) -> "Counts":
        """Return counts of 0, for the start of a run."""
        return cls([0, 0], [0, 0])


class _SentMessage(NamedTuple):
    """A message that may not have been received yet. The buffer is later added to the list ``spare``."""

    position: int
    work: Work
    message: Packed | Tensor | None = None
    spare: list[Packed] | None = None


class Outgoing:
    """The sending end of a channel.

    Args:
        ports: the ports for short and long messages.
        peer: the receiving rank.
        tag: the channel's tag. The side channel has the tag ``tag + 1``.
        encoding: encodes plain values.
        counts: the counts of received messages, shared by all channels to and from ``peer``. Default: new counts.
        way: 0 for forward messages, 1 for backward messages.

    """

    def __init__(
        self,
        ports: Ports,
        peer: int,
        tag: int,
        encoding: Encoding,
        counts: Counts | None = None,
        way: int = 0,
    ) -> None:
        self.predictor = LayoutPredictor()
        self._ports = ports
        self._peer = peer
        self._tag = tag
        self._encoding = encoding
        self._counts = counts or Counts.none()
        self._way = way
        self._position = 0
        self._sent: deque[_SentMessage] = deque()
        self._aside: deque[_SentMessage] = deque()
        self._header = bytearray(_HEADER)
        self._write = ports.short.sender(peer, tag)

    def open(self, keys: Sequence[Hashable]) -> None:
        """Wait until all sends of the previous run are complete, then begin a run.

        ``keys`` contains a layout key for each message of the run, in order.
        """
        self.drain()
        self._position = 0
        self._counts.there[self._way] = 0
        self.predictor.open(keys)

    def extend(self, keys: Sequence[Hashable]) -> None:
        """Add messages with these layout keys to the run."""
        self.predictor.extend(keys, self._position)

    def send(self, value: Any) -> None:
        """Send the next value without waiting."""
        layout = self.predictor.form(self._position)
        data = None if layout is None or layout.nbytes >= self._ports.limit else layout.plain_bytes(value)
        if layout is None or data is None:
            self._send_described(layout, value)
        else:
            _FIELDS.pack_into(self._header, 0, 0, 0, *self._counts.here)
            self._send_short((self._header, data), _HEADER + layout.nbytes)
        self._position += 1
        if self._sent or self._aside:
            self._retire(self._counts.there[self._way])

    def _send_described(self, layout: MessageLayout | None, value: Any) -> None:
        description, leaves = describe(value, self._encoding)
        if layout is None or layout.description != description:
            self._send_unforeseen(MessageLayout(description, self._encoding), leaves, layout.nbytes if layout else 0)
        elif layout.nbytes < self._ports.limit and (data := layout.in_place(leaves)) is not None:
            _FIELDS.pack_into(self._header, 0, 0, 0, *self._counts.here)
            self._send_short((self._header, data.numpy()), _HEADER + layout.nbytes)
        else:
            packed = layout.spare.pop() if layout.spare else Packed(layout, _HEADER)
            packed.fill(leaves)
            _FIELDS.pack_into(packed.data, 0, 0, 0, *self._counts.here)
            if layout.nbytes < self._ports.limit:
                self._send_short((packed.data,), len(packed.data))
                layout.spare.append(packed)
            else:
                self._send_long(packed, layout.spare)

    def _send_unforeseen(self, layout: MessageLayout, leaves: tuple[Any, ...], foreseen: int) -> None:
        """Send a message with an unpredicted layout: its header on the channel, the rest on the side channel.

        ``foreseen`` is the predicted number of bytes. This number determines the port through which
        the header is sent.
        """
        written = layout.written()
        announced = Packed(None, _HEADER)
        _FIELDS.pack_into(announced.data, 0, len(written), layout.nbytes, *self._counts.here)
        if foreseen < self._ports.limit:
            self._send_short((announced.data,), _HEADER)
        else:
            self._send_long(announced, [])
        data = Packed(layout, 0)
        data.fill(leaves)
        for tensor in (torch.frombuffer(bytearray(written), dtype=torch.uint8), data.tensor):
            if len(tensor) and (work := self._ports.send(tensor, self._peer, self._tag + 1)) is not None:
                self._aside.append(_SentMessage(self._position, work, tensor))
        self.predictor.note(self._position, layout)

    def _send_short(self, parts: Sequence[Any], nbytes: int) -> None:
        try:
            work = self._write(parts, nbytes)
        except RuntimeError as error:
            raise lost(self._peer, error) from None
        if work is not None:
            self._sent.append(_SentMessage(self._position, work))

    def _send_long(self, packed: Packed, spare: list[Packed]) -> None:
        try:
            work = self._ports.long.send([packed.tensor], self._peer, self._tag)
        except RuntimeError as error:
            raise lost(self._peer, error) from None
        self._sent.append(_SentMessage(self._position, work, packed, spare))

    def _retire(self, count: int) -> None:
        """Wait until the first ``count`` messages of this run are sent, and release their buffers."""
        for queue in (self._sent, self._aside):
            while queue and queue[0].position < count:
                sent = queue.popleft()
                awaited(sent.work, self._peer)
                if sent.spare is not None and isinstance(sent.message, Packed):
                    sent.spare.append(sent.message)

    def drain(self) -> None:
        """Wait until all sends are complete."""
        self._retire(self._position)

    def free(self) -> None:
        """Wait until all sends are complete, and free the memory of their messages."""
        self.drain()
        for layout in self.predictor.foreseen:
            if layout is not None:
                layout.spare.clear()


class _Posted(NamedTuple):
    """A receive that has been posted, and its memory."""

    #: The memory to be filled. It begins with the header if the message is long.
    memory: Tensor
    header: memoryview
    data: memoryview
    #: The pending receive of a long message; None for a short message, whose bytes are read only in ``receive``.
    work: Work | None
    #: The value in the predicted layout, whose tensors use the memory to be filled; None if built on arrival.
    value: Any


class Incoming:
    """The receiving end of a channel. Takes the same arguments as `Outgoing`, but ``peer`` is the sending rank.

    If the predicted layout allows it, a value is built when its receive is posted, before its message arrives.
    """

    def __init__(
        self,
        ports: Ports,
        peer: int,
        tag: int,
        encoding: Encoding,
        counts: Counts | None = None,
        way: int = 0,
    ) -> None:
        self.predictor = LayoutPredictor()
        self.taken = 0
        self._ports = ports
        self._peer = peer
        self._tag = tag
        self._encoding = encoding
        self._counts = counts or Counts.none()
        self._way = way
        self._posted: deque[_Posted] = deque()
        self._next = 0
        self._header = memoryview(bytearray(_HEADER))  # of short messages, which are read one after another
        self._read = ports.short.reader(peer, tag)

    def open(self, keys: Sequence[Hashable]) -> None:
        """Begin a run. ``keys`` contains a layout key for each message of the run, in order."""
        self.taken = self._next = self._counts.here[self._way] = 0
        self.predictor.open(keys)

    def extend(self, keys: Sequence[Hashable]) -> None:
        """Add messages with these layout keys to the run."""
        self.predictor.extend(keys, self.taken)

    def post(self, ahead: int = AHEAD) -> None:
        """Post receives for the next messages until ``ahead`` receives are pending."""
        while self._next < self.predictor.end and len(self._posted) < ahead:
            self._posted.append(self._prepared(self.predictor.form(self._next)))
            self._next += 1

    def _prepared(self, layout: MessageLayout | None) -> _Posted:
        """Allocate memory for a message, and start its receive if the message is long."""
        nbytes = layout.nbytes if layout else 0
        is_long = nbytes >= self._ports.limit
        start = _HEADER if is_long else 0
        plain = None if is_long or layout is None else layout.empty_plain()
        if plain is not None:
            value, memory = plain
            view = memory.numpy().data.cast("B")
        else:
            memory = torch.empty(start + nbytes, dtype=torch.uint8, device="cpu")
            value = layout.restore(memory, start) if layout and layout.lies_as_sent else None
            view = memory.numpy().data
        header = view[:start] if is_long else self._header
        return _Posted(memory, header, view[start:], self._started(memory) if is_long else None, value)

    def receive(self) -> Any:
        """Wait for the next value and return it."""
        if not self._posted:
            self.post()
        memory, header, data, work, value = self._posted.popleft()
        layout = self.predictor.form(self.taken)
        start = 0 if work is None else _HEADER
        self.post()
        try:
            if work is not None:
                work.wait()
            else:
                self._read(header)
            layout_bytes, data_bytes, *there = _FIELDS.unpack_from(header)
            if not layout_bytes and work is None and data:
                self._read(data)
        except RuntimeError as error:
            raise lost(self._peer, error) from None
        if layout_bytes or layout is None:
            layout, memory = self._receive_unforeseen(layout_bytes, data_bytes)
            start = 0
            value = None
            self.predictor.note(self.taken, layout)
        self.taken += 1
        self._counts.here[self._way] = self.taken
        self._counts.there[:] = there
        return layout.restore(memory, start) if value is None else value

    def _receive_unforeseen(self, layout_bytes: int, data_bytes: int) -> tuple[MessageLayout, Tensor]:
        layout = MessageLayout.read(self._receive_aside(layout_bytes).numpy().tobytes(), self._encoding)
        if layout.nbytes != data_bytes:
            raise lost(
                self._peer,
                RuntimeError(
                    f"the message header announced {data_bytes} bytes of data, but the layout describes "
                    f"{layout.nbytes} bytes"
                ),
            )
        return layout, self._receive_aside(data_bytes)

    def _receive_aside(self, nbytes: int) -> Tensor:
        if not 0 <= nbytes <= _MOST_BYTES:
            raise lost(
                self._peer, RuntimeError(f"the message header announced {nbytes} bytes, which is not a valid size")
            )
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            self._ports.receive(memory, self._peer, self._tag + 1)
        return memory

    def _started(self, memory: Tensor) -> Work:
        try:
            return self._ports.long.recv([memory], self._peer, self._tag)
        except RuntimeError as error:
            raise lost(self._peer, error) from None


# ---- the channels of one rank --------------------------------------------------------------------------------------


#: Takes (other rank, tag, backward) and returns this rank's ends of the two channels with that rank: the first has the
#: methods of Outgoing, the second has the methods of Incoming.
Ends = Callable[[int, int, bool], tuple[Any, Any]]

# Tags of channels. The next odd tag is the side channel.
_FORWARD = 0
_BACKWARD = 2
_OPENING = 4
SHARE = 6
COLLECT = 8
NORMS = 10

_SAID_BYTES = 160  # of the text that describes a batch


class _Neighbour:
    """The channels with one other rank: forward and backward, outgoing and incoming."""

    def __init__(self, ports: Ports, peer: int, ends: Ends | None, encoding: Encoding) -> None:
        self._port = ports.short
        self.peer = peer
        counts = Counts.none()
        made: list[tuple[Any, Any]] = [
            (Outgoing(ports, peer, tag, encoding, counts, way), Incoming(ports, peer, tag, encoding, counts, way))
            if ends is None
            else ends(peer, tag, tag == _BACKWARD)
            for way, tag in enumerate((_FORWARD, _BACKWARD))
        ]
        self.outgoing, self.incoming = zip(*made, strict=True)
        self._opening: Work | None = None
        self.due = b""  # the bytes that the other end must send to open the run; b"" if there is nothing left to check

    def open(self, keys: Mapping[tuple[bool, bool], Sequence[Hashable]], identity: bytes, batch: str) -> None:
        """Begin a run. If the run has outgoing messages, send ``identity`` and a digest of the predicted sizes.

        Args:
            keys: the layout keys of the run's messages, keyed by (outgoing, backward).
            identity: digests of the run, which must be identical at both ends.
            batch: describes the batch, for the error message if the ends differ.

        """
        said = batch.encode()[:_SAID_BYTES].ljust(_SAID_BYTES)
        for backward in (False, True):
            self.outgoing[backward].open(keys.get((True, backward), ()))
            self.incoming[backward].open(keys.get((False, backward), ()))
        if self._opening is not None:
            awaited(self._opening, self.peer)
        try:
            if any(outgoing for outgoing, _ in keys):
                words = self._words(identity, self.outgoing) + said
                self._opening = self._port.sender(self.peer, _OPENING)((words,), len(words))
        except RuntimeError as error:
            raise lost(self.peer, error) from None
        self.due = b"" if all(outgoing for outgoing, _ in keys) else self._words(identity, self.incoming) + said

    def extend(self, keys: Mapping[tuple[bool, bool], Sequence[Hashable]]) -> None:
        """Add messages with these layout keys to the run."""
        for (outgoing, backward), own in keys.items():
            (self.outgoing if outgoing else self.incoming)[backward].extend(own)

    @staticmethod
    def _words(identity: bytes, ends: Sequence[Any]) -> bytes:
        return identity + digest(b"".join(end.predictor.sizes for end in ends))

    def check(self, names: Sequence[str]) -> None:
        """Receive the other end's digests of the run, compare them with this end's, and post the first receives.

        Raises ExecutionError if the two ends differ. ``names`` lists the names of the digests in ``identity`` (see
        ``open``), for the error message.
        """
        words, self.due, due = bytearray(len(self.due)), b"", self.due
        try:
            self._port.reader(self.peer, _OPENING)(memoryview(words))
        except RuntimeError as error:
            raise lost(self.peer, error) from None
        theirs, ours = ((bytes(one[:-_SAID_BYTES]), _said(one)) for one in (words, due))
        check_run((*names, "history of message sizes"), self.peer, theirs, ours)
        for channel in self.incoming:
            channel.post()


def _said(words: bytes | bytearray) -> str:
    """Return the description of the batch at the end of the words that open a run."""
    return str(words[-_SAID_BYTES:], "utf-8", "replace").strip()


def check_run(names: Sequence[str], peer: int, theirs: tuple[bytes, str], ours: tuple[bytes, str]) -> None:
    """Raise ExecutionError unless another rank begins the same run as this rank.

    Args:
        names: the names of the digests of a run.
        peer: the other rank.
        theirs: the digests of the other rank, concatenated, and its description of the batch.
        ours: those of this rank.

    """
    for number, name in enumerate(names):
        part = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        if theirs[0][part] == ours[0][part]:
            continue
        if name == "batch" and theirs[1] != ours[1]:
            raise ExecutionError(
                f"all ranks of a pipeline must pass the same batch; rank {peer} has a different batch in this step: "
                f"its micro-batches are {theirs[1]}, but on this rank they are {ours[1]}; pass the same batch on these "
                f"ranks (a DistributedSampler must count the replicas of the pipeline, not the processes), or make the "
                f"pipeline with distributed=Distributed(inputs='first')"
            )
        if name == "values":
            raise ExecutionError(
                f"all ranks of a pipeline must pass the same batch; rank {peer} has other values than this rank in "
                f"tensors of the same shapes; pass the same rows in the same order on these ranks (seed the shuffling "
                f"of all data loaders alike; a DistributedSampler must count the replicas of the pipeline, not the "
                f"processes), or make the pipeline with distributed=Distributed(inputs='first')"
            )
        raise ExecutionError(
            f"all ranks must run the same steps with the same batches; rank {peer} has a different {name} in this "
            f"step; call the same methods on every rank, in the same order, with the same arguments"
        )


#: The layout keys of a run's messages, keyed by rank and then by (outgoing, backward), in the order of each channel.
Messages = Mapping[int, Mapping[tuple[bool, bool], Sequence[Hashable]]]


class Channels:
    """All channels of one rank. Each channel is created at its first use.

    Args:
        ports: the ports for short and long messages.
        names: the names, in error messages, of the digests that two ranks compare when a run begins.
        encoding: encodes plain values.
        ends: a factory for the channels that carry a run's messages. Default: channels over ``ports``. Values that
            are sent outside a run always use ``ports``.

    """

    def __init__(self, ports: Ports, names: Sequence[str], encoding: Encoding, ends: Ends | None = None) -> None:
        self._ports = ports
        self._names = names
        self._ends = ends
        self._encoding = encoding
        self._neighbours: dict[int, _Neighbour] = {}
        self._single: dict[tuple[bool, int, int], Outgoing | Incoming] = {}

    def open(self, keys: Messages, identity: bytes, batch: str = "") -> None:
        """Begin a run whose messages have these layout keys.

        ``identity`` contains the digests of the run, one for each name in `names` (see the class), concatenated.
        ``batch`` describes the batch, for the error message if two ranks have different batches.
        """
        for peer, channels in keys.items():
            if peer not in self._neighbours:
                self._neighbours[peer] = _Neighbour(self._ports, peer, self._ends, self._encoding)
            self._neighbours[peer].open(channels, identity, batch)

    def extend(self, keys: Messages) -> None:
        """Add messages with these layout keys to the run. The run must have been opened with the same ranks."""
        for peer, channels in keys.items():
            self._neighbours[peer].extend(channels)

    def sender(self, peer: int, backward: bool) -> Callable[[Any], None]:
        """Return a function that sends a value without waiting. The run must have been opened with ``peer``."""
        send: Callable[[Any], None] = self._neighbours[peer].outgoing[backward].send
        return send

    def receiver(self, peer: int, backward: bool) -> Callable[[], Any]:
        """Return a function that waits for the next value. The run must have been opened with ``peer``."""
        neighbour = self._neighbours[peer]
        receive = neighbour.incoming[backward].receive

        def checked() -> Any:
            if neighbour.due:
                neighbour.check(self._names)
            return receive()

        return checked

    def tell(self, peer: int, tag: int, value: Any) -> None:
        """Send one value to a rank, without waiting. No run needs to be open."""
        channel = self._single.setdefault((True, peer, tag), Outgoing(self._ports, peer, tag, self._encoding))
        assert isinstance(channel, Outgoing)
        channel.open(_ONE)
        channel.send(value)

    def tell_all(self, peers: Sequence[int], tag: int, value: Any) -> None:
        """Send the same value to each of several ranks, as ``tell`` does."""
        for peer in peers:
            self.tell(peer, tag, value)

    def ask(self, peer: int, tag: int) -> Callable[[], Any]:
        """Post the receive for a value sent by ``tell``; return a function that waits for the value."""
        channel = self._single.setdefault((False, peer, tag), Incoming(self._ports, peer, tag, self._encoding))
        assert isinstance(channel, Incoming)
        channel.open(_ONE)
        channel.post()
        return channel.receive

    def free(self, tag: int) -> None:
        """Wait until all values with this tag have been sent, and free the memory of their messages."""
        for (_, _, own), single in self._single.items():
            if own == tag and isinstance(single, Outgoing):
                single.free()

    def drain(self) -> None:
        """Wait until all sends are complete."""
        for neighbour in self._neighbours.values():
            for channel in neighbour.outgoing:
                channel.drain()
        for single in self._single.values():
            if isinstance(single, Outgoing):
                single.drain()


_ONE: Sequence[Hashable] = ("one",)
