"""Plan trials: runs each of several plans of a model for a few steps, without changing the model."""

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.layered_model import as_model, layered
from pipesched.capture.loss_reduction import reduces
from pipesched.capture.stage_body import loss_entry
from pipesched.devices.generators import generators_kept
from pipesched.model.stale_weights import release_model
from pipesched.model.state_guard import set_aside
from pipesched.pipeline.options import Numerics
from pipesched.pipeline.pipeline import Pipeline
from pipesched.planning.confirmation import settled
from pipesched.planning.plan import Plan
from pipesched.runtime.microbatches import SplitDims, Splitter
from pipesched.runtime.rank_host import RankHost
from pipesched.simulation.trace import Trace
from pipesched.tensors.keyed_random import outside_kept
from pipesched.tensors.meta_tensors import is_expanded
from pipesched.tensors.payload import pytree
from pipesched.torch_checks import as_call

__all__ = ["PlanTrial"]

_ROUNDS = 10  # the maximum number of turns per plan; turns are short, so a slowdown of the machine affects all plans
_STEPS = 2  # measured steps per turn, after one warm-up step
_LEAST_ROUNDS = 4  # the minimum number of turns per plan before the trials may end because the result is clear
_ENOUGH_S = 5.0  # another turn starts only if the trials will probably end within this number of seconds


@dataclass(frozen=True)
class PlanTrial:
    """Runs plans for a few steps, with a given model, batch and ranks."""

    model: Any
    sample: Any  #: one micro-batch; its rows are repeated to fill a batch
    loss_fn: Callable[[Any, Any], Any] | None  #: None: the model's own loss, or else the sum of its outputs
    target: Any  #: the sample's target
    split_dims: SplitDims
    where: Mapping[str, Any]  #: devices or mesh, and whole_layers, as for ``Pipeline``
    host: RankHost  #: the host of the ranks; also makes processes agree on values
    batch_size: int
    #: Whether to run every plan. False: leave out plans that would probably end too late, except the first plan. Over a
    #: mesh, rank 0's value counts.
    runs_all: bool = True

    def run(self, plans: Sequence[Plan], told: Callable[[float], None]) -> list[list[Trace]]:
        """Run the plans in turn, and return a list of measured steps for each plan.

        In one process, the list is empty for a plan that runs out of device memory, and the error is raised only if no
        plan fits. Over a mesh, the error is always raised. The list is also empty for a plan that did not run because
        the steps of earlier plans took too long (see ``runs_all``). Collective over a mesh.

        Args:
            plans: the plans to run, the most important plan first.
            told: a function that is called each time a plan has run a few steps. The argument is the progress, a number
                from 0 to 1. The trials may end before the progress reaches 1.

        """
        with torch.inference_mode(False), torch.enable_grad():
            return self._run(plans, told)

    def _run(self, plans: Sequence[Plan], told: Callable[[float], None]) -> list[list[Trace]]:
        steps: list[list[Trace]] = [[] for _ in plans]
        args, kwargs, target = self._batch()
        with self._turns(plans) as turn_of:
            begin = time.perf_counter()
            fit = list(range(len(plans)))
            for turn in range(_ROUNDS):
                for number in [*fit]:
                    if not turn and self.host.collectives.agreed(partial(self._leaves_out, number, begin, steps)):
                        fit = [other for other in fit if other < number]
                        break
                    try:
                        steps[number] += self._steps(turn_of(number), args, kwargs, target)
                    except torch.OutOfMemoryError:
                        if len(fit) == 1 or not self.host.grid.in_one_process:
                            raise
                        fit.remove(number)
                        steps[number].clear()
                    told((turn + (number + 1) / len(plans)) / _ROUNDS)
                if self.host.collectives.agreed(partial(_is_enough, turn + 1, begin, steps)):
                    break
        return steps

    def _leaves_out(self, done: int, begin: float, steps: Sequence[Sequence[Trace]]) -> bool:
        return not self.runs_all and _is_late(done, begin, steps)

    def _steps(self, pipe: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Iterator[Trace]:
        for step in range(1 + _STEPS):
            pipe.step(*args, target=target, **kwargs)
            release_model(pipe.model)  # the weights have not changed, and another plan runs on the model next
            trace = pipe.gather_trace()
            if step:  # the first step is warm-up
                yield trace

    def _batch(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return a full batch made of copies of the sample's rows, so that layers can safely write to the batch."""
        args, kwargs = as_call(self.sample)
        splitter = Splitter(1, fixed=False, split_dims=self.split_dims)
        target = self.target
        if self.loss_fn is None:
            target = torch.zeros(splitter.batch(args, kwargs).rows)
        batch = splitter.resized(args, kwargs, target, self.batch_size)
        (args, kwargs), target = pytree.tree_map_only(Tensor, _copy, (batch.inputs[0], batch.targets[0]))
        return args, kwargs, target

    @contextmanager
    def _turns(self, plans: Sequence[Plan]) -> Iterator[Callable[[int], Pipeline]]:
        """Yield a function that maps the index of a plan to the pipeline that runs this plan.

        In one process, a single pipeline switches between the plans; over a mesh, every plan has its own pipeline.
        """
        model = as_model(self.model)
        loss_fn = self.loss_fn or _own_loss
        written = layered(model, as_call(self.sample)).written
        with ExitStack() as stack:
            stack.enter_context(set_aside(loss_fn))
            stack.enter_context(_on_stand_ins(model, written))
            if isinstance(loss_fn, nn.Module):
                stack.enter_context(_on_stand_ins(loss_fn))
            options: dict[str, Any] = {
                "loss_fn": loss_fn,
                "numerics": Numerics(split_dims=self.split_dims, loss_reduction=None if reduces(loss_fn) else "mean"),
                **self.where,
            }
            kept = plans[:1] if self.host.grid.in_one_process else plans
            pipes = [stack.enter_context(Pipeline(model, self.sample, plan=plan, **options)) for plan in kept]

            def turn_of(number: int) -> Pipeline:
                if len(pipes) < len(plans):
                    pipes[0].replan(plans[number])
                    return pipes[0]
                return pipes[number]

            yield turn_of


def _is_enough(rounds: int, begin: float, steps: Sequence[Sequence[Trace]]) -> bool:
    """Return whether the trials should end after this number of rounds, which began at ``begin``."""
    return _is_late(rounds, begin, steps) or (rounds >= _LEAST_ROUNDS and settled(steps))


def _is_late(done: int, begin: float, steps: Sequence[Sequence[Trace]]) -> bool:
    """Return whether one more turn or round would probably end too late.

    The result is False if no plan has run yet.

    Args:
        done: the number of turns or rounds since ``begin``. The next one is assumed to take their mean time.
        begin: the start of the first turn, in seconds.
        steps: the measured steps of each plan.

    """
    if not any(steps):
        return False
    return (time.perf_counter() - begin) * (done + 1) / done > _ENOUGH_S


@contextmanager
def _on_stand_ins(model: nn.Module, written: Collection[str] = ()) -> Iterator[None]:
    """Replace parameters and buffers with stand-ins inside a ``with`` block, so that steps do not change the originals.

    The stand-in of a parameter shares the parameter's memory, but has its own gradient and no hooks. Buffers, and the
    parameters that forwards write to, are copied.

    Args:
        model: the module.
        written: the names of parameters that forwards write to. Default: none.

    """
    copied = {id(parameter) for name, parameter in model.named_parameters() if name in written}
    stand_ins: dict[int, Tensor] = {}  # keyed by the id of the original, so that tied tensors stay tied
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    with generators_kept(devices), outside_kept(alone=False), set_aside(model):
        for module in model.modules():
            tensors = [
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ]
            for name, tensor in tensors:
                setattr(module, name, stand_ins.setdefault(id(tensor), _stand_in(tensor, id(tensor) in copied)))
        yield


def _stand_in(tensor: Tensor, copied: bool) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return copy.copy(tensor) if is_expanded(tensor) else tensor.clone()
    made = copy.copy(tensor)
    if copied:
        made.data = tensor.data.clone()
    return made


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _own_loss(output: Any, _: Any) -> Tensor:
    """Return the model's own loss or, if the model has no loss, the sum of the model's outputs."""
    loss = loss_entry(output)
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.sum().float() for leaf in leaves), torch.zeros(()))
