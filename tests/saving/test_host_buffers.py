"""Host buffers: an asynchronous save's copies wait for earlier work, later work waits for them, and no host waits."""

from typing import Any

import pytest
import torch

from pipesched.runtime.executors.device_streams import AcceleratorStreams
from pipesched.saving.host_buffers import HostBuffers
from tests.support.fake_cuda import CUDA, Stream


class OnDevice:
    """A tensor of a device, as host buffers use one."""

    dtype = torch.float32

    def __init__(self, cuda: CUDA, name: str, device: str, shape: tuple[int, ...] = (2,)) -> None:
        self.cuda, self.name, self.device, self.shape = cuda, name, torch.device(device), shape
        self.is_cpu = device == "cpu"

    def record_stream(self, stream: Stream) -> None:
        self.cuda.recorded.append((self.name, stream))


class InHostMemory:
    """A buffer that writes down what its copies come after."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool) -> None:
        self.shape, self.dtype, self.pinned = shape, dtype, pin_memory
        self.after: set[str] | None = None

    def copy_(self, source: OnDevice, non_blocking: bool = False) -> None:
        assert non_blocking == self.pinned == (source.device.type == "cuda")
        if self.pinned:
            stream = source.cuda.current_stream(source.device)
            assert stream.name == "own", "the copy runs on a stream of its own"
            self.after = set(stream.before)
            stream.launch(f"copy of {source.name}")


@pytest.fixture
def weights(cuda: CUDA, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch, "empty", InHostMemory)
    places = {"a": "cuda:0", "b": "cuda:0", "c": "cuda:1", "d": "cpu"}
    return {name: OnDevice(cuda, name, device) for name, device in places.items()}


def test_copies_follow_the_last_update_and_the_next_waits_for_them(cuda: CUDA, weights: dict[str, Any]) -> None:
    """On each device, wherever the update runs: on the caller's stream, or on the stream of a rank."""
    cuda.default_stream("cuda:0").launch("update of step 1")
    buffers = HostBuffers()
    copies: Any = buffers.copied(weights)
    assert copies["a"].after == {"update of step 1"}
    assert copies["c"].after == set()
    assert not cuda.synchronized, "the host does not wait"
    for device, names in (("cuda:0", "ab"), ("cuda:1", "c")):
        due = {f"copy of {name}" for name in names}
        assert due <= cuda.default_stream(device).before, "an update by the caller waits"
        rank = AcceleratorStreams(torch.device(device))
        rank.follow()
        with rank.entered():
            assert due <= cuda.current_stream(device).before, "an update inside a step waits"
    assert sorted(name for name, _ in cuda.recorded) == ["a", "b", "c"], "memory that is freed is not reused too early"
    buffers.wait()
    assert cuda.synchronized == ["event", "event"], "the thread that writes waits"


def test_the_memory_of_the_last_save_is_used_again(cuda: CUDA, weights: dict[str, Any]) -> None:
    buffers = HostBuffers()
    first = dict(buffers.copied(weights))
    buffers.wait()
    weights["b"] = OnDevice(cuda, "b", "cuda:0", shape=(3,))
    second = buffers.copied({name: weights[name] for name in "abd"})
    assert second["a"] is first["a"]
    assert second["d"] is first["d"]
    assert second["b"].shape == (3,)
    assert second.keys() == set("abd")
