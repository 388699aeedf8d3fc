"""Streams, events, pinned memory and device time, through torch's own interfaces."""

import threading

import pytest
import torch

from tests.simulated.device_time import DeviceCosts

DEVICE = "sim:0"


def test_torch_accelerator_reaches_the_devices():
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 8
    assert torch.get_device_module("sim") is torch.sim
    with torch.accelerator.device_index(2):
        assert torch.empty(1, device="sim").device == torch.device("sim:2")
        assert torch.accelerator.current_device_index() == 2
    assert torch.accelerator.current_device_index() == 0


def test_a_stream_is_entered_and_left_by_each_thread_for_itself():
    default = torch.accelerator.current_stream(DEVICE)
    stream, seen = torch.Stream(device=DEVICE), []
    with stream:
        assert torch.accelerator.current_stream(DEVICE) == stream
        assert torch.accelerator.current_stream("sim:1") != stream
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream(DEVICE)))
        thread.start()
        thread.join()
    assert torch.accelerator.current_stream(DEVICE) == default == torch.sim.default_stream(DEVICE) == seen[0]
    torch.accelerator.set_stream(stream)
    assert torch.sim.current_stream(DEVICE) == stream
    torch.accelerator.set_stream(default)


def test_an_event_is_done_once_the_host_has_waited():
    torch.ones(3, device=DEVICE)
    event = torch.Event(DEVICE)
    assert event.query()
    event.record()
    assert not event.query()
    torch.accelerator.synchronize(DEVICE)
    assert event.query()
    assert torch.accelerator.current_stream(DEVICE).query() is False


def test_events_measure_device_time_and_two_runs_measure_the_same(sim):
    sim.judge.costs = DeviceCosts(seconds_of={"aten::mm": 0.25}, launch_s=0.001)
    stream, measured = torch.Stream(device=DEVICE), []
    for _ in range(2):
        sim.judge.forget()
        x = torch.ones(3, 3, device=DEVICE)
        start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
        stream.wait_stream(torch.accelerator.current_stream(DEVICE))
        with stream:
            start.record()
            x @ x @ x
            end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end))
    sim.judge.costs = DeviceCosts()
    assert measured[0] == measured[1] == pytest.approx(500, abs=3)


def test_a_product_takes_the_time_of_its_flops(sim):
    sim.judge.costs = DeviceCosts(kernel_s=0.0, bytes_per_s=1e30, flops_per_s=1.0)
    sim.judge.spans = []
    x = torch.ones(4, 5, device=DEVICE)
    x @ torch.ones(5, 6, device=DEVICE)
    torch.nn.functional.conv2d(torch.ones(1, 2, 3, 3, device=DEVICE), torch.ones(4, 2, 3, 3, device=DEVICE))
    sim.judge.costs = DeviceCosts()
    took = {span.name: span.end_s - span.start_s for span in sim.judge.spans}
    assert took["aten::mm"] == 2 * 4 * 5 * 6
    assert took["aten::convolution"] == 2 * 4 * (2 * 3 * 3)


def test_a_copy_overlaps_the_computation_of_another_stream(sim):
    sim.judge.costs = DeviceCosts(seconds_of={"aten::mm": 1.0}, link_s=0.5)
    sim.judge.spans = []
    x = torch.ones(3, 3, device=DEVICE)
    copies = torch.Stream(device=DEVICE)
    copies.wait_stream(torch.accelerator.current_stream(DEVICE))
    x @ x
    with copies:
        x.to("sim:1", non_blocking=True)
    sim.judge.costs = DeviceCosts()
    product, copy = (next(span for span in sim.judge.spans if span.name == f"aten::{name}") for name in ("mm", "copy_"))
    assert copy.start_s < product.end_s
    assert copy.end_s < product.end_s


def test_pinned_memory_is_recognised():
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    assert not torch.ones(3, device=DEVICE).is_pinned()


def synchronisations(sim, call):
    call()
    sim.judge.read()
    sim.judge.counts.clear()
    call()
    sim.judge.read()
    return sim.judge.counts["host synchronisations"], sim.judge.counts["hidden synchronisations"]


def test_synchronisations_of_the_host_are_counted(sim):
    x, pinned = torch.ones(4, device=DEVICE), torch.empty(4, pin_memory=True)
    assert synchronisations(sim, lambda: x + 1) == (0, 0)
    assert synchronisations(sim, lambda: x.sum().item()) == (1, 0)
    assert synchronisations(sim, x.cpu) == (1, 0)
    assert synchronisations(sim, x.nonzero) == (1, 0)
    assert synchronisations(sim, lambda: x[x > 0]) == (1, 0)
    assert synchronisations(sim, lambda: x[torch.zeros(1, dtype=torch.long, device=DEVICE)]) == (0, 0)
    assert synchronisations(sim, lambda: torch.equal(x, x)) == (1, 0)
    assert synchronisations(sim, lambda: pinned.copy_(x, non_blocking=True)) == (0, 0)
    assert synchronisations(sim, lambda: pinned.to(DEVICE, non_blocking=True)) == (0, 0)
    assert synchronisations(sim, lambda: torch.ones(4).to(DEVICE, non_blocking=True)) == (0, 1)
    assert synchronisations(sim, lambda: torch.ones(4).to(DEVICE)) == (1, 0)
    assert synchronisations(sim, lambda: x.to("sim:1")) == (0, 0)
    assert synchronisations(sim, lambda: torch.accelerator.synchronize(DEVICE)) == (1, 0)


def test_a_synchronisation_has_a_place(sim):
    torch.ones(4, device=DEVICE).sum().item()
    (((what, thread, frames), count),) = sim.judge.synchronisations.items()
    assert (what, thread, count) == ("host: stream", "MainThread", 1)
    assert frames[0] == (__file__, test_a_synchronisation_has_a_place.__code__.co_firstlineno + 1)


def test_launches_allocations_events_and_waits_are_counted(sim):
    stream = torch.Stream(device=DEVICE)
    x = torch.ones(4, device=DEVICE)
    sim.judge.read()
    sim.judge.counts.clear()
    y = x.view(2, 2).T
    (x + 1).mul_(2)
    stream.wait_stream(torch.accelerator.current_stream(DEVICE))
    sim.judge.read()
    assert y.shape == (2, 2)
    assert dict(sim.judge.counts) == {"launches": 2, "allocations": 1, "events": 1, "waits": 1}
