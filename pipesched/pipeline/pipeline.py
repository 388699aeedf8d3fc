"""Pipeline: the front door. Wraps a model and trains it through a schedule."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipesched.capture.layered_model import as_model, layered
from pipesched.capture.loss_reduction import resolve_loss
from pipesched.capture.stage_module import Wrap
from pipesched.model.initialization import Init, Initial, built, check_model
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.auto_plan import AutoPlan, adds_up
from pipesched.pipeline.construction import check_functions, choose_plan, ending_on_error, start
from pipesched.pipeline.cost_book import CostBook
from pipesched.pipeline.gathering import gather_model, merged_state, place_weights
from pipesched.pipeline.memory_forecast import MemoryForecast
from pipesched.pipeline.module_interface import ModuleInterface
from pipesched.pipeline.options import Distributed, Numerics, Search, as_options
from pipesched.pipeline.replan import Replanner
from pipesched.pipeline.sample_form import MISFITS, CallForm, check_form
from pipesched.pipeline.step_history import StepHistory
from pipesched.pipeline.step_runner import StepRunner
from pipesched.planning.pins import Boundaries, Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.replan_verdict import Replanned, check_steps_left
from pipesched.planning.report import Report
from pipesched.planning.search_request import limits_of
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.runtime.coordination.rendezvous import collective
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_host import MeshRanks, ThreadRanks, host_for
from pipesched.runtime.stage.compiled_layers import compiler
from pipesched.simulation.memory import RankMemory
from pipesched.simulation.trace import Trace
from pipesched.torch_checks import as_call, as_seed

__all__ = ["Pipeline"]


class Pipeline(ModuleInterface):
    """A model cut into stages that train together.

    ::

        pipe = Pipeline(model, sample, loss_fn=loss_fn, devices=["cuda:0", "cuda:1"])
        for x, y in loader:
            loss = pipe.step(x, target=y)
            optimizer.step()
            pipe.zero_grad()

    The model's Parameters stay its own and are moved to the devices in place. Under a mesh every process makes the
    pipeline with the same model and arguments, trains its own stages, and calls the same methods with the same batch.
    ``gather_model()`` then brings all weights into the model; until then calling, copying or saving the model raises
    ExecutionError, also after ``close``.

    Args:
        model: any module: each stage runs the model's own forward with the calls of other stages left out; of an
            nn.Sequential its layers. A list of modules, each of which takes what the one before gives, is a stage each
            where there are as many. A model without contents (built under ``torch.device("meta")``, or a function that
            builds one, whose buffers then have theirs) is cut first; then each rank fills its own stages alone.
        sample: one micro-batch as an example: a tensor, a tuple (positional arguments) or a dict (keywords).
        devices: the device of each rank in this process; a device may repeat.
        mesh: instead of devices, a one-dimensional DeviceMesh with a process for each rank, such as ``mesh["pp"]``.
        loss_fn: ``loss_fn(output, target)`` -> scalar, a function or a Module; default: the model's own loss (a scalar
            output, or its ``loss``).
        schedule: a name, a Schedule or a Program, such as `load_program` reads from a file. "chimera" and "dualpipe"
            hold the layers twice. Default: "auto", the plan with the shortest predicted step, as `tune` finds it from
            measured layers; it may use fewer devices, or one alone, which a warning says; what else is given is kept.
        num_microbatches: into how many micro-batches a batch is cut; default: 4 a device.
        num_stages: default: as many as devices, times the schedule's chunks.
        boundaries: the first layer of every stage but stage 0, by position or name; or of some layers the stage that
            each begins, ``{name: stage}``. What is left open is cut where measured layer times say.
        together: groups of layers that share a stage.
        whole_layers: names of modules that are one layer each, such as ``["block.moe"]``, because their own code
            depends on the batch.
        checkpoint: what becomes of what forwards save: "never", "always" or "except_last" for whole stages, or by
            layer ``{name: "recompute", "recompute-cheap" or "offload"}``; default: "never", or what a memory limit
            asks for.
        optimizer: ``optimizer(params)`` -> torch.optim.Optimizer, called once for each stage with its parameters (those
            of a loss module belong to the last stage). Each rank updates its stages at its own end of a step, and
            clears their gradients. Asynchronous schedules update on their way and need one. Default: the user steps an
            optimizer of ``pipe.parameters()``.
        seed: of all random numbers; default: the seed of torch's default generator.
        init: what a model without contents is filled from: "reset" (the default), each module's ``reset_parameters``;
            a function of a module, called after that; both keyed by seed and name, whatever the plan; a mapping, such
            as a state_dict; or safetensors files, an index of them, or their folder, cast to the model's types.
        wrap: ``wrap(stage_module, stage)`` -> the module that the stage runs: itself, changed in place, as by
            ``fully_shard`` or by adapters in its layers, or one around it.
        compile: whether layers run through torch.compile, or its arguments by name; default: False.
        plan: a saved Plan, instead of all choices.
        search: what the search for a plan knows and respects, such as ``Search(memory_limit_bytes=16 << 30)``.
        numerics: how a batch is split and losses are weighted, such as ``Numerics(batch_norm="mini-batch")``.
        distributed: how processes work together, such as ``Distributed(timeout=300)``.

    Raises:
        GraphError: for a model that cannot be captured (also a ValueError).
        PartitionError: for stages that cannot be (also a ValueError).
        ScheduleError: for a schedule that cannot be (also a ValueError).
        DeviceCountError: for too few devices (also an IndexError).
        ModelTypeError: for an argument that is no model, function or optimizer (also a TypeError).
        InputError: for other wrong arguments (also a ValueError).

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
        schedule: str | Schedule | Program = "auto",
        num_microbatches: int | None = None,
        num_stages: int | None = None,
        boundaries: Boundaries | None = None,
        together: Sequence[Collection[str]] = (),
        whole_layers: Collection[str] = (),
        checkpoint: Checkpoint | None = None,
        optimizer: Callable[[list[Any]], Optimizer] | None = None,
        seed: int | None = None,
        init: Init | None = None,
        wrap: Wrap | None = None,
        compile: bool | Mapping[str, Any] = False,
        plan: Plan | None = None,
        search: Search | None = None,
        numerics: Numerics | None = None,
        distributed: Distributed | None = None,
    ) -> None:
        search = as_options(search, Search)
        numerics = as_options(numerics, Numerics)
        distributed = as_options(distributed, Distributed)
        threads = numerics.intra_op_threads
        chain = as_model(model)
        check_model(chain)
        check_functions(loss_fn=loss_fn, wrap=wrap, optimizer=optimizer)
        call = as_call(sample)
        own_seed = torch.initial_seed() if seed is None else as_seed(seed)
        host = host_for(devices, mesh, threads, distributed.timeout, distributed.inputs)
        with ending_on_error(host):
            self._seed = host.agreed(lambda: own_seed)
            module = built(chain, self._seed)
            layers = layered(module, call, whole_layers)
            initial = Initial(module, init, self._seed, loss_fn)
            super().__init__(module, loss_fn)
            self._form = CallForm.of(*call) if distributed.inputs == "all" or host.holds(0) else None
            self._spec = AssemblySpec(
                model=module,
                loss_fn=loss_fn,
                layered=layers,
                layers=dict(layers.layers),
                initial=initial,
                batch_norm=numerics.batch_norm,
                compiled=compiler(compile, numerics.batch_norm),
                wrap=wrap,
                optimizer=optimizer,
            )
            self._book = CostBook(
                model=module,
                layered=layers,
                loss_fn=loss_fn,
                guard=self._guard,
                devices=host.all_devices,
                intra_op_threads=threads,
                links=search.links,
            )
            loss_weight, loss_reduction = resolve_loss(
                module,
                call,
                loss_fn,
                numerics.loss_weight,
                numerics.loss_reduction,
                numerics.split_dims,
                agreed=host.agreed,
            )
            auto_plan = AutoPlan(
                model=model,
                module=module,
                layered=layers,
                sample=sample,
                devices=host.all_devices,
                ranks_are="threads" if mesh is None else "processes",
                search=search,
                numerics=numerics,
                optimizer=optimizer,
                free=adds_up(module, loss_fn, loss_weight),
            )
            limits = limits_of(search.memory_limit_bytes, len(host.all_devices))
            kept = None if checkpoint is None else as_checkpoint(checkpoint, layers.layers)
            request = PlanRequest(
                schedule=schedule,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                boundaries=boundaries,
                checkpoint=kept,
                together=together,
            )
            asked = Pins(list(layers.layers), boundaries, together)
            plan, request = choose_plan(auto_plan, request, plan, host, self._book)
            self._running = start(
                model=model,
                spec=self._spec,
                host=host,
                book=self._book,
                splitter=Splitter(1, False, numerics.split_dims, loss_weight, loss_reduction),
                plan=plan,
                request=request,
                agreed=(threads, repr(seed), numerics.batch_norm),
            )
            place_weights(self._roots, self._guard, self._running.host, self._running.assembly)
            self._running.host.start()
        self._history = StepHistory(self._running, self._book)
        self._memory = MemoryForecast(self._running, self._book, spec=self._spec, guard=self._guard, limits=limits)
        self._steps = StepRunner(
            self._running,
            model=module,
            has_loss_fn=loss_fn is not None,
            guard=self._guard,
            memory=self._memory,
            seed=self._seed,
            intra_op_threads=threads,
        )
        self._replanner = Replanner(
            running=self._running,
            book=self._book,
            history=self._history,
            roots=self._roots,
            spec=self._spec,
            asked=Pins(asked.layers, None, together) if asked.complete else asked,
            limits=limits,
        )

    # ---- running ----------------------------------------------------------------------------------------------

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
        try:
            return self._steps.step(args, kwargs, target, return_outputs=return_outputs, gather=gather)
        except MISFITS as error:
            check_form(self._form, "step", args, kwargs, error)
            raise

    def evaluate(
        self, *args: Any, target: Any = None, return_outputs: bool = False, gather: bool = False, **kwargs: Any
    ) -> Any:
        """As ``step``, without gradients: forwards alone, in the modules' present mode."""
        try:
            return self._steps.evaluate(args, kwargs, target, return_outputs=return_outputs, gather=gather)
        except MISFITS as error:
            check_form(self._form, "evaluate", args, kwargs, error)
            raise

    def forward(self, *args: Any, gather: bool = False, **kwargs: Any) -> Any:
        """The model's output for a mini-batch, on the last stage's device.

        Under a mesh the last stage's rank has it, and the others None; with gather all have it.

        With gradients enabled the output can be differentiated: ``criterion(pipe(x), y).backward()`` runs the
        backwards in GPipe's order, once, and adds the gradients of parameters to ``.grad`` (torch.autograd.grad yields
        those of inputs only). It updates nothing, also with optimizer=: step the ``optimizers``. Under no_grad, and in
        eval mode, only forwards run.
        """
        try:
            return self._steps.forward(args, kwargs, gather=gather)
        except MISFITS as error:
            check_form(self._form, "forward", args, kwargs, error)
            raise

    __call__ = forward

    def flush(self) -> torch.Tensor | None:
        """Of an asynchronous schedule: run what is left of the steps under way, so that all their updates are made.

        Returns the last step's loss; None where nothing is under way, as always with synchronous schedules. The next
        step starts anew, with the weights as they are then. Raises as ``step``. ``evaluate``, ``forward``, ``close``,
        and what reads or changes parameters, states and modes through the pipeline, flush by themselves; flush before
        you touch the model itself, an optimizer or a learning rate scheduler.
        """
        return self._running.flush()

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """What optimizer= made, by stage: to save states, and to drive learning rates.

        Flushes first. So must who keeps an optimizer, or a scheduler of it, before each change: an update of an
        asynchronous schedule that is under way takes the old learning rate or the new one.
        """
        self.flush()
        return self._running.assembly.optimizers

    # ---- the plan ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that runs, with the costs known so far."""
        return self._running.plan(self._book, self.model, self._history.costs)

    def replan(self, plan: Plan | None = None, *, steps_left: int | None = None, measure: bool = False) -> Replanned:
        """Go on with another plan: that which is given, or a better one, if there is one.

        Without a plan the medians of the last steps say what layers cost now, and layers are cut anew, for the same
        schedule; ``boundaries=`` and ``together=`` that leave some of the cut open hold, and so does
        ``memory_limit_bytes=``. The better cut is taken where
        the step that is predicted of it is shorter by more than 3 % and twice the noise, and, over ``steps_left`` steps
        if they are known, by more than moving costs. A rank that takes longer than others for equal layers gets fewer.
        Where no layer times are known yet layers are measured first, with the sample; with ``measure`` they are anew,
        which tells apart layers of one stage that have come to differ. Print what is returned: it says why.

        Weights, buffers, gradients and the states of optimizers go with their layers, random numbers and the count of
        steps go on: with as many micro-batches the result is, to the bit, that of a run that had this plan from its
        first step. Parameters stay the same objects, and so does the optimizer of each stage that there still is: a
        learning rate scheduler goes on, and a stage that is new needs one of its own. An optimizer of your own keeps
        its state where it is: with several kinds of devices move it too.
        Flushes first. A plan that cannot be applied raises what making a pipeline raises, and the old one runs on.
        Raises InputError over a mesh, and where ``wrap=`` has changed the stages.
        """
        check_steps_left(steps_left)
        self._replanner.begin()
        if plan is not None:
            return self._replanner.apply(plan)
        return self._replanner.improve(steps_left, measure=measure)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank; under a mesh this process's own, for all."""
        return self._running.host.devices

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into; with several chains of them the stages of one."""
        return len(self._running.cut)

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches a full batch is cut into."""
        return self._running.assembly.programs.num_microbatches

    @property
    def checkpoint(self) -> Checkpoint:
        """What becomes of what forwards save: a mode for all stages, or a word by layer."""
        return self._running.assembly.programs.checkpoint

    @property
    def boundaries(self) -> list[str]:
        """The first layer of every stage but stage 0."""
        return [names[0] for names in self._running.cut[1:]]

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The layers of each stage; the layers themselves, not copies."""
        return [nn.Sequential(*(self._spec.layers[name] for name in names)) for names in self._running.cut]

    # ---- measured and predicted -------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace | None:
        """The last step, measured; None before the first. On a GPU this waits for the step to end.

        Of an asynchronous schedule: what all ranks have run since the last flush, or up to it; the last six steps of
        it where there are more, which then count as in flight only what begins with them. Under a mesh: this rank's
        part; ``gather_trace`` has all.
        """
        return self._history.trace

    def gather_trace(self) -> Trace | None:
        """As ``trace``, of all ranks on one clock; None before the first step. Collective under a mesh."""
        return self._history.gather_trace()

    @property
    def predicted(self) -> Trace:
        """The step, simulated: from what actions took in the steps before the last one, else from layer times.

        Of an asynchronous schedule: as many steps as show how it goes on, and a flush.
        """
        return self._history.predicted

    @property
    def predicted_memory(self) -> tuple[RankMemory, ...]:
        """What each rank holds at once in a step, at most, by what it is for. Of an asynchronous schedule: in as many
        steps as show how it goes on.
        """
        return self._memory.by_rank()

    def report(self) -> Report:
        """The plan explained, and the last step beside what was predicted of it. Collective under a mesh.

        ``print`` shows it, ``save("report.html")`` writes a page, other endings a picture or text.
        """
        notes = (*self._history.notes(), *self._running.unused_devices)
        return Report(self.plan, self.gather_trace(), self.predicted, notes)

    # ---- weights ----------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state of the model, on every rank, also of what ``wrap=`` has sharded. Collective under a mesh."""
        state = self.state_dict()
        host = self._running.host
        return merged_state(state, self._all_state(), host) if isinstance(host, MeshRanks) else state

    def gather_model(self, rank: int | None = None) -> None:
        """Bring the newest weights and buffers of all ranks into the model itself.

        Over a mesh each rank trains the weights of its own stages. The other parameters and buffers of its model are
        stale from the first step on. Calling the model, its ``state_dict``, copying and pickling it then raise, until
        this method has gathered the weights, or ``load_state_dict`` has loaded a whole state into the model::

            pipe.gather_model(rank=0)
            if mesh.get_local_rank() == 0:
                model.save_pretrained("trained")

        Parameters stay the same objects, on their devices. Gradients and optimizer states do not move. The next step
        makes the model stale again. In one process the model is always whole.

        The call is collective: every rank of the mesh makes it, also after ``close``. A rank that gathers holds the
        whole model; parameters of other ranks on the meta device get their contents on the CPU.

        Args:
            rank: the rank of the mesh whose model gets all weights; default: None, every rank.

        Raises:
            InputError: for a rank that the mesh does not have, for ranks that differ in it, and where ``wrap=`` has
                given layers other parameters than the model has on the ranks that gather.
            ExecutionError: where a rank fails or does not come.

        """
        gather_model(
            self._roots,
            self.state_dict(),
            guard=self._guard,
            host=self._running.host,
            assembly=self._running.assembly,
            rank=rank,
        )

    def _is_own(self, name: str) -> bool:
        """Whether a parameter or buffer of this name lies in this process: under a mesh those of its stages do."""
        host = self._running.host
        return isinstance(host, ThreadRanks) or host.holds(self._running.assembly.owners.rank(name))

    def _modules(self) -> dict[str, nn.Module]:
        self.flush()  # while stages run on older weights, their modules hold those
        return super()._modules()

    # ---- its life ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and end the ranks' threads. Dropping the pipeline does not flush.

        The model stays as it is: over a mesh without the weights that other ranks have trained, see ``gather_model``.
        """
        try:
            self.flush()
        finally:
            self._running.host.close()

    def __repr__(self) -> str:
        return str(self._running)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pipeline has threads and is neither copied nor pickled; save state_dict() and plan, and make a new one"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._steps.abandon()
        self.close()
