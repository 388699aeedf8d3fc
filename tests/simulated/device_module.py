"""The module `torch.sim`, shaped like `torch.cuda`: what `torch.get_device_module` returns for a simulated device."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

__all__ = ["make_device_module"]

_Device = torch.device | str | int | None


def make_device_module(num_devices: int, generators: tuple[torch.Generator, ...]) -> ModuleType:
    """Return the module. `generators` has the default generator of each device."""
    module = ModuleType("torch.sim")
    functions = (
        current_device, set_device, device, current_stream, default_stream, set_stream, stream, synchronize,
        memory_allocated, max_memory_allocated, memory_reserved, memory_stats, mem_get_info, reset_peak_memory_stats,
        empty_cache, get_device_name, get_device_properties, get_amp_supported_dtype, is_bf16_supported,
    )  # fmt: skip
    for function in functions:
        setattr(module, function.__name__, function)
    module.Stream, module.Event = _Stream, _Event
    module.default_generators = generators
    module.device_count = lambda: num_devices
    module.is_available = module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None  # torch 2.11 synchronizes devices that it initialized, and no other
    module._initialized = True  # torch.utils.checkpoint saves random states of initialized devices only
    module._is_in_bad_fork = lambda: False  # torch.manual_seed asks this
    _add_generator_functions(module, generators)
    return module


def _add_generator_functions(module: ModuleType, generators: tuple[torch.Generator, ...]) -> None:
    def get_rng_state(device: _Device = "sim") -> torch.Tensor:
        return generators[_indexed(device).index].get_state()

    def set_rng_state(state: torch.Tensor, device: _Device = "sim") -> None:
        generators[_indexed(device).index].set_state(state)

    def get_rng_state_all() -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators]

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generators[torch.accelerator.current_device_index()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def initial_seed() -> int:
        return generators[torch.accelerator.current_device_index()].initial_seed()

    functions = (
        get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all, manual_seed, manual_seed_all, initial_seed,
    )  # fmt: skip
    for function in functions:
        setattr(module, function.__name__, function)


class _Stream:
    """Calls return torch's own streams; a class, because annotations name it."""

    def __new__(cls, device: _Device = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=_indexed(device), priority=priority)


class _Event:
    """Calls return torch's own events."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> torch.Event:
        return torch.Event("sim", enable_timing=enable_timing, blocking=blocking)


def _indexed(device: _Device) -> torch.device:
    named = torch.device("sim", device) if isinstance(device, int) else torch.device(device or "sim")
    if named.type != "sim":
        raise ValueError(f"torch.sim takes simulated devices; got {named}")
    return named if named.index is not None else torch.device("sim", torch.accelerator.current_device_index())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_indexed(device).index)


def device(device: _Device) -> Any:
    return torch.accelerator.device_index(_indexed(device).index)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_indexed(device))


def default_stream(device: _Device = None) -> torch.Stream:
    like = torch.accelerator.current_stream(_indexed(device))
    return torch.Stream(stream_id=0, device_index=like.device_index, device_type=like.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_indexed(device))


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_indexed(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_indexed(device))


def memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.memory_reserved(_indexed(device))


def memory_stats(device: _Device = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_indexed(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_indexed(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_indexed(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def get_device_name(device: _Device = None) -> str:
    return f"simulated accelerator {_indexed(device).index}"


class _Properties:
    def __init__(self, device: torch.device) -> None:
        self.name = get_device_name(device)
        self.total_memory = mem_get_info(device)[1]


def get_device_properties(device: _Device = None) -> _Properties:
    return _Properties(_indexed(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True
