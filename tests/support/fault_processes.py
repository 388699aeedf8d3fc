"""Fault processes: processes that are forked as ranks, so that one of them may fail, and the store that they share."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path


def forked(job: Callable[[], int], said: Path) -> int:
    """Run a job in a forked process, and return its number. Its exit code is the job's result."""
    process = os.fork()
    if process:
        return process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(said.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
    code = 99
    try:
        code = job()
        atexit._run_exitfuncs()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make a temporary folder. Not tempfile.TemporaryDirectory, because forked processes would remove it at exit."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def store_beside(store: str, folder: Path) -> Iterator[int]:
    """Start a TCPStore in a separate process, and yield its port; yield 0 if ``store`` states that rank 0 starts it."""
    if store == "rank 0":
        yield 0
        return
    process = forked(lambda: _serve(folder / "port"), folder / "store")
    try:
        while not (folder / "port").exists():
            time.sleep(0.01)
        yield int((folder / "port").read_text())
    finally:
        kill(process)


def _serve(file: Path) -> int:
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    file.with_suffix(".new").write_text(str(store.port))
    file.with_suffix(".new").rename(file)
    time.sleep(1000)
    return 0


def kill(process: int) -> None:
    """Kill a process, unless it has ended, and wait for its end."""
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ChildProcessError, ProcessLookupError):
        return
