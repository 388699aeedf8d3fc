"""Checker: compares a pipeline's results with the results of its model in plain PyTorch, before a long run."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipesched.capture.stage_body import loss_entry
from pipesched.errors import PipeschedError
from pipesched.model.state_guard import reachable_generators, untouched
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.checks.recompute_checks import faults_of_recomputed
from pipesched.pipeline.comparison.check_report import CheckReport, Results, differing, in_words, merged
from pipesched.pipeline.comparison.layer_outputs import LayerOutputs
from pipesched.pipeline.options import Numerics
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.step_runner import StepRunner
from pipesched.reference.reference_step import reference_step
from pipesched.runtime.microbatches import GivenBatch
from pipesched.tensors.added_losses import collect_losses
from pipesched.tensors.tensor_contents import set_data
from pipesched.tensors.tree_structure import map_tensors, tensors_in

__all__ = ["Checker"]

#: Modules that are switched to eval() for comparisons with the whole batch: they draw random numbers, or see all rows.
_BY_BATCH = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
_STEP = "a step and a plain loop over its micro-batches"
_WHOLE = "a step and the model on the whole batch"
_RECOMPUTED = "the gradients of recomputed layers"
_ONCE = "first derivatives of pipe(...)"
_TWICE = "second derivatives of pipe(...)"


class Checker:
    """Compares one pipeline with its model.

    Args:
        running: the running plan.
        roots: name prefix -> the user's modules; the model comes first.
        spec: the model and the user's options for its stages.
        numerics: the user's numeric options.
        steps: runs the steps.
        forward: ``Pipeline.forward``.
        gather_model: ``Pipeline.gather_model``.
        is_own: whether this process trains the parameter or buffer of a name.

    """

    def __init__(
        self,
        *,
        running: RunningPlan,
        roots: Mapping[str, nn.Module],
        spec: AssemblySpec,
        numerics: Numerics,
        steps: StepRunner,
        forward: Callable[..., Any],
        gather_model: Callable[[], None],
        is_own: Callable[[str], bool],
    ) -> None:
        self._running = running
        self._roots = roots
        self._model = spec.model
        self._spec = spec
        self._numerics = numerics
        self._steps = steps
        self._forward = forward
        self._gather_model = gather_model
        self._is_own = is_own

    def report(self, given: GivenBatch, *, whole_batch: bool) -> CheckReport:
        """Run all comparisons. Collective under a mesh.

        Args:
            given: the batch, as for a step.
            whole_batch: whether to compare with the model on the whole batch.

        """
        elsewhere = self._gathered()
        comparisons: list[tuple[str, str, Callable[[], str]]] = [
            (_STEP, elsewhere or self._no_reference(), lambda: self._step(given)),
            (_WHOLE, elsewhere or self._no_whole_batch(given, whole_batch), lambda: self._whole_batch(given)),
            (_RECOMPUTED, "" if self._running.assembly.recomputed else "the plan recomputes no layer", self._recompute),
            (_ONCE, elsewhere or self._no_derivatives(given), lambda: self._derivative(given, twice=False)),
            (_TWICE, elsewhere or self._no_derivatives(given, twice=True), lambda: self._derivative(given, twice=True)),
        ]
        own = CheckReport(equal=(), skipped=())
        for what, reason, compare in comparisons:
            if reason:
                own = replace(own, skipped=(*own.skipped, f"{what}: {reason}"))
                continue
            try:
                difference = compare()
            except _NotComparedError as error:
                own = replace(own, skipped=(*own.skipped, f"{what}: {error}"))
                continue
            except _FailsError as error:
                difference = str(error)
            if difference:
                own = replace(own, differences=(*own.differences, f"{what}: {difference}"))
            else:
                own = replace(own, equal=(*own.equal, what))
        host = self._running.host
        if host.grid.in_one_process:
            return own
        return merged(host.collectives.gathered_in_all((own.equal, own.skipped, own.differences)))

    # ---- what cannot be compared ----------------------------------------------------------------------------------

    def _gathered(self) -> str:
        """Gather the model on every rank, so that each process can run it. Returns why this is not possible, or ""."""
        host = self._running.host
        if self._spec.wrap is not None:
            return "wrap= may have changed the modules"
        if host.grid.in_one_process:
            return ""
        if self._spec.split is not None:
            return "layers are split over ranks, which add up their parts of sums in another order"
        if self._spec.zero:
            return "optimizer states, gradients or weights are split across replicas"
        if any(host.collectives.gathered_in_all(any(parameter.is_meta for parameter in self._model.parameters()))):
            return "this process holds only the weights of its own stages"
        self._gather_model()
        return ""

    def _no_reference(self) -> str:
        return "each replica has rows of its own" if len(self._running.host.grid.rows) > 1 else ""

    def _no_whole_batch(self, given: GivenBatch, whole_batch: bool) -> str:
        if not whole_batch:
            return "whole_batch is False"
        if given.microbatches is not None:
            return "the micro-batches were passed as a list"
        return self._no_reference()

    def _no_derivatives(self, given: GivenBatch, *, twice: bool = False) -> str:
        if not self._running.host.grid.in_one_process:
            return "a forward over a mesh cannot be differentiated"
        if not self._model.training:
            return "the model is in evaluation mode"
        if given.microbatches is not None:
            return "the micro-batches were passed as a list"
        if twice and not any(tensor.is_floating_point() for tensor in tensors_in((given.args, given.kwargs))):
            return "the model takes no floating-point tensor"
        return ""

    # ---- comparisons ----------------------------------------------------------------------------------------------

    def _step(self, given: GivenBatch) -> str:
        numerics = self._numerics
        running = self._running
        options: dict[str, Any] = {
            "loss_fn": self._spec.loss_fn,
            "num_microbatches": running.splitter.num_microbatches,
            "step": running.step,
            "seed": running.seed,
            "loss_weight": numerics.loss_weight,
            "loss_reduction": numerics.loss_reduction,
            "split_dims": numerics.split_dims,
            "batch_norm": numerics.batch_norm,
            "intra_op_threads": numerics.intra_op_threads,
            "whole_layers": self._spec.whole_layers,
            "reduction_order": numerics.reduction_order,
        }
        exact = running.program.exact and all(device.type == "cpu" for device in running.host.grid.devices)
        exact = exact and self._spec.compiled(torch.device("cpu")) is None
        return self._compared(
            lambda: self._steps.gradients(given),
            lambda batch: reference_step(
                self._model,
                *batch.args,
                **options,
                target=batch.target,
                microbatches=batch.microbatches,
                **batch.kwargs,
            ),
            given,
            exact=exact,
        )

    def _whole_batch(self, given: GivenBatch) -> str:
        with self._quiet(self._shared(given)):
            return self._compared(
                lambda: self._steps.gradients(given), self._plain_step, given, exact=False, buffers=False
            )

    def _recompute(self) -> str:
        stages = [(stage.layers, stage.device) for stage in self._running.assembly.stages.values()]
        return "; ".join(faults_of_recomputed(self._spec.layered, stages, self._running.assembly.recomputed))

    def _derivative(self, given: GivenBatch, *, twice: bool) -> str:
        """Compare the derivatives of a product of the outputs with fixed numbers."""

        def run(function: Callable[..., Any], batch: GivenBatch) -> Results:
            results = Results()
            args, kwargs = map_tensors(
                lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()),
                (batch.args, batch.kwargs),
            )
            points = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            with collect_losses() if function is self._model else nullcontext():
                output = function(*args, **kwargs)
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not outputs:
                raise _NotComparedError("no output can be differentiated")
            total = torch.stack([(output * output.detach().cos()).sum().cpu() for output in outputs]).sum()
            if twice:
                slopes = torch.autograd.grad(total, points, create_graph=True, allow_unused=True)
                total = torch.stack([slope.square().sum().cpu() for slope in slopes if slope is not None]).sum()
            if total.requires_grad:
                total.backward()
            results.values = {"the value": total.detach()}
            results.values |= {f"the gradient of input {place}": point.grad for place, point in enumerate(points)}
            return results

        with self._quiet(given):
            with self._on_one_device(given) as there:
                due = self._results(lambda: run(self._model, there))
            try:
                ours = self._results(lambda: run(self._forward, given))
            except PipeschedError as error:
                raise _NotComparedError(f"the pipeline refuses them ({str(error).partition(';')[0]})") from error
            except Exception as error:
                raise _FailsError(_in_a_line(error)) from error
        found = differing(ours, due, exact=False)
        return in_words(found) if found else ""

    def _compared(
        self,
        ours: Callable[[], Tensor],
        plain: Callable[[GivenBatch], Tensor],
        given: GivenBatch,
        *,
        exact: bool,
        buffers: bool = True,
    ) -> str:
        """Run the pipeline and the plain model, and return what differs, and where first."""
        batch = self._shared(given)

        def run_ours() -> Results:
            try:
                return self._results(lambda: Results(values={"the loss": ours().detach().clone()}))
            except Exception as error:
                if isinstance(error, PipeschedError) or not self._running.host.grid.in_one_process:
                    raise
                raise _FailsError(_in_a_line(error)) from error

        def run_plain() -> Results:
            with self._on_one_device(batch) as there:
                return self._results(lambda: Results(values={"the loss": plain(there).detach().clone()}))

        names = [name for name in self._named("named_parameters", "named_buffers") if self._is_own(name)]

        def compare() -> dict[str, float]:
            due, got = run_plain(), run_ours()
            if not buffers:
                due.buffers, got.buffers = {}, {}
            return differing(got, due, exact=exact, names=names)

        found = compare()
        differs = bool(found)
        if not self._running.host.grid.in_one_process:
            differs = any(self._running.host.collectives.gathered(differs))
        if not differs:
            return ""
        due, got = (LayerOutputs(self._spec.layers) for _ in range(2))
        with due.recorded():
            run_plain()
        with got.recorded():
            run_ours()
        if not found:
            return ""
        first = got.first_unlike(due, exact=exact)
        return f"{in_words(found)}; {self._place(first, found)}"

    def _place(self, first: str, found: Mapping[str, float]) -> str:
        if first:
            return f"the first layer that returns something else is {first!r}"
        grads = [name for name in found if name.startswith("the gradient of ")]
        last = [layer for layer in self._spec.layers if any(f"'{layer}." in name for name in grads)]
        return f"all layers return the same; in the backward, {last[-1]!r} is the first" if last else "no layer differs"

    # ---- runs -----------------------------------------------------------------------------------------------------

    def _shared(self, given: GivenBatch) -> GivenBatch:
        """Return the batch in all processes, also if only rank 0 passes it. Collective under a mesh."""
        host = self._running.host
        if host.grid.inputs == "all":
            return given
        return GivenBatch(*host.collectives.from_rank(0, lambda: tuple(given)))

    @contextmanager
    def _on_one_device(self, given: GivenBatch) -> Iterator[GivenBatch]:
        """Move the model to the device of the last stage here, if it is on several devices. Yields the batch there."""
        tensors = list(self._named("named_parameters", "named_buffers").values())
        if len({tensor.device for tensor in tensors}) < 2:
            yield given
            return
        *_, last = self._running.assembly.stages.values()
        before = [(tensor, tensor.data) for tensor in tensors]
        try:
            for tensor, data in before:
                set_data(tensor, data.to(last.device))
            yield GivenBatch(*map_tensors(lambda tensor: tensor.to(last.device), tuple(given)))
        finally:
            for tensor, data in before:
                set_data(tensor, data)

    def _plain_step(self, given: GivenBatch) -> Tensor:
        with collect_losses() as added:
            output = self._model(*given.args, **given.kwargs)
        loss_fn = self._spec.loss_fn
        loss: Tensor = loss_entry(output) if loss_fn is None else loss_fn(output, given.target)
        total = loss + sum(added.values())
        total.backward()
        return total.detach()

    def _results(self, run: Callable[[], Results]) -> Results:
        """Run a function, and return copies of its results. Everything that it has changed is restored."""
        with self._kept():
            for parameter in self._named("named_parameters").values():
                parameter.grad = None
            results = run()
            parameters = self._named("named_parameters")
            results.grads = {name: _cloned(parameter.grad) for name, parameter in parameters.items()}
            results.buffers = {name: _cloned(buffer) for name, buffer in self._named("named_buffers").items()}
        return results

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Restore weights, gradients, buffers, attributes, modes, generators and the number of steps."""
        parameters = self._named("named_parameters")
        written = [parameters[name] for name in parameters.keys() & self._spec.layered.written]
        step = self._running.step
        rules = [stage.head.rule for stage in self._running.assembly.stages.values() if stage.head is not None]
        with ExitStack() as stack:
            for root in self._roots.values():
                stack.enter_context(untouched(root, root.training, written if root is self._model else ()))
            for rule in rules:
                stack.enter_context(nullcontext() if rule is None else rule.uncounted())
            try:
                yield
            finally:
                self._running.step = step

    @contextmanager
    def _quiet(self, given: GivenBatch) -> Iterator[None]:
        """Put modules that draw random numbers or see all rows into evaluation mode; if need be, the whole model.

        Raises _NotComparedError if the model draws random numbers also then.
        """
        modules = [module for root in self._roots.values() for module in root.modules()]
        modes = [(module, module.training) for module in modules]
        try:
            for module in modules:
                if isinstance(module, _BY_BATCH):
                    module.training = False
            if self._draws(given):
                self._model.eval()
                if self._draws(given):
                    raise _NotComparedError("the model draws random numbers also in evaluation mode")
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _draws(self, given: GivenBatch) -> bool:
        """Return whether the model's outputs depend on the seeds of the generators."""
        outputs = []
        for seed in (0, 1):
            with self._on_one_device(given) as there, self._kept(), torch.no_grad(), collect_losses():
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)  # models draw from this generator
                for generator in reachable_generators(self._roots.values()):
                    generator.manual_seed(seed)
                outputs.append([_cloned(tensor) for tensor in tensors_in(self._model(*there.args, **there.kwargs))])
        one, other = outputs
        return len(one) != len(other) or any(
            a is not None and b is not None and (a.shape != b.shape or not torch.equal(a, b))
            for a, b in zip(one, other, strict=True)
        )

    def _named(self, *methods: str) -> dict[str, Any]:
        return {
            f"{prefix}{name}": tensor
            for prefix, root in self._roots.items()
            for method in methods
            for name, tensor in getattr(root, method)()
        }


class _NotComparedError(Exception):
    """A comparison is not possible. The text says why."""


class _FailsError(Exception):
    """The pipeline fails where the model does not. The text says how."""


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).partition("\n")[0].split())
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"the pipeline raises {type(error).__name__} ({text}{notes}), the model does not"


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
