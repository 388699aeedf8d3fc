"""make gpu: every command runs at a small size on the CPU, and a failing command does not stop the others."""

import json
import math
import os
import runpy
import select
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_report
from device_traces import trace_of
from gpu_report import OUT_OF_TIME, PARTS, Command, Part
from on_device import Budget, Figures, in_turn

ROOT = Path(__file__).parents[2]
COMMANDS = [command for part in PARTS for command in part.commands]


def name_of(command: Command) -> str:
    return Path(command.words[0]).stem if command.words[0].endswith(".py") else command.words[1]


@pytest.mark.one_in(12)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_a_command_runs_at_a_small_size_on_the_cpu(command: Command, tmp_path: Path) -> None:
    figures = tmp_path / "figures.jsonl"
    result = gpu_report.run(command.line("cpu", tiny=True, figures=figures), 280)
    assert result.code == 0, result.output
    if command.measures:
        rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
        assert rows
        assert all(row["measurement"] for row in rows)


def test_the_limits_fit_into_runs_of_ten_minutes_and_45_minutes_in_all() -> None:
    assert max(command.limit_s for command in COMMANDS) <= 600
    assert sum(command.limit_s for command in COMMANDS) <= 45 * 60
    assert [part.number for part in PARTS] == [*range(7)]


def python(code: str, limit_s: int = 60) -> Command:
    return Command(("-c", code), limit_s, measures=False)


def report_of(parts: tuple[Part, ...], monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--device", "cpu", "--out", str(out), *words])
    return gpu_report.main(), (out / "report.md").read_text(encoding="utf-8")


def test_a_failing_command_and_one_that_hangs_do_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = python("import signal; signal.pause()", limit_s=1)
    parts = (
        Part(0, "Fails", (python("print('broken ```'); raise SystemExit(3)"), hangs)),
        Part(1, "Runs", (python("print('measured 12')"),)),
    )
    code, text = report_of(parts, monkeypatch, tmp_path)
    assert code == 1
    assert "exit code 3" in text
    assert "out of time" in text
    assert "broken '''" in text  # the output cannot end its block
    assert "measured 12" in text
    assert text.index("## 0. Fails") < text.index("## 1. Runs")
    assert "- everything on an accelerator: the device is a CPU" in text


def test_some_parts_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = tuple(Part(number, f"Part {number}", (python(f"print('part', {number})"),)) for number in range(3))
    code, text = report_of(parts, monkeypatch, tmp_path, "--parts", "0", "2")
    assert code == 0
    assert "Part 0" in text
    assert "Part 1" not in text
    assert "Part 2" in text


def test_processes_that_a_command_leaves_running_are_ended() -> None:
    child = "import signal; signal.pause()"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    result = gpu_report.run(python(code).words, 60)
    assert result.code == 0
    try:
        left = os.pidfd_open(int(result.output))
    except ProcessLookupError:
        return
    assert select.select([left], [], [], 60)[0]  # readable once the process has ended
    os.close(left)


def test_a_command_at_its_limit_has_its_own_exit_code() -> None:
    assert gpu_report.run(python("import signal; signal.pause()").words, 1).code == OUT_OF_TIME


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, which it would measure")
@pytest.mark.parametrize("script", ["gpu", "gpu_memory", "gpu_messages", "gpu_report", "gpu_training", "gpu_tune"])
def test_without_an_accelerator_a_script_says_so_and_how_to_try_it(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")
    assert not ended.value.code
    said = capsys.readouterr().out
    assert said.startswith("no accelerator: ")
    assert "--device cpu --tiny" in said


# ---- what the scripts share -----------------------------------------------------------------------------------------

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), min_size=1, max_size=8)


def event(category: str, start: int, length: int, device: int = 0) -> dict[str, object]:
    return {"ph": "X", "cat": category, "ts": start, "dur": length, "args": {"device": device, "stream": start % 3}}


@given(kernels=INTERVALS, copies=INTERVALS)
def test_shares_of_a_trace_equal_a_count_by_the_microsecond(
    kernels: list[tuple[int, int]], copies: list[tuple[int, int]]
) -> None:
    events = [event("kernel", *one) for one in kernels] + [event("gpu_memcpy", *one) for one in copies]
    noise = [event("kernel", 0, 1000, device=1), {"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    noise.append({"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 1000, "args": {}})
    found = trace_of(events + noise, torch.device("cuda:0"))
    computing = {at for start, length in kernels for at in range(start, start + length)}
    copying = {at for start, length in copies for at in range(start, start + length)}
    whole = max(computing | copying) + 1 - min(computing | copying)
    assert found.copy_us == len(copying)
    assert math.isclose(found.idle_share, 1 - len(computing) / whole, abs_tol=1e-12)
    assert math.isclose(found.hidden_share, len(computing & copying) / len(copying), abs_tol=1e-12)


@pytest.mark.parametrize(("pairs", "seconds", "count"), [(7, math.inf, 7), (7, 0.0, 3), (2, math.inf, 2)])
def test_pairs_run_in_turn_until_the_time_is_used_up(pairs: int, seconds: float, count: int) -> None:
    calls: list[str] = []

    def step(name: str, value: float) -> float:
        calls.append(name)
        return value

    turns = in_turn(lambda: step("a", 2.0), lambda: step("b", 1.0), pairs, seconds)
    assert calls == ["a", "b"] * (count + 1)  # one warm-up of each
    assert turns.first_s == [2.0] * count
    assert turns.compared.value == 2


def test_a_budget_without_time_gives_no_share() -> None:
    assert Budget(0, 3).share_s() <= 0
    assert 0 < Budget(1e6, 4).share_s() <= 1e6 / 4


def test_figures_are_kept_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    for number in range(2):
        Figures(path).add("step", ms=number)
    Figures(None).add("step", ms=2)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"measurement": "step", "ms": 0}, {"measurement": "step", "ms": 1}]
