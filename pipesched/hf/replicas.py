"""Replicas: which processes of a job form a pipeline, and which of them read other data than this one."""

import json
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader
from transformers.trainer_utils import seed_worker

from pipesched.errors import InputError

__all__ = ["DataReplicas"]


class DataReplicas:
    """The processes of a job as a mesh of replicas, pipeline ranks and tensor ranks; one process is one replica.

    Args:
        parallel_size: the number of ranks of each pipeline. Default: as many as there are processes.
        tensor_size: the number of processes that split each layer.
        device_type: the type of the devices.

    """

    def __init__(self, parallel_size: int | None, tensor_size: int, device_type: str) -> None:
        world = distributed.get_world_size() if distributed.is_initialized() else 1
        self.pipeline_size = parallel_size or max(world // tensor_size, 1)
        self.tensor_size = tensor_size
        #: The number of processes that read the same batches.
        self.num_alike = self.pipeline_size * tensor_size
        if world % self.num_alike:
            times = f" times pipeline_tensor_size={tensor_size}" if tensor_size > 1 else ""
            raise InputError(
                f"the number of processes must be a multiple of pipeline_parallel_size; got {world} processes and "
                f"pipeline_parallel_size={self.pipeline_size}{times}; start torchrun with --nproc_per_node="
                f"{-(-world // self.num_alike) * self.num_alike}, or pass another size"
            )
        self.count = world // self.num_alike
        self.mesh: DeviceMesh | None = None
        #: The number of the replica of this process, and the number of the process among those of its replica.
        self.index = self.rank = 0
        if world > 1:
            shape: tuple[int, ...] = (self.count, self.pipeline_size)
            names: tuple[str, ...] = ("dp", "pp")
            if tensor_size > 1:
                shape, names = (*shape, tensor_size), (*names, "tp")
            self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
            self.index, self.rank = divmod(distributed.get_rank(), self.num_alike)

    def prepare(self, accelerator: Accelerator, loader: DataLoader[Any], **_: Any) -> Any:
        """Return a data loader that gives all ranks of a pipeline the same batches, as `Accelerator` prepares one."""
        if isinstance(loader.worker_init_fn, partial) and loader.worker_init_fn.func is seed_worker:
            loader.worker_init_fn = partial(seed_worker, num_workers=loader.num_workers, rank=self.index)
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self.count,
            process_index=self.index,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def gather(self, accelerator: Accelerator, data: Any, *, keeps_duplicates: bool = False) -> Any:
        """Return the rows of all replicas, by default without the rows that the last batch has twice."""
        state = accelerator.gradient_state
        is_last = state.end_of_dataloader and state.remainder > 0
        keep = state.remainder if is_last and not keeps_duplicates else None
        return recursively_apply(lambda rows: self._joined(rows)[:keep], data)

    def _joined(self, rows: Tensor) -> Tensor:
        own: Tensor = torch.atleast_1d(rows).contiguous()
        if self.mesh is None or self.count == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(parts, own, group=self.mesh.get_group("dp"))
        return torch.cat(parts)

    def of_first(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch of the first replica, in all processes. Those of others may have another length."""
        if self.mesh is None or self.count == 1:
            return batch
        shapes = {name: list(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
        first = {**batch}
        for name, shape in json.loads(self.gathered(json.dumps(shapes))[0]).items():
            first[name] = batch[name].contiguous() if self.index == 0 else batch[name].new_empty(shape)
            distributed.broadcast(first[name], group=self.mesh.get_group("dp"), group_src=0)
        return first

    def gathered(self, text: str) -> list[str]:
        """Return the text of the first rank of each replica, in all processes."""
        if self.mesh is None:
            return [text]
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.mesh.device_type)
        sizes = self._of_all(torch.tensor([len(own)], device=own.device))
        padded = torch.nn.functional.pad(own, (0, int(max(sizes)) - len(own)))
        parts = self._of_all(padded)
        texts = [bytes(part[: int(size)].tolist()).decode() for part, size in zip(parts, sizes, strict=True)]
        return texts[:: self.num_alike]

    def _of_all(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.count * self.num_alike)]
        distributed.all_gather(parts, own)
        return parts
