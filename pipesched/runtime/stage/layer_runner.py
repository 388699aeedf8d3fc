"""Layer runner: calls the layers of one stage and its loss, one micro-batch at a time.

The layers are the user's own modules. A layer uses its own Parameters and buffers, unless a call replaces them with
separate tensors for tied weights, with an older weight version, or with copies of buffers.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipesched.capture.stage_body import Body, Head, call_with
from pipesched.errors import ExecutionError, InputError
from pipesched.model.padded_encoder import encoders_in, padded
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.runtime.gradients.nonfinite_watch import NonfiniteWatch
from pipesched.runtime.stage.added_losses import AddedLosses
from pipesched.runtime.stage.attribute_changes import AttributeChanges, with_values
from pipesched.runtime.stage.batch_norm import Norms
from pipesched.runtime.stage.buffer_copies import BufferCopies, RunningStatistics, buffers_of
from pipesched.runtime.stage.compiled_layers import Compiled
from pipesched.runtime.stage.input_copies import InputCopies
from pipesched.runtime.stage.microbatch_state import MicrobatchState
from pipesched.runtime.stage.offloading import Offloads, addresses
from pipesched.runtime.stage.output_metrics import measured
from pipesched.runtime.stage.recompute import RecomputedLayers
from pipesched.runtime.stage.split_backward import Deferral
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.stage.weight_products import Product, weight_grad
from pipesched.runtime.stage.weight_stash import WeightStash
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.graph_edges import edge_of, enter
from pipesched.tensors.keyed_random import InBackward
from pipesched.tensors.loss_factors import drop_unweighted_gradients, is_known_zero, scaled
from pipesched.tensors.payload import Gradients, Payload, PerConsumer, trainable_leaves
from pipesched.tensors.strided_clone import strided_clone
from pipesched.tensors.tensor_table import LayerValues, Noting
from pipesched.tensors.torch_functions import version_of
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["LayerRunner", "StandIns"]

#: Tensors that replace tied weights: (layer, call number) -> tensors, keyed by name.
StandIns = Mapping[tuple[str, int], Mapping[str, Tensor]]

_LOSS = "loss_fn"  # the layer name of the loss, for random numbers and weight versions
_NOTHING: Mapping[str, Any] = {}
_NO_CONTEXT = nullcontext()


class LayerRunner:
    """Runs the layers of a stage in F, and again when they are recomputed. Not thread-safe.

    Args:
        body: the layers and the order in which they run.
        inputs: brings the batch to the device of the stage.
        head: the loss, on the last stage; otherwise None.
        ties: tensors that replace tied weights, keyed by layer call.
        norms: collects BatchNorm statistics per micro-batch; None if each micro-batch updates the running statistics.
        compiled: calls layers through ``torch.compile``; None to call them eagerly.
        checkpoint_of_call: the checkpoint option of each (layer, call number) whose activations are recomputed or
            offloaded.
        written: names of the model's buffers that forwards write to.

    """

    def __init__(
        self,
        body: Body,
        inputs: InputCopies,
        head: Head | None,
        *,
        ties: StandIns,
        norms: Norms | None,
        compiled: Compiled | None,
        checkpoint_of_call: Mapping[tuple[str, int], LayerCheckpoint],
        written: Collection[str],
    ) -> None:
        self._body = body
        self._head = head
        loss_fn = None if head is None else head.loss_fn
        #: The layers and, on the last stage, the loss if it is a module; keyed by name.
        self.modules = {**body.layers, _LOSS: loss_fn} if isinstance(loss_fn, nn.Module) else dict(body.layers)
        self._inputs = inputs
        self._ties = ties
        self._norms = norms
        self._compiled = compiled
        self._sharded = body.sharded
        self._copies = BufferCopies(self.modules, written, statistics_apart=norms is not None)
        self._moves_buffers = bool(self._copies)
        statistics = RunningStatistics(self.modules)
        self._statistics = statistics if statistics and norms is None else None
        self._changes = AttributeChanges(self.modules.values())
        self._modifies_input: bool | None = None
        layers = body.layers.values()
        self._encoders = {layer: found for layer in layers if (found := encoders_in(layer))}  # torch's, by layer
        self._splits: bool | None = (
            None  # whether weight gradients can be deferred; None before the step's first split forward
        )
        self.deferral = Deferral()
        self._random = body.random(inputs.device)
        self._random.first_layer = next(iter(body.layers), "")
        self._added = AddedLosses(self._random)
        back = InBackward(self._random)
        own = self._added.in_backward
        forward = (self._random, self._added) if norms is None else (self._random, self._added, norms)
        backward = (back, own) if norms is None else (back, own, norms.uncounted)
        self._forward_mode = Intercept(*forward)
        self._split_forward_mode = Intercept(*forward, self.deferral)
        self._backward_mode = Intercept(*backward)
        self._split_backward_mode = Intercept(*backward, self.deferral)
        self._mode = self._forward_mode
        self._recomputed_layers = RecomputedLayers(self._random, self.deferral)
        self._checkpoint_of_call = {call: word for call, word in checkpoint_of_call.items() if call[0] in body.layers}
        self.offloads = Offloads(inputs.device) if "offload" in self._checkpoint_of_call.values() else None
        self._is_plain = not (ties or self._checkpoint_of_call or compiled or self._moves_buffers or self._encoders)

    def begin(self, step_data: StepData, weights: WeightStash | None) -> None:
        """Start a step. ``weights`` is None if no update occurs while micro-batches are in flight."""
        self._step_data = self._added.step_data = step_data
        self._added.saved = None
        self._weights = weights
        self._body.begin()
        if self.offloads is not None:
            self.offloads.clear()
        if self._compiled is not None:
            self._compiled.begin()
        if self._splits is not None:
            self._splits = None
            self.deferral.begin()

    def run(self, saved: MicrobatchState, arrived: Payload, split: bool = False, *, entered: bool = False) -> Any:
        """Call the layers and, on the last stage, the loss. Return the value from which the backward starts.

        ``entered`` states whether the autocast settings of an asynchronous call have been entered.
        """
        if self._step_data.autocast is not None and not entered:
            with self._step_data.autocast():
                return self.run(saved, arrived, split, entered=True)
        self._added.saved = saved
        self._added.grad = grad = torch.is_grad_enabled()
        wanted = arrived.wanted
        if wanted and grad:
            into: list[Tensor | None] = [None] * len(wanted)
            saved.input_grads = into
            wanted = enter(wanted, into)
        value = arrived.with_wanted(wanted)
        inputs = None
        values = value
        if saved.takes_inputs:
            inputs, *values = value if saved.num_grads else (value,)
        elif len(saved.num_grads) == 1:
            values = (value,)
        if self._norms is not None:
            self._norms.microbatch = saved.microbatch
        self._random.begin(saved.key, "")
        call = self._call
        if not self._is_plain or saved.weights or saved.buffers:
            call = partial(self._call_treated, saved, self._checkpoint_of_call if grad else {})
        if self._step_data.watch is not None:
            call = partial(self._call_watched, self._step_data.watch, saved, call)
        self._mode = self._split_forward_mode if split else self._forward_mode
        layer_values = self._step_data.layer_values
        noting = None if layer_values is None else Noting(layer_values)
        if self._compiled is not None:
            with self._compiled.turn(saved.path, arrived):
                output = self._run_body(inputs, tuple(values), call, saved, noting)
        elif noting is None:
            with self._mode:
                output = self._body.run(inputs, tuple(values), call, self._random, saved.path)
        else:
            output = self._run_body(inputs, tuple(values), call, saved, noting)
        return output if self._head is None else self._loss(self._head, saved, output, noting.own if noting else None)

    def _run_body(
        self, inputs: Any, values: tuple[Any, ...], call: Any, saved: MicrobatchState, noting: Noting | None
    ) -> Any:
        """Run the stage's layers and the code between them, and note the results of layers if ``noting`` is given."""
        call = call if noting is None else noting.of_results(call)
        # a compiled layer would be compiled for the mode
        inner = _NO_CONTEXT if noting is None or self._compiled is not None else noting
        with self._mode, inner:
            return self._body.run(inputs, values, call, self._random, saved.path)

    def run_keeping(self, saved: MicrobatchState, arrived: Payload, split: bool) -> Any:
        """Run the forward and save its activations. ``split`` states whether the I defers weight gradients to the W."""
        if split and self._splits is None:
            self._splits = self._may_split()
        split = split and bool(self._splits)
        saved.deferred = split and self.deferral.decide(saved.microbatch, partial(self._kind, saved.path, arrived))
        noted = saved.deferred or (split and self.deferral.learning)
        first = self._moves_buffers and saved.buffers is None  # a recompute already has its copies of the buffers
        if self._moves_buffers:
            saved.written_buffers = saved.buffers = saved.buffers or self._copies.copies()
        if self.offloads is None:
            value = self.run(saved, arrived, noted)
        else:
            value = self._run_offloading(self.offloads, saved, arrived, noted)
        if first and saved.written_buffers is not None:
            self._copies.take_over(saved.written_buffers)
        saved.buffers = None
        saved.edges = [edge_of(leaf) for leaf in _roots(saved, value)]
        if noted:
            own = () if saved.added is None else saved.added.edges
            saved.products = self.deferral.finish([*saved.edges, *own])
        return value

    def run_again(self, saved: MicrobatchState, arrived: Payload, split: bool) -> None:
        """Run a forward again, with the attributes from before its first run, and save its activations."""
        with with_values(saved.attributes or {}):
            self.run_keeping(saved, arrived, split)
        saved.attributes = None

    def _may_split(self) -> bool:
        """Return whether weight gradients can be deferred to the W.

        Every parameter must be an nn.Parameter, not an instance of a subclass, and the parameters of sharded modules
        must stay gathered until the W.
        """
        gathered = self._sharded is None or self._sharded.wait()
        self.deferral.begin(None if self._weights is None else self._weights.live)
        parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        return gathered and all(type(parameter) is nn.Parameter for parameter in parameters)

    def run_dropping(self, saved: MicrobatchState, arrived: Payload) -> Any:
        """Run a checkpointed F, in grad mode like any F, but keep only the inputs and the buffers for R."""
        snapshot = buffers_of(self.modules)
        attributes = self._changes.before()
        versions = [version_of(tensor) for tensor in arrived.tensors]
        kept = arrived if self._modifies_input is False else arrived.map_tensors(strided_clone)
        with _dropping():
            value = self.run(saved, arrived)
        attributes = self._changes.after(attributes)
        self._check_input(versions != [version_of(tensor) for tensor in arrived.tensors])
        adds = saved.added is not None and bool(saved.added.edges)
        saved.added = None if saved.added is None else saved.added.again()
        saved.needs_no_backward = not _roots(saved, value) and not adds
        if saved.needs_no_backward:
            return value
        saved.arrived = kept if self._modifies_input else arrived
        saved.buffers = snapshot
        saved.attributes = attributes
        return value

    def backward(self, saved: MicrobatchState, arrived: Sequence[Gradients]) -> None:
        """Run a backward pass. Recomputed layers use the forward's random numbers, weights and buffers."""
        edges = saved.edges
        saved.edges = ()
        if self.offloads is not None:
            self.offloads.arrived(saved.microbatch)
        grads: Gradients = (None,) * len(edges)  # for the loss: autograd starts a scalar with gradient 1
        if self._step_data.loss_scale is not None and not arrived:
            loss = self._step_data.losses[saved.microbatch]
            grads = (self._step_data.loss_scale.to(loss.dtype),) * len(edges)
        if arrived or self._step_data.factors is None:
            given = tuple(chain.from_iterable(arrived)) if arrived else self._step_data.output_grads[saved.microbatch]
            reached = [(edge, grad) for edge, grad in zip(edges, given, strict=True) if grad is not None]
            edges = [edge for edge, _ in reached]
            grads = tuple([grad for _, grad in reached])
        self._added.saved = saved
        if saved.added is not None:
            edges = [*edges, *saved.added.edges]
            grads = (*grads, *saved.added.grads)
            saved.added.edges.clear()
            saved.added.grads.clear()
        if not edges:
            return
        self._mode = self._split_backward_mode if saved.deferred else self._backward_mode
        with self._mode:
            if saved.written_buffers is None and self._statistics is None and self._weights is None:
                torch.autograd.backward(edges, grads)
            else:
                self._backward_with_state(saved, partial(torch.autograd.backward, edges, grads))
        if self._sharded is not None:
            self._sharded.has_gradients = True
        self._added.saved = None

    def _backward_with_state(self, saved: MicrobatchState, run: Callable[[], None]) -> None:
        """Run a backward with the weights and buffers of its forward, and without an effect on running statistics."""
        if self._statistics is not None:
            run = partial(self._statistics.kept, run)
        if self._weights is not None:
            run = partial(self._weights.during, saved.weights, run)
        if saved.written_buffers is None:
            run()
        else:
            with self._copies.as_left(saved.written_buffers):
                run()

    def weight_grad(self, products: Sequence[Product]) -> None:
        """Accumulate the weight gradients that the I has deferred to the W."""
        with self._backward_mode:
            weight_grad(products)
        if self._sharded is not None:
            self._sharded.accumulate()

    def deliver(self, saved: MicrobatchState, weights: WeightStash) -> None:
        """End a micro-batch: accumulate all its gradients into the Parameters' ``.grad``.

        No gradient is accumulated earlier, so an update between the micro-batch's I and W applies none of these
        gradients.
        """
        with self._backward_mode:
            weights.deliver([*saved.version_grads, *weights.taken(saved.weights)])
        saved.version_grads = ()
        saved.products = ()
        saved.weights = {}
        weights.ended(saved.microbatch)

    def held_by_others(self, saved: MicrobatchState) -> frozenset[int]:
        """Return the addresses of memory that must not be offloaded, because other code also uses this memory."""
        own = [tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers())]
        return saved.staying | addresses(tensors_in((saved.weights, list(self._ties.values()), own)))

    # ---- one call of a layer ------------------------------------------------------------------------------------

    def _call(self, name: str, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer with its own tensors, and with random numbers keyed to this call."""
        self._random.enter(self._random.key, name, number)
        return layer(*args, **kwargs)

    def _call_watched(
        self,
        watch: NonfiniteWatch,
        saved: MicrobatchState,
        call: Callable[..., Any],
        name: str,
        number: int,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a layer, and record whether its output is finite."""
        value = call(name, number, layer, args, kwargs)
        watch.output(saved.microbatch, name, value)
        return value

    def _call_treated(
        self,
        saved: MicrobatchState,
        checkpoint_of_call: Mapping[tuple[str, int], LayerCheckpoint],
        name: str,
        number: int,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a layer with its replacement tensors; keep, recompute or offload its activations."""
        self._random.enter(saved.key, name, number)
        own = self._stand_ins(saved, name, number)
        word = checkpoint_of_call.get((name, number))
        if word in ("recompute", "recompute-cheap"):
            run = partial(self._call_module, layer)
            cheap = word == "recompute-cheap"
            value = self._recomputed_layers.call((name, number), layer, own, run, args, kwargs, cheap=cheap)
        else:
            with self.offloads.going() if word == "offload" and self.offloads is not None else _NO_CONTEXT:
                value = self._call_module(layer, own, args, kwargs)
        if saved.written_buffers is not None:
            self._copies.note(name, own, saved.written_buffers)
        return value

    def _call_module(
        self, layer: nn.Module, own: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._compiled is not None:
            return self._compiled.call(self._mode, self._random, layer, own, args, kwargs)
        if layer in self._encoders:
            with padded(self._encoders[layer]):
                return call_with(own, layer, args, kwargs)
        return call_with(own, layer, args, kwargs)

    def _loss(self, head: Head, saved: MicrobatchState, output: Any, made: LayerValues | None) -> Any:
        """Compute the scaled loss of the last stage's output; return the output itself if the step has no loss.

        ``made`` holds the tensors that this forward has made, if they are recorded.
        """
        if self._step_data.keep_outputs and saved.microbatch not in self._step_data.outputs:
            self._step_data.outputs[saved.microbatch] = Payload.of(head.whole(output) if head.whole else output)
        if saved.loss_inputs is None:
            return output
        target, factor = saved.loss_inputs
        if self._step_data.metrics:
            self._measure(head, saved, output, target)
        if head.rule is None and self._mode.passes(head.loss_fn):
            loss = head.loss(output, target, _NOTHING)
        else:
            self._random.enter(saved.key, _LOSS)
            own = self._stand_ins(saved, _LOSS, 0)
            compute = partial(head.loss, output, target, own)
            with self._mode:
                if head.rule is None:
                    loss = compute()
                else:
                    loss = head.rule.loss(compute, output, target, self._step_data.layer_values, made)
            if saved.written_buffers is not None:
                self._copies.note(_LOSS, own, saved.written_buffers)
        if self._step_data.watch is not None:
            self._step_data.watch.output(saved.microbatch, "", loss)
        if head.rule is not None:
            factors, targets = self._step_data.factors, self._step_data.targets
            assert factors is not None  # the step has a loss
            factor = head.rule.factor(factor, saved.microbatch, factors, targets, self._inputs.value_on_device)
            saved.loss_inputs = target, factor
        if isinstance(factor, Tensor) and torch.is_grad_enabled():
            drop_unweighted_gradients(trainable_leaves(output), factor)
        return loss if factor is None else scaled(loss, factor)  # of a factor known to be 0, no backward runs

    def _measure(self, head: Head, saved: MicrobatchState, output: Any, target: Any) -> None:
        """Compute the metrics of a micro-batch, except in a recompute."""
        metrics = self._step_data.metrics.get(saved.microbatch)
        if metrics is not None and not saved.measured:
            saved.measured = True
            self._step_data.measured[saved.microbatch] = measured(
                metrics, head.whole(output) if head.whole else output, target
            )

    def _stand_ins(self, saved: MicrobatchState, name: str, number: int) -> Mapping[str, Tensor]:
        """Return the tensors that replace a module's own tensors in one call."""
        ties = self._ties.get((name, number), _NOTHING)
        return {**saved.weights.get(name, _NOTHING), **(saved.buffers or _NOTHING).get(name, _NOTHING), **ties}

    # ---- values kept by a run -----------------------------------------------------------------------------------

    def _run_offloading(self, offloads: Offloads, saved: MicrobatchState, arrived: Payload, noted: bool) -> Any:
        """Run the forward. Record the addresses of the batch and the outputs, which must stay on the device."""
        with offloads.saving(saved.microbatch), self.deferral.saving():
            value = self.run(saved, arrived, noted)
        inputs = self._step_data.inputs[saved.microbatch] if saved.takes_inputs or not saved.num_grads else None
        output = list(value) if isinstance(value, PerConsumer) else value
        outputs = self._step_data.outputs.get(saved.microbatch)
        saved.staying = addresses((*tensors_in((inputs, output)), *(outputs.tensors if outputs else ())))
        return value

    def _kind(self, path: int, arrived: Payload) -> Hashable:
        """Return the key under which deferrable weights are stored: path, input shapes, ``requires_grad`` flags."""
        shapes = tuple(tensor.shape for tensor in arrived.tensors)
        return path, shapes, tuple(p.requires_grad for layer in self._body.layers.values() for p in layer.parameters())

    def _check_input(self, modified: bool) -> None:
        """After the first forward, record whether the stage modified its input in place. If so, the R uses a copy.

        Raises ExecutionError if a later forward modified its input, but the first forward did not.
        """
        if self._modifies_input is None:
            self._modifies_input = modified
        elif modified and not self._modifies_input:
            raise ExecutionError(
                f"a checkpointed stage must modify its input in place either always or never; the layers "
                f"{', '.join(self._body.layers)} modified their input in this forward, but not in the first forward; "
                f"use checkpoint='never', or do not modify the input in place"
            )


def _roots(saved: MicrobatchState, value: Any) -> list[Tensor]:
    """Return the tensors of a stage's output that require a gradient. The backward pass starts from these tensors.

    Raises InputError if the value is a loss that depends on no trainable parameter.
    """
    roots = [leaf for part in value for leaf in trainable_leaves(part)] if isinstance(value, PerConsumer) else None
    roots = trainable_leaves(value) if roots is None else roots
    if not roots and saved.loss_inputs is not None and not is_known_zero(saved.loss_inputs[1]):
        raise InputError(
            "the loss of a step must depend on a parameter that requires a gradient; this loss depends on no such "
            "parameter; unfreeze a parameter, or call evaluate"
        )
    return roots


def _dropping() -> saved_tensors_hooks:
    """A context in which autograd saves no tensors, although layers run in grad mode."""
    return saved_tensors_hooks(_drop, _dropped)


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(_: None) -> Tensor:
    raise ExecutionError(
        "a layer of a checkpointed stage must not compute gradients in its forward, for example with "
        "autograd.grad, because a checkpointed forward saves no tensors; a layer of this stage computes gradients; "
        "use checkpoint='never'"
    )
