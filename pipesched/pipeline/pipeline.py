"""Pipeline: wraps a model and trains it across several devices with a pipeline schedule."""

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipesched.capture.layered_model import as_model, layered
from pipesched.capture.loss_reduction import resolve_loss
from pipesched.capture.stage_module import Wrap
from pipesched.checks import short_signature
from pipesched.elastic.recovered import Recovered
from pipesched.errors import ExecutionError, InputError
from pipesched.model.initialization import Init, Initial, built, check_model
from pipesched.model.parameter_order import ParameterOrder
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.auto_plan import AutoPlan, adds_up
from pipesched.pipeline.batch_loop import batches
from pipesched.pipeline.checks.replica_checks import check_axes, check_layout
from pipesched.pipeline.comparison.check_report import CheckReport
from pipesched.pipeline.comparison.checker import Checker
from pipesched.pipeline.construction import (
    check_agreement,
    check_functions,
    choose_plan,
    made_host,
    making,
    start,
    warn_of_lone_processes,
)
from pipesched.pipeline.cost_model import CostModel, replica_costs
from pipesched.pipeline.gathering import gather_model, merged_state, named_tensors, place_weights
from pipesched.pipeline.memory_forecast import MemoryForecast
from pipesched.pipeline.options import Distributed, Numerics, Search, as_options
from pipesched.pipeline.output_probe import probed_output
from pipesched.pipeline.plan_switch import PlanSwitch, UserStates
from pipesched.pipeline.planned_rows import PlannedRows
from pipesched.pipeline.recovery import LossOptions, Methods, Recovery
from pipesched.pipeline.regrouping import MeshForm, Regrouping
from pipesched.pipeline.replan import Replanner
from pipesched.pipeline.replan_search import FoundPlan, PlanSearch
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.sample_form import MISFITS, CallForm, check_form
from pipesched.pipeline.saving_interface import SavingInterface
from pipesched.pipeline.sent_values import learn_decided_types
from pipesched.pipeline.split_layers import probing, random_numbers, split_layers
from pipesched.pipeline.split_state import own_state, whole_state
from pipesched.pipeline.step_history import StepHistory
from pipesched.pipeline.step_runner import StepRunner
from pipesched.pipeline.uneven_orders import UnevenOrders
from pipesched.planning.pins import Boundaries, Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.replan_verdict import Replanned, check_num_replicas, check_steps_left
from pipesched.planning.report.report import Report
from pipesched.planning.search_request import limits_of
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.runtime.coordination.rendezvous import collective
from pipesched.runtime.gradients.clipping import clip_gradients
from pipesched.runtime.gradients.plane_norms import NormMeasure
from pipesched.runtime.microbatches import GivenBatch, Microbatch, Splitter
from pipesched.runtime.rank_grid import Axes, RankGrid
from pipesched.runtime.stage.compiled_layers import compiler
from pipesched.runtime.stage.elementwise import check_elementwise
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.saving.optimizer_states import GivenOptimizers
from pipesched.simulation.memory import RankMemory
from pipesched.simulation.trace import Trace
from pipesched.tensors.row_join import OutputRows
from pipesched.tensors.tree_structure import positional
from pipesched.torch_checks import as_call, as_function, as_seed

__all__ = ["Pipeline"]


T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class Pipeline(SavingInterface):
    """A model that trains in pipeline stages, on the devices of this process or on the ranks of a mesh.

    ::

        pipe = Pipeline(model, sample, loss_fn=loss_fn, devices=["cuda:0", "cuda:1"])
        optimizer = torch.optim.AdamW(pipe.parameters())
        for x, y in loader:
            loss = pipe.step(x, target=y)  # runs all forwards and backwards; gradients are in .grad
            optimizer.step()
            optimizer.zero_grad()

    The model's own Parameters are moved to the devices in place and trained; they keep their names. A Pipeline is
    not an nn.Module, but it has the module methods that training loops call; ``pipe.model`` is the model itself.

    With ``mesh=`` every process builds the Pipeline from the same model and arguments and trains its own stages. All
    processes call the same methods, by default with the same batch. ``gather_model()`` collects the trained weights.
    From the first step until that call, calling, copying or saving the model itself raises ExecutionError.
    ``clip_grad_norm_()`` clips the gradients of all ranks together; torch's own function would clip each rank's
    gradients separately.

    Args:
        model: an nn.Module, a list of modules that form a chain, a function that builds the model, or a model on the
            meta device. A list with one module per stage fixes the stages. With a function or a meta model, each
            rank creates only the weights of its own stages.
        sample: one micro-batch as an example: a tensor, a tuple (positional arguments) or a dict (keyword arguments).
        devices: the device of each rank. All ranks run in this process, and several of them may share a device.
        mesh: a DeviceMesh with one process per rank, such as ``mesh["pp"]``; used instead of devices.
        axes: the mesh dimensions of the pipeline, of its replicas, of replicas that shard weights with ``fully_shard``
            (see wrap), and of ranks that split layers (see ``Distributed(tensor_parallel=)``): ``{"pipeline": "pp",
            "replicate": "dp", "shard": "fsdp", "tensor": "tp"}``. Default: dimensions are recognised by names such as
            "pp", "dp", "fsdp" and "tp"; a mesh with only one dimension is a single pipeline.
        loss_fn: ``loss_fn(output, target)`` -> scalar tensor; a function or a Module. Default: the model's own loss,
            that is, the model's output if it is a tensor, or else the output's ``loss``.
        schedule: a name from ``pipesched.schedules.names()``, a Schedule or a Program. Default: "auto", a search for
            the plan with the shortest predicted step, like `tune` without trial runs; the plan may leave devices
            unused.
        num_microbatches: the number of micro-batches per batch. Default: 4 times the number of ranks; a search with
            ``batch_size`` can choose another number.
        num_stages: the number of stages. Default: the number of devices times the schedule's chunks per rank.
        boundaries: the first layer of every stage except stage 0, by position or name; or a dict ``{name: stage}`` that
            fixes only some boundaries. Default: boundaries that are not fixed are chosen to balance measured layer
            times.
        together: groups of layer names; all layers of a group go into the same stage. Default: none.
        whole_layers: names of modules to treat as one layer each, such as ``["block.moe"]``. Needed for modules whose
            code branches on the batch. Default: none.
        checkpoint: "never", "always" or "except_last" (all micro-batches except the last) for all stages, or a dict
            with an option per layer, ``{name: "recompute", "recompute-cheap" or "offload"}``. Default: "never", unless
            a memory limit requires checkpointing.
        optimizer: ``optimizer(params)`` -> torch.optim.Optimizer, called once per stage. ``params`` is a list of
            parameters, and ``params.named()`` returns pairs (name, parameter). ``step`` then updates the weights and
            clears their gradients. Asynchronous schedules require it. Default: the caller updates the weights.
        seed: an int, the seed of all random numbers in layers. Default: the seed of torch's default generator.
        init: the source of the weights if the model is a function or on the meta device: "reset" (each module's
            ``reset_parameters``), a function that is called with each module after its ``reset_parameters``, a
            state_dict, or safetensors files or their folder. Default: "reset".
        wrap: ``wrap(stage_module, stage)`` -> the module that the stage runs: ``stage_module`` itself, changed in place
            (for example by ``fully_shard``), or a module that contains it. Default: no wrapping.
        compile: True to compile layers with torch.compile, or a dict of keyword arguments for torch.compile. Default:
            False.
        plan: a Plan to run; replaces schedule, num_microbatches, num_stages, boundaries, together and checkpoint.
        search: options of the search for a plan, such as ``Search(memory_limit_bytes=16 << 30)``.
        numerics: how batches are split, losses weighted and gradients clipped, such as
            ``Numerics(batch_norm="mini-batch")``.
        distributed: options for a mesh, such as ``Distributed(timeout=300)``.

    Raises:
        GraphError: the model cannot be captured (also a ValueError).
        PartitionError: the model cannot be cut into stages as requested (also a ValueError).
        ScheduleError: the schedule or program is invalid (also a ValueError).
        DeviceCountError: there are too few devices (also an IndexError).
        ModelTypeError: an argument is not a model, function or optimizer where one is needed (also a TypeError).
        InputError: any other argument is invalid (also a ValueError).

    """

    @short_signature
    @collective
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module],
        sample: Any,
        *,
        devices: Sequence[Any] | None = None,
        mesh: DeviceMesh | None = None,
        axes: Axes | None = None,
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
        warn_of_lone_processes(mesh)
        host = made_host(devices, mesh, axes, numerics, distributed)
        with making(host):
            learn_decided_types(host.collectives, FoundPlan)
            run_seed = host.collectives.agreed(lambda: own_seed)
            module = built(chain, run_seed)
            shared: dict[str, Any] = {"seed": seed, "loss_fn": loss_fn, "optimizer": optimizer, "wrap": wrap}
            check_agreement(host.collectives, module, call, {**shared, "numerics": numerics, **distributed.agreed})
            _check_replicas(host.grid, plan, numerics, distributed, has_optimizers=optimizer is not None)
            initial = Initial(module, init, run_seed, loss_fn)
            loss_weight, loss_reduction = resolve_loss(  # before layers are split, to see losses of whole layers
                module,
                call,
                loss_fn,
                numerics.loss_weight,
                numerics.loss_reduction,
                numerics.split_dims,
                agreed=probing(host, distributed.tensor_parallel),
            )
            split = split_layers(module, loss_fn, call, host, distributed, wrap=wrap, compiles=bool(compile))
            layers = layered(module, call, whole_layers)
            super().__init__(module, loss_fn)
            self._parameter_order = ParameterOrder(self._roots)
            self._numerics = numerics
            self._form = CallForm.of(*call) if distributed.inputs == "all" or host.grid.holds(0) else None
            self._spec = AssemblySpec(
                model=module,
                loss_fn=loss_fn,
                layered=layers,
                layers=dict(layers.layers),
                whole_layers=tuple(whole_layers),
                initial=initial,
                batch_norm=numerics.batch_norm,
                compiled=compiler(compile, numerics.batch_norm, in_threads=mesh is None),
                wrap=wrap,
                gather_once=distributed.gather_once,
                optimizer=optimizer,
                weighs_losses=numerics.loss_weight is None and numerics.loss_reduction is None,
                rows_in_front=numerics.split_dims == 0,
                rules=numerics.gradient_rules(
                    self._parameter_order,
                    has_optimizers=optimizer is not None,
                    lags=mesh is None and any(device.type != "cpu" for device in host.grid.all_devices),
                ),
                zero=distributed.zero,
                reduction_order=numerics.reduction_order,
                split=split,
                random=random_numbers(module, layers, split),
                places={name: tensor.device for name, tensor in named_tensors(self._roots)},
                survives=distributed.survives(joins=mesh is None),
            )
            replicas = replica_costs(host.grid, distributed.zero, search.links)
            self._cost_model = CostModel(
                model=module,
                layered=layers,
                loss_fn=loss_fn,
                guard=self._guard,
                host=host,
                intra_op_threads=threads,
                links=search.links,
                replicas=replicas,
            )
            auto_plan = AutoPlan(
                model=model,
                module=module,
                layered=layers,
                sample=sample,
                devices=host.grid.all_devices,
                ranks_are="threads" if mesh is None else "processes",
                search=replace(search, links=self._cost_model.links),
                numerics=numerics,
                optimizer=optimizer,
                free=adds_up(module, loss_fn, loss_weight),
                replicas=None if replicas is None else replicas.gathering(once=distributed.gather_once is not False),
                gather_once=distributed.gather_once,
                redundancy=self._spec.keeps_copies(host.grid),
            )
            limits = limits_of(search.memory_limit_bytes, len(host.grid.all_devices))
            wished = PlanRequest(
                schedule=schedule,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                boundaries=boundaries,
                checkpoint=None if checkpoint is None else as_checkpoint(checkpoint, layers.layers),
                together=together,
            )
            asked = Pins(list(layers.layers), boundaries, together)
            splitter = Splitter(1, False, numerics.split_dims, loss_weight, loss_reduction, numerics.reduction_order)
            splitter = splitter.knowing(positional(module.forward), *call)
            splitter = replace(splitter, joins=OutputRows(partial(probed_output, module, self._guard, splitter, call)))
            found, request = choose_plan(auto_plan, wished, plan, host.collectives, self._cost_model)
            self._running = start(
                model=model,
                spec=self._spec,
                host=host,
                cost_model=self._cost_model,
                splitter=splitter,
                plan=found,
                request=request,
                agreed=(repr(seed), *numerics.agreed),
            )
            distributed.check_replan(
                has_optimizers=optimizer is not None, is_asynchronous=self._running.assembly.programs.streams
            )
            if self._running.assembly.forms is not None:
                self._guard.hold_blocks = partial(_hold_blocks, self._running)
            place_weights(self._roots, self._guard, self._running.host, self._running.assembly)
            self._running.host.executor.start()
        self._replan_every = distributed.replan_every
        self._memory = MemoryForecast(
            self._running,
            self._cost_model,
            spec=self._spec,
            guard=self._guard,
            limits=limits,
            planned=PlannedRows(plan=found, is_given=plan is not None, batch_size=search.batch_size),
        )
        self._history = StepHistory(self._running, self._cost_model, self._memory)
        self._steps = StepRunner(
            self._running,
            roots=self._roots,
            num_inputs=len(call[0]),
            has_loss_fn=loss_fn is not None,
            guard=self._guard,
            memory=self._memory,
            orders=UnevenOrders(self._running, self._cost_model, limited=limits is not None),
            intra_op_threads=threads,
        )
        switch = PlanSwitch(
            self._running,
            self._spec,
            self._roots,
            self._guard,
            self._live_run,
            lambda count: numerics.check_reduction_order(num_replicas=count, zero=distributed.zero if count > 1 else 0),
        )
        self._replanner = Replanner(
            running=self._running,
            cost_model=self._cost_model,
            history=self._history,
            roots=self._roots,
            spec=self._spec,
            switch=switch,
            search=PlanSearch(
                running=self._running,
                cost_model=self._cost_model,
                roots=self._roots,
                spec=self._spec,
                asked=Pins(asked.layers, None, together) if asked.complete else asked,
                limits=limits,
                auto_plan=auto_plan,
                request=replace(wished, boundaries=None) if asked.complete else wished,
            ),
        )
        self._recovery = (
            None
            if distributed.redundancy is None
            else Recovery(
                running=self._running,
                spec=self._spec,
                switch=switch,
                regrouping=Regrouping(
                    self._running, self._spec, self._cost_model, switch, MeshForm.of(mesh, axes, numerics, distributed)
                ),
                methods=Methods(self._run_step, self._replan_if_due, self._live_run, self._finish_saves),
                options=LossOptions(
                    recovers=distributed.on_failure == "recover",
                    on_recovery=distributed.on_recovery,
                    scaler=numerics.enabled_scaler,
                    rendezvous=distributed.rendezvous,
                ),
            )
        )

    # ---- running ----------------------------------------------------------------------------------------------

    @overload
    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Literal[False] = False,
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> torch.Tensor: ...

    @overload
    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Literal[True],
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]: ...

    @overload
    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool,
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]: ...

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forward and backward of every micro-batch, and return the loss of the batch.

        ::

            loss = pipe.step(x, target=y)
            loss, outputs = pipe.step(x, target=y, return_outputs=True)
            loss = pipe.step(microbatches=[Microbatch(x, target=y) for x, y in parts])  # already cut

        Gradients are added to ``.grad``; do not call ``loss.backward()``. With ``optimizer=`` the weights are updated
        as well. Under a mesh ``step()`` does not wait for the loss; reading its value does.

        With an asynchronous schedule, ``step()`` starts the step and returns the loss of the previous step (the first
        call returns the loss of its own step). The returned loss is a mean over the rows of the step; the loss of each
        row is computed with the weights that were current during the row's forward. The next step or ``flush`` may
        raise an exception of an earlier step. The steps in progress are then discarded, but updates already made are
        kept.

        Args:
            *args: the model's positional inputs, for the whole batch.
            target: the target of loss_fn for the whole batch, split like the inputs. Default: None (no loss_fn).
            return_outputs: also return the model's output. Default: False.
            gather: under a mesh, return the output on every rank, not only on the last stage's rank. Default: False.
            microbatches: in place of inputs and target, the batch as a list of `Microbatch` objects, whose shapes may
                differ. The list can have any length, unless the program fixes the number of micro-batches.
                Default: None (the batch is split).
            metrics: ``metrics(outputs, target)`` -> a dict of named scalars (numbers or tensors of shape []) for one
                micro-batch, called without gradients on the rank that has the outputs. ``pipe.metrics`` holds the
                averages of these scalars, weighted like the losses. If the model computes its own loss, the target is
                its argument ``labels``, ``targets`` or ``target``. Under a mesh every rank must pass ``metrics``.
                Default: None.
            **kwargs: the model's keyword inputs, for the whole batch.

        Returns:
            The loss, a detached 0-d tensor. With return_outputs, ``(loss, outputs)``: the outputs are in the order of
            the batch's rows; with ``microbatches`` they are a list of one output per micro-batch. Under a mesh they
            are None on every rank but the last stage's, unless gather is True.

        Raises:
            InputError: the batch cannot be split, or the target is missing.
            ArgumentError: the batch is structured differently from the sample, and the model fails on it (also an
                InputError).
            MemoryLimitError: micro-batches have more rows than planned, and a rank would exceed its memory limit.
            ExecutionError: the pipeline is closed, or a rank of the mesh failed, which ends the pipeline on all ranks.
            Exception: any exception that a layer raises, with a note that names the stage, micro-batch and rank. In one
                process the pipeline remains usable once you have cleared the gradients. With ``optimizer=`` the
                gradients are already cleared, but some stages may have been updated.

        """
        given = GivenBatch(args, kwargs, target, microbatches)
        if metrics is not None:
            as_function(metrics, "metrics", ("outputs", "target"))
        wanted = {"return_outputs": return_outputs, "gather": gather}
        if self._recovery is not None:
            return self._recovery.step(given, metrics, wanted)
        self._replan_if_due()
        return self._run_step(given, metrics, **wanted)

    def _run_step(self, given: GivenBatch, metrics: Metrics | None, **wanted: bool) -> Any:
        try:
            return self._steps.step(given, metrics, **wanted)
        except MISFITS as error:
            check_form(self._form, "step", given, error)
            raise

    @overload
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Literal[False] = False,
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> torch.Tensor: ...

    @overload
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Literal[True],
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]: ...

    @overload
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool,
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]: ...

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        gather: bool = False,
        microbatches: Sequence[Microbatch] | None = None,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forward of every micro-batch without gradients, and return the loss of the batch.

        ::

            pipe.eval()
            loss = pipe.evaluate(x, target=y)

        The modules keep their mode, so call ``eval()`` first to switch dropout off. Arguments, return value and
        exceptions are the same as for ``step``.
        """
        given = GivenBatch(args, kwargs, target, microbatches)
        if metrics is not None:
            as_function(metrics, "metrics", ("outputs", "target"))
        try:
            return self._steps.evaluate(given, metrics, return_outputs=return_outputs, gather=gather)
        except MISFITS as error:
            check_form(self._form, "evaluate", given, error)
            raise

    def forward(self, *args: Any, gather: bool = False, **kwargs: Any) -> Any:
        """Compute the model's output for a batch; ``pipe(x)`` does the same.

        ::

            loss = criterion(pipe(x), y)
            loss.backward()

        Without a mesh, in training mode with gradients enabled, the output can be differentiated once. ``backward()``
        then runs the stages' backward passes in GPipe's order and adds the gradients of parameters to ``.grad``, but
        never updates weights: with ``optimizer=``, step the optimizers in ``pipe.optimizers`` yourself.
        ``torch.autograd.grad`` returns gradients of inputs only. Under ``no_grad`` or in evaluation mode only forwards
        run.

        Args:
            *args: the model's positional inputs, for the whole batch.
            gather: under a mesh, return the output on every rank, not only on the last stage's rank. Default: False.
            **kwargs: the model's keyword inputs, for the whole batch.

        Returns:
            The output, on the last stage's device. Under a mesh it is None on all other ranks, unless gather is True.

        Raises:
            InputError: the batch cannot be split, or an output that can be differentiated is requested under a mesh.
            Exception: any exception that a layer raises, as for ``step``.

        """
        try:
            return self._steps.forward(args, kwargs, gather=gather)
        except MISFITS as error:
            check_form(self._form, "forward", GivenBatch(args, kwargs), error)
            raise

    __call__ = forward

    @collective
    def check(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Sequence[Microbatch] | None = None,
        whole_batch: bool = True,
        **kwargs: Any,
    ) -> CheckReport:
        """Compare a step of this pipeline with its model in plain PyTorch. Call it once before a long run.

        ::

            print(pipe.check(x, target=y))

        The check compares losses, gradients and buffers of a step with those of
        `pipesched.testing.reference_step` (bit by bit on CPUs), and with those of the model on the whole batch (up to
        rounding, with dropout off and BatchNorm in evaluation mode). It compares the gradients of each layer that the
        plan recomputes with those without recomputation. In one process, it also compares the first and second
        derivatives of ``pipe(x)``. Weights, gradients, buffers, generators and the number of steps stay as they are.

        Under a mesh every rank must call this method. The latest weights are then gathered on every rank, as by
        ``gather_model``, so each rank needs memory for the whole model.

        Args:
            *args: the model's positional inputs, for the whole batch.
            target: the target of loss_fn for the whole batch. Default: None (no loss_fn).
            microbatches: in place of inputs and target, the batch as a list of `Microbatch` objects. Default: None.
            whole_batch: whether to compare with the model on the whole batch. Pass False if the model or the loss
                compares the rows of a batch with each other, as contrastive losses do. Default: True.
            **kwargs: the model's keyword inputs, for the whole batch.

        Returns:
            A report with a line for each comparison: equal, or not compared and why.

        Raises:
            DifferenceError: something differs; the message names the first layer and the largest difference.
            Exception: any exception that ``step`` raises.

        """
        self.flush()
        checker = Checker(
            running=self._running,
            roots=self._roots,
            spec=self._spec,
            numerics=self._numerics,
            steps=self._steps,
            forward=self.forward,
            gather_model=self.gather_model,
            is_own=self._is_own,
        )
        return checker.report(GivenBatch(args, kwargs, target, microbatches), whole_batch=whole_batch).raised()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients down so that their norm is at most ``max_norm``. Collective under a mesh.

        ::

            loss = pipe.step(x, target=y)
            norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        The norm covers the gradients of all parameters on all ranks, and is bit-identical under every plan;
        ``pipesched.testing.clip_grad_norm_`` computes this norm for a model without a pipeline. torch's own
        ``clip_grad_norm_`` sees only the parameters of one rank, so under a mesh each rank would scale its gradients by
        a different factor. With ``optimizer=`` pass ``Numerics(clip_grad_norm=)`` instead.

        Args:
            max_norm: the maximum norm of all gradients together; must be above 0. Pass ``math.inf`` to measure the norm
                without clipping.
            norm_type: the order of the norm, above 0; ``math.inf`` for the largest absolute value. Default: 2.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error. Default: False.

        Returns:
            The norm before clipping, a 0-d tensor: float32, or float64 if a gradient is float64. The norm is 0
            if there are no gradients.

        Raises:
            InputError: an argument is wrong or differs between ranks, a step is running, or ``step`` itself updates the
                weights.
            ExecutionError: the norm is not finite, and ``error_if_nonfinite`` is set; gradients are unchanged.

        """
        running = self._running
        if self._running.program.has_updates:
            raise InputError(
                f"clip_grad_norm_() must be called after a step and before the weights are updated; schedule "
                f"{running.program.name!r} updates the weights during each step "
                f"(num_microbatches={running.assembly.programs.num_microbatches}); choose a synchronous schedule, such "
                f"as 1f1b"
            )
        running.check_idle("clip_grad_norm_")
        running.host.collectives.enter("clip_grad_norm_")
        return clip_gradients(
            [parameter for _, parameter in self.named_parameters()],
            running.host.collectives.gathered,
            NormMeasure(self._parameter_order, running.assembly.planes),
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            intra_op_threads=self._numerics.intra_op_threads,
            has_optimizers=self._spec.optimizer is not None,
        )

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients together in the last update, before ``Numerics(clip_grad_norm=)`` clipped them.

        A 0-d tensor. None before the first update, and always None on a rank that has no stages or if ``Numerics`` sets
        none of ``clip_grad_norm``, ``scaler`` and ``on_nonfinite``.
        """
        verdict = self._running.assembly.verdict
        return None if verdict is None else verdict.norm

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler of ``Numerics(scaler=)``. `save` and `load` include its state."""
        return self._numerics.scaler

    def flush(self) -> torch.Tensor | None:
        """Finish all steps that an asynchronous schedule has in progress, including all their updates.

        Call this method before you change the model, an optimizer or a learning rate scheduler directly. Other methods
        of the pipeline call ``flush`` themselves: ``evaluate``, ``forward``, ``close``, and all methods that read or
        change weights, state or mode. The next step uses the weights that are current when the step starts.

        Returns:
            The loss of the last step; None if no step is in progress, and always None with a synchronous schedule.

        Raises:
            Exception: any exception that a layer raises, as for ``step``.

        """
        return self._running.flush()

    def batches(self, loader: Iterable[T] | None = None) -> Iterator[T | None]:
        """Iterate over the batches of a loader. With ``Distributed(inputs="first")``, all ranks end with rank 0.

        ::

            for batch in pipe.batches(loader if rank == 0 else None):
                if batch is None:  # not rank 0
                    loss = pipe.step()
                else:
                    loss = pipe.step(batch["x"], target=batch["y"])

        Only needed with ``inputs="first"``, where the other ranks do not know the number of batches. Before each batch,
        rank 0 tells the other ranks whether there is one. They wait as long as rank 0's loader works, even longer than
        ``timeout``. If rank 0 leaves the loop with ``break``, the loops of the other ranks end as well.

        Args:
            loader: the batches. Default: None, on ranks that pass no batches.

        Yields:
            The batches of the loader; None on ranks that pass no batches.

        Raises:
            InputError: a rank that passes batches has no loader, or another rank has one.
            Exception: any exception of rank 0's loader; the other ranks raise an ExecutionError.

        """
        return batches(self._running.host, loader)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers that ``optimizer=`` created, keyed by stage number.

        Use them to save optimizer states or to attach learning rate schedulers. Reading this property calls
        ``flush()``. If you hold a reference to an optimizer or scheduler, call ``flush()`` before you change it.
        Otherwise, with an asynchronous schedule, an update already in progress may use either the old or the new
        learning rate.
        """
        self.flush()
        return self._running.assembly.optimizers

    # ---- the plan ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The running plan, with the stage costs known so far."""
        return self._history.plan(self.model)

    def replan(
        self,
        plan: Plan | None = None,
        *,
        num_replicas: int | None = None,
        steps_left: int | None = None,
        measure: bool = False,
        optimizer: GivenOptimizers | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Replanned:
        """Switch to another plan between two steps: to ``plan``, or to a faster plan if the search finds one.

        ::

            print(pipe.replan(steps_left=1000))

        With the same number of micro-batches, the results are bit-identical to those of a run that uses the new plan
        from the first step. Weights, buffers, gradients and optimizer states move with their layers. Parameters, and
        the optimizers of stages that still exist, stay the same objects. A new stage may get a new optimizer, which
        needs a scheduler of its own. Pass the optimizers that you created yourself: their states move, too.

        Under a mesh every rank must call this method, with the same plan. A plan may use fewer ranks than the mesh has;
        the other ranks are idle, and may get layers later. Optimizers that you pass gain and lose parameters. Layers
        that leave a process free their memory: they go to the device on which you built them. With another number of
        replicas, results are bit-identical with ``Numerics(reduction_order="tree")`` and the same total number of
        micro-batches; otherwise they differ in rounding, and a warning says so.

        Without ``plan`` the model is cut again for the same schedule, based on the median times of the last steps; a
        rank that is slower on identical layers gets fewer layers. Boundaries, groups and memory limits that you passed
        to Pipeline still apply. The new cut is used if its predicted step is shorter by more than 3 % and by more than
        twice the variation between the measured steps.

        Args:
            plan: the plan to switch to. Default: None (search for a better cut).
            num_replicas: under a mesh, the number of replicas that the ranks form from now on; needs ``plan``. Default:
                None (that of the plan; if the plan does not say, the number stays as it is).
            steps_left: the number of steps still to run, in which the new cut must save more time than the move takes.
                Default: None (the time that the move takes is ignored).
            measure: whether to first measure the layers again, to find the layers within a stage whose times have
                changed. Default: False.
            optimizer: the optimizer of ``pipe.parameters()``, or a list or dict of optimizers, as for ``save``. In one
                process it is needed only if layers change their device. Default: None.
            scheduler: under a mesh, as for ``save``. Default: None.
            extra: under a mesh, a dict of objects with ``state_dict()`` and ``load_state_dict()``, such as averaged
                weights, whose tensors move with the layers. Default: None.

        Returns:
            The outcome. Print the outcome to see which layers moved, or why the old plan was kept.

        Raises:
            InputError: ``wrap=`` has changed the stages.
            CheckpointError: a state cannot be moved, for one of the reasons listed under ``save``; nothing changes.
            PipeschedError: the plan cannot be applied, for one of the reasons listed under Pipeline; the old plan keeps
                running.

        """
        check_steps_left(steps_left)
        check_num_replicas(plan, num_replicas)
        if self._recovery is not None and self._recovery.has_missed_change():
            return Replanned(plan=self.plan, kept="a rank was lost when this replan had ended on other ranks")
        self._running.host.collectives.enter("replan")
        self._replanner.begin()
        states = UserStates(optimizer=optimizer, scheduler=scheduler, extra=extra)
        with self._changing_state():
            self._replanner.agree(plan, states, num_replicas=num_replicas, steps_left=steps_left, measure=measure)
            if plan is None:
                found = self._replanner.improve(steps_left, states, measure=measure)
            else:
                found = self._replanner.apply(plan, states, num_replicas)
        _LOG.info("replanned before step %d: %s", self._running.step, found)
        return found

    def recover(self) -> Recovered:
        """Go on without the ranks that are lost, from the state before the step that was lost. Needs ``redundancy=``.

        ::

            try:
                loss = pipe.step(x, target=y)
            except RankLost:
                pipe.recover()
                loss = pipe.step(x, target=y)  # the same step again

        Call this method on all ranks that raise `RankLost`. They agree on who lives, connect anew, divide the layers
        among themselves, and take over the state of the lost layers from its copy. The results are bit-identical to
        those of a run that lost nobody. torch's default process group is made anew, so the number of this process may
        change; groups and meshes that you have made must be made again. With ``Distributed(on_failure="recover")``,
        ``step`` does all this itself.

        Returns:
            The outcome, with the new number of this process.

        Raises:
            InputError: no rank is lost, or the pipeline was made without ``redundancy=``.
            RankLost: the state of a layer is lost with all its copies, or the others have given up this rank.

        """
        if self._recovery is None:
            raise InputError(
                "recover() needs copies of the ranks' states; this pipeline keeps none; pass "
                "distributed=Distributed(redundancy='neighbour') to Pipeline, or start again from the last checkpoint"
            )
        return self._recovery.recover()

    def leave(self) -> None:
        """Leave the job between two steps, for example after SIGTERM, and close the pipeline. Needs ``redundancy=``.

        ::

            signal.signal(signal.SIGTERM, lambda *_: leaving.set())
            for x, y in loader:
                if leaving.is_set():
                    pipe.leave()
                    break
                pipe.step(x, target=y)

        Only the rank that leaves calls this method. It waits until the others hold the state of its layers. They go on
        from there without this rank, as after a loss, and no step runs again.

        Raises:
            InputError: the pipeline was made without ``redundancy=``, or a step is running.
            RankLost: another rank was lost meanwhile.

        """
        if self._recovery is None:
            raise InputError(
                "leave() hands the layers of this rank over to the others, which needs copies of the ranks' states; "
                "this pipeline keeps none; pass distributed=Distributed(redundancy='neighbour') to Pipeline, or save a "
                "checkpoint on all ranks"
            )
        self._recovery.leave()

    def _finish_saves(self) -> None:
        """Wait for an asynchronous save. Collective."""
        self._saver.finish(self._live_run())

    def _copy_state(self) -> None:
        """Copy the state of all ranks, if they keep copies."""
        if self._recovery is not None:
            self._recovery.copy_now()

    def _changing_state(self) -> AbstractContextManager[None]:
        """A context for a call that changes weights or states. After a loss within it, the state before counts."""
        return nullcontext() if self._recovery is None else self._recovery.changing()

    def _replan_if_due(self) -> None:
        if not self._replan_every or not self._running.step or self._running.step % self._replan_every:
            return
        self._replanner.begin()
        with self._changing_state():
            found = self._replanner.improve(None, UserStates(), every=self._replan_every)
        _LOG.info("replanned before step %d: %s", self._running.step, found)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank. Under a mesh, this process's device is repeated for every rank."""
        return list(self._running.host.grid.devices)

    @property
    def num_stages(self) -> int:
        """The number of stages that the model is cut into. A bidirectional schedule runs two copies of each stage."""
        return len(self._running.cut)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches that a full batch is split into."""
        return self._running.assembly.programs.num_microbatches

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpointing in use: one mode for all stages, or a dict from layer name to option."""
        return self._running.assembly.programs.checkpoint

    @property
    def boundaries(self) -> list[str]:
        """The name of the first layer of every stage except stage 0."""
        return [names[0] for names in self._running.cut[1:]]

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The model's own layers (not copies), as one nn.Sequential per stage."""
        return [nn.Sequential(*(self._spec.layers[name] for name in names)) for names in self._running.cut]

    # ---- measured and predicted -------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """The named scalars of the last step or evaluation: the results of ``metrics=``, and the losses of `add_loss`.

        ::

            def metrics(outputs, target):
                return {"accuracy": (outputs.argmax(-1) == target).float().mean()}

            loss = pipe.step(x, target=y, metrics=metrics)
            print(pipe.metrics["accuracy"])

        Each scalar is a detached 0-d tensor (float64 for ``metrics=``), on every rank of a mesh. Under a mesh,
        reading the dict waits until this rank has received the values. If a value is on a GPU, reading it waits until
        the step has finished. With an asynchronous schedule, the scalars belong to the step whose loss ``step``
        returned last.
        """
        return self._steps.metrics.last

    @property
    def trace(self) -> Trace:
        """The measured trace of the last step. On a GPU, reading this property waits for the step to end.

        Under a mesh the trace holds only this rank's actions; ``gather_trace()`` returns the actions of all ranks. For
        an asynchronous schedule the trace holds the steps since the last flush, at most the last six; micro-batches
        that started before those steps are not counted as in flight.

        Raises:
            ExecutionError: no step has run under this plan yet.

        """
        return _measured(self._history.trace)

    def gather_trace(self) -> Trace:
        """Return the measured trace of the last step for all ranks, with times on one clock. Collective under a mesh.

        Raises:
            ExecutionError: no step has run under this plan yet.

        """
        self._running.host.collectives.enter("gather_trace")
        return _measured(self._history.gather_trace())

    @property
    def predicted(self) -> Trace:
        """The simulated trace of a step, based on action times of earlier steps or, if there are none, on layer costs.

        For an asynchronous schedule the trace holds enough steps to show the steady state, and the flush at the end.
        """
        return self._history.predicted

    @property
    def predicted_memory(self) -> tuple[RankMemory, ...]:
        """The predicted peak memory of each rank in a step, broken down by purpose.

        For an asynchronous schedule the prediction covers enough steps to reach the steady state.
        """
        return self._memory.by_rank()

    def report(self) -> Report:
        """Return a report of the plan, and of the last step compared with its prediction. Collective under a mesh.

        ::

            print(pipe.report())
            pipe.report().save("report.html")  # or .png, .txt, .json
        """
        self._running.host.collectives.enter("report")
        predicted = self.predicted  # measures the layers if their costs are not known
        overlap = self._running.assembly.programs.streams  # the plan predicts one step, without those that overlap it
        return Report(self.plan, self._history.gather_trace(), predicted if overlap else None)

    # ---- weights ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the model's own keys; under a mesh, only the state of this rank's stages.

        With ``Distributed(tensor_parallel=)``, the weights are whole, and all ranks of a tensor group must call this
        method. Raises ExecutionError if the weights are split across replicas (``Distributed(zero=3)``).
        """
        if count := sum(len(list(weights)) for weights in self._running.assembly.divided_weights):
            raise ExecutionError(
                f"state_dict() needs full (unsharded) weights, but with zero=3 each replica holds only its own rows; "
                f"number of sharded parameters on this rank: {count}; call full_state_dict() or save_weights() on "
                f"every rank, or gather_model() first"
            )
        state = super().state_dict()
        split = self._running.assembly.split
        if split is None:
            return state
        connected = self._running.host.collectives.connected("state_dict")
        with connected as collectives, collectives.stopping_all("state_dict"):
            return whole_state(self.model, state, split)

    def _own_blocks(self, state: dict[str, Any]) -> dict[str, Any]:
        split = self._running.assembly.split
        return state if split is None else own_state(self.model, state, split)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model on every rank, including sharded tensors. Collective under a mesh."""
        with self._whole_weights("full_state_dict"):
            state = self.state_dict()
            host = self._running.host
            return state if host.grid.in_one_process else merged_state(state, self._all_state(), host.collectives)

    @contextmanager
    def _whole_weights(self, method: str) -> Iterator[None]:
        self._running.host.collectives.enter(method)
        self._guard.use()
        self._gather_rows(method)
        try:
            yield
        finally:
            self._divide_weights()

    @contextmanager
    def _whole_layers(self, method: str) -> Iterator[None]:
        assembly = self._running.assembly
        if assembly.split is None or assembly.forms is None:
            yield
            return
        own = {parameter: assembly.split_parameters.get(parameter, "") for parameter in assembly.held_parameters()}
        with self._running.host.collectives.connected(method) as collectives, collectives.stopping_all(method):
            for parameter, name in own.items():
                parameter.data = assembly.split.whole(name, parameter.detach())
        assembly.forms.make_whole(own)
        try:
            yield
        finally:
            assembly.forms.make_blocks()

    def _gather_rows(self, method: str) -> None:
        """Gather the full weights of this rank's stages if they are split across replicas.

        Collective over these replicas. ``method`` is the public method that needs the weights.
        """
        divided = self._running.assembly.divided_weights
        if divided:
            with self._running.host.collectives.connected(method) as collectives:
                for weights in divided:
                    weights.assemble(collectives.gather_over_replicas)

    def _divide_weights(self) -> None:
        """Keep only this replica's rows of the weights if the weights are split across replicas."""
        divided = self._running.assembly.divided_weights
        for weights in divided:
            weights.divide()
        if divided:
            self._guard.check(changes=True)

    def gather_model(self, rank: int | None = None) -> None:
        """Copy the latest weights and buffers of all ranks into the model itself. Collective under a mesh.

        ::

            pipe.gather_model(rank=0)
            if mesh.get_local_rank() == 0:
                model.save_pretrained("trained")

        Under a mesh each rank trains the weights of its own stages; the other weights in its copy of the model are
        stale after the first step. From then on, calling, copying or pickling the model, or calling its
        ``state_dict()``, raises ExecutionError until this method has run or a complete state has been loaded. The next
        step makes the model stale again. In one process the model is always complete, and this method does nothing.

        With ``Distributed(zero=3)`` each replica holds only its own rows of the weights, even before the first step and
        after ``close()``; the model can then be used only after this method has run. The same is true of layers that
        are split over ranks (``tensor_parallel=``). This method makes them whole, and the next step splits them again.

        Every rank of the mesh must call this method, even after ``close()``. A rank that gathers needs memory for the
        whole model. Parameters stay the same objects on the same devices, except that parameters on the meta device are
        filled on the CPU. Gradients and optimizer states are not copied.

        Args:
            rank: the rank of the mesh to gather on; with several replicas, the ranks of all replicas are numbered
                together. Default: None (every rank).

        Raises:
            InputError: the rank does not exist, ranks pass different values, or ``wrap=`` replaced parameters, so that
                the models of the ranks no longer match.
            ExecutionError: a rank fails or does not call the method.

        """
        self._running.host.collectives.enter("gather_model")
        self._guard.use()
        self._gather_rows("gather_model")
        gathers = False
        try:
            gathers = gather_model(
                self._roots,
                super().state_dict(),
                guard=self._guard,
                host=self._running.host,
                assembly=self._running.assembly,
                rank=rank,
            )
        finally:
            if not gathers:
                self._divide_weights()

    def _is_own(self, name: str) -> bool:
        """Return whether this process trains the parameter or buffer of this name. Always True without a mesh."""
        host = self._running.host
        return host.grid.holds(self._running.assembly.owners.rank(name))

    def _check_idle(self, method: str) -> None:
        """Raise InputError if a step is running. ``method`` is the name of the method that changes weights."""
        self._running.check_idle(method)

    def _is_divided(self) -> bool:
        """Return whether other processes train other parameters of the model."""
        grid = self._running.host.grid
        return not grid.in_one_process and (len(grid.devices) > 1 or bool(grid.planes))

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        assembly = self._running.assembly
        check_elementwise(optimizer, assembly.held_parameters(), assembly.split_parameters)

    def _modules(self) -> dict[str, nn.Module]:
        self.flush()  # a stage that ran with an older weight version has left that version in its modules
        return super()._modules()

    # ---- closing ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish all steps in progress, and stop the ranks.

        Deleting the pipeline stops the ranks without finishing the steps. The model keeps its weights. Under a mesh the
        model lacks the weights that other ranks trained; see ``gather_model``.
        """
        if sys.is_finalizing():  # called by a __del__; the ranks have already been stopped
            return
        host = self._running.host
        with ExitStack() as stack:
            stack.callback(host.close)
            stack.callback(self._saver.close, host)
            if self._recovery is not None:
                stack.callback(self._recovery.close)
            self.flush()

    def __repr__(self) -> str:
        return str(self._running)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, because it owns threads; save a checkpoint with save(path), and "
            "load it into a new Pipeline with load(path)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._steps.abandon()
        self.close()


def _check_replicas(
    grid: RankGrid, plan: Plan | None, numerics: Numerics, distributed: Distributed, *, has_optimizers: bool
) -> None:
    """Raise InputError or PartitionError if the options do not fit the number of replicas."""
    num_replicas = len(grid.rows)
    distributed.check_zero(num_replicas=num_replicas, has_optimizers=has_optimizers)
    numerics.check_reduction_order(num_replicas=num_replicas, zero=distributed.zero)
    check_axes(plan, len(grid.all_devices), num_replicas, distributed.zero, len(grid.every_plane))
    if distributed.tensor_parallel is not None:
        check_layout(plan, distributed.tensor_layout)


def _hold_blocks(running: RunningPlan) -> bool:
    """Let split layers hold blocks again if ``gather_model`` has made them whole. Returns whether it has."""
    forms = running.assembly.forms
    if forms is None or not forms.is_whole:
        return False
    forms.make_blocks()
    return True


def _measured(trace: Trace | None) -> Trace:
    if trace is None:
        raise ExecutionError(
            "a measured trace requires a step; no step has run under this plan yet; call step() first, or use "
            "pipe.predicted, the simulated trace"
        )
    return trace
