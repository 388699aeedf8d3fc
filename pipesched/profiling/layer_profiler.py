"""Layer profiler: measures the costs of layers for one micro-batch, without changing the model."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.devices.generators import generators_kept
from pipesched.model.state_guard import attributes_kept, unchanged
from pipesched.profiling.contention import crowd
from pipesched.profiling.layer_memory_probe import Layer, sizes_of
from pipesched.profiling.plausibility import Measured, doubt
from pipesched.profiling.timing_run import Subject, TimingRun
from pipesched.progress import advance, progress_here, work_for
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.simulation.layer_costs import TIMES, LayerCosts
from pipesched.simulation.layer_memory import LayerMemory
from pipesched.simulation.overheads import RanksAre
from pipesched.tensors.caller_context import Caller, intra_op
from pipesched.tensors.keyed_random import outside_kept
from pipesched.tensors.meta_tensors import lacks_contents, stand_in
from pipesched.tensors.payload import Payload, pytree
from pipesched.user_warning import warn

__all__ = ["QUICK", "Between", "MeasurementEffort", "measure_calls", "measure_layers"]

#: Name of a call -> the layer and its arguments. If the arguments are None, the layer gets the previous layer's output.
Calls = Mapping[str, tuple[nn.Module, Payload | None]]


@dataclass(frozen=True, kw_only=True)
class MeasurementEffort:
    """The settings that determine how layers are measured, and how thoroughly."""

    #: Maximum number of rounds. A round measures the times of every layer once.
    rounds: int = 3
    #: The time in seconds after which no further round of a group of layers begins.
    enough_s: float = 0.5
    #: Whether to repeat implausible measurements, and to warn if they stay implausible.
    checks: bool = False
    #: Whether to also measure how much longer layers take while another rank computes.
    crowds: bool = False
    #: Whether the ranks of the plan will be "threads" or "processes". For threads, layers are measured in a new thread,
    #: for processes in the current thread, because memory allocators treat new threads differently. For example, glibc
    #: maps a tensor of more than 64 MiB again each time that a new thread allocates it.
    ranks_are: RanksAre = "threads"


#: The default settings: thorough enough to choose stage boundaries.
QUICK = MeasurementEffort()

#: Layers are measured in groups of about this size, so that weights leave the caches between rounds, as in a step.
_TOGETHER_BYTES = 1 << 26


def measure_layers(
    layers: Mapping[str, nn.Module],
    sample: Any,
    device: torch.device,
    intra_op_threads: int,
    effort: MeasurementEffort = QUICK,
) -> dict[str, LayerCosts]:
    """Measure the costs of a chain of layers on one micro-batch. Each time is the median of several runs.

    If several layers are of the same kind and have the same input shapes, only some of them are measured. If no module
    is in training mode, all modules run in training mode. Otherwise, each module keeps its mode.

    Args:
        layers: layer name -> layer, in the order of the chain.
        sample: the arguments (args, kwargs) of the first layer.
        device: the device to run on.
        intra_op_threads: the number of intra-op threads.
        effort: how thoroughly to measure. Default: thorough enough to choose stage boundaries.

    """
    arrived = Payload.of(pytree.tree_map_only(Tensor, stand_in, sample))
    calls = {name: (layer, None if at else arrived) for at, (name, layer) in enumerate(layers.items())}
    return _measured(calls, device, intra_op_threads, effort)


def measure_calls(
    calls: Mapping[str, tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]],
    wanted: Collection[str],
    device: torch.device,
    intra_op_threads: int,
    effort: MeasurementEffort = QUICK,
) -> dict[str, LayerCosts]:
    """Measure layers like ``measure_layers``, but call each layer with its own arguments.

    Args:
        calls: name -> a layer and its arguments (args, kwargs).
        wanted: the names of calls that compute the gradients of all floating-point arguments. Other calls compute only
            the gradients of arguments that require gradients.
        device: the device to run on.
        intra_op_threads: the number of intra-op threads.
        effort: how thoroughly to measure. Default: thorough enough to choose stage boundaries.

    """
    given = {
        name: (layer, Payload.of(pytree.tree_map_only(Tensor, _wanting if name in wanted else _as_given, arguments)))
        for name, (layer, arguments) in calls.items()
    }
    return _measured(given, device, intra_op_threads, effort)


def _measured(calls: Calls, device: torch.device, threads: int, effort: MeasurementEffort) -> dict[str, LayerCosts]:
    """Measure layers in a new thread or in the current thread, as ``effort.ranks_are`` requires."""
    caller = replace(Caller.here([device.type], grad=True), inference=False)
    layers = [layer for layer, _ in calls.values()]
    survey = _Survey(device, caller, threads, effort)

    def run() -> dict[str, LayerCosts]:
        with intra_op(threads), caller.held(), _training(layers), generators_kept([device]), outside_kept():
            return survey.of(calls)

    if effort.ranks_are == "threads":
        with ThreadPoolExecutor(1, "pipesched-profiler", work_for, (progress_here(),)) as pool:
            costs = pool.submit(run).result()
    else:
        costs = run()
    for warning in survey.warnings:  # issued in the caller's thread, so that warnings point at the user's line
        warn(warning)
    return costs


def _as_given(tensor: Tensor) -> Tensor:
    made = stand_in(tensor)
    return made if made is tensor else made.requires_grad_(tensor.requires_grad)


def _wanting(tensor: Tensor) -> Tensor:
    return stand_in(tensor).detach().requires_grad_(tensor.is_floating_point())


@dataclass(kw_only=True)
class _Kind:
    """A group of layer calls that have the same costs, and the measurements of these calls."""

    memory: LayerMemory = field(default_factory=LayerMemory)
    parameter_bytes: int = 0
    #: The output of each call; None if the call is a `Between` whose function cannot run alone.
    output: Payload | None = None
    #: The calls that are measured.
    subjects: list[Subject] = field(default_factory=list)
    #: For each round, the slowdown factor of these calls while other layers ran in another thread.
    crowding: list[float] = field(default_factory=list)

    def costs(self) -> LayerCosts:
        """Return the costs, as medians over all measured calls."""
        seconds: dict[str, list[float]] = {column: [] for column in TIMES}
        for subject in self.subjects:
            for column in TIMES:
                seconds[column] += subject.seconds[column]
        medians: dict[str, Any] = {column: median(took_s or [0.0]) for column, took_s in seconds.items()}
        split_s = medians["input_grad_s"] + medians["weight_grad_s"]
        if 0 < split_s < medians["backward_s"]:  # noise, because I and W together do at least the work of B
            for part in ("input_grad_s", "weight_grad_s"):
                medians[part] *= medians["backward_s"] / split_s
        wholes = [medians["forward_s"], medians["backward_s"]]
        spread = _spread(seconds["forward_s"]) * wholes[0] + _spread(seconds["backward_s"]) * wholes[1]
        waiting_s = sum(
            min((waited_s for subject in self.subjects for waited_s in subject.waited[column]), default=0.0)
            for column in ("forward_s", "backward_s")
        )
        return LayerCosts(
            **medians,
            parameter_bytes=self.parameter_bytes,
            memory=self.memory,
            waiting_s=waiting_s if waiting_s > _WAITS * sum(wholes) else 0.0,
            crowded_s=sum(wholes) * max(0.0, median(self.crowding or [1.0]) - 1),
            spread=spread / sum(wholes) if any(wholes) else 0.0,
        )

    def measured(self, costs: LayerCosts) -> Measured:
        """Return the costs and times that the plausibility check needs."""
        each_s = [
            median(subject.seconds["forward_s"]) + median(subject.seconds["backward_s"]) for subject in self.subjects
        ]
        trains = any(
            any(subject.given.needs_grad) and any(weight.requires_grad for weight in subject.layer.parameters())
            for subject in self.subjects
        )
        return Measured(costs, each_s, trains)


def _spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range of the times, divided by their median."""
    if len(seconds) < 2 or not median(seconds):
        return 0.0
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / median(seconds)


_WAITS = 0.1  # a layer that spends more than this fraction of its time waiting is treated as a waiting layer


class Between(nn.Module):
    """A layer that calls a function from the code between layers. Its costs are 0 if the function cannot run alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def extra_repr(self) -> str:
        return str(self._function)


class _Survey:
    """Measures the layer calls of a model. If several calls have the same costs, only some of them are measured."""

    def __init__(self, device: torch.device, caller: Caller, threads: int, effort: MeasurementEffort) -> None:
        self._device = device
        self._caller = caller
        self._threads = threads
        self._effort = effort
        self._kinds: dict[Any, _Kind] = {}
        self._laps: list[Sequence[Subject]] = []
        #: Warnings about implausible measurements.
        self.warnings: list[str] = []

    def of(self, calls: Calls) -> dict[str, LayerCosts]:
        """Measure the calls in order, in groups whose weights and activations are larger than the CPU's caches."""
        kinds: dict[str, Any] = {}
        together: list[Subject] = []
        room = _TOGETHER_BYTES
        arrived: Payload | None = None
        for name, (layer, arguments) in calls.items():
            given: Any = arrived if arguments is None else arguments
            kind = kinds[name] = _kind(layer, given)
            subject = Subject(name=name, layer=layer, given=given)
            new = kind not in self._kinds
            if new:
                self._kinds[kind] = self._looked(subject)
            own = self._kinds[kind]
            if (new or together) and own.output is not None:
                own.subjects.append(subject)
                together.append(subject)
                room -= own.parameter_bytes + sum(vars(own.memory).values())
            if together and (room <= 0 or lacks_contents(layer)):
                self._time(together)
                together = []
                room = _TOGETHER_BYTES
            arrived = own.output
        if together:
            self._time(together)
        if self._effort.checks:
            self._check(kinds)
        if self._effort.crowds and self._device.type == "cpu":
            self._crowd(kinds)
        return {name: self._kinds[kind].costs() for name, kind in kinds.items()}

    def _crowd(self, kinds: Mapping[str, Any]) -> None:
        for lap in self._laps:
            effort = self._effort
            ratios = crowd(lap, self._device, self._caller, self._threads, effort.rounds, effort.enough_s)
            for subject in lap:
                self._kinds[kinds[subject.name]].crowding += ratios

    def _check(self, kinds: Mapping[str, Any]) -> None:
        for lap in self._laps:
            if self._doubts(kinds).keys() & {subject.name for subject in lap}:
                self._time(lap, known=True)
        for name, why in self._doubts(kinds).items():
            self.warnings.append(
                f"layer times must be measured on an idle machine; two measurements of layer {name!r} are implausible: "
                f"{why}; measure again when the machine is idle, or ignore this warning if the layer really takes this "
                f"long"
            )

    def _doubts(self, kinds: Mapping[str, Any]) -> dict[str, str]:
        """Return descriptions of implausible measurements, keyed by the name of the first layer of each kind."""
        costs = {kind: known.costs() for kind, known in self._kinds.items()}
        all_s = sum(costs[kind].forward_s + costs[kind].backward_s for kind in kinds.values())
        first: dict[Any, str] = {}
        for name, kind in kinds.items():
            first.setdefault(kind, name)
        doubts = {name: doubt(self._kinds[kind].measured(costs[kind]), all_s) for kind, name in first.items()}
        return {name: why for name, why in doubts.items() if why}

    # ---- times --------------------------------------------------------------------------------------------------

    def _time(self, together: Sequence[Subject], *, known: bool = False) -> None:
        if not known:
            self._laps.append(together)
        lap = TimingRun(together, self._device, self._caller)
        lap.held(lambda: self._rounds(lap))
        lap.forget()

    def _rounds(self, lap: TimingRun) -> None:
        lap.round()
        lap.weight_round(apart=True)
        lap.clear()
        begin = perf_counter()
        for _ in range(self._effort.rounds):
            lap.round()
            lap.weight_round(apart=False)
            lap.weight_round(apart=True)
            if perf_counter() - begin > self._effort.enough_s:
                break
        lap.correct()

    # ---- sizes --------------------------------------------------------------------------------------------------

    def _looked(self, subject: Subject) -> _Kind:
        lap = TimingRun([subject], self._device, self._caller)
        found: _Kind
        try:
            found = lap.held(lambda: self._look(lap))
        except Exception:
            if not isinstance(subject.layer, Between):
                raise
            found = _Kind()
        finally:
            lap.forget()
        return found

    def _look(self, lap: TimingRun) -> _Kind:
        subject = lap.subjects[0]
        output = Payload.of(((lap.round().output,), {}))
        stage = _IsolatedLayer(lap, subject, self._device, self._caller)
        weights = [tensor for tensor in lap.parameters() if tensor.requires_grad]
        layer = Layer(
            stage=stage.stage,
            run=stage.forward,
            release=stage.release,
            weights=weights,
            buffer_bytes=_nbytes(subject.layer.buffers()),
        )
        memory = sizes_of(layer, subject.given).memory
        return _Kind(memory=memory, parameter_bytes=_nbytes(subject.layer.parameters()), output=output)


class _UnregisteredLayer(nn.Module):
    """Calls a layer without registering the layer's parameters.

    While a layer is timed, its parameters are replaced by copies, which are plain tensors. A Stage splits the backward
    only if all registered parameters are of type ``nn.Parameter``, so the copies must not be registered.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._layer[0](*args, **kwargs)


class _IsolatedLayer:
    """A layer that runs as a stage and has already run F, I and W once. ``caller`` contains the autocast settings."""

    def __init__(self, lap: TimingRun, subject: Subject, device: torch.device, caller: Caller) -> None:
        self._lap = lap
        self._layer = lap.modules_of[subject]
        self.stage = Stage({subject.name: _UnregisteredLayer(self._layer)}, device)
        self._caller = caller
        self._step = StepData(0, 0, [])
        output = self.forward(subject.given.map_tensors(lambda tensor: tensor.to(device, copy=True)), split=True)
        self.stage.input_grad(0, tuple(torch.ones_like(tensor) for tensor in output.wanted))
        advance()
        self.stage.weight_grad(0)

    def forward(self, given: Payload, split: bool) -> Payload:
        """Start a new step, and return the output of the layer for ``given``."""
        self._lap.forget_graphs(self._layer)
        wanted = [tensor.detach().requires_grad_() for tensor in given.wanted]
        self._step = StepData(0, 0, [unchanged(given.with_wanted(wanted))], autocast=self._caller.autocast)
        self.stage.begin(self._step)
        output: Payload = self.stage.forward(0, split=split)
        advance()
        return output

    def release(self) -> None:
        """Free the input and the input gradients that the step has stored."""
        self._step.inputs = [None]
        self._step.input_grads.clear()


def _kind(layer: nn.Module, given: Payload) -> Any:
    """Return a key that is the same for calls with the same costs.

    The key consists of types, shapes, settings, and the ``requires_grad`` of parameters and inputs. The key omits
    integer attributes, because blocks often store their own index.
    """
    modules = tuple((name, type(module), repr(module), _settings(module)) for name, module in layer.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in given.tensors)
    return modules, parameters, shapes, given.places, given.needs_grad


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, float | bool | str))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _training(layers: Any) -> Iterator[None]:
    modules = [module for layer in layers for module in layer.modules()]
    flags = [module.training for module in modules]
    for module in modules:
        module.training = module.training or not any(flags)  # a frozen BatchNorm stays frozen
    try:
        with attributes_kept(modules):
            yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
