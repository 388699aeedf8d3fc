"""compile=: layers that run through torch.compile, with the gradients of eager code within rounding."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from pipesched import Microbatch, Numerics, Pipeline
from pipesched.errors import InputError
from pipesched.tensors.keyed_random import Key, KeyedRandom
from pipesched.testing import reference_step
from tests.support import added_losses
from tests.support import branching_models as zoo
from tests.support.models import assert_equal_bits, gradients, mixed_model
from tests.support.torch_versions import compiles_in_threads

pytestmark = [pytest.mark.timeout(120), compiles_in_threads]

TRACED = {"backend": "aot_eager"}  # everything but the code generation, which takes long


def made(kind: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = (
        nn.Sequential(*(layer for _ in range(4) for layer in (zoo.Block(), nn.BatchNorm1d(8))))
        if kind == "row"
        else zoo.made(kind)[0]
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model


def trained(kind: str, dropout: float, compile: Any, rows: tuple[int, ...] = (12, 7), **options: Any) -> nn.Module:
    model = made(kind, dropout)
    name = "residual" if kind == "row" else kind
    choices = {"loss_fn": zoo.square, "devices": ["cpu"] * 2, "num_microbatches": 3, "seed": 3}
    choices |= {"schedule": "1f1b", **options}
    with Pipeline(model, zoo.made(name, 3)[1], compile=compile, **choices) as pipe:
        for count in rows:
            _, args, _, target = zoo.made(name, count)
            pipe.step(*args, target=target)
    return model


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "always"), ("zb-h1", "never")])
@pytest.mark.parametrize("kind", ["row", "unet"])
def test_compiled_layers_have_the_gradients_of_eager_ones(kind: str, schedule: str, checkpoint: str) -> None:
    """Uneven micro-batches, buffers, skips, a backward that is split."""
    compiled = trained(kind, 0.0, TRACED, schedule=schedule, checkpoint=checkpoint)
    eager = made(kind)
    for step, count in enumerate((12, 7)):
        _, args, _, target = zoo.made("residual" if kind == "row" else kind, count)
        reference_step(eager, *args, target=target, loss_fn=zoo.square, num_microbatches=3, seed=3, step=step)
    torch.testing.assert_close(gradients(compiled), gradients(eager))
    torch.testing.assert_close(dict(compiled.named_buffers()), dict(eager.named_buffers()))


def test_random_numbers_of_compiled_layers_do_not_depend_on_the_plan() -> None:
    one = trained("row", 0.3, TRACED, schedule="1f1b", boundaries=[2])
    other = trained("row", 0.3, TRACED, schedule="zb-h1", boundaries=[5], checkpoint="always")
    assert_equal_bits(gradients(one), gradients(other))
    assert not torch.equal(one[0].up.weight.grad, trained("row", 0.0, TRACED, boundaries=[2])[0].up.weight.grad)


def test_numbers_drawn_while_another_rank_compiles_are_the_usual_ones() -> None:
    """torch puts the generators that all threads share back as they were before it compiled."""
    random, compiling, drawing = KeyedRandom(torch.device("cpu")), threading.Event(), threading.Event()

    def drawn(beside: threading.Thread) -> Any:
        def draw() -> torch.Tensor:
            drawing.set()
            beside.join(30)
            return torch.rand(8)

        random.enter(Key(0, 0, 0), "layer")
        return random.keyed(draw)[0]

    def backend(graph: Any, inputs: Any) -> Any:
        compiling.set()
        drawing.wait(0.5)  # as long as somebody compiles nobody draws
        return graph.forward

    other = threading.Thread(target=lambda: torch.compile(torch.sin, backend=backend)(torch.ones(2)))
    other.start()
    compiling.wait(30)
    meanwhile = drawn(other)
    assert torch.equal(meanwhile, drawn(other))


def test_equal_layers_and_shapes_are_compiled_once() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    trained("unet", 0.0, {"backend": backend, "dynamic": False}, rows=(12, 12, 12))
    assert len(graphs) == 3  # for the first layer, whose input needs no gradient, the others like it, and the wide ones


def test_layers_of_many_forms_are_all_compiled() -> None:
    """torch compiles one code for eight cases, and one of its own calls all modules that are its own."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, x = mixed_model(), torch.randn(8, 8)
    with Pipeline(
        model,
        x[:2],
        loss_fn=zoo.square,
        devices=["cpu"],
        num_microbatches=4,
        compile={"backend": backend},
        schedule="1f1b",
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=x[:, :4])
    assert len(graphs) == 12


def test_what_is_no_way_to_compile_says_so() -> None:
    for compile, options, text in (
        ("aot_eager", {}, "compile= must be a bool, or a dict of arguments for torch.compile; got 'aot_eager'"),
        (True, {"numerics": Numerics(batch_norm="mini-batch")}, "cannot intercept batch_norm calls inside compiled la"),
    ):
        with pytest.raises(InputError, match=text):
            Pipeline(made("row"), zoo.FLOATS[:3], devices=["cpu"], loss_fn=zoo.square, compile=compile, **options)


def test_compiled_layers_add_their_losses() -> None:
    model, expected = added_losses.row(), added_losses.row()
    for one in (*model, *expected):
        if isinstance(one, added_losses.Experts):
            one.drop.p = 0.0
    with added_losses.pipeline(model, {"devices": ["cpu"] * 2}, schedule="1f1b", compile={"backend": "eager"}) as pipe:
        torch.testing.assert_close(pipe.step(added_losses.X, target=added_losses.Y), added_losses.looped(expected))
        assert list(pipe.metrics) == ["added_loss", "z"]
    torch.testing.assert_close(gradients(model), gradients(expected))


class Branching(nn.Module):
    """A model whose code between layers asks whether it is compiled."""

    def __init__(self, entered: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.entered = entered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.entered()
        if torch.compiler.is_compiling():
            x = x * 2
        return self.last(x)


def test_code_between_layers_does_not_run_while_another_rank_compiles() -> None:
    """The first rank's compiler waits until the second rank has begun its code, which it may not do meanwhile."""
    begun = threading.Event()
    met = []

    def compiled_slowly(graph: Any, inputs: Any) -> Any:
        begun.clear()
        met.append(begun.wait(0.2))
        return graph.forward

    torch.manual_seed(0)
    model = Branching(begun.set)
    expected = Branching(lambda: None)
    expected.load_state_dict(model.state_dict())
    parts = [Microbatch(torch.randn(rows, 8), target=torch.zeros(rows, 8)) for rows in (2, 3, 4, 5)]
    options: Any = {"loss_fn": nn.functional.mse_loss, "devices": ["cpu"] * 2, "schedule": "1f1b"}
    options |= {"boundaries": ["last"], "numerics": Numerics(loss_reduction="mean")}
    with (
        Pipeline(expected, torch.randn(2, 8), **options) as plain,
        Pipeline(model, torch.randn(2, 8), compile={"backend": compiled_slowly, "dynamic": False}, **options) as pipe,
    ):
        assert torch.allclose(pipe.step(microbatches=parts), plain.step(microbatches=parts))
    assert len(met) > 2
    assert not any(met)
