"""The collective lane: a stream and a thread of their own, and memory that they share with the rank's stream."""

import threading
from dataclasses import replace

import pytest
import torch

from pipesched.devices.streams import new_stream, on_stream
from pipesched.runtime.reductions.collective_lane import CollectiveLane
from tests.simulated import replica_jobs
from tests.simulated.rank_devices import judged

OWN, OTHER = "sim:1", "sim:2"


def test_the_stream_of_the_lanes_device_waits_while_another_device_is_current(sim):
    lane = CollectiveLane(torch.device(OWN))
    with torch.accelerator.device_index(torch.device(OTHER).index):
        values = torch.ones(8, device=OWN)
        job = lane.start(lambda: values.mul_(2))
        job.wait(lambda: None)
        assert (values + 1).tolist() == [3.0] * 8
    lane.close()
    assert not sim.judge.violations


def test_the_times_of_a_job_are_those_of_the_lanes_stream(sim):
    """The job starts when the tensors are ready, and ends before the work that the rank launched meanwhile."""
    sim.judge.costs = replace(sim.judge.costs, seconds_of={"aten::sin_": 1.0, "aten::cos_": 10.0}, kernel_s=0.0)
    lane = CollectiveLane(torch.device(OWN))
    compute = new_stream(torch.device(OWN))
    with on_stream(compute):
        base = torch.Event(OWN, enable_timing=True)
        base.record(compute)
        values, others = torch.ones(8, device=OWN), torch.ones(8, device=OWN)
        values.cos_()
        gate = threading.Event()
        lane.start(gate.wait)
        job = lane.start(values.sin_)
        others.cos_()
        gate.set()
        job.wait(lambda: None)
        torch.accelerator.synchronize(OWN)
        start, end = (base.elapsed_time(event) / 1e3 for event in job.span)
    lane.close()
    assert (start, end) == (pytest.approx(10), pytest.approx(11))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", replica_jobs.__all__)
def test_memory_is_not_used_again_before_the_lane_and_the_rank_have_used_it(ranks, name):
    """Also after a failed step, which waits for no sum."""
    for judgement in ranks.run(4, judged, getattr(replica_jobs, name)):
        assert judgement.result is None, judgement.result
        assert judgement.num_transfers or name == "weights_are_put_away"
        assert not judgement.violations, judgement.violations[0]
