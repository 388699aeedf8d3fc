"""A rank's clock on a device, and values that leave a device for the host."""

import gc
import threading

import pytest
import torch
from torch import distributed

from pipesched.devices.collectives import pair_maker
from pipesched.devices.selection import as_device, default_devices
from pipesched.errors import DeviceCountError, ExecutionError
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.device_streams import AcceleratorStreams
from pipesched.runtime.process_collectives import ProcessCollectives
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.transport.connections import HostTransport
from pipesched.runtime.transport.host_copies import Courier
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.saving.host_buffers import HostBuffers

DEVICE = "sim:0"


def test_time_stamps_do_not_wait_for_earlier_work_of_the_device(sim):
    torch.ones(4096, 64, device=DEVICE) @ torch.ones(64, 4096, device=DEVICE)
    streams = AcceleratorStreams(torch.device(DEVICE))
    streams.begin()
    assert sim.judge.counts["host synchronisations"] == 0
    assert streams.reader(0.0)(streams.now()) == pytest.approx(streams._base_s, abs=1e-9)
    assert sim.judge.counts["host synchronisations"] == 2, "only who reads times waits"


def test_values_leave_once_they_are_there_in_their_order_and_the_rank_goes_on(sim):
    courier, left, at = Courier(torch.device(DEVICE)), [], threading.Event()
    for number in range(3):
        courier.give((torch.tensor(number, device=DEVICE) + 1, number), lambda value: left.append((at.wait(5), *value)))
    assert not left
    at.set()
    courier.drain()
    assert [(float(value), number) for _, value, number in left] == [(1, 0), (2, 1), (3, 2)]
    courier.give(None, raise_lost)
    courier.give("late", left.append)
    courier.drain()
    assert left[3:] == ["late"]
    (thread,) = courier._threads
    del courier
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert not sim.judge.violations


def raise_lost(value):
    raise ConnectionLostError("the connection ended")


def test_the_loss_of_a_mesh_leaves_by_courier(sim, tmp_path):
    """One rank alone, on a device."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)

    class Group:
        rank, size, get_group_store = staticmethod(lambda: 0), staticmethod(lambda: 1), staticmethod(lambda: store)

    grid = RankGrid.single(Group, device=torch.device(DEVICE), timeout_s=5)
    rank = ConnectedRank(Group, grid, transport=HostTransport())
    loss = ProcessCollectives(rank).loss(0, lambda: torch.tensor(2.5, device=DEVICE) * 2)
    assert float(loss) == 5
    (thread,) = rank._courier._threads
    rank.close()
    thread.join(5)
    assert not thread.is_alive()
    assert not sim.judge.violations


def test_the_memory_of_the_last_save_is_used_again(sim):
    weights = {name: torch.ones(2, device=device) for name, device in {"a": DEVICE, "b": "sim:1", "d": "cpu"}.items()}
    buffers = HostBuffers()
    first = dict(buffers.copied(weights))
    buffers.wait()
    weights["b"] = torch.ones(3, device="sim:1")
    second = buffers.copied(weights)
    assert second["a"] is first["a"]
    assert second["d"] is first["d"]
    assert second["b"].shape == (3,)
    buffers.wait()
    assert second["b"].tolist() == [1, 1, 1]
    assert not sim.judge.violations


def test_devices_are_the_machines_accelerators():
    assert as_device("sim:3") == torch.device("sim:3")
    with torch.accelerator.device_index(2):
        assert as_device("sim") == torch.device("sim:2")
    assert default_devices(2) == ["sim:0", "sim:1"]
    assert default_devices(99) == ["cpu"] * 99
    for other in ("sim:99", "cuda:0", "meta"):
        with pytest.raises(DeviceCountError, match=r"this machine's accelerators are: 8 of type 'sim'"):
            as_device(other)


def test_a_device_that_lacks_something_is_refused_by_name(monkeypatch):
    def missing(device=None):
        raise NotImplementedError

    monkeypatch.setattr(torch.get_device_module("sim"), "memory_allocated", missing)
    with pytest.raises(DeviceCountError, match=r"sim:5 has no figures of its memory in this build of torch"):
        as_device("sim:5")


def test_a_device_without_a_library_between_processes_is_refused(monkeypatch):
    with pytest.raises(ExecutionError, match=r"none is known for 'other' \(known: cuda"):
        pair_maker(type("Device", (), {"type": "other"}))
