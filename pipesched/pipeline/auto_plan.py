"""Auto plan: schedule="auto": what of a pipeline's plan is searched for, and with which numbers."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.capture.layered_model import LayeredModel, stages_of
from pipesched.capture.loss_reduction import reduces
from pipesched.checks import is_count, shown
from pipesched.errors import InputError, PartitionError
from pipesched.model.module_tree import normalised_over_rows
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import MICROBATCHES_PER_RANK
from pipesched.planning.search_request import Offload, Search, check_offload
from pipesched.planning.tuner import find_plan, too_small
from pipesched.profiling.optimizer_costs import measure_updates
from pipesched.profiling.profile_model import profile as measure
from pipesched.profiling.profile_model import put_updates
from pipesched.runtime.microbatches import SplitDims, Splitter
from pipesched.runtime.stage.offloading import host_bytes_per_s
from pipesched.simulation.layer_costs import LayerCosts, costs_of
from pipesched.simulation.links import Links
from pipesched.simulation.overheads import Machine, Overheads, RanksAre
from pipesched.simulation.profile import Profile
from pipesched.torch_checks import as_call
from pipesched.user_warning import warn

__all__ = ["Automatic", "adds_up", "as_profile", "cores_of", "on_devices"]

_EFFORT = 200_000  # actions that are simulated while a pipeline is made


@dataclass(frozen=True)
class Automatic:
    """What a pipeline's own plan is searched with.

    model: as it was given; module: as it is built. free: nothing of what is learned depends on how many micro-batches
    there are. devices: of the ranks; ranks_are processes, each has its part. profile: a Profile or the
    path of one, which is then not measured. intra_op_threads: of ranks. optimizer: what a limit of memory also
    counts the states of. offload: whether activations may wait on the host; "auto": where no device is the host's own.
    """

    model: Any
    module: nn.Module
    layered: LayeredModel
    sample: Any
    split_dims: SplitDims
    devices: Sequence[torch.device]
    ranks_are: RanksAre
    batch_size: int | None
    memory_limit_bytes: int | Sequence[int] | None
    links: Links | None
    profile: Any
    intra_op_threads: int
    optimizer: Callable[[list[Any]], Optimizer] | None
    free: bool
    offload: Offload = "auto"

    def __post_init__(self) -> None:
        check_offload(self.offload)

    def chooses(self, wishes: PlanRequest, plan: Plan | None) -> bool:
        """Whether anything is left to search for: not where a plan is given, nor a schedule or all boundaries and no
        limits. Raises PartitionError for a plan with more to be searched for.
        """
        asked = (self.batch_size, self.memory_limit_bytes, self.profile) != (None, None, None)
        if plan is not None and asked:
            raise PartitionError(
                "a plan holds all choices; batch_size, memory_limit_bytes and profile are for a search, and were given "
                "beside it; pass the plan alone, or make one with pipesched.tune"
            )
        if plan is not None:
            return False
        given = isinstance(wishes.boundaries, Sequence) or bool(
            stages_of(self.model, list(self.layered.layers), wishes.num_stages or len(self.devices))
        )
        return asked or (
            wishes.schedule == "auto" and not given and len(self.devices) > 1 and bool(self.layered.layers)
        )

    def plan(
        self, wishes: PlanRequest, profiled: Callable[[], Mapping[str, LayerCosts]]
    ) -> tuple[Plan, dict[str, LayerCosts], Overheads | None, int]:
        """The plan, what layers cost for its micro-batches, what ranks take beside, and the rows of a micro-batch.
        profiled: measures layers with the sample.

        Raises as `pipesched.tune`.
        """
        rows, size = self._rows(), self.batch_size
        if size is None:
            size = rows * (wishes.num_microbatches or MICROBATCHES_PER_RANK * len(self.devices))
        if not is_count(size):
            raise InputError(
                f"batch_size is a number of rows, at least 1; got {shown(size)}; pass that of a whole step"
            )
        search_counts = self.free and self.batch_size is not None and wishes.num_microbatches is None
        if wishes.num_microbatches is None and not search_counts:
            wishes = replace(wishes, num_microbatches=-(-size // rows))
        known = self._with_updates(self._profile(rows, profiled, several=search_counts))
        if self.memory_limit_bytes is not None:
            known = on_devices(known, self.devices, self.offload)
        search = Search.of(
            known,
            len(self.devices),
            size,
            wishes,
            memory_limit_bytes=self.memory_limit_bytes,
            links=self.links,
            ranks_are=self.ranks_are,
            num_cores=cores_of(self.devices, self.intra_op_threads),
            offload=self.offload,
            effort=_EFFORT,
        )
        plan = find_plan(search)
        if why := too_small(plan, len(self.devices)):
            warn(why)
        rows = -(-size // plan.program.num_microbatches)
        graph, beside = known.graph(rows), plan.costs.overheads if plan.costs else None
        return plan, {name: costs_of(graph, name) for name in graph}, beside, rows

    def _rows(self) -> int:
        return Splitter(1, fixed=False, split_dims=self.split_dims).batch(*as_call(self.sample)).rows[0]

    def _profile(self, rows: int, profiled: Callable[[], Mapping[str, LayerCosts]], *, several: bool) -> Profile:
        if self.profile is not None:
            known = as_profile(self.profile)
            known.check_model(self.layered.graph({}))
            return known
        if several:
            return measure(
                self.module,
                self.sample,
                device=self.devices[0],
                intra_op_threads=self.intra_op_threads,
                split_dims=self.split_dims,
            )
        return Profile({rows: self.layered.graph(profiled())}, machine=Machine(on_host=self.devices[0].type == "cpu"))

    def _with_updates(self, known: Profile) -> Profile:
        """The profile with what the optimizer keeps, where memory is limited and it does not say."""
        kept = any(size for graph in known.graphs.values() for _, size in graph.nodes(data="optimizer_bytes"))
        if self.optimizer is None or self.memory_limit_bytes is None or kept:
            return known
        parameters = dict(self.module.named_parameters())
        updates = measure_updates(self.optimizer, parameters, self.devices[0], self.intra_op_threads)
        graphs = {rows: graph.copy() for rows, graph in known.graphs.items()}
        put_updates(graphs.values(), updates)
        return replace(known, graphs=graphs)


def adds_up(module: nn.Module, loss_fn: Any, loss_weight: Any) -> bool:
    """Whether a batch teaches the same in however many micro-batches: no layer looks across rows, and the loss is known
    to be a sum or mean over what is counted.
    """
    if normalised_over_rows(module):
        return False
    return loss_weight is not None or reduces(loss_fn)


def as_profile(profile: Profile | str | PathLike[str]) -> Profile:
    """A profile, or the one in a file. Raises InputError for what is neither, ScheduleError for a file of none."""
    if not isinstance(profile, Profile | str | PathLike):
        raise InputError(
            f"profile is what layers cost, a Profile or the path of one; got {profile!r}; pass what pipesched.profile "
            f"returns, or the file that Profile.save wrote"
        )
    return profile if isinstance(profile, Profile) else Profile.load(profile)


def cores_of(devices: Sequence[torch.device], intra_op_threads: int = 1) -> int | None:
    """How many ranks on these devices may compute at once, where they do so on the host; None where they do not."""
    if any(device.type != "cpu" for device in devices):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // intra_op_threads)


def on_devices(profile: Profile, devices: Sequence[torch.device], offload: Offload) -> Profile:
    """The profile of a machine with these devices: whether they are the host's own; and how fast they copy to it, where
    that matters and was not measured of such.
    """
    on_host = any(device.type == "cpu" for device in devices)
    machine = replace(profile.machine, on_host=on_host)
    of_such = machine.host_bytes_per_s is not None and (on_host or not profile.machine.on_host)
    if not of_such and (offload is True or (offload == "auto" and not on_host)):
        machine = replace(machine, host_bytes_per_s=host_bytes_per_s(devices[0]))
    return replace(profile, machine=machine)
