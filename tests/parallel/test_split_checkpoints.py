"""Checkpoints of models whose weights the ranks of tensor groups divide: they hold whole tensors, as without groups."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint

from pipesched.saving.manifest import Manifest
from tests.support.jobs import split_weights as jobs
from tests.support.jobs.split_weights import Case
from tests.support.rank_processes import Ranks

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:.*differs in rounding")]

TIGHT = {torch.float64: 1e-12, torch.float32: 1e-5}


class Pools:
    """Processes for each number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def run(self, case: Case, job: Any, *args: Any) -> list[Any]:
        if case.dims is None:
            return [job(None, case, *args)]
        count = case.num_ranks
        if count not in self._pools:
            self._pools[count] = Ranks(count)
        return self._pools[count].run(count, job, case, *args, timeout_s=120)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def assert_near(found: Any, due: Any, case: Case) -> None:
    assert len(found) == len(due)
    for one, other in zip(found, due, strict=True):
        assert abs(one - other) <= TIGHT[case.dtype] * abs(other)


def assert_resumes(pools: Pools, before: Case, after: list[Case], path: str, **options: Any) -> None:
    """Check that runs that load a checkpoint continue as the loop that never stopped."""
    model = before.model()
    optimizer = jobs.adam(model.parameters())
    losses, norms = jobs.loop(before, range(3), model, optimizer)
    for found in pools.run(before, jobs.first_half, path):
        assert_near(found[0], losses, before)
        assert_near(found[1], norms, before)
    losses, norms = jobs.loop(before, range(3, 6), model, optimizer)
    weights = model.state_dict()
    for case in after:
        for found in pools.run(case, jobs.second_half, path):
            assert_near(found[0], losses, case)
            assert_near(found[1], norms, case)
            assert found[2].keys() == weights.keys()
            for name, value in found[2].items():
                rtol = 1e-5 if case.dtype == torch.float32 else 1e-10
                torch.testing.assert_close(value, weights[name], rtol=rtol, atol=1e-7)
            sizes = [each.dims[2] if each.dims else 1 for each in (before, case)]
            warned = any("the number of ranks that split the layers affects rounding" in text for text in found[3])
            assert warned == (sizes[0] != sizes[1])


def plain_states(path: str) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint with torch alone."""
    manifest = Manifest.read(Path(path))
    entries = manifest.tensors.items()
    wanted = {key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in entries}
    reader = checkpoint.HuggingFaceStorageReader(str(Path(path) / manifest.data))
    checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_with_four_planes_resumes_with_two_with_none_and_in_plain_pytorch(
    pools: Pools, tmp_path: Path, ranks: int, dtype: torch.dtype
) -> None:
    path = str(tmp_path / "c")
    before = Case((1, ranks, 4), dtype=dtype)
    after = [replace(before, dims=dims) for dims in ((1, 1, 2), (1, 2, 2), (1, 2, 1), None)]
    assert_resumes(pools, before, after, path)
    model = before.model(seed=7)
    states = plain_states(path)
    model.load_state_dict({name: states[f"parameter/{name.replace('head', 'embed')}"] for name in model.state_dict()})
    optimizer = jobs.adam(model.parameters())
    for name, parameter in model.named_parameters():
        own = {key: states[f"optimizer/{name}/{key}"] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **own}
    losses, _ = jobs.loop(before, range(3, 6), model, optimizer)
    due = before.model()
    optimizer = jobs.adam(due.parameters())
    jobs.loop(before, range(3), due, optimizer)
    assert_near(losses, jobs.loop(before, range(3, 6), due, optimizer)[0], before)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 2, 2), tied=False, frozen=True),
        Case((1, 2, 2), own_optimizer=False),
        Case((1, 2, 2), schedule="zb-h1"),
    ],
    ids=["frozen embedding", "the user's optimizer", "zb-h1"],
)
def test_other_runs_resume(pools: Pools, tmp_path: Path, case: Case) -> None:
    after = [case, replace(case, dims=(1, 1, 4)), replace(case, dims=None)]
    assert_resumes(pools, case, after, str(tmp_path / "c"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_run_with_zero_resumes(pools: Pools, tmp_path: Path, zero: int) -> None:
    case = Case((2, 2, 2), zero=zero, tied=zero < 3)
    others: list[Any] = [((2, 1, 2), (zero + 1) % 4), ((2, 1, 1), zero), (None, 0)]
    after = [case, *(replace(case, dims=dims, zero=other) for dims, other in others)]
    assert_resumes(pools, case, after, str(tmp_path / "c"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dims", [(1, 1, 2), (1, 2, 2), (1, 1, 4), (1, 2, 4)], ids=str)
def test_the_files_are_those_of_a_run_without_tensor_groups(
    pools: Pools, tmp_path: Path, dims: tuple[int, int, int], asynchronous: bool
) -> None:
    plain, case = Case((1, dims[1], 1)), Case(dims)
    pools.run(plain, jobs.first_half, str(tmp_path / "plain"))
    pools.run(case, jobs.saved_again, str(tmp_path / "plain"), str(tmp_path / "split"), asynchronous)
    due = jobs.files_of(str(tmp_path / "plain"))
    assert jobs.files_of(str(tmp_path / "split")) == due
    assert len(due) == 2 * dims[1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_tensors_with_zero_are_those_of_a_run_without_tensor_groups(
    pools: Pools, tmp_path: Path, zero: int
) -> None:
    plain, case = Case((2, 1, 1), zero=zero, tied=zero < 3), Case((2, 1, 2), zero=zero, tied=zero < 3)
    pools.run(plain, jobs.first_half, str(tmp_path / "plain"))
    pools.run(case, jobs.saved_again, str(tmp_path / "plain"), str(tmp_path / "split"), False)
    due, found = plain_states(str(tmp_path / "plain")), plain_states(str(tmp_path / "split"))
    assert found.keys() == due.keys()
    for key, value in due.items():
        assert torch.equal(found[key], value), key
    assert any(entry.chunks for entry in Manifest.read(tmp_path / "split").tensors.values())


def test_master_weights_are_saved_whole(pools: Pools, tmp_path: Path) -> None:
    plain, case = Case((1, 2, 1), dtype=torch.bfloat16), Case((1, 2, 2), dtype=torch.bfloat16)
    pools.run(plain, jobs.masters_saved, "", str(tmp_path / "plain"))
    pools.run(case, jobs.masters_saved, str(tmp_path / "plain"), str(tmp_path / "split"))
    assert jobs.files_of(str(tmp_path / "split")) == jobs.files_of(str(tmp_path / "plain"))
    assert any(key.endswith("/master") for key in Manifest.read(tmp_path / "split").tensors)


def test_averages_in_extra_are_saved_whole(pools: Pools, tmp_path: Path) -> None:
    plain, case = Case((1, 2, 1)), Case((1, 2, 2))
    due = pools.run(plain, jobs.averaged, "", str(tmp_path / "plain"))
    found = pools.run(case, jobs.averaged, str(tmp_path / "plain"), str(tmp_path / "split"))
    assert jobs.files_of(str(tmp_path / "split")) == jobs.files_of(str(tmp_path / "plain"))
    for rank, own in enumerate(found):
        for name, value in own.items():
            whole = due[rank // 2][name]
            assert value.numel() == whole.numel() // (2 if jobs.is_split(name) else 1), name


def test_training_states_of_the_first_plane_hold_whole_tensors(pools: Pools) -> None:
    case = Case((1, 2, 2))
    parts = pools.run(case, jobs.states_passed, None)
    assert [bool(part["tensors"]) for part in parts] == [True, False, True, False]
    first = parts[0]["tensors"]
    assert first["parameter/embed.weight"].shape == first["optimizer/embed.weight/exp_avg"].shape == (24, 16)
    model = case.model()
    optimizer = jobs.adam(model.parameters())
    jobs.loop(case, range(2), model, optimizer)
    due, _ = jobs.loop(case, range(2, 4), model, optimizer)
    for after in (case, replace(case, dims=(1, 1, 4)), replace(case, dims=None)):
        for losses in pools.run(after, jobs.states_passed, parts):
            assert_near(losses, due, case)


def test_a_rank_that_dies_while_blocks_are_gathered_leaves_the_checkpoint_before(pools: Pools, tmp_path: Path) -> None:
    errors = pools.run(Case((1, 2, 2)), jobs.dying_writer, str(tmp_path))
    assert errors[3] is None
    assert all("rank 3" in error for error in errors[:3])
    assert Manifest.read(tmp_path).step == 1


def test_planes_must_begin_with_the_same_weights(pools: Pools) -> None:
    for error in pools.run(Case((1, 2, 2)), jobs.other_weights):
        assert "all ranks must have the same model and arguments; rank 1 differs from rank 0: the values of" in error
