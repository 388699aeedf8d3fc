import subprocess
import sys
from itertools import pairwise

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from pipesched import Action, Costs, Kind, Span, Trace, schedules, simulate, viz
from pipesched.errors import PipeschedError
from pipesched.program.actions import Lane
from pipesched.program.lowering import add_recompute
from pipesched.units import counted, quote_bytes, quote_speed, quote_time
from pipesched.viz.bars import gaps
from pipesched.viz.colours import colour
from pipesched.viz.headline import headline
from tests.support.random_programs import fitting


def trace_of(name, num_ranks=4, num_microbatches=8, **costs):
    program = schedules.get(name).program(num_ranks, num_microbatches)
    return simulate(program, Costs.uniform(program.num_stages, **costs))


def measured(trace, offset_s=100.0, stretch=1.1):
    """The same spans, slower and at another time, without costs: as an executor records them."""
    spans = (
        s._replace(start_s=offset_s + s.start_s * stretch, end_s=offset_s + s.end_s * stretch) for s in trace.spans
    )
    return Trace(tuple(spans), trace.num_ranks, "measured")


def drawn_bars(ax):
    """(rank, stage and kind, start, end, colour) of every bar on the axes, and the same of the bubble."""
    bars = {"bubble": [], "work": []}
    for collection in ax.collections:
        _, rank, what = collection.get_gid().split()
        for path in collection.get_paths():
            box = path.get_extents()
            assert box.y0 < int(rank) < box.y1
            assert box.height < 1
            bar = int(rank), what, round(box.x0, 9), round(box.x1, 9), to_hex(collection.get_facecolor()[0])
            bars["bubble" if what == "bubble" else "work"].append(bar)
    return bars


def numbers(ax):
    return sorted(
        (round(text.get_position()[1]), round(text.get_position()[0], 9), text.get_text()) for text in ax.texts
    )


def legend(owner):
    box = owner.get_legend() if hasattr(owner, "get_legend") else owner.legends[0]
    return [text.get_text() for text in box.get_texts()]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_timeline_has_a_bar_for_every_span(name):
    trace = trace_of(name, transfer_s=0.25)
    bars = drawn_bars(viz.plot_timeline(trace))["work"]
    want = [
        (span.rank, f"{span.action.stage}{span.action.kind}", span.start_s, span.end_s, colour(span.action.kind))
        for span in trace.spans
    ]
    assert sorted(bars) == sorted(want)


def test_timeline_puts_a_number_into_every_bar():
    trace = trace_of("zb-h1")
    want = sorted((s.rank, (s.start_s + s.end_s) / 2, str(s.action.microbatch)) for s in trace.spans)
    assert numbers(viz.plot_timeline(trace)) == want


def test_rank_0_is_on_top():
    ax = viz.plot_timeline(trace_of("1f1b"))
    assert ax.get_ylim() == (3.5, -0.5)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_title_and_axis_tell_the_figures():
    ax = viz.plot_timeline(trace_of("1f1b", forward_s=0.001, input_grad_s=0.001, weight_grad_s=0.001))
    assert ax.get_title(loc="left") == "1f1b: makespan 33 ms, bubble 27.3%, 22.2% above the bound, peak in flight 4"
    assert ax.get_xlabel() == "time [ms]"
    assert ax.get_xlim() == pytest.approx((0, 33))
    assert legend(ax) == ["forward (F)", "backward (B)", "bubble"]


def test_drawn_times_start_at_0():
    bars = drawn_bars(viz.plot_timeline(measured(trace_of("1f1b"))))["work"]
    assert min(start for _, _, start, _, _ in bars) == 0
    assert max(end for _, _, _, end, _ in bars) == pytest.approx(33 * 1.1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1"])
def test_bubble_fills_what_the_bars_leave(name):
    trace = trace_of(name, transfer_s=0.5)
    drawn = drawn_bars(viz.plot_timeline(trace))
    idle = sum(end - start for _, _, start, end, _ in drawn["bubble"])
    assert idle == pytest.approx(trace.bubble_ratio * trace.num_ranks * trace.makespan_s)
    for rank in range(trace.num_ranks):
        row = sorted((start, end) for bars in drawn.values() for r, _, start, end, _ in bars if r == rank)
        assert row[0][0] == 0
        assert row[-1][1] == trace.makespan_s
        assert all(before[1] == after[0] for before, after in pairwise(row))


def test_bubble_is_hatched_and_named_only_where_there_is_one():
    whole = viz.plot_timeline(trace_of("1f1b"))
    assert all(c.get_hatch() for c in whole.collections if c.get_gid().endswith("bubble"))
    assert legend(viz.plot_timeline(trace_of("1f1b", num_ranks=1))) == ["forward (F)", "backward (B)"]
    assert gaps(trace_of("1f1b", num_ranks=1), 0) == []


def test_later_chunks_are_lighter():
    ax = viz.plot_timeline(trace_of("interleaved-1f1b"))
    colours = {(rank, what): shade for rank, what, _, _, shade in drawn_bars(ax)["work"]}
    assert colours[0, "0F"] == colours[3, "3F"] == colour(Kind.F)
    assert colours[0, "4F"] == colours[3, "7F"] == colour(Kind.F, 1, 2)
    assert int(colours[0, "4B"][1:3], 16) >= int(colours[0, "0B"][1:3], 16)
    assert int(colours[0, "4B"][5:], 16) > int(colours[0, "0B"][5:], 16)
    assert legend(ax) == ["forward (F)", "backward (B)", "chunk 0", "chunk 1", "bubble"]


def test_legend_of_many_chunks_names_the_first_and_the_last():
    program = schedules.get("interleaved-1f1b").program(2, 4, chunks_per_rank=6)
    ax = viz.plot_timeline(simulate(program, Costs.uniform(program.num_stages)))
    assert legend(ax) == ["forward (F)", "backward (B)", "chunk 0", "chunk 5", "bubble"]


def test_kinds_have_different_colours():
    compute = [kind for kind in Kind if Action(0, kind, 0).lane is Lane.COMPUTE]
    assert len({colour(kind, chunk, 2) for kind in compute for chunk in (0, 1)}) == 2 * len(compute)


def test_recompute_is_drawn():
    program = add_recompute(schedules.get("gpipe").program(2, 3), "always")
    ax = viz.plot_timeline(simulate(program, Costs.uniform(2)))
    assert sum(what.endswith("R") for _, what, *_ in drawn_bars(ax)["work"]) == 6
    assert legend(ax) == ["forward (F)", "backward (B)", "recompute (R)", "bubble"]


def test_thousands_of_bars_are_few_objects_without_numbers_or_edges():
    trace = trace_of("1f1b", 32, 128)
    ax = viz.plot_timeline(trace)
    assert len(drawn_bars(ax)["work"]) == 32 * 128 * 2
    assert len(ax.collections) == 32 * 3
    assert not ax.texts
    assert {width for c in ax.collections for width in c.get_linewidth()} == {0}


@pytest.mark.parametrize(("inches", "fits"), [(12, True), (2, False)])
def test_numbers_are_drawn_where_they_fit(inches, fits):
    ax = viz.plot_timeline(trace_of("gpipe", 2, 12), Figure(figsize=(inches, 3)).add_subplot())
    assert bool(ax.texts) is fits


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inches", [3, 4, 5, 6, 8, 12])
@pytest.mark.parametrize(("name", "num_microbatches"), [("interleaved-1f1b", 12), ("1f1b", 12), ("zb-h1", 8)])
def test_drawn_numbers_stay_inside_their_bars(name, num_microbatches, inches):
    figure = Figure(figsize=(inches, 3))
    ax = viz.plot_timeline(trace_of(name, 4, num_microbatches), figure.add_subplot())
    renderer = FigureCanvasAgg(figure).get_renderer()
    widths = {(rank, round((start + end) / 2, 9)): end - start for rank, _, start, end, _ in drawn_bars(ax)["work"]}
    for text in ax.texts:
        x, y = text.get_position()
        box = text.get_window_extent(renderer).transformed(ax.transData.inverted())
        assert box.width < widths[round(y), round(x, 9)]
        assert abs(box.height) < 1


def test_plots_draw_on_given_axes_and_return_them():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert viz.plot_timeline(trace_of("1f1b"), left) is left
    assert viz.plot_memory(trace_of("1f1b"), ax=right) is right
    assert left.collections
    assert right.lines


def test_global_state_of_matplotlib_is_left_alone():
    before = dict(matplotlib.rcParams)
    viz.plot_timeline(trace_of("1f1b"))
    viz.plot_memory(trace_of("1f1b"))
    viz.plot_compare([("a", trace_of("1f1b"))])
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not matplotlib.pyplot.get_fignums()


def test_an_empty_trace_is_drawn_empty():
    empty = Trace((), 2)
    ax = viz.plot_timeline(empty)
    assert ax.get_title(loc="left") == "makespan 0 s, bubble 0.0%, peak in flight 0"
    assert drawn_bars(ax) == {"bubble": [], "work": []}
    assert [list(line.get_ydata()) for line in viz.plot_memory(empty).lines] == [[0], [0]]
    assert viz.text_timeline(empty).splitlines()[:2] == ["rank 0 |", "rank 1 |"]


def test_compare_has_one_time_scale_and_one_legend():
    predicted, other = trace_of("1f1b"), measured(trace_of("zb-h1"), stretch=2)
    figure = viz.plot_compare([("predicted", predicted), ("measured", other)])
    above, below = figure.axes
    assert (
        above.get_title(loc="left") == "predicted: makespan 33 s, bubble 27.3%, 22.2% above the bound, peak in flight 4"
    )
    assert below.get_title(loc="left") == "measured: makespan 54 s, bubble 11.1%, peak in flight 4"
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 54))
    assert max(end for _, _, _, end, _ in drawn_bars(above)["bubble"]) == 33
    assert legend(figure) == ["forward (F)", "backward (B)", "input gradients (I)", "weight gradients (W)", "bubble"]
    assert above.get_legend() is None
    assert (above.get_xlabel(), below.get_xlabel()) == ("", "time [s]")


def test_compare_takes_the_unit_of_the_longest():
    fast = measured(trace_of("1f1b"), stretch=1e-6)
    slow = measured(trace_of("1f1b"), stretch=1e-3)
    above, below = viz.plot_compare([("fast", fast), ("slow", slow)]).axes
    assert below.get_xlabel() == "time [ms]"
    assert max(end for _, _, _, end, _ in drawn_bars(above)["work"]) == pytest.approx(0.033)


def test_compare_shows_the_longest_whole_wherever_it_stands():
    figure = viz.plot_compare([("long", trace_of("gpipe")), ("short", trace_of("zb-h1"))])
    assert [ax.get_xlim() for ax in figure.axes] == [(0, 33), (0, 33)]


def test_compare_of_nothing_is_an_error():
    with pytest.raises(PipeschedError, match="at least one timeline"):
        viz.plot_compare([])


def line_points(ax, rank):
    line = next(line for line in ax.lines if line.get_gid() == f"rank {rank}")
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_memory_counts_pairs_where_costs_have_no_sizes():
    ax = viz.plot_memory(trace_of("gpipe", 2, 2))
    # Rank 0 runs F0 in 0..1, F1 in 1..2, B0 in 5..7, B1 in 7..9.
    assert line_points(ax, 0) == [(0, 1), (1, 2), (2, 2), (5, 2), (7, 1), (9, 0)]
    assert ax.get_ylabel() == "(stage, micro-batch) pairs"
    assert legend(ax) == ["rank 0: peak 2", "rank 1: peak 2"]
    assert ax.get_title(loc="left") == "gpipe: in flight, peak 2"


def test_memory_in_pairs_follows_the_order():
    # 2 ranks, 1 micro-batch: rank 0 runs F 0..1 and B 4..6, rank 1 F 1..2 and B 2..4.
    ax = viz.plot_memory(trace_of("1f1b", 2, 1))
    assert line_points(ax, 0) == [(0, 1), (1, 1), (4, 1), (6, 0)]
    assert line_points(ax, 1) == [(0, 0), (1, 1), (2, 1), (4, 0), (6, 0)]
    assert all(line.get_drawstyle() == "steps-post" for line in ax.lines)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_memory_peaks_are_those_of_the_trace(name):
    trace = measured(trace_of(name))
    lines = viz.plot_memory(trace).lines
    assert tuple(max(line.get_ydata()) for line in lines) == trace.peak_in_flight
    assert {line.get_ydata()[-1] for line in lines} == {0}
    assert {line.get_xdata()[0] for line in lines} == {0}
    assert {line.get_xdata()[-1] for line in lines} == {trace.makespan_s}


def test_memory_is_in_bytes_where_costs_have_sizes():
    trace = trace_of("zb-h1", activation_bytes=3 * 2**20, weight_grad_bytes=2**20)
    ax = viz.plot_memory(trace)
    assert ax.get_ylabel() == "held [MiB]"
    assert tuple(max(line.get_ydata()) * 2**20 for line in ax.lines) == trace.peak_bytes
    assert legend(ax)[0] == f"rank 0: peak {trace.peak_bytes[0] // 2**20} MiB"
    assert ax.get_title(loc="left") == f"zb-h1: memory held, peak {max(trace.peak_bytes) // 2**20} MiB"


def test_memory_has_no_dips_that_last_no_time():
    # In the steady state a backward ends and a forward starts at one moment.
    held = [pairs for time, pairs in line_points(viz.plot_memory(trace_of("1f1b")), 0) if 4 <= time < 24]
    assert set(held) == {4}


TEXT_1F1B = """\
rank 0 | F0 F1 .. .. B0--- F2 B1--- .. B2---
rank 1 | .. F0 B0--- F1 B1--- F2 B2--- .. ..
1f1b: makespan 12 s, bubble 25.0%, 20.0% above the bound, peak in flight 2; 3 columns are 1 s"""

TEXT_1F1B_NARROW = """\
rank 0 | F0F1....B0--F2B1--..B2--
rank 1 | ..F0B0--F1B1--F2B2--....
1f1b: makespan 12 s, bubble 25.0%, 20.0% above the bound, peak in flight 2; 2 columns are 1 s"""

TEXT_1F1B_SCALED = """\
rank 0 | FF1..B0-FB1-.B2-
rank 1 | .F0B0F1B1F2B2...
1f1b: makespan 12 s, bubble 25.0%, 20.0% above the bound, peak in flight 2; a column is 750 ms"""

TEXT_ZB_H1 = """\
rank 0 | F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
rank 1 | .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
rank 2 | .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
rank 3 | .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
zb-h1: makespan 27 s, bubble 11.1%, 0.0% above the bound, peak in flight 4; 3 columns are 1 s"""

TEXT_CHUNKS = """\
rank 0 | 0F0 0F1 2F0 2F1 ... ... 2B0---- ... 2B1---- 0B0---- 0B1----
rank 1 | ... 1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- ... ...
interleaved-1f1b: makespan 15 s, bubble 20.0%, 15.4% above the bound, peak in flight 4 / 2 chunks; 4 columns are 1 s"""

TEXT_CHUNKS_NARROW = """\
rank 0 | F0F1f0f1....b0--..b1--B0--B1--
rank 1 | ..F0F1f0b0--f1b1--B0--B1--....
interleaved-1f1b: makespan 15 s, bubble 20.0%, 15.4% above the bound, peak in flight 4 / 2 chunks; \
2 columns are 1 s; lower case: odd chunks"""


@pytest.mark.parametrize(
    ("name", "shape", "width", "text"),
    [
        ("1f1b", (2, 3), 120, TEXT_1F1B),
        ("1f1b", (2, 3), 9 + 12 * 3, TEXT_1F1B),
        ("1f1b", (2, 3), 9 + 12 * 3 - 1, TEXT_1F1B_NARROW),
        ("1f1b", (2, 3), 9 + 16, TEXT_1F1B_SCALED),
        ("zb-h1", (4, 8), 100, TEXT_ZB_H1),
        ("interleaved-1f1b", (2, 2), 100, TEXT_CHUNKS),
        ("interleaved-1f1b", (2, 2), 40, TEXT_CHUNKS_NARROW),
    ],
)
def test_text_timeline_is_exactly(name, shape, width, text):
    assert viz.text_timeline(trace_of(name, *shape), width) == text


TEXT_OVERLAP = """\
rank 0 | F0 F1 F2 f0 i0 w0 f1 F3&b1--- .. f2&B0--- b2--- .. f3&B1--- b3--- I2 W2 I3 W3
rank 1 | .. F0 f0 F1 f1 F2 b0--- f2&B0--- F3&b1--- f3&B1--- b2--- B2--- .. i3 I3 w3 W3
dualpipe-v: makespan 26 s, bubble 7.7%, 4.0% above the bound, peak in flight 5 / 2 chunks; 3 columns are 1 s; \
lower case: odd chunks"""


def test_an_overlapping_pair_is_one_bar_in_text_where_it_fits():
    trace = trace_of("dualpipe-v", 2, 4)
    assert viz.text_timeline(trace, 100) == TEXT_OVERLAP
    assert "1F3&2B1" in viz.text_timeline(trace, 120)
    narrow = viz.text_timeline(trace, 9 + 26)
    assert "&" not in narrow
    assert narrow.splitlines()[0].startswith("rank 0 | FFFfiwfF3-.f2-b2.f3-b3IWIW")


def test_an_overlapping_pair_is_drawn_as_two_halves():
    trace = trace_of("dualpipe-v", 2, 4)
    ax = viz.plot_timeline(trace)
    boxes = {}
    for collection in ax.collections:
        _, rank, what = collection.get_gid().split()
        for path in collection.get_paths():
            box = path.get_extents()
            boxes.setdefault((int(rank), what), {})[box.x0, box.x1] = box.y0 - int(rank), box.y1 - int(rank)
    pairs = 0
    for rank, row in enumerate(trace.by_rank):
        for one, other in pairwise(row):
            if (one.start_s, one.end_s) == (other.start_s, other.end_s):
                pairs += 1
                assert (one.action.kind, other.action.kind) == (Kind.F, Kind.B)
                upper, lower = (
                    boxes[rank, f"{s.action.stage}{s.action.kind}"][s.start_s, s.end_s] for s in (one, other)
                )
                assert upper == pytest.approx((-0.42, 0))  # rank 0 is on top
                assert lower == pytest.approx((0, 0.42))
    assert pairs == 6
    whole = boxes[0, "0F"][0, 1]
    assert whole == pytest.approx((-0.42, 0.42))
    assert gaps(trace, 0) == [(10, 11), (16, 17)]
    assert len([text for text in ax.texts if text.get_text()]) == len(trace.spans)
    assert len(ax.get_legend().get_texts()) == 4 + 2 + 1  # kinds, chunks, bubble


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("shape", [(1, 1), (4, 8), (12, 40)])
def test_text_rows_stay_within_the_width(name, width, shape):
    num_ranks = fitting(name, shape[0])
    *rows, summary = viz.text_timeline(trace_of(name, num_ranks, shape[1], transfer_s=0.3), width).splitlines()
    assert len(rows) == num_ranks
    assert max(map(len, rows)) <= width
    assert len({row.index("|") for row in rows}) == 1
    assert summary.startswith(f"{name}: makespan ")


def test_text_cells_are_found_in_floating_point_times():
    tenth = trace_of("1f1b", 4, 8, forward_s=0.1, input_grad_s=0.1, weight_grad_s=0.1)
    whole = viz.text_timeline(trace_of("1f1b")).splitlines()[:-1]
    assert viz.text_timeline(tenth).splitlines()[:-1] == whole
    assert viz.text_timeline(tenth).splitlines()[-1].endswith("3 columns are 100 ms")


def test_text_of_a_measured_trace_starts_at_0_and_fills_the_width():
    spans = [("0F0", 0, 7.0, 8.1), ("1F0", 1, 8.1, 9.3), ("1B0", 1, 9.3, 11.7), ("0B0", 0, 11.75, 13.0)]
    trace = Trace(tuple(Span(Action.parse(a), rank, start, end, Lane.COMPUTE) for a, rank, start, end in spans), 2)
    text = viz.text_timeline(trace, width=9 + 30)
    assert text.splitlines()[:2] == [
        "rank 0 | F0---...................B0----",
        "rank 1 | .....F0----B0----------.......",
    ]


def test_a_text_column_shows_what_runs_at_its_middle():
    trace = trace_of("1f1b", 4, 64)
    rows = viz.text_timeline(trace, width=9 + 50).splitlines()[:-1]
    for rank, row in enumerate(rows):
        for column, letter in enumerate(row[9:]):
            now = (column + 0.5) * trace.makespan_s / 50
            running = [s.action.kind for s in trace.by_rank[rank] if s.start_s < now < s.end_s]
            on_an_edge = any(now in (s.start_s, s.end_s) for s in trace.by_rank[rank])
            if letter in "FB." and not on_an_edge:
                assert ([letter] if letter != "." else []) == running, (rank, column)


def test_times_and_sizes_are_written_with_units():
    times = [quote_time(value) for value in (0, 90, 1, 0.999, 0.0015, 2.5e-6, 3e-9)]
    assert times == ["0 s", "90 s", "1 s", "999 ms", "1.5 ms", "2.5 us", "0.003 us"]
    assert [quote_bytes(value) for value in (999, 1000, 1023 * 2**10)] == ["999 B", "1000 B", "1023 KiB"]
    assert [counted(*one) for one in ((1, "rank"), (0, "rank"), (2, "micro-batch"))] == [
        "1 rank",
        "0 ranks",
        "2 micro-batches",
    ]
    assert [quote_bytes(value, 4) for value in (0, 7, 1536, 5 * 2**20, 3 * 2**29)] == [
        "0 B",
        "7 B",
        "1.5 KiB",
        "5 MiB",
        "1.5 GiB",
    ]


def test_a_ratio_is_said_in_one_way():
    ratios = (1.38, 1, 1.0004, 1.004, 0.5, 12.34, 1 / 1.2)
    assert [quote_speed(ratio) for ratio in ratios] == [
        "1.38x faster",
        "as fast",
        "as fast",
        "1.004x faster",
        "2.00x slower",
        "12.3x faster",
        "1.20x slower",
    ]


def test_the_headline_has_makespan_bubble_gap_and_peak():
    assert (
        headline(trace_of("1f1b"), "predicted")
        == "predicted: makespan 33 s, bubble 27.3%, 22.2% above the bound, peak in flight 4"
    )
    assert headline(trace_of("interleaved-1f1b")).endswith("peak in flight 11 / 2 chunks")


def test_importing_viz_imports_no_matplotlib():
    code = "import sys, pipesched.viz; print(sorted({'matplotlib', 'networkx', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
