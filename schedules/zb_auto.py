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
    """Made for measured costs and a memory limit by a greedy heuristic with all its open choices tried. Qi et al. 2023.

    Its span is never longer than that of ZB-H1. costs: one number a stage; equal ones unless given. max_in_flight: the
    micro-batches that a rank may hold at once; p unless given (ZB-1p), 2p is ZB-2p.
    weight_grad_share: what is held from I to W as a share of a micro-batch's activations, by which ZB-2p is measured:
    32 / (34 + 5as/h) for a transformer with a heads, hidden size h and s tokens. 1 counts it whole until W ends.
    """
    return zero_bubble(shape, costs, max_in_flight=max_in_flight, weight_grad_share=weight_grad_share)
