"""Stage memory probe: measures the memory of each stage of a captured model by running the stage as a whole.

A stage needs more memory than all its layers together, for four reasons. A view keeps its whole storage alive. A value
that a later layer uses stays in memory until that layer runs. If several layers use a value, the gradients of the value
stay in memory until they are added. Variables of code between layers keep tensors alive.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.captured_model import CapturedModel
from pipesched.capture.stage_body import Head
from pipesched.model.state_guard import unchanged, untouched
from pipesched.model.tied_weights import Ties
from pipesched.partitioning.result import StageLayers
from pipesched.profiling.layer_memory_probe import Layer, Sizes, sizes_of
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.program.program import Program
from pipesched.progress import advance
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import MEMORY_COLUMNS
from pipesched.simulation.layer_memory import LayerMemory, stage_memory
from pipesched.simulation.memory import MessageSizes
from pipesched.simulation.tied_weight_costs import weight_bytes
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.exchange import Trade
from pipesched.tensors.loss_factors import LossFactor
from pipesched.tensors.memory_tracker import books_of
from pipesched.tensors.payload import Payload, PerConsumer, pytree
from pipesched.tensors.tensor_attributes import with_copied_attributes_of

__all__ = ["StageSizes", "costs_with", "messages_of", "stage_sizes"]


@dataclass(frozen=True, kw_only=True)
class StageSizes:
    """The memory needs of a stage."""

    memory: LayerMemory
    #: The peak memory in bytes of a forward that keeps nothing for a backward pass, excluding the forward's input.
    dropping_bytes: int
    #: Parameter name -> the parameter's size in bytes.
    parameters: Mapping[str, int]
    #: Consumer stage -> the sizes of the message to this consumer.
    messages: Mapping[int, MessageSizes]


def stage_sizes(
    captured: CapturedModel,
    cut: StageLayers,
    devices: Sequence[torch.device],
    trade: Trade,
    checkpoint_of_call: Mapping[tuple[str, int], LayerCheckpoint],
    *,
    own_loss: bool,
) -> list[StageSizes]:
    """Measure the memory of each stage by running the sample through the stages, each on its device.

    The model is left unchanged. The run uses the parameters' own memory, but not their gradients or hooks.

    Args:
        captured: the model.
        cut: the layers of each stage.
        devices: the device of each stage.
        trade: the Trade that sends tied weights between ranks.
        checkpoint_of_call: the checkpoint option of each (layer, call number) whose activations are not kept.
        own_loss: whether the last stage computes the model's own loss.

    """
    caller = replace(Caller.here({device.type for device in devices}, grad=True), inference=False)
    model = captured.model
    aliases: dict[str, Tensor] = {
        f"model.{name}": with_copied_attributes_of(
            parameter, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        )
        for name, parameter in model.named_parameters()
    }

    def act() -> list[StageSizes]:
        ties = Ties(model, captured.uses(cut, range(len(cut))), trade)
        bodies = captured.bodies(cut, devices, ties)
        names = {parameter: name for name, parameter in model.named_parameters()}
        edges = captured.edges(cut)
        found: list[StageSizes] = []
        sent: dict[tuple[int, int], Payload] = {}
        for index, (body, device) in enumerate(zip(bodies, devices, strict=True)):
            givers = [one for one, two in edges if two == index]
            takers = [two for one, two in edges if one == index]
            head = Head(None) if own_loss and index == len(cut) - 1 else None
            own_ties = ties.for_layers(body.layers, device)
            written = captured.written_by(cut)[index]
            stage = Stage(body, device, head, ties=own_ties, checkpoint_of_call=checkpoint_of_call, written=written)
            alone = _IsolatedStage(stage, captured.sample, caller, [sent.pop((giver, index)) for giver in givers])
            leaves = [*ties.leaves(index), *(own for own in stage.optimizer.parameters if own not in ties.parameters)]
            sizes = alone.sizes([leaf for leaf in leaves if leaf.requires_grad])
            for giver, back in zip(givers, sizes.backs, strict=False):
                messages = dict(found[giver].messages)
                messages[index] = messages[index]._replace(back=back)
                found[giver] = replace(found[giver], messages=messages)
            needs = StageSizes(
                memory=sizes.memory,
                dropping_bytes=alone.dropping_bytes(sizes.memory.buffer_bytes),
                parameters={names[parameter]: parameter.nbytes for parameter in stage.optimizer.parameters},
                messages=dict(zip(takers, sizes.gives, strict=False)),
            )
            found.append(needs)
            sent.update(((index, taker), given) for taker, given in zip(takers, alone.output(), strict=False))
        return found

    with untouched(model, model.training), caller.held():
        found: list[StageSizes] = torch.func.functional_call(_ModelHolder(model), aliases, (act,))
    return found


def messages_of(program: Program, stages: Sequence[StageSizes]) -> dict[tuple[int, int], MessageSizes]:
    """Return the message sizes, keyed by (producer, consumer).

    ``stages`` has one entry for each set of weights. Stages with the same weights send messages of the same sizes.
    """
    own = program.weights
    return {
        (giver, taker): stages[own[giver]].messages[own[taker]]
        for taker, givers in enumerate(program.graph.producers)
        for giver in givers
    }


def costs_with(costs: Costs, program: Program, stages: Sequence[StageSizes], loss: LayerMemory | None) -> Costs:
    """Return the stages' costs with the measured memory.

    ``loss`` is the memory of a loss that is not a part of the model; None if there is no such loss.
    """
    rows = []
    for index, part in enumerate(program.weights):
        memories = [stages[part].memory]
        dropping = [stages[part].dropping_bytes]
        if loss is not None and not program.graph.consumers[index]:
            memories.append(loss)
            dropping.append(loss.activation_bytes + loss.forward_transient_bytes)
        whole = stage_memory(memories)
        row = {name: getattr(whole, name) for name in MEMORY_COLUMNS}
        rows.append(row | {"dropping_transient_bytes": max(dropping)})
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns["weight_bytes"] = weight_bytes(program, [stage.parameters for stage in stages])
    for index, size in enumerate(costs.input_bytes):
        if not program.graph.producers[index]:
            columns["input_bytes"][index] = size  # the size of the batch
    return replace(costs, **columns)


class _ModelHolder(nn.Module):
    """Runs code while other tensors replace the model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, act: Callable[[], Any]) -> Any:
        return act()


class _IsolatedStage:
    """A stage that runs without the other stages. ``arrived`` contains the payload from each producer."""

    def __init__(self, stage: Stage, sample: Any, caller: Caller, arrived: Sequence[Payload]) -> None:
        self._stage = stage
        self._caller = caller
        self._arrived = arrived
        self._sample = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(stage.device), sample)
        self._given = Payload.joined(arrived)
        self._step = StepData(0, 0, [])
        grads = [tuple(torch.ones_like(leaf) for leaf in one.wanted) for one in self._outputs(split=True)]
        stage.input_grad(0, *grads)  # the first backward determines how to split backward passes into I and W
        stage.weight_grad(0)

    def sizes(self, leaves: Sequence[Tensor]) -> Sizes:
        """Measure the stage's memory. ``leaves`` are the tensors that accumulate the stage's gradients."""
        buffers = {buffer for module in self._stage.modules.values() for buffer in module.buffers()}
        layer = Layer(
            stage=self._stage,
            run=self._run,
            release=self._release,
            weights=leaves,
            buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        )
        return sizes_of(layer, self._given)

    def dropping_bytes(self, buffer_bytes: int) -> int:
        """Return the peak memory of a checkpointed forward in bytes, excluding its input and the copies of buffers."""
        books = books_of(self._stage.device)
        with books.watching():
            given = self._given.map_tensors(Tensor.clone)
            for _ in range(2):  # the first run determines whether the stage modifies its input
                held = books.bytes
                books.mark()
                self._forward(given, checkpointed=True)
                self._end()
        return max(0, books.peak - held - buffer_bytes)

    def output(self) -> list[Payload]:
        """Run a forward, and return the output for each consumer."""
        outputs = self._outputs()
        self._end()
        return outputs

    def _release(self) -> None:
        """Free the model's inputs that a forward has stored."""
        self._step.inputs = [None]

    def _end(self) -> None:
        self._stage.begin(StepData(0, 0, []))

    def _outputs(self, *, split: bool = False) -> list[Payload]:
        made = self._run(self._given, split)
        return list(made) if isinstance(made, PerConsumer) else [made]

    def _run(self, given: Payload, split: bool) -> Payload | PerConsumer:
        return self._forward(given, split=split)

    def _forward(self, given: Payload, **how: bool) -> Payload | PerConsumer:
        factors: list[LossFactor] | None = None if self._stage.head is None else [1.0]
        self._step = StepData(0, 0, [unchanged(self._sample)], factors=factors, autocast=self._caller.autocast)
        self._stage.begin(self._step)
        leaves = iter(given.leaves)
        parts = [
            Payload(tuple(next(leaves) for _ in one.leaves), one.places, one.spec, one.needs_grad)
            for one in self._arrived
        ]
        made: Payload | PerConsumer = self._stage.forward(0, *parts, **how)
        advance()
        return made
