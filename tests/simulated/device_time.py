"""Device time: how long operations and copies take on the simulated devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DeviceCosts"]


@dataclass(frozen=True)
class DeviceCosts:
    """The costs of operations: simple and regular.

    An operation takes the time in `seconds_of`, by its name, such as ``aten::addmm``. Another operation takes
    `kernel_s` and the longer one of the times for its bytes and for its floating-point operations. A copy between two
    devices, or between a device and the host, takes `link_s` and the time for its bytes.
    """

    seconds_of: Mapping[str, float] = field(default_factory=dict)
    kernel_s: float = 2e-6
    bytes_per_s: float = 1e12
    flops_per_s: float = 2e13
    link_s: float = 5e-6
    link_bytes_per_s: float = 5e10
    host_link_bytes_per_s: float = 2e10
    #: What a launch costs the thread that launches.
    launch_s: float = 0.0

    def operation_s(self, name: str, nbytes: int, flops: float) -> float:
        """Return the time of an operation that moves so many bytes and computes so many flops."""
        given = self.seconds_of.get(name)
        if given is not None:
            return given
        return self.kernel_s + max(nbytes / self.bytes_per_s, flops / self.flops_per_s)

    def copy_s(self, nbytes: int, *, with_host: bool) -> float:
        """Return the time of a copy over a link."""
        return self.link_s + nbytes / (self.host_link_bytes_per_s if with_host else self.link_bytes_per_s)
