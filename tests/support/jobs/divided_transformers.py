"""Jobs of the tests of transformers in pipelines: models that "auto" divides train as in a plain loop."""

import warnings
from typing import Any, NamedTuple

import torch

from pipesched import Distributed, Numerics, Pipeline
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support import rank_processes
from tests.support.divided_transformers import LENGTH, MODELS, VOCABULARY

ROWS, MICROBATCHES, SEED, CLIP = 8, 4, 3, 0.5


class Training(NamedTuple):
    """A training run of a model of `MODELS`."""

    name: str
    attention: str = "eager"
    schedule: str = "1f1b"
    num_stages: int = 2
    size: int = 2
    steps: int = 3
    #: the name of a module whose weights are frozen
    frozen: str = ""


def batch_of(case: Training, step: int) -> dict[str, torch.Tensor]:
    """Inputs of which some rows are padded, and labels of which other numbers in each micro-batch do not count."""
    generator = torch.Generator().manual_seed(step)
    numbers = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[3, 6:] = 0
    mask[4, 8:] = 0
    numbers = numbers.masked_fill(mask == 0, 0)
    labels = numbers.masked_fill(mask == 0, -100)
    for row in range(ROWS):
        labels[row, : row % 5] = -100
    batch = {"input_ids": numbers, "attention_mask": mask, "labels": labels}
    if "t5" in case.name:
        batch["decoder_input_ids"] = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return batch


def model_of(case: Training) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[case.name](attn_implementation=case.attention, use_cache=False).train()
    if case.frozen:
        model.get_submodule(case.frozen).requires_grad_(False)
    return model


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(group: Any, case: Training) -> list[float]:
    """Train over stages and tensor ranks, and return the losses."""
    mesh = rank_processes.mesh_of((1, case.num_stages, case.size), ("dp", "pp", "tp"))
    sample = {key: value[: ROWS // MICROBATCHES] for key, value in batch_of(case, 0).items()}
    with warnings.catch_warnings(action="ignore"):
        pipe = Pipeline(
            model_of(case),
            sample,
            mesh=mesh,
            schedule=case.schedule,
            num_microbatches=MICROBATCHES,
            optimizer=sgd,
            numerics=Numerics(clip_grad_norm=CLIP),
            seed=SEED,
            distributed=Distributed(timeout=60, tensor_parallel="auto"),
        )
    with pipe:
        return [float(pipe.step(**batch_of(case, step))) for step in range(case.steps)]


def looped(case: Training) -> list[float]:
    """Train the whole model in a plain loop, and return the losses."""
    model = model_of(case)
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = sgd(parameters)
    losses = []
    for step in range(case.steps):
        batch = batch_of(case, step)
        losses.append(float(reference_step(model, **batch, num_microbatches=MICROBATCHES, seed=SEED, step=step)))
        clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def difference(group: Any, case: Training) -> float:
    """The largest relative difference of the losses from those of the plain loop."""
    found = trained(group, case)
    return max(abs(one - other) / other for one, other in zip(found, looped(case), strict=True))
