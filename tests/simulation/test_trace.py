import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Program, Span, Trace, lower, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.actions import Lane
from tests.support.random_programs import costs_for, programs, quick


def trace_of(*spans, num_ranks=1, costs=None):
    """A trace of (action, rank, start, end), as a measurement would give it."""
    actions = [(Action.parse(text), rank, start, end) for text, rank, start, end in spans]
    return Trace(tuple(Span(a, rank, start, end, a.lane) for a, rank, start, end in actions), num_ranks, "mine", costs)


def one_rank(order, **sizes):
    """The predicted trace of one rank's order with one stage; every action takes one second."""
    microbatches = 1 + max(Action.parse(text).microbatch for text in order.split())
    return simulate(
        Program.parse(f"microbatches {microbatches}\nrank 0: {order}"), Costs.uniform(1, backward_s=1, **sizes)
    )


SIZES = {"activation_bytes": 100, "input_bytes": 10, "weight_grad_bytes": 1}


def test_times_of_a_measured_trace_count_from_its_first_computation():
    trace = trace_of(("0F0", 0, 10, 12), ("1F0", 1, 13, 16), ("1B0", 1, 16, 20), ("0B0", 0, 21, 24), num_ranks=2)
    assert trace.start_s == 10
    assert trace.makespan_s == 14
    assert trace.span_s == 14
    assert trace.busy_s == (5, 7)
    assert trace.busy_ratios == (5 / trace.makespan_s, 7 / trace.makespan_s)
    assert trace.bubble_ratio == 1 - 12 / 28


def test_the_span_is_the_longest_of_the_ranks_own():
    trace = trace_of(("0F0", 0, 0, 4), ("1F0", 1, 4, 9), num_ranks=2)
    assert (trace.makespan_s, trace.span_s) == (9, 5)


def test_transfers_count_for_no_time():
    compute = ("0F0", 0, 1, 2), ("0B0", 0, 4, 5)
    with_transfers = trace_of(*compute, ("0SEND_F0>1", 0, 2, 9), ("0RECV_B0<1", 0, 0, 4))
    without = trace_of(*compute)
    assert with_transfers.makespan_s == without.makespan_s == 4
    assert with_transfers.busy_s == without.busy_s == (2,)
    assert with_transfers.by_rank == without.by_rank
    assert {span.lane for span in with_transfers.spans} == {Lane.COMPUTE, Lane.COPY}


def test_by_rank_is_in_time_order():
    trace = trace_of(("0B0", 0, 5, 6), ("0F0", 0, 1, 2), ("1F0", 1, 3, 4), num_ranks=3)
    assert [[str(span.action) for span in row] for row in trace.by_rank] == [["0F0", "0B0"], ["1F0"], []]


def test_an_empty_trace_takes_no_time():
    trace = trace_of(num_ranks=2)
    assert (trace.makespan_s, trace.span_s, trace.bubble_ratio) == (0, 0, 0)
    assert trace.busy_s == trace.busy_ratios == trace.peak_in_flight == trace.peak_bytes == (0, 0)


@pytest.mark.parametrize(
    ("order", "peak"),
    [
        ("0F0 0F1 0B0 0B1", 200),
        ("0F0 0B0 0F1 0B1", 100),
        ("0F0 0F1 0R0 0B0 0R1 0B1", 120),  # two inputs, then the activations of one
        ("0F0 0F1 0B1 0R0 0B0", 110),  # only micro-batch 0 is checkpointed
        ("0F0 0F1 0R0 0R1 0B0 0B1", 210),
        ("0F0 0I0 0W0 0F1 0I1 0W1", 101),  # while I runs, both its activations and what W needs
        ("0F0 0I0 0F1 0I1 0W0 0W1", 102),
        ("0F0 0F1 0I0 0I1 0W0 0W1", 201),
        ("0F0 0F1 0R0 0I0 0W0 0R1 0I1 0W1", 120),
    ],
)
def test_peak_bytes_of_whole_split_and_checkpointed_backwards(order, peak):
    assert one_rank(order, **SIZES).peak_bytes == (peak,)


def test_memory_over_time_of_a_split_backward():
    steps = list(one_rank("0F0 0F1 0I0 0W0 0I1 0W1", **SIZES).memory(0))
    assert steps == [(0, 100), (1, 200), (2, 201), (3, 101), (4, 100), (4, 101), (5, 1), (6, 0)]


def test_memory_over_time_of_a_checkpointed_forward():
    steps = list(one_rank("0F0 0F1 0B1 0R0 0B0", **SIZES).memory(0))
    assert steps == [(0, 10), (1, 110), (3, 10), (3, 110), (4, 100), (5, 0)]


def test_bytes_are_those_of_each_ranks_own_stages():
    costs = Costs((1, 1), (1, 1), (1, 1), activation_bytes=(100, 7))
    assert simulate(schedules.get("gpipe").program(2, 3), costs).peak_bytes == (300, 21)
    assert simulate(schedules.get("1f1b").program(2, 3), costs).peak_bytes == (200, 7)


def test_without_costs_a_trace_knows_pairs_but_no_bytes():
    trace = trace_of(("0F0", 0, 0, 1), ("0F1", 0, 1, 2), ("0B0", 0, 2, 3), ("0B1", 0, 3, 4))
    assert trace.peak_in_flight == (2,)
    assert trace.peak_bytes == (0,)


def test_without_a_backward_activations_are_held_only_while_their_forward_runs():
    trace = simulate(Program.parse("microbatches 2\nforward-only\nrank 0: 0F0 0F1"), Costs.uniform(1, **SIZES))
    assert trace.peak_in_flight == (1,)
    assert trace.peak_bytes == (100,)
    assert list(trace.memory(0)) == [(0, 100), (1, 0), (1, 100), (2, 0)]


@quick
@given(st.data())
def test_memory_returns_to_nothing_and_one_byte_a_pair_counts_the_pairs(data):
    program = data.draw(programs())
    trace = simulate(program, Costs.uniform(program.num_stages, activation_bytes=1))
    for rank, row in enumerate(trace.by_rank):
        assert [held for _, held in trace.memory(rank)][-1:] == ([0] if row else [])
    if not any(span.action.kind is Kind.W for span in trace.spans):
        assert trace.peak_bytes == trace.peak_in_flight


@quick
@given(st.data())
def test_from_dict_is_the_inverse_of_to_dict_also_through_json(data):
    program = data.draw(programs())
    trace = simulate(lower(program), data.draw(costs_for(program)))
    assert Trace.from_dict(trace.to_dict()) == trace
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_a_measured_trace_without_costs_keeps_its_dict_form():
    trace = trace_of(("0F0", 0, 0.25, 1.5), ("1RECV_F0<0", 1, 0.5, 2.0), num_ranks=2)
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_chrome_events_are_one_a_span_in_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    trace = trace_of(("0F0", 0, 10, 12), ("0SEND_F0>1", 0, 12, 12.5), ("1F0", 1, 12.5, 15), num_ranks=2)
    trace.to_chrome(path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [{key: event[key] for key in ("name", "cat", "pid", "ts", "dur")} for event in events if event["ph"] == "X"]
    assert spans == [
        {"name": "0F0", "cat": "F", "pid": 0, "ts": 0, "dur": 2e6},
        {"name": "0SEND_F0>1", "cat": "SEND_F", "pid": 0, "ts": 2e6, "dur": 0.5e6},
        {"name": "1F0", "cat": "F", "pid": 1, "ts": 2.5e6, "dur": 2.5e6},
    ]


def test_chrome_names_each_rank_and_gives_each_lane_its_row(tmp_path):
    trace = simulate(lower(schedules.get("1f1b").program(3, 4)), Costs.uniform(3, transfer_s=1))
    trace.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert ranks == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(rows.values()) == ["compute"] * 3 + ["copy"] * 3
    drawn = [(e["name"], rows[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"]
    assert sorted(drawn) == sorted((str(span.action), str(span.lane)) for span in trace.spans)
    assert all(
        e["args"] == {"stage": int(e["name"][0]), "microbatch": e["args"]["microbatch"]}
        for e in events
        if e["ph"] == "X"
    )


def test_a_trace_of_pairs_that_overlap_comes_back_from_json():
    trace = simulate(schedules.get("dualpipe-v").program(2, 6), Costs.uniform(4))
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


@pytest.mark.parametrize(
    "values", [{}, {"num_ranks": 1, "spans": [["0F0", 0, 1]]}, {"num_ranks": 1, "spans": [1]}, None]
)
def test_a_dict_that_is_no_trace_is_refused(values):
    with pytest.raises(ScheduleError, match="a trace must have num_ranks, and spans of the form"):
        Trace.from_dict(values)
