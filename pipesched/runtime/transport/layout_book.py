"""Layout book: what form each message of a channel is foreseen to have. Both ends keep one, and foresee the same."""

from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from pipesched.runtime.transport.message_layout import MessageLayout
from pipesched.simulation.memory import AHEAD

__all__ = ["DIGEST_BYTES", "LayoutBook", "digest"]

_SETTLED = 2 * AHEAD  # messages: when a receive is posted, all that come so many before it are here, and more
_REMEMBERED = 4096  # forms in the book of a channel
DIGEST_BYTES = 16


def digest(data: bytes) -> bytes:
    """A short stand-in for data: equal where the data are."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


class LayoutBook:
    """The forms that one end of a channel foresees: the same ones as the other end."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, MessageLayout] = {}
        self._news: deque[tuple[int, Hashable, MessageLayout]] = deque()  # with the message's number in the run
        self._keys: Sequence[Hashable] = ()
        self._first = 0  # the message that stands first in what follows; those before are behind
        self.foreseen: list[MessageLayout | None] = []
        self.sizes = digest(b"")  # what both ends must foresee alike

    @property
    def end(self) -> int:
        """How many messages of the run are known."""
        return self._first + len(self._keys)

    def open(self, keys: Sequence[Hashable]) -> None:
        """Foresee the messages of a run, which have these keys."""
        if keys is not self._keys or self._news:
            self._write(len(self._news))
            self._keys = keys
            self._first = 0
            self.foreseen = [self._forms.get(key) for key in keys]
            self.sizes = digest(repr([-1 if form is None else form.nbytes for form in self.foreseen]).encode())

    def extend(self, keys: Sequence[Hashable], behind: int) -> None:
        """Further messages of the run. behind: how many are over, and need not be remembered."""
        self._keys = [*self._keys[behind - self._first :], *keys]
        del self.foreseen[: behind - self._first]
        self._first = behind

    def form(self, number: int) -> MessageLayout | None:
        """What is foreseen of a message of the run; of a further one, when that is the next to be asked for."""
        at = number - self._first
        if at == len(self.foreseen):
            self._write(sum(noted <= number - _SETTLED for noted, *_ in self._news))
            self.foreseen.append(self._forms.get(self._keys[at]))
        return self.foreseen[at]

    def note(self, number: int, form: MessageLayout) -> None:
        """A message had another form. It counts from the next run on, or a few messages on in one of several parts:
        not before both ends must know it, so that they agree.
        """
        self._news.append((number, self._keys[number - self._first], form))

    def _write(self, count: int) -> None:
        for _ in range(count):
            _, key, form = self._news.popleft()
            if len(self._forms) >= _REMEMBERED:
                self._forms.clear()
            self._forms[key] = form
