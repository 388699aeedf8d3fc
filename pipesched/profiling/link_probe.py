"""Link probe: measures latency and bandwidth between ranks with programs that send messages back and forth.

The programs run like training programs, so the results include packing, sending and unpacking. For two ranks a and b,
a program has a chain of three stages, which are placed on a, b and a. A round trip lasts from the end of the first
stage to the start of the third stage, so rank a alone can measure the duration of the round trip. If the mesh has
replicas, the probe also measures the collectives that sum gradients and gather weights across replicas in a training
step.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pipesched.devices.streams import synchronize
from pipesched.program.actions import Action, Kind
from pipesched.program.dependencies import chain
from pipesched.program.lowering import lower
from pipesched.program.program import Program
from pipesched.runtime.coordination.rendezvous import collective
from pipesched.runtime.executors.interpreter import StageLike
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.rank_grid import Axes, RankGrid, SumRanks, grid_of
from pipesched.runtime.rank_host import RankHost, host_of_group, host_of_mesh
from pipesched.runtime.reductions.collective_lane import LaneJob
from pipesched.runtime.reductions.replica_sum import ReplicaSums
from pipesched.simulation.links import Collectives, Link, Links
from pipesched.simulation.trace import Span
from pipesched.tensors.payload import Payload

__all__ = ["find_links", "measure_links", "probe_links"]

_SHORT_TRIPS = 10  # round trips of empty messages
_LONG_TRIPS = 5  # round trips of messages of each size
_FIRST_BYTES = 1 << 16
_GROWTH = 8  # ratio of successive message sizes
_MOST_BYTES = 1 << 22
_COLLECTIVE_BYTES = 64, 1 << 19, _MOST_BYTES
_LONG_S = 0.02  # seconds; latency hardly affects the measured bandwidth if a transfer takes this long

#: Runs a program whose stages have outputs of these sizes in bytes, and returns the spans of all ranks.
Run = Callable[[Program, Sequence[int]], Iterable[Span]]
Pair = tuple[int, int]


@collective
def probe_links(mesh: DeviceMesh, *, timeout: float = 60.0, axes: Axes | None = None) -> Links:
    """Measure latency and bandwidth between all ranks of a mesh, for ``Costs(links=...)``. Collective.

    ::

        links = pipesched.probe_links(mesh)
        links.to_dict()  # for JSON

    The probe takes about one second per rank, more on slow links. Each rank exchanges messages with one other rank at a
    time, while the other ranks also exchange messages in pairs. If pairs share a network cable, each pair gets only a
    part of the cable's bandwidth.

    Args:
        mesh: a torch DeviceMesh: one dimension for the ranks of a pipeline and, if there are replicas, one for the
            replicas.
        timeout: the number of seconds that a rank waits for another rank. Default: 60.
        axes: the mesh dimensions of the pipeline and of the replicas, as for ``Pipeline``. Default: found by name.

    Returns:
        The Links, the same on every rank, with three values for each pair and direction. ``latency_s`` is half of the
        median round-trip time of an empty message. ``bytes_per_s`` is measured with messages that are long enough to
        take 20 ms, up to 4 MiB. ``spread`` is the range of the round-trip times of these messages, divided by their
        median; a large spread means that the measurement was disturbed. With replicas, the pairs include ranks of
        different replicas, and ``collectives`` has an entry for each group of ranks with the same stages. The entry has
        the latency and bandwidth of all-reduces, reduce-scatters and all-gathers in this group, measured with tensors
        of up to 4 MiB.

    Raises:
        DeviceCountError: the dimensions of the mesh are not recognised by name, or ``axes`` does not fit them.
        ExecutionError: a rank did not respond within the timeout.

    """
    host = host_of_mesh(mesh, 1, timeout, axes=axes)
    host.collectives.learn_types(Links, Link, Collectives)
    try:
        if host.sums is None and not host.grid.planes:
            return measure_links(host)
        group, *_ = grid_of(mesh, axes, timeout)
        in_a_row = RankGrid.single(group, device=host.grid.devices[0], timeout_s=timeout)
        with closing(host_of_group(group, in_a_row, SumRanks([], []))) as every:
            links = measure_links(every)
        collectives = () if host.sums is None else measure_collectives(host, host.sums)
        return host.collectives.agreed(lambda: replace(links, collectives=collectives))
    finally:
        host.close()


def measure_links(host: RankHost) -> Links:
    """Measure the links between the ranks of a host with a single replica. Collective."""
    grid = host.grid

    def run(program: Program, sizes: Sequence[int]) -> Iterable[Span]:
        stages = {
            index: _Gives(sizes[index], grid.devices[grid.position])  # type: ignore[abstract]  # nothing but F runs
            for index in program.chunks(grid.position)
        }
        run_spec = RunSpec(program, stages)
        looks = [tuple(sizes)] * program.num_microbatches
        host.executor.run(run_spec, grad=False, looks=looks)  # warm-up: later runs can predict the form of messages
        return host.collectives.gather_spans([host.executor.run(run_spec, grad=False, looks=looks)])

    return find_links(len(grid.devices), run)


def measure_collectives(host: RankHost, sums: ReplicaSums) -> tuple[Collectives, ...]:
    """Measure the collectives among replicas, for each group of ranks with the same stages. Collective."""
    device = host.grid.devices[0]
    count = len(host.grid.rows)

    def whole(size: int) -> Tensor:
        return torch.zeros(sums.length(max(1, size // 4)), dtype=torch.float32, device=device)

    def gather(size: int) -> LaneJob:
        return sums.spread([[[row] for row in whole(size).view(count, -1)]])

    starts: dict[str, Callable[[int], LaneJob]] = {
        "all_reduce": lambda size: sums.start([whole(size)]),
        "reduce_scatter": lambda size: sums.scatter([whole(size).view(count, -1)]),
        "all_gather": gather,
    }
    own = {kind: _timed(start, sums, device) for kind, start in starts.items()}
    every = host.collectives.gathered_in_all(own)
    rings = [list(ring) for rows in host.grid.every_plane for ring in zip(*rows, strict=True)]
    return tuple(
        Collectives(tuple(ring), **{kind: _slowest([every[rank][kind] for rank in ring]) for kind in starts})
        for ring in rings
    )


def _timed(start: Callable[[int], LaneJob], sums: ReplicaSums, device: torch.device) -> dict[int, list[float]]:
    """Return the times of a collective in seconds for tensors of several sizes, keyed by the size in bytes."""
    found: dict[int, list[float]] = {}
    for size in _COLLECTIVE_BYTES:
        trips = []
        for _ in range(1 + _LONG_TRIPS):
            sums.any(torch.zeros((), device=device))  # so that all ranks start together
            begin = time.perf_counter()
            start(size).wait(sums.check)
            synchronize(device)
            trips.append(time.perf_counter() - begin)
        found[size] = trips[1:]
    return found


def _slowest(members: Sequence[dict[int, list[float]]]) -> Link:
    """Return the latency and bandwidth of a collective in a group of ranks, from the times of the slowest ranks.

    The latency is the time for the smallest tensor. The bandwidth is computed from the additional time that the largest
    tensor takes.
    """
    smallest, *_, largest = sorted(members[0])
    latency_s = max(median(own[smallest]) for own in members)
    slowest = max((own[largest] for own in members), key=median)
    travel_s = median(slowest) - latency_s
    speed = (largest - smallest) / travel_s if travel_s > 0 else None
    return Link(latency_s, speed, (max(slowest) - min(slowest)) / median(slowest))


def find_links(num_ranks: int, run: Run) -> Links:
    """Measure the links between ``num_ranks`` ranks, with programs that the function ``run`` executes."""
    special: dict[Pair, Link] = {}
    for pairs in _rounds(num_ranks):
        for directed in (pairs, [(b, a) for a, b in pairs]):
            special |= _measured(directed, num_ranks, run)
    return Links(special=tuple(special.items()), contended=True)


def _rounds(num_ranks: int) -> Iterator[list[Pair]]:
    """Yield all pairs of ranks in rounds, each with at most one pair per rank (the circle method for tournaments)."""
    seats = list(range(num_ranks + num_ranks % 2))
    half = len(seats) // 2
    for _ in range(1, len(seats) if num_ranks > 1 else 0):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in facing if max(pair) < num_ranks]
        seats.insert(1, seats.pop())


def _measured(pairs: list[Pair], num_ranks: int, run: Run) -> dict[Pair, Link]:
    """Return the measured link from the first to the second rank of each pair, keyed by pair."""
    empty = _trips(dict.fromkeys(pairs, 0), num_ranks, _SHORT_TRIPS, run)
    links: dict[Pair, Link] = {}
    sizes = dict.fromkeys(pairs, _FIRST_BYTES)
    while sizes:
        longer: dict[Pair, int] = {}
        for pair, trips in _trips(sizes, num_ranks, _LONG_TRIPS, run).items():
            both_ways_s = median(empty[pair])
            trip_s = median(trips)
            travel_s = trip_s - both_ways_s
            size = sizes[pair]
            spread = (max(trips) - min(trips)) / trip_s if trip_s else 0
            links[pair] = Link(both_ways_s / 2, size / travel_s if travel_s > 0 else None, spread)
            if travel_s < _LONG_S and size < _MOST_BYTES:
                longer[pair] = size * _GROWTH
        sizes = longer
    return links


def _trips(sizes: dict[Pair, int], num_ranks: int, count: int, run: Run) -> dict[Pair, list[float]]:
    """Return the times of ``count`` round trips for each pair, in seconds.

    A round trip consists of a message of ``sizes[pair]`` bytes and an empty reply.
    """
    program = lower(_there_and_back(list(sizes), num_ranks, 1 + count))
    spans = run(program, [nbytes for size in sizes.values() for nbytes in (size, 0, 0)])
    times = {span.action: (span.start_s, span.end_s) for span in spans}
    return {
        pair: [
            times[Action(first + 2, Kind.F, trip)][0] - times[Action(first, Kind.F, trip)][1]
            for trip in range(1, 1 + count)  # in trip 0, the other rank may have started late
        ]
        for first, pair in zip(range(0, program.num_stages, 3), sizes, strict=True)
    }


def _there_and_back(pairs: list[Pair], num_ranks: int, trips: int) -> Program:
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    for first, (a, b) in zip(range(0, 3 * len(pairs), 3), pairs, strict=True):
        for trip in range(trips):
            orders[a] += [Action(first, Kind.F, trip), Action(first + 2, Kind.F, trip)]
            orders[b].append(Action(first + 1, Kind.F, trip))
    placement = tuple(rank for a, b in pairs for rank in (a, b, a))
    graph = chain(len(placement), len(pairs))
    return Program(orders, placement, trips, graph, forward_only=True, name="link probe")  # type: ignore[arg-type]


class _Gives(StageLike):
    """A stage that only runs forwards and returns an output of a fixed size."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._output = Payload.of(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Payload:
        return self._output
