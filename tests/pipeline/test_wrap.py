"""wrap=: a stage as one module: hooks, adapters, other modules around it; and what cannot be honoured."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pipesched import Pipeline
from pipesched.errors import ExecutionError, GraphError, ModelTypeError, PipeschedError, ScheduleError
from pipesched.testing import reference_step
from tests.support import branching_models as zoo
from tests.support.adapted_models import Adapted
from tests.support.models import assert_as, mixed_model

X, ZEROS = zoo.FLOATS, torch.zeros(zoo.ROWS, 8)
KINDS = ["row", "captured"]


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(zoo.Block() for _ in range(6))) if kind == "row" else zoo.made("residual")[0]


def pipeline(model: nn.Module, wrap: Any, **options: Any) -> Pipeline:
    choices = {"devices": ["cpu"] * 3, "loss_fn": zoo.square, "num_microbatches": 3, "seed": 3}
    choices |= {"schedule": "1f1b", **options}
    return Pipeline(model, X[:3], wrap=wrap, **choices)


def step_as_the_loop(pipe: Pipeline, plain: nn.Module) -> None:
    due = reference_step(plain, X, target=ZEROS, loss_fn=zoo.square, num_microbatches=3, seed=3)
    assert torch.equal(pipe.step(X, target=ZEROS), due)
    assert_as(pipe, plain)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_runs_as_one_module_with_the_same_bits(kind: str, schedule: str) -> None:
    """Its layers under their names in the model, its own hooks forward and backward, and a module around it."""
    model, seen = made(kind), []

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return self.inner(*args)

    def wrap(module: nn.Module, stage: int) -> nn.Module:
        names = {name for name, _ in module.named_modules() if not name.startswith("(")}
        assert names & {*pipe_names} == {*pipe_names} & set(names)
        assert all(model.get_submodule(name) is module.get_submodule(name) for name in names & {*pipe_names})
        module.register_forward_hook(lambda *_: seen.append(("F", stage)))
        module.register_full_backward_hook(lambda *_: seen.append(("B", stage)))
        return Around(module) if stage % 2 else module

    pipe_names = [f"{number}" if kind == "row" else f"blocks.{number}" for number in range(6)]
    with pipeline(model, wrap, schedule=schedule, checkpoint="never") as pipe:
        step_as_the_loop(pipe, made(kind))
        stages = pipe.num_stages
    assert sorted(seen) == sorted((way, stage) for way in "FB" for stage in range(stages) for _ in range(3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_wrap_adds_are_parameters_of_the_model(kind: str) -> None:
    """Linear layers inside of layers are replaced, and in a row a layer itself; all else is frozen."""

    def adapt(module: nn.Module, stage: int) -> nn.Module:
        module.requires_grad_(False)
        for name, part in list(module.named_modules()):
            if name.endswith("up"):
                torch.manual_seed(len(name) + int(name.split(".")[-2]))
                holder, _, last = name.rpartition(".")
                setattr(module.get_submodule(holder), last, Adapted(part))
        return module

    model, plain = made(kind), made(kind)
    adapt(plain, 0)
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    steps: list[Tensor] = []
    with pipeline(model, adapt, optimizer=lambda params: noted(params, steps), checkpoint="always") as pipe:
        assert [name for name, parameter in pipe.named_parameters() if parameter.requires_grad] == trained
        assert pipe.state_dict().keys() == plain.state_dict().keys()
        pipe.load_state_dict(plain.state_dict())
        due = reference_step(plain, X, target=ZEROS, loss_fn=zoo.square, num_microbatches=3, seed=3)
        assert torch.equal(pipe.step(X, target=ZEROS), due)
    assert len(steps) == len(trained)
    noted(plain.parameters(), []).step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def noted(params: Any, steps: list[Tensor]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in params if parameter.requires_grad]
    steps += trained
    return torch.optim.SGD(trained, lr=0.1)


def test_a_layer_can_be_replaced() -> None:
    model, plain = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2))
    plain.load_state_dict(model.state_dict())

    def replace(module: nn.Module, stage: int) -> nn.Module:
        for name, layer in list(module.named_children()):
            torch.manual_seed(int(name))
            setattr(module, name, Adapted(layer))
        return module

    with pipeline(model, replace, devices=["cpu"] * 2) as pipe:
        replace(plain, 0)
        assert all(isinstance(layer, Adapted) for part in pipe.partitions for layer in part)
        step_as_the_loop(pipe, plain)


def test_a_model_of_mixed_layers_is_wrapped_with_the_same_bits() -> None:
    """Dropout, work in place, buffers and checkpoints; a loss with parameters of its own."""
    model = mixed_model()
    plain, x, y = copy.deepcopy(model), torch.randn(12, 8), torch.arange(12) % 4
    loss_fn = functional.cross_entropy
    with Pipeline(
        model,
        x[:3],
        devices=["cpu"] * 2,
        loss_fn=loss_fn,
        num_microbatches=4,
        checkpoint="always",
        seed=3,
        wrap=lambda module, stage: module,
        schedule="1f1b",
    ) as pipe:
        due = reference_step(plain, x, target=y, loss_fn=loss_fn, num_microbatches=4, seed=3)
        assert torch.equal(pipe.step(x, target=y), due)
        assert_as(pipe, plain)


def test_wrappers_that_cannot_work_are_refused() -> None:
    class Owner(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    class Parallel(DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)

    def lose(module: nn.Module, stage: int) -> nn.Module:
        del module.get_submodule("blocks")._modules["0"]
        return module

    def shared(module: nn.Module, stage: int) -> nn.Module:
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.weight = nn.Parameter(part.weight.detach().clone())
        return module

    wrongs: list[tuple[Any, type[PipeschedError], str]] = [
        (lambda module, stage: None, ModelTypeError, "for stage 0 it returned NoneType"),
        (
            lambda module, stage: Parallel(module),
            GraphError,
            "wrap= must not return a DistributedDataParallel, because it reduces gradients at the end of each",
        ),
        (
            lambda module, stage: Owner(module),
            GraphError,
            "returned for stage 0 adds parameters outside the layers: 'scale'; register",
        ),
        (lose, GraphError, "layer 'blocks.0' of stage 0 was removed or changed"),
    ]
    for wrap, kind, text in wrongs:
        with pytest.raises(kind, match=text):
            pipeline(made("captured"), wrap)
    with pytest.raises(GraphError, match="must not change layers or weights that are used several times"):
        zoo.pipeline("tied", zoo.made("tied")[0], devices=["cpu"] * 2, wrap=shared)
    with pytest.raises(ScheduleError, match="several copies of each stage: 4 stages, of which only 2 are different"):
        pipeline(made("row"), lambda module, stage: module, devices=["cpu"] * 2, schedule="chimera")
    with (
        pipeline(made("row"), lambda module, stage: nn.Sequential(module, module)) as pipe,
        pytest.raises(ExecutionError, match="Sequential called the stage module 2 times"),
    ):
        pipe.step(X, target=ZEROS)
