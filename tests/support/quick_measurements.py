"""Quick measurements: tests measure and search in fewer rounds than users, since few of them judge the figures."""

from dataclasses import replace

from pipesched.pipeline import plan_trials
from pipesched.profiling import layer_profiler, optimizer_costs, overhead_probe, profile_model
from pipesched.runtime.stage import offloading


def measure_quickly() -> None:
    """Shorten all measurements of this process."""
    object.__setattr__(layer_profiler.QUICK, "rounds", 1)  # the default of arguments: the same object everywhere
    profile_model._PASSES = 1
    profile_model._EFFORT = replace(profile_model._EFFORT, rounds=2, enough_s=0.2)
    profile_model._CROWDED = replace(profile_model._EFFORT, crowds=True)
    optimizer_costs._ROUNDS = 3
    optimizer_costs._STANDS_IN_BYTES = 1 << 22
    overhead_probe._TRIES = 2
    overhead_probe._AGAIN = 1
    overhead_probe._AGAIN_ASLEEP = 1
    offloading._MEASURED_BYTES = 1 << 23
    plan_trials._ROUNDS = 3
