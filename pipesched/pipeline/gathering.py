"""Gathering: what a pipeline over a mesh brings together from all ranks: their states, or all weights in the model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pipesched.checks import is_count, shown
from pipesched.errors import InputError
from pipesched.model.stale_weights import Placement
from pipesched.pipeline.replan import Planned
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.rank_host import MeshRanks, ThreadRanks
from pipesched.tensors.exchange import copy_into
from pipesched.tensors.meta_tensors import give_contents

__all__ = ["Gathered"]

#: The shape and the bytes of each tensor that a rank gives, by name.
_Share = Mapping[str, tuple[tuple[int, ...], int]]

_BATCH = 64 << 20  # bytes that travel together
_EXTRA = "_extra_state"


class Gathered(Planned):
    """A pipeline whose weights may lie in several processes."""

    def _place(self) -> None:
        """Say which tensors of the model other ranks train."""
        if isinstance(self._host, MeshRanks):
            names = (name for name, _ in _tensors(self._roots(), duplicates=True))
            homes = {name: self._assembly.owners.rank(name) for name in names}
            layers = [layer for stage in self._assembly.stages.values() for layer in stage.modules.values()]
            run_here = [module for layer in layers for module in layer.modules()]
            self._guard.place(Placement(self._host.group, self._host.rank, homes), run_here, self._host.executor)

    def _is_own(self, name: str) -> bool:
        """Whether a parameter or buffer of this name lies in this process: under a mesh those of its stages do."""
        return isinstance(self._host, ThreadRanks) or self._host.holds(self._assembly.owners.rank(name))

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state of the model, on every rank, also of what ``wrap=`` has sharded. Collective under a mesh."""
        if not isinstance(self._host, MeshRanks):
            return self.state_dict()
        executor, state = self._host.executor, self.state_dict()
        with executor.collective("full_state_dict"):
            own = {name: _whole(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        merged = {name: value for share in executor.exchange(own) for name, value in share.items()}
        names = [*self._all_state(), *merged]  # the model's order; then what wrap has added on other ranks
        return {name: merged[name] for name in names if name in merged}

    def gather_model(self, rank: int | None = None) -> None:
        """Bring the newest weights and buffers of all ranks into the model itself.

        Over a mesh each rank trains the weights of its own stages. The other parameters and buffers of its model are
        stale from the first step on. Calling the model, its ``state_dict``, copying and pickling it then raise, until
        this method has gathered the weights, or ``load_state_dict`` has loaded a whole state into the model::

            pipe.gather_model(rank=0)
            if mesh.get_local_rank() == 0:
                model.save_pretrained("trained")

        Parameters stay the same objects, on their devices. Gradients and optimizer states do not move. The next step
        makes the model stale again. In one process the model is always whole.

        The call is collective: every rank of the mesh makes it, also after ``close``. A rank that gathers holds the
        whole model; parameters of other ranks on the meta device get their contents on the CPU.

        Args:
            rank: the rank of the mesh whose model gets all weights; default: None, every rank.

        Raises:
            InputError: for a rank that the mesh does not have, for ranks that differ in it, and where ``wrap=`` has
                given layers other parameters than the model has on the ranks that gather.
            ExecutionError: where a rank fails or does not come.

        """
        self._settle()
        site = self._host
        if not isinstance(site, MeshRanks):
            _check_target(rank, [rank], 1)
            return
        with site.connected() as executor, self._guard.lifted():
            tensors = dict(_tensors(self._roots()))
            own = {name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items() if self._is_own(name)}
            extra = {name: value for name, value in self.state_dict().items() if name.endswith(_EXTRA)}
            asked, shares, extras = zip(*executor.exchange((rank, own, extra)), strict=True)
            targets = _check_target(rank, asked, executor.num_ranks)
            _check_fits(executor.exchange(_misfit(tensors, shares) if executor.rank in targets else None))
            _collect(executor, targets, tensors, shares)
            if executor.rank in targets:
                for name, value in ((name, value) for theirs in extras for name, value in theirs.items()):
                    self._holder(name).set_extra_state(value)
        if executor.rank in targets:
            self._guard.release()

    def _holder(self, name: str) -> nn.Module:
        """The module of which a name in the state is the extra state."""
        prefix, root = max(
            (item for item in self._roots().items() if name.startswith(item[0])), key=lambda item: item[0]
        )
        return root.get_submodule(name.removeprefix(prefix).removesuffix(_EXTRA).removesuffix("."))


def _tensors(roots: Mapping[str, nn.Module], *, duplicates: bool = False) -> Iterator[tuple[str, Tensor]]:
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
            names, left = [], _BATCH
        names.append(name)
        left -= nbytes
    if names:
        yield names


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor. A sharded one is gathered over its own mesh, as the other replicas of it do."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _take(mine: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one of this rank's model."""
    if mine.is_meta:
        give_contents(mine, value.clone())
    elif isinstance(mine, DTensor):
        copy_into(mine, distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None))
    else:
        copy_into(mine, value)
