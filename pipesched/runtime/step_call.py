"""Step call: one call of step, evaluate or forward: what goes in, how losses count, and what comes out.

And how it travels, where rank 0 alone passes a batch: every rank gets what all need and of the batch what its own
stages take.
"""

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipesched.capture.stage_body import Body
from pipesched.errors import InputError
from pipesched.program.program import Program
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.microbatches import Batch, Weighting
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.exchange import Trade
from pipesched.tensors.payload import Payload, pytree, trainable_leaves

__all__ = ["SENT_TYPES", "StepCall", "bring_ends", "dealt", "received"]


@dataclass(frozen=True)
class StepCall:
    """A mini-batch and what is asked of it.

    weighting: how losses count; None where there are none. A forward has those in its outputs alone. gather: whether
    every rank gets the outputs.
    """

    method: str
    batch: Batch
    weighting: Weighting | None = None
    _: KW_ONLY
    return_outputs: bool = False
    gather: bool = False

    def step_data(self, seed: int, step: int) -> StepData:
        """What the stages get, and where they put what they make."""
        factors = None if self.weighting is None or self.method == "forward" else self.weighting.factors
        return StepData(
            seed,
            step,
            list(self.batch.inputs),
            targets=self.batch.targets,
            factors=factors,
            keep_outputs=self.return_outputs,
        )

    @property
    def counting(self) -> Weighting:
        """How its losses count. Raises ValueError where no loss is asked for."""
        if self.weighting is None:
            raise ValueError(f"a call has a loss where it was asked for one; {self.method} was not")
        return self.weighting

    def loss(self, step_data: StepData) -> Tensor:
        """The mini-batch's loss, where the last stage runs."""
        return self.counting.total([step_data.losses[microbatch] for microbatch in range(len(self.batch.rows))])

    def outputs(self, step_data: StepData, *, own_loss: bool) -> Any:
        """In the mini-batch's order; None where the last stage runs in another process. own_loss: the loss that counts
        is in the outputs.
        """
        if not step_data.outputs:
            return None
        outputs = [step_data.outputs[microbatch].value for microbatch in range(len(self.batch.rows))]
        return self.batch.gathered(outputs, self.weighting if own_loss else None)


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """What every rank needs to know of a call, apart from numbers that change from step to step."""

    method: str
    rows: list[int]
    output_dim: int
    looks: list[Hashable]
    return_outputs: bool
    gather: bool
    has_loss: bool


@dataclass(frozen=True)
class _Unsent:
    """A tensor that a rank does not need: it has none of its contents."""

    dtype: torch.dtype
    shape: tuple[int, ...]


#: What a message of a call holds, beside the batch.
SENT_TYPES = _Opening, _Unsent


def dealt(call: StepCall, program: Program, bodies: Sequence[Body], num_ranks: int) -> tuple[StepCall, list[Any]]:
    """(rank 0's own call, each rank's part of it as a message). program: what the call runs, as far as placement goes.

    num_ranks: of the mesh; the program may use fewer. bodies: what its stages run. An input goes where one uses it,
    targets to the stages without consumers. Raises InputError for inputs whose gradients would stay on another rank.
    """
    batch = call.batch
    looks = [look(value) for value in call.batch.inputs]
    lasts = {program.placement[stage] for stage, others in enumerate(program.graph.consumers) if not others}
    takers: list[list[Body]] = [[] for _ in range(num_ranks)]
    for stage, producers in enumerate(program.graph.producers):
        body = bodies[program.weights[stage]]
        if not producers or body.late_inputs:
            takers[program.placement[stage]].append(body)
    inputs = [[_needed(value, own) for value in batch.inputs] if own else None for own in takers]
    others = [rank for rank, own in enumerate(inputs) if rank and any(map(trainable_leaves, own or ()))]
    if others:
        raise InputError(
            f"gradients of inputs stay where the inputs are used, here on ranks {others}, and rank 0 alone "
            f"has the inputs; detach them, or pass the batch on every rank with inputs='all'"
        )
    factors, shares = call.weighting or ((), ())
    opening = _Opening(
        method=call.method,
        rows=batch.rows,
        output_dim=batch.output_dim,
        looks=looks,
        return_outputs=call.return_outputs,
        gather=call.gather,
        has_loss=call.weighting is not None,
    )
    for_all = opening, _written(factors), _written(shares)
    messages = [(*for_all, own, batch.targets if rank in lasts else None) for rank, own in enumerate(inputs)]
    return replace(call, batch=replace(batch, looks=looks)), messages


def received(message: tuple[Any, ...]) -> StepCall:
    """Rank 0's call, as far as this rank has a part in it."""
    opening, factors, shares, inputs, targets = message
    size = len(opening.rows)
    inputs = pytree.tree_map_only(_Unsent, _without_contents, inputs)
    batch = Batch(
        inputs or [((), {})] * size, targets or [], opening.rows, output_dim=opening.output_dim, looks=opening.looks
    )
    weighting = Weighting(_read(factors, size), _read(shares, size)) if opening.has_loss else None
    return StepCall(opening.method, batch, weighting, return_outputs=opening.return_outputs, gather=opening.gather)


def _needed(value: Any, takers: Sequence[Body]) -> Any:
    """What any of the bodies takes of a micro-batch's inputs."""
    leaves, spec = pytree.tree_flatten(value)
    columns = zip(leaves, *(pytree.tree_leaves(body.inputs(value)) for body in takers), strict=True)
    return pytree.tree_unflatten(
        [
            leaf if any(one is leaf for one in seen) else _Unsent(leaf.dtype, tuple(leaf.shape))
            for leaf, *seen in columns
        ],
        spec,
    )


def _without_contents(one: _Unsent) -> Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="meta")


def _written(numbers: Any) -> Tensor | None:
    """Numbers as a tensor: they change, and the form of the message does not."""
    return None if None in numbers else torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _read(written: Tensor | None, size: int) -> list[float | None]:
    return [None] * size if written is None else written.tolist()


_WHAT = "losses and outputs"


def bring_ends(program: Program, step_data: StepData, trade: Trade) -> None:
    """Bring losses and outputs of all micro-batches to the program's output rank. Collective over processes."""
    end = program.output_rank
    ends = {program.placement[route[-1]] for route in program.routes}
    if len(ends) < 2:
        return
    if trade.holds(end):
        others = {rank for rank in ends if not trade.holds(rank)}
        for losses, outputs in trade.trade(_WHAT, {}, others).values():
            step_data.losses.update(losses)
            step_data.outputs.update({microbatch: Payload.of(value) for microbatch, value in outputs.items()})
    elif any(map(trade.holds, ends)):
        outputs = {microbatch: payload.value for microbatch, payload in step_data.outputs.items()}
        trade.trade(_WHAT, {end: (step_data.losses, outputs)}, ())
        step_data.outputs = {}
