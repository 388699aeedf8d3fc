"""Streams: no rank waits where a step ends; what flushes, what ends one, errors under way."""

import copy
import functools
import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Kind, Numerics, Pipeline
from pipesched.errors import ExecutionError, InputError, ModelTypeError, ScheduleError
from pipesched.runtime.executors.device_streams import CpuStreams
from tests.support.async_replay import (
    ASYNCHRONOUS,
    batch,
    mse,
    pipeline,
    sgd,
    transformer,
    weights_after,
)
from tests.support.models import assert_equal_bits


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
    monkeypatch.setattr(CpuStreams, "has_streams", True)
    monkeypatch.setattr(CpuStreams, "catch_up", lambda streams, stamp: told.append(stamp))
    with pipeline(transformer(), name, 3) as pipe:
        for step in range(3):
            pipe.step(batch(step)[0], target=batch(step)[1])
            assert len(told) == 3 * max(1, step)
            ends = [span.end_s for span in pipe.trace.spans if span.action.kind is Kind.F and span.rank == 2]
            assert len(ends) == 3 * max(1, step)
            seconds = pipe._running.host.executor.streams_of_rank[2].reader(pipe._running.stream._run.start_s)
            assert seconds(told[-1]) >= max(ends)


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


@pytest.mark.one_in(9)
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
def test_reading_the_weights_flushes_the_stream(name: str, between: Callable[[Pipeline], object]) -> None:
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
    before = set(threading.enumerate())  # other tests may have left pipelines to the garbage collector
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
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("pipesched")]
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
        assert all(stage.weights is None and not stage._saved for stage in pipe._running.assembly.stages.values())
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
        with pytest.raises(ExecutionError, match=r"(step|flush)\(\) was called from inside a running step"):
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
    with pytest.raises(
        ModelTypeError,
        match="with 14 parameters the function returned an optimizer with 16 other parameters; pass only params to the",
    ):
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
        with pytest.raises(ExecutionError, match="no step has run under this plan yet; call step"):
            _ = pipe.trace
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
    with pipeline(
        transformer(), "pipedream", 4, numerics=Numerics(loss_weight=lambda target: float(target.any()))
    ) as pipe:
        pipe.step(x, target=y)
        assert pipe.flush().isfinite()
        last = pipe.optimizers[2].state[pipe.model[5].weight]["momentum_buffer"]
        assert last.isfinite().all()


def test_a_pipeline_that_is_dropped_with_steps_under_way_ends_its_threads() -> None:
    pipe = pipeline(transformer(), "pipedream", 3)
    weights_after(pipe, 7)
    pipe.step(batch(1)[0], target=batch(1)[1])
    threads = pipe._running.host.executor._threads
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


# ---- batches that the caller changes ----


def asynchronous(schedule, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    given = {"devices": ["cpu"] * 2, "boundaries": [2], "num_microbatches": 4, "optimizer": sgd, **options}
    return Pipeline(model, torch.randn(2, 8), loss_fn=nn.MSELoss(), schedule=schedule, **given)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("what", ["input", "target"])
def test_a_batch_that_is_refilled_while_backwards_still_read_it_is_an_error(schedule, what):
    x, y = torch.randn(2, 8, 8)
    with asynchronous(schedule) as pipe:
        pipe.step(x, target=y)
        (x if what == "input" else y).normal_()
        with pytest.raises(InputError, match=r"must not be changed in place until its backwards have run, . steps"):
            pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))


def test_a_batch_that_is_changed_before_flush_is_an_error():
    x, y = torch.randn(2, 8, 8)
    with asynchronous("pipedream") as pipe:
        pipe.step(x, target=y)
        x.zero_()
        with pytest.raises(InputError, match="the batch of step 0 of this stream was changed"):
            pipe.flush()


def test_memory_may_be_refilled_once_the_backwards_have_run():
    """As the error says; the results are those of new tensors."""
    weights = []
    for reuses in (False, True):
        memories = [torch.empty(2, 8, 8) for _ in range(3)]
        with asynchronous("pipedream", seed=1) as pipe:
            assert pipe.step(*torch.zeros(1, 8, 8), target=torch.zeros(8, 8)).isfinite()
            assert pipe._running.stream._kept._kept.maxlen < len(memories)
            for step in range(7):
                values = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
                x, y = memories[step % 3].copy_(values) if reuses else values
                pipe.step(x, target=y)
            pipe.flush()
            weights.append([parameter.detach().clone() for parameter in pipe.parameters()])
    assert all(map(torch.equal, *weights))
