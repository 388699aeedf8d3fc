"""Fleet costs: what a change of the ranks costs. All policies are replayed with the same costs."""

from dataclasses import dataclass, fields
from typing import Any

from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.simulation.links import Link

__all__ = ["FleetCosts"]


@dataclass(frozen=True, kw_only=True)
class FleetCosts:
    """The assumptions of a replay, in seconds and bytes per second.

    | Field | Default | Where it comes from |
    |---|---|---|
    | notice_s | 0.5 | a killed process closes its connections, which its neighbours notice at once |
    | replan_s | 3 | measured by `benchmarks/fleet.py`: 0.9 s on average, at most 2.7 s |
    | switch_s | 2 | assumed: new connections and stages |
    | start_s | 30 | assumed: a returning rank starts a process and imports PyTorch, while the others train |
    | restart_s | 120 | given: all processes start again, connect and read a checkpoint |
    | link_bytes_per_s | 10e9 | assumed: a network card of 100 Gb/s at 80 % |
    | link_latency_s | 10e-6 | as in `benchmarks/published.py` |
    | checkpoint_bytes_per_s | 1e9 | assumed, of each rank; fast, which helps checkpoint-restart |
    | checkpoint_every_s | 1800 | assumed, for elastic and rerouting, which seldom need one |

    Raises:
        InputError: for negative numbers, and speeds that are not positive.

    """

    #: From a loss until the other ranks know of it.
    notice_s: float = 0.5
    #: The search for a plan, for each number of ranks that has no plan yet.
    replan_s: float = 3.0
    #: From the plan to the first step, without moving layers.
    switch_s: float = 2.0
    #: From the return of a rank until it can join.
    start_s: float = 30.0
    #: A restart of all ranks from a checkpoint.
    restart_s: float = 120.0
    #: The bandwidth of a rank in each direction, for steps and for moving layers.
    link_bytes_per_s: float = 10e9
    link_latency_s: float = 10e-6
    #: The speed with which each rank writes its part of a checkpoint.
    checkpoint_bytes_per_s: float = 1e9
    #: Training between two checkpoints of elastic and rerouting. The other policies use Daly's estimate.
    checkpoint_every_s: float = 1800.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 <= value < 2**63 and (value > 0 or field.name not in _POSITIVE)):
                least = "above 0" if field.name in _POSITIVE else "not negative"
                raise InputError(f"{field.name} must be a number, {least}; got {shown(value)}; correct it")

    @property
    def link(self) -> Link:
        """The link between two ranks."""
        return Link(latency_s=self.link_latency_s, bytes_per_s=self.link_bytes_per_s)


_POSITIVE = ("link_bytes_per_s", "checkpoint_bytes_per_s", "checkpoint_every_s")
