"""Tune: search for the plan with the shortest step, from a model or its profile."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipesched.capture.layered_model import as_model, layered
from pipesched.checks import as_list, is_count, shown
from pipesched.devices.selection import default_devices
from pipesched.errors import DeviceCountError, InputError, PartitionError
from pipesched.pipeline.auto_plan import as_profile, cores_of, on_devices
from pipesched.pipeline.options import Distributed, TensorParallel
from pipesched.pipeline.plan_trials import PlanTrial
from pipesched.pipeline.sent_values import learn_decided_types
from pipesched.planning.adviser import advised
from pipesched.planning.axes_search import Axes, TensorLayouts, TensorSizes, Zero, check_tensor, tensor_sizes
from pipesched.planning.confirmation import Run, confirmed_plan
from pipesched.planning.pins import Boundaries
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.profile_search import ProfileSearch, check_effort
from pipesched.planning.progress_bar import progress_bar
from pipesched.planning.search_request import EFFORT, MemoryLimit, Offload, SearchRequest
from pipesched.profiling.optimizer_costs import check_optimizer, with_updates
from pipesched.profiling.profile_model import as_loss
from pipesched.profiling.profile_model import profile as measure
from pipesched.profiling.tensor_shares import SplitCopy
from pipesched.program.checkpoint_options import Checkpoint
from pipesched.program.order import Schedule
from pipesched.runtime.collectives import RankCollectives
from pipesched.runtime.coordination.rendezvous import collective
from pipesched.runtime.microbatches import SplitDims
from pipesched.runtime.rank_host import host_for
from pipesched.simulation.exact_solver import check_solver
from pipesched.simulation.links import Links
from pipesched.simulation.optimizer_state import OptimizerState
from pipesched.simulation.overheads import RanksAre, check_ranks_are
from pipesched.simulation.profile import Profile
from pipesched.simulation.trace import Trace
from pipesched.torch_checks import as_call

__all__ = ["tune"]

_DEVICES = "pass a list such as ['cpu', 'cpu']"
_CONFIRMED = 3  # the default number of plans in trial runs
_EFFORT_WITH_TRIALS = EFFORT // 10  # per search; the loss is smaller than the noise of a measured step


@collective
def tune(
    model: Any,
    sample: Any = None,
    *,
    num_ranks: int | None = None,
    devices: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
    batch_size: int,
    memory_limit_bytes: MemoryLimit | None = None,
    optimizer: Callable[[list[Any]], Optimizer] | OptimizerState | None = None,
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
    effort: int | None = None,
    axes: Axes | None = None,
    zero: Zero = "auto",
    tensor: TensorSizes = 1,
    tensor_parallel: TensorParallel | None = None,
    sequence_parallel: bool = False,
    tensor_layouts: TensorLayouts = ("1d",),
    confirm: int | None = None,
    prove: bool = False,
    progress: bool = False,
    timeout: float | None = None,
) -> Plan:
    """Find the plan with the shortest step. Pass it to ``Pipeline(plan=...)``, or save, read and edit it.

    ::

        plan = pipesched.tune(model, sample, devices=["cuda:0", "cuda:1"], batch_size=64)
        print(plan.explain())
        pipe = pipesched.Pipeline(model, sample, loss_fn=loss_fn, devices=["cuda:0", "cuda:1"], plan=plan)

    tune measures the model's layers with the sample, or reads the layers' costs from a Profile, and searches for plans.
    If you pass a model and devices, the plans with the shortest predicted steps then run on these devices, in up to ten
    rounds. In each round, every plan runs three steps. No further round starts if it would probably end more than five
    seconds after the start of the first round. Unless you pass ``confirm``, plans that would end later than that are
    also left out of the first round, except the best plan. tune then corrects the layer costs with the measured times,
    searches once more with the corrected costs, and returns the plan with the shortest measured step. If several plans
    are equally fast within noise, tune returns the plan with the shortest expected step time, which is a mean of the
    predicted and the measured step time. ``Plan.alternatives`` lists the other plans with their predicted and measured
    times. Without trial runs, identical profiles give identical plans.

    Trial runs leave weights, buffers, gradients and random state unchanged. Trial runs call module hooks but not
    parameter hooks. The search considers only schedules that leave the results of training unchanged. The number of
    micro-batches changes the results of BatchNorm and of losses that compare rows: pass num_microbatches for such
    models.

    Args:
        model: a module (measured with the sample), a Profile, or the path of a saved Profile.
        sample: one micro-batch as an example, as for Pipeline. Default: None, which requires a Profile as the model.
        num_ranks: the number of ranks to plan for, if neither devices nor a mesh is given.
        devices: the device of each rank, as for Pipeline; used instead of num_ranks.
        mesh: a mesh, as for Pipeline; used instead of num_ranks. Every process calls tune with the same arguments and
            gets the plan that rank 0 found.
        batch_size: the number of rows in a step.
        memory_limit_bytes: the memory of each rank, in bytes or as text such as "16GB" (10**9 bytes) or "16GiB" (2**30
            bytes): one limit for all ranks, or one per rank. Default: None (no limit).
        optimizer: the optimizer of the training run, whose state and updates the plan then includes:
            ``optimizer(params)`` -> torch.optim.Optimizer, as for Pipeline; or "sgd", "momentum", "adam", "adamw", or
            the bytes of state for each parameter. Default: None (no optimizer, or the optimizer of the profile).
        schedule: the schedule to use. If you have set the schedule's number of chunks per rank with ``with_options``,
            the search keeps this number. The search also keeps the options ``max_in_flight`` and ``placement`` of
            `searched`. Default: "auto" (chosen by the search).
        num_stages: the number of stages. Default: chosen by the search.
        num_microbatches: the number of micro-batches. Default: chosen by the search, such that micro-batch sizes stay
            within the measured range.
        boundaries: fixed stage boundaries, as for Pipeline. Default: chosen by the search.
        together: groups of layers to keep in one stage, as for Pipeline. Default: none.
        checkpoint: the checkpoint setting, as for Pipeline. Default: chosen by the search.
        links: the speed of the connections between ranks, from `probe_links`. Default: None (transfers take no time).
        all_ranks: whether the plan must use every rank. Default: False (it may use fewer).
        ranks_are: whether ranks are "threads" of one process or "processes". Default: "processes" with a mesh, else
            "threads".
        profile: the layers' costs: a Profile, or the path of a saved Profile. Default: None (the layers are measured).
        loss_fn: the loss function, as for Pipeline. Measurements and trial runs call it with the target. Default: the
            model's own loss, or the sum of the model's outputs.
        target: the sample's target for loss_fn.
        split_dims: how arguments are split into micro-batches, as for Numerics. Default: 0.
        whole_layers: modules to treat as one layer each, as for Pipeline. Default: none.
        offload: whether activations may be moved to the host to stay within a memory limit: "auto", True or False.
            Default: "auto", which means True if the profile has a ``host_bytes_per_s`` and the devices are not CPUs.
        effort: the maximum number of actions that a search simulates. For the schedule ``searched``, the search for an
            order of actions may simulate three times as many. Default: 3,000,000, or 300,000 if plans also run.
        axes: how to divide num_ranks into pipelines and replicas: "auto", or a mapping such as
            ``{"pipeline": 8, "replicate": 4}``. The plan is then chosen by simulation, without trial runs;
            batch_size counts the rows of all replicas; num_microbatches counts the micro-batches of one replica.
            A mapping can also have the number of ranks that split each layer, ``"tensor"``. Default: None (one
            pipeline).
        zero: with axes, the data that is split across replicas, as for Distributed: 0, 1, 2 or 3. Default: "auto", the
            fastest of 0, 2 and 3 that stays within the memory limit; with 3, a step gathers weights before each use.
        tensor: with ``axes="auto"``, the numbers of ranks from which the search chooses the number that split each
            layer (tensor parallelism), such as ``(1, 2, 4, 8)``. Another number changes sums, so losses agree only
            within rounding. Default: 1 (layers are not split).
        tensor_parallel: which layers of the model these ranks can split, as for ``Distributed(tensor_parallel=)``: a
            dict of names and styles, or "auto". The layers are measured whole, and split among the largest number of
            ranks. Default: None (the profile says what can be split).
        sequence_parallel: whether the ranks that split a layer also divide the sequence in norms, dropouts, residual
            sums and messages between stages. Default: False.
        tensor_layouts: the layouts from which the search chooses how these ranks divide matrices: "1d" (Shoeybi et al.
            2019, arXiv:1909.08053), "2d" (Xu et al. 2021, arXiv:2104.05343), "2.5d" (Wang et al. 2021,
            arXiv:2105.14500) and "3d" (Bian et al. 2021, arXiv:2105.14450), or several of them, such as
            ``("1d", "3d")``. Default: ``("1d",)``.
        confirm: the number of plans in trial runs. tune runs the plans with the shortest predicted steps. Default: up
            to 3 for a model with devices or a mesh (fewer if steps take longer than about half a second), else 0. With
            num_ranks, the plans run on that many GPUs if the machine has them, else on the CPU.
        prove: let a solver prove a lower bound on the step time of the plan's stages, for all orders of actions that
            keep the results bit-identical. If the solver finds an order that is at least 0.5 % faster and fits in
            memory, the plan uses this order, although the order has not run in a trial. The proof takes up to about a
            minute, and needs the extra ``solver`` (``pip install 'pipesched[solver]'``). Default: False.
        progress: show a progress bar of the search, if tqdm is installed. Default: False.
        timeout: with a mesh, the number of seconds that a rank waits for another rank without a sign of progress: a
            finished layer call, a finished step of the search, or a message. Default: None (60 seconds).

    Returns:
        The plan, with the costs on which the choice was based. Trial runs, if any, have corrected these costs.

    Raises:
        PartitionError: the model cannot be cut as requested.
        MemoryLimitError: no plan stays within the memory limits; the message states a limit that suffices.
        ScheduleError: the profile cannot be read.
        InputError: the arguments contradict each other, plans cannot be run as requested, or ``prove`` is True but
            ortools is not installed.
        DeviceCountError: devices is an empty list.
        Exception: any exception that a layer raises in a trial run.

    """
    check_ranks_are(ranks_are)
    if prove:
        check_solver()
    given = {"num_ranks": num_ranks, "devices": devices, "mesh": mesh}
    if sum(value is not None for value in given.values()) != 1:
        got = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InputError(f"tune requires exactly one of num_ranks=, devices= and mesh=; got {got}; pass one of them")
    if num_ranks is not None and not is_count(num_ranks):
        raise PartitionError(f"num_ranks must be a whole number, at least 1; got {shown(num_ranks)}; pass 1 or more")
    if devices is not None and not as_list(devices, "devices must be a list with one device per rank", _DEVICES):
        raise DeviceCountError(f"a plan needs at least one device; devices is empty; {_DEVICES}")
    if isinstance(model, Profile | str | PathLike):
        model, profile = None, as_profile(model)
    if mesh is not None or axes is not None:
        ranks_are = "processes"
    _check_axes(axes, num_ranks, confirm)
    check_effort(effort, axes, zero)
    check_tensor(axes, tensor, sequence_parallel, tensor_layouts)
    splits = _splits(tensor_sizes(axes, tensor), tensor_parallel, model if profile is None else None, loss_fn)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    count = _to_confirm(confirm, model, num_ranks is None, here=mesh is not None or ranks_are == "threads")
    if count and isinstance(num_ranks, int):
        devices = default_devices(num_ranks)
    runs_here = None if mesh is not None else ["cpu"]
    host = host_for((count and devices) or runs_here, mesh, 1, timeout, "all")
    places = list(devices or host.grid.devices)
    search = partial(
        ProfileSearch,
        num_ranks=num_ranks or len(places),
        batch_size=batch_size,
        request=PlanRequest(
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
        effort=_EFFORT_WITH_TRIALS if count and effort is None else effort,
        axes=axes,
        zero=zero,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        tensor_layouts=tensor_layouts,
        updates=optimizer is not None,
    )

    def decide(run: Run) -> Plan:
        options: dict[str, Any] = {
            "split_dims": split_dims,
            "whole_layers": whole_layers,
            "device": places[0],
            "ranks_are": ranks_are,
            **splits,
        }
        if axes is None and isinstance(num_microbatches, int) and is_count(num_microbatches) and is_count(batch_size):
            options["rows"] = [-(-batch_size // num_microbatches)]  # the plan uses no other micro-batch size
        options["thorough"] = not count  # quick measurements suffice if trial runs correct the costs
        known = _profile(model, sample, profile, loss_fn, target, options)
        if optimizer is not None:
            known = with_updates(known, optimizer, model, options["device"])
        if devices or mesh is not None:
            known = on_devices(
                known, list(map(torch.device, places)), offload, is_limited=memory_limit_bytes is not None
            )
        own = search(profile=known)
        with progress_bar(progress) as told:
            if count:
                plan = confirmed_plan(own.search_request, run, count, told, partial(_advised, own))
            else:
                plan = advised(own, own.find(told))
        plan = own.finished(plan, prove=prove)
        return plan if host.grid.in_one_process else replace(plan, advice=plan.advice.in_words)

    ranks = {"devices": devices} if mesh is None else {"mesh": mesh, "distributed": Distributed(timeout=timeout)}
    where: dict[str, Any] = {**ranks, "whole_layers": whole_layers}
    with closing(host):
        trial = PlanTrial(
            model, sample, loss_fn, target, split_dims, where, host, batch_size, runs_all=confirm is not None
        )
        return decide(trial.run) if host.grid.in_one_process else _together(host.collectives, decide, trial.run)


def _advised(search: ProfileSearch, plan: Plan, corrected: SearchRequest) -> Plan:
    """Return a plan with advice from searches with the costs that measured steps have corrected."""
    return advised(replace(search, profile=corrected.profile), plan)


def _together(collectives: RankCollectives, decide: Callable[[Run], Plan], run: Run) -> Plan:
    """Search on rank 0, while all ranks run the trial plans that rank 0 chooses. Returns the plan on every rank."""

    def ask(plans: Sequence[Plan], told: Callable[[float], None]) -> Sequence[Sequence[Trace]]:
        return run(collectives.agreed(lambda: list(plans)), told)

    learn_decided_types(collectives)
    while isinstance(asked := collectives.agreed(lambda: decide(ask)), list):
        run(asked, lambda _: None)
    return asked


def _check_axes(axes: Any, num_ranks: int | None, confirm: int | None) -> None:
    """Raise InputError for ``axes`` with ``confirm`` or without ``num_ranks``."""
    if axes is not None and (num_ranks is None or confirm):
        got = "devices= or mesh=" if num_ranks is None else f"confirm={confirm}"
        raise InputError(
            f"with axes=, tune only simulates plans for num_ranks= ranks, and runs none; got {got}; pass num_ranks=, "
            f"and leave {got} out"
        )


def _splits(sizes: Sequence[int], tensor_parallel: Any, model: Any, loss_fn: Any) -> dict[str, Any]:
    """Return the options with which the layers of a split copy of the model are measured.

    Args:
        sizes: the numbers of ranks that may split each layer, in ascending order.
        tensor_parallel: the argument of tune.
        model: the model that tune measures; None if there is a profile.
        loss_fn: the loss function.

    Raises:
        InputError: the arguments contradict each other, or one of the sizes does not divide the layers.

    """
    most = sizes[-1]
    if tensor_parallel is None:
        if model is not None and most > 1:
            raise InputError(
                f"tensor= has the numbers of ranks that may split each layer; got up to {most} ranks, but no layers "
                f"that can be split; pass tensor_parallel='auto', or a dict of your layers' names and styles, such as "
                f"{{'*.up': 'column', '*.down': 'row'}}"
            )
        return {}
    if most == 1:
        raise InputError(
            "tensor_parallel= says which layers can be split; no layer is split, because all tensor groups have 1 "
            "rank; pass axes='auto' and tensor=(1, 2, 4), or leave tensor_parallel= out"
        )
    if model is None:
        raise InputError(
            "tensor_parallel= says which layers of a measured model can be split; got a profile, which says so itself; "
            "leave tensor_parallel= out, and measure the profile with pipesched.profile(tensor_parallel=...)"
        )
    for size in sizes[:-1]:
        if most % size:  # a size that divides the largest one divides the layers as well
            SplitCopy(as_model(model), loss_fn, tensor_parallel, size)
    return {"tensor_parallel": tensor_parallel, "tensor_size": most}


def _to_confirm(confirm: Any, model: Any, known: bool, *, here: bool) -> int:
    """Return the number of plans in trial runs. Raises InputError if the requested plans cannot run.

    Args:
        confirm: the argument ``confirm`` of tune; None for the default.
        model: the user's model; None if only a profile was given.
        known: whether the devices are known from devices= or mesh=.
        here: whether all ranks can run now, in this process or over a mesh.

    """
    if confirm is None:
        return _CONFIRMED if model is not None and known and here else 0
    if not is_count(confirm, 0):
        raise InputError(
            f"confirm= must be the number of plans to run, at least 0; got {shown(confirm)}; pass 0 to run none"
        )
    if confirm and model is None:
        raise InputError(
            f"confirming a plan requires a model to run; got confirm={confirm} with a profile, but without a model; "
            f"pass the model together with profile=, or pass confirm=0"
        )
    if confirm and not here:
        raise InputError(
            f"confirming a plan requires running it on all of its ranks; got confirm={confirm} with "
            f"ranks_are='processes', but without a mesh; call tune with mesh= in every process, or pass confirm=0"
        )
    return int(confirm)


def _profile(model: Any, sample: Any, profile: Any, loss_fn: Any, target: Any, options: Mapping[str, Any]) -> Profile:
    """Return the layers' costs: the given profile, or a profile measured with these options."""
    as_loss(loss_fn, target)
    if profile is None:
        return measure(model, sample, loss_fn=loss_fn, target=target, **options)
    known = as_profile(profile)
    if model is not None:
        known.check_model(layered(as_model(model), as_call(sample), options["whole_layers"]).graph({}))
    return known
