"""The examples run, and show what they say."""

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.rank_processes import FORKED

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import killed_runs  # noqa: E402

OWN = ROOT / "examples" / "own_schedule.py"
MESH = ROOT / "examples" / "torchrun.py"
DEMO = ROOT / "examples" / "train_gpt.py"
SLURM = ROOT / "examples" / "slurm.sh"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def printed_by(script, folder):
    """Run a script in this folder, and return its output."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def test_an_own_schedule_is_proved_trained_with_and_drawn_in_30_lines(tmp_path):
    assert len(OWN.read_text().splitlines()) <= 30
    with FORKED.Pool(1) as pool:
        printed = pool.apply(printed_by, (OWN, tmp_path))
    assert "slow-link-1f1b: valid for 1..8 ranks and 1..16 micro-batches" in printed
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert (tmp_path / "runs" / "own_schedule.png").read_bytes().startswith(b"\x89PNG")


def losses(launcher, **environment):
    ran = subprocess.run(
        [*launcher, str(MESH)],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    return re.findall(r"^step \d: loss [\d.]+$", ran.stdout, re.MULTILINE)


@pytest.mark.exhaustive
def test_as_many_processes_as_there_are_give_the_same_losses():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = losses([sys.executable], RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert len(alone) == 5
    assert losses([*TORCHRUN, "--standalone", "--nproc_per_node=2"]) == alone


def finish(commands, folder):
    """Run all at once, in a folder; what they print."""
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        printed = [one.communicate(timeout=100)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    assert not any(one.returncode for one in running), "\n".join(printed)
    return "".join(printed)


@pytest.mark.parametrize(
    ("script", "module", "extra"),
    [(DEMO, "tqdm", "demo"), (ROOT / "benchmarks" / "zoo.py", "transformers", "zoo")],
    ids=["demo", "zoo"],
)
def test_a_script_says_in_one_line_which_extra_it_needs(monkeypatch, script, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    assert re.fullmatch(rf".*{module}, which is not installed; pip install 'pipesched\[{extra}\]'", ended.value.code)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the demo trains in one process, in two steps."""
    folder = tmp_path_factory.mktemp("alone")
    finish([[sys.executable, str(DEMO), "--steps", "2", "--save", "weights.pt"]], folder)
    return torch.load(folder / "weights.pt")


def check_demo(folder, printed, num_ranks, alone):
    assert printed.count(f"Pipeline(1f1b, {num_ranks} rank{'s' * (num_ranks > 1)},") == 1
    assert len(re.findall(r"^loss [\d.]+ before training, [\d.]+ after 2 steps", printed, re.M)) == 1
    median = re.findall(r"^measured: the median step took ([\d.]+) ms \(1 measured\)$", printed, re.M)
    (measured,) = re.findall(r"^predicted .*, measured ([\d.]+ m?s) ", printed, re.M)
    number, unit = measured.split()
    assert [float(number) * (1000 if unit == "s" else 1)] == pytest.approx([float(own) for own in median], abs=0.06)
    assert (folder / "runs" / "demo" / "report.png").read_bytes().startswith(b"\x89PNG")
    weights = torch.load(folder / "weights.pt")
    assert weights.keys() == alone.keys()
    assert all(torch.equal(weights[name], value) for name, value in alone.items())


def test_the_demo_trains_reports_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [DEMO.name, "--steps", "2", "--save", "weights.pt"])
    runpy.run_path(str(DEMO), run_name="__main__")
    check_demo(tmp_path, capsys.readouterr().out, 2, torch.load("weights.pt"))


@pytest.mark.exhaustive
def test_the_command_of_the_docs_for_several_machines(alone, tmp_path):
    """Two torchruns, as on two machines, of one process each."""
    page = (ROOT / "docs" / "howto" / "machines.md").read_text()
    (line,) = re.findall(r"^    torchrun (--nnodes 2.*) examples/train_gpt.py$", page, re.M)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = shlex.split(line.replace("host1:29500", endpoint))
    command = [*TORCHRUN, *options, "--local_addr", "127.0.0.1", str(DEMO), "--steps", "2", "--save", "weights.pt"]
    check_demo(tmp_path, finish([command, command], tmp_path), 2, alone)


@pytest.mark.timeout(100)
def test_a_hugging_face_run_that_is_stopped_ends_with_the_weights_of_one_that_is_not(tmp_path, monkeypatch, capsys):
    """benchmarks/killed_runs.py kills it, on several ranks."""
    pytest.importorskip("transformers", reason="needs transformers: pip install pipesched[zoo]")
    monkeypatch.syspath_prepend(ROOT / "examples")
    train_hf = importlib.import_module("train_hf")
    own_handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def run(name):
        every = ["--save-every", "2", "--evaluate-every", "3", "--log-every", "2"]
        monkeypatch.setattr(sys, "argv", ["train_hf.py", "--steps", "6", "--folder", str(tmp_path / name), *every])
        train_hf.main()
        return capsys.readouterr().out

    def stops(batches):
        if batches._name == "training":
            signal.raise_signal(signal.SIGTERM)
        return draw(batches)

    draw = train_hf.Batches.next
    try:
        said = run("whole")
        assert "done after step 6" in said
        assert len(re.findall(r"^step 3: loss .* tokens/s", said, re.M)) == 1
        assert len(re.findall(r"^step [36]: validation loss", said, re.M)) == 2
        for step in (1, 2):
            monkeypatch.setattr(train_hf.Batches, "next", stops)
            assert f"stopped after step {step}; saved in" in run("stopped")
        monkeypatch.setattr(train_hf.Batches, "next", draw)
        assert "done after step 6" in run("stopped")
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), own_handlers, strict=True):
            signal.signal(number, handler)
    whole, stopped = (killed_runs.tensors(tmp_path / name) for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(value, stopped[name]) for name, value in whole.items())


def test_the_slurm_script_is_a_script():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    options = dict(re.findall(r"--(\w+) (\S+)", SLURM.read_text().split("srun torchrun")[1]))
    assert {"nnodes", "nproc_per_node", "rdzv_id", "rdzv_backend", "rdzv_endpoint"} == options.keys()
    assert os.access(SLURM, os.X_OK)
