"""Cost model: the measured costs of a pipeline's layers and devices, and the stage costs computed from them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from torch import nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.model.stale_weights import StaleGuard
from pipesched.model.state_guard import set_aside
from pipesched.partitioning.result import StageLayers
from pipesched.pipeline.assembly import StageCut
from pipesched.pipeline.sent_values import learn_sent_values
from pipesched.planning.advice import NO_ADVICE
from pipesched.planning.cost_correction import Known, MeasuredStage, slowed
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.stage_partitioner import StagePartitioner
from pipesched.profiling.layer_profiler import QUICK
from pipesched.profiling.layered_costs import measure
from pipesched.profiling.lone_layers import without_collectives
from pipesched.profiling.loss_costs import with_supposed_loss
from pipesched.profiling.tensor_link import collective_s, given_link
from pipesched.program.checkpoint_options import offloading
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.rank_host import RankHost, alone
from pipesched.runtime.stage.offloading import host_bytes_per_s
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import LayerCosts, costs_of, stage_costs, treated
from pipesched.simulation.links import Links
from pipesched.simulation.overheads import Overheads, RanksAre
from pipesched.simulation.profile import Profile
from pipesched.simulation.replication import ReplicaCosts, Replication
from pipesched.simulation.size_fit import Size, SizeFit
from pipesched.tensors.meta_tensors import lacks_contents

__all__ = ["CostModel", "replica_costs"]


def replica_costs(grid: RankGrid, zero: int, links: Links | None) -> ReplicaCosts | None:
    """Return the costs of a pipeline's replicas; None if there is only one replica.

    Args:
        grid: the ranks of each replica.
        zero: which data is split across the replicas: a number from 0 to 3, as in `Distributed`.
        links: the links between the ranks of all replicas; None if unknown.

    """
    rows = grid.first_rows
    if len(rows) == 1:
        return None
    first, *_ = rows
    in_order = sorted(chain(*rows))
    replication = Replication(
        num_replicas=len(rows),
        zero=zero,
        consecutive="stages" if first == tuple(in_order[: len(first)]) else "replicas",
    )
    return ReplicaCosts(replication, len(first), links, rows)


class CostModel:
    """The known costs of layers, devices and links.

    Args:
        model: the user's model.
        layered: the model's layers.
        loss_fn: the loss function. The costs of the last layer include the memory of the loss.
        guard: the StaleGuard, which lets the code that measures the layers read the model.
        host: the host of the ranks, including ranks that the plan leaves unused.
        intra_op_threads: the number of CPU threads per rank.
        links: the measured links between all ranks; None if unknown.
        replicas: the costs of the pipeline's replicas; None if there is only one replica.

    """

    def __init__(
        self,
        *,
        model: nn.Module,
        layered: LayeredModel,
        loss_fn: Callable[[Any, Any], Any] | None,
        guard: StaleGuard,
        host: RankHost,
        intra_op_threads: int,
        links: Links | None,
        replicas: ReplicaCosts | None,
    ) -> None:
        #: The costs of the pipeline's replicas; None if there is only one replica.
        self.replicas = replicas
        self._all_links = links
        self.layered = layered
        #: The links between the ranks of one replica.
        self.links = self._pipeline_links(host.grid)
        #: The costs of each layer; None until they are measured.
        self.layers: dict[str, LayerCosts] | None = None
        #: Sentences on costs of layers that a profile assumes.
        self.notes: tuple[str, ...] = ()
        #: The ranks' overheads outside their stages; None if no profile contains them.
        self.overheads: Overheads | None = None
        #: The size of a micro-batch for which the plan was found; 0 rows if there was no search.
        self.planned = Size(0, 0)
        #: The layers' costs as functions of the size of a micro-batch.
        self.size_fit = SizeFit()
        #: Slow device -> the measured factor by which the device is slower than the fastest device.
        self.slow: dict[Hashable, float] = {}
        self._kinds: dict[str, Hashable] | None = None
        self._agreed: dict[str, LayerCosts] | None = None  # costs of the layers that all processes have
        self._model = model
        self._loss_fn = loss_fn
        self._guard = guard
        self._tensor = host.tensor
        self._may_wait = host.tensor is not None and host.tensor_link is None and host.tensor.size > 1
        link = given_link(links, host.grid) if links is not None and host.tensor is not None else host.tensor_link
        self._collective_s = None if link is None else collective_s(link)
        grid = host.grid
        self._devices = grid.all_devices
        #: For each rank, the device or the process that can be slower than others.
        self.places = self.places_of(grid)
        self._ranks_are: RanksAre = "threads" if grid.in_one_process else "processes"
        self._intra_op_threads = intra_op_threads

    def regroup(self, grid: RankGrid, zero: int) -> None:
        """Use the costs of other replicas, which ``grid`` arranges. ``zero`` is as in `Distributed`."""
        self.replicas = replica_costs(grid, zero, self._all_links)
        self.links = self._pipeline_links(grid)
        self._devices = grid.all_devices
        self.places = self.places_of(grid)

    def _pipeline_links(self, grid: RankGrid) -> Links | None:
        if self.replicas is not None:
            return self.replicas.pipeline_links()
        links = self._all_links
        return links.among(grid.first_rows[0]) if links is not None and grid.planes else links

    def places_of(self, grid: RankGrid) -> tuple[Hashable, ...]:
        """Return, for each rank of a grid, the device or the process that can be slower than others."""
        return grid.all_devices if grid.in_one_process else grid.first_rows[0]

    def replication(self, programs: ProgramFactory) -> Replication | None:
        """Return the `Replication` that describes the replicas that run these programs.

        Returns None if there is only one replica. Also returns None if the programs do not sum gradients, because
        gradients are then summed after a run.
        """
        replicas = self._replica_costs(programs)
        return None if replicas is None else replicas.replication

    def _replica_costs(self, programs: ProgramFactory) -> ReplicaCosts | None:
        if self.replicas is None or not programs.buckets:
            return None
        return self.replicas.gathering(once=programs.completion.gather_once is not False)

    def measured(self, *, crowds: bool = False) -> dict[str, LayerCosts]:
        """Return the layers' costs, keyed by layer. The first call measures the layers; no step may run meanwhile.

        Args:
            crowds: whether to also measure how much longer a layer takes while another rank of this process computes.

        """
        if self.layers is None:
            self.layers = self._measured_now(crowds=crowds)
        return self.layers

    def _measured_now(self, *, crowds: bool) -> dict[str, LayerCosts]:
        if self._may_wait:
            with without_collectives(self._model):  # the user may have split layers
                self._measured_alone(crowds=False)
        return self._measured_alone(crowds=crowds)

    def _measured_alone(self, *, crowds: bool) -> dict[str, LayerCosts]:
        without_contents = lacks_contents(self._model)
        effort = replace(QUICK, crowds=crowds and not without_contents, ranks_are=self._ranks_are)
        device = self._devices[0]
        with alone(self._tensor, self._collective_s), self._guard.lifted(), set_aside(self._model, self._loss_fn):
            layers = measure(self.layered, device, self._intra_op_threads, effort)
            if self._loss_fn is not None and not without_contents:
                last, costs = layers.popitem()
                layers[last] = with_supposed_loss(
                    costs, self._loss_fn, self.layered.output(), device, self._intra_op_threads
                )
        return layers

    @property
    def is_agreed(self) -> bool:
        """Whether all processes have these costs of the layers."""
        return self.layers is not None and self.layers is self._agreed

    def agree(self, layers: dict[str, LayerCosts]) -> None:
        """Use costs of the layers that all processes use from now on."""
        self.layers = self._agreed = layers

    def slowness_here(self) -> float:
        """Measure the layers in this process, and return how many times slower it is than the known costs say.

        A process without stages measures itself in this way, because steps do not measure it.
        """
        known = self.measured()
        now = self._measured_now(crowds=False)
        return sum(map(_work_s, now.values())) / (sum(map(_work_s, known.values())) or 1.0)

    def forget(self) -> None:
        """Discard the measured layer costs, so that the next use measures the layers again."""
        self.layers = None
        self.notes = ()
        self._kinds = None

    def for_rows(self, rows: int) -> dict[str, LayerCosts]:
        """Return the layers' costs for micro-batches of ``rows`` rows, scaled from the costs for the planned size."""
        graph = Profile({self.planned.rows: self.layered.graph(self.measured())}).graph(rows)
        return {name: costs_of(graph, name) for name in graph}

    def for_size(self, size: Size) -> dict[str, LayerCosts]:
        """Return the layers' costs for micro-batches of this size, scaled from the costs for the planned size."""
        return self.size_fit.scaled(self.measured(), self.planned, size)

    def treated(self, programs: ProgramFactory) -> dict[str, LayerCosts]:
        """Return the layers' costs under these programs' checkpointing, keyed by layer."""
        return treated(self.measured(), programs.checkpoint)

    def stage_costs(
        self,
        programs: ProgramFactory,
        cut: StageLayers,
        layers: Mapping[str, LayerCosts] | None = None,
        places: Sequence[Hashable] | None = None,
    ) -> Costs:
        """Return the stages' costs, including the effects of links and slow devices, but excluding overheads.

        Args:
            programs: the programs that run the stages.
            cut: the layers of each stage.
            layers: the layers' costs. Default: the measured costs.
            places: the places of the ranks. Default: those of the running plan.

        """
        places = self.places if places is None else places
        costs_by_layer = treated(self.measured() if layers is None else layers, programs.checkpoint)
        program = programs.full.plain
        stages = [[costs_by_layer[name] for name in cut[part]] for part in program.weights]
        offloads = offloading(programs.checkpoint, cut)
        costs = stage_costs(stages, len(cut), host_bytes_per_s=self._host_bytes_per_s if offloads else None)
        costs = replace(
            slowed(costs, [self.slow.get(places[rank], 1.0) for rank in program.placement]), links=self.links
        )
        replicas = self._replica_costs(programs)
        if replicas is None:
            return costs
        sizes = [
            [costs_by_layer[name].parameter_bytes if name in costs_by_layer else 0 for name in names]
            for names in programs.buckets
        ]
        return replicas.added(costs, program.placement, sizes)

    def expected_costs(self, programs: ProgramFactory, cut: StageLayers) -> Costs:
        """Return the stages' costs, including the ranks' overheads."""
        return replace(self.stage_costs(programs, cut), overheads=self.overheads)

    @cached_property
    def _host_bytes_per_s(self) -> float | None:
        return host_bytes_per_s(self._devices[0])

    def slowness(self, place: Hashable) -> float:
        """Return how many times slower a device or process is than the fastest; 1 if this was not measured."""
        return self.slow.get(place, 1.0)

    def learn(self, stages: Sequence[MeasuredStage], tolerance: float) -> None:
        """Correct the costs of layers and devices, based on the measured times of stages.

        Args:
            stages: the measured times of stages.
            tolerance: the relative difference below which two times are treated as equal.

        """
        layers = self.measured()
        if self._kinds is None:
            self._kinds = dict(layers)
        known = Known(layers, self._kinds, self.slow).corrected(stages, tolerance)
        self.layers = dict(known.layers)
        self.slow = dict(known.slow)
        self.overheads = None  # measured stage times contain the overheads

    def partitioner(
        self, pins: Pins, programs: ProgramFactory, places: Sequence[Hashable] | None = None
    ) -> StagePartitioner:
        """Return what divides the layers into the stages of some programs.

        Args:
            pins: the fixed boundaries.
            programs: the programs.
            places: the places of the ranks. Default: those of the running plan.

        """
        program = programs.full.plain
        places = self.places if places is None else places
        speeds = {rank: 1 / slow for rank in program.placement if (slow := self.slowness(places[rank])) != 1}
        return StagePartitioner(
            pins=pins,
            program=program,
            graph=lambda: self.layered.graph(self.treated(programs)),
            checkpoint=programs.checkpoint,
            links=self.links,
            speeds=speeds,
        )

    def cut_stages(
        self,
        host: RankHost,
        pins: Pins,
        programs: ProgramFactory,
        plan: Plan | None,
        places: Sequence[Hashable] | None = None,
    ) -> StageCut:
        """Choose the layers of each stage. Rank 0 chooses on behalf of all ranks.

        Args:
            host: the host of the ranks.
            pins: the fixed boundaries.
            programs: the programs that will run the stages.
            plan: the user's plan, or None. The plan's partition and alternatives are copied to the result.
            places: the places of the ranks. Default: those of the running plan.

        """
        partitioner = self.partitioner(pins, programs, places)
        cut, found = host.collectives.agreed(partitioner.partition)
        learn_sent_values(host, self.layered, cut)
        return StageCut(
            cut=cut,
            partitioner=partitioner,
            partition=found if plan is None else plan.partition,
            alternatives=() if plan is None else plan.alternatives,
            advice=NO_ADVICE if plan is None else plan.advice,
            gather_once=plan is None or plan.replication is None or plan.replication.gather_once,
        )


def _work_s(costs: LayerCosts) -> float:
    return costs.forward_s + costs.backward_s
