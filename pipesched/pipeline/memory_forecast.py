"""Memory forecast: predicts each rank's peak memory, and checks batches against the memory limits."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.capture.captured_model import CapturedModel
from pipesched.errors import MemoryLimitError
from pipesched.model.stale_weights import StaleGuard
from pipesched.model.state_guard import set_aside
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.planned_rows import PlannedRows
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.profiling.optimizer_memory import Upkeep, another, upkeep_of
from pipesched.profiling.replica_buffers import StageReplicas
from pipesched.profiling.stage_memory_probe import StageSizes, costs_with, messages_of, stage_sizes
from pipesched.program.program import Program
from pipesched.runtime.gradients.buckets import local
from pipesched.runtime.gradients.shards import Shards
from pipesched.runtime.stage.divided_stage import shards_for
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_memory import SCALARS_BYTES
from pipesched.simulation.memory import AHEAD, MessageSizes, RankMemory, rank_memory
from pipesched.simulation.replica_memory import ModelStates, ReplicaMemory, held_states
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.units import counted, quote_bytes
from pipesched.user_warning import warn

__all__ = ["MemoryForecast"]

_LOSS_BYTES = 8  # the memory of one micro-batch's loss


class MemoryForecast:
    """Predicts the peak memory of the ranks under the running plan.

    Args:
        running: the running plan.
        cost_model: the known costs of layers and devices.
        spec: the model and its loss.
        guard: the StaleGuard, which lets the code that measures the stages read the model.
        limits: the maximum number of bytes that each rank may hold, or None if there is no limit.
        planned: the size of the micro-batches for which the plan was found.

    """

    def __init__(
        self,
        running: RunningPlan,
        cost_model: CostModel,
        *,
        spec: AssemblySpec,
        guard: StaleGuard,
        limits: tuple[int, ...] | None,
        planned: PlannedRows,
    ) -> None:
        self.limits = limits
        #: Whether the next step must call `check_rows`: the first step, and all steps if memory is limited.
        self.checks_rows = True
        self._planned: PlannedRows | None = planned
        self._running = running
        self._cost_model = cost_model
        self._spec = spec
        self._guard = guard

    def by_rank(self) -> tuple[RankMemory, ...]:
        """Return the predicted peak memory of each rank in a step."""
        running = self._running
        program = running.program
        if self._cost_model.layers is None:
            running.flush()  # no step may run while the layers are measured
        costs = self._cost_model.stage_costs(running.assembly.programs, running.cut)
        messages = None
        stages = self._stage_sizes()
        own_loss = self._spec.loss_fn is None  # the model computes its own loss
        if stages:
            loss = None if own_loss else self._cost_model.measured()[running.cut[-1][-1]].loss_layer
            costs = costs_with(costs, program, stages, loss)
            messages = messages_of(program, stages)
        without_messages = running.assembly.programs.full.without_messages
        costs = self._with_shards(
            self.with_states(_with_losses(costs, without_messages, known=not stages or not own_loss))
        )
        return self._rank_memory(without_messages, costs, messages)

    def check_rows(self, rows: Sequence[int]) -> None:
        """Check the memory limits for micro-batches with these numbers of rows.

        Raises MemoryLimitError if a rank would exceed its limit. Measured sizes are scaled in proportion to the rows.
        Warns once, in the first step, if the micro-batches do not have the size for which the plan was found.
        """
        running = self._running
        planned = self._cost_model.planned.rows
        if self._planned is not None:
            complaint = self._planned.complaint(rows) if running.host.grid.holds(0) else ""
            self._planned = None
            self.checks_rows = self.limits is not None
            if complaint:
                warn(complaint)
        if self.limits is None or max(rows) <= max(planned, running.assembly.most_rows):
            return
        programs = running.assembly.programs
        costs = self._cost_model.stage_costs(programs, running.cut, self._cost_model.for_rows(max(rows)))
        without_messages = programs.of(len(rows)).without_messages
        costs = self._with_shards(self.with_states(costs))
        needs = self._rank_memory(without_messages, costs)
        limits = self.limits
        worst = max(range(len(needs)), key=lambda rank: needs[rank].total_bytes - limits[rank])
        need = needs[worst].total_bytes
        limit = limits[worst]
        if need > limit:
            count = programs.num_microbatches
            most = planned * count
            raise MemoryLimitError(
                f"a batch must not have more rows than memory_limit_bytes allows; this plan allows "
                f"{counted(most, 'row')} in {counted(count, 'micro-batch')} of {planned}, but this step has "
                f"{counted(sum(rows), 'row')} in {counted(len(rows), 'micro-batch')} of up to {max(rows)}, so rank "
                f"{worst} needs {quote_bytes(need)}, {quote_bytes(need - limit)} more than its limit of "
                f"{quote_bytes(limit)}; pass at most {counted(most, 'row')}, or make the pipeline with "
                f"search=Search(batch_size={sum(rows)}, ...)"
            )
        running.assembly.most_rows = max(rows)

    @property
    def posted(self) -> int:
        """The number of receives on each channel that are posted in advance."""
        return 0 if self._running.host.grid.in_one_process else AHEAD

    def _rank_memory(
        self, program: Program, costs: Costs, messages: Mapping[tuple[int, int], MessageSizes] | None = None
    ) -> tuple[RankMemory, ...]:
        options: dict[str, Any] = {"replicas": self._replicas(), "in_tree": self._spec.reduction_order == "tree"}
        return rank_memory(program, costs, posted=self.posted, messages=messages, **options)

    def _stage_sizes(self) -> Sequence[StageSizes]:
        """Measure each stage of a captured model as a whole, and return the memory needs of the stages.

        Returns an empty sequence if the stages cannot be measured.
        """
        layered = self._cost_model.layered
        spec = self._spec
        running = self._running
        now = running.assembly
        if not isinstance(layered, CapturedModel) or spec.wrap is not None or lacks_contents(layered.model):
            return ()
        if running.assembly.divided_weights:
            return ()
        if now.sizes is None:
            running.flush()
            devices = [
                running.host.grid.devices[now.program.placement[part]] for part in range(now.program.num_weights)
            ]
            with running.host.alone(), self._guard.lifted(), set_aside(spec.model):
                now.sizes = stage_sizes(
                    layered,
                    now.cut,
                    devices,
                    running.host.collectives,
                    now.checkpoint_of_call,
                    own_loss=spec.loss_fn is None,
                )
        return now.sizes

    def with_states(self, costs: Costs) -> Costs:
        """Return the costs, with the sizes of the weights, gradients and optimizer states that each rank holds.

        Assumes that all ranks use the same kind of optimizer.
        """
        assembly = self._running.assembly
        known = next(iter(assembly.optimizers.values()), None)
        if known is None:
            return costs
        make = another(known)
        held = []
        gathered = []
        transients = []
        sizes = zip(costs.weight_bytes, costs.gathered_bytes, costs.gradient_bytes, strict=True)
        for stage, (own_weights, others, gradients) in enumerate(sizes):
            weights = own_weights + others
            upkeep = self._upkeep(make, stage, assembly.parameters(stage))
            whole = part = ModelStates(weights, gradients, upkeep.state_bytes)
            if self._shards(stage) is not None:
                rows = self._updated(stage)
                upkeep = self._upkeep(make, stage, rows, divided=True)
                size = sum(own.nbytes for own in rows)
                part = ModelStates(size, sum(own.nbytes for own in rows if own.requires_grad), upkeep.state_bytes)
            held.append(held_states(whole, part, zero=assembly.zero))
            gathered.append(self._others_weights(stage))
            transients.append(upkeep.transient_bytes)
        return replace(
            costs,
            weight_bytes=tuple(own.weights - size for own, size in zip(held, gathered, strict=True)),
            gathered_bytes=tuple(gathered),
            gradient_bytes=tuple(own.gradients for own in held),
            optimizer_bytes=tuple(own.optimizer for own in held),
            update_transient_bytes=tuple(transients),
        )

    def _upkeep(
        self, make: Callable[[list[Any]], Optimizer], stage: int, parameters: Sequence[Tensor], *, divided: bool = False
    ) -> Upkeep:
        """Return the memory that an optimizer needs for a stage's parameters. The result is kept for the assembly."""
        known = self._running.assembly.upkeeps
        if (stage, divided) not in known:
            known[stage, divided] = upkeep_of(make, parameters)
        return known[stage, divided]

    def _with_shards(self, costs: Costs) -> Costs:
        """Return the costs, adjusted for weights that are sharded with ``fully_shard``.

        A rank always holds its shards. From the start of a step until the gradients have been reduced, it also holds
        the full weights. Optimizer states exist only for the shards.
        """
        shares = [self._shard_share(stage) for stage in range(costs.num_stages)]
        return replace(
            costs,
            weight_bytes=tuple(
                size + math.ceil(size * share) * (share < 1)
                for size, share in zip(costs.weight_bytes, shares, strict=True)
            ),
            optimizer_bytes=tuple(
                math.ceil(size * share) for size, share in zip(costs.optimizer_bytes, shares, strict=True)
            ),
        )

    def _shard_share(self, stage: int) -> float:
        """Return the fraction of a stage's weights that one shard contains; 1 if the weights are not sharded.

        A stage of another process is assumed to be sharded like those of this process.
        """
        stages = self._running.assembly.stages
        own = [stages[stage]] if stage in stages else list(stages.values())
        if not any(one.sharded is not None and one.sharded.once for one in own):
            return 1
        parameters = [p for one in own for module in one.modules.values() for p in module.parameters()]
        return sum(local(p).nbytes for p in parameters) / sum(p.numel() * p.element_size() for p in parameters)

    def _others_weights(self, stage: int) -> int:
        """Return the number of bytes of a stage's weights that only other replicas hold between steps."""
        assembly = self._running.assembly
        shards = self._shards(stage)
        if assembly.zero < 3 or shards is None:
            return 0
        replica = self._running.host.grid.replica
        divided = {p for bucket in assembly.buckets(stage) for p in bucket if p in shards}
        return sum((shards.shape(p).numel() - shards.numbers(p)[replica]) * p.element_size() for p in divided)

    def _updated(self, stage: int) -> list[nn.Parameter]:
        """Return the rows of a stage's parameters that this replica updates, as views."""
        shards = self._shards(stage)
        assert shards is not None
        rows = [(p, shards.own(p, p.detach())) for p in self._running.assembly.parameters(stage) if p in shards]
        return [nn.Parameter(own, requires_grad=p.requires_grad) for p, own in rows if own is not None]

    def _shards(self, stage: int) -> Shards | None:
        """Return the rows of a stage's parameters that each replica updates; None if every replica updates all rows."""
        assembly = self._running.assembly
        known = next(iter(assembly.optimizers.values()), None)
        if not assembly.zero or known is None:
            return None
        own = assembly.stages.get(stage)
        if own is not None:
            return None if own.optimizer.sharded is None else own.optimizer.sharded.shards
        grid = self._running.host.grid
        return shards_for(known, assembly.parameters(stage), grid.replica, len(grid.rows))

    def sent_to_replicas(self) -> tuple[int, ...]:
        """Return the number of bytes that each rank sends to the other replicas in a step."""
        sent = [0] * self._running.program.num_ranks
        for rank, stage in zip(self._running.program.placement, self._replicated(), strict=False):
            sent[rank] += stage.sent_bytes()
        return tuple(sent)

    def _replicas(self) -> list[ReplicaMemory] | None:
        """Return the memory that each stage needs for communication with other replicas; None if it needs no memory."""
        found = [own.memory(self._freed(stage)) for stage, own in enumerate(self._replicated())]
        sharded = [one.sharded for one in self._running.assembly.stages.values() if one.sharded is not None]
        if not any(one.once for one in sharded):
            return found or None
        placement = self._running.assembly.program.placement
        stages = found or [ReplicaMemory()] * len(placement)
        unit = max(one.largest_unit() for one in sharded)
        for stage in map(placement.index, {*placement}):  # once per rank: a rank reduces one sharded module at a time
            late = stages[stage].late
            more = math.ceil(unit * (1 + self._shard_share(stage)))  # copied gradients, and a shard of their sum
            stages[stage] = replace(stages[stage], late=late._replace(buffer=late.buffer + more))
        return stages

    def _replicated(self) -> list[StageReplicas]:
        """Return, for each stage, the parameters whose gradients replicas sum; empty if there is only one replica."""
        running = self._running
        assembly = running.assembly
        placement = assembly.program.placement
        if running.host.sums is None:
            return []
        gathers = assembly.programs.full.without_messages.gathers
        return [
            StageReplicas(
                buckets=assembly.buckets(stage),
                late=assembly.late_bucket(rank) if placement.index(rank) == stage else [],
                num_replicas=len(running.host.grid.rows),
                shards=self._shards(stage),
                zero=assembly.zero,
                num_gathers=gathers[stage],
            )
            for stage, rank in enumerate(placement)
        ]

    def _freed(self, stage: int) -> list[int]:
        """Return, for each bucket of a stage, the activation bytes freed by the time the bucket is complete."""
        assembly = self._running.assembly
        programs = assembly.programs
        if not programs.buckets:
            return []
        costs = self._cost_model.treated(programs)
        names = list(assembly.cut[stage])
        sizes = [costs[name].memory.activation_bytes - costs[name].memory.kept_input_bytes for name in names]
        buckets = programs.buckets[stage]
        return [sum(sizes[names.index(name) + 1 :]) if name in names else 0 for name in buckets]


def _with_losses(costs: Costs, program: Program, *, known: bool) -> Costs:
    """Return the costs plus the memory of the micro-batches' losses, which are kept until the step ends.

    Args:
        costs: the stages' costs.
        program: the program.
        known: whether the costs already contain ``SCALARS_BYTES``, the memory of a few micro-batches' losses.

    """
    more = max(SCALARS_BYTES, _LOSS_BYTES * program.num_microbatches) - SCALARS_BYTES * known
    ends = [not takers for takers in program.graph.consumers]
    sizes = [size + more * end for size, end in zip(costs.buffer_bytes, ends, strict=True)]
    return replace(costs, buffer_bytes=tuple(sizes))
