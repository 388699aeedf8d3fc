"""Pipeline: the front door. Wraps a model and trains it through a schedule."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipesched.capture.layered_model import as_model, layered, stages_of
from pipesched.capture.loss_reduction import LossReduction, resolve_loss
from pipesched.capture.stage_module import Wrap
from pipesched.errors import InputError
from pipesched.model.initialization import Init, Initial, built, check_model
from pipesched.pipeline.assembly import Assembly, AssemblySpec
from pipesched.pipeline.auto_plan import Automatic, adds_up
from pipesched.pipeline.autograd_bridge import OpenPass, attach, deliver_input_grads
from pipesched.pipeline.gathering import Gathered
from pipesched.pipeline.sample_form import CallForm, explained
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.search_request import Offload, limits_of
from pipesched.planning.stage_cutter import Boundaries, Pins
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint
from pipesched.program.lowering import halves
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.runtime.async_steps import Stream
from pipesched.runtime.coordination.rendezvous import collective
from pipesched.runtime.executors.threads import ThreadExecutor, Timeline
from pipesched.runtime.microbatches import Batch, SplitDims, Splitter
from pipesched.runtime.rank_host import Inputs, MeshRanks, ThreadRanks, host_for
from pipesched.runtime.stage.batch_norm import BatchNormMode
from pipesched.runtime.stage.compiled_layers import compiler
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.step_call import StepCall, bring_ends, dealt, end_of
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.links import Links
from pipesched.simulation.profile import Profile
from pipesched.torch_checks import as_call, as_function, as_optimizer, as_seed, as_threads

__all__ = ["Pipeline"]

_LOSS, _WRAP = ("output", "target"), ("stage_module", "stage")  # what is called with what
_REMEMBERED = 6  # steps whose times serve the next prediction


class Pipeline(Gathered):
    """A model cut into stages that train together.

    model: any module; each stage runs the model's own forward with the calls of other stages left out, an nn.Sequential
    its layers. Or a list of modules, each of which takes what the one before gives: a stage each, where there are as
    many. Its Parameters stay its own and are moved to the devices in place. A model without contents (built under
    ``torch.device("meta")``, or a function that builds one, whose buffers then have theirs) is cut first; then each
    rank fills its own stages. init: from what: "reset", each module's ``reset_parameters``, is the default;
    init_fn(module) is called after that, both keyed by seed and name, whatever the plan; a mapping, such as a
    state_dict; or safetensors files, an index of them, or their folder, cast to the model's types. sample: one
    micro-batch as an example: a tensor, a tuple (positional arguments) or a dict (keywords). loss_fn(output, target)
    -> scalar, a function or a Module; without one the model's own loss counts (a scalar output, or its ``loss``).
    devices: one a rank of this process; a device may repeat. mesh: instead, a one-dimensional DeviceMesh, with one rank
    a process, such as ``mesh["pp"]``: every process makes the pipeline with the same model and arguments, keeps its own
    stages, and calls the same methods with the same batch; with inputs="first" rank 0 alone passes one, and the others
    call ``step()``, ``evaluate()`` and ``forward()`` with nothing, and get what rank 0 asks for. Each rank then trains
    its own stages' weights in its model. ``gather_model()`` brings all weights into the model; until then calling,
    copying or saving the model raises ExecutionError, also after ``close``. timeout: how long a
    rank waits for another one there, 60 s unless given. schedule: a name, a Schedule or a Program, such as
    ``load_program(path)`` reads from a file; "chimera" and "dualpipe" hold the layers twice. "auto": the plan with the
    shortest predicted step, as `pipesched.tune` finds it from measured layers; it may use fewer devices, or one alone,
    which a warning says; what else is given is kept. memory_limit_bytes: what a rank may hold, also of the states of
    optimizer=, one number for all or one for each. batch_size: the rows of a step, where they are known: then the
    search may choose other micro-batches than the sample's size, if neither BatchNorm nor the loss looks across rows (a
    loss of torch.nn, a model's own over labels, or one with loss_weight).
    profile: what layers cost, a Profile or its path, in the place of measuring them.
    num_stages: as many as devices, times the schedule's chunks, unless given. num_microbatches: 4 a device, likewise.
    boundaries: the first layer of every stage but stage 0, by position or
    name; or of some layers the stage that each begins, {name: stage}; the rest is cut where measured layer times say.
    together: groups of layers that share a stage. whole_layers: names of modules that are one layer each, such as
    ["block.moe"], whose own code depends on the batch. links: between ranks, as `probe_links` finds them: then what
    crosses between stages counts. checkpoint: of whole stages "never", "always" or "except_last", or by
    layer {name: "recompute", "recompute-cheap" or "offload"}; "never" unless given, or what a limit of memory asks for.
    offload: whether such a limit may take to the host what layers save; "auto": not on CPUs, where it gives no memory
    back.
    loss_weight(target, or the inputs without one) -> what a micro-batch counts; default: what a mean loss of torch.nn
    divides by (rows, or targets that are not ignore_index, by their classes' weight), the labels over which a model
    with ``labels`` takes its own mean loss, else rows. loss_reduction: how loss_fn reduces; default: as a loss of
    torch.nn says, else "mean"; of functions of your own pass "sum" for a sum.
    split_dims: the dim along which arguments are split, one for all or one for each; None passes an argument whole.
    batch_norm: running statistics of BatchNorm move with each "micro-batch", or once a "mini-batch", as by one forward.
    intra_op_threads: of each rank, 1 unless given. seed: of all random numbers; the default generator's unless given.
    plan: a saved Plan, instead of all choices. wrap: (stage_module, stage) -> the module that the stage runs: itself,
    changed in place, as by ``fully_shard`` or by adapters in its layers, or one around it. compile: layers run through
    torch.compile; its arguments by name, or True.
    optimizer: params -> torch.optim.Optimizer, called once for each stage with its parameters (a loss module's are the
    last stage's): each rank updates its stages at its own end of a step, and clears their gradients; asynchronous
    schedules, which update on their way, need one.

    Raises GraphError, PartitionError, ScheduleError (all also ValueError), DeviceCountError (also IndexError),
    ModelTypeError (also TypeError), InputError (also ValueError).
    """

    @collective
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module],
        sample: Any,
        *,
        devices: Sequence[Any] | None = None,
        mesh: DeviceMesh | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        num_stages: int | None = None,
        schedule: str | Schedule | Program = "auto",
        num_microbatches: int | None = None,
        boundaries: Boundaries | None = None,
        together: Sequence[Collection[str]] = (),
        whole_layers: Collection[str] = (),
        links: Links | None = None,
        checkpoint: Checkpoint | None = None,
        optimizer: Callable[[list[Any]], Optimizer] | None = None,
        loss_weight: Callable[..., Any] | None = None,
        loss_reduction: LossReduction | None = None,
        split_dims: SplitDims = 0,
        wrap: Wrap | None = None,
        compile: bool | Mapping[str, Any] = False,
        batch_norm: BatchNormMode = "micro-batch",
        intra_op_threads: int = 1,
        seed: int | None = None,
        inputs: Inputs = "all",
        timeout: float | None = None,
        plan: Plan | None = None,
        profile: Profile | str | PathLike[str] | None = None,
        batch_size: int | None = None,
        memory_limit_bytes: int | Sequence[int] | None = None,
        offload: Offload = "auto",
        init: Init | None = None,
    ) -> None:
        chain = as_model(model)
        check_model(chain)
        loss_fn, wrap = as_function(loss_fn, "loss_fn", _LOSS), as_function(wrap, "wrap", _WRAP)
        given, weight, optimizer = as_call(sample), as_function(loss_weight, "loss_weight"), as_optimizer(optimizer)
        self._threads = as_threads(intra_op_threads)
        own_seed = torch.initial_seed() if seed is None else as_seed(seed)
        self._host = host_for(devices, mesh, self._threads, timeout, inputs)
        self._seed = self._host.agreed(lambda: own_seed)
        module = built(chain, self._seed)
        self._layered = layered(module, given, whole_layers)
        initial = Initial(module, init, self._seed, loss_fn)
        self._layers = dict(self._layered.layers)
        super().__init__(module, loss_fn)
        self._profile: dict[str, LayerCosts] | None = None
        self._slow, self._kinds, self._overheads, self._planned_rows = {}, None, None, 0
        keeping = None if checkpoint is None else as_checkpoint(checkpoint, self._layers)
        wishes = PlanRequest(schedule, num_stages, num_microbatches, boundaries, keeping, together)
        weight, reduction = resolve_loss(
            module, given, loss_fn, weight, loss_reduction, split_dims, agreed=self._host.agreed
        )
        self._links, self._step, self._form = (
            links,
            0,
            CallForm.of(*given) if inputs == "all" or self._host.holds(0) else None,
        )
        automatic = Automatic(
            model,
            module,
            self._layered,
            sample,
            split_dims,
            self.devices,
            "threads" if mesh is None else "processes",
            batch_size,
            memory_limit_bytes,
            links,
            profile,
            self._threads,
            optimizer,
            free=adds_up(module, self.loss_fn, weight),
            offload=offload,
        )
        self._limits = limits_of(memory_limit_bytes, len(self.devices))
        asked = Pins(list(self._layers), boundaries, together)
        self._asked = asked if not asked.complete else Pins(asked.layers, None, together)
        if automatic.chooses(wishes, plan):
            plan, self._profile, self._overheads, self._planned_rows = self._host.agreed(
                lambda: automatic.plan(wishes, lambda: self._profiled(crowds=mesh is None))
            )
            wishes = PlanRequest()
        if plan is not None:
            wishes = wishes.pinned(plan, list(self._layers))
        pins = Pins(list(self._layers), wishes.boundaries, wishes.together)
        programs = ProgramFactory(wishes, len(self.devices), updates=optimizer is not None)
        programs.check_updates()
        self._host = self._host.use(programs.num_ranks, all_ranks=plan is None)
        self._splitter = Splitter(programs.num_microbatches, programs.fixed, split_dims, weight, reduction)
        program = programs.plain(programs.num_microbatches)
        programs.training(programs.num_microbatches)
        self._layered.check(program)
        if wishes.boundaries is None and (starts := stages_of(model, pins.layers, program.num_weights)):
            pins = Pins(pins.layers, starts, wishes.together)
        division = self._divided(pins, programs, plan)
        decided = division.cut, repr(pins), repr(programs.checkpoint), self._threads, repr(seed), batch_norm
        self._host.check(program, decided)
        if wrap is not None:
            self._profile = self._host.agreed(self._profiled)  # layers may be sharded from here on
        self._spec = AssemblySpec(
            module,
            self.loss_fn,
            self._layered,
            self._layers,
            initial,
            batch_norm,
            compiler(compile, batch_norm),
            wrap,
            optimizer,
        )
        self._assembly = Assembly(self._spec, self._host, programs, division)
        self._assembly.take_over()
        self._place()
        self._host.start()
        self._runs: deque[Timeline] = deque(maxlen=_REMEMBERED)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """What optimizer= made, by stage: to save states, and to drive learning rates.

        Flushes first. So must who keeps an optimizer, or a scheduler of it, before each change: an update of an
        asynchronous schedule that is under way takes the old learning rate or the new one.
        """
        self.flush()
        return self._assembly.optimizers

    # ---- running ----------------------------------------------------------------------------------------------

    @explained
    def step(
        self, *args: Any, target: Any = None, return_outputs: bool = False, gather: bool = False, **kwargs: Any
    ) -> Any:
        """Run every micro-batch forward and backward; gradients are added to ``.grad``, with optimizer= applied.

        args, kwargs: the model's inputs, a whole mini-batch. target: goes to loss_fn, split as the inputs are.
        Returns the loss of the mini-batch, a 0-d tensor, detached; with return_outputs also the outputs, in the
        mini-batch's order: under a mesh on the last stage's rank, with gather on all. Raises InputError for a batch
        that cannot be split (ArgumentError for one in another form than the sample's, with which the model does not
        run), MemoryLimitError for micro-batches of more rows than were planned for, with which a rank would need more
        than memory_limit_bytes, and what a layer raises, with a note that says in which stage, micro-batch and rank;
        the pipeline is usable afterwards (zero the gradients; with optimizer= they are cleared, and some stages may
        have been updated). Under a mesh the loss of another rank waits for its value once it is looked at, and a rank
        that fails ends the pipeline.

        Asynchronous schedules enqueue the step and return the loss of the one before, which has then run up to this
        one on all ranks (the first step waits for its own); under a mesh each process runs its part of the step. The
        loss is the mean over the step's rows, each with the weights that it met; an update's gradient is that of its
        own rows. A batch of another number of micro-batches flushes first. What a layer raises comes from this step,
        the next one or ``flush``; the steps under way are then lost, and each stage keeps the updates that it has made.
        """

        def make() -> StepCall:
            if not torch.is_grad_enabled():
                raise InputError(
                    "step computes gradients; it was called under no_grad; leave no_grad, or call evaluate"
                )
            batch = self._batch(args, kwargs, target)
            weighting = self._splitter.weighting(batch, self._assembly.programs.groups(len(batch)))
            return StepCall("step", batch, weighting, return_outputs=return_outputs, gather=gather)

        call = self._called("step", (args, kwargs, target), make)
        self._check_room(call.batch.rows)
        if self._assembly.programs.streams:
            return self._enqueue(call)
        feed = call.feed(self._seed, self._step)
        work = self._assembly.work(
            self._assembly.programs.training(len(call)), feed, uses=self._assembly.programs.uses(len(call))
        )
        with self._assembly.delivering(), self._assembly.norms.counting():
            self._runs.append(self._host.run(work, call.batch, grad=True))
        if self._assembly.updates_late:
            self._assembly.update_late(self._threads)
        self._step += 1
        bring_ends(self._assembly.programs.plain(len(call)), feed, self._host)
        if feed.input_grads:
            deliver_input_grads(call.batch, feed)
        return self._result(call, feed)

    def _called(self, method: str, given: tuple[Any, ...], make: Callable[[], StepCall]) -> StepCall:
        args, kwargs, target = given
        self._assembly.members.check()
        self._guard.check(changes=method == "step" or self.training)

        def deal(call: StepCall) -> tuple[StepCall, list[Any]]:
            return dealt(
                call, self._assembly.programs.plain(len(call)), self._assembly.bodies, len(self._host.all_devices)
            )

        return self._host.call(method, bool(args or kwargs) or target is not None, make, deal)

    def _enqueue(self, call: StepCall) -> torch.Tensor:
        wanted = any(call.batch.wanted_inputs())
        for what, asked in (("outputs", call.return_outputs), ("gradients of inputs", wanted)):
            if asked:
                raise InputError(
                    f"an asynchronous step returns before its own {what} are known; this one was asked for them; "
                    f"call evaluate or forward for outputs, detach inputs, or use a synchronous schedule"
                )
        executor = self._host.executor
        executor.check_outside("step")
        caller, segments = executor.caller(grad=True), self._assembly.programs.segments(len(call))
        if self._stream is not None and (self._stream.caller, self._stream.segments) != (caller, segments):
            self.flush()
        if self._stream is None or not self._stream.open:
            feed = StepData(self._seed, self._step, [])
            self._stream = Stream(self._host, segments, self._assembly.stages, feed, caller, self._runs.append)
        self._step += 1
        return self._stream.step(call.batch, call.counting)

    def flush(self) -> torch.Tensor | None:
        """Of an asynchronous schedule: run what is left of the steps under way, so that all their updates are made.

        Returns the last step's loss; None where nothing is under way, as always with synchronous schedules. The next
        step starts anew, with the weights as they are then. Raises as ``step``. ``evaluate``, ``forward``, ``close``,
        and what reads or changes parameters, states and modes through the pipeline, flush by themselves; flush before
        you touch the model itself, an optimizer or a learning rate scheduler.
        """
        return self._stream.flush() if self._stream is not None and self._stream.open else None

    @explained
    def evaluate(
        self, *args: Any, target: Any = None, return_outputs: bool = False, gather: bool = False, **kwargs: Any
    ) -> Any:
        """As ``step``, without gradients: forwards alone, in the modules' present mode."""

        def make() -> StepCall:
            batch = self._batch(args, kwargs, target)
            weighting = self._splitter.weighting(batch)
            return StepCall("evaluate", batch, weighting, return_outputs=return_outputs, gather=gather)

        self.flush()
        call = self._called("evaluate", (args, kwargs, target), make)
        return self._result(call, self._infer(call))

    def _infer(self, call: StepCall) -> StepData:
        feed = call.feed(self._seed, self._step)
        with self._assembly.norms.counting():
            self._host.run(
                self._assembly.work(self._assembly.programs.inference(len(call)), feed), call.batch, grad=False
            )
        bring_ends(self._assembly.programs.plain(len(call)), feed, self._host)
        return feed

    def _result(self, call: StepCall, feed: StepData) -> Any:
        last = end_of(self._assembly.programs.plain(len(call)))
        loss = self._host.loss(last, lambda: call.loss(feed))
        return (loss, self._outputs(call, feed)) if call.return_outputs else loss

    def _outputs(self, call: StepCall, feed: StepData) -> Any:
        own_loss = self.loss_fn is None
        if not call.gather:
            return call.outputs(feed, own_loss=own_loss)
        last = end_of(self._assembly.programs.plain(len(call)))
        return self._host.from_rank(last, lambda: call.outputs(feed, own_loss=own_loss))

    def _local(self, what: str) -> ThreadExecutor:
        if not isinstance(self._host, ThreadRanks):
            raise InputError(
                f"{what} runs in one process, so far; this pipeline runs over a mesh; use step, or devices="
            )
        return self._host.executor

    @explained
    def forward(self, *args: Any, gather: bool = False, **kwargs: Any) -> Any:
        """The model's output for a mini-batch, on the last stage's device.

        Under a mesh the last stage's rank has it, and the others None; with gather all have it.

        With gradients enabled the output can be differentiated: ``criterion(pipe(x), y).backward()`` runs the
        backwards in GPipe's order, once, and adds the gradients of parameters to ``.grad`` (torch.autograd.grad yields
        those of inputs only). It updates nothing, also with optimizer=: step the ``optimizers``. Under no_grad, and in
        eval mode, only forwards run.
        """
        what = "a forward that can be differentiated (under no_grad none can)"
        differentiated = torch.is_grad_enabled() and self.training

        def make() -> StepCall:
            if differentiated:
                self._local(what)
            batch = self._splitter.batch(args, kwargs)
            weighting = self._splitter.weighting_of_outputs(batch) if self.loss_fn is None else None
            return StepCall("forward", batch, weighting, return_outputs=True, gather=gather)

        self.flush()
        call = self._called("forward", (args, kwargs, None), make)
        if not differentiated or isinstance(self._host, MeshRanks):  # there rank 0's settings decide, in make
            return self._outputs(call, self._infer(call))
        executor = self._local(what)
        feed = call.feed(self._seed, self._step)
        program = self._assembly.programs.open_pass(len(call))
        there, back = halves(program)
        stages = {index: stage.fresh() for index, stage in self._assembly.stages.items()}
        work = self._assembly.work(program, feed, stages)
        with self._assembly.norms.counting():
            executor.run(replace(work, orders=there, finish=_nothing), grad=True)
        self._step += 1
        back_work = replace(work, prepare=_nothing, orders=back)

        def run_backwards() -> None:
            with self._assembly.delivering():
                executor.run(back_work, grad=True)

        return attach(OpenPass(call.batch, feed, run_backwards, call.weighting))

    __call__ = forward

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Batch:
        if self.loss_fn is not None and target is None:
            raise InputError("loss_fn(output, target) needs a target; got none; pass target=, or call forward")
        if self.loss_fn is None and target is not None:
            raise InputError("a target goes to loss_fn; there is none; pass loss_fn= to Pipeline, or no target")
        return self._splitter.batch(args, kwargs, target)

    # ---- its life ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and end the ranks' threads. Dropping the pipeline does not flush.

        The model stays as it is: over a mesh without the weights that other ranks have trained, see ``gather_model``.
        """
        try:
            self.flush()
        finally:
            self._host.close()

    def _settle(self) -> None:
        self.flush()

    def _modules(self) -> dict[str, nn.Module]:
        self.flush()  # while stages run on older weights, their modules hold those
        return super()._modules()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pipeline has threads and is neither copied nor pickled; save state_dict() and plan, and make a new one"
        )

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._stream is not None:
            self._stream.abandon()
        self.close()


def _nothing(*_: Any) -> None:
    return
