"""Writes the checkpoints of formats 1 and 2, which all later versions of pipesched must load bit-identically.

python -m tests.support.jobs.kept_checkpoint
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from pipesched import Distributed, Pipeline
from tests.support.places import Group, mesh_of
from tests.support.rank_processes import Ranks

FOLDER = Path(__file__).parents[2] / "saving" / "data" / "format-1"


class Run:
    """A small pipeline with tied weights, BatchNorm, dropout, an optimizer, a scheduler and extra values."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        first, last = nn.Linear(3, 3), nn.Linear(3, 3)
        last.weight = first.weight
        model = nn.Sequential(first, nn.BatchNorm1d(3), nn.Dropout(0.2), last)
        options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "boundaries": [2], "seed": seed}
        self.pipe = Pipeline(model, torch.ones(2, 3), loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, **options)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.1, weight_decay=0.3)
        self.scheduler = ExponentialLR(self.optimizer, 0.9)
        self.states: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self) -> None:
        """Train two steps."""
        for step in range(2):
            x = torch.linspace(-1, 1 + step, 12).reshape(4, 3)
            self.pipe.step(x, target=x.flip(0))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def extra(self) -> dict[str, Any]:
        """Return values of several types, for ``extra=``."""
        average = {name: parameter.detach() * 2 for name, parameter in self.pipe.named_parameters()}
        return {"epoch": 3, "order": (torch.arange(3), float("inf"), "text"), "average": average}

    def digest(self, extra: Any) -> str:
        """Return a hash of the step, the seed, all tensors, options and extra values."""
        digest = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype}{list(value.shape)}".encode())
                digest.update(value.detach().contiguous().numpy().tobytes())
            elif isinstance(value, dict):
                add([[key, value[key]] for key in sorted(value)])
            elif isinstance(value, list | tuple):
                digest.update(f"{type(value).__name__}{len(value)}".encode())
                list(map(add, value))
            else:
                digest.update(f"{value!r};".encode())

        pipe = self.pipe
        add([pipe._running.step, pipe._running.seed, dict(pipe.named_parameters()), dict(pipe.named_buffers())])
        state = self.optimizer.state_dict()
        group = state["param_groups"][0]
        add([state["state"], group["lr"], group["betas"], group["weight_decay"], self.scheduler.last_epoch, extra])
        return digest.hexdigest()


DIVIDED = FOLDER.with_name("format-2")


def divided(**where: Any) -> Pipeline:
    """Return a small pipeline with a weight that two replicas divide by rows."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3))
    options: dict[str, Any] = {"schedule": "1f1b", "seed": 4, "optimizer": torch.optim.AdamW, **where}
    return Pipeline(model, torch.ones(2, 16), loss_fn=nn.functional.mse_loss, **options)


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Return a hash of the names, dtypes, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_divided(group: Group) -> None:
    """Train two replicas with zero=2, and save them."""
    where = {"mesh": mesh_of(2, 1), "num_microbatches": 1, "distributed": Distributed(zero=2, timeout=60)}
    with divided(**where) as pipe:
        rows = torch.linspace(-1, 1, 32).reshape(2, 16) + group.rank()
        pipe.step(rows, target=rows[:, :3])
        pipe.save(DIVIDED / "checkpoint")


def main() -> None:
    """Write the checkpoints and the digests of their contents."""
    ranks = Ranks(2)
    ranks.run(2, write_divided, timeout_s=100)
    ranks.close()
    with divided(num_microbatches=2, devices=["cpu"]) as pipe:
        pipe.load(DIVIDED / "checkpoint")
        (DIVIDED / "digest.txt").write_text(digest_of(pipe.training_state()["tensors"]) + "\n")
    run = Run(seed=4)
    with run.pipe:
        run.train()
        run.pipe.save(FOLDER / "checkpoint", **run.states, extra=run.extra())
        (FOLDER / "digest.txt").write_text(run.digest(run.extra()) + "\n")


if __name__ == "__main__":
    main()
