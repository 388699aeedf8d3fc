"""The library that connects simulated devices: threads stand for processes, each with a device of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from pipesched.devices.collectives import pair_maker
from tests.simulated.collectives import CollectiveError, SimulatedGroup, register
from tests.simulated.happens_before import stream_key
from tests.simulated.violations import ViolationKind


def options(kind, *, asynchronous=False, **fields):
    made = kind()
    for name, value in {"asyncOp": asynchronous, **fields}.items():
        setattr(made, name, value)
    return made


def over_threads(run, size=2, timeout_s=20.0):
    """Run `run(group, device)` in a thread for each rank; return the results or the errors."""
    store = distributed.HashStore()

    def rank(index):
        try:
            return run(SimulatedGroup(store, index, size, timeout_s), f"sim:{index}")
        except CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def kinds(sim):
    sim.judge.read()
    return [violation.kind for violation in sim.judge.violations]


def numbered(device, count=3):
    """The index of the device, in a tensor on it."""
    return torch.full((count,), float(torch.device(device).index), device=device)


def test_collectives_give_the_results_of_their_definitions(sim):
    def run(group, device):
        own, size = numbered(device, 3), group.size()
        total, first, every = own.clone(), own.clone(), torch.empty(3 * size, device=device)
        exchanged, scattered = torch.empty(3, device=device), torch.empty(1, device=device)
        group.allreduce([total], options(c10d.AllreduceOptions))
        group.broadcast([first], options(c10d.BroadcastOptions, rootRank=2))
        group.all_gather_single(every, own, options(c10d.AllgatherOptions))
        group.all_to_all_single(
            exchanged, own * 10 + torch.arange(3, device=device), [], [], options(c10d.AllToAllOptions)
        )
        group.reduce_scatter_single(scattered, torch.arange(3.0, device=device), options(c10d.ReduceScatterOptions))
        return [one.tolist() for one in (total, first, every, exchanged, scattered)]

    for rank, (total, first, every, exchanged, scattered) in enumerate(over_threads(run, size=3)):
        assert total == [3.0] * 3
        assert first == [2.0] * 3
        assert every == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
        assert exchanged == [0.0 + rank, 10.0 + rank, 20.0 + rank]
        assert scattered == [3.0 * rank]
    assert not kinds(sim)


def test_messages_arrive_in_the_order_in_which_they_were_sent(sim):
    def run(group, device):
        if group.rank() == 0:
            works = [group.send([torch.full((2,), float(number), device=device)], 1, 0) for number in range(5)]
        else:
            memory = [torch.empty(2, device=device) for _ in range(5)]
            works = [group.recv([one], 0, 0) for one in memory]
        for work in works:
            work.wait()
        return None if group.rank() == 0 else [one[0].item() for one in memory]

    assert over_threads(run)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert not kinds(sim)


@pytest.mark.parametrize("waits", [True, False])
def test_the_receiver_must_wait_for_its_message(sim, waits):
    def run(group, device):
        tensor = numbered(device)
        work = group.send([tensor], 1, 0) if group.rank() == 0 else group.recv([tensor], 0, 0)
        if group.rank() and waits:
            work.wait()
        return tensor + 1

    over_threads(run)
    assert kinds(sim) == ([] if waits else [ViolationKind.READ])


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_being_sent_must_not_be_written(sim, waits):
    def run(group, device):
        tensor = numbered(device)
        work = group.send([tensor], 1, 0) if group.rank() == 0 else group.recv([tensor], 0, 0)
        if group.rank() or waits:
            work.wait()
        tensor += 1

    over_threads(run)
    assert kinds(sim) == ([] if waits else [ViolationKind.OVERWRITTEN])


def test_a_work_holds_its_tensors_until_a_stream_waits(sim):
    def run(group, device):
        tensor = numbered(device)
        block = sim.backend.block_of(tensor)
        work = group.allreduce([tensor], options(c10d.AllreduceOptions, asynchronous=True))
        del tensor
        other = numbered(device)
        assert block != sim.backend.block_of(other)
        work.wait()
        return torch.zeros(3, device=device)

    over_threads(run)
    assert not kinds(sim)


@pytest.mark.parametrize("records", [True, False])
def test_a_collective_without_async_op_runs_on_the_current_stream_and_holds_nothing(sim, records):
    """Memory of another stream that is freed afterwards needs record_stream."""

    def run(group, device):
        tensor = numbered(device)
        side = torch.Stream(device=device)
        side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            group.allreduce([tensor], options(c10d.AllreduceOptions))
        if records:
            tensor.record_stream(side)
        del tensor
        return numbered(device)

    over_threads(run)
    assert {*kinds(sim)} == (set() if records else {ViolationKind.FREED})


def test_two_sends_that_meet_are_reported(sim):
    """Both devices would wait forever for their send to be received."""

    def run(group, device):
        given, taken = numbered(device), numbered(device)
        other = 1 - group.rank()
        group.send([given], other, 0)
        group.recv([taken], other, 0).wait()

    for rank, text in enumerate(over_threads(run)):
        assert f"call 0 of rank {rank} is send of 12 bytes, but that of rank {1 - rank} is send of 12 bytes" in text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_other_calls_in_other_ranks_are_reported(sim, asynchronous):
    def run(group, device):
        given = numbered(device, 4 + group.rank())
        group.allreduce([given], options(c10d.AllreduceOptions, asynchronous=asynchronous))

    assert (
        "call 0 of rank 0 is all_reduce to the sum of 16 bytes, but that of rank 1 is all_reduce to the sum of 20"
        in (over_threads(run)[0])
    )


def test_a_send_that_nobody_receives_is_reported_within_the_time_limit(sim):
    def run(group, device):
        tensor = numbered(device)
        if group.rank() == 0:
            group.send([tensor], 1, 0)
            group.send([tensor], 1, 0).wait()
        else:
            group.recv([tensor], 0, 0)

    assert "rank 1 has not made its call 1; call 1 of rank 0 is send of 12 bytes" in over_threads(run, timeout_s=0.2)[0]


def test_the_first_call_waits_for_the_other_rank(sim):
    def run(group, device):
        if group.rank() == 0:
            group.send([numbered(device)], 1, 0)

    assert "rank 1 has not used this communicator" in over_threads(run, timeout_s=0.2)[0]


def test_an_abort_ends_the_waits_of_a_rank(sim):
    def run(group, device):
        if group.rank() == 0:
            group._pair(1)
            group.abort()
            group.send([numbered(device)], 1, 0)

    assert over_threads(run) == ["the communicator was aborted", None]


def test_a_send_is_complete_once_the_host_knows_a_later_time(sim):
    """Before, memory must not be used again, although its bytes have left."""
    sim.judge.costs = replace(sim.judge.costs, seconds_of={"aten::fill_": 1.0})
    received = threading.Event()

    def run(group, device):
        tensor = numbered(device)
        if group.rank():
            group.recv([tensor], 0, 0)
            received.set()
            return None
        work = group.send([tensor], 1, 0)
        received.wait()
        before = work.is_completed()
        side = torch.Stream(device=device)
        with side:
            for _ in range(10):
                torch.ones(3, device=device)
        side.synchronize()
        return before, work.is_completed()

    assert over_threads(run)[0] == (False, True)


def test_a_transfer_begins_when_both_streams_are_ready(sim):
    sim.judge.costs = replace(sim.judge.costs, seconds_of={"aten::sin": 1.0}, kernel_s=0.0, link_s=0.25)

    def run(group, device):
        tensor = torch.zeros(3, device=device)
        for _ in range(2 if group.rank() else 5):
            tensor = tensor.sin()
        works = []
        works.append(group.send([tensor], 1, 0) if group.rank() == 0 else group.recv([tensor], 0, 0))
        works.append(group.recv([tensor], 1, 0) if group.rank() == 0 else group.send([tensor.sin()], 0, 0))
        for work in works:
            work.wait()
        return sim.judge.ready_s(sim.backend.host_thread(), stream_key(torch.device(device).index, 0))

    here, there = over_threads(run)
    assert here == there == pytest.approx(5.5)


def test_the_store_keeps_no_contents(sim):
    counts = []

    def run(group, device):
        tensor, store = numbered(device), group.get_group_store()
        for step in range(6):
            group.allreduce([tensor], options(c10d.AllreduceOptions))
            work = group.send([tensor], 1, 0) if group.rank() == 0 else group.recv([tensor], 0, 0)
            work.wait()
            if step in (1, 5):
                counts.append(store.num_keys())

    over_threads(run)
    assert max(counts) <= 10


def test_pipesched_knows_how_to_connect_two_devices(sim):
    register()
    store = distributed.HashStore()

    def run(rank):
        device = torch.device(f"sim:{rank}")
        group = pair_maker(device)(store, rank, 5.0)
        tensor = numbered(device)
        (group.recv([tensor], 0, 0) if rank else group.send([tensor], 1, 0)).wait()
        return tensor.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, range(2))] == [[0.0] * 3] * 2
    assert not kinds(sim)
