"""Keyed random: random numbers that depend on the place in the model and the point in training, never on the plan.

The seed of each draw is computed from (seed, step, micro-batch, layer, call, op). The draw therefore gives the same
bits in any stage, in any thread, in any order of execution, and when the layer is recomputed. Dropout uses a separate
generator. For other random functions, the default generator is seeded for each call. A lock protects the default
generator, because all threads share it. If a layer, or the code between layers, uses the global generator of Python or
numpy, that generator is seeded in the same way.
"""

import functools
import hashlib
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from pipesched.devices.generators import default_generator
from pipesched.devices.streams import is_accelerator
from pipesched.errors import ExecutionError
from pipesched.tensors.function_mode import Handler
from pipesched.tensors.torch_insides import compile_lock

__all__ = ["InBackward", "Key", "KeyedRandom", "Place", "draws", "is_random", "outside_kept", "outside_state"]

_DROPOUTS = frozenset({nn.functional.dropout, torch.dropout, torch.dropout_})
#: Python functions that draw inside their body and therefore have no operator with a tag.
_DRAW_INSIDE = frozenset(
    {
        nn.functional.dropout1d,
        nn.functional.dropout2d,
        nn.functional.dropout3d,
        nn.functional.fractional_max_pool2d,
        nn.functional.fractional_max_pool2d_with_indices,
        nn.functional.fractional_max_pool3d,
        nn.functional.fractional_max_pool3d_with_indices,
        nn.functional.gumbel_softmax,
    }
)
_DEFAULT_GENERATORS = threading.Lock()
_OUTSIDE = threading.RLock()


class Key(NamedTuple):
    """The point in training at which a forward runs. ``microbatch`` is numbered across all data-parallel replicas."""

    seed: int
    step: int
    microbatch: int


class Place(NamedTuple):
    """The place of a call to a random function: a layer call, and the number of earlier random calls in it."""

    key: Key
    layer: str
    call: int = 0
    op: int = 0
    #: The key for the generators of Python and numpy; None if the code uses neither generator.
    outside: str | None = None


@functools.cache
def is_random(function: Callable[..., Any]) -> bool:
    """Return whether a torch function draws random numbers in its Python code, or has an operator tagged as random."""
    if function in _DRAW_INSIDE or getattr(function, "__module__", "") == nn.init.__name__:
        return True
    packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    if not isinstance(packet, type(torch.ops.aten.dropout)):
        return False
    tag = torch.Tag.nondeterministic_seeded
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads())


def draws(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call draws random numbers from a default generator, not from one passed as an argument."""
    if not (function in _DROPOUTS or is_random(function)):
        return False
    return kwargs.get("generator") is None and not _is_quiet(function.__name__, args, kwargs)


def outside_state() -> Hashable:
    """Return the state of Python's and numpy's global generators. Each number drawn changes this state."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(numbers).tobytes(), *rest


@contextmanager
def outside_kept(seed: int | None = None, *, alone: bool = True) -> Iterator[None]:
    """Seed Python's and numpy's global generators if a seed is given, and restore their states afterwards.

    If ``alone`` is set, other threads that draw keyed numbers from these generators wait until the ``with`` block ends.
    """
    with _OUTSIDE if alone else nullcontext():
        states = random.getstate(), np.random.get_state()
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


class KeyedRandom:
    """Provides handlers that draw keyed random numbers. Each stage has a separate KeyedRandom object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators: dict[torch.device, torch.Generator] = {}
        self.key = Key(0, 0, 0)
        self._layer = ""
        self._call = 0
        self._op = 0
        self._outside: str | None = None
        self.first_layer = ""  # of the stage
        self.again = False  # True while a layer is recomputed in a backward pass

    def enter(self, key: Key, layer: str, call: int = 0, op: int = 0) -> None:
        """Set the place of the next random call. ``op`` is the number of earlier random calls in this layer call."""
        self.key = key
        self._layer = layer
        self._call = call
        self._op = op

    #: Sets the place at the beginning of a stage, outside of its layers.
    begin = enter

    @property
    def place(self) -> Place:
        """The place of the next random call, to be passed to ``repeated``."""
        return Place(self.key, self._layer, self._call, self._op, self._outside)

    @contextmanager
    def repeated(self, place: Place) -> Iterator[None]:
        """During the ``with`` block, repeat the random numbers that were drawn from ``place`` on."""
        before = self.place
        again = self.again
        self.enter(*place[:-1])
        self.again = True
        try:
            with nullcontext() if place.outside is None else outside_kept(self._seed(place.outside)):
                yield
        finally:
            self.enter(*before[:-1])
            self.again = again

    @property
    def op(self) -> int:
        """The number of random calls so far in this layer call, starting from the ``op`` passed to ``enter``."""
        return self._op

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        """Return the handler if the function is dropout or another random function, else None."""
        if function in _DROPOUTS:
            return self._dropout
        return self._seeded if is_random(function) else None

    @contextmanager
    def outside(self, layer: str, call: int) -> Iterator[None]:
        """Seed Python's and numpy's generators for a layer call, or for the code between layers (``layer`` is "")."""
        before = self._outside
        self._outside = f"{layer}/{call}/outside"
        try:
            with outside_kept(self._seed(self._outside)):
                yield
        finally:
            self._outside = before

    def _next_seed(self) -> int:
        self._op += 1
        return self._seed(f"{self._layer}/{self._call}/{self._op - 1}")

    def _seed(self, place: str) -> int:
        text = f"{self.key.seed}/{self.key.step}/{self.key.microbatch}/{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(self._next_seed())

    def _dropout(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is nn.functional.dropout:
            return self._drop(*args, **kwargs)
        values = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
        return self._drop(values["input"], values["p"], values["train"], function is torch.dropout_)

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0.0:
            return input
        mask = torch.empty_like(input, requires_grad=False)
        mask = mask.zero_() if p == 1.0 else mask.bernoulli_(1 - p, generator=self._generator(input.device)).div_(1 - p)
        return input.mul_(mask) if inplace else input * mask

    def _seeded(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("generator") is not None or _is_quiet(function.__name__, args, kwargs):
            return function(*args, **kwargs)
        with self._default_generators():
            return function(*args, **kwargs)

    @contextmanager
    def _default_generators(self) -> Iterator[list[torch.Generator]]:
        """Lock the default generators, seed them for the next random call, and restore their states afterwards."""
        generators = [torch.default_generator]
        if is_accelerator(self._device):
            generators.append(default_generator(self._device))
        seed = self._next_seed()
        with compile_lock(), _DEFAULT_GENERATORS:
            states = [generator.get_state() for generator in generators]
            try:
                for generator in generators:
                    generator.manual_seed(seed)
                yield generators
            finally:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)

    def keyed(self, act: Callable[[], Any]) -> tuple[Any, bool]:
        """Call ``act`` with seeded default generators; return its result, and whether it drew from these generators."""
        with self._default_generators() as generators:
            before = [generator.get_state() for generator in generators]
            output = act()
            pairs = zip(generators, before, strict=True)
            return output, any(not torch.equal(generator.get_state(), state) for generator, state in pairs)


def _is_quiet(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call to a random function draws no numbers, as with dropout in evaluation mode."""
    if name == "scaled_dot_product_attention":
        return not kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        at = next(i for i, value in enumerate(args) if isinstance(value, float))  # p; the training flag is next
        return not (args[at] and args[at + 1])
    if name in ("rrelu", "rrelu_"):
        return not kwargs.get("training", args[3] if len(args) > 3 else False)
    if "dropout" in name:
        default = "alpha" not in name  # the default of torch's Python functions
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else default))
        return not (training and kwargs.get("p", args[1] if len(args) > 1 else 0.5))
    return False


class InBackward:
    """Handlers for backward passes. Recomputation repeats the forward's random numbers; other random calls fail."""

    def __init__(self, random: KeyedRandom) -> None:
        self._random = random

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        keyed = self._random.handler_for(function)
        if keyed is None:
            return None

        def handle(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._random.again:
                return keyed(function, args, kwargs)
            if kwargs.get("generator") is not None or _is_quiet(function.__name__, args, kwargs):
                return function(*args, **kwargs)
            return _refuse_draw(function.__name__)

        return handle


def _refuse_draw(name: str) -> NoReturn:
    raise ExecutionError(
        f"random numbers must be drawn in forwards, where pipesched can reproduce them; {name} was called during a "
        f"backward, by torch.utils.checkpoint inside the model, by a layer's autograd.Function, or by a hook; "
        f"checkpoint with Pipeline(checkpoint=...) instead, set the dropout to 0, or give the hook its own generator"
    )
