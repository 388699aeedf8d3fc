"""Gathering: collects the state of all ranks of a mesh, as one state dict or in the model itself."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from pipesched.checks import is_count, shown
from pipesched.errors import InputError
from pipesched.model.stale_weights import Placement, StaleGuard
from pipesched.parallel.weight_split import SplitWeights
from pipesched.pipeline.assembly import Assembly
from pipesched.runtime.collectives import RankCollectives
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.rank_host import RankHost
from pipesched.tensors.exchange import copy_into
from pipesched.tensors.meta_tensors import give_contents, weights_replaced

__all__ = ["gather_model", "merged_state", "named_tensors", "place_weights"]

#: Name of a tensor that a rank sends -> the shape of the tensor, and its number of bytes.
_Share = Mapping[str, tuple[tuple[int, ...], int]]

_BATCH = 64 << 20  # the maximum total size in bytes of several tensors that are sent as one message
_EXTRA = "_extra_state"


def place_weights(roots: Mapping[str, nn.Module], guard: StaleGuard, host: RankHost, assembly: Assembly) -> None:
    """Record in the model's StaleGuard which rank trains each tensor.

    Args:
        roots: the model and the loss module, keyed by the prefix of their parameters' names.
        guard: the StaleGuard, which refuses reads of the model while its weights are stale.
        host: the host of the ranks.
        assembly: the stages.

    """
    grid = host.grid
    if not grid.in_one_process:
        tensors = dict(named_tensors(roots, duplicates=True))
        homes = {name: assembly.owners.rank(name) for name in tensors}
        kept = {parameter for weights in assembly.divided_weights for parameter in weights}
        kept |= assembly.split_parameters.keys()
        divided = frozenset(name for name, tensor in tensors.items() if tensor in kept)
        layers = [layer for stage in assembly.stages.values() for layer in stage.modules.values()]
        run_here = [module for layer in layers for module in layer.modules()]
        pipeline = tuple(grid.global_ranks[rank] for rank in grid.pipeline)
        guard.place(Placement(pipeline, grid.position, homes, divided), run_here, host.executor)
        if divided:
            guard.check(changes=True)


def merged_state(state: Mapping[str, Any], names: Iterable[str], collectives: RankCollectives) -> dict[str, Any]:
    """Merge the states of all ranks on every rank, and gather sharded tensors. Collective.

    Args:
        state: the state of this rank.
        names: the keys of the whole model's state dict, in order.
        collectives: exchange the states.

    """
    with collectives.stopping_all("full_state_dict"):
        share = {name: _whole(value) if isinstance(value, Tensor) else value for name, value in state.items()}
    merged = {name: value for shares in collectives.gathered(share) for name, value in shares.items()}
    collectives.gathered_in_all(
        None
    )  # so that no replica returns before it can report a failed rank of another replica
    return {name: merged[name] for name in (*names, *merged) if name in merged}  # names added by wrap come last


def gather_model(
    roots: Mapping[str, nn.Module],
    state: Mapping[str, Any],
    *,
    guard: StaleGuard,
    host: RankHost,
    assembly: Assembly,
    rank: int | None,
) -> bool:
    """Copy the weights and buffers of all ranks into the model of one rank, or of every rank. Collective under a mesh.

    Returns whether the weights were copied into the model of this rank.

    Args:
        roots: the model and the loss module, keyed by the prefix of their parameters' names.
        state: the state of this rank.
        guard: the StaleGuard, which refuses reads of the model while its weights are stale.
        host: the host of the ranks.
        assembly: the stages, which determine the rank of each weight.
        rank: the rank that gathers, numbered across all replicas; None for every rank.

    """
    grid = host.grid
    if grid.in_one_process:
        _check_target(rank, [rank], 1)
        return True
    with host.collectives.connected("gather_model") as collectives, guard.lifted():
        tensors = dict(named_tensors(roots))
        share = {
            name: (tuple(tensor.shape), tensor.nbytes)
            for name, tensor in tensors.items()
            if grid.holds(assembly.owners.rank(name))
        }
        extra = {name: value for name, value in state.items() if name.endswith(_EXTRA)}
        targets = _check_target(rank, collectives.gathered_in_all(rank), grid.num_processes)
        shares, extras = zip(*collectives.gathered((share, extra)), strict=True)
        gathers = grid.rank in targets
        misfit = _misfit(grid.rank, tensors, shares, grid.pipeline) if gathers else None
        _check_fits(collectives.gathered_in_all(misfit))
        with ExitStack() as stack:
            for root in roots.values():
                stack.enter_context(weights_replaced(root, [one for one in tensors.values() if one.is_meta]))
            _collect(collectives, grid, targets, tensors, shares, assembly.split)
        if gathers and assembly.forms is not None:
            assembly.forms.make_whole(assembly.split_parameters)
        if gathers:
            for states in extras:
                for name, value in states.items():
                    _holder(roots, name).set_extra_state(value)
    if gathers:
        guard.release()
    return gathers


def _holder(roots: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return the module that owns the extra state with this name."""
    prefix = max((prefix for prefix in roots if name.startswith(prefix)), key=len)
    return roots[prefix].get_submodule(name.removeprefix(prefix).removesuffix(_EXTRA).removesuffix("."))


def named_tensors(roots: Mapping[str, nn.Module], *, duplicates: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters and buffers. With ``duplicates``, a shared tensor appears once for each name."""
    for prefix, root in roots.items():
        for named in (root.named_parameters, root.named_buffers):
            for name, tensor in named(remove_duplicate=not duplicates):
                yield prefix + name, tensor


def _check_target(rank: Any, asked: Sequence[Any], num_ranks: int) -> range:
    """Return the ranks that gather. Raises InputError on all ranks if they passed invalid or different values."""
    for number, target in enumerate(asked):
        if target is not None and not (is_count(target, 0) and target < num_ranks):
            raise InputError(
                f"the rank passed to gather_model must be a rank of the mesh, or None for all ranks; rank {number} of "
                f"{num_ranks} passed {shown(target)}; pass a rank from 0 to {num_ranks - 1}, or None"
            )
    if any(target != rank for target in asked):
        raise InputError(
            f"every rank must pass the same rank to gather_model; ranks 0 to {num_ranks - 1} passed "
            f"{', '.join(map(str, asked))}; pass the same value on every rank"
        )
    return range(num_ranks) if rank is None else range(rank, rank + 1)


def _misfit(rank: int, tensors: Mapping[str, Tensor], shares: Sequence[_Share], ranks: Sequence[int]) -> str | None:
    """Return why the tensors of ``ranks`` do not fit the model of ``rank``; None if they fit."""
    sent = {name: (own, shape) for own, share in zip(ranks, shares, strict=True) for name, (shape, _) in share.items()}
    for name, (source, shape) in sent.items():
        if name not in tensors:
            return f"rank {rank}'s model has no tensor {name!r}, which rank {source} sent"
        if tuple(tensors[name].shape) != shape:
            here = list(tensors[name].shape)
            return f"{name!r} has shape {here} in rank {rank}'s model, but {list(shape)} on rank {source}"
    missing = next((name for name in tensors if name not in sent), None)
    return None if missing is None else f"rank {rank}'s model has a tensor {missing!r}, which no rank sent"


def _check_fits(misfits: Sequence[str | None]) -> None:
    """Raise InputError on every rank if at least one rank reported that tensors do not fit its model."""
    for misfit in misfits:
        if misfit is not None:
            raise InputError(
                f"the model must have the same tensors on every rank for gather_model; {misfit}; probably wrap= "
                f"changed layers on some ranks only; use full_state_dict() instead"
            )


def _collect(
    collectives: RankCollectives,
    grid: RankGrid,
    targets: Collection[int],
    tensors: Mapping[str, Tensor],
    shares: Sequence[_Share],
    split: SplitWeights | None,
) -> None:
    """Send the tensors of each rank in turn to the ranks that gather, in groups of limited size.

    The ranks of a tensor group make their weights whole together, one at a time, and each sends them in its own plane.
    """
    here = grid.position
    takers = [place for place, rank in enumerate(grid.pipeline) if rank in targets]
    in_planes = [rank in targets for rows in grid.every_plane for rank in rows[grid.replica]]
    for source, share in enumerate(shares):
        others = [place for place in takers if place != source]
        wanted = others or (split is not None and any(in_planes))
        for names in _batches(share) if wanted else ():
            if here == source:
                with collectives.stopping_all("gather_model"):
                    values = [_whole_block(split, name, _whole(tensors[name]).detach()).cpu() for name in names]
                if others:
                    collectives.trade("weights", dict.fromkeys(others, values), ())
                if split is not None and here in takers:
                    for name, value in zip(names, values, strict=True):
                        _take(tensors[name], value)
            elif here in others:
                for name, value in zip(names, collectives.trade("weights", {}, (source,))[source], strict=True):
                    _take(tensors[name], value)


def _whole_block(split: SplitWeights | None, name: str, tensor: Tensor) -> Tensor:
    """Return the whole weight of which this rank holds a block. Collective over the tensor group."""
    return tensor if split is None else split.whole(name, tensor)


def _batches(share: _Share) -> Iterator[list[str]]:
    """Split the tensors' names into groups of limited total size. A tensor above the limit forms a group of one."""
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
    """Return the full tensor. For a sharded tensor, all ranks of its mesh must call this function."""
    from torch.distributed.tensor import DTensor  # takes a second to import

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _take(tensor: Tensor, value: Tensor) -> None:
    """Copy a full tensor into ``tensor``, which belongs to this rank's model and may be sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if tensor.is_meta:
        give_contents(tensor, value.clone())
    elif isinstance(tensor, DTensor):
        value = value.to(tensor.device)
        copy_into(tensor, distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None))
    else:
        copy_into(tensor, value)
