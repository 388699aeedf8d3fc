"""Profile model: a model and a sample -> a Profile: what its layers cost for micro-batches of several sizes."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from pipesched.errors import InputError
from pipesched.model.fingerprint import code_of, device_name, fingerprint, form_of
from pipesched.model.state_guard import set_aside, unchanged, untouched
from pipesched.profiling.layer_profiler import Between, Effort, measure_calls
from pipesched.profiling.layered_costs import measure
from pipesched.profiling.loss_costs import loss_costs, with_loss_bytes
from pipesched.profiling.optimizer_costs import Update, measure_updates
from pipesched.profiling.plausibility import doubt_of_sum
from pipesched.runtime.microbatches import Batch, SplitDims, Splitter
from pipesched.runtime.stage.offloading import host_bytes_per_s
from pipesched.simulation.layer_costs import TIMES, LayerCosts
from pipesched.simulation.overheads import Machine
from pipesched.simulation.profile import Profile
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.torch_checks import as_call, as_device, as_function, as_optimizer, as_threads
from pipesched.user_warning import warn

__all__ = ["as_loss", "profile", "put_updates"]

_FACTORS = (0.25, 0.5, 1, 2)  # of the sample's rows, that are measured unless sizes are given
_PASSES = 3  # over all sizes: a machine that others slow down does so for seconds, and then a pass lies between two
_EFFORT = Effort(rounds=5, enough_s=2.0)
_CROWDED = replace(_EFFORT, crowds=True)
_LARGEST_BYTES = 1 << 31  # of parameters, of a model that is also measured in one piece
_ROWS = "rows is a list of sizes of micro-batches"
_MEDIANS = (*TIMES, "waiting_s", "crowded_s")
_FEWEST = 2  # code may treat a single row apart: that is not what is measured


def profile(
    model: nn.Module,
    sample: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    optimizer: Callable[[list[Any]], Optimizer] | None = None,
    rows: Collection[int] | None = None,
    device: Any = "cpu",
    intra_op_threads: int = 1,
    split_dims: SplitDims = 0,
    whole_layers: Collection[str] = (),
    cache: str | PathLike[str] | None = None,
) -> Profile:
    """Measure what the layers of a model cost, for `pipesched.tune` and ``Search(profile=)``.

    sample: one micro-batch, as for ``Pipeline``. loss_fn: as there, with the sample's target; what it takes belongs to
    the last layer. optimizer: as there; layers then have ``update_s`` and ``optimizer_bytes``. rows: the sizes of
    micro-batches to measure, made from the sample's rows: a quarter, half and twice as many beside its own unless
    given; single rows are measured as two. split_dims, whole_layers: as for ``Pipeline``. Layers run several
    times on ``device`` with so many threads, forward and backward, one after the other as in a step. What cannot be
    true of a layer is measured again, and then named in a warning. cache: a folder of profiles: one of an equal model,
    sample, device and torch is read and not measured again; numbers in weights and inputs do not count. The model is
    left as it was. Raises InputError, GraphError, ModelTypeError; ScheduleError for a file there that is no profile.
    """
    chain = as_model(model)
    args, kwargs = as_call(sample)
    where = as_device(device)
    threads = as_threads(intra_op_threads)
    splitter = Splitter(1, fixed=False, split_dims=split_dims)
    optimizer = as_optimizer(optimizer)
    loss = as_loss(loss_fn, target)
    has = splitter.batch(args, kwargs, target).rows[0]
    sizes = _sizes(rows, has)
    own = fingerprint(form_of(chain))
    measured_on = device_name(where), torch.__version__, threads, Caller.here([where.type], grad=True)
    parts = (
        form_of(loss),
        form_of((args, kwargs, target)),
        sizes,
        split_dims,
        list(whole_layers),
        *measured_on,
        own,
        code_of(optimizer),
    )
    file = None if cache is None else as_path(cache) / f"{fingerprint(*parts)}.json"
    if file is not None and file.exists():
        return Profile.load(file)
    batches = {count: splitter.resized(args, kwargs, target, count) for count in sizes}
    known = {count: layered(chain, batch.inputs[0], whole_layers) for count, batch in batches.items()}
    passes: dict[int, list[dict[str, LayerCosts]]] = {count: [] for count in sizes}
    for number, (count, own_passes) in product(range(_PASSES), passes.items()):
        effort = replace(_CROWDED, checks=number == _PASSES - 1)
        with set_aside(chain, loss):
            own_passes.append(measure(known[count], where, threads, effort))
            if count == has and effort.checks:
                _check_sum(own_passes[-1], chain, batches[count], where, threads)
            if loss is not None:
                last, costs = own_passes[-1].popitem()
                own_passes[-1][last] = _with_loss(costs, chain, batches[count], loss, where, threads)
    graphs = {count: known[count].graph(_between(own)) for count, own in passes.items()}
    if optimizer is not None:
        put_updates(graphs.values(), measure_updates(optimizer, dict(chain.named_parameters()), where, threads))
    machine = Machine(device_name(where), host_bytes_per_s=host_bytes_per_s(where), on_host=where.type == "cpu")
    found = Profile(graphs, own, machine)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        found.save(file)
    return found


def as_loss(loss_fn: Any, target: Any) -> nn.Module | None:
    """A loss as a layer of two arguments. Raises InputError where one of both is missing."""
    if (loss_fn is None) != (target is None):
        raise InputError(
            f"a loss is measured with the sample's target; got {'a target' if loss_fn is None else 'a loss_fn'} alone; "
            f"pass loss_fn= and target=, or neither"
        )
    function = as_function(loss_fn, "loss_fn")
    return function if function is None or isinstance(function, nn.Module) else Between(function)


def _with_loss(
    costs: LayerCosts, model: nn.Module, batch: Batch, loss: nn.Module, device: torch.device, threads: int
) -> LayerCosts:
    """The last layer's costs with the loss's."""
    args, kwargs = batch.inputs[0]
    with untouched(model, model.training), torch.no_grad():
        output = model(*unchanged(args), **unchanged(kwargs))
    own = loss_costs(loss, output, batch.targets[0], device, threads, _EFFORT)
    times = {what: getattr(costs, what) + getattr(own, what) for what in TIMES}
    return with_loss_bytes(replace(costs, **times), own)


def _between(passes: Sequence[Mapping[str, LayerCosts]]) -> dict[str, LayerCosts]:
    """The medians of what was measured several times."""
    found = {}
    for name, first in passes[0].items():
        times = {what: median(getattr(costs[name], what) for costs in passes) for what in _MEDIANS}
        least, most = (pick(costs[name].forward_s + costs[name].backward_s for costs in passes) for pick in (min, max))
        took_s = times["forward_s"] + times["backward_s"]
        spread = max(median(costs[name].spread for costs in passes), (most - least) / took_s if took_s else 0.0)
        found[name] = replace(first, **times, spread=spread)
    return found


def _check_sum(
    costs: Mapping[str, LayerCosts], model: nn.Module, batch: Batch, device: torch.device, threads: int
) -> None:
    """Warn where the layers do not take what the model takes in one piece; not of a large one."""
    if lacks_contents(model) or sum(parameter.nbytes for parameter in model.parameters()) > _LARGEST_BYTES:
        return
    calls = {"model": (model, unchanged(batch.inputs[0]))}
    whole = measure_calls(calls, (), device, threads, _EFFORT)["model"]
    if why := doubt_of_sum(costs, whole):
        warn(
            f"layers and functions between them are all that a model takes; {why}; measure again on an idle machine; "
            f"where that is how it is, what the model's code does besides is not in the profile"
        )


def put_updates(graphs: Iterable["nx.DiGraph[str]"], updates: Mapping[str, Update]) -> None:
    """Each parameter's update belongs to the first layer that uses it."""
    for graph in graphs:
        left = dict(updates)
        for _, node in graph.nodes(data=True):
            own = [left.pop(name) for name in node["parameters"] if name in left]
            node["update_s"] = sum(update.update_s for update in own)
            node["optimizer_bytes"] = sum(update.optimizer_bytes for update in own)
            node["update_transient_bytes"] = sum(update.update_transient_bytes for update in own)


def _sizes(rows: Collection[int] | None, has: int) -> list[int]:
    given = [int(has * factor) for factor in _FACTORS] if rows is None else as_list(rows, _ROWS, "pass such as [4, 8]")
    for count in given:
        if rows is not None and not is_count(count):
            raise InputError(f"micro-batches have whole numbers of rows; got rows={shown(rows)}; pass such as [4, 8]")
    if not given:
        raise InputError("a profile has at least one size of micro-batches; got rows=[]; leave it out, or name some")
    return sorted({max(_FEWEST, count) for count in given})
