"""Updates on the way: the split backward, own schedules, programs; and the memory of older weights."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Costs, Order, Pipeline, Plan, Program, Shape, lower, schedule, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.order import v
from pipesched.program.lowering import add_recompute
from pipesched.program.segments import Segments, enough_steps
from pipesched.program.weight_versions import used_versions
from tests.support.async_replay import (
    CUT,
    KINDS,
    LR,
    SEED,
    Replay,
    ScaledLoss,
    batch,
    data,
    f_grads,
    factors,
    pipeline,
    sgd,
    trained,
    transformer,
    weights_after,
)
from tests.support.models import assert_equal_bits


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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.usefixtures("every_product_deferred")
def test_the_split_backward_works_on_versions(checkpoint: str) -> None:
    """And defers products: their weights' gradients wait for W."""
    models, waited = [transformer(), transformer()], []
    for model, kind in zip(models, ("pipedream", split_pipedream), strict=True):
        with pipeline(model, kind, 3, checkpoint=checkpoint) as pipe:
            stage = pipe._running.assembly.stages[2]
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


@pytest.mark.one_in(4)
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
    with pytest.raises(ScheduleError, match="has 5F0 after the first action of a later step"):
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

    with pytest.raises(ScheduleError, match=r"repeat|gradients of different steps"):
        pipeline(transformer(), odd, 4, boundaries=CUT)
    pipeline(transformer(), odd, 3).close()


@pytest.mark.one_in(3)
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
            versions = pipe._running.assembly.stages[stage].weights._held.values()
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


@pytest.mark.one_in(3)
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
