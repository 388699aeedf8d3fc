"""Report tables: arranges the numbers of a report in rows and columns."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pipesched.planning.alternatives import taken
from pipesched.planning.cells import bytes_cell, count_cell, margin_cell, share_cell, time_cell
from pipesched.planning.compared_plans import compared_plans
from pipesched.planning.plan import Plan
from pipesched.program.actions import Action, Kind
from pipesched.program.checkpoint_options import LayerCheckpoint, checkpoint_by_layer
from pipesched.simulation.communication import AxisCommunication
from pipesched.simulation.comparison import Comparison, Pair, quote_off
from pipesched.simulation.trace import Trace
from pipesched.units import quote_count, time_unit
from pipesched.viz.tables import Cell, Table

__all__ = ["tables"]

_NOTABLE = 0.05  # relative prediction errors above this number are marked
_TREATED: dict[LayerCheckpoint, str] = {"recompute": "recomputed", "offload": "offloaded"}
_TIMED = tuple(kind for kind in Kind if kind.row.label and kind.row.number == "micro-batch")
_STAGES = "Times {sizes}per micro-batch. {kinds}"
_SIZES = " kept: activations held for the backward. sent: the stage's output."
_RANKS = "busy: share of the step spent computing. in flight: largest number of (stage, micro-batch) pairs held."
_MEMORY = "Peak memory of each rank."
_HOST_COPIES = " host copies: what the rank keeps in the host's memory for when a rank is lost; not part of the total."
_AXES = (
    "sent, time: largest value of any rank, per step. exposed: the time by which communication lengthens the step. "
    "hidden: the rest of the communication time."
)
_MEDIANS = "Median time of each kind of action, predicted → measured. {kinds} step: all actions of the stage in a step."

_Row = dict[str, Cell]


def tables(plan: Plan, predicted: Trace | None, comparison: Comparison | None) -> list[Table]:
    """Return the tables of a report: compared plans, prediction errors, stages, ranks and memory.

    Tables without known values are left out.
    """
    made = (
        compared_plans(plan.alternatives),
        _axes(plan),
        _differences(comparison),
        _stages(plan),
        _ranks(plan, predicted, comparison),
        _memory(plan),
    )
    return [table for table in made if table]


# ---- axes -----------------------------------------------------------------------------------------------------------


def _axes(plan: Plan) -> Table | None:
    """Return a table with the communication on each axis; None if the plan is not for replicas."""
    rows = [_axis(own) for own in plan.communication()] if plan.replication is not None else []
    return Table.of("Communication, predicted", rows, ("axis",), _AXES) if rows else None


def _axis(own: AxisCommunication) -> _Row:
    row = {
        "axis": Cell(own.axis),
        "ranks": count_cell(own.size),
        "sent": bytes_cell(own.sent_bytes),
        "time": time_cell(own.seconds),
        "exposed": time_cell(own.exposed_s),
    }
    if own.hidden is not None:
        row["hidden"] = share_cell(own.hidden)
    return row


# ---- prediction errors ----------------------------------------------------------------------------------------------


def _differences(comparison: Comparison | None) -> Table | None:
    if comparison is None:
        return None
    rows = []
    for own in comparison.stages:
        row = {"stage": count_cell(own.stage), "rank": count_cell(own.rank)}
        for kind, pair in own.seconds.items():
            row |= _pair(str(kind), pair)
        row |= _pair(
            "step", own.work_s, "bad" if own is comparison.worst and abs(pair.off or 0) > _NOTABLE else "strong"
        )
        rows.append(row)
    kinds = dict.fromkeys(kind for own in comparison.stages for kind in own.seconds)
    return Table.of("Predicted and measured, by stage", rows, (), _MEDIANS.format(kinds=_in_words(kinds)))


def _pair(name: str, pair: Pair, tone: Any = "") -> _Row:
    """Return two cells of a row: one with the predicted and the measured time, one with the prediction error."""
    unit = time_unit(max(pair))
    both = " → ".join(f"{value * unit.per_one:.4g}" for value in pair)
    return {
        name: Cell(f"{both} {unit.name}", pair.measured),
        f"{name} error": Cell(quote_off(pair.off), pair.off, tone),
    }


# ---- stages, ranks, memory ------------------------------------------------------------------------------------------


def _stages(plan: Plan) -> Table:
    costs = plan.costs
    treated = checkpoint_by_layer(plan.checkpoint)
    runs = plan.completed.index
    kinds = [kind for kind in _TIMED if runs.has(kind)]
    summaries = plan.partition.summaries if plan.partition is not None else ()
    # Costs that come only from measured steps have no sizes.
    has_sizes = costs is not None and any((*costs.weight_bytes, *costs.activation_bytes, *costs.output_bytes))
    rows = []
    for stage, part in enumerate(plan.program.weights):
        layers = plan.stages[part]
        row = {
            "stage": count_cell(stage),
            "rank": count_cell(plan.program.placement[stage]),
            "layers": count_cell(len(layers)),
            "first .. last": Cell(plan.first_to_last(part) if layers else "none"),
        }
        kept = Counter(treated[name].removesuffix("-cheap") for name in layers if name in treated)
        row |= {head: Cell(str(kept[word] or ""), kept[word]) for word, head in _TREATED.items()}
        if costs is not None:
            row |= {str(kind): time_cell(costs.seconds(Action(stage, kind, 0))) for kind in kinds}
        if costs is not None and has_sizes:
            row |= {
                "weights": bytes_cell(costs.weight_bytes[stage]),
                "kept": bytes_cell(costs.activation_bytes[stage]),
                "sent": bytes_cell(costs.output_bytes[stage]),
            }
        if summaries and summaries[part].num_parameters:
            count = summaries[part].num_parameters
            row["parameters"] = Cell(quote_count(count), count)
        rows.append(row)
    note = _STAGES.format(sizes="and sizes " if has_sizes else "", kinds=_in_words(kinds)) if costs else ""
    return Table.of("Stages, predicted", rows, ("first .. last",), note + _SIZES if has_sizes else note)


def _ranks(plan: Plan, predicted: Trace | None, comparison: Comparison | None) -> Table | None:
    if predicted is None:
        return None
    rows = []
    for rank in range(predicted.num_ranks):
        own = [str(stage) for stage, place in enumerate(plan.program.placement) if place == rank]
        row = {"rank": count_cell(rank), "stages": Cell(" ".join(own))}
        if comparison is None:
            row["busy, predicted"] = share_cell(predicted.busy_ratios[rank])
        else:
            busy = comparison.busy[rank]
            row |= {"busy, predicted": share_cell(busy.predicted), "busy, measured": share_cell(busy.measured)}
        row["in flight, predicted"] = count_cell(predicted.peak_in_flight[rank])
        rows.append(row)
    return Table.of("Ranks", rows, ("stages",), _RANKS)


def _memory(plan: Plan) -> Table | None:
    """Return a table with each rank's memory by purpose, its total memory, and the margin below its limit."""
    needs = plan.memory()
    if not any(need.total_bytes for need in needs):
        return None
    own = taken(plan.alternatives)
    limit = own.limit_bytes if own else None
    parts = [name for name in asdict(needs[0]) if any(getattr(need, name) for need in needs)]
    rows = []
    for rank, need in enumerate(needs):
        row = {"rank": count_cell(rank)}
        row |= {name.replace("_", " "): bytes_cell(getattr(need, name)) for name in parts}
        row["total"] = bytes_cell(need.total_bytes)
        if limit is not None:
            row["margin"] = margin_cell(limit - need.total_bytes)
        rows.append(row)
    note = _MEMORY + _HOST_COPIES if "host_copies" in parts else _MEMORY
    return Table.of("Memory, predicted", rows, (), note, ("total",))


def _in_words(kinds: Iterable[Kind]) -> str:
    """Return the names of these kinds of actions, as a legend for the column headings."""
    return " ".join(f"{kind}: {kind.row.label}." for kind in kinds if kind.row.label)
