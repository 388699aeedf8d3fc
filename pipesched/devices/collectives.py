"""Collectives: the libraries that send tensors between accelerators of several processes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pipesched.devices.transfers import CUDA
from pipesched.errors import ExecutionError

__all__ = ["PairMaker", "pair_maker", "register_pairs"]

#: Makes the process group of two ranks from a store, the own rank (0 or 1) and the timeout in seconds. The group has a
#: stream of its own, and the methods ``send``, ``recv`` and ``abort`` of torch's process groups.
PairMaker = Callable[[Any, int, float], Any]

_TORCH_WATCHES_S = 600  # torch's default: torch ends a process whose device waits this long
_MAKERS: dict[str, PairMaker] = {}


def register_pairs(device_type: str, make: PairMaker) -> None:
    """State how two processes with devices of a type are connected.

    Example::

        register_pairs("npu", make_hccl_pair)

    Args:
        device_type: the type of the devices, such as "npu".
        make: makes the process group of two ranks.

    """
    _MAKERS[device_type] = make


def pair_maker(device: torch.device) -> PairMaker:
    """Return the function that connects the devices of two processes.

    Raises ExecutionError if none is known for devices of this type, or if its library is missing.
    """
    if device.type not in _MAKERS:
        raise ExecutionError(
            f"ranks in several processes need a library that sends tensors between their devices; none is known for "
            f"{device.type!r} (known: {', '.join(sorted(_MAKERS))}); run on CPUs, use one process with devices=, or "
            f"state it with pipesched.devices.collectives.register_pairs"
        )
    if device.type == CUDA and not distributed.is_nccl_available():
        raise ExecutionError(
            f"ranks on CUDA devices need NCCL; this build of torch ({torch.__version__}) has no NCCL; "
            f"install a build with NCCL, run on CPUs, or use one process with devices="
        )
    return _MAKERS[device.type]


def _nccl_pair(store: Any, rank: int, timeout_s: float) -> Any:
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)  # transfers start before waiting compute kernels
    group = nccl(store, rank, 2, options)
    if timeout_s > _TORCH_WATCHES_S:
        group.set_timeout(timedelta(seconds=timeout_s))
    return group


register_pairs(CUDA, _nccl_pair)
