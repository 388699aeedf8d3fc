"""Unguarded: switches off a guard of pipesched, so that a test sees whether `Pipeline.check` finds what it guards."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import PropertyMock, patch

__all__ = ["GUARDS", "unguarded"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _second(first: Any, second: Any) -> Any:
    return second


def _no_bytes(*args: Any, **kwargs: Any) -> bytes:
    return b""


#: The guard -> the functions that replace its parts.
GUARDS: dict[str, dict[str, Any]] = {
    "second derivatives": {"pipesched.pipeline.autograd_bridge._check_builds_no_graph": _nothing},
    "rows in lists": {"pipesched.tensors.row_split.RowSplit._is_by_row": lambda *args: False},
    "attributes of weights": {
        "pipesched.model.tied_weights.with_attributes_of": _second,
        "pipesched.reference.reference_step.with_attributes_of": _second,
    },
    "recomputed twice": {
        "pipesched.capture.captured_model.CapturedModel.recomputed": PropertyMock(return_value=frozenset())
    },
    "recomputed layers": {"pipesched.pipeline.assembly.check_recomputed": _nothing},
    "same batches": {"pipesched.pipeline.call_builder.digest_of_values": _no_bytes},
    "statistics of copies": {"pipesched.runtime.stage.batch_norm.MiniBatchNorms.check": _nothing},
    "attributes of layers": {"pipesched.model.containers.Shells.follow": _nothing},
}


@contextmanager
def unguarded(guard: str) -> Iterator[None]:
    """Switch a guard off in the ``with`` block."""
    with ExitStack() as stack:
        for place, instead in GUARDS[guard].items():
            stack.enter_context(patch(place, instead))
        yield
