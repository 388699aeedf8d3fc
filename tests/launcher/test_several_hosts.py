"""`pipesched run` on two hosts, which are network namespaces. Where there can be none the test is skipped.

The launcher of rank 0 waits for the rank on the other host, until that host is lost.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import network_namespaces as hosts

pytestmark = [pytest.mark.hosts, pytest.mark.exhaustive, pytest.mark.timeout(180)]

SCRIPT = """
import signal
from torch import distributed

distributed.init_process_group("gloo")
print("ranks met", flush=True)
if distributed.get_rank() == 1:
    signal.pause()
"""


def start(host, own, at, folder):
    """Start the launcher of a host."""
    command = ["ip", "netns", "exec", own.names[host], sys.executable, "-m", "pipesched", "run", "--ranks", "1"]
    command += ["--of", "2", "--first-rank", str(host), "--address", f"{own.address(0)}:{hosts.PORT}", at]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": f"to{1 - host}"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_the_launcher_with_the_store_ends_after_another_host_is_lost(tmp_path):
    """Linux drops the connections to a host after 30 s without an answer."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    (tmp_path / "script.py").write_text(SCRIPT)
    with hosts.hosts(2) as own:
        first, second = launchers = [start(host, own, "script.py", tmp_path) for host in range(2)]
        try:
            said = []
            for line in first.stdout:
                said.append(line)
                if "the store stays until the ranks of the other hosts have ended" in line:
                    hosts.run("ip", "-n", own.names[0], "link", "set", "to1", "down")
            assert first.wait(10) == 0, said
            assert "[rank 0] ranks met\n" in said
            assert "the store stays" in said[-1]
            second.terminate()
            assert "[rank 1] ranks met\n" in second.communicate(timeout=30)[0]
            assert second.returncode == 1
        finally:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
