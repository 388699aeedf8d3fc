"""Step runner: runs steps, evaluations and forwards under the running plan."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from pipesched.errors import InputError
from pipesched.model.agreement import modes_of_model
from pipesched.model.stale_weights import StaleGuard
from pipesched.pipeline.assembly_parts import AssemblyParts
from pipesched.pipeline.autograd_bridge import OpenPass, attach, check_derivatives, deliver_input_grads
from pipesched.pipeline.call_builder import CallBuilder
from pipesched.pipeline.idle_optimizer import IdleOptimizer
from pipesched.pipeline.memory_forecast import MemoryForecast
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.step_loss import explain_backward, without_attributes
from pipesched.pipeline.uneven_orders import UnevenOrders
from pipesched.program.lowering import halves
from pipesched.program.program import Program
from pipesched.program.weight_versions import Uses
from pipesched.runtime.async_steps import Stream
from pipesched.runtime.executors.threads import RunSpec, Timeline
from pipesched.runtime.gradients.nonfinite_reaction import NonfiniteReaction
from pipesched.runtime.microbatches import GivenBatch
from pipesched.runtime.stage.kept_buffers import KeptBuffers
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.runtime.stage.run_parts import RunParts
from pipesched.runtime.stage.run_stages import RunStages
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.step_call import StepCall, bring_ends
from pipesched.runtime.step_metrics import RunResults, StepMetrics

__all__ = ["StepRunner"]

_NO_UPDATES: Mapping[int, Uses] = {}


class StepRunner:
    """Runs batches through the stages.

    A call is split into micro-batches and exchanged between processes (`CallBuilder`). Its program then begins, runs
    and ends, together with the parts that the assembly needs (`AssemblyParts`).

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
        self._has_loss_fn = has_loss_fn
        self._calls = CallBuilder(running, self._model, num_inputs, has_loss_fn=has_loss_fn)
        #: The collectives over which the ranks have compared the modes of their modules.
        self._agreed: Any = None
        self._guard = guard
        self._memory = memory
        self._orders = orders
        #: Watches the user's optimizers after the first step; None if the pipeline has its own.
        self._optimizers = None if running.updates else IdleOptimizer()
        self._buffers = KeptBuffers(list(roots.values()))
        self._reaction = NonfiniteReaction()
        self._intra_op_threads = intra_op_threads
        self._made_parts: AssemblyParts | None = None
        #: The named scalars of the last step or evaluation. ``metrics.last`` returns them as a dict.
        self.metrics = StepMetrics()

    def step(self, given: GivenBatch, metrics: Metrics | None = None, **wanted: bool) -> Any:
        """Run a step, and return the result of ``Pipeline.step``. ``wanted`` has the keys return_outputs and gather."""
        running = self._running
        self._check("step", changes=True)
        call = self._calls.call("step", given, metrics, **wanted)
        if self._memory.checks_rows:
            self._memory.check_rows(call.batch.rows)
        running.rows = call.batch.rows
        if running.assembly.programs.streams:
            return self._enqueue(call, metrics)
        programs = self._orders.of(call.batch)
        step_data = self._step_data(call, metrics)
        parts = self._parts.step
        running.runs.append(self._run(programs.training, call, step_data, parts, programs.uses))
        running.last_programs = programs
        running.step += 1
        if not running.host.grid.in_one_process:
            bring_ends(programs.plain, step_data, running.host.collectives)
        for finish in parts.finish:
            finish(step_data)
        if step_data.input_grads:
            deliver_input_grads(call.batch, step_data)
        if self._optimizers is not None and self._optimizers.waits:
            self._optimizers.watch(running.assembly.held_parameters())
        return self._result(call, step_data)

    def gradients(self, given: GivenBatch) -> Tensor:
        """Run the forwards and backwards of a step without an update, for `Pipeline.check`. Returns the loss.

        Gradients are added to ``.grad``. The number of steps, the metrics and the measured steps stay as they are.
        """
        running = self._running
        self._check("check", changes=False)
        call = self._calls.call("check", given)
        programs = running.assembly.programs.of(len(call.batch.rows))
        step_data = self._step_data(call)
        self._run(programs.gradients, call, step_data, self._parts.check)
        if not running.host.grid.in_one_process:
            bring_ends(programs.plain, step_data, running.host.collectives)
        metrics, self.metrics = self.metrics, StepMetrics()
        try:
            loss: Tensor = self._result(call, step_data)
        finally:
            self.metrics = metrics
        return loss

    def evaluate(self, given: GivenBatch, metrics: Metrics | None = None, **wanted: bool) -> Any:
        """Run the forward of every micro-batch, and return the result of ``Pipeline.evaluate``."""
        self._running.flush()
        self._check("evaluate", changes=self._model.training)
        call = self._calls.call("evaluate", given, metrics, **wanted)
        return self._result(call, self._infer(call, metrics))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, gather: bool) -> Any:
        """Run the forward of every micro-batch, and return the output.

        In training mode with gradients enabled, the output can be differentiated.
        """
        check_derivatives((args, kwargs))
        self._running.flush()
        self._check("forward", changes=self._model.training)
        call = self._calls.call("forward", GivenBatch(args, kwargs), return_outputs=True, gather=gather)
        # Over a mesh, rank 0 has raised an error if it wants an output that can be differentiated.
        if self._calls.differentiates and self._running.host.grid.in_one_process:
            return self._differentiable(call)
        return self._outputs(call, self._infer(call))

    def _differentiable(self, call: StepCall) -> Any:
        """Run the forward passes, and return the output. Differentiating the output runs the backward passes."""
        assembly = self._running.assembly
        host = self._running.host
        program = assembly.programs.of(len(call.batch.rows)).open_pass
        forwards, backwards = halves(program)
        step_data = call.step_data(self._running.seed, self._running.step)
        step_data.outside_loss = True
        stages = {index: stage.fresh() for index, stage in assembly.stages.items()}
        own = RunStages(program=program, stages=stages, step_data=step_data, copies=assembly.copies)
        caller = host.executor.caller(grad=True)  # torch hides some of these settings from code that runs in a backward
        own.parts = self._parts.forward
        forward_spec = RunSpec(program, stages, prepare=own.begin, orders=forwards)
        own.completed(partial(host.executor.run, forward_spec, grad=True, caller=caller))
        self._running.step += 1
        backward_spec = RunSpec(program, stages, orders=backwards, finish=own.end)
        parts = self._parts.backward

        def run_backwards() -> None:
            own.parts = parts
            own.completed(partial(host.executor.run, backward_spec, grad=True, caller=caller))

        opened = OpenPass(call.batch, step_data, run_backwards, self._model.parameters, call.weighting)
        return attach(opened, self._running.splitter.joins)

    def abandon(self) -> None:
        """Discard the steps of an asynchronous schedule that are under way."""
        if self._running.stream is not None:
            self._running.stream.abandon()

    def _check(self, method: str, *, changes: bool) -> None:
        """Check that a method may run. ``changes`` states whether it changes weights or buffers."""
        assembly = self._running.assembly
        collectives = self._running.host.collectives
        if self._agreed is not collectives:
            modes = partial(modes_of_model, self._model, whole=assembly.wrapped)
            collectives.agree_on(modes, "call train() or eval() on every rank")
            self._agreed = collectives
        assembly.members.check()
        if self._optimizers is not None and self._optimizers.ran:
            self._optimizers.check(assembly.held_parameters())
        self._guard.check(changes=changes)

    @property
    def _parts(self) -> AssemblyParts:
        """What the runs of the present assembly need besides their programs."""
        running = self._running
        if self._made_parts is None or self._made_parts.assembly is not running.assembly:
            self._made_parts = AssemblyParts.of(
                running.assembly, running.host, self._buffers, self._reaction, self._intra_op_threads
            )
        return self._made_parts

    def _step_data(self, call: StepCall, metrics: Metrics | None = None) -> StepData:
        running = self._running
        return call.step_data(running.seed, running.step, metrics, replica=running.host.grid.replica)

    def _run(
        self,
        program: Program,
        call: StepCall,
        step_data: StepData,
        parts: RunParts,
        uses: Mapping[int, Uses] = _NO_UPDATES,
        *,
        grad: bool = True,
    ) -> Timeline:
        """Run a lowered program over the stages, with what it needs besides.

        ``uses`` maps each stage to the weight versions that the stage uses.
        """
        assembly = self._running.assembly
        own = RunStages(
            program=program, stages=assembly.stages, step_data=step_data, uses=uses, copies=assembly.copies, parts=parts
        )
        run_spec = RunSpec(program, assembly.actors, prepare=own.begin, finish=own.end)
        return own.completed(partial(self._running.host.run, run_spec, call.batch, grad=grad))

    def _infer(self, call: StepCall, metrics: Metrics | None = None) -> StepData:
        running = self._running
        programs = running.assembly.programs.of(len(call.batch.rows))
        step_data = self._step_data(call, metrics)
        self._run(programs.inference, call, step_data, self._parts.forward, grad=False)
        bring_ends(programs.plain, step_data, running.host.collectives)
        return step_data

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

    def _result(self, call: StepCall, step_data: StepData) -> Any:
        last = self._running.assembly.programs.of(len(call.batch.rows)).plain.output_rank
        host = self._running.host
        if step_data.added or step_data.metrics or not host.grid.in_one_process:
            run = RunResults(
                rank=last,
                loss=partial(call.loss, step_data),
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
        joins = self._running.splitter.joins
        outputs = partial(call.outputs, step_data, joins, own_loss=not self._has_loss_fn)
        if not call.gather:
            return outputs()
        last = self._running.assembly.programs.of(len(call.batch.rows)).plain.output_rank
        return self._running.host.collectives.from_rank(last, outputs)
