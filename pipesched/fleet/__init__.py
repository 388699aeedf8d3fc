"""Fleets, simulated: what losses and returns of ranks cost a run, for several policies on the same plans and costs.

::

    profile = pipesched.Profile.load("profile.json")
    capacity = pipesched.fleet.Capacity(profile, batch_size=512, num_ranks=64, memory_limit_bytes="72GB")
    print(pipesched.fleet.replay(pipesched.fleet.generate("spot", num_ranks=64), capacity))

`read_trace` reads the times of losses from a file, `generate` makes them. `Capacity` finds the fastest plan for each
number of ranks. `replay` replays the trace for each of `POLICIES`, with the costs of `FleetCosts`. Needs no torch.
"""

from pipesched.fleet.capacity import Capacity, FleetPlan
from pipesched.fleet.checkpoint_interval import daly_interval_s
from pipesched.fleet.events import FleetEvent, FleetTrace, read_trace
from pipesched.fleet.families import FAMILIES, generate
from pipesched.fleet.fleet_costs import FleetCosts
from pipesched.fleet.replay import POLICIES, FleetReport, PolicyResult, replay

__all__ = [
    "FAMILIES",
    "POLICIES",
    "Capacity",
    "FleetCosts",
    "FleetEvent",
    "FleetPlan",
    "FleetReport",
    "FleetTrace",
    "PolicyResult",
    "daly_interval_s",
    "generate",
    "read_trace",
    "replay",
]
