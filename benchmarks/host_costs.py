"""Host costs: what a step over two processes costs the host, per action and per message, by cause.

    python benchmarks/host_costs.py [OTHER] [--turns 25] [--cases tiny evicting]

Two gloo ranks with one thread each run one layer each under 1F1B. The layer of "evicting" multiplies matrices for about
1.5 ms in each action, and so evicts everything else from the processor's caches; the layer of "tiny" multiplies none.
A layer measures its own time. All other time of the step is host cost.

One pair of ranks runs the package as it is, and another pair, in turn with it, runs with wrappers around functions of
the package. A wrapper adds the time of its function, less that of the wrapped functions inside, to a cause. The cost of
the wrappers is measured beforehand and subtracted. A rank that waits for a message waits "for the other rank" until the
other one begins to write it; the rest of the wait is "transfer and wake-up". A turn is the fastest of five steps.
Figures are medians over the turns, in microseconds. The line "bare calls" is the host cost of a plain loop over the
same layers, measured in the same ranks: it corresponds to the rows "torch". "the causes / the step" compares the sum of
all causes, waits included, with the host cost of the step without wrappers.

With OTHER, a checkout of another version, both versions run in turn, and the last line is the median of the paired
ratios of their steps without wrappers. Leave the machine alone meanwhile.
"""

import argparse
import importlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import Served, machine, ratio, serve_turns
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipesched import Pipeline
from pipesched.runtime.transport.sockets import SocketPort

now = time.perf_counter

STEPS = 5  #: steps in a turn
MESSAGE_BEGINS = 64  #: bytes: a header, or the digests that open a run; the data of this script are shorter

WALL = "step"
WORK = "work of layers"
BARE = "bare calls"
BLOCKED = "blocked"
WAITING = "wait for the other rank"
WAKING = "transfer and wake-up"

#: Cause -> the functions whose own time counts for it, as module:name.
ACTION = {
    "loop over the actions": ("runtime.executors.processes:ProcessExecutor._interpret",),
    "bookkeeping of the stage": ("runtime.stage.stage:Stage.forward", "runtime.stage.stage:Stage.backward"),
    "layer runner": tuple(
        f"runtime.stage.layer_runner:LayerRunner.{name}" for name in ("run_keeping", "run", "backward", "_loss")
    ),
    "torch-function mode": (
        "tensors.function_mode:Intercept.__enter__",
        "tensors.function_mode:Intercept.__exit__",
    ),
    "random keys": ("tensors.keyed_random:KeyedRandom.enter",),
    "edges of the graph": tuple(f"runtime.stage.layer_runner:{name}" for name in ("enter", "edge_of", "_roots")),
    "payloads": ("tensors.payload:Payload.of",),
    "torch: layers": (),
    "torch: loss": ("capture.stage_body:Head.loss",),
    "torch: autograd": ("torch.autograd:backward",),
}
MESSAGE = {
    "layout and header": (
        "runtime.transport.channels:Outgoing.send",
        "runtime.transport.layout_predictor:LayoutPredictor.form",
        "runtime.transport.layout_book:LayoutBook.form",  # before 0.1.0
        "runtime.transport.message_layout:MessageLayout.plain_bytes",
    ),
    "write to the socket": (),
    "memory for the receive": ("runtime.transport.channels:Incoming.post",),
    "receive": ("runtime.transport.channels:Incoming.receive",),
    WAKING: (),
    "read of the data": (),
}
STEP = {
    "checks and call": (
        "pipeline.pipeline:Pipeline.step",
        "pipeline.step_runner:StepRunner.step",
        "pipeline.call_builder:CallBuilder.call",
        "runtime.microbatches:Splitter.batch",
        "runtime.microbatches:Splitter.weighting",
    ),
    "digest of the batch": (
        "pipeline.call_builder:digest_of_values",
        "pipeline.step_runner:digest_of_values",  # before 0.1.0
    ),
    "opening of the channels": (
        "runtime.transport.channels:Channels.open",
        "runtime.executors.channel_plan:OrderMessages.keys",
    ),
    "run of the executor": ("runtime.executors.processes:ProcessExecutor.run",),
    "begin and end of stages": ("runtime.stage.stage:Stage.begin", "runtime.stage.stage:Stage.end"),
    "loss to all ranks": ("runtime.step_metrics:StepMetrics.finish",),
}
GROUPS = {"an action": ACTION, "a message": MESSAGE, "a step": STEP}


class Case(NamedTuple):
    """The number of micro-batches, and of matrix products in each action."""

    num_microbatches: int
    num_products: int


CASES = {"tiny": Case(64, 0), "evicting": Case(16, 4)}


class Layer(nn.Module):
    """A layer whose forward and backward multiply matrices that have nothing to do with its input."""

    def __init__(self, num_products: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._given = torch.randn(128, 512)
        self._factors = [torch.randn(512, 512) for _ in range(num_products)]
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Any:
        return _Worked.apply(x, self.weight, self.work) * 1.0

    def work(self, x: Tensor) -> Tensor:
        """Multiply the matrices, and return a copy of ``x``."""
        begin_s = now()
        for factor in self._factors:
            functional.gelu(torch.mm(self._given, factor)).sum(-1)
        result = x.clone()
        self.seconds += now() - begin_s
        return result


class _Worked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.work = work
        return work(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.work(grad), None, None


# ---- wrappers ------------------------------------------------------------------------------------------------------


class Causes:
    """Adds up the own time of wrapped functions by cause, and notes when messages are written and read."""

    def __init__(self) -> None:
        self._inner = 0.0  # seconds in the wrapped functions that the running one has called, and their number
        self._calls = 0
        self._empty_s = self._call_s = 0.0
        self.clear()
        self._calibrate()

    def clear(self) -> None:
        """Begin a step."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.called: Counter[str] = Counter()  # the number of calls that functions of a cause make to wrapped ones
        self.writes: defaultdict[int, list[float]] = defaultdict(list)  # when each write of a tag began
        self.reads: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)  # and each wait for a message

    def timed(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one, and adds its own time to a cause."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            inner, calls = self._inner, self._calls
            self._inner = self._calls = 0
            begin_s = now()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = now() - begin_s
                self.seconds[cause] += took_s - self._inner
                self.calls[cause] += 1
                self.called[cause] += self._calls
                self._inner, self._calls = inner + took_s, calls + 1

        return wrapped

    def _calibrate(self, count: int = 2_000) -> None:
        """Measure what a wrapper costs: the time that it adds to its own cause, and the time that it adds outside."""

        def nothing() -> None:
            pass

        def loop(function: Callable[[], None]) -> float:
            begin_s = now()
            for _ in range(count):
                function()
            return (now() - begin_s) / count

        wrapped = self.timed("", nothing)
        bare_s = min(loop(nothing) for _ in range(20))
        found: list[tuple[float, float]] = []
        for _ in range(20):
            self.clear()
            found.append((loop(wrapped), self.seconds[""] / count))
        wrapped_s, inside_s = min(found)
        self._empty_s = max(0.0, inside_s - bare_s)
        self._call_s = wrapped_s - inside_s
        self.clear()

    def found(self) -> dict[str, float]:
        """Return the seconds of each cause, without the cost of the wrappers."""
        return {
            cause: seconds - self.calls[cause] * self._empty_s - self.called[cause] * self._call_s
            for cause, seconds in self.seconds.items()
        }

    def waits(self, other_writes: Mapping[int, list[float]]) -> dict[str, float]:
        """Split the time in which this rank waited for messages at the moments at which the other rank wrote them."""
        waiting = waking = 0.0
        for tag, reads in self.reads.items():
            for (begin_s, end_s), written_s in zip(reads, other_writes[tag], strict=True):
                arrived_s = min(max(begin_s, written_s), end_s)
                waiting += arrived_s - begin_s
                waking += end_s - arrived_s
        return {WAITING: waiting, WAKING: waking}


def wrap_all(causes: Causes) -> None:
    """Put a wrapper around each function of the package that stands for a cause. Names that are gone are skipped."""
    for group in GROUPS.values():
        for cause, names in group.items():
            for name in names:
                wrap(causes, cause, name)
    sender, reader = SocketPort.sender, SocketPort.reader

    def timed_sender(port: SocketPort, to: int, tag: int) -> Callable[..., Any]:
        send = causes.timed("write to the socket", sender(port, to, tag))

        def noted(parts: Any, nbytes: int) -> Any:
            causes.writes[tag].append(now())
            return send(parts, nbytes)

        return noted

    def timed_reader(port: SocketPort, from_: int, tag: int) -> Callable[..., Any]:
        read = reader(port, from_, tag)
        first, rest = causes.timed(BLOCKED, read), causes.timed("read of the data", read)

        def noted(into: memoryview) -> None:
            if len(into) < MESSAGE_BEGINS:
                rest(into)
                return
            begin_s = now()
            first(into)
            causes.reads[tag].append((begin_s, now()))

        return noted

    SocketPort.sender, SocketPort.reader = timed_sender, timed_reader
    Layer.__call__ = causes.timed("torch: layers", Layer.__call__)
    Layer.work = causes.timed(WORK, Layer.work)


def wrap(causes: Causes, cause: str, name: str) -> None:
    """Put a wrapper around one function of the package or of torch."""
    module, _, path = name.partition(":")
    try:
        holder: Any = importlib.import_module(module if module.startswith("torch") else f"pipesched.{module}")
    except ModuleNotFoundError:
        return
    *classes, function = path.split(".")
    for one in classes:
        holder = getattr(holder, one, None)
    if hasattr(holder, function):
        setattr(holder, function, causes.timed(cause, getattr(holder, function)))


# ---- the ranks -----------------------------------------------------------------------------------------------------


def bare_s(layer: Layer, rank: int, num_microbatches: int) -> float:
    """Run the calls of a rank in a plain loop, and return the host cost in seconds."""
    x, y, grad = torch.randn(1, 4, requires_grad=bool(rank)), torch.randn(1, 4), torch.randn(1, 4)
    layer.seconds = 0.0
    begin_s = now()
    for _ in range(num_microbatches):
        output = layer(x)
        if rank:
            output, grad = functional.mse_loss(output, y) * 0.5, None
        torch.autograd.backward(output, grad)
    return now() - begin_s - layer.seconds


@contextmanager
def one_case(rank: int, case: str, wraps: bool) -> Iterator[Callable[[], list[dict[str, float]]]]:
    """Yield a function that runs STEPS steps, and returns what each cause took in this rank, in seconds a step."""
    torch.manual_seed(0)
    causes = Causes() if wraps else None
    read_loss: Callable[[Tensor], float] = float
    if causes is not None:
        wrap_all(causes)
        read_loss = causes.timed("loss to all ranks", float)
    m, num_products = CASES[case]
    layers = [Layer(num_products), Layer(num_products)]
    x, y = torch.randn(m, 4), torch.randn(m, 4)
    with ExitStack() as stack:
        pipe = stack.enter_context(
            Pipeline(
                nn.Sequential(*layers),
                x[:1],
                loss_fn=functional.mse_loss,
                schedule="1f1b",
                num_microbatches=m,
                boundaries=[1],
                mesh=init_device_mesh("cpu", (2,)),
            )
        )

        def step() -> dict[str, float]:
            layers[rank].seconds = 0.0
            if causes is not None:
                causes.clear()
            distributed.barrier()
            begin_s = now()
            read_loss(pipe.step(x, target=y))
            found = {WALL: now() - begin_s, WORK: layers[rank].seconds}
            if causes is not None:
                writes: list[Any] = [None, None]
                distributed.all_gather_object(writes, dict(causes.writes))
                found |= causes.found() | causes.waits(writes[1 - rank])
            else:
                distributed.barrier()
                found[BARE] = bare_s(layers[rank], rank, m)
            return found

        def turn() -> list[dict[str, float]]:
            return [step() for _ in range(STEPS)]

        for _ in range(3):  # the first steps announce the layouts of messages
            float(pipe.step(x, target=y))
        yield turn


# ---- the report ----------------------------------------------------------------------------------------------------

#: What each rank spent on each cause in a turn, in seconds.
Ranks = list[dict[str, float]]


def fastest(turn: list[Ranks]) -> Ranks:
    """Return the fastest of the steps of a turn, in which the machine did the least of other work."""
    return min(map(list, zip(*turn, strict=True)), key=lambda ranks: sum(rank[WALL] for rank in ranks))


def medians(turns: list[Ranks]) -> Counter[str]:
    """Return the medians over the turns of what each cause took, in microseconds, added up over the ranks."""
    total: Counter[str] = Counter()
    for of_rank in zip(*turns, strict=True):
        for cause in dict.fromkeys(cause for one in of_rank for cause in one):
            total[cause] += median(one.get(cause, 0.0) for one in of_rank) * 1e6
    return total


def column(case: str, plain: list[Ranks], wrapped: list[Ranks]) -> dict[str, float]:
    """Return the rows of the table of one version."""
    m = CASES[case].num_microbatches
    causes, measured = medians(wrapped), medians(plain)
    shares = {"an action": 4 * m, "a message": 2 * m, "a step": 2}  # of two ranks: actions, messages, steps
    rows: dict[str, float] = {}
    for unit, group in GROUPS.items():
        rows[unit] = sum(causes[cause] for cause in group) / shares[unit]
        rows |= {f"    {cause}": causes[cause] / shares[unit] for cause in group}
    rows["bare calls of an action"] = measured[BARE] / shares["an action"]
    rows["wait for the other rank in a step"] = causes[WAITING] / 2
    rows["host cost of a step, measured"] = host_us = (measured[WALL] - measured[WORK]) / 2
    named = [cause for group in GROUPS.values() for cause in group]
    rows["the causes / the step"] = sum(causes[cause] for cause in (*named, WAITING)) / 2 / host_us
    return rows


def compare(case: str, checkouts: Mapping[str, Path], num_turns: int) -> None:
    """Run all versions of a case in turn, and print a column for each."""
    kinds = [(name, wraps) for name in checkouts for wraps in ("plain", "wrapped")]
    ranks = {kind: Served(checkouts[kind[0]], __file__, "--serve", case, kind[1]) for kind in kinds}
    turns: dict[tuple[str, str], list[Ranks]] = {kind: [] for kind in kinds}
    for number in range(num_turns + 1):
        for kind in kinds:
            turn = fastest(ranks[kind].turn())
            turns[kind] += [turn] if number else []  # the first turn is a warm-up
    for one in ranks.values():
        one.close()
    columns = {name: column(case, turns[name, "plain"], turns[name, "wrapped"]) for name in checkouts}
    print(f"{case + ', microseconds':42}" + "".join(f"{name:>10}" for name in columns))
    for row in columns["this"]:
        digits = 2 if "/" in row else 1
        print(f"{row:42}" + "".join(f"{rows[row]:>10.{digits}f}" for rows in columns.values()))
    if "other" in checkouts:
        walls = ([max(rank[WALL] for rank in one) for one in turns[name, "plain"]] for name in checkouts)
        print(f"step, this / other: {ratio(*walls)}")
    print(flush=True)


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="a checkout of another version")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        case, wraps = arguments.serve
        serve_turns(2, one_case, case, wraps == "wrapped")
        return
    checkouts = {"this": Path(__file__).parent.parent} | ({"other": arguments.other} if arguments.other else {})
    print(machine())
    for case in arguments.cases:
        compare(case, checkouts, arguments.turns)


if __name__ == "__main__":
    main()
