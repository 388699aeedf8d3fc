"""Fake streams, events and NCCL that record the order of operations, so that CUDA code runs with CPU tensors.

A Stream records the operations that have ended before the next operation on this stream starts: those launched on this
stream, and those on other streams for which this stream has waited.
"""

import threading
import time
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, name: str = "own") -> None:
        self.device, self.name = device, name
        self.before: set[str] = set()

    def launch(self, what: str) -> None:
        self.before.add(what)

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before

    def wait_event(self, event: "Event") -> None:
        self.before |= event.before

    def synchronize(self) -> None:
        CUDA.synchronized.append(self.name)


class Event:
    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.before: set[str] = set()
        self.timed = enable_timing
        self.at_s = None

    def record(self, stream: Stream) -> None:
        self.before, self.at_s = set(stream.before), time.perf_counter()

    def synchronize(self) -> None:
        assert self.at_s is not None, "synchronize() was called on an event that was never recorded"
        CUDA.synchronized.append("event")

    def elapsed_time(self, other: "Event") -> float:
        assert self.timed
        assert other.timed
        return (other.at_s - self.at_s) * 1e3


class CUDA:
    """The functions of torch.accelerator that pipesched calls, with separate streams for each thread, as in torch."""

    synchronized: ClassVar[list[str]] = []  # the streams and events that the host has waited for, by name

    def __init__(self) -> None:
        self.defaults: dict[str, Stream] = {}
        self.current = threading.local()
        self.recorded: list[tuple[Any, Stream]] = []
        CUDA.synchronized = []

    def default_stream(self, device: Any) -> Stream:
        return self.defaults.setdefault(str(device), Stream(device, name=f"default of {device}"))

    def current_stream(self, device: Any) -> Stream:
        return vars(self.current).get(str(device)) or self.default_stream(device)

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        before = vars(self.current).get(str(stream.device))
        vars(self.current)[str(stream.device)] = stream
        yield
        vars(self.current)[str(stream.device)] = before

    def set_stream(self, stream: Stream) -> None:
        vars(self.current)[str(stream.device)] = stream


class Work:
    def __init__(self, cuda: CUDA, device: Any, what: str, before: set[str]) -> None:
        self._cuda, self._device, self.before = cuda, device, before | {what}

    def wait(self) -> None:
        self._cuda.current_stream(self._device).before |= self.before

    def is_completed(self) -> bool:
        return False


class Tensor:
    """A tensor with a fake device, for code that uses device streams."""

    def __init__(self, cuda: CUDA, device: Any) -> None:
        self.cuda, self.device, self.is_meta = cuda, torch.device(device), False
        self.is_cpu = self.device.type == "cpu"

    def record_stream(self, stream: Stream) -> None:
        self.cuda.recorded.append((self, stream))

    def to(self, device: Any, non_blocking: bool = False) -> "Tensor":
        """Copy on the source's stream, as torch does; this stream and the destination's stream wait for each other."""
        assert non_blocking
        source, destination = self.cuda.current_stream(self.device), self.cuda.current_stream(device)
        source.wait_stream(destination)
        source.launch(f"copy to {device}")
        destination.wait_stream(source)
        return Tensor(self.cuda, device)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CUDA:
    """Replace the functions of torch.accelerator, and the classes of streams and events, with fakes."""
    fake = CUDA()
    for name in ("current_stream", "set_stream"):
        monkeypatch.setattr(torch.accelerator, name, getattr(fake, name))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: fake.recorded.append((tensor, stream)))

    class Nccl:
        class Options:
            def __init__(self, is_high_priority_stream: bool = False) -> None:
                assert is_high_priority_stream

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.rank, self.size, self.calls, self.timeout = rank, size, [], None

        def set_timeout(self, timeout: Any) -> None:
            self.timeout = timeout

        def _post(self, what: str, tensors: list[torch.Tensor], peer: int) -> Work:
            assert peer == 1 - self.rank
            device = torch.device("cuda", 0)
            stream = fake.current_stream(device)
            self.calls.append((what, len(tensors[0]), stream))
            return Work(fake, device, what, set(stream.before))  # NCCL's own stream waits for the current stream

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
            return self._post("send", tensors, peer)

        def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
            return self._post("receive", tensors, peer)

        def abort(self) -> None:
            self.calls.append(("abort", 0, None))

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Nccl, raising=False)
    return fake
