"""Tune profile: search for the plan with the shortest step from a profile, without torch and without the devices."""

from collections.abc import Collection, Sequence
from os import PathLike

from pipesched.checks import check_type
from pipesched.planning.adviser import advised
from pipesched.planning.axes_search import Axes, TensorLayouts, TensorSizes, Zero
from pipesched.planning.pins import Boundaries
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.profile_search import ProfileSearch
from pipesched.planning.progress_bar import progress_bar
from pipesched.planning.search_request import MemoryLimit, Offload
from pipesched.program.checkpoint_options import Checkpoint
from pipesched.program.order import Schedule
from pipesched.simulation.exact_solver import check_solver
from pipesched.simulation.links import Links
from pipesched.simulation.optimizer_state import OptimizerState
from pipesched.simulation.overheads import RanksAre
from pipesched.simulation.profile import Profile

__all__ = ["tune_profile"]


def tune_profile(
    profile: Profile | str | PathLike[str],
    *,
    num_ranks: int,
    batch_size: int,
    memory_limit_bytes: MemoryLimit | None = None,
    optimizer: OptimizerState | None = None,
    schedule: str | Schedule = "auto",
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    boundaries: Boundaries | None = None,
    together: Sequence[Collection[str]] = (),
    checkpoint: Checkpoint | None = None,
    links: Links | None = None,
    all_ranks: bool = False,
    ranks_are: RanksAre = "processes",
    offload: Offload = "auto",
    effort: int | None = None,
    axes: Axes | None = None,
    zero: Zero = "auto",
    tensor: TensorSizes = 1,
    sequence_parallel: bool = False,
    tensor_layouts: TensorLayouts = ("1d",),
    prove: bool = False,
    progress: bool = False,
) -> Plan:
    """Find the plan with the shortest simulated step for a profile. Needs neither torch nor the devices.

    ::

        profile = pipesched.Profile.from_table("layers.csv", rows=4)
        plan = pipesched.tune_profile(profile, num_ranks=16, batch_size=128, memory_limit_bytes="8GB")
        print(plan.explain())

    Identical profiles give identical plans. The search considers only schedules that leave the results of training
    unchanged. `pipesched.tune` also measures models and runs the best plans.

    Args:
        profile: a Profile, or the path of a saved Profile.
        num_ranks: the number of ranks to plan for.
        batch_size: the number of rows in a step.
        memory_limit_bytes: the memory of each rank, in bytes or as text such as "8GB" (10**9 bytes) or "8GiB" (2**30
            bytes): one limit for all ranks, or one per rank. Default: None (no limit).
        optimizer: the optimizer's state: "sgd", "momentum", "adam", "adamw", or the bytes of state for each parameter.
            Default: the state in the profile.
        schedule: the schedule to use. Default: "auto" (chosen by the search).
        num_stages: the number of stages. Default: chosen by the search.
        num_microbatches: the number of micro-batches. Default: chosen by the search, such that micro-batch sizes stay
            within the range of the profile's sizes.
        boundaries: fixed stage boundaries, as for Pipeline. Default: chosen by the search.
        together: groups of layers to keep in one stage. Default: none.
        checkpoint: the checkpoint setting, as for Pipeline. Default: chosen by the search.
        links: the speed of the connections between ranks. Default: None (transfers take no time).
        all_ranks: whether the plan must use every rank. Default: False (it may use fewer).
        ranks_are: whether ranks are "threads" of one process or "processes". Default: "processes".
        offload: whether activations may be moved to the host to stay within a memory limit: "auto", True or False.
            Default: "auto", which means True if the profile has a ``host_bytes_per_s`` and the devices are not CPUs.
        effort: the maximum number of actions that a search simulates. Default: 3,000,000.
        axes: how to divide num_ranks into pipelines and replicas: "auto", or a mapping such as
            ``{"pipeline": 8, "replicate": 4}``; batch_size counts the rows of all replicas, num_microbatches the
            micro-batches of one. A mapping can also have the number of ranks that split each layer, ``"tensor"``.
            Default: None (one pipeline).
        zero: with axes, the data that is split across replicas: 0, 1, 2 or 3. Default: "auto".
        tensor: with ``axes="auto"``, the numbers of ranks from which the search chooses the number that split each
            layer (tensor parallelism), such as ``(1, 2, 4, 8)``. The profile must say what can be split. Another number
            changes sums, so losses agree only within rounding. Default: 1 (layers are not split).
        sequence_parallel: whether the ranks that split a layer also divide the sequence in norms, dropouts, residual
            sums and messages between stages. Default: False.
        tensor_layouts: the layouts from which the search chooses how these ranks divide matrices: "1d" (Shoeybi et al.
            2019, arXiv:1909.08053), "2d" (Xu et al. 2021, arXiv:2104.05343), "2.5d" (Wang et al. 2021,
            arXiv:2105.14500) and "3d" (Bian et al. 2021, arXiv:2105.14450), or several of them, such as
            ``("1d", "3d")``. Default: ``("1d",)``.
        prove: let a solver prove a lower bound on the step time of the plan's stages; needs the extra ``solver``.
            Default: False.
        progress: show a progress bar, if tqdm is installed. Default: False.

    Returns:
        The plan.

    Raises:
        PartitionError: the layers cannot be cut as requested.
        MemoryLimitError: no plan stays within the memory limits; the message states a limit that suffices.
        ScheduleError: the profile cannot be read.
        InputError: the arguments contradict each other.

    """
    if prove:
        check_solver()
    rule, remedy = "profile must be a Profile or the path of a saved profile", "pass Profile.from_table(...), or a path"
    check_type(profile, (Profile, str, PathLike), rule, remedy)
    known = profile if isinstance(profile, Profile) else Profile.load(profile)
    search = ProfileSearch(
        profile=known if optimizer is None else known.with_optimizer(optimizer),
        num_ranks=num_ranks,
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
        offload=offload,
        effort=effort,
        axes=axes,
        zero=zero,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        tensor_layouts=tensor_layouts,
        updates=optimizer is not None,
    )
    with progress_bar(progress) as told:
        plan = advised(search, search.find(told))
    return search.finished(plan, prove=prove)
