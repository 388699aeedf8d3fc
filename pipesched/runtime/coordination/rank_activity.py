"""Rank activity: tracks the current action of each rank, to decide which rank caused a failure."""

import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import distributed

from pipesched.program.actions import Action

if TYPE_CHECKING:
    from pipesched.runtime.executors.interpreter import Stamps

__all__ = [
    "COLLECTIVE",
    "ENDED",
    "SILENT",
    "Activity",
    "Doing",
    "State",
    "Stopped",
    "blamed",
    "different_methods",
    "doing_at",
    "is_in_call",
    "said",
    "user_line",
]


class Stopped(Exception):  # noqa: N818  not an error: ends a rank's loop
    """Raised in a rank that must stop because another rank has failed."""


#: The activity of a rank: it has raised an error ("raised"), runs the model's or the user's code ("works"), waits for
#: another rank ("waits"), or is in a collective of torch.distributed ("collective").
Doing = Literal["raised", "works", "waits", "collective"]
COLLECTIVE: Doing = "collective"

#: Used in place of a rank's reply: ENDED if nothing listens at its address, SILENT if no reply arrives in time.
ENDED = "ended"
SILENT = "silent"

_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_OF_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = os.sep + "site-packages" + os.sep
_PIPESCHED = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
#: The code that runs collectives of torch.distributed: torch's own, and that of split layers.
_OF_COLLECTIVES = (
    os.path.dirname(distributed.__file__) + os.sep,
    os.path.join(_PIPESCHED, "parallel", "tensor_group.py"),
)
#: The packages whose code waits for other ranks, or reports that such a wait has failed.
_WAITING = tuple(
    os.path.join(_PIPESCHED, *name.split("."), "")
    for name in ("program", "runtime.coordination", "runtime.executors", "runtime.reductions", "runtime.transport")
)
#: The packages whose code waits for other processes.
_WAITING_ELSEWHERE = tuple(
    os.path.join(_PIPESCHED, "runtime", name, "") for name in ("coordination", "reductions", "transport")
)


class State(NamedTuple):
    """The activity of a rank."""

    doing: Doing
    #: The current action, or the current call if no action runs; "" between calls.
    what: str
    #: The current line of the model's or the user's code; "" if the rank does not run such code.
    place: str
    #: The seconds since the action or the call began; between calls, since the last call ended.
    seconds: float
    #: For each other rank, keyed by its name: the last action whose result was received from it.
    last: dict[str, str]
    #: The last method of the pipeline that the user called, such as "step"; "" if there was none.
    method: str = ""


class Activity:
    """Tracks the activity of this rank. The executor's calls record it, and the alarm's thread reads it.

    ``names`` lists the names of all ranks, in rank order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._thread = threading.get_ident()
        self.call = ""  # the current call; "" between calls
        self.method = ""  # the last method that the user called
        self.since_s = time.monotonic()  # when the current call began, or the last call ended
        self._stamps: Stamps | None = None
        self._placement: Sequence[int] = ()
        self._failure: tuple[Doing, str] | None = None

    def rename(self, names: Sequence[str]) -> None:
        """Use other names for the ranks in messages."""
        self._names = names

    def begin(self, call: str, *, by_heartbeat: bool = False) -> None:
        """Record that a call begins in this thread.

        ``by_heartbeat`` states whether the heartbeat's thread makes the call while the rank's own thread works.
        """
        self.call = call
        self.since_s = time.monotonic()
        if not by_heartbeat:
            self._thread = threading.get_ident()
        self._failure = None

    def fail(self, doing: Doing, text: str) -> None:
        """Record that the call has failed, so that the cleanup after the failure does not count as work.

        ``doing`` is the activity in which the call failed, and ``text`` describes the error.
        """
        self._failure = doing, text

    def end(self) -> None:
        """Record that the call has ended."""
        self.call = ""
        self.since_s = time.monotonic()
        self._stamps = None
        self._failure = None

    def run(self, stamps: "Stamps", placement: Sequence[int]) -> None:
        """Record that this rank has begun to run an order.

        ``stamps`` contains the order, and the start and end times of the actions run so far. ``placement`` lists the
        rank of each stage.
        """
        self._placement = placement
        self._stamps = stamps

    def doing(self) -> tuple[Doing, str]:
        """Return the activity of the rank's thread, and the line of model or user code that it runs ("" if none)."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_OF_COLLECTIVES):
                return COLLECTIVE, ""
            if file.startswith(_WAITING):
                return "waits", ""
            if _is_of_user(file):
                return "works", _line(frame)
            frame = frame.f_back
        return "works", ""

    def innermost(self) -> tuple[int, int]:
        """Return an identifier of the current position of the rank's thread in its code."""
        frame = sys._current_frames().get(self._thread)
        return (id(frame), frame.f_lasti) if frame is not None else (0, 0)

    def stack(self) -> str:
        """Return the current traceback of the rank's thread as text; "" if the thread has ended."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def state(self) -> State:
        """Return the current state of the rank."""
        failure = self._failure
        if failure is None:
            return self._state(*self.doing())
        doing, text = failure
        state = self._state(doing, "")
        return state._replace(what=text) if doing == "raised" else state

    def _state(self, doing: Doing, place: str) -> State:
        stamps = self._stamps
        seconds = time.monotonic() - self.since_s
        if stamps is None:
            return State(doing, self.call, place, seconds, {}, self.method)
        position = next((index for index, end in enumerate(stamps.ends) if end is None), None)
        last = self._last(stamps.order[:position])
        if position is None:
            return State(doing, self.call, place, seconds, last, self.method)
        start = stamps.starts[position]
        if isinstance(start, float):  # a host time; a device event cannot be read before the step ends
            seconds = time.perf_counter() - start
        action = stamps.order[position]
        what = f"{action} (stage {action.stage}, {action.kind.row.number} {action.microbatch})"
        return State(doing, what, place, seconds, last, self.method)

    def _last(self, done: Sequence[Action]) -> dict[str, str]:
        return {
            self._names[self._placement[peer]]: f"{peer}{kind.row.transfer.result_of}{microbatch}"
            for _, kind, microbatch, peer in done
            if peer is not None and kind.row.transfer and not kind.row.transfer.sends
        }


def user_line(thread: int | None) -> str:
    """Return the innermost line of model, user or pipesched code that a thread runs; "" if there is none."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and not _is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _line(frame)


def is_in_call(thread: int) -> bool:
    """Return whether a thread runs code of pipesched that does not wait for another process."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_PIPESCHED):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_WAITING_ELSEWHERE)


def _is_of_user(file: str) -> bool:
    """Return whether a file belongs neither to torch nor to Python."""
    return not file.startswith((_OF_TORCH, "<")) and (_SITE_PACKAGES in file or not file.startswith(_OF_PYTHON))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def doing_at(error: BaseException) -> Doing:
    """Return the activity in which an error occurred: "collective" if a collective raised it, otherwise "raised".

    A collective usually raises because another rank of its group has stopped.
    """
    doing: Doing = "raised"
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(_OF_COLLECTIVES) and not isinstance(error, ValueError):  # no wrong argument
            doing = COLLECTIVE
        elif not file.startswith((_OF_TORCH, "<")):
            doing = "raised"  # raised by user code that torch called
        trace = trace.tb_next
    return doing


def said(error: BaseException) -> str:
    """Return the type and the message of an error, as text for other ranks."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def blamed(answers: Mapping[str, State | str], timeout_s: float) -> tuple[list[str], str] | None:
    """Return the names of the ranks to blame, and the reason; None if the replies do not show which ranks are to blame.

    Args:
        answers: the replies, keyed by rank name.
        timeout_s: how long a rank waits for another rank, in seconds. A rank that is still working is blamed
            only if its current action has taken at least half of ``timeout_s``.

    """
    states = {name: answer for name, answer in answers.items() if isinstance(answer, State)}
    for name, state in states.items():
        if state.doing == "raised":
            return [name], state.what
    quiet = [name for name, answer in answers.items() if not isinstance(answer, State)]
    if quiet:
        last = {name: action for state in states.values() for name, action in state.last.items()}
        return quiet, "; ".join(_quiet(name, answers[name], last.get(name), len(quiet) > 1) for name in quiet)
    busy = {name: state for name, state in states.items() if state.doing == "works"}
    late = max(busy, key=lambda name: busy[name].seconds, default=None)
    if late is None or busy[late].seconds < timeout_s / 2:
        return None
    what, place, seconds = busy[late].what, busy[late].place, busy[late].seconds
    why = f"has been in {what}" if what else "has been in code outside the pipeline"
    return [late], f"it {why} for {seconds:.1f} s{f', at {place}' if place else ''}"


def different_methods(answers: Mapping[str, State | str]) -> tuple[list[str], str] | None:
    """Return the names of the ranks that wait in calls of different methods, and the methods; None if there are none.

    ``answers`` maps the names of ranks to their replies.
    """
    waiting = {name: one for name, one in answers.items() if isinstance(one, State) and one.what and one.method}
    if len({state.method for state in waiting.values()}) < 2:
        return None
    names = sorted(waiting, key=lambda name: (len(name), name))
    called = ", ".join(f"{name} called {waiting[name].method}" for name in names)
    return names, (
        f"all ranks must call the same method; {called}; call the same methods on every rank, in the same order"
    )


def _quiet(name: str, answer: State | str, last: str | None, several: bool) -> str:
    ended = "its process has exited, or it has left the pipeline"
    why = ended if answer == ENDED else "it does not answer, so its process is stopped or cannot be reached"
    known = f"; its last message came from action {last}" if last else "; it has sent no message in this call"
    return f"{f'{name}: ' if several else ''}{why}{known}"
