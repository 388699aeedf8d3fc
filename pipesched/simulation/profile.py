"""Profile: measured costs of a model's layers for several micro-batch sizes on one machine, saved as JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any, get_args

import networkx as nx

from pipesched.checks import as_list, as_path, check_known, check_type, is_count, shown
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.json_files import load_json
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import FIXED, LayerCosts, Stages, costs_of, costs_of_stage, joined_costs, messages
from pipesched.simulation.layer_table import TableOptions, read_table, rows_of_table, write_table
from pipesched.simulation.optimizer_state import OptimizerState, StateRule, without_assumption
from pipesched.simulation.overheads import Machine, RanksAre
from pipesched.simulation.profile_validation import as_notes, check_graphs, check_model
from pipesched.simulation.size_fit import SizeFit
from pipesched.simulation.size_interpolation import figure_at
from pipesched.simulation.table_cells import Table
from pipesched.simulation.tensor_split import SPLIT_COUNTS, SPLIT_SHARES, SPLIT_SIZES, TRAFFIC
from pipesched.simulation.tied_weight_costs import parameter_bytes, stage_parameters
from pipesched.units import counted, quote_time
from pipesched.whole_files import write_whole

__all__ = ["Profile"]


@dataclass(frozen=True)
class Profile:
    """Measured times and sizes of a model's layers, for one or more micro-batch sizes.

    ::

        profile = pipesched.profile(model, sample, rows=[2, 4, 8])
        profile.save("profile.json")
        plan = pipesched.tune(pipesched.Profile.load("profile.json"), num_ranks=4, batch_size=32)

    Attributes:
        graphs: the graph of the measured layers for each micro-batch size (in rows), in the form that
            `pipesched.graph_of` returns. All graphs have the same layers and edges.
        model: a digest of the measured model.
        machine: device name, links, overheads and host bandwidth of the machine.
        size_fit: the costs of the layers as functions of a micro-batch's size, used when the micro-batches of a step
            have different sizes. Default: all costs are proportional to the number of elements.
        notes: sentences on costs that were assumed, not measured. Plans made from the profile repeat them. Default: ().

    Raises:
        ScheduleError: for graphs with different layers or edges, and for invalid values.

    """

    graphs: Mapping[int, "nx.DiGraph[str]"]
    model: str = ""
    machine: Machine = field(default_factory=Machine)
    size_fit: SizeFit = field(default_factory=SizeFit)
    notes: tuple[str, ...] = ()
    _known: dict[int, "nx.DiGraph[str]"] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_graphs(self.graphs)
        object.__setattr__(self, "notes", as_notes(self.notes))
        if self.size_fit.layers and list(self.size_fit.layers) != list(self.layers):
            raise ScheduleError(
                f"size_fit of a profile must have the profile's layers, in the same order; the profile has "
                f"{counted(len(self.layers), 'layer')}, and the {counted(len(self.size_fit.layers), 'layer')} of "
                f"size_fit are not the same; measure the model again"
            )

    def __repr__(self) -> str:
        rows = max(self.graphs)
        layers = [costs_of(self.graphs[rows], name) for name in self.layers]
        both = sum(own.forward_s for own in layers), sum(own.backward_s for own in layers)
        took = f"{quote_time(both[0])} forward, {quote_time(both[1])} backward for {rows}"
        sizes = ", ".join(map(str, sorted(self.graphs)))
        return f"Profile({counted(len(self.layers), 'layer')}, micro-batches of {sizes} rows; {took})"

    def on(self, machine: Machine) -> "Profile":
        """Return the profile with another machine. Both share the costs that are interpolated for other sizes."""
        other = copy(self)  # unlike a new profile, a copy does not check all numbers again
        object.__setattr__(other, "machine", machine)
        return other

    def check_model(self, graph: "nx.DiGraph[str]") -> None:
        """Raise ScheduleError if the profile belongs to another model.

        ``graph`` contains the model's layers, without measurements.
        """
        check_model(self.graph(min(self.graphs)), graph)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in execution order."""
        return tuple(next(iter(self.graphs.values())))

    def graph(self, rows: int) -> "nx.DiGraph[str]":
        """Return the layers with their costs for a micro-batch of ``rows`` rows.

        Costs are interpolated if this micro-batch size was not measured.
        """
        if not is_count(rows):
            raise ScheduleError(f"rows must be a whole number, at least 1; got {shown(rows)}; for example, pass 8")
        if rows in self.graphs:
            return self.graphs[rows]
        if rows not in self._known:
            self._known[rows] = _at(self.graphs, rows)
        return self._known[rows]

    def costs(
        self,
        stages: Stages,
        rows: int,
        *,
        keep: Mapping[str, LayerCheckpoint] | None = None,
        ranks_are: RanksAre = "threads",
    ) -> Costs:
        """Return the costs of stages made of these layers, with the machine's links and overheads.

        A weight that several layers of a stage use is counted once. ``input_bytes`` and ``output_bytes`` are the bytes
        that cross the stage's boundaries. A tensor used by several later stages is passed on from each of these stages
        to the next.

        Args:
            stages: the names of each stage's layers. Every layer of the profile must be in exactly one stage.
            rows: the number of rows of a micro-batch.
            keep: how to reduce activation memory, keyed by layer name: "recompute", "recompute-cheap" or "offload".
                Default: activations are held.
            ranks_are: "threads" or "processes"; the two have different overheads. Default: "threads".

        Returns:
            The costs, one entry per stage.

        Raises:
            ScheduleError: for missing, unknown or repeated layers.
            InputError: ``ranks_are`` is neither "threads" nor "processes".

        """
        rule = "stages must be a list of lists of layers"
        remedy = "for example, pass [['0', '1'], ['2']]"
        stages = [as_list(names, rule, remedy) for names in as_list(stages, rule, remedy)]
        check_type(
            {} if keep is None else keep,
            Mapping,
            "keep= must map layers to checkpoint options",
            "for example, pass {'0': 'recompute'}",
        )
        graph = self.graph(rows)
        _check_layers(list(graph), stages, keep or {})
        sent = messages(graph, stages)
        costs = [dict(self._stage(rows, tuple(names), keep or {}, names is stages[-1])) for names in stages]
        for stage in range(1, len(stages)):
            costs[stage]["input_bytes"] = sum(size for (_, taker), size in sent.items() if taker == stage)
            costs[stage - 1]["output_bytes"] = sum(size for (giver, _), size in sent.items() if giver == stage - 1)
        return joined_costs(costs, **self.machine.between(ranks_are, self._crowding(rows)))

    def _stage(
        self, rows: int, names: tuple[str, ...], keep: Mapping[str, LayerCheckpoint], ends: bool
    ) -> Mapping[str, Any]:
        """Return one stage's costs, keyed by the field names of `Costs`.

        Results are cached, because a search needs the costs of the same stage many times.
        """
        key = rows, names, tuple((name, keep[name]) for name in names if name in keep), ends
        known = self._stages.get(key)
        if known is None:
            graph = self.graph(rows)
            layers = [costs_of(graph, name).treated(keep.get(name)) for name in names]
            begins = names[:1] == (next(iter(graph)),)
            known = costs_of_stage(layers, begins, ends, self.machine.host_bytes_per_s)
            known["weight_bytes"] = parameter_bytes(graph, stage_parameters(graph, names))
            self._stages[key] = known
        return known

    def _crowding(self, rows: int) -> float:
        """Return the factor by which all layers together take longer while one other rank computes."""
        nodes = self.graph(rows).nodes.values()
        took_s = sum(node["forward_s"] + node["backward_s"] for node in nodes)
        return 1 + sum(node.get("crowded_s", 0.0) for node in nodes) / took_s if took_s else 1.0

    @cached_property
    def _stages(self) -> dict[Any, dict[str, Any]]:
        return {}

    @classmethod
    def from_table(
        cls,
        table: Table,
        *,
        rows: int | None = None,
        optimizer: OptimizerState | None = None,
        bytes_per_parameter: float = 4,
        machine: Machine | None = None,
    ) -> "Profile":
        """Make a profile from a table of layers, for a model or a machine that cannot be measured here.

        ::

            table = [
                {"name": "embed", "forward_ms": 1, "backward_ms": 2, "parameter_bytes": 4e8, "output_bytes": 16e6,
                 "activation_bytes": 16e6},
                {"name": "block", "forward_ms": 9, "backward_ms": 18, "parameter_bytes": 2e8, "output_bytes": 16e6,
                 "activation_bytes": 3e8},
            ]
            profile = pipesched.Profile.from_table(table, rows=4)
            plan = pipesched.tune_profile(profile, num_ranks=2, batch_size=64)

        Each row is a layer, and takes the output of the row above it. docs/howto/tables.md describes all columns and
        their default values.

        Args:
            table: a list of dicts, a DataFrame, or the path of a CSV file whose first line has the names of the
                columns.
            rows: the number of rows of the micro-batch whose costs the table has. Default: the column ``rows``.
            optimizer: the optimizer's state: "sgd", "momentum", "adam", "adamw", or the bytes of state for each
                parameter. Default: the column ``optimizer_bytes``, or the state of Adam in rows without it.
            bytes_per_parameter: the size of a parameter, for a table without ``num_parameters``. Default: 4.
            machine: the machine's links and overheads. Default: unknown.

        Returns:
            The profile. Its ``notes`` say what was assumed.

        Raises:
            ScheduleError: for missing or unknown columns and invalid values; the message lists all of them.

        """
        options = TableOptions(optimizer=optimizer, bytes_per_parameter=bytes_per_parameter)
        known = Machine() if machine is None else machine
        check_type(known, Machine, "machine= must be a Machine", "for example, pass the machine of a measured Profile")
        graphs, notes = read_table(table, rows, options)
        return cls(graphs, machine=known, notes=notes)

    def to_table(self, path: str | PathLike[str] | None = None) -> list[dict[str, Any]]:
        """Return the layers as the rows of a table, without columns in which all values are defaults.

        ``Profile.from_table`` makes layers with the same costs from these rows. Times are in milliseconds, or in
        seconds if milliseconds would round one of them. Names of parameters, links and overheads are not part of a
        table.

        Args:
            path: the CSV file to write. Default: None (no file is written).

        Raises:
            ScheduleError: a table cannot hold the profile, because a layer shares parameters with several layers, or
                has a name that a table cannot have.

        """
        lines = rows_of_table(self.graphs)
        if path is not None:
            write_table(lines, path)
        return lines

    def with_optimizer(self, optimizer: OptimizerState) -> "Profile":
        """Return a copy with the size of an optimizer's state.

        Args:
            optimizer: "sgd", "momentum", "adam", "adamw", or the bytes of state for each parameter.

        """
        state = StateRule.of(optimizer)
        graphs = {rows: graph.copy() for rows, graph in self.graphs.items()}
        for graph in graphs.values():
            seen: set[str] = set()
            for _, node in graph.nodes(data=True):
                fresh = [graph.graph["parameters"][name] for name in node["parameters"] if name not in seen]
                total = node["parameter_bytes"]
                trained = node["gradient_bytes"] / total if total and "gradient_bytes" in node else 1
                node["optimizer_bytes"] = sum(state.size(count, size, trained) for count, size in fresh)
                seen.update(node["parameters"])
        return replace(self, graphs=graphs, notes=without_assumption(self.notes))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            "model": self.model,
            "machine": self.machine.to_dict(),
            "sizes": {str(rows): _plain(graph) for rows, graph in sorted(self.graphs.items())},
            **({"size_fit": self.size_fit.to_dict()} if self.size_fit.layers else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Profile":
        """Make a profile from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        try:
            check_known("a profile must have", values, ("model", "machine", "sizes", "size_fit", "notes"))
            machine = Machine.from_dict(values["machine"])
            graphs = {_rows(rows): _graph(graph) for rows, graph in values["sizes"].items()}
            check_type(
                values["model"], str, "the field 'model' of a profile must be the model's digest, a string", _AGAIN
            )
            size_fit = SizeFit.from_dict(values.get("size_fit", {}))
            return cls(graphs, values["model"], machine, size_fit, values.get("notes", ()))
        except PipeschedError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"a value is wrong ({type(error).__name__}: {error})"
            if isinstance(error, KeyError):
                problem = f"{error} is missing"
            raise ScheduleError(
                f"a profile must have the fields model, machine and sizes; {problem}; {_AGAIN}"
            ) from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to a JSON file."""
        write_whole(as_path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Profile":
        """Read a profile from a JSON file. If that fails, raises a ScheduleError that names the file."""
        try:
            return load_json(path, cls.from_dict)
        except OSError as error:
            raise ScheduleError(
                f"a profile must be a readable file; {str(path)!r} cannot be read ({error.strerror}); check the path"
            ) from error


def _check_layers(layers: list[str], stages: Stages, keep: Mapping[str, str]) -> None:
    """Raise ScheduleError unless stages contain each layer once and ``keep`` has only known layers and settings."""
    listed = [name for names in stages for name in names]
    for name in dict.fromkeys([*layers, *listed]):
        if name in layers and listed.count(name) == 1:
            continue
        where = f"listed {listed.count(name)} times" if name in layers else "in a stage, but not in the profile"
        raise ScheduleError(
            f"stages must contain every layer of the profile exactly once; {name!r} is {where}; the profile has "
            f"{counted(len(layers), 'layer')}; list each layer once, or measure this model"
        )
    for name, how in keep.items():
        if name not in layers or how not in get_args(LayerCheckpoint):
            raise ScheduleError(
                f"keep= must map layers of the profile to {' or '.join(get_args(LayerCheckpoint))}; got {name!r}: "
                f"{how!r}; use layer names, and one of these options"
            )


#: The names of a layer's saved attributes. ``_EDGE`` lists the saved attributes of an edge.
_LAYER = (
    *(*LayerCosts().figures(), "num_parameters", "parameters", "buffers"),
    *(*SPLIT_SHARES, *SPLIT_SIZES, *SPLIT_COUNTS, *TRAFFIC),
)
_EDGE = ("bytes", "tensors")
_AGAIN = "measure the model again"


def _plain(graph: "nx.DiGraph[str]") -> dict[str, Any]:
    def known(attributes: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in attributes.items() if name in names}

    return {
        "layers": {name: known(node, _LAYER) for name, node in graph.nodes(data=True)},
        "edges": [[one, other, known(edge, _EDGE)] for one, other, edge in graph.edges(data=True)],
        "parameters": {name: list(size) for name, size in graph.graph.get("parameters", {}).items()},
    }


def _rows(text: str) -> int:
    """Convert a key of the file to a micro-batch size in rows."""
    rows = int(text) if len(text) < 10 else 0
    if str(rows) != text:
        raise ScheduleError(f"the sizes of a profile must be whole numbers of rows; got {shown(text)}; {_AGAIN}")
    return rows


def _graph(values: Mapping[str, Any]) -> "nx.DiGraph[str]":
    check_known("each entry of a profile's sizes must have", values, ("layers", "edges", "parameters"))
    parameters = {name: tuple(size) for name, size in values["parameters"].items()}
    graph: nx.DiGraph[str] = nx.DiGraph(parameters=parameters)
    for name, node in values["layers"].items():
        check_known(f"layer {shown(name)} of a profile must have", node, _LAYER)
        graph.add_node(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in node.items()})
    places = {name: place for place, name in enumerate(graph)}
    for one, other, edge in values["edges"]:
        check_known("an edge of a profile must have", edge, _EDGE)
        if not places[one] < places[other] or graph.has_edge(one, other):
            raise ScheduleError(
                f"edges of a profile must go from a layer to a later one, and must not be repeated; {shown(one)} -> "
                f"{shown(other)} goes backwards or is repeated; {_AGAIN}"
            )
        graph.add_edge(one, other, **edge)
    return graph


def _at(graphs: Mapping[int, "nx.DiGraph[str]"], rows: int) -> "nx.DiGraph[str]":
    """Return the graph for a micro-batch size that was not measured, with interpolated costs."""
    sizes = sorted(graphs)
    found = graphs[sizes[0]].copy()
    for name, node in found.nodes(data=True):
        _put(node, [graphs[size].nodes[name] for size in sizes], sizes, rows)
    for one, other, edge in found.edges(data=True):
        edges = [graphs[size].edges[one, other] for size in sizes]
        _put(edge, edges, sizes, rows)
        if "tensors" in edge:
            columns = zip(*(own["tensors"].values() for own in edges), strict=True)
            values = [math.ceil(figure_at(sizes, column, rows)) for column in columns]
            edge["tensors"] = dict(zip(edge["tensors"], values, strict=True))
    return found


def _put(own: dict[str, Any], measured: Sequence[Mapping[str, Any]], sizes: Sequence[int], rows: int) -> None:
    for key, number in own.items():
        if isinstance(number, int | float) and key not in FIXED:
            value = figure_at(sizes, [one[key] for one in measured], rows)
            own[key] = math.ceil(value) if key.endswith("bytes") else value
