"""Broken files: randomly changes every kind of file that pipesched reads, and reports how each changed file is read.

A reader may accept a changed file that is still valid, or refuse it with a PipeschedError that names the file. Every
other outcome is a bug: another exception (raw); a reader that does not return (hang); an impossible value that is
accepted, or a value of the file that is missing in the resulting object (wrong); or a message that quotes the
whole file (long). Identical seeds produce identical files.

    python benchmarks/broken_files.py --files 400            # of each kind; prints a table and the failures
    python benchmarks/broken_files.py --only plan --show 3   # three messages of each outcome

Each file is read in a separate process with a limit of ``--limit`` seconds, and the result is used: programs are
validated, simulated and run by fake stages, profiles are partitioned, plans explained, traces drawn. The hashes of a
checkpoint are made right again after the change, so that the reader sees it; a load that is refused must change
nothing.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import signed_checkpoints
import valid_files
from file_changes import changed_bytes, changed_value, changed_words

from pipesched import Costs, Plan, Profile, Program, Trace, load_program, schedules, simulate, validate
from pipesched.cli.options import read_links
from pipesched.errors import PipeschedError
from pipesched.json_files import load_json
from pipesched.planning.report.report import Report
from pipesched.program.lowering import lower
from pipesched.simulation.links import Links
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.overheads import Machine
from pipesched.viz.text import text_timeline

FILES, LIMIT_S = 400, 20.0
_MEMORY_BYTES = 8 << 30
_LONGEST = 4000  # letters; a longer message is an error, because it probably quotes the file


class Wrong(Exception):
    """A reader accepted a file that it should have refused."""


@dataclass(frozen=True)
class Sort:
    """A kind of file."""

    name: str
    #: Makes valid files, which are then changed.
    seeds: Callable[[], list[str | bytes]]
    #: Reads a file and uses the result.
    read: Callable[[Path], None]
    #: The ending of the file name.
    ending: str = ".json"


# ---- reading and using a file -------------------------------------------------------------------------------------


def _use_program(program: Program) -> None:
    if Program.parse(str(program)) != program:
        raise Wrong("the program's text must parse to the same program, but parses to a different one")
    errors = [_error(lambda: validate(program)), _error(lambda: _run_fake(program))]
    if errors[0] is None and errors[1] is not None:
        raise Wrong(f"validate says {errors[0]!r}, run_fake {errors[1]!r}")
    if errors[0] is not None:
        _error(lambda: lower(program))
        _error(lambda: simulate(program, Costs.uniform(program.num_stages)))
        raise errors[0]
    costs = valid_files.costs(program.num_stages)
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
        raise Wrong("from_dict(to_dict()) must return the same plan, but returns a different one")
    edited = {"costs", "ties", "alternatives"} if plan.partition is None else set()  # an edited plan loses these
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
    plan = pipesched.tune(profile, num_ranks=2, batch_size=8, effort=30_000)
    _numbers_hold([alternative.to_dict() for alternative in plan.alternatives])


def _read_trace(path: Path) -> None:
    trace = Trace.load(path)
    back = trace.to_dict()
    if Trace.from_dict(json.loads(json.dumps(back))) != trace:
        raise Wrong("from_dict(to_dict()) must return the same trace, but returns a different one")
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
    """Make a program from a file that holds a schedule's name, options and shape, as loading a plan does."""
    values = load_json(path, lambda plain: plain)
    if not isinstance(values, dict) or not isinstance(values.get("options"), dict):
        raise PipeschedError("the file must be a JSON object with a field 'options' that is an object")
    if set(values) - {"schedule", "options", "num_ranks", "num_microbatches", "steps"}:
        raise PipeschedError("the file has an unknown field")
    schedule = schedules.get(values.get("schedule")).with_options(**values["options"])
    program = schedule.program(values.get("num_ranks"), values.get("num_microbatches"), steps=values.get("steps"))
    validate(program)
    _use_program(program)


def _read_weights(path: Path) -> None:
    from pipesched.model.safetensors_files import WeightFiles

    for name in ("a", "b"):
        other = path.parent / f"{name}.safetensors"
        if other != path:
            other.write_bytes(valid_files.weights(name))
    files = WeightFiles(path)
    for name in files:
        tensor = files[name]
        if tensor.shape != files.shape(name) or tensor.dtype != files.dtype(name):
            raise Wrong(f"{name} has a different shape or dtype than its entry states")
        if path.suffix == ".json" and not files._entries[name].path.resolve().is_relative_to(path.parent.resolve()):
            raise Wrong(f"{name} is read from a file outside the index's folder")


def _load_changed(kind: str, file: str, path: Path) -> None:
    try:
        signed_checkpoints.load_changed(kind, file, path)
    except signed_checkpoints.RefusedButChangedError as error:
        raise Wrong(str(error)) from error


SORTS = [
    Sort("program, text", valid_files.programs, _read_program, ".txt"),
    Sort("program, CSV", valid_files.tables, _read_program, ".csv"),
    Sort("plan", valid_files.plans, _read_plan),
    Sort("profile", lambda: [json.dumps(valid_files.profile().to_dict(), indent=1)], _read_profile),
    Sort("trace", lambda: [json.dumps(trace.to_dict()) for trace in valid_files.traces()], _read_trace),
    Sort(
        "trace, Chrome",
        lambda: [json.dumps({"traceEvents": trace.chrome_events()}) for trace in valid_files.traces()],
        _read_trace,
    ),
    Sort("costs", lambda: [json.dumps(valid_files.costs(count).to_dict()) for count in (2, 4)], _read_costs),
    Sort("links", lambda: [json.dumps(links.to_dict()) for links in (valid_files.LINKS, Links())], _read_links),
    Sort("machine", lambda: [json.dumps(valid_files.MACHINE.to_dict())], _read_machine),
    Sort("schedule options", valid_files.options, _read_options),
    Sort("safetensors index", valid_files.index, _read_weights, ".safetensors.index.json"),
    Sort("safetensors", lambda: [valid_files.weights("a"), valid_files.weights("b")], _read_weights, ".safetensors"),
    *(
        Sort(
            f"checkpoint {kind}, {file}",
            partial(signed_checkpoints.seeds, kind, file),
            partial(_load_changed, kind, file),
            ".safetensors" if file == "tensors" else ".json",
        )
        for kind in signed_checkpoints.KINDS
        for file in ("manifest", "values", "tensors")
    ),
]


# ---- checks of accepted files --------------------------------------------------------------------------------------


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _numbers_hold(value: Any) -> None:
    """Raise Wrong if any number is negative or not finite."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            _numbers_hold(part)
    elif isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
        raise Wrong(f"a number is {value!r}")


def _nothing_ignored(given: Any, kept: Any, but: set[str] | None = None, place: str = "") -> None:
    """Raise Wrong if a value of the file (``given``) differs in the object made from it (``kept``)."""
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


def broken(sort: Sort, index: int) -> bytes:
    """Return the broken file of a kind with this index; equal arguments give equal files."""
    rng = random.Random(f"{sort.name} {index}")
    seed = rng.choice(_seeds(sort.name))
    if isinstance(seed, bytes):
        length = struct.unpack("<Q", seed[:8])[0]
        if rng.random() < 0.3:
            return changed_bytes(rng, seed)
        header = changed_value(rng, seed[8 : 8 + length].decode()).encode()
        told = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 7, 2**63, 2**64 - 1, len(header) + 1])
        return struct.pack("<Q", told) + header + seed[8 + length :]
    if rng.random() < 0.3:
        return changed_bytes(rng, seed.encode())
    change = changed_value if sort.ending.endswith("json") else changed_words
    return change(rng, seed).encode("utf-8", "surrogatepass")


@cache
def _seeds(name: str) -> list[str | bytes]:
    return next(sort for sort in SORTS if sort.name == name).seeds()


# ---- running ------------------------------------------------------------------------------------------------------


def outcome(sort: Sort, path: Path) -> tuple[str, str]:
    """Read a file; return the outcome, which is one of WORDS, and the message of the error."""
    try:
        sort.read(path)
    except PipeschedError as error:
        said = str(error)
        return ("refused", said) if len(said) <= _LONGEST else ("long", said[:200])
    except Wrong as error:
        return "wrong", str(error)
    except BaseException as error:  # any exception is a finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "raw", f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    return "accepted", ""


def _work(pipe: Any, folder: str, name: str, first: int, stop: int) -> None:
    """Read broken files one after the other, and send the outcome of each. Runs in a process of its own."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    sort = next(sort for sort in SORTS if sort.name == name)
    path = Path(folder) / f"broken{sort.ending}"
    import pipesched.model.safetensors_files  # noqa: F401  # takes seconds, which do not count for the first file

    _seeds(name)
    pipe.send("ready")
    for index in range(first, stop):
        path.write_bytes(broken(sort, index))
        begin = time.perf_counter()
        pipe.send((index, *outcome(sort, path), time.perf_counter() - begin))


def run(sort: Sort, files: int, limit_s: float) -> list[tuple[int, str, str, float]]:
    """Read ``files`` broken files of one kind. Return (index, outcome, message, seconds) for each file."""
    context = multiprocessing.get_context("forkserver")
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
    """Return the results as a Markdown table with a row for each kind of file."""
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
    """Break files, read them, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=FILES, help="files of each kind")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each file")
    parser.add_argument("--only", help="break only kinds of files whose name contains this text")
    parser.add_argument("--show", type=int, default=0, help="number of messages to print for each outcome")
    parser.add_argument("--keep", type=Path, help="folder for copies of the files that failed")
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
