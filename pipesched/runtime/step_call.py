"""Step call: one call to step, evaluate or forward, with its batch, its loss weights and its options.

With ``inputs='first'``, only rank 0 passes a batch. Rank 0 then sends the call to every other rank, together with the
part of the batch that the stages of that rank need.
"""

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipesched.capture.paths import BatchPaths
from pipesched.capture.stage_body import Body
from pipesched.devices.selection import have_accelerator
from pipesched.devices.streams import used_here
from pipesched.errors import InputError
from pipesched.program.program import Program
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.microbatches import Batch, Weighting
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.exchange import Trade
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.loss_factors import LossFactor
from pipesched.tensors.payload import Payload, pytree, trainable_leaves
from pipesched.tensors.row_join import OutputRows
from pipesched.tensors.rows import Dim

__all__ = ["SENT_TYPES", "StepCall", "bring_ends", "received", "scatter_call"]


@dataclass(frozen=True)
class StepCall:
    """One call to step, evaluate or forward, with its mini-batch."""

    method: str
    batch: Batch
    #: The loss weights; None if there is no loss. In a call to forward, the weights apply to losses in the outputs.
    weighting: Weighting | None = None
    _: KW_ONLY
    return_outputs: bool = False
    #: Whether every rank receives the outputs.
    gather: bool = False

    def step_data(self, seed: int, step: int, metrics: Metrics | None = None, *, replica: int = 0) -> StepData:
        """Create the `StepData` that the stages of a replica use for this call."""
        factors = None if self.weighting is None or self.method == "forward" else self.weighting.factors
        return StepData(
            seed,
            step,
            list(self.batch.inputs),
            targets=self.batch.targets,
            paths=self.batch.paths.paths,
            factors=factors,
            ready=self.batch.ready() if have_accelerator() else {},
            keep_outputs=self.return_outputs,
            metrics={} if metrics is None else dict.fromkeys(range(len(self.batch.rows)), metrics),
            key=partial(_key, seed, step, replica * len(self.batch.rows)) if replica else None,
        )

    @property
    def counting(self) -> Weighting:
        """The loss weights of this call. Raises ValueError if the call computes no loss."""
        if self.weighting is None:
            raise ValueError(f"loss weights require a call that computes a loss; {self.method} computes no loss")
        return self.weighting

    def loss(self, step_data: StepData) -> Tensor:
        """Return the mini-batch's loss. Only the process of the last stage can compute this loss."""
        losses = [step_data.losses[microbatch] for microbatch in range(len(self.batch.rows))]
        for loss in losses:
            if not loss.is_cpu:
                used_here(loss)  # a rank's stream has allocated it
        return self.counting.total(losses)

    def outputs(self, step_data: StepData, joins: OutputRows, *, own_loss: bool) -> Any:
        """Return the outputs of the whole mini-batch, or None if this process has no outputs.

        ``joins`` joins the outputs of micro-batches. ``own_loss`` states whether the outputs contain the model's own
        loss.
        """
        if not step_data.outputs:
            return None
        payloads = [step_data.outputs[microbatch] for microbatch in range(len(self.batch.rows))]
        for tensor in (tensor for payload in payloads for tensor in payload.tensors):
            used_here(tensor)  # a rank's stream has allocated it
        outputs = [payload.value for payload in payloads]
        return self.batch.gathered(outputs, self.weighting if own_loss else None, joins)


def _key(seed: int, step: int, first: int, microbatch: int) -> Key:
    """Return the random key of a micro-batch. ``first`` is the number of the replica's first micro-batch."""
    return Key(seed, step, first + microbatch)


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """The fields of a call that every rank needs. These fields seldom change from step to step."""

    method: str
    rows: list[int]
    output_dim: tuple[Any, bool]
    as_given: bool
    looks: list[Hashable]
    paths: BatchPaths
    return_outputs: bool
    gather: bool
    has_loss: bool
    reduction_order: ReductionOrder


@dataclass(frozen=True)
class _Unsent:
    """The dtype and shape of a tensor that a rank does not need, sent in place of the tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


#: Types in the message that transmits a call, in addition to the types in the batch.
SENT_TYPES = _Opening, _Unsent, BatchPaths


def scatter_call(
    call: StepCall, program: Program, bodies: Sequence[Body], planes: Sequence[Sequence[Sequence[int]]]
) -> tuple[StepCall, list[Any]]:
    """Split rank 0's call into one message for each rank.

    Each replica gets an equal part of the micro-batches, and all planes get the same. An input is sent to the ranks
    whose stages use it. Targets are sent to the ranks of the stages whose outputs no other stage consumes.

    Args:
        call: rank 0's call with the whole batch.
        program: the program that the call runs.
        bodies: the layers of each part of the model. Stage s runs ``bodies[program.weights[s]]``.
        planes: for each plane and replica, the ranks in pipeline order, including ranks that the program does not use.

    Returns:
        Rank 0's own call, and the message for each rank.

    Raises:
        InputError: another rank needs an input that requires a gradient. (The gradient would not be sent back.)

    """
    messages: dict[int, Any] = {}
    own: list[StepCall] = []
    size = len(planes[0])
    for replica, rows in enumerate(zip(*planes, strict=True)):
        batch = call.batch.of_replica(replica, size)
        weighting = None if call.weighting is None else call.weighting.of_replica(replica, size)
        part = replace(call, batch=replace(batch, looks=[look(value) for value in batch.inputs]), weighting=weighting)
        own.append(part)
        alone = len(planes) == 1 and not replica
        of_ranks = _scatter_in_replica(part, program, bodies, len(rows[0]), holds_first=alone)
        for ranks in rows:
            messages.update(zip(ranks, of_ranks, strict=True))
    return own[0], [messages[rank] for rank in sorted(messages)]


def _scatter_in_replica(
    call: StepCall, program: Program, bodies: Sequence[Body], num_ranks: int, *, holds_first: bool
) -> list[Any]:
    """Split a replica's call into one message for each rank.

    ``holds_first`` states whether the first rank of this replica is always rank 0, so that nothing is sent to it.
    """
    batch = call.batch
    lasts = {program.placement[stage] for stage, others in enumerate(program.graph.consumers) if not others}
    takers: list[list[Body]] = [[] for _ in range(num_ranks)]
    for stage, producers in enumerate(program.graph.producers):
        body = bodies[program.weights[stage]]
        if not producers or body.late_inputs:
            takers[program.placement[stage]].append(body)
    paths = batch.paths.paths or [0] * len(batch.inputs)
    inputs = [
        [_needed(value, own, path) for value, path in zip(batch.inputs, paths, strict=True)] if own else None
        for own in takers
    ]
    local = {0} if holds_first else set()
    others = [rank for rank, own in enumerate(inputs) if rank not in local and any(map(trainable_leaves, own or ()))]
    if others:
        raise InputError(
            f"with inputs='first', an input that requires a gradient may be used on rank 0 only; rank {others[0]}"
            f"{' of another replica or plane' * (not others[0])} also uses such an input; detach the input, or pass "
            f"the batch on every rank with inputs='all'"
        )
    weighting = call.weighting or Weighting([], [])
    opening = _Opening(
        method=call.method,
        rows=batch.rows,
        output_dim=(batch.output_dim.given, batch.output_dim.explicit),
        as_given=batch.as_given,
        looks=batch.looks,
        paths=replace(batch.paths, new=[]),
        return_outputs=call.return_outputs,
        gather=call.gather,
        has_loss=call.weighting is not None,
        reduction_order=weighting.reduction_order,
    )
    for_all = opening, _written(weighting.factors), _written(weighting.shares)
    return [
        (*for_all, own, batch.targets if rank in lasts else None, batch.paths.new) for rank, own in enumerate(inputs)
    ]


def received(message: tuple[Any, ...]) -> StepCall:
    """Rebuild rank 0's call from a message, with this rank's part of the batch."""
    opening, factors, shares, inputs, targets, new_paths = message
    size = len(opening.rows)
    inputs = pytree.tree_map_only(_Unsent, _without_contents, inputs)
    batch = Batch(
        inputs or [((), {})] * size,
        targets or [],
        opening.rows,
        output_dim=Dim(*opening.output_dim),
        looks=opening.looks,
        paths=replace(opening.paths, new=new_paths),
        as_given=opening.as_given,
    )
    weighting = None
    if opening.has_loss:
        weighting = Weighting(_read(factors, size), _read(shares, size), opening.reduction_order)
    return StepCall(opening.method, batch, weighting, return_outputs=opening.return_outputs, gather=opening.gather)


def _needed(value: Any, takers: Sequence[Body], path: int) -> Any:
    """Return a micro-batch's inputs, with an `_Unsent` in place of each tensor that none of the ``takers`` uses."""
    leaves, spec = pytree.tree_flatten(value)
    columns = zip(leaves, *(pytree.tree_leaves(body.inputs(value, path)) for body in takers), strict=True)
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
    """Convert numbers to a tensor, or return None if any number is None.

    Numbers are sent as a tensor, so that the layout of the message does not depend on their values.
    """
    return None if None in numbers else torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _read(written: Tensor | None, size: int) -> list[LossFactor]:
    return [None] * size if written is None else written.tolist()


_WHAT = "losses and outputs"


def bring_ends(program: Program, step_data: StepData, trade: Trade) -> None:
    """Move the losses and outputs of all micro-batches to the program's output rank. Collective over processes."""
    end = program.output_rank
    ends = {program.placement[route[-1]] for route in program.routes}
    if len(ends) < 2:
        return
    if trade.holds(end):
        others = {rank for rank in ends if not trade.holds(rank)}
        for losses, outputs, measured in trade.trade(_WHAT, {}, others).values():
            step_data.losses.update(losses)
            step_data.measured.update(measured)
            step_data.outputs.update({microbatch: Payload.of(value) for microbatch, value in outputs.items()})
    elif any(map(trade.holds, ends)):
        outputs = {microbatch: payload.value for microbatch, payload in step_data.outputs.items()}
        trade.trade(_WHAT, {end: (step_data.losses, outputs, step_data.measured)}, ())
        step_data.outputs = {}
