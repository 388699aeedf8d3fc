"""Reference step: a training step without a pipeline, bit-identical to a pipeline whose ``Program.exact`` is true."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.capture import Capture
from pipesched.capture.layered_model import as_model
from pipesched.capture.loss_reduction import LossReduction, reduces, resolve_loss, weights_in_numbers
from pipesched.capture.loss_rule import LossRule
from pipesched.capture.recorder import record
from pipesched.capture.whole_layers import as_whole_layers, opened
from pipesched.checks import is_count, shown
from pipesched.devices.selection import autocast_types
from pipesched.errors import InputError, ModelTypeError
from pipesched.model.module_tree import check_initialised, is_in_a_row, layers_of
from pipesched.model.state_guard import no_graph, untouched
from pipesched.model.tied_weights import deliver
from pipesched.program.tree_groups import num_tree_groups
from pipesched.reference.unsplit_model import Unsplit
from pipesched.runtime.collectives import LocalCollectives
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.microbatches import Batch, GivenBatch, Microbatch, SplitDims, Splitter
from pipesched.runtime.stage.batch_norm import BatchNormMode, MiniBatchNorms, Norms
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.step_metrics import with_added
from pipesched.runtime.targets import check_given_targets, check_target
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.graph_edges import edge_of
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.loss_factors import is_known_zero, read, scaled
from pipesched.tensors.tensor_attributes import with_attributes_of
from pipesched.tensors.tree_structure import positional
from pipesched.torch_checks import as_function, as_seed, as_threads

__all__ = ["reference_step"]


def reference_step(
    model: nn.Module | Sequence[nn.Module],
    *args: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    num_microbatches: int = 1,
    step: int = 0,
    seed: int | None = None,
    loss_weight: Callable[..., Any] | None = None,
    loss_reduction: LossReduction | None = None,
    split_dims: SplitDims = 0,
    batch_norm: BatchNormMode = "micro-batch",
    intra_op_threads: int = 1,
    whole_layers: Collection[str] = (),
    microbatches: Sequence[Microbatch] | None = None,
    num_replicas: int = 1,
    reduction_order: ReductionOrder = "sequential",
    **kwargs: Any,
) -> Tensor:
    """Run one training step without a pipeline, one micro-batch after another, as a reference for tests.

    ::

        loss = reference_step(model, x, loss_fn=loss_fn, target=y, num_microbatches=4, seed=0)
        assert torch.equal(pipe.step(x, target=y), loss)  # pipe runs a copy of the model

    For each micro-batch, the forward runs first, then ``(loss * factor).backward()``. The factor is computed from the
    weight of the micro-batch. The batch is split, losses are weighted, random numbers are drawn, and gradients are
    added to ``.grad``, in the same way as in a pipeline.

    Args:
        model: an nn.Module, or a list of modules that form a chain.
        *args: the model's positional inputs, for the whole mini-batch.
        loss_fn: ``loss_fn(output, target)`` -> scalar tensor. Default: None (the model's output, or its "loss" entry,
            is the loss).
        target: the target of the mini-batch. Default: None.
        num_microbatches: the number of parts into which the mini-batch is split, at least 1. Default: 1.
        step: the number of earlier steps, on which random numbers depend. Default: 0.
        seed: the seed of all random numbers in layers. Default: the seed of torch's default generator.
        loss_weight: a function that takes a micro-batch's target (or its inputs if there is no target), and returns the
            weight of the micro-batch's loss. Default: the number of rows, or of targets over which the loss averages.
        loss_reduction: how the loss reduces over rows, "mean" or "sum". Default: read from ``loss_fn``, else "mean".
        split_dims: the dimension along which arguments are split: one dimension for all arguments, a sequence with one
            dimension per argument, or a mapping from positions or names to dimensions. None: the argument is not split.
            Default: 0.
        batch_norm: when BatchNorm updates its running statistics: after each "micro-batch", or once per "mini-batch".
            Default: "micro-batch".
        intra_op_threads: the number of CPU threads per operation. Default: 1.
        whole_layers: names of modules that are kept as one layer, as in ``Pipeline``. Default: none.
        microbatches: micro-batches to run instead of splitting inputs and target, as in ``Pipeline.step``. Default:
            None (inputs and target are split).
        num_replicas: the number of replicas of the pipeline. The mini-batch is split into ``num_replicas`` times
            ``num_microbatches`` parts. Gradients are added first within each replica, then across the replicas in
            replica order. The total is added to the gradients from before the step. Default: 1.
        reduction_order: how gradients and losses are added, as in ``Numerics``. With "tree", only the product of
            ``num_microbatches`` and ``num_replicas`` matters. Default: "sequential".
        **kwargs: the model's keyword inputs, for the whole mini-batch.

    Returns:
        The loss of the mini-batch, a detached 0-d tensor.

    Raises:
        ModelTypeError: the model is not an nn.Module.
        InputError: the batch cannot be split, there is a loss_fn but no target or a target but no loss_fn, or the
            loss is not a single number.

    """
    whole = as_model(model)
    if not isinstance(whole, nn.Module):
        raise ModelTypeError(
            f"the model must be an nn.Module or a list of nn.Modules; got {shown(whole)}; pass the module"
        )
    check_initialised(whole)
    if not is_count(num_microbatches):
        raise InputError(f"num_microbatches must be at least 1; got {shown(num_microbatches)}; pass 1 or more")
    loss_fn = as_function(loss_fn, "loss_fn")
    loss_weight = as_function(loss_weight, "loss_weight")
    intra_op_threads = as_threads(intra_op_threads)
    whole_layers = as_whole_layers(whole, whole_layers)
    first = (args, kwargs) if not microbatches else (microbatches[0].args, microbatches[0].kwargs)
    weight, reduction = resolve_loss(whole, first, loss_fn, loss_weight, loss_reduction, split_dims)
    splitter = Splitter(num_microbatches, False, split_dims, weight, reduction, reduction_order)
    splitter = replace(splitter, names=positional(whole.forward))
    batch = _split(
        splitter,
        GivenBatch(args, kwargs, target, microbatches),
        has_loss_fn=loss_fn is not None,
        num_replicas=num_replicas,
    )
    weighting = splitter.weighting(weights_in_numbers(splitter.weights(batch)))
    factors = weighting.factors
    seed = torch.initial_seed() if seed is None else as_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(intra_op_threads)
    step_data = StepData(seed, step, batch.inputs, targets=batch.targets, factors=factors)
    rule = _rule(loss_fn, loss_weight, loss_reduction, rows_in_front=split_dims == 0)
    norms = MiniBatchNorms(batch_norm, LocalCollectives())
    modules = {"": whole, **({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
    try:
        run = _Unpipelined(
            whole, loss_fn, norms.of_stage((0, 0), (0, 0), modules), batch.inputs[0], whole_layers, step_data
        )
        total: Tensor | None = None
        num_parts = num_replicas if reduction_order == "sequential" else num_tree_groups(len(factors))
        parts = _PartSums(modules, num_parts, reduction_order)
        norms.begin(step_data)
        for microbatch, (inputs, by_rows) in enumerate(zip(batch.inputs, factors, strict=True)):
            if microbatch and microbatch % (len(factors) // num_parts) == 0:
                run.deliver()
                total = parts.end(total)
            target_part = batch.targets[microbatch] if batch.targets else None
            loss = run.loss(inputs, target_part, Key(seed, step, microbatch), rule)
            factor = read(by_rows if rule is None else rule.factor(by_rows, microbatch, factors, batch.targets))
            root = scaled(loss, factor)
            run.backward([] if is_known_zero(factor) else [root])
            total = root.detach() if total is None else total + root.detach()
        norms.after_run(step_data)
        run.deliver()
        total = parts.end(total)
    except BaseException:
        norms.failed()
        raise
    finally:
        torch.set_num_threads(threads)
    assert total is not None  # a batch has at least one micro-batch
    return with_added(total, step_data.added, weighting)


def _rule(loss_fn: Any, loss_weight: Any, loss_reduction: Any, *, rows_in_front: bool) -> LossRule | None:
    """Return the rule that the first calls of a user's loss function show; None if its weights are known."""
    if loss_fn is None or reduces(loss_fn) or loss_weight is not None or loss_reduction is not None:
        return None
    return LossRule(weighs=True, rows_in_front=rows_in_front, elsewhere=lambda tensor: "")


def _split(splitter: Splitter, given: GivenBatch, *, has_loss_fn: bool, num_replicas: int) -> Batch:
    args, kwargs, target, microbatches = given
    if microbatches is not None:
        batch = splitter.as_given(microbatches, num_replicas=num_replicas)
        check_given_targets(batch, has_loss_fn=has_loss_fn)
        return batch
    call, without = "reference_step(model, x, loss_fn=loss_fn, target=x)", "call the model itself for its output"
    check_target(target, has_loss_fn=has_loss_fn, call=call, without=without)
    return splitter.batch(args, kwargs, target, num_replicas=num_replicas)


class _PartSums:
    """Adds the losses and the gradients of parts of a batch. A part is one replica's rows or a group of micro-batches.

    Gradients from before the step are set aside, and the sum over the parts is added to them. With a single part
    in sequential order, nothing is set aside.
    """

    def __init__(self, modules: Mapping[str, nn.Module], num_parts: int, order: ReductionOrder) -> None:
        all_parameters = [parameter for module in modules.values() for parameter in module.parameters()]
        self._parameters = all_parameters if num_parts > 1 or order == "tree" else []
        self._num_parts = num_parts
        self._sum = _in_a_row if order == "sequential" else _as_a_tree
        self._before = self._taken()
        self._grads: list[list[Tensor | None]] = []
        self._losses: list[Tensor | None] = []

    def end(self, loss: Tensor | None) -> Tensor | None:
        """Record the loss and the gradients of a part. Return the sum of all losses after the last part, else None."""
        self._losses.append(loss)
        self._grads.append(self._taken())
        if len(self._losses) < self._num_parts:
            return None
        for parameter, before, *grads in zip(self._parameters, self._before, *self._grads, strict=True):
            parameter.grad = _added(before, self._sum(grads))
        return self._sum(self._losses)

    def _taken(self) -> list[Tensor | None]:
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return grads


def _in_a_row(values: Sequence[Tensor | None]) -> Tensor | None:
    return reduce(_added, values)


def _as_a_tree(values: Sequence[Tensor | None]) -> Tensor | None:
    """Sum the values pairwise, in a balanced binary tree. The number of values must be a power of two."""
    half = len(values) // 2
    return _added(_as_a_tree(values[:half]), _as_a_tree(values[half:])) if half else values[0]


def _added(total: Tensor | None, value: Tensor | None) -> Tensor | None:
    return value if total is None else total if value is None else total + value


class _Unpipelined:
    """Computes the model's forward and loss. Each use of a shared weight has its own leaf tensor."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None,
        norms: Norms | None,
        inputs: Any,
        whole_layers: Collection[str],
        step_data: StepData,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._leaves: dict[tuple[str, int, int], tuple[nn.Parameter, Tensor]] = {}
        self._uses: Counter[int] = Counter()
        if isinstance(model, nn.Sequential) and is_in_a_row(model):
            layers = layers_of(model, whole_layers)
        else:
            layers, capture = opened(model, inputs, lambda layers: self._seen(layers, inputs), whole_layers)
            own = {name: id(parameter) for name, parameter in model.named_parameters()}
            self._uses.update(
                own[name] for call in capture.calls if not call.reads for name in call.uses if name in own
            )
        self._unsplit = Unsplit(model, layers, self._stand_ins, norms, step_data)

    def _seen(self, layers: Mapping[str, nn.Module], inputs: Any) -> Capture:
        model = self._model
        training = model.training
        with untouched(model, training), no_graph(model) if training else torch.no_grad():
            return record(model, layers, *inputs)

    def _stand_ins(self, name: str, number: int, parameters: Collection[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        leaves = {}
        for parameter in parameters:
            if self._uses[id(parameter)] > 1:
                leaf = with_attributes_of(parameter, parameter.detach().requires_grad_(parameter.requires_grad))
                leaves[parameter] = self._leaves.setdefault((name, number, id(parameter)), (parameter, leaf))[1]
        return leaves

    def loss(self, inputs: Any, target: Any, key: Key, rule: LossRule | None) -> Tensor:
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        args, kwargs = inputs
        with Caller.here([device.type], grad=True).autocast():
            output = self._unsplit(key, args, kwargs)
            if self._loss_fn is not None:
                compute = partial(self._unsplit.loss, self._loss_fn, key, output, target)
                loss: Tensor = compute() if rule is None else rule.loss(compute, output, target, None, None)
                return loss
        if isinstance(output, Tensor):
            return output
        own: Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
        return own

    def backward(self, roots: Sequence[Tensor]) -> None:
        """Run the backward pass of a micro-batch's loss, which ``roots`` contains, and of the losses of layers."""
        # edges, because for tensors torch would disable the torch function mode
        edges = [*map(edge_of, roots), *self._unsplit.added.edges()]
        if edges:
            here = torch.autograd.set_multithreading_enabled(False)  # the mode and the locks are of this thread
            with _without_autocast(), self._unsplit.in_backward, here:
                torch.autograd.backward(edges)

    def deliver(self) -> None:
        """Sum each shared weight's gradients over all uses, in call order, and add the sums to ``.grad``."""
        for parameter in {id(parameter): parameter for parameter, _ in self._leaves.values()}.values():
            deliver(parameter, [leaf.grad for own, leaf in self._leaves.values() if own is parameter])
        self._leaves.clear()


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Disable autocast, because the backward pass uses the dtypes of the forward."""
    with ExitStack() as stack:
        for kind in autocast_types():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
