"""Rendezvous: brings the ranks of a group together to make one pipeline, even after failed attempts.

Each rank announces its arrival. Once all ranks have arrived, rank 0 sends a new token to every rank. The ranks use the
token as a prefix for keys in the group's store. A rank that raises an exception before it arrives announces the
exception instead, and the other ranks receive the exception immediately. A rank that has waited too long withdraws its
announcement, and rank 0 skips withdrawn announcements. An error on one rank therefore ends the attempt in all ranks,
and the next attempt starts anew.

The announcements of a rank are numbered. Each announcement has one key, whose value changes once from
"waiting" to its outcome. The announcing rank or rank 0, whichever changes the value first, decides the outcome.
"""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.stores import asked

__all__ = ["AbsentError", "Rendezvous", "collective", "names_of", "ranks_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LOOK_S = 0.2  # rank 0 waits this long for one rank before checking the others for failures
_PAUSE_S = 0.001  # the first pause between two checks of the store; later pauses are longer
_LONGEST_PAUSE_S = 0.05  # the longest time between two checks of the store
_SPARE_S = 1.0  # added to the other ranks' timeout, so that rank 0, which sees all arrivals, gives up first
_PATIENCE_S = 2.0  # time to wait for a store that does not reply
_HEARD_S = 1.0  # rank 0 waits at most this long for the other ranks to read its error, because it may host the store
_WAITING = "waiting"
_WITHDRAWN = "withdrawn"
_TOKEN = "token "
_FAILED = "failed "


class AbsentError(ExecutionError):
    """Some ranks did not arrive in time.

    Args:
        ranks: the missing ranks.
        names: the names of all ranks of the group.
        waiting: the rank that waited.
        timeout_s: how long that rank waited, in seconds.

    """

    def __init__(self, ranks: Sequence[int], names: Sequence[str], waiting: int, timeout_s: float) -> None:
        self.ranks = tuple(ranks) or (0,)
        who = " and ".join(names[rank] for rank in self.ranks) + (" has" if len(self.ranks) == 1 else " have")
        super().__init__(
            f"all {len(names)} ranks must construct the pipeline at the same time; {who} not joined; "
            f"{names[waiting]} waited {timeout_s:g} s; make the pipeline on every rank, or pass a larger timeout="
        )


def ranks_of(group: Any) -> list[int] | None:
    """Return the global ranks of a group's ranks; None if the group is not registered with torch.distributed."""
    try:
        return distributed.get_process_group_ranks(group) if distributed.is_initialized() else None
    except (ValueError, KeyError):
        return None


def names_of(group: Any) -> list[str]:
    """Return the names of a group's ranks for error messages.

    A name includes the global rank if the global rank differs from the rank in the group.
    """
    ranks = ranks_of(group) or range(group.size())
    return [f"rank {rank}" if rank == own else f"rank {rank} (global rank {own})" for rank, own in enumerate(ranks)]


class Rendezvous:
    """Announces this rank to the other ranks of its group, and waits for their arrival.

    Keys contain torchelastic's restart count, so a restarted job does not read keys from before the restart.

    Args:
        store: the store of the group.
        rank: the rank of this process in the group.
        names: the names of the group's ranks.

    """

    #: The number of announcements that this process has made.
    announced = 0

    def __init__(self, store: Any, rank: int, names: Sequence[str]) -> None:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = distributed.PrefixStore(f"pipesched/{restarts}", store)  # type: ignore[attr-defined]
        self._rank = rank
        self._names = names
        self._num_ranks = len(names)
        self._withdrawn: set[int] = set()  # ranks that arrived but withdrew

    def meet(self, timeout_s: float) -> Any:
        """Wait for the other ranks; return a PrefixStore that only the ranks of this pipeline use.

        Raises an ExecutionError that names the missing ranks, or the rank that failed.
        """
        end_s = time.monotonic() + timeout_s
        number = self._announce()
        token = self._answers(end_s, timeout_s) if self._rank == 0 else self._answered(number, end_s, timeout_s)
        return distributed.PrefixStore(token, self._store)  # type: ignore[attr-defined]

    def fail(self, text: str) -> None:
        """Announce that this rank failed before it arrived. Does not wait for ranks that have not arrived."""
        number = self._announce()
        said = f"{_FAILED}{self._names[self._rank]} failed: {text}"
        if self._rank:
            self._change(self._rank, number, "", said)
            self._store.set(self._heard(self._rank, number), "")
            self._store.set(f"came/{self._rank}/{number}", "")
        else:
            self._store.set("taken/0", str(number))
            self._give_up(said, dict.fromkeys(range(1, self._num_ranks)))

    def _announce(self) -> int:
        """Reserve and return the number of this rank's next announcement."""
        Rendezvous.announced += 1
        return int(self._store.add(f"count/{self._rank}", 1))

    # ---- ranks other than 0 -----------------------------------------------------------------------------------

    def _answered(self, number: int, end_s: float, timeout_s: float) -> str:
        found = self._change(self._rank, number, "", _WAITING)
        self._store.set(f"came/{self._rank}/{number}", "")
        if found == _WAITING:
            if not self._wait([f"answered/{self._rank}/{number}"], end_s + _SPARE_S):
                found = self._change(self._rank, number, _WAITING, _WITHDRAWN)
            else:
                found = self._state(self._rank, number)
        self._store.set(self._heard(self._rank, number), "")
        if found == _WITHDRAWN:
            absent = [
                rank
                for rank in range(self._num_ranks)
                if rank != self._rank and self._store.add(f"count/{rank}", 0) <= self._store.add(f"taken/{rank}", 0)
            ]
            raise self._missing(absent, timeout_s)
        if found.startswith(_FAILED):
            raise self._stopped(found)
        return found.removeprefix(_TOKEN)

    # ---- rank 0 -----------------------------------------------------------------------------------------------

    def _answers(self, end_s: float, timeout_s: float) -> str:
        came: dict[int, int | None] = {rank: self._arrival(rank) for rank in range(1, self._num_ranks)}
        self._withdrawn.clear()  # the recorded ranks withdrew before this rank arrived
        while True:
            came = {rank: self._arrival(rank) for rank in came}
            failed = [self._state(rank, number) for rank, number in came.items() if number is not None]
            failed = [said for said in failed if said.startswith(_FAILED)]
            if failed:
                self._end_attempt()
                self._give_up(failed[0], came)
                raise self._stopped(failed[0])
            absent = [rank for rank, number in came.items() if number is None]
            if not absent:
                break
            if time.monotonic() > end_s:
                self._end_attempt()
                never = [rank for rank in absent if rank not in self._withdrawn]
                error = self._missing(never or absent, timeout_s)
                self._give_up(f"{_FAILED}{error}", {rank: number for rank, number in came.items() if number})
                raise error
            key = f"came/{absent[0]}/{self._next(absent[0])}"
            self._wait([key], min(end_s, time.monotonic() + _LOOK_S))
        self._end_attempt()
        token = secrets.token_hex(8)
        gone = [rank for rank, number in came.items() if number and not self._answer(rank, number, _TOKEN + token)]
        if gone:  # these ranks withdrew after the last check; ranks that already have the token will time out
            raise self._missing(gone, timeout_s)
        return token

    def _end_attempt(self) -> None:
        self._store.set("taken/0", str(self._store.add("count/0", 0)))

    def _arrival(self, rank: int) -> int | None:
        """Return the number of the rank's first announcement that is neither answered nor withdrawn.

        Returns None if there is no such announcement yet. Skips withdrawn announcements.
        """
        while self._store.check([f"came/{rank}/{self._next(rank)}"]):
            number = self._next(rank)
            if self._state(rank, number) != _WITHDRAWN:
                return number
            self._withdrawn.add(rank)
            self._store.set(f"taken/{rank}", str(number))
        return None

    def _next(self, rank: int) -> int:
        return int(self._store.add(f"taken/{rank}", 0)) + 1

    def _give_up(self, said: str, came: dict[int, int | None]) -> None:
        """Answer the ranks in ``came`` with the text ``said``, and wait until the ranks that have arrived have read it.

        A rank that has not arrived yet gets the answer when it arrives.
        """
        unheard = []
        for rank, number in came.items():
            arrived = number or self._arrival(rank)
            self._answer(rank, arrived or self._next(rank), said)
            if arrived:
                unheard.append(self._heard(rank, arrived))
        self._wait(unheard, time.monotonic() + _HEARD_S)

    def _answer(self, rank: int, number: int, said: str) -> bool:
        """Answer an announcement; return whether the answer became the announcement's outcome."""
        self._store.set(f"taken/{rank}", str(number))
        found = self._change(rank, number, "", said)
        if found == _WAITING:
            found = self._change(rank, number, _WAITING, said)
        self._store.set(f"answered/{rank}/{number}", "")
        return found == said

    # ---- the store --------------------------------------------------------------------------------------------

    def _heard(self, rank: int, number: int) -> str:
        """Return the key that a rank sets once it has read the outcome of its announcement."""
        return f"heard/{rank}/{number}"

    def _state(self, rank: int, number: int) -> str:
        return self._change(rank, number, _WAITING, _WAITING)

    def _change(self, rank: int, number: int, expected: str, said: str) -> str:
        """If an announcement's state is ``expected`` ("" for none), set it to ``said``. Return the resulting state."""
        return str(self._store.compare_set(f"state/{rank}/{number}", expected, said).decode())

    def _wait(self, keys: list[str], end_s: float) -> bool:
        """Wait for keys until a deadline; return whether all exist. Polls, because torch logs waits that time out."""
        pause_s = _PAUSE_S
        while not (there := bool(self._store.check(keys))) and time.monotonic() < end_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return there

    # ---- errors -----------------------------------------------------------------------------------------------

    def _missing(self, absent: Sequence[int], timeout_s: float) -> AbsentError:
        return AbsentError(absent, self._names, self._rank, timeout_s)

    def _stopped(self, said: str) -> ExecutionError:
        text = said.removeprefix(_FAILED)
        if not text.startswith("rank "):
            return ExecutionError(text)  # rank 0's AbsentError
        return ExecutionError(
            f"a failed rank stops all ranks; {text}; {self._names[self._rank]} of {self._num_ranks} stopped while "
            f"making the pipeline; fix the cause and make a new pipeline"
        )


def collective(function: _Function) -> _Function:
    """Decorate a function that all ranks of its ``mesh`` argument must call together.

    An error that the function raises before its rendezvous is reported to all ranks.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        rendezvous = _rendezvous(kwargs.get("mesh", args[0] if args else None))
        before = Rendezvous.announced
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if rendezvous is not None and Rendezvous.announced == before:
                text = f"{type(error).__name__}: {error}"
                with suppress(RuntimeError):  # the store has ended; the other ranks also notice its end
                    asked(lambda: rendezvous.fail(text), _PATIENCE_S)
            raise

    return cast(_Function, call)


def _rendezvous(mesh: Any) -> Rendezvous | None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        return None
    group = mesh.get_group()
    return Rendezvous(group.get_group_store(), group.rank(), names_of(group))
