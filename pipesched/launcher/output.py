"""Output of ranks: cuts it into whole lines, and writes them without ever waiting for the reader."""

import os
import re
from typing import IO

__all__ = ["LineCutter", "OutputQueue", "RankPipe", "Screen"]

#: A whole line: text and its end. A carriage return alone ends the line of a progress bar.
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
#: A line of more bytes than this is passed on in parts.
_LONGEST = 1 << 20


class LineCutter:
    """Cuts the bytes of one pipe into lines with a prefix."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._part = b""

    def add(self, data: bytes) -> bytes:
        """Take bytes, and return the lines that are complete now."""
        data = self._part + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # a newline may follow a return at the end
        self._part = data[end:]
        lines = b"".join(self._prefix + line for line in _LINE.findall(data, 0, end))
        return lines + self.rest() if len(self._part) > _LONGEST else lines

    def rest(self) -> bytes:
        """Return the last line if it has no end, with an end."""
        part, self._part = self._part, b""
        return self._prefix + part.rstrip(b"\r") + b"\n" if part else b""


class OutputQueue:
    """Bytes on their way to a file descriptor, such as the launcher's stdout.

    If the reader is slow, the bytes wait here, so that the launcher can still answer signals. Once `full`, the launcher
    stops reading from the ranks, and they wait in turn.
    """

    #: A pipe that is ready takes this many bytes at once; more could block. POSIX guarantees 512, Linux has 4096.
    _AT_ONCE = 4096

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.closed = False
        self._waiting = bytearray()

    @property
    def empty(self) -> bool:
        """Whether all bytes are written."""
        return not self._waiting

    @property
    def full(self) -> bool:
        """Whether no more bytes should be added before some are written."""
        return len(self._waiting) > 1 << 20

    def put(self, data: bytes) -> None:
        """Add whole lines. They are dropped if the reader has closed its end."""
        if not self.closed:
            self._waiting += data

    def write(self) -> None:
        """Write some bytes, once the descriptor is ready: whole lines, if one fits."""
        end = self._waiting.rfind(b"\n", 0, self._AT_ONCE) + 1
        try:
            written = os.write(self.descriptor, self._waiting[: end or self._AT_ONCE])
        except BlockingIOError:  # the descriptor is non-blocking, and another process was faster
            return
        except OSError:
            self.closed = True
            self._waiting.clear()
            return
        del self._waiting[:written]


class Screen:
    """The launcher's stdout and stderr. If both are one file or terminal, they share a queue, which keeps the order."""

    def __init__(self, out: int, err: int) -> None:
        self.out = OutputQueue(out)
        self.err = self.out if os.path.sameopenfile(out, err) else OutputQueue(err)
        self._told = False

    @property
    def queues(self) -> set[OutputQueue]:
        """The queues that have bytes to write."""
        return {queue for queue in (self.out, self.err) if not queue.empty}

    @property
    def full(self) -> bool:
        """Whether a reader is so slow that ranks should wait."""
        return self.out.full or self.err.full

    def say(self, text: str) -> None:
        """Print a line of the launcher itself to stderr."""
        self.err.put(f"pipesched run: {text}\n".encode())

    def write(self, queue: OutputQueue) -> None:
        """Write some bytes of a queue. Say so if its reader is gone."""
        queue.write()
        if queue.closed and not self._told:
            self._told = True
            self.say("stdout is closed; the ranks go on, and their output is dropped from here")


class RankPipe:
    """The pipe with the stdout or the stderr of a rank."""

    _AT_ONCE = 1 << 16

    def __init__(self, file: IO[bytes], cutter: LineCutter, queue: OutputQueue) -> None:
        self._file = file
        self._cutter = cutter
        self._queue = queue
        self.descriptor = file.fileno()
        os.set_blocking(self.descriptor, False)

    @property
    def closed(self) -> bool:
        """Whether the pipe has ended."""
        return self._file.closed

    def read(self) -> bool:
        """Pass on bytes that are in the pipe. Return whether there may be more."""
        try:
            data = os.read(self.descriptor, self._AT_ONCE)
        except BlockingIOError:
            return False
        self._queue.put(self._cutter.add(data))
        if not data:
            self.close()
        return bool(data)

    def drain(self) -> None:
        """Pass on all that a rank wrote before it ended. A process that it started may still write: 1 MiB is enough."""
        reads = 0
        while not self.closed and reads < 16 and self.read():
            reads += 1
        self._queue.put(self._cutter.rest())

    def close(self) -> None:
        """Close the pipe, and pass on a line without an end."""
        self._queue.put(self._cutter.rest())
        self._file.close()
