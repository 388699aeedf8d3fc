"""Output of ranks: lines are cut whole, and a slow or closed reader does not stop the launcher."""

import os
import sys
from pathlib import Path

import pytest

from pipesched.errors import InputError
from pipesched.launcher.launcher import Launcher
from pipesched.launcher.output import LineCutter, Screen
from pipesched.launcher.rank_end import RankEnd, all_ends, names_of
from pipesched.launcher.rank_process import RankProcess


def cut(*pieces):
    cutter = LineCutter(b"> ")
    return b"".join(map(cutter.add, pieces)) + cutter.rest()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], b"> a\n> b\n"),
        ([b"a", b"b\n", b"c"], b"> ab\n> c\n"),
        ([b"a\r", b"\nb"], b"> a\r\n> b\n"),
        ([b"10%\r20%\r", b"30%\n"], b"> 10%\r> 20%\r> 30%\n"),
        ([b"\n\n"], b"> \n> \n"),
        ([], b""),
        ([b"x" * (1 << 20), b"y\n"], b"> " + b"x" * (1 << 20) + b"y\n"),
    ],
)
def test_lines_are_cut_where_they_end(pieces, lines):
    assert cut(*pieces) == lines


def test_a_line_without_an_end_does_not_fill_the_memory():
    assert LineCutter(b"> ").add(b"x" * ((1 << 20) + 1)) == b"> " + b"x" * ((1 << 20) + 1) + b"\n"


def ranks_of(code, screen, count=2):
    return [
        RankProcess(rank, (sys.executable, "-c", code), {**os.environ, "RANK": str(rank)}, screen)
        for rank in range(count)
    ]


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_reader_that_does_not_read_does_not_keep_the_launcher_from_stopping_the_job(pipe, tmp_path):
    """Rank 0 writes without end. Nobody reads. Rank 1 sends SIGTERM to the launcher, which is this process."""
    code = """
import os, signal
if os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGTERM)
while True:
    os.write(1, b"text" * 1000 + b"\\n")
"""
    with (tmp_path / "err").open("w") as err:
        screen = Screen(pipe[1], err.fileno())
        assert Launcher(ranks_of(code, screen), screen, None, max_losses=None, grace_s=0.2).run() == 1
    assert "the job failed (stopped by SIGTERM)" in (tmp_path / "err").read_text()


def test_ranks_go_on_if_the_reader_of_their_output_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "err").open("w") as err:
        screen = Screen(writer, err.fileno())
        code = "import os; os.write(1, bytes(3_000_000)); open(f'ended-{os.environ[\"RANK\"]}', 'w')"
        assert Launcher(ranks_of(code, screen), screen, None, max_losses=None, grace_s=5).run() == 0
    os.close(writer)
    assert Path("ended-0").exists()
    assert Path("ended-1").exists()
    assert "stdout is closed; the ranks go on, and their output is dropped from here" in (tmp_path / "err").read_text()


def test_stdout_and_stderr_in_one_file_keep_their_order(tmp_path):
    code = "import os; [os.write(1, b'text\\n') for _ in range(1000)]"
    with (tmp_path / "all").open("wb") as file:
        screen = Screen(file.fileno(), file.fileno())
        assert screen.out is screen.err
        assert Launcher(ranks_of(code, screen, 1), screen, None, max_losses=None, grace_s=5).run() == 0
    lines = (tmp_path / "all").read_text().splitlines()
    assert lines[:-1] == ["[rank 0] text"] * 1000
    assert lines[-1].startswith("pipesched run: the job finished with 1 of 1 rank: ")


def test_a_rank_that_cannot_be_started_stops_those_that_were(tmp_path):
    """The second rank's file for output is a folder. The first would run without end."""
    with (tmp_path / "err").open("w") as err:
        screen = Screen(err.fileno(), err.fileno())
        command = (sys.executable, "-c", "import signal; signal.pause()")
        ranks = [RankProcess(at, command, {}, screen, tmp_path / name) for at, name in enumerate(["log", "."])]
        with pytest.raises(InputError, match=r"rank 1 did not: Is a directory .*; check the path, or start fewer"):
            Launcher(ranks, screen, None, max_losses=None, grace_s=5).run()
    assert ranks[0].collect().code == -9


def test_ends_are_told_together():
    ends = {rank: RankEnd(0, 2.04) for rank in (0, 1, 2, 5)} | {
        3: RankEnd(-9, 1),
        4: RankEnd(-9, 1.5),
        6: RankEnd(2, 1),
    }
    assert all_ends(ends) == (
        "ranks 0-2 and 5 ended with exit code 0 after 2.0 s; ranks 3 and 4 were killed by SIGKILL after 1.0 to 1.5 s; "
        "rank 6 failed with exit code 2 after 1.0 s"
    )
    assert RankEnd(-50, 1).text() == "was killed by signal 50"
    assert names_of([4, 2, 0]) == "ranks 0, 2 and 4"
