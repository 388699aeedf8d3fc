"""Plan: all decisions on partition, schedule, ranks, micro-batches and checkpointing in one object."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from os import PathLike
from typing import Any

from pipesched import schedules
from pipesched.checks import as_path, check_known, check_number, check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import load_json, maybe, read_fields
from pipesched.partitioning.result import Partition, StageLayers, span, with_class_name
from pipesched.planning.advice import NO_ADVICE, Advice, binding, places_of
from pipesched.planning.alternatives import Alternative, taken
from pipesched.planning.compared_plans import compared_plans
from pipesched.planning.step_shares import StepShares, step_shares
from pipesched.program.actions import Kind
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint, checkpoint_in_words
from pipesched.program.completion import UNCHANGED, Completion
from pipesched.program.dependencies import StageGraph, chain
from pipesched.program.liveness import peak_in_flight
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.program.validation import validate
from pipesched.simulation.communication import AxisCommunication, communication
from pipesched.simulation.costs import Costs
from pipesched.simulation.memory import RankMemory, rank_memory
from pipesched.simulation.profile_validation import as_notes
from pipesched.simulation.replication import Replication
from pipesched.simulation.simulator import simulate, simulate_with_bound
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_bytes, quote_time
from pipesched.viz.notebook import timeline_html
from pipesched.viz.tables import text_table
from pipesched.whole_files import write_whole

__all__ = ["Plan", "Tie", "completion_of", "searched_before"]

_EFFORT = 1 / 120  # the relative effort of a search for more micro-batches than a plan's program has
_ROUNDING = 1e-9  # a step this close to a bound is optimal: sums of times are rounded
_OPTIMAL = 1e-4  # a step this close to a proved bound is optimal: the solver rounds times


@dataclass(frozen=True)
class Tie:
    """Parameters that several layer calls use, such as a weight of both the embedding and the output layer."""

    parameters: tuple[str, ...]
    #: The stage of each call that uses the parameters, in execution order.
    stages: tuple[int, ...]
    #: Bytes sent per step: the weights to the rank of each later use, and the gradients back.
    bytes_per_step: int

    def __str__(self) -> str:
        others = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        places = sorted({*self.stages})
        if len(places) == 1:
            way = f"all {len(self.stages)} uses are in stage {places[0]}"
        else:
            cost = f"{quote_bytes(self.bytes_per_step)} sent per step" if self.bytes_per_step else "nothing is sent"
            way = f"used in stages {', '.join(map(str, places))}; gradients are summed; {cost}"
        return f"tied: {self.parameters[0]}{others}: {way}"


@dataclass(frozen=True)
class Plan:
    """A complete decision on how to run a model: stages, schedule, micro-batches and checkpointing.

    ::

        plan = pipesched.tune(model, sample, num_ranks=4, batch_size=32)
        print(plan.explain())
        plan.save("plan.json")
        pipe = pipesched.Pipeline(model, sample, plan=pipesched.Plan.load("plan.json"), devices=devices)

    Attributes:
        stages: the names of the layers of each stage. In bidirectional schedules, the stages of one direction.
        schedule: the name of the schedule that made the program.
        program: the program, without the recomputes and host copies that ``checkpoint`` adds.
        checkpoint: which activations to recompute or offload: one setting for all stages, or one for each named layer.
            Default: "never".
        costs: the costs of each stage in the program. None: not measured.
        options: the schedule's options (numbers, flags and strings).
        partition: the times and sizes of the stages, and the reason for the boundaries. None: not measured.
        ties: the parameters that several layer calls use.
        alternatives: the plans that the search compared, this plan first. Empty if there was no search.
        replication: the number of replicas that run the program on different rows, and the tensors that are split
            across the replicas (``zero``). ``costs`` describes one replica. None: the plan does not depend on replicas.
        tensor: the tensor groups, each of which runs what a rank of the program runs. Its ranks split each layer.
            ``costs`` then describes one rank of each group. None: layers are not split.
        completion: the actions that a step adds to the program: updates, norms, recomputes, copies to the host, the
            collectives of replicas, and copies of stages. Only ``updates``, ``norms`` and ``redundancy`` are given; the
            rest follows from the other fields. Default: no updates.
        proved_bound_s: a lower bound on the step time of these stages in any order with bit-identical results, proved
            by a solver. None: no proof.
        posted: the number of receives on each channel that are posted in advance, each with a buffer. Default: 0.
        notes: sentences on costs that were assumed, and on what a running pipeline predicts from.
        shares: what the predicted step is spent on, found by the search. None: there was no search.
        advice: why the plan does not have more ranks, chunks or micro-batches, and what to try next. Default: empty.
        microbatch_rows: the number of rows of the micro-batch to which ``costs`` belong. None: not known.

    """

    stages: StageLayers
    schedule: str
    program: Program
    checkpoint: Checkpoint = "never"
    costs: Costs | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    partition: Partition | None = None
    ties: tuple[Tie, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    replication: Replication | None = None
    tensor: TensorAxis | None = None
    completion: Completion = UNCHANGED
    proved_bound_s: float | None = None
    posted: int = 0
    notes: tuple[str, ...] = ()
    shares: StepShares | None = None
    advice: Advice = NO_ADVICE
    microbatch_rows: int | None = None
    #: The class names of layers whose names are numbers, keyed by layer. For reports; not in ``explain``.
    layer_classes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = (name for layers in self.stages for name in layers)
        object.__setattr__(self, "checkpoint", as_checkpoint(self.checkpoint, names))
        own = completion_of(self.completion, self.stages, self.checkpoint, self.costs, self.replication)
        object.__setattr__(self, "completion", own)

    @property
    def boundaries(self) -> list[str]:
        """The first layer of every stage except stage 0."""
        return [layers[0] for layers in self.stages[1:]]

    @property
    def chained(self) -> Program:
        """The program with its stages connected as a plain chain, without the model's skip connections."""
        count = self.program.num_stages
        return replace(self.program, graph=chain(count, count // self.program.num_weights))

    def maker(self) -> Schedule | None:
        """Return the plan's schedule with its options; None if this schedule cannot create the plan's program."""
        program = self.program
        if self.schedule not in schedules.names():
            return None
        try:
            schedule = _schedule(self.schedule, self.options, program.num_stages // program.num_ranks)
            if "found" in schedule.options:
                schedule = searched_before(self.chained, self.costs)
            made = schedule.program(program.num_ranks, program.num_microbatches)
        except ScheduleError:  # another schedule may have this name now
            return None
        return schedule if made == self.chained else None

    @cached_property
    def completed(self) -> Program:
        """The program with all actions that ``completion`` adds."""
        return self.completion.complete(self.program)

    def predicted(self) -> Trace | None:
        """Return the simulated step, with a lower bound on the step time of these stages; None if ``costs`` is None."""
        if self.costs is None:
            return None
        trace = simulate_with_bound(self.completed, self.costs)
        if self.proved_bound_s is None or trace.bound_s is None:
            return trace
        return replace(trace, bound_s=max(trace.bound_s, self.proved_bound_s))

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the peak memory of each rank, broken down by purpose; () if ``costs`` is None."""
        if self.costs is None:
            return ()
        replicas = None if self.replication is None else self.replication.buffers(self.costs)
        return rank_memory(self.completed, self.costs, posted=self.posted, replicas=replicas)

    @property
    def num_devices(self) -> int:
        """The number of ranks of all replicas and tensor groups together."""
        replicas = 1 if self.replication is None else self.replication.num_replicas
        return self.program.num_ranks * replicas * (1 if self.tensor is None else self.tensor.size)

    @property
    def mesh(self) -> dict[str, int] | None:
        """The mesh dimensions that the plan needs, such as ``{"dp": 8, "pp": 4}``; None if ``replication`` is None.

        If layers are split, the last dimension is ``"tp"``.

        ``init_device_mesh("cuda", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))`` creates the mesh.
        """
        return None if self.replication is None else self.replication.mesh(self.program.num_ranks, self.tensor)

    def communication(self) -> tuple[AxisCommunication, ...]:
        """Return the predicted communication on each axis: pipeline, replicas, zero and tensor; () without costs."""
        return communication(self.completed, self.costs, self.replication, self.tensor) if self.costs else ()

    def explain(self) -> str:
        """Describe the plan as text.

        The text has the stages, the predicted step, what binds it, the plans that the search compared, why the plan
        does not have more ranks, chunks or micro-batches, what was assumed, and what to try next.
        """
        lines = [f"{self.schedule} on {self._shape}, checkpoint {checkpoint_in_words(self.checkpoint)!r}"]
        predicted = self.predicted()
        if predicted is not None:
            rows = "" if self.microbatch_rows is None else f" of {counted(self.microbatch_rows, 'row')}"
            step = f"{quote_time(predicted.makespan_s)} per step"
            counts = f"{counted(self.program.num_microbatches, 'micro-batch')}{rows}"
            lines.append(f"predicted: {step} of {counts}, bubble {predicted.bubble_ratio:.1%}")
            lines += self.binding()
            lines += self.bound_in_words(predicted)
        lines += [*map(str, self.advice.next_steps), *self.advice.why_not_more, *self.notes, "", *self._stage_lines()]
        lines += map(str, self.ties)
        lines += map(str, self.communication() if self.replication is not None else ())
        table = compared_plans(self.alternatives)
        lines += [] if table is None else ["", text_table(table)]
        return "\n".join(lines)

    def _stage_lines(self) -> list[str]:
        """Return the lines of a table of the stages, and a line on the cut."""
        if self.partition is None:
            ranks = self.program.placement
            lines = [f"stage {at} on rank {ranks[at]}: {self.first_to_last(at)}" for at in range(len(self.stages))]
            return [*lines, "stage costs are unknown: layers are measured only if pipesched chooses the boundaries"]
        times: list[float] = []
        if self.costs is not None:
            has = self.completed.index.has
            columns = [self.costs.times(kind) for kind in (Kind.F, Kind.B, Kind.R) if kind is not Kind.R or has(kind)]
            times = [sum(column) for column in zip(*columns, strict=True)]
        memory = [own.total_bytes for own in self.memory()]
        return [*self.partition.stage_lines(times, memory), f"cut: {self.partition.reason}"]

    def binding(self) -> Sequence[str]:
        """Return sentences that say what binds the predicted step, and what its time is spent on; [] without costs."""
        if self.costs is None:
            return []
        shares = self.shares or step_shares(self.completed, self.costs)
        return binding(shares, self.advice, places_of(self.program, self.costs, shares, taken(self.alternatives)))

    def bound_in_words(self, predicted: Trace) -> list[str]:
        """Return a list with one sentence that compares a predicted step with its bound; [] if there is no bound."""
        if predicted.bound_s is None or predicted.above_bound is None:
            return []
        bound = quote_time(predicted.bound_s)
        if self.proved_bound_s is None:
            least = f"no schedule of these stages on these ranks can take less than {bound}{self._shared_cores}"
            if predicted.above_bound < _ROUNDING:
                return [f"{least}; the predicted step is optimal"]
            return [f"{least}; the predicted step is {predicted.above_bound:.1%} above this bound"]
        least = (
            f"a solver has proved that no order of these stages on these ranks can take less than {bound} and keep "
            f"results bit-identical to an unpipelined loop"
        )
        if predicted.above_bound < _OPTIMAL:
            return [f"{least}; the predicted step is optimal"]
        return [f"{least}; the predicted step is {predicted.above_bound:.1%} above this bound"]

    @property
    def _shared_cores(self) -> str:
        """A remark for bounds if ranks share cores, which bounds do not know; "" if every rank has its own."""
        overheads = self.costs.overheads if self.costs is not None else None
        cores = len(overheads.crowding) if overheads is not None else 0
        ranks = self.program.num_ranks
        return f" if each had a core of its own ({ranks} ranks share {cores} cores)" if 0 < cores < ranks else ""

    def first_to_last(self, part: int) -> str:
        """Return the first and the last layer of ``stages[part]``, with class names: ``0 Embed .. 3 Block``."""
        return span([with_class_name(name, self.layer_classes) for name in self.stages[part]])

    @property
    def ranks(self) -> str:
        """The numbers of ranks and replicas, as text."""
        ranks = counted(self.program.num_ranks, "rank")
        if self.tensor is not None:
            ranks = f"{counted(self.program.num_ranks, 'tensor group')} of {counted(self.tensor.size, 'rank')}"
        if self.replication is None:
            return ranks
        axes = self.replication.describe(self.program.num_ranks, self.tensor)
        return f"{counted(self.replication.num_replicas, 'replica')} of {ranks} ({axes})"

    @property
    def _shape(self) -> str:
        return f"{self.ranks}, {counted(self.program.num_microbatches, 'micro-batch')}"

    def _repr_html_(self) -> str | None:
        """Return the predicted timeline, for notebooks; None if ``costs`` is None."""
        predicted = self.predicted()
        return None if predicted is None else timeline_html(predicted)

    def __repr__(self) -> str:
        layers = counted(sum(map(len, self.stages)), "layer")
        cut = f"{layers} in {counted(len(self.stages), 'stage')} on {self._shape}"
        chosen = taken(self.alternatives)
        step = f", {quote_time(chosen.step_s)} per step" if chosen else ""
        return f"Plan({self.schedule}: {cut}, checkpoint {checkpoint_in_words(self.checkpoint)!r}{step})"

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON. ``"predicted"`` is only for human readers and is ignored on loading."""
        predicted = simulate(self.completed, self.costs) if self.costs else None
        summary = {"makespan_s": predicted.makespan_s, "bubble_ratio": predicted.bubble_ratio} if predicted else None
        values = {
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
        if self.replication is not None:
            values["replication"] = self.replication.to_dict()
        if self.tensor is not None:
            values["tensor"] = self.tensor.to_dict()
        copies = {"redundancy": True} if self.completion.redundancy else {}
        values["completion"] = {"updates": self.completion.updates, "norms": self.completion.norms, **copies}
        if self.proved_bound_s is not None:
            values["proved_bound_s"] = self.proved_bound_s
        if self.posted:
            values["posted"] = self.posted
        if self.layer_classes:
            values["layer_classes"] = dict(self.layer_classes)
        if self.notes:
            values["notes"] = list(self.notes)
        if self.shares is not None:
            values |= {"shares": asdict(self.shares), "advice": self.advice.to_dict()}
        if self.microbatch_rows is not None:
            values["microbatch_rows"] = self.microbatch_rows
        return values

    def _program(self) -> dict[str, Any] | list[str]:
        """Return the program as text lines, or its digest if one of pipesched's schedules can quickly recreate it."""
        program = self.program
        known = self.schedule in schedules.names() and schedules.get(self.schedule)
        quick = known and not known.searches and known.module.startswith(f"{schedules.__name__}.")
        if not quick or self.maker() is None:
            return str(program).splitlines()
        edges = {} if program == self.chained else {"edges": [list(edge) for edge in program.graph.edges]}
        return {**edges, "digest": _digest(program)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """Create a plan from the dict that ``to_dict`` returned, and validate its program.

        ``"program"`` can contain text lines even if ``to_dict`` wrote a digest. If the stages were edited, the costs,
        ties and alternatives are dropped, because they describe the stages before the edit.

        Raises:
            ScheduleError: for an invalid plan, or if the schedule no longer creates the program that was saved.

        """
        check_known("a plan must have", values, (*_KEYS, *_MORE))
        try:
            program = _read_program(values)
            costs = None if values.get("costs") is None else Costs.from_dict(values["costs"])
            stages = tuple(tuple(map(_as_name, _as_list(layers))) for layers in _as_list(values["stages"]))
            _check_stages(stages, program)
            options = values.get("options", {})
            check_type(options, Mapping, "a plan's options must map names to values", "save the plan again")
            found = values.get("partition")
            partition = None if found is None else Partition.from_dict({**found, "stages": values["stages"]})
            plan = cls(
                stages=stages,
                ties=tuple(read_fields(Tie, tie, "a tie must have") for tie in _as_list(values.get("ties", []))),
                alternatives=tuple(map(Alternative.from_dict, _as_list(values.get("alternatives", [])))),
                schedule=values["schedule"],
                program=program,
                checkpoint=values["checkpoint"],
                costs=costs,
                options=dict(options),
                partition=partition,
                replication=maybe(Replication.from_dict)(values.get("replication")),
                tensor=maybe(TensorAxis.from_dict)(values.get("tensor")),
                completion=_read_completion(values),
                proved_bound_s=_as_bound(values.get("proved_bound_s")),
                posted=_as_posted(values.get("posted", 0)),
                layer_classes=_as_classes(values.get("layer_classes", {})),
                notes=as_notes(values.get("notes", ()), "a plan"),
                shares=maybe(_shares)(values.get("shares")),
                advice=Advice.from_dict(values.get("advice", {})),
                microbatch_rows=_as_rows(values.get("microbatch_rows")),
            )
        except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ScheduleError(
                f"a plan must have the fields {', '.join(_KEYS)}; {_problem(error)}; save the plan again"
            ) from error
        names = [name for layers in stages for name in layers]
        if len({*names}) < len(names):
            doubled = next(name for name in names if names.count(name) > 1)
            raise ScheduleError(
                f"every layer must be in exactly one stage; the plan lists {doubled!r} {names.count(doubled)} times; "
                f"remove the duplicates"
            )
        _check_agrees(values, program)
        validate(program)
        if partition is not None and not partition.is_summarised:
            return replace(
                plan,
                costs=None,
                partition=None,
                ties=(),
                alternatives=(),
                proved_bound_s=None,
                microbatch_rows=None,
                notes=(),
                shares=None,
                advice=NO_ADVICE,
            )
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        write_whole(as_path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Plan":
        """Read a plan from a JSON file. Raises ScheduleError with the file's name for an invalid plan."""
        return load_json(path, cls.from_dict)


def _shares(values: Any) -> StepShares:
    return read_fields(StepShares, values, "the shares of a plan must have")


def _check_stages(stages: Sequence[tuple[str, ...]], program: Program) -> None:
    if len(stages) != program.num_weights:
        raise ScheduleError(
            f"a plan must have one stage for each part of the model; the plan lists "
            f"{counted(len(stages), 'stage')}, but its program cuts the model into "
            f"{counted(program.num_weights, 'part')}; correct the stages or the program"
        )
    if () in stages:
        raise ScheduleError(
            f"every stage must have a layer; stage {stages.index(())} of {len(stages)} has none; add a layer, or "
            f"plan for fewer stages"
        )


def _problem(error: Exception) -> str:
    """Describe an error that was raised while a saved plan was read."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return f"a value is wrong ({type(error).__name__}: {error})"


def _as_list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, got {shown(value)}")
    return value


def _as_bound(value: Any) -> float | None:
    if value is not None:
        check_number(value, "the proved_bound_s of a plan")
    return value  # type: ignore[no-any-return]  # checked above


def _as_classes(values: Any) -> Mapping[str, str]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values.values()):
        raise TypeError(f"layer_classes must map layers to the names of classes; got {shown(values)}")
    return dict(values)


def _as_posted(value: Any) -> int:
    if not is_count(value, 0):
        raise TypeError(f"posted must be a whole number, at least 0; got {shown(value)}")
    return value  # type: ignore[no-any-return]  # checked above


def _as_rows(value: Any) -> int | None:
    if value is not None and not is_count(value):
        raise TypeError(f"microbatch_rows must be a whole number, at least 1; got {shown(value)}")
    return value  # type: ignore[no-any-return]  # checked above


def _as_name(layer: Any) -> str:
    if not isinstance(layer, str):
        raise TypeError(f"expected the name of a layer, got {shown(layer)}")
    return layer


_KEYS = ("schedule", "stages", "checkpoint", "program")
_MORE = (
    "options",
    "num_ranks",
    "num_microbatches",
    "predicted",
    "ties",
    "alternatives",
    "partition",
    "costs",
    "replication",
    "tensor",
    "completion",
    "proved_bound_s",
    "posted",
    "layer_classes",
    "notes",
    "shares",
    "advice",
    "microbatch_rows",
)


def completion_of(
    completion: Completion,
    stages: StageLayers,
    checkpoint: Checkpoint,
    costs: Costs | None,
    replication: Replication | None,
) -> Completion:
    """Return a copy of a completion with the actions that a plan's stages, checkpoint option and replicas need.

    Args:
        completion: tells whether a step updates the weights, whether updates wait for the norm of all gradients, and
            whether copies of stages are kept.
        stages: the layers of each stage.
        checkpoint: the plan's checkpoint option.
        costs: the costs of the stages, with the buckets of gradients. None: not measured, so there are no collectives.
        replication: the replicas; None for a single pipeline.

    """
    buckets = () if costs is None else tuple(map(len, costs.reduce_s))
    gather_once = replication.gather_once if replication is not None and replication.zero == 3 else None
    treated = completion.treating(checkpoint, stages)
    return replace(treated, buckets=buckets if any(buckets) else (), gather_once=gather_once)


def searched_before(program: Program, costs: Costs | None) -> Schedule:
    """Return the schedule `searched` with a program that this schedule found earlier.

    For at most as many micro-batches as ``program`` has, the schedule uses ``program``. For more micro-batches, the
    schedule searches again with ``costs``. No rank then holds more (stage, micro-batch) pairs than in ``program``.

    Args:
        program: the program, for a chain of stages.
        costs: the costs of the stages. None: all stages take the same time.

    """
    return schedules.get("searched").with_options(
        chunks_per_rank=program.num_stages // program.num_ranks,
        placement=program.placement,
        max_in_flight=tuple(peak_in_flight(program.orders.rank(rank)) for rank in range(program.num_ranks)),
        costs=costs,
        effort=_EFFORT,
        starts=(),
        found=program,
    )


def _schedule(name: str, options: Mapping[str, Any], chunks: int) -> Schedule:
    """Return the schedule of this name with these options. Raises ScheduleError for an unknown name."""
    schedule = schedules.get(name)
    given = {**options, "chunks_per_rank": chunks}
    return schedule.with_options(**{option: given[option] for option in schedule.options if option in given})


def _read_completion(values: Mapping[str, Any]) -> Completion:
    """Return what a saved plan says of its updates and copies of stages.

    Plans without this field have updates if they have replicas.
    """
    given = values.get("completion")
    if given is None:
        return Completion(updates=values.get("replication") is not None)
    check_known("a plan's completion must have", given, ("updates", "norms", "redundancy"))
    for name, value in given.items():
        check_type(value, bool, f"{name} of a plan must be True or False", "save the plan again")
    return Completion(**given)


def _read_program(values: Mapping[str, Any]) -> Program:
    """Return the program of a saved plan: parsed from the saved lines, or created by the saved schedule."""
    given = values["program"]
    if not isinstance(given, Mapping):
        return Program.parse("\n".join(_as_list(given)))
    check_known("a plan's program must have", given, ("edges", "digest"))
    name = values["schedule"]
    num_ranks = values["num_ranks"]
    num_microbatches = values["num_microbatches"]
    schedule = _schedule(name, values.get("options", {}), len(_as_list(values["stages"])) // num_ranks)
    program = schedule.program(num_ranks, num_microbatches)
    if "edges" in given:
        program = replace(program, graph=StageGraph.of(program.num_stages, _edges(given["edges"], program.num_stages)))
    own = _digest(program)
    if given.get("digest", own) != own:
        raise ScheduleError(
            f"a plan's schedule must generate the program that was saved; {name!r} for "
            f"{counted(num_ranks, 'rank')} and {counted(num_microbatches, 'micro-batch')} generates a program with "
            f"digest {own!r}, but the plan has the digest {given['digest']!r}: the plan was made by another version of "
            f"pipesched, or it was edited; make a new plan, or remove the digest from the plan to use the program "
            f"that the schedule generates now"
        )
    return program


def _edges(given: Any, num_stages: int) -> list[tuple[int, int]]:
    for edge in _as_list(given):
        if len(_as_list(edge)) != 2 or not all(map(is_count, edge, (0, 1))) or not edge[0] < edge[1] < num_stages:
            raise ScheduleError(
                f"an edge of a saved plan must lead from a stage to a later stage, and stages are numbered 0 to "
                f"{num_stages - 1}; got {shown(edge)}; save the plan again"
            )
    return [(giver, taker) for giver, taker in given]


def _digest(program: Program) -> str:
    """Return a short hash of the program's text."""
    return blake2b(str(program).encode(), digest_size=8).hexdigest()


def _check_agrees(values: Mapping[str, Any], program: Program) -> None:
    """Raise ScheduleError if the plan and its program differ in schedule, number of ranks or micro-batches."""
    runs = {
        "schedule": program.name or values["schedule"],
        "num_ranks": program.num_ranks,
        "num_microbatches": program.num_microbatches,
    }
    for key, own in runs.items():
        if values.get(key, own) != own:
            raise ScheduleError(
                f"a plan must agree with its program; {key!r} is {values[key]!r} in the plan, but {own!r} in its "
                f"program; make them agree, or pass schedule=, devices= and num_microbatches= to Pipeline instead of a "
                f"plan"
            )
