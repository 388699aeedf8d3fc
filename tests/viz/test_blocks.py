"""Text timelines whose labels do not fit: a block character for each column, in proportion to the time."""

import pytest

from pipesched import Costs, schedules, simulate, viz
from pipesched.program.actions import Kind, Lane
from pipesched.program.lowering import add_gathers, add_reductions
from pipesched.viz.bars import kinds
from pipesched.viz.blocks import encodable

BLOCK = {kind: kind.row.block for kind in Kind}

TEXT_1F1B = """\
rank 0 | ▄▄▄▄      ██▄██▄██▄██ ██ ██ ██ |
rank 1 | ▄▄▄      █▄███▄█▄██▄███ ██ ██  |
rank 2 |  ▄▄▄    ██▄██▄██▄██▄██ ██ ██   |
rank 3 |  ▄▄    █▄██▄██▄██▄██▄███ ██    |
rank 4 |   ▄▄  ██▄██▄██▄█▄██▄███ ██     |
rank 5 |   ▄  █▄██▄██▄█▄███▄██▄██ █     |
rank 6 |    ▄ ██▄██▄██▄██▄██▄█▄███      |
rank 7 |    ▄███▄██▄█▄██▄███▄██▄█       |
1f1b: makespan 69 s, bubble 30.4%, 25.5% above the bound, peak in flight 8; a column is 2.226 s; \
▄ forward, █ backward, blank: idle"""


def dense(name="1f1b", num_ranks=14, num_microbatches=64, *, program=lambda own: own, **costs):
    own = program(schedules.get(name).program(num_ranks, num_microbatches))
    return simulate(own, Costs.uniform(own.num_stages, **costs))


def rows(trace, width):
    return [line.partition("| ")[2] for line in viz.text_timeline(trace, width).splitlines()[:-1]]


def test_a_timeline_without_space_for_labels_is_drawn_in_blocks():
    assert viz.text_timeline(dense(num_ranks=8, num_microbatches=16), 41) == TEXT_1F1B


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "zb-h1"])
def test_blocks_are_in_proportion_to_the_times_of_kinds_and_idle_time(name, width):
    trace = dense(name)
    columns = width - len("rank 13 | ") - 1
    for row, spans in zip(rows(trace, width), trace.by_rank, strict=True):
        assert row.endswith("|")
        assert len(row) == columns + 1
        for kind in kinds(trace):
            share = sum(own.end_s - own.start_s for own in spans if own.action.kind is kind) / trace.makespan_s
            assert row.count(BLOCK[kind]) == pytest.approx(share * columns, abs=1.5)


def test_warm_up_steady_state_and_cool_down_are_visible_in_blocks():
    trace = dense()
    drawn = rows(trace, 120)
    forward, backward = BLOCK[Kind.F], BLOCK[Kind.B]
    first_backward = [row.index(backward) for row in drawn]
    assert first_backward == sorted(first_backward, reverse=True)  # the first backward moves up the pipeline
    last_forward = [row.rindex(forward) for row in drawn]
    assert drawn[0][: first_backward[0]].strip(" ") == forward * 7  # 14 forwards of 1 s, of 2.1 s a column
    assert set(drawn[0][last_forward[0] + 1 :]) == {backward, " ", "|"}


def test_each_block_is_of_an_action_that_runs_in_its_column():
    trace = dense("zb-v")
    width = 120
    columns = width - len("rank 13 | ") - 1
    for row, spans in zip(rows(trace, width), trace.by_rank, strict=True):
        for column, block in enumerate(row[:-1]):
            start, end = (trace.makespan_s * edge / columns for edge in (column, column + 1))
            running = {BLOCK[own.action.kind] for own in spans if own.start_s < end and start < own.end_s}
            assert block in {*running, " "}


def test_collectives_are_blocks_in_a_line_below_their_rank():
    trace = dense(num_ranks=4, program=lambda own: add_gathers(add_reductions(own, 2)), reduce_s=(20, 20), unshard_s=8)
    lines = viz.text_timeline(trace, 70).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["rank", "comm"] * 4
    assert set(lines[1].partition("| ")[2]) == {"+", "=", " "}
    assert lines[1].index("+") == lines[0].index("|") + 2
    assert lines[1].rindex("=") > lines[0].rindex(BLOCK[Kind.B])
    assert lines[-1].endswith("▄ forward, █ backward, = gradient reduction, + weight gather, blank: idle")


def test_labels_are_used_again_where_they_fit():
    trace = dense(num_ranks=4, num_microbatches=32)
    assert BLOCK[Kind.B] in viz.text_timeline(trace, 100)
    assert "B31-" in viz.text_timeline(trace, 330)
    regular = viz.text_timeline(trace, 120).splitlines()  # 105 units of 1 s, of one column each
    assert regular[3].startswith("rank 3 | ...FB0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB-FB-FB-")
    assert regular[-1].endswith("a column is 1 s")


def test_a_few_short_actions_do_not_take_the_labels_of_the_others():
    times = {"forward_s": 1.003, "input_grad_s": 1.017, "weight_grad_s": 0.011}
    text = viz.text_timeline(dense("zb-h1", 2, 4, **times), 80)
    assert "F3--" in text
    assert BLOCK[Kind.F] not in text


def test_an_overlapping_pair_counts_half_for_each_action():
    trace = dense("dualpipe-v", 4, 32, forward_s=1.1, input_grad_s=1.3, weight_grad_s=1.7)
    columns = 60 - len("rank 0 | ") - 1
    for row, spans in zip(rows(trace, 60), trace.by_rank, strict=True):
        busy = {own.start_s: own.end_s for own in spans}
        idle = 1 - sum(end - start for start, end in busy.items()) / trace.makespan_s
        assert row.count(" ") == pytest.approx(idle * columns, abs=1.5)


def test_an_encoding_without_blocks_gets_the_letters_of_the_kinds():
    text = viz.text_timeline(dense("zb-v"), 100)
    plain = encodable(text, "latin-1")
    assert plain.isascii()
    assert plain.splitlines()[0].startswith("rank 0  | FFF")
    assert plain.endswith("F forward, I input gradients, W weight gradients, blank: idle")
    assert [len(line) for line in plain.splitlines()[:14]] == [len(line) for line in text.splitlines()[:14]]
    assert encodable(text, "utf-8") == text
    assert encodable("1 → 2 ms of layer é", "ascii") == "1 -> 2 ms of layer ?"


def test_kinds_that_are_drawn_together_have_blocks_of_their_own():
    known = {Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.REDUCE, Kind.UNSHARD}
    assert len({BLOCK[kind] for kind in known}) == len(known)
    assert {len(kind.row.block) for kind in Kind if kind.row.lane is not Lane.COPY} == {1}
