"""Replayed body: a stage body that runs the stage's part of a captured forward."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipesched.capture.capture import Value
from pipesched.capture.paths import MOST_PATHS
from pipesched.capture.rehearsal import rehearse
from pipesched.capture.replay import Look, Looks, Replay
from pipesched.capture.stage_body import CallLayer
from pipesched.errors import GraphError
from pipesched.model.containers import Twin
from pipesched.model.sharded_modules import ShardedModules
from pipesched.model.tied_weights import Ties
from pipesched.partitioning.result import StageLayers
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.payload import PerConsumer, pytree
from pipesched.tensors.tree_structure import named_leaves, positional

if TYPE_CHECKING:
    from pipesched.capture.captured_model import CapturedModel

__all__ = ["Loose", "ReplayedBody"]


_BETWEEN = "(between layers)"
_NEVER_USED = "(never used)"  # by the sample's forwards


class ReplayedBody:
    """Runs a stage's part of a captured forward."""

    def __init__(
        self,
        captured: "CapturedModel",
        cut: StageLayers,
        edges: Sequence[tuple[int, int]],
        stage: int,
        device: torch.device,
        ties: Ties,
    ) -> None:
        self._model = captured.model
        self._missing = captured.missing
        self._captured = captured
        self._cut = cut
        self._stage = stage
        self._device = device
        parts = captured.parts(cut)[captured.primary]
        own = parts[stage]
        last = stage == len(parts) - 1
        self._positional = positional(captured.model.forward)
        self._givers = [giver for giver, taker in edges if taker == stage]
        self._takers = [taker for giver, taker in edges if giver == stage]
        self.late_inputs = True
        self.sharded: ShardedModules | None = None
        self.random: Callable[[torch.device], KeyedRandom] = KeyedRandom
        self._next = stage + 1
        self._last = last
        calls = captured.primary_capture.calls
        away = [calls[index] for part in parts if part is not own for index in part.own]
        looked_into = {name for call in away if not call.layer for name in call.uses}  # for example self.embed.weight
        elsewhere = {call.layer for call in away}
        elsewhere |= {calls[index].layer for index in own.own if looked_into & {*calls[index].uses}}
        names = dict.fromkeys(calls[index].layer for index in sorted(own.own) if calls[index].layer)
        away_layers = {call.layer for call in away}
        elsewhere |= {name for name in names if not away_layers.isdisjoint(captured.sharing.get(name, ()))}
        self._twins = {name: Twin(captured.modules[name]) for name in names if name in elsewhere}
        self.layers: dict[str, nn.Module] = {
            name: self._twins[name].layer if name in elsewhere else captured.modules[name] for name in names
        }
        self._tied = {calls[index].place: ties.stand_ins(calls[index].place, device) for index in own.own}
        #: (mode, path) -> the replay of this path
        self._replays: dict[tuple[bool, int], Replay] = {}
        used, never = captured.loose(cut, stage)
        loose = {_BETWEEN: Loose(captured.model, used), _NEVER_USED: Loose(captured.model, never)}
        #: The weights and buffers that belong to no layer of this stage.
        self._loose = {key: tensors for key, one in loose.items() if (tensors := one())}
        self.layers |= {key: loose[key] for key in self._loose}

    def _replay_of(self, mode: bool, path: int) -> Replay:
        """Return the replay of a path, made when the path is first run."""
        replay = self._replays.get((mode, path))
        if replay is None:
            if len(self._replays) >= 2 * MOST_PATHS:
                del self._replays[next(key for key in self._replays if key[1])]
            captured = self._captured
            parts = captured.parts_on(self._cut, mode, path)
            capture = captured.capture_on(mode, path)
            of_stage = self._stage, self._device, self._tied, self.layers
            replay = Replay(captured.model, captured.modules, capture, parts, *of_stage)
            self._replays[mode, path] = replay
        return replay

    def over(self, layers: Mapping[str, nn.Module], device: torch.device) -> "ReplayedBody":
        """Return a body that runs these copies of the layers. The copies have their own weights and gradients."""
        other = copy.copy(self)
        other.layers = dict(layers)
        other._twins = {}
        other._device = device
        other._tied = {}
        other._replays = {}
        return other

    def rehearse(self) -> None:
        """Run the code between layers on the sample. Raises GraphError if the code cannot run in this stage."""
        rehearse(self._replay_of(self._model.training, 0), *self.inputs(self._captured.sample))

    def forget(self) -> None:
        """Forget the attributes that a rehearsal has set."""
        self._replay_of(self._model.training, 0).shells.reset()

    def begin(self) -> None:
        """Select the capture of the model's current mode. Raises GraphError if this mode was not captured."""
        mode = self._model.training
        if mode not in self._captured.captures:
            raise GraphError(
                f"a pipeline may run only in a mode (training or evaluation) in which its model was captured; with "
                f"training={mode}, the model calls different layers for the sample, or fails; call "
                f"model.{'train' if mode else 'eval'}() before you build the pipeline"
            ) from self._missing
        self._captured.set_up(mode)
        for (of_mode, _), replay in self._replays.items():
            if of_mode == mode:
                replay.refresh()
        for twin in self._twins.values():
            twin.refresh()

    def inputs(self, inputs: Any, path: int = 0) -> Any:
        """Return the model's inputs, with meta tensors in place of tensors that this stage does not need on a path.

        Inputs that the forward writes to are copied, because stages on other threads also read the batch.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        captured = self._captured
        mode = self._model.training if self._model.training in captured.captures else captured.primary
        replay = self._replay_of(mode, path)
        needed = replay.part.inputs
        written = replay.capture.written_inputs
        for place, (name, leaf) in enumerate(named_leaves(self._positional, *inputs)):
            if isinstance(leaf, Tensor) and name[:2] not in needed:
                leaves[place] = torch.empty_like(leaf, device="meta", requires_grad=False)
            elif name[:2] in written and not leaf.requires_grad:
                leaves[place] = leaf.clone()
        return pytree.tree_unflatten(leaves, spec)

    def run(self, inputs: Any, arrived: tuple[Any, ...], call: CallLayer, random: KeyedRandom, path: int = 0) -> Any:
        args, kwargs = inputs
        replay = self._replay_of(self._model.training, path)
        part = replay.part
        outside = replay.capture.outside
        received: dict[Value, Any] = {}
        looks: Mapping[Value, Look] = {}
        for giver, (values, seen) in zip(self._givers, arrived, strict=True):
            received.update(zip(part.receives.get(giver, ()), values, strict=True))
            looks = dict(seen.values) if seen is not None else looks

        def call_own(name: str, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name not in outside:
                return call(name, number, layer, args, kwargs)
            with random.outside(name, number):
                return call(name, number, layer, args, kwargs)

        present: dict[Tensor, Tensor] = {}
        for key, own in self._loose.items() if replay.uses_loose else ():
            now = call(key, 0, self.layers[key], (), {})
            present |= {one: tensor for one, tensor in zip(own, now, strict=True) if tensor is not one}
        made, looks, output = replay.run(args, kwargs, received, looks, present, call_own, random)
        for twin in self._twins.values():
            twin.hand_back()
        if self._last:
            return output
        seen = Looks.of(looks)
        return PerConsumer(
            (
                [made[value] for value in part.gives.get(taker, ())],
                seen if taker == self._next else None,
            )
            for taker in self._takers
        )


class Loose(nn.Module):
    """Holds the parameters and buffers that belong to no layer. Dots in their names are replaced by slashes.

    Calling this module returns the tensors to use in the current forward. These can be tensors of an older weight
    version, or copies for a recompute.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        for name in dict.fromkeys(names):
            if name in parameters:
                self.register_parameter(name.replace(".", "/"), parameters[name])
            else:
                self.register_buffer(name.replace(".", "/"), buffers[name])

    def forward(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers()]
