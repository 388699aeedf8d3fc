"""Call builder: turns the batch that a caller passed into the call that this process runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipesched.capture.label_counts import labels_in
from pipesched.capture.loss_reduction import weights_in_numbers
from pipesched.errors import InputError
from pipesched.pipeline.assembly_parts import READ_STEPS
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.program_factory import StepPrograms
from pipesched.runtime.microbatches import Batch, GivenBatch, Weighting
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.runtime.step_call import StepCall, scatter_call
from pipesched.runtime.targets import check_given_targets, check_target
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.sampled_values import digest_of_values
from pipesched.units import counted

__all__ = ["CallBuilder"]


class CallBuilder:
    """Splits a batch into micro-batches, and exchanges with the other processes what all of them must know.

    Args:
        running: the running plan.
        model: the user's model.
        num_inputs: the number of positional arguments in the sample.
        has_loss_fn: whether the pipeline has a loss function. A loss function needs a target.

    """

    def __init__(self, running: RunningPlan, model: nn.Module, num_inputs: int, *, has_loss_fn: bool) -> None:
        self._running = running
        self._model = model
        self._num_inputs = num_inputs
        self._has_loss_fn = has_loss_fn

    @property
    def differentiates(self) -> bool:
        """Whether the output of a forward can be differentiated."""
        return torch.is_grad_enabled() and self._model.training

    def call(self, method: str, given: GivenBatch, metrics: Metrics | None = None, **wanted: bool) -> StepCall:
        """Return the call of this process. If the caller passed no batch here, the batch comes from rank 0.

        Args:
            method: the name of the pipeline's method.
            given: the batch that the caller passed.
            metrics: the function that computes metrics. Default: None (no metrics).
            wanted: has the keys return_outputs and gather.

        """
        host = self._running.host
        grid = host.grid
        collectives = host.collectives
        collectives.begin_call(method, given=given.is_given)
        call = None
        messages: list[Any] = []
        if grid.inputs == "all" or not grid.rank:
            with collectives.telling_failure(method):
                call = self._split(method, given, metrics, wanted)
                if grid.inputs == "first":
                    program = self._programs(call.batch).plain
                    call, messages = scatter_call(call, program, self._running.assembly.bodies, grid.every_plane)
        call = collectives.exchange_call(method, call, messages)
        layered = self._running.assembly.layered
        if layered.may_branch and not given.is_given:
            layered.learn_paths(call.batch.paths)
        if not grid.compares_batches:
            return call
        values = digest_of_values(given, devices=self._running.step < READ_STEPS)
        return replace(call, batch=replace(call.batch, values=values))

    def _split(self, method: str, given: GivenBatch, metrics: Metrics | None, wanted: dict[str, bool]) -> StepCall:
        """Split a batch into micro-batches, and weight their losses."""
        if method == "step" and not torch.is_grad_enabled():
            raise InputError(
                "step() must run with gradients enabled; it was called under no_grad; call it outside no_grad, or "
                "call evaluate() instead"
            )
        if method == "forward" and not self._running.host.grid.in_one_process and self.differentiates:
            raise InputError(
                "a forward with gradients may only run in one process; this pipeline runs over a mesh; use step(), "
                "call forward() under no_grad, or make the pipeline with devices= instead of mesh="
            )
        batch = self._batch(method, given)
        weighting = self._weighting(method, batch)
        if metrics is not None and not self._has_loss_fn:
            batch = self._with_labels(batch)
        call = StepCall(method, batch, weighting, **wanted)
        return self._with_paths(call) if self._running.assembly.layered.may_branch else call

    def _batch(self, method: str, given: GivenBatch) -> Batch:
        args, kwargs, target, microbatches = given
        splitter = self._running.splitter
        num_replicas = self._running.host.grid.replicas_per_batch
        if method == "forward":
            return splitter.batch(args, kwargs, num_replicas=num_replicas)
        if microbatches is not None:
            return self._batch_as_given(method, given)
        if self._has_loss_fn and target is None and 0 < self._num_inputs < len(args):
            inputs = "x" if self._num_inputs == 1 else "..."
            raise InputError(
                f"the target must be passed to {method}() as a keyword; got {len(args)} positional arguments and "
                f"no target=, but the sample has {counted(self._num_inputs, 'positional argument')}; call "
                f"{method}({inputs}, target=y)"
            )
        if self._has_loss_fn != (target is not None):
            call = f"{method}(x, target=x)"
            check_target(target, has_loss_fn=self._has_loss_fn, call=call, without="call forward()")
        return splitter.batch(args, kwargs, target, num_replicas=num_replicas)

    def _batch_as_given(self, method: str, given: GivenBatch) -> Batch:
        args, kwargs, target, microbatches = given
        if args or kwargs or target is not None:
            raise InputError(
                f"{method}() takes either a batch or microbatches=; both were passed; pass the inputs and the target "
                f"of each micro-batch to Microbatch(...)"
            )
        num_replicas = self._running.host.grid.replicas_per_batch
        batch = self._running.splitter.as_given(microbatches, num_replicas=num_replicas)
        check_given_targets(batch, has_loss_fn=self._has_loss_fn)
        return batch

    def _with_labels(self, batch: Batch) -> Batch:
        """Return a batch whose targets ``metrics`` gets: without a loss_fn, the labels among the model's inputs."""
        labels = [labels_in(self._model, *inputs) for inputs in batch.inputs]
        return batch if labels[0] is None else replace(batch, targets=labels)

    def _weighting(self, method: str, batch: Batch) -> Weighting | None:
        """Return the weights of the losses. Collective over replicas."""
        splitter = self._running.splitter
        if method == "forward":
            if self._running.host.sums is not None:
                self._weights_of_replicas([1] * len(batch.rows))
            return None if self._has_loss_fn else splitter.weighting_of_outputs(batch)
        groups = self._programs(batch).groups if method == "step" else ()
        weights = splitter.weights(batch)
        host = self._running.host
        if host.sums is None and host.grid.inputs == "all":
            return splitter.weighting(weights, groups)
        numbers = weights_in_numbers(weights)  # other processes need them
        every = None if host.sums is None else self._weights_of_replicas(numbers)
        return splitter.weighting(numbers, groups, every)

    def _weights_of_replicas(self, weights: Sequence[float]) -> list[Sequence[float]]:
        """Return, for each replica, the loss weights of its micro-batches; one list if all replicas share one batch."""
        host = self._running.host
        if host.grid.replicas_per_batch > 1:
            return [weights]
        every = host.collectives.gather_over_replicas(weights)
        sizes = [len(own) for own in every]
        if len(set(sizes)) > 1:
            raise InputError(
                f"all replicas must have the same number of micro-batches; the replicas have {sizes} micro-batches; "
                f"pass at least {max(sizes)} rows in each replica"
            )
        return every

    def _programs(self, batch: Batch) -> StepPrograms:
        """Return the programs of a replica's part of a batch that this process has split."""
        return self._running.assembly.programs.of(len(batch.rows) // self._running.host.grid.replicas_per_batch)

    def _with_paths(self, call: StepCall) -> StepCall:
        """Return the call with the path of each micro-batch through the model's code."""
        running = self._running
        # with inputs="first", the batch holds the micro-batches of all replicas
        replica = 0 if running.host.grid.replicas_per_batch > 1 else running.host.grid.replica
        first = Key(running.seed, running.step, replica * len(call.batch.rows))
        found = running.assembly.layered.find_paths(call.batch.inputs, first, running.assembly.cut)
        is_plain = not (found.paths or found.forgotten)
        return call if is_plain else replace(call, batch=replace(call.batch, paths=found))
