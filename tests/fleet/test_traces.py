"""Traces of fleets: files, errors, and generated families."""

import pytest

from pipesched.errors import InputError
from pipesched.fleet import FAMILIES, FleetEvent, FleetTrace, generate, read_trace

TEXT = "# two outages\ntime_s,rank,event\n10,3,down\n10,1,down\n\n20.5,3,up\n"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "trace.csv"
        path.write_text(text)
        return path

    return write


def test_a_file_is_read(file):
    trace = read_trace(file(TEXT))
    assert trace.events == (FleetEvent(10, 3, False), FleetEvent(10, 1, False), FleetEvent(20.5, 3, True))
    assert (trace.num_ranks, trace.duration_s, trace.name) == (4, 20.5, "trace")
    assert trace.num_alive == ((0, 4), (10, 2), (20.5, 3))
    assert [(change.lost, change.back) for change in trace.changes] == [({1, 3}, set()), (set(), {3})]
    assert read_trace(file(TEXT), num_ranks=8, duration_s=100).between_losses_s == 100


def test_a_rank_that_is_lost_and_back_in_the_same_moment_has_lost_its_memory(file):
    (change,) = read_trace(file("time_s,rank,event\n10,0,down\n10,0,up\n")).changes
    assert (change.lost, change.back) == ({0}, {0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,rank,event\n", "line 1 has 'time,rank,event'; make time_s,rank,event the first line"),
        ("", "line 1 has ''; make"),
        ("time_s,rank,event\n5,0,gone\n", "line 2 has '5,0,gone'; write it like 360,12,down"),
        ("time_s,rank,event\n5,0\n", "line 2 has '5,0'; write it like"),
        ("time_s,rank,event\nsoon,0,down\n", "line 2 has 'soon,0,down'; write it like"),
        ("time_s,rank,event\n5,-1,down\n", "line 2 has rank -1; correct the rank"),
        ("time_s,rank,event\n5,9,down\n", "are 0 to 3; .*line 2 has rank 9; correct the rank, or pass a larger"),
        ("time_s,rank,event\n5,0,down\n# x\n4,1,down\n", "line 4 has 4.0 s after 5 s; sort the events by time"),
        ("time_s,rank,event\nnan,0,down\n", "line 2 has nan s after 0 s; sort"),
        ("time_s,rank,event\n5,0,up\n", "line 2 has up for rank 0, which is alive; remove the event"),
        ("time_s,rank,event\n5,0,down\n6,0,down\n", "line 3 has down for rank 0, which is lost; remove the event"),
    ],
)
def test_an_error_names_the_line_and_the_remedy(file, text, message):
    with pytest.raises(InputError, match=message):
        read_trace(file(text), num_ranks=4)


def test_a_missing_file_and_a_trace_without_an_end_are_errors(file, tmp_path):
    with pytest.raises(InputError, match=r"none\.csv cannot be read .*; correct the path"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="has no events; pass num_ranks= and duration_s="):
        read_trace(file("time_s,rank,event\n"))
    with pytest.raises(InputError, match=r"the last event is at 20\.5 s, and duration_s is 20; pass a later time"):
        read_trace(file(TEXT), duration_s=20)
    assert read_trace(file("time_s,rank,event\n"), num_ranks=2, duration_s=9).changes == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same_each_time_and_survives_a_file(family, tmp_path):
    trace = generate(family, num_ranks=64, seed=1)
    assert trace == generate(family, num_ranks=64, seed=1)
    assert trace.events != generate(family, num_ranks=64, seed=2).events
    trace.save(tmp_path / "trace.csv", comment=f"generated: {trace.name}")
    again = read_trace(tmp_path / "trace.csv", num_ranks=64, duration_s=trace.duration_s)
    assert again.events == trace.events


def test_families_lose_what_they_say():
    def fewest(family):
        return min(count for _, count in generate(family, num_ranks=64).num_alive)

    assert {len(change.lost) for change in generate("hosts").changes if change.lost} == {8}
    assert fewest("decline") == fewest("waves") == 32
    assert all(event.is_up is False for event in generate("decline").events)
    assert len({event.rank for event in generate("flapping").events}) == 2
    assert {len(change.lost) for change in generate("single").changes if change.lost} == {1}
    assert 1 < max(len(change.lost) for change in generate("spot").changes) <= 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"family": "storm"}, "one of single, hosts, .*; got 'storm'; choose"),
        ({"num_ranks": 0}, "num_ranks must be .*; got 0; pass 1 or more"),
        ({"seed": -1}, "seed must be .*; got -1; pass 0 or more"),
        ({"duration_s": 0}, "duration_s is 0; pass a later time"),
    ],
)
def test_wrong_arguments_of_a_family_are_errors(given, message):
    with pytest.raises(InputError, match=message):
        generate(**({"family": "spot"} | given))


def test_a_trace_checks_its_events():
    with pytest.raises(InputError, match="event 1 has rank 2; correct"):
        FleetTrace(num_ranks=2, duration_s=9, events=[FleetEvent(1, 0, False), FleetEvent(2, 2, False)])
