"""Kept calls: batches are divided anew among replicas. The ranks are threads whose collectives are in memory."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipesched.elastic.kept_calls import KeptCall, divided_anew, of_replica
from pipesched.runtime.microbatches import GivenBatch, Microbatch, Splitter
from tests.support.random_programs import quick

pytestmark = pytest.mark.timeout(60)

PER_REPLICA = 6  # micro-batches of two rows


def batch(step: int, replica: int) -> torch.Tensor:
    """Return a batch whose rows are numbered over all steps and replicas."""
    first = 1000 * step + 2 * PER_REPLICA * replica
    return torch.arange(first, first + 2 * PER_REPLICA).view(-1, 1)


def call(step: int, replica: int, num_replicas: int, given: GivenBatch | None = None) -> KeptCall:
    whole = batch(step, replica)
    given = given or GivenBatch((whole,), {"mask": whole + 0.5}, -whole)
    return KeptCall(given, None, {}, Splitter(PER_REPLICA, True), replica, num_replicas)


def on_ranks(num_replicas: int, num_ranks: int, job: Callable[[Any, int], Any]) -> list[Any]:
    """Call a function on each rank, with a host whose ranks form this number of replicas; return the results."""
    size = num_ranks // num_replicas
    rows = [list(range(size * replica, size * (replica + 1))) for replica in range(num_replicas)]
    values: dict[int, Any] = {}
    barrier = threading.Barrier(num_ranks, timeout=30)

    def run(rank: int) -> Any:
        def gathered_in_all(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            every = [values[other] for other in range(num_ranks)]
            barrier.wait()
            return every

        grid = SimpleNamespace(rank=rank, rows=rows, replica=rank // size)
        return job(SimpleNamespace(grid=grid, collectives=SimpleNamespace(gathered_in_all=gathered_in_all)), rank)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def rows_of(parts: Any) -> list[float]:
    """Return the numbers of the rows, after a check that all parts of a micro-batch belong together."""
    for (inputs,), kwargs, target in parts:
        assert torch.equal(kwargs["mask"], inputs + 0.5)
        assert torch.equal(target, -inputs)
    return [float(row) for (inputs,), _, _ in parts for row in inputs.detach()]


@quick
@given(st.data())
def test_the_new_replicas_get_the_micro_batches_of_the_old_ones_in_their_order(data):
    """A step whose batch of an old replica nobody has is left out."""
    before = data.draw(st.sampled_from([1, 2, 3, 4]))
    after = data.draw(st.sampled_from([count for count in (1, 2, 3) if before * PER_REPLICA % count == 0]))
    num_ranks = after * data.draw(st.sampled_from([1, 2]))
    steps = data.draw(st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=2))
    replicas = st.integers(0, before - 1)
    held: list[dict[int, int]] = [
        {step: data.draw(replicas) for step in steps if data.draw(st.booleans())} for _ in range(num_ranks)
    ]

    def job(host: Any, rank: int) -> Mapping[int, Any]:
        return divided_anew(host, {step: call(step, replica, before) for step, replica in held[rank].items()})

    found = on_ranks(after, num_ranks, job)
    complete = [step for step in steps if {own[step] for own in held if step in own} == set(range(before))]
    for rank, divided in enumerate(found):
        assert sorted(divided) == sorted(complete)
        for step, parts in divided.items():
            whole = [float(row) for replica in range(before) for row in batch(step, replica)]
            size, replica = len(whole) // after, rank * after // num_ranks
            assert rows_of(parts) == whole[size * replica : size * (replica + 1)]


def test_a_batch_that_several_ranks_have_is_sent_by_the_first_of_them_only():
    """The others, which have no batch to send, need not split theirs."""
    sent = []

    class Watched(KeptCall):
        def in_microbatches(self) -> Any:
            sent.append(self.metrics)
            return super().in_microbatches()

    def job(host: Any, rank: int) -> Any:
        return divided_anew(host, {0: Watched(*call(0, rank // 2, 2)._replace(metrics=rank))})

    on_ranks(1, 4, job)
    assert sorted(sent) == [0, 2]


def test_micro_batches_that_the_caller_has_split_are_divided_anew():
    def job(host: Any, rank: int) -> Any:
        rows = batch(0, rank).split(2)
        parts = [Microbatch(own, mask=own + 0.5, target=-own) for own in rows]
        return divided_anew(host, {0: call(0, rank, 2, GivenBatch((), {}, None, parts))})

    one, other = (rows_of(found[0]) for found in on_ranks(2, 2, job))
    assert one == [float(row) for row in batch(0, 0)]
    assert other == [float(row) for row in batch(0, 1)]


def test_a_call_for_other_micro_batches_has_them_in_the_same_order():
    before = call(3, 1, 2)
    parts = before.in_microbatches()
    after = before.over(parts[::-1], 0, 1)
    assert (after.replica, after.num_replicas) == (0, 1)
    assert rows_of(after.in_microbatches()) == rows_of(parts[::-1])


def test_micro_batches_without_a_target_have_none():
    inputs = torch.arange(12.0).view(-1, 1)
    parts = call(0, 0, 1, GivenBatch((inputs,), {}, None)).in_microbatches()
    assert [target for _, _, target in parts] == [None] * PER_REPLICA


def test_a_copied_call_keeps_its_batch_when_the_caller_changes_it():
    inputs = torch.ones(12, 1, requires_grad=True)
    before = call(0, 0, 1, GivenBatch((inputs,), {"mask": inputs + 0.5}, -inputs))
    after = before.copied()
    with torch.no_grad():
        inputs.zero_()
    assert rows_of(after.in_microbatches()) == [1.0] * 12
    assert after.given.args[0].requires_grad
    assert after.given.args[0].is_leaf


@pytest.mark.parametrize("passing", [[], [0], [1], [2, 3], [0, 3], [0, 1, 2, 3]])
def test_a_replica_takes_the_batch_of_the_first_of_its_ranks_that_has_one(passing):
    def job(host: Any, rank: int) -> Any:
        return of_replica(host, [((rank,), {}, None)] if rank in passing else None)

    found = on_ranks(2, 4, job)
    for rank, parts in enumerate(found):
        own = [other for other in passing if other // 2 == rank // 2]
        assert parts == ([((own[0],), {}, None)] if own else None)
