"""Assembly: builds the stages of a model and places them on their ranks, for one plan."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.capture.layered_model import LayeredModel
from pipesched.capture.loss_reduction import reduces
from pipesched.capture.loss_rule import LossRule
from pipesched.capture.stage_body import Body, Head
from pipesched.capture.stage_module import Wrap, WrappedBody, wrapped_bodies
from pipesched.errors import GraphError, ScheduleError
from pipesched.model.initialization import Initial
from pipesched.model.module_tree import Members
from pipesched.model.sharded_modules import ShardedModules
from pipesched.model.tied_weights import Ties
from pipesched.model.weight_owners import Owners
from pipesched.parallel.model_forms import ModelForms
from pipesched.parallel.weight_split import SplitWeights
from pipesched.partitioning.partition import Partition
from pipesched.partitioning.result import StageLayers
from pipesched.pipeline.checks.recompute_checks import check_recomputed, check_stateless
from pipesched.pipeline.checks.replica_checks import (
    TREE,
    ZERO_3,
    NeedsOwnWeights,
    check_own_weights,
    check_replicas,
    check_tree,
    warn_of_written,
)
from pipesched.planning.advice import NO_ADVICE, Advice
from pipesched.planning.alternatives import Alternative
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.stage_partitioner import StagePartitioner
from pipesched.profiling.optimizer_memory import Upkeep
from pipesched.profiling.stage_memory_probe import StageSizes
from pipesched.program.actions import Kind
from pipesched.program.checkpoint_options import checkpoint_by_layer
from pipesched.program.program import Program
from pipesched.runtime.gradients.buckets import GradientBuckets, local
from pipesched.runtime.gradients.plane_norms import PlaneNorms
from pipesched.runtime.gradients.rules import GradientRules, Verdict
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.batch_norm import BatchNormMode, MiniBatchNorms
from pipesched.runtime.stage.buffer_copies import own_buffers
from pipesched.runtime.stage.compiled_layers import Compiled
from pipesched.runtime.stage.copied_stage import CopiedStage
from pipesched.runtime.stage.divided_stage import divided_update, divided_weights
from pipesched.runtime.stage.divided_weights import DividedWeights
from pipesched.runtime.stage.elementwise import check_elementwise
from pipesched.runtime.stage.optimizers import Inheritance, NumberedGroup, optimizers_for
from pipesched.runtime.stage.sharded_update import ShardedUpdate
from pipesched.runtime.stage.stage import Stage, TreeStage
from pipesched.runtime.stage.weight_copies import WeightCopies
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.meta_tensors import put_on
from pipesched.units import and_more, counted
from pipesched.user_warning import warn

__all__ = ["Assembly", "AssemblySpec", "StageCut", "Survives"]


#: Whether the pipeline tells the user's code of the loss of a rank, or whether this process is about to join a job.
Survives = Literal["told", "untold", "joins"]


@dataclass(frozen=True, kw_only=True)
class AssemblySpec:
    """A model and the user's options for its stages. All fields stay the same when the plan changes."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any] | None
    layered: LayeredModel
    layers: dict[str, nn.Module]  #: name -> layer; ``wrap`` may replace some layers
    whole_layers: Collection[str] = ()  #: the modules that the user keeps as one layer each
    initial: Initial  #: fills a model built on the meta device
    batch_norm: BatchNormMode
    compiled: Callable[[torch.device], Compiled | None]  #: returns the compiler for the layers on a device
    wrap: Wrap | None
    #: Whether a run gathers sharded weights only once. None: as in the plan, or once if there is no plan.
    gather_once: bool | None
    optimizer: Callable[[list[Any]], Optimizer] | None
    weighs_losses: bool = False  #: whether the first calls of loss_fn show the weights of micro-batches
    rows_in_front: bool = True  #: whether dim 0 of the batch has the rows
    rules: GradientRules | None = None  #: the clipping, loss scaling and checks of gradients before an update
    #: The data split across replicas: 0 none, 1 optimizer states, 2 also summed gradients, 3 also weights.
    zero: int = 0
    reduction_order: ReductionOrder = "sequential"  #: the order in which the gradients of micro-batches are added
    #: The devices of all parameters and buffers before the pipeline moves them, keyed by name.
    places: Mapping[str, torch.device] = field(default_factory=dict)
    #: The weights that the ranks of a tensor group divide; None if every rank of a plane holds whole weights.
    split: SplitWeights | None = None
    #: Makes the random numbers of a stage on a device.
    random: Callable[[torch.device], KeyedRandom] = KeyedRandom
    #: Whether the job goes on after the loss of a rank, and whether the user's code is told of it; None if it ends.
    survives: Survives | None = None

    @property
    def updates_by_rules(self) -> bool:
        """Whether steps update the weights, and apply gradient rules (such as clipping) before each update."""
        return self.rules is not None and self.optimizer is not None

    def keeps_copies(self, grid: RankGrid) -> bool:
        """Return whether the ranks of a grid keep copies of each other's states."""
        return self.survives is not None and grid.num_processes > 1


@dataclass(kw_only=True)
class StageCut:
    """The layers of each stage, and how they were chosen."""

    cut: StageLayers  #: the layers of each stage
    partitioner: StagePartitioner
    partition: Partition | None  #: the cut and its costs; None until the costs are known
    alternatives: tuple[Alternative, ...] = ()  #: the other plans of the search
    advice: Advice = NO_ADVICE  #: what the search found out beside its plans
    #: Whether a step gathers the weights of a stage only once, if the weights are split across replicas.
    gather_once: bool = True


class Assembly:
    """The stages of a model on their ranks.

    The constructor moves layers to their devices, and fills weights on the meta device with values.

    Args:
        spec: the model and the user's options for its stages.
        host: the host of the ranks.
        programs: the programs that the stages will run.
        stage_cut: the layers of each stage.
        previous: the assembly of the plan that ends; the weights then keep their values. Default: None.
        arriving: for each parameter that another process has trained under the previous plan, its parameter group
            there. Default: none.

    Raises:
        GraphError: stages share or shard weights in an unsupported way.
        ModelTypeError: ``optimizer=`` or ``wrap=`` returned an object of the wrong type.
        InputError: the layers cannot be moved to their devices, or their weights cannot be filled as requested.
        ScheduleError: the program does not fit the stages.

    """

    def __init__(
        self,
        spec: AssemblySpec,
        host: RankHost,
        programs: ProgramFactory,
        stage_cut: StageCut,
        previous: "Assembly | None" = None,
        arriving: Mapping[nn.Parameter, NumberedGroup] | None = None,
    ) -> None:
        begin = time.perf_counter()
        self._is_first = previous is None
        self._spec = spec
        self.programs = programs
        self.stage_cut = stage_cut
        #: The rules for gradients before an update; None if there are no rules.
        self.rules = None if spec.rules is None else replace(spec.rules, planes=self.planes)
        self._filling_s = 0.0
        self.layered = spec.layered
        self._host = host
        program = programs.connect(spec.layered.edges(self.cut), self.cut)
        ranks = [program.placement[index] for index in range(program.num_weights)]
        self.ties = Ties(spec.model, spec.layered.uses(self.cut, ranks), host.collectives)
        self.weight_copies = WeightCopies(host.collectives, self.ties.own)
        if host.sums is not None:
            check_replicas(spec.model, programs, spec.batch_norm)
        once = stage_cut.gather_once if spec.gather_once is None else spec.gather_once
        programs.replicate([] if host.sums is None else self._bucket_layers(), once if self.zero == 3 else None)
        self.norms = MiniBatchNorms(spec.batch_norm, host.collectives)
        self.norms.check(spec.model, program, streams=programs.streams)
        layers = checkpoint_by_layer(programs.checkpoint).items()
        #: The checkpoint option of each call whose activations are recomputed or offloaded.
        self.checkpoint_of_call = {
            call: word for layer, word in layers for call in spec.layered.calls_of(layer, again=word != "offload")
        }
        #: The stages' memory needs; None until they are measured.
        self.sizes: Sequence[StageSizes] | None = None
        #: The memory that the optimizer of each stage needs for its parameters, and for the rows that this replica
        #: updates, keyed by stage and by whether it is for the rows.
        self.upkeeps: dict[tuple[int, bool], Upkeep] = {}
        #: One Body for each stage that holds its own weights. A Body runs the layers of a stage.
        self.bodies = self._bodies()
        self.owners = self._owners(self.bodies)
        if spec.reduction_order == "tree":
            check_tree(spec.model, program, self.bodies, self.ties.parameters)
            self._check_own_weights(TREE, [0] * len(self.cut))
        self._check_reached()
        #: The parameters of this process that are sharded over the mesh dimension of the axis "shard".
        self._sharded = self._sharded_parameters()
        #: Stage number -> stage, for the stages of this process.
        self.stages = self._stages()
        if host.sums is not None and self._is_first:
            held = self.held_tensors()
            shards = [tensor for tensor in held if tensor in self._sharded]
            host.sums.copy_from_first(
                [local(tensor) for tensor in held if tensor not in self._sharded], [local(shard) for shard in shards]
            )
        #: Sums, across replicas, the gradients that are complete only after a run; None if there is one replica.
        self.late_sums = self._late() if host.sums is not None else None
        #: The holders of weight copies. A step refreshes the copies before it starts.
        self.copies = [holder for holder in (self.ties, self.weight_copies) if holder]
        #: Detects modules of the model that were replaced after the pipeline was built.
        self.members = Members(spec.model, spec.layered.layers)
        #: Seconds that the construction took, excluding the time to fill the model and make optimizers.
        self.made_s = time.perf_counter() - begin - self._filling_s
        #: The largest number of rows of a micro-batch for which the memory limits were found to hold.
        self.most_rows = 0
        #: Stage number -> optimizer; empty until ``adopt_optimizers``.
        self.optimizers: dict[int, Optimizer] = {}
        #: The weights of this process's stages if they are split across replicas (zero=3); otherwise empty.
        self.divided_weights: list[DividedWeights] = []
        self._inheritance: Inheritance | None = None
        if spec.optimizer is not None:
            tied = self.ties.parameters
            home = self.owners.stage
            names = {parameter: name for name, parameter in self._named_parameters()}
            before = {} if previous is None else previous.optimizers
            self._inheritance = optimizers_for(
                spec.optimizer, self.stages, tied, home, before, names, self.rules, arriving
            )
        #: Whether some stages update only after the run, when the gradients of tied parameters are complete.
        self.updates_late = any(stage.optimizer.late for stage in self.stages.values()) or (
            spec.updates_by_rules and bool(self.ties.parameters)
        )

    @cached_property
    def forms(self) -> ModelForms | None:
        """The forms of a model that the ranks of a tensor group divide; None if no layer is divided."""
        return None if self._spec.split is None else ModelForms(self._spec.model, self._spec.split)

    @cached_property
    def split_parameters(self) -> dict[nn.Parameter, str]:
        """The parameters that the ranks of a tensor group divide, and their names."""
        split = self._spec.split
        named = self._spec.model.named_parameters(remove_duplicate=False)
        return {} if split is None else {parameter: name for name, parameter in named if name in split}

    @cached_property
    def planes(self) -> PlaneNorms | None:
        """Combines norms of gradients over the planes; None if no weights are divided over tensor groups."""
        split = self.split
        if split is None:
            return None
        rank = split.group.rank
        return PlaneNorms(split.group, {one: split[name].counts(rank) for one, name in self.split_parameters.items()})

    @property
    def split(self) -> SplitWeights | None:
        """The weights that the ranks of a tensor group divide; None if there are none."""
        return self._spec.split

    @property
    def has_optimizers(self) -> bool:
        """Whether steps update the weights."""
        return self._spec.optimizer is not None

    @property
    def zero(self) -> int:
        """The data split across replicas: 0 none, 1 optimizer states, 2 also summed gradients, 3 also weights."""
        return 0 if self._host.sums is None else self._spec.zero

    @property
    def divided_updates(self) -> dict[int, ShardedUpdate]:
        """The updates in which each replica updates only its part of a stage's weights, keyed by stage."""
        updates = {index: stage.optimizer.sharded for index, stage in self.stages.items()}
        return {index: update for index, update in updates.items() if update is not None}

    def adopt_optimizers(self) -> None:
        """From now on, update the parameters with this assembly's optimizers instead of the previous assembly's."""
        if self._inheritance is not None:
            self.optimizers = self._inheritance.take()
            for optimizer in self.optimizers.values():
                self.check_optimizer(optimizer)
            for index, optimizer in self.optimizers.items():
                self.stages[index].optimizer.wrapped = optimizer
            if self.zero:
                self._divide()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ModelTypeError if an optimizer cannot update the blocks of weights that this rank holds."""
        if self.split is not None:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            check_elementwise(optimizer, parameters, self.split_parameters)

    def _divide(self) -> None:
        """Split the updates across the replicas.

        With zero=2 or 3, also split the summed gradients. With zero=3, also split the weights.
        """
        assert self._host.sums is not None
        grid = self._host.grid
        place = self._host.sums, grid.replica, len(grid.rows)
        updates = [
            divided_update(stage, *place) for stage in self.stages.values() if stage.optimizer.wrapped is not None
        ]
        if self.zero >= 2:
            divided = {parameter: update for update in updates for parameter in update.parameters}
            for gradients in (self.late_sums, *(stage.gradients for stage in self.stages.values())):
                if gradients is not None:
                    gradients.divided = divided
        if self.zero == 3:
            self._check_own_weights(ZERO_3, self.program.placement)
            self.divided_weights = [divided_weights(stage, *place) for stage in self.stages.values()]

    @property
    def stages_without_scheduler(self) -> list[int]:
        """The stages whose new optimizer lacks a learning rate scheduler; empty if no optimizer has a scheduler."""
        return [] if self._inheritance is None else self._inheritance.stages_without_scheduler

    @property
    def layer_names(self) -> list[str]:
        """The names of the model's layers, in the order in which the layers run."""
        return list(self._spec.layers)

    @property
    def wrapped(self) -> bool:
        """Whether ``wrap=`` may have changed the modules of stages."""
        return self._spec.wrap is not None

    @cached_property
    def reads_losses(self) -> bool:
        """Whether the first calls of loss_fn are read, because it is no loss of torch."""
        return self._spec.loss_fn is not None and not reduces(self._spec.loss_fn)

    @property
    def cut(self) -> StageLayers:
        """The layers of each stage."""
        return self.stage_cut.cut

    @property
    def program(self) -> Program:
        """The program for a full batch, as the schedule or the user defined it (before lowering)."""
        return self.programs.full.plain

    def _bodies(self) -> Sequence[Body]:
        spec = self._spec
        program = self.program
        tied = self.ties.parameters
        devices = [self._host.grid.devices[program.placement[index]] for index in range(program.num_weights)]
        spec.layered.check_sent(self.cut, threads=self._host.grid.in_one_process)
        bodies = spec.layered.bodies(self.cut, devices, self.ties)
        if self._is_first:
            begin = time.perf_counter()
            spec.initial.fill(self._owners(bodies), self._host.grid, self._host.collectives.fail, spec.split)
            self._filling_s = time.perf_counter() - begin
        holds = self._host.grid.holds
        return wrapped_bodies(spec.wrap, spec.model, spec.layers, bodies, program, devices, holds, tied)

    def _check_own_weights(self, option: NeedsOwnWeights, placement: Sequence[int]) -> None:
        spec = self._spec
        tied = self.ties.parameters
        check_own_weights(option, spec.model, spec.layered, self.cut, placement, self.owners.stage, tied)

    def _owners(self, bodies: Sequence[Body]) -> Owners:
        homes = [(self.program.placement[part], body.layers) for part, body in enumerate(bodies)]
        return Owners(self._spec.model, homes, self.program.output_rank, self.ties.parameters)

    def _check_reached(self) -> None:
        """Check that no layer uses a parameter of another rank without receiving it as an input.

        Raises GraphError if a layer reaches such a parameter through a module or a reference, because the parameter
        would be stale or on another device, and its gradient would not reach the rank that holds the parameter. If both
        ranks share a device and a process, this method only issues a warning.
        """
        grid = self._host.grid
        placement = self.program.placement
        for layer, name, stage in self.layered.reached(self.cut):
            home = self.owners.rank(name)
            rank = placement[stage]
            if home == rank:
                continue
            message = (
                f"a layer may use only its own weights and weights passed to it as tensors; layer {layer!r} (stage "
                f"{stage}, rank {rank}) uses {name!r} of rank {home} through a module or a reference; pass the weight "
                f"to the layer as an argument, or keep this layer and the weight's layer in one stage with together="
            )
            if not grid.in_one_process or grid.devices[home] != grid.devices[rank]:
                raise GraphError(message)
            warn(f"{message}; otherwise the gradient of {name!r} matches an unpipelined loop only up to rounding")

    def _written(self) -> list[set[str]]:
        """Return, for each stage, the names of the buffers that the stage's forward writes to.

        The names of a loss module's buffers are in the set of every stage.
        """
        spec = self._spec
        written = spec.layered.written_by(self.cut) if any(own_buffers(spec.model)) else [()] * len(self.cut)
        of_loss = list(own_buffers(spec.loss_fn)) if isinstance(spec.loss_fn, nn.Module) else []
        every = [{*names, *(f"loss_fn.{key}" for key, *_ in of_loss)} for names in written]
        changed = set().union(*every)
        if self._host.sums is not None:
            warn_of_written(spec.model, changed)
        if self.program.num_weights < self.program.num_stages and changed:
            raise ScheduleError(
                f"a forward may change a buffer only under a schedule that runs micro-batches one after another in one "
                f"copy of the layer; {self.program.name} runs copies of the layers, and their forwards change "
                f"{and_more(sorted(changed))}; use a schedule with a single chain of stages, such as dualpipe-v"
            )
        return every

    def _stages(self) -> dict[int, Stage]:
        program = self.program
        grid = self._host.grid
        written = self._written()
        stages: dict[int, Stage] = {}
        for index, part in reversed(list(enumerate(program.weights))):  # the first user of a tied weight places it last
            rank = program.placement[index]
            last = not program.graph.consumers[index]
            device = grid.devices[rank]
            body = self.bodies[part]
            loss_fn = self._spec.loss_fn if last else None
            if index != part:  # this stage runs copies of the layers of stage ``part``
                weight_copy = self.weight_copies.add(body.layers, loss_fn, device, (program.placement[part], rank))
                if weight_copy is not None:
                    body = body.over(weight_copy.layers, device)
                    loss_fn = weight_copy.loss_fn
            modules = {**body.layers, **({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
            norms = self.norms.of_stage((index, part), (rank, program.placement[part]), modules)
            if not grid.holds(rank):
                continue
            if index == part:
                for module in modules.values():
                    put_on(module, device)
            ties = self.ties.for_layers(body.layers, device)
            whole = None if self._spec.split is None else self._spec.split.whole_outputs
            head = Head(loss_fn, self._loss_rule(index, part), whole) if last else None
            compiled = self._spec.compiled(device)
            options: dict[str, Any] = {"ties": ties, "norms": norms, "compiled": compiled, "written": written[part]}
            body.random = self._spec.random
            if isinstance(body, WrappedBody):
                body.sharded = ShardedModules.of(body.module, device, once=self._spec.gather_once is not False)
                if body.sharded is not None and not self._sharded.isdisjoint(body.module.parameters()):
                    body.sharded.sum_gradients()
            make = TreeStage if self._spec.reduction_order == "tree" else Stage
            stages[index] = make(body, device, head, **options, checkpoint_of_call=self.checkpoint_of_call)
            stages[index].gradients = self._gradients(index)
        self._check_sharded({index: stage.sharded for index, stage in stages.items() if stage.sharded is not None})
        self._check_recomputed(stages.values())
        self._check_stateless(stages.values())
        return dict(sorted(stages.items()))

    @cached_property
    def actors(self) -> Mapping[int, Any]:
        """What the actions of this process run on: its stages, and the copies that it keeps, keyed by stage."""
        return {**self.copied_stages, **self.stages}

    @cached_property
    def copied_stages(self) -> dict[int, CopiedStage]:
        """The stages of another rank whose copies this rank keeps, keyed by stage."""
        program = self.programs.full.without_messages
        if not (self.programs.completion.redundancy and program.index.has(Kind.REPLAY)):
            return {}
        holds = self._host.grid.holds
        return {stage: CopiedStage() for stage, rank in enumerate(program.copy_ranks) if holds(rank)}

    def _loss_rule(self, stage: int, part: int) -> LossRule | None:
        """Return the rule that the first calls of the user's loss function show; None for losses of torch."""
        spec = self._spec
        if not self.reads_losses:
            return None
        here = {id(tensor) for layer in self.bodies[part].layers.values() for tensor in layer.parameters()}
        here = here - {id(parameter) for parameter in self.ties.parameters} if stage == part else set()
        programs = self.programs.full
        stage_of = {
            id(parameter): place
            for place, body in enumerate(self.bodies)
            for layer in body.layers.values()
            for parameter in layer.parameters()
        }
        places = {
            id(parameter): f"the weight {name!r} of stage {stage_of.get(id(parameter))}"
            for name, parameter in spec.model.named_parameters()
            if id(parameter) not in here or programs.plain.has_updates
        }

        def elsewhere(tensor: Tensor) -> str:
            return places.get(id(tensor), "") if tensor.requires_grad else ""

        program = self.program
        return LossRule(
            weighs=spec.weighs_losses,
            rows_in_front=spec.rows_in_front,
            elsewhere=elsewhere,
            copied=program.num_weights < program.num_stages,
        )

    def _check_recomputed(self, stages: Iterable[Stage]) -> None:
        """Raise GraphError if recomputation would change the gradients of a layer in these stages."""
        spec = self._spec
        if twice := sorted(self._recomputed_by_name.keys() & spec.layered.recomputed):
            raise GraphError(
                f"a layer must be recomputed by the pipeline or by the model, not by both; the model's code calls "
                f"{and_more(twice)} inside torch.utils.checkpoint, and checkpoint= recomputes it, too; leave it out of "
                f"checkpoint=, or do not call torch.utils.checkpoint"
            )
        if self.recomputed and spec.wrap is None and spec.compiled(torch.device("cpu")) is None:
            check_recomputed(spec.layered, [(stage.layers, stage.device) for stage in stages], self.recomputed)

    def _check_stateless(self, stages: Iterable[Stage]) -> None:
        """Raise GraphError if layers keep state that their copies, or a recomputation by the model, would not share."""
        program = self.program
        where = [(stage.layers, stage.device) for stage in stages]
        if program.num_weights < program.num_stages:
            check_stateless(
                self.layered,
                where,
                self._spec.layers,
                because=f"{program.name} runs copies of layers",
                remedy="choose a schedule without copies, such as 1f1b or zb-v",
            )
        if self.layered.recomputed:
            check_stateless(
                self.layered,
                where,
                self.layered.recomputed,
                because="layers that the model calls inside torch.utils.checkpoint run again after other micro-batches",
                remedy="do not call torch.utils.checkpoint for this layer",
            )

    @cached_property
    def recomputed(self) -> dict[str, Any]:
        """How each layer is recomputed: "recompute", "recompute-cheap", or "always" in checkpointed stages."""
        if self.programs.checkpoint in ("always", "except_last"):
            return dict.fromkeys(self._spec.layers, "always")
        return self._recomputed_by_name

    @property
    def _recomputed_by_name(self) -> dict[str, Any]:
        return {name: word for (name, _), word in self.checkpoint_of_call.items() if word != "offload"}

    def _check_sharded(self, sharded: Mapping[int, ShardedModules]) -> None:
        """Check that the program can run stages whose weights are sharded across several processes."""
        program = self.program
        if sharded and self._spec.reduction_order == "tree":
            raise GraphError(
                f"reduction_order='tree' needs pipesched to add all gradients, but fully_shard adds those of the "
                f"modules that it shards; wrap= shards {counted(len(sharded), 'stage')} of this process; leave "
                f"fully_shard or reduction_order= out"
            )
        if sharded and program.has_updates:
            raise ScheduleError(
                f"a stage that wrap= shards with fully_shard must not be updated while micro-batches are in flight, "
                f"because fully_shard keeps only one version of the weights; schedule {program.name!r} updates stages "
                f"during that time; choose another schedule, such as 1f1b or zb-v"
            )
        ranks = {program.placement[index] for index, one in sharded.items() if one.num_shards > 1}
        if self._host.grid.in_one_process and len(ranks) > 1:
            raise GraphError(
                f"if wrap= applies fully_shard to stages of several ranks, each of these ranks must run in its own "
                f"process, because threads can issue their collectives in different orders; {len(ranks)} ranks of this "
                f"process have such stages; pass mesh= instead of devices="
            )

    def held_tensors(self) -> list[Tensor]:
        """Return the parameters and buffers of this process's stages, excluding copies of other ranks' weights."""
        own = [stage for index, stage in self.stages.items() if index == self.program.weights[index]]
        modules = [module for stage in own for module in stage.modules.values()]
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def held_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this process's stages, excluding copies of other ranks' weights."""
        return [tensor for tensor in self.held_tensors() if isinstance(tensor, nn.Parameter)]

    def put_back(self) -> None:
        """Move the layers back to the devices of this assembly's ranks, after another assembly has failed."""
        for index, stage in reversed(self.stages.items()):
            if index == self.program.weights[index]:
                for module in stage.modules.values():
                    put_on(module, stage.device)

    def _bucket_layers(self) -> list[list[str]]:
        """Return, for each stage, the layers that have their own gradient bucket, in reverse order.

        The result is empty if several stages share weights, because their gradients are complete only after a run.
        """
        program = self.program
        if program.num_weights < program.num_stages:
            return []
        spec = self._spec
        tied = self.ties.parameters

        def has_own(module: Any) -> bool:
            return isinstance(module, nn.Module) and any(parameter not in tied for parameter in module.parameters())

        buckets = [[name for name in reversed(names) if has_own(spec.layers[name])] for names in self.cut]
        if has_own(spec.loss_fn):
            buckets[len(self.cut) - 1].insert(0, "loss_fn")
        return buckets

    def _gradients(self, stage: int) -> GradientBuckets | None:
        """Return the gradient buckets of one of this process's stages; None if there is only one replica."""
        sums = self._host.sums
        return None if sums is None else GradientBuckets(self.buckets(stage), sums, self._sharded)

    def buckets(self, stage: int) -> list[list[nn.Parameter]]:
        """Return the parameters of each bucket of a stage. The stage may belong to another process."""
        tied = self.ties.parameters
        layers = self.programs.buckets[stage] if self.programs.buckets else []
        modules = self._modules(stage)
        return [[p for p in modules[name].parameters() if p not in tied] for name in layers]

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage updates. The stage may belong to another process."""
        own = dict.fromkeys(p for module in self._modules(stage).values() for p in module.parameters())
        tied = self.ties.parameters
        return [p for p in own if p not in tied or self.owners.stage(p) == stage]

    def _modules(self, stage: int) -> dict[str, nn.Module]:
        """Return the layers of a stage and, on the last stage, the loss if it is a module."""
        part = self.program.weights[stage]
        loss_fn = None if self.program.graph.consumers[stage] else self._spec.loss_fn
        return {**self.bodies[part].layers, **({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})}

    def _late(self) -> GradientBuckets:
        """Return one bucket of all parameters of this process that are not in any stage's buckets."""
        assert self._host.sums is not None
        late = [
            p for rank in range(self.program.num_ranks) if self._host.grid.holds(rank) for p in self.late_bucket(rank)
        ]
        return GradientBuckets([late] if late else [], self._host.sums, self._sharded)

    def _sharded_parameters(self) -> set[nn.Parameter]:
        sums = self._host.sums
        if sums is None:
            return set()
        own = [(name, p) for name, p in self._named_parameters() if self._host.grid.holds(self.owners.rank(name))]
        return {parameter for name, parameter in own if sums.is_sharded(name, parameter)}

    def late_bucket(self, rank: int) -> list[nn.Parameter]:
        """Return the parameters of a rank that are not in any stage's buckets."""
        early = {p for stage in range(self.program.num_stages) for bucket in self.buckets(stage) for p in bucket}
        own = [p for name, p in self._named_parameters() if self.owners.rank(name) == rank]
        return [parameter for parameter in dict.fromkeys(own) if parameter not in early]

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        loss_fn = self._spec.loss_fn
        yield from self._spec.model.named_parameters()
        if isinstance(loss_fn, nn.Module):
            yield from loss_fn.named_parameters(prefix="loss_fn")

    @property
    def verdict(self) -> Verdict | None:
        """The gradient norms of the last update, and whether the update was skipped.

        None before the first update, and always None if there are no gradient rules or this process has no stages.
        """
        return next((stage.optimizer.verdict for stage in self.stages.values()), None)
