"""Jobs that train models of transformers that "auto" divides, and save their weights for other programs.

Imported only in processes that need transformers, because its import takes seconds.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Distributed, Numerics, Pipeline
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.divided_transformers import LENGTH, MODELS, VOCABULARY

SEED, ROWS, CLIP, STEPS = 5, 8, 0.5, 3


def made(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name](attn_implementation="eager").double().train()


def batch(name: str, step: int) -> dict[str, Tensor]:
    """Return inputs with labels, of which different rows leave out different numbers."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = words.clone()
    for row in range(ROWS):
        labels[row, : row % 4] = -100
    mask = torch.ones_like(words)
    mask[ROWS // 2 :, LENGTH - 2 :] = 0
    labels[mask == 0] = -100
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def pipeline(dims: tuple[int, int], model: nn.Module, name: str) -> Pipeline:
    split = dims[1] > 1
    members = torch.arange(dims[0] * dims[1]).view(dims if split else dims[:1])
    mesh = DeviceMesh("cpu", members, mesh_dim_names=("pp", "tp") if split else ("pp",))
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(
            model,
            {key: value[:2] for key, value in batch(name, 0).items()},
            mesh=mesh,
            num_microbatches=4,
            schedule="1f1b",
            seed=SEED,
            optimizer=adam,
            numerics=Numerics(clip_grad_norm=CLIP),
            distributed=Distributed(timeout=60, tensor_parallel="auto" if split else None),
        )


def saved(group: Any, name: str, dims: tuple[int, int], folder: str, load: str = "") -> dict[str, Any]:
    """Train, or load a run and train on; save the run, and its weights in both ways."""
    model = made(name, seed=1 if load else 0)
    with pipeline(dims, model, name) as pipe, warnings.catch_warnings(action="ignore"):
        first = pipe.load(load).step if load else 0
        losses, norms = [], []
        for step in range(first, first + STEPS):
            losses.append(float(pipe.step(**batch(name, step))))
            norms.append(float(pipe.grad_norm))  # type: ignore
        pipe.save(f"{folder}/run")
        pipe.save_weights(f"{folder}/weights")
        pipe.gather_model(rank=0)
        found: dict[str, Any] = {"losses": losses, "norms": norms}
        if group.rank() == 0:
            model.save_pretrained(f"{folder}/pretrained")  # type: ignore
            model.eval()
            with torch.no_grad():
                outputs = model(**batch(name, 90))
            found["loss"], found["logits"] = float(outputs.loss), outputs.logits
            found["state"] = {key: value.clone() for key, value in model.state_dict().items()}
    return found


def loop(name: str, steps: int) -> tuple[list[float], list[float], nn.Module]:
    """Train in plain PyTorch; return the losses, the norms and the model."""
    model = made(name)
    optimizer = adam(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        losses.append(float(reference_step(model, num_microbatches=4, seed=SEED, step=step, **batch(name, step))))
        norms.append(float(clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def read_again(name: str, folder: Path) -> Tensor:
    """Return the logits of the model that transformers reads from a folder."""
    kind: Any = type(made(name))
    model = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: Tensor = model(**batch(name, 90)).logits
    return logits
