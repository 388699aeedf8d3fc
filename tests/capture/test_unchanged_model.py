"""Making a pipeline, also one that is refused, leaves the model as it was, whatever its forward does to itself."""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from pipesched import Pipeline
from pipesched.capture.layered_model import layered
from pipesched.errors import PipeschedError
from tests.support.odd_models import FLOATS, square

pytestmark = pytest.mark.timeout(300)


class Mischief(nn.Module):
    """A layer or container on which a forward may do what ``DEEDS`` names."""

    shared = 0
    items: ClassVar[list[int]] = [0]

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.list, self.count = nn.Linear(8, 8), [1], 0
        self.table: dict[str, Any] = {"key": 1}
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("empty", None)
        self.other = nn.Linear(8, 8)


DEEDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "sets an attribute": lambda m, x: setattr(m, "last", x.detach()),
    "counts": lambda m, x: setattr(m, "count", m.count + 1),
    "deletes an attribute": lambda m, x: m.__dict__.pop("count", None),
    "appends to a list": lambda m, x: m.list.append(2),
    "fills a dict": lambda m, x: m.table.update(more=x.detach()),
    "writes a buffer": lambda m, x: m.running.add_(1),
    "writes a buffer's data": lambda m, x: m.running.data.fill_(3.0),
    "replaces a buffer": lambda m, x: setattr(m, "running", m.running + 1),
    "registers a buffer": lambda m, x: m.register_buffer("made", torch.ones(8), persistent=False),
    "fills an empty buffer": lambda m, x: setattr(m, "empty", torch.ones(8)),
    "deletes a buffer": lambda m, x: m._buffers.pop("running", None),
    "writes a weight": lambda m, x: m.other.weight.data.mul_(0.5),
    "freezes a weight": lambda m, x: m.other.weight.requires_grad_(False),
    "sets a gradient": lambda m, x: setattr(m.other.weight, "grad", torch.ones(8, 8)),
    "makes a weight": lambda m, x: setattr(m, "gain", nn.Parameter(torch.ones(8))),
    "replaces a weight": lambda m, x: setattr(m.other, "weight", nn.Parameter(torch.ones(8, 8))),
    "makes a module": lambda m, x: setattr(m, "act", nn.GELU()),
    "makes a layer": lambda m, x: setattr(m, "more", nn.Linear(8, 8)),
    "removes a module": lambda m, x: m._modules.pop("other", None),
    "registers a hook": lambda m, x: m.other.register_forward_hook(lambda *_: None),
    "changes its mode": lambda m, x: m.other.eval(),
    "sets a class attribute": lambda m, x: setattr(type(m), "shared", type(m).shared + 1),
    "fills a class attribute": lambda m, x: type(m).items.append(1),
    "draws random numbers": lambda m, x: (torch.rand(2), random.random()),
    "calls with other weights": lambda m, x: functional_call(m.other, {"weight": m.other.weight * 2}, (x,)),
}

ENDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "goes on": lambda m, x: None,
    "raises": lambda m, x: 1 / 0,
    "reads a value": lambda m, x: x.sum().item() > 0,
    "differentiates": lambda m, x: torch.autograd.grad(x.sum(), x, allow_unused=True) if x.requires_grad else None,
}


class Layer(Mischief):
    """``deeds`` are done before ``end``."""

    def __init__(self, deeds: list[str], end: str) -> None:
        super().__init__()
        self.deeds, self.end = tuple(deeds), end

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for deed in self.deeds:
            DEEDS[deed](self, x)
        ENDS[self.end](self, x)
        return x


class Container(Layer):
    """The deeds are done by the model's own code, after two of its layers."""

    def __init__(self, deeds: list[str], end: str) -> None:
        super().__init__(deeds, end)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.blocks[1](self.blocks[0](x)))
        return self.blocks[3](self.blocks[2](x))


class Holds(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), layer, nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


WHERE: dict[str, Callable[[list[str], str], nn.Module]] = {
    "between layers": Container,
    "in a layer": lambda deeds, end: Holds(Layer(deeds, end)),
    "in a row": lambda deeds, end: nn.Sequential(nn.Linear(8, 8), Layer(deeds, end)),
}


SOME_DEEDS = st.lists(st.sampled_from(sorted(DEEDS)), min_size=1, max_size=3, unique=True)


def contents(value: Any) -> Any:
    """A value's identity, and the contents of lists, dicts and tensors."""
    if isinstance(value, Tensor):
        return id(value), value.tolist(), value.requires_grad, None if value.grad is None else value.grad.tolist()
    if isinstance(value, dict):
        return id(value), [(key, contents(one)) for key, one in value.items()]
    if isinstance(value, list):
        return id(value), [contents(one) for one in value]
    return id(value), sorted(value) if isinstance(value, set) else value if isinstance(value, int | str) else None


def snapshot(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {"random": (torch.get_rng_state().tolist(), random.getstate())}
    for name, module in model.named_modules():
        found[name] = type(module), {key: contents(value) for key, value in vars(module).items()}
        for kind in type(module).__mro__:
            if kind.__module__ == __name__:
                found[kind.__name__] = {key: contents(one) for key, one in vars(kind).items() if key[:2] != "__"}
    return found


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", WHERE)
@settings(max_examples=60)
@given(
    deeds=st.lists(st.sampled_from(sorted(DEEDS)), min_size=1, max_size=3, unique=True),
    end=st.sampled_from(sorted(ENDS)),
)
def test_a_recording_leaves_the_model_unchanged(where: str, training: bool, deeds: list[str], end: str) -> None:
    model = WHERE[where](deeds, end).train(training)
    before = snapshot(model)
    try:
        own = layered(model, ((FLOATS[:2],), {}))
        _ = own.written  # a property that runs forwards
    except Exception:
        pass
    differing = [key for key, value in snapshot(model).items() if before.get(key) != value]
    assert not differing, f"{where}, {deeds}, {end}"


@pytest.mark.one_in(9)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("where", WHERE)
def test_a_refused_pipeline_leaves_the_model_unchanged(where: str, deed: str) -> None:
    for end in ENDS:
        model = WHERE[where]([deed], end)
        before = snapshot(model)
        with pytest.raises((PipeschedError, ZeroDivisionError)):  # there are more stages than layers
            Pipeline(model, FLOATS[:2], loss_fn=square, devices=["cpu"] * 64, schedule="1f1b", num_microbatches=4)
        now = snapshot(model)
        assert [key for key in before if before[key] != now.get(key)] == [], f"{where}, {deed}, {end}"
