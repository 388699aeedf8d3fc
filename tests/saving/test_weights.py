"""Weights for other programs: safetensors shards with an index, as save_pretrained writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipesched import Pipeline
from pipesched.saving import exported_weights
from tests.support import places
from tests.support.jobs import saving as jobs
from tests.support.jobs.saving import X, layers
from tests.support.models import assert_equal_bits
from tests.support.rank_processes import Ranks
from tests.support.resumed_runs import Half, Net, pipeline

pytestmark = pytest.mark.timeout(60)


def weights_in(folder: Path) -> dict[str, Any]:
    """As transformers reads them: one file, or several by the index."""
    if (folder / "model.safetensors").exists():
        assert not (folder / "model.safetensors.index.json").exists()
        return dict(load_file(folder / "model.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in {*index["weight_map"].values()}}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for own in files.values() for tensor in own.values())
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def test_each_rank_writes_a_shard_and_stale_shards_go(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, jobs.save_weights, str(tmp_path), 1)
    ranks.run(2, jobs.save_weights, str(tmp_path), 0)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert_equal_bits(weights_in(tmp_path), layers().state_dict())
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "schedule": "1f1b", "num_microbatches": 4}
    with Pipeline(layers, X[:2], init=tmp_path, devices=["cpu"] * 2, **options) as pipe:
        assert_equal_bits(pipe.state_dict(), layers().state_dict())


def test_tied_weights_come_once_and_the_configuration_comes_along(tmp_path: Path) -> None:
    class Configuration:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text("{}")

    model = Net()
    model.config = Configuration()  # type: ignore[assignment]
    with pipeline(places.OneProcess(2), Half(2), model) as pipe:
        pipe.save_weights(tmp_path)
    found = weights_in(tmp_path)
    assert {*found} == {*model.state_dict()} - {"last.weight"}
    assert torch.equal(found["first.weight"], model.last.weight)
    assert (tmp_path / "config.json").exists()


def test_a_failed_export_leaves_the_weights_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with jobs.piped(places.OneProcess(2)) as pipe:
        pipe.save_weights(tmp_path)
        with torch.no_grad():
            pipe.model.get_parameter("0.weight").zero_()
        monkeypatch.setattr(exported_weights, "write_tensors", full)
        with pytest.raises(RuntimeError, match="No space left on device"):
            pipe.save_weights(tmp_path)
    assert_equal_bits(weights_in(tmp_path), layers().state_dict())
