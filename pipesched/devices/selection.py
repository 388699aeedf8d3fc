"""Selection: which devices ranks may run on, and what a device needs for that."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipesched.checks import shown
from pipesched.devices.generators import default_generator
from pipesched.devices.memory import allocated_bytes
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream
from pipesched.errors import DeviceCountError, InputError

__all__ = [
    "accelerator_name",
    "as_device",
    "as_devices",
    "autocast_types",
    "current_device",
    "default_devices",
    "have_accelerator",
]


def as_devices(devices: Any) -> list[torch.device]:
    """Convert the device of each rank with `as_device`. Raises DeviceCountError if ``devices`` is not a list."""
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
        raise DeviceCountError(
            f"devices= must be a list with one device for each rank; got {devices!r}; pass a list, such as ['cpu', "
            f"'cpu']"
        )
    return [as_device(device) for device in devices]


def as_device(device: Any) -> torch.device:
    """Convert a device to a ``torch.device``; an accelerator without an index gets the index of the current device.

    Raises InputError if the value is not a device, and DeviceCountError if the machine does not have that device, or if
    ranks cannot run on it.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise InputError(
            f"a device must be a string such as 'cpu' or 'cuda:0', or a torch.device; got {shown(device)} ({why}); "
            f"pass one of these"
        ) from None
    if place.type == "cpu":
        return place
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = 0 if accelerator is None else torch.accelerator.device_count()
    if accelerator is None or place.type != accelerator.type or (place.index or 0) >= here:
        found = "none" if accelerator is None else f"{here} of type {accelerator.type!r}"
        raise DeviceCountError(
            f"a rank must run on a CPU or on an available accelerator; got {device!r}, but this machine's accelerators "
            f"are: {found}; choose another device"
        )
    place = current_device(place.type) if place.index is None else place
    if missing := _missing(place):
        raise DeviceCountError(
            f"a rank's device must have streams, events with times, a random generator, and figures of its memory; "
            f"{place} has no {' and no '.join(missing)} in this build of torch ({torch.__version__}); run on CPUs, or "
            f"use a build of torch or a backend that has these"
        )
    return place


def current_device(kind: str) -> torch.device:
    """Return the current device of a type, with its index; a CPU has no index."""
    device = torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index()) if is_accelerator(device) else device


def have_accelerator() -> bool:
    """Return whether this build of torch knows an accelerator."""
    return torch.accelerator.current_accelerator() is not None


def default_devices(count: int) -> list[str]:
    """Return the names of ``count`` accelerators if the machine has that many, else "cpu" ``count`` times."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < count:
        return ["cpu"] * count
    return [f"{accelerator.type}:{index}" for index in range(count)]


def accelerator_name(device: torch.device) -> str:
    """Return the model name of an accelerator, or its type if it has none."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def autocast_types() -> list[str]:
    """Return the device types that may have autocast on this machine."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


@functools.cache
def _missing(device: torch.device) -> tuple[str, ...]:
    """Return what a device lacks of the things that a rank needs."""
    needs: dict[str, Callable[[], object]] = {
        "streams": lambda: new_stream(device).wait_stream(current_stream(device)),
        "events with times": lambda: event_on(current_stream(device), timed=True).synchronize(),
        "random generator": lambda: default_generator(device).get_state(),
        "figures of its memory": lambda: allocated_bytes(device),
    }
    return tuple(need for need, attempt in needs.items() if _fails(attempt))


def _fails(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (RuntimeError, AttributeError, NotImplementedError, TypeError, IndexError):
        return True
    return False
