"""A script that runs steps and then ends in different ways, most of them without closing its pipelines.

    python -m tests.support.jobs.exits PLACE SCHEDULE END

PLACE: "threads" (one process) or "mesh" (one process per rank, with torchrun's environment). END: a key of ENDS. After
its steps, the script prints "ran".
"""

import atexit
import builtins
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from pipesched import Pipeline

PIPELINES = 4  # the number of pipelines that are open over one mesh
ENDS = {
    "end of the script": 0,
    "destroy_process_group": 0,
    "close": 0,
    "exception": 1,
    "sys.exit(3)": 3,
    "one step": 0,
    "steps in a daemon thread": 0,
    "a thread joined at exit": 0,
    "close in __del__": 0,
}
#: The ends with a daemon thread that makes steps.
OF_THREADS = ("steps in a daemon thread", "a thread joined at exit")
OWN_ERROR = "ValueError: of the script's own"


def main() -> None:
    place, schedule, end = sys.argv[1:]
    torch.manual_seed(0)  # all ranks make the same model and the same batch
    torch.set_num_threads(1)
    choices = {"devices": ["cpu"] * 3}
    if place == "mesh":
        distributed.init_process_group("gloo")
        choices = {"mesh": init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("pp",))["pp"]}
    if schedule == "pipedream":
        choices["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.01)
    x = torch.randn(24, 64)
    pipes = [
        Pipeline(
            nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))),
            x[:2],
            loss_fn=nn.functional.mse_loss,
            schedule=schedule,
            boundaries=[1, 2] if place == "threads" or distributed.get_world_size() == 3 else [1],
            num_microbatches=12,
            seed=0,
            **choices,
        )
        for _ in range(PIPELINES if place == "mesh" else 1)
    ]
    if end in OF_THREADS:
        stop = step_in_daemon_thread(lambda: pipes[0].step(x, target=x))
        if end == "a thread joined at exit":
            atexit.register(stop)
    if end == "close in __del__":
        builtins.kept = Closes(pipes)  # type: ignore[attr-defined]
    for _ in range(1 if end == "one step" else 3):
        for pipe in pipes[1:] if end in OF_THREADS else pipes:
            pipe.step(x, target=x)
    print("ran", flush=True)
    if end == "close":
        for pipe in pipes:
            pipe.close()
    elif end == "exception":
        raise ValueError("of the script's own")
    elif end == "sys.exit(3)":
        sys.exit(3)
    if end in ("close", "destroy_process_group") and place == "mesh":
        distributed.destroy_process_group()


class Closes:
    """Closes pipelines when Python deletes this object, which is among the last things it does."""

    def __init__(self, pipes: list[Pipeline]) -> None:
        self.pipes = pipes

    def __del__(self) -> None:
        for pipe in self.pipes:
            pipe.close()


def step_in_daemon_thread(step: Callable[[], Any]) -> Callable[[], None]:
    """Start a daemon thread that makes steps, and return after the third: a function that ends and joins the thread."""
    three, ended = threading.Semaphore(0), threading.Event()

    def loop() -> None:
        while not ended.is_set():
            step()
            three.release()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    for _ in range(3):
        three.acquire()

    def stop() -> None:
        ended.set()
        thread.join()

    return stop


if __name__ == "__main__":
    main()
