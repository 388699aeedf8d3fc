"""Jobs of spawned ranks that strangers connect to; benchmarks/strangers.py has all kinds of them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "strangers.py"


@pytest.mark.one_in(2)
@pytest.mark.timeout(110)
@pytest.mark.parametrize("kinds", [("half-open", "flood"), ("drip", "replayed", "later")], ids=" ".join)
def test_no_job_dies_of_strangers(kinds: tuple[str, ...]) -> None:
    """They come while it is made, and stay. Its losses are the loop's, to the bit."""
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--steps", "3", "--timeout", "30", "--only", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.count("all bits right") == len(kinds), done.stdout + done.stderr
    assert done.returncode == 0
