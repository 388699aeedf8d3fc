"""Common values: values that several processes hold. They must be identical in all processes, and are saved once."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesched.errors import CheckpointError
from pipesched.runtime.rank_host import RankHost
from pipesched.saving.collective_work import agreed
from pipesched.saving.state_encoding import Encoder
from pipesched.saving.tensor_files import bytes_of

__all__ = ["Encoded", "encode", "kept_here"]


@dataclass(frozen=True)
class Encoded:
    """An encoded value, and its tensors, keyed as in the checkpoint."""

    value: Any
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """Return the digests of all tensors and plain values inside the encoded value, keyed by path."""
        return dict(self._digests(self.value, ""))

    def _digests(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        parts: Any = list(enumerate(value)) if isinstance(value, list) else None
        if isinstance(value, dict):
            key = value.get("tensor", value.get("array"))
            if isinstance(key, str):
                digest = hashlib.sha256(bytes_of(self.tensors[key])).hexdigest()
                yield path, f"{digest} {tuple(self.tensors[key].shape)} {value.get('dtype')}"
                return
            inner = next((value[word] for word in ("dict", "tuple", "pairs") if word in value), None)
            parts = list(inner.items() if isinstance(inner, dict) else enumerate(inner or ()))
            parts = None if inner is None else parts
        if parts is None:
            yield path, json.dumps(value, sort_keys=True)
            return
        yield f"{path}()", str(len(parts))
        for name, part in parts:
            yield from self._digests(part, f"{path}[{name!r}]")


def encode(value: Any, prefix: str) -> Encoded:
    """Encode a value. The keys of its tensors begin with ``prefix``."""
    encoder = Encoder(prefix)
    return Encoded(encoder.encoded(value), encoder.tensors)


def kept_here(host: RankHost, rank: int, what: str, items: Mapping[str, Encoded], *, everywhere: bool) -> set[str]:
    """Return the names of the values that this process saves. Collective.

    If several processes have a value, the first of these processes saves the value.

    Args:
        host: the RankHost that runs the ranks of this process.
        rank: the rank of this process within its replica.
        what: the kind of values, as a plural noun for error messages.
        items: the values of this process, keyed by name.
        everywhere: whether every process must have every value.

    Raises:
        CheckpointError: a value differs between processes of a replica. All processes raise this error.

    """
    digests = host.collectives.gathered({name: item.digests() for name, item in items.items()})
    first: dict[str, int] = {}
    for giver, own in enumerate(digests):
        for name in own:
            first.setdefault(name, giver)
    agreed(host, lambda: _check_identical(what, digests, first, host.grid.pipeline, everywhere=everywhere))
    return {name for name in items if first[name] == rank}


def _check_identical(
    what: str,
    digests: Sequence[Mapping[str, Mapping[str, str]]],
    first: Mapping[str, int],
    ranks: Sequence[int],
    *,
    everywhere: bool,
) -> None:
    """Raise CheckpointError unless all processes of a replica have the same values.

    Args:
        what: the kind of values, as a plural noun.
        digests: the digests of each process's values.
        first: for each value, the index of the first process that has it.
        ranks: the ranks of the processes, for the message.
        everywhere: whether every process must have every value.

    """
    for name, giver in first.items():
        theirs = digests[giver][name]
        for rank, every in zip(ranks, digests, strict=False):
            own = every.get(name)
            if own is None:
                if everywhere:
                    raise CheckpointError(
                        f"every rank must pass the same {what}; {name!r} was passed on rank {ranks[giver]}, but not on "
                        f"rank {rank}; pass it on every rank"
                    )
                continue
            other = next((path for path in {**theirs, **own} if theirs.get(path) != own.get(path)), None)
            if other is not None:
                raise CheckpointError(
                    f"{what} must be identical on all ranks, except tensors that have the name of a parameter or "
                    f"buffer of the model; {name!r} differs between rank {ranks[giver]} and rank {rank} at "
                    f"{name}{other.removesuffix('()')}; to save state that differs by rank, gather the states of all "
                    f"ranks, and pass the gathered state on every rank"
                )
