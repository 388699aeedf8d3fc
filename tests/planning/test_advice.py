"""Advice: plans with a known weakness say what binds them, and what to try next; the expected step is reached."""

from typing import Any

import pytest

from pipesched import Link, Links, Plan, Profile, tune_profile
from pipesched.errors import ScheduleError
from pipesched.planning.advice import NextStep, cause_of

MIB = 1 << 20


def layers(count: int = 8, **changes: Any) -> list[dict[str, Any]]:
    """Return the rows of a table of equal layers. ``changes`` replace values of all rows."""
    usual = {
        "forward_ms": 10,
        "backward_ms": 20,
        "parameter_bytes": 16 * MIB,
        "output_bytes": MIB,
        "activation_bytes": 32 * MIB,
    }
    return [{"name": f"layer{number}", **usual, **changes} for number in range(count)]


def heavy(place: int, times: int) -> list[dict[str, Any]]:
    """Return the rows of a table in which one layer takes several times as long as the others."""
    table = layers(8)
    table[place] |= {"forward_ms": 10 * times, "backward_ms": 20 * times}
    return table


FAST = Links(inside=Link(5e-6, 200e9))
SLOW = Links(inside=Link(1e-4, 0.01e9))
#: For each cause: a table, and the arguments of tune_profile.
PLANTED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "compute": (layers(8), {"num_ranks": 4, "batch_size": 256, "links": FAST}),
    "messages": (layers(8), {"num_ranks": 4, "batch_size": 64, "links": SLOW, "all_ranks": True, "effort": 150_000}),
    "memory": (layers(8), {"num_ranks": 4, "batch_size": 48, "links": FAST, "memory_limit_bytes": "250MB"}),
    "ranks": (heavy(3, 12), {"num_ranks": 8, "batch_size": 128, "links": FAST, "all_ranks": True}),
    "balance": (heavy(3, 5), {"num_ranks": 3, "batch_size": 128, "links": FAST}),
    "micro-batches": (layers(16), {"num_ranks": 8, "batch_size": 16, "links": FAST, "all_ranks": True}),
}
#: A part of the text that names the cause.
NAMED = {
    "compute": "bound by compute",
    "messages": "bound by messages between stages",
    "memory": "bound by memory",
    "ranks": "too many ranks: num_ranks=4 is as fast",
    "balance": "bound by one slow stage",
    "micro-batches": "bound by too few micro-batches",
}


def planned(cause: str, **changes: Any) -> Plan:
    """Plan a case with a planted cause, with changed arguments."""
    table, options = PLANTED[cause]
    profile = Profile.from_table(table, rows=4)
    return tune_profile(**{"profile": profile, "effort": 60_000, **options, **changes})


@pytest.mark.parametrize("cause", PLANTED)
def test_a_plan_names_what_binds_it_and_a_next_step_that_removes_it(cause: str) -> None:
    plan = planned(cause)
    assert plan.shares is not None
    assert cause_of(plan.shares, plan.advice) == cause
    text = plan.explain()
    assert NAMED[cause] in text
    step = next(step for step in plan.advice.next_steps if step.cause == cause)
    assert str(step) in text.splitlines()
    followed = planned(cause, **step.arguments)
    assert followed.shares is not None
    assert reached(step, followed)
    assert followed.program.num_ranks < plan.program.num_ranks if cause == "ranks" else step.saving > 0.1


def test_a_saved_plan_with_a_wrong_number_of_posted_receives_is_refused() -> None:
    saved = planned("ranks").to_dict()
    assert saved["posted"] == 4
    for posted in ("x", -1, 1.5, None, True):
        with pytest.raises(ScheduleError, match="posted must be a whole number"):
            Plan.from_dict({**saved, "posted": posted})


def reached(step: NextStep, plan: Plan) -> bool:
    """Return whether a new plan has the expected step time, within 3 %."""
    return abs(plan.alternatives[0].step_s / step.step_s - 1) < 0.03
