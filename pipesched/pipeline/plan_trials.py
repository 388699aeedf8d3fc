"""Plan trials: plans of a model run for some steps, in turn, on the devices that are there, and leave the model as
it was.
"""

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.layered_model import as_model, layered
from pipesched.capture.stage_body import loss_entry
from pipesched.model.stale_weights import release_model
from pipesched.model.state_guard import set_aside
from pipesched.pipeline.options import Numerics
from pipesched.pipeline.pipeline import Pipeline
from pipesched.planning.plan import Plan
from pipesched.runtime.microbatches import SplitDims, Splitter
from pipesched.runtime.rank_host import RankHost, ThreadRanks
from pipesched.simulation.trace import Trace
from pipesched.tensors.keyed_random import outside_kept
from pipesched.tensors.meta_tensors import is_expanded
from pipesched.tensors.payload import pytree
from pipesched.torch_checks import as_call

__all__ = ["Trial"]

_ROUNDS = 10  # in which each plan has its turn: a machine that others slow down does so for seconds
_STEPS = 2  # that count, of a plan's turn, after one that warms up
_ENOUGH_S = 5.0  # no further round after that


@dataclass(frozen=True)
class Trial:
    """Where and with what plans run. sample, target: a micro-batch, whose rows fill a batch of ``batch_size``, over and
    over; without loss_fn the model's own loss counts, or, where it has none, a sum of what it returns. where: devices
    or mesh, and whole_layers, as for ``Pipeline``; over a mesh ``run`` is collective. host: the same place, to agree on
    what all do.
    """

    model: Any
    sample: Any
    loss_fn: Callable[[Any, Any], Any] | None
    target: Any
    split_dims: SplitDims
    where: Mapping[str, Any]
    host: RankHost
    batch_size: int

    def run(self, plans: Sequence[Plan], told: Callable[[float], None]) -> list[list[Trace]]:
        """The measured steps of each plan; none of one that has no room on its device while another has. told: which
        share of the work is done, at most.
        """
        with torch.inference_mode(False), torch.enable_grad():
            return self._run(plans, told)

    def _run(self, plans: Sequence[Plan], told: Callable[[float], None]) -> list[list[Trace]]:
        steps: list[list[Trace]] = [[] for _ in plans]
        args, kwargs, target = self._batch()
        begin = time.perf_counter()
        with self._turns(plans) as turn_of:
            fit = list(range(len(plans)))
            for turn in range(_ROUNDS):
                for number in [*fit]:
                    try:
                        steps[number] += self._steps(turn_of(number), args, kwargs, target)
                    except torch.OutOfMemoryError:
                        if len(fit) == 1 or not isinstance(self.host, ThreadRanks):
                            raise
                        fit.remove(number)
                        steps[number].clear()
                    told((turn + (number + 1) / len(plans)) / _ROUNDS)
                if self.host.agreed(lambda: time.perf_counter() - begin > _ENOUGH_S):
                    break
        return steps

    def _steps(self, pipe: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Iterator[Trace]:
        for step in range(1 + _STEPS):
            pipe.step(*args, target=target, **kwargs)
            release_model(pipe.model)  # nothing updates weights here, and other plans run on them next
            trace = pipe.gather_trace()
            if step:  # the first one warms up
                yield trace

    def _batch(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """A whole batch of the sample's rows: copies, which layers may write on."""
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
        """Gives the pipeline that runs a plan, by its number: one that goes from plan to plan, as far as one can."""
        model = as_model(self.model)
        loss_fn = self.loss_fn or _own_loss
        written = layered(model, as_call(self.sample)).written
        with ExitStack() as stack:
            stack.enter_context(set_aside(loss_fn))
            stack.enter_context(_on_stand_ins(model, written))
            if isinstance(loss_fn, nn.Module):
                stack.enter_context(_on_stand_ins(loss_fn))
            own: dict[str, Any] = {"loss_fn": loss_fn, "numerics": Numerics(split_dims=self.split_dims), **self.where}
            kept = plans[:1] if isinstance(self.host, ThreadRanks) else plans
            pipes = [stack.enter_context(Pipeline(model, self.sample, plan=plan, **own)) for plan in kept]

            def turn_of(number: int) -> Pipeline:
                if len(pipes) < len(plans):
                    pipes[0].replan(plans[number])
                    return pipes[0]
                return pipes[number]

            yield turn_of


@contextmanager
def _on_stand_ins(model: nn.Module, written: Collection[str] = ()) -> Iterator[None]:
    """Train the model without a trace: its parameters stand aside for others around the same numbers, with gradients of
    their own and no hooks, its buffers for copies; afterwards all is as it was. written: the names of parameters that
    forwards write to, and that stand aside for copies, too.
    """
    copied = {id(parameter) for name, parameter in model.named_parameters() if name in written}
    others: dict[int, Tensor] = {}  # what is tied stays tied
    with torch.random.fork_rng(), outside_kept(alone=False), set_aside(model):
        for module in model.modules():
            own = [
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ]
            for name, tensor in own:
                setattr(module, name, others.setdefault(id(tensor), _stand_in(tensor, id(tensor) in copied)))
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
    """The model's own loss; where it has none, a sum of what it returns."""
    loss = loss_entry(output)
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.sum().float() for leaf in leaves), torch.zeros(()))
