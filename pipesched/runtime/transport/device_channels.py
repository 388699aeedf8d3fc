"""Device channels: values from rank to rank whose tensors lie on accelerators. Control by the hosts, data by the
devices.

A value is a header, by sockets from host to host, and one packed tensor of bytes, by a link from device to device. The
header says that the form is the foreseen one, or announces another, which follows it. Data is posted and never waited
for by a host: streams wait for each other.

A receive is posted when its header is there, and no sooner, though its size is often foreseen: what NCCL was told to
receive cannot be taken back, so a receive ahead of its header would have to be served with bytes that nobody wants
where a form changes, and would still stand on the device where a step fails. Waiting for the header costs nothing
where devices are what a step waits for: the hosts are then ahead of them, so the receive is posted before the data is
computed, and data travels while both devices compute.

Why it cannot hang. One link for each (from, to, kind): a communicator of two ranks, with a stream of its own, in which
nothing waits but one message behind the other. Both ends post in the channel's order. A send is posted before its
header goes, so whoever has a header finds the send. A host waits for headers alone, and a header for no device: as in
the proof of the executor, hosts never wait in a circle. A device then has what hosts posted: a send waits for the
computation before it and for its receive, a receive for its send, a computation for receives before it, and never for a
send, not even for its memory: that is used again when a query finds the send complete, else there is new memory. A
receive that a computation waits for is posted, and so is its send; so devices wait only along the edges of the
program, which have no cycle. The first use of a communicator blocks hosts until both are there: so all are made and
used once before a program first runs, by all ranks in one order, in which the first one that is not yet made always
has both its ranks.

Memory. A message is a copy in memory of the wire's own, made on the stream that computes: some thousandth of the time
of the stage that made it, after which the layers may do with their tensors what they like. What is received lies in
memory of a stream in which nothing computes, so it comes while the rank computes; it is recorded for the stream that
uses it.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from struct import Struct
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from pipesched.errors import ExecutionError
from pipesched.runtime.transport.channels import Ends
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.layout_book import LayoutBook
from pipesched.runtime.transport.message_layout import MessageLayout, Packed, describe
from pipesched.runtime.transport.ports import ShortPort, lost

__all__ = ["Channel", "Link", "Links", "ends_over", "links_for"]

_LENGTH = Struct("<q")  # of a header: the bytes of a form that follows it; 0: the form is the foreseen one
_AS_FORESEEN = _LENGTH.pack(0)
_MOST_LINKS = 32  # of one rank: torch has so many streams of a priority, and two links in one could wait in a circle
_TORCH_WATCHES_S = 600  # torch ends a process whose device has waited so long, unless told otherwise
_WATCHED = 5  # as many timeouts at least: what is posted may wait for the steps before
_PATIENCE_S = 5  # for ranks that are to end their links at the same time


class Channel(NamedTuple):
    """What has a link of its own."""

    giver: int
    taker: int
    backward: bool


class _Sending(Protocol):
    """A send that was posted."""

    def is_completed(self) -> bool:
        """Whether its memory may be used again. Asks, and does not wait."""


class Link(Protocol):
    """One end of a connection between two devices, in one direction, first in, first out."""

    def connect(self) -> None:
        """Return once the other end is there, and data has crossed."""

    def send(self, memory: Tensor) -> _Sending:
        """Post a send of bytes that are there when the current stream comes to here."""

    def receive(self, nbytes: int) -> Tensor:
        """Post a receive. The bytes are there when the current stream goes on from here."""

    def drain(self) -> None:
        """Wait until all that was posted is done."""

    def abort(self) -> None:
        """End it, and what waits for it on the device."""


class _Maker(Protocol):
    """Makes the links of one rank."""

    device: torch.device

    def link(self, store: Any, *, sends: bool) -> Link:
        """One end; both are made with the same store."""

    def begin(self) -> None:
        """A run begins: what the current stream was told before comes before what is received."""


class NcclLink:
    """A link over a NCCL communicator of two ranks. arrivals: the stream in which received memory is made."""

    def __init__(self, store: Any, sends: bool, device: torch.device, arrivals: Any, timeout_s: float) -> None:
        self._sends = sends
        self._device = device
        self._arrivals = arrivals
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options(is_high_priority_stream=True)  # its kernels start before those that wait to compute
        # a group of two ranks for one direction: torch then has one communicator and one stream for it alone
        self._group = nccl(store, int(not sends), 2, options)
        if timeout_s > _TORCH_WATCHES_S:
            self._group.set_timeout(timedelta(seconds=timeout_s))
        self._last: Any = None

    def connect(self) -> None:
        with torch.cuda.device(self._device):
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
        user = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._arrivals):  # NCCL's own stream waits for the current one: this is empty
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._last = work = self._group.recv([memory], 0, 0)
        work.wait()  # the current stream does, not the host
        memory.record_stream(user)
        return memory

    def drain(self) -> None:
        if self._last is not None:
            self._last.wait()
            torch.cuda.current_stream(self._device).synchronize()
            self._last = None

    def abort(self) -> None:
        self._group.abort()


class Nccl:
    """Makes NCCL links for one device. timeout_s: how long ranks wait for each other."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self._timeout_s = _WATCHED * timeout_s
        self._arrivals = torch.cuda.Stream(device)

    def link(self, store: Any, *, sends: bool) -> NcclLink:
        with torch.cuda.device(self.device):
            return NcclLink(store, sends, self.device, self._arrivals, self._timeout_s)

    def begin(self) -> None:
        # its freed memory may still be read in other streams, such as the caller's
        self._arrivals.wait_stream(torch.cuda.current_stream(self.device))


def links_for(device: torch.device, timeout_s: float) -> _Maker | None:
    """What makes the links of a device; None for a CPU. Raises ExecutionError where torch was built without NCCL."""
    if device.type == "cpu":
        return None
    if not distributed.is_nccl_available():
        raise ExecutionError(
            f"ranks on CUDA devices reach each other over NCCL; this build of torch ({torch.__version__}) has none; "
            f"install one that has, run on CPUs, or in one process with devices="
        )
    return Nccl(device, timeout_s)


class Links:
    """All links of one rank. Nobody makes or closes one alone: all ranks call the same."""

    def __init__(self, maker: _Maker, store: Any, rank: int) -> None:
        self._maker = maker
        self._store = store
        self._rank = rank
        self._links: dict[Channel, Link] = {}
        self.begin = maker.begin

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self._maker.device

    def connect(self, channels: Iterable[Channel]) -> None:
        """Make what is missing for these channels of all ranks. Raises ExecutionError where one does not come."""
        new = [channel for channel in channels if self._rank in channel[:2] and channel not in self._links]
        if len(self._links) + len(new) > _MOST_LINKS:
            raise ExecutionError(
                f"a rank on a CUDA device has at most {_MOST_LINKS} channels to others, each with a stream of its own; "
                f"rank {self._rank} has {len(self._links) + len(new)}; cut the model where fewer edges cross"
            )
        for channel in sorted(new, key=_turn):
            name = f"link/{channel.giver}/{channel.taker}/{int(channel.backward)}"
            try:
                link = self._links[channel] = self._maker.link(
                    distributed.PrefixStore(name, self._store),  # type: ignore[attr-defined]  # public all the same
                    sends=channel.giver == self._rank,
                )
                link.connect()
            except RuntimeError as error:
                peer = channel.giver + channel.taker - self._rank
                raise ExecutionError(
                    f"devices of neighbouring ranks are connected before a program runs; ranks {self._rank} and {peer} "
                    f"were not ({error}); give every process a device of its own"
                ) from error

    def __getitem__(self, channel: Channel) -> Link:
        return self._links[channel]

    def drain(self) -> None:
        """Wait until this rank's device has done all that was posted."""
        for link in self._links.values():
            link.drain()

    def close(self) -> None:
        """End all, where possible after the other ranks have drained theirs: what was sent may be on its way."""
        if self._links:
            peers = {rank for channel in self._links for rank in channel[:2]}
            with suppress(RuntimeError):  # a rank that does not close has failed, or will notice
                self._store.set(f"links drained/{self._rank}", "")
                self._store.wait([f"links drained/{rank}" for rank in peers], timedelta(seconds=_PATIENCE_S))
        self.abort()

    def abort(self) -> None:
        """End all at once, and with them what waits for them."""
        for link in list(self._links.values()):  # another thread may add one
            with suppress(RuntimeError):
                link.abort()


def _turn(channel: Channel) -> tuple[bool, int, int, int]:
    """The order of all channels in which links are made: even ranks' first, so that pairs do so side by side."""
    return channel.backward, channel.giver % 2, channel.giver, channel.taker


class _Sent(NamedTuple):
    """A message that the device may not have sent. spare: where its memory is used again."""

    sending: _Sending
    message: Packed
    spare: list[Packed]


class DeviceOutgoing:
    """The sending end of a channel. port: for headers."""

    def __init__(self, links: Links, channel: Channel, port: ShortPort, tag: int, encoding: Encoding) -> None:
        self.book = LayoutBook()
        self._encoding = encoding
        self._links = links
        self._channel = channel
        self._write = port.sender(channel.taker, tag)
        self._position = 0
        self._sent: deque[_Sent] = deque()

    def open(self, keys: Sequence[Hashable]) -> None:
        """Begin a run."""
        self._position = 0
        self.book.open(keys)

    def extend(self, keys: Sequence[Hashable]) -> None:
        """Further messages of the run."""
        self.book.extend(keys, self._position)

    def send(self, value: Any) -> None:
        """Send the next value, without waiting."""
        description, leaves = describe(value, self._encoding)
        form = self.book.form(self._position)
        written = b""
        if form is None or form.description != description:
            form = MessageLayout(description, self._encoding)
            written = form.written()
            self.book.note(self._position, form)
        if form.nbytes:
            self._send_data(form, leaves)
        self._send_header(written)
        self._position += 1

    def _send_data(self, form: MessageLayout, leaves: tuple[Any, ...]) -> None:
        self._reclaim()
        packed = form.spare.pop() if form.spare else Packed(form, 0, self._links.device)
        packed.fill(leaves)
        self._sent.append(_Sent(self._links[self._channel].send(packed.tensor), packed, form.spare))

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
        """Wait until the device has sent everything."""
        if self._sent:
            self._links[self._channel].drain()


class DeviceIncoming:
    """The receiving end of a channel. port: for headers."""

    def __init__(self, links: Links, channel: Channel, port: ShortPort, tag: int, encoding: Encoding) -> None:
        self.book = LayoutBook()
        self._encoding = encoding
        self.taken = 0
        self._links = links
        self._channel = channel
        self._reader = port.reader(channel.giver, tag)

    def open(self, keys: Sequence[Hashable]) -> None:
        """Begin a run."""
        self.taken = 0
        self.book.open(keys)

    def extend(self, keys: Sequence[Hashable]) -> None:
        """Further messages of the run."""
        self.book.extend(keys, self.taken)

    def post(self) -> None:
        """Nothing to do: a receive is posted when its header is there."""

    def receive(self) -> Any:
        """The next value, once the sender's host has posted it; its tensors are there in the current stream's order."""
        (form_bytes,) = _LENGTH.unpack(self._read(_LENGTH.size))
        form = self.book.form(self.taken)
        if form_bytes or form is None:
            form = MessageLayout.read(bytes(self._read(form_bytes)), self._encoding)
            self.book.note(self.taken, form)
        self.taken += 1
        if form.nbytes:
            memory = self._links[self._channel].receive(form.nbytes)
        else:
            memory = torch.empty(0, dtype=torch.uint8, device=self._links.device)
        return form.restore(memory, 0)

    def _read(self, size: int) -> bytearray:
        memory = bytearray(size)
        try:
            self._reader(memoryview(memory))
        except RuntimeError as error:
            raise lost(self._channel.giver, error) from None
        return memory


def ends_over(links: Links, port: ShortPort, rank: int, encoding: Encoding) -> Ends:
    """How a wire makes its channels with another rank: (the rank, the tag of headers, backward or not)."""

    def ends(peer: int, tag: int, backward: bool) -> tuple[DeviceOutgoing, DeviceIncoming]:
        return (
            DeviceOutgoing(links, Channel(rank, peer, backward), port, tag, encoding),
            DeviceIncoming(links, Channel(peer, rank, backward), port, tag, encoding),
        )

    return ends
