"""Overhead probe: measures the time that ranks need in addition to the work of their stages.

Test programs run on the executors and stages that training uses. Each layer measures the time of its own work; the rest
of an action's time is overhead. If a rank has twice as much work as its neighbour, the neighbour always waits. With
such programs, the probe separately measures the overheads of an action without messages, of sending, of receiving, and
of the transfer.

The cost of waking up a waiting rank is measured on a pipeline in which all ranks only wait, as they would for a GPU.
This cost is computed from the difference between the measured and the simulated time of the whole pipeline, because the
delays of all ranks add up.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched.checks import is_count, shown
from pipesched.errors import DeviceCountError, InputError
from pipesched.program.actions import Action, Kind
from pipesched.program.dependencies import chain
from pipesched.program.lowering import lower
from pipesched.program.program import Program
from pipesched.runtime.coordination.rendezvous import collective
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.microbatches import Batch
from pipesched.runtime.rank_host import RankHost, host_for
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.simulation.costs import Costs
from pipesched.simulation.links import Link
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Trace
from pipesched.tensors.caller_context import Caller

__all__ = ["Ran", "find_overheads", "probe_overheads", "waited_s"]

_MICROBATCHES = 6
_MICROBATCHES_ASLEEP = 16
_DISTURBED = 0.02  # a run is repeated if other processes took more than this fraction of its time
_TRIES = 5  # attempts at an undisturbed run
# The work takes about 3 ms, with as much computation per byte as typical layers.
_ROWS = 128
_WIDTH = 512
_PRODUCTS = 4
_AGAIN = 4  # number of repetitions with ranks that work in parallel, because the slowdown is only a few percent
_AGAIN_ASLEEP = 2  # number of repetitions with waiting ranks, because wake-up delays vary from run to run
_SLEEP_S = 0.01  # seconds that a waiting layer sleeps for each unit of work
_SHORT = 16  # rows of a short message
_LONG = 512
_ROW_BYTES = 1024
_KINDS = Kind.F, Kind.B


class _Worked(torch.autograd.Function):
    """An autograd function that does the same work in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.work = work
        return work(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.work(grad), None, None


class _SyntheticLayer(nn.Module):
    """A layer that computes or sleeps for a time proportional to ``parts``. ``seconds`` has the time of each action."""

    def __init__(self, parts: int, waits: bool, device: torch.device) -> None:
        super().__init__()
        self._sleep_s = parts * _SLEEP_S if waits else 0.0
        self.weight = nn.Parameter(torch.zeros(1, device=device))  # so that a backward runs
        self.seconds: list[float] = []
        generator = torch.Generator().manual_seed(0)
        self._given = torch.randn(_ROWS, _WIDTH, generator=generator).to(device)
        factors = [torch.randn(_WIDTH, _WIDTH, generator=generator).to(device) for _ in range(_PRODUCTS)]
        self._factors = [] if waits else factors * parts

    def forward(self, x: Tensor) -> Any:
        return _Worked.apply(x, self.weight, self._work)  # type: ignore[no-untyped-call]

    def _work(self, given: Tensor) -> Tensor:
        begin = time.perf_counter()
        if self._sleep_s:
            time.sleep(self._sleep_s)
        for factor in self._factors:
            functional.gelu(torch.mm(self._given, factor)).sum(-1)
        result = given.clone()
        self.seconds.append(time.perf_counter() - begin)
        return result


@dataclass(frozen=True)
class Ran:
    """The trace of a program's run, and for each action the time in seconds that the work of its layer took."""

    trace: Trace
    work_s: dict[Action, float]


class ProgramRunner(Protocol):
    """Runs programs whose stages measure the time of their own work."""

    def __call__(self, program: Program, parts: Sequence[int], rows: int, *, waits: bool = False) -> Ran:
        """Run a program.

        Args:
            program: the program.
            parts: for each stage, the work in each of its actions, as a multiple of a unit of work.
            rows: the size of each message, in rows of 1 KiB.
            waits: whether layers wait instead of computing. Default: False.

        """


def _chains(over: Sequence[tuple[int, ...]], num_ranks: int, num_microbatches: int = _MICROBATCHES) -> Program:
    """Return a program with parallel chains of stages. Each rank runs all F, then all B.

    ``over`` has the ranks of each chain, in stage order.
    """
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    placement = tuple(rank for ranks in over for rank in ranks)
    for stage, rank in enumerate(placement):
        orders[rank] += [
            Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(num_microbatches)
        ]
    graph = chain(len(placement), len(over))
    return Program(orders, placement, num_microbatches, graph=graph, name="overhead probe")  # type: ignore[arg-type]


@collective
def probe_overheads(
    *,
    devices: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
    rounds: int = 5,
) -> Overheads:
    """Measure the time that CPU ranks need in addition to the work of their stages. Collective if ``mesh`` is given.

    ::

        threads = pipesched.probe_overheads(devices=["cpu"] * 4)

    Store the result in a profile's machine, as ``Machine(threads=...)`` or, for a mesh, ``Machine(processes=...)``.
    Predictions then include the overheads. The measurement takes several seconds. If there are more ranks than cores,
    only as many ranks compute at once as there are cores.

    Args:
        devices: one CPU device per rank, if all ranks are in this process. Pass either devices or mesh.
        mesh: a one-dimensional torch DeviceMesh, for one process per rank.
        timeout: the number of seconds that a rank of a mesh waits for another rank.
        rounds: the number of measurements. Each overhead is the median of its measurements. Default: 5.

    Returns:
        The Overheads, the same on every rank.

    Raises:
        InputError: ``rounds`` is not a positive integer, or a device is not a CPU.
        DeviceCountError: there are no devices, or the mesh has several dimensions.
        ExecutionError: a rank did not respond within the timeout.

    """
    if not is_count(rounds):
        raise InputError(f"rounds must be at least 1; got rounds={shown(rounds)}; pass 1 or more")
    host = host_for(devices, mesh, 1, timeout, "all")
    try:
        if not host.grid.devices:
            raise DeviceCountError(
                "measuring overheads requires at least one rank; got no devices; pass a list such as ['cpu', 'cpu']"
            )
        others = sorted({str(device) for device in host.grid.devices if device.type != "cpu"})
        if others:
            raise InputError(
                f"overheads can be measured only for ranks on CPUs; devices contains {', '.join(others)}; use "
                f"probe_links for the links between devices"
            )
        host.executor.start()
        num_cores = host.collectives.agreed(lambda: os.cpu_count() or 1)
        return find_overheads(len(host.grid.devices), num_cores, _runner(host), rounds)
    finally:
        host.close()


def _runner(host: RankHost) -> ProgramRunner:
    def run(program: Program, parts: Sequence[int], rows: int, *, waits: bool = False) -> Ran:
        device = host.grid.devices[0]
        lowered = lower(program)
        own = {stage for stage, rank in enumerate(program.placement) if host.grid.holds(rank)}
        layers = {stage: _SyntheticLayer(parts[stage], waits, device) for stage in sorted(own)}
        stages = {stage: Stage({"work": layer}, device) for stage, layer in layers.items()}
        x = torch.zeros(rows, _ROW_BYTES // 4, device=device)
        count = program.num_microbatches
        step = StepData(0, 0, [((x,), {})] * count, output_grads=[(x,)] * count)

        def prepare(caller: Caller) -> None:
            for layer, stage in zip(layers.values(), stages.values(), strict=True):
                layer.seconds.clear()
                stage.begin(step)

        batch = Batch([((x,), {})] * count, [], [rows] * count)

        def once() -> tuple[Ran, bool]:
            before_s = waited_s()
            timeline = host.run(RunSpec(lowered, stages, prepare=prepare), batch, grad=True)
            lost_s = waited_s() - before_s
            seconds = {
                action: took_s
                for stage, layer in layers.items()
                for action, took_s in zip(_of_stage(program, stage), layer.seconds, strict=True)
            }
            spans = host.collectives.gather_spans([timeline])
            parts = host.collectives.gathered((seconds, lost_s))
            seconds = {action: took_s for own, _ in parts for action, took_s in own.items()}
            lost_s = sum(lost for _, lost in parts)
            trace = Trace(spans, program.num_ranks)
            return Ran(trace, seconds), waits or lost_s < _DISTURBED * trace.makespan_s

        once()  # warm-up: later runs can predict the form of messages and reuse message buffers
        for _ in range(_TRIES):
            ran, undisturbed = once()
            if undisturbed:
                break
        return ran

    return run


def waited_s() -> float:
    """Return how long this process's threads have waited for a core, in seconds, as counted by Linux.

    Returns 0 on other systems.
    """
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended in the meantime
            waited_ns += int(path.read_text().split()[1])
    return waited_ns * 1e-9


def _of_stage(program: Program, stage: int) -> list[Action]:
    return [action for action in program.orders[program.placement[stage]] if action.stage == stage]


def find_overheads(num_ranks: int, num_cores: int, run: ProgramRunner, rounds: int = 1) -> Overheads:
    """Measure the overheads of ``num_ranks`` ranks on ``num_cores`` cores, with programs that ``run`` executes."""
    most = max(2, min(num_ranks, num_cores)) if num_ranks > 1 else 1  # the number of ranks that compute at once
    seen = _MeasuredOverheads()
    everybody = _chains([tuple(range(num_ranks))], num_ranks, _MICROBATCHES_ASLEEP)
    asleep: list[tuple[Ran, Ran]] = []
    for _ in range(rounds):
        for count in [*range(1, most + 1)] * _AGAIN:
            seen.side_by_side(run(_chains([(rank,) for rank in range(count)], num_ranks), [1] * count, _SHORT), count)
        pairs = _pairs(most)
        for rows in (_SHORT, _LONG) if pairs else ():
            seen.first_waits(run(_chains(pairs, num_ranks), [1, 2] * len(pairs), rows), pairs, rows)
            seen.second_waits(run(_chains(pairs, num_ranks), [2, 1] * len(pairs), rows), pairs, rows)
        for _ in range(_AGAIN_ASLEEP):  # uses all ranks, because waiting needs no core
            alone = run(_chains([(0,)], num_ranks), [1], _SHORT, waits=True)
            asleep.append((alone, run(everybody, [1] * num_ranks, _SHORT, waits=True)))
    awake = seen.overheads()
    return replace(awake, waking_s=max(0.0, median(_waking_s(one, everybody, all_, awake) for one, all_ in asleep)))


def _waking_s(alone: Ran, program: Program, ran: Ran, awake: Overheads) -> float:
    """Return the extra time per action, in seconds, that a program takes if all ranks wait.

    The result is the extra time of the whole program, divided by the number of actions on the longest path.

    Args:
        alone: a run of a single waiting rank. This run shows the time of a layer that a profile would measure.
        program: the program of all ranks.
        ran: a run of this program in which all ranks wait instead of computing.
        awake: the other overheads, which are subtracted.

    """
    work_s = median(alone.work_s.values())
    costs = Costs.uniform(
        program.num_stages,
        forward_s=work_s,
        input_grad_s=work_s,
        weight_grad_s=0,
        output_bytes=_SHORT * _ROW_BYTES,
        waiting_s=2 * work_s,
        overheads=awake,
    )
    actions = len(_KINDS) * (program.num_stages + program.num_microbatches - 1)
    return float(ran.trace.makespan_s - simulate(program, costs).makespan_s) / actions


def _pairs(num_ranks: int) -> list[tuple[int, int]]:
    return [(rank, rank + 1) for rank in range(0, num_ranks - 1, 2)]


class _MeasuredOverheads:
    """Collects overheads in seconds, keyed by measurement, kind of action, and number of rows in the message.

    The probe measures four overheads: of an action without messages ("action"), of an action that sends a message
    ("send"), of an action that receives a message ("receive"), and of two actions on two ranks ("chained"), the second
    of which waits for the first.
    """

    def __init__(self) -> None:
        self._work: dict[int, list[float]] = {}  # the work of each run, by the number of ranks that work at once
        self._lost: dict[tuple[str, Kind, int], list[float]] = {}

    def side_by_side(self, ran: Ran, count: int) -> None:
        """Add a run of ``count`` ranks that do not depend on each other."""
        self._work.setdefault(count, []).append(median(ran.work_s.values()))
        for kind in _KINDS:
            self._note("action", kind, 0, _per_action(ran, range(count), kind))

    def first_waits(self, ran: Ran, pairs: Sequence[tuple[int, int]], rows: int) -> None:
        """Add a run in which the second rank of each pair has more work, so that only the first rank waits."""
        firsts, seconds = zip(*pairs, strict=True)
        self._note("send", Kind.F, rows, _per_action(ran, firsts, Kind.F))
        self._note("receive", Kind.F, rows, _per_action(ran, seconds, Kind.F))
        self._note("send", Kind.B, rows, _per_action(ran, seconds, Kind.B))
        self._note("chained", Kind.B, rows, _chained(ran, Kind.B))

    def second_waits(self, ran: Ran, pairs: Sequence[tuple[int, int]], rows: int) -> None:
        """Add a run in which the first rank of each pair has more work, so that only the second rank waits."""
        self._note("receive", Kind.B, rows, _per_action(ran, [first for first, _ in pairs], Kind.B))
        self._note("chained", Kind.F, rows, _chained(ran, Kind.F))

    def _note(self, case: str, kind: Kind, rows: int, seconds: list[float]) -> None:
        self._lost.setdefault((case, kind, rows), []).extend(seconds)

    def overheads(self) -> Overheads:
        """Return the overheads, computed from the medians over all runs."""
        action_s = self._seconds("action", 0)
        crowding = [1.0]
        for count in sorted(self._work)[1:]:
            ratios = [some_s / one_s for some_s, one_s in zip(self._work[count], self._work[1], strict=True)]
            crowding.append(max(crowding[-1], median(ratios)))
        if len(crowding) == 1:
            return Overheads(action_s)
        sends: list[float] = []
        receives: list[float] = []
        links: list[float] = []
        for rows in (_SHORT, _LONG):
            sends.append(self._seconds("send", rows) - action_s)
            receives.append(self._seconds("receive", rows) - action_s)
            links.append(self._seconds("chained", rows) - 2 * action_s - sends[-1] - receives[-1])
        return Overheads(
            action_s=action_s,
            send=_line(sends),
            receive=_line(receives),
            link=_line(links),
            crowding=tuple(crowding),
        )

    def _seconds(self, case: str, rows: int) -> float:
        return sum(median(self._lost[case, kind, rows]) for kind in _KINDS) / len(_KINDS)


def _line(seconds: Sequence[float]) -> Link:
    """Return the latency and bandwidth that result from the times of a short and a long message."""
    short_s, long_s = (max(0.0, took_s) for took_s in seconds)
    byte_s = (long_s - short_s) / ((_LONG - _SHORT) * _ROW_BYTES)
    return Link(max(0.0, short_s - byte_s * _SHORT * _ROW_BYTES), 1 / byte_s) if byte_s > 0 else Link(short_s)


def _per_action(ran: Ran, ranks: Sequence[int], kind: Kind) -> list[float]:
    """Return the time in seconds between the starts of consecutive actions of a kind, minus the first action's work."""
    found = []
    for rank in ranks:
        for one, other in pairwise(ran.trace.by_rank[rank]):
            if one.action.kind is other.action.kind is kind:
                found.append(other.start_s - one.start_s - ran.work_s[one.action])
    return found


def _chained(ran: Ran, kind: Kind) -> list[float]:
    """Return the seconds from an action's start to the end of the action that waits for it, minus the work of both."""
    spans = {span.action: span for rank in ran.trace.by_rank for span in rank}
    found = []
    for action, span in spans.items():
        if action.kind is kind:
            other = action._replace(stage=action.stage + (1 if kind is Kind.F else -1))
            if (other.stage // 2 == action.stage // 2) and other in spans and action.microbatch > 1:
                found.append(spans[other].end_s - span.start_s - ran.work_s[action] - ran.work_s[other])
    return found
