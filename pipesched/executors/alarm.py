"""Alarm: how all ranks of a job learn that one has failed, within moments and whatever they wait for; and which one.

In every rank a thread listens at an address that the others have read from the store. A rank that fails tells all:
those of its pipeline, and all others of the job, which may share collectives with them. Each answers with what it is
doing, and ends its own waits by closing its connections. A rank that noticed only that another one is late or gone
works out from the answers which one is to blame, and tells that, too.

The store itself is not asked once something has failed: it may lie in the process that is stopped.
"""

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import finalize

from torch import distributed

from pipesched.errors import ExecutionError
from pipesched.executors.activity import ENDED, SILENT, Activity, State, blamed
from pipesched.executors.stores import Store, asked, missing
from pipesched.executors.stuck import Stuck

__all__ = ["Alarm", "Fault"]

_PATIENCE_S = 2.0  # for answers, and for what another rank makes of them
_LOOK_S = 0.2  # how often a rank that has heard of a fault looks whether it is stuck
_WORD_BYTES = 16
_LONGEST, _LONGEST_TEXT = 1 << 16, 8000  # bytes of a message; letters of what it says
_CALLERS = 256  # connections at a time
_PEOPLE = "pipesched/alarms"  # in the job's store: how many addresses there are


class Fault(NamedTuple):
    """What happened. who: the rank to blame, as errors name it. settled: whether that is known, or a guess so far."""

    who: str
    text: str
    settled: bool

    def __str__(self) -> str:
        return f"{self.who} failed: {self.text}"


class _Address(NamedTuple):
    """Where a rank listens. word: in hexadecimals; who does not know it from the store is a stranger."""

    name: str
    rank: int
    host: str
    port: int
    word: str


class Bell:
    """Whether a rank has failed."""

    rung = False


class _Ear:
    """What the listening thread shares with the alarm. It holds no alarm, so that one can be dropped."""

    def __init__(self, host: str, activity: Activity, name: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family, backlog=_CALLERS)
        self.listener.setblocking(False)
        self.word = secrets.token_bytes(_WORD_BYTES)
        self.inside, self.outside = socket.socketpair()  # a byte from outside ends the thread
        self.bell, self.settled = Bell(), threading.Event()
        self.fault: Fault | None = None
        self.state: State | None = None
        self.hang_ups: list[Callable[[], None]] = []
        self._activity, self._name, self._timeout_s = activity, name, timeout_s
        self._lock = threading.Lock()
        self._stuck: Stuck | None = None

    def hear(self, fault: Fault, own: State | None = None) -> None:
        """A fault is known here. The first that is settled counts. own: this rank's state, where it failed."""
        with self._lock:
            if self.state is None or own is not None:
                self.state = own or self._activity.state()
            if self.fault is None or (fault.settled and not self.settled.is_set()):
                self.fault = fault
            self.bell.rung = True
        if fault.settled:
            self.settled.set()

    def hang_up(self) -> None:
        """End all that this rank waits for."""
        hang_ups, self.hang_ups = self.hang_ups, []
        for hang_up in hang_ups:
            hang_up()

    def listen(self) -> None:
        """The thread."""
        with selectors.DefaultSelector() as selector, self.listener, self.inside:
            selector.register(self.inside, selectors.EVENT_READ)
            selector.register(self.listener, selectors.EVENT_READ)
            callers: dict[Any, bytearray] = {}
            while True:
                for key, _ in selector.select(_LOOK_S if self.bell.rung else None):
                    if key.fileobj is self.inside:
                        for caller in callers:
                            caller.close()
                        return
                    if key.fileobj is self.listener:
                        self._admit(selector, callers)
                    else:
                        self._serve(selector, callers, key.fileobj)
                if self.bell.rung and self.fault is not None:
                    self._stuck = self._stuck or Stuck(self._activity, self._timeout_s)
                    self._stuck.look(self._name, str(self.fault))

    def _admit(self, selector: selectors.BaseSelector, callers: dict[Any, bytearray]) -> None:
        with suppress(OSError):
            caller, _ = self.listener.accept()
            caller.setblocking(False)
            if len(callers) == _CALLERS:  # the one that has been silent for longest
                oldest = next(iter(callers))
                del callers[oldest]
                selector.unregister(oldest)
                oldest.close()
            callers[caller] = bytearray()
            selector.register(caller, selectors.EVENT_READ)

    def _serve(self, selector: selectors.BaseSelector, callers: dict[Any, bytearray], caller: Any) -> None:
        """Read what has come. A whole message is heard and answered; then the connection ends."""
        said = callers[caller]
        try:
            part = caller.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        said += part
        if part and not said.endswith(b"\n") and len(said) <= _LONGEST:
            return
        del callers[caller]
        selector.unregister(caller)
        with caller, suppress(OSError, ValueError, TypeError):
            if said.endswith(b"\n") and secrets.compare_digest(said[:_WORD_BYTES], self.word):
                self.hear(Fault(*json.loads(said[_WORD_BYTES:])))
                caller.sendall(json.dumps(self.state).encode())
                caller.close()
                self.hang_up()


class Alarm:
    """One rank's alarm. Making one is collective: all ranks of the pipeline come within the timeout.

    store: of the pipeline's ranks alone. group: theirs. host: this rank's address. Dropping the alarm ends its thread,
    as ``end`` does.

    Raises ExecutionError that names the ranks that have not come.
    """

    def __init__(self, store: Store, group: Any, host: str, timeout_s: float) -> None:
        self.rank: int = group.rank()
        self._timeout_s = timeout_s
        self._job, ranks = _job_of(group)
        self._names = [_name(rank, ranks[rank]) for rank in range(group.size())]
        self._own_ranks = set(ranks)
        self.activity = Activity(self._names)
        self._ear = _Ear(host, self.activity, self.name, timeout_s)
        self._thread = threading.Thread(target=self._ear.listen, name=f"pipesched alarm {self.rank}", daemon=True)
        self._thread.start()
        self._finalizer = finalize(self, _end, self._ear.outside, self._thread)
        port = self._ear.listener.getsockname()[1]
        address = _Address(self.name, ranks[self.rank], host, port, self._ear.word.hex())
        self._elsewhere: dict[int, _Address] = {}
        self._number = 0 if self._job is None else self._announce(address)
        self._addresses = self._awaited(store, address)

    @property
    def name(self) -> str:
        """Of this rank, in errors."""
        return self._names[self.rank]

    @property
    def bell(self) -> Bell:
        """Whether a rank has failed."""
        return self._ear.bell

    def on_fault(self, hang_up: Callable[[], None]) -> None:
        """Call this once a rank has failed, in any thread: it ends what this rank waits for."""
        self._ear.hang_ups.append(hang_up)
        if self.bell.rung:
            self._ear.hang_up()

    # ---- addresses --------------------------------------------------------------------------------------------

    def _announce(self, address: _Address) -> int:
        """To the ranks of the job that are in other pipelines."""

        def ask() -> int:
            assert self._job is not None
            number = self._job.add(_PEOPLE, 1)
            self._job.set(f"{_PEOPLE}/{number}", json.dumps(address))
            return number

        return asked(ask, self._timeout_s)

    def _awaited(self, store: Store, address: _Address) -> list[_Address]:
        """Of all ranks of this pipeline."""
        keys = [f"alarm/{rank}" for rank in range(len(self._names))]
        try:
            asked(lambda: store.set(keys[self.rank], json.dumps(address)), self._timeout_s)
            absent = missing(store, keys, self._timeout_s)
            if not absent:
                return asked(lambda: [_Address(*json.loads(store.get(key))) for key in keys], self._timeout_s)
        except RuntimeError as error:
            self.end()
            raise ExecutionError(
                f"all {len(keys)} ranks make their pipeline together; {self.name} waited {self._timeout_s:g} s; make "
                f"it on every rank, or raise the timeout ({error})"
            ) from None
        who, have = ", ".join(self._names[rank] for rank in absent), "has" if len(absent) == 1 else "have"
        text = f"it has not come to make its pipeline within {self._timeout_s:g} s"
        fault = Fault(who, text, True)
        self._ear.hear(fault)
        self._tell(fault, self._elsewhere_now(), _PATIENCE_S)
        self.end()
        raise ExecutionError(
            f"all {len(keys)} ranks make their pipeline together; {who} {have} not come; {self.name} waited "
            f"{self._timeout_s:g} s; make it on every rank, or raise the timeout"
        )

    def look_around(self) -> None:
        """Read where the ranks of other pipelines listen, before anything fails. It asks the job's store."""
        if self._job is not None:
            with suppress(RuntimeError):
                self._elsewhere = asked(self._read_elsewhere, _PATIENCE_S)

    def _read_elsewhere(self) -> dict[int, _Address]:
        assert self._job is not None
        known: dict[int, _Address] = {}
        for number in range(1, self._job.add(_PEOPLE, 0) + 1):
            key = f"{_PEOPLE}/{number}"
            if self._job.check([key]):
                address = self._elsewhere.get(number) or _Address(*json.loads(self._job.get(key)))
                if address.rank not in self._own_ranks:
                    known[number] = address
        return known

    def _elsewhere_now(self) -> list[_Address]:
        if not self._elsewhere:
            self.look_around()
        return list(self._elsewhere.values())

    # ---- a fault ----------------------------------------------------------------------------------------------

    def ring(self, text: str, *, own: bool) -> Fault:
        """Tell all ranks that this one fails, and end what it waits for. Returns what happened, as all of them see it.

        own: whether the cause is this rank's; else it is looked for. Takes some seconds where ranks do not answer.
        """
        ear, heard = self._ear, self.bell.rung
        text = text[:_LONGEST_TEXT]
        if own and not ear.settled.is_set():
            fault = Fault(self.name, text, True)
            ear.hear(fault, self.activity.state()._replace(doing="raised", what=text))
            self._tell(fault, [*self._others(), *self._elsewhere_now()], _PATIENCE_S / 2)
        elif heard:
            ear.hang_up()
            ear.settled.wait(2 * _PATIENCE_S)
        else:
            self._look_for_the_cause(Fault(self.name, text, False))
        ear.hang_up()
        assert ear.fault is not None
        return ear.fault

    def _look_for_the_cause(self, guess: Fault) -> None:
        ear = self._ear
        ear.hear(guess)
        assert ear.state is not None
        ours = self._tell(guess, self._others(), _PATIENCE_S, until=ear.settled.is_set)
        if ear.settled.is_set():
            return
        found = blamed({self.name: ear.state, **ours}, self._timeout_s)
        elsewhere = self._elsewhere_now()
        theirs = self._tell(guess, elsewhere, _PATIENCE_S / 2, until=ear.settled.is_set)
        who, why = found or blamed(theirs, self._timeout_s) or ([self.name], "")
        noticed = f"{why}; {self.name} noticed: " if why else ""
        fault = Fault(", ".join(who), noticed + guess.text, True)
        ear.hear(fault)
        answers = {**theirs, **ours}
        listeners = [one for one in (*self._others(), *elsewhere) if isinstance(answers[one.name], State)]
        self._tell(fault, listeners, _PATIENCE_S / 4)

    def _others(self) -> list[_Address]:
        return [address for rank, address in enumerate(self._addresses) if rank != self.rank]

    def _tell(
        self,
        fault: Fault,
        listeners: Sequence[_Address],
        patience_s: float,
        until: Callable[[], bool] = lambda: False,
    ) -> dict[str, State | str]:
        """Tell these ranks. What each of them answers, by name. until: ends it early."""
        said = json.dumps(fault).encode() + b"\n"
        calls = [_Call(address, bytes.fromhex(address.word) + said) for address in listeners]
        end_s = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            for call in calls:
                call.begin(selector)
            while selector.get_map() and time.monotonic() < end_s and not until():
                for key, _ in selector.select(0.05):
                    key.data.go_on(selector)
        answers: dict[str, State | str] = {}
        for call in calls:  # a rank that has made several pipelines is alive as long as one of them answers
            answer, name = call.end(), call.address.name
            if answer != ENDED or name not in answers:
                answers[name] = answer
        return answers

    def end(self) -> None:
        """End the thread."""
        if self._finalizer.alive and self._job is not None and not self.bell.rung:
            job, key = self._job, f"{_PEOPLE}/{self._number}"
            with suppress(RuntimeError):
                asked(lambda: job.delete_key(key), _PATIENCE_S)
        self._finalizer()


class _Call:
    """A message to one rank, and its answer."""

    def __init__(self, address: _Address, said: bytes) -> None:
        self.address = address
        self._said, self._read, self._answer = said, bytearray(), SILENT
        self._socket = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        self._socket.setblocking(False)

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Connect."""
        self._socket.connect_ex((self.address.host, self.address.port))
        selector.register(self._socket, selectors.EVENT_WRITE, self)

    def go_on(self, selector: selectors.BaseSelector) -> None:
        """Where the socket is ready: say, or read."""
        try:
            if self._said:
                self._said = self._said[self._socket.send(self._said) :]
                if not self._said:
                    selector.modify(self._socket, selectors.EVENT_READ, self)
                return
            part = self._socket.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._read += part
        if not part:
            selector.unregister(self._socket)
            self._answer = ENDED

    def end(self) -> State | str:
        """What was answered."""
        self._socket.close()
        with suppress(ValueError, TypeError):
            return State(*json.loads(self._read))
        return self._answer


def _end(outside: socket.socket, thread: threading.Thread) -> None:
    with outside, suppress(OSError):
        outside.send(b"\0")
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)


def _job_of(group: Any) -> tuple[Store | None, list[int]]:
    """(the store of the whole job, None where all its ranks are in this group; the group's ranks in the job)."""
    size = group.size()
    if not distributed.is_initialized():
        return None, list(range(size))
    try:
        ranks = distributed.get_process_group_ranks(group)
    except (ValueError, KeyError):  # a group that torch.distributed does not know
        return None, list(range(size))
    world = distributed.group.WORLD
    return (None if world is None or world.size() == size else world.get_group_store()), ranks


def _name(rank: int, in_job: int) -> str:
    return f"rank {rank}" if rank == in_job else f"rank {rank} (global rank {in_job})"
