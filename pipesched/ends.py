"""Ends: what the last stages of several chains leave, brought together where ranks are processes."""

from pipesched.feed import Feed
from pipesched.payload import Payload
from pipesched.program import Program
from pipesched.trades import Trade

__all__ = ["bring_ends", "end_of"]

_WHAT = "losses and outputs"


def end_of(program: Program) -> int:
    """The rank where the first micro-batch leaves the program: the first chain's end."""
    return program.placement[program.routes[0][-1] if program.routes else -1]


def bring_ends(program: Program, feed: Feed, trade: Trade) -> None:
    """Bring losses and outputs of all micro-batches to ``end_of`` the program. Collective over processes."""
    end, ends = end_of(program), {program.placement[route[-1]] for route in program.routes}
    if trade.holds(end):
        others = {rank for rank in ends if not trade.holds(rank)}
        for losses, outputs in trade.trade(_WHAT, {}, others).values():
            feed.losses.update(losses)
            feed.outputs.update({microbatch: Payload.of(value) for microbatch, value in outputs.items()})
    elif any(map(trade.holds, ends)):
        outputs = {microbatch: payload.value for microbatch, payload in feed.outputs.items()}
        trade.trade(_WHAT, {end: (feed.losses, outputs)}, ())
        feed.outputs = {}
