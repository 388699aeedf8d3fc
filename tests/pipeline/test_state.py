"""State: parameters without gradients, adapters on a frozen model, layers in evaluation mode, BatchNorm, shards."""

import copy
import functools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline
from pipesched.errors import InputError, PartitionError, ScheduleError
from pipesched.runtime.stage import split_backward as backward
from pipesched.runtime.stage.stage import Stage
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support import places
from tests.support.adapted_models import adapt
from tests.support.branching_models import FLOATS, IMAGES, ROWS, Looped, inputs_of, made, pipeline, square
from tests.support.models import Scale, Scaled, assert_as, assert_equal_bits
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

X, ZEROS = FLOATS, torch.zeros(ROWS, 8)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Scaled(8), nn.Linear(8, 8), nn.Tanh(), Scaled(8), nn.Linear(8, 8), nn.Linear(8, 8), Scaled(8), nn.Linear(8, 8)
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", ["row", "captured"])
def test_what_is_frozen_costs_nothing_backward(
    kind: str, schedule: str, monkeypatch: pytest.MonkeyPatch, every_product_deferred: None
) -> None:
    """Two stages in front of the first trainable layer, a frozen layer behind it, a frozen weight in a deferred W."""
    model: nn.Module = layers()
    model[:5].requires_grad_(False)
    model[6:].requires_grad_(False)
    model = model if kind == "row" else Looped(model)
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name])) if name else None
    sent: list[tuple[Any, ...]] = []
    for method in ("backward", "input_grad"):
        plain = getattr(Stage, method)
        monkeypatch.setattr(Stage, method, lambda *args, plain=plain: sent.extend(back := plain(*args)) or back)
    rule, products = backward.linear_rule, []
    monkeypatch.setattr(backward, "linear_rule", lambda *args: products.append(1) or rule(*args))
    with Pipeline(
        model,
        X[:3],
        devices=["cpu"] * 4,
        loss_fn=square,
        boundaries=[2, 5, 6],
        schedule=schedule,
        num_microbatches=4,
        checkpoint="always",
    ) as pipe:
        known = pipe.predicted.costs
        for noted in (calls, sent, products):
            noted.clear()
        Scale.calls = 0
        pipe.step(X, target=ZEROS)
    assert known is not None
    assert known.activation_bytes[:2] == (0, 0)  # the profile knows it, too
    names = [f"{'layers.' * (kind == 'captured')}{index}" for index in range(8)]
    assert [calls[name] for name in names] == [4] * 5 + [8] * 3  # stages 0 and 1 do not run again
    assert Scale.calls == 4  # the one behind what trains
    assert sum(map(len, sent)) == 4  # from stage 3 to 2 alone
    assert len(products) == (3 if schedule == "zb-h1" else 0)  # the first micro-batch is whole
    assert [parameter.grad is not None for parameter in model.parameters()].count(True) == 2


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", ["residual", "unet", "tied", "repeated"])
def test_adapters_on_a_frozen_model_train_as_in_the_loop(run: places.Run, name: str) -> None:
    run(3, adapters, name)


def adapters(group: places.Group, name: str) -> None:
    """Some stages have nothing to train at first; then more is unfrozen, then other layers alone."""
    own, plain = (adapt(made(name)[0]) if name != "unet" else halved(made(name)[0]) for _ in range(2))
    for model in (own, plain):  # adapters are drawn again
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.requires_grad and nn.init.normal_(parameter, std=0.3)
    first = [parameter.requires_grad for parameter in own.parameters()]
    others = [number % 5 > 2 for number in range(len(first))]
    with pipeline(name, own, schedule="zb-h1", **places.place(group)) as pipe:
        for step, wanted in enumerate((first, [True] * len(first), others, first)):
            for model in (own, plain):
                model.zero_grad()
                for parameter, requires_grad in zip(model.parameters(), wanted, strict=True):
                    parameter.requires_grad_(requires_grad)
            args, kwargs, target = inputs_of(name, ROWS)
            loss = pipe.step(*args, **kwargs, **target)
            due = reference_step(
                plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3, step=step
            )
            assert torch.equal(loss, due), step
            if any(True for _ in pipe.parameters()):
                assert_as(pipe, plain)


def halved(model: nn.Module) -> nn.Module:
    """Freeze its first half."""
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    return model


class Normed(nn.Module):
    """Convolutions with BatchNorm, and dropout: what is usually fine-tuned with some of it in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.2)) for _ in range(4)
        )
        self.norm, self.drop = nn.BatchNorm2d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(torch.relu(block(x)))
        return functional.dropout(self.norm(x), 0.2, self.training).mean((2, 3))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["row", "captured"])
def test_layers_in_evaluation_mode_stay_so(run: places.Run, kind: str) -> None:
    run(3, partly_evaluating, kind)


def partly_evaluating(group: places.Group, kind: str) -> None:
    """Frozen batch norms and a dropout that is switched off, from the beginning; then others, step by step."""
    torch.manual_seed(0)
    net = Normed()
    for norm in (net.norm, *(block[1] for block in net.blocks)):
        norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)
    own, plain = (copy.deepcopy(nn.Sequential(*net.blocks, net.norm) if kind == "row" else net) for _ in range(2))
    images = IMAGES
    modes = [[module.training for module in own.modules()]]
    for chosen in (2, 3, 5):
        modes.append([number % chosen != 1 for number, _ in enumerate(own.modules())])
        modes[-1][0] = True
    for module, mode in zip(own.modules(), modes[1], strict=True):
        module.training = mode
    loss_fn = functional.mse_loss
    options = {"schedule": "1f1b", "checkpoint": "always", "num_microbatches": 3, "seed": 3}
    target = torch.zeros(ROWS, 4) if kind == "captured" else torch.zeros_like(images)
    with Pipeline(own, images[:1], loss_fn=loss_fn, **options, **places.place(group)) as pipe:
        for step, chosen in enumerate([modes[1], modes[0], modes[2], modes[3]]):
            for model in (own, plain):
                for module, mode in zip(model.modules(), chosen, strict=True):
                    module.training = mode
            loss = pipe.step(images, target=target)
            due = reference_step(plain, images, target=target, loss_fn=loss_fn, num_microbatches=3, seed=3, step=step)
            assert torch.equal(loss, due), step
            assert_as(pipe, plain)


# ---- BatchNorm over mini-batches -----------------------------------------------------------------------------------


class Norms(nn.Module):
    """Norms with and without a momentum, one that is called twice, one that keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(4, momentum=0.3)
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.twice, self.bare = nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, track_running_stats=False)
        self.drop, self.last = nn.Dropout(0.2), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.bare(self.blocks[1](self.twice(self.twice(self.blocks[0](x)))))
        return self.last(self.drop(self.blocks[3](torch.relu(self.blocks[2](x)))).mean((2, 3)))


def normed(momentum: float | None = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(4, momentum=momentum), nn.Conv2d(4, 4, 3), nn.Dropout(0.2), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)
    )


def images(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 4, 6, 6, generator=torch.Generator().manual_seed(seed)) * 3 + 1


LOSS = {"loss_fn": square, "seed": 3}
MINI = {**LOSS, "numerics": Numerics(batch_norm="mini-batch")}
ONE: dict[str, Any] = {"schedule": "1f1b"}  # not the search, for which these models are too small


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_are_those_of_the_whole_mini_batch(momentum: float | None, checkpoint: str) -> None:
    """Of the first layer, whose input no other norm has seen. Few rows, many rows, uneven ones, evaluation between."""
    model, alone = normed(momentum), normed(momentum)[0]
    with Pipeline(
        model, images(1), devices=["cpu"] * 2, num_microbatches=4, checkpoint=checkpoint, **MINI, **ONE
    ) as pipe:
        for step, rows in enumerate((8, 7, 3, 5, 13)):
            x = images(rows, step)
            pipe.step(x, target=torch.zeros(rows, 2, 2, 2))
            alone(x)
            torch.testing.assert_close(model[0].state_dict(), alone.state_dict())
            before = copy.deepcopy(model.state_dict())
            pipe.eval().evaluate(x, target=torch.zeros(rows, 2, 2, 2))
            pipe.train()
            assert_equal_bits(model.state_dict(), before)
        pipe.evaluate(x, target=torch.zeros(rows, 2, 2, 2))  # in training mode: forwards move them, too
        pipe(x)
    alone(x), alone(x)
    torch.testing.assert_close(model[0].state_dict(), alone.state_dict())


def test_a_row_of_its_own_in_a_micro_batch_counts_as_one() -> None:
    """torchgpipe's statistics of 5 rows in 4 micro-batches mix with the next step's, and leave out n / (n - 1)."""
    model, alone = normed(), normed()[0]
    with Pipeline(model, images(1), devices=["cpu"] * 2, num_microbatches=4, **MINI, **ONE) as pipe:
        for step in range(3):
            pipe.step(images(5, step), target=torch.zeros(5, 2, 2, 2))
            alone(images(5, step))
    torch.testing.assert_close(model[0].running_var, alone.running_var, rtol=1e-6, atol=0)
    assert model[3].num_batches_tracked == 3


@pytest.mark.one_in(8)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-1f1b", "chimera"])
def test_statistics_are_the_loops_bit_by_bit(run: places.Run, schedule: str) -> None:
    run(2, loop_with_statistics, schedule, "row")
    if schedule != "chimera":
        run(2, loop_with_statistics, schedule, "captured")


def loop_with_statistics(group: places.Group, schedule: str, kind: str) -> None:
    torch.manual_seed(0)
    own = normed() if kind == "row" else Norms()
    plain = copy.deepcopy(own)
    options = {"schedule": schedule, "checkpoint": "always", "num_microbatches": 4, **MINI, **places.place(group)}
    with Pipeline(own, images(2), **options) as pipe:
        for step, rows in enumerate((8, 10)):
            target = torch.zeros(rows, 2, 2, 2) if kind == "row" else torch.zeros(rows, 4)
            loss = pipe.step(images(rows, step), target=target)
            due = reference_step(
                plain, images(rows, step), target=target, num_microbatches=4, step=step, batch_norm="mini-batch", **LOSS
            )
            assert torch.equal(loss, due)
            if schedule != "chimera":  # whose gradients are equal within rounding
                assert_as(pipe, plain)
            buffers = dict(plain.named_buffers())
            assert_equal_bits(mine := dict(pipe.named_buffers()), {name: buffers[name] for name in mine})


def test_calls_that_move_the_same_statistics_stay_in_one_stage() -> None:
    with pytest.raises(PartitionError, match="'twice#2'"):
        Pipeline(Norms(), images(2), devices=["cpu"] * 2, boundaries=["twice#2"], **MINI)


def test_a_step_that_fails_moves_no_statistics() -> None:
    model = normed()
    with Pipeline(model, images(2), devices=["cpu"] * 2, num_microbatches=2, **MINI, **ONE) as pipe:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError):
            pipe.step(images(4), target=torch.zeros(4, 3))
        assert_equal_bits(model.state_dict(), before)
        pipe.step(images(4), target=torch.zeros(4, 2, 2, 2))
    assert model[0].num_batches_tracked == 1


def test_wrong_ways_to_ask_for_statistics_say_so() -> None:
    options = {"devices": ["cpu"] * 2, "loss_fn": square}
    with pytest.raises(InputError, match="batch_norm must be one of micro-batch, mini-batch; got 'batch'"):
        Pipeline(normed(), images(2), numerics=Numerics(batch_norm="batch"), **options)
    make = functools.partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(ScheduleError, match="the steps of pipedream overlap"):
        Pipeline(
            normed(),
            images(2),
            numerics=Numerics(batch_norm="mini-batch"),
            schedule="pipedream",
            optimizer=make,
            **options,
        )
    match = "BatchNorm sees one micro-batch at a time.*pass numerics=Numerics\\(batch_norm='mini-batch'\\)"
    with pytest.warns(UserWarning, match=match):
        Pipeline(normed(), images(2), **ONE, **options).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline(normed(), images(2), numerics=Numerics(batch_norm="mini-batch"), **ONE, **options).close()


# ---- stages that are sharded over a second dimension of a mesh ------------------------------------------------------


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "schedule", "sharded", "checkpoint"),
    [
        ("row", "zb-h1", "layers", "never"),
        ("captured", "1f1b", "stages", "never"),
        ("row", "gpipe", "layers", {"0": "recompute", "1": "offload", "2": "offload", "3": "recompute"}),
    ],
)
def test_fully_sharded_stages_train_as_the_whole_batch(
    ranks: Ranks, kind: str, schedule: str, sharded: str, checkpoint: Any
) -> None:
    """Two replicas of two stages, each with half of the rows; weights and gradients lie in shards."""
    ranks.run(4, fully_sharded, kind, schedule, sharded, checkpoint)


def fully_sharded(group: Any, kind: str, schedule: str, sharded: str, checkpoint: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Looped(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))) for _ in range(4)))
    own = blocks if kind == "row" else made("unet")[0]
    plain, x = copy.deepcopy(own), X if kind == "row" else IMAGES
    target, mine = torch.zeros(ROWS, 8 if kind == "row" else 4), slice(mesh["dp"].get_local_rank(), None, 2)

    def wrap(module: nn.Module, stage: int) -> nn.Module:
        for part in [*reversed(list(module.modules()))] if sharded == "layers" else [module]:
            if part is module or isinstance(part, Looped):
                fully_shard(part, mesh=mesh["dp"])
        return module

    boundaries = [2 if kind == "row" else 4]  # as replicas that measured might cut differently
    options = {
        "schedule": schedule,
        "boundaries": boundaries,
        "num_microbatches": 3,
        "wrap": wrap,
        "distributed": Distributed(timeout=60),
    }
    options |= {"checkpoint": checkpoint, "num_microbatches": 4} if isinstance(checkpoint, dict) else {}
    with places.every_product_deferred(), Pipeline(own, x[:1], loss_fn=square, mesh=mesh["pp"], **options) as pipe:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (pipe, plain)]
        for _ in range(2):
            pipe.step(x[mine], target=target[mine])
            square(plain(x), target).backward()
            norms = pipe.clip_grad_norm_(0.01), clip_grad_norm_(plain.parameters(), 0.01)
            torch.testing.assert_close(*norms)
            assert type(norms[0]) is Tensor
            for optimizer in optimizers:
                optimizer.step()
            due = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert isinstance(parameter, DTensor)
                torch.testing.assert_close(parameter.grad.full_tensor(), due[name].grad)
                torch.testing.assert_close(parameter.full_tensor(), due[name])
            for optimizer in optimizers:
                optimizer.zero_grad()
        whole_state = pipe.full_state_dict()
        assert {*whole_state} >= {*plain.state_dict()}
        for name, value in plain.state_dict().items():
            assert not isinstance(whole_state[name], DTensor)
            torch.testing.assert_close(whole_state[name], value)
        pipe.gather_model()
        sharded_here = 0
        for name, value in (*own.named_parameters(), *own.named_buffers()):
            sharded_here += isinstance(value, DTensor)
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            torch.testing.assert_close(whole, plain.get_parameter(name) if name in due else plain.get_buffer(name))
        assert 0 < sharded_here < len(due), "what other ranks have trained is whole here"
