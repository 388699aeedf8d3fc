"""Device traces: when an accelerator computes and when it copies, from a trace of torch.profiler."""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from pipesched.devices.streams import is_accelerator, synchronize

__all__ = ["DeviceTrace", "trace_of", "traced"]

#: The categories of a device's events in a trace.
_KERNELS = ("kernel",)
_COPIES = ("gpu_memcpy",)
_OTHERS = ("gpu_memset",)

_Interval = tuple[float, float]


@dataclass(frozen=True)
class DeviceTrace:
    """The times at which a device computes, copies and fills memory, in microseconds. Intervals are disjoint.

    There is at least one kernel.
    """

    kernels: Sequence[_Interval]
    copies: Sequence[_Interval]
    others: Sequence[_Interval]

    @property
    def idle_share(self) -> float:
        """The share of the time from the first to the last event in which no kernel runs."""
        events = _joined([*self.kernels, *self.copies, *self.others])
        return 1 - _length(self.kernels) / max(events[-1][1] - events[0][0], 1e-9)

    @property
    def copy_us(self) -> float:
        """The microseconds in which at least one copy runs."""
        return _length(self.copies)

    @property
    def hidden_share(self) -> float:
        """The share of the copies' time in which a kernel also runs; 1 if there are no copies."""
        both = self.copy_us + _length(self.kernels) - _length(_joined([*self.copies, *self.kernels]))
        return both / self.copy_us if self.copies else 1.0


def traced(step: Callable[[], Any], device: torch.device) -> DeviceTrace | None:
    """Run a step under torch.profiler, and return what the device did; None if the profiler sees no kernel."""
    kinds = supported_activities() - {ProfilerActivity.CPU}
    if not (kinds and is_accelerator(device)):
        return None
    synchronize(device)
    with profile(activities=kinds) as profiler:
        step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    found = trace_of(events, device)
    return found if found.kernels else None


def trace_of(events: Iterable[dict[str, Any]], device: torch.device) -> DeviceTrace:
    """Return the times of a device from the events of a Chrome trace."""
    here = [one for one in events if one.get("ph") == "X" and one.get("args", {}).get("device") == device.index]
    return DeviceTrace(_of(here, _KERNELS), _of(here, _COPIES), _of(here, _OTHERS))


def _of(events: Iterable[dict[str, Any]], categories: Sequence[str]) -> list[_Interval]:
    times = [(float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in events if one.get("cat") in categories]
    return _joined(times)


def _joined(times: Iterable[_Interval]) -> list[_Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    union: list[_Interval] = []
    for start, end in sorted(times):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def _length(times: Iterable[_Interval]) -> float:
    return sum(end - start for start, end in times)
