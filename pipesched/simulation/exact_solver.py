"""Exact solver: uses CP-SAT to find the fastest program for a chain of stages (needs the extra ``solver``).

This is a job-shop problem: each rank runs one action at a time, and holds at most a given number of (stage,
micro-batch) pairs. Each backward is one B, or an I and a W. Only exact programs (`Program.exact`) are considered: each
stage runs its forwards (F) in ascending micro-batch order, and likewise its input gradients (I or B) and its weight
gradients (W or B). The solver searches on one thread and stops after a deterministic amount of work, so equal inputs
give equal results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import floor
from typing import Any

from pipesched.errors import InputError, ScheduleError
from pipesched.program.action_arrays import Orders
from pipesched.program.actions import Action, Kind
from pipesched.program.liveness import rank_limits
from pipesched.program.placement import Placement
from pipesched.program.program import Program
from pipesched.program.validation import validate
from pipesched.progress import progress_here
from pipesched.simulation.best_known import best_known
from pipesched.simulation.bounds import lower_bound
from pipesched.simulation.costs import Costs
from pipesched.simulation.relaxation.time_units import TimeUnits
from pipesched.simulation.simulator import simulate, step_time

__all__ = ["ProgramSolution", "check_solver", "solve"]

_EFFORT = 60.0
_MOST_UNITS = 2**22  # the maximum number of units in a step; the solver is slower with larger numbers
_ROUNDING = 1e-4  # a program this close to the bound counts as optimal, because times are rounded


@dataclass(frozen=True, kw_only=True)
class ProgramSolution:
    """The best program that the solver found, and a proven lower bound on the makespan."""

    #: The best program; None if the solver found no program.
    program: Program | None
    #: The makespan of the program in seconds; None if there is no program.
    makespan_s: float | None
    #: A lower bound in seconds on the makespan of every exact program.
    bound_s: float
    #: The solver's status: "OPTIMAL", "FEASIBLE", "INFEASIBLE" or "UNKNOWN".
    status: str

    @property
    def gap(self) -> float | None:
        """The gap between makespan and bound, relative to the bound (0.03 for 3 %). None if there is no program."""
        if self.makespan_s is None:
            return None
        return max(0.0, float(self.makespan_s) / float(self.bound_s) - 1) if self.bound_s else 0.0

    @property
    def proved(self) -> bool:
        """Whether the program is proved to be the fastest exact program.

        The gap may be up to 1e-4, because the solver works with rounded times.
        """
        return self.gap is not None and self.gap <= _ROUNDING


def solve(
    costs: Costs,
    num_microbatches: int,
    *,
    placement: Placement | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    split: bool = True,
    start: Program | None = None,
    low: float | None = None,
    effort: float = _EFFORT,
) -> ProgramSolution:
    """Find the fastest exact program (`Program.exact`) for a chain of stages, and prove a lower bound on the makespan.

    The costs must have no links, no overheads and no gain from overlapping actions.

    Args:
        costs: the times of each stage, and the time of a transfer.
        num_microbatches: the number of micro-batches.
        placement: the rank of each stage. Default: one rank per stage.
        max_in_flight: the maximum number of (stage, micro-batch) pairs that a rank may hold: one number, or one per
            rank. Default: no limit.
        split: whether each backward can be one B, or an I and a W. If False, every backward is a B. Default: True.
        start: the program to start from. It must have this placement and satisfy the limits. Default: the fastest
            program of any schedule.
        low: a lower bound in seconds on the makespan, from which the solver starts. Pass 0 for a result that does not
            depend on ``lower_bound`` and can therefore verify it. Default: the result of ``lower_bound``.
        effort: the limit on the solver's deterministic time; one unit takes about a second. Default: 60.

    Raises:
        InputError: if ortools is not installed.
        ScheduleError: for costs that the solver cannot use, and for an invalid placement, limit or effort.

    """
    if costs.links is not None or costs.overheads is not None or costs.overlap != 1:
        raise ScheduleError(
            "the solver supports only the times of actions and transfer_s; these costs also have links, overheads or "
            "an overlap other than 1; leave them out, with dataclasses.replace(costs, links=None, overheads=None, "
            "overlap=1)"
        )
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not effort > 0:
        raise ScheduleError(f"effort must be a number above 0; got {effort!r}; for example, pass 60")
    placement = tuple(range(costs.num_stages)) if placement is None else tuple(placement)
    if low is None:
        low = lower_bound(costs, num_microbatches, placement=placement, max_in_flight=max_in_flight, split=split)
    if start is None:
        start = best_known(costs, num_microbatches, placement, max_in_flight)
    elif start.placement != placement or start.num_microbatches != num_microbatches:
        raise ScheduleError(
            f"start= must have placement {placement} and {num_microbatches} micro-batches; it has placement "
            f"{start.placement} and {start.num_microbatches} micro-batches; pass another program, or leave start= out"
        )
    if start is not None and not split and any(start.columns.are(Kind.I)):
        start = None
    limits = None if max_in_flight is None else rank_limits(max_in_flight, max(placement) + 1)
    if start is not None:
        validate(start, max_in_flight=limits, exact=True)
        if step_time(start, costs) <= low:
            return ProgramSolution(program=start, makespan_s=step_time(start, costs), bound_s=low, status="OPTIMAL")
    job_shop = _JobShop(costs, placement, num_microbatches, limits, split=split)
    return job_shop.solution(start, low, effort)


class _JobShop:
    """The model for CP-SAT. Its main variables are the start times of all actions, as multiples of a time unit."""

    def __init__(
        self, costs: Costs, placement: Placement, num_microbatches: int, limits: list[int] | None, *, split: bool
    ) -> None:
        self._cp: Any = _cp_model()
        self._model = self._cp.CpModel()
        self._costs = costs
        self._units = TimeUnits.of(costs, num_microbatches, most=_MOST_UNITS)
        self._placement = placement
        self._num_microbatches = num_microbatches
        self._limits = limits
        self._split = split
        units = self._units
        self._forward_s = units.each_down(costs.forward_s)
        self._input_s = units.each_down(costs.input_grad_s)
        self._weight_s = units.each_down(costs.weight_grad_s)
        self._whole_s = units.each_down(costs.backward_s)
        self._transfer_s = units.down(costs.transfer_s)
        longest = [max(i + w, b) for i, w, b in zip(self._input_s, self._weight_s, self._whole_s, strict=True)]
        ways = 2 * len(placement) * self._transfer_s
        self._horizon = num_microbatches * (sum(self._forward_s) + sum(longest) + ways)
        self._end = self._model.new_int_var(0, self._horizon, "makespan")
        pairs = list(product(range(len(placement)), range(num_microbatches)))
        #: For each (stage, micro-batch): the starts of F, of I or B, and of W or B; and whether the backward is a B.
        self._forward = {pair: self._time() for pair in pairs}
        self._gradient = {pair: self._time() for pair in pairs}
        self._release = {pair: self._time() for pair in pairs}
        self._is_whole = {pair: self._model.new_bool_var("") for pair in pairs}
        self._gradient_end: dict[tuple[int, int], Any] = {}
        self._release_end: dict[tuple[int, int], Any] = {}
        self._busy: dict[int, list[Any]] = {rank: [] for rank in placement}
        self._held: dict[int, list[Any]] = {rank: [] for rank in placement}
        for pair in pairs:
            self._add_actions(pair)
        for pair in pairs:
            self._add_dependencies(pair)
        for rank in sorted(self._busy):
            self._model.add_no_overlap(self._busy[rank])
            if limits is not None and limits[rank] < len(self._held[rank]):
                self._model.add_cumulative(self._held[rank], [1] * len(self._held[rank]), limits[rank])
        self._model.minimize(self._end)

    def _time(self) -> Any:
        return self._model.new_int_var(0, self._horizon, "")

    def _end_of(self, start: Any, part: int, whole: int, is_whole: Any) -> Any:
        """Return the end of an action that takes ``whole`` units if the backward is a B, otherwise ``part`` units."""
        if part == whole:
            return start + part
        end = self._time()
        self._model.add(end == start + part + (whole - part) * is_whole)
        return end

    def _add_actions(self, pair: tuple[int, int]) -> None:
        """Add the actions of a (stage, micro-batch) pair, and the time for which the pair is held."""
        model = self._model
        stage, _ = pair
        rank = self._placement[stage]
        is_whole = self._is_whole[pair]
        forward = self._forward[pair]
        gradient = self._gradient[pair]
        release = self._release[pair]
        inputs, weights, whole = self._input_s[stage], self._weight_s[stage], self._whole_s[stage]
        self._gradient_end[pair] = self._end_of(gradient, inputs, whole, is_whole)
        self._release_end[pair] = self._end_of(release, weights, whole, is_whole)
        model.add(release == gradient).only_enforce_if(is_whole)
        model.add(release >= self._gradient_end[pair]).only_enforce_if(~is_whole)
        if not self._split:
            model.add(is_whole == 1)
        self._busy[rank] += [
            model.new_fixed_size_interval_var(forward, self._forward_s[stage], ""),
            model.new_interval_var(gradient, inputs + (whole - inputs) * is_whole, self._gradient_end[pair], ""),
            model.new_optional_fixed_size_interval_var(release, weights, ~is_whole, ""),
        ]
        if self._limits is not None:
            life = self._time()
            self._held[rank].append(model.new_interval_var(forward, life, self._release_end[pair], ""))

    def _add_dependencies(self, pair: tuple[int, int]) -> None:
        """Make the actions of a pair wait for their inputs, and for the same actions of the previous micro-batch."""
        model = self._model
        stage, microbatch = pair
        done = self._forward[pair] + self._forward_s[stage]
        if stage + 1 < len(self._placement):
            following = (stage + 1, microbatch)
            way = self._transfer_s if self._placement[stage] != self._placement[stage + 1] else 0
            model.add(self._forward[following] >= done + way)
            model.add(self._gradient[pair] >= self._gradient_end[following] + way)
        else:
            model.add(self._gradient[pair] >= done)
        if microbatch:
            earlier = (stage, microbatch - 1)
            model.add(self._forward[pair] >= self._forward[earlier] + self._forward_s[stage])
            model.add(self._gradient[pair] >= self._gradient_end[earlier])
            model.add(self._release[pair] >= self._release_end[earlier])
        model.add(self._end >= self._gradient_end[pair])
        model.add(self._end >= self._release_end[pair])

    def solution(self, start: Program | None, low: float, effort: float) -> ProgramSolution:
        """Solve the problem, starting from a program if there is one."""
        self._model.add(self._end >= (self._units.up(low) if self._units.exact else self._units.down(low)))
        if start is not None:
            self._add_hints(start)
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.max_deterministic_time = effort
        with progress_here().bounded():  # by the effort
            status = solver.status_name(solver.solve(self._model))
        found = [] if start is None else [start]
        if status in ("OPTIMAL", "FEASIBLE"):
            found += self._programs(solver)
        program = min(found, key=lambda each: step_time(each, self._costs), default=None)
        bound = max(low, self._units.seconds(floor(solver.best_objective_bound))) if status != "INFEASIBLE" else low
        makespan_s = None if program is None else step_time(program, self._costs)
        if makespan_s is not None:
            bound = min(bound, makespan_s)
        return ProgramSolution(program=program, makespan_s=makespan_s, bound_s=bound, status=status)

    def _programs(self, solver: Any) -> list[Program]:
        """Return a list with the solver's program; [] if this program is invalid.

        The program can be invalid if actions of length 0 start at the same time.
        """
        orders: list[list[tuple[Any, ...]]] = [[] for _ in range(max(self._placement) + 1)]
        for (stage, microbatch), forward in self._forward.items():
            pair = (stage, microbatch)
            whole = solver.boolean_value(self._is_whole[pair])
            kinds = [(Kind.F, forward, self._forward_s[stage], stage)]
            if whole:
                kinds += [(Kind.B, self._gradient[pair], self._whole_s[stage], -stage)]
            else:
                kinds += [(Kind.I, self._gradient[pair], self._input_s[stage], -stage)]
                kinds += [(Kind.W, self._release[pair], self._weight_s[stage], -stage)]
            own = orders[self._placement[stage]]
            for number, (kind, at, length, turn) in enumerate(kinds):
                begin = solver.value(at)
                own.append((begin, begin + length, number, turn, microbatch, Action(stage, kind, microbatch)))
        actions = tuple(tuple(row[-1] for row in sorted(own, key=lambda row: row[:-1])) for own in orders)
        program = Program(Orders.of(actions), self._placement, self._num_microbatches, name="solved")
        try:
            validate(program, max_in_flight=self._limits, exact=True)
        except ScheduleError:
            return []
        return [program]

    def _add_hints(self, start: Program) -> None:
        """Pass the times of a program to the solver as hints."""
        times = {name: getattr(self, f"_{name}") for name in ("forward", "gradient", "release")}
        costs = Costs(self._forward_s, self._input_s, self._weight_s, self._whole_s, transfer_s=self._transfer_s)
        trace = simulate(start, costs)
        self._model.add_hint(self._end, int(trace.makespan_s))
        for span in trace.spans:
            stage, kind, microbatch = span.action.stage, span.action.kind, span.action.microbatch
            pair = (stage, microbatch)
            begin = int(span.start_s)
            if kind is Kind.F:
                self._model.add_hint(times["forward"][pair], begin)
            if kind in (Kind.I, Kind.B):
                self._model.add_hint(times["gradient"][pair], begin)
                self._model.add_hint(self._is_whole[pair], kind is Kind.B)
            if kind in (Kind.W, Kind.B):
                self._model.add_hint(times["release"][pair], begin)


def check_solver() -> None:
    """Raise InputError if ortools is not installed."""
    _cp_model()


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise InputError(
            "proving an optimum requires the package ortools, which is not installed; run "
            "pip install 'pipesched[solver]', or do not request a proof"
        ) from error
    return cp_model
