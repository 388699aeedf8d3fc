"""Assembly: the parts of a model on ranks, for one plan: what each of its stages runs, holds and updates."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.capture.layered_model import LayeredModel
from pipesched.capture.stage_body import Body, Head
from pipesched.capture.stage_module import Wrap, wrapped_bodies
from pipesched.errors import GraphError
from pipesched.model.initialization import Initial
from pipesched.model.module_tree import Members
from pipesched.model.tied_weights import Ties
from pipesched.model.weight_owners import Owners
from pipesched.partitioning.partition import Partition
from pipesched.partitioning.result import StageLayers
from pipesched.planning.alternatives import Alternative
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.stage_partitioner import StagePartitioner
from pipesched.profiling.stage_memory_probe import StageSizes
from pipesched.program.checkpoint_options import checkpoint_by_layer, offloading
from pipesched.program.program import Program
from pipesched.runtime.rank_host import RankHost, ThreadRanks
from pipesched.runtime.stage.batch_norm import BatchNormMode, MiniBatchNorms
from pipesched.runtime.stage.buffer_copies import own_buffers
from pipesched.runtime.stage.compiled_layers import Compiled
from pipesched.runtime.stage.optimizers import Inheritance, optimizers_for
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.weight_copies import WeightCopies
from pipesched.tensors.caller_context import intra_op
from pipesched.tensors.meta_tensors import put_on
from pipesched.user_warning import warn

__all__ = ["Assembly", "AssemblySpec", "StageCut"]


@dataclass(frozen=True, kw_only=True)
class AssemblySpec:
    """A model, and what is asked of it whatever the plan, as ``Pipeline`` takes it.

    layers: those of the model by name; ``wrap`` may replace some.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any] | None
    layered: LayeredModel
    layers: dict[str, nn.Module]
    initial: Initial
    batch_norm: BatchNormMode
    compiled: Callable[[torch.device], Compiled | None]
    wrap: Wrap | None
    optimizer: Callable[[list[Any]], Optimizer] | None


@dataclass(kw_only=True)
class StageCut:
    """Which layers each stage has, who cut them, and what they cost and why, once that is known."""

    cut: StageLayers
    partitioner: StagePartitioner
    partition: Partition | None
    alternatives: tuple[Alternative, ...] = ()  #: what a search weighed against it


class Assembly:
    """A model in stages on its ranks. Layers are moved to the devices of their ranks, and filled.

    stages: those of this process, by number. bodies: what the stages that hold weights of their own run. members: the
    modules that the model holds. checkpoint_of_call: what becomes of what calls save. sizes: what the stages need in
    memory, where they were run for it. optimizers: given those of the assembly before; its own once it has taken over.

    Raises GraphError, ModelTypeError, InputError and ScheduleError for what does not go together.
    """

    def __init__(
        self,
        spec: AssemblySpec,
        host: RankHost,
        programs: ProgramFactory,
        stage_cut: StageCut,
        optimizers: Mapping[int, Optimizer] | None = None,
    ) -> None:
        begin = time.perf_counter()
        self.programs = programs
        self.stage_cut = stage_cut
        self._filling_s = 0.0
        self._spec = spec
        self._host = host
        going = offloading(programs.checkpoint, self.cut)
        program = programs.connect(spec.layered.edges(self.cut), going)
        ranks = [program.placement[index] for index in range(program.num_weights)]
        self.ties = Ties(spec.model, spec.layered.uses(self.cut, ranks), host)
        self._weight_copies = WeightCopies(host, self.ties.own)
        self.norms = MiniBatchNorms(spec.batch_norm, host)
        self.norms.check(spec.model, program, streams=programs.streams)
        layers = checkpoint_by_layer(programs.checkpoint).items()
        self.checkpoint_of_call = {
            call: word for layer, word in layers for call in spec.layered.calls_of(layer, again=word != "offload")
        }
        self.sizes: Sequence[StageSizes] | None = None
        self.bodies = self._bodies()
        self.owners = self._owners(self.bodies)
        self._check_reached()
        self.stages = self._stages()
        #: What runs on copies of weights: made equal before a run, whose gradients are brought back after it.
        #: What holds copies of weights, which a step refreshes before it starts.
        self.copies = [one for one in (self.ties, self._weight_copies) if one]
        #: A context around a run that computes gradients: those of copies go to the parameters. Collective.
        self.delivering = self._delivering if self.copies else nullcontext
        self.members = Members(spec.model, spec.layered.layers)
        #: How long it took to make, without what is done once: filling the model, making optimizers.
        self.made_s = time.perf_counter() - begin - self._filling_s
        #: Of a micro-batch, with which ranks were found to stay within their memory, beyond those that were planned.
        self.most_rows = 0
        self.optimizers: dict[int, Optimizer] = {}
        self._inheritance: Inheritance | None = None
        if spec.optimizer is not None:
            tied = self.ties.parameters
            home = self.owners.stage
            self._inheritance = optimizers_for(spec.optimizer, self.stages, tied, home, optimizers or {})
        #: Whether updates wait for the gradients of tied parameters.
        self.updates_late = any(stage.optimizer.late for stage in self.stages.values())

    def take_over(self) -> None:
        """From now on its stages' optimizers update the parameters; those of the assembly before do no more."""
        if self._inheritance is not None:
            self.optimizers = self._inheritance.take()
            for index, optimizer in self.optimizers.items():
                self.stages[index].optimizer.wrapped = optimizer

    @property
    def undriven(self) -> list[int]:
        """The stages that have new optimizers, where a scheduler drives those that the others have kept."""
        return [] if self._inheritance is None else self._inheritance.undriven

    @property
    def cut(self) -> StageLayers:
        """The layers of each stage."""
        return self.stage_cut.cut

    @property
    def program(self) -> Program:
        """That of a full batch, as its author wrote it."""
        return self.programs.full.plain

    def _bodies(self) -> Sequence[Body]:
        spec = self._spec
        program = self.program
        tied = self.ties.parameters
        devices = [self._host.devices[program.placement[index]] for index in range(program.num_weights)]
        bodies = spec.layered.bodies(self.cut, devices, self.ties)
        begin = time.perf_counter()
        spec.initial.fill(self._owners(bodies), self._host)
        self._filling_s = time.perf_counter() - begin
        holds = self._host.holds
        return wrapped_bodies(spec.wrap, spec.model, spec.layers, bodies, program, devices, holds, tied)

    def _owners(self, bodies: Sequence[Body]) -> Owners:
        homes = [(self.program.placement[part], body.layers) for part, body in enumerate(bodies)]
        return Owners(self._spec.model, homes, self.program.output_rank, self.ties.parameters)

    def _check_reached(self) -> None:
        """Raise GraphError where a layer uses a parameter of another rank that it is not given: it would be an old one,
        or on another device, and its gradient would not come back.
        """
        host = self._host
        placement = self.program.placement
        for layer, name, stage in self._spec.layered.reached(self.cut):
            home = self.owners.rank(name)
            rank = placement[stage]
            if home == rank:
                continue
            what = (
                f"a layer uses its own weights, and those that it is given as tensors; {layer!r} of stage {stage} on "
                f"rank {rank} reaches {name!r} of rank {home} through a module or a reference; pass the weight itself "
                f"to the layer, or keep both layers in one stage with together="
            )
            if not isinstance(host, ThreadRanks) or host.devices[home] != host.devices[rank]:
                raise GraphError(what)
            warn(f"{what}; its gradient agrees with an unpipelined loop's within rounding")

    def _written(self) -> list[set[str]]:
        """The names of buffers that forwards of each part write to; of a loss module all: it has not been seen."""
        spec = self._spec
        written = spec.layered.written_by(self.cut) if any(own_buffers(spec.model)) else [()] * len(self.cut)
        own = list(own_buffers(spec.loss_fn)) if isinstance(spec.loss_fn, nn.Module) else []
        return [{*names, *(f"loss_fn.{key}" for key, *_ in own)} for names in written]

    def _stages(self) -> dict[int, Stage]:
        program = self.program
        host = self._host
        written = self._written()
        stages: dict[int, Stage] = {}
        for index, part in reversed(list(enumerate(program.weights))):  # what is tied belongs to its first user
            rank = program.placement[index]
            last = not program.graph.consumers[index]
            device = host.devices[rank]
            body = self.bodies[part]
            loss_fn = self._spec.loss_fn if last else None
            if index != part:  # the stage of this number runs the same layers
                weight_copy = self._weight_copies.add(body.layers, loss_fn, device, (program.placement[part], rank))
                if weight_copy is not None:
                    body = body.over(weight_copy.layers, device)
                    loss_fn = weight_copy.loss_fn
            modules = {**body.layers, **({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
            norms = self.norms.of_stage((index, part), (rank, program.placement[part]), modules)
            if not host.holds(rank):
                continue
            if index == part:
                for module in modules.values():
                    put_on(module, device)
            ties = self.ties.for_layers(body.layers, device)
            head = Head(loss_fn) if last else None
            compiled = self._spec.compiled(device)
            own: dict[str, Any] = {"ties": ties, "norms": norms, "compiled": compiled, "written": written[part]}
            stages[index] = Stage(body, device, head, **own, checkpoint_of_call=self.checkpoint_of_call)
        return dict(sorted(stages.items()))

    def put_back(self) -> None:
        """Layers lie on the devices of its ranks again, where another assembly has not come about."""
        for index, stage in reversed(self.stages.items()):
            if index == self.program.weights[index]:
                for module in stage.modules.values():
                    put_on(module, stage.device)

    @contextmanager
    def _delivering(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.copies:
                stack.enter_context(one.delivering())
            yield

    def update_late(self, intra_op_threads: int) -> None:
        """The updates that have waited for the gradients of tied parameters."""
        with intra_op(intra_op_threads):
            for stage in self.stages.values():
                stage.optimizer.update_late()
