"""Tries an installed pipesched, outside the repository: a simulation without torch, a picture, a step, a checkpoint."""

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pipesched

place = Path(pipesched.__file__)
assert Path(sys.prefix) in place.parents, f"{place} is not the installed package"
assert pipesched.__version__ == metadata.version("pipesched"), pipesched.__version__

program = pipesched.schedules.get("zb-h1").program(4, 8)
pipesched.validate(program)
trace = pipesched.simulate(pipesched.lower(program), pipesched.Costs.uniform(4))
assert f"{trace.bubble_ratio:.3f}" == "0.111", trace.bubble_ratio
pipesched.viz.plot_timeline(trace)
assert "torch" not in sys.modules, "a simulation must not import torch"
printed = subprocess.run(["pipesched", "show", "1f1b", "--ranks", "2"], check=True, capture_output=True, text=True)
assert "bubble" in printed.stdout, printed.stdout

import torch  # noqa: E402  # the part above runs without it
from torch import nn  # noqa: E402

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
x, y = torch.randn(8, 8), torch.randn(8, 2)
with pipesched.Pipeline(
    model, x[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b", num_microbatches=4, seed=0
) as pipe:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(float(pipe.step(x, target=y)))
        optimizer.step()
        optimizer.zero_grad()
assert losses[2] < losses[1] < losses[0], losses
with tempfile.TemporaryDirectory() as folder:
    plan = pipesched.tune(model, x[:2], num_ranks=2, batch_size=8, num_microbatches=4, confirm=0, all_ranks=True)
    plan.save(Path(folder) / "plan.json")
    assert pipesched.Plan.load(Path(folder) / "plan.json").program == plan.program
print(f"pipesched {pipesched.__version__} with torch {torch.__version__}: losses {losses}")
