"""ZB-auto: the automatic zero-bubble schedule (Qi et al. 2023, arXiv:2401.10241, section 3.1)."""

from typing import TYPE_CHECKING

from pipesched.order import Order, Shape, schedule
from pipesched.program.generators.zero_bubble import zero_bubble

if TYPE_CHECKING:
    from pipesched.simulation.costs import Costs


@schedule("zb-auto")
def zb_auto(
    shape: Shape, *, costs: "Costs | None" = None, max_in_flight: int | None = None, weight_grad_share: float = 1
) -> list[Order]:
    """A greedy heuristic for the given stage costs and memory limit. Zero Bubble, Qi et al. 2023.

    The paper leaves three choices open. The schedule tries all eight combinations, and ZB-H1 if ZB-H1 stays within the
    memory limit. The order with the shortest span is used. The span is the longest time, over all ranks, from the start
    of a rank's first action to the end of its last.

    Options:
        costs: the times of each stage. Default: identical stages.
        max_in_flight: the maximum number of micro-batches that a rank may hold at the same time. Default: p, which
            gives ZB-1p; 2p gives ZB-2p.
        weight_grad_share: the fraction of a micro-batch's activations that is kept from the I to the W. The paper's
            ZB-2p uses 32 / (34 + 5as/h) for a transformer with a heads, hidden size h and s tokens. Default: 1.
    """
    return zero_bubble(shape, costs, max_in_flight=max_in_flight, weight_grad_share=weight_grad_share)
