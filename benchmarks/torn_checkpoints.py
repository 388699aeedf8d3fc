"""Torn checkpoints: kills processes while they save, damages complete checkpoints, and loads the results.

    python benchmarks/torn_checkpoints.py [--kills 300] [--changes 300]

First, processes save repeatedly until SIGKILL ends one of them, at a random time or at a random call that changes the
file system. Then the checkpoint is loaded: every weight must have the value of the step that the checkpoint states, and
this step must not be earlier than the last complete save. The files that a killed save leaves behind stay in place for
the next save. There are four kinds of saves: to one checkpoint, with ``keep=3``, asynchronous, and from two ranks of a
mesh, of which one is killed.

Second, one file of a complete checkpoint is changed, truncated, lengthened, emptied, replaced or removed. Loading the
checkpoint must raise an error that names the file, and must leave the pipeline unchanged.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from measure import machine
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Pipeline
from pipesched.errors import CheckpointError, DamagedCheckpointError, ExecutionError

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.rank_processes import FORKED, MINUTE

WAYS = ("one", "keep", "asynchronous", "mesh")
_WIDTH, _LAYERS = 96, 4
_LONGEST_S = 0.06
_MOST_CALLS = 60  # calls that change the file system in two saves


def pipeline(**where: Any) -> Pipeline:
    """Return a pipeline with an optimizer for each stage."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    where = where or {"devices": ["cpu"] * 2}
    sample = torch.zeros(2, _WIDTH)
    options: dict[str, Any] = {"schedule": "1f1b", "boundaries": [_LAYERS // 2], "num_microbatches": 2, "seed": 1}
    return Pipeline(model, sample, loss_fn=nn.functional.mse_loss, optimizer=torch.optim.Adam, **options, **where)


def set_step(pipe: Pipeline, step: int) -> None:
    """Set the step counter of a pipeline to ``step``, and every weight to the number ``step``."""
    pipe._running.step = step
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(step)


def save_until_killed(path: str, way: str, first: int, calls: int | None, here: Any, rank: int, port: int) -> None:
    """Save in a loop, each time for the next step. Before each save, report the last step that was saved completely."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # silences a surviving rank
    where: dict[str, Any] = {}
    if way == "mesh":
        store = distributed.TCPStore("127.0.0.1", port, None, False, MINUTE)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=MINUTE)
        where = {"mesh": DeviceMesh.from_group(distributed.group.WORLD, "cpu")}
    pipe = pipeline(**where)
    if calls is not None:
        _die_at_call(calls)
    step = first
    here.send(first - 1)
    while True:
        set_step(pipe, step)
        pipe.save(path, asynchronous=way == "asynchronous", keep=3 if way == "keep" else None)
        here.send(step - 1 if way == "asynchronous" else step)
        step += 1


def _die_at_call(calls: int) -> None:
    """Kill this process at its ``calls``-th call that changes the file system."""
    left = [calls]

    def audit(event: str, args: Any) -> None:
        writes = event == "open" and isinstance(args[1], str) and "w" in args[1]
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def killed_save(path: Path, way: str, first: int, rng: random.Random) -> int:
    """Start processes that save from step ``first`` on, and kill one. Return the last completely saved step."""
    calls = rng.randint(1, _MOST_CALLS) if rng.random() < 0.5 else None
    count = 2 if way == "mesh" else 1
    victim = rng.randrange(count)
    store = distributed.TCPStore("127.0.0.1", 0, None, True, MINUTE, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(count):
        here, there = FORKED.Pipe(duplex=False)
        own = calls if rank == victim else None
        process = FORKED.Process(
            target=save_until_killed, args=(str(path), way, first, own, there, rank, store.port), daemon=True
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    for here in pipes:
        assert here.poll(60)
    if calls is None:
        time.sleep(rng.uniform(0, _LONGEST_S))
        processes[victim].kill()
    processes[victim].join(60)
    for process in processes:  # a surviving rank is killed at once, or after it had time to fail
        process.join(0.05 if rng.random() < 0.5 else 10)
        process.kill()
        process.join()
    last = []
    for here in pipes:
        with suppress(EOFError):
            while True:
                step = here.recv()
        last.append(step)
    return max(last) if way == "mesh" else last[0]


def kills(count: int, ways: tuple[str, ...] = WAYS, seed: int = 0) -> Counter[str]:
    """Kill this number of processes that save, and load the checkpoint after each kill.

    Returns counts of the kills during and between saves, and of the outcomes of loads.
    """
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, pipeline() as pipe:
        last = dict.fromkeys(ways, 0)
        for way in ways:  # there is a checkpoint before the first kill
            set_step(pipe, 0)
            pipe.save(Path(folder) / way, keep=3 if way == "keep" else None)
        for number in range(count):
            way = ways[number % len(ways)]
            path = Path(folder) / way
            last[way] = max(last[way], killed_save(path, way, last[way] + 1, rng))
            found["in the write" if _is_torn(path) else "between two saves"] += 1
            found[_outcome(pipe, path, last[way])] += 1
            last[way] = max(last[way], pipe._running.step)
    return found


def _is_torn(path: Path) -> bool:
    """Return whether a save was incomplete, or a checkpoint was partly removed, when the process was killed."""
    data = list(path.rglob("data-*"))
    return len(data) != len(list(path.rglob("manifest.json"))) or any(path.rglob("*.tmp"))


def _outcome(pipe: Pipeline, path: Path, last: int) -> str:
    set_step(pipe, -1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = pipe.load(path).step
    except CheckpointError as error:
        return f"unusable: {error}"
    if any(not torch.all(parameter == step) for parameter in pipe.parameters()):
        return "unusable: mixed steps"
    return "whole" if step >= last else f"unusable: loads step {step}, although step {last} was saved"


# ---- changed files --------------------------------------------------------------------------------------------------


def _flip(rng: random.Random, path: Path, others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(rng: random.Random, path: Path, others: list[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def _append(rng: random.Random, path: Path, others: list[Path]) -> None:
    path.write_bytes(path.read_bytes() + rng.choice((b"\0", b"\n", b" ", rng.randbytes(9))))


def _empty(rng: random.Random, path: Path, others: list[Path]) -> None:
    path.write_bytes(b"")


def _zero(rng: random.Random, path: Path, others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    begin = rng.randrange(len(data))
    size = min(rng.choice((16, 512, 4096)), len(data) - begin)
    data[begin : begin + size] = rng.randbytes(size) if rng.random() < 0.5 else bytes(size)
    path.write_bytes(data)


def _remove(rng: random.Random, path: Path, others: list[Path]) -> None:
    path.unlink()


def _exchange(rng: random.Random, path: Path, others: list[Path]) -> None:
    shutil.copyfile(rng.choice(others), path)


CHANGES: list[Callable[[random.Random, Path, list[Path]], None]] = [
    _flip, _flip, _flip, _cut, _append, _empty, _zero, _remove, _exchange,
]  # fmt: skip


def changes(count: int, seed: int = 0) -> Counter[str]:
    """Change a file in this number of checkpoints; return how many loads had each outcome."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, pipeline() as pipe:
        whole, other = Path(folder) / "whole", Path(folder) / "other"
        for step, path in ((5, whole), (6, other)):
            set_step(pipe, step)
            pipe.save(path, extra={"epoch": step, "order": torch.arange(10)})
        while sum(found.values()) < count:
            changed = Path(folder) / "changed"
            shutil.copytree(whole, changed)
            files = sorted(path for path in changed.rglob("*") if path.is_file())
            path = rng.choice(files)
            before = path.read_bytes()
            others = [one for one in (*files, *other.rglob("*")) if one.is_file() and one != path]
            rng.choice(CHANGES)(rng, path, others)
            if not path.exists() or path.read_bytes() != before:
                found[_refused(pipe, changed, path)] += 1
            shutil.rmtree(changed)
    return found


def _refused(pipe: Pipeline, folder: Path, path: Path) -> str:
    set_step(pipe, -1)
    try:
        pipe.load(folder)
    except (CheckpointError, ExecutionError) as error:
        if any(not torch.all(parameter == -1) for parameter in pipe.parameters()) or pipe._running.step != -1:
            return f"refused, but changed the pipeline: {path.name}"
        if path.name not in str(error):
            return f"refused, but the error does not name {path.name}: {error}"
        return "file named as damaged" if isinstance(error, DamagedCheckpointError) else "file named as missing"
    return f"silently loaded: {path.name}"


def main() -> None:
    """Run both parts and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--changes", type=int, default=300)
    args = parser.parse_args()
    begin = time.perf_counter()
    results = {
        f"{args.kills} killed saves": kills(args.kills),
        f"{args.changes} changed checkpoints": changes(args.changes),
    }
    good = {"whole", "in the write", "between two saves", "file named as damaged", "file named as missing"}
    for what, found in results.items():
        bad = sum(number for outcome, number in found.items() if outcome not in good)
        print(f"{what}, {bad} wrong: {dict(found)}")
    print(f"{time.perf_counter() - begin:.0f} s; {machine()}")
    sys.exit(any(outcome not in good for found in results.values() for outcome in found))


if __name__ == "__main__":
    main()
