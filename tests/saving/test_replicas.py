"""Checkpoints of a pipeline with replicas: written once, read by all, and refused where replicas differ."""

from pathlib import Path

import pytest
import torch

from pipesched.saving.replica_states import fingerprint
from tests.support import places
from tests.support.jobs import replica_saving as jobs
from tests.support.jobs import saving
from tests.support.jobs.saving import error_of, layers
from tests.support.models import assert_equal_bits
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


def test_replica_0_writes_and_all_replicas_load(ranks: Ranks, tmp_path: Path) -> None:
    due = [f"part-0000{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")]
    assert ranks.run(4, jobs.every_way, str(tmp_path)) == [due] * 4
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 2
    with saving.piped(places.OneProcess(2), layers(8), optimizer=torch.optim.Adam) as pipe:
        with pytest.warns(UserWarning, match=r"was saved with 2 replicas, and this pipeline has 1; .* in rounding"):
            assert pipe.load(tmp_path / "kept").step == 2
        assert_equal_bits(pipe.model.state_dict(), jobs.trained(2).state_dict())
    with saving.piped(places.OneProcess(2), num_microbatches=2) as pipe:
        assert error_of(lambda: pipe.load(tmp_path / "one")).endswith(
            "but 2 in this pipeline; pass num_microbatches=4, the number per replica, to Pipeline, or load "
            "only the weights with load_state_dict"
        )
    for error in ranks.run(4, jobs.loads_with_other_microbatches, str(tmp_path / "one")):
        assert "num_microbatches of all replicas is 4 in " in error
        assert ", but 8 in this pipeline; pass num_microbatches=2, the number per replica, to" in error


def test_the_writers_are_the_ranks_of_replica_0(ranks: Ranks, tmp_path: Path) -> None:
    due = [f"part-0000{rank}.{kind}" for rank in (0, 2) for kind in ("json", "safetensors")]
    assert ranks.run(4, jobs.transposed, str(tmp_path)) == [due] * 4


def test_what_differs_between_replicas_is_named(ranks: Ranks, tmp_path: Path) -> None:
    names = {
        "extra": "extra value 'loader' differs between replica 0 (rank 0) and replica 1 (rank 2)",
        "ranks": "at loader['value']['place']; to save state that differs by rank, gather the states",
        "given": "extra value 'loader' differs",
        "keep": "ranks 0 to 3 passed (asynchronous, keep) = (False, 1), (False, 1), (False, 2), (False, 2)",
        "path": "which rank 0 made, does not exist on rank",
        "rank": "rank 0 of 4 passed 4",
        "options": "group of the optimizers 0 differs",
        "module": "module state '1' differs",
        "buffer": "buffer '3.scale' differs between replica 0 (rank 1) and replica 1 (rank 3)",
        "weight": "parameter '0.weight' differs",
    }
    for found in ranks.run(4, jobs.different, str(tmp_path / "run")):
        assert found.keys() == names.keys()
        for what, name in names.items():
            assert name in found[what], what


def test_all_replicas_raise_the_error_of_a_writer(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(4, jobs.failing_writer, str(tmp_path)):
        for error in found:
            assert error.startswith("CheckpointError: ")
            assert "No space left on device" in error


def test_a_rank_that_dies_during_a_save_is_named(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, jobs.dying, str(tmp_path))
    assert found[3] is None
    for error in found[:3]:
        assert "rank 3" in error
    with saving.piped(places.OneProcess(2)) as pipe, pytest.warns(UserWarning, match="2 replicas"):
        assert pipe.load(tmp_path).step == 0


@pytest.mark.parametrize("shape", [(3,), (4096 * 3 + 5, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_fingerprint_sees_changed_and_moved_elements(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    others = [value.clone() for _ in range(3)]
    others[0].view(-1).view(torch.uint8)[-1] ^= 1
    others[1].view(-1).view(torch.uint8)[0] ^= 1
    others[2].view(-1)[:2] = value.view(-1)[:2].flip(0)
    odd = torch.empty(len(value.view(-1)) + 1, dtype=dtype)[1:].view(shape).copy_(value)
    assert fingerprint(odd) == fingerprint(value)
    assert len({fingerprint(one) for one in (value, *others, value[None], value.view(torch.int8))}) == 6
