"""Layout predictor: predicts the layout of each message on a channel. Both ends of a channel predict the same."""

from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from pipesched.runtime.transport.message_layout import MessageLayout
from pipesched.simulation.memory import AHEAD

__all__ = ["DIGEST_BYTES", "LayoutPredictor", "digest"]

_SETTLED = 2 * AHEAD  # messages; receives are posted fewer than this many messages ahead of the last received message
_REMEMBERED = 4096  # the maximum number of layouts of one channel that are remembered
DIGEST_BYTES = 16


def digest(data: bytes) -> bytes:
    """Return a 16-byte digest of ``data``."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


class LayoutPredictor:
    """The layouts that one end of a channel predicts. The other end predicts the same layouts."""

    def __init__(self) -> None:
        self._layouts: dict[Hashable, MessageLayout] = {}
        #: Messages with unpredicted layouts: (number of the message in the run, layout key, layout).
        self._news: deque[tuple[int, Hashable, MessageLayout]] = deque()
        self._keys: Sequence[Hashable] = ()
        self._first = 0  # number of the first message in ``foreseen``
        self.foreseen: list[MessageLayout | None] = []
        self.sizes = digest(b"")  # digest of the predicted sizes, compared between both ends

    @property
    def end(self) -> int:
        """The number of messages that have been added to the run so far."""
        return self._first + len(self._keys)

    def open(self, keys: Sequence[Hashable]) -> None:
        """Begin a run: predict the layouts of its messages from their keys."""
        if keys is not self._keys or self._news:
            self._write(len(self._news))
            self._keys = keys
            self._first = 0
            self.foreseen = [self._layouts.get(key) for key in keys]
            self.sizes = digest(repr([-1 if layout is None else layout.nbytes for layout in self.foreseen]).encode())

    def extend(self, keys: Sequence[Hashable], behind: int) -> None:
        """Add messages to the run. ``behind`` is the number of messages already sent or received."""
        self._keys = [*self._keys[behind - self._first :], *keys]
        del self.foreseen[: behind - self._first]
        self._first = behind

    def form(self, number: int) -> MessageLayout | None:
        """Return the predicted layout of message ``number`` of the run; None if the message's key is new."""
        at = number - self._first
        if at == len(self.foreseen):
            self._write(sum(noted <= number - _SETTLED for noted, *_ in self._news))
            self.foreseen.append(self._layouts.get(self._keys[at]))
        return self.foreseen[at]

    def note(self, number: int, layout: MessageLayout) -> None:
        """Record the layout of a message for which another layout, or no layout, was predicted.

        The layout is used for predictions from the next run on. If the current run is extended, the layout is also used
        for added messages that come at least ``_SETTLED`` messages later, when both ends have certainly recorded the
        layout.
        """
        self._news.append((number, self._keys[number - self._first], layout))

    def _write(self, count: int) -> None:
        for _ in range(count):
            _, key, layout = self._news.popleft()
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            self._layouts[key] = layout
