"""File changes: functions that change the values, words or bytes of a file at random."""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["changed_bytes", "changed_value", "changed_words"]

_DEEP = 100_000
_DIGITS = 5000
#: The JSON texts that replace a value.
_STRANGE = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-1", "-0.5", "0", "1", "1.5", "2147483648",
    "9223372036854775807", "9223372036854775808", "1e300", "1" + "0" * 400, "9" * _DIGITS, "-" + "9" * _DIGITS,
    "1e-320", "true", "false", "null", '""', '"x"', '"3"', '"\\ud800"', '"\\u0000"', '"../x"', "[]", "{}", "[[]]",
    "[null]", "[1, 2, 3]", '{"x": 1}', '{"": []}', "[" * _DEEP + "]" * _DEEP, '{"x": ' * 1000 + "1" + "}" * 1000,
    "[" * 200 + "]" * 200,
]  # fmt: skip
_WORDS = [
    "0",
    "-1",
    "99999999999",
    "9" * 40,
    "9" * _DIGITS,
    "1.5",
    "x",
    ":",
    "&",
    "0F0&0B0",
    "0F99999",
    "9F0",
    "route",
    "rank",
]


def changed_value(rng: random.Random, text: str) -> str:
    """Return a JSON text with one to three random changes in its values, keys or nesting."""
    tree = json.loads(text)
    raw: dict[str, str] = {}

    def strange() -> str:
        mark = f"@{len(raw)}@"
        raw[mark] = rng.choice(_STRANGE)
        return mark

    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(tree))
        if not places:
            break
        holder, key = rng.choice(places)
        _change(rng, holder, key, strange, places)
    written = json.dumps(tree, indent=rng.choice([None, 1]))
    for mark, value in raw.items():
        written = written.replace(json.dumps(mark), value)
    return written


def _change(rng: random.Random, holder: Any, key: Any, strange: Callable[[], str], places: list[Any]) -> None:
    how = rng.choice(["strange"] * 6 + ["delete", "twin", "swap", "unknown", "rename", "near"])
    other, there = rng.choice(places)
    if how == "strange":
        holder[key] = strange()
    elif how == "delete":
        del holder[key]
    elif how == "twin" and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == "swap":
        try:
            holder[key], other[there] = json.loads(json.dumps(other[there])), json.loads(json.dumps(holder[key]))
        except (LookupError, TypeError):
            return  # one of the two places is inside the other
    elif how == "unknown" and isinstance(holder, dict):
        holder["unheard_of" if rng.random() < 0.5 else f"{key}_"] = rng.choice([1, "x", strange()])
    elif how == "rename" and isinstance(holder, dict):
        holder[rng.choice(["", "x", f"{key}s", "0", "-1"])] = holder.pop(key)
    elif isinstance(holder[key], int | float):
        holder[key] += rng.choice([-1, 1, 0.5, -1e9])
    else:
        holder[key] = strange()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict | list):
        for key, value in list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)):
            yield tree, key
            yield from _places(value)


def changed_words(rng: random.Random, text: str) -> str:
    """Return a text with some lines or words changed at random."""
    lines = [re.split(r"([ ,])", line) for line in text.splitlines()]
    for _ in range(rng.choice([1, 1, 2, 3])):
        if not lines:
            break
        line = rng.choice(lines)
        at = rng.randrange(len(line))
        how = rng.choice(["word", "word", "number", "number", "number", "delete", "twin", "line", "drop", "header"])
        if how == "word":
            line[at] = rng.choice(_WORDS)
        elif how == "number":
            numbers = list(re.finditer(r"\d+", line[at]))
            if numbers:
                found = rng.choice(numbers)
                line[at] = line[at][: found.start()] + rng.choice(_WORDS[:6]) + line[at][found.end() :]
        elif how == "delete":
            del line[at]
            line += [""] if not line else []
        elif how == "twin":
            line.insert(at, line[at])
        elif how == "line":
            lines.insert(rng.randrange(len(lines)), list(line))
        elif how == "drop":
            lines.remove(line)
        else:
            lines.insert(rng.randrange(len(lines) + 1), [rng.choice(_HEADERS)])
    return "\n".join("".join(line) for line in lines) + "\n"


_HEADERS = [
    "slices 2", "slices 0", "slices -2", "forward-only", "route 0 1 : 0 1", "route 0 : 99999999999", "route : ",
    "weights 0 0 1", "weights 0 1 2", "weights -1 0 1", "weights 99999999999999999999 0 1", "edges 0-1",
    "edges 0-2 1-2", "edges", "placement 0 0 0", "placement 0 1 2 9", "placement -1 0 1", "versions 0 : 0 0 0 1",
    "versions 1 : -1 0 0 0", "versions 9 : 1", "microbatches 3", "microbatches 99999999999999", "microbatches -4",
    "rank 3: 3F0 3B0", "rank 0:", "name", "versions 0 : 1 2 3 4", "route 0 1 2 : 0 1 2 3", "route 2 1 0 : 0 1 2 3",
    "route 0 0 1 2 : 0", "edges " + " ".join(f"{a}-{a + 1}" for a in range(300)), "placement " + "0 " * 5000,
    "versions 0 : 99999999999999999999999 0 0 0",
]  # fmt: skip


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the data with some bytes changed, removed or doubled at random."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, end = sorted((rng.randrange(len(found) + 1), rng.randrange(len(found) + 1)))
        how = rng.choice(["flip", "flip", "flip", "cut", "twin", "out", "in", "deep", "number", "whole"])
        if how == "flip" and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif how == "cut":
            del found[at:]
        elif how == "twin":
            found[at:at] = found[at : min(end, at + 5000)]
        elif how == "out":
            del found[at : min(end, at + 40)]
        elif how == "in":
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == "deep":
            found[at:at] = rng.choice([b"[", b'{"x":', b"("]) * _DEEP
        elif how == "number":
            numbers = list(re.finditer(rb"\d+", bytes(found)))
            if numbers:
                one = rng.choice(numbers)
                found[one.start() : one.end()] = rng.choice([b"9" * _DIGITS, b"9" * 25, b"-1", b"1e999", b"NaN", b"0"])
        elif rng.random() < 0.2:
            whole = [
                b"",
                b"\xff\xfe" + data,
                b"\xef\xbb\xbf" + data,
                b"\x00" * 100,
                b"[]",
                b"{}",
                b"null",
                b"1",
                b'"x"',
                b"[" * _DEEP,
            ]
            found = bytearray(rng.choice(whole))
        if not found:
            break
    return bytes(found)
