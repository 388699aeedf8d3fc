"""Jobs on batches with Python values, on loops over batches, and on optimizers with names."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from pipesched import Distributed, Pipeline
from pipesched.testing import reference_step
from tests.support.models import assert_as

X = torch.randn(13, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(13, 4, generator=torch.Generator().manual_seed(1))
LENGTHS = [1 + row % 4 for row in range(13)]
MASKS = [torch.full((length, 16), float(length)) for length in LENGTHS]
TEXTS = [f"row {row}" for row in range(13)]


class Scale(nn.Module):
    def forward(self, x: Tensor, lengths: Any, masks: Any, texts: Any) -> Tensor:
        assert len(x) == len(lengths) == len(masks) == len(texts)
        parts = [
            (row / length + mask.mean(0)) * (1 + int(text.split()[1]))
            for row, length, mask, text in zip(x, lengths, masks, texts, strict=True)
        ]
        return torch.stack(parts) / max(lengths)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = nn.Linear(8, 16), nn.LayerNorm(16), Scale()
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Any, masks: Any, texts: Any) -> Tensor:
        made: Tensor = self.last(self.scale(self.norm(torch.tanh(self.first(x))), lengths, masks, texts))
        return made


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def batch(rows: int) -> dict[str, Any]:
    return {"x": X[:rows], "lengths": LENGTHS[:rows], "masks": MASKS[:rows], "texts": tuple(TEXTS[:rows])}


def loss_fn(output: Tensor, target: list[Tensor]) -> Tensor:
    return functional.mse_loss(output, torch.stack(target))


def placed(group: Any, inputs: Any, replicas: int = 1) -> dict[str, Any]:
    distributed = Distributed(inputs=inputs, timeout=30)
    if replicas == 1:
        return {"mesh": DeviceMesh.from_group(group, "cpu"), "distributed": distributed}
    mesh = torch.arange(group.size()).reshape(replicas, -1)
    return {"mesh": DeviceMesh("cpu", mesh, mesh_dim_names=("dp", "pp")), "distributed": distributed}


def trains(group: Any, inputs: str, replicas: int = 1) -> None:
    """Check that batches with lists have the bits of the reference step. With replicas, rank 0 passes all rows."""
    expected, actual = scaled(), scaled()
    options: dict[str, Any] = {"loss_fn": loss_fn, "seed": 3, "num_microbatches": 3}
    with Pipeline(actual, batch(2), schedule="1f1b", **options, **placed(group, inputs, replicas)) as pipe:
        for step, rows in enumerate((13, 7, 13)):
            whole = {**batch(rows), "target": list(Y[:rows])}
            given = whole if inputs == "all" or not group.rank() else {}
            loss = pipe.step(**given)
            due = reference_step(expected, **whole, step=step, num_replicas=replicas, **options)
            assert torch.equal(loss, due)
            assert_as(pipe, expected)
        outputs = pipe.evaluate(**given, return_outputs=True, gather=True)[1]
        assert outputs.shape[1:] == (4,)
        assert replicas > 1 or len(outputs) == 13


# ---- the end of the data --------------------------------------------------------------------------------------------


def loops(group: Any, how: str) -> Any:
    """Run a loop over the batches of rank 0 on every rank. Return the number of steps, or the text of the error."""
    rank = group.rank()
    losses = []

    def loader() -> Iterator[int]:
        yield from (13, 7)
        if how == "fails":
            raise RuntimeError("the disk is full")
        yield 11

    options: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": 3, "seed": 3, "schedule": "1f1b"}
    given = loader() if (rank == 0) != (how == "swapped") else None
    with Pipeline(scaled(), batch(2), **options, **placed(group, "first")) as pipe:
        try:
            for rows in pipe.batches(given):
                losses.append(float(pipe.step() if rows is None else pipe.step(**batch(rows), target=list(Y[:rows]))))
                if how == "breaks" and rank == 0 and len(losses) == 2:
                    break
                if how == "leaves" and rank == 1:
                    break
            if how == "leaves":
                pipe.evaluate(**(batch(13) | {"target": list(Y)} if rank == 0 else {}))
            for _ in pipe.batches([] if rank == 0 else None):
                raise AssertionError
            pipe.evaluate(**(batch(13) | {"target": list(Y)} if rank == 0 else {}))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return losses


# ---- optimizers with names ------------------------------------------------------------------------------------------


def decayed(params: Any) -> Optimizer:
    """Exclude biases and norms from weight decay, by name."""
    named = params.named()
    plain = [p for name, p in named if name.endswith("bias") or "norm" in name]
    others = [p for name, p in named if not (name.endswith("bias") or "norm" in name)]
    return AdamW([{"params": others}, {"params": plain, "weight_decay": 0.0}], lr=0.1, weight_decay=0.5)


class Named:
    """Makes a NamedParameters of a whole model, for an optimizer without a pipeline."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named(self) -> list[tuple[str, Any]]:
        return list(self._model.named_parameters())


def decays(group: Any, zero: int, replicas: int) -> None:
    """Check that weight decay by name has the results of one optimizer of the whole model."""
    expected, actual = scaled(), scaled()
    optimizer = decayed(Named(expected))
    options: dict[str, Any] = {"loss_fn": loss_fn, "seed": 3, "num_microbatches": 2}
    place = placed(group, "first", replicas)
    place["distributed"] = Distributed(inputs="first", timeout=30, zero=zero)
    with Pipeline(actual, batch(2), schedule="1f1b", optimizer=decayed, **options, **place) as pipe:
        for step in range(3):
            whole = {**batch(12), "target": list(Y[:12])}
            pipe.step(**(whole if not group.rank() else {}))
            reference_step(expected, **whole, step=step, num_replicas=replicas, **options)
            optimizer.step()
            optimizer.zero_grad()
        state = pipe.full_state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value)
