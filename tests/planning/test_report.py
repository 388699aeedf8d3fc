import importlib.util
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipesched
from pipesched import Costs, Kind, Pipeline, Plan, Report, Trace, schedules, simulate
from pipesched.cli.main import main
from pipesched.errors import InputError, ScheduleError
from pipesched.partitioning.result import Partition
from pipesched.planning.alternatives import Alternative
from pipesched.simulation.comparison import Pair, compared, measured_costs
from pipesched.viz import page
from tests.support.saved_reports import read_again

GIB = 2**30
TAKEN = Alternative(
    label="1f1b",
    schedule="1f1b",
    num_ranks=2,
    chunks_per_rank=1,
    num_microbatches=4,
    checkpoint="never",
    step_s=0.030,
    bubble_ratio=0.1,
    peak_bytes=3 * GIB,
    limit_bytes=4 * GIB,
    measured_s=0.031,
)
TOO_LARGE = Alternative(
    label="gpipe",
    schedule="gpipe",
    num_ranks=2,
    chunks_per_rank=1,
    num_microbatches=4,
    checkpoint="never",
    step_s=0.029,
    bubble_ratio=0.1,
    peak_bytes=5 * GIB,
    limit_bytes=4 * GIB,
    note="1 GiB too large",
)
EQUAL = Alternative(
    label="equal split",
    schedule="1f1b",
    num_ranks=2,
    chunks_per_rank=1,
    num_microbatches=4,
    checkpoint="never",
    step_s=0.045,
    bubble_ratio=0.3,
    peak_bytes=3 * GIB,
    limit_bytes=4 * GIB,
    note="1.50x slower",
)
ALONE = Alternative(
    label="one device",
    schedule="gpipe",
    num_ranks=1,
    chunks_per_rank=1,
    num_microbatches=4,
    checkpoint="never",
    step_s=0.09,
    bubble_ratio=0.0,
    note="3.00x slower",
)


def costs_of(program, seconds=0.001):
    return Costs.uniform(
        program.num_stages,
        forward_s=seconds,
        input_grad_s=seconds,
        weight_grad_s=seconds,
        activation_bytes=2**20,
        weight_bytes=3 * 2**20,
    )


def plan_of(name="1f1b", num_ranks=2, num_microbatches=4, alternatives=()):
    program = schedules.get(name).program(num_ranks, num_microbatches)
    stages = tuple((f"layer {2 * stage}", f"layer {2 * stage + 1}") for stage in range(program.num_weights))
    return Plan(stages, name, program, costs=costs_of(program), alternatives=alternatives)


def slower(costs, factors):
    """Each stage's times by its factor."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
    return replace(
        costs, **{name: [v * f for v, f in zip(getattr(costs, name), factors, strict=True)] for name in names}
    )


def measured_of(plan, *factors):
    """The plan's program where stages take longer than was predicted; on another clock, as an executor records it."""
    trace = simulate(plan.program, slower(plan.costs, factors))
    moved = tuple(span._replace(start_s=span.start_s + 100, end_s=span.end_s + 100) for span in trace.spans)
    return Trace(moved, trace.num_ranks, "measured")


@settings(max_examples=25)
@given(st.data(), st.sampled_from(["1f1b", "zb-h1", "interleaved-1f1b"]))
def test_a_comparison_finds_how_far_off_each_stage_is(data, name):
    plan = plan_of(name, 3, 3)
    factors = data.draw(
        st.lists(st.floats(0.25, 4), min_size=plan.program.num_stages, max_size=plan.program.num_stages)
    )
    found = compared(plan.predicted(), measured_of(plan, *factors))
    for own, factor in zip(found.stages, factors, strict=True):
        assert own.rank == plan.program.placement[own.stage]
        assert set(own.seconds) == ({Kind.F, Kind.I, Kind.W} if name == "zb-h1" else {Kind.F, Kind.B})
        for pair in (*own.seconds.values(), own.work_s):
            assert pair.off == pytest.approx(factor - 1, abs=1e-9)
    far = max(abs(factor - 1) for factor in factors)
    assert abs(found.worst.work_s.off) == pytest.approx(far)


def test_a_comparison_in_a_line():
    plan = plan_of()
    found = compared(plan.predicted(), measured_of(plan, 1, 1.2))
    assert str(found) == "predicted 15 ms per step, measured 17.4 ms (+16.0%), largest error on stage 1 (+20.0%)"
    assert found.busy[0] == pytest.approx((12 / 15, 12 / 17.4))
    assert found.bubble_ratio == pytest.approx((1 - 24 / 30, 1 - 26.4 / 34.8))


def test_one_action_that_was_held_up_says_nothing_of_its_stage():
    plan = plan_of()
    spans = list(measured_of(plan, 1, 1).spans)
    spans[-1] = spans[-1]._replace(end_s=spans[-1].end_s + 1)
    found = compared(plan.predicted(), Trace(tuple(spans), 2))
    assert found.step_s.off > 60
    assert [own.work_s.off for own in found.stages] == pytest.approx([0, 0], abs=1e-6)


def test_steps_of_other_lengths_are_compared_action_by_action():
    plan, other = plan_of(), plan_of(num_microbatches=3)
    found = compared(plan.predicted(), measured_of(other, 1, 1.5))
    assert found.step_s is None
    assert str(found) == (
        "the predicted and the measured step have different numbers of actions; "
        "median times of actions: largest error on stage 1 (+50.0%)"
    )
    assert found.worst.work_s == pytest.approx((12e-3, 18e-3))
    assert str(found) in Report(plan, measured_of(other, 1, 1.5)).lines


def test_a_report_separates_gaps_between_actions_from_stage_compute():
    plan = plan_of()
    late = simulate(plan.program, replace(slower(plan.costs, (1, 1.2)), transfer_s=1e-4))
    lines = Report(plan, Trace(late.spans, 2)).lines
    assert lines[1] == "of this difference, stage compute accounts for +16.0% and gaps between actions for +1.3%"


def test_layers_that_run_again_are_counted():
    plan = replace(plan_of(), checkpoint={"layer 2": "recompute", "layer 3": "recompute"})
    (stages,) = (table for table in Report(plan).tables if table.title == "Stages, predicted")
    assert [row[stages.columns.index("recomputed")].text for row in stages.rows] == ["", "2"]
    assert "offloaded" not in stages.columns


def test_sizes_that_are_not_known_are_left_out():
    plan = plan_of()
    only_times = replace(plan, costs=measured_costs([plan.predicted()], 2))
    tables = {known: Report(own).tables[0] for known, own in ((True, plan), (False, only_times))}
    for known, table in tables.items():
        assert [name in table.columns for name in ("F", "weights", "kept", "sent")] == [True, known, known, known]
        assert ("kept:" in table.note) is known


def test_memory_is_shown_by_what_it_is_for():
    plan = plan_of(alternatives=(TAKEN,))
    table = Report(replace(plan, costs=replace(plan.costs, gradient_bytes=(5, 2**30)))).tables[-1]
    assert table.title == "Memory, predicted"
    assert [cell.text for cell in table.rows[0]] == ["0", "3 MiB", "5 B", "2 MiB", "5 MiB", "3.995 GiB"]
    assert table.columns == ("rank", "parameters", "gradients", "activations", "total", "margin")


def test_a_difference_from_a_prediction_of_0_has_no_ratio():
    assert Pair(0, 1).off is None
    found = compared(replace(plan_of(), costs=Costs.uniform(2, weight_grad_s=0)).predicted(), plan_of().predicted())
    assert found.worst.work_s.off < 0


@pytest.mark.parametrize("other", [plan_of("1f1b", 3).predicted(), Trace((), 2)])
def test_traces_of_two_programs_are_not_compared(other):
    with pytest.raises(InputError, match=r"two traces of the same program; the traces have 2 and \d ranks"):
        compared(plan_of().predicted(), other)


def test_a_report_says_what_was_found():
    plan = plan_of(alternatives=(TOO_LARGE, TAKEN, EQUAL, ALONE))
    text = str(Report(plan, measured_of(plan, 1, 1.2)))
    for line in (
        "1f1b on 2 ranks: 2 stages, 4 micro-batches, checkpoint never",
        "predicted 15 ms per step, measured 17.4 ms (+16.0%), largest error on stage 1 (+20.0%)",
        "of this difference, stage compute accounts for +16.0% and gaps between actions for +0.0%",
        "with the predicted times, no schedule of these stages on these ranks can take less than 13 ms; "
        + "the predicted step is 15.4% above this bound",
        "with the measured times, the bound is 15.4 ms; the measured step is 13.0% above it",
        "1.50x faster than an equal split (45 ms), as predicted by the search",
        "    1     1  1 → 1.2 ms   +20.0%  2 → 2.4 ms   +20.0%  12 → 14.4 ms      +20.0%",
        "    1     1       2  layer 2 .. layer 3  1 ms  2 ms    3 MiB  1 MiB   0 B",
    ):
        assert line in text.splitlines()
    assert text.count("rank 0 | F0") == 2
    weighed = Report(replace(plan, alternatives=plan.alternatives[:3])).tables[0]
    assert weighed.note.startswith("All plans have ranks 2, chunks 1, m 4, checkpoint never. m: micro-batches. ")
    assert dict(zip(weighed.columns, (cell.text for cell in weighed.rows[0]), strict=True)) == {
        "plan": "gpipe",
        "schedule": "",
        "predicted": "29 ms",
        "measured": "",
        "bubble": "10.0%",
        "memory": "5 GiB",
        "margin": "-1 GiB",
        "why not chosen": "1 GiB too large",
    }
    assert [cell.tone for cell in weighed.rows[0]].count("bad") == 2
    assert [row[2].text for row in Report(plan).tables[0].rows] == ["2", "2", "2", "1"]
    assert plan.predicted().above_bound == pytest.approx(2 / 13)


def test_a_report_of_a_plan_whose_layers_were_not_measured():
    report = Report(replace(plan_of(), costs=None))
    assert report.lines == ["the step time is unknown: layers were not measured"]
    assert [table.title for table in report.tables] == ["Stages, predicted"]
    assert "layer 0 .. layer 1" in report.text()
    assert "<img" not in report.html()
    report.figure()


def test_a_report_without_a_measured_step_is_of_what_is_predicted():
    report = Report(plan_of("zb-v", 3, 6))
    assert report.lines[0].startswith("predicted 38 ms per step")
    assert [label for label, _ in report.traces] == ["predicted"]
    assert [table.title for table in report.tables] == ["Stages, predicted", "Ranks", "Memory, predicted"]
    ranks = report.tables[1]
    assert [row[1].text for row in ranks.rows] == ["0 5", "1 4", "2 3"]


def shown_in(html):
    """The bytes of the only picture in an HTML text."""
    (data,) = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', html)
    return b64decode(data)


def test_notebooks_show_the_picture():
    plan = plan_of()
    measured = measured_of(plan, 1, 1.2)
    for shown in (measured, plan, Report(plan, measured)):
        assert shown_in(shown._repr_html_()).startswith(b"\x89PNG")
    assert 'alt="measured: makespan 17.4 ms, bubble' in measured._repr_html_()
    assert 'alt="1f1b: makespan 15 ms, bubble' in plan._repr_html_()
    assert 'alt="1f1b on 2 ranks: 2 stages, ' in Report(plan)._repr_html_()
    assert replace(plan, costs=None)._repr_html_() is None
    assert shown_in(Report(replace(plan, costs=None))._repr_html_())


def figures_of(report):
    """What the figures at the top of a page say, which come before everything else on it."""
    html = report.html()
    assert html.index("</h1>") < html.index('<dl class="figures">') < html.index('<p class="first">')
    figures = re.findall(r"<dt>(.*?)</dt><dd><strong>(.*?)</strong> (.*?)</dd>", html)
    assert len(figures) == html.count("<dt>")
    return [tuple(map(unescape, figure)) for figure in figures]


def test_a_page_begins_with_three_figures():
    plan = plan_of()
    # Two stages of 4 x 3 ms: 24 ms of compute in a step of 15 ms.
    assert figures_of(Report(plan)) == [
        (
            "compared to one device",
            "1.60x faster",
            "15 ms a step instead of 24 ms, both predicted, from all stages' compute",
        ),
        ("bubble", "20.0%", "of the ranks' time is idle (predicted)"),
        ("slowest stage", "stage 0", "layer 0 .. layer 1: 12 ms a step, predicted, 0.0% above the mean"),
    ]
    assert figures_of(Report(plan, measured_of(plan, 1, 1.2))) == [
        (
            "compared to one device",
            "1.60x faster",
            "15 ms a step instead of 24 ms, both predicted, from all stages' compute; "
            "the last step took 17.4 ms (measured)",
        ),
        ("bubble", "24.1%", "of the ranks' time is idle (measured); predicted 20.0%"),
        ("slowest stage", "stage 1", "layer 2 .. layer 3: 14.4 ms a step, measured, 9.1% above the mean"),
    ]


def test_the_speed_against_one_device_comes_from_the_search_or_from_measured_steps():
    plan = plan_of(alternatives=(TAKEN, ALONE))
    searched, *_ = figures_of(Report(plan))
    assert searched[1:] == ("3.00x faster", "30 ms a step instead of 90 ms, both predicted by the search")
    ran, *_ = figures_of(Report(plan, measured_of(plan, 1, 1.2)))
    assert ran[1] == "3.00x faster"
    assert ran[2] == (
        "30 ms a step instead of 90 ms, both predicted by the search; the last step took 17.4 ms (measured)"
    )
    both, *_ = figures_of(Report(replace(plan, alternatives=(TAKEN, replace(ALONE, measured_s=0.0155)))))
    assert both[1:] == ("2.00x slower", "31 ms a step instead of 15.5 ms, both measured in trial runs")
    alone = plan_of(num_ranks=1)
    assert figures_of(Report(alone))[0][1:] == ("the same", "the plan uses one device")


def test_a_baseline_that_ran_under_another_label_counts_once():
    taken, other = replace(TAKEN, first_s=0.03), replace(ALONE, label="gpipe", measured_s=0.095, first_s=0.09)
    plan = plan_of(alternatives=(taken, other, replace(other, label="one device")))
    assert "confirmed: in trial runs of 2 plans this plan took" in str(Report(plan))


def test_a_report_whose_layers_were_not_measured_has_no_figures():
    assert Report(replace(plan_of(), costs=None)).key_figures == []


class Checker(HTMLParser):
    """That every element ends, in its turn, and what the page would load."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.loads = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        assert tag not in ("link", "iframe", "object", "embed", "base")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_and_needs_nothing_else():
    plan = plan_of("zb-v", alternatives=(replace(TAKEN, label="<script>alert(1)</script>"), EQUAL))
    plan = replace(plan, stages=(("<b>", "&"), *plan.stages[1:]))
    trace = measured_of(plan, *[1.1] * 4)
    html = Report(plan, trace).html()
    (source,) = Checker(html).loads
    assert source.startswith("data:image/svg+xml;base64,")
    assert b"rank 0 3F" in b64decode(source.partition(",")[2])
    assert not re.search(r"https?:|url\(|@import", html)
    assert "<script>alert" not in html
    assert "&lt;b&gt; .. &amp;" in html
    assert html.isascii() or 'charset="utf-8"' in html
    assert 'alt="predicted: makespan ' in html


def test_a_page_of_many_bars_has_them_as_pixels(monkeypatch):
    monkeypatch.setattr(page, "_MOST_BARS", 10)
    html = Report(plan_of()).html()
    (source,) = Checker(html).loads
    assert source.startswith("data:image/png;base64,")


@pytest.mark.parametrize("half", ["seq1f1b", "chimera"])
def test_every_kind_of_program_is_reported(half):
    program = schedules.get(half).program(2, 4)
    plan = Plan(tuple((f"layer {at}",) for at in range(program.num_weights)), half, program, costs=costs_of(program))
    report = Report(plan, plan.predicted())
    Checker(report.html())
    assert report.text()
    report.figure()


def test_a_picture_shows_candidates_timelines_and_stages():
    plan = plan_of(alternatives=(TAKEN, TOO_LARGE, EQUAL))
    figure = Report(plan, measured_of(plan, 1, 1.2)).figure()
    candidates, predicted, measured, work = figure.axes
    assert [label.get_text() for label in candidates.get_yticklabels()] == ["1f1b", "gpipe", "equal split, 1f1b"]
    assert [patch.get_width() for patch in candidates.patches] == [0.030, 0.029, 0.045]
    assert [bool(patch.get_hatch()) for patch in candidates.patches] == [False, True, False]
    assert predicted.get_xlim() == measured.get_xlim() == pytest.approx((0, 17.4))
    assert [text.get_text() for text in work.texts] == ["+0.0%", "+20.0%"]
    heights = [patch.get_height() for patch in work.patches]
    assert heights == pytest.approx([4, 4, 8, 8, 4, 4.8, 8, 9.6])


def test_a_picture_says_what_to_do_next():
    report = Report(plan_of(alternatives=(TAKEN, EQUAL)))
    said = " ".join(" ".join(text.get_text() for text in report.figure().texts).split())
    assert report.next_steps
    assert all(step in said for step in report.next_steps)


def test_a_report_is_saved_by_its_ending(tmp_path):
    report = Report(plan_of(alternatives=(TAKEN,)))
    for ending, begins in {"html": b"<!DOCTYPE html>", "png": b"\x89PNG", "svg": b"<?xml", "txt": b"1f1b on"}.items():
        report.save(tmp_path / f"report.{ending}")
        assert (tmp_path / f"report.{ending}").read_bytes().startswith(begins)
    with pytest.raises(
        InputError, match=r"saved as .html, .txt, .json, .png, .svg, .pdf; got 'report.doc'; use one of"
    ):
        report.save("report.doc")


def test_both_timelines_lie_one_under_the_other_in_perfetto(tmp_path):
    plan = plan_of()
    Report(plan, measured_of(plan, 1, 1.2)).save(tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [named[pid] for pid in range(4)] == [
        "rank 0, predicted",
        "rank 0, measured",
        "rank 1, predicted",
        "rank 1, measured",
    ]
    ran = [(event["pid"], event["name"]) for event in events if event["ph"] == "X"]
    assert sorted(ran) == sorted((2 * s.rank + side, str(s.action)) for s in plan.predicted().spans for side in (0, 1))


def test_the_command_reads_plans_and_traces(tmp_path):
    plan = plan_of(alternatives=(TAKEN, EQUAL))
    trace = measured_of(plan, 1, 1.2)
    plan.save(tmp_path / "plan.json")
    trace.to_chrome(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert [span.action for span in again.spans] == [span.action for span in trace.spans]
    assert again.makespan_s == pytest.approx(trace.makespan_s)
    arguments = ["report", str(tmp_path / "plan.json"), str(tmp_path / "trace.json")]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0
    assert "predicted 15 ms per step, measured 17.4 ms (+16.0%), largest error on stage 1 (+20.0%)" in shown.output
    ran = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "a.html"), "-o", str(tmp_path / "a.txt")])
    assert ran.output.count("wrote") == 2
    assert "largest error on stage 1" in (tmp_path / "a.html").read_text() + (tmp_path / "a.txt").read_text()
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    wrong = CliRunner().invoke(main, arguments)
    assert wrong.exit_code == 1
    assert f"{tmp_path / 'trace.json'}: " in wrong.output


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"num_ranks": 1, "spans": [[1]]}'])
def test_a_file_that_is_no_trace_is_named(text, tmp_path):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ScheduleError, match=r"trace\.json: "):
        Trace.load(tmp_path / "trace.json")


def test_rich_shows_the_same_in_colour():
    console = pytest.importorskip("rich.console").Console(width=150, force_terminal=True, record=True, file=sys.stderr)
    plan = plan_of(alternatives=(TAKEN, TOO_LARGE, EQUAL))
    console.print(Report(plan, measured_of(plan, 1, 1.2)))
    styled = console.export_text(styles=True, clear=False)
    plain = console.export_text()
    for table in Report(plan, measured_of(plan, 1, 1.2)).tables:
        assert table.title in plain
        for row in table.rows:
            assert all(cell.text in plain for cell in row)
    assert "\x1b[31m-1 GiB" in styled


def test_text_needs_no_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "Stages" in str(Report(plan_of()))
    assert importlib.util.find_spec("pipesched.planning.report")


def test_a_pipeline_reports_its_last_step():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x = torch.ones(8, 4)
    with Pipeline(
        model, x[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, num_microbatches=4, schedule="1f1b"
    ) as pipe:
        assert [label for label, _ in pipe.report().traces] == ["predicted"]
        pipe.step(x, target=x)
        report = pipe.report()
    assert [label for label, _ in report.traces] == ["predicted", "measured"]
    assert str(report.comparison) in str(report)
    assert report.measured == pipe.trace


def test_a_pipeline_says_what_its_prediction_and_its_measured_step_come_from():
    """The first step also warms up: it is marked, and predicts nothing where there are others."""
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(8, 4)
    cold = "the first step, which includes memory allocation and warm-up"
    says = [
        ["predicted from measured layer times", f"the measured step is {cold}; run more steps before you compare"],
        [f"predicted from action times of {cold}"],
        ["predicted from action times of 1 earlier step"],
        ["predicted from action times of 2 earlier steps"],
    ]
    with Pipeline(model, x[:1], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b") as pipe:
        assert pipe.report().plan.notes == ()
        for said in says:
            pipe.step(x, target=x)
            report = pipe.report()
            assert [*report.plan.notes, *report.measured.notes] == said
            assert [line for line in report.lines if line in said] == said
        assert (
            pipe.plan.costs.forward_s
            == measured_costs(
                [pipe._history.trace_of([run], ()) for run in list(pipe._running.runs)[1:-1]], 2
            ).forward_s
        )
        pipe.replan(pipe.plan)
        assert pipe.report().plan.notes == ()


class Block(nn.Linear):
    pass


def test_layers_of_a_sequential_are_reported_with_their_classes(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), Block(4, 4), nn.Sequential(Block(4, 4), nn.GELU())), torch.ones(8, 4)
    with Pipeline(model, x[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b") as pipe:
        plan, report = pipe.plan, str(pipe.report())
    assert "0 Linear" in report
    assert "2.1 GELU" in report
    assert f"bottleneck: {plan.partition.with_class_names(plan.layer_classes).bottleneck}" in report
    assert re.search(r"stage \d \((\S+ (Linear|Block|GELU))( \.\. \S+ (Block|GELU))?\)", report)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").explain() == plan.explain()
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json").layer_classes == plan.layer_classes


def test_a_class_name_stands_behind_the_names_of_layers_only():
    plan = plan_of()
    partition = Partition(
        stages=[["0", "1"], ["2"]],
        bottleneck_s=1.0,
        lower_bound_s=1.0,
        summaries=(),
        bottleneck="stage 0 (0 .. 1)",
        reason="layer 2 alone takes 1 s; the work of all layers is 2 s",
    )
    named = partition.with_class_names({"0": "Embed", "2": "Block"})
    assert named.bottleneck == "stage 0 (0 Embed .. 1)"
    assert named.reason == "layer 2 Block alone takes 1 s; the work of all layers is 2 s"
    assert partition.with_class_names({}) is partition
    assert replace(plan, layer_classes={"layer 0": "Embed"}).first_to_last(0) == "layer 0 Embed .. layer 1"


def test_devices_that_a_plan_leaves_out_are_named():
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(8, 4)
    with Pipeline(model, x[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b") as pipe:
        plan = pipe.plan
    with Pipeline(model, x[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 3, plan=plan) as pipe:
        said = "1 device of 3 unused (cpu), because the plan has 2 ranks"
        assert said in pipe.report().lines
        assert repr(pipe).endswith(said)


def test_a_report_separates_the_prediction_of_the_search_from_the_current_one():
    plan = plan_of(alternatives=(TAKEN,))
    said = "the search predicted 30 ms per step, and used this prediction to compare plans and to choose the split"
    assert said in Report(plan).lines
    same = replace(plan, alternatives=(replace(TAKEN, step_s=plan.predicted().makespan_s),))
    assert not any("the search predicted" in line for line in Report(same).lines)


def test_a_plan_that_is_as_fast_as_a_baseline_is_said_to_be_so():
    report = Report(plan_of(alternatives=(TAKEN, replace(EQUAL, step_s=TAKEN.step_s))))
    assert "as fast as an equal split (30 ms), as predicted by the search" in report.lines


def test_the_command_says_which_ranks_are_left_out(tmp_path):
    known = pipesched.profile(nn.Linear(4, 4), torch.ones(2, 4))
    known.save(tmp_path / "profile.json")
    ran = CliRunner().invoke(main, ["tune", str(tmp_path / "profile.json"), "--ranks", "3", "--batch", "4"])
    assert "the plan uses 1 of 3 ranks" in ran.stdout
    assert repr(known).startswith("Profile(1 layer, micro-batches of ")
    assert "\n" not in repr(known)


def test_a_footnote_explains_only_columns_of_its_table():
    note = Report(plan_of(alternatives=(replace(TAKEN, limit_bytes=None), ALONE))).tables[0].note
    assert "memory: highest peak of any rank." in note
    assert "margin" not in note


def test_the_repr_of_a_large_object_is_one_line():
    plan = plan_of(alternatives=(TAKEN,))
    assert repr(plan).startswith("Plan(1f1b: 4 layers in 2 stages on 2 ranks, 4 micro-batches, checkpoint 'never', ")
    assert repr(plan.predicted()) == "Trace(1f1b: 16 spans on 2 ranks, makespan 15 ms, bubble 20.0%)"


CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-headless-shell", "google-chrome"])), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, or another name of it, on the path")
def test_a_browser_sorts_and_shows_the_timelines(tmp_path):
    plan = plan_of(alternatives=(EQUAL, TOO_LARGE, TAKEN))
    html = Report(plan, measured_of(plan, 1, 1.2)).html()
    acts = """<script>
      const order = () => [...document.querySelector("table").tBodies[0].rows].map(r => r.cells[0].textContent).join();
      const says = [order()];
      const head = [...document.querySelectorAll("th")].find(th => th.textContent === "predicted");
      head.click(); says.push(order());
      head.click(); says.push(order());
      addEventListener("load", () => {
        says.push(document.querySelector("img").naturalWidth > 0);
        document.body.append("SAYS " + JSON.stringify(says));
      });
    </script></body>"""
    (tmp_path / "page.html").write_text(html.replace("</body>", acts))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    command = [CHROMIUM, *flags, f"file://{tmp_path}/page.html"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = re.search(r"SAYS (\[.*?\])", ran.stdout)
    names = ["equal split,gpipe,1f1b", "gpipe,1f1b,equal split", "equal split,1f1b,gpipe"]
    assert said, ran.stderr
    assert said[1] == f'["{names[0]}","{names[1]}","{names[2]}",true]'


# ---- reports of files ------------------------------------------------------------------------------------------------


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("num_steps", "choices"),
    [
        (0, {"search": pipesched.Search(batch_size=64), "num_stages": 2}),
        (0, {"schedule": "1f1b", "boundaries": [2]}),
        (1, {"schedule": "1f1b"}),
        (3, {"schedule": "zb-h1", "optimizer": adamw}),
        (3, {"num_microbatches": 4, "num_stages": 2}),
        (3, {"schedule": "interleaved-1f1b", "checkpoint": "always"}),
        (3, {"schedule": "1f1b", "num_stages": 1, "devices": ["cpu"]}),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else str(value),
)
def test_the_command_shows_all_that_the_report_of_a_running_pipeline_shows(num_steps, choices, tmp_path):
    """Class names of layers, notes on the prediction and the measured step, optimizer states and bounds."""
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(64, 8)
    with Pipeline(model, x[:8], loss_fn=nn.functional.mse_loss, **{"devices": ["cpu"] * 2} | choices) as pipe:
        for _ in range(num_steps):
            pipe.step(x, target=x)
        report = pipe.report()
    assert "0 Linear" in report.text()
    assert read_again(report).text() == report.text()
    assert read_again(report).key_figures == report.key_figures


def test_the_command_prints_the_text_of_a_saved_report(tmp_path):
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(64, 8)
    devices = ["cpu"] * 3
    with Pipeline(model, x[:8], loss_fn=nn.functional.mse_loss, devices=devices, num_stages=2) as pipe:
        pipe.step(x, target=x)
        pipe.report().save(tmp_path / "report.txt")
        pipe.plan.save(tmp_path / "plan.json")
        pipe.trace.to_chrome(tmp_path / "trace.json")
    arguments = ["report", str(tmp_path / "plan.json"), str(tmp_path / "trace.json"), "--width", "120"]
    shown = CliRunner().invoke(main, arguments).stdout
    assert "1 device of 3 unused" in shown
    assert "the measured step is the first step" in shown
    assert shown == (tmp_path / "report.txt").read_text()


def test_a_text_file_of_the_command_has_the_width_that_is_asked_for(tmp_path):
    plan = plan_of("1f1b", 4, 32)
    plan.save(tmp_path / "plan.json")
    for width in (40, 250):
        arguments = ["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "a.txt"), "--width", str(width)]
        assert CliRunner().invoke(main, arguments).exit_code == 0
        assert (tmp_path / "a.txt").read_text() == f"{Report(plan).text(width)}\n"


# ---- like with like --------------------------------------------------------------------------------------------------


def speeds_of(text):
    return re.findall(r"([\d.]+x (?:faster|slower)|as fast)", text)


@given(st.floats(0.2, 3), st.booleans(), st.booleans())
@settings(max_examples=30)
def test_a_speed_divides_only_measured_by_measured_or_predicted_by_predicted(factor, own_ran, alone_ran):
    own = replace(TAKEN, measured_s=0.04 if own_ran else None)
    alone = replace(ALONE, measured_s=0.06 if alone_ran else None)
    plan = plan_of(alternatives=(own, alone))
    figure = Report(plan, measured_of(plan, factor, factor)).key_figures[0]
    if own_ran and alone_ran:
        assert (figure.value, "both measured in trial runs" in figure.note) == ("1.50x faster", True)
    else:
        assert (figure.value, "both predicted by the search" in figure.note) == ("3.00x faster", True)


@given(st.floats(0.2, 3), st.floats(0.2, 3))
@settings(max_examples=8)
def test_no_bound_contradicts_the_step_beside_it(one, other):
    """A bound for predicted times can be above a measured step: so both bounds say which times they hold for."""
    plan = plan_of()
    report = Report(plan, measured_of(plan, one, other))
    predicted, measured = (
        next(line for line in report.lines if line.startswith(f"with the {word} times"))
        for word in ("predicted", "measured")
    )
    assert "the predicted step is 15.4% above this bound" in predicted
    found = re.search(r"the bound is ([\d.]+) ms; the measured step is ([\d.]+)% above it", measured)
    assert found
    assert float(found[1]) <= report.measured.makespan_s * 1e3 * 1.001


def test_a_measured_step_below_the_bound_of_its_median_times_shows_no_number():
    """One action was faster than the other actions of its kind."""
    plan = plan_of(num_ranks=1)
    spans = list(measured_of(plan, 1).spans)
    spans[-1] = spans[-1]._replace(end_s=spans[-1].end_s - 1e-3)
    lines = Report(plan, Trace(tuple(spans), 1)).lines
    assert "with the measured times, no schedule of these stages on these ranks can be clearly faster" in lines


def test_every_head_of_the_tables_says_predicted_or_measured():
    plan = plan_of(alternatives=(TAKEN, EQUAL))
    for report in (Report(plan), Report(plan, measured_of(plan, 1, 1.2))):
        for table in report.tables:
            said = f"{table.title} {table.columns}"
            assert "predicted" in said.lower()


def test_a_saved_trace_keeps_its_name_bound_and_notes(tmp_path):
    trace = replace(plan_of().predicted(), notes=("the machine was busy",))
    trace.to_chrome(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert (again.name, again.bound_s, again.notes) == ("1f1b", trace.bound_s, ("the machine was busy",))
    assert Trace.from_dict(trace.to_dict()).notes == trace.notes
    others = json.loads((tmp_path / "trace.json").read_text())
    for other in ({"version": 1}, {}):
        (tmp_path / "trace.json").write_text(json.dumps(others | {"otherData": other}))
        assert Trace.load(tmp_path / "trace.json").notes == ()
    for wrong in ([], {"pipesched": []}, {"pipesched": {"notes": 1}}, {"pipesched": {"unknown": 1}}):
        (tmp_path / "trace.json").write_text(json.dumps(others | {"otherData": wrong}))
        with pytest.raises(ScheduleError, match=r"trace\.json: "):
            Trace.load(tmp_path / "trace.json")


# ---- optimizer states ------------------------------------------------------------------------------------------------


def memory_of(plan):
    table = next(table for table in Report(plan).tables if table.title == "Memory, predicted")
    return dict(zip(table.columns, (cell.value for cell in table.rows[0]), strict=True))


@pytest.mark.parametrize("optimizer", ["adam", adamw])
def test_memory_shows_the_optimizer_of_tune(optimizer):
    """Adam keeps two values for each weight."""
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(4, 64)
    plan = pipesched.tune(
        model, x, num_ranks=2, batch_size=16, num_microbatches=4, num_stages=2, schedule="1f1b", optimizer=optimizer
    )
    held = memory_of(plan)
    assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=0.01)


def test_memory_shows_the_optimizer_of_a_table_and_its_part_in_replicas():
    row = {
        "forward_ms": 2,
        "backward_ms": 4,
        "parameter_bytes": 10**6,
        "output_bytes": 10**5,
        "activation_bytes": 10**6,
    }
    known = pipesched.Profile.from_table([{"name": f"layer {at}", **row} for at in range(4)], rows=4)
    whole = memory_of(pipesched.tune_profile(known, num_ranks=2, batch_size=32, num_stages=2, schedule="1f1b"))
    assert whole["optimizer"] == 2 * whole["parameters"]
    axes = {"pipeline": 2, "replicate": 2}
    options = {"num_ranks": 4, "batch_size": 64, "axes": axes, "zero": 1, "num_stages": 2, "schedule": "1f1b"}
    divided = memory_of(pipesched.tune_profile(known, **options))
    assert divided["optimizer"] == divided["parameters"] == whole["parameters"]


def test_memory_shows_the_optimizer_of_a_pipeline_without_a_limit():
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(16, 64)
    options = {"loss_fn": nn.functional.mse_loss, "devices": ["cpu"] * 2, "schedule": "1f1b", "optimizer": adamw}
    with Pipeline(model, x[:4], **options) as pipe:
        before = memory_of(pipe.report().plan)
        pipe.step(x, target=x)
        after = memory_of(pipe.report().plan)
    for held in (before, after):
        assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=0.01)


def test_a_pipeline_whose_optimizer_steps_only_its_own_parameters_has_a_plan():
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(16, 8)
    for parameter in model.parameters():
        parameter.scale = 0.1

    class Scaled(torch.optim.SGD):
        def step(self, closure=None):
            assert all(parameter.scale for group in self.param_groups for parameter in group["params"])
            return super().step(closure)

    options = {"devices": ["cpu"] * 2, "schedule": "1f1b", "optimizer": lambda parameters: Scaled(parameters, lr=0.1)}
    with Pipeline(model, x[:4], loss_fn=nn.functional.mse_loss, **options) as pipe:
        pipe.step(x, target=x)
        report = pipe.report()
    assert "optimizer" not in memory_of(report.plan)
    assert any(line.startswith("the memory of the optimizer is not known") for line in report.lines)


@pytest.mark.parametrize("width", [40, 250])
def test_the_timelines_of_tune_have_the_width_that_is_asked_for(width, tmp_path):
    row = "{},2,4,1000000,100000,1000000"
    head = "name,forward_ms,backward_ms,parameter_bytes,output_bytes,activation_bytes"
    (tmp_path / "layers.csv").write_text("\n".join([head, *(row.format(f"layer {at}") for at in range(8))]))
    options = ["--rows", "4", "--batch", "128", "--microbatches", "32", "--ranks", "8", "--schedule", "1f1b"]
    where = ["-o", str(tmp_path / "a.txt"), "--width", str(width)]
    ran = CliRunner().invoke(main, ["tune", "--table", str(tmp_path / "layers.csv"), *options, *where])
    assert ran.exit_code == 0, ran.output
    for text in (ran.stdout, (tmp_path / "a.txt").read_text()):
        drawn = [line for line in text.splitlines() if re.match(r"rank \d \| ", line)]
        assert len(drawn) == 8
        assert max(map(len, drawn)) <= width
        assert ("█" in drawn[0]) == (width == 40)
