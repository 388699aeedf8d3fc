"""What comes after what on CUDA devices, with streams that only write it down, so that this code runs on CPUs."""

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn import functional

from pipesched import Pipeline
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors import threads as local
from pipesched.runtime.executors.device_streams import AcceleratorStreams, streams_for
from pipesched.runtime.process_collectives import ProcessCollectives
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.transport import device_channels as device_wire
from pipesched.runtime.transport.connections import DeviceTransport, HostTransport, transport_for
from pipesched.runtime.transport.device_channels import PairLink, PairLinks
from pipesched.runtime.transport.host_copies import Courier
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.testing import reference_step
from tests.support.fake_cuda import CUDA, Event, Stream, Tensor
from tests.support.models import assert_equal_bits, gradients, mixed_model

CPU = torch.device("cpu")
X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4


def computing(streams: AcceleratorStreams, cuda: CUDA) -> Stream:
    with streams.entered():
        return cuda.current_stream(streams.device)


def test_a_rank_follows_its_caller_and_the_caller_the_rank(cuda):
    streams, side = AcceleratorStreams(torch.device("cuda:0")), Stream("cuda:0")
    with cuda.stream(side):
        side.launch("batch")
        streams.begin()
        streams.follow()
        compute = computing(streams, cuda)
        assert "batch" in compute.before
        compute.launch("forward")
        stamp = streams.now()
        assert "forward" not in side.before
        streams.catch_up(stamp)
        assert "forward" in side.before
        compute.launch("backward")
        streams.end()
        assert "backward" in side.before
    assert not cuda.synchronized


def test_time_stamps_do_not_wait_for_earlier_work_of_the_device(cuda):
    streams = AcceleratorStreams(torch.device("cuda:0"))
    cuda.default_stream("cuda:0").launch("long work")
    streams.begin()
    assert not streams._base.before
    assert not cuda.synchronized
    assert streams.reader(0.0)(streams.now()) == pytest.approx(streams._base_s, abs=0.1)
    assert cuda.synchronized, "only who reads times waits"


def test_values_between_devices_are_copied_once_they_are_there_and_both_ways_at_once(cuda):
    first, second = AcceleratorStreams(torch.device("cuda:0")), AcceleratorStreams(torch.device("cuda:1"))
    computing(first, cuda).launch("forward")
    there = first.pack((None, Tensor(cuda, "cuda:0")))
    computing(second, cuda).launch("other work")
    with second.entered():
        none, moved = second.unpack(there)
    assert none is None
    assert moved.device == torch.device("cuda:1")
    assert {"forward", "copy to cuda:1"} <= computing(second, cuda).before
    assert "other work" not in computing(first, cuda).before
    assert "other work" not in second._inward.before, "what comes in does not wait for what is computed"
    computing(first, cuda).launch("late work")
    assert [(str(tensor.device), stream) for tensor, stream in cuda.recorded] == [
        ("cuda:0", first._outward),
        ("cuda:1", computing(second, cuda)),
    ]
    computing(second, cuda).launch("backward")
    with first.entered():
        first.unpack(second.pack((Tensor(cuda, "cuda:1"),)))
    assert "late work" not in first._inward.before
    first._outward.launch("next copy out")
    assert "next copy out" not in first._inward.before
    assert not cuda.synchronized


def test_values_on_one_device_are_not_copied(cuda):
    first, second = AcceleratorStreams(torch.device("cuda:0")), AcceleratorStreams(torch.device("cuda:0"))
    computing(first, cuda).launch("forward")
    tensor = Tensor(cuda, "cuda:0")
    with second.entered():
        (got,) = second.unpack(first.pack((tensor,)))
    assert got is tensor
    assert "forward" in computing(second, cuda).before
    assert cuda.recorded == [(tensor, computing(second, cuda))]


def test_values_pass_between_a_cpu_rank_and_a_gpu_rank(cuda):
    gpu, cpu = AcceleratorStreams(torch.device("cuda:0")), streams_for(CPU)
    with gpu.entered():
        (moved,) = gpu.unpack(cpu.pack((Tensor(cuda, "cpu"),)))
    assert moved.device == torch.device("cuda:0")
    assert not cuda.synchronized
    computing(gpu, cuda).launch("forward")
    message = gpu.pack((torch.ones(2),))
    assert "forward" in message.ready.before
    cpu.unpack(message)
    assert cuda.synchronized == ["event"], "a CPU computes in the host's thread"


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "pipedream"])
def test_a_pipeline_runs_over_such_streams(cuda, monkeypatch, name):
    monkeypatch.setattr(local, "streams_for", AcceleratorStreams)
    expected, actual = mixed_model(), mixed_model()
    options = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.0)} if name == "pipedream" else {}
    with Pipeline(
        actual, X[:4], loss_fn=functional.cross_entropy, devices=["cpu"] * 2, schedule=name, num_microbatches=4, seed=1,
        **options,
    ) as pipe:  # fmt: skip
        loss = pipe.step(X, target=Y)
        pipe.flush()
        assert not cuda.synchronized, "no step waits for a device"
        assert pipe.trace.makespan_s > 0
    wanted = reference_step(expected, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=1)
    assert torch.equal(loss, wanted)
    if not options:
        assert_equal_bits(gradients(actual), gradients(expected))


# ---- NCCL ----


CUDA_0 = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def has_nccl(monkeypatch):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(device_wire, "torch", CpuMemory())


class CpuMemory:
    """The module torch, but with the memory of fake devices on the CPU."""

    def empty(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype)

    zeros = empty

    def __getattr__(self, name):
        return getattr(torch, name)


def link(sends: bool, timeout_s: float = 60) -> PairLink:
    return PairLinks(CUDA_0, timeout_s).link(None, sends=sends)


def test_a_send_follows_what_is_computed_and_no_computation_follows_a_send(cuda):
    sender, compute = link(sends=True), Stream(CUDA_0)
    with cuda.stream(compute):
        compute.launch("forward")
        sending = sender.send(torch.zeros(5, dtype=torch.uint8))
    assert "forward" in sending.before
    assert "send" not in compute.before
    assert not sending.is_completed()
    assert sender._group.calls == [("send", 5, compute)]


def test_a_receive_waits_for_no_computation_and_what_is_computed_next_for_it(cuda):
    receiver, compute = link(sends=False), Stream(CUDA_0)
    with cuda.stream(compute):
        compute.launch("forward")
        memory = receiver.receive(7)
    ((what, size, stream),) = receiver._group.calls
    assert (what, size) == ("receive", 7)
    assert "forward" not in stream.before
    assert "receive" in compute.before
    assert cuda.recorded == [(memory, compute)]
    assert not cuda.synchronized


def test_links_wait_where_they_are_made_and_drained(cuda):
    for sends in (True, False):
        one = link(sends)
        one.connect()
        assert len(cuda.synchronized) == 1
        one.drain()
        assert len(cuda.synchronized) == 1, "nothing was posted since"
        cuda.synchronized.clear()
        one.abort()


def test_memory_of_a_run_before_is_received_into_once_its_readers_are_done(cuda):
    maker, compute = PairLinks(CUDA_0, 60), Stream(CUDA_0)
    with cuda.stream(compute):
        compute.launch("a caller's reading")
        maker.begin()
    assert "a caller's reading" in maker._arrivals.before


def test_torch_watches_longer_than_ranks_wait(cuda):
    assert link(sends=True)._group.timeout is None
    assert link(sends=True, timeout_s=3600)._group.timeout.total_seconds() > 3600


def test_links_are_of_accelerators_and_need_nccl(monkeypatch):
    assert isinstance(transport_for(CPU), HostTransport)
    transport = transport_for(torch.device("cuda", 0))
    assert isinstance(transport, DeviceTransport)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(device_wire.ExecutionError, match=r"need NCCL; this build of torch .* has no NCCL"):
        transport.connect(None, 0, 1, 60)


# ---- losses ----


def test_values_leave_once_they_are_there_in_their_order_and_the_rank_goes_on(cuda, monkeypatch):
    at = threading.Event()
    monkeypatch.setattr(Event, "synchronize", lambda event: at.wait(5))
    courier, left = Courier(torch.device("cuda", 0)), []
    for number in range(3):
        courier.give((torch.tensor(number), number), lambda value: left.append(value[1]))
    assert not left
    at.set()
    courier.drain()
    assert left == [0, 1, 2]
    courier.give(None, raise_lost)
    courier.give("late", left.append)
    courier.drain()
    assert left[3:] == ["late"]
    (thread,) = courier._threads
    del courier
    thread.join(5)
    assert not thread.is_alive()


def raise_lost(value):
    raise ConnectionLostError("the connection ended")


def test_the_loss_of_a_mesh_leaves_by_courier(cuda, tmp_path):
    """One rank alone, told that its device is a GPU."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)

    class Group:
        rank, size, get_group_store = staticmethod(lambda: 0), staticmethod(lambda: 1), staticmethod(lambda: store)

    grid = RankGrid.single(Group, device=torch.device("cuda", 0), timeout_s=5)
    rank = ConnectedRank(Group, grid, transport=HostTransport())
    assert float(ProcessCollectives(rank).loss(0, lambda: torch.tensor(2.5))) == 2.5
    (thread,) = rank._courier._threads
    rank.close()
    thread.join(5)
    assert not thread.is_alive()


# ---- no wait for a device ----

PACKAGE = Path(__file__).parents[2] / "pipesched"
WAITS = {"item", "cpu", "tolist", "synchronize", "numpy", "nonzero", "block_current_stream"}
#: Where a host may wait for a device, by file and function, and why.
MAY_WAIT = {
    ("runtime/executors/device_streams.py", "seconds"),  # who reads times
    ("runtime/executors/device_streams.py", "unpack"),  # a CPU rank that takes a value from a GPU
    ("runtime/microbatches.py", "_weights"),  # counting targets on a device: once a step, as docs/howto/losses.md says
    ("runtime/step_call.py", "_read"),  # numbers that rank 0 dealt, which lie on the host
    ("runtime/transport/host_copies.py", "_carry"),  # a thread of its own
    ("runtime/transport/device_channels.py", "drain"),  # when links are made and closed
    ("runtime/transport/device_channels.py", "_read"),  # bytes of a header, which lie on the host
}
STEP = [
    *(
        "runtime/stage/stage.py",
        "runtime/stage/split_backward.py",
        "runtime/stage/weight_stash.py",
        "tensors/payload.py",
        "tensors/keyed_random.py",
        "tensors/function_mode.py",
        "runtime/microbatches.py",
        "runtime/step_call.py",
    ),
    *(
        "tensors/caller_context.py",
        "runtime/async_steps.py",
        "runtime/executors/interpreter.py",
        "runtime/executors/threads.py",
        "runtime/executors/device_streams.py",
    ),
    *("runtime/transport/device_channels.py", "runtime/transport/host_copies.py"),
]


def waits(source: str) -> list[tuple[str, int]]:
    """(function, line) of each call that waits for a device where its tensor lies on one."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


@pytest.mark.parametrize("name", STEP)
def test_no_line_of_a_step_waits_for_a_device(name):
    found = [one for one in waits((PACKAGE / name).read_text(encoding="utf-8")) if (name, one[0]) not in MAY_WAIT]
    assert not found


def test_a_line_that_waits_for_a_device_is_found():
    assert waits("def f(x):\n    return x.sum().item()") == [("f", 2)]
