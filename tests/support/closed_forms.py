"""Helpers for tests of schedules: simulation with uniform costs, and hypothesis strategies for shapes and times.

p, m and v are the numbers of ranks, micro-batches and chunks per rank. F, I and W are the times of a forward, of input
gradients and of weight gradients for one micro-batch on a rank; each chunk takes 1/v of these times. T is F + I + W. c
is the latency between two ranks.
"""

from fractions import Fraction

from hypothesis import strategies as st

from pipesched import Costs, schedules, simulate
from pipesched.program.liveness import peak_in_flight

RANKS, MICROBATCHES, SECONDS = st.integers(1, 8), st.integers(1, 24), st.integers(1, 9)


def built(name, p, m, *, v=1):
    """Return the program of a schedule, with v chunks per rank if it has chunks."""
    plan = schedules.get(name)
    return plan.program(p, m, **({"chunks_per_rank": v} if "chunks_per_rank" in plan.options else {}))


def timed(name, p, m, *, F, I, W, c=0, v=1):  # noqa: E741
    """Simulate a schedule with uniform costs."""
    chunk = {"forward_s": Fraction(F, v), "input_grad_s": Fraction(I, v), "weight_grad_s": Fraction(W, v)}
    return simulate(built(name, p, m, v=v), Costs.uniform(p * v, transfer_s=c, **chunk))


def peaks(program):
    """Return, for each rank, the largest number of (stage, micro-batch) pairs that it holds at the same time."""
    return [peak_in_flight(order) for order in program.orders]


def assert_makespan(trace, expected):
    """Check that the makespan and the longest time from a rank's first start to its last end are ``expected``.

    If the two are equal, overlapping consecutive steps would save no time.
    """
    assert trace.makespan_s == expected
    assert trace.span_s == expected


@st.composite
def times_with_short_weight_gradients(draw):
    """Draw (F, I, W, c) with W <= F, W <= I and c <= W / 2."""
    W = draw(st.integers(1, 9))
    return draw(st.integers(W, 12)), draw(st.integers(W, 12)), W, draw(st.integers(0, W // 2))
