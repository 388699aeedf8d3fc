"""A layer is recomputed only if its gradients are those of no recomputation; else it is refused by name."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import pipesched
from pipesched import Numerics, Pipeline, Search
from pipesched.capture.layered_model import layered
from pipesched.errors import ExecutionError, GraphError, MemoryLimitError
from pipesched.profiling.recompute_refusals import put_refusals
from pipesched.testing import reference_step

X, Y = torch.linspace(-1, 1, 128).reshape(16, 8), torch.linspace(1, -1, 128).reshape(16, 8)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x) * torch.rand(x.shape, generator=self.generator)
        return made


class GradientInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(point).square().sum(), point, create_graph=True)
        made: Tensor = self.linear(x) + slope
        return made


class InPlace(nn.Module):
    """Changes the result of a matrix product in place, which "recompute-cheap" keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = (x @ self.linear.weight).mul_(2).sin()
        return made


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x[None])[0][0]
        return made


class Counting(nn.Module):
    """Counts its calls in an attribute of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(8, 8), SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        made: Tensor = self.linear(x).sin() * self.state.calls
        return made


class Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda x: self.linear(x).sin(), x, use_reentrant=False)
        return made


class Whole(nn.Module):
    """One layer with several modules."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.parts(x)
        return made


BAD: dict[str, tuple[Any, set[str]]] = {
    "count in an object": (Counting, {"recompute", "recompute-cheap", "always"}),
    "own generator": (OwnGenerator, {"recompute", "recompute-cheap", "always"}),
    "RReLU": (lambda: Whole(nn.Linear(8, 8), nn.RReLU()), {"recompute", "recompute-cheap"}),
    "gradient inside": (GradientInside, {"recompute-cheap"}),
    "in place": (InPlace, {"recompute-cheap"}),
    "ReLU in place": (lambda: Whole(nn.Linear(8, 8), nn.ReLU(inplace=True)), {"recompute-cheap"}),
    "GRU": (lambda: Recurrent(nn.GRU), {"recompute-cheap"}),
}
GOOD: dict[str, Any] = {
    "linear": lambda: Whole(nn.Linear(8, 8), nn.Tanh()),
    "dropout": lambda: Whole(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()),
    "batch norm": lambda: Whole(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "checkpoints itself": Checkpointing,
}


def model(make: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), make(), make(), nn.Linear(8, 8))


def pipeline(layers: nn.Module, **options: Any) -> Pipeline:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4, "boundaries": [2]}
    return Pipeline(layers, X[:4], loss_fn=functional.mse_loss, seed=1, **{**given, **options})


def check(pipe: Pipeline, ours: nn.Module, plain: nn.Module) -> None:
    loss = pipe.step(X, target=Y)
    due = reference_step(plain, X, loss_fn=functional.mse_loss, target=Y, num_microbatches=4, seed=1)
    assert torch.equal(loss, due)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch")
@pytest.mark.parametrize("word", ["recompute", "recompute-cheap", "always"])
@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_a_layer_is_recomputed_with_the_bits_of_no_recomputation_or_is_refused(name: str, word: str) -> None:
    make, faults = BAD.get(name, (GOOD.get(name), set()))
    ours, plain = model(make), model(make)
    option: Any = {"1": word, "2": word} if word != "always" else word
    if name == "gradient inside" and TorchVersion(torch.__version__) < "2.13":
        faults = set()  # there, "recompute-cheap" keeps nothing that this layer changes
    if word in faults:
        with pytest.raises(GraphError, match=r"layer '[12]' \(\w+\) does not: it"):
            pipeline(ours, checkpoint=option)
        return
    with pipeline(ours, checkpoint=option) as pipe:
        if name == "gradient inside" and word == "always":
            with pytest.raises(ExecutionError, match="must not compute gradients in its forward"):
                pipe.step(X, target=Y)
            return
        check(pipe, ours, plain)


def test_the_remedy_for_cheap_recomputation_works() -> None:
    with pytest.raises(GraphError, match="choose 'recompute' for this layer"):
        pipeline(model(lambda: Recurrent(nn.GRU)), checkpoint={"1": "recompute-cheap"})
    with pytest.raises(GraphError, match="leave this layer out of checkpoint=, or offload"):
        pipeline(model(OwnGenerator), checkpoint={"1": "recompute"})
    pipeline(model(OwnGenerator), checkpoint={"1": "offload"}).close()


@pytest.mark.parametrize("make", [GOOD["dropout"], OwnGenerator, Counting])
def test_a_trial_leaves_the_layer_as_it_was(make: Any) -> None:
    layers = model(make)
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    seed = torch.get_rng_state()
    try:
        pipeline(layers, checkpoint={"1": "recompute"}).close()
    except GraphError:
        if make is Counting:
            assert layers[1].state.calls == 0
            return
        assert torch.equal(layers[1].generator.get_state(), torch.Generator().manual_seed(3).get_state())
    torch.testing.assert_close(layers.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), seed)
    assert all(parameter.grad is None for parameter in layers.parameters())


class Blocks(nn.Module):
    """Its own code recomputes its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.free = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        for layer in self.free:
            x = layer(x)
        return x


@pytest.mark.parametrize("word", ["recompute", "recompute-cheap"])
def test_a_layer_that_the_model_recomputes_is_not_recomputed_again(word: Any) -> None:
    options: dict[str, Any] = {"boundaries": ["free.0"]}
    with pytest.raises(GraphError, match=r"by the pipeline or by the model, not by both; .* calls 'blocks"):
        pipeline(Blocks(), checkpoint={"blocks.1.0": word}, **options)
    ours, plain = Blocks(), Blocks()
    with pipeline(ours, checkpoint={"free.1": word}, **options) as pipe:
        check(pipe, ours, plain)


class NormedTwice(nn.Module):
    """A BatchNorm that the model itself recomputes, so that its statistics count each batch twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return made


def normed_twice(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), NormedTwice(), nn.Linear(8, 8))
    return model, {"loss_fn": functional.mse_loss, "num_microbatches": 4, **options}


@pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch")
def test_batch_norm_in_the_models_own_checkpoint_is_refused() -> None:
    model, options = normed_twice()
    before = [buffer.clone() for buffer in model.buffers()]
    with (
        Pipeline(model, X[:4], devices=["cpu"] * 2, schedule="1f1b", **options) as pipe,
        pytest.raises(ExecutionError, match=r"both write to buffer 'inner\.1\.num_batches_tracked' of layer '1'"),
    ):
        pipe.step(X, target=Y)
    assert all(map(torch.equal, model.buffers(), before))


def test_batch_norm_of_the_mini_batch_is_right_in_the_models_own_checkpoint() -> None:
    numerics = Numerics(batch_norm="mini-batch")
    model, options = normed_twice()
    plain, _ = normed_twice()
    kept = nn.Sequential(plain[0], copy.deepcopy(plain[1].inner), plain[2])
    with Pipeline(model, X[:4], devices=["cpu"] * 2, schedule="1f1b", numerics=numerics, **options) as pipe:
        loss = pipe.step(X, target=Y)
    for other in (plain, kept):
        assert torch.equal(loss, reference_step(other, X, target=Y, batch_norm="mini-batch", **options))
        assert all(map(torch.equal, model.buffers(), other.buffers()))


def test_a_batch_norm_that_the_plan_recomputes_counts_each_batch_once() -> None:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    options: Any = {"loss_fn": functional.mse_loss, "num_microbatches": 4}
    with Pipeline(model, X[:4], devices=["cpu"] * 2, schedule="1f1b", checkpoint={"1": "recompute"}, **options) as pipe:
        pipe.step(X, target=Y)
    reference_step(plain, X, target=Y, **options)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


class Highest(nn.Linear):
    """Keeps its largest input in a buffer, which not every call changes."""

    highest: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("highest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.highest.copy_(torch.maximum(self.highest, x.abs().max()))
        return super().forward(x / self.highest.clone())


def test_a_buffer_that_the_first_call_writes_without_a_change() -> None:
    ours, plain = model(Highest), model(Highest)
    x = X * torch.linspace(0.1, 9, 16)[:, None]
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "seed": 1}
    checkpoint = {"1": "recompute", "2": "recompute"}
    with Pipeline(ours, X[:4], devices=["cpu"] * 2, schedule="gpipe", checkpoint=checkpoint, **options) as pipe:
        functional.mse_loss(pipe(x), Y).backward()
    reference_step(plain, x, target=Y, **options)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert all(map(torch.equal, ours.buffers(), plain.buffers()))


class Calls(nn.Linear):
    """Multiplies by the number of its calls."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class InCheckpoint(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))
        return made


@pytest.mark.parametrize("kind", [Calls, OwnGenerator])
def test_state_in_the_models_own_checkpoint_is_refused(kind: Any) -> None:
    with pytest.raises(GraphError, match=rf"inside torch.utils.checkpoint.*layer 'middle' \({kind.__name__}\) keeps"):
        pipeline(InCheckpoint(kind()), boundaries=["last"])


@pytest.mark.parametrize("word", ["always", "except_last"])
def test_checkpointed_stages_may_contain_checkpoints_of_the_model(word: Any) -> None:
    torch.manual_seed(0)
    ours, plain = (InCheckpoint(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    with pipeline(ours, boundaries=["last"], checkpoint=word) as pipe:
        check(pipe, ours, plain)


# ---- searches --------------------------------------------------------------------------------------------------------


def refusals(layers: nn.Module) -> dict[str, list[str]]:
    known = layered(layers, ((X[:4],), {}))
    graph = known.graph({})
    put_refusals(known, [graph])
    return dict(graph.nodes(data="refuses"))


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch")
@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_a_search_knows_which_layers_are_refused(name: str) -> None:
    """All layers of a kind, although only one is tried."""
    make, faults = BAD.get(name, (GOOD.get(name), set()))
    due = [word for word in ("recompute", "always") if word in faults]
    assert refusals(model(make)) == {"0": [], "1": due, "2": due, "3": []}


def test_a_search_knows_the_layers_that_the_model_recomputes_itself() -> None:
    found = refusals(Blocks())
    assert {name for name, words in found.items() if words == ["recompute"]} == {
        name for name in found if name.startswith("blocks")
    }
    assert found["free.1"] == []


class Sharing(nn.Module):
    """Its layers pass a tensor through an object, not as an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = SimpleNamespace(scale=None)
        self.layers = nn.ModuleList(Scaled(shared, sets=number == 1) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    def __init__(self, shared: Any, *, sets: bool) -> None:
        super().__init__()
        self.linear, self.shared, self.sets = nn.Linear(8, 8), shared, sets

    def forward(self, x: Tensor) -> Tensor:
        if self.sets:
            self.shared.scale = x.sigmoid()
        made: Tensor = self.linear(x)
        return made if self.shared.scale is None else made * self.shared.scale


def test_a_search_knows_the_layers_that_share_tensors_through_an_object() -> None:
    """A layer has the refusal "recompute" exactly if construction refuses to recompute it."""
    found = refusals(Sharing())
    for name, words in found.items():
        try:
            pipeline(Sharing(), boundaries=[1], checkpoint={name: "recompute"}).close()
        except GraphError:
            assert "recompute" in words
        else:
            assert words == []


class Wide(nn.Module):
    """A layer with large activations; ``stateful``: it draws from a generator of its own."""

    def __init__(self, *, stateful: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.generator = torch.Generator().manual_seed(3) if stateful else None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x).tanh()
        if self.generator is not None:
            inner = inner * torch.rand(inner.shape, generator=self.generator)
        made: Tensor = x + self.down(inner)
        return made


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Wide(stateful=bool(number % 2)) for number in range(8)])


def with_hook() -> nn.Module:
    """A layer whose hook draws from a generator of its own."""
    layer, generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)
    layer.register_forward_hook(lambda module, args, output: output * torch.rand(8, generator=generator))
    return layer


class Acting(nn.Module):
    """A layer that calls a function or a module that it keeps in an attribute."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), [act]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.act[0](self.linear(x))
        return made


def drawing() -> Any:
    generator = torch.Generator().manual_seed(3)
    return lambda x: x * torch.rand(8, generator=generator)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: Wide(stateful=False), lambda: Wide(stateful=True)),
        (lambda: nn.Linear(8, 8), with_hook),
        (lambda: Acting(torch.tanh), lambda: Acting(drawing())),
        (lambda: Acting(nn.Tanh()), lambda: Acting(nn.RReLU())),
        (lambda: Acting(functional.relu), lambda: Acting(functools.partial(functional.rrelu, training=True))),
    ],
)
def test_each_layer_is_tried_unless_it_behaves_like_another(first: Any, second: Any) -> None:
    """Two layers of the same class with the same settings: only the second must not be recomputed."""
    torch.manual_seed(0)
    layers = nn.Sequential(first(), second(), nn.Linear(8, 8))
    with pytest.raises(GraphError, match=r"layer '1' \(\w+\) does not"):
        pipeline(layers, boundaries=[2], checkpoint={"0": "recompute", "1": "recompute"})
    with pipeline(layers, boundaries=[2], checkpoint={"0": "recompute"}) as pipe:
        pipe.step(X, target=Y)


def test_no_search_under_a_memory_limit_recomputes_a_layer_that_refuses() -> None:
    """From limits without recomputation down to limits that no plan meets. Each plan runs."""
    x, y = torch.randn(2, 256, 8)
    profile = pipesched.profile(wide(), x[:32], rows=[32], thorough=False)
    options: dict[str, Any] = {"num_ranks": 2, "batch_size": 256, "num_microbatches": 8, "schedule": "1f1b"}
    options |= {"boundaries": [4]}
    chosen = []
    for limit in (400_000, 220_000, 180_000, 160_000, 140_000, 60_000):
        try:
            plan = pipesched.tune(profile, memory_limit_bytes=limit, all_ranks=True, **options)
        except MemoryLimitError:
            break
        assert plan.checkpoint == "never" or not {"1", "3", "5", "7"} & plan.checkpoint.keys()
        chosen.append(plan.checkpoint)
        with Pipeline(wide(), x[:32], loss_fn=functional.mse_loss, devices=["cpu"] * 2, plan=plan) as pipe:
            pipe.step(x, target=y)
    assert chosen[0] == "never"
    assert any(one != "never" for one in chosen)
    assert limit < 180_000


def test_a_pipeline_under_a_memory_limit_recomputes_no_layer_that_refuses() -> None:
    x, y = torch.randn(2, 256, 8)
    found = set()
    for limit in (220_000, 180_000):
        with Pipeline(
            wide(),
            x[:32],
            loss_fn=functional.mse_loss,
            devices=["cpu"] * 2,
            schedule="1f1b",
            num_microbatches=8,
            boundaries=[4],
            search=Search(memory_limit_bytes=limit, batch_size=256),
        ) as pipe:
            checkpoint = pipe.plan.checkpoint
            found |= set() if checkpoint == "never" else set(checkpoint)
            pipe.step(x, target=y)
    assert found
    assert not found & {"1", "3", "5", "7"}
