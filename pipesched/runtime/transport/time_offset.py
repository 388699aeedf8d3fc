"""Time offset: measures how far the times of ranks are apart, so that times of several processes can be compared."""

import time
from typing import Any

import torch
from torch import Tensor

from pipesched.runtime.transport.ports import ConnectionLostError

__all__ = ["time_offset"]

_TAG = 20
_ROUNDS = 10


def time_offset(port: Any, rank: int, num_ranks: int) -> float:
    """Return the seconds to add to this rank's clock to get the time on rank 0's clock. Collective.

    The error is at most half the duration of the fastest round trip. Raises ConnectionLostError.
    """
    answer = torch.zeros(1, dtype=torch.float64, device="cpu")
    try:
        if rank:
            trips = [_trip(port, answer) for _ in range(_ROUNDS)]
            return min(trips)[1]
        for peer in range(1, num_ranks):
            for _ in range(_ROUNDS):
                port.recv([answer], peer, _TAG).wait()
                answer[0] = time.perf_counter()
                port.send([answer], peer, _TAG).wait()
    except RuntimeError as error:
        raise ConnectionLostError(str(error)) from None
    return 0.0


def _trip(port: Any, answer: Tensor) -> tuple[float, float]:
    """Make one round trip; return its duration in seconds and the clock offset that it measures."""
    start_s = time.perf_counter()
    port.send([answer], 0, _TAG).wait()
    port.recv([answer], 0, _TAG).wait()
    end_s = time.perf_counter()
    return end_s - start_s, float(answer[0]) - (start_s + end_s) / 2
