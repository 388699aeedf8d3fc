"""Proof: proves a lower bound on the step time of a plan's stages, and can find a faster order.

The bound holds for every order of actions that keeps the results bit-identical.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipesched.planning.evaluated_candidate import WORTH
from pipesched.planning.plan import Plan
from pipesched.simulation.exact_solver import solve
from pipesched.simulation.relaxation.chain_costs import chain_costs

__all__ = ["proved"]

_SOLVED = "solved"


def proved(plan: Plan, memory_limit_bytes: Sequence[int] | None = None, *, effort: float = 60.0) -> Plan:
    """Return the plan with a bound that a solver has proved, and with the solver's order if that order is faster.

    The bound holds for all orders of the stages' actions that keep the results bit-identical, regardless of memory. The
    bound includes the smallest latency of a link and all overheads except crowding, but no other costs of links, and no
    recomputation. The solver's order is used if it fits into memory and if its simulated step, which
    includes all of these costs, is shorter by at least 0.5 %.

    Args:
        plan: a plan with costs, for a chain of stages.
        memory_limit_bytes: the memory limit of each rank. Default: no limit.
        effort: the limit on the solver's deterministic time; one unit takes about a second. Default: 60.

    """
    before = plan.predicted()
    if before is None or plan.costs is None or not plan.program.is_chain or plan.program.has_updates:
        return plan
    program = plan.program
    solution = solve(
        chain_costs(plan.costs, program.placement),
        program.num_microbatches,
        placement=program.placement,
        start=program,
        effort=effort,
    )
    plan = replace(plan, proved_bound_s=float(solution.bound_s))
    if solution.program is None or solution.program == program:
        return plan
    other = replace(plan, program=solution.program, schedule=_SOLVED, options={})
    after = other.predicted()
    if after is None or after.makespan_s > before.makespan_s * (1 - WORTH) or not _fits(other, memory_limit_bytes):
        return plan
    chosen, *others = plan.alternatives
    solved = replace(
        chosen,
        label=_SOLVED,
        schedule=_SOLVED,
        step_s=float(after.makespan_s),
        bubble_ratio=float(after.bubble_ratio),
        peak_bytes=max(memory.total_bytes for memory in other.memory()),
        measured_s=None,
        first_s=None,
    )
    return replace(other, alternatives=(solved, *others))


def _fits(plan: Plan, memory_limit_bytes: Sequence[int] | None) -> bool:
    if memory_limit_bytes is None:
        return True
    return all(memory.total_bytes <= limit for memory, limit in zip(plan.memory(), memory_limit_bytes, strict=False))
