"""Transfer plans: every process gets what it needs, each row is sent once, and a round is bounded."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipesched.elastic.transfer_plan import HeldRows, Message, bytes_moved, messages_for, rounds_of
from pipesched.saving.chunks import Rows

PROCESSES, ROWS, ROW_BYTES = 5, 12, 4


@st.composite
def pictures(draw):
    """What processes hold and need: whole tensors, or tensors cut into rows, of which some processes hold a part."""
    held, needed = {}, [{} for _ in range(PROCESSES)]
    for number in range(draw(st.integers(1, 4))):
        key = f"tensor {number}"
        cuts = sorted({0, ROWS, *draw(st.lists(st.integers(0, ROWS), max_size=2))})
        spans = [Rows(*pair) for pair in pairwise(cuts)] if draw(st.booleans()) else [None]
        held[key] = [
            HeldRows(
                rows=rows,
                nbytes=ROW_BYTES * (ROWS if rows is None else rows.end - rows.start),
                holders=tuple(sorted(draw(st.sets(st.integers(0, PROCESSES - 1), min_size=1)))),
            )
            for rows in spans
        ]
        for own in needed:
            if draw(st.booleans()):
                start, end = sorted(draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))))
                own[key] = None if spans == [None] or draw(st.booleans()) else Rows(start, end)
    return held, dict(enumerate(needed))


def numbers(rows):
    return range(ROWS) if rows is None else range(rows.start, rows.end)


@given(pictures())
def test_each_process_gets_each_missing_row_once(picture):
    held, needed = picture
    arrived = Counter()
    for message in messages_for(held, needed):
        piece = next(one for one in held[message.key] if message.source in one.holders and _in(message.rows, one.rows))
        assert set(numbers(message.rows)) <= set(numbers(piece.rows))
        assert message.nbytes == ROW_BYTES * len(numbers(message.rows))
        arrived.update((message.target, message.key, row) for row in numbers(message.rows))
    missing = {
        (process, key, row)
        for process, own in needed.items()
        for key, rows in own.items()
        for row in numbers(rows)
        if not any(process in one.holders and row in numbers(one.rows) for one in held[key])
    }
    assert arrived == Counter(missing)


def _in(rows, of):
    return of is None or (rows is not None and rows.start >= of.start and rows.end <= of.end)


@given(pictures(), st.integers(1, 60))
def test_a_round_is_bounded_and_keeps_the_order(picture, most_bytes):
    messages = messages_for(*picture)
    rounds = rounds_of(messages, most_bytes)
    assert [message for own in rounds for message in own] == messages
    for own in rounds:
        for process in range(PROCESSES):
            sizes = [message.nbytes for message in own if process in (message.source, message.target)]
            assert len(sizes) <= 1 or sum(sizes) <= most_bytes


def test_holders_of_the_same_rows_share_the_sending():
    held = {str(number): [HeldRows(rows=None, nbytes=8, holders=(0, 1))] for number in range(4)}
    messages = messages_for(held, {2: dict.fromkeys(held)})
    assert Counter(message.source for message in messages) == {0: 2, 1: 2}
    assert bytes_moved(messages) == 32
    assert messages[0] == Message(key="0", rows=None, source=0, target=2, nbytes=8)
