"""Violations: two operations that use one memory, without the order that they need."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Operation", "Violation", "ViolationKind"]


class ViolationKind(StrEnum):
    """What goes wrong if the two operations run in the wrong order."""

    READ = "read before write"
    OVERWRITTEN = "write before read"
    WRITTEN_TWICE = "write before write"
    FREED = "memory freed while in use"
    HOST_READ = "host read"
    PINNED_REUSED = "pinned memory reused too early"


@dataclass(frozen=True)
class Operation:
    """An operation of a violation. `stream` is None for the host, `label` what its thread worked on."""

    name: str
    stream: str | None
    device: int | None
    thread: str
    label: Any
    frames: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        place = " < ".join(f"{_short(file)}:{line}" for file, line in self.frames)
        label = "" if self.label is None else f", in {self.label}"
        return f"{self.name} on {self.stream or 'the host'} ({self.thread}{label}) at [{place}]"


def _short(file: str) -> str:
    return "/".join(file.split("/")[-2:])


@dataclass(frozen=True)
class Violation:
    """`later` does not wait for `earlier`. `freed_at` is where the memory was freed, for that kind."""

    kind: ViolationKind
    earlier: Operation
    later: Operation
    nbytes: int
    freed_at: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        text = f"{self.kind}: {self.later} does not wait for {self.earlier}; both use {self.nbytes} bytes"
        if self.kind is ViolationKind.FREED:
            freed = " < ".join(f"{_short(file)}:{line}" for file, line in self.freed_at)
            return (
                f"{text}, which were freed at [{freed}] and allocated again; call record_stream or wait before the free"
            )
        if self.later.stream is None:
            return f"{text} of pinned memory; synchronise with an event after {self.earlier.name}"
        return f"{text}; make {self.later.stream} wait for an event that is recorded after {self.earlier.name}"
