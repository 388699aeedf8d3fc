"""Stage: runs F, B, I, W and R of one stage for a micro-batch, and owns what it saves between them.

A stage knows nothing of order, ranks or transfers. Its runner calls the user's own layers.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.stage_body import Body, Chain, Head
from pipesched.errors import ExecutionError, InputError
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.program.weight_versions import Uses
from pipesched.runtime.stage.batch_norm import Norms
from pipesched.runtime.stage.compiled_layers import Compiled
from pipesched.runtime.stage.layer_runner import LayerRunner, StandIns
from pipesched.runtime.stage.microbatch_state import MicrobatchState
from pipesched.runtime.stage.stage_optimizer import StageOptimizer
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.stage.weight_products import Product
from pipesched.runtime.stage.weight_stash import WeightStash
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.payload import Gradients, Payload, PerConsumer, memory_of, pytree, used_here

__all__ = ["Stage"]

_NONE_BACK = PerConsumer()


class Stage:
    """One stage: its body, layers in a row unless it is another one, and on the last stage the head.

    Where several stages take what it gives, its body gives each its own (``PerConsumer``).
    """

    def __init__(
        self,
        body: Body | Mapping[str, nn.Module],
        device: torch.device,
        head: Head | None = None,
        *,
        ties: StandIns | None = None,
        norms: Norms | None = None,
        compiled: Compiled | None = None,
        checkpoint_of_call: Mapping[tuple[str, int], LayerCheckpoint] | None = None,
        written: Collection[str] = (),
    ) -> None:
        self.body = Chain(body) if isinstance(body, Mapping) else body
        self.layers = self.body.layers
        self.device = device
        self.head = head
        self.weights: WeightStash | None = None
        self._saved: dict[int, MicrobatchState] = {}
        self._step_data = StepData(0, 0, [])
        how: Any = {"ties": ties or {}, "norms": norms, "compiled": compiled, "written": written}
        how["checkpoint_of_call"] = checkpoint_of_call or {}
        self._runner = LayerRunner(self.body, device, head, **how)
        self.modules = self._runner.modules
        self.optimizer = StageOptimizer(self.modules, self.layers)
        #: Makes a stage over the same layers that holds nothing: for a pass that stays open beside others.
        self.fresh = partial(Stage, self.body, device, head, **how)

    def begin(self, step_data: StepData, uses: Uses | None = None) -> None:
        """Start a step; what a broken one left behind is dropped.

        uses: for a program that updates the weights on its way: which version each micro-batch uses.
        """
        self._saved.clear()
        self._step_data = step_data
        self.weights = None if uses is None else WeightStash(self.modules, uses)
        self._runner.begin(step_data, self.weights)

    def end(self, failed: bool) -> None:
        """End a step: nothing of it stays behind, nor of one that failed gradients that the next update would take."""
        self.begin(StepData(0, 0, []))
        if failed:
            self.optimizer.drop_gradients()

    def products(self, microbatch: int) -> Sequence[Product]:
        """What I has left to W."""
        return self._saved[microbatch].products

    def forward(self, microbatch: int, *arrived: Payload, split: bool = False, checkpointed: bool = False) -> Any:
        """F: the stage's output, a Payload, or PerConsumer one for each consumer; on the last stage the loss, where
        the feed asks for one.
        """
        step_data = self._step_data
        payload, takes_inputs = self._body_inputs(microbatch, arrived)
        saved = MicrobatchState(
            microbatch=microbatch,
            key=Key(step_data.seed, step_data.step, microbatch) if step_data.key is None else step_data.key(microbatch),
            num_grads=tuple([sum(one.needs_grad) for one in arrived]) if arrived else (),
            takes_inputs=takes_inputs,
            weights={} if self.weights is None else self.weights.used_by(microbatch),
            loss_inputs=None if self.head is None else self._loss_inputs(microbatch),
        )
        guarded = payload.overlapping if arrived and len(payload.leaves) > 1 else ()
        versions = [tensor._version for tensor in guarded]
        if not torch.is_grad_enabled():
            value = self._runner.run(saved, payload)
        else:
            self._saved[microbatch] = saved
            run = self._runner
            value = run.run_dropping(saved, payload) if checkpointed else run.run_keeping(saved, payload, split)
        if guarded and versions != [tensor._version for tensor in guarded]:
            raise ExecutionError(
                f"tensors that pass between stages are modified in place only where they share no memory; the layers "
                f"{', '.join(self.layers)} modified one of {len(guarded)} that do; clone it, or move the boundary"
            )
        if isinstance(value, PerConsumer):
            return PerConsumer([self._buffers_copied(Payload.of(one)) for one in value])
        output = Payload.of(value)
        if not all(output.needs_grad):
            output = self._buffers_copied(output)
        if saved.loss_inputs is not None:
            step_data.losses[microbatch] = output.leaves[0]
        return output

    def recompute(self, microbatch: int, *, split: bool = False) -> None:
        """R: run F again, with the same random numbers and buffers, and this time keep what the backward needs."""
        saved = self._saved[microbatch]
        if saved.needs_no_backward:
            return
        if saved.arrived is None:
            raise ExecutionError(f"R needs a checkpointed F before it; micro-batch {microbatch} has none; remove the R")
        arrived = saved.arrived
        saved.arrived = None
        self._runner.run_keeping(saved, arrived, split)

    def backward(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """B: adds the gradients of all parameters; returns those of what arrived, for each producer."""
        saved = self._saved.pop(microbatch)
        self._runner.backward(saved, grads)
        if self.weights is not None:
            self._runner.deliver(saved, self.weights)
        return self._input_grads(microbatch, saved)

    def input_grad(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """I: returns the gradients of what arrived, for each producer; the weight gradients that pay are left to W."""
        saved = self._saved[microbatch]
        if saved.deferred:
            with self._runner.deferral.unnoted():
                self._runner.backward(saved, grads)
        else:
            self._runner.backward(saved, grads)
        if self.weights is not None:
            saved.version_grads = self.weights.taken(saved.weights)
        return self._input_grads(microbatch, saved)

    def weight_grad(self, microbatch: int) -> None:
        """W: adds the gradients that I left."""
        saved = self._saved.pop(microbatch)
        if saved.products:
            self._runner.weight_grad(saved.products)
        if self.weights is not None:
            self._runner.deliver(saved, self.weights)

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: copy what layers that are to offload have saved to the host, but for what others hold."""
        if self._runner.offloads is not None:
            self._runner.offloads.offload(microbatch, self._runner.held_by_others(self._saved[microbatch]))

    def free(self, microbatch: int) -> None:
        """FREE: once that is copied, give its memory back."""
        if self._runner.offloads is not None:
            self._runner.offloads.free(microbatch)

    def fetch(self, microbatch: int) -> None:
        """FETCH: bring it back, for the backward."""
        if self._runner.offloads is not None:
            self._runner.offloads.fetch(microbatch)

    def update(self, number: int) -> None:
        """UPDATE: the optimizer's step with the gradients since the last one, which are then cleared."""
        self.optimizer.update(self.weights)

    def _loss_inputs(self, microbatch: int) -> tuple[Any, float | None] | None:
        """The loss's target and factor. F reads them, once: R may come when a stream has dropped them."""
        step_data = self._step_data
        if step_data.factors is None:
            return None
        target: Any = step_data.targets[microbatch] if step_data.targets else None
        here = (
            self._on_device(target)
            if isinstance(target, Tensor)
            else pytree.tree_map_only(Tensor, self._on_device, target)
        )
        return here, step_data.factors[microbatch]

    def _body_inputs(self, microbatch: int, arrived: Sequence[Payload]) -> tuple[Payload, bool]:
        """All that the body gets, and whether the model's inputs are the first of it."""
        if arrived and not self.body.late_inputs:
            return arrived[0] if len(arrived) == 1 else Payload.joined(arrived), False
        given = Payload.of(self.body.inputs(self._step_data.inputs[microbatch]), self._on_device)
        if arrived and any(given.needs_grad):
            raise InputError(
                "gradients of inputs come from the first stage; an input that requires one is used in a later stage, "
                "too; detach it, or move the boundary behind its last use"
            )
        return (Payload.joined([given, *arrived]) if arrived else given), True

    def _buffers_copied(self, output: Payload) -> Payload:
        """A buffer that leaves the stage is copied: the next forward may change it before it is read."""
        own = {memory_of(buffer) for layer in self.layers.values() for buffer in layer.buffers()}
        return output.map_tensors(lambda one: one.clone() if memory_of(one) in own else one) if own else output

    def _on_device(self, tensor: Tensor) -> Tensor:
        """An input of the model, on this device. It is a view of the batch, but counts its own modifications: a layer
        that works in place on one micro-batch does not spoil the others' backward.
        """
        if tensor.is_meta:
            return tensor  # it is not needed here
        own = used_here(tensor.data) if tensor.is_cuda else tensor.data
        return own if own.device == self.device else own.to(self.device, non_blocking=True)

    def _input_grads(self, microbatch: int, saved: MicrobatchState) -> PerConsumer:
        grads = tuple(saved.input_grads)
        saved.input_grads.clear()  # the graph holds the list, and somebody may hold the graph for longer
        if not saved.num_grads:
            if grads:
                self._step_data.input_grads[microbatch] = grads
            return _NONE_BACK
        if len(saved.num_grads) == 1:
            return PerConsumer((grads,))
        left = iter(grads)
        return PerConsumer(tuple(islice(left, count)) for count in saved.num_grads)
