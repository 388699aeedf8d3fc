"""Communication: the time, the bytes and the hidden fraction of a step's communication along each axis."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipesched.program.actions import Kind
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs
from pipesched.simulation.links import Links
from pipesched.simulation.replication import Replication
from pipesched.simulation.simulator import message_times, step_time
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_costs import without_collectives
from pipesched.simulation.tensor_split import TensorTraffic
from pipesched.units import counted, quote_bytes, quote_time

__all__ = ["AxisCommunication", "communication"]


@dataclass(frozen=True, kw_only=True)
class AxisCommunication:
    """The predicted communication of a step along one axis.

    Attributes:
        axis: "pipeline" for sending outputs and their gradients, "replicas" for summing gradients, "zero" for
            gathering weights (after each update or, if the weights are divided, before they are used), or "tensor" for
            the collectives inside split layers.
        size: the number of ranks along the axis.
        sent_bytes: the largest number of bytes that any rank sends in a step.
        seconds: the largest communication time of any rank in a step.
        exposed_s: how much longer the step takes because of this communication, in seconds.

    """

    axis: str
    size: int
    sent_bytes: int
    seconds: float
    exposed_s: float

    @property
    def hidden(self) -> float | None:
        """The fraction of ``seconds`` that does not lengthen the step. None if there is no communication."""
        return max(0.0, 1 - float(self.exposed_s) / float(self.seconds)) if self.seconds else None

    def __str__(self) -> str:
        text = (
            f"{self.axis}: {counted(self.size, 'rank')}, at most {quote_bytes(self.sent_bytes)} sent by a rank per step"
        )
        if self.hidden is None:
            return text
        exposed = quote_time(self.exposed_s)
        return f"{text} in {quote_time(self.seconds)}, {self.hidden:.1%} of this time hidden ({exposed} exposed)"


def communication(
    program: Program, costs: Costs, replication: Replication | None, tensor: TensorAxis | None = None
) -> tuple[AxisCommunication, ...]:
    """Return the communication along each axis with at least two ranks.

    Args:
        program: the program of one replica as it runs, with its REDUCEs, UNSHARDs and UPDATEs.
        costs: the costs of the program's stages.
        replication: the replicas, or None if there is only one pipeline.
        tensor: the tensor groups. Default: None (layers are not split).

    """
    of_tensors = () if tensor is None else (_of_tensors(program, costs, tensor),)
    return (*_axes(program, costs, replication), *of_tensors)


def _of_tensors(program: Program, costs: Costs, tensor: TensorAxis) -> AxisCommunication:
    """Return the communication of the collectives inside split layers."""
    sent, seconds = [0] * program.num_ranks, [0.0] * program.num_ranks
    columns = program.columns
    for kind, of_bytes, of_seconds in (
        (Kind.F, "forward_bytes", "forward_s"),
        (Kind.R, "forward_bytes", "forward_s"),
        (Kind.B, "backward_bytes", "backward_s"),
        (Kind.I, "input_grad_bytes", "input_grad_s"),
        (Kind.W, "weight_grad_bytes", "weight_grad_s"),
    ):
        for stage, count in Counter(columns.stage[columns.are(kind)].tolist()).items():
            own = costs.tensor[stage] if costs.tensor else TensorTraffic()
            sent[program.placement[stage]] += count * getattr(own, of_bytes)
            seconds[program.placement[stage]] += count * getattr(own, of_seconds)
    exposed_s = step_time(program, costs) - step_time(program, without_collectives(costs))
    return AxisCommunication(
        axis="tensor", size=tensor.size, sent_bytes=max(sent), seconds=max(seconds), exposed_s=max(0.0, exposed_s)
    )


def _axes(program: Program, costs: Costs, replication: Replication | None) -> Iterator[AxisCommunication]:
    step_s = step_time(program, costs)

    def exposed_s(without: Costs) -> float:
        return max(0, step_s - step_time(program, without))

    ranks = range(program.num_ranks)
    if program.num_ranks > 1:
        sent, took = message_times(program, costs)
        free = replace(costs, links=Links(), transfer_s=0)
        yield AxisCommunication(
            axis="pipeline", size=len(ranks), sent_bytes=max(sent), seconds=max(took), exposed_s=exposed_s(free)
        )
    if replication is None or replication.num_replicas == 1:
        return
    own = [[stage for stage, place in enumerate(program.placement) if place == rank] for rank in ranks]
    to_sum, to_gather = zip(*(replication.sent_bytes(sum(sizes)) for sizes in costs.reduce_bytes), strict=True)
    sum_s = [sum(sum(costs.reduce_s[stage]) for stage in stages) for stages in own]
    count = replication.num_replicas
    instant = tuple((0,) * len(times) for times in costs.reduce_s)
    yield AxisCommunication(
        axis="replicas",
        size=count,
        sent_bytes=max(sum(map(to_sum.__getitem__, stages)) for stages in own),
        seconds=max(sum_s),
        exposed_s=exposed_s(replace(costs, reduce_s=instant)),
    )
    if replication.zero:
        counts = [1] * program.num_stages if replication.zero < 3 else program.gathers
        gather_s = [
            sum(counts[stage] * (costs.gather_s[stage] + costs.unshard_s[stage]) for stage in stages) for stages in own
        ]
        yield AxisCommunication(
            axis="zero",
            size=count,
            sent_bytes=max(sum(counts[stage] * to_gather[stage] for stage in stages) for stages in own),
            seconds=max(gather_s),
            exposed_s=exposed_s(replace(costs, gather_s=(), unshard_s=())),
        )
