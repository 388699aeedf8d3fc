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
ELASTIC = ROOT / "examples" / "torchrun_elastic.py"
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
    return re.findall(r"step \d: loss [\d.]+$", ran.stdout, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_as_many_processes_as_there_are_give_the_same_losses():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = losses([sys.executable], RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert len(alone) == 5
    assert losses([*TORCHRUN, "--standalone", "--nproc_per_node=2"]) == alone
    assert losses([sys.executable, "-m", "pipesched", "run", "--ranks", "2"]) == alone


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
    to_ms = 1000 if unit == "s" else 1  # the number has four digits
    assert [float(number) * to_ms] == pytest.approx([float(own) for own in median], rel=5.1e-4, abs=0.06)
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


def trained_by(rank, num_ranks, port, *arguments):
    """Run the example of a Hugging Face model as a rank of torchrun, or alone, and return its output."""
    torch.set_num_threads(1)
    if num_ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["train_hf.py", *arguments, "--save-every", "9", "--evaluate-every", "3"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "examples" / "train_hf.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.timeout(200)
def test_a_hugging_face_run_with_split_layers_resumes_without_them(tmp_path):
    """On two ranks that split each layer, and then on one."""
    pytest.importorskip("transformers", reason="needs transformers: pip install pipesched[zoo]")

    def run(num_ranks, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with FORKED.Pool(num_ranks) as pool:
            ranks = [pool.apply_async(trained_by, (rank, num_ranks, port, *arguments)) for rank in range(num_ranks)]
            said = "".join(rank.get(timeout=100) for rank in ranks)
            pool.close()  # the example's handler of SIGTERM, with which a pool ends its processes, only takes a note
            pool.join()
            return said

    split, whole = str(tmp_path / "split"), str(tmp_path / "whole")
    assert "done after step 3" in run(2, "--tp", "2", "--steps", "3", "--folder", split)
    assert "done after step 5" in run(1, "--steps", "5", "--folder", split)
    assert "done after step 5" in run(1, "--steps", "5", "--folder", whole)
    found, due = killed_runs.tensors(Path(split)), killed_runs.tensors(Path(whole))
    assert found.keys() == due.keys()
    for name, value in due.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)


#: Runs the example. In step 7 of the first start, the host of rank 1 is lost: its torchrun and its rank are killed.
LOSES_A_HOST = f"""
import os, runpy, signal
import pipesched

pipesched.Pipeline.step, step, done = (lambda *args, **named: lost_or_step(*args, **named)), pipesched.Pipeline.step, []


def lost_or_step(*args, **named):
    done.append(True)
    if len(done) == 8 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **named)


runpy.run_path({str(ELASTIC)!r}, run_name="__main__")
"""
ELASTIC_OPTIONS = ["--steps", "12", "--save-every", "5", "--folder"]


def run_torchrun(arguments, folder, output):
    """Run torchrun in a process that has imported torch."""
    from torch.distributed import run

    os.environ |= ENVIRONMENT
    os.chdir(folder)
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run.main(arguments)


def run_alone(folder):
    """Run the example on one rank without a loss; what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    sys.argv = [ELASTIC.name, *ELASTIC_OPTIONS, "alone"]
    return printed_by(ELASTIC, folder)


@pytest.mark.timeout(110)
def test_torchrun_goes_on_with_fewer_hosts_from_the_last_checkpoint(tmp_path):
    """Two torchruns stand for hosts. The first hosts the rendezvous, so the second is lost."""
    (tmp_path / "lost.py").write_text(LOSES_A_HOST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=2", "--rdzv_backend=c10d", "--rdzv_id=job"]
    options += ["--local_addr=127.0.0.1", f"--rdzv_endpoint={endpoint}"]
    timing = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"  # a lost host is noticed after 5 s
    hosts = []
    for at in range(2):
        arguments = [*options, f"--rdzv_conf={timing},is_host={1 - at}", "lost.py", *ELASTIC_OPTIONS, "lost"]
        hosts.append(FORKED.Process(target=run_torchrun, args=(arguments, tmp_path, f"host-{at}.txt")))
        hosts[-1].start()
    try:
        with FORKED.Pool(1) as pool:
            alone = pool.apply(run_alone, (tmp_path,)).splitlines()
        for host in hosts:
            host.join(100)
    finally:
        for host in hosts:
            host.kill()
    said = (tmp_path / "host-0.txt").read_text()
    assert [host.exitcode for host in hosts] == [0, -signal.SIGKILL], said
    starts = re.findall(r"^\d ranks, from step \d$|^step \d+: loss [\d.]+$", said, re.MULTILINE)
    assert starts == ["2 ranks, from step 0", *alone[1:8], "1 ranks, from step 5", *alone[6:]]
    assert alone[0] == "1 ranks, from step 0"
    tensors, expected = (killed_runs.tensors(tmp_path / name) for name in ("lost", "alone"))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_the_slurm_script_is_a_script():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    options = dict(re.findall(r"--(\w+) (\S+)", SLURM.read_text().split("srun torchrun")[1]))
    assert {"nnodes", "nproc_per_node", "rdzv_id", "rdzv_backend", "rdzv_endpoint"} == options.keys()
    assert os.access(SLURM, os.X_OK)
