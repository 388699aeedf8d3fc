"""Jobs of test_mesh_schedules: each function runs on all ranks of a group at the same time."""

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline, schedules
from pipesched.errors import ExecutionError
from pipesched.runtime.stage import split_backward as backward
from pipesched.runtime.transport.channels import Outgoing
from tests.support.models import ScaledLoss, assert_equal_bits, mixed_model

X, Y = torch.randn(19, 8, generator=torch.Generator().manual_seed(3)), torch.arange(19) % 4
SEED = 5


def pair(group: Any, name: str, **options: Any) -> tuple[Pipeline, Pipeline]:
    """Return a pipeline in this process and an equal one over the mesh. Each has its own model and loss module."""
    program = schedules.get(name).program(group.size(), 4)
    parts = program.num_weights
    if parts < program.num_stages:  # copies of layers have no running statistics of their own
        options.setdefault("numerics", Numerics(batch_norm="mini-batch"))
    pipes = []
    for where in (
        {"devices": ["cpu"] * group.size()},
        {"mesh": DeviceMesh.from_group(group, "cpu"), "distributed": Distributed(timeout=20.0)},
    ):
        model, loss_fn = mixed_model(), ScaledLoss()
        model[0].weight.register_hook(lambda grad: grad / 2)
        cut = [len(model) * part // parts for part in range(1, parts)]
        choices = {"num_microbatches": 4, "boundaries": cut, "seed": SEED, "loss_fn": loss_fn, "schedule": name}
        pipes.append(Pipeline(model, X[:2], **{**choices, **where, **options}))
    return pipes[0], pipes[1]


def assert_same_weights(expected: Pipeline, actual: Pipeline) -> None:
    """Check this rank's own state and the gathered state bit for bit against the pipeline in one process."""
    whole, due = actual.full_state_dict(), expected.state_dict()
    assert_equal_bits(whole, due)
    assert_equal_bits(actual.state_dict(), {name: due[name] for name in actual.state_dict()})


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def shared_weights(group: Any, name: str, checkpoint: str) -> None:
    """Check that losses, gradients, buffers, weights and outputs are bit-identical to those in one process."""
    backward.PAYS_FLOPS = 0  # defer the weight gradients of all products to W, however small
    expected, actual = pipes = pair(group, name, checkpoint=checkpoint)
    with expected, actual:
        optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9) for pipe in pipes]
        for step, rows in enumerate((19, 6, 3, 19)):
            for pipe in pipes:
                pipe.model[2].p = 0.1 * step
                pipe.model[3][0].weight.requires_grad_(step != 2)
            losses = [pipe.step(X[:rows], target=Y[:rows]) for pipe in pipes]
            assert torch.equal(*losses), step
            due = gradients(expected)
            assert_equal_bits(gradients(actual), {key: due[key] for key, _ in actual.named_parameters() if key in due})
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_weights(expected, actual)
            losses = [pipe.evaluate(X, target=Y) for pipe in pipes]
            assert torch.equal(*losses), step
        assert_same_outputs(expected.eval(), actual.eval(), group)
        shares = actual._running.host.collectives.gathered(sorted(name for name, _ in actual.named_parameters()))
        assert sorted(name for share in shares for name in share) == sorted(dict(expected.named_parameters()))
        for pipe in pipes:
            pipe.double()
        losses = [pipe.step(X.double(), target=Y) for pipe in pipes]
        assert torch.equal(*losses)
        assert losses[1].dtype == torch.float64


def assert_same_outputs(expected: Pipeline, actual: Pipeline, group: Any) -> None:
    """Check the outputs of a forward and an evaluation. Only the last rank has them."""
    with torch.no_grad():
        wanted, found = expected(X), actual(X)
    outputs = actual.evaluate(X, target=Y, return_outputs=True)[1]
    if group.rank() == group.size() - 1:
        assert torch.equal(found, wanted)
        assert torch.equal(outputs, wanted)
    else:
        assert found is None
        assert outputs is None


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.005, momentum=0.9)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def trains(group: Any, name: str) -> None:
    """Check that the losses and weights of three steps are bit-identical to those in one process."""
    program = schedules.get(name).program(group.size(), 4)
    optimizer = {"optimizer": sgd} if program.num_weights == program.num_stages else {}
    pipes = pair(group, name, **optimizer)
    with pipes[0], pipes[1]:
        for rows in (19, 19, 5):
            losses = [pipe.step(X[:rows], target=Y[:rows]) for pipe in pipes]
            assert torch.equal(*losses)
        losses = [pipe.flush() for pipe in pipes]
        assert losses[0] is losses[1] is None or torch.equal(*losses)
        assert_same_weights(*pipes)


def streams(group: Any, name: str, optimizer: Any, checkpoint: str) -> None:
    """Check that the steps of an asynchronous schedule are bit-identical to those in one process.

    Flushes and an evaluation run between the steps. Also compares the traces.
    """
    pipes = pair(group, name, optimizer=optimizer, checkpoint=checkpoint)
    with pipes[0], pipes[1]:
        for step, rows in enumerate((19, 19, 6, 19, 19, 3, 3, 19, 19, 6)):
            losses = [pipe.step(X[:rows], target=Y[:rows]) for pipe in pipes]
            assert torch.equal(*losses), step
            if step == 3:
                assert torch.equal(*[pipe.flush() for pipe in pipes])
                assert [pipe.flush() for pipe in pipes] == [None, None]
            if step == 7:
                assert torch.equal(*[pipe.evaluate(X, target=Y) for pipe in pipes])
        assert torch.equal(*[pipe.flush() for pipe in pipes])
        assert_same_weights(*pipes)
        assert not gradients(pipes[1])
        due, whole, own = pipes[0].trace, pipes[1].gather_trace(), pipes[1].trace
        assert [[span.action for span in row] for row in whole.by_rank] == [
            [span.action for span in row] for row in due.by_rank
        ]
        assert whole.peak_versions == due.peak_versions
        assert len(own.by_rank[group.rank()]) == len(due.by_rank[group.rank()])


def drained(group: Any, name: str) -> None:
    """Check that steps of a Program that contains updates need no flush: each step ends with its updates."""
    program = schedules.get(name).program(group.size(), 4)
    pipes = pair(group, name, optimizer=adam, schedule=program, num_microbatches=None)
    with pipes[0], pipes[1]:
        for _ in range(3):
            assert torch.equal(*[pipe.step(X, target=Y) for pipe in pipes])
            assert pipes[1].flush() is None
        assert_same_weights(*pipes)


def over_mesh(group: Any, model: nn.Module, name: str, **options: Any) -> Pipeline:
    mesh = DeviceMesh.from_group(group, "cpu")
    choices = {"loss_fn": functional.mse_loss, "boundaries": list(range(1, group.size())), "num_microbatches": 2}
    return Pipeline(
        model,
        X[:2],
        mesh=mesh,
        schedule=name,
        optimizer=sgd,
        **{**choices, "distributed": Distributed(timeout=20.0), **options},
    )


class Calls(nn.Module):
    """A layer that multiplies by a weight. Each forward calls ``act`` with its number."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act, self.calls = act, 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.act(self.calls - 1)
        return x * self.weight


def nothing(call: int) -> None:
    return


def fail_in_a_stream(group: Any, name: str, failing: int, backward: bool) -> tuple[float, str, str]:
    """Make stage ``failing`` fail in its eighth micro-batch.

    Returns the seconds of the call that raised, the error, and the error of the next call.
    """
    model = nn.Sequential(*(Calls(nothing) for _ in range(group.size())))

    def fail(call: int) -> None:
        if call == 7:
            raise ZeroDivisionError("a layer's own error")

    if backward:
        counter = Calls(fail)
        model[failing].register_full_backward_hook(lambda *_: [counter(X), None][1])
    else:
        model[failing].act = fail
    said = ["", ""]
    pipe = over_mesh(group, model, name)
    for part in range(2):
        start_s = time.perf_counter()
        try:
            for _ in range(12):
                start_s = time.perf_counter()
                pipe.step(X, target=X)
            pipe.flush()
        except Exception as error:
            said[part] = f"{type(error).__name__}: {error}"
        if not part:
            seconds = time.perf_counter() - start_s
    pipe.close()
    return seconds, *said


def leave_a_stream(group: Any) -> str:
    """Return this rank's error if an exception in rank 0's own code ends its ``with`` block between steps."""
    try:
        with over_mesh(group, nn.Sequential(*(Calls(nothing) for _ in range(group.size()))), "pipedream") as pipe:
            for step in range(6):
                pipe.step(X, target=X)
                if step == 2 and group.rank() == 0:
                    raise KeyError("the user's own")
    except (KeyError, ExecutionError) as error:
        return str(error)
    return "no error"


def no_barrier(group: Any, name: str, key: str) -> bool:
    """Check that rank 0 can begin a step while rank 1 is still running the previous step.

    Rank 1's last forward of a step waits until rank 0 has begun the next step. Returns whether this rank has waited.
    """
    store, held = group.get_group_store(), []

    def begun(call: int) -> None:
        if call == 4 and group.rank() == 0:
            store.set(key, "begun")

    def hold(call: int) -> None:
        if call == 3 and group.rank() == 1:
            store.wait([key], timedelta(seconds=15))
            held.append(True)

    with over_mesh(group, nn.Sequential(Calls(begun), Calls(hold)), name) as pipe:
        for _ in range(4):
            pipe.step(X[:2], target=X[:2])
    return bool(held)


class Widen(nn.Module):
    """A layer with outputs of more than 1 MiB."""

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 20_000)


def long_stream(group: Any, name: str) -> tuple[int, list[int]]:
    """Run 16 steps with long messages. Returns the largest number of sent messages that this rank kept at once.

    Also returns, for each step, the number of messages so far whose layout the receiver did not know.
    """
    kept, announced, count = [], [], [0]
    announce = Outgoing._send_unforeseen

    def counted(end: Outgoing, *args: Any) -> None:
        count[0] += 1
        announce(end, *args)

    model = nn.Sequential(nn.Linear(8, 8), Widen(), nn.Flatten(), Calls(nothing))
    with (
        mock.patch.object(Outgoing, "_send_unforeseen", counted),
        over_mesh(group, model, name, boundaries=[2], loss_fn=lambda output, target: output.square().mean()) as pipe,
    ):
        for _ in range(16):
            pipe.step(X[:7], target=Y[:7])
            ends = [
                end
                for near in pipe._running.host.executor.connected.wire()._neighbours.values()
                for end in near.outgoing
            ]
            kept.append(sum(len(end._sent) + len(end._aside) for end in ends))
            announced.append(count[0])
    return max(kept), announced
