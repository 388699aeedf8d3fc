"""Contention: measures how much longer layers take while another rank on the same machine computes.

Ranks share memory and caches. Multiplications of small matrices hardly slow each other down, but layers that stream
data through memory do.
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import torch

from pipesched.profiling.timing_run import Subject, TimingRun
from pipesched.progress import progress_here, work_for
from pipesched.tensors.caller_context import Caller, intra_op

__all__ = ["crowd"]


def crowd(
    subjects: Sequence[Subject], device: torch.device, caller: Caller, threads: int, rounds: int, enough_s: float
) -> list[float]:
    """Measure by what factor layers slow down while copies of them run in another thread.

    Args:
        subjects: the layers.
        device: the device to run on.
        caller: the thread-local settings to use.
        threads: the number of intra-op threads for each of the two copies of the layers.
        rounds: the maximum number of rounds. A round measures the factor once.
        enough_s: the time in seconds after which no further round begins.

    Returns:
        The slowdown factor of each round; empty if the layers cannot be copied.

    """
    try:
        twins = [replace(subject, layer=copy.deepcopy(subject.layer)) for subject in subjects]
    except Exception:  # modules may hold objects that cannot be copied: locks, graphs, files
        return []
    laps = [
        TimingRun([replace(one, seconds={}, waited={}) for one in own], device, caller) for own in (subjects, twins)
    ]
    with ThreadPoolExecutor(2, "pipesched-crowding", work_for, (progress_here(),)) as pool:

        def ran(*those: TimingRun) -> list[float]:
            def go(lap: TimingRun) -> float:
                with intra_op(threads), caller.held():
                    seconds: float = lap.held(lambda: _round(lap))
                    return seconds

            return list(pool.map(go, those))

        for lap in laps:  # warm-up
            ran(lap)
        found: list[float] = []
        begin = perf_counter()
        while len(found) < rounds and (not found or perf_counter() - begin < enough_s):
            (one_s,) = ran(laps[0])
            (other_s,) = ran(laps[1])
            both_s = ran(*laps)
            found.append(sum(both_s) / (one_s + other_s))
    for lap in laps:
        lap.forget()
    return found


def _round(lap: TimingRun) -> float:
    """Return the time in seconds that the layers take for two F, one B, one I and one W.

    The work of the measurement between layers is not counted, because this work slows down other threads more than
    layers do.
    """
    lap.round()
    lap.weight_round(apart=True)
    layers_s = sum(sum(took_s) for subject in lap.subjects for took_s in subject.seconds.values())
    lap.clear()
    return layers_s
