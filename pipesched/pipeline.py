"""Pipeline: the front door. Wraps a model and trains it through a schedule."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipesched.arguments import as_call, as_function, as_seed, as_threads
from pipesched.batch import Batch, LossReduction, SplitDims, Splitter
from pipesched.body import Body
from pipesched.boundaries import Boundaries, Pins
from pipesched.caller import Caller, intra_op
from pipesched.calls import Call, dealt
from pipesched.compiled import compiler
from pipesched.contents import put_on
from pipesched.ends import bring_ends, end_of
from pipesched.errors import InputError
from pipesched.executors.local import LocalExecutor, Timeline, Work
from pipesched.feed import Feed, Head
from pipesched.initial import Init, Initial, built, check_model
from pipesched.labels import counted_labels, counts
from pipesched.layered import as_model, layered, stages_of
from pipesched.links import Links
from pipesched.lowering import CheckpointMode, halves
from pipesched.norms import BatchNormMode, MiniBatchNorms
from pipesched.observed import Observed
from pipesched.open_pass import OpenPass, attach, deliver_input_grads
from pipesched.order import Schedule
from pipesched.owners import Owners
from pipesched.plan import Plan
from pipesched.planning import Programs, Wishes
from pipesched.profiler import LayerCosts
from pipesched.program import Program
from pipesched.replicas import Replicas
from pipesched.sites import InProcess, Inputs, OverMesh, site_for
from pipesched.stage import Stage
from pipesched.stage_module import Wrap, wrapped_bodies
from pipesched.stream import Stream
from pipesched.ties import Ties
from pipesched.updates import give_optimizers
from pipesched.versions import Uses

__all__ = ["Pipeline"]

_REMEMBERED = 6  # steps whose times serve the next prediction


class Pipeline(Observed):
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
    call ``step()``, ``evaluate()`` and ``forward()`` with nothing, and get what rank 0 asks for. timeout: how long a
    rank waits for another one there, 60 s unless given. schedule: a name, a Schedule or a Program, such as
    ``load_program(path)`` reads from a file; "auto" is 1f1b; "chimera" and "dualpipe" hold the layers twice.
    num_stages: as many as devices, times the schedule's chunks, unless given. num_microbatches: 4 a rank unless given.
    boundaries: the first layer of every stage but stage 0, by position or
    name; or of some layers the stage that each begins, {name: stage}; the rest is cut where measured layer times say.
    together: groups of layers that share a stage. links: between ranks, as `probe_links` finds them: then what crosses
    between stages counts. checkpoint: "never", "always" or "except_last".
    loss_weight(target, or the inputs without one) -> what a micro-batch counts; unless given its rows, or the labels
    over which a model with ``labels`` takes its own mean loss. loss_reduction: "mean" or "sum", as loss_fn reduces.
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
        links: Links | None = None,
        checkpoint: CheckpointMode = "never",
        optimizer: Callable[[list[Any]], Optimizer] | None = None,
        loss_weight: Callable[..., Any] | None = None,
        loss_reduction: LossReduction = "mean",
        split_dims: SplitDims = 0,
        wrap: Wrap | None = None,
        compile: bool | Mapping[str, Any] = False,
        batch_norm: BatchNormMode = "micro-batch",
        intra_op_threads: int = 1,
        seed: int | None = None,
        inputs: Inputs = "all",
        timeout: float | None = None,
        plan: Plan | None = None,
        init: Init | None = None,
    ) -> None:
        self._stream: Stream | None = None
        chain = as_model(model)
        check_model(chain)
        self._threads = as_threads(intra_op_threads)
        own_seed = torch.initial_seed() if seed is None else as_seed(seed)
        self._site = site_for(devices, mesh, self._threads, timeout, inputs)
        self._seed = self._site.agreed(lambda: own_seed)
        module = built(chain, self._seed)
        self._layered = layered(module, as_call(sample))
        self._initial = Initial(module, init, self._seed, loss_fn)
        self._layers = dict(self._layered.layers)
        super().__init__(module, as_function(loss_fn, "loss_fn"))
        self._profile: dict[str, LayerCosts] | None = None
        wishes = Wishes(schedule, num_stages, num_microbatches, boundaries, checkpoint, together)
        if plan is not None:
            wishes = wishes.pinned(plan, list(self._layers))
        pins = Pins(list(self._layers), wishes.boundaries, wishes.together)
        self._programs = Programs(wishes, len(self.devices), updates=optimizer is not None)
        self._programs.check_updates()
        self._site.use(self._programs.num_ranks)
        weight = as_function(loss_weight, "loss_weight")
        if (loss_fn, weight, loss_reduction, split_dims) == (None, None, "mean", 0):
            weight = counts(module, self._site.agreed(lambda: counted_labels(module, as_call(sample))))
        count, fixed = self._programs.num_microbatches, self._programs.fixed
        self._splitter = Splitter(count, fixed, split_dims, weight, loss_reduction)
        program = self._programs.plain(self._programs.num_microbatches)
        self._programs.training(self._programs.num_microbatches)
        self._layered.check(program)
        if wishes.boundaries is None and (starts := stages_of(model, pins.layers, program.num_weights)):
            pins = Pins(pins.layers, starts, wishes.together)
        self._decide_cut(pins, program, links, plan)
        self._site.check(program, (self._cut, repr(pins), self.checkpoint, self._threads, repr(seed), batch_norm))
        program = self._programs.connect(self._layered.edges(self._cut))
        ranks = [program.placement[index] for index in range(program.num_weights)]
        self._ties = Ties(module, self._layered.uses(self._cut, ranks), self._site)
        self._replicas = Replicas(self._site, self._ties.own)
        self._norms, self._compiled = MiniBatchNorms(batch_norm, self._site), compiler(compile, batch_norm)
        self._norms.check(module, program, streams=self._programs.streams)
        if wrap is not None:
            self._profile = self._site.agreed(self._profiled)  # layers may be sharded from here on
        self._stages = self._build_stages(program, wrap)
        self._optimizers = (
            {}
            if optimizer is None
            else give_optimizers(optimizer, self._stages, self._ties.parameters, self._owners.stage)
        )
        self._site.start()
        self._runs: deque[Timeline] = deque(maxlen=_REMEMBERED)
        self._step = 0

    def _build_stages(self, program: Program, wrap: Wrap | None) -> dict[int, Stage]:
        stages: dict[int, Stage] = {}
        devices = [self.devices[program.placement[index]] for index in range(program.num_weights)]
        bodies = self._layered.bodies(self._cut, devices, self._ties)
        self._initial.fill(self._owners_of(program, bodies), self._site)
        holds, tied = self._site.holds, self._ties.parameters
        self._bodies = bodies = wrapped_bodies(wrap, self.model, self._layers, bodies, program, devices, holds, tied)
        self._owners = self._owners_of(program, bodies)
        for index, part in reversed(list(enumerate(program.weights))):  # what is tied belongs to its first user
            rank, last = program.placement[index], not program.graph.consumers[index]
            device, body = self.devices[rank], bodies[part]
            loss_fn = self.loss_fn if last else None
            if index != part:  # the stage of this number runs the same layers
                replica = self._replicas.add(body.layers, loss_fn, device, (program.placement[part], rank))
                if replica is not None:
                    body, loss_fn = body.over(replica.layers, device), replica.loss_fn
            modules = {**body.layers, **({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
            norms = self._norms.of_stage((index, part), (rank, program.placement[part]), modules)
            if not self._site.holds(rank):
                continue
            if index == part:
                for module in modules.values():
                    put_on(module, device)
            ties = self._ties.for_layers(body.layers, device)
            head = Head(loss_fn) if last else None
            stages[index] = Stage(body, device, head, ties=ties, norms=norms, compiled=self._compiled())
        return dict(sorted(stages.items()))

    def _owners_of(self, program: Program, bodies: Sequence[Body]) -> Owners:
        homes = [(program.placement[part], body.layers) for part, body in enumerate(bodies)]
        return Owners(self.model, homes, end_of(program), self._ties.parameters)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """What optimizer= made, by stage: to save states, and to drive learning rates.

        Flushes first. So must who keeps an optimizer, or a scheduler of it, before each change: an update of an
        asynchronous schedule that is under way takes the old learning rate or the new one.
        """
        self.flush()
        return self._optimizers

    # ---- running ----------------------------------------------------------------------------------------------

    def step(
        self, *args: Any, target: Any = None, return_outputs: bool = False, gather: bool = False, **kwargs: Any
    ) -> Any:
        """Run every micro-batch forward and backward; gradients are added to ``.grad``, with optimizer= applied.

        args, kwargs: the model's inputs, a whole mini-batch. target: goes to loss_fn, split as the inputs are.
        Returns the loss of the mini-batch, a 0-d tensor, detached; with return_outputs also the outputs, in the
        mini-batch's order: under a mesh on the last stage's rank, with gather on all. Raises InputError for a batch
        that cannot be split, and what a layer raises, with a note that says in which stage, micro-batch and rank; the
        pipeline is usable afterwards (zero the gradients; with optimizer= they are cleared, and some stages may have
        been updated). Under a mesh the loss of another rank waits for its value once it is looked at, and a rank that
        fails ends the pipeline.

        Asynchronous schedules enqueue the step and return the loss of the one before, which has then run up to this
        one on all ranks (the first step waits for its own); under a mesh each process runs its part of the step. The
        loss is the mean over the step's rows, each with the weights that it met; an update's gradient is that of its
        own rows. A batch of another number of micro-batches flushes first. What a layer raises comes from this step,
        the next one or ``flush``; the steps under way are then lost, and each stage keeps the updates that it has made.
        """

        def make() -> Call:
            if not torch.is_grad_enabled():
                raise InputError(
                    "step computes gradients; it was called under no_grad; leave no_grad, or call evaluate"
                )
            batch = self._batch(args, kwargs, target)
            weighting = self._splitter.weighting(batch, self._programs.groups(len(batch)))
            return Call("step", batch, weighting, return_outputs, gather)

        call = self._called("step", (args, kwargs, target), make)
        if self._programs.streams:
            return self._enqueue(call)
        feed = call.feed(self._seed, self._step)
        work = self._work(self._programs.training(len(call)), feed, uses=self._programs.uses(len(call)))
        with self._ties.delivering(), self._replicas.delivering(), self._norms.counting():
            self._runs.append(self._site.run(work, call.batch, grad=True))
        with intra_op(self._threads):
            for stage in self._stages.values():
                stage.update_late()
        self._step += 1
        bring_ends(self._programs.plain(len(call)), feed, self._site)
        deliver_input_grads(call.batch, feed)
        return self._result(call, feed)

    def _called(self, method: str, given: tuple[Any, ...], make: Callable[[], Call]) -> Call:
        args, kwargs, target = given

        def deal(call: Call) -> tuple[Call, list[Any]]:
            return dealt(call, self._programs.plain(len(call)), self._bodies)

        return self._site.call(method, bool(args or kwargs) or target is not None, make, deal)

    def _enqueue(self, call: Call) -> torch.Tensor:
        wanted = any(call.batch.wanted_inputs())
        for what, asked in (("outputs", call.return_outputs), ("gradients of inputs", wanted)):
            if asked:
                raise InputError(
                    f"an asynchronous step returns before its own {what} are known; this one was asked for them; "
                    f"call evaluate or forward for outputs, detach inputs, or use a synchronous schedule"
                )
        executor = self._site.executor
        executor.check_outside("step")
        caller, segments = executor.caller(grad=True), self._programs.segments(len(call))
        if self._stream is not None and (self._stream.caller, self._stream.segments) != (caller, segments):
            self.flush()
        if self._stream is None or not self._stream.open:
            feed = Feed(self._seed, self._step, [])
            self._stream = Stream(self._site, segments, self._stages, feed, caller, self._runs.append)
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

    def evaluate(
        self, *args: Any, target: Any = None, return_outputs: bool = False, gather: bool = False, **kwargs: Any
    ) -> Any:
        """As ``step``, without gradients: forwards alone, in the modules' present mode."""

        def make() -> Call:
            batch = self._batch(args, kwargs, target)
            return Call("evaluate", batch, self._splitter.weighting(batch), return_outputs, gather)

        self.flush()
        call = self._called("evaluate", (args, kwargs, target), make)
        return self._result(call, self._infer(call))

    def _infer(self, call: Call) -> Feed:
        feed = call.feed(self._seed, self._step)
        with self._norms.counting():
            self._site.run(self._work(self._programs.inference(len(call)), feed), call.batch, grad=False)
        bring_ends(self._programs.plain(len(call)), feed, self._site)
        return feed

    def _result(self, call: Call, feed: Feed) -> Any:
        last = end_of(self._programs.plain(len(call)))
        loss = self._site.loss(last, lambda: call.loss(feed))
        return (loss, self._outputs(call, feed)) if call.return_outputs else loss

    def _outputs(self, call: Call, feed: Feed) -> Any:
        if not call.gather:
            return call.outputs(feed)
        return self._site.from_rank(end_of(self._programs.plain(len(call))), lambda: call.outputs(feed))

    def _local(self, what: str) -> LocalExecutor:
        if not isinstance(self._site, InProcess):
            raise InputError(
                f"{what} runs in one process, so far; this pipeline runs over a mesh; use step, or devices="
            )
        return self._site.executor

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

        def make() -> Call:
            if differentiated:
                self._local(what)
            return Call("forward", self._splitter.batch(args, kwargs), return_outputs=True, gather=gather)

        self.flush()
        call = self._called("forward", (args, kwargs, None), make)
        if not differentiated or isinstance(self._site, OverMesh):  # there rank 0's settings decide, in make
            return self._outputs(call, self._infer(call))
        executor = self._local(what)
        feed = call.feed(self._seed, self._step)
        program = self._programs.open_pass(len(call))
        there, back = halves(program)
        stages = {index: stage.fresh() for index, stage in self._stages.items()}
        work = self._work(program, feed, stages)
        with self._norms.counting():
            executor.run(replace(work, orders=there, finish=_nothing), grad=True)
        self._step += 1
        back_work = replace(work, prepare=_nothing, orders=back)

        def run_backwards() -> None:
            with self._ties.delivering(), self._replicas.delivering():
                executor.run(back_work, grad=True)

        return attach(OpenPass(call.batch, feed, run_backwards))

    __call__ = forward

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Batch:
        if self.loss_fn is not None and target is None:
            raise InputError("loss_fn(output, target) needs a target; got none; pass target=, or call forward")
        if self.loss_fn is None and target is not None:
            raise InputError("a target goes to loss_fn; there is none; pass loss_fn= to Pipeline, or no target")
        return self._splitter.batch(args, kwargs, target)

    def _work(
        self,
        program: Program,
        feed: Feed,
        stages: dict[int, Stage] | None = None,
        uses: Mapping[int, Uses] | None = None,
    ) -> Work:
        own = self._stages if stages is None else stages

        def begin(caller: Caller) -> None:
            feed.autocast = caller.autocast
            self._ties.refresh()
            self._replicas.refresh()
            for index, stage in own.items():
                stage.begin(feed, (uses or {}).get(index))

        def end(failed: bool) -> None:
            for stage in own.values():
                stage.end(failed)

        return Work(program, own, begin, finish=end)

    # ---- its life ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and end the ranks' threads. The model stays as it is. Dropping the pipeline does not flush."""
        try:
            self.flush()
        finally:
            self._site.close()

    def _is_own(self, name: str) -> bool:
        """Whether a parameter or buffer of this name lies in this process: under a mesh those of its stages do."""
        return isinstance(self._site, InProcess) or self._site.holds(self._owners.rank(name))

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's state, on every rank. Collective under a mesh."""
        if not isinstance(self._site, OverMesh):
            return self.state_dict()
        merged = {name: value for own in self._site.executor.exchange(self.state_dict()) for name, value in own.items()}
        names = [*self._all_state(), *merged]  # the model's order; then what wrap has added on other ranks
        return {name: merged[name] for name in names if name in merged}

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
