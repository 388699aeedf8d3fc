"""Checkpoints of replicas that divide optimizer states: each row is saved once, and loads under any plan."""

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from pipesched.saving.chunks import Chunk, Rows, covers_tensor, pieces
from pipesched.saving.manifest import Manifest
from tests.support.jobs import zero, zero_saving
from tests.support.jobs.zero import Case
from tests.support.rank_processes import Ranks
from tests.support.resumed_llama import Place, loop, run

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*differs in rounding")]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("dims", "before", "after"),
    [
        ((2, 2), Case(2, zero.tied, "1f1b", zero.adamw), Case(1, zero.tied, "interleaved-1f1b", zero.adamw)),
        ((2, 2), Case(1, zero.in_halves, "1f1b", zero.masters), Case(2, zero.in_halves, "zb-h1", zero.masters)),
        ((2, 2), Case(2, zero.in_halves, "1f1b", zero.masters), Case(3, zero.in_halves, "zb-h1", zero.masters)),
        ((2, 2), Case(3, zero.tied, "1f1b", zero.adamw), Case(3, zero.tied, "zb-v", zero.adamw)),
        ((4, 1), Case(2, zero.plain, "1f1b", zero.adafactor), Case(1, zero.plain, "1f1b", zero.adafactor)),
        ((4, 1), Case(3, zero.plain, "1f1b", zero.adafactor), Case(1, zero.plain, "1f1b", zero.adafactor)),
    ],
    ids=["groups", "masters", "weights after", "weights", "whole parameters", "whole weights before"],
)
def test_a_run_continues_with_another_level(
    ranks: Ranks, tmp_path: Path, dims: tuple[int, int], before: Case, after: Case
) -> None:
    ranks.run(4, zero_saving.save_and_load, dims, before, after, str(tmp_path / "checkpoint"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_replicas_write_each_row_once_and_torch_reads_the_files(ranks: Ranks, tmp_path: Path) -> None:
    held = ranks.run(4, zero_saving.save, (2, 2), Case(2, zero.plain, "1f1b", zero.adamw), str(tmp_path))
    manifest = Manifest.read(tmp_path)
    assert manifest.version == 2
    assert manifest.num_parts == 4
    for key, entry in manifest.tensors.items():
        rows = [own[key] for own in held if key in own]
        assert len(rows) == len(entry.chunks)
        assert sum(rows) == (entry.shape[0] if rows else 0)
    divided = [key for key, entry in manifest.tensors.items() if entry.chunks]
    assert {"optimizer/1.weight/exp_avg", "optimizer/10.weight/exp_avg_sq"} <= {*divided}
    wanted = {key: torch.empty(entry.shape) for key, entry in manifest.tensors.items()}
    reader = checkpoint.HuggingFaceStorageReader(str(tmp_path / manifest.data))
    checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    with zero_saving.one_process(zero.plain(), zero.adamw) as pipe:
        pipe.load(tmp_path)
        states = pipe.training_state()["tensors"]
    assert states.keys() == wanted.keys()
    for key, tensor in states.items():
        assert torch.equal(wanted[key], tensor), key
        assert tensor.any() or "bias" in key


def test_what_cannot_be_saved_is_named(ranks: Ranks, tmp_path: Path) -> None:
    names = {
        "scalar": "optimizer state '0.weight' differs between replica 0 (rank 0) and replica 1 (rank 2)",
        "shape": "must have the shape of their parameter, or be scalars; 'optimizer/0.weight/count' has shape [3], but",
        "options": "group of the optimizers 0 differs between replica 0",
        "missing": "must together save each of its rows once; 'optimizer/",
        "twice": "rows, and the processes saved rows 0 to ",
        "full": "No space left on device",
        "full, asynchronous": "No space left on device",
        "group": "was made with 1 group, and now has 2; make all groups in optimizer=",
    }
    found = ranks.run(4, zero_saving.refusals, str(tmp_path))
    for what, text in names.items():
        errors = [own[what] for own in found]
        assert all(error.startswith("CheckpointError: ") for error in errors), (what, errors)
        assert any(text in error for error in errors), (what, errors)


def test_a_replica_that_dies_while_it_writes_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, zero_saving.dying_writer, str(tmp_path))
    assert found[3] is None
    for error in found[:3]:
        assert "rank 3" in error
    case = Case(2, zero.plain, "1f1b", zero.momentum)
    assert ranks.run(4, zero_saving.load_step, (4, 1), case, str(tmp_path)) == [1] * 4


@pytest.mark.exhaustive
def test_a_hugging_face_run_continues_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install pipesched[zoo]")
    before, after = Place(2, 2, zero=2), Place(1, 2, mesh=False)
    losses = run(ranks, before, range(3), None, str(tmp_path)) + run(ranks, after, range(3, 6), str(tmp_path), None)
    assert all(map(torch.equal, losses, loop(before, after, 3, 6)))


def test_chunks_are_checked_and_read_by_rows() -> None:
    def chunk(start: int, count: int, width: int = 3) -> Chunk:
        return Chunk(file=str(start), offsets=(start, 0), sizes=(count, width))

    assert covers_tensor([chunk(0, 2), chunk(2, 4)], (6, 3))
    for wrong in ([chunk(0, 2)], [chunk(0, 2), chunk(3, 3)], [chunk(0, 3), chunk(2, 4)], [chunk(0, 6, 2)]):
        assert not covers_tensor(wrong, (6, 3))
    own = [chunk(0, 2), chunk(2, 4)]
    assert list(pieces(own, None)) == [(own[0], None), (own[1], None)]
    assert list(pieces(own, Rows(1, 4))) == [(own[0], Rows(1, 2)), (own[1], Rows(0, 2))]
    assert list(pieces(own, Rows(2, 3))) == [(own[1], Rows(0, 1))]
