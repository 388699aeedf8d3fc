"""Layer table: the layers' costs as rows of plain numbers, for models and machines that cannot be measured here.

`pipesched.simulation.table_cells` reads the cells. Default values fill the columns that a table lacks, so that a table
of six columns describes a training step.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

import networkx as nx

from pipesched.checks import LARGEST_SIZE, as_path, is_count, shown
from pipesched.errors import InputError, ScheduleError
from pipesched.simulation.layer_costs import LayerCosts, carried
from pipesched.simulation.optimizer_state import ASSUMED, OptimizerState, StateRule
from pipesched.simulation.table_cells import (
    BETWEEN_INPUTS,
    COLUMNS,
    NO_INPUTS,
    REQUIRED,
    TEXTS,
    Table,
    TableRow,
    attribute_of,
    read_rows,
)
from pipesched.simulation.tensor_split import COUNTED, SPLIT_COUNTS, SPLIT_SHARES, SPLIT_SIZES
from pipesched.simulation.tied_weight_costs import tied_groups
from pipesched.units import parse_bytes, quote_bytes
from pipesched.whole_files import write_whole

__all__ = ["TableOptions", "read_table", "rows_of_table", "write_table"]

Row = dict[str, Any]

_SPLIT = (*SPLIT_SHARES, *SPLIT_SIZES, *SPLIT_COUNTS)
_FIGURES = (*LayerCosts().figures(), *_SPLIT)
_MOST_PROBLEMS = 8  # an error lists at most this many
_DIGITS = (15, 16, 17)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What a table leaves out: the size of a parameter and the optimizer's state."""

    #: The size of a parameter in bytes, for rows without ``num_parameters``.
    bytes_per_parameter: float = 4
    #: The optimizer's state. None: the column ``optimizer_bytes``, or Adam's in rows without it.
    optimizer: OptimizerState | None = None
    #: The optimizer's state as a rule.
    state: StateRule = field(init=False)

    def __post_init__(self) -> None:
        size: Any = self.bytes_per_parameter
        if isinstance(size, bool) or not isinstance(size, int | float) or not 2**-10 <= size < math.inf:
            raise InputError(
                f"bytes_per_parameter= must be the size of a parameter in bytes, a positive number; got {shown(size)}; "
                f"for example, pass 2 for bfloat16"
            )
        object.__setattr__(self, "state", StateRule.of("adam" if self.optimizer is None else self.optimizer))


class _Input(NamedTuple):
    """A tensor that a layer takes from another layer."""

    layer: str
    tensor: str
    size: int


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
    lines = read_rows(table, problems)
    problems += _missing(lines, rows)
    sizes: dict[int, list[TableRow]] = {}
    for line in lines:
        sizes.setdefault(line.values.get("rows", rows if is_count(rows) else 0) or 0, []).append(line)
    readers = {size: _LayerReader(options, problems) for size in sizes}
    for size, reader in readers.items():
        for line in sizes[size]:
            reader.read(line)
    for (first, one), (second, other) in pairwise(readers.items()):
        if one.shape != other.shape:
            problems.append(
                f"the layers for micro-batches of {first} and of {second} rows differ in their names, inputs, ties or "
                f"parameters, or in their order"
            )
    if problems:
        seen = list(dict.fromkeys(problems))
        more = f"; and {len(seen) - _MOST_PROBLEMS} more" if len(seen) > _MOST_PROBLEMS else ""
        place = f"the table {str(table)!r}" if isinstance(table, str | PathLike) else "the table"
        raise ScheduleError(
            f"a table of layers must have a value in the columns {', '.join(REQUIRED)} of each row, and may have "
            f"others; in {place}: {'; '.join(seen[:_MOST_PROBLEMS])}{more}; correct the table "
            f"(docs/howto/tables.md describes all columns)"
        )
    graphs = {size: reader.graph for size, reader in readers.items()}
    _forget_unsplit(graphs.values())
    return graphs, _assumptions(lines, graphs[min(graphs)], options)


def _forget_unsplit(graphs: Iterable["nx.DiGraph[str]"]) -> None:
    """Remove what concerns tensor groups from all layers if no layer can be split."""
    nodes = [node for graph in graphs for node in graph.nodes.values()]
    if not any(node[name] for node in nodes for name in _SPLIT):
        for node in nodes:
            for name in _SPLIT:
                del node[name]


def _missing(lines: Sequence[TableRow], rows: int | None) -> Iterator[str]:
    """Yield a sentence for each value that the rows lack, and for each contradiction between ``rows`` and the rows."""
    if not lines:
        yield "no rows of layers"
        return
    if rows is not None and not is_count(rows):
        yield f"rows={shown(rows)} is not a whole number of at least 1"
    given = set[str]().union(*({*line.values} | line.invalid for line in lines))
    absent = [name for name in REQUIRED if attribute_of(name) not in given]
    if rows is None and "rows" not in given:
        absent.append("rows (a column, or the argument rows=: the number of rows of the micro-batch)")
    if absent:
        yield f"no column {', '.join(absent)}"
    for line in lines:
        empty = [name for name in REQUIRED if attribute_of(name) in given - {*line.values} - line.invalid]
        if rows is None and "rows" in given - {*line.values} - line.invalid:
            empty.append("rows")
        if empty:
            yield f"{line} has no {', '.join(empty)}"
        if rows is not None and "rows" in line.values and line.values["rows"] != rows:
            yield f"{line} has the rows {line.values['rows']}, but rows={shown(rows)} was passed"


def _assumptions(lines: Sequence[TableRow], graph: "nx.DiGraph[str]", options: TableOptions) -> tuple[str, ...]:
    """Return a sentence for each cost that is not in all rows of the table: what was assumed."""
    known = set.intersection(*({*line.values} for line in lines))
    count, size = _sum(graph.graph["parameters"].values())
    notes = []
    if count and "gradient_bytes" not in known:
        notes.append(f"{ASSUMED}gradients take {quote_bytes(size / count)} for each parameter")
    if count and "optimizer_bytes" not in known and options.optimizer is None:
        notes.append(options.state.assumed(size / count))
    if not {"weight_grad_s", "input_grad_s"} & known:
        notes.append(f"{ASSUMED}weight gradients take half of a backward")
    return tuple(notes)


class _LayerReader:
    """Reads the rows of one micro-batch size, and adds a layer to a graph for each row."""

    def __init__(self, options: TableOptions, problems: list[str]) -> None:
        self.graph: nx.DiGraph[str] = nx.DiGraph(parameters={}, classes={})
        self._options = options
        self._problems = problems
        self._earlier: dict[str, Row] = {}
        self._shared: dict[str, int] = {}  # the bytes of each part of an output that several layers can take

    @property
    def shape(self) -> tuple[Any, ...]:
        """What must be the same for all micro-batch sizes: the layers, tensors and parameters, in order."""
        edges = [(*ends, *self.graph.edges[ends]["tensors"]) for ends in self.graph.edges]
        return list(self._earlier), edges, self.graph.graph["parameters"], list(self.graph.nodes(data="parameters"))

    def read(self, line: TableRow) -> None:
        """Add the layer of a row to the graph. A row that lacks values is only checked."""
        own = line.values
        inputs = list(self._inputs(line))
        name: str = own.get("name", "")
        if name in self._earlier:
            self._problems.append(f"{line} has the name of an earlier row")
        elif all(attribute_of(column) in own for column in REQUIRED):
            fresh = self._add_parameters(line)
            figures = {key: value for key, value in own.items() if key in (*_FIGURES, "num_parameters")}
            taken_bytes = sum(one.size for one in inputs)
            self.graph.nodes[name].update(_completed(figures, taken_bytes, fresh, self._options))
            for layer in dict.fromkeys(one.layer for one in inputs):
                tensors = {one.tensor: one.size for one in inputs if one.layer == layer}
                self.graph.add_edge(layer, name, tensors=tensors, bytes=sum(tensors.values()))
            if own["backward_s"] < own.get("weight_grad_s", 0) and "input_grad_s" not in own:
                self._problems.append(f"{line} has a weight_grad that takes longer than its backward")
        if name:
            self._earlier.setdefault(name, own)

    def _inputs(self, line: TableRow) -> Iterator[_Input]:
        """Yield the tensors that a row takes from earlier rows: by default, the output of the previous row."""
        own = line.values
        texts = own["inputs"].split(BETWEEN_INPUTS) if "inputs" in own else list(self._earlier)[-1:]
        tensors: set[str] = set()
        for text in map(str.strip, texts):
            if text == NO_INPUTS and len(texts) == 1:
                continue
            found = self._input(text, own.get("name", ""))
            if found is None:
                self._problems.append(
                    f"{line} has the input {shown(text)}, which is neither an earlier row nor a part of its output, "
                    f"such as 'row=1MB'"
                )
            elif found.tensor in tensors or self._shared.setdefault(found.tensor, found.size) != found.size:
                self._problems.append(f"{line} has the input {shown(text)} twice, or with another size than before")
            else:
                tensors.add(found.tensor)
                yield found

    def _input(self, text: str, name: str) -> _Input | None:
        """Return an entry of a cell ``inputs``: ``row``, ``row=bytes`` or ``row:part=bytes``; None if it is invalid."""
        if text in self._earlier:
            return _Input(text, text, self._earlier[text].get("output_bytes", 0))
        tensor, _, size = text.rpartition("=")
        taken = parse_bytes(size)
        layer, _, part = (tensor, "", tensor) if tensor in self._earlier else tensor.rpartition(":")
        if not part or layer not in self._earlier or taken is None or taken >= LARGEST_SIZE:
            return None
        return _Input(layer, tensor if tensor != layer else f"{layer} for {name}", taken)

    def _add_parameters(self, line: TableRow) -> tuple[int, int]:
        """Add the parameters of a row to the graph. Returns the number and the bytes of those that it does not share.

        The parameters that a row shares with an earlier row become a parameter of their own.
        """
        name, size = line.values["name"], line.values["parameter_bytes"]
        count = line.values.get("num_parameters", math.ceil(size / self._options.bytes_per_parameter))
        if bool(count) != bool(size):
            self._problems.append(f"{line} has {count} parameters in {size} bytes")
        of_graph: dict[str, tuple[int, int]] = self.graph.graph["parameters"]
        self.graph.add_node(name, parameters=())
        fresh = count, size
        if "tied_to" in line.values:
            shared, tied = self._tie(line, count)
            fresh = count - tied[0], size - tied[1]
            self.graph.nodes[name]["parameters"] = (shared,)
        if fresh != (0, 0):
            of_graph[name] = fresh
            self.graph.nodes[name]["parameters"] += (name,)
        return fresh

    def _tie(self, line: TableRow, count: int) -> tuple[str, tuple[int, int]]:
        """Return the parameter that a row shares with an earlier row: its name, and its number and bytes."""
        parameters: dict[str, tuple[int, int]] = self.graph.graph["parameters"]
        text, size = line.values["tied_to"], line.values["parameter_bytes"]
        first, _, part = (text, "", "") if text in self.graph else text.rpartition("=")
        taken = min(parse_bytes(part) or 0, size + 1) if part else size
        shared = f"{first} (tied)"
        tied = round(count * taken / size) if size else 0, taken
        whole = parameters.get(first, (0, 0))
        if shared not in parameters and tied[0] <= whole[0] and 0 < tied[1] <= whole[1]:
            parameters[shared] = tied
            parameters[first] = whole[0] - tied[0], whole[1] - tied[1]
            self.graph.nodes[first]["parameters"] += (shared,)
        if parameters.get(shared) != tied or taken > size:
            self._problems.append(
                f"{line} is tied to {shown(text)}, which is not an earlier row with at least as many parameters of its "
                f"own, or does not share as many of them as the other rows that are tied to it"
            )
        return shared, tied


def _completed(given: Row, taken_bytes: int, fresh: tuple[int, int], options: TableOptions) -> Row:
    """Return all attributes of a layer: the given values, and defaults for the others.

    Args:
        given: the values in the table.
        taken_bytes: the bytes that the layer takes from other layers.
        fresh: the number and the bytes of the parameters that no earlier layer has.
        options: what the table leaves out.

    """
    known = dict(given)

    def add(attribute: str, value: Any) -> None:
        known.setdefault(attribute, value)

    add("weight_grad_s", max(0.0, given["backward_s"] - given.get("input_grad_s", given["backward_s"] / 2)))
    add("input_grad_s", max(0.0, given["backward_s"] - known["weight_grad_s"]))
    add("num_parameters", math.ceil(given["parameter_bytes"] / options.bytes_per_parameter))
    add("input_bytes", taken_bytes)
    add("gradient_bytes", given["parameter_bytes"])
    if options.optimizer is not None or "optimizer_bytes" not in given:
        trained = known["gradient_bytes"] / given["parameter_bytes"] if given["parameter_bytes"] else 0
        known["optimizer_bytes"] = options.state.size(*fresh, trained)
    add("deferred_gradient_bytes", known["gradient_bytes"])
    add("weight_grad_bytes", given["activation_bytes"])
    passing = known["input_bytes"] + given["output_bytes"]
    add("forward_transient_bytes", passing)
    add("backward_transient_bytes", passing)
    add("first_backward_transient_bytes", passing + known["gradient_bytes"])
    add("input_grad_transient_bytes", passing + known["weight_grad_bytes"])
    for attribute, value in _split_defaults(known):
        add(attribute, value)
    return {attribute: known.get(attribute, 0) for attribute in (*_FIGURES, "num_parameters")}


def _split_defaults(known: Row) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that concern tensor groups, with defaults.

    The backward is like the forward, and the split parameters are the weights of the products, if there are any.
    """
    forward = known.get("split_forward", 0)
    backward = known.get("split_backward", forward)
    yield "split_backward", backward
    yield "split_weight_grad", backward
    yield "split_parameters", forward
    size = known.get("all_reduce_forward_bytes", 0)
    other = known.get("all_reduce_backward_bytes", size)
    count = known.get("all_reduces_forward", 1 if size else 0)
    yield "all_reduce_backward_bytes", other
    yield "all_reduces_forward", count
    yield "all_reduces_backward", max(1, count) if other else 0
    counts = {name: known.get(name, int(any(map(known.get, sizes)))) for name, sizes in COUNTED.items()}
    yield from counts.items()
    products = bool(counts["first_products"] or counts["second_products"])
    yield "product_weight_bytes", round(known["parameter_bytes"] * known.get("split_parameters", forward)) * products


# ---- from a graph to rows -------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """A layer of a profile: the values of all attributes that a table can have, and what their defaults depend on."""

    values: Row
    taken_bytes: int
    fresh: tuple[int, int]

    def differs(self, attribute: str, used: set[str]) -> bool:
        """Return whether a table with only the ``used`` attributes would give this one another value."""
        given = {key: value for key, value in self.values.items() if key in used}
        return bool(
            _completed(given, self.taken_bytes, self.fresh, TableOptions())[attribute] != self.values[attribute]
        )


def rows_of_table(graphs: Mapping[int, "nx.DiGraph[str]"]) -> list[Row]:
    """Return the layers of a profile as the rows of a table, without columns in which all values are defaults.

    Raises ScheduleError if `read_table` would not make the same layers from these rows.
    """
    layers = [layer for rows in sorted(graphs) for layer in _layers(graphs, rows)]
    columns = {column: attribute_of(column) or column for column in COLUMNS}
    used = {"rows", *(columns[column] for column in REQUIRED)}
    used |= {text for text in TEXTS if any(layer.values[text] for layer in layers)}
    figures = [attribute for attribute in columns.values() if attribute not in ("rows", *TEXTS)]
    while unlike := [own for own in figures if own not in used and any(one.differs(own, used) for one in layers)]:
        used.add(unlike[0])  # only the first, because the defaults of the others can depend on it
    exact = all(
        _milliseconds(layer.values[own]) is not None
        for layer in layers
        for own in used.intersection(figures)
        if own.endswith("_s")
    )
    heads = {column if exact or not column.endswith("_ms") else own: own for column, own in columns.items()}
    made = [{head: _cell(head, layer.values[own]) for head, own in heads.items() if own in used} for layer in layers]
    _check(made, graphs)
    return made


def _check(lines: Sequence[Row], graphs: Mapping[int, "nx.DiGraph[str]"]) -> None:
    """Raise ScheduleError unless `read_table` makes the same layers from these rows."""
    problem = "a layer shares some of its parameters with one layer, and others with another layer"
    try:
        again, _ = read_table(lines, None, TableOptions())
        if all(_content(again, rows) == _content(graphs, rows) for rows in graphs):
            return
    except ScheduleError as error:
        problem = str(error)
    raise ScheduleError(
        f"a table must have all costs of a profile; this profile does not fit into a table, because {problem}; save it "
        f"with Profile.save instead"
    )


def _content(graphs: Mapping[int, "nx.DiGraph[str]"], rows: int) -> tuple[Any, ...]:
    """Return all that a table must keep of a graph."""
    graph = graphs[rows]
    parameters = graph.graph["parameters"]
    groups = {users: sum(parameters[name][1] for name in names) for users, names in tied_groups(graph).items()}
    return _layers(graphs, rows), [*map(sorted, graph.edges)], {name: _parts(graph, name) for name in graph}, groups


def _layers(graphs: Mapping[int, "nx.DiGraph[str]"], rows: int) -> list[_Layer]:
    """Return the layers of a micro-batch size. The same words describe the inputs and ties in all sizes."""
    graph = graphs[rows]
    parameters: dict[str, tuple[int, int]] = graph.graph["parameters"]
    first_users: dict[str, str] = {}
    layers = []
    for name, node in graph.nodes(data=True):
        own = dict.fromkeys(node["parameters"])
        total = _sum(parameters[one] for one in own)
        fresh = _sum(parameters[one] for one in own if one not in first_users)
        firsts = dict.fromkeys(first_users[one] for one in own if one in first_users)
        part = "" if fresh == (0, 0) else f"={total[1] - fresh[1]}"
        values: Row = {key: node.get(key, 0) for key in _FIGURES if key != "offloads"}
        values |= {"num_parameters": total[0], "parameter_bytes": total[1], "rows": rows, "name": name}
        values |= {"inputs": _inputs_in_words(graphs, rows, name), "tied_to": "".join(f"{one}{part}" for one in firsts)}
        taken_bytes = sum(sum(carried(graph, one, name).values()) for one in graph.pred[name])
        layers.append(_Layer(values, taken_bytes, fresh))
        first_users = dict.fromkeys(own, name) | first_users
    return layers


def _sum(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the total number and the total bytes of parameters."""
    found = [*sizes]
    return sum(count for count, _ in found), sum(size for _, size in found)


def _inputs_in_words(graphs: Mapping[int, "nx.DiGraph[str]"], rows: int, name: str) -> str:
    """Return the cell ``inputs`` of a layer; "" if the layer takes only the output of the previous layer."""
    graph = graphs[rows]
    order = list(graph)
    words = []
    for layer in sorted(graph.pred[name], key=order.index):
        found = []
        parts = _parts(graph, layer)
        whole = next((users for users in parts if _is_whole(graphs, layer, users)), None)  # others are parts beside it
        for number, (users, size) in enumerate(parts.items()):
            if name in users:
                found.append(layer if users == whole else f"{layer}{f':{number}' if len(users) > 1 else ''}={size}")
        words += found or [f"{layer}=0"]
    place = order.index(name)
    return "" if words == order[max(0, place - 1) : place] else BETWEEN_INPUTS.join(words) or NO_INPUTS


def _is_whole(graphs: Mapping[int, "nx.DiGraph[str]"], layer: str, users: tuple[str, ...]) -> bool:
    """Return whether the part of a layer's output that these layers take is as large as the output, for all sizes."""
    return all(_parts(own, layer).get(users) == own.nodes[layer]["output_bytes"] for own in graphs.values())


def _parts(graph: "nx.DiGraph[str]", layer: str) -> dict[tuple[str, ...], int]:
    """Return the bytes of a layer's output that the same layers take, keyed by these layers."""
    users: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for user in graph.succ[layer]:
        for tensor, size in carried(graph, layer, user).items():
            users.setdefault(tensor, []).append(user)
            sizes[tensor] = size
    parts: dict[tuple[str, ...], int] = {}
    for tensor, size in sizes.items():
        key = tuple(users[tensor])
        parts[key] = parts.get(key, 0) + size
    return parts


def _cell(column: str, value: Any) -> Any:
    """Return an attribute's value in the unit of a column."""
    return _milliseconds(value) if column.endswith("_ms") else value


def _milliseconds(seconds: float) -> float | None:
    """Return the time in milliseconds that becomes the same number of seconds again; None if there is none."""
    near = (float(f"{seconds * 1e3:.{digits}g}") for digits in _DIGITS)
    return next((value for value in near if value / 1e3 == seconds), None)


def write_table(lines: Sequence[Row], path: str | PathLike[str]) -> None:
    """Write the rows of a table to a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(as_path(path), text.getvalue())
