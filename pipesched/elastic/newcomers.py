"""Newcomers: processes that ask to join a running job, and the answers that they get.

A job publishes the addresses of its ranks in a file. A newcomer asks the first rank over the connections of the failure
alarm, and gets its number and the address of a store once the ranks have agreed to let it join between two steps.
"""

import json
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.failure_notices import Address, asked_of
from pipesched.runtime.coordination.rank_activity import ENDED, SILENT
from pipesched.whole_files import write_whole

__all__ = ["Newcomers", "asked_to_join", "publish"]

_PATIENCE_S = 2.0  # how long a rank may take to answer
_PAUSE_S = 0.05  # between two questions


class Newcomers:
    """The processes that have asked this rank to let them join. The alarm's thread and the rank's own share it."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, Any] | None] = {}
        self._asked_s: dict[str, float] = {}  # when each newcomer asked last
        self._lock = threading.Lock()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a newcomer: what it needs to join, or None as long as it has to wait.

        A rank that has noticed a loss earlier may ask who lives. This rank does, and has nothing to say yet.
        """
        if "joins" not in question:
            return {}
        with self._lock:
            self._asked_s[question["joins"]] = time.monotonic()
            return {"join": self._answers.setdefault(question["joins"], None)}

    @property
    def waiting(self) -> list[str]:
        """The newcomers that have no answer yet, and still ask."""
        since_s = time.monotonic() - _PATIENCE_S
        with self._lock:
            return [name for name, answer in self._answers.items() if answer is None and self._asked_s[name] > since_s]

    def accept(self, name: str, answer: dict[str, Any]) -> None:
        """Answer a newcomer that waits."""
        with self._lock:
            self._answers[name] = answer


def publish(path: str | PathLike[str], addresses: Sequence[Address]) -> None:
    """Write the addresses of a job's ranks to a file that only its user may read, because they hold secrets."""
    write_whole(Path(path), json.dumps(addresses), private=True)


def asked_to_join(path: str | PathLike[str], timeout_s: float) -> dict[str, Any]:
    """Ask a job to let this process join, and wait for the answer.

    Raises ExecutionError if there is no answer in time.
    """
    name = secrets.token_hex(8)
    end_s = time.monotonic() + timeout_s
    said = "there is no such file"
    while time.monotonic() < end_s:
        with suppress(OSError, ValueError):
            first = Address(*json.loads(Path(path).read_text())[0])
            (answer,) = asked_of([first], {"joins": name}, _PATIENCE_S)
            said = f"{first.name} of the job does not answer at {first.host}:{first.port}"
            if answer not in (ENDED, SILENT):
                said = f"{first.name} of the job has not let it join"
                if answer.get("join") is not None:
                    return dict(answer["join"])
        time.sleep(_PAUSE_S)
    raise ExecutionError(
        f"a process joins a running job between two of its steps; it has waited {timeout_s:g} s for the job at {path}, "
        f"and {said}; check that the job runs with the same rendezvous=, or pass a larger timeout="
    )
