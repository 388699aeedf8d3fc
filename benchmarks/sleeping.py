"""Sleeping: compares measured with simulated makespans of stages that sleep, as if they waited for an accelerator.

    python benchmarks/sleeping.py [--ranks 8 16] [--kinds floor ...] [--schedules 1f1b ...] [--steps 15] [--torch]

Each rank is a process; messages use gloo. The forward, the input gradient and the weight gradient of a stage end 10 ms
after they began (a whole backward: 20 ms); in the meantime the processor is free. There are three kinds of cases:

- "layers": modules with a small product, run by Pipeline(mesh=...).
- "bare": stages that only sleep and return a tensor of the same size, to measure the executor alone: order,
  interpreter and messages.
- "floor": processes that run the same orders without pipesched's executor, to measure the machine alone. Each process
  only sleeps for each action and sends each message over a plain socket.

The simulation uses the nominal times and assumes that messages take no time.

The script prints the median of measured / simulated over the steps with a 95 % bootstrap interval; the median delay of
an action after the previous action of its rank and after the message that it waits for, in us; and the processor time
per action of the busiest rank, summed over its threads. With many ranks on few cores, this work makes steps longer,
because ranks wake up at the same moment.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from weakref import ref

import torch
from measure import Delays, delays, in_ranks, machine, ratio, slowest_s
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from versus_torch import same_gradients, torch_step

from pipesched import Costs, Pipeline, Trace, lower, schedules, simulate
from pipesched.program.actions import Action, Kind
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.process_collectives import ProcessCollectives
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.transport.sockets import SocketPort
from pipesched.simulation.trace import Span
from pipesched.tensors.payload import Payload, PerConsumer

SECONDS = 0.010  # F, I and W
ROWS, WIDTH = 16, 256  # of a micro-batch: the smallest product whose weight gradient is deferred to W


class Clock:
    """A clock that makes an action take a fixed time, including the time that other code takes during the action."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.began_s = 0.0
        self.in_backward = False

    def begin(self) -> None:
        """Start an action."""
        self.began_s = time.perf_counter()

    def wait(self, parts: int = 1) -> None:
        """Sleep until the next ``parts * seconds`` of the action are over."""
        self.began_s += parts * self.seconds
        time.sleep(max(0.0, self.began_s - time.perf_counter()))


class Edge(torch.autograd.Function):
    """An identity function that marks the start or the end of a layer. A backward pass reaches the end first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, entering: bool) -> Tensor:
        ctx.clock, ctx.entering = clock, entering
        if entering:
            clock.begin()
        else:
            clock.wait()
        return x.clone()  # not a view: torch's split backward does not accept a view as a stage's output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        clock = ctx.clock
        if ctx.entering:
            clock.wait()
        else:
            clock.begin()
        clock.in_backward = not ctx.entering
        return grad, None, None


class Sleeping(nn.Module):
    """A layer whose F, I and W each take ``seconds`` (default: 10 ms). A hook on the weight sleeps during W.

    The forward registers the hook on a new weight: a profile measures layers with copies of their weights.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__()
        self.seconds = seconds  # a profile measures layers of different lengths separately
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.clock = Clock(seconds)
        self._hook()

    def _hook(self) -> None:
        self.weight.register_hook(self._arrived)
        self.hooked = ref(self.weight)

    def _arrived(self, grad: Tensor) -> Tensor:
        if not self.clock.in_backward:  # a separate W, not part of a B
            self.clock.begin()
        self.clock.wait()
        return grad

    def forward(self, x: Tensor) -> Tensor:
        if self.hooked() is not self.weight:
            self._hook()
        # The first stage's input needs no gradient, but its I takes the same time.
        x = Edge.apply(x if x.requires_grad else x.detach().requires_grad_(), self.clock, True)
        return Edge.apply(functional.linear(x, self.weight), self.clock, False)


class Bare:
    """A stage that only sleeps. Its output is a constant tensor with the size of the layer's output."""

    def __init__(self, index: int) -> None:
        tensor = torch.zeros(ROWS, WIDTH, requires_grad=True)
        self.output, self.grads = Payload.of(tensor), PerConsumer([(tensor.detach(),)] * (index > 0))
        self.clock = Clock()

    def _sleep(self, parts: int) -> None:
        self.clock.begin()
        self.clock.wait(parts)

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Payload:
        self._sleep(1)
        return self.output

    def backward(self, microbatch: int, *grads: Any) -> Any:
        self._sleep(2)
        return self.grads

    def input_grad(self, microbatch: int, *grads: Any) -> Any:
        self._sleep(1)
        return self.grads

    def weight_grad(self, microbatch: int) -> None:
        self._sleep(1)

    def recompute(self, microbatch: int, *, split: bool) -> None:
        """Do nothing: there is no checkpointing."""

    def update(self, number: int) -> None:
        """Do nothing: there is no optimizer."""


class WholePipeline:
    """A complete Pipeline with sleeping layers: the case "layers"."""

    def __init__(self, name: str, num_ranks: int) -> None:
        m = 2 * num_ranks
        program = schedules.get(name).program(num_ranks, m)
        model = nn.Sequential(
            *(Sleeping() for _ in range(program.num_stages))
        )  # before x: the peer's weights are equal
        self.x, self.y = torch.randn(m * ROWS, WIDTH), torch.randn(m * ROWS, WIDTH)
        self.pipe = Pipeline(
            model,
            self.x[:ROWS],
            loss_fn=functional.mse_loss,
            mesh=init_device_mesh("cpu", (num_ranks,)),
            schedule=name,
            num_microbatches=m,
            boundaries=list(range(1, program.num_stages)),
        )

    def step(self) -> None:
        self.pipe.step(self.x, target=self.y)

    def trace(self) -> Trace:
        """The trace of the last step."""
        return self.pipe.gather_trace()

    def close(self) -> None:
        self.pipe.close()


def beside_torch(
    rank: int, names: list[str], num_ranks: int, pairs: int
) -> list[tuple[list[float], list[float], bool]]:
    """Run pipesched and torch in turn. Return (our seconds, torch's seconds, whether gradients agree) per schedule."""
    wake_in_time()
    found = []
    for name in names:
        torch.manual_seed(0)
        ours = WholePipeline(name, num_ranks)
        torch.manual_seed(0)
        theirs = nn.Sequential(*(Sleeping() for _ in ours.pipe.plan.stages))
        rival = torch_step(name, theirs, rank, num_ranks, ours.pipe.num_microbatches)
        both = ours.step, partial(rival, ours.x, ours.y)
        for step in both:
            step()
        agree = same_gradients(ours.pipe, theirs)
        runs = [[slowest_s(step) for step in both] for _ in range(pairs)]
        found.append((*map(list, zip(*runs, strict=True)), agree))
        ours.close()
    return found


def show_beside_torch(names: list[str], num_ranks: int, pairs: int) -> None:
    """Print a row for each schedule, with the wall times of a step on the slowest rank."""
    for name, *results in zip(names, *in_ranks(num_ranks, beside_torch, names, num_ranks, pairs), strict=True):
        (ours, theirs, _), simulated = results[0], predicted(name, num_ranks)
        times = "".join(f"{median(each) / simulated:14.3f}" for each in (ours, theirs))
        agree = all(agree for *_, agree in results)
        print(f"{name:20}{num_ranks:6}{ratio(ours, theirs)!s:>26}{times}  {agree}", flush=True)


def connected_rank() -> ConnectedRank:
    """Return the rank of this process, connected to all others."""
    group = distributed.group.WORLD
    return ConnectedRank(group, RankGrid.single(group))


class BareStages:
    """The process executor with bare stages: the case "bare"."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self.program = schedules.get(name).program(num_ranks, 2 * num_ranks)
        stages = {index: Bare(index) for index in range(self.program.num_stages)}
        self.run_spec = RunSpec(lower(self.program), stages)
        self.rank = connected_rank()
        self.executor = ProcessExecutor(self.rank)

    def step(self) -> None:
        self.timeline = self.executor.run(self.run_spec, grad=True)

    def trace(self) -> Trace:
        """The trace of the last step."""
        return Trace(ProcessCollectives(self.rank).gather_spans([self.timeline]), self.rank.num_ranks)

    def close(self) -> None:
        self.executor.close()


class Floor:
    """The case "floor": sleeps for each action, and sends messages over plain sockets.

    No executor runs; the collectives collect the ranks' spans after a step.
    """

    def __init__(self, name: str, num_ranks: int) -> None:
        self.program = lower(schedules.get(name).program(num_ranks, 2 * num_ranks))
        self.connected = connected_rank()
        self.rank = self.connected.rank
        store = distributed.PrefixStore(f"floor/{name}", distributed.group.WORLD.get_group_store())
        self.port = SocketPort(store, self.rank, "127.0.0.1", 60)
        self.message = memoryview(bytearray(ROWS * WIDTH * 4))
        self.calls = [self._call(action) for action in self.program.orders[self.rank]]
        self.times: list[tuple[float, float]] = []

    def _call(self, action: Action) -> Callable[[], Any]:
        if action.peer is None:
            return partial(time.sleep, SECONDS * (2 if action.kind is Kind.B else 1))
        peer, backward = self.program.placement[action.peer], action.kind in (Kind.SEND_B, Kind.RECV_B)
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            return partial(self.port.sender(peer, backward), (self.message,), len(self.message))
        return partial(self.port.reader(peer, backward), self.message)

    def step(self) -> None:
        self.times = [(time.perf_counter(), call(), time.perf_counter())[::2] for call in self.calls]

    def trace(self) -> Trace:
        """The trace of the last step. The processes of one machine share a clock."""
        order = self.program.orders[self.rank]
        own = [Span(action, self.rank, *times, action.lane) for action, times in zip(order, self.times, strict=True)]
        every = ProcessCollectives(self.connected).gathered(own)
        return Trace(tuple(span for spans in every for span in spans), self.connected.num_ranks)

    def close(self) -> None:
        self.connected.close()
        self.port.close()


KINDS = {"floor": Floor, "bare": BareStages, "layers": WholePipeline}


class Figures(NamedTuple):
    """The makespans of all steps, the delays between the actions of one step, and processor seconds for each action."""

    makespans_s: list[float]
    lost: Delays
    work_s: float


def measured(rank: int, kind: str, name: str, num_ranks: int, steps: int) -> Figures:
    """Measure one case. Runs on each rank."""
    run = KINDS[kind](name, num_ranks)
    run.step()
    makespans, work_s = [], 0.0
    for _ in range(steps):
        before = time.process_time()
        run.step()
        work_s += time.process_time() - before
        trace = run.trace()
        makespans.append(trace.makespan_s)
    run.close()
    program = schedules.get(name).program(num_ranks, 2 * num_ranks)
    return Figures(makespans, delays(program, trace), work_s / steps / len(program.orders[rank]))


def all_measured(rank: int, cases: list[tuple[str, str]], num_ranks: int, steps: int) -> list[Figures]:
    """Measure all (kind, schedule) cases. Runs on each rank."""
    wake_in_time()
    return [measured(rank, *case, num_ranks, steps) for case in cases]


def show(num_ranks: int, cases: list[tuple[str, str]], steps: int) -> None:
    """Measure with this number of ranks and print a row for each case."""
    for (kind, name), *results in zip(cases, *in_ranks(num_ranks, all_measured, cases, num_ranks, steps), strict=True):
        makespans, simulated = results[0].makespans_s, predicted(name, num_ranks)
        found = ratio(makespans, [simulated] * len(makespans))
        work_s = max(each.work_s for each in results)
        lost = "".join(f"{median(kind or [0.0]) * 1e6:10.0f}" for kind in results[0].lost)
        times = f"{found.first:12.3f}{simulated:11.3f}{lost}{work_s * 1e6:10.0f}"
        print(f"{kind:8}{name:20}{num_ranks:6}{found!s:>26}{times}", flush=True)


def wake_in_time() -> None:
    """Turn off timer slack: Linux ends sleeps up to 50 us late to save power."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, in ns


def lengths() -> dict[str, float]:
    """Return the action times as keyword arguments of Costs.uniform."""
    return dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), SECONDS)


def predicted(name: str, num_ranks: int) -> float:
    """Return the simulated makespan, in seconds."""
    program = schedules.get(name).program(num_ranks, 2 * num_ranks)
    return simulate(program, Costs.uniform(program.num_stages, **lengths())).makespan_s


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved-1f1b", "zb-v"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--torch", action="store_true", help="compare with torch.distributed.pipelining")
    args = parser.parse_args()
    print(machine())
    print(f"F, I and W take {SECONDS * 1e3:g} ms each; the number of micro-batches is twice the number of ranks")
    if args.torch:
        print(f"{'a step, wall time':26}{'ours / torch':>26}{'ours / sim.':>14}{'torch / sim.':>14}  equal")
        for num_ranks in args.ranks:
            show_beside_torch(args.schedules, num_ranks, args.steps)
        return
    lost = f"{'us: rank':>10}{'message':>10}{'work':>10}"
    print(f"{'':34}{'measured / simulated':>26}{'measured s':>12}{'simulated':>11}{lost}")
    for num_ranks in args.ranks:
        show(num_ranks, [(kind, name) for kind in args.kinds for name in args.schedules], args.steps)


if __name__ == "__main__":
    main()
