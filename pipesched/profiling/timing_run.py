"""Timing run: measures all layers in one run, first their forwards in order, then their backward passes in reverse.

Because of this order, the caches are in the same state as in a step: a layer's input has just been written, and its
weights were last used in the previous round. One backward pass runs through all layers and records the time at which it
reaches each layer, so work between layers is not counted. Layers run on copies of their weights.
"""

import copy
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.devices.streams import current_stream, event_on, is_accelerator, synchronize
from pipesched.model.attributes import OF_ALL_MODULES
from pipesched.model.state_guard import unchanged
from pipesched.progress import advance, progress_here
from pipesched.runtime.stage.split_backward import Deferral
from pipesched.runtime.stage.weight_products import Product, weight_grad
from pipesched.tensors.added_losses import added_loss
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.function_mode import Handler, Intercept
from pipesched.tensors.graph_edges import check_layouts, edge_of, enter
from pipesched.tensors.keyed_random import InBackward, Key, KeyedRandom
from pipesched.tensors.meta_tensors import lacks_contents, stand_in
from pipesched.tensors.payload import Payload, trainable_leaves
from pipesched.tensors.tensor_attributes import with_copied_attributes_of
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Subject", "TimingRun"]

_TOGETHER = "weight_grads_together_s"


@dataclass(eq=False, kw_only=True)
class Subject:
    """A layer call to measure, with its measured times."""

    name: str
    layer: nn.Module
    #: The arguments (args, kwargs) of the call.
    given: Payload
    #: Kind of time, such as "forward_s" -> the seconds of each round.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    #: Kind of time -> for each round, the seconds in which the thread did not run on a processor.
    waited: dict[str, list[float]] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class TimingRound:
    """The state of a round between its forwards and its backward passes; each list has one entry for each layer."""

    #: Whether the backward passes leave weight gradients to W.
    deferred: bool
    #: The output of the last measured layer.
    output: Any = None
    turns: list["_Turn"] = field(default_factory=list)
    #: For each layer with a backward pass, the tensor at which the backward pass starts.
    roots: list[Tensor] = field(default_factory=list)
    #: The deferred weight gradients.
    products: list[list[Product]] = field(default_factory=list)


class TimingRun(nn.Module):
    """Measures several layers in one run, on copies of their weights.

    ``caller`` contains the autocast settings for forwards.
    """

    def __init__(self, subjects: Sequence[Subject], device: torch.device, caller: Caller) -> None:
        super().__init__()
        self.subjects = list(subjects)
        blanks = [
            Subject(name="", layer=nn.Identity(), given=Payload.of(((torch.empty(0, requires_grad=True),), {})))
            for _ in range(3)
        ]
        # The time of a layer without work shows the cost of recording times. The last such layer is not used for this,
        # because the backward starts there.
        self._blank = blanks[1]
        self._all = [blanks[0], *subjects, *blanks[1:]]
        self._device = device
        self._caller = caller
        self._attributes = {module: dict(vars(module)) for subject in subjects for module in subject.layer.modules()}
        callables = {id(subject.layer): _callable(subject.layer, device) for subject in self._all}
        self.modules_of = {subject: callables[id(subject.layer)] for subject in self._all}
        self.layers = nn.ModuleList(callables.values())
        self.tensors = _copies(self, device)
        self._random = KeyedRandom(device)
        self._deferral = Deferral()
        self._added = _AddedLosses()
        forward = self._random, self._added
        backward = InBackward(self._random), self._added
        self._forward_mode = {False: Intercept(*forward), True: Intercept(*forward, self._deferral)}
        self._backward_mode = {False: Intercept(*backward), True: Intercept(*backward, self._deferral)}

    def forward(self, act: Callable[[], Any]) -> Any:
        return act()

    def held(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` while the layers use the copies of their weights, and return its result."""
        return torch.func.functional_call(self, self.tensors, (act,))

    def forget(self) -> None:
        """Free the copies of the weights.

        A model on the meta device can be large, so a garbage collection frees its copies immediately.
        """
        for layer in self.layers:
            self.forget_graphs(layer)
        for tensor in self.tensors.values():
            tensor.grad = None
        self.tensors.clear()
        if any(map(lacks_contents, self.layers)):
            gc.collect()  # graphs and modules form reference cycles

    # ---- rounds, each of which adds its times to the subjects ------------------------------------------------------

    def round(self, *, split: bool = False, stopwatch: "Stopwatch | None" = None) -> TimingRound:
        """Run the F of all layers, then the B of all layers; if ``split`` is True, run the I instead of the B."""
        own = stopwatch or Stopwatch(self._device)
        self._deferral.begin()
        run = TimingRound(deferred=split and self._deferral.decide(0, lambda: None))
        self.forwards(run, own, split=split)
        self.backwards(run, own, "input_grad_s" if split else "backward_s")
        if stopwatch is None:
            own.settle()
        return run

    def weight_round(self, *, apart: bool) -> None:
        """Run forwards, input gradients and weight gradients.

        If ``apart`` is True, the weight gradients are computed by one call for each layer, otherwise by one call for
        all layers.
        """
        stopwatch = Stopwatch(self._device)
        run = self.round(split=True, stopwatch=stopwatch)
        if apart:
            for subject, products in zip(reversed(self._all), reversed(run.products), strict=True):
                begin = stopwatch.now()
                self.weight_grads(products)
                stopwatch.note(subject, "weight_grad_s", begin)
        else:
            together = [product for products in run.products for product in products]
            begin = stopwatch.now()
            self.weight_grads(together)
            stopwatch.note(self.subjects[0], _TOGETHER, begin)
        stopwatch.settle()

    def clear(self) -> None:
        """Discard the times recorded so far."""
        for subject in self._all:
            subject.seconds.clear()
            subject.waited.clear()

    def correct(self) -> None:
        """Correct the times for effects of the measurement.

        - Recording the start of a backward pass takes time. Therefore the time of a layer without work is subtracted.
        - Computing weight gradients layer by layer takes longer than one call for all layers. Therefore the time of
          that call is divided among the layers.
        - Short disturbances occur in every step, but the median time of a single layer excludes them. Therefore the
          layers' times are scaled so that their sum is the median time of a round.
        """
        for column in ("backward_s", "input_grad_s"):
            blank_s = median(self._blank.seconds[column])
            for subject in self.subjects:
                subject.seconds[column] = [max(0.0, took_s - blank_s) for took_s in subject.seconds[column]]
        for column in ("forward_s", "backward_s", "input_grad_s"):
            rounds = zip(*(subject.seconds[column] for subject in self.subjects), strict=True)
            self._share(column, median(map(sum, rounds)))
        self._share("weight_grad_s", median(self.subjects[0].seconds.pop(_TOGETHER)), most=1)

    def _share(self, column: str, together_s: float, most: float = math.inf) -> None:
        apart_s = sum(median(subject.seconds[column]) for subject in self.subjects)
        share = min(most, together_s / apart_s) if apart_s else 1.0
        for subject in self.subjects:
            subject.seconds[column] = [share * took_s for took_s in subject.seconds[column]]

    def forwards(self, run: TimingRound, stopwatch: "Stopwatch", *, split: bool = False) -> None:
        """Call all layers, and record the time of each call."""
        noted = run.deferred or (split and self._deferral.learning)
        counts = [0]
        self._added.taken()  # drops losses that recomputations in the previous backward added again
        for subject, layer in self.modules_of.items():
            args, kwargs = self._arguments(subject)
            self.forget_graphs(layer)
            self._random.enter(Key(0, 0, 0), subject.name)
            with _naming(subject, self._device), self._caller.autocast(), self._forward_mode[noted]:
                begin = stopwatch.now()
                output = layer(*args, **kwargs)
                stopwatch.note(subject, "forward_s", begin)
                advance()
                check_layouts(tensors_in(output), f"layer {subject.name!r}")
            if subject is self.subjects[-1]:
                run.output = output  # other outputs are freed if no backward needs them
            leaves = [*trainable_leaves(output), *self._added.taken()]
            run.turns.append(_Turn(subject, stopwatch, leaves))
            if leaves:
                run.roots.append(_Begin.apply(run.turns[-1], *leaves))  # type: ignore[no-untyped-call]
            counts.append(self._deferral.num_noted)
        products = self._deferral.finish([edge_of(root) for root in run.roots]) if noted else []
        run.products = [products[begin:end] for begin, end in pairwise(counts)]

    def forget_graphs(self, layer: nn.Module) -> None:
        """Reset attributes that hold a graph of an earlier round, such as a recurrent state.

        In a training step, the model itself resets such attributes before each forward.
        """
        for module in layer.modules():
            before = self._attributes.get(module, {})
            for name in vars(module).keys() - OF_ALL_MODULES:
                if any(tensor.grad_fn is not None for tensor in tensors_in(vars(module)[name])):
                    vars(module)[name] = before.get(name)

    def _arguments(self, subject: Subject) -> Any:
        given = subject.given.map_tensors(lambda tensor: tensor.to(self._device, copy=True))
        return unchanged(given.with_wanted(enter(given.wanted) if given.wanted else ()))

    def backwards(self, run: TimingRound, stopwatch: "Stopwatch", column: str) -> None:
        """Run the B or I of all layers, the last layer first."""
        with self._backward_mode[run.deferred], self._deferral.unnoted():
            if run.roots:
                with _naming_turn(run.turns, self._device):
                    edges = [edge_of(root) for root in run.roots]  # with tensors, torch would exit the dispatch mode
                    torch.autograd.backward(edges, [root.detach() for root in run.roots])
        end = stopwatch.now()
        for turn in run.turns:  # a layer's backward ends when the backward of the layer before begins
            end = turn.note(column, end)

    def weight_grads(self, products: Sequence[Product]) -> None:
        """Compute the weight gradients that the I has deferred to the W."""
        with self._backward_mode[False]:
            weight_grad(products)


class _AddedLosses:
    """Collects the losses that a layer passes to ``add_loss``. The layer's backward pass includes these losses."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        return self._take if function is added_loss else None

    def taken(self) -> list[Tensor]:
        """Return the losses that were added since the previous call and require a gradient."""
        losses = [loss for loss in self._losses if loss.requires_grad]
        self._losses.clear()
        return losses

    def _take(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value: Tensor = args[0]
        self._losses.append(value)
        return value


class Stopwatch:
    """Measures times: on a CPU, wall time and the thread's processor time; on a GPU, events on the thread's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: list[tuple[Subject, str, Any, Any]] = []

    def now(self) -> Any:
        """Return the current wall time and the thread's processor time, or an event of the accelerator."""
        if not is_accelerator(self._device):
            return time.perf_counter(), time.thread_time()
        return event_on(current_stream(self._device), timed=True)

    def note(self, subject: Subject, column: str, begin: Any, end: Any = None) -> None:
        """Record the time from ``begin`` to ``end`` for a subject. Default for ``end``: now."""
        self._noted.append((subject, column, begin, self.now() if end is None else end))

    def settle(self) -> None:
        """Convert the recorded times to seconds, and store them in the subjects."""
        synchronize(self._device)
        for subject, column, begin, end in self._noted:
            if is_accelerator(self._device):
                took_s, ran_s = (begin.elapsed_time(end) * 1e-3,) * 2
            else:
                took_s, ran_s = (until - since for since, until in zip(begin, end, strict=True))
            subject.seconds.setdefault(column, []).append(took_s)
            subject.waited.setdefault(column, []).append(took_s - ran_s)
        self._noted.clear()


class _Turn:
    """The start of one layer's backward pass, with the shapes and types of the gradients that it receives."""

    def __init__(self, subject: Subject, stopwatch: Stopwatch, leaves: Sequence[Tensor]) -> None:
        self.subject = subject
        self._stopwatch = stopwatch
        self._device = leaves[0].device if leaves else None
        self._progress = progress_here()  # the backward may run in another thread
        # the shape of a nested tensor is data, so a nested tensor on the meta device has no shape
        self._forms = [leaf.detach() if leaf.is_nested else torch.empty_like(leaf, device="meta") for leaf in leaves]
        self.came: Any = None
        self._begin: Any = None

    def come(self) -> list[Tensor]:
        """Return new gradients for the layer's output.

        Writing the gradients leaves them in the CPU cache, as the backward of the next layer would do in a step.
        """
        self._progress.advance()
        self.came = self._stopwatch.now()
        ones = [torch.ones_like(form, device=self._device) for form in self._forms]
        self._begin = self._stopwatch.now()
        return ones

    def note(self, column: str, end: Any) -> Any:
        """Record that the layer's backward pass ended at ``end``. Return the end of the previous backward pass."""
        if self.came is None:
            self._stopwatch.note(self.subject, column, end, end)
            return end
        self._stopwatch.note(self.subject, column, self._begin, end)
        return self.came


class _Begin(torch.autograd.Function):
    """Marks the start of a layer's backward pass.

    The _Turn must not refer to the graph, because the garbage collector cannot find reference cycles through a graph.
    """

    @staticmethod
    def forward(ctx: Any, turn: _Turn, *leaves: Tensor) -> Tensor:
        ctx.turn = turn
        return torch.empty(0, device=leaves[0].device)  # on the device, so that autograd uses its stream

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.turn.come()


@contextmanager
def _naming(subject: Subject, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while layer {subject.name!r} was being measured on {device} with the given sample")
        raise


@contextmanager
def _naming_turn(turns: Sequence[_Turn], device: torch.device) -> Iterator[None]:
    """Add a note to any exception. The note names the layer whose backward pass was running."""
    try:
        yield
    except Exception as error:
        come = [turn.subject.name for turn in turns if turn.came is not None]
        place = f"the backward of layer {come[0]!r}" if come else "a backward"
        error.add_note(f"while {place} was being measured on {device} with the given sample")
        raise


def _callable(layer: nn.Module, device: torch.device) -> nn.Module:
    """Return the layer, or a copy if the layer is scripted and thus cannot be called with other tensors."""
    if not _is_scripted(layer):
        return layer
    with torch.no_grad():
        twin = copy.deepcopy(layer).to(device)
    for parameter, own in zip(twin.parameters(), layer.parameters(), strict=True):
        parameter.requires_grad_(own.requires_grad)
    return twin


def _is_scripted(layer: nn.Module) -> bool:
    return any(isinstance(module, torch.jit.ScriptModule) for module in layer.modules())


def _copies(lap: TimingRun, device: torch.device) -> dict[str, Tensor]:
    scripted = [layer for layer in lap.layers if _is_scripted(layer)]
    own = {id(tensor) for layer in scripted for tensor in (*layer.parameters(), *layer.buffers())}
    parameters = {
        name: _copied(parameter, device).requires_grad_(parameter.requires_grad)
        for name, parameter in lap.named_parameters()
        if id(parameter) not in own
    }
    return parameters | {name: _copied(buffer, device) for name, buffer in lap.named_buffers() if id(buffer) not in own}


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    copied = stand_in(tensor, device, weight=True) if tensor.is_meta else tensor.detach().to(device, copy=True)
    return with_copied_attributes_of(tensor, copied)
