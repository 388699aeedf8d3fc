"""Live run: this process's part of a running pipeline's state, from which a checkpoint is made."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pipesched.parallel.weight_split import SplitWeights
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.sharded_update import ShardedUpdate
from pipesched.saving.chunks import Rows

__all__ = ["DividedWeight", "Facts", "LiveRun"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The step, seed, settings and plan of a run."""

    step: int
    seed: int
    #: The settings that determine results. A run can be continued only with the same settings.
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DividedWeight:
    """What this process holds of a parameter that the replicas divide among themselves."""

    #: The rows that this process holds; None if the parameter is not cut, and one replica holds all of it.
    rows: Rows | None
    #: Whether this process holds the parameter or some of its rows.
    is_here: bool


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """The state of a running pipeline. Names have no wrapper prefixes; a tied parameter appears once."""

    host: RankHost
    facts: Facts
    #: The parameters that this process trains.
    parameters: Mapping[str, nn.Parameter]
    #: The buffers that this process owns.
    buffers: Mapping[str, Tensor]
    #: The buffers that another process owns and that stages of this process also use.
    shared_buffers: Mapping[str, Tensor]
    #: The shapes of all parameters and buffers of the model; of a divided weight, the shape of the block.
    shapes: Mapping[str, tuple[int, ...]]
    #: The names of all parameters of the model.
    parameter_names: Collection[str]
    #: The non-persistent buffers, which the model's state_dict leaves out. The saved shape of such a buffer may differ.
    caches: Collection[str]
    #: The names of all parameters of the model, keyed by the id of the parameter.
    names: Mapping[int, str]
    #: The modules that define ``get_extra_state`` and that this process saves.
    modules: Mapping[str, nn.Module]
    #: The optimizers made by ``optimizer=``, keyed by stage; None without ``optimizer=``.
    optimizers: Mapping[int, Optimizer] | None
    #: The updates that are split across replicas, keyed by stage; empty with ``zero=0``.
    divided: Mapping[int, ShardedUpdate]
    #: The option ``zero`` of the pipeline.
    zero: int
    #: What this process holds of each parameter that the replicas divide between steps, keyed by name. A parameter
    #: without an entry is whole, also with ``zero=3`` if the rows were gathered first.
    divided_weights: Mapping[str, DividedWeight] = field(default_factory=dict)
    #: The gradient scaler. Every process has its own scaler, and all scalers have the same state.
    scaler: GradScaler | None
    #: The weights of which this process holds only blocks. None if there are none, or if states move within a plane.
    split: SplitWeights | None = None

    @property
    def process(self) -> int:
        """The rank of this process among the ranks of all planes and replicas, or 0 if there is no mesh."""
        return self.host.grid.rank

    @property
    def num_processes(self) -> int:
        """The total number of processes in all planes and replicas."""
        return self.host.grid.num_processes

    @property
    def writers(self) -> tuple[int, ...]:
        """The processes that write a checkpoint, all of the first plane.

        They are those of replica 0, or of all replicas if these hold different states.
        """
        grid = self.host.grid
        return self.numbered if self.zero or grid.in_one_process else grid.first_rows[0]

    @property
    def numbered(self) -> tuple[int, ...]:
        """The processes of the first plane, in ascending order."""
        grid = self.host.grid
        return (0,) if grid.in_one_process else tuple(sorted(chain(*grid.first_rows)))

    @property
    def replica(self) -> int:
        """The index of this process's replica."""
        return self.host.grid.replica

    @property
    def rank(self) -> int:
        """The rank of this process within its replica, or 0 if there is no mesh."""
        return self.host.grid.position

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter or buffer of the model, whole also if this process holds only a block."""
        shape = self.shapes[name]
        return shape if self.split is None else self.split.whole_shape(name, shape)

    def division_of(self, optimizer: Optimizer) -> ShardedUpdate | None:
        """Return the `ShardedUpdate` that runs an optimizer, or None if the optimizer updates whole parameters."""
        stages = [stage for stage, own in (self.optimizers or {}).items() if own is optimizer]
        return self.divided.get(stages[0]) if stages else None

    def parameters_of(self, roots: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
        """Return all parameters of the model, also those that other processes train, keyed by name.

        ``roots`` are the model and the loss module.
        """
        every = (parameter for root in roots.values() for parameter in root.parameters())
        return {self.names[id(parameter)]: parameter for parameter in every if id(parameter) in self.names}

    def is_here(self, name: str) -> bool:
        """Return whether this process holds a parameter or buffer of its stages, or at least some rows of it."""
        held = self.divided_weights.get(name)
        return held is None or held.is_here

    def is_own(self, name: str) -> bool:
        """Return whether this process saves the parameter or buffer with this name."""
        return name in self.parameters or name in self.buffers
