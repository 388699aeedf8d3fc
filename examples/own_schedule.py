"""Define your own schedule in 30 lines, validate it, train with it, and draw it to runs/own_schedule.png."""

from pathlib import Path

import torch

import pipesched


@pipesched.schedule("slow-link-1f1b")
def slow_link(rank: int, shape: pipesched.Shape) -> pipesched.Order:
    """1F1B with three times as many forwards in the warm-up, to hide slow messages (see Zhuang et al. 2022)."""
    order, ahead = pipesched.Order(shape), 3 * (shape.num_ranks - 1 - rank)
    for microbatch in range(shape.num_microbatches + ahead):
        order.F(rank)  # adds the forward of the next micro-batch, or nothing after the last one
        if microbatch >= ahead:
            order.B(rank)
    return order


pipesched.testing.check_schedule(slow_link)  # every shape up to 8 ranks and 16 micro-batches
x, model = torch.randn(64, 16), torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
with pipesched.Pipeline(model, x[:8], loss_fn=torch.nn.MSELoss(), devices=["cpu"] * 4, schedule=slow_link) as pipe:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    for step in range(8):
        print(f"step {step}: loss {pipe.step(x, target=x):.3f}")
        optimizer.step()
        optimizer.zero_grad()
    Path("runs").mkdir(exist_ok=True)
    pipesched.viz.plot_timeline(pipe.predicted).figure.savefig("runs/own_schedule.png")
