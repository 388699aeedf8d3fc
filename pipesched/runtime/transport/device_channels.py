"""Device channels: send values whose tensors are on accelerators. Hosts send headers, and devices send data.

A value is sent as a header, through sockets from host to host, and one packed tensor of bytes, through a link from
device to device. The header states either that the message has the predicted layout, or that another layout follows.
Hosts post data transfers and never wait for them; streams wait for each other.

Although the size of a receive is often predicted, the receive is posted only after its header has arrived, because a
posted NCCL receive cannot be cancelled. If the receive were posted before its header arrived, the sender would have to
send useless bytes whenever a layout changes, and the receive would remain on the device after a failed step. Waiting
for the header costs nothing when the devices are the bottleneck: the hosts are ahead of the devices, so the receive is
posted before the data is computed, and data is transferred while both devices compute.

Why the channels cannot hang. Each channel (the forward or the backward messages from one rank to another) has its own
link: a communicator of two ranks with its own stream, in which messages wait only for earlier messages. Both ends post
in the channel's order. A send is posted before its header is sent, so when a header arrives, its send has been posted.
Hosts wait only for headers, and no header waits for a device. Hosts therefore never wait in a cycle, as the proof for
the process executor shows.

On a device, a send waits for the computation posted before it and for its receive, a receive waits for its send, and a
computation waits for the receives posted before it. A computation never waits for a send, not even to reuse its memory:
memory is reused only if a query finds the send complete, otherwise new memory is allocated. A receive that a
computation waits for has been posted, and so has its send. So devices wait only along the edges of the program, which
form no cycle.

The first use of a communicator blocks the hosts until both ranks use it. Therefore, before a program first runs, all
ranks create its communicators and use each of them once, in one global order. In this order, both ranks of the next
communicator can always proceed.

Memory. The compute stream copies each message into a buffer of the channel, so that the layers may change their tensors
afterwards. The copy takes about a thousandth of the time of the stage that computed the message. Memory for received
data is allocated on a stream that runs no computation, so data arrives while the rank computes. ``record_stream`` keeps
the memory from being reused before the compute stream has finished with it, and the caller's stream, which may read
outputs that a stage has received and returns unchanged.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from struct import Struct
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from pipesched.devices.collectives import pair_maker
from pipesched.devices.streams import current_stream, new_stream, on_device, on_stream
from pipesched.errors import ExecutionError
from pipesched.runtime.transport.channels import Ends
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.layout_predictor import LayoutPredictor
from pipesched.runtime.transport.message_layout import MessageLayout, Packed, describe
from pipesched.runtime.transport.ports import ShortPort, lost

__all__ = ["Channel", "DeviceLink", "DeviceLinks", "LinkMaker", "PairLinks", "ends_over"]

_LENGTH = Struct("<q")  # a header: the size in bytes of the layout that follows; 0 if the prediction is right
_AS_FORESEEN = _LENGTH.pack(0)
_MOST_LINKS = 32  # per rank; torch has this many streams of one priority, and two links on one stream could deadlock
_WATCHED = 5  # a group's timeout, as a multiple of the ranks' timeout: posted transfers may wait for earlier steps
_PATIENCE_S = 5  # time for the other ranks to drain their links


class Channel(NamedTuple):
    """The forward or the backward messages from rank ``giver`` to rank ``taker``. Each channel has its own link."""

    giver: int
    taker: int
    backward: bool


class _Sending(Protocol):
    """A posted send."""

    def is_completed(self) -> bool:
        """Return whether the memory of the send may be reused. Does not wait."""


class DeviceLink(Protocol):
    """One end of a one-way connection between two devices. Messages arrive in the order in which they are sent."""

    def connect(self) -> None:
        """Wait for the other end, and transfer one byte."""

    def send(self, memory: Tensor) -> _Sending:
        """Post a send of bytes, which starts once the work posted so far on the current stream is done."""

    def receive(self, nbytes: int) -> Tensor:
        """Post a receive of ``nbytes`` bytes; later work on the current stream waits for the data."""

    def drain(self) -> None:
        """Wait until all posted transfers are done."""

    def abort(self) -> None:
        """Abort the link, and all device work that waits for it."""


class LinkMaker(Protocol):
    """Creates the links of one rank."""

    device: torch.device

    def link(self, store: Any, *, sends: bool) -> DeviceLink:
        """Create the sending or the receiving end of a link; both ends must pass the same store."""

    def begin(self) -> None:
        """Begin a run, whose caller may read received data on the current stream."""


@dataclass
class _Arrivals:
    """The stream on which received data is allocated and nothing is computed, and the stream of the run's caller."""

    stream: torch.Stream
    caller: torch.Stream


class PairLink:
    """A link over a process group of two ranks.

    Args:
        group: the process group, which has a stream of its own.
        sends: whether this is the sending end.
        device: the device of this end.
        arrivals: the stream on which received data is allocated, and the stream of the run's caller.

    """

    def __init__(self, group: Any, *, sends: bool, device: torch.device, arrivals: _Arrivals) -> None:
        self._group = group
        self._sends = sends
        self._device = device
        self._arrivals = arrivals
        self._last: Any = None

    def connect(self) -> None:
        with on_device(self._device):
            if self._sends:
                self.send(torch.zeros(1, dtype=torch.uint8, device=self._device))
            else:
                self.receive(1)
            self.drain()

    def send(self, memory: Tensor) -> _Sending:
        self._last = work = self._group.send([memory], 1, 0)
        sending: _Sending = work
        return sending

    def receive(self, nbytes: int) -> Tensor:
        user = current_stream(self._device)
        with on_stream(self._arrivals.stream):  # the group's stream waits for the current stream, which is empty here
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._last = work = self._group.recv([memory], 0, 0)
        work.wait()  # makes the current stream wait, not the host
        memory.record_stream(user)
        memory.record_stream(self._arrivals.caller)
        return memory

    def drain(self) -> None:
        if self._last is not None:
            self._last.wait()
            current_stream(self._device).synchronize()
            self._last = None

    def abort(self) -> None:
        self._group.abort()


class PairLinks:
    """Creates the links of one device, each over a process group of its own.

    Args:
        device: the device of this rank.
        timeout_s: how long ranks wait for each other, in seconds.

    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self._make = pair_maker(device)
        self._timeout_s = _WATCHED * timeout_s
        self._arrivals = _Arrivals(stream=new_stream(device), caller=current_stream(device))

    def link(self, store: Any, *, sends: bool) -> PairLink:
        with on_device(self.device):
            group = self._make(store, int(not sends), self._timeout_s)
        return PairLink(group, sends=sends, device=self.device, arrivals=self._arrivals)

    def begin(self) -> None:
        self._arrivals.caller = current_stream(self.device)


class DeviceLinks:
    """All links of one rank. ``connect`` and ``close`` are collective."""

    def __init__(self, maker: LinkMaker, store: Any, rank: int) -> None:
        self._maker = maker
        self._store = store
        self._rank = rank
        self._links: dict[Channel, DeviceLink] = {}
        self.begin = maker.begin

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._maker.device

    def connect(self, channels: Iterable[Channel]) -> None:
        """Create the missing links for these channels. Raises ExecutionError if a rank does not connect."""
        new = [channel for channel in channels if self._rank in channel[:2] and channel not in self._links]
        if len(self._links) + len(new) > _MOST_LINKS:
            raise ExecutionError(
                f"a rank on an accelerator may have at most {_MOST_LINKS} channels, each with its own stream; "
                f"rank {self._rank} has {len(self._links) + len(new)} channels; move stage boundaries so that "
                f"fewer edges cross them"
            )
        for channel in sorted(new, key=_turn):
            name = f"link/{channel.giver}/{channel.taker}/{int(channel.backward)}"
            try:
                link = self._links[channel] = self._maker.link(
                    distributed.PrefixStore(name, self._store),  # type: ignore[attr-defined]  # public in torch, but not exported
                    sends=channel.giver == self._rank,
                )
                link.connect()
            except RuntimeError as error:
                peer = channel.giver + channel.taker - self._rank
                raise ExecutionError(
                    f"devices of neighbouring ranks must be connected before a program runs; the devices of ranks "
                    f"{self._rank} and {peer} could not connect ({error}); give every process a separate device"
                ) from error

    def __getitem__(self, channel: Channel) -> DeviceLink:
        return self._links[channel]

    def drain(self) -> None:
        """Wait until this rank's device has completed all posted transfers."""
        for link in self._links.values():
            link.drain()

    def close(self) -> None:
        """Close all links. The caller must have called ``drain``.

        Before closing, waits up to 5 s for the connected ranks to call ``close``, so that no transfer is cut off.
        """
        if self._links:
            peers = {rank for channel in self._links for rank in channel[:2]}
            with suppress(RuntimeError):  # a rank that does not close its links has failed, or will detect a failure
                self._store.set(f"links drained/{self._rank}", "")
                self._store.wait([f"links drained/{rank}" for rank in peers], timedelta(seconds=_PATIENCE_S))
        self.abort()

    def abort(self) -> None:
        """Abort all links immediately, and the device work that waits for them."""
        for link in list(self._links.values()):  # another thread may add a link
            with suppress(RuntimeError):
                link.abort()


def _turn(channel: Channel) -> tuple[bool, int, int, int]:
    """Return the sort key of a channel. All ranks create their links in the order of these keys.

    Forward channels come before backward channels. In each direction, even sending ranks come before odd sending ranks,
    so that pairs of ranks connect in parallel.
    """
    return channel.backward, channel.giver % 2, channel.giver, channel.taker


class _DeviceSend(NamedTuple):
    """A message that the device may still be sending. The buffer is later added to the list ``spare``."""

    sending: _Sending
    message: Packed
    spare: list[Packed]


class DeviceOutgoing:
    """The sending end of a channel between devices. ``port`` sends the headers, with the tag ``tag``."""

    def __init__(self, links: DeviceLinks, channel: Channel, port: ShortPort, tag: int, encoding: Encoding) -> None:
        self.predictor = LayoutPredictor()
        self._encoding = encoding
        self._links = links
        self._channel = channel
        self._write = port.sender(channel.taker, tag)
        self._position = 0
        self._sent: deque[_DeviceSend] = deque()

    def open(self, keys: Sequence[Hashable]) -> None:
        """Begin a run. ``keys`` contains a layout key for each message of the run, in order."""
        self._position = 0
        self.predictor.open(keys)

    def extend(self, keys: Sequence[Hashable]) -> None:
        """Add messages with these layout keys to the run."""
        self.predictor.extend(keys, self._position)

    def send(self, value: Any) -> None:
        """Send the next value without waiting."""
        description, leaves = describe(value, self._encoding)
        layout = self.predictor.form(self._position)
        written = b""
        if layout is None or layout.description != description:
            layout = MessageLayout(description, self._encoding)
            written = layout.written()
            self.predictor.note(self._position, layout)
        if layout.nbytes:
            self._send_data(layout, leaves)
        self._send_header(written)
        self._position += 1

    def _send_data(self, layout: MessageLayout, leaves: tuple[Any, ...]) -> None:
        self._reclaim()
        packed = layout.spare.pop() if layout.spare else Packed(layout, 0, self._links.device)
        packed.fill(leaves)
        self._sent.append(_DeviceSend(self._links[self._channel].send(packed.tensor), packed, layout.spare))

    def _reclaim(self) -> None:
        while self._sent and self._sent[0].sending.is_completed():
            sent = self._sent.popleft()
            sent.spare.append(sent.message)

    def _send_header(self, written: bytes) -> None:
        length = _LENGTH.pack(len(written)) if written else _AS_FORESEEN
        try:
            self._write((length, written), len(length) + len(written))
        except RuntimeError as error:
            raise lost(self._channel.taker, error) from None

    def drain(self) -> None:
        """Wait until the device has sent all messages."""
        if self._sent:
            self._links[self._channel].drain()


class DeviceIncoming:
    """The receiving end of a channel between devices. ``port`` receives the headers, with the tag ``tag``."""

    def __init__(self, links: DeviceLinks, channel: Channel, port: ShortPort, tag: int, encoding: Encoding) -> None:
        self.predictor = LayoutPredictor()
        self._encoding = encoding
        self.taken = 0
        self._links = links
        self._channel = channel
        self._reader = port.reader(channel.giver, tag)

    def open(self, keys: Sequence[Hashable]) -> None:
        """Begin a run. ``keys`` contains a layout key for each message of the run, in order."""
        self.taken = 0
        self.predictor.open(keys)

    def extend(self, keys: Sequence[Hashable]) -> None:
        """Add messages with these layout keys to the run."""
        self.predictor.extend(keys, self.taken)

    def post(self) -> None:
        """Do nothing, because a receive is posted only after its header has arrived."""

    def receive(self) -> Any:
        """Wait for the next value's header, and return the value.

        Later work on the current stream waits for the tensors of the value.
        """
        (layout_bytes,) = _LENGTH.unpack(self._read(_LENGTH.size))
        layout = self.predictor.form(self.taken)
        if layout_bytes or layout is None:
            layout = MessageLayout.read(bytes(self._read(layout_bytes)), self._encoding)
            self.predictor.note(self.taken, layout)
        self.taken += 1
        if layout.nbytes:
            memory = self._links[self._channel].receive(layout.nbytes)
        else:
            memory = torch.empty(0, dtype=torch.uint8, device=self._links.device)
        return layout.restore(memory, 0)

    def _read(self, size: int) -> bytearray:
        memory = bytearray(size)
        try:
            self._reader(memoryview(memory))
        except RuntimeError as error:
            raise lost(self._channel.giver, error) from None
        return memory


def ends_over(links: DeviceLinks, port: ShortPort, rank: int, encoding: Encoding) -> Ends:
    """Return a function that creates the sending and the receiving end of ``rank``'s channels with another rank.

    The arguments of that function are the other rank, the tag of the headers, and whether the channels are backward.
    """

    def ends(peer: int, tag: int, backward: bool) -> tuple[DeviceOutgoing, DeviceIncoming]:
        return (
            DeviceOutgoing(links, Channel(rank, peer, backward), port, tag, encoding),
            DeviceIncoming(links, Channel(peer, rank, backward), port, tag, encoding),
        )

    return ends
