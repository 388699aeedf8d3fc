"""Values between layers that are no plain tensors, over processes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Pipeline
from pipesched.errors import GraphError
from pipesched.testing import reference_step
from tests.capture.test_function_transforms import Windows, gradient, members, with_code
from tests.capture.test_values_between_layers import LENGTHS, WORDS, Made, Nested, Recurrent, padded
from tests.support.odd_models import FLOATS, made, square
from tests.support.places import Group
from tests.support.rank_processes import Ranks

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "packed sequences": (type("Packed", (Recurrent,), {"pack": padded}), (WORDS, LENGTHS)),
    "vmap over weights": (with_code(members), (FLOATS,)),
    "grad of an activation": (with_code(gradient), (FLOATS,)),
    "mask of nested vmaps": (Windows, (WORDS,)),
}


def pipeline(group: Group, model: nn.Module, args: tuple[Tensor, ...], schedule: str) -> Pipeline:
    mesh = DeviceMesh.from_group(group, "cpu")
    sample = tuple(value[:2] for value in args)
    return Pipeline(model, sample, mesh=mesh, loss_fn=square, num_microbatches=4, seed=5, schedule=schedule)


def train(group: Group, name: str) -> None:
    make, args = CASES[name]
    target = torch.zeros(8, 8)
    for schedule in ("1f1b", "zb-h1"):
        own, plain = made(make), made(make)
        with pipeline(group, own, args, schedule) as pipe:
            for step in range(2):
                due = reference_step(plain, *args, target=target, loss_fn=square, num_microbatches=4, seed=5, step=step)
                assert torch.equal(pipe.step(*args, target=target), due)
            expected = dict(plain.named_parameters())
            for key, parameter in pipe.named_parameters():
                grad, due = parameter.grad, expected[key].grad
                assert (grad is due is None) or torch.equal(grad, due), key


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_like_the_loop(ranks: Ranks, name: str) -> None:
    ranks.run(2, train, name)


def refuse(group: Group, kind: type[Nested]) -> None:
    remedy = r"convert the tensor before it leaves the layer \(to_dense, torch\.nested\.to_padded_tensor\)"
    with pytest.raises(GraphError, match=f"only plain, strided tensors; stage 0 sends a tensor of layout .*; {remedy}"):
        pipeline(group, made(kind), (FLOATS, LENGTHS), "1f1b")


@pytest.mark.parametrize("kind", [Nested, Made])
def test_processes_do_not_exchange_jagged_tensors(ranks: Ranks, kind: type[Nested]) -> None:
    ranks.run(2, refuse, kind)
