"""Pipelines of layers that are split in two and three dimensions."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import tensor_grids as jobs
from tests.support.rank_processes import Ranks

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.one_in(2)
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


LAYOUTS = {"3d": (1, 1, 8), "2.5d": (1, 1, 8), "2d": (1, 2, 4), "1d": (1, 2, 4)}


@pytest.mark.one_in(24)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", ["plain", *LAYOUTS])
def test_a_run_of_one_layout_continues_in_another(eight: Ranks, tmp_path: Path, before: str, after: str) -> None:
    dtype = torch.float64
    due = jobs.looped(dtype)

    def options(layout: str) -> tuple[Any, ...]:
        return LAYOUTS[layout], layout, "1f1b", dtype

    path = str(tmp_path / "run")
    for loss in eight.run(8, jobs.saved, path, *options(before), timeout_s=60):
        assert loss == pytest.approx(due.losses[1], rel=1e-12)
    if after == "plain":
        found = [jobs.loaded_plain(path, dtype)]
    else:
        found = eight.run(8, jobs.loaded, path, *options(after), timeout_s=60)
    for loss, weights in found:
        assert loss == pytest.approx(due.losses[1], rel=1e-12)
        assert weights.keys() == due.weights.keys()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("zero", range(4))
def test_replicas_of_a_grid_train_as_one_process(eight: Ranks, tmp_path: Path, zero: int) -> None:
    """And a saved run of replicas continues, with the parts of the states that each holds."""
    dtype = torch.float64
    due = jobs.looped(dtype, 2)
    for one, again in eight.run(8, jobs.of_replicas, str(tmp_path / "run"), zero, dtype, timeout_s=60):
        assert one.losses == pytest.approx(due.losses, rel=1e-12)
        assert one.norms == pytest.approx(due.norms, rel=1e-12)
        assert again == one.losses[-1]
        for name, weight in one.weights.items():
            assert torch.allclose(weight, due.weights[name], rtol=1e-12, atol=1e-13)


COLLECTIVES = [("2d", (1, 2, 4), "broadcast"), ("2d", (1, 2, 4), "reduce"), ("3d", (1, 1, 8), "reduce_scatter")]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("fault", ["raise", "exit", "freeze", "hang"])
@pytest.mark.parametrize("place", COLLECTIVES, ids=str)
def test_a_rank_that_fails_inside_a_collective_is_named_in_time(eight: Ranks, place: Any, fault: str) -> None:
    layout, shape, collective = place
    *others, last = eight.run(8, jobs.with_a_fault, layout, shape, fault, collective, timeout_s=100)
    assert (last is None) == (fault in ("exit", "freeze"))
    for seen in others:
        assert "rank 7" in seen.error
        assert seen.seconds < 5 + 5, seen


@pytest.mark.exhaustive
def test_a_rank_that_is_late_in_a_collective_changes_nothing(eight: Ranks) -> None:
    for seen in eight.run(8, jobs.with_a_fault, "2d", (1, 2, 4), "late", "broadcast", timeout_s=60):
        assert not seen.error


def test_options_that_a_grid_does_not_allow_are_refused_by_name(four: Ranks) -> None:
    for found in four.run(4, jobs.refused, timeout_s=60):
        assert "must be l x l x l, such as 8 or 27; got 4" in found["ranks"]
        assert "the layout 2d (3 x 3) has 9, and the dimension 4" in found["size"]
        assert "name the layers, such as {'*.up': 'column'" in found["auto"]
        assert "one of '1d', '2d', '2.5d', '3d', or a TensorLayout; got '4d'" in found["word"]
        assert "'1.up' got Column(gathered=True); choose 'column', 'row'" in found["gathered"]
        assert "'1.norm'" in found["a norm without a style"]
        assert "'1.inner' is a Dropout" in found["no norm"]
        assert "give them to the module that contains it" in found["edge"]
