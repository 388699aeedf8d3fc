"""Pins: a user's constraints on which layers begin stages, and on which layers share a stage."""

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pipesched.checks import shown
from pipesched.errors import PartitionError
from pipesched.partitioning.result import StageLayers
from pipesched.units import counted

__all__ = ["Boundaries", "Pins"]

#: The first layer of every stage except stage 0, by position or name; or a mapping from layers to the stages that they
#: begin.
Boundaries = Sequence[int | str] | Mapping[int | str, int]


@dataclass(frozen=True)
class Pins:
    """Constraints on the partition. Raises PartitionError for unknown layers and impossible constraints."""

    #: All layers, in execution order.
    layers: Sequence[str]
    boundaries: Boundaries | None = None
    #: Groups of layers that must share a stage.
    together: Sequence[Collection[str]] = ()

    def __post_init__(self) -> None:
        if self.complete:
            self.starts_of_all()
        else:
            self._check_ascending()
        if isinstance(self.together, str | Mapping) or not isinstance(self.together, Iterable):
            raise PartitionError(
                f"together= must be a list of groups of layers; got {shown(self.together)}; pass [(first, second)]"
            )
        for group in self.together:
            if isinstance(group, str) or not isinstance(group, Collection):
                raise PartitionError(
                    f"together= must be a list of groups of layers; got {group!r}; pass [(first, second)]"
                )
            for layer in group:
                _position(layer, self.layers, "together= must name layers")

    @property
    def complete(self) -> bool:
        """Whether the boundaries determine all stages: True if ``boundaries`` is a list."""
        return self.boundaries is not None and not isinstance(self.boundaries, Mapping)

    @cached_property
    def places(self) -> dict[str, int]:
        """The position of each layer in execution order."""
        return {layer: place for place, layer in enumerate(self.layers)}

    @property
    def starts(self) -> dict[str, int]:
        """The stage that each pinned layer must begin, keyed by layer. Empty if ``boundaries`` is not a mapping."""
        if not isinstance(self.boundaries, Mapping):
            return {}
        places = {_position(name, self.layers): (name, stage) for name, stage in self.boundaries.items()}
        for place, (name, _) in places.items():
            if not 0 <= place < len(self.layers):
                raise PartitionError(
                    f"boundaries must map layers to the stages that they begin; there are "
                    f"{counted(len(self.layers), 'layer')}; got {name!r}; pass a layer's position, starting at 0, or "
                    f"its name"
                )
        return {self.layers[place]: stage for place, (_, stage) in places.items()}

    def _check_ascending(self) -> None:
        starts = sorted(self.starts.items(), key=lambda pin: self.layers.index(pin[0]))
        for layer, stage in starts:
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise PartitionError(
                    f"boundaries must map layers to the stages that they begin; got stage {stage!r} for layer "
                    f"{layer!r}; pass the number of the stage, such as {{{layer!r}: 1}}"
                )
        for (one, before), (other, behind) in pairwise(starts):
            if before >= behind:
                raise PartitionError(
                    f"later layers must begin later stages; {one!r} begins stage {before}, but {other!r}, a later "
                    f"layer, begins stage {behind}; swap the stages, or leave out a layer"
                )

    def starts_of_all(self) -> list[int]:
        """Return the position of each stage's first layer.

        Raises PartitionError if a boundary is unknown, out of range or out of order.
        """
        starts = [0]
        if isinstance(self.boundaries, str) or not isinstance(self.boundaries, Sequence):
            raise PartitionError(
                f"boundaries must be a list of layers, or map layers to the stages that they begin; got "
                f"{self.boundaries!r}; pass a list, such as [{self.boundaries!r}]"
            )
        for boundary in self.boundaries:
            start = _position(boundary, self.layers)
            if not 0 < start < len(self.layers):
                raise PartitionError(
                    f"a boundary must be the position at which a stage other than stage 0 begins, from 1 to "
                    f"{len(self.layers) - 1} for {counted(len(self.layers), 'layer')}; got {boundary!r}; remove or "
                    f"move this boundary"
                )
            if start <= starts[-1]:
                raise PartitionError(
                    f"boundaries must be in ascending order; got {boundary!r} (layer {start}) after layer "
                    f"{starts[-1]}; sort the boundaries and remove duplicates"
                )
            starts.append(start)
        return starts

    def stages(self, starts: Sequence[int]) -> StageLayers:
        """Return the layers of the stages that begin at these positions."""
        return tuple(tuple(self.layers[begin:end]) for begin, end in pairwise([*starts, len(self.layers)]))

    def allows(self, starts: Sequence[int]) -> bool:
        """Return whether stages that begin at these positions meet the constraints.

        Must not be called if the boundaries are `complete`.
        """
        return all(starts[stage] == place for place, stage in self._begins) and all(
            bisect(starts, first) == bisect(starts, last) for first, last in self._groups
        )

    @cached_property
    def _begins(self) -> list[tuple[int, int]]:
        return [(self.places[layer], stage) for layer, stage in self.starts.items()]

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """The positions of the first and the last layer of each group in ``together``."""
        places = [[self.places[layer] for layer in group] for group in self.together if group]
        return [(min(group), max(group)) for group in places]

    @property
    def most_stages(self) -> int:
        """The largest number of stages that meets the constraints."""
        if self.complete:
            return len(self.starts_of_all())
        starts = range(1, len(self.layers))
        return 1 + sum(not any(first < start <= last for first, last in self._groups) for start in starts)

    def check_together(self, starts: Sequence[int]) -> None:
        """Raise PartitionError if boundaries separate the layers of a group in ``together``."""
        for group in self.together:
            stages = {layer: bisect(starts, self.places[layer]) - 1 for layer in group}
            if len({*stages.values()}) > 1:
                raise PartitionError(
                    f"layers kept together must share a stage; the boundaries put {_listed(stages)}; move a boundary, "
                    f"or remove that group from together="
                )


def _listed(stages: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} into stage {stage}" for name, stage in stages.items())


def _position(boundary: Any, names: Sequence[str], rule: str = "a boundary must name a layer") -> int:
    if isinstance(boundary, str):
        if boundary not in names:
            raise PartitionError(
                f"{rule}; got {boundary!r}; the layers are {', '.join(names[:12])}"
                f"{', ...' if len(names) > 12 else ''}; use one of these names, or a position"
            )
        return names.index(boundary)
    if isinstance(boundary, bool) or not isinstance(boundary, int):
        raise PartitionError(f"a boundary must be a layer's position or name; got {boundary!r}; pass an int or a str")
    return boundary
