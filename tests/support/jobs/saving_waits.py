"""Jobs of test_waits: saves and loads in which one rank's work is stuck, slow, or fails."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from pipesched import Distributed, Pipeline
from pipesched.errors import CheckpointError, ExecutionError
from pipesched.progress import advance
from pipesched.saving import manifest, writing
from tests.support import places

X = torch.linspace(-1, 1, 64).reshape(8, 8)
TIMEOUT_S = 1.0


class Kept(nn.Linear):
    """A layer with an extra state, which calls a function when the state is loaded."""

    call: Callable[[], None] = staticmethod(lambda: None)

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        self.call()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Slow:
    """An object whose state takes half of the timeout to make and to load, on one rank."""

    def __init__(self, here: bool) -> None:
        self.pause_s = TIMEOUT_S / 2 if here else 0.0

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.pause_s)
        return {"kept": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(self.pause_s)


def piped(group: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        nn.Sequential(Kept(8, 8), Kept(8, 8)),
        X[:2],
        loss_fn=functional.mse_loss,
        schedule="1f1b",
        boundaries=[1],
        num_microbatches=4,
        seed=0,
        **{**places.place(group), "distributed": Distributed(timeout=TIMEOUT_S)},
    )


@contextmanager
def doing(where: str, pipe: Pipeline, act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` whenever this rank reaches a part of a save or a load."""
    flush, hash_of, commit = os.fsync, manifest.hash_of, writing.commit
    with pytest.MonkeyPatch.context() as patch:
        if where == "write":
            patch.setattr(os, "fsync", lambda file: (act(), flush(file))[1])
        elif where == "commit":
            patch.setattr(writing, "commit", lambda *args: (act(), commit(*args))[1])
        elif where == "hash":
            patch.setattr(manifest, "hash_of", lambda path: (act(), hash_of(path))[1])
        else:
            patch.setattr(Kept, "call", staticmethod(act))
        yield


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CheckpointError, ExecutionError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stuck(group: Any, folder: str, where: str, rank: int, background: bool) -> tuple[str, str, str]:
    """Return the errors of a save or load in which ``rank`` is stuck, of a save then, and of one after its end."""
    pipe, release = piped(group), threading.Event()
    loads = where in ("hash", "set_extra_state")
    if loads:
        pipe.save(folder)

    def save() -> None:
        pipe.save(folder, asynchronous=background)
        if background:
            pipe.save(folder)

    with doing(where, pipe, (lambda: release.wait(30) and None) if group.rank() == rank else lambda: None):
        first = error_of(lambda: pipe.load(folder) if loads else save())
        second = "" if loads else error_of(lambda: pipe.save(folder))
        release.set()
        for thread in [one for one in threading.enumerate() if one.name == "pipesched saving"]:
            thread.join(30)
    distributed.barrier(group=group)
    third = error_of(lambda: (pipe.save(folder), pipe.load(folder)))
    pipe.close()
    return first, second, third


def slow(group: Any, folder: str) -> None:
    """Save and load while a rank takes longer than the timeout, and finishes a part often."""
    pipe = piped(group)

    def act() -> None:
        for _ in range(6):
            time.sleep(TIMEOUT_S / 5)
            advance()

    with doing("write", pipe, act if group.rank() else lambda: None):
        pipe.save(folder)
    with doing("hash", pipe, act if group.rank() else lambda: None):
        pipe.load(folder)
    objects = {str(at): Slow(group.rank() == 1) for at in range(3)}
    pipe.save(folder, extra=objects)
    pipe.load(folder, extra=objects)
    pipe.close()


def fails(group: Any, folder: str, rank: int, background: bool) -> str:
    """Return the error of a save in which the disk of ``rank`` is full."""
    pipe = piped(group)

    def act() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save() -> None:
        pipe.save(folder, asynchronous=background)
        if background:
            pipe.load(folder)

    with doing("write", pipe, act if group.rank() == rank else lambda: None):
        said = error_of(save)
    pipe.save(folder)
    pipe.close()
    return said
