"""Pictures of redundancy: narrow bars below the compute actions and the collectives of their rank."""

import re
from base64 import b64decode
from dataclasses import replace

import pytest

from pipesched import Costs, Plan, schedules, simulate
from pipesched.planning.report.findings import findings
from pipesched.planning.report.tables import tables
from pipesched.program.actions import Kind
from pipesched.program.completion import Completion
from pipesched.program.lowering import add_gathers, add_reductions, add_redundancy, add_updates
from pipesched.simulation.links import Link, Links
from pipesched.viz import plot_timeline, text_timeline
from pipesched.viz.bars import bars, collective_bars, kinds, redundancy_bars
from pipesched.viz.colours import colour
from pipesched.viz.notebook import timeline_html
from pipesched.viz.page import html_page

PLAIN = schedules.get("1f1b").program(2, 2)
COSTS = Costs.uniform(
    2, update_s=1, keep_s=1, gradient_bytes=2, weight_bytes=2, links=Links(Link(0, 1)), reduce_s=(1,), unshard_s=1
)


@pytest.fixture(scope="module")
def trace():
    return simulate(Completion(updates=True, redundancy=True).complete(PLAIN), COSTS)


def extents(ax):
    return {one.get_gid(): one.get_paths()[0].get_extents() for one in ax.collections if one.get_paths()}


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_bars_of_redundancy_have_the_rank_that_runs_it_and_compute_bars_stay(trace):
    found = [(bar.rank, bar.stage, str(bar.kind), bar.start_s, bar.end_s) for bar in redundancy_bars(trace)]
    assert found == [
        (0, 0, "MIRROR", 0, 2),
        (0, 0, "KEEP", 2, 3),
        (0, 1, "REPLAY", 3, 4),
        (1, 1, "MIRROR", 0, 2),
        (1, 1, "KEEP", 2, 3),
        (1, 0, "REPLAY", 3, 4),
    ]
    plain = simulate(Completion(updates=True).complete(PLAIN), COSTS)
    assert list(bars(trace)) == list(bars(plain))
    assert list(redundancy_bars(plain)) == list(collective_bars(trace)) == []
    assert kinds(trace) == [Kind.F, Kind.B, Kind.UPDATE, Kind.MIRROR, Kind.KEEP, Kind.REPLAY]


def test_a_timeline_draws_redundancy_below_the_compute_of_its_rank_and_names_it(trace):
    ax = plot_timeline(trace)
    drawn = extents(ax)
    assert drawn["rank 0 0B"].y1 < drawn["rank 0 0MIRROR"].y0 == drawn["rank 0 1REPLAY"].y0
    assert drawn["rank 0 1REPLAY"].y1 < drawn["rank 1 1F"].y0
    assert drawn["rank 1 0REPLAY"].y1 <= 1.5
    named = ["gradients to a copy (MIRROR)", "state set aside (KEEP)", "update of a copy (REPLAY)"]
    assert legend(ax)[3:6] == named
    assert ax.get_title(loc="left").endswith("peak in flight 2")


def test_a_timeline_draws_collectives_and_redundancy_one_below_the_other():
    program = add_redundancy(add_updates(add_gathers(add_reductions(PLAIN, 1))))
    ax = plot_timeline(simulate(program, COSTS))
    drawn = extents(ax)
    assert drawn["rank 0 0B"].y1 < drawn["rank 0 0REDUCE"].y0
    assert drawn["rank 0 0REDUCE"].y1 < drawn["rank 0 0KEEP"].y0
    assert drawn["rank 0 0KEEP"].y1 < drawn["rank 1 1F"].y0
    assert ax.get_title(loc="left").endswith("hidden")


def test_a_long_legend_has_rows_within_the_picture(tmp_path):
    plain = schedules.get("interleaved-1f1b").program(2, 2)
    costs = Costs.uniform(4, update_s=1, keep_s=1, gradient_bytes=2, reduce_s=(1,), unshard_s=1)
    ax = plot_timeline(simulate(add_redundancy(add_updates(add_gathers(add_reductions(plain, 1)))), costs))
    ax.figure.savefig(tmp_path / "timeline.png")
    box = ax.get_legend().get_window_extent()
    assert len(legend(ax)) == 11
    assert box.x1 <= ax.figure.bbox.x1
    assert box.y1 <= ax._left_title.get_window_extent().y0  # the title is above
    assert ax.bbox.width > 0.9 * ax.figure.bbox.width


def test_a_text_timeline_has_a_line_for_the_copies_of_a_rank(trace):
    assert text_timeline(trace).splitlines()[:4] == [
        "rank 0 | F0----- F1----- ....... ....... B0------------- ....... B1------------- UPDATE0",
        "copies | M0------------- K0----- R1-----",
        "rank 1 | ....... F0----- B0------------- F1----- B1------------- UPDATE0 ....... .......",
        "copies | M1------------- K1----- R0-----",
    ]
    dense = text_timeline(simulate(Completion(updates=True, redundancy=True).complete(wide()), wide_costs()), 60)
    assert [line.split()[0] for line in dense.splitlines()[:-1]] == ["rank", "copies"] * 4
    assert dense.splitlines()[1].startswith("copies | ▌▌▌▌")
    assert "▌ gradients to a copy, ▐ state set aside, ▀ update of a copy" in dense


def wide():
    return schedules.get("1f1b").program(4, 64)


def wide_costs():
    return Costs.uniform(4, update_s=1.03, keep_s=9.7, gradient_bytes=17, links=Links(Link(0, 1)), replay_s=8.3)


def test_a_page_shows_and_describes_the_copies(trace):
    html = html_page("a step", [], [], [], [("predicted", trace)])
    svg = b64decode(re.search('svg.xml;base64,([^"]*)', html)[1]).decode()
    assert "rank 0 0MIRROR" in svg
    assert colour(Kind.KEEP) in svg
    assert timeline_html(trace).startswith("<img")


def test_a_report_says_what_copies_cost(trace):
    costs = replace(COSTS, reduce_s=())
    plan = Plan((("0",), ("1",)), "1f1b", PLAIN, costs=costs, completion=Completion(updates=True, redundancy=True))
    said = "\n".join(findings(plan, plan.predicted(), None, None, []))
    assert "they are up to date 40.0% into the step, make it 0.0% longer, and take at most 8 B of a rank's host" in said
    slow = replace(plan, costs=replace(costs, keep_s=(11, 11)))
    assert "make it 40.0% longer" in "\n".join(findings(slow, slow.predicted(), None, None, []))
    plain = replace(plan, completion=Completion(updates=True))
    assert "copies of stages" not in "\n".join(findings(plain, plain.predicted(), None, None, []))


def test_a_report_has_the_memory_of_copies_and_says_where_it_is():
    stages = (("0",), ("1",))
    costs = replace(COSTS, reduce_s=())
    plan = Plan(stages, "1f1b", PLAIN, costs=costs, completion=Completion(updates=True, redundancy=True))
    table = next(table for table in tables(plan, None, None) if table.title == "Memory, predicted")
    assert "host copies" in table.columns
    assert "in the host's memory" in table.note
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["host copies"].value == 2 * (2 + 2)  # weights and gradients, of its own stage and of the other
    plain = Plan(stages, "1f1b", PLAIN, costs=COSTS, completion=Completion(updates=True))
    table = next(table for table in tables(plain, None, None) if table.title == "Memory, predicted")
    assert "host copies" not in table.columns
    assert "host" not in table.note
