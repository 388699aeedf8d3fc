"""Layer table: the layers' costs as rows of plain numbers, for models and machines that cannot be measured here.

A table has one row for each layer, in execution order. A row maps column names to numbers or text. `COLUMNS` lists the
columns. Default values fill the columns that a table lacks, so that a table of six columns describes a training step.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from typing import Any

import networkx as nx

from pipesched.checks import as_list, as_path, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.simulation.layer_costs import LayerCosts, carried
from pipesched.simulation.optimizer_state import OptimizerState, StateRule
from pipesched.units import parse_bytes
from pipesched.whole_files import write_whole

__all__ = ["COLUMNS", "TableOptions", "assumptions", "read_table", "rows_of_table", "write_table"]

#: A table: rows that map column names to values, or the path of a CSV file whose first line has the column names.
Table = str | PathLike[str] | Iterable[Mapping[str, Any]]
Row = dict[str, Any]
Graph = "nx.DiGraph[str]"

_PER_SECOND = {"_ms": 1e3, "_us": 1e6, "_s": 1.0}
_PER_BYTE = {"_bytes": 1, "_kb": 10**3, "_mb": 10**6, "_gb": 10**9, "_kib": 2**10, "_mib": 2**20, "_gib": 2**30}
_FIGURES = LayerCosts().figures()
_TIMES = tuple(name for name in _FIGURES if name.endswith("_s"))
_SIZES = tuple(name for name in _FIGURES if name.endswith("_bytes"))
_TEXTS = ("name", "inputs", "tied_to")
_COUNTS = ("rows", "num_parameters")
_OTHERS = ("spread",)
#: The columns that every table has. Times can also be in ``_s`` or ``_us``, and sizes in ``_kb``, ``_mib`` and so on.
REQUIRED = ("name", "forward_ms", "backward_ms", "parameter_bytes", "output_bytes", "activation_bytes")
_OPTIONAL = (
    *("weight_grad_ms", "input_grad_ms", "inputs", "tied_to", "num_parameters"),
    *(f"{name.removesuffix('_s')}_ms" for name in _TIMES),
    *_SIZES,
    *_OTHERS,
)
#: All columns, in the order in which they are written.
COLUMNS = ("rows", *REQUIRED, *(name for name in dict.fromkeys(_OPTIONAL) if name not in REQUIRED))
_MOST_PROBLEMS = 8  # an error lists at most this many
_BETWEEN_INPUTS = "|"
_NO_INPUTS = "-"  # the cell of a layer that takes no output of another layer
_DIGITS = (15, 16, 17)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What a table leaves out: the size of a parameter and the optimizer's state."""

    #: The size of a parameter in bytes, used to count parameters from ``parameter_bytes``.
    bytes_per_parameter: float = 4
    #: The optimizer's state: "sgd", "momentum", "adam", "adamw", or a number of bytes for each parameter.
    optimizer: OptimizerState = "adam"

    @property
    def state(self) -> StateRule:
        """The rule for the size of the optimizer's state."""
        return StateRule.of(self.optimizer)


def read_table(
    table: Table, rows: int | None, options: TableOptions
) -> tuple[dict[int, "nx.DiGraph[str]"], tuple[str, ...]]:
    """Return the layers of a table as graphs keyed by the rows of a micro-batch, and sentences on what was assumed.

    Args:
        table: the rows, or the path of a CSV file.
        rows: the rows of a micro-batch, for a table without a column ``rows``.
        options: what the table leaves out.

    Raises:
        ScheduleError: for missing and unknown columns and for invalid values; the message lists all of them.

    """
    problems: list[str] = []
    lines = [_normalised(line, problems) for line in _lines(table)]
    if not lines:
        problems.append("it has no rows")
    given = set[str]().union(*lines) if lines else set[str]()
    missing = [name for name in REQUIRED if _attribute(name) not in given]
    if lines and missing:
        problems.append(f"without {', '.join(missing)}")
    if lines and rows is None and "rows" not in given:
        problems.append("without rows, the number of rows of the micro-batch (a column, or the argument rows=)")
    if rows is not None and not is_count(rows):
        problems.append(f"rows={shown(rows)} is not a whole number of at least 1")
    _refuse(problems)
    sizes: dict[Any, list[Row]] = {}
    for line in lines:
        sizes.setdefault(line.pop("rows", rows), []).append(line)
    graphs = {size: _graph(own, options, problems) for size, own in sizes.items()}
    _refuse(problems)
    return graphs, assumptions(given, options)


def _refuse(problems: Sequence[str]) -> None:
    """Raise ScheduleError if there are problems."""
    if not problems:
        return
    seen = list(dict.fromkeys(problems))
    more = f"; and {len(seen) - _MOST_PROBLEMS} more" if len(seen) > _MOST_PROBLEMS else ""
    raise ScheduleError(
        f"a table of layers must have the columns {', '.join(REQUIRED)}, and may have others; this table: "
        f"{'; '.join(seen[:_MOST_PROBLEMS])}{more}; correct the table (docs/howto/tables.md describes all columns)"
    )


def assumptions(given: Iterable[str], options: TableOptions) -> tuple[str, ...]:
    """Return a sentence for each cost that the table lacked, which says what was assumed.

    ``given`` are the names of the attributes that the table has.
    """
    known = {*given}
    words = []
    if "gradient_bytes" not in known:
        words.append("gradients have the size of the parameters")
    if "optimizer_bytes" not in known:
        words.append(options.state.in_words(options.bytes_per_parameter))
    if "weight_grad_s" not in known and "input_grad_s" not in known:
        words.append("weight gradients take half of a backward")
    return tuple(f"assumed, as the table does not say: {word}" for word in words)


# ---- from text to numbers -------------------------------------------------------------------------------------------


def _lines(table: Table) -> list[Mapping[str, Any]]:
    """Return the rows of a table. A path is read as CSV; lines that begin with ``#`` are comments."""
    if isinstance(table, str | PathLike):
        path = as_path(table)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ScheduleError(
                f"a table of layers must be a readable CSV file; {str(path)!r} cannot be read ({reason}); check the "
                f"path"
            ) from error
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        separator = max((",", ";", "\t"), key=lines[0].count) if lines else ","
        return list(csv.DictReader(lines, delimiter=separator, skipinitialspace=True))
    records = getattr(table, "to_dict", None)
    if callable(records):  # a DataFrame
        table = records("records")
    rule, remedy = "a table of layers must be a list of rows, or the path of a CSV file", "pass a list of dicts"
    lines_given = as_list(table, rule, remedy)
    if not all(isinstance(line, Mapping) for line in lines_given):
        raise ScheduleError(f"{rule}; got {shown(lines_given)}; {remedy}")
    return lines_given


def _normalised(line: Mapping[str, Any], problems: list[str]) -> Row:
    """Return a row with attributes of layers as keys, in seconds and bytes. Empty cells are left out."""
    made: Row = {}
    where = f"row {shown(line.get('name', line.get('layer', '?')))}"
    for head, cell in line.items():
        name = re.sub(r"[^a-z0-9]+", "_", str(head).strip().lower()).strip("_")
        name = {"layer": "name", "parameters": "num_parameters"}.get(name, name)
        value = cell.strip() if isinstance(cell, str) else cell
        if head is None or (cell is None and name not in COLUMNS):
            problems.append(f"{where} has more or fewer cells than the first line")
            continue
        if value in (None, "") or (isinstance(value, float) and math.isnan(value)):
            continue
        attribute = _attribute(name)
        if attribute is None:
            near = get_close_matches(name, COLUMNS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append(f"the unknown column {shown(head)}{hint}")
            continue
        number = _value(name, attribute, value)
        if number is None:
            problems.append(f"{where} has {name} {shown(value)}")
        elif attribute in made:
            problems.append(f"two columns for {attribute}")
        else:
            made[attribute] = number
    return made


def _attribute(column: str) -> str | None:
    """Return the attribute of a layer that a column holds, such as ``forward_s`` for ``forward_ms``."""
    if column in (*_TEXTS, *_COUNTS, *_OTHERS):
        return column
    for ending, known, unit in (
        *((ending, _TIMES, "_s") for ending in _PER_SECOND),
        *((ending, _SIZES, "_bytes") for ending in _PER_BYTE),
    ):
        name = column.removesuffix(ending) + unit
        if column.endswith(ending) and name in known:
            return name
    return None


def _value(column: str, attribute: str, value: Any) -> Any:
    """Return a cell as text, a whole number, seconds or bytes; None if it is invalid."""
    if attribute in _TEXTS:
        return str(value)
    if attribute.endswith("_bytes"):
        size = parse_bytes(value) if isinstance(value, str) else _number(value)
        per = next(per for ending, per in _PER_BYTE.items() if column.endswith(ending))
        return None if size is None else round(size * per)
    number = _number(value)
    if number is None or attribute in _OTHERS:
        return number
    if attribute in _COUNTS:
        return int(number) if number == int(number) and number >= (attribute == "rows") else None
    return number / next(per for ending, per in _PER_SECOND.items() if column.endswith(ending))


def _number(value: Any) -> float | None:
    """Return a value as a finite number of at least 0; None if it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < math.inf and not isinstance(value, bool) else None


# ---- from rows to a graph and back ----------------------------------------------------------------------------------


def _graph(lines: Sequence[Row], options: TableOptions, problems: list[str]) -> "nx.DiGraph[str]":
    """Return the layers of one micro-batch size as a graph. Adds to ``problems``."""
    graph: nx.DiGraph[str] = nx.DiGraph(parameters={}, classes={})
    for number, line in enumerate(lines, 1):
        empty = [name for name in REQUIRED if _attribute(name) not in line]
        name = line.get("name", f"(line {number})")
        if empty:
            problems.append(f"row {name!r} lacks {', '.join(empty)}")
        elif name in graph:
            problems.append(f"two rows have the name {name!r}")
        else:
            taken = _inputs(graph, line, problems)
            graph.add_node(name, parameters=_parameters(graph, line, options, problems))
            own = {key: value for key, value in line.items() if key in (*_FIGURES, *_COUNTS)}
            graph.nodes[name].update(own | _defaults(graph, name, own, sum(taken.values()), options.state))
            for one, size in taken.items():
                graph.add_edge(one, name, tensors={_tensor(graph, one, size): size})
            if own["backward_s"] < own.get("weight_grad_s", 0) and "input_grad_s" not in own:
                problems.append(f"row {name!r} has a weight_grad that takes longer than its backward")
    return graph


def _inputs(graph: "nx.DiGraph[str]", line: Row, problems: list[str]) -> dict[str, int]:
    """Return the bytes that a row takes from each earlier row: by default, the output of the previous row."""
    names = line["inputs"].split(_BETWEEN_INPUTS) if "inputs" in line else list(graph)[-1:]
    sizes: dict[str, int] = {}
    for text in map(str.strip, names):
        if text == _NO_INPUTS:
            continue
        name, equals, size = (text, "", "") if text in graph else text.rpartition("=")
        taken = parse_bytes(size) if equals else graph.nodes[name].get("output_bytes") if name in graph else None
        if name not in graph or taken is None:
            problems.append(f"row {line['name']!r} takes the output of {text!r}, which is no earlier row")
        else:
            sizes[name] = taken
    return sizes


def _tensor(graph: "nx.DiGraph[str]", producer: str, size: int) -> str:
    """Return the name of a tensor on an edge. All edges that carry the producer's whole output carry one tensor."""
    return producer if size == graph.nodes[producer]["output_bytes"] else f"{producer}={size}"


def _parameters(graph: "nx.DiGraph[str]", line: Row, options: TableOptions, problems: list[str]) -> tuple[str, ...]:
    """Return the names of a row's parameters, and add their sizes to the graph.

    The parameters of a row with ``tied_to`` are a part of the parameters of an earlier row, which is then divided.
    """
    sizes = graph.graph["parameters"]
    name = line["name"]
    size = line["parameter_bytes"]
    count = line.get("num_parameters", round(size / options.bytes_per_parameter))
    first = line.get("tied_to")
    if first is None:
        sizes |= {name: (count, size)} if size else {}
        return (name,) if size else ()
    shared = f"{first} (tied)"
    if shared not in sizes and first in sizes and sizes[first][1] >= size:
        sizes[shared] = (count, size)
        sizes[first] = (sizes[first][0] - count, sizes[first][1] - size)
        graph.nodes[first]["parameters"] += (shared,)
    if sizes.get(shared) != (count, size):
        problems.append(
            f"row {name!r} is tied to {first!r}, which must be an earlier row with at least as many parameters, and "
            f"all rows that are tied to it must have equally many"
        )
    return (shared,)


def _defaults(graph: "nx.DiGraph[str]", name: str, own: Row, taken_bytes: int, state: StateRule) -> dict[str, Any]:
    """Return the values of all attributes that a row lacks."""
    sizes = [graph.graph["parameters"][one] for one in graph.nodes[name]["parameters"]]
    known = dict(own)

    def add(attribute: str, value: Any) -> None:
        known.setdefault(attribute, value)

    add("weight_grad_s", max(0.0, own["backward_s"] - own.get("input_grad_s", own["backward_s"] / 2)))
    add("input_grad_s", max(0.0, own["backward_s"] - known["weight_grad_s"]))
    add("num_parameters", sum(count for count, _ in sizes))
    add("input_bytes", taken_bytes)
    add("gradient_bytes", own["parameter_bytes"])
    add("deferred_gradient_bytes", known["gradient_bytes"])
    add("weight_grad_bytes", own["activation_bytes"])
    passing = known["input_bytes"] + own["output_bytes"]
    add("forward_transient_bytes", passing)
    add("backward_transient_bytes", passing)
    add("first_backward_transient_bytes", passing + known["gradient_bytes"])
    add("input_grad_transient_bytes", passing + known["weight_grad_bytes"])
    is_tied = graph.nodes[name]["parameters"][:1] not in ((), (name,))
    add("optimizer_bytes", 0 if is_tied else state.size(known["num_parameters"], own["parameter_bytes"]))
    return {attribute: known.get(attribute, 0) for attribute in (*_FIGURES, "num_parameters") if attribute not in own}


def rows_of_table(graphs: Mapping[int, "nx.DiGraph[str]"], options: TableOptions) -> list[Row]:
    """Return the layers of a profile as the rows of a table, without columns in which all values are defaults.

    Raises ScheduleError if a layer shares only a part of its parameters with another layer.
    """
    lines: list[Row] = []
    for rows, graph in sorted(graphs.items()):
        for name, node in graph.nodes(data=True):
            own = {key: node.get(key, 0) for key in (*_FIGURES, "num_parameters") if key != "offloads"}
            words = {"inputs": _inputs_in_words(graph, name), "tied_to": _tied_to(graph, name)}
            lines.append({"rows": rows, "name": name, **own, **words})
    heads = {column: _attribute(column) or column for column in COLUMNS}
    used = {"rows", *(heads[name] for name in REQUIRED), *(key for key in _TEXTS if any(line[key] for line in lines))}
    for attribute in (own for own in heads.values() if own not in ("rows", *_TEXTS)):
        short = [{key: value for key, value in line.items() if key in used} for line in lines]
        plain, _ = read_table(short, None, options)
        nodes = [plain[line["rows"]].nodes[line["name"]] for line in lines]
        if any(line[attribute] != node[attribute] for line, node in zip(lines, nodes, strict=True)):
            used.add(attribute)
    if len(graphs) == 1:
        del heads["rows"]
    return [{column: _cell(column, line[own]) for column, own in heads.items() if own in used} for line in lines]


def _inputs_in_words(graph: "nx.DiGraph[str]", name: str) -> str:
    """Return the cell ``inputs`` of a layer; "" if the layer takes only the output of the previous layer."""
    before = [one for one in graph if one in graph.pred[name]]
    sizes = {one: sum(carried(graph, one, name).values()) for one in before}
    whole = {one for one, size in sizes.items() if size == graph.nodes[one]["output_bytes"]}
    words = [one if one in whole else f"{one}={size}" for one, size in sizes.items()]
    place = list(graph).index(name)
    usual = list(graph)[place - 1 : place] if place else []
    return "" if words == usual else _BETWEEN_INPUTS.join(words) or _NO_INPUTS


def _tied_to(graph: "nx.DiGraph[str]", name: str) -> str:
    """Return the layer whose parameters this layer uses too; "" if there is none."""
    own = graph.nodes[name]["parameters"]
    firsts = [next(one for one in graph if parameter in graph.nodes[one]["parameters"]) for parameter in own]
    if {*firsts} <= {name}:
        return ""
    if len({*firsts}) > 1:
        raise ScheduleError(
            f"in a table, a layer may share all of its parameters with one earlier layer, or none; {name!r} uses "
            f"parameters of {' and '.join(map(repr, dict.fromkeys(firsts)))}; save the profile as JSON instead"
        )
    return firsts[0]


def _cell(column: str, value: Any) -> Any:
    """Return an attribute's value in the unit of a column."""
    return _milliseconds(value) if column.endswith("_ms") else value


def _milliseconds(seconds: float) -> float:
    """Return a time in milliseconds which `read_table` converts back to the same number of seconds, if there is one."""
    near = (float(f"{seconds * 1e3:.{digits}g}") for digits in _DIGITS)
    return next((value for value in near if value / 1e3 == seconds), seconds * 1e3)


def write_table(lines: Sequence[Row], path: str | PathLike[str]) -> None:
    """Write the rows of a table to a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(as_path(path), text.getvalue())
