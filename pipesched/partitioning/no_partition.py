"""No partition: builds the error for a request that no partition satisfies, with the violated limit and a remedy."""

from bisect import bisect_left
from functools import cached_property
from typing import Any

import numpy as np

from pipesched.errors import PartitionError
from pipesched.partitioning.interleaving import solved
from pipesched.partitioning.knapsack import Knapsack
from pipesched.partitioning.request import Request
from pipesched.units import counted, quote_bytes

__all__ = ["no_partition_error"]

_MOST_IDEALS = 5_000  # maximum number of order ideals; a small search is enough, as the remedy need not be exact


def no_partition_error(request: Request, *, exact: bool) -> PartitionError:
    """Build the error for a request that no partition satisfies.

    The remedy is computed only when the message is read, because the planner tries many requests and ignores their
    messages.

    Args:
        request: the request.
        exact: True if it is proved that no partition exists; False if the search merely found none.

    """
    return PartitionError(_Text(request, exact))


class _Text:
    """The text of the error, computed when the text is first read."""

    def __init__(self, request: Request, exact: bool) -> None:
        self._request = request
        self._exact = exact

    @cached_property
    def _text(self) -> str:
        rule = "there is no partition" if self._exact else "no partition was found"
        limits = [limit for limit in self._request.limits if limit is not None]
        free = self._request.but(memory_limit_bytes=None)
        if limits and _possible(free):
            place, numbers, remedy = _memory(self._request, limits)
        else:
            place, numbers, remedy = _pins(free)
        return f"{rule} {place}; {numbers}; {remedy}"

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return repr(self._text)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._text,)  # pickled as a plain string


def _possible(request: Request) -> bool:
    try:
        return solved(request.problem(), _MOST_IDEALS).found is not None
    except PartitionError:  # fewer blocks than stages
        return False


def _memory(request: Request, limits: list[int]) -> tuple[str, str, str]:
    most = max(limits) if len(limits) == len(request.limits) else None
    place = f"of {len(request.layers)} layers into {counted(request.num_stages, 'stage')} within memory_limit_bytes"
    alone = _alone(request)
    enough = _enough(request)
    if most is not None and alone[1] > most:
        numbers = f"{alone[0]} {alone[1]} bytes ({quote_bytes(alone[1])}), {alone[1] - most} more than a rank has"
    else:
        shown = ", ".join(map(str, sorted(set(limits))))
        numbers = f"the limit is {shown} bytes per rank, but {enough / max(limits) - 1:.1%} more would be enough"
    alternatives = _recompute(request) + _more_ranks(request)
    return place, numbers, f"allow {enough} bytes ({quote_bytes(enough)}) per rank{alternatives}"


def _alone(request: Request) -> tuple[str, int]:
    """Find the block that needs the most memory on the stage with the fewest micro-batches in flight.

    Returns the beginning of a sentence, such as ``layer 'a' alone takes``, and the memory in bytes.
    """
    problem = request.problem()
    layers = problem.blocks.layers
    blocks = problem.blocks
    fewest = min(slot.in_flight for slot in problem.layout.slots)
    needed = blocks.total(layers.state_bytes + fewest * layers.activation_bytes)
    if problem.options:
        knapsack = Knapsack(problem.options)
        items_of = [[knapsack.item(layer, fewest) for layer in members] for members in blocks.members]
        needed = np.array([knapsack.least_bytes(items) for items in items_of])
    members = blocks.members[int(needed.argmax())]
    layer = f"layer {layers.names[members[0]]!r}"
    others = counted(len(members) - 1, "layer")
    takes = "alone takes" if len(members) == 1 else f"and {others} that must be in the same stage together take"
    return f"{layer} {takes}", int(needed.max())


def _enough(request: Request) -> int:
    """Return a memory limit in bytes, the same for every rank, that makes a partition possible.

    For small graphs, the result is the smallest such limit.
    """
    problem = request.problem()
    layers = problem.blocks.layers
    most = max(slot.in_flight for slot in problem.layout.slots)
    working = max((option.working_bytes for options in problem.options for option in options), default=0)
    largest = working + int((layers.state_bytes + most * layers.activation_bytes).sum())
    return bisect_left(range(largest), True, key=lambda limit: _possible(request.but(memory_limit_bytes=limit)))


def _recompute(request: Request) -> str:
    """Return the advice to recompute activations, if this makes a partition possible; otherwise ""."""
    if (
        request.checkpoint
        or request.any_order
        or request.communication == "serial"
        or not _possible(request.but(checkpoint=("recompute",)))
    ):
        return ""
    return ", or allow activations to be recomputed (checkpoint=('recompute',))"


def _more_ranks(request: Request) -> str:
    """Return the advice to use more ranks, if all ranks are alike and a partition then exists; otherwise ""."""
    if (
        request.placement is not None
        or len(set(request.ranks)) > 1
        or not (request.in_flight is None or callable(request.in_flight))
    ):
        return ""
    uniform = {"memory_limit_bytes": request.limits[0], "speeds": None}
    for more in range(request.num_stages + 1, min(2 * request.num_stages + 8, len(request.layers)) + 1):
        if _possible(request.but(num_stages=more, **uniform)):
            return f", or use {more} ranks"
    return ""


def _pins(request: Request) -> tuple[str, str, str]:
    """Return three parts of the error for requirements that no partition meets: sizes, requirements and remedy.

    The requirements are ``starts``, ``together`` and ``exactly``.
    """
    pins = [f"{layer!r} begins stage {stage}" for layer, stage in request.starts.items()]
    pins += [f"{', '.join(map(repr, group))} share a stage" for group in request.together]
    pins += ["no stage is empty"] * request.exactly
    return (
        f"of {len(request.layers)} layers into {counted(request.num_stages, 'stage')}",
        f"the requirements are: {'; '.join(pins)}",
        _without(request),
    )


def _without(request: Request) -> str:
    """Return the advice to remove one requirement if this makes a partition possible, otherwise to remove several."""
    starts: dict[Any, int] = dict(request.starts)
    for layer in starts:
        others = {name: stage for name, stage in starts.items() if name != layer}
        if _possible(request.but(starts=others)):
            return f"a partition exists if {layer!r} may be in any stage"
    for place, group in enumerate(request.together):
        if _possible(request.but(together=request.together[:place] + request.together[place + 1 :])):
            return f"a partition exists if {', '.join(map(repr, group))} need not share a stage"
    if request.exactly and _possible(request.but(exactly=False)):
        return "a partition exists without exactly=True"
    return "remove several of these requirements"
