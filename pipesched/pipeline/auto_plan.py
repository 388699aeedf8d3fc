"""Auto plan: searches for values of the options that the user of a Pipeline did not set."""

import logging
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
from pipesched.model.state_guard import set_aside
from pipesched.pipeline.options import Numerics, Search
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import MICROBATCHES_PER_RANK
from pipesched.planning.search_request import Offload, SearchRequest
from pipesched.planning.tuner import find_plan, find_plan_of_replicas, too_small
from pipesched.profiling.optimizer_costs import measure_updates, put_updates
from pipesched.profiling.profile_model import profile as measure
from pipesched.profiling.recompute_refusals import put_refusals
from pipesched.program.completion import Completion
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.microbatches import Microbatch, Splitter
from pipesched.runtime.stage.offloading import host_bytes_per_s
from pipesched.simulation.layer_costs import LayerCosts, costs_of
from pipesched.simulation.overheads import Machine, Overheads, RanksAre
from pipesched.simulation.profile import Profile
from pipesched.simulation.replication import ReplicaCosts
from pipesched.simulation.size_fit import Size, SizeFit
from pipesched.torch_checks import as_call
from pipesched.user_warning import warn

__all__ = ["AutoPlan", "adds_up", "as_profile", "cores_of", "on_devices"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """Searches for the plan that a Pipeline runs."""

    model: Any  #: the user's model argument
    module: nn.Module  #: the module built from ``model``
    layered: LayeredModel
    sample: Any
    devices: Sequence[torch.device]  #: one device per rank
    ranks_are: RanksAre
    search: Search
    numerics: Numerics
    optimizer: Callable[[list[Any]], Optimizer] | None  #: makes an optimizer, whose states count towards a memory limit
    free: bool  #: whether the search may choose the number of micro-batches, because results do not depend on it
    replicas: ReplicaCosts | None = None  #: the costs of several replicas; None if there is one replica
    redundancy: bool = False  #: whether ranks keep copies of each other's states
    gather_once: bool | None = None  #: whether a step gathers sharded weights once; None: only if that fits in memory

    def is_wanted(self, request: PlanRequest, plan: Plan | None) -> bool:
        """Return whether a search is needed.

        If a plan is given, no search is needed. Otherwise, search options always require a search. Without search
        options, no search is needed if the schedule or all boundaries are given, or if there is only one device.

        Raises PartitionError if search options were given together with a plan.
        """
        if plan is not None and self.search.is_asked_for:
            raise PartitionError(
                "plan= must not be combined with search options, because a plan leaves nothing to search for; "
                "batch_size, memory_limit_bytes or profile was passed with plan=; pass plan= without them, or make a "
                "new plan with pipesched.tune"
            )
        if plan is not None:
            return False
        cut_is_given = isinstance(request.boundaries, Sequence) or bool(
            stages_of(self.model, list(self.layered.layers), request.num_stages or len(self.devices))
        )
        several = len(self.devices) > 1 and bool(self.layered.layers)
        return self.search.is_asked_for or (request.schedule == "auto" and not cut_is_given and several)

    def find(
        self, request: PlanRequest, measured: Callable[[], Mapping[str, LayerCosts]]
    ) -> tuple[Plan, dict[str, LayerCosts], Overheads | None, Size, SizeFit]:
        """Search for the plan. Raises the same errors as `pipesched.tune`.

        Args:
            request: the user's choices; the search makes the other choices.
            measured: a function that measures the layers with the sample and returns layer name -> costs.

        Returns:
            The plan, the layers' costs for the plan's micro-batches, the time that ranks spend outside their stages'
            work, the size of a micro-batch, and the layers' costs as functions of this size.

        """
        sample = self._sample_size()
        sample_rows = sample.rows
        batch_size = self.search.batch_size
        if batch_size is None:
            batch_size = sample_rows * (request.num_microbatches or MICROBATCHES_PER_RANK * len(self.devices))
        if not is_count(batch_size):
            raise InputError(
                f"batch_size must be a whole number of rows, at least 1; got {shown(batch_size)}; pass the number of "
                f"rows in a step"
            )
        search_counts = self.free and self.search.batch_size is not None and request.num_microbatches is None
        if request.num_microbatches is None and not search_counts:
            request = replace(request, num_microbatches=-(-batch_size // sample_rows))
        profile = self._profile(sample_rows, measured, several=search_counts)
        search_request = self._search_request(profile, batch_size, request)
        plan = find_plan_of_replicas(search_request) if self.gather_once is None else find_plan(search_request)
        first = plan.alternatives[0] if plan.alternatives else None
        _LOG.info("chose a plan: %s", first.label if first else plan.schedule)
        if why := too_small(plan, search_request):
            several = "schedule= without search=" if self.search.is_asked_for else "schedule="
            warn(f"{why}; pass one device, or pass {several} to use several")
        rows = -(-batch_size // plan.program.num_microbatches)
        graph = profile.graph(rows)
        overheads = plan.costs.overheads if plan.costs else None
        size = Size(rows, max(1, rows * sample.elements // sample_rows))
        return plan, {name: costs_of(graph, name) for name in graph}, overheads, size, profile.size_fit

    def again(
        self,
        request: PlanRequest,
        layers: Mapping[str, LayerCosts],
        rows: int,
        **changes: Any,
    ) -> Plan:
        """Search again, with costs and speeds of ranks that were measured in steps. Raises the errors of ``find``.

        Args:
            request: the user's choices, with the number of micro-batches.
            layers: the costs of the layers.
            rows: the number of rows of a micro-batch; 0 for that of the sample.
            **changes: other fields of the SearchRequest, such as ``speeds`` and ``effort``.

        """
        rows = rows or self._sample_size().rows
        machine = Machine(on_host=self.devices[0].type == "cpu")
        profile = Profile({rows: self.layered.graph(layers)}, machine=machine)
        assert request.num_microbatches is not None
        search = self._search_request(profile, rows * request.num_microbatches, request)
        return find_plan(replace(search, **changes))

    def _search_request(self, profile: Profile, batch_size: int, request: PlanRequest) -> SearchRequest:
        is_limited = self.search.memory_limit_bytes is not None
        profile = self._with_updates(profile)
        profile = self._with_refusals(profile) if is_limited else profile
        profile = on_devices(profile, self.devices, self.search.offload, is_limited=is_limited)
        return SearchRequest.of(
            profile,
            len(self.devices),
            batch_size,
            request,
            memory_limit_bytes=self.search.memory_limit_bytes,
            links=self.search.links if self.replicas is None else self.replicas.pipeline_links(),
            ranks_are=self.ranks_are,
            num_cores=cores_of(self.devices, self.numerics.intra_op_threads),
            offload=self.search.offload,
            effort=self.search.effort,
            completion=Completion(
                updates=self.optimizer is not None,
                norms=self.optimizer is not None and self.numerics.needs_norms,
                redundancy=self.redundancy,
            ),
            replica_costs=self.replicas,
            in_tree=self.numerics.reduction_order == "tree",
        )

    def _sample_size(self) -> Size:
        splitter = Splitter(1, fixed=False, split_dims=self.numerics.split_dims)
        args, kwargs = as_call(self.sample)
        return splitter.as_given([Microbatch(*args, **kwargs)]).sizes(look)[0]

    def _profile(self, rows: int, measured: Callable[[], Mapping[str, LayerCosts]], *, several: bool) -> Profile:
        """Return the given profile, or measure the layers.

        If ``several`` is True, the layers are measured with micro-batches of several sizes, otherwise only with the
        sample.
        """
        if self.search.profile is not None:
            known = as_profile(self.search.profile)
            known.check_model(self.layered.graph({}))
            return known
        if several:
            return measure(
                self.module,
                self.sample,
                device=self.devices[0],
                intra_op_threads=self.numerics.intra_op_threads,
                split_dims=self.numerics.split_dims,
                ranks_are=self.ranks_are,
            )
        return Profile({rows: self.layered.graph(measured())}, machine=Machine(on_host=self.devices[0].type == "cpu"))

    def _with_updates(self, known: Profile) -> Profile:
        """Return the profile. If memory is limited and the profile lacks the optimizer's memory, add this memory."""
        kept = any(size for graph in known.graphs.values() for _, size in graph.nodes(data="optimizer_bytes"))
        if self.optimizer is None or self.search.memory_limit_bytes is None or kept:
            return known
        parameters = dict(self.module.named_parameters())
        updates = measure_updates(self.optimizer, parameters, self.devices[0], self.numerics.intra_op_threads)
        graphs = {rows: graph.copy() for rows, graph in known.graphs.items()}
        put_updates(graphs.values(), updates)
        return replace(known, graphs=graphs)

    def _with_refusals(self, known: Profile) -> Profile:
        """Return the profile. If it does not state which layers must not be recomputed, try them, and add this."""
        if all("refuses" in node for _, node in known.graph(min(known.graphs)).nodes(data=True)):
            return known
        graphs = {rows: graph.copy() for rows, graph in known.graphs.items()}
        with set_aside(self.module):
            put_refusals(self.layered, graphs.values())
        return replace(known, graphs=graphs)


def adds_up(module: nn.Module, loss_fn: Any, loss_weight: Any) -> bool:
    """Return whether the result of a step is the same for every number of micro-batches.

    True if no layer combines rows, and the loss is known to be a sum, or a mean over a known number of items.
    """
    if normalised_over_rows(module):
        return False
    return loss_weight is not None or reduces(loss_fn)


def as_profile(profile: Profile | str | PathLike[str]) -> Profile:
    """Return the given profile, or the profile read from a file if ``profile`` is a path.

    Raises InputError for another type, and ScheduleError for a file that does not contain a profile.
    """
    if not isinstance(profile, Profile | str | PathLike):
        raise InputError(
            f"profile must be a Profile or the path of a saved profile; got {profile!r}; pass the result of "
            f"pipesched.profile, or a file that Profile.save wrote"
        )
    return profile if isinstance(profile, Profile) else Profile.load(profile)


def cores_of(devices: Sequence[torch.device], intra_op_threads: int = 1) -> int | None:
    """Return the number of CPU ranks that can compute at the same time; None if some ranks use other devices."""
    if any(device.type != "cpu" for device in devices):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // intra_op_threads)


def on_devices(
    profile: Profile, devices: Sequence[torch.device], offload: Offload, *, is_limited: bool = True
) -> Profile:
    """Return the profile for a machine with these devices.

    The ``machine.on_host`` of the result states whether any device is a CPU. If offloading needs the speed of copies
    to the host, and the profile does not contain this speed for these devices, the function measures it. Plans offload
    only if the memory is limited (``is_limited``, default: True).
    """
    on_host = any(device.type == "cpu" for device in devices)
    machine = replace(profile.machine, on_host=on_host)
    speed_is_known = machine.host_bytes_per_s is not None and (on_host or not profile.machine.on_host)
    if is_limited and not speed_is_known and (offload is True or (offload == "auto" and not on_host)):
        machine = replace(machine, host_bytes_per_s=host_bytes_per_s(devices[0]))
    return replace(profile, machine=machine)
