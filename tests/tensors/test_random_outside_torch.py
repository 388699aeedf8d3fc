"""Random numbers from Python's and numpy's global generators are keyed as torch's are."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.tensors.keyed_random import outside_state
from pipesched.testing import reference_step
from tests.support.models import assert_equal_bits, gradients

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Noisy(nn.Module):
    """Draws inside a layer, from both, and from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.linear(x)
        if random.random() < 0.5:
            x = -x
        return self.linear(x) * torch.from_numpy(np.random.rand(6)).float() + torch.rand(6)


class Model(nn.Module):
    """Draws between layers, some of which draw, too, and is told nothing of the draws of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() if number % 3 == 1 else nn.Linear(6, 6) for number in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training:
                x = x * random.gauss(1, 0.1) + torch.tensor(np.random.rand(6), dtype=torch.float32)
            x = torch.tanh(block(x))
        return x


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def made() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_what_is_drawn_depends_on_its_place_alone(num_ranks: int, checkpoint: str) -> None:
    own, plain = made(), made()
    losses = []
    with Pipeline(
        own,
        ROWS[:2],
        loss_fn=square,
        devices=["cpu"] * num_ranks,
        num_microbatches=4,
        seed=3,
        checkpoint=checkpoint,
        schedule="1f1b",
    ) as pipe:
        for step in range(3):
            random.seed(step)  # nor on what others have drawn
            np.random.seed(step)
            before = outside_state()
            loss = pipe.step(ROWS, target=ROWS)
            assert outside_state() == before
            due = reference_step(plain, ROWS, target=ROWS, loss_fn=square, num_microbatches=4, seed=3, step=step)
            assert outside_state() == before
            assert torch.equal(loss, due)
            assert_equal_bits(gradients(own), gradients(plain))
            losses.append(float(loss))
        assert len({*losses}) == 3
        pipe.eval()
        assert torch.equal(pipe.evaluate(ROWS, target=ROWS), pipe.evaluate(ROWS, target=ROWS))


def test_a_capture_and_a_measurement_leave_the_generators_as_they_were() -> None:
    before = outside_state()
    Pipeline(made(), ROWS[:2], loss_fn=square, devices=["cpu"] * 2, schedule="1f1b").close()
    assert outside_state() == before


def test_a_warning_names_the_layer_of_a_sequential_that_draws_random_numbers_outside_torch() -> None:
    row = nn.Sequential(nn.Linear(6, 6), Noisy(), nn.Linear(6, 6))
    with Pipeline(row, ROWS[:2], loss_fn=square, devices=["cpu"] * 3, num_microbatches=4, schedule="1f1b") as pipe:
        pipe.eval()
        pipe.evaluate(ROWS, target=ROWS)
        pipe.train()
        with pytest.warns(
            UserWarning,
            match=r"layers of an nn\.Sequential.* must draw .* from torch; layer '1' draws from Python's or numpy's",
        ):
            pipe.step(ROWS, target=ROWS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(ROWS, target=ROWS)
