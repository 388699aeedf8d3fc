"""`pipesched run`: ranks start, share the launcher's store, and go on without those that are lost."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipesched.cli.main import main

ROOT = Path(__file__).parents[2]

#: Waits until a rank has ended, and the launcher has noticed; or until a file exists.
WAITING = """
import os, signal, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
Path(f"started-{rank}.part").write_text(str(os.getpid()))
os.rename(f"started-{rank}.part", f"started-{rank}")


def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)
    return Path(name).read_text()


def wait_for_end_of(other):
    pid = int(wait_for(f"started-{other}"))
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Return a function that runs ranks of a script; it returns the exit code, and the lines of stdout and stderr.

    The command runs in this process, which has imported torch already. Signals that a rank sends to its parent reach
    the command, because it catches them while ranks run. A process in the background ignores some of them otherwise.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def launch(code, *options, arguments=()):
        Path("script.py").write_text(WAITING + code)
        with pytest.raises(SystemExit) as ended:
            main(["run", *map(str, options), "script.py", *arguments])
        said = capfd.readouterr()
        return ended.value.code, sorted(said.out.splitlines()), said.err.splitlines()

    yield launch
    for number, handler in before.items():
        signal.signal(number, handler)


def timeless(lines):
    return [re.sub(r"after [\d.]+( to [\d.]+)? s", "after T s", line) for line in lines]


def test_each_rank_gets_its_numbers_the_store_and_its_arguments(launch, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS TORCHELASTIC_USE_AGENT_STORE"
    code, out, err = launch(
        f"print(*[os.environ[name] for name in '{names}'.split()], *sys.argv[1:])",
        *("--ranks", 2),
        arguments=["--epochs", "3", "-h"],
    )
    assert out == [f"[rank {rank}] {rank} {rank} 2 2 127.0.0.1 1 True --epochs 3 -h" for rank in range(2)]
    assert timeless(err) == [
        "pipesched run: the job finished with 2 of 2 ranks: ranks 0 and 1 ended with exit code 0 after T s"
    ]
    assert code == 0


def test_threads_that_the_user_set_and_those_of_a_single_rank_stay(launch, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch("print(os.environ['OMP_NUM_THREADS'])", "--ranks", 2)[1] == ["[rank 0] 3", "[rank 1] 3"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch("print(os.environ.get('OMP_NUM_THREADS'))", "--ranks", 1)[1] == ["[rank 0] None"]


def test_a_module_is_run_as_python_does(launch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--ranks", "1", "--log-dir", "logs", "-m", "package.train", "--lr", "1"])
    assert ended.value.code == 0
    assert Path("logs/rank-0.log").read_text() == "__main__ ['--lr', '1']\n"


@pytest.mark.timeout(100)
def test_the_death_of_rank_0_takes_neither_the_store_nor_the_other_ranks(launch):
    code, out, err = launch(
        """
import torch
from torch import distributed

distributed.init_process_group("gloo")
total = torch.tensor(rank)
distributed.all_reduce(total)
print("sum", total.item())
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
wait_for_end_of(0)
store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
print("store", store.add("key", 5))
""",
        *("--ranks", 2),
    )
    assert out == ["[rank 0] sum 1", "[rank 1] store 5", "[rank 1] sum 1"]
    said = [line for line in timeless(err) if line.startswith("pipesched run")]
    assert said == [
        "pipesched run: rank 0 was killed by SIGKILL after T s; 1 rank goes on",
        "pipesched run: the job finished with 1 of 2 ranks: rank 1 ended with exit code 0 after T s; "
        "rank 0 was killed by SIGKILL after T s",
    ]
    assert code == 0


FAILS = """
if rank == 1:
    sys.exit(3)
wait_for_end_of(1)
print("goes on")
"""


def test_ranks_go_on_after_a_loss_and_the_job_has_succeeded(launch):
    code, out, err = launch(FAILS, "--ranks", 3)
    assert out == ["[rank 0] goes on", "[rank 2] goes on"]
    assert timeless(err)[0] == "pipesched run: rank 1 failed with exit code 3 after T s; 2 ranks go on"
    assert code == 0


def test_the_job_fails_if_no_rank_ends_with_0(launch):
    code, _, err = launch("sys.exit(2 + rank)", "--ranks", 2)
    assert code == 1
    assert timeless(err)[-1] == (
        "pipesched run: the job failed (no rank ended with exit code 0): rank 0 failed with exit code 2 after T s; "
        "rank 1 failed with exit code 3 after T s"
    )


def test_one_loss_more_than_allowed_stops_the_job(launch):
    """Rank 2 fails once rank 1 is lost. Rank 0 would run on without end."""
    code, _, err = launch(
        """
if rank == 2:
    wait_for_end_of(1)
if rank:
    sys.exit(3)
signal.pause()
""",
        *("--ranks", 3, "--max-losses", 1),
    )
    assert code == 1
    assert timeless(err) == [
        "pipesched run: rank 1 failed with exit code 3 after T s; 2 ranks go on",
        "pipesched run: rank 2 failed with exit code 3 after T s; 2 ranks lost, and --max-losses is 1; "
        "the other ranks are stopped",
        "pipesched run: the job failed (2 ranks lost, and --max-losses is 1): rank 0 was killed by SIGTERM after T s; "
        "ranks 1 and 2 failed with exit code 3 after T s",
    ]


def test_stop_on_failure_kills_a_rank_that_ignores_sigterm(launch):
    code, _, err = launch(
        """
if rank == 1:
    wait_for("ready")
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("ready").touch()
while True:
    signal.pause()
""",
        *("--ranks", 2, "--stop-on-failure", "--grace", 0.2),
    )
    assert code == 1
    assert "pipesched run: rank 0 did not end within 0.2 s after SIGTERM; rank 0 is killed" in err
    assert "rank 0 was killed by SIGKILL after T s" in timeless(err)[-1]


HANDS_OVER = """
def hand_over(*_):
    print("handed over")
    sys.exit(0)


signal.signal(signal.SIGTERM, hand_over)
Path(f"ready-{rank}").touch()
if rank == 0:
    wait_for("ready-1")
    os.kill(os.getppid(), signal.NUMBER)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_lets_all_ranks_hand_over(launch, name):
    code, out, err = launch(HANDS_OVER.replace("NUMBER", name), "--ranks", 2)
    assert out == ["[rank 0] handed over", "[rank 1] handed over"]
    assert err[0] == f"pipesched run: got {name}; the ranks get SIGTERM, and SIGKILL after 30 s or a second {name}"
    assert timeless(err)[-1] == (
        f"pipesched run: the job ended (stopped by {name}): ranks 0 and 1 ended with exit code 0 after T s"
    )
    assert code == 0


def test_a_second_signal_kills_at_once(launch):
    """Rank 0 answers the first signal with a second one."""
    again = HANDS_OVER.replace('print("handed over")\n    sys.exit(0)', "rank or os.kill(os.getppid(), signal.SIGTERM)")
    code, _, err = launch(again.replace("NUMBER", "SIGTERM"), "--ranks", 2)
    assert "pipesched run: a second signal, SIGTERM, has arrived; ranks 0 and 1 are killed" in err
    assert timeless(err)[-1] == (
        "pipesched run: the job failed (stopped by SIGTERM): ranks 0 and 1 were killed by SIGKILL after T s"
    )
    assert code == 1


def test_lines_of_ranks_stay_whole_and_in_order(launch):
    """Three ranks write lines of up to 100 kB in pieces. The last line has no end."""
    code, out, _ = launch(
        """
def text(at):
    return f"line {at} " + "x" * (at * at % 997 + 100_000 * (at % 100 == 7))


data = "".join(f"{text(at)}\\n" for at in range(300)).encode()
for start in range(0, len(data), 777):
    os.write(1, data[start : start + 777])
os.write(1, b"the end")
""",
        *("--ranks", 3),
    )
    assert code == 0
    for rank in range(3):
        own = [line for line in out if line.startswith(f"[rank {rank}] ")]
        assert len(own) == 301
        assert f"[rank {rank}] the end" in own
        assert {
            f"[rank {rank}] line {at} " + "x" * (at * at % 997 + 100_000 * (at % 100 == 7)) for at in range(300)
        } < {*own}
    assert len(out) == 903


def test_each_rank_has_a_file_with_log_dir(launch):
    fails = "print('out', rank, flush=True); print('err', rank, file=sys.stderr, end=''); sys.exit(rank)"
    for times in (1, 2):  # a second job appends
        code, out, err = launch(fails, "--ranks", 2, "--log-dir", "a/logs")
        assert (code, out) == (0, [])
        assert all(line.startswith("pipesched run: ") for line in err)
        for rank in range(2):
            assert Path(f"a/logs/rank-{rank}.log").read_text() == f"out {rank}\nerr {rank}" * times


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.timeout(100)
def test_the_store_stays_until_the_ranks_of_other_hosts_have_ended(launch, tmp_path):
    """Two launchers, as on two hosts. The rank of the first ends before the rank of the second uses the store."""
    options = ["--ranks", 1, "--of", 2, "--address", f"127.0.0.1:{free_port()}"]
    code = """
from torch import distributed

distributed.init_process_group("gloo")
distributed.barrier()
if rank == 1:
    wait_for_end_of(0)
    store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    print("store", store.add("key", 5))
"""
    (tmp_path / "script.py").write_text(WAITING + code)
    command = [sys.executable, "-m", "pipesched", "run", *map(str, options), "--first-rank", "1", "script.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        code, _, err = launch(code, *options)
        out, other_err = other.communicate(timeout=60)
    assert "pipesched run: the store stays until the ranks of the other hosts have ended" in err
    assert (code, other.returncode) == (0, 0), other_err
    assert out == "[rank 1] store 5\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a process to its parent")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    """The rank holds a FIFO, which ends with it."""
    (tmp_path / "script.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with open('fifo', 'w') as fifo:\n    print('holds', file=fifo, flush=True)\n    signal.pause()\n"
    )
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-m", "pipesched", "run", "--ranks", "1", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as launcher, (tmp_path / "fifo").open() as fifo:
        assert fifo.readline() == "holds\n"
        launcher.send_signal(signal.SIGKILL)
        assert fifo.read() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0", "script.py"], "--ranks must be at least 1; got 0; pass the number of ranks to start"),
        (["--ranks", "2", "none.py"], "'none.py' does not exist; check the path, or pass -m for a module"),
        (["--ranks", "2", "."], "'.' is a folder; check the path"),
        (["--ranks", "2", "-m", "no_such.module"], "there is no module 'no_such'; check the name"),
        (["--ranks", "2", "--address", "host", "script.py"], "--address must be HOST:PORT; got 'host'"),
        (["--ranks", "2", "--address", "192.0.2.1:29500", "script.py"], "cannot listen at 192.0.2.1:29500"),
        (["--ranks", "2", "--of", "4", "script.py"], "no --address; pass --address HOST:PORT"),
        (["--ranks", "2", "--of", "4", "--first-rank", "3", "script.py"], "got ranks 3..4; change --first-rank"),
        (["--ranks", "2", "--stop-on-failure", "--max-losses", "1", "script.py"], "leave out one of the options"),
        (["--ranks", "2", "--log-dir", "script.py/logs", "script.py"], "--log-dir must be a folder; cannot make"),
    ],
)
def test_a_job_that_cannot_start_is_refused_in_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    refused = CliRunner().invoke(main, ["run", *arguments])
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert re.fullmatch(r"Error: .*\n", refused.stderr)


def test_a_port_in_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = CliRunner().invoke(main, ["run", "--ranks", "2", "--address", f"127.0.0.1:{port}", "script.py"])
    assert refused.exit_code == 2
    assert f"port {port} is in use on this host; pass another port" in refused.stderr


def test_an_unknown_option_before_the_script_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    assert "No such option '--rank'" in CliRunner().invoke(main, ["run", "--rank", "2", "script.py"]).stderr
