"""Live run: the parts of a running pipeline that a checkpoint holds, as this process sees them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pipesched.runtime.rank_host import MeshRanks, RankHost

__all__ = ["Facts", "LiveRun"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Numbers and settings of a run that do not depend on its plan, and the plan."""

    step: int
    seed: int
    #: The settings that determine results; runs with other settings cannot continue a run.
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A running pipeline. Names are the model's own, without wrappers; tied parameters come once."""

    host: RankHost
    facts: Facts
    #: The parameters that this process trains.
    parameters: Mapping[str, nn.Parameter]
    #: The buffers that this process owns.
    buffers: Mapping[str, Tensor]
    #: The buffers of other processes that stages of this process use, too.
    shared_buffers: Mapping[str, Tensor]
    #: The shapes of all parameters and buffers of the model.
    shapes: Mapping[str, tuple[int, ...]]
    #: The names of all parameters of the model.
    parameter_names: Collection[str]
    #: The buffers that the model's state_dict leaves out, such as caches; they take any saved shape.
    caches: Collection[str]
    #: The names of all parameters of the model, by the id of the parameter.
    names: Mapping[int, str]
    #: The modules with an extra state that this process owns.
    modules: Mapping[str, nn.Module]
    #: The optimizers made by ``optimizer=``, by stage; None without ``optimizer=``.
    optimizers: Mapping[int, Optimizer] | None
    #: The scaler of the loss; every process has one with the same state.
    scaler: GradScaler | None

    @property
    def process(self) -> int:
        """The number of this process: its rank in the mesh, or 0."""
        return self.host.rank if isinstance(self.host, MeshRanks) else 0

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return len(self.host.all_devices) if isinstance(self.host, MeshRanks) else 1

    def is_own(self, name: str) -> bool:
        """Whether this process saves the parameter or buffer of this name."""
        return name in self.parameters or name in self.buffers
