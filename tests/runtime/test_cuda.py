"""One rank a process on CUDA devices, over NCCL; without any, the same jobs on CPUs over stand-ins."""

import pytest
import torch

from pipesched import schedules
from tests.support.jobs import cuda as jobs
from tests.support.jobs import devices
from tests.support.models import EXACT
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(300)
needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL between ranks")
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices: NCCL between ranks")


def test_the_jobs_run_on_cpus(ranks: Ranks) -> None:
    ranks.run(2, devices.over_links, jobs.round_trips, "cpu", 3)
    ranks.run(2, devices.over_links, jobs.train, "cpu", ["1f1b", "zb-v"], "always")
    ranks.run(1, devices.over_links, jobs.train, "cpu", ["1f1b"], "never")


@needs_one
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_a_mesh_of_one_gpu(ranks: Ranks, name: str) -> None:
    ranks.run(1, jobs.train, "cuda", [name], "never", timeout_s=120)


@needs_two
@pytest.mark.parametrize("seed", range(8))
def test_any_value_crosses_between_gpus(ranks: Ranks, seed: int) -> None:
    ranks.run(2, jobs.round_trips, "cuda", seed, timeout_s=120)


@needs_two
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_training_over_two_gpus_equals_the_loop_bit_by_bit(ranks: Ranks, checkpoint: str) -> None:
    names = [name for name in EXACT if 2 * schedules.get(name).chunks_per_rank <= 11]
    ranks.run(2, jobs.train, "cuda", names, checkpoint, timeout_s=240)


@needs_four
def test_training_over_four_gpus_equals_the_loop_bit_by_bit(ranks: Ranks) -> None:
    ranks.run(4, jobs.train, "cuda", ["1f1b", "zb-v", "interleaved-1f1b"], "never", timeout_s=240)
