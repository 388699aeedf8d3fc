"""Costs: the times and sizes of each stage, from which the simulation predicts a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipesched.checks import LARGEST, LARGEST_SIZE, as_list, check_number, check_size, check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import maybe
from pipesched.program.actions import Action, Holding, Kind
from pipesched.simulation.links import Links, plain
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.tensor_split import TensorTraffic

__all__ = ["BY_BUCKET", "Costs", "check_costs"]


@dataclass(frozen=True)
class Costs:
    """Times and sizes of one micro-batch on each stage, in seconds and bytes.

    ::

        pipesched.Costs(forward_s=(1, 1), input_grad_s=(1, 1), weight_grad_s=(1, 1), transfer_s=0.1)
        pipesched.Costs.uniform(4, forward_s=2)

    Fields of type tuple have one number per stage; any iterable of numbers is accepted. They default to 0 for each
    stage unless another default is given. A transient is the peak memory that an action needs in addition to the
    memory that is held when the action begins.

    Attributes:
        forward_s: time of a forward (F).
        input_grad_s: time to compute the input gradients (I).
        weight_grad_s: time to compute the weight gradients (W).
        backward_s: time of a full backward (B). Default: ``input_grad_s + weight_grad_s``.
        recompute_s: time of a recompute (R). Default: ``forward_s``.
        transfer_s: latency of a message between two ranks, a single number. The time from ``links`` is added to it.
        activation_bytes: memory held from F to the backward, excluding the model's inputs, which belong to the batch.
        input_bytes: size of the stage's input, which is all that a checkpointed F holds.
        weight_grad_bytes: memory held from I to W.
        update_s: time of the optimizer's step.
        weight_bytes: size of one version of the weights.
        output_bytes: size of the stage's output, and of its gradient.
        overlap: the ratio of the time of an overlapping forward and backward to the sum of their separate times; a
            single number. Default: 1, no gain.
        links: bandwidth, latency and contention between ranks. Default: None, messages take only ``transfer_s``.
        gradient_bytes: size of the gradients of the parameters.
        optimizer_bytes: size of the optimizer's state.
        buffer_bytes: size of the buffers.
        forward_transient_bytes: transient of F and R.
        backward_transient_bytes: transient of a B that adds to existing gradients.
        waiting_s: how long the processor is idle during a forward and a full backward, for example because it waits for
            a device.
        overheads: time that a rank spends outside its stages' work. Default: None, no overheads.
        first_backward_transient_bytes: transient of the first B, which allocates the gradients. Default:
            ``gradient_bytes + backward_transient_bytes``.
        input_grad_transient_bytes: transient of I. Default: ``weight_grad_bytes + backward_transient_bytes``.
        weight_grad_transient_bytes: transient of W. Default: ``backward_transient_bytes``.
        deferred_gradient_bytes: the part of ``gradient_bytes`` that W computes.
        update_transient_bytes: transient of the optimizer's step.
        offload_bytes: the part of ``activation_bytes`` that OFFLOAD copies to the host and FETCH copies back.
        offload_s: time of the copy to the host. The rank can compute during the copy.
        fetch_s: time of the copy back. The rank can compute during the copy.
        dropping_transient_bytes: transient of a checkpointed F, which keeps only its input. Default:
            ``activation_bytes + forward_transient_bytes``.
        kept_output_bytes: the part of ``activation_bytes`` that shares memory with the output.
        norm_s: time to compute the norms of the gradients (NORM).
        reduce_s: time to sum the gradients of each bucket over the replicas (REDUCE): for each stage a tuple with one
            number per bucket, or a number for a single bucket. Default: 0 for all buckets.
        reduce_bytes: size of the flat copy that each REDUCE makes, in the same form as ``reduce_s``. The stage holds
            the copy until its update.
        unshard_s: time to gather the full (unsharded) weights of a stage (UNSHARD).
        gathered_bytes: size of the other replicas' parts of the weights, held from UNSHARD to RESHARD in addition to
            ``weight_bytes``. ``weight_bytes`` is then the size of this replica's own part.
        gather_s: time to gather the updated weights from all replicas at the end of each UPDATE (``zero=1`` or 2).
        keep_s: time to set the weights and the optimizer's state aside in the host's memory (KEEP). The rank can
            compute meanwhile. Default: at the speed at which OFFLOADs copy; no time if this is unknown.
        replay_s: time of an update of the copy of a stage, on another rank (REPLAY). That rank can compute meanwhile.
            Default: ``update_s``.
        other_s: times of kinds of actions that have no field of their own, keyed by the kind's text: a tuple with one
            number per stage, such as ``{"FREE": (0.1, 0.2)}``. Default: {}, no time.
        tensor: the collectives of the tensor groups of each stage, whose times are part of the times of F, B, I and W.
            Default: (), layers are not split.

    Raises:
        ScheduleError: for tuples of different lengths, and for numbers that are negative, infinite, NaN or too large.

    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    backward_s: tuple[float, ...] = ()
    recompute_s: tuple[float, ...] = ()
    transfer_s: float = 0
    activation_bytes: tuple[int, ...] = ()
    input_bytes: tuple[int, ...] = ()
    weight_grad_bytes: tuple[int, ...] = ()
    update_s: tuple[float, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    overlap: float = 1
    links: Links | None = None
    gradient_bytes: tuple[int, ...] = ()
    optimizer_bytes: tuple[int, ...] = ()
    buffer_bytes: tuple[int, ...] = ()
    forward_transient_bytes: tuple[int, ...] = ()
    backward_transient_bytes: tuple[int, ...] = ()
    waiting_s: tuple[float, ...] = ()
    overheads: Overheads | None = None
    first_backward_transient_bytes: tuple[int, ...] = ()
    input_grad_transient_bytes: tuple[int, ...] = ()
    weight_grad_transient_bytes: tuple[int, ...] = ()
    deferred_gradient_bytes: tuple[int, ...] = ()
    update_transient_bytes: tuple[int, ...] = ()
    offload_bytes: tuple[int, ...] = ()
    offload_s: tuple[float, ...] = ()
    fetch_s: tuple[float, ...] = ()
    dropping_transient_bytes: tuple[int, ...] = ()
    kept_output_bytes: tuple[int, ...] = ()
    norm_s: tuple[float, ...] = ()
    reduce_s: tuple[tuple[float, ...], ...] = ()
    reduce_bytes: tuple[tuple[int, ...], ...] = ()
    unshard_s: tuple[float, ...] = ()
    gathered_bytes: tuple[int, ...] = ()
    gather_s: tuple[float, ...] = ()
    keep_s: tuple[float, ...] = ()
    replay_s: tuple[float, ...] = ()
    other_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    tensor: tuple[TensorTraffic, ...] = ()

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            values = getattr(self, name)
            if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
                raise ScheduleError(f"costs must have one number per stage; {name} is {shown(values)}; pass a list")
            object.__setattr__(self, name, _plain(values))
        for name in _SCALARS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        if not isinstance(self.links, Links | None):
            raise ScheduleError(f"links= must be a pipesched.Links; got {self.links!r}; pass Links(...) or None")
        if not isinstance(self.overheads, Overheads | None):
            raise ScheduleError(
                f"overheads= must be of type Overheads; got {self.overheads!r}; pass Overheads(...) or None"
            )
        for name in _ZERO:
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * self.num_stages)
        for name in _BY_BUCKET:
            values = getattr(self, name) or ((),) * self.num_stages
            object.__setattr__(self, name, tuple(map(_as_buckets, values)))
        self._check((*_GIVEN, *_ZERO, *_BY_BUCKET, *(name for name in _UNSET if getattr(self, name))))
        for name, parts in _SUMS.items():
            if not getattr(self, name):
                columns = zip(*(getattr(self, part) for part in parts), strict=True)
                object.__setattr__(self, name, tuple(map(sum, columns)))
        self._check(_SUMS)
        self._check_nested()
        for name in _SCALARS:
            check_number(getattr(self, name), name)

    def _check_nested(self) -> None:
        """Check the fields that are neither numbers nor tuples of numbers, and convert them to plain values."""
        if self.other_s != {}:
            object.__setattr__(self, "other_s", self._checked_others())
        if self.tensor != ():
            object.__setattr__(self, "tensor", self._checked_tensor())

    def _checked_others(self) -> dict[str, tuple[float, ...]]:
        """Return ``other_s`` with plain numbers. Raises ScheduleError for a wrong kind or wrong times."""
        rule = "other_s must map kinds of actions that have no field of their own to one time per stage"
        remedy = f"use only the kinds {', '.join(_OTHERS)}"
        if not isinstance(self.other_s, Mapping) or not set(_OTHERS).issuperset(self.other_s):
            raise ScheduleError(f"{rule}; got {shown(self.other_s)}; {remedy}")
        others = {}
        for name, values in self.other_s.items():
            others[name] = times = tuple(map(plain, as_list(values, rule, "pass a list of times")))
            if len(times) != self.num_stages:
                raise ScheduleError(
                    f"{rule}; forward_s has {self.num_stages}, {name} has {len(times)}; make the numbers agree"
                )
            for stage, time_s in enumerate(times):
                check_number(time_s, f"{name} of stage {stage}")
        return others

    def _checked_tensor(self) -> tuple[TensorTraffic, ...]:
        """Return ``tensor`` as a tuple. Raises ScheduleError unless each stage has collectives of a tensor group."""
        rule = "tensor= must have a TensorTraffic for each stage"
        own = tuple(as_list(self.tensor, rule, "leave it out"))
        if len(own) != self.num_stages or not all(isinstance(one, TensorTraffic) for one in own):
            raise ScheduleError(f"{rule}; got {shown(self.tensor)} for {self.num_stages} stages; leave it out")
        return own

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            values: tuple[Any, ...] = getattr(self, name)
            if len(values) != self.num_stages:
                raise ScheduleError(
                    f"costs must have one number per stage; forward_s has {self.num_stages}, {name} has "
                    f"{len(values)}; make the numbers agree"
                )
            sizes = name.endswith("_bytes")
            if name in _BY_BUCKET:
                _check_buckets(name, values, sizes=sizes)
                continue
            if _are_valid(values, sizes=sizes):
                continue
            for stage, value in enumerate(values):
                (check_size if sizes else check_number)(value, f"{name} of stage {stage}")

    @property
    def shares(self) -> tuple[float, ...]:
        """For each stage, the fraction of its time during which the processor computes instead of waiting."""
        times = zip(self.forward_s, self.backward_s, self.waiting_s, strict=True)
        return tuple(max(0.0, 1 - wait / (forward + backward)) if wait else 1 for forward, backward, wait in times)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward_s)

    @classmethod
    def uniform(cls, num_stages: int, **costs: Any) -> "Costs":
        """Create costs that are the same for all stages.

        Args:
            num_stages: the number of stages, at least 1.
            costs: fields by name, each a single number: ``Costs.uniform(4, forward_s=2, transfer_s=0.1)``. ``reduce_s``
                and ``reduce_bytes`` can be a tuple with one number per bucket. ``forward_s``, ``input_grad_s`` and
                ``weight_grad_s`` default to 1.

        """
        unknown = sorted(set(costs) - {field.name for field in fields(cls)})
        if unknown:
            raise ScheduleError(
                f"costs may only have the fields {', '.join(field.name for field in fields(cls))}; got {unknown[0]!r}; "
                f"leave it out"
            )
        if not is_count(num_stages):
            raise ScheduleError(
                f"num_stages must be a whole number, at least 1; got {shown(num_stages)}; pass 1 or more"
            )
        costs = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, **costs}
        if isinstance(others := costs.get("other_s"), Mapping):
            costs["other_s"] = {name: (value,) * num_stages for name, value in others.items()}
        spread: dict[str, Any] = {
            name: (value,) * num_stages if name in _COLUMNS else value for name, value in costs.items()
        }
        return cls(**spread)

    def times(self, kind: Kind) -> tuple[float, ...]:
        """Return the time in seconds of an action of this kind on each stage.

        Returns () for transfers, and for REDUCE, whose time depends on the bucket. An UPDATE includes ``gather_s``. For
        MIRROR, returns the times in ``other_s``; the simulation adds those of its message.
        """
        names = kind.row.costs
        if not names:
            return self.other_s.get(kind, ())
        if kind in BY_BUCKET:
            return ()
        first, *more = (getattr(self, name) or self._in_place_of(name) for name in names)
        used = [times for times in more if any(times)]
        return tuple(map(sum, zip(first, *used, strict=True))) if used else first

    def _in_place_of(self, name: str) -> tuple[float, ...]:
        """Return the times that a field of `_UNSET` stands for if it is not given."""
        if name == "replay_s":
            return self.update_s
        copied = sum(self.offload_bytes)
        byte_s = sum(self.offload_s) / copied if copied else 0
        return tuple(sum(sizes) * byte_s for sizes in zip(self.weight_bytes, self.optimizer_bytes, strict=True))

    def seconds(self, action: Action) -> float:
        """Return the time of an action in seconds; 0 for transfers between stages and, besides ``other_s``, MIRRORs."""
        stage, kind, number, _ = action
        if kind in BY_BUCKET:
            of_buckets: tuple[float, ...] = getattr(self, kind.row.costs[0])[stage]
            return of_buckets[number] if of_buckets else 0
        times = self.times(kind)
        return times[stage] if times else 0

    def sizes(self) -> dict[Holding, tuple[int, ...]]:
        """Return the bytes that each stage holds per micro-batch, or per version of the weights, keyed by purpose."""
        return {
            Holding.INPUT: self.input_bytes,
            Holding.ACTIVATIONS: self.activation_bytes,
            Holding.OFFLOADED: self.offload_bytes,
            Holding.WEIGHT_GRAD: self.weight_grad_bytes,
            Holding.WEIGHTS: self.weight_bytes,
            Holding.GATHERED: self.gathered_bytes,
        }

    def scaled(self, factor: float) -> "Costs":
        """Return a copy with all times multiplied by ``factor``, except those in ``links`` and ``overheads``.

        Raises ScheduleError for an invalid factor.
        """
        check_number(factor, "the factor")
        times: dict[str, Any] = {
            name: tuple(value * factor for value in getattr(self, name))
            for name in ("waiting_s", *(name for name in _TIMES if name not in _BY_BUCKET))
        }
        times["reduce_s"] = tuple(tuple(value * factor for value in own) for own in self.reduce_s)
        times["other_s"] = {name: tuple(value * factor for value in own) for name, own in self.other_s.items()}
        times["tensor"] = tuple(own.scaled(factor) for own in self.tensor)
        return replace(self, transfer_s=self.transfer_s * factor, **times)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists and numbers for JSON.

        Fields for reductions, gathers, redundancy, tensor groups and kinds without a field of their own are left out if
        unused.
        """
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _BY_BUCKET:
            own = values.pop(name)
            values |= {name: [*map(list, own)]} if any(own) else {}
        others = values.pop("other_s")
        values |= {"other_s": {name: list(own) for name, own in others.items()}} if others else {}
        traffic = values.pop("tensor")
        values |= {"tensor": [own.to_dict() for own in traffic]} if traffic else {}
        for name in [name for name in _LEFT_OUT_IF_UNUSED if not any(values[name])]:
            del values[name]
        for name in [name for name in _UNSET if not values[name]]:
            del values[name]
        parts = {name: values[name].to_dict() if values[name] else None for name in ("links", "overheads")}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()} | parts

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Costs":
        """Make costs from the dict that ``to_dict`` returned.

        Raises ScheduleError for wrong fields and invalid numbers.
        """
        check_type(values, Mapping, "costs must be a mapping from field names to values", "pass the result of to_dict")
        known = [field.name for field in fields(cls)]
        wrong = sorted(set(values) - set(known)) + sorted({"forward_s", "input_grad_s", "weight_grad_s"} - set(values))
        if wrong:
            raise ScheduleError(
                f"costs may only have the fields {', '.join(known)}, of which the first three are required; "
                f"{shown(wrong[0])} is {'missing; add it' if wrong[0] in known else 'unknown; leave it out'}"
            )
        parts = {"links": maybe(Links.from_dict), "overheads": maybe(Overheads.from_dict)}
        made: dict[str, Any] = {name: make(values.get(name)) for name, make in parts.items()}
        if "tensor" in values:
            rows = as_list(values["tensor"], "tensor of the costs must be a list", "save the file again")
            made["tensor"] = tuple(map(TensorTraffic.from_dict, rows))
        return cls(**{**values, **made})


def check_costs(costs: Any) -> None:
    """Raise ArgumentError unless ``costs`` is a Costs object."""
    check_type(costs, Costs, "costs must be a Costs", "for example, pass Costs.uniform(num_stages)")


def _as_buckets(value: Any) -> tuple[Any, ...]:
    """Return the values of a stage as a tuple with one number per bucket. A single number stands for one bucket."""
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return _plain(value) if several else (plain(value),)


def _plain(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values as a tuple, with numpy scalars as Python numbers."""
    return values if type(values) is tuple and {*map(type, values)} <= {int, float} else tuple(map(plain, values))


def _are_valid(values: tuple[Any, ...], *, sizes: bool) -> bool:
    """Return True if a quick check shows that all values are valid sizes or times; False if it does not."""
    kinds, most = ({int}, LARGEST_SIZE) if sizes else ({int, float}, LARGEST)
    return {*map(type, values)} <= kinds and min(values, default=0) >= 0 and sum(values) < most


def _check_buckets(name: str, values: tuple[tuple[Any, ...], ...], *, sizes: bool) -> None:
    check = check_size if sizes else check_number
    for stage, own in enumerate(values):
        if _are_valid(own, sizes=sizes):
            continue
        for bucket, value in enumerate(own):
            check(value, f"{name} of stage {stage}" + (f", bucket {bucket}," if len(own) > 1 else ""))


_GIVEN = ("forward_s", "input_grad_s", "weight_grad_s")
_SUMS = {  # fields whose default is the sum of other fields
    "backward_s": ("input_grad_s", "weight_grad_s"),
    "recompute_s": ("forward_s",),
    "dropping_transient_bytes": ("activation_bytes", "forward_transient_bytes"),
    "first_backward_transient_bytes": ("gradient_bytes", "backward_transient_bytes"),
    "input_grad_transient_bytes": ("weight_grad_bytes", "backward_transient_bytes"),
    "weight_grad_transient_bytes": ("backward_transient_bytes",),
}
_SCALARS = ("transfer_s", "overlap")
_NESTED = ("links", "overheads", "other_s", "tensor")
_BY_BUCKET = ("reduce_s", "reduce_bytes")
#: The kinds whose time depends on the bucket.
BY_BUCKET = tuple(kind for kind in Kind if not set(kind.row.costs).isdisjoint(_BY_BUCKET))
#: The kinds whose time is in `Costs.other_s`.
_OTHERS = [str(kind) for kind in Kind if not (kind.row.costs or kind.row.transfer)]
_TIMES = {name for kind in Kind for name in kind.row.costs}
_UNSET = ("keep_s", "replay_s")  # fields that stay () if they are not given
_LEFT_OUT_IF_UNUSED = ("unshard_s", "gathered_bytes", "gather_s")
_COLUMNS = [field.name for field in fields(Costs) if field.name not in (*_SCALARS, *_NESTED)]
_ZERO = [name for name in _COLUMNS if name not in (*_GIVEN, *_SUMS, *_UNSET, *_BY_BUCKET)]
