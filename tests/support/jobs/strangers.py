"""Jobs of test_sent_types: the layers of their pipelines return values of many types, such as dataclasses and enums."""

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from pipesched import Distributed, Pipeline
from pipesched.errors import PipeschedError
from pipesched.runtime.rank_grid import Inputs
from pipesched.testing import reference_step

X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(3)), torch.arange(9) % 3


class Colour(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Record:
    hidden: Tensor
    colour: Colour
    inner: Any = None


class Node:
    def __init__(self, hidden: Tensor, note: str) -> None:
        self.hidden, self.note = hidden, note


pytree.register_pytree_node(Node, lambda one: ([one.hidden], one.note), lambda parts, note: Node(*parts, note))


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def model_output(hidden: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden.relu(),))


WRAPS = {
    "tuple": (lambda hidden: (hidden, None, 3, slice(2)), lambda value: value[0] * value[2]),
    "dict": (lambda hidden: {"a": hidden, ("b", 1): torch.float32}, lambda value: value["a"].to(value["b", 1])),
    "enum": (lambda hidden: (hidden, Colour.RED), lambda value: value[0] * (value[1] is Colour.RED)),
    "named tuple": (lambda hidden: Pair(hidden, {1, 2}), lambda value: value.first * len(value.second)),
    "dataclass": (
        lambda hidden: Record(hidden, Colour.RED, Record(hidden.exp(), Colour.RED)),
        lambda value: value.hidden + value.inner.hidden * (value.inner.colour is Colour.RED),
    ),
    "node": (lambda hidden: [Node(hidden, "note")], lambda value: value[0].hidden * len(value[0].note)),
    "model output": (model_output, lambda value: value.last_hidden_state - value.hidden_states[0] * 2),
    "opaque": (Opaque, lambda value: value.hidden),
}


class Wraps(nn.Module):
    """A layer that returns its output inside a value of the type ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Linear(4, 4), WRAPS[name][0]

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.inner(x))


class Unwraps(nn.Module):
    """A layer that reads its input from the value that `Wraps` returned."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.unwrap = nn.Linear(4, 3), WRAPS[name][1]

    def forward(self, value: Any) -> Tensor:
        return self.inner(self.unwrap(value))


def model(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), Wraps(name), Unwraps(name), nn.Linear(3, 3))


GIVEN = {"loss_fn": nn.functional.cross_entropy, "num_microbatches": 3, "seed": 5}


def pipeline(group: Any, of: nn.Module, boundary: int = 2, inputs: Inputs = "all", **options: Any) -> Pipeline:
    mesh = DeviceMesh.from_group(group, "cpu")
    return Pipeline(
        of,
        X[:2],
        mesh=mesh,
        schedule="1f1b",
        boundaries=[boundary],
        distributed=Distributed(inputs=inputs, timeout=20),
        **GIVEN,
        **options,
    )


def passes_on(group: Any, name: str) -> None:
    """Check that losses, gradients and the gathered state of two steps are bit-identical to a plain loop's.

    The messages of the two steps have different sizes.
    """
    plain, piped = model(name), model(name)
    with pipeline(group, piped) as pipe:
        for step, rows in enumerate((9, 7)):
            loss = reference_step(plain, X[:rows], target=Y[:rows], step=step, **GIVEN)
            assert torch.equal(pipe.step(X[:rows], target=Y[:rows]), loss)
        own = dict(plain.named_parameters())
        for key, parameter in pipe.named_parameters():
            assert parameter.grad is not None, key
            assert torch.equal(parameter.grad, own[key].grad), key
        collected = pipe.full_state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(collected[key], value), key
        assert collected[key].untyped_storage().nbytes() == value.untyped_storage().nbytes()


def opaque(group: Any, boundary: int) -> str:
    """Return the error of a pipeline that sends an Opaque object between stages, or "it trains" if none occurs."""
    try:
        with pipeline(group, model("opaque"), boundary) as pipe:
            pipe.step(X, target=Y)
    except PipeschedError as error:
        return f"{type(error).__name__}: {error}"
    return "it trains"


class Tells(nn.Module):
    """A model that returns a dataclass with ``extra``, an object that may be impossible to send."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layers, self.extra = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)]), extra

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return Record(x, Colour.RED, self.extra)


def outputs_for_all(group: Any, with_opaque: bool) -> Any:
    """Gather an output that is a dataclass on all ranks. Returns the error if the output cannot be sent."""
    plain = Tells(Opaque(X) if with_opaque else None)
    mesh = DeviceMesh.from_group(group, "cpu")
    given = {
        "schedule": "1f1b",
        "boundaries": ["layers.1"],
        "num_microbatches": 3,
        "distributed": Distributed(timeout=20),
    }
    with Pipeline(plain, X[:2], mesh=mesh, **given) as pipe:
        with torch.no_grad():
            expected = plain(X).hidden
        try:
            with torch.no_grad():
                output = pipe.forward(X, gather=True)
        except PipeschedError as error:
            return str(error)
    assert type(output) is Record
    return output.colour is Colour.RED, output.hidden.shape == expected.shape


def targets_of_a_type(group: Any) -> list[Any]:
    """Pass targets of a type that the other rank does not know, with inputs="first". Return the error."""
    with pipeline(group, model("tuple"), inputs="first") as pipe:
        first = group.rank() == 0
        loss = float(pipe.step(X, target=Y) if first else pipe.step())
        try:
            pipe.step(X, target=Pair(Y, Colour.RED)) if first else pipe.step()
        except PipeschedError as error:
            return [loss, str(error)]
    return [loss, "it ran"]
