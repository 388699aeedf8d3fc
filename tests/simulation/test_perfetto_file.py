"""Traces in Perfetto's format, read with the protos of the package perfetto."""

import pytest

from pipesched import Costs, schedules, simulate
from pipesched.errors import InputError
from pipesched.program.actions import Action
from pipesched.simulation.trace import Span, Trace

PerfettoTrace = pytest.importorskip("tests.support.perfetto_trace").PerfettoTrace

TIMES = {"forward_s": (1.0, 2.0, 1.0), "backward_s": (2.0, 3.0, 2.0), "transfer_s": 0.5}
HALVES = {"input_grad_s": (1.0, 1.5, 1.0), "weight_grad_s": (1.0, 1.5, 1.0)}
COSTS = Costs(**TIMES, **HALVES, activation_bytes=(8, 8, 8), input_bytes=(4, 4, 4))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_file_has_the_trace_its_counters_and_its_messages(name, tmp_path):
    trace = simulate(schedules.get(name).program(3, 4), COSTS)
    trace.to_perfetto(tmp_path / "step.pftrace")
    read = PerfettoTrace(tmp_path / "step.pftrace")
    spans = [(action, start, end) for slices in read.slices.values() for action, start, end in slices]
    assert sorted(spans) == sorted((str(s.action), round(s.start_s * 1e9), round(s.end_s * 1e9)) for s in trace.spans)
    assert read.bubble_ratio == pytest.approx(trace.bubble_ratio, abs=1e-9)
    for rank in range(3):
        assert max(value for _, value in read.counters[rank, "bytes held"]) == trace.peak_bytes[rank] > 0
        assert max(value for _, value in read.counters[rank, "pairs in flight"]) == trace.peak_in_flight[rank] > 0
    assert read.senders.keys() == read.receivers.keys()
    assert len(read.senders) == 2 * 2 * 4  # two edges, forward and backward, four micro-batches
    for number, (rank, action) in read.senders.items():
        sent, (other, received) = Action.parse(action), read.receivers[number]
        assert Action.parse(received).microbatch == sent.microbatch
        assert other - rank == (1 if str(sent.kind) == "F" else -1)


def test_messages_that_the_trace_has_are_drawn_also_where_they_skip_stages(tmp_path):
    actions = {0: ["0F0", "0SEND_F0>2"], 1: ["1F0"], 2: ["2RECV_F0<0", "2F0"]}
    spans = [
        Span(action, rank, at - 1, at, action.lane)  # times are relative: a receive can wait before the first action
        for rank, texts in actions.items()
        for at, action in enumerate(map(Action.parse, texts))
    ]
    Trace(spans, 3).to_perfetto(tmp_path / "step.pftrace")
    read = PerfettoTrace(tmp_path / "step.pftrace")
    assert read.senders == {1: (0, "0F0")}
    assert read.receivers == {1: (2, "2F0")}


def test_without_the_package_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(InputError, match=r"pip install 'pipesched\[perfetto\]', or use to_chrome"):
        Trace([], 1).to_perfetto(tmp_path / "step.pftrace")
