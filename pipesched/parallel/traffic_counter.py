"""Traffic counter: the bytes, messages and serial rounds of the collectives in layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Traffic", "TrafficCounter"]


@dataclass
class Traffic:
    """What one rank sends and receives in collectives.

    Attributes:
        calls: the number of collectives.
        sent_bytes: the bytes that the rank sends.
        received_bytes: the bytes that the rank receives.
        messages: the number of messages that the rank sends.
        rounds: the number of messages that wait for each other: the latency of the links is paid so many times.

    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    rounds: int = 0

    def add(self, other: "Traffic") -> None:
        """Add another rank's or collective's traffic."""
        self.calls += other.calls
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.messages += other.messages
        self.rounds += other.rounds


class TrafficCounter:
    """Adds up the traffic of a rank by (action, kind of collective).

    ``with counter.during("F"):`` names the action in which the collectives of a block happen.
    """

    def __init__(self) -> None:
        #: The traffic of each (action, kind of collective).
        self.traffic: dict[tuple[str, str], Traffic] = {}
        #: The action in which collectives happen now.
        self.action = ""

    @contextmanager
    def during(self, action: str) -> Iterator[None]:
        """Count the collectives in the ``with`` block under this action."""
        before = self.action
        self.action = action
        try:
            yield
        finally:
            self.action = before

    def count(self, kind: str, traffic: Traffic) -> None:
        """Add the traffic of one collective."""
        self.traffic.setdefault((self.action, kind), Traffic()).add(traffic)

    def total(self, *, action: str | None = None, kind: str | None = None) -> Traffic:
        """Return the traffic of all collectives, of those in one action, of one kind, or both."""
        total = Traffic()
        for (own_action, own_kind), traffic in self.traffic.items():
            if action in (None, own_action) and kind in (None, own_kind):
                total.add(traffic)
        return total

    def clear(self) -> None:
        """Start from zero."""
        self.traffic.clear()
