"""Program: the order of actions of every rank, the placement of the stages, and the stage graph.

A program is an immutable value. Parsing its text form gives an equal program. The same object is validated, simulated,
drawn and executed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, zip_longest
from os import PathLike
from typing import Any

import numpy as np

from pipesched.checks import as_path, check_type, is_whole, shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Columns, Ints, Mask, Orders
from pipesched.program.actions import Action, Kind
from pipesched.program.dependencies import INPUT_USES, Index, Requirements, StageGraph, chain, needs, requirements
from pipesched.program.placement import Placement, chunks_of, copy_ranks
from pipesched.program.text_format import order_words, parse_program, table_lines
from pipesched.program.torch_table import torch_table
from pipesched.units import counted
from pipesched.whole_files import write_whole

__all__ = ["Program", "check_program", "marked_grid"]

_ORDERED = ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W))
_CHAIN = StageGraph((), ())  # replaced by a chain of all stages
_GRID_REACH = 5  # actions shown on either side of a mark
_REPR_RANKS = 8
_REPR_COLUMNS = 40


@dataclass(frozen=True)
class Program:
    """Every rank's order of actions: the object that is validated, simulated, drawn and executed.

    A schedule builds programs. ``repr`` shows the orders as a grid, shortened if they are long; ``str`` is the whole
    text form, and `Program.parse` reads this text:

        >>> pipesched.schedules.get("1f1b").program(num_ranks=2, num_microbatches=4)
        Program '1f1b': 2 ranks, 2 stages, 4 micro-batches
        rank 0 | 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    ``2F0`` is the forward of stage 2 for micro-batch 0.

    Args:
        orders: the actions of each rank, in the order in which the rank runs them.
        placement: the rank of each stage.
        num_microbatches: the total number of micro-batches, over all steps of the program; with token slices, the total
            number of slices.
        graph: the producers and consumers of each stage. Default: a chain, in which every stage feeds the next.
        forward_only: whether the program has only forwards, for evaluation. Default: False.
        name: the schedule's name, for display; ignored by ``==``. Default: "".
        weights: the index of each stage's weights. Stages with the same index hold copies of the same weights.
            Default: each stage has its own weights.
        routes: for each micro-batch, the stages that it visits. A route that contains a stage must also contain
            the stage's producers and consumers. Default: all stages.
        versions: for each stage, the weight version that each micro-batch uses in its forward and its backward. Version
            v is the weights after v updates. () means the newest weights at the time of the forward. Default: () for
            all stages.
        slices_per_microbatch: the number of token slices in a micro-batch. If it is above 1, actions are numbered by
            slice, and the slices of a micro-batch have consecutive numbers. Default: 1.

    Raises:
        ScheduleError: a field has the wrong type, or the fields disagree on the number of stages or micro-batches.
            The orders themselves are checked by `validate`.

    """

    orders: Orders
    placement: Placement
    num_microbatches: int
    graph: StageGraph = _CHAIN
    forward_only: bool = False
    name: str = field(default="", compare=False)
    weights: tuple[int, ...] = ()
    routes: tuple[tuple[int, ...], ...] = ()
    versions: tuple[tuple[int, ...], ...] = ()
    slices_per_microbatch: int = 1

    def __post_init__(self) -> None:
        self._keep_as_tuples()
        if not is_whole(self.num_microbatches):
            raise ScheduleError(
                f"a program must have a whole number of micro-batches; got {shown(self.num_microbatches)}; pass 1 or "
                f"more"
            )
        check_type(self.graph, StageGraph, "a program's graph must be a StageGraph", "leave graph= out for a chain")
        if self.graph is _CHAIN:
            object.__setattr__(self, "graph", chain(len(self.placement)))
        if not self.weights:
            object.__setattr__(self, "weights", tuple(range(len(self.placement))))
        if not any(self.versions):  # no stage has versions
            object.__setattr__(self, "versions", ())
        for what, has, due in (
            ("a stage graph", len(self.graph.producers), len(self.placement)),
            ("weights", len(self.weights), len(self.placement)),
            ("versions", len(self.versions or self.placement), len(self.placement)),
            ("routes", len(self.routes) or self.num_microbatches, self.num_microbatches),
        ):
            if has != due:
                of = "micro-batches" if what == "routes" else "stages"
                raise ScheduleError(
                    f"{what} must have one entry for each of the {due} {of}; got a list of length {has}; make the "
                    f"numbers agree"
                )

    def _keep_as_tuples(self) -> None:
        try:
            object.__setattr__(self, "orders", Orders.of(self.orders))
            for name in ("placement", "weights"):
                object.__setattr__(self, name, tuple(getattr(self, name)))
            for name in ("routes", "versions"):
                object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))
        except (TypeError, ValueError, AttributeError) as error:
            raise ScheduleError(
                f"a program must have a list of Actions for each rank, and lists of whole numbers in its other fields; "
                f"got a different type ({error}); build it with a Schedule or Program.parse"
            ) from error

    @property
    def columns(self) -> Columns:
        """The actions of all ranks as arrays, rank after rank."""
        return self.orders.columns

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def num_weights(self) -> int:
        """The number of parts into which the model is cut. Several stages can hold copies of one part."""
        return len(set(self.weights))

    @property
    def is_chain(self) -> bool:
        """Whether every stage feeds only the next stage, as in the default graph."""
        return self.graph == chain(self.num_stages)

    @property
    def is_chains(self) -> bool:
        """Whether the graph consists of chains, and each micro-batch visits one chain.

        Each chain must hold all weights of the model, in the same order.
        """
        num_chains, rest = divmod(self.num_stages, max(1, self.num_weights))
        copies = tuple(range(self.num_weights)) * num_chains
        if rest or self.weights != copies or self.graph != chain(self.num_stages, num_chains):
            return False
        return num_chains == 1 or {len(route) for route in self.routes} == {self.num_weights}

    @cached_property
    def output_rank(self) -> int:
        """The rank of the last stage that micro-batch 0 visits."""
        return self.placement[self.routes[0][-1] if self.routes else -1]

    @cached_property
    def has_updates(self) -> bool:
        """Whether the program has UPDATE actions, as asynchronous schedules do."""
        return bool(self.columns.are(Kind.UPDATE).any())

    @cached_property
    def has_norms(self) -> bool:
        """Whether the program has NORM actions. Updates that use the norm of all gradients need these actions."""
        return bool(self.columns.are(Kind.NORM).any())

    @cached_property
    def has_redundancy(self) -> bool:
        """Whether the program has KEEP actions, which set the state of stages aside, for when a rank is lost."""
        return bool(self.columns.are(Kind.KEEP).any())

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """For each stage, the number of gradient buckets that REDUCE actions sum over the replicas."""
        reduced = self.columns.stage[self.columns.are(Kind.REDUCE)]
        return tuple(np.bincount(reduced, minlength=self.num_stages).tolist())

    @cached_property
    def gathers(self) -> tuple[int, ...]:
        """For each stage, the number of UNSHARD actions, which gather weights that are split across replicas."""
        gathered = self.columns.stage[self.columns.are(Kind.UNSHARD)]
        return tuple(np.bincount(gathered, minlength=self.num_stages).tolist())

    @property
    def has_gathers(self) -> bool:
        """Whether the program has UNSHARD actions, which gather weights that are split across replicas."""
        return any(self.gathers)

    @cached_property
    def index(self) -> Index:
        """A lookup table from each action to its row in `columns`."""
        return Index(self.columns, self.graph, self.num_microbatches)

    @cached_property
    def requirements(self) -> Requirements:
        """All dependencies between actions, as pairs of rows of `columns`."""
        return requirements(self.columns, self.index, self.graph)

    @cached_property
    def crossing(self) -> Ints:
        """The positions in `requirements` of the dependencies between different ranks."""
        row, needed = self.requirements
        rank_of = self.orders.rank_of
        return np.flatnonzero((needed >= 0) & (rank_of[row] != rank_of[needed]))

    @cached_property
    def messages(self) -> Ints:
        """The positions in `requirements` of the dependencies for which one stage sends a message to another.

        These are the ``crossing`` dependencies of actions that use an output or a gradient of another stage. The others
        are on norms and on gradients for copies of stages, which ranks exchange in another way.
        """
        return self.crossing[self.columns.are(*INPUT_USES)[self.requirements.row[self.crossing]]]

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds."""
        return chunks_of(self.placement, rank)

    @cached_property
    def copy_ranks(self) -> Placement:
        """For each stage, the rank that would hold a copy of the stage."""
        return copy_ranks(self.placement, self.num_ranks)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """For each stage, the number of forwards that its rank runs for one micro-batch, over all chunks and slices.

        One forward of the stage is therefore 1 / shares[stage] of its rank's forward work for a micro-batch.
        """
        routes = set(self.routes) or {tuple(range(self.num_stages))}
        held = [Counter(self.placement[stage] for stage in route) for route in routes]
        per_stage = {stage: ranks for route, ranks in zip(routes, held, strict=True) for stage in route}
        chunks = (per_stage[stage][rank] if stage in per_stage else 1 for stage, rank in enumerate(self.placement))
        return tuple(count * self.slices_per_microbatch for count in chunks)

    def needs(self, action: Action) -> Iterable[Action]:
        """Return the actions that must have ended before ``action`` starts."""
        return needs(action, self.graph, self.index)

    def place(self, action: Action) -> tuple[int, int]:
        """Return the rank of an action, and its position in that rank's order. Raises KeyError for a missing action."""
        row = self.index.row(action)
        if row < 0:
            raise KeyError(str(action))
        return self.orders.place(row)

    @property
    def visits(self) -> Mask:
        """Whether each micro-batch visits each stage, as a boolean array of shape (stages, micro-batches)."""
        visits = np.full((self.num_stages, self.num_microbatches), not self.routes)
        for microbatch, route in enumerate(self.routes):
            visits[list(route), microbatch] = True
        return visits

    @cached_property
    def exact(self) -> bool:
        """Whether the program's results are bit-identical to those of every other exact program.

        Every stage must have its own weights, micro-batches must not be sliced, and each stage must run its forwards
        (F), its input gradients (B or I) and its weight gradients (B or W) in ascending micro-batch order. Every
        schedule then updates buffers and sums gradients in the same order. (The order of the I actions matters because
        they accumulate the weight gradients that are too cheap to defer.)
        """
        own_weights = self.num_weights == self.num_stages
        return own_weights and self.slices_per_microbatch == 1 and self.first_descent() is None

    def first_descent(self) -> tuple[int, int, Action] | None:
        """Return the (rank, position, action) of the first action that breaks ascending micro-batch order, or None."""
        rows = [row for family in _ORDERED for row in _descents(self.columns, family)]
        return (*self.orders.place(min(rows)), self.columns.action(min(rows))) if rows else None

    def with_orders(self, orders: Iterable[Iterable[Action]]) -> "Program":
        """Return a copy of the program with other orders."""
        changed: Any = orders
        return replace(self, orders=changed)

    def forward(self) -> "Program":
        """Return a program with only the forwards, in the same order, for evaluation."""
        return replace(self, orders=self.orders.where(self.columns.are(Kind.F)), forward_only=True, versions=())

    def __repr__(self) -> str:
        units = "micro-batch" if self.slices_per_microbatch == 1 else "slice"
        counts = (counted(self.num_ranks, "rank"), counted(self.num_stages, "stage"))
        title = f"Program {self.name!r}" if self.name else "Program"
        lines = [f"{title}: {', '.join(counts)}, {counted(self.num_microbatches, units)}"]
        ranks = range(min(self.num_ranks, _REPR_RANKS))
        grid = [list(self._first_words(rank)) for rank in ranks]
        widths = [max(map(len, column)) for column in zip_longest(*grid, fillvalue="")]
        for rank, row in zip(ranks, grid, strict=True):
            cells = " ".join(word.ljust(width) for word, width in zip(row, widths, strict=False))
            lines.append(f"rank {rank} | {cells}".rstrip())
        total = len(self.columns)
        in_grid = sum(1 + word.count("&") for row in grid for word in row)
        if in_grid < total:
            lines.append(
                f"not shown: {self.num_ranks - len(ranks):,} of {counted(self.num_ranks, 'rank')}, "
                f"{total - in_grid:,} of {total:,} actions; str(program) has all of them"
            )
        return "\n".join(lines)

    def _first_words(self, rank: int) -> Iterable[str]:
        """Return the first cells of a rank's row in the grid. Two overlapping actions share a cell."""
        start = self.orders.rank(rank)[: 2 * _REPR_COLUMNS]
        return islice(order_words(start), _REPR_COLUMNS)

    def __str__(self) -> str:
        lines = [f"name {self.name}"] if self.name else []
        lines.append(f"microbatches {self.num_microbatches}")
        lines.append("placement " + " ".join(map(str, self.placement)))
        if not self.is_chain:
            lines.append("edges " + " ".join(f"{a}-{b}" for a, b in self.graph.edges))
        if self.weights != tuple(range(self.num_stages)):
            lines.append("weights " + " ".join(map(str, self.weights)))
        if self.slices_per_microbatch != 1:
            lines.append(f"slices {self.slices_per_microbatch}")
        lines += table_lines(self.routes, self.versions)
        if self.forward_only:
            lines.append("forward-only")
        ranks = range(self.num_ranks)
        lines += [" ".join([f"rank {rank}:", *order_words(self.orders.rank(rank))]) for rank in ranks]
        return "\n".join(lines) + "\n"

    def to_torch(self, path: str | PathLike[str]) -> None:
        """Write the program to a file for ``torch.distributed.pipelining``, whose runtime runs other libraries' orders.

        ::

            plan.program.to_torch("order.csv")
            schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn)  # private in torch 2.15
            schedule._load_csv("order.csv")

        The file has a line for each rank, with its actions separated by commas. `load_program` reads it back.

        Args:
            path: the file; its name must end in .csv for `load_program`.

        Raises:
            ScheduleError: the program has something that torch's runtime cannot express: recomputation, offloading,
                updates, overlapping pairs, token slices, versions of weights, several chains, or edges that skip
                stages.

        """
        write_whole(as_path(path), torch_table(self))

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Read the text form: header lines, then a line ``rank 0: 0F0 0F1 ...`` for each rank.

        Empty lines are skipped, and ``#`` starts a comment.

        Raises:
            ScheduleError: a line cannot be read. The error states the line's number.

        """
        check_type(text, str, "Program.parse reads a str", "pass a program's text; to read a file, call load_program")
        return cls(**parse_program(text))


def check_program(program: Any) -> None:
    """Raise ArgumentError unless the argument is a Program."""
    check_type(program, Program, "program must be a Program", "for example, pass schedules.get('1f1b').program(4, 8)")


def _descents(columns: Columns, family: tuple[Kind, ...]) -> Ints:
    """Find the actions that break ascending micro-batch order on their stage. Compare only the kinds in ``family``.

    Returns:
        The rows of the actions that have a lower micro-batch than the previous compared action of their stage.

    """
    rows = np.flatnonzero(columns.are(*family))
    rows = rows[np.argsort(columns.stage[rows], kind="stable")]
    stage = columns.stage[rows]
    microbatch = columns.microbatch[rows]
    descents: Ints = rows[1:][(stage[1:] == stage[:-1]) & (microbatch[1:] < microbatch[:-1])]
    return descents


def marked_grid(program: Program, marks: Mapping[int, int]) -> str:
    """Return the orders as a text grid, cut to a few positions around the marks.

    On each rank in ``marks``, the action at position ``marks[rank]`` is shown as ``>action<``.
    """
    reach = range(
        max(0, min(marks.values(), default=0) - _GRID_REACH), max(marks.values(), default=0) + _GRID_REACH + 1
    )
    lines = []
    for rank, order in enumerate(program.orders):
        cells = [f">{order[i]}<" if marks.get(rank) == i else f" {order[i]} " for i in reach if i < len(order)]
        before = "... " if reach.start else ""
        after = " ..." if reach.stop < len(order) else ""
        width = 1 + max((len(str(a)) + 2 for o in program.orders for a in o[reach.start : reach.stop]), default=1)
        row = "".join(cell.ljust(width) for cell in cells).rstrip()
        lines.append(f"rank {rank} | {before}{row}{after}" + ("   <-- here" if rank in marks else ""))
    return "\n".join(lines)
