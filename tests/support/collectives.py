"""Collectives: counts the collectives that FSDP2, and pipesched's sums over replicas, start in this process."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import distributed

from pipesched.runtime.reductions import replica_sum

#: The collectives of torch.distributed, by their names in new and older versions of torch -> the name to count.
NAMES = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce",
    "all_to_all_single": "reduce",
    "all_reduce": "all-reduce",
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the gathers, reductions (reduce-scatters) and all-reduces that start in this context.

    pipesched adds gradients of replicas with an all-to-all in place of a reduce-scatter. It counts as a reduction.
    """
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        gather = _noting(replica_sum._all_gather, "gather", calls)
        stack.enter_context(mock.patch.object(replica_sum, "_all_gather", gather))
        for name, kind in NAMES.items():
            if plain := getattr(distributed, name, None):
                stack.enter_context(mock.patch.object(distributed, name, _noting(plain, kind, calls)))
        yield calls


def _noting(plain: Any, kind: str, calls: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[kind] += 1
        return plain(*args, **kwargs)

    return call
