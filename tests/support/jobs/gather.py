"""Jobs of test_gather_model: they use a model that a pipeline over a mesh trains, between steps and after ``close``."""

import copy
import io
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import pipesched
from pipesched import Distributed, Numerics, Pipeline
from pipesched.errors import PipeschedError
from pipesched.testing import reference_step
from tests.support.models import mixed_model

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)), torch.arange(16) % 4
ADAM = {"optimizer": lambda params: torch.optim.Adam(params, lr=0.05)}


class Tied(nn.Module):
    """A model with code between its layers, a parameter outside its layers, BatchNorm, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x * self.scale)


def pipeline(group: Any, model: Any, **options: Any) -> Pipeline:
    choices = {
        "loss_fn": functional.cross_entropy,
        "num_microbatches": 4,
        "seed": 5,
        "distributed": Distributed(timeout=20),
        **ADAM,
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # BatchNorm warns about its running statistics
        return Pipeline(model, X[:4], mesh=DeviceMesh.from_group(group, "cpu"), **choices)


def model_of(kind: str) -> nn.Module:
    return mixed_model() if kind == "row" else Tied()


def cut(kind: str, stages: int) -> list[Any]:
    if kind == "row":
        return [11 * stage // stages for stage in range(1, stages)]
    return [["blocks.1.0"], ["blocks.0.0", "blocks.2.0"], ["blocks.0.0", "blocks.1.0", "blocks.2.0"]][stages - 2]


def reference(kind: str, steps: int) -> nn.Module:
    """Return a model that was trained for this number of steps in a plain loop."""
    model = model_of(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        given = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5}
        reference_step(model, X, target=Y, step=step, **given)
        optimizer.step()
        optimizer.zero_grad()
    return model


def said(call: Any) -> str:
    """Return the error or the warnings of a call as text; "" if there are none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except PipeschedError as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(str(warning.message) for warning in caught)


def hooks_of(model: nn.Module) -> int:
    kinds = "_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks"
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def assert_is(model: nn.Module, other: dict[str, Tensor]) -> None:
    assert_same(model.state_dict(), other)
    assert hooks_of(model) == 0


def assert_same(own: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert own.keys() == other.keys()
    assert not [name for name, value in own.items() if not torch.equal(value, other[name])]


def gathered(group: Any, kind: str, schedule: str, rank: int | None, closed: bool) -> None:
    """Check that the gathered model is bit-identical to a plain loop's, and keeps its Parameter objects.

    Gathers after each step, or only after ``close`` if ``closed``.
    """
    model, chunks = model_of(kind), 2 if schedule == "zb-v" else 1
    parameters, told = dict(model.named_parameters()), rank in (None, group.rank())
    boundaries = cut(kind, group.size() * chunks)
    options: dict[str, Any] = {"schedule": schedule, "boundaries": boundaries, "optimizer": None}
    if schedule == "chimera":  # copies of layers have no running statistics of their own
        options["numerics"] = Numerics(batch_norm="mini-batch")
    with pipeline(group, model, **options) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.05)
        for step in range(2):
            pipe.step(X, target=Y)
            optimizer.step()
            optimizer.zero_grad()
            due = pipe.full_state_dict()
            if schedule != "chimera":  # chimera adds gradients in a different order
                assert_same(due, reference(kind, step + 1).state_dict())
            if not closed:
                pipe.gather_model(rank)
                if told:
                    assert_is(model, due)
                    assert all(one is parameters[name] for name, one in model.named_parameters())
                else:
                    assert "gather_model()" in said(model.state_dict)
    if closed:
        assert "gather_model()" in said(lambda: model(X))
        pipe.gather_model(rank)
        if told:
            assert_is(model, due)
            model(X)
        else:
            assert "gather_model()" in said(lambda: model(X))


def readings(group: Any, kind: str) -> dict[str, str]:
    """Return the error of each way to read or save the model after a step.

    Checks that the same calls raise no error before the first step and after gather_model.
    """
    model = model_of(kind)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    outer = Outer()
    ways = {
        "call": lambda: model(X),
        "inside": lambda: outer(X),
        "state_dict": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "outer state_dict": outer.state_dict,
        "copy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model) if kind == "row" else pickle.dumps(model.blocks),
        "profile": lambda: pipesched.graph_of(model, X[:4], measured=False),
        "second": lambda: Pipeline(model, X[:4], devices=["cpu"], loss_fn=functional.cross_entropy),
        "part of another rank": lambda: [module(X) for module in foreign(pipe)],
    }
    with pipeline(group, model, boundaries=cut(kind, group.size())) as pipe:
        buffers = [buffer.clone() for buffer in model.buffers()]
        pipe.eval()
        before = {name: said(way) for name, way in ways.items() if name not in ("second", "part of another rank")}
        pipe.evaluate(X, target=Y)  # an evaluation does not make the model stale
        before["after evaluate"] = said(model.state_dict)
        assert set(before.values()) == {""}, before
        pipe.train()
        assert hooks_of(model) == 0
        pipe.step(X, target=Y)
        buffers = [buffer.clone() for buffer in model.buffers()]
        found = {name: said(way) for name, way in ways.items()}
        assert all(torch.equal(one, other) for one, other in zip(model.buffers(), buffers, strict=True))
        assert set(pipe.state_dict()) < set(pipe.full_state_dict())
        assert pipe.report() is not None
        assert [name for name, _ in pipe.named_parameters()]
        pipe.evaluate(X, target=Y)
        pipe.gather_model()
        duplicate = copy.deepcopy(model)
        assert hooks_of(duplicate) == hooks_of(model) == 0
        pickle.loads(pickle.dumps(model))
        pipe.step(X, target=Y)
        assert "gather_model()" in said(lambda: model(X))
        assert said(lambda: duplicate(X)) == ""
    return found


def foreign(pipe: Pipeline) -> list[nn.Module]:
    own = {
        module
        for stage in pipe._running.assembly.stages.values()
        for layer in stage.layers.values()
        for module in layer.modules()
    }
    return [module for module in pipe.model.modules() if isinstance(module, nn.Linear) and module not in own]


def loaded(group: Any) -> None:
    """Check that loading the state of the whole model makes the model usable again, but loading a part does not."""
    model = mixed_model()
    with pipeline(group, model, boundaries=cut("row", group.size())) as pipe:
        for load in (model.load_state_dict, pipe.load_state_dict):
            pipe.step(X, target=Y)
            load(mixed_model().state_dict())
            assert_is(model, mixed_model().state_dict())
        pipe.step(X, target=Y)
        model.load_state_dict({"0.bias": torch.zeros(16)}, strict=False)
        pipe.load_state_dict(pipe.state_dict())
        assert "gather_model()" in said(model.state_dict)
        whole = pipe.full_state_dict()
        pipe.load_state_dict(whole)
        assert model.state_dict().keys() == whole.keys()
    fresh = mixed_model()
    with pipeline(group, fresh, boundaries=cut("row", group.size())) as pipe:
        pipe.load_state_dict({name: value + 1 for name, value in pipe.state_dict().items()})
        assert "gather_model()" in said(fresh.state_dict)
        pipe.gather_model()
        assert all(
            torch.equal(value, mixed_model().state_dict()[name] + 1) for name, value in fresh.state_dict().items()
        )


def several(group: Any) -> dict[str, str]:
    """Train one model with several pipelines over a mesh. Return the errors of pipelines with different stages.

    Checks that pipelines with the same layers on the same ranks can take turns.
    """
    model, found = mixed_model(), {}
    one = pipeline(group, model, boundaries=[4], optimizer=None)
    same = pipeline(group, model, boundaries=[4], optimizer=None, schedule="gpipe")
    other = pipeline(group, model, boundaries=[7], optimizer=None)
    one.step(X, target=Y)
    same.step(X, target=Y)
    same.state_dict()
    for name, call in {
        "step": lambda: other.step(X, target=Y),
        "evaluate": lambda: other.eval().evaluate(X, target=Y),
        "state": other.state_dict,
        "new": lambda: pipeline(group, model, boundaries=[4]),
    }.items():
        found[name] = said(call)
    same.gather_model()
    other.train().step(X, target=Y)
    found["old"] = said(lambda: one.step(X, target=Y))
    other.gather_model()
    pipeline(group, model, boundaries=[4]).close()
    for pipe in (one, same, other):
        pipe.close()
    assert hooks_of(model) == 0
    return found


def wrong_ranks(group: Any) -> list[str]:
    found = []
    with pipeline(group, mixed_model(), boundaries=[4], wrap=adapted) as pipe:
        pipe.step(X, target=Y)
        found.append(said(lambda: pipe.gather_model(2)))
        found.append(said(lambda: pipe.gather_model(None if group.rank() else 1)))
        found.append(said(pipe.gather_model))
        pipe.step(X, target=Y)
    return found


class Adapter(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.small = inner, nn.Linear(inner.in_features, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.small(x)


def adapted(stage: nn.Module, index: int) -> nn.Module:
    if index == 1:
        layers = dict(stage.named_children())
        name = next(name for name, layer in layers.items() if isinstance(layer, nn.Linear))
        stage.add_module(name, Adapter(layers[name]))
    return stage


def without_contents(group: Any) -> tuple[str, str]:
    """Build a model in a function, so that each rank creates only its own weights. Check that gathering completes it.

    Returns the errors of a forward and of ``state_dict`` before the model is gathered.
    """

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    with pipeline(group, build, boundaries=[2]) as pipe:
        pipe.step(X, target=Y)
        found = said(lambda: pipe.model(X)), said(pipe.model.state_dict)
        whole, parameters = pipe.full_state_dict(), list(pipe.model.parameters())
        pipe.gather_model(1)
        assert all(one is other for one, other in zip(pipe.model.parameters(), parameters, strict=True))
        if group.rank() == 1:
            assert all(torch.equal(value, whole[name]) for name, value in pipe.model.state_dict().items())
            pipe.model(X)
        pipe.step(X, target=Y)
    return found


class OwnLoss(nn.Module):
    """A loss module with a weight of its own, which only the last rank trains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output * self.scale, target)


def one_criterion(group: Any, kind: str) -> str:
    """Train two models over a mesh and one in this process with one loss module, and call the module.

    Returns the error of a call of the module after the first step.
    """
    made = {"plain": nn.CrossEntropyLoss, "weighted": lambda: nn.CrossEntropyLoss(torch.ones(4)), "own": OwnLoss}
    criterion = made[kind]()
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        same = copy.deepcopy(model)
        expected = criterion(model(X), Y)
        with pipeline(group, model, boundaries=[1], loss_fn=criterion) as pipe:
            assert torch.allclose(pipe.step(X, target=Y), expected)
            found = said(lambda: criterion(torch.randn(16, 4), Y))
            if kind == "own":
                return found
    with Pipeline(same, X[:4], devices=["cpu"] * 2, loss_fn=criterion, num_microbatches=4) as pipe:
        assert torch.allclose(pipe.step(X, target=Y), expected)
    return found
