"""Split layers: splits layers of the user's model over the ranks of a tensor group, and finds what each layer gets.

The layers are split in place before the model is captured. So the record of the model has the shapes of this rank's
blocks. While a pipeline is made, and while layers are measured, the collectives in split layers exchange nothing
(`RankHost.alone`), because each process runs the layers by itself.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipesched.capture.layer_calls import LayerCalls
from pipesched.capture.layered_model import LayeredModel
from pipesched.capture.stage_module import Wrap
from pipesched.errors import InputError, ScheduleError
from pipesched.model.state_guard import set_aside, untouched
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.block_check import BlockCheck
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.divided_outputs import DividedOutputs
from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.layout_trace import LayoutTrace
from pipesched.parallel.styles import divide_losses, split_model, styles_of
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.parallel.weight_split import SplitWeights
from pipesched.pipeline.options import Distributed, TensorParallel
from pipesched.runtime.rank_host import RankHost
from pipesched.simulation.tensor_layout import TensorLayout
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.meta_tensors import Beside, lacks_contents
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["probing", "random_numbers", "split_layers"]

T = TypeVar("T")

_META = torch.device("meta")


def split_layers(
    model: nn.Module,
    loss_fn: Any,
    sample: tuple[tuple[Any, ...], dict[str, Any]],
    host: RankHost,
    distributed: Distributed,
    *,
    wrap: Wrap | None,
    compiles: bool,
) -> SplitWeights | None:
    """Split layers of the model in place over the ranks of the tensor group. Return how, or None if no layer is split.

    Args:
        model: the user's module.
        loss_fn: the user's loss, which may take divided logits; None if the model computes its own loss.
        sample: the arguments of a micro-batch.
        host: the host of the ranks.
        distributed: the options, of which ``tensor_parallel`` names the layers.
        wrap: the user's ``wrap=``, which must be None if layers are split.
        compiles: whether the user passed ``compile=``, which must be False if layers are split.

    Raises:
        InputError: the layers cannot be split as ``tensor_parallel=`` asks, or get blocks that do not fit.

    """
    distributed.check_tensor_parallel(
        None if host.grid.in_one_process else host.grid, wraps=wrap is not None, compiles=compiles
    )
    if distributed.tensor_parallel is None or host.tensor is None:
        return None
    group = host.tensor
    wanted = distributed.tensor_parallel
    _set_grid(group, distributed)
    check = BlockCheck.of_whole(model, styles_of(model, wanted, group.size), sample)
    divide_losses(loss_fn, group)
    split = split_model(model, wanted, group)
    outputs = _trace_layouts(model, loss_fn, sample, group)
    if outputs is not None and outputs.blocks:
        split.whole_outputs = outputs.whole
    if check is not None:
        is_gathered = split.whole_outputs is not None
        check.compare(split, group, sample, takes_logits=is_gathered or _has_divided_losses(loss_fn))
    return split


def _trace_layouts(
    model: nn.Module, loss_fn: Any, sample: tuple[tuple[Any, ...], dict[str, Any]], group: TensorGroup
) -> DividedOutputs | None:
    """Run the model once, and return which of its outputs are divided; None if nothing shows this.

    Errors of the model itself are left to the runs that follow. Raises InputError if a layer or the loss gets blocks
    that do not fit.
    """
    in_model, in_loss = (_has_divided_losses(root) for root in (model, loss_fn))
    if group.grid is None and not in_model and not in_loss:
        return None

    def look(trace: LayoutTrace, output: Any) -> DividedOutputs:
        if in_loss:
            trace.expect_logits(output)
        elif group.grid is not None:
            trace.expect_whole([one for one in tensors_in(output) if loss_fn is not None or not one.dim()])
        return trace.divided(output)

    try:
        with group.alone(), set_aside(model):
            for run in (_run_on_meta, _run):
                trace = LayoutTrace(group)
                try:
                    return look(trace, run(model, *sample, trace))
                except InputError:
                    raise
                except Exception:  # any error of a model's code
                    if lacks_contents(model):
                        break
        return None
    finally:
        group.layout = ActivationLayout.WHOLE


def _has_divided_losses(root: Any) -> bool:
    return isinstance(root, nn.Module) and any(isinstance(part, VocabularyCrossEntropy) for part in root.modules())


def _set_grid(group: TensorGroup, distributed: Distributed) -> None:
    """Arrange the ranks of a tensor group in a grid if layers are split in more than one dimension.

    Collective over all processes. Raises InputError if the number of ranks does not fit the layout.
    """
    layout = distributed.tensor_layout
    if isinstance(layout, str):
        try:
            layout = TensorLayout.of(layout, group.size)
        except ScheduleError as error:
            raise InputError(f"the mesh dimension 'tp' must fit tensor_layout=; {error}") from None
    if layout.size != group.size:
        raise InputError(
            f"the mesh dimension 'tp' must have as many ranks as tensor_layout=; the layout {layout} has "
            f"{layout.size}, and the dimension {group.size}; change one of them"
        )
    if layout.kind == "1d":
        return
    if distributed.tensor_parallel == "auto":
        raise InputError(
            f"tensor_parallel='auto' splits layers in one dimension; this pipeline has tensor_layout={layout.kind!r}; "
            f"name the layers, such as {{'*.up': 'column', '*.down': 'row'}}, or leave tensor_layout= out"
        )
    AxisGroups(group, layout)


def probing(host: RankHost, tensor_parallel: TensorParallel | None) -> Callable[[Callable[[], T]], T]:
    """Return a function that calls a function which runs the whole model, and returns rank 0's result in all processes.

    If the user may have split layers, whose collectives wait for other ranks, all ranks call the function.
    ``tensor_parallel`` is the option that names the layers to split, if the user has not.
    """
    agreed = host.collectives.agreed
    if host.tensor is None or tensor_parallel is not None:
        return agreed

    def of_all(make: Callable[[], T]) -> T:
        own = make()
        return agreed(lambda: own)

    return of_all


def random_numbers(
    model: nn.Module, layered: LayeredModel, split: SplitWeights | None
) -> Callable[[torch.device], KeyedRandom]:
    """Return a function that makes the random numbers of a stage on a device.

    Args:
        model: the user's module.
        layered: its layers.
        split: the weights that the ranks of a tensor group divide; None if no layer is split.

    """
    if split is None:
        return KeyedRandom
    group: Any = split.group
    return partial(DividedRandom, group=group, layouts=_layouts(model, layered, group))


def _layouts(model: nn.Module, layered: LayeredModel, group: TensorGroup) -> dict[tuple[str, int], ActivationLayout]:
    """Return the layout of the activations that each call of a layer gets, if they are not whole.

    The model runs once on the meta device, so that nothing is computed. If its code needs values, it runs with them.
    """
    found: dict[tuple[str, int], ActivationLayout] = {}
    notes = _LayoutNotes(layered.modules, group, found)
    with group.alone(), set_aside(model):
        try:
            _run_on_meta(model, *layered.sample, notes)
        except Exception:  # any error of a model's code
            if lacks_contents(model):
                raise
            _run(model, *layered.sample, notes)
    group.layout = ActivationLayout.WHOLE
    return {call: layout for call, layout in found.items() if layout is not ActivationLayout.WHOLE}


class _LayoutNotes:
    """Notes the layout at each call of a layer in a ``with`` block, and copies the notes at its end.

    The notes are made beside ``found``, because the state that hooks reach is restored after a run of the model.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], group: TensorGroup, found: dict[tuple[str, int], ActivationLayout]
    ) -> None:
        self._layers = layers
        self._group = group
        self._found = found

    def __enter__(self) -> None:
        group = self._group
        group.layout = ActivationLayout.WHOLE
        notes: dict[tuple[str, int], ActivationLayout] = {}
        self._notes = notes
        calls = LayerCalls(self._layers)

        def note(layer: nn.Module, *_: Any) -> None:
            notes[calls.begin(layer)] = group.layout

        self._handles = [layer.register_forward_pre_hook(note) for layer in calls.layers]

    def __exit__(self, *_: object) -> None:
        self._found.clear()
        self._found.update(self._notes)
        for handle in self._handles:
            handle.remove()


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], notes: AbstractContextManager[Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
    with untouched(model, model.training), torch.no_grad(), notes:
        return model(*args, **kwargs)


def _run_on_meta(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], notes: AbstractContextManager[Any]
) -> Any:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    own = {name: torch.empty_like(tensor, device=_META) for name, tensor in tensors.items()}
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=_META), (args, kwargs))
    with untouched(model, model.training), torch.no_grad(), Beside(_META), notes:
        return torch.func.functional_call(model, own, args, kwargs)
