"""Pins: what a user fixes of the partition of a model: which layers begin stages, and which share a stage."""

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pipesched.checks import shown
from pipesched.errors import PartitionError
from pipesched.partitioning.result import StageLayers

__all__ = ["Boundaries", "Pins"]

#: Every later stage's first layer, by position or name; or of some layers the stage that each begins.
Boundaries = Sequence[int | str] | Mapping[int | str, int]


@dataclass(frozen=True)
class Pins:
    """What the user asked for. Raises PartitionError for layers that there are not, and for pins that cannot be kept.

    layers: in order. together: groups of layers that share a stage.
    """

    layers: Sequence[str]
    boundaries: Boundaries | None = None
    together: Sequence[Collection[str]] = ()

    def __post_init__(self) -> None:
        if self.complete:
            self.starts_of_all()
        else:
            self._check_ascending()
        if isinstance(self.together, str | Mapping) or not isinstance(self.together, Iterable):
            raise PartitionError(
                f"together is a list of groups of layers; got {shown(self.together)}; pass [(first, second)]"
            )
        for group in self.together:
            if isinstance(group, str) or not isinstance(group, Collection):
                raise PartitionError(f"together is a list of groups of layers; got {group!r}; pass [(first, second)]")
            for layer in group:
                _position(layer, self.layers, "together names layers")

    @property
    def complete(self) -> bool:
        """Whether nothing is left to choose."""
        return self.boundaries is not None and not isinstance(self.boundaries, Mapping)

    @cached_property
    def places(self) -> dict[str, int]:
        """Of each layer, its place in the row."""
        return {layer: place for place, layer in enumerate(self.layers)}

    @property
    def starts(self) -> dict[str, int]:
        """The layers that are to begin stages."""
        if not isinstance(self.boundaries, Mapping):
            return {}
        places = {_position(name, self.layers): (name, stage) for name, stage in self.boundaries.items()}
        for place, (name, _) in places.items():
            if not 0 <= place < len(self.layers):
                raise PartitionError(
                    f"boundaries says of layers which stages they begin; there are {len(self.layers)}; got {name!r}; "
                    f"pass a position from 0 on, or a name"
                )
        return {self.layers[place]: stage for place, (_, stage) in places.items()}

    def _check_ascending(self) -> None:
        starts = sorted(self.starts.items(), key=lambda pin: self.layers.index(pin[0]))
        for layer, stage in starts:
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise PartitionError(
                    f"boundaries says which stage a layer begins; {layer!r} is to begin stage {stage!r}; "
                    f"pass its number, such as {{{layer!r}: 1}}"
                )
        for (one, before), (other, behind) in pairwise(starts):
            if before >= behind:
                raise PartitionError(
                    f"later layers begin later stages; {one!r} is to begin stage {before} and {other!r}, which is "
                    f"behind it, stage {behind}; exchange them, or leave one out"
                )

    def starts_of_all(self) -> list[int]:
        """Where each stage begins. Raises PartitionError for unknown, misplaced or unordered boundaries."""
        starts = [0]
        if isinstance(self.boundaries, str) or not isinstance(self.boundaries, Sequence):
            raise PartitionError(
                f"boundaries is a list of layers, or says of some layers which stages they begin; got "
                f"{self.boundaries!r}; pass a list, such as [{self.boundaries!r}]"
            )
        for boundary in self.boundaries:
            start = _position(boundary, self.layers)
            if not 0 < start < len(self.layers):
                raise PartitionError(
                    f"a boundary is the first layer of a stage after stage 0, one of 1..{len(self.layers) - 1} of "
                    f"{len(self.layers)} layers; got {boundary!r}; leave it out or move it"
                )
            if start <= starts[-1]:
                raise PartitionError(
                    f"boundaries ascend; got {boundary!r} (layer {start}) after layer {starts[-1]}; sort them, each "
                    f"once"
                )
            starts.append(start)
        return starts

    def stages(self, starts: Sequence[int]) -> StageLayers:
        """The layers of the stages that begin at these places."""
        return tuple(tuple(self.layers[begin:end]) for begin, end in pairwise([*starts, len(self.layers)]))

    def allows(self, starts: Sequence[int]) -> bool:
        """Whether stages that begin at these places keep what was asked of a cut that is open."""
        return all(starts[stage] == place for place, stage in self._begins) and all(
            bisect(starts, first) == bisect(starts, last) for first, last in self._groups
        )

    @cached_property
    def _begins(self) -> list[tuple[int, int]]:
        return [(self.places[layer], stage) for layer, stage in self.starts.items()]

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """The first and the last place of each group."""
        places = [[self.places[layer] for layer in group] for group in self.together if group]
        return [(min(group), max(group)) for group in places]

    def check_together(self, starts: Sequence[int]) -> None:
        """Raise PartitionError where boundaries tear a group apart."""
        for group in self.together:
            stages = {layer: bisect(starts, self.places[layer]) - 1 for layer in group}
            if len({*stages.values()}) > 1:
                raise PartitionError(
                    f"layers kept together share a stage; the boundaries put {_listed(stages)}; move a boundary, or "
                    f"leave that group out"
                )


def _listed(stages: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} into stage {stage}" for name, stage in stages.items())


def _position(boundary: Any, names: Sequence[str], rule: str = "a boundary names a layer") -> int:
    if isinstance(boundary, str):
        if boundary not in names:
            raise PartitionError(
                f"{rule}; got {boundary!r}; the layers are {', '.join(names[:12])}"
                f"{', ...' if len(names) > 12 else ''}; use one of these names, or a position"
            )
        return names.index(boundary)
    if isinstance(boundary, bool) or not isinstance(boundary, int):
        raise PartitionError(f"a boundary is a layer's position or name; got {boundary!r}; pass an int or a str")
    return boundary
