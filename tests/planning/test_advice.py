"""Advice: plans with a known weakness say what binds them, and what to try next; the expected step is reached."""

import re
from dataclasses import replace
from typing import Any

import pytest

from pipesched import Link, Links, Plan, Profile, tune_profile
from pipesched.errors import ScheduleError
from pipesched.planning.advice import NextStep, cause_of
from pipesched.simulation.overheads import Overheads
from pipesched.units import quote_bytes

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
    "balance": "bound by unequal stages",
    "micro-batches": "bound by too few micro-batches",
}


def planned(cause: str, **changes: Any) -> Plan:
    """Plan a case with a planted cause, with changed arguments."""
    table, options = PLANTED[cause]
    profile = Profile.from_table(table, rows=4)
    return tune_profile(**{"profile": profile, "effort": 60_000, **options, **changes})


@pytest.mark.one_in(6)
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


# ---- what explain() prints -------------------------------------------------------------------------------------------


def test_the_memory_of_an_explanation_includes_recomputation_and_stays_below_the_limit() -> None:
    plan = planned("memory")
    assert not isinstance(plan.checkpoint, str)
    assert "recompute" in plan.checkpoint.values()
    head, *lines = plan.explain().splitlines()[plan.explain().splitlines().index("") + 1 :]
    at = re.split(r"\s{2,}", head).index("rank memory")
    printed = [re.split(r"\s{2,}", line.strip())[at] for line in lines[: len(plan.stages)]]
    assert printed == [quote_bytes(own.total_bytes) for own in plan.memory()]
    assert max(own.total_bytes for own in plan.memory()) <= 250e6


def test_ranks_that_share_cores_are_named_beside_the_bound() -> None:
    plan = planned("compute")
    assert plan.costs is not None
    assert "cores" not in plan.explain()
    crowded = replace(plan, costs=replace(plan.costs, overheads=Overheads(crowding=(1, 1.2))))
    assert "can take less than" in crowded.explain()
    assert "if each had a core of its own (4 ranks share 2 cores)" in crowded.explain()


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ((3,), "rank 3 (stage 3) has the most work"),
        ((1, 2, 3), "ranks 1 to 3 (stages 1 to 3) have the most work"),
        ((0, 2), "ranks 0, 2 (stages 0, 2) have the most work"),
    ],
)
def test_all_ranks_with_the_most_work_are_named(slow: tuple[int, ...], said: str) -> None:
    """Without rounding: the times of the layers add up to other last digits on each rank."""
    table = layers(4, forward_ms=0.1, backward_ms=0.2)
    for place in slow:
        table[place] |= {"forward_ms": 0.7, "backward_ms": 1.4}
    request: dict[str, Any] = {"num_ranks": 4, "batch_size": 256, "links": FAST, "all_ranks": True, "num_stages": 4}
    plan = tune_profile(Profile.from_table(table, rows=4), schedule="1f1b", effort=20_000, **request)
    assert f"bound by unequal stages: {said}" in plan.explain()


def test_equal_ranks_are_not_told_apart() -> None:
    assert "bound by compute: all 4 ranks have the same work" in planned("compute").explain()


def test_a_faster_plan_that_the_search_missed_is_named_with_the_argument_that_finds_it() -> None:
    plan = planned("memory")
    line = next(line for line in plan.advice.why_not_more if "chunks" in line)
    assert line.endswith("; this search did not find it: pass num_stages=8")
    followed = planned("memory", num_stages=8)
    assert followed.alternatives[0].step_s < 0.97 * plan.alternatives[0].step_s


def test_without_a_memory_limit_no_reason_names_one() -> None:
    """The plan has one rank in each pipeline, where no schedule has chunks."""
    profile = Profile.from_table(layers(4, parameter_bytes=MIB), rows=4)
    plan = tune_profile(profile, num_ranks=4, batch_size=64, links=FAST, axes={"pipeline": 1, "replicate": 4})
    assert "why not more chunks: chunks need several ranks in a pipeline" in plan.advice.why_not_more
    assert "memory limit" not in plan.explain()


def test_a_next_step_of_replicas_names_the_division_that_it_expects() -> None:
    """A search with axes="auto" for more ranks may divide them otherwise, and be faster than expected."""
    profile = Profile.from_table(layers(4, parameter_bytes=MIB), rows=4)
    request: dict[str, Any] = {"batch_size": 64, "links": FAST, "axes": "auto"}
    plan = tune_profile(profile, num_ranks=4, **request)
    assert plan.replication is not None
    step = next(step for step in plan.advice.next_steps if step.cause == "compute")
    replicas, ranks = 2 * plan.replication.num_replicas, plan.program.num_ranks
    assert step.change == f"num_ranks=8 as {replicas} replicas of {ranks} rank{'s' * (ranks > 1)}"
    assert reached(step, tune_profile(profile, **{"num_ranks": 4, **request, **step.arguments}))
