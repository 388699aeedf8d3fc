"""Timing run: layers that are measured together, forwards in their order and then backwards in the reverse one.

So each layer finds the caches as it does in a step: its input has just been written, its weights have not been used
since the lap before. What a stage does between layers is not counted: one backward runs through all of them, and notes
when it comes to each. Layers run on copies of their weights.
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

from pipesched.model.state_guard import unchanged
from pipesched.runtime.stage.split_backward import Deferral
from pipesched.runtime.stage.weight_products import Product, weight_grad
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.graph_edges import edge_of, enter
from pipesched.tensors.keyed_random import InBackward, Key, KeyedRandom
from pipesched.tensors.meta_tensors import lacks_contents, stand_in
from pipesched.tensors.payload import Payload, trainable_leaves
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Subject", "TimingRun"]

_TOGETHER = "weight_grads_together_s"


@dataclass(eq=False, kw_only=True)
class Subject:
    """A call of a layer that is measured."""

    name: str
    layer: nn.Module
    #: Its (args, kwargs).
    given: Payload
    #: Of each round, by what took them.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    #: For how many of these seconds the thread left the processor to others.
    waited: dict[str, list[float]] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class Run:
    """Layers between their forwards and their backwards; each list has one entry a layer."""

    #: Whether weight gradients are left to W.
    deferred: bool
    #: Of the last layer.
    output: Any = None
    turns: list["_Turn"] = field(default_factory=list)
    #: What the backward begins with, of the layers that have one.
    roots: list[Tensor] = field(default_factory=list)
    #: What waits for the weight gradients.
    products: list[list[Product]] = field(default_factory=list)


class TimingRun(nn.Module):
    """See the module. caller: whose autocast holds in forwards."""

    def __init__(self, subjects: Sequence[Subject], device: torch.device, caller: Caller) -> None:
        super().__init__()
        self.subjects = list(subjects)
        blanks = [
            Subject(name="", layer=nn.Identity(), given=Payload.of(((torch.empty(0, requires_grad=True),), {})))
            for _ in range(3)
        ]
        self._blank = blanks[1]  # behind it comes one more, since the last one to go forward begins the backward
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
        self._forward_mode = {False: Intercept(self._random), True: Intercept(self._random, self._deferral)}
        self._backward_mode = {
            False: Intercept(InBackward(self._random)),
            True: Intercept(InBackward(self._random), self._deferral),
        }

    def forward(self, act: Callable[[], Any]) -> Any:
        """What ``held`` calls."""
        return act()

    def held(self, act: Callable[[], Any]) -> Any:
        """Act while the layers use the copies."""
        return torch.func.functional_call(self, self.tensors, (act,))

    def forget(self) -> None:
        """Free the copies; at once where there may be no room for those of several laps."""
        for layer in self.layers:
            self.forget_graphs(layer)
        for tensor in self.tensors.values():
            tensor.grad = None
        self.tensors.clear()
        if any(map(lacks_contents, self.layers)):
            gc.collect()  # graphs and modules refer to each other

    # ---- rounds, each of which notes what it took -------------------------------------------------------------------

    def round(self, *, split: bool = False, clock: "Clock | None" = None) -> Run:
        """Forwards, and whole backwards, or input gradients."""
        own = clock or Clock(self._device)
        self._deferral.begin()
        run = Run(deferred=split and self._deferral.decide(0, lambda: None))
        self.forwards(run, own, split=split)
        self.backwards(run, own, "input_grad_s" if split else "backward_s")
        if clock is None:
            own.settle()
        return run

    def weight_round(self, *, apart: bool) -> None:
        """Forwards, input gradients, and weight gradients: layer by layer, or at once as a stage does them."""
        clock = Clock(self._device)
        run = self.round(split=True, clock=clock)
        if apart:
            for subject, products in zip(reversed(self._all), reversed(run.products), strict=True):
                begin = clock.now()
                self.weight_grads(products)
                clock.note(subject, "weight_grad_s", begin)
        else:
            together = [product for products in run.products for product in products]
            begin = clock.now()
            self.weight_grads(together)
            clock.note(self.subjects[0], _TOGETHER, begin)
        clock.settle()

    def clear(self) -> None:
        """What was measured so far was for the caches."""
        for subject in self._all:
            subject.seconds.clear()
            subject.waited.clear()

    def correct(self) -> None:
        """Take away what it costs to note when a backward comes to a layer, and that weight gradients layer by layer
        begin again each time: of what all took together each layer has its share. What slows a processor for a moment
        is in no layer's median but in every step: layers together take what they took in the median round.
        """
        for what in ("backward_s", "input_grad_s"):
            blank_s = median(self._blank.seconds[what])
            for subject in self.subjects:
                subject.seconds[what] = [max(0.0, took_s - blank_s) for took_s in subject.seconds[what]]
        for what in ("forward_s", "backward_s", "input_grad_s"):
            rounds = zip(*(subject.seconds[what] for subject in self.subjects), strict=True)
            self._share(what, median(map(sum, rounds)))
        self._share("weight_grad_s", median(self.subjects[0].seconds.pop(_TOGETHER)), most=1)

    def _share(self, what: str, together_s: float, most: float = math.inf) -> None:
        apart_s = sum(median(subject.seconds[what]) for subject in self.subjects)
        share = min(most, together_s / apart_s) if apart_s else 1.0
        for subject in self.subjects:
            subject.seconds[what] = [share * took_s for took_s in subject.seconds[what]]

    def forwards(self, run: Run, clock: "Clock", *, split: bool = False) -> None:
        """Call all layers."""
        noted = run.deferred or (split and self._deferral.learning)
        counts = [0]
        for subject, layer in self.modules_of.items():
            args, kwargs = self._arguments(subject)
            self.forget_graphs(layer)
            self._random.enter(Key(0, 0, 0), subject.name)
            with _naming(subject, self._device), self._caller.autocast(), self._forward_mode[noted]:
                begin = clock.now()
                output = layer(*args, **kwargs)
                clock.note(subject, "forward_s", begin)
            if subject is self.subjects[-1]:
                run.output = output  # the others are free as far as no backward needs them
            leaves = trainable_leaves(output)
            run.turns.append(_Turn(subject, clock, leaves))
            if leaves:
                run.roots.append(_Begin.apply(run.turns[-1], *leaves))  # type: ignore[no-untyped-call]
            counts.append(self._deferral.num_noted)
        products = self._deferral.finish([edge_of(root) for root in run.roots]) if noted else []
        run.products = [products[begin:end] for begin, end in pairwise(counts)]

    def forget_graphs(self, layer: nn.Module) -> None:
        """What an earlier round has left in attributes of a layer, such as a state, and what its graph is of, is not
        there for the next one, as it would not be in a model that puts its state back before each forward.
        """
        for module in layer.modules():
            before = self._attributes.get(module, {})
            for name, value in list(vars(module).items()):
                if any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                    vars(module)[name] = before.get(name)

    def _arguments(self, subject: Subject) -> Any:
        given = subject.given.map_tensors(lambda tensor: tensor.to(self._device, copy=True))
        return unchanged(given.with_wanted(enter(given.wanted) if given.wanted else ()))

    def backwards(self, run: Run, clock: "Clock", what: str) -> None:
        """Whole backwards, or input gradients, of all layers: of the last one first."""
        with self._backward_mode[run.deferred], self._deferral.unnoted():
            if run.roots:
                with _naming_turn(run.turns, self._device):
                    edges = [edge_of(root) for root in run.roots]  # of tensors torch would run it with the mode left
                    torch.autograd.backward(edges, [root.detach() for root in run.roots])
        end = clock.now()
        for turn in run.turns:  # each ends where the one before it in the model begins
            end = turn.note(what, end)

    def weight_grads(self, products: Sequence[Product]) -> None:
        """The weight gradients that the input gradients have left."""
        with self._backward_mode[False]:
            weight_grad(products)


class Clock:
    """Times on a device: of this thread, or between events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: list[tuple[Subject, str, Any, Any]] = []

    def now(self) -> Any:
        """A point in time, and of the thread's own."""
        if self._device.type != "cuda":
            return time.perf_counter(), time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def note(self, subject: Subject, what: str, begin: Any, end: Any = None) -> None:
        """It took from begin to end, which is now unless given."""
        self._noted.append((subject, what, begin, self.now() if end is None else end))

    def settle(self) -> None:
        """Give the subjects their times."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for subject, what, begin, end in self._noted:
            if self._device.type == "cuda":
                took_s, ran_s = (begin.elapsed_time(end) * 1e-3,) * 2
            else:
                took_s, ran_s = (until - since for since, until in zip(begin, end, strict=True))
            subject.seconds.setdefault(what, []).append(took_s)
            subject.waited.setdefault(what, []).append(took_s - ran_s)
        self._noted.clear()


class _Turn:
    """When a backward comes to a layer, and with gradients of which form."""

    def __init__(self, subject: Subject, clock: Clock, leaves: Sequence[Tensor]) -> None:
        self.subject = subject
        self._clock = clock
        self._device = leaves[0].device if leaves else None
        self._forms = [torch.empty_like(leaf, device="meta") for leaf in leaves]
        self.came: Any = None
        self._begin: Any = None

    def come(self) -> list[Tensor]:
        """The gradients of the layer's output, just written as those of a layer behind it would be."""
        self.came = self._clock.now()
        ones = [torch.ones_like(form, device=self._device) for form in self._forms]
        self._begin = self._clock.now()
        return ones

    def note(self, what: str, end: Any) -> Any:
        """The layer's backward ends there; returns when the one behind it ended."""
        if self.came is None:
            self._clock.note(self.subject, what, end, end)
            return end
        self._clock.note(self.subject, what, self._begin, end)
        return self.came


class _Begin(torch.autograd.Function):
    """Where the backward of a layer begins. The turn does not hold the graph: no garbage collector sees through it."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, *leaves: Tensor) -> Tensor:
        ctx.turn = turn
        return torch.empty(0, device=leaves[0].device)  # so that autograd knows the stream

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.turn.come()


@contextmanager
def _naming(subject: Subject, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while layer {subject.name!r} was measured on {device} with the given sample")
        raise


@contextmanager
def _naming_turn(turns: Sequence[_Turn], device: torch.device) -> Iterator[None]:
    """As ``_naming``, of the layer to which a backward has come."""
    try:
        yield
    except Exception as error:
        come = [turn.subject.name for turn in turns if turn.came is not None]
        error.add_note(f"while the backward of layer {come[:1]} was measured on {device} with the given sample")
        raise


def _callable(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer; a copy of one that is scripted, which takes no other tensors than its own."""
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
    return stand_in(tensor, device, weight=True) if tensor.is_meta else tensor.detach().to(device, copy=True)
