"""Profile validation: checks that a profile's values are consistent, and that a profile belongs to a model."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import networkx as nx

from pipesched.checks import check_type, is_cost, is_count, is_size, shown
from pipesched.errors import ScheduleError
from pipesched.simulation.layer_costs import NEEDED
from pipesched.simulation.tensor_split import SPLIT_COUNTS, SPLIT_SHARES
from pipesched.units import and_more, counted

__all__ = ["as_notes", "check_graphs", "check_model"]

_AGAIN = "measure the model again"
_MOST_PROBLEMS = 12  # an error lists at most this many
_OTHERS = ("spread", "num_parameters", "offloads", *SPLIT_SHARES, *SPLIT_COUNTS)


def check_graphs(graphs: Mapping[int, "nx.DiGraph[str]"]) -> None:
    """Raise ScheduleError unless all micro-batch sizes of a profile have the same layers and valid values."""
    if not isinstance(graphs, Mapping) or not all(isinstance(graph, nx.DiGraph) for graph in graphs.values()):
        raise ScheduleError(f"a profile must have a graph of layers for each size; got {shown(graphs)}; {_AGAIN}")
    if not graphs or not all(len(graph) for graph in graphs.values()):
        raise ScheduleError(
            f"a profile must have layers for at least one micro-batch size; this profile has none; {_AGAIN}"
        )
    first = min(graphs)
    for rows, graph in graphs.items():
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ScheduleError(
                f"micro-batches must have a whole number of rows; the profile has micro-batches of {rows!r} rows; "
                f"{_AGAIN}"
            )
        for one, other in ((graph, graphs[first]), (graphs[first], graph)):
            for name in one:
                if name not in other:
                    raise ScheduleError(
                        f"a profile must have the same layers for all micro-batch sizes; {name!r} exists for "
                        f"micro-batches of {rows if one is graph else first} rows, but not for "
                        f"{first if one is graph else rows} rows; {_AGAIN}"
                    )
        if set(graph.edges) != set(graphs[first].edges):
            one, other = min(set(graph.edges) ^ set(graphs[first].edges))
            raise ScheduleError(
                f"a profile must have the same edges for all micro-batch sizes; {one!r} -> {other!r} exists for only "
                f"one of the micro-batch sizes {first} and {rows}; {_AGAIN}"
            )
        _check_parameters(graph)
    _check_costs(graphs)
    for rows, graph in graphs.items():
        _check_alike(graphs[first], graph, f"{first} and {rows}")


def _check_alike(one: "nx.DiGraph[str]", other: "nx.DiGraph[str]", rows: str) -> None:
    """Raise ScheduleError if a layer or an edge has different entries for two micro-batch sizes."""
    pairs: list[tuple[Any, Mapping[str, Any], Mapping[str, Any]]] = [
        *((layer, one.nodes[layer], other.nodes[layer]) for layer in one),
        *((edge, one.edges[edge], other.edges[edge]) for edge in one.edges),
    ]
    for name, first, second in pairs:
        for key in first.keys() | second.keys():
            figures = [_figures(values.get(key)) for values in (first, second)]
            if figures[0] != figures[1]:
                raise ScheduleError(
                    f"a profile must contain the same entries for every micro-batch size; the entries of {key} of "
                    f"{name!r} differ between micro-batches of {rows} rows; {_AGAIN}"
                )


def _figures(value: Any) -> Any:
    """Return the property of an entry's value that must be the same for all micro-batch sizes.

    For a mapping, this is the set of its keys. For any other value, it is whether the value is a number.
    """
    return {*value} if isinstance(value, Mapping) else isinstance(value, int | float)


def _check_costs(graphs: Mapping[int, "nx.DiGraph[str]"]) -> None:
    """Raise ScheduleError unless every layer has all costs, and all costs are valid. The error lists all problems."""
    missing: dict[str, list[str]] = {}
    wrong: list[str] = []
    for rows, graph in graphs.items():
        for name, node in graph.nodes(data=True):
            for key in (*NEEDED, "parameters"):
                if key not in node and name not in missing.setdefault(key, []):
                    missing[key].append(name)
        for what, value in _numbers(graph):
            figure = what.split()[0]
            if not (is_size if "bytes" in figure else is_cost)(value) or (figure in SPLIT_SHARES and value > 1):
                wrong.append(f"{what} for {counted(rows, 'row')} is {shown(value)}")
    problems = [f"{key} of layer {and_more(names)} is missing" for key, names in missing.items() if names] + wrong
    if problems:
        more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise ScheduleError(
            f"a profile must have all costs of each layer, times as finite numbers of at least 0, sizes as whole "
            f"numbers of bytes below 2**48, and shares as numbers from 0 to 1; "
            f"{'; '.join(problems[:_MOST_PROBLEMS])}{more}; {_AGAIN}, or make the profile with Profile.from_table, "
            f"which has default values"
        )


def as_notes(values: Any, of: str = "a profile") -> tuple[str, ...]:
    """Return the notes of a profile or a plan as a tuple. Raises ScheduleError unless they are a list of strings."""
    if not isinstance(values, list | tuple) or not all(isinstance(note, str) for note in values):
        raise ScheduleError(f"the notes of {of} must be a list of strings; got {shown(values)}; pass a list")
    return tuple(values)


def _check_parameters(graph: "nx.DiGraph[str]") -> None:
    """Raise ScheduleError unless the graph has a valid size for every parameter of its layers."""
    sizes = graph.graph.get("parameters", {})
    for name, size in sizes.items():
        if not isinstance(size, tuple) or not len(size) == 2 or not all(is_count(number, 0) for number in size):
            raise ScheduleError(
                f"a profile must have (number of elements, bytes) for each parameter; {name!r} has {shown(size)}; "
                f"{_AGAIN}"
            )
    for layer, node in graph.nodes(data=True):
        names = node.get("parameters", ())
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name in sizes for name in names):
            raise ScheduleError(
                f"the parameters of a layer must be names from the profile's list of parameters; {layer!r} has "
                f"{shown(names)}, and the list has {counted(len(sizes), 'name')}; {_AGAIN}"
            )


def _numbers(graph: "nx.DiGraph[str]") -> Iterator[tuple[str, Any]]:
    for name, node in graph.nodes(data=True):
        for key, value in node.items():
            if key.endswith(("_s", "_bytes")) or key in _OTHERS:
                yield f"{key} of layer {name!r}", value
    for one, other, edge in graph.edges(data=True):
        tensors = edge.get("tensors", {})
        check_type(
            tensors, Mapping, f"the tensors between {one!r} and {other!r} must be a mapping from names to bytes", _AGAIN
        )
        for size in (edge.get("bytes", 0), *tensors.values()):
            yield f"bytes between {one!r} and {other!r}", size


def check_model(profiled: "nx.DiGraph[str]", own: "nx.DiGraph[str]") -> None:
    """Raise ScheduleError if a profile belongs to another model.

    Args:
        profiled: the layers of the profile.
        own: the layers of the model, without measurements.

    """
    if list(profiled) != list(own):
        pairs = enumerate(zip_longest(profiled, own))
        place, (one, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        difference = f"layer {place} is {one!r} in the profile and {other!r} in the model"
        if one is None or other is None:
            difference = f"layer {place}, {one or other!r}, is missing from the {'profile' if one is None else 'model'}"
        raise ScheduleError(
            _of_another(f"the profile has {counted(len(profiled), 'layer')}, the model has {len(own)}; {difference}")
        )
    for name in own:
        for parameter in dict.fromkeys((*own.nodes[name]["parameters"], *profiled.nodes[name].get("parameters", ()))):
            sizes = [tuple(one.graph.get("parameters", {}).get(parameter, (0, 0))) for one in (profiled, own)]
            if sizes[0] != sizes[1]:
                raise ScheduleError(
                    _of_another(
                        f"{parameter!r} of layer {name!r} has {sizes[0][0]} elements in the profile ({sizes[0][1]} "
                        f"bytes), and {sizes[1][0]} in the model ({sizes[1][1]} bytes)"
                    )
                )


def _of_another(difference: str) -> str:
    return f"a profile must belong to the pipeline's model; {difference}; measure this model, or pass its profile"
