"""Cost correction: updates layer costs from measured stage times, and detects slow devices.

The time of a stage does not show which layer or device is slow. All layers of a stage are therefore scaled by the same
ratio: measured time divided by known time. The known time is the sum of the layer times before the correction. If
another stage runs layers of the same kind faster, these layers get the smaller ratio of that stage. The rest of the
slow stage's extra time is assigned to the layers whose kind occurs only in this stage. If there are no such layers, and
other devices run layers of the same kinds faster, the device is regarded as slow. If a slow device then runs faster or
slower than before, the device has changed, not its layers.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import TIMES, LayerCosts

__all__ = ["Known", "MeasuredStage", "slowed"]


@dataclass(frozen=True)
class MeasuredStage:
    """The layers of a stage, and the times in seconds that were measured for one micro-batch on this stage."""

    layers: Sequence[str]
    device: Hashable
    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float

    @property
    def total_s(self) -> float:
        """The time of the forward plus the backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Known:
    """The current layer costs, and the slow devices."""

    #: Costs of each layer on a device that is not slow.
    layers: Mapping[str, LayerCosts]
    #: A key for the kind of each layer, such as the layer's first measured costs. Layers with equal keys should take
    #: the same time.
    kinds: Mapping[str, Hashable]
    #: The factor by which each slow device is slower than the fastest device, keyed by device.
    slow: Mapping[Hashable, float] = field(default_factory=dict)

    def slowness(self, device: Hashable) -> float:
        """Return the factor by which a device is slower than the fastest device; 1 if the device is not slow."""
        return self.slow.get(device, 1.0)

    def corrected(self, stages: Sequence[MeasuredStage], tolerance: float) -> "Known":
        """Correct the costs so that they reproduce measured stage times.

        Args:
            stages: the measured times of all stages; together they contain every layer.
            tolerance: the largest slowdown that noise can explain, relative to layers of the same kinds in other
                stages.

        """
        factors = self._least_ratios(stages)
        known = replace(self, slow=self._slow_devices(stages, factors, tolerance))
        places = self._by_kind(stages, lambda stage: tuple(stage.layers))
        found: dict[str, list[LayerCosts]] = {}
        for stage in stages:
            alone = {name for name in stage.layers if len(places[self.kinds[name]]) == 1}
            own = alone if known._ratio(stage, factors) > 1 + tolerance else set()
            for name, costs in known._scaled(stage, factors, own).items():
                found.setdefault(name, []).append(costs)
        return known._with({name: _mean(costs) for name, costs in found.items()}, {stage.device for stage in stages})

    def _least_ratios(self, stages: Sequence[MeasuredStage]) -> dict[str, float]:
        """Return, for each layer, the smallest ratio of measured to known time.

        The minimum is over all stages that contain a layer of the same kind, and that run on devices that are not known
        to be slow: if a slow device runs faster or slower than before, the device has changed, not its layers.
        """
        least: dict[Hashable, float] = {}
        for stage in stages:
            if stage.device in self.slow:
                continue
            ratio = self._ratio(stage)
            for kind in {self.kinds[name] for name in stage.layers}:
                least[kind] = min(ratio, least.get(kind, ratio))
        return {name: least[kind] for name, kind in self.kinds.items() if kind in least}

    def _slow_devices(
        self, stages: Sequence[MeasuredStage], factors: Mapping[str, float], tolerance: float
    ) -> dict[Hashable, float]:
        """Find the devices on which layers run slower than layers of the same kinds on other devices.

        On a device that is not known to be slow, a stage is ignored if it has a layer of a kind that runs on no other
        device. Returns the factor by which each slow device is slower than other devices, keyed by device.
        """
        devices = self._by_kind(stages, lambda stage: stage.device)
        slow = dict(self.slow)
        for device in dict.fromkeys(stage.device for stage in stages):
            beyond = [
                self._ratio(stage, factors)
                for stage in stages
                if stage.device == device
                and (device in self.slow or all(len(devices[self.kinds[name]]) > 1 for name in stage.layers))
            ]
            if beyond and (min(beyond) > 1 + tolerance or (device in self.slow and min(beyond) < 1 - tolerance)):
                factor = self.slowness(device) * min(beyond)
                slow[device] = factor if factor > 1 + tolerance else 1.0
        return slow

    def _by_kind(
        self, stages: Sequence[MeasuredStage], value: Callable[[MeasuredStage], Hashable]
    ) -> dict[Hashable, set[Hashable]]:
        """For each kind of layer, return the distinct results of ``value`` for the stages that contain this kind."""
        found: dict[Hashable, set[Hashable]] = {}
        for stage in stages:
            for name in stage.layers:
                found.setdefault(self.kinds[name], set()).add(value(stage))
        return found

    def _ratio(self, stage: MeasuredStage, factors: Mapping[str, float] | None = None) -> float:
        """Return a stage's measured time divided by its known time. ``factors`` scale the known times of layers."""
        known = sum(
            (self.layers[name].forward_s + self.layers[name].backward_s) * (factors or {}).get(name, 1.0)
            for name in stage.layers
        )
        return stage.total_s / (known * self.slowness(stage.device)) if known else 1.0

    def _scaled(self, stage: MeasuredStage, factors: Mapping[str, float], own: set[str]) -> dict[str, LayerCosts]:
        """Return the costs of the stage's layers, scaled so that the layer times add up to the stage's measured times.

        Args:
            stage: the stage and its measured times.
            factors: for each layer, the smallest ratio of measured to known time of any stage with this kind of layer.
            own: the layers that get the rest of the stage's time after all other layers are scaled by ``factors``. If
                empty, all layers are scaled by the same ratio.

        """
        scaled = {name: self.layers[name] for name in stage.layers}
        for time in TIMES:
            target = getattr(stage, time) / self.slowness(stage.device)
            parts = {name: getattr(self.layers[name], time) for name in stage.layers}
            others = {name: part * factors.get(name, 1.0) for name, part in parts.items() if name not in own}
            left = sum(part for name, part in parts.items() if name in own)
            if own and left and target > sum(others.values()):
                rest = (target - sum(others.values())) / left
                new = {name: others.get(name, part * rest) for name, part in parts.items()}
            else:
                whole = sum(parts.values())
                new = {name: part * target / whole if whole else part for name, part in parts.items()}
            scaled = {name: replace(costs, **{time: new[name]}) for name, costs in scaled.items()}
        return scaled

    def _with(self, layers: Mapping[str, LayerCosts], devices: set[Hashable]) -> "Known":
        """Return a copy with these layer costs, normalised so that the fastest device has slowness 1."""
        fastest = min((self.slowness(device) for device in devices), default=1.0)
        new = dict(self.layers)
        for name, costs in layers.items():
            times: dict[str, Any] = {time: getattr(costs, time) * fastest for time in TIMES}
            new[name] = replace(costs, **times, crowded_s=0.0)  # measured times already include crowding
        slow = {device: self.slowness(device) / fastest for device in {*self.slow, *devices}}
        return replace(self, layers=new, slow={device: own for device, own in slow.items() if own != 1})


def _mean(costs: Sequence[LayerCosts]) -> LayerCosts:
    times: dict[str, Any] = {time: sum(getattr(one, time) for one in costs) / len(costs) for time in TIMES}
    return replace(costs[0], **times)


def slowed(costs: Costs, slowness: Sequence[float]) -> Costs:
    """Return a copy of the costs in which each stage's times are multiplied by the stage's factor in ``slowness``."""
    times: dict[str, Any] = {
        time: tuple(own * slow for own, slow in zip(getattr(costs, time), slowness, strict=True))
        for time in (*TIMES, "recompute_s", "update_s", "waiting_s")
    }
    return replace(costs, **times)
