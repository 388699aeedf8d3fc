"""Stage: runs F, B, I, W and R of one stage for a micro-batch, and owns what it saves between them.

A stage knows nothing of order, ranks or transfers. It calls the user's own layers, with their own Parameters.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.loss import Head
from pipesched.capture.stage_body import Body, Chain, call_with
from pipesched.errors import ExecutionError, InputError
from pipesched.program.checkpoint_options import Keep
from pipesched.program.weight_versions import Uses
from pipesched.runtime.stage.batch_norm import Norms
from pipesched.runtime.stage.buffer_copies import BufferCopies
from pipesched.runtime.stage.compiled_layers import Compiled
from pipesched.runtime.stage.microbatch_state import MicrobatchState, buffers_of, dropping, roots_of
from pipesched.runtime.stage.offloading import Offloads, addresses
from pipesched.runtime.stage.recompute import RecomputedLayers
from pipesched.runtime.stage.split_backward import Deferral, edge_of, enter
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.stage.weight_products import Product, weight_grad
from pipesched.runtime.stage.weight_stash import WeightStash
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import InBackward, KeyedRandom
from pipesched.tensors.payload import Gradients, Payload, PerConsumer, memory_of, pytree, used_here
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Stage"]

_NOTHING: Mapping[str, Any] = {}
_NONE_BACK = PerConsumer()
_NOTHING_MOVES = nullcontext()
_LOSS = "loss_fn"  # the layer as which the loss draws random numbers and has versions


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
        ties: Mapping[tuple[str, int], Mapping[str, Tensor]] | None = None,
        norms: Norms | None = None,
        compiled: Compiled | None = None,
        keep: Mapping[tuple[str, int], Keep] | None = None,
        written: Collection[str] = (),
    ) -> None:
        self.body = Chain(body) if isinstance(body, Mapping) else body
        self.layers = self.body.layers
        self._ties, self._keep = ties or {}, keep or {}
        self._norms, self._compiled = norms, compiled
        self.device = device
        self.head = head
        self._moving = BufferCopies(self.modules, written, statistics_apart=norms is not None)
        self._moves = bool(self._moving)
        self._how: Any = {"ties": ties, "norms": norms, "compiled": compiled, "keep": keep, "written": written}
        self.optimizer: torch.optim.Optimizer | None = None
        self.elsewhere: Collection[nn.Parameter] = ()  # the tied parameters that other stages update
        self.late = False  # whether updates wait for the gradients of tied parameters, which come after the run
        self._waiting = False
        self.weights: WeightStash | None = None
        self._saved: dict[int, MicrobatchState] = {}
        self._splits = True
        self._feed = StepData(0, 0, [])
        self._modifies_input: bool | None = None
        self._random = KeyedRandom(device)
        self._deferral = Deferral()
        forward = (self._random,) if norms is None else (self._random, norms)
        back = InBackward(self._random)
        again = (back,) if norms is None else (back, norms.uncounted)
        self._forward_mode = {False: Intercept(*forward), True: Intercept(*forward, self._deferral)}
        self._backward_mode = {False: Intercept(*again), True: Intercept(*again, self._deferral)}
        self._mode = self._forward_mode[False]
        self._again = RecomputedLayers(self._random, self._deferral)
        offloads = any(word == "offload" and name in self.layers for (name, _), word in self._keep.items())
        self._offloads = Offloads(device) if offloads else None

    def fresh(self) -> "Stage":
        """A stage over the same layers that holds nothing: for a pass that stays open beside others."""
        return Stage(self.body, self.device, self.head, **self._how)

    def begin(self, feed: StepData, uses: Uses | None = None) -> None:
        """Start a step; what a broken one left behind is dropped.

        uses: for a program that updates the weights on its way: which version each micro-batch uses.
        """
        self._saved.clear()
        if self._offloads is not None:
            self._offloads.clear()
        self._feed = feed
        self.body.begin()
        if self._compiled is not None:
            self._compiled.begin()
        self._splits = all(type(parameter) is nn.Parameter for parameter in self.parameters)  # none is sharded
        self.weights = None if uses is None else WeightStash(self.modules, uses)
        self._deferral.begin(None if self.weights is None else self.weights.live)

    def end(self, failed: bool) -> None:
        """End a step: nothing of it stays behind, nor of one that failed gradients that the next update would take."""
        self.begin(StepData(0, 0, []))
        if failed and self.optimizer is not None:
            self._waiting = False
            self.optimizer.zero_grad(set_to_none=True)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The layers by name, and on the last stage the loss where it is a module."""
        loss_fn = None if self.head is None else self.head.loss_fn
        return {**self.layers, _LOSS: loss_fn} if isinstance(loss_fn, nn.Module) else dict(self.layers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the layers and of a loss module, without those that other stages update."""
        own = dict.fromkeys(parameter for module in self.modules.values() for parameter in module.parameters())
        return [parameter for parameter in own if parameter not in self.elsewhere]

    def products(self, microbatch: int) -> Sequence[Product]:
        """What I has left to W."""
        return self._saved[microbatch].products

    def forward(self, microbatch: int, *arrived: Payload, split: bool = False, checkpointed: bool = False) -> Any:
        """F: the stage's output, a Payload, or PerConsumer one for each consumer; on the last stage the loss, where
        the feed asks for one.
        """
        payload, inputs = self._taken(microbatch, arrived)
        weights = self.weights.used_by(microbatch) if self.weights is not None else {}
        wanted = tuple([sum(one.needs_grad) for one in arrived]) if arrived else ()
        counted = None if self.head is None else self._counted(microbatch)
        saved = MicrobatchState(microbatch, self._feed.key(microbatch), wanted, inputs, weights, counted)
        guarded = payload.overlapping if arrived and len(payload.leaves) > 1 else ()
        versions = [tensor._version for tensor in guarded]
        if not torch.is_grad_enabled():
            value = self._run(saved, payload)
        else:
            self._saved[microbatch] = saved
            value = self._run_dropping(saved, payload) if checkpointed else self._run_keeping(saved, payload, split)
        if guarded and versions != [tensor._version for tensor in guarded]:
            raise ExecutionError(
                f"tensors that pass between stages are modified in place only where they share no memory; the layers "
                f"{', '.join(self.layers)} modified one of {len(guarded)} that do; clone it, or move the boundary"
            )
        if isinstance(value, PerConsumer):
            return PerConsumer([self._apart_from_buffers(Payload.of(one)) for one in value])
        output = Payload.of(value)
        if not all(output.needs_grad):
            output = self._apart_from_buffers(output)
        if saved.counted is not None:
            self._feed.losses[microbatch] = output.leaves[0]
        return output

    def recompute(self, microbatch: int, *, split: bool = False) -> None:
        """R: run F again, with the same random numbers and buffers, and this time keep what the backward needs."""
        saved = self._saved[microbatch]
        if saved.bare:
            return
        if saved.arrived is None:
            raise ExecutionError(f"R needs a checkpointed F before it; micro-batch {microbatch} has none; remove the R")
        arrived, saved.arrived = saved.arrived, None
        self._run_keeping(saved, arrived, split)

    def backward(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """B: adds the gradients of all parameters; returns those of what arrived, for each producer."""
        saved = self._saved.pop(microbatch)
        self._propagate(microbatch, saved, grads)
        if self.weights is not None:
            self._deliver(saved, self.weights)
        return self._sent_back(microbatch, saved)

    def input_grad(self, microbatch: int, *grads: Gradients) -> PerConsumer:
        """I: returns the gradients of what arrived, for each producer; the weight gradients that pay are left to W."""
        saved = self._saved[microbatch]
        if saved.deferred:
            with self._deferral.unnoted():
                self._propagate(microbatch, saved, grads)
        else:
            self._propagate(microbatch, saved, grads)
        if self.weights is not None:
            saved.grads = self.weights.taken(saved.weights)
        return self._sent_back(microbatch, saved)

    def weight_grad(self, microbatch: int) -> None:
        """W: adds the gradients that I left."""
        saved = self._saved.pop(microbatch)
        if saved.products:
            with self._backward_mode[False]:
                weight_grad(saved.products)
        if self.weights is not None:
            self._deliver(saved, self.weights)

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: copy what layers that are to offload have saved to the host, but for what others hold."""
        if self._offloads is not None:
            saved = self._saved[microbatch]
            own = [tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers())]
            others = tensors_in((saved.weights, list(self._ties.values()), own))
            self._offloads.offload(microbatch, saved.staying | addresses(others))

    def free(self, microbatch: int) -> None:
        """FREE: once that is copied, give its memory back."""
        if self._offloads is not None:
            self._offloads.free(microbatch)

    def fetch(self, microbatch: int) -> None:
        """FETCH: bring it back, for the backward."""
        if self._offloads is not None:
            self._offloads.fetch(microbatch)

    def update(self, number: int) -> None:
        """UPDATE: the optimizer's step with the gradients since the last one, which are then cleared."""
        if self.late:
            self._waiting = True
        else:
            self._update()

    def update_late(self) -> None:
        """The update that has waited for the gradients of tied parameters."""
        if self._waiting:
            self._waiting = False
            self._update()

    def _update(self) -> None:
        if self.weights is not None:
            self.weights.before_update()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        elif any(parameter.requires_grad and parameter.grad is not None for parameter in self.parameters):
            raise ExecutionError(
                f"a stage that trained nothing when the pipeline was made has no optimizer; parameters of the layers "
                f"{', '.join(self.layers)} have gradients now; make a new Pipeline, or freeze them again"
            )
        if self.weights is not None:
            self.weights.after_update()

    def _deliver(self, saved: MicrobatchState, weights: WeightStash) -> None:
        """End a micro-batch: all gradients at once, so that no update between its I and its W takes a part of them."""
        with self._backward_mode[False]:
            weights.deliver([*saved.grads, *weights.taken(saved.weights)])
        saved.grads, saved.products, saved.weights = (), (), {}
        weights.ended(saved.microbatch)

    def _counted(self, microbatch: int) -> tuple[Any, float | None] | None:
        """Read once, by F: R may come when a stream has dropped them."""
        feed = self._feed
        if feed.factors is None:
            return None
        target: Any = feed.targets[microbatch] if feed.targets else None
        here = self._here(target) if isinstance(target, Tensor) else pytree.tree_map_only(Tensor, self._here, target)
        return here, feed.factors[microbatch]

    def _taken(self, microbatch: int, arrived: Sequence[Payload]) -> tuple[Payload, bool]:
        """All that the body gets, and whether the model's inputs are the first of it."""
        if arrived and not self.body.late_inputs:
            return arrived[0] if len(arrived) == 1 else Payload.joined(arrived), False
        given = Payload.of(self.body.inputs(self._feed.inputs[microbatch]), self._here)
        if arrived and any(given.needs_grad):
            raise InputError(
                "gradients of inputs come from the first stage; an input that requires one is used in a later stage, "
                "too; detach it, or move the boundary behind its last use"
            )
        return (Payload.joined([given, *arrived]) if arrived else given), True

    def _apart_from_buffers(self, output: Payload) -> Payload:
        """A buffer that leaves the stage is copied: the next forward may change it before it is read."""
        own = {memory_of(buffer) for layer in self.layers.values() for buffer in layer.buffers()}
        return output.map_tensors(lambda one: one.clone() if memory_of(one) in own else one) if own else output

    def _here(self, tensor: Tensor) -> Tensor:
        """An input of the model, on this device. It is a view of the batch, but counts its own modifications: a layer
        that works in place on one micro-batch does not spoil the others' backward.
        """
        if tensor.is_meta:
            return tensor  # it is not needed here
        own = used_here(tensor.data) if tensor.is_cuda else tensor.data
        return own if own.device == self.device else own.to(self.device, non_blocking=True)

    def _run(self, saved: MicrobatchState, arrived: Payload, split: bool = False) -> Any:
        """Call the layers, and on the last stage the head. What is returned is the root of the backward."""
        wanted = arrived.wanted
        if wanted and torch.is_grad_enabled():
            into: list[Tensor | None] = [None] * len(wanted)
            saved.input_grads = into
            wanted = enter(wanted, into)
        value = arrived.with_wanted(wanted)
        inputs, values = None, value
        if saved.inputs:
            inputs, *values = value if saved.wanted else (value,)
        elif len(saved.wanted) == 1:
            values = (value,)

        others = bool(saved.weights or saved.buffers or self._ties)
        keep = self._keep if torch.is_grad_enabled() else {}

        def call(name: str, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._random.enter(saved.key, name, number)
            own = self._own(saved, name, number) if others else _NOTHING
            word = keep.get((name, number))
            if word is None and self._compiled is None:
                value = call_with(own, layer, args, kwargs) if own else layer(*args, **kwargs)
            elif word in ("recompute", "recompute-cheap"):
                run, cheap = partial(self._call_layer, layer), word == "recompute-cheap"
                value = self._again.call((name, number), layer, own, run, args, kwargs, cheap=cheap)
            else:
                with self._offloads.going() if word == "offload" and self._offloads is not None else _NOTHING_MOVES:
                    value = self._call_layer(layer, own, args, kwargs)
            if saved.left is not None:
                self._moving.note(name, own, saved.left)
            return value

        if self._norms is not None:
            self._norms.microbatch = saved.microbatch
        self._random.enter(saved.key, "")
        mode = self._mode = self._forward_mode[split]
        with self._feed.autocast():
            with mode:
                output = self.body.run(inputs, tuple(values), call, self._random)
            if self.head is None:
                return output
            if self._feed.keep_outputs:
                self._feed.outputs.setdefault(saved.microbatch, Payload.of(output))
            if saved.counted is None:
                return output
            target, factor = saved.counted
            if mode.passes(self.head.loss_fn):
                loss = self.head.loss(output, target, _NOTHING)
            else:
                self._random.enter(saved.key, _LOSS)
                own = self._own(saved, _LOSS, 0) if others else _NOTHING
                with mode:
                    loss = self.head.loss(output, target, own)
                if saved.left is not None:
                    self._moving.note(_LOSS, own, saved.left)
        if factor == 0:
            return torch.zeros_like(loss)  # counts nothing, whatever it is: nothing goes backward
        return loss if factor is None else loss * factor

    def _call_layer(
        self, layer: nn.Module, own: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._compiled is not None:
            return self._compiled.call(self._mode, self._random, layer, own, args, kwargs)
        return call_with(own, layer, args, kwargs)

    def _own(self, saved: MicrobatchState, name: str, number: int) -> Mapping[str, Tensor]:
        """What a module's call uses in place of its own tensors."""
        ties = self._ties.get((name, number), _NOTHING)
        return {**saved.weights.get(name, _NOTHING), **(saved.buffers or _NOTHING).get(name, _NOTHING), **ties}

    def _run_keeping(self, saved: MicrobatchState, arrived: Payload, split: bool) -> Any:
        split = split and self._splits
        saved.deferred = split and self._deferral.decide(saved.microbatch, lambda: self._kind(arrived))
        noted = saved.deferred or (split and self._deferral.learning)
        first = self._moves and saved.buffers is None  # of two where it runs again, on copies that it has
        if self._moves:
            saved.left = saved.buffers = saved.buffers or self._moving.copies()
        if self._offloads is None:
            value = self._run(saved, arrived, noted)
        else:
            with self._offloads.saving(saved.microbatch), self._deferral.saving():
                value = self._run(saved, arrived, noted)
            inputs = self._feed.inputs[saved.microbatch] if saved.inputs or not saved.wanted else None
            output = list(value) if isinstance(value, PerConsumer) else value
            outputs = self._feed.outputs.get(saved.microbatch)
            saved.staying = addresses((*tensors_in((inputs, output)), *(outputs.tensors if outputs else ())))
        if first and saved.left is not None:
            self._moving.take_over(saved.left)
        saved.buffers = None
        saved.edges = [edge_of(leaf) for leaf in roots_of(saved, value)]
        if noted:
            saved.products = self._deferral.finish(saved.edges)
        return value

    def _kind(self, arrived: Payload) -> Hashable:
        """What decides which weight gradients are left to W: shapes, and which parameters are trainable."""
        shapes = tuple(tensor.shape for tensor in arrived.tensors)
        return shapes, tuple(p.requires_grad for layer in self.layers.values() for p in layer.parameters())

    def _run_dropping(self, saved: MicrobatchState, arrived: Payload) -> Any:
        """Run in grad mode, so that the layers see what they see without checkpointing, and keep the input alone."""
        snapshot = {name: buffers_of(module) for name, module in self.modules.items()}
        versions = [tensor._version for tensor in arrived.tensors]
        kept = arrived if self._modifies_input is False else arrived.map_tensors(Tensor.clone)
        with dropping():
            value = self._run(saved, arrived)
        self._check_input(versions != [tensor._version for tensor in arrived.tensors])
        saved.bare = not roots_of(saved, value)
        if saved.bare:
            return value
        saved.arrived = kept if self._modifies_input else arrived
        saved.buffers = snapshot
        return value

    def _check_input(self, modified: bool) -> None:
        """Learn from the first forward whether the stage modifies its input, and must recompute from a copy."""
        if self._modifies_input is None:
            self._modifies_input = modified
        elif modified and not self._modifies_input:
            raise ExecutionError(
                f"a checkpointed stage recomputes from its input; the layers {', '.join(self.layers)} modified it in "
                f"place now, but not in their first forward; use checkpoint='never', or do not modify it in place"
            )

    def _propagate(self, microbatch: int, saved: MicrobatchState, arrived: tuple[Gradients, ...]) -> None:
        edges, saved.edges = saved.edges, ()
        if self._offloads is not None:
            self._offloads.arrived(microbatch)
        grads: Gradients = (None,) * len(edges)  # right for the loss: a scalar's gradient is one
        if arrived or self._feed.factors is None:
            given = arrived[0] if len(arrived) == 1 else tuple(chain.from_iterable(arrived))
            given = given if arrived else self._feed.output_grads[microbatch]
            reached = [(edge, grad) for edge, grad in zip(edges, given, strict=True) if grad is not None]
            edges, grads = [edge for edge, _ in reached], tuple([grad for _, grad in reached])
        if not edges:
            return
        self._mode = self._backward_mode[saved.deferred]
        with self._mode, _NOTHING_MOVES if saved.left is None else self._moving.as_left(saved.left):
            if self.weights is None:
                torch.autograd.backward(edges, grads)
            else:
                self.weights.during(saved.weights, lambda: torch.autograd.backward(edges, grads))

    def _sent_back(self, microbatch: int, saved: MicrobatchState) -> PerConsumer:
        grads = tuple(saved.input_grads)
        saved.input_grads.clear()  # the graph holds the list, and somebody may hold the graph for longer
        if not saved.wanted:
            if grads:
                self._feed.input_grads[microbatch] = grads
            return _NONE_BACK
        if len(saved.wanted) == 1:
            return PerConsumer((grads,))
        left = iter(grads)
        return PerConsumer(tuple(islice(left, count)) for count in saved.wanted)
