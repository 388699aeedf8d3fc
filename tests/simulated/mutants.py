"""Deletes one wait, event or mark of memory at a time from a copy of the source, and tells which races are then found.

    python -m tests.simulated.mutants [NUMBER ...]

Prints a row for each mutant: its number, its name, and the first violation, or "not found". A mutant that changes
results without a violation counts as not found.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant", "show"]

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 240


@dataclass(frozen=True)
class Mutant:
    """A change of the source, the features that should show it, and the module that runs them.

    A mutant that no feature can show has a reason.
    """

    file: str
    old: str
    new: str
    features: tuple[str, ...]
    module: str = "compare"
    reason: str = ""

    @property
    def name(self) -> str:
        changed = [line.strip() for line in self.old.splitlines() if line.strip() not in self.new]
        return f"{Path(self.file).stem}: {changed[0]}"


_STREAMS = "pipesched/runtime/executors/device_streams.py"
_COPIES = "pipesched/devices/copies.py"
_INPUTS = "pipesched/runtime/stage/input_copies.py"
_OFFLOADING = "pipesched/runtime/stage/offloading.py"
_BUFFERS = "pipesched/saving/host_buffers.py"

MUTANTS = [
    Mutant(
        _STREAMS,
        "        self._compute.wait_stream(self._caller)\n",
        "",
        ("own optimizer on own stream", "batch on the first device"),
    ),
    Mutant(
        _STREAMS,
        "        self._caller.wait_event(stamp)\n",
        "        return\n",
        ("own optimizer on own stream", "evaluate and forward"),
    ),
    Mutant(
        _STREAMS,
        "        self._caller.wait_stream(self._compute)\n",
        "        return\n",
        ("a failed step and another",),
    ),
    Mutant(
        _STREAMS,
        "            self._compute.wait_event(message.ready)\n",
        "            pass\n",
        ("two ranks on one device",),
    ),
    Mutant(
        _STREAMS, "            return used_here(tensor)\n", "            return tensor\n", ("two ranks on one device",)
    ),
    Mutant(
        _COPIES,
        "        departures.wait_event(event_on(current_stream(tensor.device)) if ready is None else ready)\n",
        "",
        ("schedule 1f1b", "batch on a device without a rank", "cpu beside devices"),
    ),
    Mutant(
        _COPIES,
        "        tensor.record_stream(departures)\n",
        "",
        ("schedule 1f1b", "batch on a device without a rank", "schedule zb-v"),
    ),
    Mutant(
        _COPIES,
        "            copy = tensor.to(self.device, non_blocking=True)\n        tensor.record_stream(departures)\n"
        "        return used_here(copy)\n",
        "            copy = tensor.to(self.device, non_blocking=True)\n        tensor.record_stream(departures)\n"
        "        return copy\n",
        ("schedule 1f1b", "schedule zb-v"),
    ),
    Mutant(
        _COPIES,
        "            copy = tensor.to(self.device, non_blocking=True)\n        return used_here(copy)\n",
        "            copy = tensor.to(self.device, non_blocking=True)\n        return copy\n",
        ("schedule 1f1b", "own optimizer on own stream"),
    ),
    Mutant(
        _COPIES,
        "            current_stream(self.device).wait_stream(self.arrivals)\n",
        "            pass\n",
        ("schedule 1f1b",),
    ),
    Mutant(
        _COPIES,
        "            self._for_host.popitem()[1].synchronize()\n",
        "            self._for_host.popitem()\n",
        ("cpu beside devices", "host values that a cpu rank takes"),
    ),
    Mutant(
        _COPIES,
        "            self.arrivals.wait_event(ready)\n",
        "            pass\n",
        ("host values of a device rank",),
    ),
    Mutant(
        _INPUTS,
        "            self.step_data.copies[self] = event_on(self._copies.arrivals)\n",
        "            pass\n",
        ("batch in pinned memory that is refilled",),
    ),
    Mutant(
        "pipesched/runtime/stage/step_data.py",
        "            self.copies.popitem()[1].synchronize()\n",
        "            self.copies.popitem()\n",
        ("batch in pinned memory that is refilled",),
    ),
    Mutant(
        "pipesched/runtime/async_steps.py",
        "        self._step_data.wait_for_copies()\n",
        "",
        ("pinned memory of an asynchronous schedule",),
    ),
    Mutant(
        "pipesched/runtime/step_call.py",
        "ready=self.batch.ready() if have_accelerator() else {},",
        "ready={},",
        ("batch on a device without a rank",),
    ),
    Mutant(
        "pipesched/runtime/async_steps.py",
        "                self._step_data.ready.update(batch.ready())\n",
        "                pass\n",
        ("asynchronous batch on a device without a rank",),
    ),
    Mutant(
        "pipesched/runtime/step_call.py",
        "            used_here(tensor)  # a rank's stream has allocated it\n",
        "            pass\n",
        ("evaluate and forward", "outputs that are inputs"),
    ),
    Mutant(
        "pipesched/runtime/step_metrics.py",
        "        (number, *place, name, reduction, used_here(value))\n",
        "        (number, *place, name, reduction, value)\n",
        ("added losses and metrics",),
    ),
    Mutant(
        "pipesched/runtime/step_metrics.py",
        "weighted([used_here(one[name]) for one in of_each])",
        "weighted([one[name] for one in of_each])",
        ("added losses and metrics",),
    ),
    Mutant(
        "pipesched/runtime/async_steps.py",
        "weighting.total([used_here(losses.pop(number)) for number in own])",
        "weighting.total([losses.pop(number) for number in own])",
        ("schedule pipedream", "schedule pipedream-2bw"),
    ),
    Mutant(
        "pipesched/runtime/stage/weight_stash.py",
        "parameters[key].data = used_here(parameters[key].data).clone()",
        "parameters[key].data = parameters[key].data.clone()",
        ("asynchronous steps that are shorter than the pipeline",),
    ),
    Mutant(
        _OFFLOADING,
        "        stream.wait_stream(current_stream(self._device))\n",
        "",
        ("layers offloaded",),
    ),
    Mutant(
        _OFFLOADING,
        "            current_stream(self._device).wait_event(piece.ready)\n",
        "            pass\n",
        ("layers offloaded",),
    ),
    Mutant(
        _OFFLOADING,
        "                piece.ready.synchronize()\n",
        "                pass\n",
        ("a failed step that offloads",),
    ),
    Mutant(_BUFFERS, "        side.wait_stream(current)\n", "", ("saved while training",)),
    Mutant(_BUFFERS, "        current.wait_event(event)\n", "", ("saved while training",)),
    Mutant(
        _BUFFERS,
        "            self._events.pop().synchronize()\n",
        "            self._events.pop()\n",
        ("saved while training",),
    ),
    Mutant(
        "pipesched/runtime/gradients/nonfinite_reaction.py",
        "            self.arrived.synchronize()\n",
        "            pass\n",
        ("numbers watched, raise",),
    ),
    Mutant(
        "pipesched/pipeline/autograd_bridge.py",
        "            with on_streams(self.streams):\n",
        "            if True:\n",
        ("gradients of outputs and inputs",),
    ),
    Mutant(
        "pipesched/runtime/gradients/loss_scale.py",
        "            self._observe_on(device)\n",
        "            pass\n",
        ("gradient scaler",),
    ),
]


def found(mutant: Mutant) -> str:
    """Return the first violation that a mutant causes, or "not found" with what happened instead."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pipesched", "schedules", "viz", "tests"):
            shutil.copytree(_ROOT / name, Path(folder, name), symlinks=True, ignore=shutil.ignore_patterns("*.pyc"))
        path = Path(folder, mutant.file)
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.old) != 1:
            return f"not found: the text stands {source.count(mutant.old)} times in the file"
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", f"tests.simulated.{mutant.module}", "1", *mutant.features]
        env = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            ran = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return "not found: the run did not end"
    races = re.findall(r"^ +\d+ x (.*)$", ran.stdout, re.MULTILINE)
    return races[0] if races else f"not found: {' '.join(ran.stdout.split())[-300:]}{ran.stderr[-600:]}"


def show(mutants: Sequence[Mutant], numbers: list[int]) -> None:
    """Print a row for each mutant."""
    for number in numbers or range(len(mutants)):
        mutant = mutants[number]
        text = found(mutant)
        how = "caught" if not text.startswith("not found") else "reason" if mutant.reason else "silent"
        print(f"{how} {number} {mutant.name}\n    {text}")
        sys.stdout.flush()


if __name__ == "__main__":
    show(MUTANTS, [int(number) for number in sys.argv[1:]])
