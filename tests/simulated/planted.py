"""Planted faults: small programs with one mistake each, and the same programs repaired.

`python -m tests.simulated.planted 100` runs each program 100 times both ways, and counts the wrong verdicts.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import nn

from tests.simulated.accelerator import Accelerator, start
from tests.simulated.violations import Violation, ViolationKind

__all__ = ["FAULTS", "Fault", "verdict"]

_HERE, _THERE = "sim:0", "sim:1"


@dataclass(frozen=True)
class Fault:
    """A program that runs with its mistake, or repaired. The violation must be of the kind and name both operations.

    A fault without a kind is refused by torch: `refusal` is a part of the error's text.
    """

    program: Callable[[bool], None]
    kind: ViolationKind | None
    earlier: str = ""
    later: str = ""
    refusal: str = ""

    @property
    def name(self) -> str:
        return self.program.__name__

    def is_named_by(self, violation: Violation) -> bool:
        """Whether a violation has the kind, the names of both operations, and places in the program's own code."""
        ends = violation.earlier, violation.later
        names = self.earlier in violation.earlier.name and self.later in violation.later.name
        code = self.program.__code__
        lines = {line for _, _, line in code.co_lines() if line is not None}
        places = all(
            any(file == code.co_filename and min(lines) <= line <= max(lines) for file, line in end.frames)
            for end in ends
        )
        return violation.kind is self.kind and names and places


FAULTS: list[Fault] = []


def _fault(kind: ViolationKind | None, earlier: str = "", later: str = "", refusal: str = "") -> Callable[..., None]:
    def add(program: Callable[[bool], None]) -> None:
        FAULTS.append(Fault(program, kind, earlier, later, refusal))

    return add


def verdict(accelerator: Accelerator, fault: Fault, *, repaired: bool) -> str | None:
    """Run a program. Return None if the verdict is right, otherwise what is wrong."""
    accelerator.judge.forget()
    try:
        fault.program(repaired)
    except RuntimeError as error:
        if repaired or not fault.refusal or fault.refusal not in str(error):
            return f"raised {error}"
        return None
    accelerator.judge.read()
    found = accelerator.judge.violations
    if repaired:
        return f"repaired, yet {found[0]}" if found else None
    if fault.kind is None:
        return "was not refused"
    if not found:
        return "was not found"
    return None if any(map(fault.is_named_by, found)) else f"was found under other names: {found[0]}"


def _stream(device: str = _HERE) -> torch.Stream:
    return torch.Stream(device=device)


def _now(device: str = _HERE) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def _event(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device)
    event.record(stream)
    return event


# ---- missing waits between streams ----
@_fault(ViolationKind.READ, "aten::mul", "aten::add")
def missing_wait(repaired: bool) -> None:
    writer, reader = _stream(), _stream()
    with writer:
        values = torch.ones(4, device=_HERE) * 2
    if repaired:
        reader.wait_stream(writer)
    with reader:
        values + 1


@_fault(ViolationKind.OVERWRITTEN, "aten::add", "aten::zero_")
def write_after_read_on_another_stream(repaired: bool) -> None:
    writer, reader = _stream(), _stream()
    with writer:
        values = torch.ones(4, device=_HERE)
    reader.wait_stream(writer)
    with reader:
        values + 1
    if repaired:
        writer.wait_stream(reader)
    with writer:
        values.zero_()


@_fault(ViolationKind.WRITTEN_TWICE, "aten::mul_", "aten::add_")
def two_writers(repaired: bool) -> None:
    one, other = _stream(), _stream()
    values = torch.ones(4, device=_HERE)
    one.wait_stream(_now())
    other.wait_stream(_now())
    with one:
        values.mul_(2)
    if repaired:
        other.wait_event(_event(one))
    with other:
        values.add_(1)


@_fault(ViolationKind.READ, "aten::add_", "aten::mul")
def event_recorded_too_early(repaired: bool) -> None:
    writer, reader = _stream(), _stream()
    with writer:
        values = torch.ones(4, device=_HERE)
        early = _event(writer)
        values.add_(1)
        late = _event(writer)
    reader.wait_event(late if repaired else early)
    with reader:
        values * 2


@_fault(ViolationKind.READ, "aten::mul", "aten::copy_")
def missing_wait_before_a_copy(repaired: bool) -> None:
    compute, copies = _stream(), _stream()
    with compute:
        values = torch.ones(4, device=_HERE) * 2
    if repaired:
        copies.wait_event(_event(compute))
    with copies:
        values.to(_THERE, non_blocking=True)


@_fault(ViolationKind.READ, "aten::copy_", "aten::add")
def received_value_used_before_it_arrived(repaired: bool) -> None:
    """A copy between devices makes the target's current stream wait, and no other stream of the target."""
    compute, inward = _stream(_THERE), _stream(_THERE)
    values = torch.ones(4, device=_HERE)
    with inward:
        received = values.to(_THERE, non_blocking=True)
    if repaired:
        compute.wait_stream(inward)
    with compute:
        received + 1


@_fault(ViolationKind.READ, "aten::mul", "aten::copy_")
def wrong_stream_of_the_source_device(repaired: bool) -> None:
    """A copy between devices runs on the current stream of the source's device."""
    compute, inward = _stream(), _stream(_THERE)
    with compute:
        values = torch.ones(4, device=_HERE) * 2
    with compute if repaired else _stream(), inward:
        values.to(_THERE, non_blocking=True)


@_fault(ViolationKind.READ, "aten::mul", "aten::add")
def wait_for_the_current_stream_of_another_device(repaired: bool) -> None:
    """`current_stream()` without a device is that of the thread's current device."""
    compute, lane = _stream(_THERE), _stream(_THERE)
    with torch.accelerator.device_index(1), compute:
        values = torch.ones(4, device=_THERE) * 2
        with torch.accelerator.device_index(0):
            lane.wait_stream(torch.accelerator.current_stream(_THERE if repaired else None))
        with lane:
            values + 1


# ---- what a pipeline does ----
@_fault(ViolationKind.READ, "aten::mm", "aten::add_")
def gradients_reduced_before_they_are_ready(repaired: bool) -> None:
    compute, lane = _stream(), _stream()
    layer = nn.Linear(4, 4, bias=False, device=_HERE)
    compute.wait_stream(_now())
    lane.wait_stream(_now())
    with compute:
        layer(torch.ones(2, 4, device=_HERE)).relu().sum().backward()
        bucket = torch.zeros(4, 4, device=_HERE)
    lane.wait_event(_event(compute) if repaired else torch.Event(_HERE))
    with lane:
        bucket.add_(layer.weight.grad)


@_fault(ViolationKind.OVERWRITTEN, "aten::copy_", "aten::")
def weights_updated_while_a_copy_reads_them(repaired: bool) -> None:
    side = _stream()
    weights = nn.Parameter(torch.ones(4, device=_HERE))
    weights.grad = torch.ones(4, device=_HERE)
    optimizer = torch.optim.SGD([weights], 0.1, foreach=False)
    side.wait_stream(_now())
    with side, torch.no_grad():
        saved = torch.empty(4, pin_memory=True)
        saved.copy_(weights, non_blocking=True)
    if repaired:
        _now().wait_stream(side)
    optimizer.step()


@_fault(ViolationKind.READ, "aten::copy_", "aten::mul")
def offloaded_value_used_before_it_is_back(repaired: bool) -> None:
    side = _stream()
    kept = torch.empty(4, pin_memory=True)
    kept.copy_(torch.ones(4, device=_HERE), non_blocking=True)
    side.wait_stream(_now())
    with side:
        back = kept.to(_HERE, non_blocking=True)
    if repaired:
        _now().wait_stream(side)
    back * 2


@_fault(ViolationKind.READ, "aten::mul", "aten::mm")
def backward_with_a_gradient_of_another_stream(repaired: bool) -> None:
    """Autograd's backward runs on the forward's stream, which must wait for the gradient that starts it."""
    compute, inward = _stream(), _stream()
    layer = nn.Linear(4, 4, device=_HERE)
    compute.wait_stream(_now())
    with compute:
        output = layer(torch.ones(2, 4, device=_HERE))
    with inward:
        grad = torch.ones(2, 4, device=_HERE) * 2
    if repaired:
        compute.wait_stream(inward)
    with compute:
        output.backward(grad)


@_fault(ViolationKind.READ, "aten::mm", "aten::add_")
def reduction_started_in_a_hook_without_a_wait(repaired: bool) -> None:
    lane = _stream()
    layer = nn.Linear(4, 4, bias=False, device=_HERE)
    bucket = torch.zeros(4, 4, device=_HERE)
    lane.wait_stream(_now())

    def reduce(weight: nn.Parameter) -> None:
        if repaired:
            lane.wait_stream(_now())
        with lane:
            bucket.add_(weight.grad)

    layer.weight.register_post_accumulate_grad_hook(reduce)
    layer(torch.ones(2, 4, device=_HERE)).sum().backward()


@_fault(ViolationKind.READ, "aten::mul", "aten::add")
def value_of_another_thread_used_without_an_event(repaired: bool) -> None:
    """Passing a value through a queue orders the hosts, and not the streams."""
    sent: SimpleQueue = SimpleQueue()

    def sender() -> None:
        with _stream() as stream:
            values = torch.ones(4, device=_HERE) * 2
            sent.put((values, _event(stream)))

    thread = threading.Thread(target=sender)
    thread.start()
    values, ready = sent.get()
    if repaired:
        _now().wait_event(ready)
    values + 1
    thread.join()


# ---- memory ----
@_fault(ViolationKind.FREED, "aten::add", "aten::fill_")
def memory_freed_while_another_stream_reads_it(repaired: bool) -> None:
    owner, reader = _stream(), _stream()
    with owner:
        values = torch.ones(64, device=_HERE)
    reader.wait_stream(owner)
    with reader:
        values + 1
    if repaired:
        values.record_stream(reader)
    del values
    with owner:
        torch.full((64,), 3.0, device=_HERE)


@_fault(ViolationKind.FREED, "aten::copy_", "aten::fill_")
def memory_freed_while_a_copy_reads_it(repaired: bool) -> None:
    compute, outward, inward = _stream(), _stream(), _stream(_THERE)
    with compute:
        values = torch.ones(64, device=_HERE)
    outward.wait_stream(compute)
    with outward, inward:
        values.to(_THERE, non_blocking=True)
    if repaired:
        compute.wait_stream(outward)
    del values
    with compute:
        torch.full((64,), 3.0, device=_HERE)


@_fault(ViolationKind.FREED, "aten::add", "aten::fill_")
def received_memory_freed_without_record_stream(repaired: bool) -> None:
    """The memory of a received value belongs to the stream that received it."""
    compute, inward = _stream(_THERE), _stream(_THERE)
    values = torch.ones(64, device=_HERE)
    with inward:
        received = values.to(_THERE, non_blocking=True)
    compute.wait_stream(inward)
    if repaired:
        received.record_stream(compute)
    with compute:
        received + 1
    del received
    with inward:
        torch.full((64,), 3.0, device=_THERE)


# ---- the host ----
@_fault(ViolationKind.HOST_READ, "aten::sum", "aten::item")
def loss_read_by_the_host_before_its_event(repaired: bool) -> None:
    compute = _stream()
    with compute:
        loss = torch.ones(4, device=_HERE).sum()
    if repaired:
        _now().wait_event(_event(compute))
    loss.item()


@_fault(ViolationKind.HOST_READ, "aten::copy_", "aten::sum")
def pinned_memory_read_before_its_event(repaired: bool) -> None:
    loss = torch.empty(4, pin_memory=True)
    loss.copy_(torch.ones(4, device=_HERE), non_blocking=True)
    ready = _event(_now())
    if repaired:
        ready.synchronize()
    loss.sum()


@_fault(ViolationKind.HOST_READ, "aten::copy_", "numpy")
def pinned_memory_read_as_an_array(repaired: bool) -> None:
    loss = torch.empty(4, pin_memory=True)
    loss.copy_(torch.ones(4, device=_HERE), non_blocking=True)
    if repaired:
        _event(_now()).synchronize()
    loss.numpy()


@_fault(ViolationKind.PINNED_REUSED, "aten::copy_", "aten::fill_")
def pinned_buffer_reused_too_early(repaired: bool) -> None:
    batch = torch.ones(4).pin_memory()
    batch.to(_HERE, non_blocking=True)
    if repaired:
        _now().synchronize()
    batch.fill_(2.0)


@_fault(ViolationKind.HOST_READ, "aten::copy_", "aten::sum")
def another_thread_waited(repaired: bool) -> None:
    """What one thread has waited for, another thread knows only after it got a message or a result."""
    loss = torch.empty(4, pin_memory=True)
    with ThreadPoolExecutor(1) as pool:
        loss.copy_(torch.ones(4, device=_HERE), non_blocking=True)
        waited = pool.submit(_event(_now()).synchronize)
        if repaired:
            waited.result()
        loss.sum()


# ---- what torch refuses ----
@_fault(None, refusal="Expected all tensors to be on the same device")
def wrong_device(repaired: bool) -> None:
    torch.ones(4, device=_HERE) + torch.ones(4, device=_HERE if repaired else _THERE)


@_fault(None, refusal="Expected all tensors to be on the same device")
def weights_left_on_the_cpu(repaired: bool) -> None:
    layer = nn.Linear(4, 4)
    if repaired:
        layer.to(_HERE)
    layer(torch.ones(2, 4, device=_HERE))


@_fault(None, refusal="generator")
def wrong_generator(repaired: bool) -> None:
    generator = torch.Generator(_HERE if repaired else "cpu").manual_seed(3)
    torch.empty(4, device=_HERE).bernoulli_(0.5, generator=generator)


def main(times: int) -> int:
    """Run all programs. Print and return the number of wrong verdicts."""
    accelerator = start()
    wrong = 0
    for fault in FAULTS:
        found = [verdict(accelerator, fault, repaired=repaired) for _ in range(times) for repaired in (False, True)]
        texts = [text for text in found if text is not None]
        wrong += len(texts)
        print(f"{fault.name}: {len(found) - len(texts)} of {len(found)} right{''.join(f'; {t}' for t in texts[:1])}")
    print(f"{len(FAULTS)} faults, {times} times each way: {wrong} wrong verdicts")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
