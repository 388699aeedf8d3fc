"""Failure alarm: quickly informs all ranks of a job that a rank has failed, and finds the rank to blame.

In every rank, a thread listens at an address that the other ranks have read from the store. A rank that fails notifies
all ranks of the job, because ranks of other pipelines may share collectives with its pipeline. Each notified rank
replies with its current activity, and stops waiting for other ranks by closing its connections. A rank that has not
failed itself, but has noticed a late or missing peer, determines the rank to blame from the replies, and then
notifies the other ranks of the result.

After a failure, the alarm waits for the store only briefly, because the process that hosts the store may have stopped.
"""

import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torch import distributed

from pipesched.runtime.coordination.failure_notices import LONGEST, Address, Fault, told
from pipesched.runtime.coordination.rank_activity import (
    ENDED,
    SILENT,
    Activity,
    Doing,
    State,
    blamed,
    different_methods,
)
from pipesched.runtime.coordination.rendezvous import AbsentError, ranks_of
from pipesched.runtime.coordination.stores import Store, StoreLostError, asked, missing
from pipesched.runtime.coordination.strangers import STRANGERS
from pipesched.runtime.coordination.stuck_collectives import Stuck

__all__ = ["Alarm"]

_PATIENCE_S = 2.0  # time to wait for replies, or for another rank to find the rank to blame
_SEND_S = 0.1  # time to send a notice that is read later
_GRACE_S = 0.5  # time in which a message can still arrive after a rank's process has exited
_LOOK_S = 0.2  # after a fault, the time between two checks for a stuck rank
_WORD_BYTES = 32
# Messages other than faults.
_WATCH = b"watch\n"  # the sender watches the receiver
_LEFT = b"left\n"  # the sender has closed its pipeline without a failure
_LONGEST_TEXT = 8000  # longest description of a failure in characters, so that a message fits in LONGEST bytes
_WATCHERS = 128  # the maximum number of watchers
_BACKLOG = 256
_MAKING = "the construction of a pipeline"  # the activity that a rank reports while it constructs a pipeline
_PEOPLE = "pipesched/alarms"  # key in the job's store for the number of announced addresses
_SIGNED_OFF = "signed off"  # suffix of the key that a rank sets in the job's store when it closes its pipeline


class Bell:
    """A flag that is set when a rank has failed."""

    rung = False


class _ListenerState:
    """The state shared by the listening thread and the alarm. A listener holds no reference to the alarm."""

    def __init__(self, host: str, activity: Activity, name: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.server = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.server.setblocking(False)
        self.word = secrets.token_hex(_WORD_BYTES // 2).encode()
        self.inside, self.outside = socket.socketpair()  # a byte makes the thread watch ``watched``, or end
        self.watched: tuple[socket.socket, str] | None = None  # (connection, name) of the watched rank
        self.addresses: list[Address] = []  # addresses of the other ranks
        self.bell = Bell()
        self.settled = threading.Event()
        self.fault: Fault | None = None
        self.state: State | None = None
        self.hang_ups: list[Callable[[], None]] = []
        #: Answers questions of other processes.
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        #: Whether the rank looks for survivors, so that a collective may take its time.
        self.recovers = False
        self._activity = activity
        self._name = name
        self._lock = threading.Lock()
        self._stuck: Stuck | None = None
        self._callers: dict[Any, bytearray] = {}  # connections, with the bytes received so far
        self._watchers: set[Any] = set()
        self._gone = ""  # the name of the watched rank if its process has exited without a message

    def hear(self, fault: Fault, own: State | None = None) -> None:
        """Record a fault. The first fault whose cause is certain replaces any earlier guess, and is final.

        ``own`` is this rank's state, passed only if this rank itself reports the fault. If ``own`` is None, the
        state recorded by an earlier call is kept. If no state has been recorded, the current state is recorded.
        """
        with self._lock:
            if self.state is None or own is not None:
                self.state = own or self._activity.state()
            if self.fault is None or (fault.settled and not self.settled.is_set()):
                self.fault = fault
            self.bell.rung = True
        if fault.settled:
            self.settled.set()

    def hang_up(self) -> None:
        """Make this rank stop waiting for other ranks."""
        hang_ups = self.hang_ups
        self.hang_ups = []
        for hang_up in hang_ups:
            hang_up()

    def listen(self) -> None:
        """The main loop of the listening thread."""
        with selectors.DefaultSelector() as selector, self.server, self.inside:
            selector.register(self.inside, selectors.EVENT_READ)
            selector.register(self.server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_LOOK_S if self.bell.rung or self._gone else None):
                    if key.fileobj is self.inside:
                        if self.inside.recv(1) != _WATCH[:1]:
                            return self._leave()
                        assert self.watched is not None
                        selector.register(self.watched[0], selectors.EVENT_READ)
                    elif key.fileobj is self.server:
                        self._admit(selector)
                    elif self.watched is not None and key.fileobj is self.watched[0]:
                        self._watch(selector, *self.watched)
                    else:
                        self._serve(selector, key.fileobj)
                if self._gone:
                    self._check_gone(self._gone)
                if self.bell.rung and self.fault is not None and not self.recovers:
                    self._stuck = self._stuck or Stuck(self._activity)
                    self._stuck.look(self._name, str(self.fault))

    def _leave(self) -> None:
        with STRANGERS.lock:
            for caller in self._callers:
                STRANGERS.remove(caller)
                with caller, suppress(OSError):
                    if caller in self._watchers:
                        caller.send(_LEFT)
            self._callers.clear()
        if self.watched is not None:
            self.watched[0].close()

    def _watch(self, selector: selectors.BaseSelector, watched: socket.socket, name: str) -> None:
        """Handle the end of the watched rank's connection: the rank has closed its pipeline, or has died."""
        selector.unregister(watched)
        with suppress(OSError):
            if watched.recv(len(_LEFT)):
                return
        self._gone = name

    def _check_gone(self, name: str) -> None:
        """Report that the process of rank ``name`` has exited, once this rank has waited for ``_GRACE_S`` seconds."""
        state = self._activity.state()
        if not self.bell.rung and state.what and state.doing == "waits" and state.seconds >= _GRACE_S:
            fault = Fault(name, "its process has exited without a message, because it was killed or crashed", True)
            self.hear(fault)
            told(fault, [address for address in self.addresses if address.name != name], _PATIENCE_S / 2)
            self.hang_up()

    def _admit(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError), STRANGERS.lock:
            caller = STRANGERS.accepted(self.server)
            if caller is None:
                return
            caller.setblocking(False)
            STRANGERS.admit(caller, partial(self._dismiss, selector, caller))
            self._callers[caller] = bytearray()
            selector.register(caller, selectors.EVENT_READ)

    def _dismiss(self, selector: selectors.BaseSelector, caller: Any) -> None:
        with STRANGERS.lock:
            STRANGERS.remove(caller)
            self._watchers.discard(caller)
            if self._callers.pop(caller, None) is not None:
                selector.unregister(caller)
                caller.close()

    def _serve(self, selector: selectors.BaseSelector, caller: Any) -> None:
        """Read from a connection. Once a fault has arrived, record it, reply with this rank's state, and disconnect."""
        said = self._callers.get(caller)
        if said is None:  # another listener of this process has closed the connection
            return
        try:
            part = caller.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        said += part
        if part and not said.endswith(b"\n") and len(said) <= LONGEST:
            return
        known = secrets.compare_digest(said[:_WORD_BYTES], self.word)
        if part and known and said[_WORD_BYTES:] == _WATCH and len(self._watchers) < _WATCHERS:
            self._watchers.add(caller)
            STRANGERS.remove(caller)
            return
        if part and known:
            with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                caller.sendall(json.dumps(self._reply(json.loads(said[_WORD_BYTES:]))).encode())
        self._dismiss(selector, caller)
        if self.bell.rung:
            self.hang_up()

    def _reply(self, said: Any) -> Any:
        """Return the reply to a message: this rank's state to a fault; a dict to a question."""
        if isinstance(said, dict):
            if not self.recovers and self.state is not None and self.state.doing == "raised":
                return {"ends": True}
            return {} if self.answer is None else self.answer(said)
        self.hear(Fault(*said))
        return self.state


class Alarm:
    """One rank's failure alarm.

    Ranks of other pipelines can reach the alarm as soon as it is created, and ranks of this pipeline after ``meet``.
    The alarm's thread ends when ``end`` is called or the alarm is garbage-collected.

    Args:
        group: the process group of the pipeline's ranks.
        names: the names of the group's ranks.
        host: this rank's address.
        timeout_s: how long to wait for other ranks and the store, in seconds.

    Raises:
        StoreLostError: if the store does not reply.

    """

    def __init__(self, group: Any, names: Sequence[str], host: str, timeout_s: float) -> None:
        self.rank: int = group.rank()
        self._timeout_s = timeout_s
        self._job, ranks = _job_of(group)
        self._names = names
        self._own_ranks = set(ranks)
        self.activity = Activity(self._names)
        self._listener = _ListenerState(host, self.activity, self.name)
        self._thread = threading.Thread(target=self._listener.listen, name=f"pipesched alarm {self.rank}", daemon=True)
        self._thread.start()
        # multiprocessing's Finalize also runs at the end of a multiprocessing.Process.
        self._finalizer = Finalize(self, _end, (self._listener.outside, self._thread), exitpriority=0)
        port = self._listener.server.getsockname()[1]
        self._own = Address(self.name, ranks[self.rank], host, port, self._listener.word.decode())
        self._addresses: list[Address] = []
        self._elsewhere: dict[int, Address] = {}
        self._key = ""  # the key of this rank's address in the job's store
        self._store_is_lost = False
        if self._job is not None:
            asked(self._announce, timeout_s)
        self.activity.begin(_MAKING)

    def meet(self, store: Store) -> None:
        """Wait for the other ranks of the pipeline. Only the ranks of this pipeline may use ``store``.

        Raises an ExecutionError that names the missing ranks, or StoreLostError.
        """
        self._addresses = self._awaited(store)
        self.activity.end()
        self._listener.addresses = self._others()
        self.look_around()
        if len(self._addresses) > 1:
            self._watch(self._addresses[(self.rank + 1) % len(self._addresses)])

    def rename(self, names: Sequence[str]) -> None:
        """Use other names for the ranks in messages."""
        self._names = names
        self.activity.rename(names)

    @property
    def name(self) -> str:
        """The name of this rank in error messages."""
        return self._names[self.rank]

    @property
    def bell(self) -> Bell:
        """The flag that is set when a rank has failed."""
        return self._listener.bell

    @property
    def addresses(self) -> Sequence[Address]:
        """The addresses of the alarms of this pipeline's ranks, in rank order."""
        return self._addresses

    @property
    def fault(self) -> Fault | None:
        """The fault that has ended the pipeline, if there is one."""
        return self._listener.fault

    @property
    def blamed(self) -> list[int]:
        """The ranks of this pipeline that the fault blames, in ascending order."""
        who = "" if self.fault is None else f", {self.fault.who}, "
        return [  # a name may contain a comma, and may be older than the last ``rename``
            rank
            for rank, address in enumerate(self._addresses)
            if any(f", {name}, " in who for name in (address.name, self._names[rank]))
        ]

    @property
    def settled(self) -> threading.Event:
        """Is set once it is certain which rank has failed."""
        return self._listener.settled

    def answer_with(self, answer: Callable[[dict[str, Any]], dict[str, Any]], *, recovers: bool = False) -> None:
        """Answer questions of other processes with this function.

        ``recovers`` states whether this rank looks for survivors. It then no longer looks for stuck collectives.
        """
        self._listener.answer = answer
        self._listener.recovers = recovers

    def on_fault(self, hang_up: Callable[[], None]) -> None:
        """Register a function that makes this rank stop waiting. After a failure, any thread may call the function."""
        self._listener.hang_ups.append(hang_up)
        if self.bell.rung:
            self._listener.hang_up()

    def _watch(self, address: Address) -> None:
        """Watch the rank at an address, to notice if its process exits silently. Each rank watches the next rank."""
        with suppress(OSError):  # a rank that waits for the unreachable rank will detect its failure
            watched = socket.create_connection((address.host, address.port), self._timeout_s)
            watched.sendall(address.word.encode() + _WATCH)
            self._listener.watched = watched, address.name
            self._listener.outside.send(_WATCH[:1])

    # ---- addresses --------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Write this rank's address to the job's store for the ranks of other pipelines."""
        assert self._job is not None
        self._key = f"{_PEOPLE}/{self._job.add(_PEOPLE, 1)}"
        self._job.set(self._key, json.dumps(self._own))

    def _sign_off(self) -> None:
        """Record in the job's store that this rank no longer listens."""
        job = self._job
        key = self._key
        if job is not None and key and self._finalizer.still_active() and not self._store_is_lost:
            with suppress(RuntimeError):  # the store is gone, or Python is exiting and starts no threads
                asked(lambda: job.set(f"{key}/{_SIGNED_OFF}", ""), _PATIENCE_S / (8 if self.bell.rung else 2))

    def _awaited(self, store: Store) -> list[Address]:
        """Publish this rank's address; wait for the addresses of all ranks of this pipeline, and return them."""
        keys = [f"alarm/{rank}" for rank in range(len(self._names))]
        asked(lambda: store.set(keys[self.rank], json.dumps(self._own)), self._timeout_s)
        if absent := missing(store, keys, self._timeout_s):
            raise AbsentError(absent, self._names, self.rank, self._timeout_s)
        return asked(lambda: [Address(*json.loads(store.get(key))) for key in keys], self._timeout_s)

    def look_around(self) -> None:
        """Read the addresses of other pipelines' ranks from the job's store, for notices of later failures."""
        if self._job is None or self._store_is_lost:
            return
        try:
            self._elsewhere = asked(self._read_elsewhere, _PATIENCE_S)
        except StoreLostError:
            self._store_is_lost = True  # wait for the store only once
        except RuntimeError:
            return
        self._listener.addresses = [*self._others(), *self._elsewhere.values()]

    def _read_elsewhere(self) -> dict[int, Address]:
        assert self._job is not None
        known: dict[int, Address] = {}
        for number in range(1, self._job.add(_PEOPLE, 0) + 1):
            key = f"{_PEOPLE}/{number}"
            if self._job.check([key]):
                address = self._elsewhere.get(number) or Address(*json.loads(self._job.get(key)))
                if address.rank not in self._own_ranks:
                    known[number] = address
        return known

    def _elsewhere_now(self) -> list[Address]:
        if not self._elsewhere:
            self.look_around()
        return list(self._elsewhere.values())

    def _without_signed_off(self, answers: Mapping[str, State | str]) -> dict[str, State | str]:
        """Return the replies, without the ranks that have closed all their pipelines and are not to blame.

        Such a rank may seem silent, because the port of a closed pipeline may belong to another process by now.
        """
        numbers = {
            number for number, address in self._elsewhere.items() if not isinstance(answers.get(address.name), State)
        }
        job = self._job
        if job is None or not numbers:
            return dict(answers)
        # The host of the store may be the silent rank, and other ranks wait for the result of this search.
        patience_s = _PATIENCE_S / (2 if ENDED in answers.values() else 8)
        with suppress(RuntimeError):
            numbers = asked(
                lambda: {number for number in numbers if not job.check([f"{_PEOPLE}/{number}/{_SIGNED_OFF}"])},
                patience_s,
            )
        blamable = {self._elsewhere[number].name for number in numbers}
        return {name: answer for name, answer in answers.items() if isinstance(answer, State) or name in blamable}

    # ---- a fault ----------------------------------------------------------------------------------------------

    def ring(self, text: str, doing: Doing, ended: int | None = None) -> Fault:
        """Notify all ranks that this rank has failed, and make this rank stop waiting for other ranks.

        If some ranks do not reply, the call takes a few seconds.

        Args:
            text: the description of the failure.
            doing: the activity of this rank when it failed: "raised" if it raised an error itself, "waits" if it was
                waiting for another rank, "collective" if a collective of torch.distributed raised an error. Unless the
                activity is "raised", the alarm searches for the rank to blame.
            ended: the rank of this pipeline that ended its connection with this rank, if known.

        Returns:
            The fault that all ranks report.

        """
        listener = self._listener
        heard = self.bell.rung
        text = text[:_LONGEST_TEXT]
        state = self.activity.state()._replace(doing=doing)
        if doing == "raised" and not listener.settled.is_set():
            fault = Fault(self.name, text, True)
            listener.hear(fault, state._replace(what=text))
            told(fault, [*self._others(), *self._elsewhere_now()], _PATIENCE_S / 2)
        elif heard:
            listener.hang_up()
            listener.settled.wait(2 * _PATIENCE_S)
            assert listener.fault is not None
            told(listener.fault, self._elsewhere_now(), _PATIENCE_S / 4)
        else:
            self._look_for_the_cause(Fault(self.name, text, False), state, ended)
        listener.hang_up()
        assert listener.fault is not None
        return listener.fault

    def _look_for_the_cause(self, guess: Fault, state: State, ended: int | None) -> None:
        listener = self._listener
        listener.hear(guess, state)
        ours = told(guess, self._others(), _PATIENCE_S, until=listener.settled.is_set)
        if listener.settled.is_set():
            return
        found = blamed({self.name: state, **ours}, self._timeout_s) or different_methods({self.name: state, **ours})
        elsewhere = self._elsewhere_now()
        theirs = self._without_signed_off(told(guess, elsewhere, _PATIENCE_S / 2, until=listener.settled.is_set))
        left = None if ended is None else ([self._names[ended]], "it has left the pipeline")
        if left is None and ENDED in theirs.values():
            found = found or self._host_of_lost_store()  # ranks of other pipelines may have stopped because of this
        found = found or blamed(theirs, self._timeout_s) or left
        found = found or self._host_of_lost_store() or self._absent({self.name: state, **theirs})
        who, why = found or ([self.name], "")
        noticed = f"{why}; {self.name} noticed: " if why else ""
        fault = Fault(", ".join(who), noticed + guess.text, True)
        listener.hear(fault)
        answers = {**theirs, **ours}
        listeners = [one for one in (*self._others(), *elsewhere) if isinstance(answers.get(one.name), State)]
        told(fault, listeners, _PATIENCE_S / 4)
        silent = [one for one in self._others() if answers.get(one.name) == SILENT]
        told(fault, silent, _SEND_S)  # a frozen rank reads it when it wakes

    def _host_of_lost_store(self) -> tuple[list[str], str] | None:
        """If the job's store is lost, return the name of the process that hosts it, and the reason; otherwise None."""
        job = self._job
        if job is None:
            return None
        try:
            asked(lambda: job.add(_PEOPLE, 0), _PATIENCE_S / 2)
        except StoreLostError as error:
            who, _, why = str(error).partition(" failed: ")
            return [who], why
        except RuntimeError:
            return None
        return None

    def _absent(self, states: Mapping[str, State | str]) -> tuple[list[str], str] | None:
        """Return the names of the ranks that have not announced a pipeline in the job's store, and the reason.

        Returns None if no replying rank is constructing its pipeline, or if all ranks have announced one.
        """
        making = any(isinstance(state, State) and state.what == _MAKING for state in states.values())
        if self._job is None or not making:
            return None
        try:
            known = asked(self._read_elsewhere, _PATIENCE_S / 2)
        except RuntimeError:
            return None
        come = self._own_ranks if self._addresses else {self._own.rank}
        come = come | {address.rank for address in known.values()}
        absent = [f"rank {rank}" for rank in range(distributed.get_world_size()) if rank not in come]
        if not absent:
            return None
        return absent, "it has not made its pipeline" if len(absent) == 1 else "they have not made their pipelines"

    def _others(self) -> list[Address]:
        return [address for rank, address in enumerate(self._addresses) if rank != self.rank]

    def end(self) -> None:
        """Record that this rank no longer listens, and stop the listening thread."""
        self._sign_off()
        self._finalizer()

    def __del__(self) -> None:
        if hasattr(self, "_finalizer"):
            self._sign_off()


def _end(outside: socket.socket, thread: threading.Thread) -> None:
    with outside, suppress(OSError):
        outside.send(b"\0")
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)


def _job_of(group: Any) -> tuple[Store | None, list[int]]:
    """Return the job's store, and the group's global ranks.

    The store is None if the group contains all ranks of the job, or if the group is not registered with
    torch.distributed.
    """
    size = group.size()
    ranks = ranks_of(group)
    if not distributed.is_initialized() or ranks is None:
        return None, list(range(size))
    world = distributed.group.WORLD
    return (None if world is None or world.size() == size else world.get_group_store()), ranks
