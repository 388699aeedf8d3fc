"""Pictures of gradient reductions: narrow bars below the compute actions of their rank."""

import pytest

from pipesched import Costs, Plan, schedules, simulate
from pipesched.planning.report.findings import findings
from pipesched.program.actions import Kind
from pipesched.program.lowering import add_reductions
from pipesched.viz import plot_timeline, text_timeline
from pipesched.viz.bars import bars, collective_bars, kinds

COSTS = Costs.uniform(2, reduce_s=(1, 1))
PLAIN = schedules.get("1f1b").program(2, 2)


@pytest.fixture(scope="module")
def trace():
    return simulate(add_reductions(PLAIN, 2), COSTS)


def test_bars_of_reductions_have_their_bucket_and_compute_bars_stay(trace):
    found = [(bar.rank, bar.stage, bar.microbatch, bar.start_s, bar.end_s) for bar in collective_bars(trace)]
    assert found == [(0, 0, 0, 8, 9), (0, 0, 1, 9, 10), (1, 1, 0, 7, 8), (1, 1, 1, 8, 9)]
    plain = simulate(PLAIN, COSTS)
    assert list(bars(trace)) == list(bars(plain))
    assert list(collective_bars(plain)) == []
    assert (kinds(trace), kinds(plain)) == ([Kind.F, Kind.B, Kind.REDUCE], [Kind.F, Kind.B])


def test_a_timeline_draws_reductions_below_the_compute_of_their_rank_and_names_them(trace):
    ax = plot_timeline(trace)
    extents = {one.get_gid(): one.get_paths()[0].get_extents() for one in ax.collections if one.get_paths()}
    assert extents["rank 0 0B"].y1 < extents["rank 0 0REDUCE"].y0
    assert extents["rank 0 0REDUCE"].y1 < extents["rank 1 1F"].y0
    assert extents["rank 1 1REDUCE"].y1 <= 1.5
    assert "gradient reduction (REDUCE)" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert ax.get_title(loc="left").endswith("peak in flight 2, reductions 75.0% hidden")
    assert not any("REDUCE" in str(one.get_gid()) for one in plot_timeline(simulate(PLAIN, COSTS)).collections)


def test_a_text_timeline_has_a_second_line_for_the_reductions_of_a_rank(trace):
    lines = text_timeline(trace).splitlines()
    assert lines[:4] == [
        "rank 0 | F0 F1 .. .. B0--- .. B1--- ..",
        "reduce |                         0- 1-",
        "rank 1 | .. F0 B0--- F1 B1--- .. .. ..",
        "reduce |                      0- 1-",
    ]


def test_a_report_says_how_much_is_hidden(trace):
    plan = Plan(stages=(("0",), ("1",)), schedule="1f1b", program=PLAIN)
    said = "\n".join(findings(plan, trace, None, None, []))
    assert (
        "predicted gradient reductions: 50.0% of their time is in bubbles, 25.0% overlaps with compute, and 25.0% comes"
        in said
    )
    assert "reductions" not in "\n".join(findings(plan, simulate(PLAIN, COSTS), None, None, []))
