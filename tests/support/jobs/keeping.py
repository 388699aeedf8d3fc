"""Jobs that train pipelines in which some layers keep their activations, and others recompute or offload them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipesched import Pipeline, schedules
from tests.support import places
from tests.support.models import compare_step, mixed_model

SCHEDULES = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"]
WORDS = ["recompute", "offload", "recompute-cheap"]
LAYERS = ["0", "1", "2", "3.0", "3.1", "4", "5", "6", "7", "8", "9", "10"]  # the layer names of mixed_model
X = torch.randn(11, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (11,), generator=torch.Generator().manual_seed(2))


def wrap(model: nn.Sequential, group: Any, schedule: str, **options: Any) -> Pipeline:
    num_stages = group.size() * schedules.get(schedule).chunks_per_rank
    choices = {"boundaries": places.even_boundaries(12, num_stages), "num_microbatches": 4, "seed": 5, **options}
    return Pipeline(model, X[:2], loss_fn=functional.cross_entropy, schedule=schedule, **places.place(group), **choices)


def assert_trains_as_the_loop(group: Any, schedule: str, checkpoint: Mapping[str, str], steps: int = 2) -> None:
    expected, actual = mixed_model(), mixed_model()
    with wrap(actual, group, schedule, checkpoint=checkpoint) as pipe:
        for step in range(steps):
            compare_step(pipe, expected, X, target=Y, seed=5, step=step)


def mixtures(group: Any) -> None:
    """Train with several schedules, each with a different combination of checkpoint options."""
    with places.every_product_deferred():
        for number, schedule in enumerate(SCHEDULES):
            words = {name: WORDS[(at + number) % len(WORDS)] for at, name in enumerate(LAYERS) if (at + number) % 3}
            assert_trains_as_the_loop(group, schedule, words)
