"""What one host thread has waited for is known to the thread that comes after it, and to no other thread."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.simulated.violations import ViolationKind

DEVICE = "sim:0"


class Copied:
    """Pinned memory that a copy writes. Reading it is right only in a thread that knows the event."""

    def __init__(self):
        self.host = torch.empty(4, pin_memory=True)
        self.host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        self.event = torch.Event(DEVICE)
        self.event.record()


def in_threads(*parts):
    """Run each function in a thread of its own. The threads start before anything was waited for."""
    threads = [threading.Thread(target=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def passed_by_queue(kind):
    def hand_over(waits, reads):
        line = kind()
        in_threads(lambda: (waits(), line.put(1)), lambda: (line.get(), reads()))

    return hand_over


def passed_by_event(waits, reads):
    event = threading.Event()
    in_threads(lambda: (waits(), event.set()), lambda: (event.wait(30), reads()))


def passed_by_condition(waits, reads):
    condition, done = threading.Condition(), []

    def give():
        waits()
        with condition:
            done.append(1)
            condition.notify_all()

    def take():
        with condition:
            condition.wait_for(lambda: done, 30)
        reads()

    in_threads(take, give)


def passed_by_barrier(waits, reads):
    barrier = threading.Barrier(2, timeout=30)
    in_threads(lambda: (waits(), barrier.wait()), lambda: (barrier.wait(), reads()))


def passed_by_semaphore(waits, reads):
    done = threading.Semaphore(0)
    in_threads(lambda: (waits(), done.release()), lambda: (done.acquire(timeout=30), reads()))


def passed_by_future(waits, reads):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(waits).result()
    reads()


def passed_by_start(waits, reads):
    waits()
    in_threads(reads)


def passed_by_join(waits, reads):
    in_threads(waits)
    reads()


WAYS = {
    "SimpleQueue": passed_by_queue(queue.SimpleQueue),
    "Queue": passed_by_queue(queue.Queue),
    "LifoQueue": passed_by_queue(queue.LifoQueue),
    "Event": passed_by_event,
    "Condition": passed_by_condition,
    "Barrier": passed_by_barrier,
    "Semaphore": passed_by_semaphore,
    "Future": passed_by_future,
    "start": passed_by_start,
    "join": passed_by_join,
}


@pytest.mark.parametrize("hand_over", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("waits", [True, False])
def test_what_a_thread_waited_for_is_handed_over(sim, hand_over, waits):
    copied = Copied()
    hand_over(copied.event.synchronize if waits else lambda: None, copied.host.numpy)
    assert [violation.kind for violation in sim.judge.violations] == ([] if waits else [ViolationKind.HOST_READ])


def test_a_thread_that_got_nothing_knows_nothing(sim):
    copied, waited = Copied(), threading.Lock()
    waited.acquire()

    def waits():
        copied.event.synchronize()
        waited.release()  # orders the threads in fact, and hands nothing on

    def reads():
        waited.acquire()
        copied.host.numpy()

    in_threads(waits, reads)
    assert len(sim.judge.violations) == 1


def test_virtual_time_is_handed_over(sim):
    times = queue.SimpleQueue()

    def waits():
        torch.accelerator.synchronize(DEVICE)
        times.put(sim.judge.host_time_s(sim.backend.host_thread()))

    for _ in range(3):
        torch.ones(4, device=DEVICE)
    in_threads(waits)
    assert 0 < times.get() == sim.judge.host_time_s(sim.backend.host_thread())
