"""Batch norm: updates running statistics once per mini-batch, although each micro-batch is normalised separately.

This is deferred batch normalisation as in torchgpipe (Kim et al. 2020, arXiv:2004.09910): each micro-batch is
normalised with its own mean and variance, and the running statistics are updated once per mini-batch, just as a single
forward over the whole mini-batch would update them. The statistics that each call of ``functional.batch_norm`` computes
are stored, and combined in micro-batch order after the run (Chan et al. 1983). The running statistics are therefore
bit-identical for every schedule, and a mini-batch may have any number of micro-batches of any sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched.errors import InputError, ScheduleError
from pipesched.model.module_tree import normalised_over_rows, with_running_statistics
from pipesched.program.program import Program
from pipesched.runtime.stage.run_parts import RunPart
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.exchange import Move, Trade, moved
from pipesched.tensors.function_mode import Handler
from pipesched.units import and_more
from pipesched.user_warning import warn

__all__ = ["SENT_TYPES", "BatchNormMode", "MiniBatchNorms", "Norms"]

#: When running statistics are updated: with each micro-batch, or once per mini-batch.
BatchNormMode = Literal["micro-batch", "mini-batch"]


class _Part(NamedTuple):
    """The statistics of each channel in a call (number of values, mean, unbiased variance), and the call's momentum."""

    numbers: int
    mean: Tensor
    var: Tensor
    momentum: float


_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
#: (module index, call number) -> statistics, keyed by micro-batch
_Seen = dict[tuple[int, int], dict[int, _Part]]


#: The types that a message of statistics contains in addition to tensors.
SENT_TYPES = (_Part,)


class Norms:
    """Collects the statistics of one stage's BatchNorm calls per micro-batch, instead of updating running statistics.

    ``modules`` are searched for BatchNorm layers at the start of every run.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._roots = modules
        self._modules: list[Any] = []
        self._before: list[Tensor | None] = []
        self._index: dict[int, int] = {}
        self._seen: _Seen = {}
        self.microbatch = 0  # the micro-batch whose forward is running
        self.uncounted = _Uncounted(self)  # replaces this object in backward passes, which may recompute layers

    def begin(self) -> None:
        """Start a run: find the BatchNorm layers and save their batch counters (``num_batches_tracked``)."""
        found = [module for root in self._roots.values() for module in root.modules()]
        self._modules = [m for m in dict.fromkeys(found) if isinstance(getattr(m, "running_mean", None), Tensor)]
        self._index = {id(module.running_mean): index for index, module in enumerate(self._modules)}
        self._before = [None if tracked is None else tracked.clone() for tracked in self._tracked()]
        self._seen = {}

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        """Return the handler for ``functional.batch_norm``, or None for any other function."""
        return self._counted if function is functional.batch_norm else None

    def _counted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, seen = self.normalised(args, kwargs)
        if seen is not None:
            index, part = seen
            number = 0
            while self.microbatch in self._seen.setdefault((index, number), {}):
                number += 1
            self._seen[index, number][self.microbatch] = part
        return output

    def normalised(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[int, _Part] | None]:
        """Call ``functional.batch_norm`` without changing the running statistics.

        Returns:
            (output, (index of the module, statistics of the call)), or (output, None) if the call would not update
            running statistics.

        """
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        running = given["running_mean"]
        index = self._index.get(id(given["running_mean"]))
        if index is None or not given.get("training", False):
            return functional.batch_norm(**given), None
        mean = torch.zeros_like(running)
        var = torch.zeros_like(running)
        momentum = given.get("momentum", 0.1)
        given["momentum"] = 1.0  # so that the buffers receive the batch's own statistics
        output = functional.batch_norm(**{**given, "running_mean": mean, "running_var": var})
        numbers = given["input"].numel() // given["input"].shape[1]
        return output, (index, _Part(numbers=numbers, mean=mean, var=var, momentum=momentum))

    def restore(self) -> None:
        """Reset the batch counters to their values before the run, because forwards have incremented the counters."""
        for tracked, before in zip(self._tracked(), self._before, strict=True):
            if tracked is not None and before is not None:
                tracked.copy_(before)

    def taken(self) -> _Seen:
        """Return the collected statistics and clear them."""
        seen = self._seen
        self._seen = {}
        return seen

    @torch.no_grad()
    def commit(self, replicas: Sequence[Sequence[_Seen]]) -> None:
        """Update the running statistics as a single forward over all micro-batches would update them.

        ``replicas`` contains, for each replica, the statistics that its stages with the same weights collected.
        """
        every = [(replica, one) for replica, seen in enumerate(replicas) for one in seen]
        for index, number in sorted({key for _, one in every for key in one}):
            parts = {
                (replica, microbatch): part
                for replica, one in every
                for microbatch, part in one.get((index, number), {}).items()
            }
            module = self._modules[index]
            momentum = next(iter(parts.values())).momentum
            tracked = getattr(module, "num_batches_tracked", None)
            if tracked is not None:
                tracked.add_(1)
                if getattr(module, "momentum", momentum) is None:  # None: the mean over all mini-batches so far
                    momentum = 1.0 / float(tracked)
            whole = _combined([parts[microbatch] for microbatch in sorted(parts)], module.running_mean.device)
            for running, new in zip((module.running_mean, module.running_var), whole, strict=True):
                running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)

    def _tracked(self) -> list[Any]:
        return [getattr(module, "num_batches_tracked", None) for module in self._modules]


class _Uncounted:
    """Intercepts ``functional.batch_norm`` in recomputed layers, so that no statistics are updated or collected."""

    def __init__(self, norms: Norms) -> None:
        self._norms = norms

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        return self._normalise if function is functional.batch_norm else None

    def _normalise(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._norms.normalised(args, kwargs)[0]


def _combined(parts: Sequence[_Part], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased variance of each channel over all parts."""
    total = sum(part.numbers for part in parts)
    means = torch.stack([part.mean.to(device).double() for part in parts])
    within = torch.stack([part.var.to(device).double() * (part.numbers - 1) for part in parts])
    counts = torch.tensor([part.numbers for part in parts], dtype=torch.double, device=device)[:, None]
    mean = (means * counts).sum(0) / total
    squares = (within + counts * (means - mean) ** 2).sum(0)
    return mean, squares / (total - 1)


@dataclass(frozen=True)
class _StageNorms:
    """A stage's `Norms` (None if another process runs the stage), and two ranks.

    ``rank`` runs the stage, and ``home_rank`` runs the stage that owns the weights.
    """

    norms: Norms | None
    rank: int
    home_rank: int


class MiniBatchNorms(RunPart):
    """The `Norms` of all stages. In "micro-batch" mode, no stage has `Norms`, and BatchNorm layers run unchanged.

    The running statistics are updated once after a run, or not at all if the run fails.
    """

    def __init__(self, mode: BatchNormMode, trade: Trade) -> None:
        if mode not in get_args(BatchNormMode):
            raise InputError(
                f"batch_norm must be one of {', '.join(get_args(BatchNormMode))}; got {mode!r}; pass "
                f"'micro-batch' to update the running statistics once per micro-batch, or 'mini-batch' to update them "
                f"once per mini-batch"
            )
        self.active = mode == "mini-batch"
        self._trade = trade
        self._all: dict[tuple[int, int], _StageNorms] = {}
        #: The norms of this process whose batch counters the present run may have changed.
        self._counted: list[Norms] = []

    def check(self, model: nn.Module, program: Program, *, streams: bool) -> None:
        """Warn about layers whose normalisation or running statistics differ from an unsplit batch.

        ``streams`` states whether steps overlap. Raises ScheduleError if steps overlap and the mode is "mini-batch", or
        if the program runs copies of layers with running statistics and the mode is "micro-batch".
        """
        if self.active:
            if streams:
                raise ScheduleError(
                    f"batch_norm='mini-batch' needs a schedule in which each step ends before the next begins; the "
                    f"steps of {program.name} overlap; choose a synchronous schedule, or batch_norm='micro-batch'"
                )
            return
        names = normalised_over_rows(model)
        if names and program.num_microbatches > 1:
            warn(
                f"BatchNorm sees one micro-batch at a time; each of {program.num_microbatches} micro-batches is "
                f"normalised separately by layer {and_more(names)}; to compute running statistics over the whole "
                f"batch, pass numerics=Numerics(batch_norm='mini-batch'); to get the gradients of an unsplit batch, "
                f"replace BatchNorm with a norm over features, such as LayerNorm; otherwise ignore this warning"
            )
        names = with_running_statistics(model)
        if names and program.num_weights < program.num_stages:
            raise ScheduleError(
                f"running statistics must include all micro-batches; {program.name} runs some of them on copies of the "
                f"layers, and the running statistics of layer {and_more(names)} would miss these; pass "
                f"numerics=Numerics(batch_norm='mini-batch') to include them, or use a schedule with a single chain of "
                f"stages, such as dualpipe-v"
            )

    def of_stage(
        self, stage: tuple[int, int], ranks: tuple[int, int], modules: Mapping[str, nn.Module]
    ) -> Norms | None:
        """Register a stage and return its `Norms`.

        Returns None if the mode is "micro-batch" or the stage is in another process.

        Args:
            stage: the stage's number, and the number of the stage that owns the weights.
            ranks: the ranks of these two stages, in the same order.
            modules: the modules that the stage runs.

        """
        if not self.active:
            return None
        norms = Norms(modules) if self._trade.holds(ranks[0]) else None
        self._all[stage] = _StageNorms(norms, *ranks)
        return norms

    def begin(self, step_data: StepData) -> None:
        self._counted = self._own()
        for norms in self._counted:
            norms.begin()

    def failed(self) -> None:
        for norms in self._counted:
            norms.restore()
        self._counted = []

    def after_run(self, step_data: StepData) -> None:
        self.failed()  # forwards have incremented the batch counters
        moves: list[Move] = [(held.rank, held.home_rank, partial(_taken, held)) for _, held in self._sorted()]
        arrived: dict[int, list[_Seen]] = {}
        for ((_, home), _), seen in zip(self._sorted(), moved(self._trade, "statistics", moves), strict=True):
            arrived.setdefault(home, []).append(seen)
        for (stage, home), held in self._sorted():
            if held.norms is not None and stage == home:
                held.norms.commit(self._trade.gather_over_replicas(arrived[home]))

    def _own(self) -> list[Norms]:
        return [held.norms for held in self._all.values() if held.norms is not None]

    def _sorted(self) -> list[tuple[tuple[int, int], _StageNorms]]:
        return sorted(self._all.items(), key=lambda item: item[0])


def _taken(held: _StageNorms) -> _Seen:
    return held.norms.taken() if held.norms is not None else {}
