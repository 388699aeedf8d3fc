"""Transfer plan: which process sends which rows of which tensor to which other process.

What the processes hold is data: the rows of each tensor, and their holders. What they need is data, too. A row is sent
only to processes that need it and do not hold it, and only once to each of them, so no transfer can move fewer bytes.
All processes compute the same messages, in rounds of bounded size. In a round a process first sends, without waiting,
then receives, and then waits until its own messages have been received. The receives of a round wait only for sends,
which come before all waits of the round, and the last wait is only for receives. So each round ends in all processes,
and a transfer cannot deadlock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipesched.saving.chunks import Rows

__all__ = ["HeldRows", "Message", "bytes_moved", "messages_for", "rounds_of"]


@dataclass(frozen=True, kw_only=True)
class HeldRows:
    """Some rows of a tensor that one or several processes hold."""

    #: The rows; None for a whole tensor.
    rows: Rows | None
    #: The size of these rows in bytes.
    nbytes: int
    #: The processes that hold these rows.
    holders: tuple[int, ...]

    def part(self, rows: Rows | None) -> Rows | None:
        """Return those of the tensor's ``rows`` that are held here; None if both are a whole tensor."""
        if self.rows is None or rows is None:
            return self.rows if rows is None else rows
        start = max(self.rows.start, rows.start)
        return Rows(start, max(start, min(self.rows.end, rows.end)))

    def size(self, part: Rows | None) -> int:
        """Return the size in bytes of a part of the tensor that is held here."""
        if self.rows is None or part is None:
            return self.nbytes
        return self.nbytes * (part.end - part.start) // max(1, self.rows.end - self.rows.start)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Rows of a tensor that one process sends to another."""

    key: str
    #: The rows of the tensor; None for a whole tensor.
    rows: Rows | None
    source: int
    target: int
    nbytes: int


def messages_for(
    held: Mapping[str, Sequence[HeldRows]], needed: Mapping[int, Mapping[str, Rows | None]]
) -> list[Message]:
    """Return the messages that give each process what it needs and does not hold.

    ::

        held = {"weight": [HeldRows(rows=None, nbytes=400, holders=(0, 1))]}
        messages_for(held, {2: {"weight": None}})  # process 0 sends to process 2

    Of several holders, the one that sends the fewest bytes so far is the source.

    Args:
        held: for each tensor, its rows and their holders. The keys are in the order in which the tensors are used.
        needed: for each process, the rows of each tensor that it needs (None: the whole tensor).

    """
    sent: Counter[int] = Counter()
    messages = []
    for key, pieces in held.items():
        for target, own in needed.items():
            for piece in pieces if key in own else ():
                part = piece.part(own[key])
                if target in piece.holders or (part is not None and part.start == part.end):
                    continue
                source = min(piece.holders, key=lambda holder: (sent[holder], holder))
                size = piece.size(part)
                sent[source] += size
                messages.append(Message(key=key, rows=part, source=source, target=target, nbytes=size))
    return messages


def rounds_of(messages: Sequence[Message], most_bytes: int) -> list[list[Message]]:
    """Divide messages into rounds, in which no process sends or receives more than ``most_bytes``.

    A larger message has a round of its own.
    """
    rounds: list[list[Message]] = []
    busy: Counter[int] = Counter()
    for message in messages:
        ends = (message.source, message.target)
        if not rounds or any(busy[end] and busy[end] + message.nbytes > most_bytes for end in ends):
            rounds.append([])
            busy.clear()
        rounds[-1].append(message)
        busy.update(dict.fromkeys(ends, message.nbytes))
    return rounds


def bytes_moved(messages: Sequence[Message]) -> int:
    """Return the total size of the messages."""
    return sum(message.nbytes for message in messages)
