"""Jobs of spawned ranks that strangers connect to. test_sockets.py has each kind of stranger at one port."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "strangers.py"


@pytest.mark.exhaustive
@pytest.mark.timeout(110)
@pytest.mark.parametrize("kind", ["half-open", "flood", "drip", "replayed", "later"])
def test_a_job_survives_connections_from_strangers(kind: str) -> None:
    """They come while it is made, and stay. Its losses are the loop's, to the bit."""
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--steps", "3", "--timeout", "30", "--only", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.count("all bits right") == 1, done.stdout + done.stderr
    assert done.returncode == 0
