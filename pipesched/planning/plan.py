"""Plan: all decisions in one value: partition, schedule, shape and checkpointing; with its predicted trace."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from os import PathLike
from typing import Any

from pipesched import schedules
from pipesched.checks import as_path, check_known, check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import load_json, read_fields
from pipesched.partitioning.result import Partition, StageLayers, span, with_class_name
from pipesched.planning.alternatives import Alternative, taken
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint, checkpoint_in_words, offloading
from pipesched.program.dependencies import StageGraph, chain
from pipesched.program.lowering import add_offloading, add_recompute
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.program.validation import validate
from pipesched.simulation.costs import Costs
from pipesched.simulation.memory import RankMemory, rank_memory
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_bytes, quote_time
from pipesched.viz.notebook import timeline_html

__all__ = ["Plan", "Tie"]


@dataclass(frozen=True)
class Tie:
    """Parameters that several calls use. stages: of each use, in order. bytes_per_step: what is sent for them: the
    weights to the ranks or devices of later uses, and from each of these uses a gradient back.
    """

    parameters: tuple[str, ...]
    stages: tuple[int, ...]
    bytes_per_step: int

    def __str__(self) -> str:
        others = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        places = sorted({*self.stages})
        if len(places) == 1:
            way = f"all {len(self.stages)} uses are in stage {places[0]}"
        else:
            cost = f"{quote_bytes(self.bytes_per_step)} a step are sent" if self.bytes_per_step else "nothing is sent"
            way = f"used in stages {', '.join(map(str, places))}, gradients are summed, {cost}"
        return f"tied: {self.parameters[0]}{others}: {way}"


@dataclass(frozen=True)
class Plan:
    """What runs: the layers of each stage, the program, checkpointing, and what a micro-batch costs."""

    #: The names of each stage's layers; of one chain, where several run on the same weights.
    stages: StageLayers
    #: The name of the algorithm that made the program.
    schedule: str
    program: Program
    checkpoint: Checkpoint = "never"
    #: What stages cost; those of all chains.
    costs: Costs | None = None
    #: The schedule's plain options: numbers, flags and words.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: What the stages cost and why they are cut so, where layers were measured.
    partition: Partition | None = None
    #: The weights that several calls use.
    ties: tuple[Tie, ...] = ()
    #: What a search weighed against this plan, the best first, where it was searched for.
    alternatives: tuple[Alternative, ...] = ()
    #: The class names of numbered layers, by layer, for reports. Not saved, and not in ``explain``.
    layer_classes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = (name for layers in self.stages for name in layers)
        object.__setattr__(self, "checkpoint", as_checkpoint(self.checkpoint, names))

    @property
    def boundaries(self) -> list[str]:
        """The first layer of every stage but stage 0."""
        return [layers[0] for layers in self.stages[1:]]

    @property
    def chained(self) -> Program:
        """The program as its author wrote it: stage after stage, whichever feeds which in the model."""
        count = self.program.num_stages
        return replace(self.program, graph=chain(count, count // self.program.num_weights))

    def maker(self) -> Schedule | None:
        """The schedule that the plan names, where it makes the plan's program."""
        program = self.program
        if self.schedule not in schedules.names():
            return None
        try:
            schedule = _schedule(self.schedule, self.options, program.num_stages // program.num_ranks)
            made = schedule.program(program.num_ranks, program.num_microbatches)
        except ScheduleError:  # of another one with this name
            return None
        return schedule if made == self.chained else None

    @property
    def treated(self) -> Program:
        """The program with what ``checkpoint`` adds to it: recomputation, and copies to the host."""
        return add_offloading(add_recompute(self.program, self.checkpoint), offloading(self.checkpoint, self.stages))

    def predicted(self) -> Trace | None:
        """The simulated step; None where no costs are known."""
        return simulate(self.treated, self.costs) if self.costs else None

    def memory(self) -> tuple[RankMemory, ...]:
        """What each rank needs at most, by what it is for; () where no costs are known."""
        return rank_memory(self.treated, self.costs) if self.costs else ()

    def explain(self) -> str:
        """What each stage has and costs, the bottleneck and why it cannot be better, ties, and the predicted step."""
        predicted = self.predicted()
        lines = [f"{self.schedule} on {self._shape}, checkpoint {checkpoint_in_words(self.checkpoint)!r}"]
        if self.partition is not None:
            lines.append(self.partition.explain())
        else:
            ranks = self.program.placement
            lines += [f"stage {at} on rank {ranks[at]}: {span(names)}" for at, names in enumerate(self.stages)]
            lines.append("what stages cost is not known: layers are measured where no boundaries are given")
        lines += map(str, self.ties)
        if predicted is not None:
            lines.append(f"predicted: {quote_time(predicted.makespan_s)} a step, bubble {predicted.bubble_ratio:.1%}")
        return "\n".join(lines)

    def first_to_last(self, part: int) -> str:
        """The first and the last layer of ``stages[part]``, with class names: ``0 Embed .. 3 Block``."""
        return span([with_class_name(name, self.layer_classes) for name in self.stages[part]])

    @property
    def _shape(self) -> str:
        return f"{counted(self.program.num_ranks, 'rank')}, {counted(self.program.num_microbatches, 'micro-batch')}"

    def _repr_html_(self) -> str | None:
        """The predicted timeline, for notebooks; None if no costs are known."""
        predicted = self.predicted()
        return None if predicted is None else timeline_html(predicted)

    def __repr__(self) -> str:
        """What it is and its size; ``explain`` says more."""
        layers = counted(sum(map(len, self.stages)), "layer")
        cut = f"{layers} in {counted(len(self.stages), 'stage')} on {self._shape}"
        own = taken(self.alternatives)
        step = f", {quote_time(own.step_s)} a step" if own else ""
        return f"Plan({self.schedule}: {cut}, checkpoint {checkpoint_in_words(self.checkpoint)!r}{step})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them. ``predicted`` is for the reader: it is computed anew on load."""
        predicted = self.predicted()
        summary = {"makespan_s": predicted.makespan_s, "bubble_ratio": predicted.bubble_ratio} if predicted else None
        return {
            "schedule": self.schedule,
            "options": dict(self.options),
            "num_ranks": self.program.num_ranks,
            "num_microbatches": self.program.num_microbatches,
            "checkpoint": self.checkpoint if isinstance(self.checkpoint, str) else dict(self.checkpoint),
            "stages": [list(layers) for layers in self.stages],
            "predicted": summary,
            "ties": [asdict(tie) for tie in self.ties],
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "partition": self.partition.to_dict() if self.partition else None,
            "costs": self.costs.to_dict() if self.costs else None,
            "program": self._program(),
        }

    def _program(self) -> dict[str, Any] | list[str]:
        """The lines of the program; where a schedule of pipesched's own makes it at once, what tells whether it still
        does.
        """
        program = self.program
        known = self.schedule in schedules.names() and schedules.get(self.schedule)
        quick = known and not known.searches and known.module.startswith(f"{schedules.__name__}.")
        if not quick or self.maker() is None:
            return str(program).splitlines()
        edges = {} if program == self.chained else {"edges": [list(edge) for edge in program.graph.edges]}
        return {**edges, "digest": _digest(program)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """The inverse of ``to_dict``. The program is validated: raises ScheduleError where it is wrong, or where the
        schedule makes another one than it did when the plan was saved. As ``program`` there may always be its lines. Of
        stages that were edited nothing else is known: what was measured, weighed and tied was that of others.
        """
        check_known("a plan has", values, (*_KEYS, *_MORE))
        try:
            program = _read_program(values)
            costs = None if values.get("costs") is None else Costs.from_dict(values["costs"])
            stages = tuple(tuple(map(_as_name, _as_list(layers))) for layers in _as_list(values["stages"]))
            _check_stages(stages, program)
            options = values.get("options", {})
            check_type(options, Mapping, "the options of a plan are a mapping of names", "save it again")
            found = values.get("partition")
            partition = None if found is None else Partition.from_dict({**found, "stages": values["stages"]})
            plan = cls(
                stages=stages,
                ties=tuple(read_fields(Tie, tie, "a tie has") for tie in _as_list(values.get("ties", []))),
                alternatives=tuple(map(Alternative.from_dict, _as_list(values.get("alternatives", [])))),
                schedule=values["schedule"],
                program=program,
                checkpoint=values["checkpoint"],
                costs=costs,
                options=dict(options),
                partition=partition,
            )
        except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ScheduleError(f"a plan has {', '.join(_KEYS)}; {error} is missing or wrong; save it again") from error
        names = [name for layers in stages for name in layers]
        if len({*names}) < len(names):
            doubled = next(name for name in names if names.count(name) > 1)
            raise ScheduleError(
                f"every layer is in exactly one stage; the plan has {doubled!r} {names.count(doubled)} times; "
                f"correct it"
            )
        _check_agrees(values, program)
        validate(program)
        if partition is not None and not partition.is_summarised:
            return replace(plan, costs=None, partition=None, ties=(), alternatives=())
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON."""
        as_path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Plan":
        """Read a plan. Raises ScheduleError naming the file where it is none."""
        return load_json(path, cls.from_dict)


def _check_stages(stages: Sequence[tuple[str, ...]], program: Program) -> None:
    if len(stages) != program.num_weights:
        raise ScheduleError(
            f"a plan has as many stages as its program has weight copies; it lists {len(stages)}, the program has "
            f"{program.num_weights}; correct one of them"
        )
    if () in stages:
        raise ScheduleError(
            f"every stage has a layer; stage {stages.index(())} of {len(stages)} has none; give it one, or plan for "
            f"fewer stages"
        )


def _as_list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a list, {shown(value)},")
    return value


def _as_name(layer: Any) -> str:
    if not isinstance(layer, str):
        raise TypeError(f"a layer's name, {shown(layer)},")
    return layer


_KEYS = ("schedule", "stages", "checkpoint", "program")
_MORE = ("options", "num_ranks", "num_microbatches", "predicted", "ties", "alternatives", "partition", "costs")


def _schedule(name: str, options: Mapping[str, Any], chunks: int) -> Schedule:
    """The schedule of this name with the options that it has. Raises ScheduleError for an unknown name."""
    schedule = schedules.get(name)
    given = {**options, "chunks_per_rank": chunks}
    return schedule.with_options(**{option: given[option] for option in schedule.options if option in given})


def _read_program(values: Mapping[str, Any]) -> Program:
    """The program of a saved plan: from its lines, or made again."""
    given = values["program"]
    if not isinstance(given, Mapping):
        return Program.parse("\n".join(_as_list(given)))
    check_known("a plan's program has", given, ("edges", "digest"))
    name = values["schedule"]
    num_ranks = values["num_ranks"]
    num_microbatches = values["num_microbatches"]
    schedule = _schedule(name, values.get("options", {}), len(values["stages"]) // num_ranks)
    program = schedule.program(num_ranks, num_microbatches)
    if "edges" in given:
        program = replace(program, graph=StageGraph.of(program.num_stages, _edges(given["edges"], program.num_stages)))
    own = _digest(program)
    if given.get("digest", own) != own:
        raise ScheduleError(
            f"a plan's schedule makes the program that was planned; {name!r} for {num_ranks} ranks and "
            f"{num_microbatches} micro-batches makes one with the digest {own!r}, the plan has {given['digest']!r}: it "
            f"is of another version of pipesched, or was edited; plan again, or take the digest out of the plan to "
            f"have what the schedule makes now"
        )
    return program


def _edges(given: Any, num_stages: int) -> list[tuple[int, int]]:
    for edge in _as_list(given):
        if len(_as_list(edge)) != 2 or not all(map(is_count, edge, (0, 1))) or not edge[0] < edge[1] < num_stages:
            raise IndexError(f"an edge from a stage to a later one of {num_stages}, {shown(edge)},")
    return [(giver, taker) for giver, taker in given]


def _digest(program: Program) -> str:
    """Equal where programs are: a few characters that stand for its lines."""
    return blake2b(str(program).encode(), digest_size=8).hexdigest()


def _check_agrees(values: Mapping[str, Any], program: Program) -> None:
    """What is written for the reader is what runs."""
    runs = {
        "schedule": program.name or values["schedule"],
        "num_ranks": program.num_ranks,
        "num_microbatches": program.num_microbatches,
    }
    for key, own in runs.items():
        if values.get(key, own) != own:
            raise ScheduleError(
                f"what runs is the program; {key!r} is {values[key]!r}, that of the program {own!r}; make them agree, "
                f"or pass schedule=, devices= and num_microbatches= to Pipeline in the place of a plan"
            )
