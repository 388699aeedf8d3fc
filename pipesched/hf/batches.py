"""Batches: splits the batches of a data loader into micro-batches, and joins the outputs of micro-batches."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipesched.tensors.row_count import rows_of_batch
from pipesched.tensors.row_evidence import Evidence
from pipesched.tensors.row_split import RowSplit
from pipesched.tensors.rows import Argument, Dim

__all__ = ["cut", "joined", "rows_in"]


def rows_in(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch."""
    return rows_of_batch(_arguments(inputs))


def cut(inputs: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """Split a batch by rows into ``parts`` nearly equal parts, or into its rows if it has fewer."""
    rows = rows_in(inputs)
    split = RowSplit.into(Evidence(), rows, min(parts, rows))
    columns = [split.parts(argument) for argument in _arguments(inputs)]
    return [dict(zip(inputs, values, strict=True)) for values in zip(*columns, strict=True)]


def joined(outputs: list[Any], device: torch.device) -> Any:
    """Return the outputs of micro-batches as the output of their batch, in float32 and without the losses."""
    first = outputs[0]
    if isinstance(first, Mapping):
        names = [name for name, value in first.items() if name != "loss" and value is not None]
        return {name: joined([one[name] for one in outputs], device) for name in names}
    if isinstance(first, tuple | list):
        return tuple(joined(list(parts), device) for parts in zip(*outputs, strict=True))
    if isinstance(first, Tensor):
        whole = torch.cat([one.to(device) for one in outputs]) if first.dim() else first.to(device)
        return whole.float() if whole.is_floating_point() else whole
    return first


def _arguments(inputs: Mapping[str, Any]) -> list[Argument]:
    return [Argument(name, value, Dim()) for name, value in inputs.items()]
