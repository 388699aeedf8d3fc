"""Batch loop: iterates over the batches of rank 0 on every rank, so that all ranks stop when the data has ended."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from pipesched.errors import InputError, PipeschedError
from pipesched.runtime.rank_host import RankHost

__all__ = ["batches"]

T = TypeVar("T")

_WHAT = "batches(), where rank 0 loads a batch"


def batches(host: RankHost, loader: Iterable[T] | None) -> Iterator[T | None]:
    """Yield the batches of ``loader``; on a rank that passes no batches, yield None for each batch of rank 0.

    Raises:
        InputError: a rank that passes batches has no loader, or another rank has one.

    """
    if host.grid.inputs == "all":
        if loader is None:
            raise InputError(
                "batches() must get a loader on each rank that passes batches; got None; pass the loader, or make the "
                "pipeline with Distributed(inputs='first'), with which only rank 0 needs a loader"
            )
        yield from loader
        return
    if (loader is None) == (host.grid.rank == 0):
        error = InputError(
            f"with inputs='first', rank 0 must pass a loader to batches(), and the other ranks must pass None; rank "
            f"{host.grid.rank} passed {'None' if loader is None else 'a loader'}; call batches(loader if rank == 0 "
            f"else None)"
        )
        host.collectives.fail("batches", error)
    if loader is None:
        while host.collectives.agreed(bool, _WHAT):
            yield None
    else:
        yield from _scattered(host, loader)


def _scattered(host: RankHost, loader: Iterable[T]) -> Iterator[T]:
    """Yield the batches of rank 0. Tell the other ranks before each batch, and after the last one."""
    iterator = iter(loader)
    taken: list[T] = []

    def take() -> bool:
        taken[:] = islice(iterator, 1)
        return bool(taken)

    try:
        while host.collectives.agreed(take, _WHAT):
            yield taken[0]
    except GeneratorExit:  # the loop on rank 0 has ended early
        if not host.executor.closed:
            with suppress(PipeschedError):
                host.collectives.agreed(lambda: False, _WHAT)
        raise
