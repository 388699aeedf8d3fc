"""Contention: how much longer layers take while another rank computes beside them. They share memory and its caches, by
how much depends on the layers: products of small matrices hinder each other little, what streams through memory does.
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import torch

from pipesched.profiling.timing_run import Subject, TimingRun
from pipesched.tensors.caller_context import Caller, intra_op

__all__ = ["crowd"]


def crowd(
    subjects: Sequence[Subject], device: torch.device, caller: Caller, threads: int, rounds: int, enough_s: float
) -> list[float]:
    """How many times as long a lap of these layers takes beside one of copies of them, by round; none where they cannot
    be copied. So many rounds, of which no further one begins once so many seconds are spent.
    """
    try:
        twins = [replace(subject, layer=copy.deepcopy(subject.layer)) for subject in subjects]
    except Exception:  # of whatever modules hold: locks, graphs, files
        return []
    laps = [
        TimingRun([replace(one, seconds={}, waited={}) for one in own], device, caller) for own in (subjects, twins)
    ]
    with ThreadPoolExecutor(2, "pipesched-crowding") as pool:

        def ran(*those: TimingRun) -> list[float]:
            def go(lap: TimingRun) -> float:
                with intra_op(threads), caller.held():
                    seconds: float = lap.held(lambda: _round(lap))
                    return seconds

            return list(pool.map(go, those))

        for lap in laps:  # for the caches
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
    """What its layers take of a whole forward and backward and of a split one; not what is done between layers to
    measure them, which hinders others more than they do.
    """
    lap.round()
    lap.weight_round(apart=True)
    layers_s = sum(sum(took_s) for subject in lap.subjects for took_s in subject.seconds.values())
    lap.clear()
    return layers_s
