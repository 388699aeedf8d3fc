"""A small fleet: 12 equal layers, whose pipelines need at least 3 ranks, and random traces of 8 ranks."""

from functools import cache

from hypothesis import strategies as st

from pipesched import Profile
from pipesched.fleet import Capacity, FleetCosts, FleetEvent, FleetTrace

NUM_RANKS = 8
LAYER = {"forward_ms": 50, "backward_ms": 100, "parameter_bytes": 1e9, "output_bytes": 1e6, "activation_bytes": 1e6}


def profile(num_layers=12, **columns):
    return Profile.from_table(
        [{"name": f"block{at}"} | LAYER | columns for at in range(num_layers)], rows=1, optimizer="adam"
    )


@cache
def capacity(num_ranks=NUM_RANKS, num_layers=12, memory_limit_bytes="18GB"):
    return Capacity(
        profile(num_layers),
        batch_size=32,
        num_ranks=num_ranks,
        memory_limit_bytes=memory_limit_bytes,
        link=FleetCosts().link,
        effort=2_000,
    )


@st.composite
def traces(draw, num_ranks=NUM_RANKS):
    """Draw a trace of at most 12 outages, some of them at the same moment, within 3,000 seconds."""
    moments = draw(st.lists(st.integers(1, 2_900), min_size=0, max_size=6))
    until = dict.fromkeys(range(num_ranks), 0)
    events = []
    for time_s in sorted(moments):
        for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks)):
            if until[rank] < time_s:
                until[rank] = time_s + draw(st.integers(1, 1_000))
                events.append(FleetEvent(time_s, rank, is_up=False))
                if until[rank] <= 3_000:
                    events.append(FleetEvent(until[rank], rank, is_up=True))
    return FleetTrace(num_ranks=num_ranks, duration_s=3_000, events=sorted(events))


def outage(*ranks, at, until=None, num_ranks=NUM_RANKS, duration_s=3_000):
    """A trace in which some ranks are lost at the same moment, and maybe come back at the same moment."""
    events = [FleetEvent(at, rank, is_up=False) for rank in ranks]
    events += [] if until is None else [FleetEvent(until, rank, is_up=True) for rank in ranks]
    return FleetTrace(num_ranks=num_ranks, duration_s=duration_s, events=events)
