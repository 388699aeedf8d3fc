"""Jobs of test_distributed that send values of many forms between ranks, and measure the memory of messages."""

import random
from typing import Any

import torch
from torch import Tensor

from pipesched import schedules
from pipesched.program.lowering import lower
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.rank_grid import RankGrid
from pipesched.tensors.payload import Payload, PerConsumer
from tests.support.jobs.programs import checked_run, run_spec

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
PLAIN = [None, 3, 3.0, True, "text", float("nan"), (), -0.0]


def tensor(rng: random.Random) -> Tensor:
    """Return a plain tensor of any dtype: dense or with gaps, permuted, expanded, overlapping, empty or a scalar."""
    shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
    made = (
        torch.rand([2 * size for size in shape], generator=torch.Generator().manual_seed(rng.randrange(99))) * 9
    ).to(rng.choice(DTYPES))
    for dim in range(len(shape)):
        step = rng.choice([1, 2])
        made = made[(slice(None),) * dim + (slice(rng.randrange(2), None, step),)]
    if shape and rng.random() < 0.5:
        made = made.permute(rng.sample(range(len(shape)), len(shape)))
    if rng.random() < 0.3:
        made = made.unsqueeze(0).expand(3, *made.shape)
    if made.dim() and made.shape[-1] >= 3 and rng.random() < 0.3:
        made = made.unfold(-1, 2, 1)
    if rng.random() < 0.3:
        made = made.conj().imag if made.is_complex() and rng.random() < 0.5 else made.conj()
    if made.dtype.is_floating_point and rng.random() < 0.5:
        made = made.detach().requires_grad_()
    return made


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(6) if depth else rng.randrange(3)
    if kind < 2:
        return tensor(rng)
    if kind == 2:
        return rng.choice(PLAIN)
    if kind == 3:  # several tensors that share one storage
        whole = torch.arange(24.0)
        return [whole[rng.randrange(6) :], whole.view(4, 6).t(), whole.view(torch.int32)[3:7], tensor(rng)]
    parts = [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 4 and parts:
        return (*parts, parts[0])  # the same object at two places
    return {str(index): part for index, part in enumerate(parts)}


def assert_same(got: Any, sent: Any) -> None:
    if isinstance(sent, Payload):
        assert (got.spec, got.places, got.needs_grad) == (sent.spec, sent.places, sent.needs_grad)
        got, sent = got.leaves, sent.leaves
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        assert type(one) is type(other), (one, other)
        if isinstance(other, Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one, other)
        else:
            assert repr(one) == repr(other)
    assert sharing(got) == sharing(sent)


def sharing(leaves: Any) -> list[tuple[int, int]]:
    """Return the pairs of positions of tensors that share a storage."""
    places = [
        leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) and leaf.numel() else -index
        for index, leaf in enumerate(leaves)
    ]
    unlike = [isinstance(leaf, Tensor) and (leaf.is_conj() or leaf.is_neg()) for leaf in leaves]
    pairs = ((a, b) for b in range(len(places)) for a in range(b))
    return [(a, b) for a, b in pairs if places[a] == places[b] and not (unlike[a] or unlike[b])]


class Carries:
    """A fake stage that sends given outputs and gradients, and checks that it receives those of the other stages."""

    def __init__(self, index: int, outputs: list[Payload], grads: list[Any]) -> None:
        self.index, self.outputs, self.grads = index, outputs, grads
        self.seen = 0

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        for one in arrived:
            assert_same(one, self.outputs[microbatch])
            self.seen += 1
        return self.outputs[microbatch]

    def backward(self, microbatch: int, *grads: Any) -> Any:
        for one in grads:
            assert_same(one, self.grads[microbatch])
            self.seen += 1
        return PerConsumer([self.grads[microbatch]] * self.index)  # index is the number of producers


def round_trips(group: Any, seeds: list[int]) -> int:
    """Send random values forward and gradients back between two ranks. Return the number of checked values.

    In the first run, the receiver does not know the layouts of the messages. The second run has the same layouts as the
    first. Two later runs reverse the order of the micro-batches, so some layouts differ from those of the run before.
    """
    rngs = [random.Random(seed) for seed in seeds]
    outputs = [Payload.of(value(rng)) for rng in rngs]
    grads = [tuple(rng.choice([None, tensor(rng).detach()]) for _ in range(rng.randrange(4))) for rng in rngs]
    program = lower(schedules.get("gpipe").program(2, len(seeds)))
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    seen = 0
    for order in (1, 1, -1, -1, 1):
        stages = {index: Carries(index, outputs[::order], grads[::order]) for index in range(2)}
        executor.run(run_spec(program, stages), grad=False, looks=list(range(len(seeds))))
        seen += stages[group.rank()].seen
    executor.close()
    return seen


def long_values(group: Any, kilobytes: list[int]) -> int:
    """Send tensors larger than a connection's buffers, all before the first is received. Return how many arrived."""
    outputs = [Payload.of(torch.full((size, 256), float(size))) for size in kilobytes]
    grads = [one.leaves for one in outputs]
    program = lower(schedules.get("gpipe").program(2, len(outputs)))
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    for _ in range(3):
        stages = {index: Carries(index, outputs, grads) for index in range(2)}
        executor.run(run_spec(program, stages), grad=False, looks=kilobytes)
    executor.close()
    return stages[group.rank()].seen


class Changing(Carries):
    """A `Carries` that sends copies of its values, and sets each copy to zero in the next action."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.given: list[Tensor] = []

    def forward(self, microbatch: int, *arrived: Any, **how: bool) -> Any:
        return self._copy(super().forward(microbatch, *arrived, **how))

    def backward(self, microbatch: int, *grads: Any) -> Any:
        return PerConsumer(self._copy(Payload.of(one)).leaves for one in super().backward(microbatch, *grads))

    def _copy(self, value: Payload) -> Payload:
        for tensor in self.given:
            tensor.zero_()
        copy = value.map_tensors(Tensor.clone)
        self.given = list(copy.tensors)
        return copy


def changed_once_sent(group: Any, kilobytes: list[int]) -> int:
    """Check that tensors that are modified in place right after a send arrive unchanged."""
    outputs = [Payload.of(torch.full((size, 256), float(size))) for size in kilobytes]
    grads = [one.leaves for one in outputs]
    program = lower(schedules.get("gpipe").program(2, len(outputs)))
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    for _ in range(3):
        stages = {index: Changing(index, outputs, grads) for index in range(2)}
        executor.run(run_spec(program, stages), grad=False, looks=kilobytes)
    executor.close()
    return stages[group.rank()].seen


def memory_of_messages(group: Any, name: str, num_microbatches: int) -> int:
    """Count, for each layout, the messages whose memory this rank holds. Return the largest count."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    program = lower(schedules.get(name).program(group.size(), num_microbatches))
    for _ in range(3):
        checked_run(executor, program)
    made = most_made(executor)
    executor.close()
    return made


def memory_of_long_messages(group: Any, name: str, num_microbatches: int) -> int:
    """Return the same number as `memory_of_messages`, for messages so long that gloo sends them."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    program = lower(schedules.get(name).program(group.size(), num_microbatches))
    outputs = [Payload.of(torch.ones(1100, 256))] * num_microbatches
    for _ in range(3):
        stages = {index: Carries(index, outputs, [one.leaves for one in outputs]) for index in range(2)}
        executor.run(run_spec(program, stages), grad=False)
    made = most_made(executor)
    executor.close()
    return made


def most_made(executor: ProcessExecutor) -> int:
    channels = [channel for one in executor.connected.wire()._neighbours.values() for channel in one.outgoing]
    return max(
        sum(sent.spare is form.spare for sent in channel._sent) + len(form.spare)
        for channel in channels
        for form in channel.predictor.foreseen
    )
