"""Pipelines of layers that are split in two and three dimensions."""

import pytest
import torch

from tests.support.jobs import tensor_grids as jobs
from tests.support.rank_processes import Ranks

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_grid_trains_as_one_process_with_the_same_bits_for_every_schedule(eight: Ranks, dtype: torch.dtype) -> None:
    due = jobs.looped(dtype)
    first = None
    for schedule in ("1f1b", "zb-h1"):
        results = eight.run(8, jobs.trained, (1, 2, 4), "2d", schedule, dtype, timeout_s=100)
        for one in results:
            assert one.losses == pytest.approx(due.losses, rel=LIMITS[dtype])
            assert one.norms == pytest.approx(due.norms, rel=LIMITS[dtype])
            assert (one.share > 0.01) == (schedule == "zb-h1")
            first = first or one
            assert (one.losses, one.norms) == (first.losses, first.norms)
            for (name, weight), expected in zip(one.weights.items(), due.weights.values(), strict=True):
                assert torch.equal(weight, first.weights[name])
                assert float((weight - expected).abs().max() / expected.abs().max()) <= LIMITS[dtype]
