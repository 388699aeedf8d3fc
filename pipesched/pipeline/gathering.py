"""Gathering: bring the states of all ranks of a mesh together, or all weights into the model."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipesched.checks import is_count, shown
from pipesched.errors import InputError
from pipesched.model.stale_weights import Placement, StaleGuard
from pipesched.pipeline.assembly import Assembly
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.rank_host import MeshRanks, RankHost
from pipesched.tensors.exchange import copy_into
from pipesched.tensors.meta_tensors import give_contents

__all__ = ["gather_model", "merged_state", "named_tensors", "place_weights"]

#: The shape and the bytes of each tensor that a rank gives, by name.
_Share = Mapping[str, tuple[tuple[int, ...], int]]

_BATCH = 64 << 20  # bytes that travel together
_EXTRA = "_extra_state"


def place_weights(roots: Mapping[str, nn.Module], guard: StaleGuard, host: RankHost, assembly: Assembly) -> None:
    """Tell a model's guard which of its tensors other ranks train. roots: modules by the prefix of their names."""
    if isinstance(host, MeshRanks):
        names = (name for name, _ in named_tensors(roots, duplicates=True))
        homes = {name: assembly.owners.rank(name) for name in names}
        layers = [layer for stage in assembly.stages.values() for layer in stage.modules.values()]
        run_here = [module for layer in layers for module in layer.modules()]
        guard.place(Placement(host.group, host.rank, homes), run_here, host.executor)


def merged_state(state: Mapping[str, Any], names: Iterable[str], host: MeshRanks) -> dict[str, Any]:
    """The states of all ranks in one, on every rank, also of what ``wrap=`` has sharded. Collective.

    Args:
        state: of this rank.
        names: of the whole model's state, in its order.
        host: of the ranks.

    """
    executor = host.executor
    with executor.collective("full_state_dict"):
        own = {name: _whole(value) if isinstance(value, Tensor) else value for name, value in state.items()}
    merged = {name: value for share in executor.exchange(own) for name, value in share.items()}
    return {name: merged[name] for name in (*names, *merged) if name in merged}  # what wrap has added comes last


def gather_model(
    roots: Mapping[str, nn.Module],
    state: Mapping[str, Any],
    *,
    guard: StaleGuard,
    host: RankHost,
    assembly: Assembly,
    rank: int | None,
) -> None:
    """Bring the weights and buffers of all ranks into the model of one rank, or of all. Collective under a mesh.

    Args:
        roots: the model and its loss module, by the prefix of their names.
        state: of this rank.
        guard: of the model.
        host: of the ranks.
        assembly: says which rank trains which weight.
        rank: the one that gathers; None: all.

    """
    if not isinstance(host, MeshRanks):
        _check_target(rank, [rank], 1)
        return
    with host.connected() as executor, guard.lifted():
        tensors = dict(named_tensors(roots))
        own = {
            name: (tuple(tensor.shape), tensor.nbytes)
            for name, tensor in tensors.items()
            if host.holds(assembly.owners.rank(name))
        }
        extra = {name: value for name, value in state.items() if name.endswith(_EXTRA)}
        asked, shares, extras = zip(*executor.exchange((rank, own, extra)), strict=True)
        targets = _check_target(rank, asked, executor.num_ranks)
        _check_fits(executor.exchange(_misfit(tensors, shares) if executor.rank in targets else None))
        _collect(executor, targets, tensors, shares)
        if executor.rank in targets:
            for theirs in extras:
                for name, value in theirs.items():
                    _holder(roots, name).set_extra_state(value)
    if executor.rank in targets:
        guard.release()


def _holder(roots: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module of which a name in the state is the extra state."""
    prefix = max((prefix for prefix in roots if name.startswith(prefix)), key=len)
    return roots[prefix].get_submodule(name.removeprefix(prefix).removesuffix(_EXTRA).removesuffix("."))


def named_tensors(roots: Mapping[str, nn.Module], *, duplicates: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers under all their names, or a shared one once."""
    for prefix, root in roots.items():
        for named in (root.named_parameters, root.named_buffers):
            for name, tensor in named(remove_duplicate=not duplicates):
                yield prefix + name, tensor


def _check_target(rank: Any, asked: Sequence[Any], num_ranks: int) -> range:
    """The ranks that gather. Raises InputError, in all ranks alike."""
    for number, other in enumerate(asked):
        if other is not None and not (is_count(other, 0) and other < num_ranks):
            raise InputError(
                f"gather_model(rank) takes a rank of the mesh, or None for all; rank {number} of {num_ranks} passed "
                f"{shown(other)}; pass one of 0 to {num_ranks - 1}, or None"
            )
    if any(other != rank for other in asked):
        raise InputError(
            f"all ranks gather the model on the same rank; ranks 0 to {num_ranks - 1} passed "
            f"{', '.join(map(str, asked))}; pass the same on every rank"
        )
    return range(num_ranks) if rank is None else range(rank, rank + 1)


def _misfit(tensors: Mapping[str, Tensor], shares: Sequence[_Share]) -> str | None:
    """What keeps this rank's model from taking the tensors of all."""
    given = {name: (rank, shape) for rank, share in enumerate(shares) for name, (shape, _) in share.items()}
    for name, (rank, shape) in given.items():
        if name not in tensors:
            return f"{name!r} of rank {rank} is missing"
        if tuple(tensors[name].shape) != shape:
            return f"{name!r} has the shape {list(tensors[name].shape)}, on rank {rank} {list(shape)}"
    missing = next((name for name in tensors if name not in given), None)
    return None if missing is None else f"there is {missing!r}, which no rank trains"


def _check_fits(found: Sequence[str | None]) -> None:
    """Raise InputError, in all ranks alike, where a model cannot take the tensors of all."""
    for rank, wrong in enumerate(found):
        if wrong is not None:
            raise InputError(
                f"gather_model brings weights into a model that has the same ones on every rank; in the model of rank "
                f"{rank} {wrong}; wrap= has changed layers on one rank alone: use full_state_dict"
            )


def _collect(
    executor: ProcessExecutor, targets: Collection[int], tensors: Mapping[str, Tensor], shares: Sequence[_Share]
) -> None:
    """Each rank in turn gives its tensors to those that gather, some at a time."""
    for source, share in enumerate(shares):
        takers = [rank for rank in targets if rank != source]
        for names in _batches(share) if takers else ():
            if executor.rank == source:
                with executor.collective("gather_model"):
                    values = [_whole(tensors[name]).detach().cpu() for name in names]
                executor.trade("weights", dict.fromkeys(takers, values), ())
            elif executor.rank in takers:
                for name, value in zip(names, executor.trade("weights", {}, (source,))[source], strict=True):
                    _take(tensors[name], value)


def _batches(share: _Share) -> Iterator[list[str]]:
    """Names in groups, each of one tensor or of a limited size."""
    names: list[str] = []
    left = _BATCH
    for name, (_, nbytes) in share.items():
        if names and nbytes > left:
            yield names
            names = []
            left = _BATCH
        names.append(name)
        left -= nbytes
    if names:
        yield names


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor. A sharded one is gathered over its own mesh, as the other replicas of it do."""
    from torch.distributed.tensor import DTensor  # a second to import

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _take(mine: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one of this rank's model."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if mine.is_meta:
        give_contents(mine, value.clone())
    elif isinstance(mine, DTensor):
        copy_into(mine, distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None))
    else:
        copy_into(mine, value)
