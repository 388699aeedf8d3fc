"""Profile model: measures the costs of a model's layers for micro-batches of several sizes, and returns a Profile."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from os import PathLike
from statistics import median
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.capture.layered_model import as_model, layered
from pipesched.checks import as_list, as_path, is_count, shown
from pipesched.devices.selection import as_device
from pipesched.errors import InputError
from pipesched.model.fingerprint import code_of, device_name, fingerprint, form_of
from pipesched.model.state_guard import set_aside, unchanged, untouched
from pipesched.profiling.layer_profiler import Between, MeasurementEffort, measure_calls
from pipesched.profiling.layered_costs import measure
from pipesched.profiling.loss_costs import loss_costs, with_loss_bytes
from pipesched.profiling.optimizer_costs import measure_updates, put_updates
from pipesched.profiling.plausibility import doubt_of_sum
from pipesched.profiling.recompute_refusals import put_refusals
from pipesched.profiling.tensor_shares import SplitCopy
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.microbatches import Batch, Microbatch, SplitDims, Splitter
from pipesched.runtime.stage.offloading import host_bytes_per_s
from pipesched.simulation.layer_costs import TIMES, LayerCosts
from pipesched.simulation.overheads import Machine, RanksAre, check_ranks_are
from pipesched.simulation.profile import Profile
from pipesched.simulation.size_fit import SizeFit
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.torch_checks import as_call, as_function, as_optimizer, as_threads
from pipesched.user_warning import warn

__all__ = ["as_loss", "profile"]

_FACTORS = (0.25, 0.5, 1, 2)  # default sizes, as multiples of the sample's rows
_PASSES = 3  # passes over all sizes, so that a disturbance of several seconds affects only one pass of a size
# A size needs no third pass if each time of a layer differs between the first two passes by at most the fraction _AGREE
# of this time, or by at most the fraction _TINY of the time of all layers.
_AGREE = 0.03
_TINY = 0.002
_EFFORT = MeasurementEffort(rounds=5, enough_s=2.0)
_QUICK_EFFORT = MeasurementEffort(rounds=3, enough_s=0.8)  # for a single pass
_LARGEST_BYTES = 1 << 31  # a model with at most this many bytes of parameters is also measured as a whole
_ROWS = "rows= must be a list of micro-batch sizes"
_MEDIANS = (*TIMES, "waiting_s", "crowded_s")
_FEWEST = 2  # the smallest measured size; code may treat a single row differently


def profile(
    model: nn.Module,
    sample: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    optimizer: Callable[[list[Any]], Optimizer] | None = None,
    rows: Collection[int] | None = None,
    microbatches: Sequence[Microbatch] = (),
    device: Any = "cpu",
    intra_op_threads: int = 1,
    split_dims: SplitDims = 0,
    whole_layers: Collection[str] = (),
    thorough: bool = True,
    ranks_are: RanksAre = "threads",
    cache: str | PathLike[str] | None = None,
    tensor_parallel: Any = None,
    tensor_size: int = 2,
) -> Profile:
    """Measure the time and memory of each layer of a model, for micro-batches of several sizes.

    ::

        profile = pipesched.profile(model, torch.randn(8, 64))
        plan = pipesched.tune(profile, num_ranks=4, batch_size=64)
        profile.save("profile.json")

    Each layer runs forward and backward several times, in the order of a step. Implausible times are measured again; a
    warning names layers whose times stay implausible. The model, its gradients and the random state are left unchanged.

    Args:
        model: an nn.Module, or a list of modules that form a chain. The model may be on the meta device.
        sample: one micro-batch: a tensor, a tuple of arguments, or a dict of keywords.
        loss_fn: ``loss_fn(output, target)`` -> scalar tensor. The costs of the loss are added to the last layer.
            Default: None (no loss).
        target: the sample's target, required with ``loss_fn``. Default: None.
        optimizer: ``optimizer(params)`` -> torch.optim.Optimizer. If it is given, layers also have ``update_s`` and
            ``optimizer_bytes``. Default: None.
        rows: the micro-batch sizes to measure, in rows. The micro-batches are made from the sample's rows. A size of 1
            is measured as 2. Default: the sample's number of rows multiplied by 1/4, 1/2, 1 and 2.
        microbatches: additional micro-batches to measure, with other shapes than the sample, such as the shortest and
            the longest sequences. The profile then contains costs as functions of the micro-batch size, which a search
            for an order of micro-batches of different sizes requires. Default: none.
        device: the torch device to measure on. Default: "cpu".
        intra_op_threads: the number of CPU threads per operation. Default: 1.
        split_dims: the dimension of the rows: an int for all arguments, a sequence with one entry for each positional
            argument, or a dict by position or keyword. An argument with the entry None is not split. Default: 0.
        whole_layers: names of modules that are kept as one layer. Default: none.
        thorough: whether to measure each size until two measurements agree, and to compare the sum of the layers' times
            with the time of the model. False: measure once, in less time. ``tune`` passes False if it runs plans,
            because the runs correct the costs. Default: True.
        ranks_are: whether the ranks of the plan will be "threads" of one process, or "processes". Threads need more
            time to allocate large CPU tensors. Default: "threads".
        cache: a folder of profiles. If it contains a profile of the same model, sample, device and torch version, this
            profile is returned and nothing is measured. The values of weights and inputs may differ. Default: None (no
            cache).
        tensor_parallel: which layers the ranks of a tensor group can split, as for ``Distributed(tensor_parallel=)``:
            a dict of names and styles, or "auto". The layers of a split copy of the model are measured too, so that
            ``tune(tensor=)`` can choose the size of the groups. Default: None (layers stay whole).
        tensor_size: the number of ranks among which the layers of this copy are split. Default: 2.

    Returns:
        The Profile, for `pipesched.tune` and ``Search(profile=...)``.

    Raises:
        InputError: the sample does not fit the forward's signature, only one of loss_fn and target is given, ranks_are
            is neither "threads" nor "processes", or the layers cannot be split among ``tensor_size`` ranks.
        ModelTypeError: the model is not an nn.Module, or is compiled or wrapped.
        GraphError: the model cannot be cut into stages.
        ScheduleError: a file in ``cache`` is not a profile.
        Exception: any error that the model's own code raises, with a note that names the layer.

    """
    check_ranks_are(ranks_are)
    chain = as_model(model)
    args, kwargs = as_call(sample)
    where = as_device(device)
    threads = as_threads(intra_op_threads)
    splitter = Splitter(1, fixed=False, split_dims=split_dims)
    optimizer = as_optimizer(optimizer)
    loss = as_loss(loss_fn, target)
    if not is_count(tensor_size, 2):
        raise InputError(
            f"tensor_size= must be the number of ranks that split each layer, at least 2; got {shown(tensor_size)}; "
            f"pass 2 or more, or leave tensor_parallel= out"
        )
    has = splitter.batch(args, kwargs, target).rows[0]
    sizes = _sizes(rows, has)
    others = splitter.as_given(microbatches) if microbatches else None
    own = fingerprint(form_of(chain))
    measured_on = device_name(where), torch.__version__, threads, Caller.here([where.type], grad=True)
    parts = (
        form_of(loss),
        form_of((args, kwargs, target)),
        sizes,
        split_dims,
        list(whole_layers),
        thorough,
        ranks_are,
        *measured_on,
        own,
        code_of(optimizer),
        *([form_of((others.inputs, others.targets))] if others else []),
        *([repr(tensor_parallel), tensor_size] if tensor_parallel is not None else []),
    )
    file = None if cache is None else as_path(cache) / f"{fingerprint(*parts)}.json"
    if file is not None and file.exists():
        return Profile.load(file)
    batches = [splitter.resized(args, kwargs, target, size) for size in sizes]
    batches += [others.of_replica(number, len(microbatches)) for number in range(len(microbatches))] if others else []
    effort = replace(_EFFORT if thorough else _QUICK_EFFORT, ranks_are=ranks_are)
    subjects = [_Subject(chain, loss, batches, whole_layers)]
    if tensor_parallel is not None:
        split = SplitCopy(chain, loss_fn, tensor_parallel, tensor_size)
        subjects.append(_Subject(split.model, as_loss(split.loss_fn, target), batches, whole_layers))
    count = _PASSES if thorough else 1
    for number, place in product(range(count), range(len(batches))):
        if number < 2 or not _agree(*subjects[0].passes[place]):
            own_effort = replace(effort, crowds=True, checks=number == min(1, count - 1))
            checks_sum = thorough and own_effort.checks and batches[place].rows[0] == has
            for subject in subjects:  # in turn, so that a busy machine hinders both
                subject.measure(place, where, threads, own_effort, checks_sum=checks_sum)
    known = subjects[0].known
    graphs = dict(zip(sizes, subjects[0].graphs(), strict=False))
    if tensor_parallel is not None:
        of_copy = zip(subjects[1].graphs(), subjects[1].known, batches, strict=True)
        for graph, (split_graph, split_known, batch) in zip(graphs.values(), of_copy, strict=False):
            split.put_shares(graph, split_graph, split_known, batch)
    with set_aside(chain):
        put_refusals(known[sizes.index(has) if has in sizes else 0], graphs.values())
    if optimizer is not None:
        put_updates(graphs.values(), measure_updates(optimizer, dict(chain.named_parameters()), where, threads))
    machine = Machine(device_name(where), host_bytes_per_s=host_bytes_per_s(where), on_host=where.type == "cpu")
    fit = SizeFit()
    if others:
        of_sizes = [batch.sizes(look)[0] for batch in batches]
        fit = SizeFit.of(list(zip(of_sizes, subjects[0].costs(), strict=True)))
    found = Profile(graphs, own, machine, fit)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        found.save(file)
    return found


class _Subject:
    """A model whose layers are measured on several micro-batches.

    Args:
        model: the model.
        loss: its loss; None if there is none.
        batches: the micro-batches.
        whole_layers: the names of modules that are kept as one layer.

    Attributes:
        known: the layers of the model, for each micro-batch.
        passes: the measured costs of the layers in each pass, for each micro-batch.

    """

    def __init__(
        self, model: nn.Module, loss: nn.Module | None, batches: Sequence[Batch], whole_layers: Collection[str]
    ) -> None:
        self._model = model
        self._loss = loss
        self._batches = batches
        self.known = [layered(model, batch.inputs[0], whole_layers) for batch in batches]
        self.passes: list[list[dict[str, LayerCosts]]] = [[] for _ in batches]

    def measure(
        self, place: int, device: torch.device, threads: int, effort: MeasurementEffort, *, checks_sum: bool
    ) -> None:
        """Measure the layers once on a micro-batch.

        ``checks_sum`` states whether to compare the sum of the layers' times with the time of the model.
        """
        batch = self._batches[place]
        plain = replace(effort, crowds=False, checks=False)
        with set_aside(self._model, self._loss):
            costs = measure(self.known[place], device, threads, effort)
            if checks_sum:
                _check_sum(costs, self._model, batch, device, threads, plain)
            if self._loss is not None:
                last, own = costs.popitem()
                costs[last] = _with_loss(own, self._model, batch, self._loss, device, threads, plain)
        self.passes[place].append(costs)

    def costs(self) -> list[dict[str, LayerCosts]]:
        """Return the medians of the layers' costs over all passes, for each micro-batch."""
        return [_between(each) for each in self.passes]

    def graphs(self) -> list["nx.DiGraph[str]"]:
        """Return the layers with their costs, for each micro-batch."""
        return [known.graph(costs) for known, costs in zip(self.known, self.costs(), strict=True)]


def as_loss(loss_fn: Any, target: Any) -> nn.Module | None:
    """Return the loss as a module, or None if both arguments are None. Raises InputError if only one is None."""
    if (loss_fn is None) != (target is None):
        raise InputError(
            f"loss_fn= and target= must be passed together; only {'target=' if loss_fn is None else 'loss_fn='} was "
            f"passed; pass both, or neither"
        )
    function = as_function(loss_fn, "loss_fn")
    return function if function is None or isinstance(function, nn.Module) else Between(function)


def _with_loss(
    costs: LayerCosts,
    model: nn.Module,
    batch: Batch,
    loss: nn.Module,
    device: torch.device,
    threads: int,
    effort: MeasurementEffort,
) -> LayerCosts:
    """Return the last layer's costs plus the costs of the loss."""
    args, kwargs = batch.inputs[0]
    with untouched(model, model.training), torch.no_grad():
        output = model(*unchanged(args), **unchanged(kwargs))
    own = loss_costs(loss, output, batch.targets[0], device, threads, effort)
    times = {column: getattr(costs, column) + getattr(own, column) for column in TIMES}
    return with_loss_bytes(replace(costs, **times), own)


def _agree(one: Mapping[str, LayerCosts], other: Mapping[str, LayerCosts]) -> bool:
    """Return whether two passes measured nearly equal times for every layer."""
    all_s = sum(costs.forward_s + costs.backward_s for costs in one.values())
    pairs = [
        (getattr(one[name], column), getattr(other[name], column))
        for name, column in product(one, (*TIMES, "crowded_s"))
    ]
    return all(abs(a - b) <= max(_AGREE * max(a, b), _TINY * all_s) for a, b in pairs)


def _between(passes: Sequence[Mapping[str, LayerCosts]]) -> dict[str, LayerCosts]:
    """Return the medians of the layers' costs over several passes, keyed by layer."""
    found = {}
    for name, first in passes[0].items():
        times = {column: median(getattr(costs[name], column) for costs in passes) for column in _MEDIANS}
        least, most = (pick(costs[name].forward_s + costs[name].backward_s for costs in passes) for pick in (min, max))
        took_s = times["forward_s"] + times["backward_s"]
        spread = max(median(costs[name].spread for costs in passes), (most - least) / took_s if took_s else 0.0)
        found[name] = replace(first, **times, spread=spread)
    return found


def _check_sum(
    costs: Mapping[str, LayerCosts],
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    threads: int,
    effort: MeasurementEffort,
) -> None:
    """Warn if the layers' times do not add up to the model's time.

    Models on the meta device or with more than 2 GiB of parameters are not checked.
    """
    if lacks_contents(model) or sum(parameter.nbytes for parameter in model.parameters()) > _LARGEST_BYTES:
        return
    calls = {"model": (model, unchanged(batch.inputs[0]))}
    whole = measure_calls(calls, (), device, threads, effort)["model"]
    if why := doubt_of_sum(costs, whole):
        warn(
            f"layer times should add up to the model's time; {why}; the machine may have been busy: measure again when "
            f"it is idle; if the difference persists, the model's own code takes time that is not in the profile"
        )


def _sizes(rows: Collection[int] | None, has: int) -> list[int]:
    given = (
        [int(has * factor) for factor in _FACTORS]
        if rows is None
        else as_list(rows, _ROWS, "pass a list such as [4, 8]")
    )
    for count in given:
        if rows is not None and not is_count(count):
            raise InputError(
                f"rows= must contain whole numbers of at least 1; got rows={shown(rows)}; pass a list such as [4, 8]"
            )
    if not given:
        raise InputError(
            "rows= must contain at least one micro-batch size; got rows=[]; leave rows= out, or pass a list such as "
            "[4, 8]"
        )
    return sorted({max(_FEWEST, count) for count in given})
