"""Profile search: finds the best plan for a profile, on ranks that this machine need not have."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from pipesched.checks import is_count, shown
from pipesched.errors import InputError, PartitionError
from pipesched.planning.axes_search import Axes, AxesRequest, TensorLayouts, TensorSizes, Zero, check_tensor, find_axes
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.proof import proved
from pipesched.planning.search_request import EFFORT, MemoryLimit, Offload, SearchRequest, has_updates
from pipesched.planning.tuner import find_plan, too_small
from pipesched.program.completion import Completion
from pipesched.simulation.links import Links
from pipesched.simulation.overheads import RanksAre, check_ranks_are
from pipesched.simulation.profile import Profile
from pipesched.user_warning import warn

__all__ = ["ProfileSearch", "check_effort"]

_NO_STATE = (
    "assumed, because the profile has no optimizer: the optimizer keeps no state; pass optimizer= to count it towards "
    "the memory limit"
)


@dataclass(frozen=True, kw_only=True)
class ProfileSearch:
    """A search for the best plan for a profile: the measured layers, the ranks, and the choices of the user.

    The fields have the meaning of the arguments of `pipesched.tune_profile`.
    """

    profile: Profile
    num_ranks: int
    batch_size: int
    request: PlanRequest = field(default_factory=PlanRequest)
    memory_limit_bytes: MemoryLimit | None = None
    links: Links | None = None
    all_ranks: bool = False
    ranks_are: RanksAre = "processes"
    #: The number of CPU cores that all ranks share. None: every rank has a device of its own.
    num_cores: int | None = None
    offload: Offload = "auto"
    effort: int | None = None
    axes: Axes | None = None
    zero: Zero = "auto"
    tensor: TensorSizes = 1
    sequence_parallel: bool = False
    tensor_layouts: TensorLayouts = ("1d",)
    #: Whether a step updates the weights even if the optimizer keeps no state.
    updates: bool = False

    def __post_init__(self) -> None:
        check_ranks_are(self.ranks_are)
        if not is_count(self.num_ranks):
            raise PartitionError(
                f"num_ranks must be a whole number, at least 1; got {shown(self.num_ranks)}; pass 1 or more"
            )
        check_effort(self.effort, self.axes, self.zero)
        check_tensor(self.axes, self.tensor, self.sequence_parallel, self.tensor_layouts)

    @cached_property
    def search_request(self) -> SearchRequest:
        """The request for a plan of one pipeline."""
        updates: dict[str, Any] = {"completion": Completion(updates=True)} if self.updates else {}
        return SearchRequest.of(
            self.profile,
            self.num_ranks,
            self.batch_size,
            self.request,
            memory_limit_bytes=self.memory_limit_bytes,
            links=self.links,
            all_ranks=self.all_ranks,
            ranks_are=self.ranks_are,
            num_cores=self.num_cores,
            offload=self.offload,
            effort=self.effort or EFFORT,
            **updates,
        )

    @cached_property
    def axes_request(self) -> AxesRequest:
        """The request for a plan with replicas."""
        return AxesRequest(
            profile=self.profile,
            num_ranks=self.num_ranks,
            batch_size=self.batch_size,
            request=self.request,
            axes="auto" if self.axes is None else self.axes,
            zero=self.zero,
            memory_limit_bytes=self.memory_limit_bytes,
            links=self.links,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            tensor_layouts=self.tensor_layouts,
            options={"ranks_are": self.ranks_are, "offload": self.offload},
        )

    def find(self, progress: Callable[[float], None] = lambda _: None) -> Plan:
        """Find the best plan. Raises the errors of `pipesched.tune_profile`.

        Args:
            progress: called with the completed fraction of the search.

        """
        if self.axes is not None:
            return find_axes(self.axes_request, progress)
        return find_plan(self.search_request, progress)

    def finished(self, plan: Plan, *, prove: bool = False) -> Plan:
        """Return the plan that the search found, with a proof if ``prove``. Warns if only one device is useful."""
        if self.memory_limit_bytes is not None and not (self.updates or has_updates(self.profile)):
            plan = replace(plan, notes=(*plan.notes, _NO_STATE))
        if self.axes is not None:
            return plan
        if prove:
            plan = proved(plan, self.search_request.memory_limit_bytes)
        if why := too_small(plan, self.search_request):
            warn(f"{why}; keep one device, or pass all_ranks=True to use all")
        return plan

    def but(self, **changes: Any) -> "ProfileSearch":
        """Return a copy with other arguments of `pipesched.tune_profile`."""
        own = {item.name for item in fields(self)}
        of_request = {name: changes.pop(name) for name in tuple(changes) if name not in own}
        return replace(self, request=replace(self.request, **of_request), **changes)


def check_effort(effort: Any, axes: Any, zero: Any) -> None:
    """Raise InputError for an ``effort`` that is no count, and for ``effort`` or ``zero`` that contradict ``axes``."""
    if axes is None and zero != "auto":
        raise InputError(
            f"zero= splits optimizer states across replicas; got zero={zero!r} without axes=; pass axes='auto', or "
            f"leave zero= out"
        )
    if effort is not None and not is_count(effort):
        raise InputError(
            f"effort= must be the number of actions that a search may simulate, at least 1; got {shown(effort)}; pass "
            f"a whole number such as {EFFORT:_}"
        )
    if effort is not None and axes is not None:
        raise InputError(
            f"effort= limits a single search, but axes= starts a search for each division of the ranks; got "
            f"effort={effort!r} with axes={shown(axes)}; leave one of them out"
        )
