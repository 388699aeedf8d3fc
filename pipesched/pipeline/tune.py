"""Tune: a model, or what was measured of it, and the devices there are -> the plan to run."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from os import PathLike
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from pipesched.capture.layered_model import as_model, layered
from pipesched.checks import as_list, is_count, shown
from pipesched.errors import DeviceCountError, InputError, PartitionError
from pipesched.pipeline.auto_plan import as_profile, cores_of, on_devices
from pipesched.pipeline.plan_trials import Trial
from pipesched.planning.confirmation import Run, confirmed_plan
from pipesched.planning.pins import Boundaries
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.search_request import Offload, SearchRequest
from pipesched.planning.tuner import find_plan, too_small
from pipesched.profiling.profile_model import as_loss
from pipesched.profiling.profile_model import profile as measure
from pipesched.program.checkpoint_options import Checkpoint
from pipesched.program.order import Schedule
from pipesched.runtime.coordination.rendezvous import collective
from pipesched.runtime.microbatches import SplitDims
from pipesched.runtime.rank_host import MeshRanks, RankHost, host_for
from pipesched.simulation.links import Links
from pipesched.simulation.overheads import RanksAre
from pipesched.simulation.profile import Profile
from pipesched.simulation.trace import Trace
from pipesched.torch_checks import as_call
from pipesched.user_warning import warn

__all__ = ["tune"]

_DEVICES = "pass such as ['cpu', 'cpu']"
_CONFIRMED = 3  # plans run unless it is said how many
_PATIENCE_S = 1800.0  # in which rank 0 has measured, and has searched


@collective
def tune(
    model: Any,
    sample: Any = None,
    *,
    num_ranks: int | None = None,
    devices: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
    batch_size: int,
    memory_limit_bytes: int | Sequence[int] | None = None,
    schedule: str | Schedule = "auto",
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    boundaries: Boundaries | None = None,
    together: Sequence[Collection[str]] = (),
    checkpoint: Checkpoint | None = None,
    links: Links | None = None,
    all_ranks: bool = False,
    ranks_are: RanksAre = "threads",
    profile: Profile | str | PathLike[str] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    split_dims: SplitDims = 0,
    whole_layers: Collection[str] = (),
    offload: Offload = "auto",
    confirm: int | None = None,
    progress: bool = False,
) -> Plan:
    """The plan with the shortest step, predicted and run: for ``Pipeline(plan=)``, or to be saved, read and edited.

    model: a module, which is measured with ``sample``, one micro-batch, as by `pipesched.profile`; or a Profile, or the
    path of one. num_ranks, or devices: how many ranks there are; a plan may use fewer, unless all_ranks. Or mesh, as
    for ``Pipeline``: each process calls this with the same model and arguments, and gets the plan that rank 0 found.
    batch_size: rows of a step, which stay as they are. memory_limit_bytes: what a rank may hold, one number for all or
    one for each. What else is given is kept (see ``Pipeline``), and the rest chosen: the schedule, chunks a rank,
    num_microbatches (of sizes between those that were measured), boundaries, checkpoint. Only schedules that change
    nothing of what is learned are considered; into how many micro-batches a batch is cut matters to BatchNorm and to
    losses that look across rows: give num_microbatches then. links: between ranks. ranks_are: "threads" of one process
    or "processes". offload: whether what layers save may wait on the host where a limit asks for it; "auto": where the
    profile knows its machine's ``host_bytes_per_s``, and devices are not the host's own processors, to which copies
    give no memory back. profile: what the model's layers cost, in the place of measuring them. loss_fn, target: as for
    ``Pipeline``, with the sample's target, to be measured and run with; split_dims, whole_layers: likewise. progress:
    shows a bar (with tqdm). Equal profiles give equal plans, where none is confirmed.

    confirm: so many of the best plans, of different sorts, then run there: in turn, some steps of each, with
    the sample's rows over and over. What their stages took corrects what layers cost, the search goes over that, and
    if it finds a better plan that one runs too. The fastest is taken, or of those that are as fast within noise the one
    with the shortest predicted step; it has the corrected costs. Three unless given, where there are a model and
    devices or a mesh, and none otherwise; with num_ranks and a number here they run on so many GPUs, or else on the
    CPU. In each of ten rounds a plan runs three steps, of which the first one warms up; no round begins after five
    seconds. Nothing is learned: weights, buffers, gradients and random numbers are as they were; hooks on modules run,
    those on parameters do not.

    ``Plan.alternatives`` has what it was weighed against, with what was measured of those that ran. Raises
    PartitionError where nothing can be cut so, MemoryLimitError (with what would fit) where no plan keeps the limits,
    ScheduleError for a profile that cannot be, InputError where there is nothing to run, and what a step raises.
    """
    given = {"num_ranks": num_ranks, "devices": devices, "mesh": mesh}
    if sum(value is not None for value in given.values()) != 1:
        got = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InputError(f"a plan is for num_ranks, for devices, or for a mesh; got {got}; pass one")
    if num_ranks is not None and not is_count(num_ranks):
        raise PartitionError(
            f"a plan is for a whole number of ranks, at least 1; got {shown(num_ranks)}; pass 1 or more"
        )
    if devices is not None and not as_list(devices, "devices is a list with one device for each rank", _DEVICES):
        raise DeviceCountError(f"a plan is for at least one device; got none; {_DEVICES}")
    if isinstance(model, Profile | str | PathLike):
        model, profile = None, as_profile(model)
    if mesh is not None:
        ranks_are = "processes"
    count = _to_confirm(confirm, model, num_ranks is None, here=mesh is not None or ranks_are == "threads")
    if count and isinstance(num_ranks, int):
        devices = _there(num_ranks)
    host = _host_for(devices if count and devices else ["cpu"], mesh)
    places = list(devices or host.devices)
    if num_ranks is None:
        num_ranks = len(places)

    def decide(run: Run) -> Plan:
        known = _profile(model, sample, profile, places[0], loss_fn, target, split_dims, whole_layers)
        if (devices or mesh is not None) and memory_limit_bytes is not None:
            known = on_devices(known, list(map(torch.device, places)), offload)
        search = SearchRequest.of(
            known,
            num_ranks,
            batch_size,
            PlanRequest(
                schedule=schedule,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                boundaries=boundaries,
                checkpoint=checkpoint,
                together=together,
            ),
            memory_limit_bytes=memory_limit_bytes,
            links=links,
            all_ranks=all_ranks,
            ranks_are=ranks_are,
            num_cores=cores_of(list(map(torch.device, places))) if devices or mesh is not None else None,
            offload=offload,
        )
        with _bar(progress) as told:
            plan = confirmed_plan(search, run, count, told) if count else find_plan(search, told)
        if why := too_small(plan, num_ranks):
            warn(why)
        return plan

    where: dict[str, Any] = {"devices": devices} if mesh is None else {"mesh": mesh}
    where["whole_layers"] = whole_layers
    with closing(host):
        trial = Trial(model, sample, loss_fn, target, split_dims, where, host, batch_size)
        return _together(host, decide, trial.run) if isinstance(host, MeshRanks) else decide(trial.run)


def _host_for(devices: Sequence[Any], mesh: DeviceMesh | None) -> RankHost:
    return host_for(devices, None, 1, None, "all") if mesh is None else host_for(None, mesh, 1, _PATIENCE_S, "all")


def _together(host: MeshRanks, decide: Callable[[Run], Plan], run: Run) -> Plan:
    """What rank 0 decides, while all ranks run the plans that it asks for."""

    def ask(plans: Sequence[Plan], told: Callable[[float], None]) -> Sequence[Sequence[Trace]]:
        return run(host.agreed(lambda: list(plans)), told)

    while isinstance(asked := host.agreed(lambda: decide(ask)), list):
        run(asked, lambda _: None)
    return asked


def _to_confirm(confirm: Any, model: Any, known: bool, *, here: bool) -> int:
    """How many plans are to run. known: it is said where; here: they can. Raises InputError where none can."""
    if confirm is None:
        return _CONFIRMED if model is not None and known and here else 0
    if not is_count(confirm, 0):
        raise InputError(f"confirm is how many plans run, a whole number; got {shown(confirm)}; pass 0 for none")
    if confirm and model is None:
        raise InputError(
            f"plans are confirmed by steps of a model; a profile alone was given, with confirm={confirm}; pass the "
            f"model, and profile= beside it, or confirm=0"
        )
    if confirm and not here:
        raise InputError(
            f"plans are confirmed where their ranks run; ranks_are is 'processes', with confirm={confirm}; pass mesh= "
            f"in each of them, or confirm=0"
        )
    return int(confirm)


def _there(count: int) -> list[str]:
    """So many GPUs where there are, else the CPU so many times."""
    return [f"cuda:{at}" for at in range(count)] if torch.cuda.device_count() >= count else ["cpu"] * count


def _profile(
    model: Any,
    sample: Any,
    profile: Any,
    device: Any,
    loss_fn: Any,
    target: Any,
    split_dims: SplitDims,
    whole_layers: Collection[str],
) -> Profile:
    """What layers cost: as given, or measured."""
    as_loss(loss_fn, target)
    if profile is None:
        given: dict[str, Any] = {"split_dims": split_dims, "whole_layers": whole_layers}
        return measure(model, sample, loss_fn=loss_fn, target=target, device=device, **given)
    known = as_profile(profile)
    if model is not None:
        known.check_model(layered(as_model(model), as_call(sample), whole_layers).graph({}))
    return known


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[float], None]]:
    """A bar for the share of a search that is done, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda _: None
        return
    with tqdm(total=100, desc="searching for a plan", bar_format="{desc}: {percentage:3.0f}% {bar} {elapsed}") as bar:
        yield lambda share: bar.update(round(100 * share) - bar.n) and None
