"""Torch table: writes a program as the table of actions that torch.distributed.pipelining reads."""

from collections import Counter
from typing import TYPE_CHECKING

from pipesched.errors import ScheduleError
from pipesched.program.actions import Action, Kind

if TYPE_CHECKING:
    from pipesched.program.program import Program

__all__ = ["torch_table"]

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


def torch_table(program: "Program") -> str:
    """Return the table: a line for each rank, with its actions separated by commas.

    Raises:
        ScheduleError: the program has something that torch's runtime cannot express.

    """
    orders = [list(order) for order in program.orders]
    for has, what, remedy in _obstacles(program, [action for order in orders for action in order]):
        if has:
            raise ScheduleError(
                f"torch.distributed.pipelining runs F, B, I and W on a chain of stages; program {program.name!r} has "
                f"{what}; {remedy}"
            )
    return "".join(",".join(map(str, order)) + "\n" for order in orders)


def _obstacles(program: "Program", actions: list[Action]) -> list[tuple[bool, str, str]]:
    counts = Counter(action.kind for action in actions)
    others = ", ".join(f"{counts[kind]} {kind}" for kind in Kind if counts[kind] and kind not in _KINDS)
    chains = bool(program.routes) or program.num_weights != program.num_stages
    synchronous = "choose a synchronous schedule, such as 1f1b, without recomputation"
    return [
        (bool(others), f"other actions ({others})", synchronous),
        (bool(program.versions), "versions of weights", synchronous),
        (bool(program.columns.joined.any()), "pairs of actions that overlap", "choose a schedule without such pairs"),
        (program.slices_per_microbatch > 1, "token slices", "choose a schedule that does not slice micro-batches"),
        (chains, "several chains", "choose a schedule with one chain, such as zb-v"),
        (not program.is_chain, "edges that skip stages", "keep the layers of a skip connection in neighbouring stages"),
    ]
