"""Runs the script jobs/exits.py in one or several processes, and returns their exit codes and their text on stderr."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.jobs.exits import OWN_ERROR

ROOT = Path(__file__).parents[2]
JOB = "tests.support.jobs.exits"
PATIENCE_S = 120


class Exit(NamedTuple):
    """The end of a process.

    code: the exit code, negative for a signal. ran: whether the process printed "ran" as its last line. said: the text
    on stderr, without the traceback of the error that the script raises on purpose.
    """

    code: int
    ran: bool
    said: str


def exits(place: str, schedule: str, end: str, num_ranks: int = 2) -> list[Exit]:
    """Run the script in a place, and return how each process ended.

    place: "threads" (one process), "mesh" (one process per rank, with torchrun's environment) or "torchrun".
    """
    if place == "torchrun":
        return _by_torchrun(schedule, end, num_ranks)
    environment = [_environment({})]
    if place == "mesh":
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num_ranks)}
        environment = [_environment({**common, "RANK": str(rank)}) for rank in range(num_ranks)]
    command = [sys.executable, "-m", JOB, place, schedule, end]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for own in environment
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [
        Exit(process.returncode, out.endswith("ran\n"), _beside_its_own(text))
        for process, (out, text) in zip(started, said, strict=True)
    ]


def _by_torchrun(schedule: str, end: str, num_ranks: int) -> list[Exit]:
    """Run the script under torchrun. Returns torchrun's own Exit; ``said`` lists the signals that ended ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={num_ranks}", "-m", JOB, "mesh", schedule, end]
    run = subprocess.run(
        command, check=False, cwd=ROOT, env=_environment({}), capture_output=True, text=True, timeout=PATIENCE_S
    )
    signals = re.findall(r"exitcode\s*: (-\d+)", run.stderr)
    return [Exit(run.returncode, run.stdout.count("ran") == num_ranks, " ".join(signals))]


def _environment(more: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with ``more`` and with one OpenMP thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def _beside_its_own(text: str) -> str:
    """Return the text on stderr without the traceback of the error that the script raises on purpose."""
    if OWN_ERROR not in text:
        return text
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines()]
    start, stop = lines.index("Traceback (most recent call last):"), lines.index(OWN_ERROR)
    own = all(line.startswith("  ") for line in lines[start + 1 : stop])
    return "\n".join(lines[:start] + lines[stop + 1 :]) if own else text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
