"""Jobs of the tests of grids that refuse what they would compute wrongly."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipesched import Distributed, Pipeline
from pipesched.parallel import VocabularyCrossEntropy
from pipesched.testing import reference_step
from tests.support.jobs.tensor_parallel import said

WIDTH = 16


def _linears(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), *(nn.Linear(WIDTH, WIDTH) for _ in range(count)), nn.Identity())


def pipeline(model: nn.Module, styles: Any, layout: Any, loss_fn: Any, **options: Any) -> Pipeline:
    """Return a pipeline of one stage on four ranks."""
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=("dp", "pp", "tp"))
    given = {"timeout": 20, "tensor_parallel": styles, "tensor_layout": layout} | options.pop("distributed", {})
    named: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "seed": 3, "sample": torch.zeros(8, WIDTH)}
    named |= options
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(
            model, named.pop("sample"), mesh=mesh, loss_fn=loss_fn, distributed=Distributed(**given), **named
        )


def entropies(group: Any, layout: Any) -> tuple[list[float], list[float]]:
    """Return the losses of steps with uneven labels, and those of the whole batch in one process."""
    torch.manual_seed(0)
    x, target = torch.randn(8, WIDTH), torch.randint(WIDTH, (8,))
    target[:4] = -100  # all rows of a rank, in the first of two micro-batches
    target[0] = 3
    whole = _linears(3)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    styles = {"0": "begin", "1": "column", "2": "row", "3": "vocabulary"}
    options = {"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1), "sample": x[:4]}
    found, due = [], []
    with pipeline(_linears(3), styles, layout, VocabularyCrossEntropy(), **options) as pipe:
        for _ in range(2):
            found.append(float(pipe.step(x, target=target)))
            loss = functional.cross_entropy(whole(x), target)
            loss.backward()
            due.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return found, due


def outputs(group: Any, layout: Any) -> tuple[list[Any], list[Any]]:
    """Return outputs and metrics of a model with divided logits, and those of one process."""
    torch.manual_seed(0)
    x, target = torch.randn(8, WIDTH), torch.randint(WIDTH, (8,))
    styles = {"0": "begin", "1": "column", "2": "row", "3": "vocabulary"}

    def metrics(logits: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"found": logits.gather(1, target.unsqueeze(1)).mean()}

    due = _linears(3)(x).detach()
    with pipeline(_linears(3), styles, layout, VocabularyCrossEntropy(), sample=x[:4]) as pipe:
        _, evaluated = pipe.evaluate(x, target=target, metrics=metrics, return_outputs=True)
        of_metrics = pipe.metrics["found"]
        with torch.no_grad():
            found = [evaluated, pipe.forward(x), of_metrics]
        _, stepped = pipe.step(x, target=target, metrics=metrics, return_outputs=True)
        found += [stepped, pipe.metrics["found"]]
    metric = metrics(due, target)["found"]
    return [
        torch.as_tensor(one).detach() if isinstance(one, torch.Tensor) else torch.stack(list(one)) for one in found
    ], [
        due,
        due,
        metric,
        due,
        metric,
    ]


class Functional(nn.Module):
    """Layers with dropouts between them that no layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Identity(), nn.Identity()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        change = self.up(self.norm(functional.dropout(x, 0.5, self.training)))
        change = self.down(functional.dropout(change, 0.5, self.training))
        return self.end(x + functional.dropout(change, 0.5, self.training))


def begun(group: Any, boundary: int) -> tuple[float, float]:
    """Return the loss of two stages, the second of which may begin with a dropout, and that of one process."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Functional())
    styles = {"begin": "begin", "norm": "norm", "up": "column", "down": "row", "end": "end"}
    mesh = init_device_mesh("cpu", (1, 2, 4), mesh_dim_names=("dp", "pp", "tp"))
    options = {"sample": x[:4], "mesh": mesh, "boundaries": [boundary]}
    with pipeline(models[0], styles, "2d", functional.mse_loss, **options) as pipe:
        found = float(pipe.step(x, target=x))
    shape = {"num_microbatches": 2, "num_replicas": 1, "seed": 3, "step": 0}
    return found, float(reference_step(models[1], x, loss_fn=functional.mse_loss, target=x, **shape))


class Shared(nn.Module):
    """A pair of layers that share a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.dropout(self.down(self.dropout(self.up(x))))
        return x


def shared(group: Any) -> tuple[float, float]:
    """Return the loss of a model whose dropout runs on whole and on divided activations, and that of one process."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Shared())
    styles = {"up": "column", "down": "row"}
    with pipeline(models[0], styles, "1d", functional.mse_loss, sample=x[:4]) as pipe:
        found = float(pipe.step(x, target=x))
    shape = {"num_microbatches": 2, "num_replicas": 1, "seed": 3, "step": 0}
    return found, float(reference_step(models[1], x, loss_fn=functional.mse_loss, target=x, **shape))


def refused(group: Any) -> dict[str, str]:
    """Return the errors of models whose outputs and losses do not fit the blocks; "" if a pipeline is made."""
    pair = {"1": "column", "2": "row"}
    ended = {"0": "begin", **pair, "3": "end"}
    entropy = VocabularyCrossEntropy()
    cases: dict[str, tuple[nn.Module, dict[str, str], str, Any]] = {
        "no begin": (_linears(), {**pair, "3": "end"}, "2d", functional.mse_loss),
        "no end": (_linears(), {"0": "begin", **pair}, "2d", functional.mse_loss),
        "whole logits": (_linears(), ended, "2d", entropy),
        "whole logits in one dimension": (_linears(3), pair, "1d", entropy),
        "divided logits": (_linears(3), {"0": "begin", **pair, "3": "vocabulary"}, "2d", entropy),
        "divided logits in one dimension": (_linears(3), {**pair, "3": "vocabulary"}, "1d", entropy),
    }
    return {name: said(lambda case=case: pipeline(*case)) for name, case in cases.items()}
