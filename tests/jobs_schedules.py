"""What the processes of test_mesh_schedules run: each function in all ranks of a group at once."""

from typing import Any

import torch
from models import ScaledLoss, assert_equal_bits, mixed_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Pipeline, backward, schedules

X, Y = torch.randn(19, 8, generator=torch.Generator().manual_seed(3)), torch.arange(19) % 4
SEED = 5


def pair(group: Any, name: str, **options: Any) -> tuple[Pipeline, Pipeline]:
    """The same pipeline in this process and over the mesh, each over a model and a loss of its own."""
    parts = schedules.get(name).program(group.size(), 4).num_weights
    pipes = []
    for where in ({"devices": ["cpu"] * group.size()}, {"mesh": DeviceMesh.from_group(group, "cpu"), "timeout": 20.0}):
        model, loss_fn = mixed_model(), ScaledLoss()
        model[0].weight.register_hook(lambda grad: grad / 2)
        cut = [len(model) * part // parts for part in range(1, parts)]
        choices = {"num_microbatches": 4, "boundaries": cut, "seed": SEED, "loss_fn": loss_fn, **where, **options}
        pipes.append(Pipeline(model, X[:2], schedule=name, **choices))
    return pipes[0], pipes[1]


def assert_same_weights(expected: Pipeline, actual: Pipeline) -> None:
    """Every rank's own, and all of them gathered."""
    whole, due = actual.full_state_dict(), expected.state_dict()
    assert_equal_bits(whole, due)
    assert_equal_bits(actual.state_dict(), {name: due[name] for name in actual.state_dict()})


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def shared_weights(group: Any, name: str, checkpoint: str) -> None:
    """Losses, gradients, buffers, weights and outputs are those of the pipeline in one process, to the bit."""
    backward.PAYS_FLOPS = 0  # every product is deferred, however small
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
        shares = actual._site.executor.exchange(sorted(name for name, _ in actual.named_parameters()))
        assert sorted(name for share in shares for name in share) == sorted(dict(expected.named_parameters()))
        for pipe in pipes:
            pipe.double()
        losses = [pipe.step(X.double(), target=Y) for pipe in pipes]
        assert torch.equal(*losses)
        assert losses[1].dtype == torch.float64


def assert_same_outputs(expected: Pipeline, actual: Pipeline, group: Any) -> None:
    """On the rank where the first chain ends."""
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
    """Three steps are those of the pipeline in one process, to the bit, whatever the schedule."""
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
