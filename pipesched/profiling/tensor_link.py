"""Tensor link: the latency and bandwidth between the ranks of a tensor group, and the time of collectives in layers."""

import time
from collections.abc import Callable
from itertools import chain, permutations
from statistics import median

import torch

from pipesched.parallel.tensor_group import TensorGroup
from pipesched.parallel.traffic_counter import Traffic
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.rank_host import RankHost
from pipesched.simulation.links import Link, Links

__all__ = ["collective_s", "given_link", "measured_link"]

_SHORT, _LONG = 16, 1 << 20  # bytes
_TRIPS = 5


def measured_link(host: RankHost) -> Link | None:
    """Measure the slowest link between ranks of a tensor group. Collective; takes a few milliseconds.

    Returns None if there are no tensor groups of several ranks.
    """
    group = host.tensor
    if group is None or group.size == 1:
        return None
    device = host.grid.all_devices[0]
    with host.collectives.stopping_all("the construction of a pipeline, where links of tensor groups are measured"):
        own = tuple(_gather_s(group, torch.zeros(size, dtype=torch.uint8, device=device)) for size in (_SHORT, _LONG))
    short_s, long_s = map(max, zip(*host.collectives.gathered_in_all(own), strict=True))
    others = group.size - 1
    travel_s = long_s - short_s
    return Link(short_s / others, others * (_LONG - _SHORT) / travel_s if travel_s > 0 else None)


def _gather_s(group: TensorGroup, tensor: torch.Tensor) -> float:
    """Return the median time of an all-gather in seconds."""
    took = []
    for _ in range(1 + _TRIPS):
        begin = time.perf_counter()
        group.gathered(tensor)[-1][-1:].cpu()  # waits for a device
        took.append(time.perf_counter() - begin)
    return median(took[1:])


def given_link(links: Links, grid: RankGrid) -> Link:
    """Return the slowest of these links between ranks of a tensor group."""
    places = zip(*(chain(*rows) for rows in grid.every_plane), strict=True)
    found = [links.link(*pair) for ranks in places for pair in permutations(ranks, 2)] or [Link()]
    speeds = [link.bytes_per_s for link in found if link.bytes_per_s is not None]
    return Link(max(link.latency_s for link in found), min(speeds, default=None))


def collective_s(link: Link) -> Callable[[Traffic], float]:
    """Return a function that predicts the time of a collective in seconds, from the traffic of one rank.

    The latency of the link is paid in each round, and the bytes that the rank sends follow one another.
    """
    return lambda traffic: traffic.rounds * link.latency_s + traffic.sent_bytes * link.byte_s
