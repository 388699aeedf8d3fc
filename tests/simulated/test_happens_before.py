"""The judge of the simulated accelerator, without torch: against brute force, and by the allocator's rules."""

from random import Random

import pytest

from tests.simulated.device_time import DeviceCosts
from tests.simulated.happens_before import HappensBefore, stream_key
from tests.simulated.lanes import Stream
from tests.simulated.reachability import BruteForce
from tests.simulated.violations import ViolationKind

STREAMS = [stream_key(0, 0), stream_key(0, 1), stream_key(1, 0), stream_key(1, 7)]
THREADS, BLOCKS, EVENTS, PINNED = range(3), range(5), range(3), 5
MINE, OTHER, THIRD = STREAMS[:3]

KINDS = (
    *["launch"] * 4,
    *["record", "wait", "wait", "synchronize event", "synchronize stream", "hand over"],
    *["allocate again", "allocate again", "record_stream", "host access"],
)


def drawn(random):
    """A step of a random program."""
    what, thread, event = random.choice(KINDS), random.choice(THREADS), random.choice(EVENTS)
    stream, block = random.choice(STREAMS), random.choice(BLOCKS)
    reads, writes = (set(random.sample([*BLOCKS, PINNED], random.choice((0, 1, 1, 2)))) for _ in range(2))
    rest = {
        "launch": (stream, reads, writes),
        "record": (event, stream),
        "wait": (event, stream),
        "synchronize event": (event,),
        "synchronize stream": (stream,),
        "hand over": (random.choice(THREADS),),
        "allocate again": (block, stream),
        "record_stream": (block, stream),
        "host access": (random.random() < 0.5,),
    }
    return what, thread, *rest[what]


class Program:
    """Gives each step to the judge and to the brute force. A step's place in the program names it in both."""

    def __init__(self, width):
        self.log = []
        self.judge = HappensBefore(self._take, width=width)
        self.brute = BruteForce()
        self.ids = {}
        self.next_id = 1
        for block in BLOCKS:
            self.allocate(0, block, STREAMS[block % len(STREAMS)])
        self.log.append(("pinned", 0, 1000, 8, 0))
        self.ids[PINNED] = 1000
        self.brute.allocate(0, PINNED, None)

    def _take(self):
        taken, self.log = self.log, []
        return taken

    def allocate(self, thread, block, stream):
        self.ids[block], self.next_id = self.next_id, self.next_id + 1
        self.log.append(("allocated", thread, self.ids[block], stream, 8))
        self.brute.allocate(thread, block, stream)

    def run(self, place, what, thread, *rest):
        judge, brute, ids = self.judge, self.brute, self.ids
        match what, *rest:
            case "launch", stream, reads, writes:
                given = [[ids[block] for block in blocks] for blocks in (reads, writes)]
                judge.launch(thread, stream, "operation", *given, place=place)
                brute.launch(place, thread, stream, reads, writes)
            case "record", event, stream:
                self.log.append(("recorded", thread, event, stream, 0))
                brute.record(place, thread, event, stream)
            case "wait", event, stream:
                self.log.append(("waited", thread, event, stream, 0))
                brute.wait(place, thread, event, stream)
            case "synchronize event", event:
                judge.event_synchronized(thread, event)
                brute.synchronize_event(place, thread, event)
            case "synchronize stream", stream:
                judge.stream_synchronized(thread, stream)
                brute.synchronize_stream(place, thread, stream)
            case "hand over", taker:
                judge.take_over(taker, judge.hand_over(thread))
                brute.hand_over(place, thread, taker)
            case "allocate again", block, stream:
                self.log.append(("freed", thread, ids[block], place, 0))
                brute.free(thread, block)
                self.allocate(thread, block, stream)
            case "record_stream", block, stream:
                self.log.append(("recorded on", thread, ids[block], stream, 0))
                brute.record_stream(block, stream)
            case "host access", writes:
                judge.host_access(thread, "read", [] if writes else [ids[PINNED]], [ids[PINNED]] * writes, place)
                brute.host_access(place, thread, PINNED, writes)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("seed", range(100))
def test_the_judge_finds_what_brute_force_finds(seed):
    """Also with vectors that have to grow. A program that hypothesis shrinks takes minutes, so seeds draw them."""
    random, width = Random(seed), 1 + seed % 4
    program = Program(width)
    for place in range(80):
        program.run(place, *drawn(random))
        for thread in THREADS:
            for event in EVENTS:
                assert program.judge.event_done(thread, event) == program.brute.knows(thread, event)
    found = {(each.kind, each.earlier.frames[0][1], each.later.frames[0][1]) for each in program.judge.violations}
    assert found == program.brute.found


def test_vectors_that_learn_from_each_other_stay_short():
    one, other = Stream(0, (0, 0), 1), Stream(4, (1, 0), 3)
    for _ in range(10):
        one.learn(other.stamp())
        other.learn(one.stamp())
    assert len(one.known) == len(other.known) == 8


# ---- the allocator's rules, one by one ----
class Memory:
    """A block that stream MINE allocated and wrote, and that stream OTHER reads, in order."""

    def __init__(self):
        self.log = [("allocated", 0, 1, MINE, 8)]
        self.judge = HappensBefore(lambda: [self.log.pop(0) for _ in range(len(self.log))])
        self.launch(MINE, writes=[1])
        self.order(MINE, OTHER)
        self.launch(OTHER, reads=[1])

    def launch(self, stream, reads=(), writes=(), thread=0):
        self.judge.launch(thread, stream, "operation", [*reads], [*writes])

    def order(self, earlier, later):
        self.log += [("recorded", 0, 9, earlier, 0), ("waited", 0, 9, later, 0)]

    def freed_and_used_again(self, stream=MINE, thread=0):
        self.log += [("freed", thread, 1, 0, 0), ("allocated", 0, 2, MINE, 8)]
        self.launch(stream, writes=[2])
        return [violation.kind for violation in self.judge.violations]


def test_memory_freed_while_another_stream_reads_it_is_found():
    assert Memory().freed_and_used_again() == [ViolationKind.FREED]


def test_record_stream_makes_the_free_safe():
    memory = Memory()
    memory.log.append(("recorded on", 0, 1, OTHER, 0))
    assert not memory.freed_and_used_again()


def test_record_stream_of_a_third_stream_helps_if_that_stream_waits_for_the_reader():
    memory = Memory()
    memory.log.append(("recorded on", 0, 1, THIRD, 0))
    assert memory.freed_and_used_again() == [ViolationKind.FREED]
    memory = Memory()
    memory.log.append(("recorded on", 0, 1, THIRD, 0))
    memory.order(OTHER, THIRD)
    assert not memory.freed_and_used_again()


def test_the_allocating_stream_may_wait_before_the_free_or_after_it():
    memory = Memory()
    memory.order(OTHER, MINE)
    assert not memory.freed_and_used_again()
    memory = Memory()
    memory.log.append(("freed", 0, 1, 0, 0))
    memory.order(OTHER, MINE)
    memory.log.append(("allocated", 0, 2, MINE, 8))
    memory.launch(MINE, writes=[2])
    assert not memory.judge.violations


def test_memory_that_another_stream_allocates_is_not_the_freed_memory():
    memory = Memory()
    memory.log += [("freed", 0, 1, 0, 0), ("allocated", 0, 2, OTHER, 8)]
    memory.launch(OTHER, writes=[2])
    assert not memory.judge.violations


def test_the_host_may_wait_for_the_reader_before_it_frees():
    memory = Memory()
    memory.judge.stream_synchronized(0, OTHER)
    assert not memory.freed_and_used_again()


def test_another_thread_that_waited_does_not_help_until_it_hands_over():
    memory = Memory()
    memory.judge.stream_synchronized(5, OTHER)
    assert memory.freed_and_used_again() == [ViolationKind.FREED]
    memory = Memory()
    memory.judge.stream_synchronized(5, OTHER)
    memory.judge.take_over(0, memory.judge.hand_over(5))
    assert not memory.freed_and_used_again()


def test_forget_begins_anew_and_keeps_memory():
    memory = Memory()
    memory.launch(THIRD, reads=[1])
    assert memory.judge.violations
    memory.judge.forget()
    memory.launch(THIRD, reads=[1])
    assert not memory.judge.violations
    memory.launch(OTHER, writes=[1])
    assert [violation.kind for violation in memory.judge.violations] == [ViolationKind.OVERWRITTEN]


def test_a_thread_that_used_the_memory_and_waited_may_leave_the_free_to_another_thread():
    for waits in (False, True):
        memory = Memory()
        memory.launch(OTHER, reads=[1], thread=5)
        if waits:
            memory.judge.stream_synchronized(5, OTHER)
        assert bool(memory.freed_and_used_again()) == (not waits)


# ---- what a violation says ----
def test_a_violation_names_both_operations_their_places_and_labels():
    frames = {3: [("/a/b/model.py", 30)], 4: [("/a/b/loss.py", 40)]}
    log = [("allocated", 1, 1, MINE, 8)]
    judge = HappensBefore(lambda: [log.pop() for _ in range(len(log))], frames.get, lambda thread: f"rank {thread}")
    judge.works_on(1, "1F0")
    judge.launch(1, MINE, "aten::mul", [], [1], place=3)
    judge.works_on(1, "1B0")
    judge.launch(2, THIRD, "aten::add", [1], [], place=4)
    (violation,) = judge.violations
    assert str(violation) == (
        "read before write: aten::add on sim:1 default stream (rank 2) at [b/loss.py:40] does not wait for "
        "aten::mul on sim:0 default stream (rank 1, in 1F0) at [b/model.py:30]; both use 8 bytes; "
        "make sim:1 default stream wait for an event that is recorded after aten::mul"
    )


# ---- copies and device time ----
COSTS = DeviceCosts(seconds_of={"operation": 4.0}, link_s=1.0, link_bytes_per_s=2.0, host_link_bytes_per_s=1.0)


def timed():
    log = []
    judge = HappensBefore(lambda: [log.pop(0) for _ in range(len(log))], costs=COSTS)
    judge.spans = []
    return judge, log


def spans(judge):
    return [(span.start_s, span.end_s) for span in judge.spans]


def test_operations_of_one_stream_follow_each_other_and_streams_overlap():
    judge, _ = timed()
    judge.launch(0, MINE, "operation", [], [])
    judge.launch(0, OTHER, "operation", [], [])
    judge.launch(0, MINE, "operation", [], [])
    assert spans(judge) == [(0, 4), (0, 4), (4, 8)]


def test_a_copy_between_devices_runs_beside_computation_and_holds_up_the_stream_that_waits():
    judge, log = timed()
    judge.launch(0, MINE, "operation", [], [])
    log += [("recorded", 0, 1, MINE, 0), ("waited", 0, 1, OTHER, 0)]
    judge.copied(0, OTHER, THIRD, 1, 2, True, nbytes=6)
    judge.launch(0, MINE, "operation", [], [])
    judge.launch(0, THIRD, "operation", [], [])
    assert spans(judge) == [(0, 4), (4, 8), (4, 8), (8, 12)]


def test_a_blocking_copy_holds_up_the_host_and_a_pinned_one_does_not():
    for non_blocking, host_s in ((False, 4), (True, 0)):
        judge, log = timed()
        log.append(("pinned", 0, 1, 3, 0))
        judge.copied(0, None, MINE, 1, 2, non_blocking, nbytes=3)
        assert judge.host_time_s(0) == host_s
        assert judge.counts["host synchronisations"] == (not non_blocking)


def test_a_copy_to_pageable_memory_is_a_hidden_synchronisation():
    judge, _ = timed()
    judge.copied(0, MINE, None, 1, 0, True, nbytes=3)
    assert judge.counts["hidden synchronisations"] == 1
    assert judge.host_time_s(0) == 4


def test_events_measure_virtual_milliseconds():
    judge, log = timed()
    log.append(("recorded", 0, 1, MINE, 0))
    judge.launch(0, MINE, "operation", [], [])
    log.append(("recorded", 0, 2, MINE, 0))
    assert judge.elapsed_ms(1, 2) == pytest.approx(4000)


def test_a_thread_passes_its_virtual_time_on():
    judge, _ = timed()
    judge.launch(0, MINE, "operation", [], [])
    judge.stream_synchronized(0, MINE)
    judge.take_over(1, judge.hand_over(0))
    judge.launch(1, THIRD, "operation", [], [])
    assert spans(judge) == [(0, 4), (4, 8)]


def test_launches_may_cost_the_host_time():
    judge, _ = timed()
    judge.costs = DeviceCosts(seconds_of={"operation": 1.0}, launch_s=3.0)
    for _ in range(2):
        judge.launch(0, MINE, "operation", [], [])
    assert spans(judge) == [(0, 1), (3, 4)]


def test_an_operation_takes_the_longer_time_of_its_bytes_and_its_flops():
    costs = DeviceCosts(kernel_s=1.0, bytes_per_s=10.0, flops_per_s=100.0)
    assert costs.operation_s("aten::mm", nbytes=20, flops=50) == 3.0
    assert costs.operation_s("aten::mm", nbytes=20, flops=500) == 6.0
