"""The format of checkpoints: one of format 1 loads for ever, and the files are those of the safetensors library."""

import hashlib
import json
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipesched import Pipeline
from pipesched.errors import CheckpointError, DamagedCheckpointError
from pipesched.saving import tensor_files, writing
from pipesched.saving.manifest import Manifest, dumped
from pipesched.saving.tensor_files import TensorFile, write_tensors
from tests.support.jobs import kept_checkpoint
from tests.support.jobs.kept_checkpoint import FOLDER, Run
from tests.support.jobs.saving import piped
from tests.support.places import OneProcess
from tests.support.rank_processes import FORKED

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch")


def test_the_kept_checkpoint_of_format_1_loads_bit_for_bit() -> None:
    """To change the format, use another version, keep this file, and write another beside it."""
    run = Run(seed=8)
    with run.pipe as pipe:
        restored = pipe.load(FOLDER / "checkpoint", **run.states)
        assert (restored.step, restored.seed) == (2, 4)
        assert run.digest(dict(restored.extra)) == (FOLDER / "digest.txt").read_text().strip()


@pytest.mark.filterwarnings("ignore:.*differs in rounding")
def test_the_kept_checkpoint_of_format_2_loads_bit_for_bit() -> None:
    with kept_checkpoint.divided(num_microbatches=2, devices=["cpu"]) as pipe:
        folder = kept_checkpoint.DIVIDED
        assert Manifest.read(folder / "checkpoint").version == 2
        assert pipe.load(folder / "checkpoint").step == 1
        digest = kept_checkpoint.digest_of(pipe.training_state()["tensors"])
        assert digest == (folder / "digest.txt").read_text().strip()


def test_a_checkpoint_of_another_format_names_its_version(tmp_path: Path) -> None:
    values = json.loads((FOLDER / "checkpoint" / "manifest.json").read_text()) | {"version": 3}
    del values["digest"]
    (tmp_path / "manifest.json").write_bytes(dumped({**values, "digest": hashlib.sha256(dumped(values)).hexdigest()}))
    with pytest.raises(CheckpointError, match=r"of formats 1 and 2; .*manifest.json has format 3, and was written"):
        Manifest.read(tmp_path)
    values["step"] = 3
    (tmp_path / "manifest.json").write_bytes(dumped({**values, "digest": "0" * 64}))
    with pytest.raises(DamagedCheckpointError, match="its content does not match its digest"):
        Manifest.read(tmp_path)


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
    ]  # fmt: skip
    tensors = {str(dtype): (torch.arange(6).reshape(2, 3) % 2).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "strided": torch.arange(6.0).reshape(2, 3).t()}
    path = tmp_path / "all.safetensors"
    entry = write_tensors(path, tensors | {"own": torch.tensor([1 + 2j], dtype=torch.complex128)}, {"format": "pt"})
    assert entry.bytes == path.stat().st_size
    read = load_file(path)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        own = TensorFile(path).read(name, tensor.dtype, tuple(tensor.shape))
        for found in (read[name], own):
            assert bytes(found.reshape(-1).view(torch.uint8).tolist() if found.numel() else b"") == bytes(
                tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else b""
            )
    assert TensorFile(path).read("own", torch.complex128, (1,)).item() == 1 + 2j


def test_killed_saves_and_changed_files() -> None:
    """Few of them; `benchmarks/torn_checkpoints.py` has hundreds."""
    import torn_checkpoints

    found = torn_checkpoints.kills(2, ("one", "keep"), seed=3) + torn_checkpoints.changes(25, seed=3)
    good = {"whole", "in the write", "between two saves", "file named as damaged", "file named as missing"}
    assert {*found} <= good, found
    assert found["whole"] == 2


@pytest.mark.parametrize(("flushed", "flushes"), [(1 << 28, 1), (1000, 2)])
def test_a_file_is_flushed_once_and_after_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: int, flushes: int
) -> None:
    """However many tensors the bytes belong to: a flush for each of many small tensors would take most of a save."""
    calls: list[int] = []
    monkeypatch.setattr(tensor_files.os, "fsync", calls.append)
    monkeypatch.setattr(tensor_files, "_FLUSHED", flushed)
    write_tensors(tmp_path / "small.safetensors", {"a": torch.zeros(1)})
    assert len(calls) == 1
    calls.clear()
    write_tensors(tmp_path / "many.safetensors", {f"{at:02}": torch.zeros(2) for at in range(50)})
    assert len(calls) == flushes


def _save_at_the_end(path: str) -> None:
    """Begin a save that writes only after the process has begun to exit."""
    write = writing.write_tensors
    exits = threading.Event()
    Finalize(None, exits.set, exitpriority=1000)

    def late(*args: Any) -> Any:
        exits.wait()
        return write(*args)

    writing.write_tensors = late
    piped(OneProcess(2)).save(path, asynchronous=True)


def test_a_process_that_exits_finishes_its_save(tmp_path: Path) -> None:
    process = FORKED.Process(target=_save_at_the_end, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert Manifest.read(tmp_path).step == 0


# ---- headers of tensor files -----------------------------------------------------------------------------------------


def signed_again(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of the tensor file, and sign the file and the manifest again."""
    manifest, file = json.loads((folder / "manifest.json").read_text()), next(folder.glob("data-*/*.safetensors"))
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    text = json.dumps(change(header) or header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])
    manifest["files"][file.name] = {
        "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    del manifest["digest"]
    manifest["digest"] = hashlib.sha256(dumped(manifest)).hexdigest()
    (folder / "manifest.json").write_bytes(dumped(manifest))


LAST = "parameter/3.weight"
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a shorter tensor": lambda header: header[LAST]["data_offsets"].__setitem__(1, 0),
    "a tensor beyond the file": lambda header: header[LAST].update(
        data_offsets=[offset + 10**6 for offset in header[LAST]["data_offsets"]]
    ),
    "a tensor before the file": lambda header: header[LAST].update(
        data_offsets=[offset - 10**6 for offset in header[LAST]["data_offsets"]]
    ),
    "no tensor": lambda header: {key: value for key, value in header.items() if key != LAST},
    "a tensor that is no object": lambda header: header.update({LAST: [1, 2]}),
    "offsets that are no pair": lambda header: header[LAST].update(data_offsets=[0]),
    "offsets that are text": lambda header: header[LAST].update(data_offsets=["0", "4"]),
    "offsets that are no list": lambda header: header[LAST].update(data_offsets=7),
    "a header that is a list": lambda header: [1, 2],
    "a header that is a number": lambda header: 5,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_wrong_is_refused_before_any_weight_changes(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x = torch.randn(4, 4)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "devices": ["cpu"] * 2, "schedule": "1f1b"}
    with Pipeline(model, x, boundaries=[2], **options) as pipe:
        pipe.step(x, target=x)
        pipe.save(tmp_path)
        signed_again(tmp_path, HEADERS[name])
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
        with pytest.raises(DamagedCheckpointError, match=r"safetensors"):
            pipe.load(tmp_path)
        assert all(bool((parameter == 7).all()) for parameter in model.parameters())
