"""Program: every rank's order of actions, where the stages lie, and how they feed each other.

A program is a value: immutable, comparable, and equal to what its own text form parses to. The same object is
validated, simulated, drawn and executed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipesched.actions import Action, Kind
from pipesched.dependencies import StageGraph, chain, needs
from pipesched.errors import ScheduleError
from pipesched.placement import Placement, chunks_of

__all__ = ["Program", "marked_grid"]

_ORDERED = ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W))
_CHAIN = StageGraph((), ())  # stands for the chain of as many stages as there are
_GRID_REACH = 5  # actions shown on either side of a mark


@dataclass(frozen=True)
class Program:
    """The orders of all ranks.

    orders: a tuple of actions for each rank. placement: stage -> rank. graph: which stage feeds which, a chain
    unless given. forward_only: the program has no backward, as for evaluation.
    """

    orders: tuple[tuple[Action, ...], ...]
    placement: Placement
    num_microbatches: int
    graph: StageGraph = _CHAIN
    forward_only: bool = False
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.graph is _CHAIN:
            object.__setattr__(self, "graph", chain(len(self.placement)))
        if len(self.graph.producers) != len(self.placement):
            raise ScheduleError(
                f"a stage graph has the program's stages; it has {len(self.graph.producers)}, the placement "
                f"{len(self.placement)}; make them agree"
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    @property
    def is_chain(self) -> bool:
        """Whether every stage feeds the next one and no other."""
        return self.graph == chain(self.num_stages)

    @cached_property
    def positions(self) -> dict[Action, tuple[int, int]]:
        """Where each action stands: action -> (rank, position). Of a repeated one, the first place."""
        places: dict[Action, tuple[int, int]] = {}
        for rank, order in enumerate(self.orders):
            for position, action in enumerate(order):
                places.setdefault(action, (rank, position))
        return places

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return chunks_of(self.placement, rank)

    def needs(self, action: Action) -> Iterable[Action]:
        """What must have ended before ``action`` starts."""
        return needs(action, self.graph, self.positions)

    @cached_property
    def exact(self) -> bool:
        """Whether every stage runs its F, its B or I, and its B or W in ascending micro-batch order.

        Buffers and sums of gradients then have one order, whatever the schedule, and results are equal to the bit.
        (I counts too: it delivers the gradients that are too cheap to be deferred.)
        """
        return self.first_descent() is None

    def first_descent(self) -> tuple[int, int, Action] | None:
        """The first (rank, position, action) that breaks the ascending order of an exact program, or None."""
        for rank, order in enumerate(self.orders):
            last: dict[tuple[int, tuple[Kind, ...]], int] = {}
            for position, action in enumerate(order):
                for family in _ORDERED:
                    if action.kind in family:
                        if action.microbatch < last.get((action.stage, family), -1):
                            return rank, position, action
                        last[action.stage, family] = action.microbatch
        return None

    def with_orders(self, orders: Iterable[Iterable[Action]]) -> "Program":
        """The same program with other orders."""
        return replace(self, orders=tuple(tuple(order) for order in orders))

    def forward(self) -> "Program":
        """The forwards of this program alone, in the same order: for evaluation."""
        kept = [[action for action in order if action.kind is Kind.F] for order in self.orders]
        return replace(self.with_orders(kept), forward_only=True)

    def __str__(self) -> str:
        lines = [f"name {self.name}"] if self.name else []
        lines.append(f"microbatches {self.num_microbatches}")
        lines.append("placement " + " ".join(map(str, self.placement)))
        if not self.is_chain:
            lines.append("edges " + " ".join(f"{a}-{b}" for a, b in self.graph.edges))
        if self.forward_only:
            lines.append("forward-only")
        lines += [" ".join([f"rank {rank}:", *map(str, order)]) for rank, order in enumerate(self.orders)]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Read the text form: header lines, then a line ``rank 0: 0F0 0F1 ...`` for each rank.

        Empty lines and what follows ``#`` do not count. Raises ScheduleError with the line's number.
        """
        header: dict[str, Any] = {}
        edges_line = 0
        orders: list[tuple[Action, ...]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split("#")[0].split()
            if not words:
                continue
            try:
                if words[0] == "rank":
                    orders.append(_parse_order(words, len(orders)))
                else:
                    header |= _once(header, _parse_header(words), words[0])
                    edges_line = number if words[0] == "edges" else edges_line
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}") from None
            except ValueError as error:
                raise ScheduleError(f"line {number}: expected whole numbers; got {line.strip()!r}; {error}") from None
        return cls(tuple(orders), **_complete(header, len(orders), edges_line))


def _parse_order(words: list[str], rank: int) -> tuple[Action, ...]:
    if len(words) < 2 or words[1] != f"{rank}:":
        raise ScheduleError(
            f"ranks are written in order, each as 'rank {rank}: ...'; got {' '.join(words[:2])!r}; write 'rank {rank}:'"
        )
    return tuple(Action.parse(word) for word in words[2:])


def _once(header: Mapping[str, Any], parsed: dict[str, Any], word: str) -> dict[str, Any]:
    if not parsed.keys().isdisjoint(header):
        raise ScheduleError(f"a header line stands once; {word!r} stands again; remove one")
    return parsed


def _parse_header(words: list[str]) -> dict[str, Any]:
    key, values = words[0], words[1:]
    match key:
        case "name":
            return {"name": " ".join(values)}
        case "microbatches" if len(values) == 1:
            return {"num_microbatches": int(values[0])}
        case "placement":
            return {"placement": tuple(map(int, values))}
        case "edges" if all(re.fullmatch(r"\d+-\d+", value) for value in values):
            return {"edges": [tuple(map(int, value.split("-"))) for value in values]}
        case "forward-only":
            return {"forward_only": True}
    raise ScheduleError(
        f"a line is 'name', 'microbatches N', 'placement RANK...', 'edges A-B...', 'forward-only' or 'rank R: ...'; "
        f"got {' '.join(words)!r}; correct or remove it"
    )


def _complete(header: dict[str, Any], num_ranks: int, edges_line: int) -> dict[str, Any]:
    """Fill in what the header left out: a linear placement, as many micro-batches as it says, a chain."""
    if "num_microbatches" not in header:
        raise ScheduleError("a program says how many micro-batches it has; no such line; add 'microbatches N'")
    if num_ranks == 0:
        raise ScheduleError("a program has at least one rank; found none; add 'rank 0: 0F0 0B0'")
    placement = header.setdefault("placement", tuple(range(num_ranks)))
    edges = header.pop("edges", None)
    if edges is not None:
        bad = [edge for edge in edges if not 0 <= edge[0] < edge[1] < len(placement)]
        if bad:
            raise ScheduleError(
                f"line {edges_line}: an edge A-B goes from an earlier to a later one of the stages "
                f"0..{len(placement) - 1}; got {bad[0][0]}-{bad[0][1]}; correct it"
            )
        header["graph"] = StageGraph.of(len(placement), edges)
    return header


def marked_grid(program: Program, marks: Mapping[int, int]) -> str:
    """The orders as a grid with ``>action<`` at position ``marks[rank]``, cut to the marks' neighbourhood."""
    reach = range(
        max(0, min(marks.values(), default=0) - _GRID_REACH), max(marks.values(), default=0) + _GRID_REACH + 1
    )
    lines = []
    for rank, order in enumerate(program.orders):
        cells = [f">{order[i]}<" if marks.get(rank) == i else f" {order[i]} " for i in reach if i < len(order)]
        before, after = "... " if reach.start else "", " ..." if reach.stop < len(order) else ""
        width = 1 + max((len(str(a)) + 2 for o in program.orders for a in o[reach.start : reach.stop]), default=1)
        row = "".join(cell.ljust(width) for cell in cells).rstrip()
        lines.append(f"rank {rank} | {before}{row}{after}" + ("   <-- here" if rank in marks else ""))
    return "\n".join(lines)
