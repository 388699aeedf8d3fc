"""Pictures of weight gathers: narrow bars in the lane of the gradient reductions; a RESHARD has no bar."""

import pytest

from pipesched import Costs, Plan, schedules, simulate
from pipesched.planning.report.findings import findings
from pipesched.program.actions import Kind
from pipesched.program.lowering import add_gathers, add_reductions
from pipesched.viz import plot_timeline, text_timeline
from pipesched.viz.bars import bars, collective_bars, kinds
from pipesched.viz.colours import colour

COSTS = Costs.uniform(2, reduce_s=(1, 1), unshard_s=1)
PLAIN = schedules.get("1f1b").program(2, 2)


@pytest.fixture(scope="module")
def trace():
    return simulate(add_gathers(add_reductions(PLAIN, 2)), COSTS)


def test_bars_of_gathers_lie_with_those_of_reductions(trace):
    gathers = [bar for bar in collective_bars(trace) if bar.kind is Kind.UNSHARD]
    found = [(bar.rank, bar.stage, bar.microbatch, bar.start_s, bar.end_s) for bar in gathers]
    assert found == [(0, 0, 0, 0, 1), (1, 1, 0, 0, 1)]
    assert [bar.start_s for bar in bars(trace)] == [1 + bar.start_s for bar in bars(simulate(PLAIN, COSTS))]
    assert kinds(trace) == [Kind.F, Kind.B, Kind.REDUCE, Kind.UNSHARD]
    assert colour(Kind.UNSHARD) not in {colour(kind) for kind in Kind if kind is not Kind.UNSHARD}


def test_a_timeline_draws_and_names_gathers(trace):
    ax = plot_timeline(trace)
    extents = {one.get_gid(): one.get_paths()[0].get_extents() for one in ax.collections if one.get_paths()}
    assert extents["rank 0 0UNSHARD"].y0 == extents["rank 0 0REDUCE"].y0 > extents["rank 0 0B"].y1
    assert "weight gather (UNSHARD)" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert ax.get_title(loc="left").endswith("peak in flight 2, communication 66.7% hidden")
    assert not any("RESHARD" in str(gid) for gid in extents)


def test_a_text_timeline_marks_gathers_with_a_letter(trace):
    assert text_timeline(trace).splitlines()[:4] == [
        "rank 0 | .. F0 F1 .. .. B0--- .. B1--- ..",
        "comm   | U0                         0- 1-",
        "rank 1 | .. .. F0 B0--- F1 B1--- .. .. ..",
        "comm   | U0                      0- 1-",
    ]


def test_a_report_says_how_much_of_both_is_hidden(trace):
    plan = Plan(stages=(("0",), ("1",)), schedule="1f1b", program=PLAIN)
    said = "\n".join(findings(plan, trace, None, None, []))
    assert (
        "predicted gradient reductions and weight gathers: 50.0% of their time is in bubbles, "
        "16.7% overlaps with compute, and "
        "33.3% makes ranks wait"
    ) in said
