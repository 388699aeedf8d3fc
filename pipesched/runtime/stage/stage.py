"""Stage: runs the actions of one stage, and keeps the state of each micro-batch between its actions.

A stage contains no scheduling, rank or transport logic. A `LayerRunner` calls the user's own layers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.stage_body import Body, Head, LayerChain
from pipesched.errors import ExecutionError, InputError
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.program.weight_versions import Uses
from pipesched.runtime.gradients.buckets import GradientBuckets
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.tree_sums import TreeSums
from pipesched.runtime.stage.batch_norm import Norms
from pipesched.runtime.stage.compiled_layers import Compiled
from pipesched.runtime.stage.copied_stage import CopyTimes, Times
from pipesched.runtime.stage.divided_weights import DividedWeights
from pipesched.runtime.stage.input_copies import InputCopies
from pipesched.runtime.stage.layer_runner import LayerRunner, StandIns
from pipesched.runtime.stage.microbatch_state import MicrobatchState
from pipesched.runtime.stage.stage_optimizer import StageOptimizer
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.stage.weight_products import Product
from pipesched.runtime.stage.weight_stash import WeightStash
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.loss_factors import LossFactor
from pipesched.tensors.payload import Gradients, Payload, PerConsumer, memory_of

__all__ = ["Stage", "TreeStage"]

_NONE_BACK = PerConsumer()


class Stage:
    """One stage of the model: its layers and, on the last stage, the loss.

    Args:
        body: the layers, keyed by name and run one after another, or a `Body` that runs them in another way. A body
            whose output has several consumer stages returns a ``PerConsumer`` with one value for each consumer.
        device: the device of the stage's rank.
        head: the loss, on the last stage. Default: none.
        ties: tensors that replace tied weights, keyed by layer call. Default: none.
        norms: collects the BatchNorm statistics of each micro-batch. Default: each micro-batch updates the running
            statistics.
        compiled: calls layers through ``torch.compile``. Default: layers run eagerly.
        checkpoint_of_call: the checkpoint option of each (layer, call number) whose activations are not kept. Default:
            all activations are kept.
        written: names of the model's buffers that forwards write to. Default: none.

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
        self.body = LayerChain(body) if isinstance(body, Mapping) else body
        self.layers = self.body.layers
        self.device = device
        self.head = head
        self.weights: WeightStash | None = None
        #: Sums the gradients of the stage's parameters over replicas; None if there is only one replica.
        self.gradients: GradientBuckets | None = None
        self._saved: dict[int, MicrobatchState] = {}
        self._step_data = StepData(0, 0, [])
        self._copies = InputCopies(device)
        options: Any = {"ties": ties or {}, "norms": norms, "compiled": compiled, "written": written}
        options["checkpoint_of_call"] = checkpoint_of_call or {}
        #: The modules whose weights are divided among several processes; None if there are no such modules.
        self.sharded = self.body.sharded
        #: The weights that are split across replicas between runs; None if each replica holds all weights.
        self.divided_weights: DividedWeights | None = None
        #: When the copy of this stage was brought up to date; None if no other rank keeps a copy.
        self.copy_times: CopyTimes | None = None
        self._last_backward: int | None = None
        self._runner = LayerRunner(self.body, self._copies, head, **options)
        self.modules = self._runner.modules
        self.optimizer = StageOptimizer(self.modules, self.layers)
        #: Creates a new stage with the same layers, for a forward pass whose backward may run after other passes.
        self.fresh: Callable[[], Stage] = partial(Stage, self.body, device, head, **options)

    def begin(self, step_data: StepData, uses: Uses | None = None) -> None:
        """Start a step. State left by a failed step is discarded.

        ``uses`` contains the weight version of each micro-batch, for a program that updates the weights while
        micro-batches are in flight.
        """
        self._saved.clear()
        self._step_data = self._copies.step_data = step_data
        self.weights = None if uses is None else WeightStash(self.modules, uses)
        self._runner.begin(step_data, self.weights)

    def begin_weights(self, last_backward: int | None) -> None:
        """Prepare the weights for a run: keep this replica's rows of divided weights, and gather sharded modules.

        ``last_backward`` is the micro-batch of the stage's last B or W, during which the gradients of sharded
        modules are reduced; None if the run has no backward.
        """
        self._last_backward = last_backward
        if self.sharded is not None:
            self.sharded.gather()
        if self.divided_weights is not None:
            self.divided_weights.begin()

    def end(self, failed: bool) -> None:
        """End a step and release its state. After a failed step, also clear the optimizer's gradients."""
        self.begin(StepData(0, 0, []))
        if self.sharded is not None:
            self.sharded.release(failed=failed)
        if self.divided_weights is not None:
            self.divided_weights.end()
        if failed:
            self.optimizer.drop_gradients()

    def products(self, microbatch: int) -> Sequence[Product]:
        """Return the operations whose weight gradients the I has deferred to the W."""
        return self._saved[microbatch].products

    def forward(self, microbatch: int, *arrived: Payload, split: bool = False, checkpointed: bool = False) -> Any:
        """F: run the layers. ``arrived`` contains the value received from each producer stage, in stage order.

        Returns:
            The stage's output: a Payload, or a PerConsumer with one Payload for each consumer stage. If
            ``StepData.factors`` is set, the output of the last stage is the loss.

        """
        step_data = self._step_data
        path = step_data.paths[microbatch] if step_data.paths else 0
        payload, takes_inputs = self._body_inputs(microbatch, path, arrived)
        saved = MicrobatchState(
            microbatch=microbatch,
            path=path,
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
                f"a stage must not modify received tensors that share memory; the layers {', '.join(self.layers)} "
                f"modified one of {len(guarded)} such tensors in place; clone the tensor first, or move the stage "
                f"boundary"
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
        """R: run a checkpointed F again, with the same random numbers and buffers, and save its activations."""
        saved = self._saved[microbatch]
        if saved.needs_no_backward:
            return
        if saved.arrived is None:
            raise ExecutionError(
                f"every R must follow a checkpointed F; micro-batch {microbatch} has no checkpointed F; remove its R"
            )
        arrived = saved.arrived
        saved.arrived = None
        self._runner.run_again(saved, arrived, split)

    def backward(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """B: accumulate all parameters' gradients; return the gradients of the values received from each producer."""
        saved = self._saved.pop(microbatch)
        self._runner.backward(saved, grads)
        if self.weights is not None:
            self._runner.deliver(saved, self.weights)
        if microbatch == self._last_backward and self.sharded is not None:
            self.sharded.reduce()
        return self._input_grads(microbatch, saved)

    def input_grad(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """I: return the gradients of the values received from each producer. Defer costly weight gradients to the W."""
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
        """W: accumulate the weight gradients that the I has deferred."""
        saved = self._saved.pop(microbatch)
        if saved.products:
            self._runner.weight_grad(saved.products)
        if self.weights is not None:
            self._runner.deliver(saved, self.weights)
        if microbatch == self._last_backward and self.sharded is not None:
            self.sharded.reduce()

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: start copying offloaded layers' activations to the host, unless other code uses their memory."""
        if self._runner.offloads is not None:
            self._runner.offloads.offload(microbatch, self._runner.held_by_others(self._saved[microbatch]))

    def free(self, microbatch: int) -> None:
        """FREE: wait for the copy to the host, then release the device memory."""
        if self._runner.offloads is not None:
            self._runner.offloads.free(microbatch)

    def fetch(self, microbatch: int) -> None:
        """FETCH: start copying the activations back to the device for the backward."""
        if self._runner.offloads is not None:
            self._runner.offloads.fetch(microbatch)

    def reduce(self, bucket: int) -> None:
        """REDUCE: start to sum the gradients of a bucket over replicas."""
        if self.gradients is not None:
            self.gradients.start(bucket)

    def last_backward(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """B: run the stage's last backward; start each REDUCE as soon as the gradients of its bucket are complete."""
        with nullcontext() if self.gradients is None else self.gradients.completing():
            return self.backward(microbatch, *grads)

    def reduced(self) -> Times:
        """Wait until gradients are summed over the replicas and the weights that other replicas update have arrived.

        Returns the start and the end of each bucket's REDUCE, keyed by bucket.
        """
        if self.gradients is None:
            return {}
        self.gradients.wait()
        self.optimizer.wait()
        return self.gradients.spans

    def unshard(self, number: int) -> None:
        """UNSHARD: start to gather the stage's weights from all replicas."""
        if self.divided_weights is not None:
            self.divided_weights.unshard(number)

    def await_weights(self) -> None:
        """Wait for the weights that the last UNSHARD gathers."""
        if self.divided_weights is not None:
            self.divided_weights.wait()

    def reshard(self, number: int, *, last: bool) -> None:
        """RESHARD: free the gathered weights. ``last`` states whether this is the stage's last RESHARD in the step."""
        if self.divided_weights is not None:
            self.divided_weights.reshard(last=last)

    def gathered(self) -> Times:
        """Return the start and the end of each gather of this step."""
        return {} if self.divided_weights is None else self.divided_weights.spans

    def norm(self, number: int) -> GradientNorms:
        """NORM: return the norms of the gradients accumulated since the last update."""
        if self.head is None:
            return self.optimizer.norm(())
        norms = self.optimizer.norm(self._step_data.losses.values())
        return norms if self.gradients is None else self.gradients.common(norms)

    def update(self, number: int, norms: Sequence[GradientNorms] = ()) -> None:
        """UPDATE: step the optimizer with the gradients accumulated since the last update, then clear the gradients.

        ``norms`` contains the gradient norms of all stages if the program has NORM actions.
        """
        self.optimizer.update(self.weights, [one.on(self.device) for one in norms])

    def mirror(self, number: int) -> None:
        """MIRROR: the gradients of the previous update are sent in the thread that keeps copies of states."""

    def mirrored(self) -> Times:
        """Return the start and the end of each MIRROR of this step."""
        return {} if self.copy_times is None else self.copy_times.mirrored()

    def keep(self, number: int) -> None:
        """KEEP: the weights and the optimizer's state are set aside in the thread that keeps copies of states."""

    def kept(self) -> Times:
        """Wait for the KEEPs of this step. Return the start and the end of each."""
        return {} if self.copy_times is None else self.copy_times.kept()

    def _loss_inputs(self, microbatch: int) -> tuple[Any, LossFactor] | None:
        """Return the target and the factor of the loss; None if no loss is computed.

        The F reads the target and the factor, and keeps them for the R. If steps overlap, the step data may no longer
        contain them when the R runs.
        """
        step_data = self._step_data
        if step_data.factors is None:
            return None
        target: Any = step_data.targets[microbatch] if step_data.targets else None
        factor = step_data.factors[microbatch]
        if isinstance(factor, Tensor):
            factor = self._copies.tensor_on_device(factor)
        copies = self._copies
        bring = copies.tensor_on_device if isinstance(target, Tensor) else copies.value_on_device
        return bring(target), factor

    def _body_inputs(self, microbatch: int, path: int, arrived: Sequence[Payload]) -> tuple[Payload, bool]:
        """Return the inputs of the stage's body, and whether these inputs begin with the model's inputs."""
        if arrived and not self.body.late_inputs:
            return arrived[0] if len(arrived) == 1 else Payload.joined(arrived), False
        inputs = self.body.inputs(self._step_data.inputs[microbatch], path)
        given = Payload.of(inputs, self._copies.tensor_on_device)
        if arrived and any(given.needs_grad):
            raise InputError(
                "an input that requires a gradient may be used by the first stage only; a later stage also uses it; "
                "detach the input, or move the stage boundary after its last use"
            )
        return (Payload.joined([given, *arrived]) if arrived else given), True

    def _buffers_copied(self, output: Payload) -> Payload:
        """Clone output tensors that are buffers of this stage, because the next forward may change these buffers."""
        own = {memory_of(buffer) for layer in self.layers.values() for buffer in layer.buffers()}
        return output.map_tensors(lambda one: one.clone() if memory_of(one) in own else one) if own else output

    def _input_grads(self, microbatch: int, saved: MicrobatchState) -> PerConsumer:
        grads = tuple(saved.input_grads)
        saved.input_grads.clear()  # the graph references the list and may outlive this call
        if not saved.num_grads:
            if grads:
                self._step_data.input_grads[microbatch] = grads
            return _NONE_BACK
        if len(saved.num_grads) == 1:
            return PerConsumer((grads,))
        left = iter(grads)
        return PerConsumer(tuple(islice(left, count)) for count in saved.num_grads)


class TreeStage(Stage):
    """A stage that sums the gradients of its micro-batches in a binary tree. Takes the same arguments as `Stage`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fresh = partial(TreeStage, *args, **options)
        self._tree = TreeSums()

    def begin(self, step_data: StepData, uses: Uses | None = None) -> None:
        super().begin(step_data, uses)
        own = (parameter for module in self.modules.values() for parameter in module.parameters())
        self._tree.begin(own, len(step_data.inputs))

    def end(self, failed: bool) -> None:
        if not failed:
            self._tree.finish()
        super().end(failed)

    def backward(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        with self._tree.adding(microbatch):
            return super().backward(microbatch, *grads)

    def input_grad(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        with self._tree.adding(microbatch):
            return super().input_grad(microbatch, *grads)

    def weight_grad(self, microbatch: int) -> None:
        with self._tree.adding(microbatch):
            super().weight_grad(microbatch)

    def reshard(self, number: int, *, last: bool) -> None:
        if last:  # torch refuses a gradient whose shape differs from its parameter's shape
            self._tree.finish()
        super().reshard(number, last=last)

    def reduce(self, bucket: int) -> None:
        self._tree.finish()
        super().reduce(bucket)

    def last_backward(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """B: run the stage's last backward. REDUCE actions start only afterwards, with complete tree sums."""
        return self.backward(microbatch, *grads)

    def norm(self, number: int) -> GradientNorms:
        self._tree.finish()
        return super().norm(number)

    def update(self, number: int, norms: Sequence[GradientNorms] = ()) -> None:
        self._tree.finish()
        super().update(number, norms)
