"""Executors: the order that runs is the program's, ranks overlap, failures stop all, settings are the caller's."""

import _thread
import gc
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Action, Costs, Numerics, Pipeline, Program, lower, schedules, simulate
from pipesched.errors import DeadlockError, ExecutionError
from pipesched.program.actions import Kind, Lane
from pipesched.program.lowering import add_recompute, add_reductions
from pipesched.runtime.executors import threads as local
from pipesched.runtime.executors.threads import RunSpec, ThreadExecutor
from pipesched.simulation.trace import Trace
from pipesched.testing import FakeStage, run_fake
from tests.support.models import EXACT, KINDS, assert_equal_bits, gradients, mixed_model, synchronous_names
from tests.support.places import even_boundaries
from tests.support.random_programs import fitting

X, Y = torch.randn(16, 8), torch.randint(0, 4, (16,))


def wrapped(name: str, **options: Any) -> Pipeline:
    program = schedules.get(name).program(2, 8)
    if program.num_weights < program.num_stages:  # copies of layers have no running statistics of their own
        options["numerics"] = Numerics(batch_norm="mini-batch")
    return Pipeline(
        mixed_model(),
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=["cpu"] * 2,
        schedule=name,
        num_microbatches=8,
        boundaries=even_boundaries(11, 2 * schedules.get(name).chunks_per_rank),
        **options,
    )


def ran(trace: Trace) -> list[list[Action]]:
    rows: list[list[Action]] = [[] for _ in range(trace.num_ranks)]
    for span in trace.spans:
        rows[span.rank].append(span.action)
    return rows


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", synchronous_names())
def test_the_order_that_ran_is_the_programs(name: str, checkpoint: str) -> None:
    with wrapped(name, checkpoint=checkpoint) as pipe:
        pipe.step(X, target=Y)
        program = lower(add_recompute(pipe.plan.program, checkpoint))
        assert ran(pipe.trace) == [list(order) for order in program.orders]
        spans = pipe.trace.spans
        assert all(span.start_s <= span.end_s for span in spans)
        for rank in range(2):
            row = [span for span in spans if span.rank == rank]
            assert all(a.end_s <= b.start_s for a, b in pairwise(row))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", schedules.names())
def test_ranks_overlap_and_dependencies_hold_in_time(name: str) -> None:
    program = schedules.get(name).program(fitting(name, 3), 6)
    costs = Costs.uniform(program.num_stages, forward_s=0.004, input_grad_s=0.004, weight_grad_s=0.004)
    trace = run_fake(program, costs, sleeping=True)
    rows = trace.by_rank
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert any(a.start_s < b.end_s and b.start_s < a.end_s for a in rows[first] for b in rows[second])
    ends = {span.action: span.end_s for span in trace.spans}
    for span in trace.spans:
        if span.lane is Lane.COMPUTE:
            assert all(ends[need] <= span.start_s for need in program.needs(span.action))


def test_threads_record_the_times_that_a_stage_returns_for_actions_that_its_rank_only_starts() -> None:
    class Reducing(FakeStage):
        def reduced(self) -> dict[int, tuple[float, float]]:
            return {0: (100.0, 102.0)}

    program = lower(add_reductions(schedules.get("1f1b").program(2, 2), 1))
    costs = Costs.uniform(2, forward_s=0, input_grad_s=0, weight_grad_s=0)
    executor = ThreadExecutor([torch.device("cpu")] * 2, 1)
    try:
        run = executor.run(RunSpec(program, {stage: Reducing(stage, costs) for stage in range(2)}), grad=False)
    finally:
        executor.close()

    assert [span.end_s - span.start_s for span in run.spans() if span.action.kind is Kind.REDUCE] == [2, 2]


def test_fake_updates_follow_each_other() -> None:
    stage = FakeStage(2, Costs.uniform(3, forward_s=0, input_grad_s=0, weight_grad_s=0), versions=(0, 2))
    with pytest.raises(ExecutionError, match="must have gradients to apply; 2UPDATE0 has none; move the update after"):
        stage.update(0)
    stage.forward(0, split=False, checkpointed=False)
    stage.backward(0)
    stage.update(0)
    with pytest.raises(ExecutionError, match="uses version 2 of stage 2, but the stage's newest version is 1"):
        stage.forward(1, split=False, checkpointed=False)
    with pytest.raises(ExecutionError, match="update 1 is next, but 2UPDATE2 was called"):
        stage.update(2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", schedules.names())
def test_the_virtual_clock_agrees_with_the_simulator(name: str) -> None:
    program = schedules.get(name).program(4, 6)
    costs = Costs.uniform(program.num_stages, forward_s=3, input_grad_s=2, weight_grad_s=5, transfer_s=1)
    assert run_fake(program, costs).makespan_s == simulate(program, costs).makespan_s
    checkpointed = add_recompute(program, "always")
    assert run_fake(checkpointed, costs).peak_in_flight == simulate(checkpointed, costs).peak_in_flight


def parsed(text: str) -> Program:
    return Program.parse(text)


def test_fake_stages_see_a_deadlock() -> None:
    crossed = parsed("microbatches 2\nrank 0: 0F1 0B1 0F0 0B0\nrank 1: 1F0 1B0 1F1 1B1\n")
    with pytest.raises(DeadlockError, match="rank 0 at 0RECV_B0<1, rank 1 at 1RECV_F0<0"):
        run_fake(crossed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("microbatches 1\nrank 0: 0F0\n", "stage 0 has done F for micro-batch 0; correct"),
        ("microbatches 1\nrank 0: 0F0 0F0 0B0\n", "0F0 would be done twice"),
        ("microbatches 1\nrank 0: 0F0 0B0 0I0 0W0\n", "0I0 would be done twice"),
        ("microbatches 1\nrank 0: 0B0 0F0\n", "0B0 needs F before it"),
        ("microbatches 1\nrank 0: 0F0 0W0 0I0\n", "0W0 needs F, I before it"),
        (
            "microbatches 1\nplacement 0 0\nrank 0: 1F0 0F0 1B0 0B0\n",
            "the value from stage 0 has not arrived; .*\nin 1F0 ",
        ),
        ("microbatches 1\nrank 0: 0F0 0B0\nrank 1: 1B0 1F0\n", "1B0 needs F before it"),
    ],
)
def test_fake_stages_see_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        run_fake(parsed(text))


class Fails(nn.Module):
    """A layer that raises at a given call, in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.at: deque[int] = deque()  # no setting: copies of the layer keep their own
        self.backward_too = False
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls in self.at and not self.backward_too:
            raise ZeroDivisionError("a layer's own error")
        if self.calls in self.at:
            x.register_hook(self.fail)
        return x

    @staticmethod
    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError("a layer's own error")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "chimera"])
@pytest.mark.parametrize("position", [1, 4, 7])
def test_an_error_stops_all_ranks_and_the_next_step_works(name: str, position: int, backward: bool) -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(8)]
    bad = Fails()
    layers.insert(position, bad)
    stages = 4
    ranks = stages // schedules.get(name).chunks_per_rank
    with Pipeline(
        nn.Sequential(*layers),
        X[:2],
        loss_fn=functional.mse_loss,
        devices=["cpu"] * ranks,
        schedule=name,
        num_microbatches=8,
        boundaries=[2, 5, 7],
    ) as pipe:
        bad.at, bad.backward_too = deque([bad.calls + 3]), backward
        with pytest.raises(ZeroDivisionError, match="a layer's own error") as caught:
            pipe.step(X, target=X)
        stage = sum(boundary <= position for boundary in (2, 5, 7))
        note = caught.value.__notes__[-1]
        assert f"stage {stage}, micro-batch 2" in note
        assert f"rank {pipe.plan.program.placement[stage]}" in note
        bad.at = deque()
        pipe.zero_grad()
        assert pipe.step(X, target=X).isfinite()


def test_ranks_are_bound_once_to_a_program_and_anew_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(local.BoundRank):
        def __init__(self, index: int, *others: Any) -> None:
            made.append(index)
            super().__init__(index, *others)

    monkeypatch.setattr(local, "BoundRank", Counted)
    with wrapped("1f1b") as pipe:
        for _ in range(2):
            pipe.step(X, target=Y)
            pipe.evaluate(X, target=Y)
        assert made == [0, 1] * 2  # once for steps, once for evaluations
        with pytest.raises(IndexError):
            pipe.step(X, target=Y + 4)
        pipe.step(X, target=Y)
        assert made == [0, 1] * 3


def test_closing_from_within_a_step_is_an_error_and_no_hang() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with Pipeline(
        model, X[:2], loss_fn=functional.cross_entropy, devices=["cpu"] * 2, num_microbatches=4, schedule="1f1b"
    ) as pipe:
        hook = model[1].register_forward_hook(lambda *_: pipe.close())
        with pytest.raises(ExecutionError, match="after the step has returned"):
            pipe.step(X, target=Y)
        hook.remove()
        assert pipe.step(X, target=Y).isfinite()


def test_other_ranks_stop_early() -> None:
    """When a stage fails at its first micro-batch, the one before it does not go through all of its own."""

    class Stage(FakeStage):
        def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
            if self.index == 1:
                raise ZeroDivisionError
            return super().forward(microbatch, *arrived, split=split, checkpointed=checkpointed)

    program = lower(schedules.get("gpipe").program(2, 50))
    costs = Costs.uniform(2, forward_s=0.002)
    stages = {index: Stage(index, costs) for index in range(2)}
    executor = ThreadExecutor([torch.device("cpu")] * 2, 1)
    with pytest.raises(ZeroDivisionError):
        executor.run(RunSpec(program, stages), grad=False)
    executor.close()
    assert len(stages[0]._state) < 25


def test_settings_of_the_caller_hold_in_the_ranks_and_none_is_changed() -> None:
    seen: dict[str, Any] = {}

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.update(
                grad=torch.is_grad_enabled(),
                autocast=torch.is_autocast_enabled("cpu"),
                dtype=torch.get_autocast_dtype("cpu"),
                default=torch.get_default_dtype(),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                threads=torch.get_num_threads(),
                name=threading.current_thread().name,
            )
            return x * 1

    model = nn.Sequential(Looks(), nn.Linear(8, 4).double())
    before = torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with Pipeline(model, X[:2].double(), devices=["cpu"], numerics=Numerics(intra_op_threads=2)) as pipe:
            with torch.no_grad():
                pipe(X.double())
            assert seen["grad"] is False
            with torch.autocast("cpu", dtype=torch.float16):
                pipe(X.double())
            assert seen == {
                "grad": True,
                "autocast": True,
                "dtype": torch.float16,
                "default": torch.float64,
                "deterministic": True,
                "threads": 2,
                "name": "pipesched rank 0",
            }
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert torch.get_num_threads() == before[0]
    assert torch.initial_seed() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    counted: list[int] = []
    thread = threading.Thread(target=lambda: counted.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert counted == [before[0]]


def test_nothing_of_a_step_waits_for_the_garbage_collector() -> None:
    """The batch, what layers made of it, and its losses: a step that has returned holds none of them."""
    import weakref

    made: list[weakref.ref[torch.UntypedStorage]] = []

    class Notes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            made.extend(weakref.ref(tensor.untyped_storage()) for tensor in (x, y))
            return y

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(output.mean(1), target)
        made.append(weakref.ref(loss.untyped_storage()))
        return loss

    model = nn.Sequential(nn.Linear(8, 8), Notes(), nn.Linear(8, 1))
    with Pipeline(model, X[:2], loss_fn=loss_fn, devices=["cpu"] * 2, num_microbatches=2) as pipe:
        for step in (pipe.step, pipe.evaluate, pipe.step):
            step(X.clone(), target=Y.float())
            gc.collect()
            gc.disable()
            try:
                made.clear()
                x, y = X.clone(), Y.float()
                made.extend(weakref.ref(tensor.untyped_storage()) for tensor in (x, y))
                step(x, target=y)
                del x, y
                assert len(made) >= 2 + 2 * 3
                assert [ref() for ref in made if ref() is not None] == []
            finally:
                gc.enable()


def test_outputs_are_freed_once_sent() -> None:
    """A stage that has sent its output keeps the graph, not the output."""
    import weakref

    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Marks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1  # its backward needs neither x nor y
            outputs.append(weakref.ref(y.untyped_storage()))
            return y

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(sum(ref() is not None for ref in outputs))
            return x.mean().reshape(1, 1).expand(len(x), 1) * 1

    model = nn.Sequential(nn.Linear(8, 8), Marks(), Looks())
    with Pipeline(
        model,
        X[:2],
        loss_fn=functional.mse_loss,
        devices=["cpu"],
        num_stages=2,
        schedule="interleaved-1f1b",
        num_microbatches=8,
        boundaries=[2],
    ) as pipe:
        pipe.step(X, target=torch.zeros(16, 1))
    assert max(alive) <= 8
    assert sum(ref() is not None for ref in outputs) == 0


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", EXACT)
def test_stages_on_one_gpu_train_as_the_loop_does(name: str, checkpoint: str) -> None:
    from pipesched.testing import reference_step

    expected, actual = mixed_model().cuda(), mixed_model()
    x, y = X.cuda(), Y.cuda()
    with Pipeline(
        actual,
        x[:2],
        loss_fn=functional.cross_entropy,
        devices=["cuda:0"] * 2,
        schedule=name,
        num_microbatches=4,
        checkpoint=checkpoint,
        seed=1,
    ) as pipe:
        loss = pipe.step(x, target=y)
        wanted = reference_step(expected, x, target=y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=1)
        assert pipe.trace.makespan_s > 0
    assert torch.equal(loss, wanted)
    assert_equal_bits(gradients(actual), gradients(expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_agree_with_one() -> None:
    losses = []
    for devices in (["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]):
        with Pipeline(
            mixed_model(),
            X[:2].cuda(),
            loss_fn=functional.cross_entropy,
            devices=devices,
            num_microbatches=4,
            seed=1,
            schedule="1f1b",
        ) as pipe:
            losses.append(pipe.step(X.cuda(), target=Y.cuda()).cpu())
    assert torch.equal(*losses)


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [*KINDS, "chimera"])
def test_steps_and_dropped_passes_leave_nothing_behind(name: str) -> None:
    with wrapped(name) as pipe:

        def work() -> None:
            pipe.step(X, target=Y, return_outputs=True)
            pipe.zero_grad()
            pipe(X)
            pipe(X).sum().backward()
            pipe.evaluate(X, target=Y)
            pipe.zero_grad()

        for _ in range(8):
            work()
        before = live_tensors()
        for _ in range(4):
            work()
        assert live_tensors() <= before


def test_normalisation_over_rows_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with pytest.warns(UserWarning, match="normalised separately by layer '1'; to compute running statistics over"):
        Pipeline(model, X[:2], devices=["cpu"], num_microbatches=4).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline(model, X[:2], devices=["cpu"], num_microbatches=1).close()
        Pipeline(model.eval(), X[:2], devices=["cpu"], num_microbatches=4).close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python hears interrupts, which a shell lets jobs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("moment", ["the ranks are waited for", "rank 1 is given its orders"])
def test_an_interrupt_stops_the_ranks_and_the_next_step_is_right(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts: list[int] = []

    class Interrupts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if interrupts:
                interrupts.pop()
                if moment == "the ranks are waited for":
                    _thread.interrupt_main()
                time.sleep(0.05)  # the rank is still busy when the caller wakes up
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Interrupts(), nn.Linear(8, 4))
    with Pipeline(
        model,
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=["cpu"] * 2,
        num_microbatches=4,
        boundaries=[2],
    ) as pipe:
        wanted = pipe.step(X, target=Y)
        grads = {name: grad.clone() for name, grad in gradients(model).items()}
        pipe.zero_grad()
        interrupts.append(1)
        with monkeypatch.context() as patch:
            if moment == "rank 1 is given its orders":

                def interrupted(run_rank: Any, index: int) -> Any:
                    if index == 1:
                        patch.undo()
                        raise KeyboardInterrupt
                    return partial(run_rank, index)

                patch.setattr(local, "partial", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pipe.step(X, target=Y)
        pipe.zero_grad()
        assert torch.equal(pipe.step(X, target=Y), wanted)
        assert_equal_bits(gradients(model), grads)
