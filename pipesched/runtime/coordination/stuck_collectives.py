"""Stuck collectives: a rank in a collective of torch.distributed that will never end, since another rank of it has
failed.

NCCL's collectives end with their groups. gloo's do not end: the process does, unless PIPESCHED_END_STUCK_RANKS is 0.
"""

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from torch import distributed

from pipesched.runtime.coordination.rank_activity import COLLECTIVE, Activity

__all__ = ["Stuck"]

_SETTING = "PIPESCHED_END_STUCK_RANKS"
_GRACE_S = 2.0  # from the moment when a rank hears of a fault
_SEEN_S = 1.0  # for which it is seen in one collective
EXIT_CODE = 1


class Stuck:
    """Looks, from the moment when a rank hears of a fault, whether that rank is stuck in a collective."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._heard_s = time.monotonic()
        self._place: tuple[int, int] | None = None  # of the innermost call
        self._seen_s = 0.0
        self._aborted = False

    def look(self, name: str, fault: str) -> None:
        """Called again and again: end what will not end by itself. name: of this rank; fault: what has happened."""
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
    """End all collectives of the job's NCCL groups on this rank. Returns whether there are any."""
    if not distributed.is_initialized():
        return False
    groups = [one for one in distributed.distributed_c10d._world.pg_names if "nccl" in distributed.get_backend(one)]
    for group in groups:
        with suppress(RuntimeError):
            group.abort()
    return bool(groups)


def _end_process(stack: str, name: str, fault: str) -> NoReturn:
    sys.stdout.flush()
    print(
        f"{stack}\npipesched: a failed rank stops all ranks; {fault}; {name} is stuck in a collective of "
        f"torch.distributed, which nothing can end but the end of the process; it exits with code {EXIT_CODE}; mend "
        f"the cause, or set {_SETTING}=0 to leave such ranks where they are",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_CODE)
