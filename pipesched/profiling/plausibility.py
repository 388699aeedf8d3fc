"""Plausibility: checks whether the measured times of layers can be correct.

Three of the profiles that PipeDream published have a layer with an implausible time. A plan made from such a profile
can be up to three times slower than necessary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipesched.simulation.layer_costs import LayerCosts

__all__ = ["Measured", "doubt", "doubt_of_sum"]

_HEAVY = 0.05  # a layer is checked if it takes more than this fraction of all layers' time
_LEAST_S = 2e-4  # seconds; shorter layers are too noisy to check
_BACKWARD = 1, 4  # minimum and maximum time of a backward pass, as multiples of the forward's time
_BYTES_PER_S = 1e9  # lowest plausible rate at which a backward pass writes large gradients
_ALIKE = 2  # the largest ratio between the times of identical layers
_SUM = 0.1  # tolerated difference between the layers' total time and the model's time, as a fraction of the latter


@dataclass(frozen=True)
class Measured:
    """A layer's costs, with the times of all measured layers of the same kind."""

    costs: LayerCosts
    #: The time of each measured layer of the same kind, in seconds.
    each_s: Sequence[float]
    #: Whether the layer has trained weights and an input that needs gradients.
    trains: bool = True


def doubt(layer: Measured, all_s: float) -> str:
    """Return a description of a layer's implausible time; "" if the time is plausible.

    ``all_s`` is the sum of all layers' times.
    """
    costs = layer.costs
    if costs.forward_s + costs.backward_s < max(_LEAST_S, _HEAVY * all_s):
        return ""
    least = _BACKWARD[0] * costs.forward_s * (1 - costs.spread)
    most = _BACKWARD[1] * costs.forward_s * (1 + costs.spread) + costs.memory.gradient_bytes / _BYTES_PER_S
    if costs.backward_s > most or (layer.trains and costs.backward_s < least):
        return (
            f"the backward takes {costs.backward_s * 1e3:.3g} ms, {costs.backward_s / costs.forward_s:.3g} times the "
            f"forward (usual: {_BACKWARD[0]} to {_BACKWARD[1]} times)"
        )
    if layer.each_s and max(layer.each_s) > _ALIKE * min(layer.each_s):
        return (
            f"identical layers should take the same time, but they take from {min(layer.each_s) * 1e3:.3g} to "
            f"{max(layer.each_s) * 1e3:.3g} ms (median: {median(layer.each_s) * 1e3:.3g} ms)"
        )
    return ""


def doubt_of_sum(layers: Mapping[str, LayerCosts], whole: LayerCosts) -> str:
    """Describe the difference between the sum of the layers' times and the model's time; "" if it is small."""
    for column, name in (("forward_s", "forward"), ("backward_s", "backward")):
        took = getattr(whole, column)
        together = sum(getattr(costs, column) for costs in layers.values())
        noise_s = sum(costs.spread * getattr(costs, column) for costs in layers.values())
        noise_s = max(noise_s, whole.spread * took)
        if abs(together - took) > max(_LEAST_S, _SUM * took + noise_s):
            return (
                f"the {name}s of all layers add up to {together * 1e3:.3g} ms, but the model's {name} takes "
                f"{took * 1e3:.3g} ms ({together / took - 1:+.0%})"
                if took
                else ""
            )
    return ""
