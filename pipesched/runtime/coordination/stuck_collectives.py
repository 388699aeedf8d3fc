"""Stuck collectives: ends collectives of torch.distributed that cannot complete because a rank has failed.

NCCL collectives end when their groups are aborted. gloo collectives cannot be aborted, so the process exits instead,
unless the environment variable PIPESCHED_END_STUCK_RANKS is 0.
"""

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from torch import distributed

from pipesched.runtime.coordination.rank_activity import COLLECTIVE, Activity
from pipesched.tensors.torch_insides import process_groups

__all__ = ["Stuck"]

_SETTING = "PIPESCHED_END_STUCK_RANKS"
_GRACE_S = 2.0  # time to wait after the rank has learned of the fault
_SEEN_S = 1.0  # time in the same collective before it counts as stuck
EXIT_CODE = 1


class Stuck:
    """Checks, after a fault, whether this rank is stuck in a collective; if so, ends the collective or the process."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._heard_s = time.monotonic()
        self._place: tuple[int, int] | None = None  # position in a collective at the last check
        self._seen_s = 0.0
        self._aborted = False

    def look(self, name: str, fault: str) -> None:
        """Check once whether this rank is stuck; if so, end the collective or the process. Called repeatedly.

        ``name`` is the name of this rank, and ``fault`` the description of the fault, for the printed message.
        """
        now = time.monotonic()
        place = self._activity.innermost() if self._activity.doing()[0] == COLLECTIVE else None
        if place != self._place:
            self._place = place
            self._seen_s = now
        if now < self._heard_s + _GRACE_S:
            return
        if not self._aborted and (self._activity.call or place is not None):
            self._aborted = True
            if _abort_nccl_groups():
                self._seen_s = now
        if place is not None and now - self._seen_s >= _SEEN_S and os.environ.get(_SETTING) != "0":
            _end_process(self._activity.stack(), name, fault)


def _abort_nccl_groups() -> bool:
    """Abort the job's NCCL groups on this rank. Returns whether there are any such groups."""
    if not distributed.is_initialized():
        return False
    groups = [one for one in process_groups() if "nccl" in distributed.get_backend(one)]
    for group in groups:
        with suppress(RuntimeError):
            group.abort()
    return bool(groups)


def _end_process(stack: str, name: str, fault: str) -> NoReturn:
    sys.stdout.flush()
    print(
        f"{stack}\npipesched: a failed rank stops all ranks; {fault}; {name} is stuck in a collective of "
        f"torch.distributed, which ends only if the process exits; the process exits with code {EXIT_CODE}; "
        f"fix the cause, or set {_SETTING}=0 to keep such processes running",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_CODE)
