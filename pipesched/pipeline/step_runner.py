"""Step runner: runs steps, evaluations and forwards under the running plan."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipesched.capture.label_counts import labels_in
from pipesched.errors import InputError
from pipesched.model.agreement import Facts, modes_of_model
from pipesched.model.stale_weights import StaleGuard
from pipesched.pipeline.autograd_bridge import OpenPass, attach, check_derivatives, deliver_input_grads
from pipesched.pipeline.idle_optimizer import IdleOptimizer
from pipesched.pipeline.memory_forecast import MemoryForecast
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.step_loss import explain_backward, without_attributes
from pipesched.pipeline.uneven_orders import UnevenOrders
from pipesched.program.actions import Kind
from pipesched.program.lowering import halves
from pipesched.program.program import Program
from pipesched.program.weight_versions import Uses
from pipesched.runtime.async_steps import Stream
from pipesched.runtime.executors.executor import Executor
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.gradients.nonfinite_reaction import NonfiniteReaction
from pipesched.runtime.gradients.nonfinite_watch import NonfiniteWatch
from pipesched.runtime.gradients.rules import GradientRules
from pipesched.runtime.microbatches import Batch, GivenBatch
from pipesched.runtime.stage.kept_buffers import KeptBuffers
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.step_call import StepCall, bring_ends, scatter_call
from pipesched.runtime.step_metrics import RunResults, StepMetrics
from pipesched.runtime.targets import check_given_targets, check_target
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.sampled_values import digest_of_values
from pipesched.tensors.tensor_table import LayerValues
from pipesched.units import counted

__all__ = ["StepRunner"]

_NO_UPDATES: Mapping[int, Uses] = {}
#: The number of first steps in which the tensors that layers make are recorded, and batches on GPUs are compared.
_READ_STEPS = 2


class StepRunner:
    """Runs batches through the stages.

    Args:
        running: the running plan.
        roots: name prefix -> the user's modules; the model comes first.
        num_inputs: the number of positional arguments in the sample.
        has_loss_fn: whether the pipeline has a loss function. A loss function needs a target.
        guard: the StaleGuard, which refuses calls that would use stale weights.
        memory: the MemoryForecast, which checks batches against the memory limits.
        orders: the UnevenOrders, which chooses the programs of a step.
        intra_op_threads: the number of CPU threads per rank.

    """

    def __init__(
        self,
        running: RunningPlan,
        *,
        roots: Mapping[str, nn.Module],
        num_inputs: int,
        has_loss_fn: bool,
        guard: StaleGuard,
        memory: MemoryForecast,
        orders: UnevenOrders,
        intra_op_threads: int,
    ) -> None:
        self._running = running
        self._model = next(iter(roots.values()))
        self._num_inputs = num_inputs
        self._has_loss_fn = has_loss_fn
        self._agrees = False
        self._guard = guard
        self._buffers = KeptBuffers(list(roots.values()))
        self._memory = memory
        self._orders = orders
        #: Watches the user's optimizers after the first step; None if the pipeline has its own.
        self._optimizers = None if running.updates else IdleOptimizer()
        self._intra_op_threads = intra_op_threads
        self._nonfinite = NonfiniteReaction()
        #: A function that returns the loss weights of all replicas; None if there is only one replica.
        self._gather_weights = None if running.host.sums is None else self._weights_of_replicas
        #: The named scalars of the last step or evaluation. ``metrics.last`` returns them as a dict.
        self.metrics = StepMetrics()

    def step(self, given: GivenBatch, metrics: Metrics | None = None, **wanted: bool) -> Any:
        """Run a step, and return the result of ``Pipeline.step``. ``wanted`` has the keys return_outputs and gather."""
        running = self._running

        def make() -> StepCall:
            if not torch.is_grad_enabled():
                raise InputError(
                    "step() must run with gradients enabled; it was called under no_grad; call it outside no_grad, or "
                    "call evaluate() instead"
                )
            batch = self._batch("step", given)
            groups = running.assembly.programs.of(len(batch.rows) // running.host.grid.replicas_per_batch).groups
            weighting = running.splitter.weighting(batch, groups, self._gather_weights)
            return StepCall("step", batch if metrics is None else self._measurable(batch), weighting, **wanted)

        call = self._called("step", given, make)
        if running.step == 0 or self._memory.limits is not None:
            self._memory.check_rows(call.batch.rows)
        assembly = running.assembly
        if assembly.programs.streams:
            return self._enqueue(call, metrics)
        programs = self._orders.of(call.batch)
        step_data = call.step_data(running.seed, running.step, metrics, replica=running.host.grid.replica)
        if assembly.reads_losses and running.step < _READ_STEPS:
            step_data.layer_values = LayerValues()
        rules = assembly.rules
        if rules is not None:
            step_data.loss_scale = rules.loss_scale(running.host.grid.devices[programs.plain.output_rank])
            if rules.on_nonfinite is not None:
                first = running.host.grid.replica * len(call.batch.rows)
                step_data.watch = NonfiniteWatch(assembly.layer_names, first)
        run_spec = self._run_spec(programs.training, step_data, assembly.stages, programs.uses)
        has_replicas = running.host.sums is not None
        if has_replicas:
            assembly.begin_reductions()
        buffers = nullcontext() if self._buffers.idle else self._buffers.unless_it_succeeds()
        with buffers, assembly.delivering(), assembly.norms.counting():
            running.runs.append(running.host.run(run_spec, call.batch, grad=True))
        running.last_programs = programs
        if has_replicas:
            assembly.reduce_late()
        if assembly.updates_late:
            assembly.update_late(self._intra_op_threads, step_data.losses.values())
        running.step += 1
        if not running.host.grid.in_one_process:
            bring_ends(programs.plain, step_data, running.host.collectives)
        if rules is not None:
            self._finish(rules, step_data)
        if step_data.input_grads:
            deliver_input_grads(call.batch, step_data)
        if self._optimizers is not None and self._optimizers.waits:
            self._optimizers.watch(assembly.held_parameters())
        return self._result(call, step_data)

    def gradients(self, given: GivenBatch) -> Tensor:
        """Run the forwards and backwards of a step without an update, for `Pipeline.check`. Returns the loss.

        Gradients are added to ``.grad``. The number of steps, the metrics and the measured steps stay as they are.
        """
        running = self._running

        def make() -> StepCall:
            batch = self._batch("check", given)
            weighting = running.splitter.weighting(batch, gather_over_replicas=self._gather_weights)
            return StepCall("check", batch, weighting)

        call = self._called("check", given, make)
        assembly = running.assembly
        step_data = call.step_data(running.seed, running.step, replica=running.host.grid.replica)
        if assembly.reads_losses:
            step_data.layer_values = LayerValues()
        programs = assembly.programs.of(len(call.batch.rows))
        run_spec = self._run_spec(programs.gradients, step_data, assembly.stages)
        if running.host.sums is not None:
            assembly.begin_reductions()
        with assembly.delivering(), assembly.norms.counting():
            running.host.run(run_spec, call.batch, grad=True)
        if running.host.sums is not None:
            assembly.reduce_late()
        if not running.host.grid.in_one_process:
            bring_ends(programs.plain, step_data, running.host.collectives)
        metrics, self.metrics = self.metrics, StepMetrics()
        try:
            loss: Tensor = self._result(call, step_data)
        finally:
            self.metrics = metrics
        return loss

    def _finish(self, rules: GradientRules, step_data: StepData) -> None:
        """End a step that has gradient rules: adapt the loss scale, and react to infinite or NaN values."""
        assembly = self._running.assembly
        verdict = assembly.verdict
        rules.finish(verdict)
        if rules.scale is not None and not self._running.updates:
            assembly.share_overflow(self._intra_op_threads)
        if step_data.watch is None:
            return
        if verdict is None:
            verdict = assembly.decide(self._intra_op_threads, step_data.losses.values())
        ranks = self._running.host.collectives

        def gathered(value: Any) -> list[Any]:
            return [one for replica in ranks.gather_over_replicas(ranks.gathered(value)) for one in replica]

        self._nonfinite.react(step_data.step, verdict, step_data.watch, rules, gathered)

    def evaluate(self, given: GivenBatch, metrics: Metrics | None = None, **wanted: bool) -> Any:
        """Run the forward of every micro-batch, and return the result of ``Pipeline.evaluate``."""

        def make() -> StepCall:
            batch = self._batch("evaluate", given)
            weighting = running.splitter.weighting(batch, gather_over_replicas=self._gather_weights)
            return StepCall("evaluate", batch if metrics is None else self._measurable(batch), weighting, **wanted)

        running = self._running
        running.flush()
        call = self._called("evaluate", given, make)
        return self._result(call, self._infer(call, metrics))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, gather: bool) -> Any:
        """Run the forward of every micro-batch, and return the output.

        In training mode with gradients enabled, the output can be differentiated.
        """
        running = self._running
        host = running.host
        differentiated = torch.is_grad_enabled() and self._model.training
        check_derivatives((args, kwargs))

        def make() -> StepCall:
            if differentiated and not host.grid.in_one_process:
                raise InputError(
                    "a forward with gradients may only run in one process; this pipeline runs over a mesh; use step(), "
                    "call forward() under no_grad, or make the pipeline with devices= instead of mesh="
                )
            batch = running.splitter.batch(args, kwargs, num_replicas=host.grid.replicas_per_batch)
            if self._gather_weights is not None:
                self._gather_weights([1] * len(batch.rows))
            weighting = None if self._has_loss_fn else running.splitter.weighting_of_outputs(batch)
            return StepCall("forward", batch, weighting, return_outputs=True, gather=gather)

        running.flush()
        call = self._called("forward", GivenBatch(args, kwargs), make)
        # Under a mesh, make() has already raised an error if rank 0 wants an output that can be differentiated.
        if not differentiated or not host.grid.in_one_process:
            return self._outputs(call, self._infer(call))
        return self._differentiable(call, host.executor)

    def _differentiable(self, call: StepCall, executor: Executor) -> Any:
        """Run the forward passes, and return the output. Differentiating the output runs the backward passes."""
        assembly = self._running.assembly
        program = assembly.programs.of(len(call.batch.rows)).open_pass
        forwards, backwards = halves(program)
        step_data = call.step_data(self._running.seed, self._running.step)
        step_data.outside_loss = True
        stages = {index: stage.fresh() for index, stage in assembly.stages.items()}
        run_spec = self._run_spec(program, step_data, stages)
        caller = executor.caller(grad=True)  # torch hides some of these settings from code that runs in a backward
        with assembly.norms.counting():
            forward_spec = RunSpec(program, stages, prepare=run_spec.prepare, orders=forwards)
            executor.run(forward_spec, grad=True, caller=caller)
        self._running.step += 1
        backward_spec = RunSpec(program, stages, orders=backwards, finish=run_spec.finish)

        def run_backwards() -> None:
            with assembly.delivering():
                executor.run(backward_spec, grad=True, caller=caller)

        opened = OpenPass(call.batch, step_data, run_backwards, self._model.parameters, call.weighting)
        return attach(opened, self._running.splitter.joins)

    def abandon(self) -> None:
        """Discard the steps of an asynchronous schedule that are under way."""
        if self._running.stream is not None:
            self._running.stream.abandon()

    def _called(self, method: str, given: GivenBatch, make: Callable[[], StepCall]) -> StepCall:
        """Check that the method may run, and return the StepCall of this process.

        If the caller passed no inputs in this process, the inputs come from rank 0.
        """
        assembly = self._running.assembly
        grid, ranks = self._running.host.grid, self._running.host.collectives
        if not self._agrees:
            ranks.agree_on(self._modes, "call train() or eval() on every rank")
            self._agrees = True
        assembly.members.check()
        if self._optimizers is not None and self._optimizers.ran:
            self._optimizers.check(assembly.held_parameters())
        self._guard.check(changes=method == "step" or (method != "check" and self._model.training))

        def scatter(call: StepCall) -> tuple[StepCall, list[Any]]:
            size = len(call.batch.rows) // grid.replicas_per_batch
            return scatter_call(call, assembly.programs.of(size).plain, assembly.bodies, grid.rows)

        if not assembly.layered.may_branch:
            return self._with_values(ranks.agreed_call(method, given.is_given, make, scatter), given)
        call = ranks.agreed_call(method, given.is_given, lambda: self._with_paths(make()), scatter)
        call = self._with_values(call, given)
        if not given.is_given:
            assembly.layered.learn_paths(call.batch.paths)
        return call

    def _with_values(self, call: StepCall, given: GivenBatch) -> StepCall:
        """Return the call with a digest of the batch, if all ranks must pass the same batch."""
        if not self._running.host.grid.compares_batches:
            return call
        values = digest_of_values(given, devices=self._running.step < _READ_STEPS)
        return replace(call, batch=replace(call.batch, values=values))

    def _with_paths(self, call: StepCall) -> StepCall:
        """Return the call with the path of each micro-batch through the model's code."""
        running = self._running
        # with inputs="first", the batch holds the micro-batches of all replicas
        replica = 0 if running.host.grid.replicas_per_batch > 1 else running.host.grid.replica
        first = Key(running.seed, running.step, replica * len(call.batch.rows))
        found = running.assembly.layered.find_paths(call.batch.inputs, first, running.assembly.cut)
        is_plain = not (found.paths or found.forgotten)
        return call if is_plain else replace(call, batch=replace(call.batch, paths=found))

    def _modes(self) -> Facts:
        return modes_of_model(self._model, whole=self._running.assembly.wrapped)

    def _batch(self, method: str, given: GivenBatch) -> Batch:
        args, kwargs, target, microbatches = given
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
        num_replicas = self._running.host.grid.replicas_per_batch
        return self._running.splitter.batch(args, kwargs, target, num_replicas=num_replicas)

    def _measurable(self, batch: Batch) -> Batch:
        """Return a batch whose targets ``metrics`` gets: without a loss_fn, the labels among the model's inputs."""
        if self._has_loss_fn:
            return batch
        labels = [labels_in(self._model, *inputs) for inputs in batch.inputs]
        return batch if labels[0] is None else replace(batch, targets=labels)

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

    def _batch_as_given(self, method: str, given: GivenBatch) -> Batch:
        args, kwargs, target, microbatches = given
        if args or kwargs or target is not None:
            raise InputError(
                f"{method}() takes either a batch or microbatches=; both were passed; pass the inputs and the target "
                f"of each micro-batch to Microbatch(...)"
            )
        host = self._running.host
        batch = self._running.splitter.as_given(microbatches, num_replicas=host.grid.replicas_per_batch)
        check_given_targets(batch, has_loss_fn=self._has_loss_fn)
        return batch

    def _enqueue(self, call: StepCall, metrics: Metrics | None) -> Tensor:
        """Start a step of an asynchronous schedule. Returns the loss of the previous step, as ``Stream.step`` does."""
        wants_input_grads = any(call.batch.wanted_inputs())
        for name, wanted, reason, remedy in (
            ("outputs", call.return_outputs, "return_outputs is True", "call evaluate() or forward() for outputs"),
            ("gradients of inputs", wants_input_grads, "an input requires gradients", "detach the input"),
        ):
            if wanted:
                raise InputError(
                    f"a step of an asynchronous schedule cannot provide {name}, because the step returns before they "
                    f"are computed; in this call, {reason}; {remedy}, or use a synchronous schedule"
                )
        running = self._running
        executor = running.host.executor
        executor.check_outside("step")
        caller = executor.caller(grad=True)
        segments = running.assembly.programs.of(len(call.batch.rows)).segments
        stream = running.stream
        if stream is not None and (stream.caller, stream.segments) != (caller, segments):
            running.flush()
        if stream is None or not stream.open:
            step_data = StepData(running.seed, running.step, [], values=call.batch.values)
            stages = running.assembly.stages
            kind = call.method, self._model.training
            stream = Stream(running.host, segments, stages, step_data, caller, running.runs.append, self.metrics, kind)
            running.stream = stream
        running.step += 1
        loss = stream.step(call.batch, call.counting, metrics)
        vars(loss).update(backward=partial(explain_backward, ref(loss)), __getstate__=without_attributes)
        return loss

    def _run_spec(
        self, program: Program, step_data: StepData, stages: dict[int, Stage], uses: Mapping[int, Uses] = _NO_UPDATES
    ) -> RunSpec:
        """Return a RunSpec that runs a lowered program over these stages.

        ``uses`` maps each stage to the weight versions that the stage uses.
        """
        copies = self._running.assembly.copies

        def begin(caller: Caller) -> None:
            if caller.autocasts:
                step_data.autocast = caller.autocast
            for holder in copies:
                holder.refresh()
            for index, stage in stages.items():
                stage.begin(step_data, uses.get(index))
                divided = stage.sharded is not None or stage.divided_weights is not None
                if divided and not step_data.outside_loss and index not in uses:
                    stage.gather(_last_backward(program, index))

        def end(failed: bool) -> None:
            for stage in stages.values():
                stage.end(failed)

        return RunSpec(program, stages, prepare=begin, finish=end)

    def _infer(self, call: StepCall, metrics: Metrics | None = None) -> StepData:
        running = self._running
        programs = running.assembly.programs.of(len(call.batch.rows))
        step_data = call.step_data(running.seed, running.step, metrics, replica=running.host.grid.replica)
        with running.assembly.norms.counting():
            run_spec = self._run_spec(programs.inference, step_data, running.assembly.stages)
            running.host.run(run_spec, call.batch, grad=False)
        bring_ends(programs.plain, step_data, running.host.collectives)
        return step_data

    def _result(self, call: StepCall, step_data: StepData) -> Any:
        last = self._running.assembly.programs.of(len(call.batch.rows)).plain.output_rank
        host = self._running.host
        if step_data.added or step_data.metrics or not host.grid.in_one_process:
            run = RunResults(
                rank=last,
                loss=lambda: call.loss(step_data),
                step_data=step_data,
                microbatches=range(len(call.batch.rows)),
                weighting=call.counting,
                kind=(call.method, self._model.training),
                measures=bool(step_data.metrics),
            )
            loss = self.metrics.finish(host, run)
        else:
            loss = call.loss(step_data)
            self.metrics.read = dict
        if call.method == "step":
            vars(loss).update(backward=partial(explain_backward, ref(loss)), __getstate__=without_attributes)
        return (loss, self._outputs(call, step_data)) if call.return_outputs else loss

    def _outputs(self, call: StepCall, step_data: StepData) -> Any:
        own_loss = not self._has_loss_fn
        if not call.gather:
            return call.outputs(step_data, self._running.splitter.joins, own_loss=own_loss)
        last = self._running.assembly.programs.of(len(call.batch.rows)).plain.output_rank
        return self._running.host.collectives.from_rank(
            last, lambda: call.outputs(step_data, self._running.splitter.joins, own_loss=own_loss)
        )


def _last_backward(program: Program, stage: int) -> int | None:
    """Return the micro-batch of a stage's last B or W action; None if there is no such action."""
    order = program.orders[program.placement[stage]]
    backwards = (one for one in reversed(order) if one.stage == stage and one.kind in (Kind.B, Kind.W))
    return next((one.microbatch for one in backwards), None)
