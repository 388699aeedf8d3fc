"""Files are written whole: an interrupted save leaves the old file, and no other file."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipesched
from pipesched import whole_files
from pipesched.whole_files import write_whole


@pytest.fixture(scope="module")
def savers() -> dict[str, Callable[[Path], Any]]:
    """Name of a file -> a function that saves it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    profile = pipesched.profile(model, x[:4], thorough=False)
    plan = pipesched.tune(profile, num_ranks=2, batch_size=8, num_microbatches=2, all_ranks=True)
    with pipesched.Pipeline(model, x[:4], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, plan=plan) as pipe:
        pipe.step(x, target=x)
        report = pipe.report()
        own = {"plan.json": plan.save, "profile.json": profile.save, "trace.json": pipe.trace.to_chrome}
    return own | {name: report.save for name in NAMES if name.startswith("report")}


NAMES = ("plan.json", "profile.json", "trace.json", "report.html", "report.txt", "report.json", "report.svg")
NAMES += ("report.png",)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:layer times", "ignore:the model is too small")
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_save_leaves_the_old_file(
    savers: dict[str, Callable[[Path], Any]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    savers[name](path)
    old = path.read_bytes()
    assert old

    def fails(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        savers[name](path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "plan.json", "{}")
    assert caught.value.filename == str(tmp_path / "none" / "plan.json")
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "{}")


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for contents in ("first", "second"):
        write_whole(tmp_path / "link", contents)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_text() == contents


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_whole(path, "größer")
    reader.join(30)
    assert read == ["größer".encode()]
    assert stat.S_ISFIFO(path.stat().st_mode)
