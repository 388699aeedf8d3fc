"""Rank devices: processes that serve as ranks, each with its own simulated devices.

They are forked from a process that has started the simulation and imported torch. Rank 1 uses the device sim:1, so that
a use of the current device instead of the rank's own device is found where a test makes another device current.
"""

import functools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.simulated.accelerator import start
from tests.support.rank_processes import FORKED, Ranks

__all__ = ["Judged", "judged", "simulated_ranks"]

_IMPORTED = (
    "tests.simulated.started",
    "tests.simulated.device_process",
    "tests.support.slow_imports",
    "tests.support.rank_processes",
    "tests.simulated.process_features",
    "tests.simulated.replica_jobs",
)


class Judged(NamedTuple):
    """What a job returned in a rank or which error it raised, and what the simulation found meanwhile.

    `cut_off` lists the transfers that were in flight when a link was aborted.
    """

    result: Any
    num_transfers: int
    violations: list[str]
    cut_off: list[str]


@functools.cache
def simulated_ranks() -> Ranks:
    """Return four processes, which live as long as this process."""
    FORKED.set_forkserver_preload([*_IMPORTED])
    return Ranks(4, begin)


def begin(rank: int) -> str:
    """Start the simulation in the process of a rank, and return the backend of its groups."""
    accelerator = start()
    from tests.simulated.actions import label_actions  # imports pipesched, after the simulation has started
    from tests.simulated.collectives import BACKEND, register

    label_actions(accelerator)
    register()
    torch.accelerator.set_device_index(rank)
    return BACKEND


def judged(group: Any, job: Callable[..., Any], *args: Any) -> Judged:
    """Run a job in a rank, and return its result or its error with the violations."""
    from tests.simulated.collectives import CUT_OFF

    judge = start().judge
    judge.forget()
    CUT_OFF.clear()
    try:
        result = job(group, *args)
    except Exception as error:  # the violations may say why
        result = "".join(traceback.format_exception(error))
    judge.read()
    return Judged(result, judge.counts["transfers"], [str(one) for one in judge.violations], [*CUT_OFF])
