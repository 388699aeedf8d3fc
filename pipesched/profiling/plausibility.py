"""Plausibility: whether what was measured of layers can be true of them. Three of PipeDream's own profiles have a layer
that cannot: a plan made by one is up to three times as slow as it need be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipesched.simulation.layer_costs import LayerCosts

__all__ = ["Measured", "doubt", "doubt_of_sum"]

_HEAVY = 0.05  # of what all layers take
_LEAST_S = 2e-4  # shorter ones are at the mercy of their machine
_BACKWARD = 1, 4  # times a forward
_BYTES_PER_S = 1e9  # at which a backward writes and adds up large gradients, at the least
_ALIKE = 2  # times as long as others of its kind
_SUM = 0.1  # of what the model takes


@dataclass(frozen=True)
class Measured:
    """A layer's costs, and those of its kind."""

    costs: LayerCosts
    #: What each layer of its kind takes that was measured.
    each_s: Sequence[float]
    #: Whether it has weights, and passes gradients on.
    trains: bool = True


def doubt(layer: Measured, all_s: float) -> str:
    """What cannot be true of a layer, in words; nothing where all can. all_s: what all layers take."""
    costs = layer.costs
    if costs.forward_s + costs.backward_s < max(_LEAST_S, _HEAVY * all_s):
        return ""
    least = _BACKWARD[0] * costs.forward_s * (1 - costs.spread)
    most = _BACKWARD[1] * costs.forward_s * (1 + costs.spread) + costs.memory.gradient_bytes / _BYTES_PER_S
    if costs.backward_s > most or (layer.trains and costs.backward_s < least):
        return (
            f"its backward takes {costs.backward_s * 1e3:.3g} ms, {costs.backward_s / costs.forward_s:.3g} times its "
            f"forward, where {_BACKWARD[0]} to {_BACKWARD[1]} times are usual"
        )
    if layer.each_s and max(layer.each_s) > _ALIKE * min(layer.each_s):
        return (
            f"it takes {median(layer.each_s) * 1e3:.3g} ms, and layers of its kind {min(layer.each_s) * 1e3:.3g} to "
            f"{max(layer.each_s) * 1e3:.3g} ms"
        )
    return ""


def doubt_of_sum(layers: Mapping[str, LayerCosts], whole: LayerCosts) -> str:
    """How far the layers are from what the model takes in one piece, in words; nothing where they are near."""
    for what, name in (("forward_s", "forward"), ("backward_s", "backward")):
        took = getattr(whole, what)
        together = sum(getattr(costs, what) for costs in layers.values())
        noise = whole.spread
        if together:
            noise = max(noise, sum(costs.spread * getattr(costs, what) for costs in layers.values()) / together)
        if abs(together - took) > max(_LEAST_S, (_SUM + noise) * took):
            return (
                f"the layers' {name}s take {together * 1e3:.3g} ms, one after the other, and the model's "
                f"{took * 1e3:.3g} ms, {together / took - 1:+.0%}"
                if took
                else ""
            )
    return ""
