"""Generators: the default random generators of devices."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from pipesched.devices.streams import is_accelerator

__all__ = ["default_generator", "default_generators", "generators_kept"]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random functions on a device use if they get no other."""
    if not is_accelerator(device):
        return torch.default_generator
    generators = torch.get_device_module(device).default_generators
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = generators[index]
    return generator


def default_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return the default generators of the CPU and of these devices, each once."""
    accelerators = {device for device in devices if is_accelerator(device)}
    return [torch.default_generator, *map(default_generator, accelerators)]


@contextmanager
def generators_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the state of the default generators of the CPU and of these devices after the ``with`` block.

    ``torch.random.fork_rng()`` does this for all devices of the machine, which takes long and warns if there are many.
    """
    generators = default_generators(devices)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
