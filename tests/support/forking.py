"""Forking: runs a function in a forked child process."""

import os
import select
import signal
from typing import Any

from pipesched.errors import PipeschedError


def in_child(act: Any) -> str:
    """Run a function in a forked child process, and return its error as text.

    Returns "nothing" if there was no error, and "it waits" if the function has not ended after 30 s.
    """
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = "nothing"
            act()
        except PipeschedError as error:
            text = f"{type(error).__name__}: {error}"
        except BaseException as error:
            text = repr(error)
        os.write(there, text.encode())
        os._exit(0)
    os.close(there)
    ready, _, _ = select.select([here], [], [], 30)
    text = os.read(here, 1 << 16).decode() if ready else "it waits"
    os.close(here)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return text
