"""Making a pipeline, and measuring, leave the model as it was: the whole object, compared before and after."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipesched
from pipesched import Pipeline
from pipesched.errors import GraphError
from pipesched.model.state_guard import names_of, untouched
from pipesched.tensors.memory_tracker import Ledger
from pipesched.testing import reference_step
from tests.support import branching_models as any_models
from tests.support import odd_models
from tests.support.models import Scaled, TransformerBlock, assert_as, mixed_model
from tests.support.odd_models import Blocks, made, square
from tests.support.places import place
from tests.support.rank_processes import Ranks
from tests.support.whole_state import check_nothing_changes, unchanged

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::UserWarning")]

Case = tuple[Callable[[], nn.Module], Any, Any, Any]


def transformer() -> nn.Sequential:
    return nn.Sequential(*(TransformerBlock(8) for _ in range(3)))


def any_model(name: str) -> Case:
    model, _, _, target = any_models.made(name, 4)
    args, kwargs, _ = any_models.inputs_of(name, 4)
    return lambda: model, kwargs or args, None if target is None else any_models.square, target


class Kept(Blocks):
    """Sets up a mask and a configuration in its first forward, and its layers grow nested lists and draw numbers."""

    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.config, self.seen = SimpleNamespace(kind=None), {"rows": []}
        self.generator, self.table = torch.Generator().manual_seed(5), torch.ones(8)

        def count(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            self.seen["rows"].append(len(output))
            self.table.mul_(0.5)
            return output * torch.rand(8, generator=self.generator)

        for block in self.blocks:
            block.register_forward_hook(count)

    def after(self, number: int, x: Tensor) -> Tensor:
        if number == 3:
            if self.mask is None:
                self.mask, self.config.kind = torch.ones(8, 8).tril(), "masked"
            x = x @ self.mask
        return x


ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CASES: dict[str, Callable[[], Case]] = {
    "mixed": lambda: (mixed_model, ROWS, nn.functional.cross_entropy, torch.arange(4)),
    "transformer": lambda: (transformer, ROWS, odd_models.square, ROWS),
    "custom function": lambda: (lambda: nn.Sequential(*(Scaled(8) for _ in range(3))), ROWS, odd_models.square, ROWS),
    "kept": lambda: (Kept, ROWS, odd_models.square, ROWS),
    "odd": lambda: (odd_models.Blocks, ROWS, odd_models.square, ROWS),
    **{name: lambda name=name: any_model(name) for name in ("unet", "tied", "towers", "recurrent")},
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CASES)
def test_the_whole_model_is_as_it_was(name: str) -> None:
    make, sample, loss_fn, target = CASES[name]()
    torch.manual_seed(0)
    check_nothing_changes(make(), sample, loss_fn, target, 4)


# ---- weights that a layer reaches by itself ------------------------------------------------------------------------

TEXT = torch.arange(20).view(4, 5) % 12


class Head(nn.Module):
    """The embedding as the head's weight; how the head gets it, others say."""

    def __init__(self, embed: nn.Embedding, way: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(12))
        if way == "reference":
            self.weights = [embed.weight]
        if way == "closure":
            self.product = lambda x: functional.linear(x, embed.weight)

    def forward(self, x: Tensor, embed: nn.Embedding | None = None) -> Tensor:
        if hasattr(self, "product"):
            return self.product(x) + self.bias
        return functional.linear(x, embed.weight if embed is not None else self.weights[0], self.bias)


class Reaches(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.way = nn.Embedding(12, 8), way
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = Head(self.embed, way)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x, self.embed if self.way == "argument" else None)


def words(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", ["argument", "reference", "closure"])
def test_a_weight_that_another_layer_reaches_gets_no_gradient(way: str) -> None:
    check_nothing_changes(made(lambda: Reaches(way)), TEXT, words, TEXT, 4)


CUT: dict[str, Any] = {"loss_fn": words, "num_microbatches": 2, "schedule": "1f1b", "boundaries": ["blocks.2"]}
SAID = r"'head' \(stage 1, rank 1\) uses 'embed.weight' of rank 0 through a module or a reference; pass the weight to"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("way", ["argument", "reference", "closure"])
def test_a_weight_of_another_rank_that_a_layer_reaches_is_named(way: str) -> None:
    with pytest.warns(UserWarning, match=f"{SAID} .* up to rounding"):
        Pipeline(made(lambda: Reaches(way)), TEXT, devices=["cpu"] * 2, **CUT).close()


def reach(group: Any) -> None:
    for way in ("argument", "reference", "closure"):
        with pytest.raises(GraphError, match=SAID):
            Pipeline(made(lambda way=way: Reaches(way)), TEXT, **place(group), **CUT)


def test_a_layer_over_a_mesh_cannot_reach_a_stale_weight_of_another_rank(ranks: Ranks) -> None:
    ranks.run(2, reach)


def test_a_loss_that_reaches_the_models_weights_leaves_no_gradients() -> None:
    model, scale = made(Blocks), nn.Linear(8, 8)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return square(scale(output), target) + model.blocks[5].down.weight.pow(2).sum()

    with unchanged(scale, "the loss's own"):
        check_nothing_changes(model, ROWS, loss, ROWS, 4)


# ---- weights that forwards write to --------------------------------------------------------------------------------


class Rescales(Blocks):
    """Divides weights when it begins to evaluate, and multiplies them when it begins to train, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.rescaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.rescaled == self.training:
            with torch.no_grad():
                for number, block in enumerate(self.blocks):
                    block.down.weight.mul_(3.0**number if self.training else 3.0**-number)
            self.rescaled = not self.training
        return super().forward(x)


def test_a_model_that_rescales_its_weights_when_its_mode_changes_trains_as_the_loop() -> None:
    own, plain = made(Rescales), made(Rescales)
    options: Any = {"loss_fn": square, "num_microbatches": 2, "seed": 5}
    with unchanged(own, "Pipeline", but=": version"):  # its own code counts on
        pipe = Pipeline(own, ROWS[:2], devices=["cpu"] * 3, **options)
    with pipe:
        for step in range(2):
            due = reference_step(plain, ROWS, target=ROWS, step=step, **options)
            assert torch.equal(pipe.step(ROWS, target=ROWS), due)
            assert_as(pipe, plain)
        pipe.eval()
        with pytest.raises(
            GraphError, match=r"a pipeline may run only in a mode .* captured; .* call model\.eval\(\) before"
        ) as caught:
            pipe.evaluate(ROWS, target=ROWS)
        assert "after eval() writes to 6 weights, such as 'blocks.0.down.weight'" in str(caught.value.__cause__)
        pipe.train()
        assert torch.equal(pipe.step(ROWS, target=ROWS), reference_step(plain, ROWS, target=ROWS, step=2, **options))


def test_a_model_that_is_to_rescale_its_weights_first_is_refused_by_their_names() -> None:
    model = made(Rescales).eval()
    with (
        unchanged(model, "Pipeline", but=": version"),
        pytest.raises(
            GraphError, match=r"Rescales after eval\(\) writes to 6 weights, such as 'blocks\.0\.down\.weight'"
        ),
    ):
        Pipeline(model, ROWS, devices=["cpu"] * 2)
    with torch.no_grad():
        due = model(ROWS)
    with Pipeline(model, ROWS, devices=["cpu"] * 2, num_microbatches=1) as pipe, torch.no_grad():
        assert torch.equal(pipe.forward(ROWS), due)


class Renormed(nn.Module):
    """Words of which longer vectors are cut when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(12, 8, max_norm=0.1), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return x


class Clamped(nn.Linear):
    """Keeps its weights small, by way of .data, which no version counts."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class Replaced(nn.Linear):
    """Gives its weights other memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.01, 0.01)
        return super().forward(x)


class InBlocks(nn.Module):
    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


WRITERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "renormed": (Renormed, TEXT),
    "clamped": (lambda: InBlocks(Clamped), ROWS),
    "replaced": (lambda: InBlocks(Replaced), ROWS),
    "renormed in a row": (lambda: nn.Sequential(nn.Embedding(12, 8, max_norm=0.1), nn.Linear(8, 8)), TEXT),
}


def of_all(output: Tensor, target: Tensor) -> Tensor:
    return output.pow(2).mean() + 0 * target.sum()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WRITERS)
def test_weights_that_forwards_write_to_are_put_back(name: str) -> None:
    make, sample = WRITERS[name]
    model = made(make)
    before = {name: (id(weight), weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = pipesched.profile(model, sample, rows=[4])
        Pipeline(model, sample, loss_fn=of_all, devices=["cpu"] * 2).close()
        pipesched.tune(
            model,
            sample,
            profile=known,
            devices=["cpu"] * 2,
            batch_size=8,
            num_microbatches=2,
            confirm=1,
            loss_fn=of_all,
            target=torch.zeros(4),
        )
    for name, weight in model.named_parameters():
        assert (id(weight), weight.data_ptr()) == before[name][:2]
        assert torch.equal(weight, before[name][2]), name


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("kind", "weight"), [(Clamped, "blocks.0.weight"), (Replaced, "blocks.0.weight")])
def test_a_warning_names_the_weights_that_were_restored(kind: type[nn.Linear], weight: str) -> None:
    with pytest.warns(
        UserWarning, match=f"forwards of InBlocks write to 4 weights, such as '{weight}'; the old values"
    ):
        pipesched.graph_of(InBlocks(kind), ROWS, measured=False)


def test_only_what_is_written_is_copied() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    kept, ledger = [weight.clone() for weight in model.parameters()], Ledger()
    with ledger.watching(), untouched(model, True) as changed, torch.no_grad():
        model[3].weight.data.mul_(2)
        model[5].weight.view(-1)[:3] = 0
    assert names_of(model, changed) == ["3.weight", "5.weight"]
    assert all(map(torch.equal, model.parameters(), kept))
    assert ledger.peak <= 3 * model[0].weight.nbytes


def test_a_dropped_pipeline_ends_without_the_garbage_collector() -> None:
    gc.collect()
    threads = threading.active_count()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        options: Any = {"devices": ["cpu"] * 2, "schedule": "1f1b", "loss_fn": functional.mse_loss}
        pipe = Pipeline(model, torch.randn(2, 4), **options)
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
        dropped = weakref.ref(pipe)
        del pipe
        assert dropped() is None
    finally:
        gc.enable()
    assert threading.active_count() == threads
