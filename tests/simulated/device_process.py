"""Tests that run in a process of their own, which has simulated devices: one process for all tests of a folder.

The process collects the folder once. Then it runs each test whose name it gets, and sends back how the test ended.
`python -m tests.simulated.device_process FOLDER` is the other end of :class:`DeviceProcess`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest
from _pytest.runner import runtestprotocol

__all__ = ["DeviceProcess", "Ending"]

_ROOT = Path(__file__).parents[2]
ENVIRONMENT = "PIPESCHED_TESTS_ON_SIMULATED_DEVICES"  # set in the process that has the devices


class Ending(NamedTuple):
    """How a test ended: passed, failed or skipped, and the report or the reason."""

    outcome: str
    text: str


class DeviceProcess:
    """Starts the process with its first test, and again after a crash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # as long as this object

    def run(self, name: str) -> Ending:
        """Run a test by its node id."""
        process = self._process = self._process or self._started()
        try:
            process.stdin.write(f"{json.dumps(name)}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # a timeout or an interrupt: the answer may still come
            self.close(kill=True)
            raise
        if answer:
            return Ending(*json.loads(answer))
        code = process.wait()
        self._process = None
        self._errors.seek(0)
        return Ending("failed", f"the process with simulated devices ended with code {code}\n{self._errors.read()}")

    def close(self, *, kill: bool = False) -> None:
        """End the process."""
        if self._process is not None:
            if kill:
                self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join(filter(None, [str(_ROOT), *sys.path]))
        own = {ENVIRONMENT: "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}  # a process has one accelerator
        return subprocess.Popen(
            [sys.executable, "-m", "tests.simulated.device_process", str(self._folder)],
            cwd=_ROOT,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )


class _Serve:
    """The plugin of the process with the devices: runs the tests that are asked for."""

    def __init__(self, names: TextIO, answers: TextIO) -> None:
        self._names = names
        self._answers = answers

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self._names:
            ending = self._run(items.get(json.loads(line)))
            print(json.dumps(ending), file=self._answers, flush=True)
        return True

    def _run(self, item: pytest.Item | None) -> Ending:
        if item is None:
            return Ending("failed", "the process with simulated devices did not collect this test")
        reports = runtestprotocol(item, nextitem=None, log=False)
        for outcome in ("failed", "skipped"):
            for report in reports:
                if report.outcome == outcome:
                    return Ending(outcome, _text(report))
        return Ending("passed", "")


def _text(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return "\n".join([report.longreprtext, *(f"-- {title}\n{text}" for title, text in report.sections)])


def _main(folder: str) -> None:
    names, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what pytest prints goes to the errors; pytest itself takes the input away from tests
    from tests.simulated.accelerator import start

    start()
    options = ["--exhaustive", "--capture=fd", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([folder, *options], plugins=[_Serve(names, answers)])


if __name__ == "__main__":
    _main(sys.argv[1])
