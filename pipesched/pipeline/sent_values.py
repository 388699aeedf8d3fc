"""Sent values: the types of the values that the code of this package sends between processes."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from pipesched.capture.layered_model import LayeredModel, LayerError
from pipesched.errors import ExecutionError, GraphError
from pipesched.partitioning.result import Partition, StageLayers, StageSummary
from pipesched.planning.advice import Advice, NextStep
from pipesched.planning.alternatives import Alternative
from pipesched.planning.plan import Plan, Tie
from pipesched.planning.step_shares import StepShares
from pipesched.program.action_arrays import Columns, Orders
from pipesched.program.completion import Completion
from pipesched.program.dependencies import StageGraph
from pipesched.program.program import Program
from pipesched.runtime.collectives import RankCollectives
from pipesched.runtime.gradients.nonfinite_watch import Nonfinite
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage import batch_norm
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.layer_memory import LayerMemory, LossMemory
from pipesched.simulation.links import Collectives, Link, Links
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.replication import Replication
from pipesched.simulation.size_fit import Size, SizeFit
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_layout import TensorLayout
from pipesched.simulation.tensor_split import TensorShares, TensorTraffic

__all__ = ["learn_decided_types", "learn_sent_values", "learn_step_types"]

#: The types in a plan, and in the measurements and cuts from which it is made.
_DECIDED = (
    Plan,
    Tie,
    StepShares,
    Advice,
    NextStep,
    Program,
    Columns,
    StageGraph,
    Costs,
    LayerCosts,
    LayerMemory,
    LossMemory,
    Alternative,
    Partition,
    StageSummary,
    Overheads,
    Collectives,
    Link,
    Links,
    Replication,
    TensorAxis,
    TensorLayout,
    TensorShares,
    TensorTraffic,
    Completion,
    Size,
    SizeFit,
)


def learn_decided_types(collectives: RankCollectives, *others: type) -> None:
    """Register the types of the values that rank 0 decides for all ranks, and ``others``."""
    collectives.learn_types(*_DECIDED, *others)
    collectives.learn_parts(Orders, Orders.parts, Orders.of_parts)


def learn_step_types(collectives: RankCollectives) -> None:
    """Register the types of the values that the stages of different ranks send each other, besides the model's own."""
    collectives.learn_types(GradientNorms, Nonfinite, *batch_norm.SENT_TYPES)


def learn_sent_values(host: RankHost, model: LayeredModel, cut: StageLayers) -> None:
    """Register the types of the model's values that stages will send, for a cut into stages.

    Raises GraphError for a type that cannot be sent.
    """
    if host.grid.in_one_process:
        return
    learn = host.collectives.learn
    ends = {names[-1] for names in cut[:-1]}
    with closing(model.passed()) as passed, suppress(LayerError):
        for name, value in passed:
            with _refusing(name in ends, f"the output of layer {name!r} must be sent between stages"):
                learn(value)
    with _refusing(host.grid.inputs == "first", "with inputs='first', rank 0 must send the inputs to other ranks"):
        learn(model.sample)
    with _refusing(False, ""):  # outputs are sent only on request, so they need not be sendable
        learn(model.output_form)


@contextmanager
def _refusing(strict: bool, what: str) -> Iterator[None]:
    """A context that turns the error of a value that cannot be sent into a GraphError, or ignores the error."""
    try:
        yield
    except ExecutionError as error:
        if strict:
            raise GraphError(f"{what}; {error}") from None
