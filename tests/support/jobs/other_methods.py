"""Jobs in which the ranks of a pipeline call different methods."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipesched
from pipesched.errors import PipeschedError

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))


def call_others(group: Any, methods: tuple[str, str], inputs: Any, folder: str) -> str:
    """Call a method on rank 0 and another one on rank 1, after a step of both; return the error as text."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pipe = pipesched.Pipeline(
        model,
        X[:4],
        loss_fn=nn.functional.mse_loss,
        mesh=DeviceMesh.from_group(group, "cpu"),
        schedule="1f1b",
        boundaries=[2],
        num_microbatches=4,
        distributed=pipesched.Distributed(timeout=3, inputs=inputs),
    )
    own = (X,) if inputs == "all" or not group.rank() else ()
    target = {"target": X} if own else {}
    calls = {
        "step": lambda: pipe.step(*own, **target),
        "evaluate": lambda: pipe.evaluate(*own, **target),
        "forward": lambda: pipe.forward(*own),
        "save": lambda: pipe.save(Path(folder)),
        "report": pipe.report,
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "gather_model": pipe.gather_model,
        "gather_trace": pipe.gather_trace,
        "full_state_dict": pipe.full_state_dict,
    }
    calls["step"]()
    try:
        calls[methods[group.rank()]]()
    except PipeschedError as error:
        return str(error)
    return "no error"
