"""Starts the simulated accelerator in this process, once and for all."""

import queue
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from tests.simulated import build, handoffs
from tests.simulated.device_module import make_device_module
from tests.simulated.happens_before import HappensBefore
from tests.simulated.recurrent import register_recurrent

__all__ = ["Accelerator", "start"]

_HERE = Path(__file__).parent
_NOT_SHOWN = (
    str(Path(torch.__file__).parent),
    *(str(_HERE / f"{name}.py") for name in ("accelerator", "collectives", "device_module", "handoffs", "recurrent")),
    threading.__file__,
    queue.__file__,
    str(Path(threading.__file__).parent / "contextlib.py"),
    str(Path(threading.__file__).parent / "concurrent"),
    "/pipesched/tensors/function_mode.py",  # stands between each call of a layer and torch
)


@dataclass(frozen=True)
class Accelerator:
    """The running simulation: its judge, and the compiled backend."""

    judge: HappensBefore
    backend: ModuleType
    num_kernels: int

    def keep_parameters(self, keep: bool) -> None:
        """Choose whether `Module.to` keeps its Parameters, as on CUDA, or makes new ones, as on vendors' devices."""
        self.backend.keep_parameters(keep)


_started: list[tuple[Accelerator, object]] = []  # the registration of torch is one for the process, too


def start(num_devices: int = 8) -> Accelerator:
    """Register the device type `sim` with so many devices. A second call returns the running simulation.

    Raises RuntimeError if this process uses another accelerator, or has imported pipesched already.
    """
    if _started:
        return _started[0][0]
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        raise RuntimeError(f"a process has one accelerator; this one uses {other}; simulate in a process without it")
    if "pipesched.runtime" in sys.modules:
        raise RuntimeError(
            "the simulation starts before pipesched.runtime is imported, which was imported; start first"
        )
    backend = build.load()
    judge = HappensBefore(backend.take_log, lambda place: backend.frames_of(place) if place >= 0 else (), _name_of)
    torch.utils.rename_privateuse1_backend("sim")
    backend.start(judge, num_devices, list(_NOT_SHOWN))
    accelerator = Accelerator(judge, backend, backend.register_kernels())
    _started.append((accelerator, register_recurrent(backend)))
    generators = tuple(backend.default_generator(index) for index in range(num_devices))
    torch._register_device_module("sim", make_device_module(num_devices, generators))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    backend.learn_slices(
        torch.empty(0, dtype=torch.uint8).set_(torch.empty(2, dtype=torch.uint8).untyped_storage()[:1])
    )
    handoffs.install(judge, backend.host_thread)
    _watch_host_reads(accelerator)
    return accelerator


def _name_of(ident: int) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), f"thread {ident}")


def _watch_host_reads(accelerator: Accelerator) -> None:
    """Report reads of pinned memory that are no operators: `numpy`, `tolist` and `data_ptr`."""
    backend = accelerator.backend
    for name in ("numpy", "tolist", "data_ptr", "__array__"):
        read = getattr(Tensor, name)

        def watched(self: Tensor, *args: object, read: object = read, name: str = name, **options: object) -> object:
            block = backend.pinned_block(self)
            if block:
                accelerator.judge.host_access(backend.host_thread(), name, [block], [], backend.place_here())
            return read(self, *args, **options)

        setattr(Tensor, name, watched)
