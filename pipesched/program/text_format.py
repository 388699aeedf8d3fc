"""Text format: writes a program as lines of text, and parses such text."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from pipesched.checks import shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Columns, Orders
from pipesched.program.actions import Action
from pipesched.program.dependencies import StageGraph

__all__ = ["order_words", "parse_program", "table_lines"]

_LINES = (
    "a line must be 'name NAME', 'microbatches N', 'placement RANK...', 'edges A-B...', 'weights INDEX...', "
    "'slices N', 'route STAGE... : MICROBATCH...', 'versions STAGE : VERSION...', 'forward-only' or 'rank R: ...'"
)


def order_words(columns: Columns) -> Iterator[str]:
    """Yield the actions of one rank as words. Two overlapping actions are one word: ``1F4&0B2``."""
    before = ""
    for action, joined in zip(columns, columns.joined.tolist(), strict=True):
        if joined:
            before += f"{action}&"
        else:
            yield f"{before}{action}"
            before = ""


def table_lines(routes: tuple[tuple[int, ...], ...], versions: tuple[tuple[int, ...], ...]) -> Iterator[str]:
    """Yield a line for each route, with the micro-batches that take it, and a line for each stage's weight versions."""
    for route in dict.fromkeys(routes):
        members = [microbatch for microbatch, its_route in enumerate(routes) if its_route == route]
        yield f"route {_spaced(route)} : {_spaced(members)}"
    for stage, of_stage in enumerate(versions):
        if of_stage:
            yield f"versions {stage} : {_spaced(of_stage)}"


def _spaced(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


@dataclass
class _Read:
    """The fields of a program that have been parsed so far."""

    header: dict[str, Any] = field(default_factory=dict)
    edges_line: int = 0
    ranks: list[Columns] = field(default_factory=list)
    routes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    versions: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def line(self, words: list[str], number: int) -> None:
        """Parse the words of one line. ``number`` is the line's number."""
        match words[0]:
            case "rank":
                self.ranks.append(_parse_order(words, len(self.ranks)))
            case "route" if ":" in words:
                route, members = _halves(words)
                _add(self.routes, dict.fromkeys(members, tuple(route)), "micro-batch", "route")
            case "versions" if words[2:3] == [":"]:
                (stage,), versions = _halves(words)
                _add(self.versions, {stage: tuple(versions)}, "stage", "line of versions")
            case _:
                self.header |= _once(self.header, _parse_header(words), words[0])
                self.edges_line = number if words[0] == "edges" else self.edges_line


def parse_program(text: str) -> dict[str, Any]:
    """Parse a program's text into the fields of `Program`. Raises ScheduleError if the text is invalid."""
    read = _Read()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            read.line(words, number)
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from None
        except ValueError as error:
            raise ScheduleError(f"line {number}: expected whole numbers; got {shown(line.strip())}; {error}") from None
    return _complete(read)


def _parse_order(words: list[str], rank: int) -> Columns:
    if len(words) < 2 or words[1] != f"{rank}:":
        raise ScheduleError(
            f"ranks must be written in order, each as 'rank {rank}: ...'; got {shown(' '.join(words[:2]))}; write "
            f"'rank {rank}:'"
        )
    groups = [word.split("&") for word in words[2:]]
    columns = Columns.of(Action.parse(text) for group in groups for text in group)
    columns.joined[:] = True
    columns.joined[np.array([*accumulate(map(len, groups))], np.int64) - 1] = False
    return columns


def _halves(words: list[str]) -> tuple[list[int], list[int]]:
    colon = words.index(":")
    return [*map(_number, words[1:colon])], [*map(_number, words[colon + 1 :])]


def _number(word: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", word):
        raise ValueError(f"{shown(word)} is not a whole number of at most nine digits; correct it")
    return int(word)


def _add(table: dict[int, tuple[int, ...]], entries: dict[int, tuple[int, ...]], unit: str, entry: str) -> None:
    taken = sorted(set(table) & set(entries))
    if taken:
        raise ScheduleError(
            f"a {unit} may have only one {entry}; {unit} {taken[0]} has more than one; remove all but one"
        )
    table |= entries


def _once(header: Mapping[str, Any], parsed: dict[str, Any], word: str) -> dict[str, Any]:
    if not parsed.keys().isdisjoint(header):
        raise ScheduleError(f"a header line may appear only once; {word!r} appears twice; remove one")
    return parsed


def _parse_header(words: list[str]) -> dict[str, Any]:
    key, *values = words
    match key:
        case "name":
            return {"name": " ".join(values)}
        case "microbatches" if len(values) == 1:
            return {"num_microbatches": _number(values[0])}
        case "slices" if len(values) == 1:
            return {"slices_per_microbatch": _number(values[0])}
        case "placement" | "weights":
            return {key: tuple(map(_number, values))}
        case "edges" if all(re.fullmatch(r"[0-9]+-[0-9]+", value) for value in values):
            return {"edges": [tuple(map(_number, value.split("-"))) for value in values]}
        case "forward-only" if not values:
            return {"forward_only": True}
    raise ScheduleError(f"{_LINES}; got {shown(' '.join(words))}; correct or remove it")


def _complete(read: _Read) -> dict[str, Any]:
    """Check the parsed lines, and combine them into the fields of `Program`."""
    header = read.header
    if "num_microbatches" not in header:
        raise ScheduleError(
            "a program's text must state the number of micro-batches; the text has no line 'microbatches'; add "
            "'microbatches N'"
        )
    if not read.ranks:
        raise ScheduleError(
            "a program must have at least one rank; the text has no line 'rank 0: ...'; add 'rank 0: 0F0 0B0'"
        )
    header["orders"] = Orders.of_ranks(read.ranks)
    placement = header.setdefault("placement", tuple(range(len(read.ranks))))
    for name, table, count in (
        ("routes", read.routes, header["num_microbatches"]),
        ("versions", read.versions, len(placement)),
    ):
        if table and not 0 <= min(table) <= max(table) < count:
            unit = "micro-batches" if name == "routes" else "stages"
            wrong = next(number for number in sorted(table) if not 0 <= number < count)
            raise ScheduleError(
                f"{name} may only be given for the program's {unit}, 0..{count - 1}; got {wrong}; correct the line"
            )
        if name == "routes" and 0 < len(table) < count:
            missing = next(number for number in range(count) if number not in table)
            raise ScheduleError(
                f"if any micro-batch has a route, all must have one; micro-batch {min(table)} of {count:,} has a "
                f"route, but micro-batch {missing} has no route; add one, or correct the number of micro-batches"
            )
        if table:
            header[name] = tuple(table.get(number, ()) for number in range(count))
    edges = header.pop("edges", None)
    if edges is not None:
        bad = [edge for edge in edges if not 0 <= edge[0] < edge[1] < len(placement)]
        if bad:
            raise ScheduleError(
                f"line {read.edges_line}: an edge A-B must go from a stage to a later one, among the stages "
                f"0..{len(placement) - 1}; got {bad[0][0]}-{bad[0][1]}; correct it"
            )
        header["graph"] = StageGraph.of(len(placement), edges)
    return header
