"""On device: choose an accelerator, measure steps on it, and write figures down for a report."""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import Ratio, ratio
from torch import distributed

from pipesched.devices.selection import as_device
from pipesched.devices.streams import is_accelerator, synchronize

__all__ = [
    "Budget",
    "Figures",
    "Turns",
    "add_device_options",
    "add_options",
    "all_devices",
    "backend_of",
    "begun",
    "in_turn",
    "settle",
    "timed_s",
]


class Figures:
    """Appends rows of figures to a file, one JSON object a line, so that an aborted run keeps its rows.

    Args:
        path: the file; None to write nothing.

    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, measurement: str, **figures: Any) -> None:
        """Append a row. ``measurement`` names the kind of the row."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"measurement": measurement, **figures}) + "\n")


class Budget:
    """The time of a script, divided evenly between its cases.

    Args:
        seconds: the time of all cases.
        cases: the number of cases.

    """

    def __init__(self, seconds: float, cases: int) -> None:
        self._end_s = time.monotonic() + seconds
        self._left = cases

    def share_s(self) -> float:
        """Begin a case; return the seconds that it may take, which are 0 or less if the time is used up."""
        share = (self._end_s - time.monotonic()) / max(self._left, 1)
        self._left -= 1
        return share


class Turns(NamedTuple):
    """The seconds of steps that ran in turn, and how the two compare."""

    first_s: list[float]
    second_s: list[float]

    @property
    def compared(self) -> Ratio:
        """The median of first / second with its interval."""
        return ratio(self.first_s, self.second_s)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add --device and --tiny to a script's options."""
    parser.add_argument("--device", help="type of device, such as cuda, xpu or cpu (default: the accelerator's)")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few steps, to try the script")


def add_options(parser: argparse.ArgumentParser, seconds: float | None = None) -> None:
    """Add --device, --tiny, --figures and, if a default is given, --seconds to a script's options."""
    add_device_options(parser)
    parser.add_argument("--figures", type=Path, help="append the figures to this file, one JSON object a line")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help=f"time for all cases (default: {seconds:g})")


def begun(device: str | None) -> torch.device:
    """Return the chosen device. Ends the script with a message if none is chosen and the machine has no accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None and accelerator is None:
        print(f"no accelerator: torch {torch.__version__} finds none; --device cpu --tiny tries this script on the CPU")
        raise SystemExit(0)
    chosen = as_device(device or accelerator)
    if not is_accelerator(chosen):
        torch.set_num_threads(1)
    return chosen


def all_devices(device: torch.device) -> list[torch.device]:
    """Return all devices of the same type. There is one CPU."""
    if not is_accelerator(device):
        return [device]
    return [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]


def backend_of(device: torch.device) -> str | None:
    """Return the name of torch's default library of messages for a device, such as nccl; None if there is none."""
    try:
        return distributed.get_default_backend_for_device(device)
    except ValueError:
        return None


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until the devices have finished all queued work."""
    for device in devices:
        synchronize(device)


def timed_s(step: Callable[[], Any], devices: Iterable[torch.device]) -> float:
    """Run a step; return the seconds until the devices have finished."""
    settle(devices)
    start = time.perf_counter()
    step()
    settle(devices)
    return time.perf_counter() - start


def in_turn(first: Callable[[], float], second: Callable[[], float], pairs: int, seconds: float) -> Turns:
    """Run two timed steps in turn (A B A B ...) after a warm-up of each: at least three pairs, at most ``pairs``.

    No pair starts that would probably end after ``seconds``.
    """
    start = time.monotonic()
    first(), second()
    turns = Turns([], [])
    while len(turns.first_s) < pairs:
        turns.first_s.append(first())
        turns.second_s.append(second())
        pair_s = median(turns.first_s) + median(turns.second_s)
        if len(turns.first_s) >= 3 and time.monotonic() - start + pair_s > seconds:
            break
    return turns
