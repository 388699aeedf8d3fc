"""Broken files: valid files of every sort that pipesched reads, changed at random; what becomes of each.

A file that is read is either taken, and then is valid, or refused by a PipeschedError that names it. Whatever else
happens is a bug: another exception (raw), a reader that does not return (hang), a value that was taken although it
cannot be true, or that was taken and is not in what was read (ignored). Equal seeds make equal files.

    python benchmarks/broken_files.py --files 400            # of each sort; prints a table and what went wrong
    python benchmarks/broken_files.py --only plan --show 3   # three messages of each outcome

Each file is read in a process of its own that is ended after ``--limit`` seconds, with all that one does with what was
read: a program is validated, simulated and run by fake stages, a profile is cut, a plan explained, a trace drawn.
"""

import argparse
import json
import math
import multiprocessing
import random
import re
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx

from pipesched import Costs, Plan, Profile, Program, Trace, load_program, schedules, simulate, validate
from pipesched.cli.options import read_links
from pipesched.errors import PipeschedError
from pipesched.json_files import load_json
from pipesched.planning.report import Report
from pipesched.program.lowering import lower
from pipesched.simulation.links import Link, Links
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.overheads import Machine, Overheads
from pipesched.viz.text import text_timeline

FILES, LIMIT_S = 400, 20.0
_MEMORY_BYTES = 8 << 30
_LONGEST = 4000  # letters of a message: a longer one quotes the file


class Wrong(Exception):
    """A file was taken that should not have been."""


@dataclass(frozen=True)
class Sort:
    """A sort of file. seeds: valid ones; read: takes a path and does with it all that one does; ending: of its name."""

    name: str
    seeds: Callable[[], list[str | bytes]]
    read: Callable[[Path], None]
    ending: str = ".json"


# ---- valid files --------------------------------------------------------------------------------------------------


def _programs() -> list[str | bytes]:
    shapes = {"dualpipe": 4, "chimera": 4}
    found: list[str | bytes] = []
    for name in schedules.names(sliced=True):
        program = schedules.get(name).program(shapes.get(name, 3), 4)
        found.append(str(program))
        if name in ("1f1b", "zb-v", "interleaved-1f1b"):
            found += [str(lower(program)), str(program.forward())]
    found.append("name skips\nmicrobatches 2\nedges 0-1 0-2 1-2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n"
                 "rank 2: 2F0 2B0 2F1 2B1\n")  # fmt: skip
    return found


def _tables() -> list[str | bytes]:
    names = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v", "hanayo")
    programs = [schedules.get(name).program(3, 4) for name in names]
    return ["".join(",".join(map(str, order)) + "\n" for order in program.orders) for program in programs]


def _costs(num_stages: int) -> Costs:
    return Costs.uniform(
        num_stages,
        forward_s=0.5,
        input_grad_s=0.25,
        weight_grad_s=0.25,
        transfer_s=0.125,
        activation_bytes=100,
        input_bytes=10,
        output_bytes=10,
        weight_bytes=1000,
        gradient_bytes=1000,
        links=_LINKS,
        overheads=_OVERHEADS,
    )


_OVERHEADS = Overheads(1e-4, 1e-5, Link(1e-5, 1e9), Link(2e-5, 2e9), Link(1e-6, 1e10), (1.0, 1.5, 1.75))
_LINKS = Links(Link(1e-6, 50e9, 0.1), Link(1e-5, 10e9), (0, 0, 1, 1), {(0, 1): Link(1e-3, 1e6)}, contended=True)
_MACHINE = Machine("a processor", Links(), _OVERHEADS, _OVERHEADS, 20e9)


def _row(rows: int) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph(parameters={})
    names = [f"layer{at}" for at in range(5)]
    for at, name in enumerate(names):
        graph.graph["parameters"][f"{name}.weight"] = (250, 1000)
        seconds = 0.001 * (at + 1) * rows
        numbers = {
            "forward_s": seconds,
            "backward_s": 2 * seconds,
            "input_grad_s": seconds,
            "weight_grad_s": seconds,
            "input_bytes": 10 * rows,
            "output_bytes": 10 * rows,
            "activation_bytes": 100 * rows,
            "weight_grad_bytes": 20 * rows,
            "parameter_bytes": 1000,
            "num_parameters": 250,
            "gradient_bytes": 1000,
        }
        graph.add_node(name, **numbers, parameters=(f"{name}.weight",), buffers=())
    for one, other in pairwise(names):
        graph.add_edge(one, other, bytes=10 * rows, tensors={f"{one}:0": 10 * rows})
    graph.add_edge("layer0", "layer4", bytes=10 * rows, tensors={"layer0:0": 10 * rows})
    return graph


@cache
def _profile() -> Profile:
    return Profile({rows: _row(rows) for rows in (2, 4, 8)}, "a row", _MACHINE)


@cache
def _plans() -> list[str | bytes]:
    import pipesched

    made = pipesched.tune(_profile(), num_ranks=2, batch_size=8, memory_limit_bytes=100_000)
    interleaved = schedules.get("interleaved-1f1b").with_options(chunks_per_rank=2)
    stages = (("a", "b"), ("c",), ("d",), ("e",))
    plans = [
        made,
        Plan(stages, interleaved.name, interleaved.program(2, 4), "always", _costs(4), interleaved.options),
        Plan(stages, "dualpipe", schedules.get("dualpipe").program(4, 4), {"a": "recompute", "c": "offload"}),
        Plan(stages[:2], "zb-auto", schedules.get("zb-auto").program(2, 4), costs=_costs(2)),
        Plan(stages[:2], "mine", replace(schedules.get("1f1b").program(2, 3), name="mine"), "except_last"),
    ]
    return [json.dumps(plan.to_dict(), indent=1) for plan in plans]


def _traces() -> list[Trace]:
    shapes = {"1f1b": (3, 4), "zb-h1": (2, 3), "dualpipe-v": (2, 4), "pipedream": (2, 3)}
    programs = [schedules.get(name).program(*shape) for name, shape in shapes.items()]
    return [simulate(lower(program), _costs(program.num_stages)) for program in programs]


def _options() -> list[str | bytes]:
    found = [{"schedule": name, "options": dict(schedules.get(name).options)} for name in schedules.names(sliced=True)]
    return [json.dumps({**one, "num_ranks": 4, "num_microbatches": 4, "steps": 1}) for one in found]


def _weights(name: str) -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        f"{name}.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        f"{name}.bias": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(32))


def _index() -> list[str | bytes]:
    there = {"a.weight": "a.safetensors", "a.bias": "a.safetensors", "b.weight": "b.safetensors"}
    return [json.dumps({"metadata": {"total_size": 64}, "weight_map": {**there, "b.bias": "b.safetensors"}})]


# ---- what is done with a file -------------------------------------------------------------------------------------


def _use_program(program: Program) -> None:
    if Program.parse(str(program)) != program:
        raise Wrong("the program's text does not parse to the program")
    errors = [_error(lambda: validate(program)), _error(lambda: _run_fake(program))]
    if errors[0] is None and errors[1] is not None:
        raise Wrong(f"validate says {errors[0]!r}, run_fake {errors[1]!r}")
    if errors[0] is not None:
        _error(lambda: lower(program))
        _error(lambda: simulate(program, Costs.uniform(program.num_stages)))
        raise errors[0]
    costs = _costs(program.num_stages)
    trace = simulate(program, Costs.uniform(program.num_stages))
    _numbers_hold(trace.makespan_s)
    text_timeline(trace, 100)
    rank_memory(program, costs, posted=2)


def _run_fake(program: Program) -> None:
    from pipesched.testing import run_fake

    run_fake(program)


def _error(call: Callable[[], object]) -> PipeschedError | None:
    try:
        call()
    except PipeschedError as error:
        return error
    return None


def _read_program(path: Path) -> None:
    _use_program(load_program(path))


def _read_plan(path: Path) -> None:
    plan = Plan.load(path)
    back = plan.to_dict()
    if Plan.from_dict(back).to_dict() != back:
        raise Wrong("the plan's dict is of another plan")
    edited = {"costs", "ties", "alternatives"} if plan.partition is None else set()  # then what was measured is dropped
    _nothing_ignored(_json(path), back, {"predicted", "program", "partition"} | edited)
    plan.explain()
    plan.memory()
    Report(plan).text(100)
    if plan.costs is not None:
        _numbers_hold(plan.costs.to_dict())


def _read_profile(path: Path) -> None:
    import pipesched

    profile = Profile.load(path)
    back = profile.to_dict()
    _numbers_hold(back)
    _nothing_ignored(_json(path), back)
    repr(profile)
    names = list(profile.layers)
    for rows in (1, 3, 64):
        costs = profile.costs([names[:1], names[1:]] if names[1:] else [names], rows)
        _numbers_hold(costs.to_dict())
    simulate(schedules.get("1f1b").program(costs.num_stages, 4), costs)
    plan = pipesched.tune(profile, num_ranks=2, batch_size=8)
    _numbers_hold([alternative.to_dict() for alternative in plan.alternatives])


def _read_trace(path: Path) -> None:
    trace = Trace.load(path)
    back = trace.to_dict()
    if Trace.from_dict(json.loads(json.dumps(back))) != trace:
        raise Wrong("the trace's dict is of another trace")
    if "traceEvents" not in _json(path):
        _nothing_ignored(_json(path), back)
    repr(trace)
    for value in (trace.busy_s, trace.span_s, trace.bubble_ratio, trace.peak_in_flight, trace.peak_bytes):
        _numbers_hold(value)
    for rank in range(trace.num_ranks):
        _numbers_hold([held for _, held in (*trace.memory(rank), *trace.in_flight(rank))])
    if trace.spans:
        text_timeline(trace, 100)
    json.loads(json.dumps(trace.chrome_events(), allow_nan=False))


def _read_costs(path: Path) -> None:
    costs = load_json(path, Costs.from_dict)
    back = costs.to_dict()
    _numbers_hold(back)
    _nothing_ignored(_json(path), back)
    for name in ("1f1b", "gpipe"):
        program = schedules.get(name).program(costs.num_stages, 4)
        _numbers_hold(simulate(program, costs).makespan_s)
        rank_memory(program, costs)
        rank_memory(program, costs, posted=2)


def _read_links(path: Path) -> None:
    links = read_links(path)
    back = links.to_dict()
    _numbers_hold(back)
    _nothing_ignored(_json(path), back)
    costs = Costs.uniform(4, links=links, output_bytes=1000)
    _numbers_hold(simulate(schedules.get("1f1b").program(4, 4), costs).makespan_s)


def _read_machine(path: Path) -> None:
    machine = load_json(path, Machine.from_dict)
    back = machine.to_dict()
    _numbers_hold(back)
    _nothing_ignored(_json(path), back)
    for ranks_are in ("threads", "processes"):
        costs = Costs.uniform(4, output_bytes=1000, **machine.between(ranks_are))  # type: ignore[arg-type]
        _numbers_hold(simulate(schedules.get("1f1b").program(4, 4), costs).makespan_s)


def _read_options(path: Path) -> None:
    """As a plan does, whose program is made again from them."""
    values = load_json(path, lambda plain: plain)
    if not isinstance(values, dict) or not isinstance(values.get("options"), dict):
        raise PipeschedError("not what is asked here")
    if set(values) - {"schedule", "options", "num_ranks", "num_microbatches", "steps"}:
        raise PipeschedError("not what is asked here")
    schedule = schedules.get(values.get("schedule")).with_options(**values["options"])
    program = schedule.program(values.get("num_ranks"), values.get("num_microbatches"), steps=values.get("steps"))
    validate(program)
    _use_program(program)


def _read_weights(path: Path) -> None:
    from pipesched.model.safetensors_files import WeightFiles

    for name in ("a", "b"):
        other = path.parent / f"{name}.safetensors"
        if other != path:
            other.write_bytes(_weights(name))
    files = WeightFiles(path)
    for name in files:
        tensor = files[name]
        if tensor.shape != files.shape(name) or tensor.dtype != files.dtype(name):
            raise Wrong(f"{name} has another shape than its entry says")
        if path.suffix == ".json" and not files._entries[name].path.resolve().is_relative_to(path.parent.resolve()):
            raise Wrong(f"{name} is read from outside the index's folder")


SORTS = [
    Sort("program, text", _programs, _read_program, ".txt"),
    Sort("program, CSV", _tables, _read_program, ".csv"),
    Sort("plan", _plans, _read_plan),
    Sort("profile", lambda: [json.dumps(_profile().to_dict(), indent=1)], _read_profile),
    Sort("trace", lambda: [json.dumps(trace.to_dict()) for trace in _traces()], _read_trace),
    Sort(
        "trace, Chrome",
        lambda: [json.dumps({"traceEvents": trace.chrome_events()}) for trace in _traces()],
        _read_trace,
    ),
    Sort("costs", lambda: [json.dumps(_costs(count).to_dict()) for count in (2, 4)], _read_costs),
    Sort("links", lambda: [json.dumps(links.to_dict()) for links in (_LINKS, Links())], _read_links),
    Sort("machine", lambda: [json.dumps(_MACHINE.to_dict())], _read_machine),
    Sort("schedule options", _options, _read_options),
    Sort("safetensors index", _index, _read_weights, ".safetensors.index.json"),
    Sort("safetensors", lambda: [_weights("a"), _weights("b")], _read_weights, ".safetensors"),
]


# ---- what must hold of a file that was taken ----------------------------------------------------------------------


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _numbers_hold(value: Any) -> None:
    """All numbers are finite, and none is negative."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            _numbers_hold(part)
    elif isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
        raise Wrong(f"a number is {value!r}")


def _nothing_ignored(given: Any, kept: Any, but: set[str] | None = None, place: str = "") -> None:
    """What the file says is in what was read. An empty list is one that is not given."""
    if given == []:
        return
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in (but or ()):
                continue
            if key not in kept and value in (None, "", [], {}):
                continue
            if key not in kept:
                raise Wrong(f"{place}/{key} is ignored")
            _nothing_ignored(value, kept[key], None, f"{place}/{key}")
    elif isinstance(given, list) and isinstance(kept, list | tuple) and len(given) == len(kept):
        for at, (one, other) in enumerate(zip(given, kept, strict=True)):
            _nothing_ignored(one, other, None, f"{place}/{at}")
    elif (given or kept) and (given != kept or {type(given), type(kept)} == {bool, int}):
        raise Wrong(f"{place} is {given!r}, and was read as {kept!r}"[:300])


# ---- changes ------------------------------------------------------------------------------------------------------

_DEEP = 100_000
_DIGITS = 5000
#: In the place of a value, as they stand in the file.
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


def _changed_value(rng: random.Random, text: str) -> str:
    """A JSON file whose tree is another one in one to three places."""
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
            return  # one lies in the other
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


def _changed_words(rng: random.Random, text: str) -> str:
    """A text whose lines and words are others."""
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


def _changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes that are others, or no more there, or there twice."""
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


def broken(sort: Sort, index: int) -> bytes:
    """One broken file: the same for the same sort and index."""
    rng = random.Random(f"{sort.name} {index}")
    seed = rng.choice(_seeds(sort.name))
    if isinstance(seed, bytes):
        length = struct.unpack("<Q", seed[:8])[0]
        if rng.random() < 0.3:
            return _changed_bytes(rng, seed)
        header = _changed_value(rng, seed[8 : 8 + length].decode()).encode()
        told = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 7, 2**63, 2**64 - 1, len(header) + 1])
        return struct.pack("<Q", told) + header + seed[8 + length :]
    if rng.random() < 0.3:
        return _changed_bytes(rng, seed.encode())
    change = _changed_value if sort.ending.endswith("json") else _changed_words
    return change(rng, seed).encode("utf-8", "surrogatepass")


@cache
def _seeds(name: str) -> list[str | bytes]:
    return next(sort for sort in SORTS if sort.name == name).seeds()


# ---- running ------------------------------------------------------------------------------------------------------


def outcome(sort: Sort, path: Path) -> tuple[str, str]:
    """What becomes of a file: a word, and what was said."""
    try:
        sort.read(path)
    except PipeschedError as error:
        said = str(error)
        return ("refused", said) if len(said) <= _LONGEST else ("long", said[:200])
    except Wrong as error:
        return "wrong", str(error)
    except BaseException as error:  # whatever it is, it is the finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "raw", f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    return "accepted", ""


def _work(pipe: Any, folder: str, name: str, first: int, stop: int) -> None:
    """In a process of its own: reads one file after the other, and says what became of each."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    sort = next(sort for sort in SORTS if sort.name == name)
    path = Path(folder) / f"broken{sort.ending}"
    import pipesched.model.safetensors_files  # noqa: F401  which take seconds, and not of the first file

    _seeds(name)
    pipe.send("ready")
    for index in range(first, stop):
        path.write_bytes(broken(sort, index))
        begin = time.perf_counter()
        pipe.send((index, *outcome(sort, path), time.perf_counter() - begin))


def run(sort: Sort, files: int, limit_s: float) -> list[tuple[int, str, str, float]]:
    """What became of so many broken files of a sort: (index, word, message, seconds) of each."""
    context = multiprocessing.get_context("spawn")
    found: list[tuple[int, str, str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(found) < files:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, folder, sort.name, len(found), files), daemon=True)
            process.start()
            theirs.close()
            try:
                assert ours.recv() == "ready"
                while len(found) < files:
                    if not ours.poll(limit_s):
                        found.append((len(found), "hang", "", limit_s))
                        break
                    found.append(ours.recv())
            except EOFError:
                found.append((len(found), "raw", f"the process ended with {process.exitcode}", 0.0))
            process.kill()
            process.join()
    return found


WORDS = ("accepted", "refused", "raw", "hang", "wrong", "long")


def table(found: dict[str, list[tuple[int, str, str, float]]]) -> str:
    """A row a sort, in Markdown."""
    head = (
        "file",
        "files",
        "accepted",
        "refused",
        "raw errors",
        "hangs",
        "wrongly accepted",
        "message too long",
        "slowest",
    )
    rows = [head, ("---",) + ("---:",) * (len(head) - 1)]
    for name, results in [*found.items(), ("all", [result for own in found.values() for result in own])]:
        counts = Counter(word for _, word, _, _ in results)
        slowest = max((seconds for *_, seconds in results), default=0)
        rows.append((name, f"{len(results):,}", *(f"{counts[word]:,}" for word in WORDS), f"{slowest:.1f} s"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Break files, read them, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=FILES, help="of each sort")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a file")
    parser.add_argument("--only", help="sorts whose name contains this")
    parser.add_argument("--show", type=int, default=0, help="so many messages of each outcome, also of what is right")
    parser.add_argument("--keep", type=Path, help="write what went wrong into this folder")
    options = parser.parse_args()
    chosen = [sort for sort in SORTS if options.only in (None, sort.name) or (options.only or "") in sort.name]
    found: dict[str, list[tuple[int, str, str, float]]] = {}
    for sort in chosen:
        found[sort.name] = results = run(sort, options.files, options.limit)
        said: Counter[tuple[str, str]] = Counter()
        for index, word, message, _ in results:
            short = re.sub(r"\d{6,}", "9..9", message)[:300]
            said[word, short] += 1
            bad = word not in ("accepted", "refused")
            if (bad and said[word, short] == 1) or sum(n for (w, _), n in said.items() if w == word) <= options.show:
                print(f"{sort.name} {index}: {word}: {short}", file=sys.stderr)
            if bad and options.keep:
                options.keep.mkdir(exist_ok=True)
                (options.keep / f"{sort.name.replace(' ', '-').replace(',', '')}-{index}{sort.ending}").write_bytes(
                    broken(sort, index)
                )
        print(f"{sort.name}: {dict(Counter(word for _, word, _, _ in results))}", file=sys.stderr, flush=True)
    print(table(found))
    if any(word not in ("accepted", "refused") for own in found.values() for _, word, _, _ in own):
        sys.exit(1)


if __name__ == "__main__":
    main()
