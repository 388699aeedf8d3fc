"""Replica states: checks that all replicas hold the same state. A checkpoint holds the state of one replica.

The planes, too, hold the same state, except that each has its own blocks of divided weights.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pipesched.errors import CheckpointError
from pipesched.runtime.rank_host import RankHost
from pipesched.saving.collective_work import agreed
from pipesched.saving.manifest import dumped
from pipesched.saving.saved_run import CheckpointPart
from pipesched.saving.tensor_files import bytes_of

__all__ = ["check_equal_planes", "check_equal_states", "fingerprint"]

_COLUMNS = 4096
_WORD = 8  # bytes per 64-bit word


def check_equal_states(part: CheckpointPart, host: RankHost) -> None:
    """Check that ranks that run the same stages in different replicas have identical checkpoint parts. Collective.

    Raises:
        CheckpointError: a tensor or another value differs. All processes raise this error.

    """
    if len(host.grid.rows) == 1:
        return
    states = host.collectives.gather_over_replicas(agreed(host, lambda: dict(_fingerprints(part))))

    def compare() -> None:
        for replica, (rank, own) in enumerate(zip(host.grid.peers, states, strict=True)):
            first = states[0]
            name = next((name for name in {**first, **own} if first.get(name) != own.get(name)), None)
            if name is not None:
                raise CheckpointError(
                    f"replicas must have the same state, because a checkpoint holds the state of one replica; {name} "
                    f"differs between replica 0 (rank {host.grid.peers[0]}) and replica {replica} (rank {rank}); make "
                    f"it equal on all replicas; if each replica needs its own state, such as that of a data loader, "
                    f"gather the states on every rank and pass them in extra="
                )

    agreed(host, compare)


def check_equal_planes(part: CheckpointPart, host: RankHost) -> None:
    """Check that the ranks of each tensor group have identical checkpoint parts, apart from their blocks. Collective.

    Raises:
        CheckpointError: a tensor or another value differs. All processes raise this error.

    """
    peers = host.grid.tensor_peers
    states = host.collectives.gather_over_planes(agreed(host, lambda: dict(_fingerprints(part))))

    def compare() -> None:
        for plane, (rank, own) in enumerate(zip(peers, states, strict=True)):
            first = states[0]
            name = next((name for name in {**first, **own} if first.get(name) != own.get(name)), None)
            if name is not None:
                raise CheckpointError(
                    f"the ranks of a tensor group must have the same state apart from the weights that they divide, "
                    f"because a checkpoint holds it once; {name} differs between rank {peers[0]} and rank {rank} "
                    f"(tensor rank {plane}); make it equal on all ranks"
                )

    agreed(host, compare)


def _fingerprints(part: CheckpointPart) -> Iterator[tuple[str, str]]:
    """Yield the name and the fingerprint of each value and each tensor of a part that is not a block.

    Values, such as the entries of the optimizer state, come before the tensors that belong to them.
    """
    for word, value in part.values.items():
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, own in items:
            yield f"{_NAMES.get(word, word)} {name!r}", hashlib.sha256(dumped(own)).hexdigest()
    for key, tensor in part.tensors.items():
        if key in part.wholes:
            continue
        yield f"{part.entries[key].kind} {key.partition('/')[2]!r}", fingerprint(tensor)


#: Key of a part's values -> the noun that error messages use for an entry under this key.
_NAMES = {
    "modules": "module state",
    "groups": "group of the optimizers",
    "parameters": "optimizer state",
    "schedulers": "scheduler",
    "extra": "extra value",
    "extra leaves": "extra value",
}


def fingerprint(tensor: Tensor) -> str:
    """Return a fingerprint of a tensor's dtype, shape and bits.

    The bits are arranged as a matrix of 64-bit words, whose row sums and column sums are hashed. The sums are computed
    on the tensor's device, about as fast as the device can read the tensor. Any change to a single word is detected.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.numel():
        bits = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        size = len(bits) // _WORD * _WORD
        words = (bits[:size] if bits.data_ptr() % _WORD == 0 else bits[:size].clone()).view(torch.int64)
        if len(words) > _COLUMNS:
            rows = len(words) // _COLUMNS
            matrix = words[: rows * _COLUMNS].view(rows, _COLUMNS)
            for sums in (matrix.sum(0), matrix.sum(1)):
                digest.update(bytes_of(sums))
            words = words[rows * _COLUMNS :]
        digest.update(bytes_of(words))
        digest.update(bytes_of(bits[size:]))
    return digest.hexdigest()
