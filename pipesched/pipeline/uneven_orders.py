"""Uneven orders: chooses the programs of a step, and finds a new order if the micro-batches differ in size.

Each rank searches for the order itself. All ranks use the same sizes and costs, so they find the same order. Before the
first run of a program, the executor checks that the program has the same digest on all ranks.
"""

from collections.abc import Sequence

from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.program_factory import StepPrograms
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.microbatches import Batch
from pipesched.simulation.costs import Costs
from pipesched.simulation.size_fit import Size

__all__ = ["UnevenOrders"]


class UnevenOrders:
    """Chooses the programs of a step.

    A step usually runs the plan's programs. If the caller cut the batch into micro-batches of different sizes, the
    schedule is `searched`, and the layers' costs are known from a search for the plan, the step instead runs programs
    whose order of actions suits these sizes.

    Args:
        running: the running plan.
        cost_model: the known costs of layers and devices.
        limited: whether the ranks have memory limits. If so, no rank holds more micro-batches than in the order for
            micro-batches of equal size.

    """

    def __init__(self, running: RunningPlan, cost_model: CostModel, *, limited: bool) -> None:
        self._running = running
        self._cost_model = cost_model
        self._limits: dict[str, None] = {} if limited else {"max_in_flight": None}

    def of(self, batch: Batch) -> StepPrograms:
        """Return the programs of a step on ``batch``, this replica's part of a batch. Collective over replicas."""
        running = self._running
        factory = running.assembly.programs
        sizes = tuple(size.rounded() for size in batch.sizes(look)) if batch.as_given else ()
        running.num_sizes = len(set(sizes))
        if factory.searches and self._cost_model.planned.rows:
            sizes = _largest(
                running.host.collectives.gather_over_replicas([(size.rows, size.elements) for size in sizes])
            )
            if len(set(sizes)) > 1:
                return factory.of_sizes(sizes, self._costs, **self._limits)
        return factory.of(len(batch.rows))

    def _costs(self, size: Size) -> Costs:
        running = self._running
        return self._cost_model.stage_costs(running.assembly.programs, running.cut, self._cost_model.for_size(size))


def _largest(replicas: Sequence[Sequence[tuple[int, int]]]) -> tuple[Size, ...]:
    """Return the largest size of each micro-batch over all replicas, because all replicas run the same program.

    The result is empty if the caller of at least one replica did not cut the batch into micro-batches.
    """
    if not all(replicas):
        return ()
    return tuple(Size(*map(max, zip(*sizes, strict=True))) for sizes in zip(*replicas, strict=True))
