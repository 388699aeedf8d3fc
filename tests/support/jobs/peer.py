"""Jobs of test_peer_regressions, and their models."""

import copy
import io
from collections import Counter
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched import Pipeline, schedules, viz
from pipesched.errors import ExecutionError, InputError
from pipesched.program.actions import Lane
from pipesched.testing import reference_step
from tests.support.models import assert_as, compare_step, gradients
from tests.support.places import Group, every_product_deferred, has_last_rank, is_one_process, pipeline

WIDTH = 8


SPLIT = ["zb-h1", "zb-v", "interleaved-zb"]


SOME = ["1f1b", "interleaved-1f1b", *SPLIT]


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(WIDTH))


def blocks(count: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(block() for _ in range(count)))


def train(group: Group, expected: nn.Sequential, *, loss_fn: Any = functional.mse_loss, **options: Any) -> None:
    """Check that two steps of each schedule equal those of a plain loop. Gradients accumulate over both steps."""
    names = options.pop("names", SOME)
    target = options.pop("target", rows(10))
    with every_product_deferred():
        for name in names:
            plain, actual = copy.deepcopy(expected), copy.deepcopy(expected)
            with pipeline(group, actual, rows(2), schedule=name, loss_fn=loss_fn, **options) as pipe:
                for step in range(2):
                    compare_step(pipe, plain, rows(10), step=step, loss_fn=loss_fn, target=target, seed=5)


def infer(group: Group, sizes: list[int]) -> None:
    model = blocks().eval()
    for name in SOME:
        with pipeline(group, model, rows(2), schedule=name) as pipe, torch.inference_mode():
            for size in sizes:
                output = pipe(rows(size))
                if output is not None:
                    wanted = torch.cat([model(part) for part in rows(size).tensor_split(4)])
                    torch.testing.assert_close(output, wanted)
                assert (output is not None) == has_output(group, pipe)


def has_output(group: Group, pipe: Pipeline) -> bool:
    """Return whether the last stage is in this process."""
    return is_one_process(group) or pipe.plan.program.placement[-1] == group.rank()


def train_sizes(group: Group, sizes: list[int]) -> None:
    for name in SOME:
        expected, actual = blocks(), blocks()
        with pipeline(group, actual, rows(2), schedule=name, loss_fn=functional.mse_loss) as pipe:
            for step, size in enumerate(sizes):
                compare_step(
                    pipe,
                    expected,
                    rows(size),
                    step=step,
                    loss_fn=functional.mse_loss,
                    target=rows(size).flip(0),
                    seed=5,
                )


def alternate(group: Group) -> None:
    expected, actual = blocks(), blocks()
    counts = (2, 8)
    pipes = {m: pipeline(group, actual, rows(2), loss_fn=functional.mse_loss, num_microbatches=m) for m in counts}
    for step, count in enumerate([2, 8, 2, 8, 2]):
        pipe = pipes[count]
        options = {"num_microbatches": count, "target": rows(16).flip(0)}
        compare_step(pipe, expected, rows(16), step=step // 2, loss_fn=functional.mse_loss, **options, seed=5)
    for pipe in pipes.values():
        pipe.close()


class Packs(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "scale": [x.sigmoid(), None], "name": "packed"}


class Unpacks(nn.Module):
    def forward(self, value: dict[str, Any]) -> Tensor:
        scale, nothing = value["scale"]
        assert nothing is None
        assert value["name"] == "packed"
        return value["x"] * scale


class Views(nn.Module):
    """A layer that returns a view of a product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x)[:, :WIDTH]


class Transposes(nn.Module):
    """A layer that returns a tensor that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.t().contiguous() * 2).t()


class Modifies(nn.Module):
    """A layer that modifies its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def pass_between(group: Group, layers: list[type[nn.Module]]) -> None:
    """Train with layers whose values must cross a stage boundary: in every schedule, and with one layer per stage."""
    torch.manual_seed(1)
    model = nn.Sequential(*blocks(3), *(layer() for layer in layers), *blocks(3))
    train(group, model)
    each = {"num_stages": len(model), "boundaries": list(range(1, len(model)))}
    train(group, model, names=["interleaved-1f1b", "interleaved-zb"], **each)


def dict_loss(output: Tensor, target: dict[str, Any]) -> Tensor:
    return functional.mse_loss(output * target["weight"], target["rows"][0])


class OwnLoss(nn.Module):
    """A last layer that computes the loss itself."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.square().mean(), "logits": x}


def train_with_dict_target(group: Group) -> None:
    train(group, blocks(), loss_fn=dict_loss, target={"weight": 0.5, "rows": (rows(10).flip(0),)})


def train_with_own_loss(group: Group) -> None:
    train(group, nn.Sequential(*blocks(7), OwnLoss()), loss_fn=None, target=None)


def evaluate_without_target(group: Group) -> None:
    expected, actual = blocks(), blocks()
    with pipeline(group, actual, rows(2), loss_fn=functional.mse_loss) as pipe:
        with pytest.raises(InputError, match=r"needs a target; none was passed; pass target=, or call forward"):
            pipe.eval().evaluate(rows(8))
        output = pipe(rows(8))
        assert (output is None) == (not has_last_rank(group))
        pipe.train()
        compare_step(pipe, expected, rows(8), step=0, loss_fn=functional.mse_loss, target=rows(8), seed=5)


def count_batches(group: Group, mode: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(8)))
    for name in SOME:
        actual = copy.deepcopy(model)
        with pytest.warns(UserWarning, match="BatchNorm"):
            pipe = pipeline(group, actual, rows(2), schedule=name, loss_fn=functional.mse_loss, checkpoint=mode)
        with pipe:
            for trains in (True, True, False, True):
                if trains:
                    pipe.train().step(rows(8), target=rows(8))
                else:
                    pipe.eval().evaluate(rows(8), target=rows(8))
            counts = [int(buffer) for key, buffer in pipe.named_buffers() if key.endswith("num_batches_tracked")]
            assert counts
            assert set(counts) == {12}


def accumulate(group: Group) -> None:
    train(group, blocks())


def count_hooks(group: Group) -> None:
    for name in SPLIT:
        actual, fired = blocks(), Counter[str]()
        for key, parameter in actual.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: fired.update([key]))
        with (
            every_product_deferred(),
            pipeline(group, actual, rows(2), schedule=name, loss_fn=functional.mse_loss) as pipe,
        ):
            for _ in range(2):
                pipe.step(rows(8), target=rows(8))
            assert fired == {key: 8 for key, _ in pipe.named_parameters()}


class Tally:
    """A count that is no attribute of a layer, so that recomputed forwards count, too."""

    calls = 0

    def add(self, *_: Any) -> None:
        self.calls += 1


class Checkpointed(nn.Module):
    """A block that counts its forwards. ``by_itself``: whether it calls torch's checkpoint itself."""

    def __init__(self, inner: nn.Module, by_itself: bool) -> None:
        super().__init__()
        self.inner, self.by_itself, self.tally = inner, by_itself, Tally()
        inner.register_forward_pre_hook(self.tally.add)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.by_itself else self.inner(x)


def count_forwards(group: Group, by_itself: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), by_itself) for _ in range(8))
    )
    for name in SPLIT:
        for layer in model:
            layer.tally.calls = 0
        options = {} if by_itself else {"checkpoint": "always"}
        with (
            every_product_deferred(),
            pipeline(group, model, rows(2), schedule=name, loss_fn=functional.mse_loss, **options) as pipe,
        ):
            for _ in range(3):
                pipe.step(rows(8), target=rows(8))
            own = {key.split(".")[0] for key, _ in pipe.named_parameters()}
            pipe.gather_model()  # the next pipeline uses the same model
        assert [layer.tally.calls for key, layer in model.named_children() if key in own] == [3 * 4 * 2] * len(own)


def switch_modes(group: Group) -> None:
    for name in SOME:
        model, calls = blocks(), Counter[str]()
        for key, layer in model.named_children():
            layer.register_forward_pre_hook(lambda *_, key=key: calls.update([key]))
        with pipeline(group, model, rows(2), schedule=name, loss_fn=functional.mse_loss) as pipe:
            own = {key.split(".")[0] for key, _ in pipe.named_parameters()}
            for number in range(1, 4):
                pipe.train().step(rows(8), target=rows(8))
                assert calls == dict.fromkeys(own, 8 * number - 4)
                pipe.eval().evaluate(rows(8), target=rows(8))
                assert calls == dict.fromkeys(own, 8 * number)


def train_replicas(group: Group, name: str) -> None:
    """Train two replicas of two ranks, each with half of the batch. The job averages their gradients after the step."""
    x, y = rows(16), rows(16).flip(0)
    models = [blocks_without_dropout() for _ in range(2)]
    with every_product_deferred():
        if is_one_process(group):
            pipes = [make_replica(model, name, devices=["cpu"] * 2) for model in models]
            for pipe, part, target in zip(pipes, x.chunk(2), y.chunk(2), strict=True):
                pipe.step(part, target=target)
            for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                one.grad = (one.grad + other.grad) / 2
        else:
            mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "pp"))
            replica = mesh["dp"].get_local_rank()
            pipes = [make_replica(models[0], name, mesh=mesh["pp"])]
            pipes[0].step(x.chunk(2)[replica], target=y.chunk(2)[replica])
            for parameter in pipes[0].parameters():
                distributed.all_reduce(parameter.grad, group=mesh["dp"].get_group())
                parameter.grad /= 2
    expected = [blocks_without_dropout() for _ in range(2)]
    for model, part, target in zip(expected, x.chunk(2), y.chunk(2), strict=True):
        reference_step(model, part, target=target, loss_fn=functional.mse_loss, num_microbatches=4)
    for one, other in zip(expected[0].parameters(), expected[1].parameters(), strict=True):
        one.grad = (one.grad + other.grad) / 2
    assert_as(pipes[0], expected[0])
    joined = blocks_without_dropout()
    functional.mse_loss(joined(x), y).backward()
    for key, parameter in pipes[0].named_parameters():
        torch.testing.assert_close(parameter.grad, gradients(joined)[key])
    for pipe in pipes:
        pipe.close()


def blocks_without_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def make_replica(model: nn.Sequential, name: str, **place: Any) -> Pipeline:
    cut = [1, 2, 3] if schedules.get(name).chunks_per_rank == 2 else [2]
    options = {"num_microbatches": 4, "boundaries": cut, "loss_fn": functional.mse_loss}
    return Pipeline(model, rows(2), schedule=name, **options, **place)


class Raises(nn.Module):
    """A layer that raises an error in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("a layer's own error")
        return x


def fail_on_the_last_stage(group: Group, name: str) -> None:
    """Check that all ranks raise an error if the last stage fails.

    The ranks do not wait for the timeout of 600 s, which is longer than the test's own time limit.
    """
    actual = nn.Sequential(*blocks(7), Raises())
    pipe = pipeline(group, actual, rows(2), schedule=name, loss_fn=functional.mse_loss)
    own = ZeroDivisionError if has_output(group, pipe) else ExecutionError
    with pytest.raises(own, match="a layer's own error") as caught:
        float(pipe.step(rows(8), target=rows(8)))  # a rank that has run all its actions raises here
    if own is ZeroDivisionError:
        assert caught.value.__notes__[0].startswith(f"in {pipe.num_stages - 1}F2 (stage {pipe.num_stages - 1}")
    else:
        assert f"in {pipe.num_stages - 1}F2 (stage {pipe.num_stages - 1}, micro-batch 2)" in str(caught.value)
    pipe.zero_grad()
    if is_one_process(group):
        expected = nn.Sequential(*blocks(7), nn.Identity())
        compare_step(pipe, expected, rows(8), step=0, loss_fn=functional.mse_loss, target=rows(8), seed=5)
    else:
        with pytest.raises(ExecutionError, match=r"a closed pipeline cannot run; .*make a new pipeline"):
            pipe.step(rows(8), target=rows(8))
    pipe.close()


def draw(group: Group, names: list[str]) -> None:
    matplotlib.use("svg")
    for name in names:
        with pipeline(group, blocks(), rows(2), schedule=name, loss_fn=functional.mse_loss) as pipe:
            pipe.step(rows(8), target=rows(8))
            trace = pipe.gather_trace()
            program = schedules.get(name).program(group.size(), 4)
            shown = Counter(span.action for span in trace.spans if span.lane is Lane.COMPUTE)
            assert shown == Counter(program.columns)
        axes = viz.plot_timeline(trace)
        axes.figure.savefig(io.BytesIO())
        pyplot.close(axes.figure)
