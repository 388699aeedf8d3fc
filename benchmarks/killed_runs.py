"""Killed runs: kill examples/train_hf.py at random moments, restart it on other numbers of ranks, compare the weights.

    python benchmarks/killed_runs.py [--steps 2000] [--save-every 100] [--kills 20] [--ranks 1 2 3]

One run trains on two ranks without interruption; meanwhile the script prints the memory, threads and open files of rank
0. A second run of the same command is killed at random moments (SIGKILL to all ranks), and restarted each time on the
next number of ranks in ``--ranks``. At the end the script compares all tensors in the last checkpoints of both runs bit
by bit.
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_hf.py"


def start(num_ranks: int, options: list[str], out: int | None = None) -> list[subprocess.Popen[bytes]]:
    """Start the example in one process for each rank, with torchrun's environment variables if there are several."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mesh = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    environments = [{**mesh, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    if num_ranks == 1:
        environments = [{}]
    return [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
        for own in environments
    ]


@contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Yield the processes; kill those that still run when the with block ends."""
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()


def usage(process: int) -> tuple[int, int, int]:
    """Return the memory of a process in MiB, and the numbers of its threads and open files."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) >> 10, int(status["Threads"]), len(os.listdir(f"/proc/{process}/fd"))


def undisturbed(options: list[str], num_ranks: int) -> None:
    """Run the example to the end. Every 20 seconds, print the memory, threads and open files of rank 0."""
    begun = time.monotonic()
    processes = start(num_ranks, options)
    with ended(processes):
        while processes[0].poll() is None:
            with suppress(OSError, KeyError):
                memory, threads, files = usage(processes[0].pid)
                print(f"{time.monotonic() - begun:5.0f} s: {memory} MiB, {threads} threads, {files} files", flush=True)
            with suppress(subprocess.TimeoutExpired):
                processes[0].wait(20)
        codes = [process.wait(60) for process in processes]
    assert not any(codes), f"the undisturbed run failed: {codes}"
    print(f"undisturbed: {time.monotonic() - begun:.0f} s on {num_ranks} ranks", flush=True)


def killed(options: list[str], kills: int, ranks: list[int], longest_s: float, draw: random.Random) -> None:
    """Run the example to the end; kill it at random moments, and restart it on other numbers of ranks."""
    counts = itertools.cycle(ranks)
    done = 0
    while True:
        num_ranks = next(counts)
        processes = start(num_ranks, options)
        with ended(processes):
            wait_s = draw.uniform(1, longest_s) if done < kills else None
            try:
                processes[0].wait(wait_s)
            except subprocess.TimeoutExpired:
                done += 1
                print(f"kill {done} after {wait_s:.1f} s on {num_ranks} ranks", flush=True)
                continue
            code = processes[0].wait()
            assert code == 0, f"a restarted run on {num_ranks} ranks failed with exit code {code}"
        if done < kills:
            print(f"the run finished after {done} kills", flush=True)
        return


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint in a folder, keyed by name."""
    last = sorted(folder.glob("step-*"))[-1]
    found: dict[str, torch.Tensor] = {}
    for file in sorted(last.rglob("*.safetensors")):
        found |= load_file(file)
    return found


def main() -> None:
    """Run the example without and with kills, and compare the tensors of the last checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--longest", type=float, default=30.0, help="longest time until a kill, in seconds (default: 30)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    try:
        steps = ["--steps", str(args.steps), "--save-every", str(args.save_every)]
        undisturbed([*steps, "--folder", str(root / "alone")], 2)
        killed(
            [*steps, "--folder", str(root / "killed")], args.kills, args.ranks, args.longest, random.Random(args.seed)
        )
        alone, other = tensors(root / "alone"), tensors(root / "killed")
        assert alone.keys() == other.keys(), alone.keys() ^ other.keys()
        differ = [name for name, value in alone.items() if not torch.equal(value, other[name])]
        print(f"{len(alone)} tensors, {sum(value.numel() for value in alone.values())} numbers: {len(differ)} differ")
        sys.exit(bool(differ))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
