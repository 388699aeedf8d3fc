"""Survivors: after a loss, the ranks that live agree on who goes on, and from which version of their states.

The lowest rank that lives leads. The others ask it over the connections of the failure alarm, which need no store,
until it has decided. If it does not live either, they ask the next one. A decision is final: each rank that knows it
answers with it, so a rank that was frozen, and wakes later, learns that the others have gone on without it.

A rank that is blamed for the fault may live: its link to another rank may be broken, or it was blamed for want of
evidence. So it takes part if it comes to agree. Of two ranks that cannot reach each other, the leader gives up one.
Only ranks that are known to have ended are no longer counted: of the others, the larger part may go on.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from pipesched.errors import RankLost
from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.coordination.failure_notices import asked_of
from pipesched.runtime.coordination.rank_activity import ENDED, SILENT
from pipesched.runtime.transport.sockets import own_host
from pipesched.units import counted

__all__ = [
    "Decision",
    "HeldLayers",
    "LostForGood",
    "RankReport",
    "Survivors",
    "common_version",
    "connected_part",
    "hosted_store",
    "may_go_on",
    "store_at",
]

_PATIENCE_S = 2.0  # a rank whose alarm does not answer for this long counts as lost
_GLANCE_S = 0.3  # how long a rank that is blamed for the fault may take to come after all
_PAUSE_S = 0.02


class LostForGood(RankLost):
    """A loss after which this rank cannot go on."""


class HeldLayers(NamedTuple):
    """Layers whose state a rank holds, and the versions at which it can be."""

    layers: Sequence[Any]
    versions: list[int]


class RankReport(NamedTuple):
    """The states that a rank holds, and where it is, for the rank that leads."""

    held: list[HeldLayers]
    #: The number of steps that have returned on this rank.
    returned: int
    #: The ranks that this rank cannot reach. A connection that has broken does not count, because others may have
    #: closed theirs when they heard of the fault; the ranks connect anew.
    apart: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who goes on, and from which state."""

    #: The ranks that go on, in ascending order. Their new numbers are their places in this list.
    members: Sequence[int]
    #: The version of the state from which they go on; None if none is complete.
    version: int | None
    #: The host and the port of the store over which the ranks connect anew.
    host: str
    port: int
    #: Why the ranks cannot go on; empty if they can.
    refusal: str = ""


def common_version(reports: Mapping[int, RankReport], layers: Collection[Any]) -> int | None:
    """Return the latest version at which the state of all layers is held, and that no rank has passed; None if none is.

    A rank that waits in step k must run it, so no version above k will do.
    """
    limit = min(report.returned for report in reports.values())
    every = [held for report in reports.values() for held in report.held]
    candidates = {version for held in every for version in held.versions if version <= limit}
    for version in sorted(candidates, reverse=True):
        covered = {layer for held in every if version in held.versions for layer in held.layers}
        if covered.issuperset(layers):
            return version
    return None


def may_go_on(members: Collection[int], silent: Collection[int]) -> bool:
    """Return whether these ranks may go on, although others may live on the other side of a broken link.

    The larger side goes on; of equal sides, the one with the lowest rank.
    """
    return len(members) > len(silent) or (len(members) == len(silent) and min(members) < min(silent))


def connected_part(leader: int, reports: Mapping[int, RankReport]) -> list[int]:
    """Return the ranks that go on: of two that are apart, one is given up, but never the leader.

    First goes the rank that is apart from the most others; of several, the highest.
    """
    members = sorted(reports)
    pairs = {frozenset((rank, other)) for rank, report in reports.items() for other in report.apart if other in reports}
    while pairs:
        counts = Counter(rank for pair in pairs for rank in pair if rank != leader)
        given_up = max(counts, key=lambda rank: (counts[rank], rank))
        members.remove(given_up)
        pairs = {pair for pair in pairs if given_up not in pair}
    return members


def hosted_store(near: Any, timeout_s: float) -> tuple[str, Any]:
    """Host a store at a free port of this process. Return the address by which ``near``, another store, is reached."""
    host = own_host(near)
    return host, _store(host, 0, timeout_s, is_host=True)


def store_at(host: str, port: int, timeout_s: float) -> Any:
    """Return the store that another process hosts."""
    return _store(host, port, timeout_s, is_host=False)


def _store(host: str, port: int, timeout_s: float, *, is_host: bool) -> Any:
    limit = timedelta(seconds=timeout_s)
    return distributed.TCPStore(host, port, None, is_host, limit, wait_for_workers=False)  # type: ignore[attr-defined]


@dataclass
class _Known:
    """What a rank's alarm knows, and answers. The alarm's thread and the rank's own thread share it."""

    #: The reports of other ranks, keyed by attempt and rank.
    reports: dict[tuple[int, int], RankReport] = field(default_factory=dict)
    #: The decisions, keyed by attempt.
    decisions: dict[int, Decision] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a question of another rank."""
        attempt = question.get("attempt", 0)
        with self.lock:
            if "report" in question:
                held, *rest = question["report"]
                self.reports[attempt, question["rank"]] = RankReport([HeldLayers(*one) for one in held], *rest)
            decision = self.decisions.get(attempt)
            return {"decision": None if decision is None else vars(decision)}


class Survivors:
    """The ranks that live after a loss, as this rank sees them.

    Args:
        alarm: the failure alarm of the pipeline.
        store: the store of the old process group; its address tells by which address this host is reached.
        layers: the names of all layers.
        timeout_s: how long to wait for a rank that lives, in seconds.

    """

    def __init__(self, alarm: Alarm, store: Any, layers: Collection[Any], timeout_s: float) -> None:
        self._alarm = alarm
        self._old_store = store
        self._layers = layers
        self._timeout_s = timeout_s
        self._known = _Known()
        self._attempt = -1
        self._begun_s = 0.0
        self._lost: set[int] = set()
        self._silent: set[int] = set()
        #: The store that this rank hosts, if it leads.
        self.store: Any = None

    def agree(self, report: RankReport) -> Decision:
        """Return what the survivors have decided. Every survivor must call this, again after each further loss.

        Raises LostForGood if this rank does not go on.
        """
        self._attempt += 1
        self._alarm.answer_with(self._known.answer, recovers=True)
        self._begun_s = time.monotonic()
        report = report._replace(apart=self._apart())
        self._known.reports[self._attempt, self._alarm.rank] = report
        while (leader := min(self._alive())) != self._alarm.rank:
            decision = self._asked(leader, report)
            if decision is not None:
                return self._taken(decision)
        return self._taken(self._led())

    def _alive(self) -> list[int]:
        return [rank for rank in range(len(self._alarm.addresses)) if rank not in self._lost]

    def _apart(self) -> list[int]:
        """Find out which ranks have ended. Return those that live, but that this rank cannot reach."""
        question = {"attempt": self._attempt}
        others = [rank for rank in self._alive() if rank != self._alarm.rank]
        apart = []
        for blamed in (True, False):
            ranks = [rank for rank in others if (rank in self._alarm.blamed) == blamed]
            addresses = [self._alarm.addresses[rank] for rank in ranks]
            answers = asked_of(addresses, question, _GLANCE_S if blamed else _PATIENCE_S)
            for rank, answer in zip(ranks, answers, strict=True):
                if _has_ended(answer) or (blamed and answer == SILENT):
                    self._lose(rank, answer)
                if answer == SILENT:
                    apart.append(rank)
        return apart

    def _lose(self, rank: int, answer: Any) -> None:
        """Count a rank as lost.

        It counts among those that may go on elsewhere, unless it is known to have ended, or answers and is blamed: such
        a rank hangs, and learns from its alarm that it must not go on.
        """
        self._lost.add(rank)
        hangs = answer != SILENT and rank in self._alarm.blamed
        if not _has_ended(answer) and not hangs:
            self._silent.add(rank)

    def _is_late(self, rank: int, answer: Any, patience_s: float) -> bool:
        """Whether a rank that has answered should have come to agree by now."""
        deaf = rank in self._alarm.blamed and "decision" not in answer
        return time.monotonic() - self._begun_s > (_GLANCE_S if deaf else patience_s)

    def _asked(self, leader: int, report: RankReport) -> Decision | None:
        """Ask the leader once; return its decision, or None if there is none yet or if the leader is lost."""
        question = {"attempt": self._attempt, "rank": self._alarm.rank, "report": report}
        (answer,) = asked_of([self._alarm.addresses[leader]], question, _PATIENCE_S)
        patience_s = 2 * self._timeout_s  # longer than a leader waits for reports
        if answer == SILENT or _has_ended(answer) or self._is_late(leader, answer, patience_s):
            self._lose(leader, answer)
            self._begun_s = time.monotonic()  # the next leader has as much time
            return None
        found = answer.get("decision")
        if found is None:
            time.sleep(_PAUSE_S)
            return None
        return Decision(**found)

    def _led(self) -> Decision:
        """Lead: wait for the reports of all ranks that live, and decide. If another rank leads, return its decision."""
        known = self._known.reports
        while missing := [rank for rank in self._alive() if (self._attempt, rank) not in known]:
            answers = asked_of(
                [self._alarm.addresses[rank] for rank in missing], {"attempt": self._attempt}, _PATIENCE_S
            )
            for rank, answer in zip(missing, answers, strict=True):
                if answer == SILENT or _has_ended(answer) or self._is_late(rank, answer, self._timeout_s):
                    self._lose(rank, answer)
                elif answer.get("decision") is not None:
                    return Decision(**answer["decision"])
            time.sleep(_PAUSE_S)
        reports = {rank: known[self._attempt, rank] for rank in self._alive()}
        members = connected_part(self._alarm.rank, reports)
        version = common_version({rank: reports[rank] for rank in members}, self._layers)
        host, self.store = hosted_store(self._old_store, self._timeout_s)
        alone = len(reports) == 1 and self._alarm.rank in self._alarm.blamed
        refusal = "" if may_go_on(members, self._silent) and not alone else self._cut_off(members)
        return Decision(members=members, version=version, host=host, port=self.store.port, refusal=refusal)

    def _cut_off(self, members: Sequence[int]) -> str:
        if not self._silent:
            return f"the others have ended or gone on without {self._alarm.name}, because {self._alarm.fault}"
        silent = ", ".join(self._alarm.addresses[rank].name for rank in sorted(self._silent))
        return (
            f"only the larger part of the ranks may go on, because the others may live behind a broken link; "
            f"{counted(len(members), 'rank')} can be reached, and {silent} cannot"
        )

    def _taken(self, decision: Decision) -> Decision:
        """Record a decision, so that this rank answers with it, and return it."""
        with self._known.lock:
            self._known.decisions[self._attempt] = decision
        if self._alarm.rank not in decision.members:
            raise LostForGood(
                f"a rank that the others have given up must not go on; ranks {list(decision.members)} go on without "
                f"{self._alarm.name}; end this process"
            )
        if decision.refusal:
            raise LostForGood(
                f"{decision.refusal}; {self._alarm.name} ends; start the job again from the last checkpoint"
            )
        return decision


def _has_ended(answer: Any) -> bool:
    """Whether a rank's answer shows that its process has ended, or will end because of an error."""
    return answer == ENDED or (isinstance(answer, dict) and bool(answer.get("ends")))
