"""Program: every rank's order of actions, where the stages lie, and how they feed each other.

A program is a value: immutable, comparable, and equal to what its own text form parses to. The same object is
validated, simulated, drawn and executed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipesched.checks import check_type, is_whole, shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Columns, Ints, Mask, Orders
from pipesched.program.actions import Action, Kind
from pipesched.program.dependencies import Index, Requirements, StageGraph, chain, needs, requirements
from pipesched.program.placement import Placement, chunks_of
from pipesched.program.text_format import order_words, parse_program, table_lines

__all__ = ["Program", "check_program", "marked_grid"]

_ORDERED = ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W))
_CHAIN = StageGraph((), ())  # stands for the chain of as many stages as there are
_GRID_REACH = 5  # actions shown on either side of a mark


@dataclass(frozen=True)
class Program:
    """The orders of all ranks.

    orders: a tuple of actions for each rank, kept as columns of integers. placement: stage -> rank. graph: which stage
    feeds which, a chain unless given. forward_only: the program has no backward, as for evaluation.
    weights: stage -> weight copy, its own unless given: stages of one copy hold the same layers. routes: the stages
    that each micro-batch visits, all unless given: whole chains of the graph. versions: for each stage how many updates
    lie behind the weights that each micro-batch uses, forward and backward; () for the newest when its F runs.
    slices_per_microbatch: into so many token slices each micro-batch is cut; what an action and num_microbatches count
    are then slices, those of a micro-batch in a row.
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
                f"a program has a whole number of micro-batches; got {shown(self.num_microbatches)}; pass 1 or more"
            )
        check_type(self.graph, StageGraph, "a program's graph is a StageGraph", "leave it out for a chain")
        if self.graph is _CHAIN:
            object.__setattr__(self, "graph", chain(len(self.placement)))
        if not self.weights:
            object.__setattr__(self, "weights", tuple(range(len(self.placement))))
        if not any(self.versions):  # no stage says any
            object.__setattr__(self, "versions", ())
        for what, has, due in (
            ("a stage graph", len(self.graph.producers), len(self.placement)),
            ("weights", len(self.weights), len(self.placement)),
            ("versions", len(self.versions or self.placement), len(self.placement)),
            ("routes", len(self.routes) or self.num_microbatches, self.num_microbatches),
        ):
            if has != due:
                of = "micro-batches" if what == "routes" else "stages"
                raise ScheduleError(f"{what} has one entry for each of the {due} {of}; got {has}; make them agree")

    def _keep_as_tuples(self) -> None:
        try:
            object.__setattr__(self, "orders", Orders.of(self.orders))
            for name in ("placement", "weights"):
                object.__setattr__(self, name, tuple(getattr(self, name)))
            for name in ("routes", "versions"):
                object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))
        except (TypeError, ValueError, AttributeError) as error:
            raise ScheduleError(
                f"a program has orders, a list of Actions for each rank, and lists of whole numbers beside them; got "
                f"something else ({error}); make it by a Schedule, or by Program.parse"
            ) from error

    @property
    def columns(self) -> Columns:
        """All actions, rank after rank."""
        return self.orders.columns

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    @property
    def num_weights(self) -> int:
        """How many weight copies there are: into so many parts the model is cut."""
        return len(set(self.weights))

    @property
    def is_chain(self) -> bool:
        """Whether the graph is the default: stage after stage."""
        return self.graph == chain(self.num_stages)

    @property
    def is_chains(self) -> bool:
        """Whether it is a chain, or several, each over all weight copies in order; a micro-batch visits one."""
        num_chains, rest = divmod(self.num_stages, max(1, self.num_weights))
        own = tuple(range(self.num_weights)) * num_chains
        if rest or self.weights != own or self.graph != chain(self.num_stages, num_chains):
            return False
        return num_chains == 1 or {len(route) for route in self.routes} == {self.num_weights}

    @cached_property
    def output_rank(self) -> int:
        """The rank where the first micro-batch leaves the program."""
        return self.placement[self.routes[0][-1] if self.routes else -1]

    @cached_property
    def has_updates(self) -> bool:
        """Whether it updates the weights itself, as asynchronous schedules do."""
        return bool(self.columns.are(Kind.UPDATE).any())

    @cached_property
    def index(self) -> Index:
        """Where each action stands."""
        return Index(self.columns, self.graph, self.num_microbatches)

    @cached_property
    def requirements(self) -> Requirements:
        """What every action needs, at once."""
        return requirements(self.columns, self.index, self.graph)

    @cached_property
    def crossing(self) -> Ints:
        """The places, among the requirements, of those between actions of different ranks."""
        row, needed = self.requirements
        rank_of = self.orders.rank_of
        return np.flatnonzero((needed >= 0) & (rank_of[row] != rank_of[needed]))

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return chunks_of(self.placement, rank)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """For each stage, how many forwards of its rank one micro-batch is, on all its stages and in all its slices: so
        many share the rank's work.
        """
        routes = set(self.routes) or {tuple(range(self.num_stages))}
        held = [Counter(self.placement[stage] for stage in route) for route in routes]
        own = {stage: ranks for route, ranks in zip(routes, held, strict=True) for stage in route}
        chunks = (own[stage][rank] if stage in own else 1 for stage, rank in enumerate(self.placement))
        return tuple(count * self.slices_per_microbatch for count in chunks)

    def needs(self, action: Action) -> Iterable[Action]:
        """What must have ended before ``action`` starts."""
        return needs(action, self.graph, self.index)

    def place(self, action: Action) -> tuple[int, int]:
        """The rank and the position at which an action runs. Raises KeyError where it does not."""
        row = self.index.row(action)
        if row < 0:
            raise KeyError(str(action))
        return self.orders.place(row)

    @property
    def visits(self) -> Mask:
        """Which stage runs which micro-batch: by stage and micro-batch."""
        visits = np.full((self.num_stages, self.num_microbatches), not self.routes)
        for microbatch, route in enumerate(self.routes):
            visits[list(route), microbatch] = True
        return visits

    @cached_property
    def exact(self) -> bool:
        """Whether every stage has weights of its own and runs its F, its B or I, and its B or W in ascending order of
        whole micro-batches.

        Buffers and sums of gradients then have one order, whatever the schedule, and results are equal to the bit.
        (I counts too: it delivers the gradients that are too cheap to be deferred.)
        """
        own_weights = self.num_weights == self.num_stages
        return own_weights and self.slices_per_microbatch == 1 and self.first_descent() is None

    def first_descent(self) -> tuple[int, int, Action] | None:
        """The first (rank, position, action) that breaks the ascending order of an exact program, or None."""
        rows = [row for family in _ORDERED for row in _descents(self.columns, family)]
        return (*self.orders.place(min(rows)), self.columns.action(min(rows))) if rows else None

    def with_orders(self, orders: Iterable[Iterable[Action]]) -> "Program":
        """The same program with other orders."""
        changed: Any = orders
        return replace(self, orders=changed)

    def forward(self) -> "Program":
        """The forwards of this program alone, in the same order: for evaluation."""
        return replace(self, orders=self.orders.where(self.columns.are(Kind.F)), forward_only=True, versions=())

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

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Read the text form: header lines, then a line ``rank 0: 0F0 0F1 ...`` for each rank.

        Empty lines and what follows ``#`` do not count. Raises ScheduleError with the line's number.
        """
        check_type(text, str, "a program is read from its text", "pass str(program); load_program reads files")
        return cls(**parse_program(text))


def check_program(program: Any) -> None:
    """Raise ArgumentError for what is none."""
    check_type(program, Program, "program is a Program", "pass such as schedules.get('1f1b').program(4, 8)")


def _descents(columns: Columns, family: tuple[Kind, ...]) -> Ints:
    """The rows that run a micro-batch after a later one of the same stage, among the rows of some kinds."""
    rows = np.flatnonzero(columns.are(*family))
    rows = rows[np.argsort(columns.stage[rows], kind="stable")]
    stage = columns.stage[rows]
    microbatch = columns.microbatch[rows]
    descents: Ints = rows[1:][(stage[1:] == stage[:-1]) & (microbatch[1:] < microbatch[:-1])]
    return descents


def marked_grid(program: Program, marks: Mapping[int, int]) -> str:
    """The orders as a grid with ``>action<`` at position ``marks[rank]``, cut to the marks' neighbourhood."""
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
