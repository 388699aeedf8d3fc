"""State that a forward makes or exchanges, such as buffers and weights: it trains as in a loop, or is refused."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from pipesched import Pipeline
from pipesched.errors import GraphError
from pipesched.program.checkpoint_options import CheckpointMode
from pipesched.testing import reference_step
from tests.support import places
from tests.support.odd_models import FLOATS, InBlocks, check, made, square, state
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(120)


class Calls(nn.Module):
    """Six linear layers; ``piece`` is called before the layers whose numbers are in ``at``."""

    def __init__(self, piece: nn.Module, *at: int) -> None:
        super().__init__()
        self.layers, self.piece, self.at = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), piece, at

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.at:
                x = self.piece(x)
            x = layer(x).tanh()
        return x


# ---- buffers that a layer replaces or makes ------------------------------------------------------------------------


class Range(nn.Module):
    """Keeps a running maximum in a buffer that each forward replaces; subclasses replace it in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("high", torch.zeros(1))

    def put(self, value: Tensor) -> None:
        self.high = value

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.put(self.high * 0.9 + x.detach().max() * 0.1)
        return x / (1 + self.high)


class ByTable(Range):
    def put(self, value: Tensor) -> None:
        self._buffers["high"] = value


class ByRegistering(Range):
    def put(self, value: Tensor) -> None:
        self.register_buffer("high", value, persistent=False)


class ByDeleting(Range):
    def put(self, value: Tensor) -> None:
        del self.high
        self.register_buffer("high", value)


class InEvaluation(Range):
    def put(self, value: Tensor) -> None:
        if not self.training:
            self.high = value


class InTraining(Range):
    def put(self, value: Tensor) -> None:
        if self.training:
            self.high = value


REPLACING = (Range, ByTable, ByRegistering, ByDeleting, InEvaluation, InTraining)
HOW: dict[str, dict[str, Any]] = {
    "1f1b": {"schedules": ("1f1b",)},
    "zb-h1": {"schedules": ("zb-h1",)},
    "recomputed": {"schedules": ("1f1b",), "checkpoint": "always"},
}


@pytest.mark.one_in(27)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", REPLACING)
@pytest.mark.parametrize("at", [(1,), (1, 2), (0, 5)], ids=["once", "twice", "far apart"])
def test_a_buffer_that_a_layer_replaces(kind: type[Range], at: tuple[int, ...], how: str) -> None:
    check(lambda: Calls(kind(), *at), FLOATS, stages=2, **HOW[how])


def test_all_calls_of_a_layer_that_replaces_its_buffer_are_in_one_stage() -> None:
    with pipeline(Calls(Range(), 0, 4)) as pipe:
        first, second = pipe.plan.stages
        assert "piece" in first
        assert not any(name.startswith("piece") for name in second)


class Later(Range):
    """Begins to replace its buffer after the pipeline is made."""

    on = False

    def put(self, value: Tensor) -> None:
        if self.on:
            self.high = value


def test_calls_in_two_stages_that_begin_to_replace_a_buffer_are_refused() -> None:
    model = Calls(Later(), 0, 5)
    with pipeline(model, boundaries=["layers.2"]) as pipe:
        pipe.step(FLOATS, target=FLOATS)
        model.piece.on = True
        with pytest.raises(GraphError, match="replaced the buffer 'high' of Later by different values"):
            pipe.step(FLOATS, target=FLOATS)


class Table(nn.Module):
    """Makes a table in the first forward; ``hold`` stores it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def table_of(self, x: Tensor) -> Tensor:
        return torch.linspace(0.5, 1.5, x.shape[-1])

    def hold(self, table: Tensor) -> None:
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "table", None) is None:
            self.hold(self.table_of(x))
        return self.linear(x) * self.table


class NotSaved(Table):
    def hold(self, table: Tensor) -> None:
        self.register_buffer("table", table, persistent=False)


class Announced(NotSaved):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)


class Assigned(Announced):
    def hold(self, table: Tensor) -> None:
        self.table = table


class Plain(Table):
    def hold(self, table: Tensor) -> None:
        self.table = table


class OfFirstBatch(Table):
    """Its table depends on the first micro-batch, as in layers that normalise by the first data they see."""

    def table_of(self, x: Tensor) -> Tensor:
        return x.detach().std(0)


TABLES = (Table, NotSaved, Announced, Assigned, Plain)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [*TABLES, OfFirstBatch])
def test_a_table_that_a_layer_makes_in_its_first_forward(kind: type[Table], how: str) -> None:
    check(lambda: InBlocks(kind), FLOATS, **HOW[how])
    check(lambda: nn.Sequential(*(kind() for _ in range(4))), FLOATS, **HOW[how])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", TABLES)
def test_stages_that_call_one_layer_each_make_its_table(kind: type[Table]) -> None:
    check(lambda: Calls(kind(), 0, 2, 5), FLOATS, stages=4)
    with pipeline(Calls(kind(), 0, 2, 5), boundaries=["layers.3"]) as pipe:
        assert [[name for name in names if "piece" in name] for names in pipe.plan.stages] == [
            ["piece", "piece#2"],
            ["piece#3"],
        ]


def test_one_stage_calls_a_layer_whose_table_is_of_the_first_batch() -> None:
    check(lambda: Calls(OfFirstBatch(), 0, 5), FLOATS, stages=2)


def test_the_first_batch_fills_the_table_and_not_the_sample() -> None:
    own, plain = made(lambda: InBlocks(OfFirstBatch)), made(lambda: InBlocks(OfFirstBatch))
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5}
    with Pipeline(own, FLOATS[:2] * 3 + 1, devices=["cpu"] * 3, schedule="1f1b", **options) as pipe:
        assert torch.equal(pipe.step(FLOATS, target=FLOATS), reference_step(plain, FLOATS, target=FLOATS, **options))
        assert torch.equal(own.blocks[1].table, plain.blocks[1].table)


class FillsOnce(Table):
    """A plain flag tells whether its buffer is filled, and a plain list counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(8))
        self.filled, self.seen, self.largest = False, [0], 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.filled:
            self.table, self.filled = x.detach().std(0), True
        self.seen.append(len(x))
        self.largest = max(self.largest, float(x.detach().max()))
        return self.linear(x) * self.table * (1 + 0.1 * len(self.seen)) / (1 + self.largest)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", HOW)
def test_attributes_of_layers_also_where_stages_run_again(how: str) -> None:
    check(lambda: InBlocks(FillsOnce), FLOATS, steps=3, **HOW[how])
    check(lambda: nn.Sequential(*(FillsOnce() for _ in range(4))), FLOATS, steps=3, **HOW[how])


def test_attributes_of_layers_also_where_layers_run_again() -> None:
    again: dict[str, Any] = {"blocks.0": "recompute", "blocks.2": "recompute-cheap", "blocks.3": "offload"}
    check(lambda: InBlocks(FillsOnce), FLOATS, steps=3, boundaries=["blocks.2"], stages=2, checkpoint=again)


class Grows(nn.Module):
    """A table of cosines that grows with the length of the sequence."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if length:
            self.register_buffer("cosines", self.cosines_of(length), persistent=False)

    def cosines_of(self, length: int) -> Tensor:
        return torch.cos(torch.arange(length)[:, None] * torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        if len(getattr(self, "cosines", ())) < x.shape[1]:
            self.register_buffer("cosines", self.cosines_of(x.shape[1]), persistent=False)
        return self.linear(x) * self.cosines[: x.shape[1]]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("length", [0, 2, 4])
@pytest.mark.parametrize("at", [(1,), (0, 5)], ids=["once", "twice"])
def test_a_table_that_grows_with_longer_sequences(length: int, at: tuple[int, ...]) -> None:
    own, plain = (made(lambda: Calls(Grows(length), *at)) for _ in range(2))
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5}
    sample = torch.randn(2, 3, 8)
    with Pipeline(own, sample, devices=["cpu"] * 3, schedule="1f1b", **options) as pipe:
        for step, tokens in enumerate((3, 7, 5, 9)):
            x = torch.randn(8, tokens, 8, generator=torch.Generator().manual_seed(step))
            due = reference_step(plain, x, target=x, step=step, **options)
            assert torch.equal(pipe.step(x, target=x), due)
            assert all(torch.equal(value, state(own)[name]) for name, value in state(plain).items())


class Running(Table):
    """Changes what its first forward has made."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x) - self.mean


@pytest.mark.parametrize("model", [lambda: InBlocks(Running), lambda: nn.Sequential(Running(), Running())])
def test_a_made_buffer_that_later_forwards_change_must_be_there_before(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(GraphError, match=r"a buffer that forwards change must exist.*mean.*call model\(sample\) once"):
        pipeline(model())

    def settled() -> nn.Module:
        own = model()
        own(FLOATS[:2])
        return own

    check(settled, FLOATS, stages=2)


def pipeline(model: nn.Module, **options: Any) -> Pipeline:
    given: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "seed": 5, **options}
    return Pipeline(model, FLOATS[:2], loss_fn=square, devices=["cpu"] * 2, **given)


# ---- attributes that the code between layers sets ------------------------------------------------------------------


class Between(Calls):
    """Its own code makes the table of ``kind`` and uses it after each layer."""

    def __init__(self, kind: type[Table]) -> None:
        super().__init__(nn.Identity())
        self.kind = kind
        if kind in (Announced, Assigned):
            self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if getattr(self, "table", None) is None:
                self.kind.hold(self, self.kind.table_of(self, x))  # type: ignore[arg-type]
            x = layer(x).tanh() * self.table
        return x


@pytest.mark.one_in(9)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_the_code_between_layers_makes(kind: type[Table], how: str) -> None:
    check(lambda: Between(kind), FLOATS, **HOW[how])
    own, plain = Between(kind), Between(kind)
    with pipeline(own) as pipe:
        pipe.step(FLOATS, target=FLOATS)
    plain(FLOATS)
    assert own.state_dict().keys() == plain.state_dict().keys()


def test_values_of_the_first_batch_are_refused_between_layers() -> None:
    with pytest.raises(GraphError, match=r"must not keep values of the first batch.*'table'.*call model\(batch\) once"):
        pipeline(Between(OfFirstBatch))

    def settled() -> nn.Module:
        own = Between(OfFirstBatch)
        own(FLOATS)
        return own

    check(settled, FLOATS)


class Noise(Table):
    def table_of(self, x: Tensor) -> Tensor:
        return torch.rand(8)


def test_random_values_of_the_first_forward_are_refused_between_layers() -> None:
    with pytest.raises(GraphError, match="must not keep values of the first batch"):
        pipeline(Between(Noise))


# ---- weights that a forward makes or exchanges ---------------------------------------------------------------------


class Makes(nn.Module):
    """Makes a layer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def change(self) -> None:
        if not hasattr(self, "more"):
            self.more = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return getattr(self, "more", nn.Identity())(self.linear(x))


class MakesWeight(Makes):
    def change(self) -> None:
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(8))


class Exchanges(Makes):
    """Exchanges a layer, once, for a new one with the old weights."""

    def change(self) -> None:
        if not hasattr(self, "settled"):
            old, self.linear, self.settled = self.linear, nn.Linear(8, 8), True
            self.linear.weight, self.linear.bias = old.weight, old.bias


class MakesBetween(Calls):
    """The model's own code does this before its layers run."""

    def __init__(self, kind: type[Makes]) -> None:
        super().__init__(nn.Identity(), 3)
        self.kind, self.linear = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.kind.forward(self, x))  # type: ignore[arg-type]

    def change(self) -> None:
        self.kind.change(self)  # type: ignore[arg-type]


MAKING: dict[str, Callable[[type[Makes]], nn.Module]] = {
    "in a layer": lambda kind: Calls(kind(), 2),
    "in a row": lambda kind: nn.Sequential(*(kind() for _ in range(4))),
    "between layers": MakesBetween,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "where"),
    [*product([Makes, MakesWeight], MAKING), (Exchanges, "in a row")],
)
def test_weights_that_the_first_forward_makes_must_be_there_before(kind: type[Makes], where: str) -> None:
    model = MAKING[where](kind)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(GraphError, match=r"must keep the modules and weights.*call model\(sample\) once before"):
        pipeline(model)
    assert before == {name: id(module) for name, module in model.named_modules()}

    def settled() -> nn.Module:
        own = MAKING[where](kind)
        own(FLOATS[:2])
        return own

    check(settled, FLOATS, stages=2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["in a layer", "between layers"])
def test_layers_that_the_first_forward_exchanges_with_the_same_weights(where: str) -> None:
    check(lambda: MAKING[where](Exchanges), FLOATS, stages=2)


class Settles(Calls):
    """Exchanges all its layers in the first forward, and keeps their weights."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), 4)
        self.norm = nn.BatchNorm1d(8)
        self.settled = False

    def forward(self, x: Tensor) -> Tensor:
        for number, old in enumerate(() if self.settled else list(self.layers)):
            self.layers[number] = nn.Linear(8, 8)
            self.layers[number].weight, self.layers[number].bias = old.weight, old.bias
        self.settled = True
        return super().forward(self.norm(x))


def test_modules_that_the_first_forward_exchanges_with_the_same_weights() -> None:
    model = Settles()
    weights = dict(model.named_parameters())
    state = torch.get_rng_state()
    pipeline(model).close()
    assert torch.equal(state, torch.get_rng_state())
    assert model.norm.num_batches_tracked == 0
    assert all(weights[name] is parameter for name, parameter in model.named_parameters())
    check(Settles, FLOATS, stages=2)


class Temporary(Makes):
    def forward(self, x: Tensor) -> Tensor:
        return nn.LayerNorm(8)(nn.GELU()(self.linear(x)))


def test_modules_that_a_layer_makes_for_one_forward() -> None:
    check(lambda: InBlocks(Temporary), FLOATS)


# ---- other weights -------------------------------------------------------------------------------------------------


class Delta(nn.Module):
    """Calls a layer with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.delta = nn.Linear(8, 8), nn.Parameter(torch.full((8, 8), 0.1))

    def weights(self) -> dict[str, Tensor]:
        return {"weight": self.core.weight + self.delta}

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.core, self.weights(), (x,))


class Scaled(Delta):
    def weights(self) -> dict[str, Tensor]:
        return {name: own * 0.5 for name, own in self.core.named_parameters()}


class OtherLeaf(Delta):
    def weights(self) -> dict[str, Tensor]:
        return {"weight": self.delta}


class Constant(Delta):
    def weights(self) -> dict[str, Tensor]:
        return {"weight": torch.eye(8)}


class DeltaBetween(Calls):
    """The model's own code does this, after its layers."""

    def __init__(self, kind: type[Delta]) -> None:
        super().__init__(nn.Identity())
        self.kind, self.core, self.delta = kind, nn.Linear(8, 8), nn.Parameter(torch.full((8, 8), 0.1))

    def weights(self) -> dict[str, Tensor]:
        return self.kind.weights(self)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.kind.forward(self, super().forward(x))  # type: ignore[arg-type]


OTHER_WEIGHTS = (Delta, Scaled, OtherLeaf, Constant)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", OTHER_WEIGHTS)
def test_a_layer_may_call_its_modules_with_other_weights(kind: type[Delta]) -> None:
    check(lambda: Calls(kind(), 1, 4), FLOATS)


@pytest.mark.parametrize("kind", OTHER_WEIGHTS)
def test_other_weights_between_layers_are_refused(kind: type[Delta]) -> None:
    model = DeltaBetween(kind)
    core = dict(model.core.named_parameters())
    with pytest.raises(GraphError, match=r"'weight' of layer 'core'.*a module of their own"):
        pipeline(model)
    assert all(own is core[name] for name, own in model.core.named_parameters())


# ---- parametrizations ----------------------------------------------------------------------------------------------


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gain


def own_gain(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Gain())


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "gain": own_gain,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by hook": nn.utils.weight_norm,
    "spectral_norm by hook": nn.utils.spectral_norm,
}


class WithWeight(Calls):
    """Its own code multiplies by a weight of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.weight


def in_layers(add: Callable[[nn.Module], Any]) -> nn.Module:
    model = Calls(nn.Identity())
    for layer in model.layers:
        add(layer)
    return model


def in_own(add: Callable[[nn.Module], Any]) -> nn.Module:
    model = WithWeight()
    add(model)
    return model


@pytest.mark.one_in(9)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("where", [in_layers, in_own])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrized_weights(name: str, where: Callable[..., nn.Module]) -> None:
    if (name, where) != ("orthogonal", in_own):  # it parametrizes torch's own layers only
        check(lambda: where(PARAMETRIZATIONS[name]), FLOATS)


class SharedGain(Calls):
    """All layers share the module that scales their weights."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        shared = Gain()
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", shared)


def test_stages_share_no_module_whose_weights_they_replace() -> None:
    check(SharedGain, FLOATS, stages=4)
    with pipeline(SharedGain()) as pipe:
        parts = [
            {id(part) for module in stage.modules.values() for part in module.modules() if part._parameters}
            for stage in pipe._running.assembly.stages.values()
        ]
    assert len(parts) == 2
    assert parts[0].isdisjoint(parts[1])


# ---- several processes, and loading --------------------------------------------------------------------------------

DISTRIBUTED: dict[str, Callable[[], nn.Module]] = {
    "replaces": lambda: Calls(Range(), 1, 2),
    "makes": lambda: Calls(Table(), 0, 5),
    "makes between": lambda: Between(Announced),
    "of the first batch": lambda: InBlocks(OfFirstBatch),
    "shared": SharedGain,
}


def train(group: places.Group, name: str, schedule: str, checkpoint: CheckpointMode) -> None:
    own, plain = made(DISTRIBUTED[name]), made(DISTRIBUTED[name])
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5}
    planned: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint, **places.place(group)}
    with Pipeline(own, FLOATS[:2], **planned, **options) as pipe:
        for step in range(2):
            due = reference_step(plain, FLOATS, target=FLOATS, step=step, **options)
            assert torch.equal(pipe.step(FLOATS, target=FLOATS), due)
            buffers, grads = dict(plain.named_buffers()), {n: p.grad for n, p in plain.named_parameters()}
            for key, parameter in pipe.named_parameters():
                assert torch.equal(parameter.grad, grads[key]), key
        whole = pipe.full_state_dict()
        assert whole.keys() == plain.state_dict().keys()
        assert all(torch.equal(whole[key], buffers[key]) for key in whole.keys() & buffers.keys())
        pipe.eval()
        plain.eval()
        with torch.no_grad():
            due = torch.cat([plain(part) for part in FLOATS.chunk(4)])
        output = pipe.forward(FLOATS)
        assert output is None or torch.equal(output, due)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "always"), ("zb-h1", "never")])
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_models_whose_forward_changes_state_train_over_two_processes_as_the_loop(
    ranks: Ranks, name: str, schedule: str, checkpoint: str
) -> None:
    ranks.run(2, train, name, schedule, checkpoint)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_saved_run_continues(name: str, tmp_path: Any) -> None:
    own, other = made(DISTRIBUTED[name]), made(DISTRIBUTED[name])
    other(FLOATS[:2])  # makes the buffers that the checkpoint holds
    with pipeline(own) as pipe, pipeline(other) as second:
        pipe.step(FLOATS, target=FLOATS)
        pipe.save(tmp_path / "run")
        second.load(tmp_path / "run")
        assert torch.equal(pipe.step(FLOATS, target=FLOATS), second.step(FLOATS, target=FLOATS))
    assert own.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in own.state_dict().items())
