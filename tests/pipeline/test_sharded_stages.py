"""Stages that ``fully_shard`` divides among replicas: one gather and one reduction a module and step, W with work."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipesched import Distributed, Numerics, Pipeline, schedules
from pipesched.errors import ExecutionError, GraphError, ScheduleError
from pipesched.model.sharded_modules import ShardedModules
from pipesched.runtime.stage import layer_runner
from pipesched.testing import MemoryMeter, clip_grad_norm_
from tests.support import places
from tests.support.branching_models import Looped, square
from tests.support.collectives import counted
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

ROWS, M = 8, 4  #: rows of each replica and step; micro-batches of a step
BLOCKS = 4


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(Looped(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))) for _ in range(BLOCKS))
    )


def meshes(replicas: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh, int, int]:
    """The mesh of shards, that of the pipeline, the number of this replica, and how many replicas there are."""
    names = ("replicate", "shard")[-len(replicas) :]
    count = torch.Size(replicas).numel()
    mesh = init_device_mesh("cpu", (*replicas, distributed.get_world_size() // count), mesh_dim_names=(*names, "pp"))
    shards = mesh[names]
    number = int((shards.mesh == distributed.get_rank()).flatten().nonzero())
    return shards, mesh["pp"], number, count


def sharded(mesh: DeviceMesh, each: str, **options: Any) -> Callable[[nn.Module, int], nn.Module]:
    """A function for ``wrap=`` that shards each block, the stage, or both."""

    def wrap(module: nn.Module, stage: int) -> nn.Module:
        for part in [*reversed(list(module.modules()))]:
            if ("blocks" in each and isinstance(part, Looped)) or ("stage" in each and part is module):
                fully_shard(part, mesh=mesh, **options)
        return module

    return wrap


@contextmanager
def deferred() -> Iterator[list[int]]:
    """The number of weight gradients that each W computes."""
    plain, counts = layer_runner.weight_grad, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_runner, "weight_grad", lambda products: (counts.append(len(products)), plain(products))[1])
        yield counts


def batches(steps: int, replicas: int) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    for _ in range(steps):
        yield torch.randn(replicas * ROWS, 8), torch.randn(replicas * ROWS, 8)


def assert_gradients(pipe: Pipeline, plain: nn.Module) -> None:
    due = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert isinstance(parameter, DTensor)
        if due[name].grad is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad.full_tensor(), due[name].grad, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("replicas", "schedule", "each", "checkpoint"),
    [
        ((2,), "1f1b", "blocks and stage", "never"),
        ((2,), "zb-h1", "stage", "never"),
        ((2,), "zb-v", "blocks", "always"),
        ((2, 2), "1f1b", "blocks", "never"),
        ((4,), "zb-h1", "blocks and stage", {"1": "recompute"}),
    ],
)
def test_a_step_gathers_and_reduces_each_module_once(
    ranks: Ranks, replicas: tuple[int, ...], schedule: str, each: str, checkpoint: Any
) -> None:
    ranks.run(4, once, replicas, schedule, each, checkpoint)


def once(group: Any, replicas: tuple[int, ...], schedule: str, each: str, checkpoint: Any) -> None:
    """Steps with an evaluation before each, whose weights must not stay; clipped, and updated by the script."""
    shards, ranks, number, count = meshes(replicas)
    own = blocks()
    plain = copy.deepcopy(own)
    with (
        places.every_product_deferred(),
        Pipeline(
            own,
            torch.ones(2, 8),
            loss_fn=square,
            mesh=ranks,
            schedule=schedule,
            num_microbatches=M,
            wrap=sharded(shards, each),
            boundaries={1: None, 2: [2] if schedule != "zb-v" else [1, 2, 3]}[ranks.size()],
            checkpoint=checkpoint,
            distributed=Distributed(timeout=20),
        ) as pipe,
    ):
        num_blocks = BLOCKS // ranks.size()
        modules = num_blocks if "blocks" in each else 1
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pipe, plain)]
        for step, (x, y) in enumerate(batches(2, count)):
            mine = slice(number * ROWS, (number + 1) * ROWS)
            with counted() as calls:
                pipe.evaluate(x[mine], target=y[mine])
            assert calls == {"gather": modules}
            assert all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
            with counted() as calls, deferred() as products:
                pipe.step(x[mine], target=y[mine])
            assert calls == {"gather": modules, "reduce": modules} | ({"all-reduce": modules} if replicas[1:] else {})
            zero_bubble = schedule.startswith("zb")
            assert sum(products) == zero_bubble * 2 * num_blocks * (M - (step == 0))  # the first one is learned from
            square(plain(x), y).backward()
            torch.testing.assert_close(pipe.clip_grad_norm_(0.1), clip_grad_norm_(plain.parameters(), 0.1))
            assert_gradients(pipe, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_without_gather_once_the_flags_of_the_modules_decide(ranks: Ranks) -> None:
    ranks.run(4, as_flagged)


def as_flagged(group: Any) -> None:
    """The evaluation leaves no weights gathered, so that the step after it does not take the stage for a plain one."""
    shards, ranks, number, count = meshes((2,))
    own = blocks()
    plain = copy.deepcopy(own)
    with (
        places.every_product_deferred(),
        Pipeline(
            own,
            torch.ones(2, 8),
            loss_fn=square,
            mesh=ranks,
            schedule="zb-h1",
            num_microbatches=M,
            wrap=sharded(shards, "stage", reshard_after_forward=True),
            boundaries=[2],
            distributed=Distributed(timeout=20, gather_once=False),
        ) as pipe,
    ):
        for x, y in batches(2, count):
            mine = slice(number * ROWS, (number + 1) * ROWS)
            pipe.evaluate(x[mine], target=y[mine])
            assert all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
            with counted() as calls, deferred() as products:
                pipe.step(x[mine], target=y[mine])
            assert calls == {"gather": 2 * M, "reduce": M}
            assert products == []
            square(plain(x), y).backward()
            assert_gradients(pipe, plain)


def test_an_optimizer_of_the_pipeline_updates_shards(ranks: Ranks) -> None:
    ranks.run(4, updated)


def updated(group: Any) -> None:
    """Clipping and updates are actions of the step, after the reduction of their stage."""
    shards, ranks, number, count = meshes((2,))
    own = blocks()
    own[0].requires_grad_(False)
    own[3].layers[1].requires_grad_(False)
    plain = copy.deepcopy(own)
    with (
        places.every_product_deferred(),
        Pipeline(
            own,
            torch.ones(2, 8),
            loss_fn=square,
            mesh=ranks,
            schedule="zb-h1",
            num_microbatches=M,
            wrap=sharded(shards, "blocks and stage"),
            boundaries=[2],
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
            numerics=Numerics(clip_grad_norm=0.1),
            distributed=Distributed(timeout=20),
        ) as pipe,
    ):
        optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        for x, y in batches(2, count):
            with counted() as calls:
                pipe.step(x[number * ROWS : (number + 1) * ROWS], target=y[number * ROWS : (number + 1) * ROWS])
            assert calls["gather"] == 2
            assert calls["reduce"] == (1 if ranks.get_local_rank() == 0 else 2)
            optimizer.zero_grad()
            square(plain(x), y).backward()
            clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
        due = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), due[name], rtol=1e-4, atol=1e-5)


def test_mixed_precision_sums_in_the_dtype_of_the_reduction(ranks: Ranks) -> None:
    ranks.run(4, mixed)


def mixed(group: Any) -> None:
    """W delivers bfloat16 gradients, which are added up in float32 like those of whole backwards."""
    shards, ranks, number, count = meshes((2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    grads, counts = [], []
    for schedule, gather_once in (("zb-h1", True), ("1f1b", False)):
        with (
            places.every_product_deferred(),
            Pipeline(
                blocks(),
                torch.ones(2, 8),
                loss_fn=square,
                mesh=ranks,
                schedule=schedule,
                num_microbatches=M,
                wrap=sharded(shards, "blocks", mp_policy=policy),
                boundaries=[2],
                distributed=Distributed(timeout=20, gather_once=gather_once),
            ) as pipe,
        ):
            with deferred() as products:
                for x, y in batches(2, count):
                    pipe.step(x[number * ROWS : (number + 1) * ROWS], target=y[number * ROWS : (number + 1) * ROWS])
            grads.append([parameter.grad.to_local() for parameter in pipe.parameters()])
            counts.append(sum(products))
    assert counts == [4 * (2 * M - 1), 0]
    for one, other in zip(*grads, strict=True):  # sums of bfloat16 would differ by 1e-3
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_process_without_gradients_reduces_with_the_others(ranks: Ranks) -> None:
    ranks.run(2, without_gradients)


def without_gradients(group: Any) -> None:
    """All losses of one process have weight 0, so that it runs no backward."""
    shards = DeviceMesh.from_group(group, "cpu")
    own = sharded(shards, "blocks")(blocks(), 0)
    modules = ShardedModules.of(own, torch.device("cpu"), once=True)
    assert modules is not None
    modules.gather()
    loss = own(torch.ones(2, 8)).sum()
    if group.rank() == 0:
        loss.backward()
        modules.has_gradients = True
    modules.reduce()
    plain = blocks()
    (plain(torch.ones(2, 8)).sum() / 2).backward()
    for one, due in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), due.grad)


# ---- refused, and failed ---------------------------------------------------------------------------------------------


def test_a_sharded_stage_cannot_have_several_weight_versions_or_threads(ranks: Ranks) -> None:
    ranks.run(2, refused)


def refused(group: Any) -> None:
    shards = DeviceMesh.from_group(group, "cpu")
    options: Any = {"loss_fn": square, "devices": ["cpu"] * 2, "wrap": sharded(shards, "stage"), "boundaries": [2]}
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    with pytest.raises(ScheduleError, match="schedule 'pipedream' updates stages during that time; choose another"):
        Pipeline(blocks(), torch.ones(2, 8), schedule="pipedream", num_microbatches=M, **options, **sgd)
    with pytest.raises(GraphError, match="2 ranks of this process have such stages; pass mesh="):
        Pipeline(blocks(), torch.ones(2, 8), schedule="1f1b", num_microbatches=M, **options)


def test_tied_weights_cannot_be_sharded(ranks: Ranks) -> None:
    ranks.run(2, tied)


def tied(group: Any) -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(GraphError, match="must not change layers or weights that are used several times"):
        Pipeline(
            nn.Sequential(layer, nn.Tanh(), layer),
            torch.ones(2, 8),
            loss_fn=square,
            devices=["cpu"],
            wrap=sharded(DeviceMesh.from_group(group, "cpu"), "stage"),
        )


def test_after_a_failed_step_a_sharded_stage_says_that_it_cannot_go_on(ranks: Ranks) -> None:
    ranks.run(2, failed)


def failed(group: Any) -> None:
    """In one process, where a failed step would leave other pipelines usable: whole gradients lie in FSDP2."""
    own = blocks()
    fails = [False]

    def fail(*_: Any) -> None:
        if fails[0]:
            raise ValueError("once")

    own[2].register_forward_hook(fail)
    x = torch.ones(ROWS, 8)
    with Pipeline(
        own,
        x[:2],
        loss_fn=square,
        devices=["cpu"],
        num_microbatches=M,
        wrap=sharded(DeviceMesh.from_group(group, "cpu"), "blocks"),
    ) as pipe:
        pipe.step(x, target=x)
        fails[0] = True
        with pytest.raises(ValueError, match="once"):
            pipe.step(x, target=x)
        fails[0] = False
        with pytest.raises(ExecutionError, match="cannot run after a failed run"):
            pipe.step(x, target=x)


def test_a_module_that_was_not_reduced_is_an_error(ranks: Ranks) -> None:
    ranks.run(2, unreduced)


def unreduced(group: Any) -> None:
    own = blocks()
    x = torch.ones(ROWS, 8)
    with Pipeline(
        own,
        x[:2],
        loss_fn=square,
        devices=["cpu"],
        num_microbatches=M,
        wrap=sharded(DeviceMesh.from_group(group, "cpu"), "blocks"),
    ) as pipe:
        block = own[1]
        assert isinstance(block, FSDPModule)
        plain = block.set_reshard_after_backward
        block.set_reshard_after_backward = lambda _, **options: plain(False, **options)  # type: ignore[method-assign]
        with pytest.raises(ExecutionError, match="the gradients of at least one of 4 modules were not reduced"):
            pipe.step(x, target=x)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("dims", "schedule", "each", "updates"),
    [
        ((1, 2, 2), "1f1b", "blocks and stage", False),
        ((1, 2, 2), "zb-h1", "blocks", True),
        ((2, 2, 1), "interleaved-1f1b", "blocks and stage", True),
        ((1, 4, 1), "zb-v", "blocks", False),
    ],
)
def test_a_rank_holds_no_more_than_predicted(
    ranks: Ranks, dims: tuple[int, int, int], schedule: str, each: str, updates: bool
) -> None:
    """A rank holds its shards, the gathered weights and whole gradients."""
    for ratio in ranks.run(4, predicted_to_held, dims, schedule, each, updates):
        assert 1 <= ratio <= 1.25


def predicted_to_held(group: Any, dims: tuple[int, int, int], schedule: str, each: str, updates: bool) -> float:
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "fsdp", "pp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Looped([nn.Linear(64, 64)]) for _ in range(16)))
    count = dims[2] * schedules.get(schedule).chunks_per_rank
    pipe = Pipeline(
        model,
        torch.ones(2, 64),
        loss_fn=square,
        mesh=mesh,
        schedule=schedule,
        num_microbatches=M,
        boundaries=[16 * stage // count for stage in range(1, count)],
        wrap=sharded(mesh["fsdp"], each),
        optimizer=torch.optim.Adam if updates else None,
        distributed=Distributed(timeout=20),
    )
    with pipe, MemoryMeter(pipe) as meter:
        predicted = pipe.predicted_memory[mesh.get_local_rank("pp")]
        for _ in range(2):
            meter.mark()
            pipe.step(torch.ones(2 * M, 64), target=torch.ones(2 * M, 64))
            if not updates:
                pipe.zero_grad()
        (peak,) = meter.peak_bytes.values()
    return predicted.total_bytes / (peak + predicted.batch)
