"""Cases of foreign code: a small model, its batch and its loss, trained plain and as a pipeline, and compared."""

import random
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from pipesched import Distributed, Microbatch, Pipeline
from pipesched.errors import PipeschedError
from pipesched.testing import reference_step

__all__ = ["WIDTH", "Batch", "Block", "Case", "Net", "Outcome", "PipelineRun", "Run", "cut", "outcome_of", "plain_step"]

WIDTH = 8
STEPS = 2
STYLES = {"layers.*.linear": "column-gathered"}  #: the layers that ranks divide, if a case has tensor parallelism
RATE = 0.05

Code = Callable[["Net", int, Tensor, dict[str, Any]], Any]
Loss = Callable[[Any, Any], Tensor]


class Block(nn.Module):
    """A linear layer and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows of WIDTH numbers."""
        return self.linear(x).tanh()


class Net(nn.Module):
    """A chain of layers with code between them, as in a model that a user writes.

    Args:
        layers: the layers.
        between: functions that are called before the first layer (with index -1) and after every layer.
        regions: first layer -> last layer of each part that the model runs inside torch.utils.checkpoint.
        finish: a function that makes the model's output from the last layer's.

    """

    def __init__(
        self, layers: Sequence[nn.Module], between: Sequence[Code], regions: dict[int, int], finish: Code | None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.between = between
        self.regions = regions
        self.finish = finish

    def forward(self, x: Any, **extras: Any) -> Any:
        """Run the layers and the code between them."""
        x = self._code(-1, x, extras)
        index = 0
        while index < len(self.layers):
            last = self.regions.get(index)
            if last is None:
                x = self.layers[index](x)
            else:
                x = checkpoint(self._part, index, last, x, use_reentrant=False)
                index = last
            x = self._code(index, x, extras)
            index += 1
        return x if self.finish is None else self.finish(self, index, x, extras)

    def _part(self, first: int, last: int, x: Any) -> Any:
        for layer in self.layers[first : last + 1]:
            x = layer(x)
        return x

    def _code(self, index: int, x: Any, extras: dict[str, Any]) -> Any:
        for code in self.between:
            x = code(self, index, x, extras)
        return x


@dataclass(kw_only=True)
class Batch:
    """The inputs, by name, and the target of a step or of a micro-batch."""

    inputs: dict[str, Any]
    target: Any


def cut(value: Any, begin: int, end: int) -> Any:
    """Return some rows of a value, as a user would cut it by hand."""
    if isinstance(value, Tensor | list | np.ndarray):
        return value[begin:end]
    if isinstance(value, tuple):
        return type(value)(*(cut(one, begin, end) for one in value))
    if is_dataclass(value):
        return type(value)(**{one.name: cut(getattr(value, one.name), begin, end) for one in fields(value)})
    return value


class Run(ABC):
    """A training run of a case, in plain PyTorch or as a pipeline. ``case.call`` runs a step through its methods."""

    def __init__(self, case: "Case", rank: int = 0) -> None:
        self.case = case
        self.rank = rank
        self.net = case.model(rank)
        self.loss_fn = case.loss(self.net)
        self.step_number = 0
        #: Values that are compared bit by bit, in order.
        self.seen: list[Any] = []
        #: Whether a step updates the weights.
        self.updates = False

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """Run all forwards and backwards, and return the loss."""

    @abstractmethod
    def outputs(self, inputs: dict[str, Any]) -> Any:
        """Return the model's outputs for a batch, which can be differentiated."""

    @abstractmethod
    def separate_outputs(self, inputs: dict[str, Any]) -> list[Any]:
        """Return the model's outputs as one value for each micro-batch, or a list with the joined value."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters, as a user passes them to an optimizer."""
        return self.net.parameters()

    def train(self) -> None:
        """Train STEPS steps."""
        optimizer = None if self.updates else torch.optim.SGD(self.parameters(), RATE)
        for code in self.case.once_made:
            code(self)
        for number in range(STEPS):
            self.step_number = number
            for code in self.case.before_step:
                code(self)
            batch = self.case.batch(number, self.rank)
            with ExitStack() as stack:
                for context in self.case.around:
                    stack.enter_context(context())
                self.case.call(self, batch)
            if not self.case.redundancy:
                self.seen.append([None if p.grad is None else p.grad.clone() for p in self.net.parameters()])
            for code in self.case.after_step:
                code(self)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            if self.case.redundancy:
                self.seen.append([p.detach().clone() for p in self.net.parameters()])
        self.seen.append([buffer.clone() for buffer in self.net.buffers()])


class PlainRun(Run):
    """A run in plain PyTorch: a loop over the micro-batches."""

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches, cut by hand."""
        return [self.case.part(batch, begin, end) for begin, end in self.case.bounds]

    def step(self, batch: Batch) -> Tensor:
        """Run the micro-batches one after another, or ``reference_step`` if layers draw random numbers."""
        case = self.case
        if case.draws_random:
            settings: dict[str, Any] = {"num_microbatches": case.num_microbatches, "seed": case.seed}
            settings["step"] = self.step_number
            if (numerics := case.options.get("numerics")) is not None:
                named = ("split_dims", "loss_weight", "loss_reduction", "batch_norm")
                settings |= {name: getattr(numerics, name) for name in named}
            return reference_step(self.net, loss_fn=self.loss_fn, target=batch.target, **batch.inputs, **settings)
        parts = self.parts(batch)
        weights = [case.weigh(part) for part in parts]
        total: Tensor | None = None
        for part, weight in zip(parts, weights, strict=True):
            loss = self.loss_fn(self.net(**part.inputs), part.target)
            root = loss * (weight / sum(weights)) if case.averages else loss
            root.backward()
            total = root.detach() if total is None else total + root.detach()
        assert total is not None
        return total

    def outputs(self, inputs: dict[str, Any]) -> Any:
        """Return the joined outputs of the micro-batches."""
        return torch.cat(self.separate_outputs(inputs))

    def separate_outputs(self, inputs: dict[str, Any]) -> list[Any]:
        """Return the outputs of the micro-batches."""
        return [self.net(**part.inputs) for part in self.parts(Batch(inputs=inputs, target=None))]


class PipelineRun(Run):
    """A run of a pipeline, in one process or over a mesh."""

    def __init__(self, case: "Case", rank: int = 0, mesh: DeviceMesh | None = None) -> None:
        super().__init__(case, rank)
        where: dict[str, Any] = {"devices": ["cpu"] * case.num_ranks} if mesh is None else {"mesh": mesh}
        if case.alone:
            where = {"devices": ["cpu"] * case.num_ranks}
        self.early = list(self.net.parameters())
        first = case.part(case.batch(0, rank), *case.bounds[0])
        sample = first.inputs if case.sample is None else case.sample(first.inputs)
        options = {key: value() if callable(value) else value for key, value in case.options.items()}
        if case.redundancy and not case.alone:
            self.updates = True
            options["distributed"] = replace(options.get("distributed", Distributed()), redundancy="neighbour")
            options["optimizer"] = partial(torch.optim.SGD, lr=RATE)
        if case.tensor > 1 and not case.alone:
            options["distributed"] = replace(options.get("distributed", Distributed()), tensor_parallel=STYLES)
        self.pipe = Pipeline(
            self.net,
            sample,
            loss_fn=self.loss_fn,
            num_microbatches=case.num_microbatches,
            seed=case.seed,
            **where,
            **options,
        )

    def step(self, batch: Batch) -> Tensor:
        """Run a step of the pipeline."""
        if self.case.gives_microbatches:
            parts = [self.case.part(batch, begin, end) for begin, end in self.case.bounds]
            return self.pipe.step(microbatches=[Microbatch(target=part.target, **part.inputs) for part in parts])
        if self.case.inputs_of_first and self.rank:
            return self.pipe.step()
        return self.pipe.step(target=batch.target, **batch.inputs)

    def outputs(self, inputs: dict[str, Any]) -> Any:
        """Return the outputs of the pipeline's forward."""
        return self.pipe(**inputs)

    def separate_outputs(self, inputs: dict[str, Any]) -> list[Any]:
        """Return the outputs of the pipeline's forward, which are a list if they cannot be joined."""
        output = self.outputs(inputs)
        return output if isinstance(output, list) else [output]

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the pipeline's own parameters."""
        return self.early if self.case.early_optimizer else self.pipe.parameters()


def plain_step(run: Run, batch: Batch) -> None:
    """Call ``step`` and keep the loss."""
    run.seen.append(run.step(batch))


def _weigh_rows(part: Batch) -> float:
    return float(len(next(value for value in part.inputs.values() if isinstance(value, Tensor))))


@dataclass(kw_only=True)
class Case:
    """A model, its batches, its loss and the options of a pipeline. Each variant in `foreign_kinds` changes some."""

    seed: int
    draw: random.Random
    kinds: list[str] = field(default_factory=list)  #: the kinds in this case, as "kind: variant"
    world: int = 1  #: the number of processes
    num_ranks: int = 2
    num_microbatches: int = 4
    rows: int = 8
    layers: list[Callable[[], nn.Module]] = field(default_factory=list)
    between: list[Code] = field(default_factory=list)
    regions: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)  #: layers that must be in the stage of the layer before them
    finish: Code | None = None
    ties: Callable[[Net], None] | None = None  #: changes the model once its layers exist
    seed_of_rank: Callable[[int], int] = lambda rank: 0  #: added to the seed of the weights
    inputs: list[Callable[[torch.Generator, int, int], dict[str, Any]]] = field(default_factory=list)
    make_target: Callable[[torch.Generator, int], Any] | None = None
    loss: Callable[[Net], Loss] = lambda net: nn.functional.mse_loss
    weigh: Callable[[Batch], float] = _weigh_rows  #: the weight of a micro-batch's loss
    averages: bool = True  #: whether the losses of micro-batches are averaged; else they are added
    part: Callable[[Batch, int, int], Batch] = lambda batch, begin, end: Batch(
        inputs={name: cut(value, begin, end) for name, value in batch.inputs.items()},
        target=cut(batch.target, begin, end),
    )
    sample: Callable[[dict[str, Any]], Any] | None = None
    call: Callable[[Run, Batch], None] = plain_step
    once_made: list[Callable[[Run], None]] = field(default_factory=list)
    before_step: list[Callable[[Run], None]] = field(default_factory=list)
    after_step: list[Callable[[Run], None]] = field(default_factory=list)
    around: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  #: arguments of Pipeline
    close: list[str] = field(default_factory=list)  #: why results may differ in the last bits
    rounding: float = 1e-4  #: the largest relative difference that is called close
    draws_random: bool = False  #: whether layers draw random numbers
    gives_microbatches: bool = False
    inputs_of_first: bool = False  #: whether only rank 0 passes the batch
    early_optimizer: bool = False  #: whether the optimizer gets the model's parameters before there is a pipeline
    alone: bool = False  #: whether each process makes a pipeline of its own
    other_batches: bool = False  #: whether ranks pass different batches
    tensor: int = 1  #: the number of ranks over which layers are split
    redundancy: bool = False  #: whether the pipeline updates the weights, and keeps copies of its ranks' states

    def place(self, make: Callable[[], nn.Module]) -> int:
        """Put a layer in the place of a Block, and return its index."""
        if Block not in self.layers:
            self.layers.append(Block)
        index = self.draw.choice([index for index, own in enumerate(self.layers) if own is Block])
        self.layers[index] = make
        self.rows = max(self.rows, 8)  # BatchNorm needs two rows in a micro-batch
        return index

    def plain_layer(self) -> int:
        """Return the index of a Block."""
        return self.draw.choice([index for index, own in enumerate(self.layers) if own is Block])

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first row and the row after the last one of each micro-batch."""
        sizes = [len(part) for part in torch.arange(self.rows).tensor_split(self.num_microbatches)]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def model(self, rank: int) -> Net:
        """Build the model, with the same weights in every call for a rank."""
        torch.manual_seed(self.seed + self.seed_of_rank(rank))
        net = Net([make() for make in self.layers], list(self.between), dict(self.regions), self.finish)
        if self.ties is not None:
            self.ties(net)
        return net

    def batch(self, number: int, rank: int) -> Batch:
        """Return the batch of a step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number + (500 * rank if self.other_batches else 0))
        inputs: dict[str, Any] = {"x": torch.randn(self.rows, WIDTH, generator=generator)}
        for make in self.inputs:
            inputs |= make(generator, self.rows, number)
        make_target = self.make_target or (lambda generator, rows: torch.randn(rows, WIDTH, generator=generator))
        return Batch(inputs=inputs, target=make_target(generator, self.rows))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the runs of a case compare: "same bits", "close", "refused", or a failure: "silent", "late", "raw"."""

    word: str
    detail: str = ""


def outcome_of(case: Case, rank: int = 0, mesh: DeviceMesh | None = None) -> Outcome:
    """Train the case plain and as a pipeline, and compare. Collective over the processes of a mesh."""
    plain = PlainRun(case, rank)
    plain.train()
    run: PipelineRun | None = None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = PipelineRun(case, rank, mesh)
            run.train()
    except Exception as error:
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        explained = any("return what the loss needs" in note for note in getattr(error, "__notes__", ()))
        if not isinstance(error, PipeschedError) and not explained:
            return Outcome(word="raw", detail=detail)
        late = run is not None and run.step_number > 0
        return Outcome(word="late" if late else "refused", detail=detail)
    finally:
        if run is not None and (mesh is None or sys.exc_info()[0] is None):
            run.pipe.close()
    if case.alone:
        said = any("mesh=" in str(one.message) for one in caught)
        return Outcome(word="refused" if said else "silent", detail="each process trains by itself")
    own = None if mesh is None else {id(parameter) for parameter in run.pipe.parameters()}
    held = [own is None or id(parameter) in own for parameter in run.net.parameters()]
    part = None if case.tensor == 1 else rank % case.tensor
    return _compared(case, plain.seen, run.seen, held, part, whole=mesh is None)


def _compared(
    case: Case, plain: list[Any], piped: list[Any], held: list[bool], part: int | None, *, whole: bool
) -> Outcome:
    worst = 0.0
    for position, (want, got) in enumerate(zip(plain, piped, strict=True)):
        if position == len(plain) - 1 and not whole:
            break  # over a mesh, buffers of other ranks' layers are old
        pairs = [(want, got)] if not isinstance(want, list) else list(zip(want, got, strict=True))
        if isinstance(want, list) and position < len(plain) - 1:
            pairs = [(_block(one, other, part), other) for (one, other), own in zip(pairs, held, strict=True) if own]
        tensors = [one.double() for one, _ in pairs if isinstance(one, Tensor)]
        # some gradients are zero but for rounding, such as that of a bias before a BatchNorm
        least = 1e-2 * float(torch.stack([one.norm() for one in tensors]).norm()) if len(tensors) > 1 else 0.0
        worst = max([worst, *(_difference(one, other, least) for one, other in pairs)])
    if worst == 0:
        return Outcome(word="same bits")
    reasons = [*case.close, *(["sums over several ranks"] if case.tensor > 1 else [])]
    if worst <= case.rounding and reasons:
        return Outcome(word="close", detail=f"{worst:.1e}: {'; '.join(reasons)}")
    return Outcome(word="silent", detail=f"relative difference {worst:.2e}")


def _block(whole: Any, own: Any, part: int | None) -> Any:
    """Return the rows of a tensor that a rank holds, if ranks divide it."""
    if part is None or not isinstance(whole, Tensor) or not isinstance(own, Tensor) or whole.shape == own.shape:
        return whole
    return whole[part * len(own) : (part + 1) * len(own)]


def _difference(one: Any, other: Any, least: float = 0.0) -> float:
    """Return the relative difference of two values; 0 if their bits are equal, infinity if their forms differ.

    ``least`` is the smallest norm by which a difference is divided.
    """
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    first, second = one.double(), other.double()
    ratio = float((first - second).norm() / first.norm().clamp(min=max(least, 1e-12)))
    return ratio if ratio == ratio else float("inf")  # NaN
