"""Stage module: a stage as one nn.Module, for wrappers that act on a whole module, such as ``fully_shard``.

The stage module holds the layers under their qualified names. Calling this module runs the layers as the
model's code does. The pipeline runs the stage by calling the module that ``wrap`` returned, so the hooks of that module
see the stage's tensors.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesched.capture.stage_body import Body, CallLayer
from pipesched.errors import ExecutionError, GraphError, ModelTypeError, ScheduleError
from pipesched.model.sharded_modules import ShardedModules
from pipesched.program.program import Program
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.meta_tensors import put_on
from pipesched.tensors.payload import PerConsumer, pytree
from pipesched.tensors.tree_structure import Pattern
from pipesched.units import and_more

__all__ = ["StageModule", "Wrap", "WrappedBody", "wrapped_bodies"]

#: (stage module, stage number) -> the module to run
Wrap = Callable[[nn.Module, int], nn.Module]


class StageModule(nn.Module):
    """A module with the layers of a stage under their qualified names. Only the pipeline can call this module."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._turn: Callable[..., Any] | None = None
        for name, layer in layers.items():
            *path, last = name.split(".")
            holder: nn.Module = self
            for part in path:
                if part not in dict(holder.named_children()):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.add_module(last, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage's layers on one micro-batch."""
        if self._turn is None:
            raise ExecutionError(
                "only the pipeline may call a stage module; this call came from other code; call pipe.step(), "
                "pipe.evaluate() or the model itself"
            )
        return self._turn(*args, **kwargs)

    def run(self, module: nn.Module, turn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``module``, which must call this stage module exactly once. The stage module then calls ``turn``."""
        turns = []

        def once(*args: Any, **kwargs: Any) -> Any:
            turns.append(turn)
            return turn(*args, **kwargs)

        self._turn = once
        try:
            output = module(*args, **kwargs)
        finally:
            self._turn = None
        if len(turns) != 1:
            raise ExecutionError(
                f"the module that wrap= returns must call its stage module exactly once; {type(module).__name__} "
                f"called the stage module {len(turns)} times; call it once in forward, or return it unchanged"
            )
        return output


class WrappedBody:
    """A stage body that calls the module returned by ``wrap``, which in turn runs the stage's layers."""

    def __init__(self, body: Body, inner: StageModule, module: nn.Module) -> None:
        self._body = body
        self._inner = inner
        #: The module that the stage calls.
        self.module = module
        self.late_inputs = body.late_inputs
        self.sharded: ShardedModules | None = None
        self.random: Callable[[torch.device], KeyedRandom] = KeyedRandom

    @property
    def layers(self) -> dict[str, nn.Module]:
        return self._body.layers

    def over(self, layers: Mapping[str, nn.Module], device: torch.device) -> Body:
        return self._body.over(layers, device)

    def begin(self) -> None:
        self._body.begin()

    def inputs(self, inputs: Any, path: int = 0) -> Any:
        return self._body.inputs(inputs, path)

    def run(self, inputs: Any, arrived: tuple[Any, ...], call: CallLayer, random: KeyedRandom, path: int = 0) -> Any:
        """Call the module, which runs the stage's layers.

        The module of a chain gets the first layer's arguments and returns the last layer's output. The module of a
        captured stage gets tensors as positional arguments and returns a tuple of tensors.
        """
        if not self._body.late_inputs:
            args, kwargs = (arrived, {}) if inputs is None else inputs
            return self._inner.run(
                self.module, lambda *args, **kwargs: self._body.run((args, kwargs), (), call, random), args, kwargs
            )
        leaves, spec = pytree.tree_flatten((inputs, arrived))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_meta]
        pattern = Pattern(None)
        apart = False

        def turn(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal pattern, apart
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            given, came = pytree.tree_unflatten(leaves, spec)
            output = self._body.run(given, came, call, random, path)
            apart = isinstance(output, PerConsumer)
            output = tuple(output) if apart else output
            made: list[Tensor] = []
            pattern = Pattern(output, tensors=made)
            return tuple(made)

        given = self._inner.run(self.module, turn, [leaves[place] for place in places], {})
        output = pattern.build(iter(given))
        return PerConsumer(output) if apart else output


def wrapped_bodies(
    wrap: Wrap | None,
    model: nn.Module,
    layers: dict[str, nn.Module],
    bodies: Sequence[Body],
    program: Program,
    devices: Sequence[torch.device],
    holds: Callable[[int], bool],
    tied: Collection[nn.Parameter],
) -> list[Body]:
    """Return the bodies of a program's stages. Stages of this process call the modules that ``wrap`` returns.

    Args:
        wrap: the user's function, or None to leave the bodies unchanged.
        model: the user's module.
        layers: layer name -> layer; a layer that ``wrap`` replaces is also replaced in this dict.
        bodies: the body of each stage.
        program: the program to run.
        devices: the device of each stage.
        holds: a function that returns whether a rank is in this process.
        tied: parameters that several layer calls share.

    Raises:
        ScheduleError: the program runs copies of stages.
        ModelTypeError: ``wrap`` returned something that is not a module.
        GraphError: ``wrap`` changed layers in a way that is not supported.

    """
    if wrap is None:
        return list(bodies)
    if program.num_weights < program.num_stages:
        raise ScheduleError(
            f"wrap= requires a schedule with one copy of each stage; {program.name} has several copies of each stage: "
            f"{program.num_stages} stages, of which only {program.num_weights} are different; choose a schedule with "
            f"one copy, such as 1f1b or zb-v"
        )
    made = list(bodies)
    for stage, body in enumerate(bodies):
        if holds(program.placement[stage]):
            for layer in body.layers.values():
                put_on(layer, devices[stage])
            made[stage] = _wrapped(wrap, model, layers, body, stage, tied)
    return made


def _wrapped(
    wrap: Wrap,
    model: nn.Module,
    layers: dict[str, nn.Module],
    body: Body,
    stage: int,
    tied: Collection[nn.Parameter],
) -> Body:
    inner = StageModule(body.layers)
    own = dict(model.named_modules())
    kept = {p for p in inner.parameters() if p in tied}
    copies = {name: _parts(layer) for name, layer in body.layers.items() if own.get(name) is not layer}
    module = wrap(inner, stage)
    if not isinstance(module, nn.Module):
        raise ModelTypeError(
            f"wrap(stage_module, stage) must return the module to run; for stage {stage} it returned "
            f"{type(module).__name__}; return the stage module itself, or a module that calls it"
        )
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise GraphError(
            f"wrap= must not return a DistributedDataParallel, because it reduces gradients at the end of each "
            f"backward through its module; stage {stage} runs one backward per micro-batch, in parts, so gradients "
            f"would be reduced too early and too often; use fully_shard, or reduce the gradients after pipe.step"
        )
    extra = {id(p) for p in module.parameters()} - {id(p) for p in inner.parameters()}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in extra]
    if names:
        raise GraphError(
            f"parameters that wrap= adds must belong to layers, so that they have names in the model; the module "
            f"returned for stage {stage} adds parameters outside the layers: {and_more(names)}; register these "
            f"parameters in the stage's layers"
        )
    for name, layer in list(body.layers.items()):
        now = dict(inner.named_modules()).get(name)
        if name in copies and (now is not layer or _parts(layer) != copies[name]):
            now = None
        if now is None or not kept <= set(inner.parameters()):
            raise GraphError(
                f"wrap= must leave a stage's layers in place, and must not change layers or weights that are used "
                f"several times; layer {name!r} of stage {stage} was {'removed or ' * (now is None)}changed; leave "
                f"this layer unchanged"
            )
        if now is not layer:
            body.layers[name] = now
            if name in layers:
                layers[name] = now
            holder, _, last = name.rpartition(".")
            model.get_submodule(holder).add_module(last, now)
    return WrappedBody(body, inner, module)


def _parts(layer: nn.Module) -> list[int]:
    return [id(part) for part in (*layer.modules(), *layer.parameters())]
