"""Optimizers in the pipeline, and asynchronous schedules: PipeDream's staleness, to the bit, against replays.

The replays keep a list of weight versions for each stage and use plain autograd; they know nothing of stages or orders.
"""

import copy
import gc
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from models import assert_equal_bits, synchronous_names
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched import Costs, Kind, Order, Pipeline, Plan, Program, Shape, lower, schedule, schedules, simulate
from pipesched.errors import ExecutionError, InputError, ModelTypeError, ScheduleError
from pipesched.executors.streams import CpuLane
from pipesched.interception import Intercept
from pipesched.lowering import add_recompute
from pipesched.order import v
from pipesched.randomness import Key, KeyedRandom
from pipesched.segments import Segments, enough_steps
from pipesched.versions import used_versions

ASYNCHRONOUS = [name for name in schedules.names() if name not in synchronous_names()]
VERTICAL = schedules.get("pipedream").with_options(vertical_sync=True)
KINDS = {"pipedream": "pipedream", "vertical sync": VERTICAL, "pipedream-2bw": "pipedream-2bw"}

#: (stage, micro-batch) -> how many updates lie behind the weights that it uses
VersionRule = Callable[[int, int], int]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.005, momentum=0.9)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As each rank has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the formulas of the papers, on a model of one number a stage ----------------------------------------------------

LR = 0.01


class Times(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def factors(num_stages: int) -> nn.Sequential:
    return nn.Sequential(*(Times(1 + 0.25 * (stage + 1)) for stage in range(num_stages)))


def data(rows: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.rand(2, rows, 1, generator=generator, dtype=torch.float64)
    return x, y


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def f_grads(weights: list[Tensor], x: Tensor, y: Tensor, share: float = 1.0) -> list[Tensor]:
    """The gradients of share * f at these weights."""
    leaves = [weight.clone().requires_grad_() for weight in weights]
    for leaf in leaves:
        x = x * leaf
    return list(torch.autograd.grad(mse(x, y) * share, leaves))


def trained(kind: object, p: int, m: int, steps: int, **options: object) -> list[Tensor]:
    model = factors(p)
    with Pipeline(
        model,
        data(1, 0)[0],
        loss_fn=mse,
        devices=["cpu"] * p,
        schedule=kind,
        num_microbatches=m,
        boundaries=list(range(1, p)),
        optimizer=lambda params: torch.optim.SGD(params, lr=LR),
        **options,
    ) as pipe:
        for step in range(steps):
            x, y = data(m, step)
            pipe.step(x, target=y)
        pipe.flush()
    return [layer.weight.detach() for layer in model]


@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_pipedream_is_as_stale_as_its_paper_says(p: int, vertical: bool) -> None:
    """w(t+1) = w(t) - lr grad f(w_1(t-p+1), w_2(t-p+2), ..., w_p(t)); with vertical sync all at t-p+1."""
    for m in range(1, 10):
        steps = 3 if m > 3 else 6
        w = [[weight] for weight in (layer.weight.detach() for layer in factors(p))]
        pairs = [(x, y) for step in range(steps) for x, y in zip(*data(m, step), strict=True)]
        for t, (x, y) in enumerate(pairs):
            used = [max(0, t - p + 1 + (0 if vertical else stage)) for stage in range(p)]
            grads = f_grads([w[stage][used[stage]] for stage in range(p)], x, y)
            for stage, grad in enumerate(grads):
                w[stage].append(torch.add(w[stage][t], grad, alpha=-LR))
        actual = trained(VERTICAL if vertical else "pipedream", p, m, steps)
        assert actual == [versions[-1] for versions in w], m


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_2bw_is_one_update_behind(p: int) -> None:
    """W(t+1) = W(t) - lr grad f(W(t-1)), f the mean over the step; fewer than p - 1 micro-batches: further behind."""
    for m in range(1, 10):
        behind = 1 if m >= p - 1 else -(-(p - 1) // m)
        w = [[layer.weight.detach() for layer in factors(p)]]
        for t in range(6):
            x, y = data(m, t)
            used = w[max(0, t - behind)]
            grads = f_grads(used, x[0], y[0], 1 / m)
            for one, other in zip(x[1:], y[1:], strict=True):
                grads = [a + b for a, b in zip(grads, f_grads(used, one, other, 1 / m), strict=True)]
            w.append([torch.add(a, grad, alpha=-LR) for a, grad in zip(w[t], grads, strict=True)])
        assert trained("pipedream-2bw", p, m, 6) == w[-1], m


# ---- a real model ----------------------------------------------------------------------------------------------------

SEED, ROWS, CUT = 5, 7, [2, 4]


def transformer(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)

    layers = [nn.Linear(6, 8), block(), nn.LayerNorm(8), nn.Dropout(dropout), block(), nn.Linear(8, 4)]
    layers[2].bias.requires_grad_(False)  # frozen
    return nn.Sequential(*layers)


class ScaledLoss(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output * self.scale, target)


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, 6, generator=generator), torch.randn(rows, 3, 4, generator=generator)


class Replay:
    """Training with old weights, micro-batch by micro-batch, on a copy of the model that takes their values."""

    def __init__(
        self, model: nn.Sequential, loss_fn: nn.Module, optimizer: Callable, m: int, rule: VersionRule
    ) -> None:
        self.live, self.loss_live = model, loss_fn
        self.model, self.loss_fn = copy.deepcopy(model), copy.deepcopy(loss_fn)
        self.m, self.rule = m, rule
        ends = [0, *CUT, len(model)]
        names = [[f"{layer}." for layer in range(a, b)] for a, b in itertools.pairwise(ends)]
        every = [*model.named_parameters(), *((f"loss.{name}", p) for name, p in loss_fn.named_parameters())]
        names[-1].append("loss.")
        self.stages = [[(n, p) for n, p in every if n.startswith(tuple(own))] for own in names]
        self.optimizers = [optimizer([p for _, p in stage]) for stage in self.stages]
        self.versions = [[self.snapshot(stage)] for stage in self.stages]
        self.losses: list[Tensor] = []

    @staticmethod
    def snapshot(stage: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in stage}

    def shadow(self) -> dict[str, Tensor]:
        loss = {f"loss.{name}": p for name, p in self.loss_fn.named_parameters()}
        return {**dict(self.model.named_parameters()), **loss}

    def microbatch(self, number: int, x: Tensor, y: Tensor, factor: float) -> None:
        shadow = self.shadow()
        with torch.no_grad():
            for stage, versions in enumerate(self.versions):
                for name, value in versions[self.rule(stage, number)].items():
                    shadow[name].copy_(value)
        random = KeyedRandom(torch.device("cpu"))
        key = Key(SEED, *divmod(number, self.m))
        with Intercept(random):
            for name, layer in self.model.named_children():
                random.enter(key, name)
                x = layer(x)
            loss = self.loss_fn(x, y)
        (loss * factor).backward()
        self.losses.append(loss.detach())
        for name, live in itertools.chain.from_iterable(self.stages):
            grad, shadow[name].grad = shadow[name].grad, None
            if grad is not None:
                live.grad = grad if live.grad is None else live.grad + grad

    def update(self) -> None:
        for stage, optimizer, versions in zip(self.stages, self.optimizers, self.versions, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            versions.append(self.snapshot(stage))

    def step(self, step: int, x: Tensor, y: Tensor, updates_each: bool) -> None:
        for part, (one, other) in enumerate(zip(x.tensor_split(self.m), y.tensor_split(self.m), strict=True)):
            self.microbatch(step * self.m + part, one, other, 1.0 if updates_each else len(one) / len(x))
            if updates_each:
                self.update()
        if not updates_each:
            self.update()


def rule_of(kind: str, p: int, m: int) -> VersionRule:
    if kind == "pipedream-2bw":
        return lambda stage, number: max(0, number // m - 1)
    return lambda stage, number: max(0, number - (p - 1) + (0 if kind == "vertical sync" else stage))


def pipeline(model: nn.Sequential, kind: object, m: int, **options: object) -> Pipeline:
    choices: dict = {"loss_fn": functional.mse_loss, "optimizer": sgd, "boundaries": CUT, "seed": SEED, **options}
    return Pipeline(model, batch(0)[0][:2], devices=["cpu"] * 3, schedule=kind, num_microbatches=m, **choices)


@pytest.mark.parametrize(
    ("optimizer", "checkpoint"), [(sgd, "never"), (adam, "never"), (sgd, "always"), (adam, "except_last")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_after_20_steps_the_weights_are_those_of_a_replay(kind: str, optimizer: Callable, checkpoint: str) -> None:
    m = 3
    expected, actual, losses = transformer(), transformer(), [ScaledLoss(), ScaledLoss()]
    replay = Replay(expected, losses[0], optimizer, m, rule_of(kind, 3, m))
    with pipeline(actual, KINDS[kind], m, loss_fn=losses[1], optimizer=optimizer, checkpoint=checkpoint) as pipe:
        for step in range(20):
            x, y = batch(step)
            pipe.step(x, target=y)
            replay.step(step, x, y, kind != "pipedream-2bw")
        last = pipe.flush()
    assert all(value.isfinite().all() for value in actual.state_dict().values())
    assert_equal_bits(actual.state_dict(), expected.state_dict())
    assert_equal_bits(losses[1].state_dict(), losses[0].state_dict())
    assert torch.equal(actual[2].bias, transformer()[2].bias)
    rows = [3, 2, 2]
    mean = sum(loss * n for loss, n in zip(replay.losses[-m:], rows, strict=True)) / sum(rows)
    torch.testing.assert_close(last, mean)
    assert all(parameter.grad is None for parameter in actual.parameters())


def test_a_step_returns_the_loss_of_the_one_before_and_flush_the_last() -> None:
    """The loss is the mean over the rows of the step, also where each micro-batch is an update of its own."""
    m = 3
    replay = Replay(transformer(), ScaledLoss(), sgd, m, rule_of("pipedream", 3, m))
    wanted = []
    for step in range(4):
        replay.step(step, *batch(step), True)
        wanted.append(sum(loss * rows for loss, rows in zip(replay.losses[-m:], (3, 2, 2), strict=True)) / 7)
    with pipeline(transformer(), "pipedream", m, loss_fn=ScaledLoss()) as pipe:
        got = [pipe.step(batch(step)[0], target=batch(step)[1]) for step in range(4)]
        got.append(pipe.flush())
        assert pipe.flush() is None
    torch.testing.assert_close(torch.stack(got), torch.stack([wanted[0], *wanted]))


# ---- synchronous schedules with optimizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_a_synchronous_step_with_optimizers_is_a_step_and_the_users_own(name: str, optimizer: Callable) -> None:
    chunks = schedules.get(name).chunks_per_rank
    choices = {"boundaries": None, "num_stages": 6} if chunks == 2 else {}
    expected, actual = transformer(), transformer()
    with (
        pipeline(expected, name, 4, optimizer=None, **choices) as plain,
        pipeline(actual, name, 4, optimizer=optimizer, **choices) as pipe,
    ):
        parameters = [[p for p in part.parameters() if p.requires_grad] for part in plain.partitions]
        optimizers = [optimizer(own) for own in parameters if own]
        assert plain.boundaries == pipe.boundaries or chunks == 2
        for step in range(5):
            x, y = batch(step)
            assert torch.equal(pipe.step(x, target=y), plain.step(x, target=y))
            for one in optimizers:
                one.step()
                one.zero_grad()
        assert pipe.flush() is None
        kinds = [span.action.kind for span in pipe.trace.spans]
        assert kinds.count(Kind.UPDATE) == pipe.num_stages
        assert pipe.predicted.makespan_s > 0
    assert_equal_bits(actual.state_dict(), expected.state_dict())
    assert all(parameter.grad is None for parameter in actual.parameters())


def test_forward_and_backward_by_hand_update_nothing() -> None:
    model = transformer()
    before = copy.deepcopy(model.state_dict())
    with pipeline(model, "1f1b", 2) as pipe:
        pipe(batch(0)[0]).square().mean().backward()
        assert_equal_bits(model.state_dict(), before)
        assert model[0].weight.grad is not None
        for optimizer in pipe.optimizers.values():
            optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_stage_without_trainable_parameters_has_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    for parameter in model[:1].parameters():
        parameter.requires_grad_(False)
    with pipeline(model, "pipedream", 2, boundaries=[1, 2]) as pipe:
        assert sorted(pipe.optimizers) == [1, 2]
        before = copy.deepcopy(model.state_dict())
        pipe.step(batch(0)[0], target=batch(0)[1])
        after = pipe.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["1.weight"], before["1.weight"])


def test_what_is_unfrozen_in_a_stage_that_had_nothing_to_train_is_an_error() -> None:
    model = transformer()
    model[:2].requires_grad_(False)
    with pipeline(model, "1f1b", 2) as pipe:
        pipe.step(batch(0)[0], target=batch(0)[1])
        model[0].requires_grad_(True)
        with pytest.raises(ExecutionError, match="layers 0, 1 have gradients now; make a new Pipeline, or freeze"):
            pipe.step(batch(0)[0], target=batch(0)[1])
        model[0].requires_grad_(False)
        pipe.step(batch(0)[0], target=batch(0)[1])


@pytest.mark.parametrize("name", ["1f1b", *ASYNCHRONOUS])
@pytest.mark.parametrize("loss_fn", [None, mse])
def test_a_layer_may_be_called_as_the_loss_is(name: str, loss_fn: Callable | None) -> None:
    layer = Times(1.5).float() if loss_fn else nn.Sequential(Times(1.5).float(), Mean())
    layer.register_forward_hook(lambda *_: None)  # one layer, not two
    model = nn.Sequential(OrderedDict({"0": nn.Linear(6, 6), "loss_fn": layer}))
    weight = next(layer.parameters())
    with pipeline(model, name, 2, loss_fn=loss_fn, boundaries=["loss_fn"]) as pipe:
        pipe.step(batch(0)[0], target=torch.zeros(ROWS, 3, 6) if loss_fn else None)
        pipe.flush()
    assert weight.item() != 1.5
    assert weight.grad is None


class Checkpointed(nn.Module):
    """A layer that runs again in its backward, and looks at its weight there."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.inner, self.how, self.seen = nn.Linear(6, 6), how, []
        self.register_full_backward_hook(lambda *_: self.seen.append(self.inner.weight.sum().item()))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) if self.how is None else checkpoint(self.act, x, use_reentrant=self.how)

    def act(self, x: Tensor) -> Tensor:
        self.seen.append(self.inner.weight.sum().item())
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("how", [True, False])
def test_a_layer_that_runs_again_in_its_backward_meets_the_same_weights(name: str, how: bool) -> None:
    models, seen = [], []
    for one in (None, how):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 6), Checkpointed(one), nn.Linear(6, 4)))
        with pipeline(models[-1], name, 3, boundaries=[1, 2]) as pipe:
            for step in range(6):
                pipe.step(batch(step)[0], target=batch(step)[1])
        seen.append(models[-1][1].seen)
    assert_equal_bits(*(model.state_dict() for model in models))
    assert set(seen[0]) == set(seen[1])
    assert len(seen[0]) == 2 * 6 * 3
    assert len(seen[1]) == 3 * 6 * 3


# ---- the split backward, own schedules, programs ---------------------------------------------------------------------


@schedule("split-pipedream")
def split_pipedream(rank: int, shape: Shape) -> Order:
    """PipeDream whose backward is split."""
    order, ahead = Order(shape), shape.num_ranks - 1 - rank
    for number in range(shape.num_microbatches + ahead):
        order.F(rank)
        if number >= ahead:
            order.I(rank)
            order.W(rank)
            order.UPDATE(rank)
    return order


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.usefixtures("every_product_deferred")
def test_the_split_backward_works_on_versions(checkpoint: str) -> None:
    """And defers products: their weights' gradients wait for W."""
    models, waited = [transformer(), transformer()], []
    for model, kind in zip(models, ("pipedream", split_pipedream), strict=True):
        with pipeline(model, kind, 3, checkpoint=checkpoint) as pipe:
            stage = pipe._stages[2]
            original = stage.weight_grad

            def weight_grad(microbatch: int, stage=stage, original=original) -> None:
                waited.append(len(stage._saved[microbatch].products))
                original(microbatch)

            stage.weight_grad = weight_grad
            for step in range(6):
                pipe.step(batch(step)[0], target=batch(step)[1])
    assert_equal_bits(*(model.state_dict() for model in models))
    assert waited[0] == 0  # learnt from
    assert min(waited[1:]) > 0


@schedule("late")
def late(rank: int, shape: Shape, *, split: bool = False) -> Order:
    """PipeDream whose gradients come a micro-batch later, so that steps end between a forward and its R, or I and W."""
    order, ahead, count = Order(shape), shape.num_ranks - 1 - rank, shape.num_microbatches
    for number in range(count + ahead + 1):
        if number < count:
            order.F(rank)
        if split and ahead <= number < count + ahead:
            order.I(rank)
        if number > ahead:
            (order.W if split else order.B)(rank)
            order.UPDATE(rank)
    return order


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.usefixtures("every_product_deferred")
def test_an_update_takes_whole_gradients_of_its_own_micro_batches(m: int, split: bool, checkpoint: str) -> None:
    """None of what I gives of the next one; and R finds targets of a step that is over."""
    expected, actual, losses = transformer(), transformer(), [ScaledLoss(), ScaledLoss()]
    replay = Replay(expected, losses[0], sgd, m, lambda stage, number: max(0, number - 3 + stage))
    with pipeline(actual, late.with_options(split=split), m, loss_fn=losses[1], checkpoint=checkpoint) as pipe:
        for step in range(8):
            x, y = batch(step)
            pipe.step(x, target=y)
            replay.step(step, x, y, True)
    assert_equal_bits(actual.state_dict(), expected.state_dict())
    assert_equal_bits(losses[1].state_dict(), losses[0].state_dict())


def test_a_step_whose_loss_comes_after_the_next_one_begins_is_refused() -> None:
    @schedule("there-and-back", placement=v, chunks_per_rank=2)
    def there_and_back(rank: int, shape: Shape) -> Order:
        order, p, (down, up) = Order(shape), shape.num_ranks, shape.chunks(rank)
        slots = [(2 * n + stage, False, stage) for n in range(shape.num_microbatches) for stage in (down, up)]
        slots += [
            (2 * n + 4 * p - 1 - stage, True, stage) for n in range(shape.num_microbatches) for stage in (down, up)
        ]
        for _, back, stage in sorted(slots):
            if back:
                order.B(stage)
                order.UPDATE(stage)
            else:
                order.F(stage)
        return order

    program = there_and_back.program(3, 4)
    with pytest.raises(ScheduleError, match="has 5F0 behind the first action of a later step"):
        pipeline(transformer(), there_and_back, 1, boundaries=None)
    with pipeline(transformer(), program, None, boundaries=None) as pipe:
        assert pipe.step(batch(0)[0], target=batch(0)[1]).isfinite()


def test_a_program_with_updates_runs_step_by_step() -> None:
    program = schedules.get("pipedream").program(3, 4)
    models, losses = [transformer(), transformer()], []
    for model, kind in zip(models, (program, "pipedream"), strict=True):
        with pipeline(model, kind, None if kind is program else 4) as pipe:
            for step in range(3):
                losses.append(pipe.step(batch(step)[0], target=batch(step)[1]))
                assert (pipe.flush() is None) == (kind is program)
            assert pipe.trace.peak_versions == simulate(program, Costs.uniform(3)).peak_versions
    assert losses[:3] == losses[3:]
    assert_equal_bits(*(model.state_dict() for model in models))


def test_stages_that_share_weights_are_updated_by_the_caller() -> None:
    with pytest.raises(ScheduleError, match="4 stages share 2 weight copies; leave optimizer= out"):
        pipeline(transformer(), "chimera", 2, boundaries=[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_plan_streams_on(tmp_path: Path, kind: str) -> None:
    models = [transformer(), transformer()]
    with pipeline(models[0], KINDS[kind], 3) as pipe:
        pipe.plan.save(tmp_path / "plan.json")
        wanted = weights_after(pipe, 7, 5, 7)
    plan = Plan.load(tmp_path / "plan.json")
    with Pipeline(
        models[1],
        batch(0)[0][:2],
        loss_fn=functional.mse_loss,
        devices=["cpu"] * 3,
        optimizer=sgd,
        seed=SEED,
        plan=plan,
    ) as pipe:
        assert_equal_bits(weights_after(pipe, 7, 5, 7), wanted)


@pytest.mark.parametrize("delay", [3, 9])
def test_versions_may_be_late_to_come(delay: int) -> None:
    @schedule("stale")
    def stale(rank: int, shape: Shape) -> Order:
        order = Order(shape)
        for number in range(shape.num_microbatches):
            order.F(rank, version=max(0, number - delay))
            order.B(rank)
            order.UPDATE(rank)
        return order

    w = [factors(1)[0].weight.detach()]
    for t in range(20):
        grads = f_grads([w[max(0, t - delay)]], *data(1, t))
        w.append(torch.add(w[t], grads[0], alpha=-LR))
    assert trained(stale, 1, 1, 20) == [w[-1]]


def test_a_schedule_that_does_not_repeat_is_refused() -> None:
    @schedule("odd")
    def odd(rank: int, shape: Shape) -> Order:
        """An update of three micro-batches, whatever the step."""
        order = Order(shape)
        for number in range(shape.num_microbatches):
            order.F(rank)
            order.B(rank)
            if number % 3 == 2 or number == shape.num_microbatches - 1:
                order.UPDATE(rank)
        return order

    with pytest.raises(ScheduleError, match=r"repeat|of one step"):
        pipeline(transformer(), odd, 4, boundaries=CUT)
    pipeline(transformer(), odd, 3).close()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_versions_in_memory_are_those_predicted(kind: str, m: int) -> None:
    """Counted in storages, whenever a layer runs or an optimizer steps; nothing is left after a flush."""
    steps = 12
    rule = KINDS[kind]
    program = (schedules.get(rule) if isinstance(rule, str) else rule).program(3, m, steps=steps)
    predicted = simulate(program, Costs.uniform(3)).peak_versions
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))
    seen: dict[int, int] = dict.fromkeys(range(3), 0)
    tensors: list[weakref.ref[Tensor]] = []
    with pipeline(model, rule, m, boundaries=[1, 2]) as pipe:
        optimizers = pipe.optimizers

        def count(stage: int) -> None:
            versions = pipe._stages[stage].weights._held.values()
            held = [version[str(stage)]["weight"] for version in versions]
            tensors.extend(map(weakref.ref, held))
            live = optimizers[stage].param_groups[0]["params"][0]
            seen[stage] = max(seen[stage], len({tensor.data_ptr() for tensor in (*held, live)}))

        for stage, layer in enumerate(model):
            layer.register_forward_hook(lambda *_, stage=stage: count(stage))
            optimizers[stage].register_step_post_hook(lambda *_, stage=stage: count(stage))
        for step in range(steps):
            pipe.step(batch(step)[0], target=batch(step)[1])
        pipe.flush()
    assert seen == predicted
    gc.collect()
    assert not [ref for ref in tensors if ref() is not None]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_streams_parts_are_the_program_of_as_many_steps(kind: str, p: int) -> None:
    """Orders and versions, however many steps there are: segment after segment, then the cool-down."""
    rule = schedules.get(KINDS[kind]) if isinstance(KINDS[kind], str) else KINDS[kind]
    for m in (1, 2, 3, 5, 9):

        def whole(steps: int, m: int = m) -> Program:
            return lower(add_recompute(rule.program(p, m, steps=steps), "always"))

        known = enough_steps(p, m)
        segments = Segments(whole(known), m)
        for steps in (1, 2, known - 1, known, known + 3):
            program, parts = whole(steps), [*map(segments.segment, range(steps)), segments.cooldown(steps)]
            for rank in range(p):
                assert [action for part in parts for action in part[rank]] == list(program.orders[rank])
            assert segments.versions(steps * m) == used_versions(program)
            for stage, used in enumerate(used_versions(program)):
                for version in range(0, steps * segments.updates, 2):
                    users = [number for number in segments.uses(stage).users(version) if number < steps * m]
                    assert users == [number for number, one in enumerate(used) if one == version]


# ---- asynchrony ------------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Calls a function with the number of its forward."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self.act, self.calls = act, 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.act(self.calls - 1)
        return x * self.weight


PATIENCE_S = 20.0  # for what is certain to come


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_no_rank_waits_for_the_others_where_a_step_ends(name: str) -> None:
    """The last rank holds its last forward of step 1 back until the first rank begins step 2: no barrier lies there."""
    begun, held = threading.Event(), []
    first = Gate(lambda call: begun.set() if call == 4 else None)
    last = Gate(lambda call: held.append(begun.wait(PATIENCE_S)) if call == 3 else None)
    with Pipeline(
        nn.Sequential(first, last),
        torch.ones(1, 2),
        loss_fn=mse,
        devices=["cpu"] * 2,
        schedule=name,
        num_microbatches=2,
        boundaries=[1],
        optimizer=sgd,
    ) as pipe:
        for _ in range(4):
            pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))
    assert held == [True]


def test_step_returns_before_its_step_has_run_and_after_the_one_before_has() -> None:
    go, done = threading.Event(), []
    layer = Gate(lambda call: (done.append(call), call < 4 or go.wait(PATIENCE_S)))
    with Pipeline(
        nn.Sequential(layer),
        torch.ones(1, 2),
        loss_fn=mse,
        devices=["cpu"],
        schedule="pipedream",
        num_microbatches=2,
        optimizer=sgd,
    ) as pipe:
        pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))
        assert done == [0, 1]
        pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))
        pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))  # its first forward waits for us
        assert done[:4] == [0, 1, 2, 3]
        assert 5 not in done
        go.set()
        pipe.flush()
        assert done == list(range(6))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_callers_device_waits_for_what_it_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to, for each rank: after the last forward of the step whose loss is returned."""
    told: list[float] = []
    monkeypatch.setattr(CpuLane, "catch_up", lambda lane, stamp: told.append(stamp))
    with pipeline(transformer(), name, 3) as pipe:
        for step in range(3):
            pipe.step(batch(step)[0], target=batch(step)[1])
            assert len(told) == 3 * max(1, step)
            ends = [span.end_s for span in pipe.trace.spans if span.action.kind is Kind.F and span.rank == 2]
            assert len(ends) == 3 * max(1, step)
            assert pipe._site.executor.lanes[2].reader()(told[-1]) >= max(ends)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_slow_gpu_is_waited_for(name: str) -> None:
    losses = []
    for device in ("cpu", "cuda:0"):
        slow = Gate(lambda call, device=device: torch.cuda._sleep(50_000_000) if device != "cpu" else None)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), slow, nn.Linear(6, 4))
        with Pipeline(
            model,
            batch(0)[0][:2],
            loss_fn=functional.mse_loss,
            devices=[device] * 3,
            schedule=name,
            num_microbatches=3,
            boundaries=[1, 2],
            optimizer=sgd,
        ) as pipe:
            steps = [batch(step) for step in range(6)]
            losses.append([pipe.step(x.to(device), target=y.to(device)).cpu() for x, y in steps])
    torch.testing.assert_close(*losses)


# ---- its life --------------------------------------------------------------------------------------------------------


def weights_after(pipe: Pipeline, *rows: int) -> dict[str, Tensor]:
    for step, count in enumerate(rows):
        x, y = batch(step, count)
        pipe.step(x, target=y)
    return copy.deepcopy(pipe.state_dict())


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize(
    "between",
    [
        lambda pipe: pipe.flush(),
        lambda pipe: pipe.evaluate(batch(9)[0], target=batch(9)[1]),
        lambda pipe: pipe.load_state_dict(pipe.state_dict()),
        lambda pipe: list(pipe.named_parameters()),
        lambda pipe: pipe.train(),
        lambda pipe: pipe.optimizers,
    ],
    ids=["flush", "evaluate", "state", "parameters", "train", "optimizers"],
)
def test_what_looks_at_the_weights_flushes(name: str, between: Callable[[Pipeline], object]) -> None:
    """As two pipelines would, one after the other, that share optimizers and count steps on."""
    results = []
    for act in (Pipeline.flush, between):
        model = transformer()
        with pipeline(model, name, 3) as pipe:
            weights_after(pipe, 7, 7)
            for step in (2, 3):
                pipe.step(batch(step)[0], target=batch(step)[1])
            act(pipe)
            for step in (4, 5):
                pipe.step(batch(step)[0], target=batch(step)[1])
        results.append(model.state_dict())
    assert_equal_bits(*results)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_short_batch_is_a_stream_of_its_own(name: str) -> None:
    results = []
    for flushes in (False, True):
        with pipeline(transformer(), name, 4) as pipe:
            for step, rows in enumerate((7, 7, 3, 8, 5)):
                x, y = batch(step, rows)
                if flushes and rows in (3, 8):
                    pipe.flush()
                assert pipe.step(x, target=y).isfinite()
            results.append(pipe.state_dict())
    assert_equal_bits(*results)


def test_closing_loses_no_update_but_an_exception_under_way_stops_the_stream() -> None:
    expected, closed, broken = transformer(), transformer(), transformer()
    with pipeline(expected, "pipedream", 3) as pipe:
        wanted = weights_after(pipe, 7, 7, 7)
    pipe = pipeline(closed, "pipedream", 3)
    for step in range(3):
        pipe.step(batch(step)[0], target=batch(step)[1])
    pipe.close()
    assert_equal_bits(closed.state_dict(), wanted)

    def interrupted() -> None:
        with pipeline(broken, "pipedream", 3) as pipe:
            pipe.step(batch(0)[0], target=batch(0)[1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipesched")]
    assert all(parameter.grad is None for parameter in broken.parameters())


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_error_of_a_layer_ends_the_stream_and_the_next_step_begins_another(name: str) -> None:
    def fail(call: int) -> None:
        if call == 7:
            raise ZeroDivisionError("a layer's own error")

    model = nn.Sequential(nn.Linear(6, 6), Gate(fail), nn.Linear(6, 4))
    with pipeline(model, name, 2, boundaries=[1, 2]) as pipe:
        with pytest.raises(ZeroDivisionError, match="own error") as caught:
            weights_after(pipe, *[7] * 5)
        assert any("in 1F7 (stage 1, micro-batch 7), rank 1" in note for note in caught.value.__notes__)
        assert pipe.flush() is None
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(stage.weights is None and not stage.num_held for stage in pipe._stages.values())
        before = copy.deepcopy(pipe.state_dict())
        assert pipe.step(batch(9)[0], target=batch(9)[1]).isfinite()
        assert any(not torch.equal(value, before[key]) for key, value in pipe.state_dict().items())


@pytest.mark.parametrize("name", ["1f1b", *ASYNCHRONOUS])
def test_an_error_of_an_optimizer_says_which_update(name: str) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            raise ZeroDivisionError("an optimizer's own error")

    with pipeline(transformer(), name, 2, optimizer=lambda params: Fails(params, lr=0.1)) as pipe:
        with pytest.raises(ZeroDivisionError) as caught:
            weights_after(pipe, 7, 7)
        assert any("UPDATE0 (stage" in note and "update 0" in note for note in caught.value.__notes__)
        assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("call", [lambda pipe, x: pipe.step(x, target=x), lambda pipe, x: pipe.flush()])
def test_a_layer_that_calls_its_own_pipeline_is_an_error(call: Callable) -> None:
    pipes: list[Pipeline] = []
    layer = Gate(lambda number: call(pipes[0], torch.ones(2, 2)) if number == 3 else None)
    with Pipeline(
        nn.Sequential(layer),
        torch.ones(1, 2),
        loss_fn=mse,
        devices=["cpu"],
        schedule="pipedream",
        num_microbatches=2,
        optimizer=sgd,
    ) as pipe:
        pipes.append(pipe)
        pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))
        pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))
        with pytest.raises(ExecutionError, match="used from outside its steps"):
            pipe.flush()
        pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_what_an_asynchronous_step_cannot_give_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name}.*optimizer=, such as"):
        pipeline(transformer(), name, 2, optimizer=None)
    for wrong in (torch.optim.SGD([torch.zeros(1)], 0.1), lambda params: None):
        with pytest.raises(ModelTypeError, match="Optimizer"):
            pipeline(transformer(), name, 2, optimizer=wrong)
    model = transformer()
    with pytest.raises(ModelTypeError, match="a stage with 14 parameters has 16 others; make it of params"):
        pipeline(model, name, 2, optimizer=lambda _: sgd(list(model.parameters())))
    x, y = batch(0)
    with pipeline(transformer(), name, 2) as pipe:
        with pytest.raises(InputError, match="outputs"):
            pipe.step(x, target=y, return_outputs=True)
        with pytest.raises(InputError, match="gradients of inputs"):
            pipe.step(x.clone().requires_grad_(), target=y)
        pipe.step(x, target=y)


def test_the_trace_and_the_prediction_show_a_stream() -> None:
    with pipeline(transformer(), "pipedream", 2) as pipe:  # a cut that does not depend on measured times
        assert pipe.trace is None
        assert pipe.predicted.makespan_s > 0  # from a profile, which also knows the sizes
        for step in range(3):
            pipe.step(batch(step)[0], target=batch(step)[1])
        pipe.flush()
        trace, predicted = pipe.trace, pipe.predicted
    assert {span.action.microbatch for span in trace.spans if span.action.kind is Kind.F} == set(range(6))
    assert trace.peak_in_flight == predicted.peak_in_flight == (3, 2, 1)
    assert trace.peak_versions == predicted.peak_versions == {0: 3, 1: 2, 2: 1}
    assert predicted.peak_bytes[0] > predicted.peak_bytes[2]


def test_a_microbatch_that_counts_nothing_changes_nothing() -> None:
    """It is an update of its own, without gradients; the others go on."""
    x, y = batch(0, 4)
    y[1] = 0
    with pipeline(transformer(), "pipedream", 4, loss_weight=lambda target: float(target.any())) as pipe:
        pipe.step(x, target=y)
        assert pipe.flush().isfinite()
        last = pipe.optimizers[2].state[pipe.model[5].weight]["momentum_buffer"]
        assert last.isfinite().all()


def test_a_pipeline_that_is_dropped_with_steps_under_way_ends_its_threads() -> None:
    pipe = pipeline(transformer(), "pipedream", 3)
    weights_after(pipe, 7)
    pipe.step(batch(1)[0], target=batch(1)[1])
    threads = pipe._site.executor._threads
    del pipe
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_hooks_and_schedulers_see_the_live_parameters() -> None:
    model, seen = transformer(), []
    parameter = model[5].weight
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p is parameter))
    with pipeline(model, "pipedream", 3) as pipe:
        drive = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in pipe.optimizers.values()]
        for step in range(3):
            pipe.step(batch(step)[0], target=batch(step)[1])
        pipe.flush()
        for scheduler in drive:
            scheduler.step()
    assert seen == [True] * 9
    assert pipe.optimizers[2].param_groups[0]["lr"] == pytest.approx(0.0005)
