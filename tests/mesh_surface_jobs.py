"""What the processes of test_mesh_surface run: each function in all ranks of a group at once."""

from contextlib import suppress
from typing import Any

import torch
from models import mixed_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import ExecutionError
from pipesched.executors.wire import SHARE
from pipesched.testing import reference_step

X, Y = torch.randn(19, 8, generator=torch.Generator().manual_seed(3)), torch.arange(19) % 4


def pipeline(group: Any, model: nn.Module | None = None, **options: Any) -> Pipeline:
    """A Pipeline over the group."""
    choices = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5, "timeout": 20, **options}
    model = mixed_model() if model is None else model
    choices.setdefault("boundaries", [len(model) * rank // group.size() for rank in range(1, group.size())])
    return Pipeline(model, X[:2], mesh=DeviceMesh.from_group(group, "cpu"), **choices)


def expected_losses(steps: int, model: nn.Module | None = None) -> list[Tensor]:
    model = mixed_model() if model is None else model
    given = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5}
    return [reference_step(model, X, target=Y, step=step, **given) for step in range(steps)]


# ---- the loss -----------------------------------------------------------------------------------------------------


class Waits:
    """Counts the waits for losses of other ranks."""

    def __init__(self, pipe: Pipeline) -> None:
        self.count = 0
        port = pipe._site.executor._wire._ports.short
        recv = port.recv

        def counted(tensors: Any, peer: int, tag: int) -> Any:
            work = recv(tensors, peer, tag)
            return Counted(work, self) if tag == SHARE else work

        port.recv = counted


class Counted:
    def __init__(self, work: Any, waits: Waits) -> None:
        self.work, self.waits = work, waits

    def wait(self) -> None:
        self.waits.count += 1
        self.work.wait()


def who_does_not_look_does_not_wait(group: Any) -> list[int]:
    """The waits before each step and after it, of steps whose loss nobody looks at."""
    with pipeline(group) as pipe:
        waits, counts = Waits(pipe), []
        for _ in range(4):
            pipe.step(X, target=Y)
            counts.append(waits.count)
        return counts


def losses_looked_at_late(group: Any) -> None:
    """In another order than they came, one after closing: the loop's losses to the bit, plain tensors once used."""
    wanted = expected_losses(5)
    with pipeline(group) as pipe:
        losses = [pipe.step(X, target=Y) for _ in range(5)]
        assert all(isinstance(loss, Tensor) for loss in losses)
        unseen = type(losses[4]) is not Tensor
        assert unseen == (group.rank() != group.size() - 1)
        assert torch.equal(torch.stack(losses[3:1:-1]), torch.stack(wanted[3:1:-1]))
    for loss, due in zip(losses, wanted, strict=True):
        assert torch.equal(loss, due)
        assert type(loss) is Tensor
        assert (loss.dtype, loss.requires_grad, loss.grad_fn) == (due.dtype, False, None)


def a_loss_lives_without_its_pipeline(group: Any) -> None:
    pipe = pipeline(group)
    loss = pipe.step(X, target=Y)
    pipe._site.executor.exchange(None)  # nobody drops what another one still waits for
    del pipe
    assert torch.equal(loss, expected_losses(1)[0])


def losses_of_one_that_fails(group: Any) -> tuple[list[Any], list[Any]]:
    """The last rank fails in its third step, having sent the first two losses, of which nobody looked at the second.
    What the others then find in that, and in another pipeline's, of which the last rank ended before it sent it.
    """
    last, results = group.rank() == group.size() - 1, []
    for sent in (True, False):
        with suppress(ExecutionError, ZeroDivisionError), pipeline(group) as pipe:
            losses = [pipe.step(X, target=Y)]
            if last and not sent:
                pipe._site.executor.share = fails
            losses.append(pipe.step(X, target=Y))
            if sent:
                pipe._stages[group.rank()].forward = fails if last else pipe._stages[group.rank()].forward
                pipe.step(X, target=Y)
        results.append([looked_at(losses[-1]) for _ in range(2)])
    return tuple(results)


def fails(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("a layer's own error")


def looked_at(loss: Tensor) -> Any:
    try:
        return float(loss)
    except ExecutionError as error:
        return str(error)
